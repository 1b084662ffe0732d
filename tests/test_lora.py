"""LoRA: its gradient against the chain rule and full sequences, what is frozen, and that it folds back."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchreplay import gradients, lora, mesh, model, objectives
from branchreplay.checks import check_model
from branchreplay.config import ModelConfig, UserError
from experiments import training
from tests.engine import OBJECTIVE, REPLAY, SMALL, distance, function, make, parameters

SHAPE = dataclasses.replace(SMALL, lora_rank=3, lora_alpha=6.0, lora_targets=('q', 'v', 'qkv', 'out', 'down'))
BASE = dataclasses.replace(SHAPE, lora_rank=0)


def adapted(shape=SHAPE, dtype='float64'):
  """Parameters whose adapters do something: b is not zero."""
  params = model.init(shape, jax.random.key(0), jnp.dtype(dtype))
  def fill(path, x):
    return x if path[-1].name != 'b' else 0.3 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
  return jax.tree_util.tree_map_with_path(fill, params)


def gradient(shape, params, group, devices, full=False, **changes):
  f = function(shape, dataclasses.replace(REPLAY, **changes), devices, group.inputs.shape[1], full)
  return f(params, group)


def test_gradient_is_exact():
  """Against full sequences, and against the chain rule: da = scale dW b^T, db = scale a^T dW."""
  group, params = make(SHAPE, 61, [20, 0, 9]), adapted()
  got = gradient(SHAPE, params, group, 8, shard_params=True)
  assert distance(got, gradient(SHAPE, params, group, 1, full=True)) <= 1e-10
  dense = gradient(BASE, lora.folded(params), group, 1).grads
  def chain(dw, x):
    if not isinstance(x, lora.Adapted):
      return None
    return lora.Adapted(None, x.scale * dw @ x.b.swapaxes(1, 2), x.scale * x.a.swapaxes(1, 2) @ dw, x.scale)
  want = jax.tree.map(chain, dense, params)
  assert distance(got, dataclasses.replace(got, grads=want)) <= 1e-10


def test_frozen_leaves_have_no_gradient_and_no_moments():
  params = adapted()
  free = lora.trainable(SHAPE, params)
  names = {path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(free)}
  assert names == {'a', 'b'} and len(jax.tree.leaves(free)) == 2 * (3 + 4)  # qkv, out, down of deltanet; q, v, out, down of attention
  group = make(SHAPE, 20, [4, 0, 5])
  grads = gradient(SHAPE, params, group, 8, shard_params=True).grads
  assert jax.tree.structure(grads) == jax.tree.structure(free)
  with_critic = dataclasses.replace(SHAPE, critic=True)
  kept = lora.trainable(with_critic, model.shapes(with_critic))
  assert kept.value is not None and kept.norm is None and kept.embed is None


def test_new_adapters_change_nothing_and_fold_back():
  plain, fresh = parameters(BASE), model.init(SHAPE, jax.random.key(0), jnp.float64)
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(lora.folded(fresh))):
    np.testing.assert_array_equal(a, b)
  trained = adapted()
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(lora.folded(lora.off(trained)))):
    np.testing.assert_array_equal(a, b)
  group = make(SHAPE, 20, [4, 0, 5])
  scores = lambda shape, params: gradient(shape, params, group, 1, full=shape is SHAPE).scores.logprob[group.mask > 0]
  np.testing.assert_allclose(scores(SHAPE, trained), scores(BASE, lora.folded(trained)), atol=1e-12)
  assert np.abs(scores(SHAPE, trained) - scores(BASE, plain)).max() > 1e-3


def test_memory_of_gradients_is_that_of_the_adapters():
  shape = dataclasses.replace(BASE, width=256, mlp_width=512)
  tuned = dataclasses.replace(shape, lora_rank=2, lora_targets=('q',))
  def held(shape):
    group = make(shape, 20, [4, 5])
    replay = dataclasses.replace(REPLAY, mode='detached')  # compiles in half the time
    f = gradients.gradient_function(mesh.make_mesh(1, 1), shape, replay, objectives.make_objective('grpo', OBJECTIVE), group)
    report = f.lower(model.shapes(shape, 'float64'), group).compile().memory_analysis()
    return report.output_size_in_bytes, report.temp_size_in_bytes
  (full_out, full_temp), (out, temp) = held(shape), held(tuned)
  weights = sum(x.size for x in jax.tree.leaves(model.shapes(shape))) * 8
  assert full_out > weights and out < 0.1 * weights and temp < full_temp - 0.5 * weights


def test_updates_touch_adapters_only():
  @dataclasses.dataclass
  class Run:
    model: ModelConfig
    train: object
  run = Run(SHAPE, dataclasses.replace(training.TrainConfig(), lora_rank=3))
  optimizer, params = training.make_optimizer(run, 0.1, 0), adapted()
  state = optimizer.init(params)
  assert len(jax.tree.leaves(optax.tree.get(state, 'mu'))) == len(jax.tree.leaves(lora.trainable(SHAPE, params)))
  before = jax.tree.map(np.asarray, params)
  grads = jax.tree.map(jnp.ones_like, lora.trainable(SHAPE, params))
  after, _, _, taken = training.update_function(optimizer)(params, state, grads, jnp.float64(0))
  changed = {path[-1].name for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after))
             if not np.array_equal(x, y)}
  assert taken and changed == {'a', 'b'}


@pytest.mark.parametrize('changes, sentence', [
    ({'lora_rank': -1}, 'lora_rank=-1'), ({'lora_targets': ('x',)}, "unknown matrix 'x' in lora_targets"),
    ({'lora_targets': ()}, 'lora_targets is empty'), ({'lora_alpha': 0.0}, 'lora_alpha=0.0; it must be positive')])
def test_mistakes(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    check_model(dataclasses.replace(SHAPE, **changes))
