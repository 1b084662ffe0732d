"""Guards: a spike leaves everything as it was, epochs end where the policy has moved."""
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import guards, training


def test_a_spike_is_skipped_and_does_not_count():
  optimizer = guards.skip_spikes(optax.adam(0.1), factor=5.0, window=16)
  update = training.update_function(optimizer)
  params = {'w': jnp.ones(4)}
  state = optimizer.init(params)
  gradient = lambda scale: {'w': jnp.full(4, scale)}
  taken = []
  for scale in [1.0] * guards.LEAST + [100.0, 4.9, np.nan, 1.0, 5.1]:
    before = jax.tree.map(np.array, (params, state.inner, state.norms))
    params, state, _, ok = update(params, state, gradient(scale), jnp.float32(0))
    taken.append(bool(ok))
    same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((params, state.inner, state.norms)))]
    assert all(same) == (not ok)
  assert taken == [True] * guards.LEAST + [False, True, False, True, False]


def test_no_spike_before_enough_was_seen():
  optimizer = guards.skip_spikes(optax.sgd(0.1), factor=2.0)
  state, params = optimizer.init({'w': jnp.ones(1)}), {'w': jnp.ones(1)}
  for scale in (1.0, 50.0):
    _, state = optimizer.update({'w': jnp.full(1, scale)}, state, params)
    assert not guards.spiked(state)
  assert not guards.spiked(optax.sgd(0.1).init(params))


def test_how_far_the_policy_has_moved():
  group = SimpleNamespace(old_logprobs=np.array([[-1.0, -2.0, 0.0]]), mask=np.array([[1.0, 1.0, 0.0]]))
  result = SimpleNamespace(scores=SimpleNamespace(logprob=np.array([[-1.5, -2.1, -9.0]])))
  assert guards.moved([group], [result]) == pytest.approx(0.3)
  assert guards.moved([SimpleNamespace(old_logprobs=None)], [result]) == 0
