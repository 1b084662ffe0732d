"""Invariants 1-7 of the design: branch replay against plain autodiff on full sequences."""
import dataclasses
import functools
import re

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import branches, config, full_sequence, gradients, lora, mesh, model, objectives, prefix, rope
from experiments import memory
from tests.engine import DEEP, OBJECTIVE, REPLAY, SMALL, distance, flat, function, gradient, make, parameters

RAGGED = [20, 0, 1, 9, 8]
PACKED = dataclasses.replace(SMALL, pattern=('window', 'full'), repeats=2, window=11)


@pytest.mark.parametrize('shape, devices, changes', [
    (DEEP, 8, {'shard_params': True}), (SMALL, 1, {}),  # on 1, 2 and 8 devices: test_exact_for_any_lengths_segments_and_devices
    pytest.param(SMALL, 2, {'shard_params': True}, marks=pytest.mark.slow), pytest.param(SMALL, 8, {}, marks=pytest.mark.slow)])
def test_exact_equals_full_sequences_float64(shape, devices, changes):
  sizes = RAGGED if shape is DEEP else [20, 0, 1, 9]
  group = make(shape, 77, sizes)
  got, want = gradient(shape, group, devices, **changes), gradient(shape, group, 1, full_sequence=True)
  assert distance(got, want) <= 1e-10
  np.testing.assert_allclose(got.loss, want.loss, rtol=1e-12)
  mask = group.mask > 0
  np.testing.assert_allclose(got.scores.logprob[mask], want.scores.logprob[mask], atol=1e-12)
  np.testing.assert_allclose(got.scores.entropy[mask], want.scores.entropy[mask], atol=1e-12)


@pytest.mark.parametrize('name', ['tiny-dense', 'tiny-mixed', pytest.param('tiny-window', marks=pytest.mark.slow)])  # DEEP has windows
def test_presets_are_exact(name):
  shape = config.preset(name)
  group = make(shape, 77, RAGGED)
  assert distance(gradient(shape, group, 8), gradient(shape, group, 1, full_sequence=True)) <= 1e-10


def test_float32_is_as_good_as_full_sequences():
  shape = config.preset('tiny-hybrid')
  group = make(shape, 90, RAGGED)
  truth = gradient(shape, group, 1, full_sequence=True)
  single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, group)
  # Same values in both precisions: parameters are drawn in float32.
  got = gradient(shape, single, 8, dtype='float32', accumulate_dtype='float32')
  plain = gradient(shape, single, 1, full_sequence=True, dtype='float32', accumulate_dtype='float32')
  assert distance(got, truth) <= min(1e-4, 3 * distance(plain, truth))


def test_bfloat16_is_as_good_as_full_sequences():
  """Parameters and state in bfloat16; the truth is of the same, rounded, parameters."""
  shape, found = config.preset('tiny-hybrid'), []
  for seed in range(3):
    group = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, make(shape, 90, RAGGED, seed))
    low = model.init(shape, jax.random.key(seed), jnp.bfloat16)
    of = lambda params, **how: function(shape, dataclasses.replace(REPLAY, accumulate_dtype='float32'), 1, len(RAGGED), **how)(params, group)
    truth = of(jax.tree.map(lambda x: x.astype(jnp.float32), low))
    found.append((distance(of(low), truth), distance(of(low, full_sequence=True), truth)))
  got, plain = np.median(found, 0)
  assert got <= min(0.03, 1.1 * plain)


def test_branches_exchange_float32_and_prefixes_their_dtype():
  sizes, group = dataclasses.replace(REPLAY, mode='detached', accumulate_dtype='float32'), make(SMALL, 40, [7, 3])
  mesh_, low = mesh.make_mesh(1, 2), model.shapes(SMALL, 'bfloat16')
  exchanged = lambda lowered: set(re.findall(r'all_to_all.*->.*x(\w+)>', lowered.as_text()))
  capture = gradients.capture_function(mesh_, SMALL, sizes, group)
  assert exchanged(capture.lower(low, group)) == {'bf16'}
  update = gradients.gradient_function(mesh_, SMALL, sizes, objectives.make_objective('grpo', OBJECTIVE), group, with_captured=True)
  assert exchanged(update.lower(low, group, jax.eval_shape(capture, low, group))) == {'f32'}


