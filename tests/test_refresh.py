"""Captures kept over several updates: when they are made anew, and how their drift is measured."""
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.refresh import Kept, drift, refresh

GROUPS = SimpleNamespace(mask=np.array([[[1.0, 1.0, 0.0]]]))


def test_drift_by_hand():
  stale, fresh = np.array([[[-1.0, -2.0, -9.0]]]), np.array([[[-1.5, -1.0, 0.0]]])
  found = drift(GROUPS, stale, fresh)
  assert found['logprob'] == pytest.approx(0.75)  # (0.5 + 1) / 2; the masked token does not count
  assert found['loss'] == pytest.approx(0.2)  # 1.5 against 1.25


def ages(every: int, bound: float, updates: int) -> list[int]:
  """How old the state is at each use, with log-probs that go off by 0.1 nats an update."""
  kept, out = Kept([]), []
  for now in range(updates):
    capture = lambda params, groups: params
    score = lambda params, groups, captured: SimpleNamespace(
        logprob=np.full((1, 1, 3), -1.0 - 0.1 * (params - (params if captured is None else captured))))
    kept = refresh(kept, now, [GROUPS], every, bound, capture, score)
    out.append(now - kept.captured[0])
  return out


@pytest.mark.parametrize('every, bound, want', [
    (1, 0, [0, 0, 0, 0, 0]), (2, 0, [0, 1, 0, 1, 0]), (4, 0, [0, 1, 2, 3, 0]), (9, 0.15, [0, 1, 0, 1, 0]),
    (9, 0.05, [0, 0, 0, 0, 0]), (9, 0, [0, 1, 2, 3, 4])])
def test_a_state_is_made_anew_by_age_and_by_drift(every, bound, want):
  assert ages(every, bound, 5) == want
