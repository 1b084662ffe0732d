"""Blockwise attention against softmax over all pairs, and what it may skip."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import attention
from branchreplay.state import FAR

HEADS, DIM = 2, 4


def problem(seed, window=None, causal=True, row_block=4, key_block=8, rows=24, slots=48):
  """Random rows and keys: three branches, ascending positions, padding in both."""
  rng = np.random.default_rng(seed)
  position = np.sort(rng.integers(0, 40, rows)).astype(np.int32)
  sight = np.where(rng.random(rows) < 0.2, -1, position if causal else position + 3).astype(np.int32)
  branch = np.sort(rng.integers(0, 3, rows)).astype(np.int32)
  at = np.sort(rng.integers(0, 40, slots)).astype(np.int32)
  at[-8:] = FAR
  of = np.sort(rng.integers(0, 3, slots)).astype(np.int32)
  draw = lambda *shape: rng.normal(size=shape)
  q, k, v = draw(HEADS, rows, DIM), draw(1, HEADS, slots, DIM), draw(1, HEADS, slots, DIM)
  seen = (at[None] <= sight[:, None]) & (of[None] == branch[:, None])
  if window is not None:
    seen &= at[None] > position[:, None] - window
  return attention.Rows(position, sight, branch, window, row_block), q, k, v, at, of, seen, key_block


def plain(q, k, v, seen):
  """Softmax over all pairs; a row that sees nothing gives zeros."""
  a = jnp.where(seen, q @ k.swapaxes(1, 2), -jnp.inf)
  top = jnp.where(seen.any(1), a.max(-1), 0)
  e = jnp.exp(a - top[..., None])
  total = e.sum(-1)
  return (e @ v) / jnp.where(total > 0, total, 1)[..., None]


def blocks(rows, q, k, v, at, of, key_block, do=None):
  """o, lse, and with `do` the cotangents of q, k and v."""
  keys = attention.key_range(rows, k, v, at, of, jnp.int32(0), key_block)
  o, lse = attention.divided(*attention.forward(q, rows, (keys,)))
  if do is None:
    return o, lse
  dq, ((dk, dv),) = attention.backward(q, rows, (keys,), lse, do, (o * do).sum(-1), ((jnp.zeros_like(k), jnp.zeros_like(v)),))
  return o, lse, dq, dk, dv


@pytest.mark.parametrize('window, causal', [(None, True), (6, True), (None, False)])
@pytest.mark.parametrize('row_block, key_block', [(4, 8), (24, 48), (3, 16)])
def test_equals_softmax_over_all_pairs(window, causal, row_block, key_block):
  rows, q, k, v, at, of, seen, _ = problem(row_block, window, causal, row_block)
  do = np.random.default_rng(9).normal(size=q.shape)
  o, lse, *grads = jax.jit(lambda *x: blocks(rows, *x, at, of, key_block, do))(q, k, v)
  want, pull = jax.vjp(lambda q, k, v: plain(q, k[0], v[0], seen), q, k, v)
  for got, right in zip((o, *grads), (want, *pull(jnp.asarray(do)))):
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)
  assert np.all(np.isneginf(lse) == ~seen.any(1)) and not seen.all(1).any() and not seen.any(1).all()


@pytest.mark.parametrize('seed', range(5))
def test_blocks_that_see_nothing_are_not_touched(seed):
  """Keys of blocks that no row sees are NaN: they must not be read. Others are masked where `whole` is false."""
  rows, q, k, v, at, of, seen, key_block = problem(seed, window=9)
  keys = attention.key_range(rows, k, v, at, of, jnp.int32(0), key_block)
  pairs = seen.reshape(-1, rows.block, seen.shape[1] // key_block, key_block)
  assert np.all(np.asarray(keys.whole) <= pairs.all((1, 3)))
  for span, matrix in ((keys.keys, pairs.any((1, 3))), (keys.rows, pairs.any((1, 3)).T)):
    inside = (np.arange(matrix.shape[1]) >= np.asarray(span.first)[:, None]) & (np.arange(matrix.shape[1]) < np.asarray(span.last)[:, None])
    assert np.all(matrix <= inside)
  unread = np.repeat(np.asarray(keys.rows.last) == 0, key_block)
  assert unread.any()
  poison = lambda x: np.where(unread[:, None], np.nan, x)
  do = np.ones_like(q)
  for got, want in zip(blocks(rows, q, poison(k), poison(v), at, of, key_block, do), blocks(rows, q, k, v, at, of, key_block, do)):
    np.testing.assert_array_equal(got, want)


def test_causal_blocks_are_half_of_all_and_most_are_whole():
  """64 positions against themselves in blocks of 8: 36 pairs of blocks, 28 of them need no mask."""
  at = np.arange(64, dtype=np.int32)
  zeros, k = np.zeros(64, np.int32), np.zeros((1, HEADS, 64, DIM))
  rows = attention.Rows(at, at, zeros, None, 8)
  keys = attention.key_range(rows, k, k, at, zeros, jnp.int32(0), 8)
  assert int((keys.keys.last - keys.keys.first).sum()) == int((keys.rows.last - keys.rows.first).sum()) == 36
  assert int(keys.whole.sum()) == 28
