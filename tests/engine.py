"""What the engine's tests share: small groups, and gradients of them under given settings."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import batch, config, gradients, mesh, model, objectives
from branchreplay.config import ObjectiveConfig, ReplayConfig

DEEP = config.ModelConfig(  # a full pattern, twice, with heads that do not divide by devices
    width=24, mlp_width=32, vocab_size=40, pattern=('deltanet', 'window', 'full'), repeats=2, heads=6,
    kv_heads=3, head_dim=8, rotary_fraction=0.5, output_gate=True, window=23, delta_key_heads=3,
    delta_value_heads=6, delta_key_dim=8, delta_value_dim=4, chunk=8, norm_offset=1.0)
SMALL = config.ModelConfig(
    width=16, mlp_width=24, vocab_size=40, pattern=('deltanet', 'full'), repeats=1, heads=4, kv_heads=2, head_dim=8,
    delta_key_heads=2, delta_value_heads=4, delta_key_dim=8, delta_value_dim=8, chunk=8)
REPLAY = ReplayConfig(segment_len=32, branch_segment_len=8, prefix_capacity=96, branch_capacity=24, replay_batch=2,
                      key_block=16, row_block=16, vocab_rows=16, accumulate_dtype='float64')
OBJECTIVE = ObjectiveConfig(kl_coef=0.04)


def make(shape, prompt_len, sizes, seed=0, replay=REPLAY, **changes):
  """One stacked group with branches of the given sizes; `changes` replace its fields."""
  rng = np.random.default_rng(seed)
  rows = lambda draw: [draw(n) for n in sizes]
  tokens = lambda n: rng.integers(0, shape.vocab_size, n)
  near = lambda n: -np.log(shape.vocab_size) + 0.3 * rng.normal(size=n)
  group = batch.make_group(shape, replay, tokens(prompt_len), rows(tokens), advantages=rng.normal(size=len(sizes)),
                           old_logprobs=rows(near), ref_logprobs=rows(near), dtype=np.float64)
  return batch.stack([dataclasses.replace(group, **changes)])


@functools.lru_cache
def parameters(shape, dtype='float64'):
  return model.init(shape, jax.random.key(0), jnp.dtype(dtype))


@functools.lru_cache(maxsize=None)
def function(shape, replay, devices, branches, full_sequence=False, objective=OBJECTIVE, name='grpo'):
  """The jitted gradient function; one compilation for all groups of these sizes."""
  example = make(shape, 2, [1] * branches, replay=replay)
  return gradients.gradient_function(mesh.make_mesh(1, devices), shape, replay,
                                     objectives.make_objective(name, objective), example, full_sequence)


def gradient(shape, group, devices=1, full_sequence=False, dtype='float64', name='grpo', objective=OBJECTIVE,
             **settings):
  replay = dataclasses.replace(REPLAY, **settings)
  f = function(shape, replay, devices, group.inputs.shape[1], full_sequence, objective, name)
  return f(parameters(shape, dtype), group)


def flat(result):
  return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(result.grads)])


def distance(a, b) -> float:
  """Relative L2 of two Results' gradients."""
  a, b = flat(a), flat(b)
  return np.linalg.norm(a - b) / np.linalg.norm(b)
