"""Every objective through the engine: against full sequences, and against TRL from the case folders.

An engine is compiled once for many objectives: a group says which of them is meant.
"""
import dataclasses
import json
from pathlib import Path
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from branchreplay import batch, gradients, hf, mesh, model
from branchreplay.config import ObjectiveConfig, ReplayConfig
from branchreplay.objectives import Objective, make_objective
from tests.engine import REPLAY, SMALL, distance, flat, make
from tests.test_objectives import GOLDEN

CASES = Path(__file__).parent / 'cases'
CRITIC = dataclasses.replace(SMALL, critic=True)
PENALTIES = dict(kl_coef=0.04, entropy_coef=0.01)
SEPARABLE = [
    ('reinforce', ObjectiveConfig(normalize='fixed', fixed_length=1)), ('rloo', ObjectiveConfig()),
    ('grpo', ObjectiveConfig(kl_coef=0.04)), ('grpo', ObjectiveConfig(normalize='sequence', kl_kind='k1', **PENALTIES)),
    ('grpo', ObjectiveConfig(kl_kind='k2', kl_weighted=True, **PENALTIES)), ('dapo', ObjectiveConfig(clip_high=0.28)),
    ('dr_grpo', ObjectiveConfig(**PENALTIES)), ('cispo', ObjectiveConfig(**PENALTIES)), ('ppo', ObjectiveConfig()),
    ('nll', ObjectiveConfig())]
COUPLED = [
    ('gspo', ObjectiveConfig(clip_low=0.05, clip_high=0.05, **PENALTIES)), ('dpo', ObjectiveConfig(label_smoothing=0.1)),
    ('dpo_norm', ObjectiveConfig(preference_beta=5.0)), ('ipo', ObjectiveConfig()),
    ('simpo', ObjectiveConfig(preference_beta=2.0, target_margin=1.0))]
ALL = SEPARABLE + COUPLED


@struct.dataclass
class Chosen(batch.Group):
  which: Any = None  # i32 [], index of the objective


def choose(group: batch.Group, which: int) -> Chosen:
  return Chosen(**vars(group), which=np.full(group.prefix_length.shape, which, np.int32))


def one_of(named, separable: bool) -> Objective:
  """An objective that is the one of `named` that the group chooses."""
  losses = [make_objective(name, config).loss for name, config in named]
  branches = [lambda scores, group, loss=loss: loss(scores, group)[0] for loss in losses]
  return Objective(lambda scores, group: (lax.switch(group.which, branches, scores, group), {}), separable)


def full_group():
  """Ragged branches with all that any objective reads, token by token."""
  group = make(CRITIC, 45, [20, 0, 1, 9])
  rng = np.random.default_rng(1)
  draw = lambda: np.where(group.mask > 0, rng.normal(size=group.mask.shape), 0)
  near = lambda: np.where(group.mask > 0, group.old_logprobs + 0.1 * draw(), 0)
  return group.replace(advantages=draw(), sampler_logprobs=near(), returns=draw(), old_values=0.1 * draw())


@pytest.fixture(scope='module')
def params():
  made = model.init(CRITIC, jax.random.key(0), jnp.float64)
  return made.replace(value=jnp.asarray(np.random.default_rng(2).normal(size=made.value.shape)))


@pytest.fixture(scope='module')
def reference(params):
  function = gradients.gradient_function(mesh.make_mesh(1, 1), CRITIC, REPLAY, one_of(ALL, False),
                                         choose(full_group(), 0), full_sequence=True)
  return [function(params, choose(full_group(), i)) for i in range(len(ALL))]


@pytest.mark.parametrize('named, separable, devices, first', [
    (SEPARABLE, True, 1, 0), (ALL, False, 2, 0)], ids=['separable', 'all'])
def test_equal_full_sequences(params, reference, named, separable, devices, first):
  replay = dataclasses.replace(REPLAY, shard_params=devices > 1)
  function = gradients.gradient_function(mesh.make_mesh(1, devices), CRITIC, replay, one_of(named, separable),
                                         choose(full_group(), 0))
  for i, (name, config) in enumerate(named):
    got = function(params, choose(full_group(), i))
    assert distance(got, reference[i]) <= 1e-10, (name, config)
    np.testing.assert_allclose(got.loss, reference[i].loss, rtol=1e-11, atol=1e-12, err_msg=name)
    assert np.abs(flat(got)).max() > 0
    assert (np.abs(np.asarray(got.grads.value)).max() > 0) == (name == 'ppo')


@pytest.mark.parametrize('case', ['dense_small', pytest.param('hybrid_small', marks=pytest.mark.slow)])
def test_equal_trl_from_the_case_folder(case):
  shape = hf.read_config(CASES / case / 'model')
  sizes = hf.batch_sizes(CASES / case)
  replay = ReplayConfig(segment_len=96, branch_segment_len=12, prefix_capacity=sizes['prefix_len'] - 1,
                        branch_capacity=sizes['branch_len'], key_block=64, row_block=64, accumulate_dtype='float64')
  one = mesh.make_mesh(1, 1)
  params = hf.load(CASES / case / 'model', shape, one, replay, 'float64')
  group = batch.stack([hf.read_batch(CASES / case, shape, replay, np.float64)])
  named = [(name, ObjectiveConfig(**{'kl_coef': 0.04, 'fixed_length': sizes['branch_len'], **settings})) for name, settings in GOLDEN.values()]
  function = gradients.gradient_function(one, shape, replay, one_of(named, False), choose(group, 0))
  golden = json.loads((CASES / 'objectives' / case / 'golden_trl.json').read_text())
  first_pair = group.replace(mask=group.mask * np.array([1, 1, 0, 0])[:, None])
  for i, theirs in enumerate(GOLDEN):
    got = function(params, choose(first_pair if theirs == 'dpo' else group, i))
    np.testing.assert_allclose(got.loss, golden[theirs]['loss'], rtol=1e-9, err_msg=theirs)
    np.testing.assert_allclose(np.linalg.norm(flat(got)), golden[theirs]['grad_norm'], rtol=1e-9, err_msg=theirs)
    whole = CASES / 'objectives' / case / f'golden_grads_{theirs}.safetensors'
    if whole.exists():
      ours, right = dict(hf.to_hf_tensors(got.grads, shape)), load_file(whole)
      off = sum(np.sum((ours[k] - right[k])**2) for k in right)
      assert off <= 1e-9**2 * sum(np.sum(x**2) for x in right.values()), theirs
