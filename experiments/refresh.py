"""Captures kept over several updates: how far the state drifts from the parameters, and when it is made anew.

A stale state saves a capture's forward; what it costs is measured by drift.py. The pull of a
stale state replays its segments under the new parameters on the old keys: an approximation.
"""
from typing import Any, NamedTuple

import numpy as np


class Kept(NamedTuple):
  """The captures of a step's batches."""
  captured: list  # of each batch; [] where there are none
  age: int = 0  # updates since they were made
  drift: float = 0.0  # nats, as measured before the last use; 0 when fresh


def drift(groups, stale, fresh) -> dict:
  """Differences between log-probs [N, G, R] on a stale state and on a fresh one, over the groups' tokens.

  logprob: mean absolute difference, nats. loss: relative difference of the mean
  negative log-likelihoods.
  """
  real = np.asarray(groups.mask) > 0
  stale, fresh = np.asarray(stale, np.float64)[real], np.asarray(fresh, np.float64)[real]
  return {'logprob': np.abs(stale - fresh).mean(), 'loss': abs(stale.mean() - fresh.mean()) / abs(fresh.mean())}


def refresh(kept: Kept, params, groups: list, every: int, bound: float, capture: Any, score: Any) -> Kept:
  """The captures to use now: those kept, or new ones after `every` updates or at a drift of more than `bound` nats.

  capture: (params, groups) -> captures; score: (params, groups, captures or None) -> Scores,
  which makes a capture for None. The drift is that of the first batch. bound 0: not measured.
  """
  new = not kept.captured or kept.age >= every
  seen = 0.0
  if not new and bound:
    seen = drift(groups[0], score(params, groups[0], kept.captured[0]).logprob,
                 score(params, groups[0], None).logprob)['logprob']
    new = seen > bound
  if new:
    return Kept([capture(params, g) for g in groups], 1, seen)
  return kept._replace(age=kept.age + 1, drift=seen)
