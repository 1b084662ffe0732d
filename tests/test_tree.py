"""Trees of trajectories: the merged form, and its gradient against plain autodiff on every trajectory in full."""
import dataclasses
import functools

from hypothesis import Phase, given, settings, strategies as st
import jax
import numpy as np
import pytest

from branchreplay import batch, mesh, objectives, tree, trie
from branchreplay.config import ObjectiveConfig, UserError
from tests.engine import DEEP, OBJECTIVE, REPLAY, SMALL, flat, function, parameters

REPLAY = dataclasses.replace(REPLAY, segment_len=16, prefix_capacity=256, branch_capacity=96, branch_segment_len=16)
SEGMENTS, LEVELS, TRAJECTORIES = 48, 8, 8  # of every tree here, so that few functions are compiled


def grow(rng, depth, fan_out, longest, vocab) -> list:
  """Responses of a random tree: token arrays of the paths to its leaves, and some that end inside."""
  tokens = lambda: rng.integers(0, vocab, rng.integers(0, longest + 1))
  def below(path, depth):
    path = np.concatenate([path, tokens()])
    children = rng.integers(1, fan_out + 1) if depth else 0
    ends = [] if children and rng.random() < 0.8 else [path]
    return ends + [leaf for _ in range(children) for leaf in below(path, depth - 1)]
  found = below(np.zeros(0, int), depth)
  return [found[i] for i in np.sort(rng.permutation(len(found))[:TRAJECTORIES])]


def problem(shape, rng, prompt_len, responses):
  """A tree and the group of the same trajectories; masks differ among those that share a token."""
  rows = lambda draw: [draw(len(r)) for r in responses]
  near = lambda n: -np.log(shape.vocab_size) + 0.3 * rng.normal(size=n)
  others = dict(masks=rows(lambda n: rng.random(n) < 0.6), advantages=rng.normal(size=len(responses)),
                old_logprobs=rows(near), ref_logprobs=rows(near), dtype=np.float64)
  prompt = rng.integers(0, shape.vocab_size, prompt_len)
  made = trie.make_tree(shape, REPLAY, prompt, responses, segments=SEGMENTS, levels=LEVELS, **others)
  group = batch.make_group(shape, REPLAY, prompt, responses, **others)
  return jax.tree.map(lambda x: np.asarray(x)[None], (made, group))


@functools.lru_cache(maxsize=None)
def compiled(shape, devices, trajectories, name, shard=False):
  example, _ = problem(shape, np.random.default_rng(0), 3, [np.zeros(1, int)] * trajectories)
  return tree.tree_function(mesh.make_mesh(1, devices), shape, dataclasses.replace(REPLAY, shard_params=shard),
                            objectives.make_objective(name, OBJECTIVE), example)


def check(shape, devices, rng, prompt_len, responses, name='grpo', shard=False):
  responses = responses + [np.zeros(0, int)] * (TRAJECTORIES - len(responses))
  made, group = problem(shape, rng, prompt_len, responses)
  got = compiled(shape, devices, TRAJECTORIES, name, shard)(parameters(shape), made)
  want = function(shape, REPLAY, 1, TRAJECTORIES, True, OBJECTIVE, name)(parameters(shape), group)
  assert np.linalg.norm(flat(got) - flat(want)) <= 1e-10 * np.linalg.norm(flat(want))
  np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)
  mask = group.mask > 0
  np.testing.assert_allclose(got.scores.logprob[mask], want.scores.logprob[mask], atol=1e-12)


@pytest.mark.parametrize('shape, devices, name, shard', [
    (DEEP, 8, 'grpo', True), (SMALL, 1, 'grpo', False), (SMALL, 8, 'gspo', False)])
def test_exact_equals_full_sequences_float64(shape, devices, name, shard):
  rng = np.random.default_rng(3)
  trunk, turn = rng.integers(0, 40, 21), rng.integers(0, 40, 18)
  tail = lambda n: rng.integers(0, 40, n)
  responses = [np.concatenate(x) for x in (
      (trunk, turn, tail(20)), (trunk, turn, tail(1)), (trunk, turn), (trunk, tail(33)), (trunk,), (tail(5),))]
  check(shape, devices, rng, 37, responses, name, shard)


@pytest.mark.parametrize('shape, devices', [(SMALL, 8)])
@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**31), depth=st.integers(0, 5), fan_out=st.integers(1, 4), longest=st.sampled_from([0, 1, 7, 18]),
       prompt_len=st.sampled_from([0, 1, 2, 17, 50]))
def test_random_trees_are_exact(shape, devices, seed, depth, fan_out, longest, prompt_len):
  rng = np.random.default_rng(seed)
  responses = [r[:REPLAY.branch_capacity] for r in grow(rng, depth, fan_out, longest, 40)]
  check(shape, devices, rng, prompt_len, responses)
