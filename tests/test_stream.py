"""The gradient in steps equals the one in one program, and goes on from any step."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import gradients, mesh, objectives, stream
from tests import engine

REPLAY = engine.REPLAY  # segments of 32


def problem(shape, lengths, data=1, seq=1, **changes):
  replay = dataclasses.replace(REPLAY, **changes)
  groups = [engine.make(shape, length, [7, 0, 3], seed=i, replay=replay) for i, length in enumerate(lengths)]
  groups = jax.tree.map(lambda *x: np.concatenate(x), *groups)
  objective = objectives.make_objective('grpo', engine.OBJECTIVE)
  mesh_ = mesh.make_mesh(data, seq)
  whole = gradients.gradient_function(mesh_, shape, replay, objective, groups)
  return replay, groups, whole, stream.make_steps(mesh_, shape, replay, objective, groups)


def close(got, want):
  assert engine.distance(got, want) < 1e-13
  for a, b in zip(jax.tree.leaves((got.loss, got.metrics, got.scores)), jax.tree.leaves((want.loss, want.metrics, want.scores))):
    np.testing.assert_allclose(a, b, rtol=1e-12)


def test_rows_of_the_data_axis_have_prefixes_of_their_own_lengths():
  shape = dataclasses.replace(engine.SMALL, lora_rank=2)
  replay, groups, whole, steps = problem(shape, [91, 20], data=2, seq=2, shard_params=True, keep='layers', offload=True)
  params = jax.tree.map(lambda x: x + 0.01, engine.parameters(shape))  # b is zero at first
  want = whole(params, groups)
  for at_once in (1, 2, 5):
    close(stream.gradient(steps, replay, params, groups, at_once), want)


def test_goes_on_from_any_step():
  replay, groups, whole, steps = problem(engine.SMALL, [91], mode='depth=2')
  params, held = engine.parameters(engine.SMALL), []
  number = {'capture': 0, 'replay': 1, 'pull': 2}
  def watch(phase, done, of, tree):
    held.append((number[phase], done if phase != 'replay' else 0, jax.tree.map(jnp.copy, tree)))  # the rest is donated
  want = stream.gradient(steps, replay, params, groups, 1, watch)
  assert [h[:2] for h in held] == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 1), (2, 2)]
  close(want, whole(params, groups))
  for phase, done, tree in held:
    assert engine.distance(stream.gradient(steps, replay, params, groups, 2, begin=(phase, done, tree)), want) == 0


@pytest.mark.slow
def test_bfloat16_sums_and_history_are_near_and_not_the_same():
  params, found = engine.parameters(engine.SMALL, 'float32'), []
  for dtype in ('float32', 'bfloat16'):
    replay, groups, _, steps = problem(engine.SMALL, [91], accumulate_dtype='float32', cotangent_dtype=dtype, history_dtype=dtype)
    assert jax.eval_shape(steps.open, params, groups).history.delta.dtype == dtype
    found.append(stream.gradient(steps, replay, params, groups, 1))
  assert 1e-5 < engine.distance(*found) < 2e-2