def test_full_sequence_equals_one_plain_grad():
  """The reference itself, against jax.grad of the objective of all log-probs at once."""
  group = make(SMALL, 30, [5, 3, 0, 8])
  one = jax.tree.map(lambda x: x[0], group)
  objective = objectives.make_objective('grpo', OBJECTIVE)

  def loss(params):
    rows = [full_sequence.branch_scores(SMALL, params, one.prefix.reshape(-1), one.prefix_length, one.inputs[g],
                                        one.targets[g]) for g in range(4)]
    return objective.loss(jax.tree.map(lambda *x: jnp.stack(x), *rows), one)[0]

  want = jax.jit(jax.grad(loss))(parameters(SMALL))
  got = gradient(SMALL, group, 1, full_sequence=True)
  assert distance(got, dataclasses.replace(got, grads=want)) <= 1e-13


@pytest.mark.slow
def test_independent_of_segments_and_padding():
  group = make(SMALL, 61, [20, 3, 0, 9])
  want = gradient(SMALL, group, 1, full_sequence=True)
  wider = dataclasses.replace(REPLAY, segment_len=16, branch_segment_len=16, branch_capacity=32,
                              prefix_capacity=160, replay_batch=3)
  other = make(SMALL, 61, [20, 3, 0, 9], replay=wider)
  got = function(SMALL, wider, 2, 4)(parameters(SMALL), other)
  assert distance(got, want) <= 1e-10


def test_independent_of_the_order_of_branches():
  group = make(SMALL, 40, [20, 3, 0, 9])
  order = np.array([2, 0, 3, 1])
  turned = jax.tree.map(lambda x: x[:, order] if x.ndim > 1 and x.shape[1] == 4 else x, group)
  turned = turned.replace(prefix=group.prefix)
  a, b = (gradient(SMALL, g, 1, replay_batch=1) for g in (group, turned))  # each branch alone: bit for bit
  assert distance(a, b) <= 1e-13
  np.testing.assert_array_equal(np.asarray(a.scores.logprob)[0][order], np.asarray(b.scores.logprob)[0])


def test_copies_of_a_branch_share_its_weight():
  group = make(SMALL, 40, [7] * 4)
  same = jax.tree.map(lambda x: np.repeat(x[:, :1], 4, 1) if x.ndim > 1 and x.shape[1] == 4 else x, group)
  same = same.replace(prefix=group.prefix)
  alone = same.replace(mask=same.mask * np.array([1, 0, 0, 0])[None, :, None])
  assert distance(gradient(SMALL, same, 1), gradient(SMALL, alone, 1)) <= 1e-12


def test_depth_is_a_dial_between_detached_and_exact():
  group = make(SMALL, 80, [9, 2, 0, 4])  # three prefix segments
  exact, detached = gradient(SMALL, group, 1), gradient(SMALL, group, 1, mode='detached')
  short = make(SMALL, 30, [9, 2, 0, 4])  # one segment: depth 1 is all of it
  assert distance(gradient(SMALL, short, 1, mode='depth=1'), gradient(SMALL, short, 1)) == 0
  one = gradient(SMALL, group, 1, mode='depth=1')
  assert distance(detached, exact) > 0.05 and distance(one, exact) > 0.01 and distance(one, detached) > 0.01
  dial = lambda mode: dataclasses.replace(REPLAY, mode=mode).pull_depth
  assert dial('depth=0') == dial('detached') == 0 and dial('depth=2') == 2 and dial('exact') > 10**6


@pytest.mark.parametrize('shape, devices, keep', [
    (SMALL, 1, 'attention'), (SMALL, 2, 'layers'), (PACKED, 2, 'layers'),
    pytest.param(DEEP, 8, 'attention', marks=pytest.mark.slow),
    pytest.param(DEEP, 8, 'layers', marks=pytest.mark.slow)])
def test_what_a_capture_keeps_changes_nothing(shape, devices, keep):
  group = make(shape, 77, [20, 0, 1, 9])
  assert distance(gradient(shape, group, devices, keep=keep), gradient(shape, group, devices)) <= 1e-14


def test_branches_of_attention_layers_are_packed():
  """Ragged branches one behind another: exact, scored or not, and no segment is spent on padding."""
  sizes = [1, 20, 0, 3, 9, 1]
  group = make(PACKED, 45, sizes)
  for name, changes in (('grpo', {'keep': 'layers'}), ('gspo', {'keep': 'state', 'replay_batch': 4})):
    objective = dataclasses.replace(OBJECTIVE, kl_coef=0.0)
    got = gradient(PACKED, group, 2, name=name, objective=objective, **({'replay_batch': 6} | changes))
    want = gradient(PACKED, group, 1, True, name=name, objective=objective)
    assert distance(got, want) <= 1e-10
    mask = group.mask > 0
    np.testing.assert_allclose(got.scores.logprob[mask], want.scores.logprob[mask], atol=1e-12)
  one = jax.tree.map(lambda x: jnp.asarray(x[0]), group)
  six = dataclasses.replace(REPLAY, replay_batch=6)
  for shape, segments in ((PACKED, 1), (SMALL, 3)):  # 34 tokens in rows of 6 * 8; a row each of 8 for the longest
    count, index = branches.micro_batches(shape, six, one.length)
    assert (count, branches.segment_count(branches.micro_batch(shape, six, one, index, 0))) == (1, segments)


