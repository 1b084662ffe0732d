"""Small inputs for classes of fault that people have met in systems like this one, with their right answers."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import attention, batch, config, deltanet, mesh, rope, state
from branchreplay.checks import check_replay
from branchreplay.config import UserError
from tests.engine import REPLAY, SMALL, distance, flat, function, gradient, make, parameters

SPEC = jax.sharding.PartitionSpec()


def given(prompt, responses):
  """A stacked group of the given tokens, every advantage 1."""
  return batch.stack([batch.make_group(
      SMALL, REPLAY, prompt, responses, advantages=np.ones(len(responses)),
      ref_logprobs=[np.full(len(r), -3.0) for r in responses],
      old_logprobs=[np.full(len(r), -3.0) for r in responses], dtype=np.float64)])


def test_first_response_token_is_scored_at_the_last_prompt_token():
  group = given([5, 6, 7], [[9]] * 4)
  got = gradient(SMALL, group, 1)
  want = gradient(SMALL, group, 1, True)
  assert group.length.tolist() == [[1] * 4] and group.inputs[0, 0, 0] == 7 and group.targets[0, 0, 0] == 9
  np.testing.assert_allclose(got.scores.logprob[0, :, 0], want.scores.logprob[0, :, 0], atol=1e-12)


def test_nothing_crosses_branches():
  shape = SMALL
  group = make(shape, 40, [3, 2, 3, 2])
  other = group.replace(inputs=group.inputs.copy(), targets=group.targets.copy())
  other.targets[0, 1, 0] = other.inputs[0, 1, 1] = (group.targets[0, 1, 0] + 1) % 40
  only = lambda g: g.replace(mask=g.mask * np.array([1, 0, 0, 0])[None, :, None])
  a, b = gradient(shape, only(group), 1), gradient(shape, only(other), 1)
  np.testing.assert_array_equal(a.scores.logprob[0, 0, :3], b.scores.logprob[0, 0, :3])
  np.testing.assert_array_equal(flat(a), flat(b))


@pytest.mark.parametrize('prompt', [1, 2, 3, 8])
def test_prefix_shorter_than_the_convolution(prompt):
  group = make(SMALL, prompt, [1, 1, 1, 1])
  assert distance(gradient(SMALL, group, 1), gradient(SMALL, group, 1, True)) <= 1e-10


@pytest.mark.parametrize('prompt', [1, 7, 13, 97])
def test_any_prefix_length_on_eight_devices_equals_one(prompt):
  group = make(SMALL, prompt, [9, 0, 1, 4])
  assert distance(gradient(SMALL, group, 8), gradient(SMALL, group, 1)) <= 1e-10


def test_positions_follow_the_prompt_whatever_the_padding():
  short = given([1, 2, 3, 4, 5], [[8, 9]] * 4)
  wide = dataclasses.replace(REPLAY, segment_len=64)
  padded = batch.stack([batch.make_group(SMALL, wide, [1, 2, 3, 4, 5], [[8, 9]] * 4, advantages=np.ones(4),
                                         ref_logprobs=[[-3.0, -3.0]] * 4, old_logprobs=[[-3.0, -3.0]] * 4,
                                         dtype=np.float64)])
  got = function(SMALL, wide, 1, 4)(parameters(SMALL), padded)
  np.testing.assert_allclose(gradient(SMALL, short, 1).scores.logprob[0, :, :2], got.scores.logprob[0, :, :2],
                             atol=1e-12)


def test_sums_over_devices_are_counted_once():
  def local(w, d):  # L = sum over devices of (w^2 + 1) d
    share, grad = jax.value_and_grad(lambda w: ((w**2 + 1) * d).sum())(w)
    return mesh.sum_over(share), mesh.reduce_gradients({'w': grad}, {'w': False})['w']
  loss, grad = mesh.sharded(mesh.make_mesh(1, 8), local, (SPEC, jax.sharding.PartitionSpec('seq')), SPEC)(
      1.0, jnp.arange(8.0))
  assert loss == 56 and grad == 56


def test_token_outside_the_vocabulary_is_refused():
  with pytest.raises(UserError, match='token id 40, outside the vocabulary of 40'):
    make_with = lambda tokens: batch.make_group(SMALL, REPLAY, [1, 2], [tokens])
    make_with([40])
  with pytest.raises(UserError, match='token id -1'):
    batch.make_group(SMALL, REPLAY, [-1, 2], [[3]])


def test_sizes_over_the_capacity_are_refused():
  with pytest.raises(UserError, match='prompt has 98 tokens, the capacity is 97'):
    batch.make_group(SMALL, REPLAY, [1] * 98, [[3]])
  with pytest.raises(UserError, match='a branch has 25 tokens, the capacity is 24'):
    batch.make_group(SMALL, REPLAY, [1], [[3] * 25])
  with pytest.raises(UserError, match='at least one branch'):
    batch.make_group(SMALL, REPLAY, [1], [])


@pytest.mark.parametrize('devices, message', [(9, r'9 devices asked for .* --virtual_devices=9'), (0, 'empty')])
def test_devices_that_are_not_there(devices, message):
  with pytest.raises(UserError, match=message):
    mesh.make_mesh(1, devices)


@pytest.mark.parametrize('changes, message', [
    ({'segment_len': 12}, 'segment_len=12 is not divisible by the 8 devices .* use segment_len=16'),
    ({'branch_segment_len': 0}, 'branch_segment_len is 0'), ({'mode': 'depth=x'}, "unknown mode 'depth=x'"),
    ({'mode': 'fast'}, "unknown mode 'fast'")])
def test_replay_configurations_that_do_not_fit(changes, message):
  with pytest.raises(UserError, match=message):
    check_replay(dataclasses.replace(REPLAY, **changes), 8, 4)


def merged(o, top, total):
  """LSE merge over devices of stacked partial results [N, K, R, ...], one row a device."""
  local = lambda o, top, total: attention.merge(o[0], top[0], total[0], (1, 1, 8, 1))
  p = jax.sharding.PartitionSpec
  return mesh.sharded(mesh.make_mesh(1, 8), local, (p('seq'),) * 3,
                      (p(None, None, 'seq'), p(None, None, 'seq')))(o, top, total)


def test_devices_that_see_no_key():
  o, top, total = jnp.zeros((8, 1, 8, 4)), jnp.full((8, 1, 8), -jnp.inf), jnp.zeros((8, 1, 8))
  out, lse = merged(o, top, total)
  assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == -np.inf)
  out, lse = merged(o.at[3].set(2.0), top.at[3].set(1.5), total.at[3].set(2.0))
  np.testing.assert_allclose(out, 1.0)
  np.testing.assert_allclose(lse, 1.5 + np.log(2.0))


def test_merge_of_far_apart_statistics():
  top = jnp.full((8, 1, 8), -jnp.inf).at[0].set(0.0).at[1].set(100.0)
  _, lse = merged(jnp.ones((8, 1, 8, 4)), top, jnp.where(jnp.isfinite(top), 1.0, 0.0))
  np.testing.assert_allclose(lse, 100.0)


def test_rope_is_relative_at_a_million():
  shape = dataclasses.replace(SMALL, head_dim=128, rotary_fraction=1.0, rope_theta=1e6)
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 128)), jnp.float32) for _ in range(2))

  def score(base):
    turn = lambda x, at: rope.rotate(x, rope.tables_of(shape, jnp.array([at]), jnp.float32))
    return float((turn(q, base + 3) * turn(k, base)).sum())

  assert abs(score(1_000_000) - score(0)) < 2e-5
  # cos of base 8 million, to 1e-6 of float64
  at, f = 8_000_000, shape.rope_theta ** (-np.arange(0, 128, 2) / 128)
  np.testing.assert_allclose(rope.tables_of(shape, jnp.array([at]), jnp.float32)[0][0], np.cos(at * f), atol=1e-6)


def test_padding_never_enters_the_convolution_tail():
  x = jnp.array([1.0, 9.0, 9.0, 9.0]).reshape(1, 4, 1)
  weight = jnp.array([[0.1, 0.2, 0.3, 0.4]])
  y, tail = deltanet.causal_conv(x, jnp.zeros((1, 3, 1)), weight, jnp.array([1]))
  np.testing.assert_allclose(y[0, 0, 0], jax.nn.silu(0.4))
  np.testing.assert_allclose(tail[0, :, 0], [0, 0, 1])
  assert np.isfinite(jax.grad(lambda x: deltanet.unit(x).sum())(jnp.zeros(4))).all()


def test_convolution_in_bfloat16_rounds_its_inputs_alone():
  rng = np.random.default_rng(0)
  x, tail, weight = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, 9, 5), (2, 3, 5), (5, 4)))
  wide = lambda tree: jax.tree.map(lambda y: y.astype(jnp.float32), tree)
  conv = lambda x, tail, weight: deltanet.causal_conv(x, tail, weight, jnp.array([9, 4]))
  (got, pull), (want, pull_wide) = jax.vjp(conv, x, tail, weight), jax.vjp(conv, *wide((x, tail, weight)))
  assert got[0].dtype == jnp.float32 and got[1].dtype == jnp.bfloat16
  np.testing.assert_array_equal(got[0], want[0])
  for a, b in zip(pull((want[0], jnp.zeros_like(tail))), pull_wide((want[0], jnp.zeros_like(want[1])))):
    np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def recurrence(q, k, v, g, b, state):
  """The delta rule token by token, float64."""
  out = []
  q, k = (np.asarray(deltanet.unit(x)) for x in (q, k))
  for t in range(q.shape[0]):
    state = state * np.exp(g[t])[:, None, None]
    new = (v[t] - np.einsum('hkv,hk->hv', state, k[t])) * b[t][:, None]
    state = state + k[t][:, :, None] * new[:, None]
    out.append(np.einsum('hkv,hk->hv', state, q[t]) * q.shape[-1]**-0.5)
  return np.stack(out), state


@pytest.mark.parametrize('decay, chunk, length', [(-1.5, 64, 64), (-0.01, 32, 96), (-30.0, 16, 64), (0.0, 24, 72)])
def test_chunked_delta_rule_equals_the_recurrence(decay, chunk, length):
  rng = np.random.default_rng(0)
  common = rng.normal(size=(1, 2, 8))  # correlated keys
  q, k, v = (rng.normal(size=(length, 2, 8)) + (common if i == 1 else 0) for i in range(3))
  g, b, start = np.full((length, 2), decay), rng.uniform(size=(length, 2)), rng.normal(size=(2, 8, 8))
  o, end = deltanet.delta_rule(*map(jnp.asarray, (q, k, v, g, b, start)), chunk)
  want_o, want_end = recurrence(q, k, v, g, b, start)
  np.testing.assert_allclose(o, want_o, atol=1e-11)
  np.testing.assert_allclose(end, want_end, atol=1e-11)
  slope = jax.grad(lambda g: deltanet.delta_rule(*map(jnp.asarray, (q, k, v)), g, jnp.asarray(b), jnp.asarray(start),
                                                 chunk)[0].sum())(jnp.asarray(g))
  assert np.isfinite(slope).all()


@pytest.mark.parametrize('size', [1, 2, 9, 16, 24, 64, 72, 128])
def test_both_inverses_of_the_delta_rule(size):
  """On keys that have much in common, where the powers of the nilpotent part overflow."""
  rng = np.random.default_rng(size)
  k = rng.normal(size=(3, size, 32)) + 2 * rng.normal(size=(3, 1, 32))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  a = k @ k.swapaxes(-1, -2)
  want = np.linalg.inv(np.tril(a, -1) + np.eye(size))
  for inverse in (deltanet.invert_by_masks, deltanet.invert_by_blocks, deltanet.invert_unit_lower):
    np.testing.assert_allclose(inverse(jnp.asarray(a)), want, atol=1e-12 * np.abs(want).max())


def test_a_branch_never_changes_the_captured_state():
  """Key slots are only read by branches: captured before and after are the same arrays."""
  group = make(SMALL, 40, [9, 2, 0, 4])
  a, b = gradient(SMALL, group, 1), gradient(SMALL, group, 1)
  np.testing.assert_array_equal(flat(a), flat(b))
  assert state.FAR > config.ModelConfig().max_positions
