"""Trees of trajectories: the merged form, and its gradient against plain autodiff on every trajectory in full."""
import dataclasses
import functools

from hypothesis import Phase, given, settings, strategies as st
import jax
import numpy as np
import pytest

from branchreplay import batch, config, mesh, objectives, sample, tree, trie
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


def walk(made):
  """Checks a tree's order of entering and leaving against its paths; the segments above each, and itself."""
  above, path, left = {}, [], []
  def enter(s):
    assert made.path[s] == len(path)
    path.append(s)
  for k in range(int(made.count)):
    s = int(made.order[k])
    for e in range(int(made.enter[k]), s):
      enter(e)
    if path and path[-1] == s:
      path.pop()
    assert made.path[s] == len(path)
    above[s] = [*path, s]
    left.append(s)
  assert not path and sorted(left) == list(range(int(made.count)))
  return above


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), depth=st.integers(0, 5), fan_out=st.integers(1, 4), longest=st.sampled_from([0, 1, 7, 40]),
       prompt_len=st.sampled_from([0, 1, 2, 17, 50]), vocab=st.sampled_from([2, 40]))
def test_every_trajectory_is_a_path(seed, depth, fan_out, longest, prompt_len, vocab):
  """Reading the segments on the way to a trajectory's last one gives its tokens; equal beginnings stand once."""
  rng = np.random.default_rng(seed)
  responses = [r[:REPLAY.branch_capacity] for r in grow(rng, depth, fan_out, longest, vocab)]
  prompt = rng.integers(0, vocab, prompt_len)
  made = trie.make_tree(SMALL, REPLAY, prompt, responses, masks=[np.ones(len(r)) for r in responses])
  above = walk(made)
  elements = set()
  for g, response in enumerate(responses):
    full = np.concatenate([prompt, response])
    elements |= {tuple(full[:j + 2]) for j in range(len(full) - 1)}
    places = made.index[g][made.index[g] >= 0]
    skipped = 0 if prompt_len else 1  # nothing scores the first token of all
    assert len(places) == max(len(response) - skipped, 0)
    np.testing.assert_array_equal(made.targets.reshape(-1)[places], response[skipped:])
    if not places.size:
      continue
    way = above[places[-1] // REPLAY.segment_len]
    read = np.concatenate([made.tokens[s, :made.length[s]] for s in way])
    np.testing.assert_array_equal(read[:len(full) - 1], full[:-1])
    starts = np.cumsum([0, *(made.length[s] for s in way[:-1])])
    np.testing.assert_array_equal([made.start[s] for s in way], starts)
    assert [made.level[s] for s in way] == np.cumsum([made.first[s] for s in way]).tolist()
  assert made.length.sum() == len(elements)


def test_capacities_are_checked():
  make = lambda *rows, **sizes: trie.make_tree(SMALL, REPLAY, [1, 2], [np.array(r) for r in rows], **sizes)
  with pytest.raises(UserError, match='has 3 segments, the capacity is 2; raise segments to 3'):
    make([1, 2], [3, 4], segments=2)
  with pytest.raises(UserError, match='has 2 levels, the capacity is 1; raise levels to 2'):
    make([1, 2], [3, 4], levels=1)
  with pytest.raises(UserError, match='fills 18 segments of 16 positions, the capacity is 16; raise --prefix_capacity to 288'):
    trie.make_tree(SMALL, REPLAY, np.arange(270) % 40, [[1], [2]])
  with pytest.raises(UserError, match='the prompt holds token id 40, outside the vocabulary of 40'):
    trie.make_tree(SMALL, REPLAY, [40, 1], [[1], [2]])
  example, _ = problem(SMALL, np.random.default_rng(0), 3, [np.zeros(1, int)] * 2)
  with pytest.raises(UserError, match='mode=detached has no meaning for a tree'):
    tree.tree_function(mesh.make_mesh(1, 1), SMALL, dataclasses.replace(REPLAY, mode='detached'),
                       objectives.make_objective('grpo', OBJECTIVE), example)


def test_memory_is_that_of_the_longest_path():
  """More leaves add their matrices [G, R], and nothing else."""
  def compiled_bytes(leaves):
    rng = np.random.default_rng(0)
    responses = [rng.integers(0, 40, 20) for _ in range(leaves)]
    sizes = dict(segments=80, levels=4, advantages=np.ones(leaves), dtype=np.float32)
    made = jax.tree.map(lambda x: np.asarray(x)[None], trie.make_tree(SMALL, REPLAY, np.arange(100) % 40, responses, **sizes))
    report = tree.tree_function(mesh.make_mesh(1, 1), SMALL, REPLAY, objectives.make_objective('grpo', ObjectiveConfig()),
                                made).lower(parameters(SMALL), made).compile().memory_analysis()
    return report.temp_size_in_bytes, made
  (few, _), (many, made) = compiled_bytes(4), compiled_bytes(32)
  matrix = 28 * made.index.shape[-1] * 8  # what 28 more leaves add to a matrix of float64
  assert many - few <= 6 * matrix
  recurrent = 4 * 8 * 8 * 8  # one layer's state, of which a leaf that stayed alive would keep one
  keys = 16 * 2 * 2 * 8 * 8  # and its segment's keys and values
  assert many - few < 28 * (recurrent + keys)


def test_branches_forked_at_a_node_are_those_of_its_tokens():
  """Sampling behind prompt + node from the captured prompt, against capturing prompt + node whole."""
  rng, seq, width = np.random.default_rng(0), 2, 3
  replay = dataclasses.replace(REPLAY, segment_len=16, prefix_capacity=96, branch_capacity=8, branch_segment_len=8)
  prompt, node = rng.integers(0, 40, 21), rng.integers(0, 40, 19)
  mesh_, how = mesh.make_mesh(1, seq), sample.Sampling(np.float32(1), np.float32(1), np.int32(-1))
  def prompts(tokens):
    prefix, length = batch.make_prefix(replay, tokens)
    return sample.Prompts(prefix[None], length[None], np.array(tokens[-1:], np.int32))
  keys = jax.random.split(jax.random.key(1), 1)
  roll = sample.rollout_function(mesh_, SMALL, replay, width, 5, True)
  want, _ = roll(parameters(SMALL), prompts(np.concatenate([prompt, node])), keys, how)
  _, captured = roll(parameters(SMALL), prompts(prompt), keys, how)
  tokens = np.zeros((1, 1, 2, 16), np.int32)
  tokens.reshape(-1)[:19] = np.concatenate([prompt[-1:], node[:-1]])
  forks = sample.Forks(tokens, np.full((1, 1), 19, np.int32), np.array([20], np.int32), node[-1:].reshape(1, 1).astype(np.int32))
  got = sample.fork_function(mesh_, SMALL, replay, width, 5)(parameters(SMALL), captured, forks, keys[None], how)
  np.testing.assert_array_equal(got.tokens[0], want.tokens)
  np.testing.assert_allclose(got.logprobs[0], want.logprobs, atol=1e-5)


@pytest.mark.parametrize('shape, devices, name, shard', [
    (DEEP, 8, 'grpo', True), (SMALL, 1, 'gspo', False)])
def test_exact_equals_full_sequences_float64(shape, devices, name, shard):
  rng = np.random.default_rng(3)
  trunk, turn = rng.integers(0, 40, 21), rng.integers(0, 40, 18)
  tail = lambda n: rng.integers(0, 40, n)
  responses = [np.concatenate(x) for x in (
      (trunk, turn, tail(20)), (trunk, turn, tail(1)), (trunk, turn), (trunk, tail(33)), (trunk,), (tail(5),))]
  check(shape, devices, rng, 37, responses, name, shard)


@pytest.mark.parametrize('shape, devices', [(SMALL, 8), *(pytest.param(shape, devices, marks=pytest.mark.slow) for shape in (
    config.preset('tiny-dense'), config.preset('tiny-window'), DEEP) for devices in (1, 8))])
@settings(max_examples=12, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 2**31), depth=st.integers(0, 5), fan_out=st.integers(1, 4), longest=st.sampled_from([0, 1, 7, 18]),
       prompt_len=st.sampled_from([0, 1, 2, 17, 50]))
def test_random_trees_are_exact(shape, devices, seed, depth, fan_out, longest, prompt_len):
  rng = np.random.default_rng(seed)
  responses = [r[:REPLAY.branch_capacity] for r in grow(rng, depth, fan_out, longest, 40)]
  check(shape, devices, rng, prompt_len, responses)