@pytest.mark.parametrize('batch, most, lengths, want', [
    (1, 3, [9, 12, 4, 0, 24, 1, 1], [0, 0, 1, 1, 2, 3, 3]),  # 3 segments of 8 hold the longest branch there may be, of 24
    (2, 2, [9, 12, 4, 0, 24, 1, 1], [0, 0, 0, 0, 1, 1, 1]),  # 2 of 16, as they do
    (3, 1, [24, 1, 23], [0, 1, 1]),  # 1 of 24
    (9, 1, [24] * 3, [0, 0, 0])])
def test_packed_micro_batches_hold_whole_branches(batch, most, lengths, want):
  replay = dataclasses.replace(REPLAY, replay_batch=batch)
  assert branches.are_packed(PACKED, replay) and branches.most_segments(PACKED, replay) == most
  count, index = branches.micro_batches(PACKED, replay, jnp.array(lengths, jnp.int32))
  assert int(count) == want[-1] + 1 and index.tolist() == want


def test_packed_branches_replayed_in_several_micro_batches():
  """Exact whatever is replayed at once, with branches of more than a segment and of none."""
  group = make(PACKED, 45, [24, 1, 0, 20, 3, 9])
  want = gradient(PACKED, group, 1, True)
  for batch in (1, 3):
    got = gradient(PACKED, group, 2, keep='layers', replay_batch=batch)
    assert distance(got, want) <= 1e-10
    np.testing.assert_allclose(got.scores.logprob[group.mask > 0], want.scores.logprob[group.mask > 0], atol=1e-12)


@pytest.mark.parametrize('repeats', [1, 2])
def test_a_prefix_does_not_run_the_end_of_its_last_layer(repeats):
  """Nobody reads its output: what is not a number there does not reach the pullback."""
  shape = dataclasses.replace(SMALL, repeats=repeats)
  params = parameters(shape)
  delta, full = params.blocks
  spoilt = full.mlp.down.at[-1].set(np.nan)
  params = params.replace(blocks=(delta, full.replace(mlp=full.mlp.replace(down=spoilt))))
  split = mesh.split_tree(model.shapes(shape), 1, False)

  def local(params, tokens):
    run = functools.partial(prefix.scan_prefix, shape, REPLAY, split, tokens, jnp.int32(40))
    state, pullback = jax.vjp(run, params)
    return pullback(jax.tree.map(lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating)
                                 else np.zeros(x.shape, jax.dtypes.float0), state))[0]

  spec = jax.sharding.PartitionSpec()
  grads = mesh.sharded(mesh.make_mesh(1, 1), local, (spec, spec), spec)(params, np.ones((3, 32), np.int32))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads)) and np.abs(grads.blocks[1].mixer.k[-1]).max() > 0


def test_products_are_pulled_back_as_matmuls():
  rng = np.random.default_rng(0)
  x, weight, d = (jnp.asarray(rng.normal(size=size)) for size in ((2, 3, 5), (5, 4), (2, 3, 4)))
  want, pull = jax.vjp(jnp.matmul, x, weight)
  for known in (None, [want]):
    (got,), pull_back = jax.vjp(lambda x, w: lora.products(x, (w,), known), x, weight)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    for a, b in zip(pull_back((d,)), pull(d)):
      np.testing.assert_allclose(a, b, rtol=1e-13)
  low = jax.tree.map(lambda y: y.astype(jnp.bfloat16), (x, weight))
  (wide,), pull_back = jax.vjp(lambda x, w: lora.products(x, (w,), wide=True), *low)
  assert wide.dtype == jnp.float32 and [y.dtype for y in pull_back((wide,))] == [jnp.bfloat16] * 2
  np.testing.assert_allclose(wide, jnp.matmul(*(y.astype(jnp.float32) for y in low)), rtol=1e-5)


def test_a_capture_that_keeps_layers_serves_several_updates():
  sizes, group = dataclasses.replace(REPLAY, keep='layers'), make(SMALL, 77, [20, 0, 1, 9])
  mesh_ = mesh.make_mesh(1, 2)
  captured = gradients.capture_function(mesh_, SMALL, sizes, group)(parameters(SMALL), group)
  update = gradients.gradient_function(mesh_, SMALL, sizes, objectives.make_objective('grpo', OBJECTIVE), group, with_captured=True)
  assert distance(update(parameters(SMALL), group, captured), gradient(SMALL, group, 1)) <= 1e-13


def test_bytes_that_a_capture_keeps():
  group, mesh_ = make(SMALL, 77, RAGGED), mesh.make_mesh(1, 2)
  held = lambda **changes: memory.state_bytes(mesh_, SMALL, dataclasses.replace(REPLAY, **changes), parameters(SMALL), group)[0]
  for keep, size in prefix.kept_bytes(SMALL, REPLAY, 2, 'float64').items():
    assert held(keep=keep) - held() == size and (size > 0) == (keep != 'state')
    assert held(keep=keep, mode='detached') == held()  # no pull, nothing to keep for it
  assert held(keep='auto') == held()  # not settled


def test_one_compilation_for_all_lengths():
  f = function(SMALL, REPLAY, 1, 4)
  for length, sizes in ((2, [1] * 4), (77, [24, 0, 3, 9]), (33, [0, 0, 0, 1])):
    f(parameters(SMALL), make(SMALL, length, sizes))
  assert f._cache_size() == 1


def test_masked_and_equal_rewards_give_zero():
  group = make(SMALL, 40, [7, 3, 0, 9])
  masked = group.replace(mask=np.zeros_like(group.mask))
  assert np.all(flat(gradient(SMALL, masked, 1)) == 0)
  plain = config.ObjectiveConfig()
  equal = group.replace(advantages=np.zeros_like(group.advantages))
  assert np.all(flat(gradient(SMALL, equal, 1, objective=plain)) == 0)


def test_vjp_of_scan_prefix_is_the_pullback():
  """jax.vjp(scan_prefix) in float64 against autodiff of the last keys through plain layers."""
  shape = dataclasses.replace(SMALL, pattern=('deltanet', 'full'), repeats=2)
  replay = dataclasses.replace(REPLAY, prefix_capacity=64)
  params, split = parameters(shape), mesh.split_tree(model.shapes(shape), 1, False)
  tokens = np.random.default_rng(0).integers(0, 40, 50)
  padded = np.zeros(64, np.int32)
  padded[:50] = tokens

  def local(params, prefix_tokens):
    run = functools.partial(prefix.scan_prefix, shape, replay, split, prefix_tokens, jnp.int32(50))
    state, pullback = jax.vjp(run, params)
    ones = jax.tree.map(lambda x: jnp.ones_like(x) if jnp.issubdtype(x.dtype, jnp.floating)
                        else np.zeros(x.shape, jax.dtypes.float0), state)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, ones)
    k = ones.slots.k.at[:, :, 50:].set(0)
    return pullback(zeros.replace(slots=zeros.slots.replace(k=k)))[0]

  spec = jax.sharding.PartitionSpec()
  got = mesh.sharded(mesh.make_mesh(1, 1), local, (spec, spec), spec)(params, padded.reshape(2, 32))

  def keys(params):  # sum of every attention layer's keys, by the plain layers
    tables = rope.tables_of(shape, jnp.arange(50), jnp.float64)
    h, total = params.embed[jnp.asarray(tokens)], 0
    for r in range(2):
      delta, full = jax.tree.map(lambda x: x[r], params.blocks)
      h = full_sequence._delta_layer(shape, delta, h)
      total += model.attention_in(shape, full, h, tables)[0][1].sum()
      h = full_sequence._attention_layer(shape, 'full', full, h, tables)
    return total

  want = jax.jit(jax.grad(keys))(params)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10, err_msg=jax.tree_util.keystr(path))


def test_objective_that_couples_tokens_takes_the_score_pass():
  objective = dataclasses.replace(OBJECTIVE, kl_coef=0.0)
  group = make(SMALL, 40, [7, 3, 5, 9])
  got = gradient(SMALL, group, 1, name='gspo', objective=objective)
  assert distance(got, gradient(SMALL, group, 1, True, name='gspo', objective=objective)) <= 1e-10


@settings(max_examples=25)
@given(prompt=st.integers(0, 97), sizes=st.lists(st.integers(0, 24), min_size=4, max_size=4),
       devices_segment=st.sampled_from([(1, 32), (2, 16), (8, 32)]), seed=st.integers(0, 2**16))
def test_exact_for_any_lengths_segments_and_devices(prompt, sizes, devices_segment, seed):
  devices, segment = devices_segment
  replay = dataclasses.replace(REPLAY, segment_len=segment)
  got = function(SMALL, replay, devices, 4)(parameters(SMALL), make(SMALL, prompt, sizes, seed, replay))
  want = function(SMALL, REPLAY, 1, 4, True)(parameters(SMALL), make(SMALL, prompt, sizes, seed))
  assert np.linalg.norm(flat(got) - flat(want)) <= 1e-10 * max(np.linalg.norm(flat(want)), 1e-6)
