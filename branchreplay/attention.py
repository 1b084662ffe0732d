"""Causal attention over key blocks: a forward/backward pair with log-sum-exp.

Letters: L attention layers, K kv heads, R query rows (branch, position and query
group folded together), S key slots, h head_dim. Keys and values are head-major,
so that every product is a 2-D matrix multiply. Loops run over the pairs of blocks
that see each other only (trip counts are traced).

The keys that a segment sees lie in several ranges: the prefix's slots (read-only
while branches run) and the node's own. Softmax statistics are float32 at least.
Forward: online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867; FlashAttention,
arXiv:2205.14135); partial results of devices merge by log-sum-exp.
"""
import functools
from typing import Any

from flax import struct
from jax import lax
import jax.numpy as jnp

from branchreplay import mesh


@struct.dataclass
class Rows:
  """What the mask needs to know of the query rows, and how they are blocked."""
  position: Any  # i32 [R]
  sight: Any  # i32 [R], the last position a row sees: its own where causal; -1: it sees nothing
  branch: Any  # i32 [R]
  window: int | None = struct.field(pytree_node=False)  # positions seen, own included
  block: int = struct.field(pytree_node=False)  # rows per block; divides R


@struct.dataclass
class Span:
  """Blocks first..last-1, one such range for each of [n] others."""
  first: Any  # i32 [n]
  last: Any  # i32 [n]


@struct.dataclass
class KeyRange:
  """Keys of a layer, and which of their blocks the rows see; see `key_range`."""
  k: Any  # [L, K, S, h]
  v: Any  # [L, K, S, h]
  position: Any  # i32 [S]; FAR where a slot holds nothing
  branch: Any  # i32 [S], or None: visible to every branch
  layer: Any  # i32 []
  into: Any  # i32 [], the layer of the cotangents that are added to
  keys: Span  # of key blocks, for each block of rows
  rows: Span  # of row blocks, for each block of keys
  whole: Any  # bool [row blocks, key blocks], where every row sees every key
  block: int = struct.field(pytree_node=False)  # keys per block; divides S


def at_least_f32(dtype):
  return jnp.promote_types(dtype, jnp.float32)


def largest_divisor(n: int, limit: int) -> int:
  """The largest divisor of n that is at most `limit`."""
  return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def _spans(seen) -> Span:
  """The first and behind the last True of each row of bool [n, m]; nothing is 0..0."""
  first, last = jnp.argmax(seen, 1), seen.shape[1] - jnp.argmax(seen[:, ::-1], 1)
  return Span(*(jnp.where(seen.any(1), x, 0).astype(jnp.int32) for x in (first, last)))


def key_range(rows: Rows, k, v, position, branch, layer, block: int, into=None) -> KeyRange:
  """Keys k, v [L, K, S, h] in blocks; what no row of a block sees of them costs nothing.

  position i32 [S], branch i32 [S] or None, layer i32 [], into (layer if None): see `KeyRange`; `block` divides S.
  A block of keys counts as seen where the extremes of its positions and branches
  and those of the rows leave it possible; `_masked` decides the rest.
  """
  of_keys = lambda x: [reduce(x.reshape(-1, block), 1)[None] for reduce in (jnp.min, jnp.max)]
  of_rows = lambda x: [reduce(x.reshape(-1, rows.block), 1)[:, None] for reduce in (jnp.min, jnp.max)]
  (oldest, newest), (least, most) = of_keys(position), of_rows(rows.sight)
  seen, whole = oldest <= most, newest <= least
  if rows.window is not None:
    first, last = of_rows(rows.position)
    seen, whole = seen & (newest > first - rows.window), whole & (oldest > last - rows.window)
  if branch is not None:
    (low, high), (low_row, high_row) = of_keys(branch), of_rows(rows.branch)
    seen &= (high >= low_row) & (low <= high_row)
    whole &= (low == high_row) & (high == low_row)
  return KeyRange(k, v, position, branch, layer, layer if into is None else into, _spans(seen), _spans(seen.T), whole, block)


def _dot(a, b, contract):
  return lax.dot_general(a, b, ((contract[:1], contract[1:]), ((), ())),
                         preferred_element_type=at_least_f32(a.dtype))


def index(*starts):
  """Starts of a slice, integers or i32 [], as i32 [] all: in 64-bit mode they would differ."""
  return tuple(jnp.asarray(s, jnp.int32) for s in starts)


def _block(x, layer, head, start, size):
  return lax.dynamic_slice(x, index(layer, head, start, 0), (1, 1, size, x.shape[3]))[0, 0]


def _add_block(x, update, layer, head, start):
  old = _block(x, layer, head, start, update.shape[0])
  new = (old.astype(update.dtype) + update).astype(x.dtype)
  return lax.dynamic_update_slice(x, new[None, None], index(layer, head, start, 0))


def _rows_of(x, head, start, size):
  return lax.dynamic_slice(x, index(head, start, *[0] * (x.ndim - 2)), (1, size) + x.shape[2:])[0]


def _masked(scores, rows, keys, row, key, axis):
  """Scores of blocks `row` and `key`, -inf where a row does not see a key; rows lie along `axis`."""
  of_rows = lambda x: jnp.expand_dims(lax.dynamic_slice_in_dim(x, row * rows.block, rows.block), 1 - axis)
  of_keys = lambda x: jnp.expand_dims(lax.dynamic_slice_in_dim(x, key * keys.block, keys.block), axis)

  def mask(scores):
    visible = of_keys(keys.position) <= of_rows(rows.sight)
    if rows.window is not None:
      visible &= of_keys(keys.position) > of_rows(rows.position) - rows.window
    if keys.branch is not None:
      visible &= of_keys(keys.branch) == of_rows(rows.branch)
    return jnp.where(visible, scores, -jnp.inf)

  return lax.cond(keys.whole[row, key], lambda x: x, mask, scores)


def _finite(x):
  return jnp.where(jnp.isfinite(x), x, 0)


def _absorb(b, stats, head, q, row, rows, keys):
  """One step of the online softmax: takes key block b into (o, max, sum) of row block `row`."""
  o, top, total = stats
  start = b * keys.block
  k = _block(keys.k, keys.layer, head, start, keys.block).astype(q.dtype)
  v = _block(keys.v, keys.layer, head, start, keys.block).astype(q.dtype)
  a = _masked(_dot(q, k, (1, 1)), rows, keys, row, b, 0)
  new_top = jnp.maximum(top, a.max(-1))
  e = jnp.exp(a - _finite(new_top)[:, None])
  scale = jnp.exp(top - _finite(new_top))
  o = o * scale[:, None] + _dot(e.astype(v.dtype), v, (1, 0))
  return o, new_top, total * scale + e.sum(-1)


def forward(q, rows: Rows, ranges: tuple[KeyRange, ...]):
  """Partial attention of this device's keys; q [K, R, h] is already scaled.

  Returns o [K, R, h] (not divided by the sum), max [K, R] (-inf where a row sees
  no key) and sum [K, R], all float32 at least.
  """
  heads, count, dim = q.shape
  dtype = at_least_f32(q.dtype)
  blocks = count // rows.block

  def one(t):
    head, row = t // blocks, t % blocks
    qb = _rows_of(q, head, row * rows.block, rows.block)
    stats = (jnp.zeros((rows.block, dim), dtype), jnp.full((rows.block,), -jnp.inf, dtype),
             jnp.zeros((rows.block,), dtype))
    for keys in ranges:
      absorb = functools.partial(_absorb, head=head, q=qb, row=row, rows=rows, keys=keys)
      stats = lax.fori_loop(keys.keys.first[row], keys.keys.last[row], absorb, stats)
    return stats

  o, top, total = lax.map(one, jnp.arange(heads * blocks, dtype=jnp.int32))
  return o.reshape(q.shape), top.reshape(heads, count), total.reshape(heads, count)


def divided(o, top, total):
  """(o, lse) of what `forward` returns on one device: zeros and -inf for a row that sees no key."""
  seen = total > 0
  total = jnp.where(seen, total, 1)
  return o / total[..., None], jnp.where(seen, top + jnp.log(total), -jnp.inf)


def merge(o, top, total, shape):
  """Merges the devices' partial results by log-sum-exp; each keeps its own rows.

  o [K, R, h], top and total [K, R]; shape = (K, B, T, G) unfolds the rows.
  Returns o [K, B, T/devices, G, h] and lse [K, B, T/devices, G]: zeros and -inf
  for a row that sees no key.
  """
  highest = mesh.max_over(top)
  weight = jnp.exp(top - _finite(highest))
  packed = jnp.concatenate([o, total[..., None]], -1) * weight[..., None]
  packed = mesh.scatter_sum(packed.reshape(*shape, -1), 2)
  return divided(packed[..., :-1], mesh.own(highest.reshape(shape), 2), packed[..., -1])


def backward(q, rows: Rows, ranges: tuple[KeyRange, ...], lse, do, delta, cotangents):
  """Cotangents of `forward` then `merge`, given all rows of all devices.

  q, do [K, R, h]; lse [K, R]; delta [K, R] = sum(o * do, h). `cotangents` holds
  (dk, dv) of each range, [L, K, S, h]; this device's contributions are added to
  them in place. Returns this device's share of dq [K, R, h], and the cotangents.
  """
  heads, count, dim = q.shape
  dtype = at_least_f32(q.dtype)
  lse = _finite(lse)

  def against(j, carry, head, k, v, b, keys):
    """Adds block j of the rows against block b of the keys; everything is [keys, rows]."""
    dq, dk, dv = carry
    row = j * rows.block
    qb, dob, lseb, deltab = (_rows_of(x, head, row, rows.block) for x in (q, do, lse, delta))
    p = jnp.exp(_masked(_dot(k, qb, (1, 1)), rows, keys, j, b, 1) - lseb)
    dv = dv + _dot(p.astype(q.dtype), dob, (1, 0))
    da = (p * (_dot(v, dob, (1, 1)) - deltab)).astype(q.dtype)
    dk = dk + _dot(da, qb, (1, 0))
    at = index(head, 0, row)
    dqb = lax.dynamic_slice(dq, at, (1, dim, rows.block)) + _dot(k.T, da, (1, 0))
    return lax.dynamic_update_slice(dq, dqb, at), dk, dv

  def key_block(t, carry, keys, first, span):
    dq, dk_all, dv_all = carry
    head, b = t // span, first + t % span
    start = b * keys.block
    k = _block(keys.k, keys.layer, head, start, keys.block).astype(q.dtype)
    v = _block(keys.v, keys.layer, head, start, keys.block).astype(q.dtype)
    zero = jnp.zeros((keys.block, dim), dtype)
    step = functools.partial(against, head=head, k=k, v=v, b=b, keys=keys)
    dq, dk, dv = lax.fori_loop(keys.rows.first[b], keys.rows.last[b], step, (dq, zero, zero))
    return (dq, _add_block(dk_all, dk, keys.into, head, start),
            _add_block(dv_all, dv, keys.into, head, start))

  # dq is transposed, so that no product contracts its operands' first axes: on CPUs those run at half the rate.
  dq, out = jnp.zeros((heads, dim, count), dtype), []
  for keys, (dk, dv) in zip(ranges, cotangents):
    seen = _spans((keys.rows.last > 0)[None])  # of key blocks, by any row
    span = seen.last[0] - seen.first[0]
    step = functools.partial(key_block, keys=keys, first=seen.first[0], span=span)
    dq, dk, dv = lax.fori_loop(jnp.int32(0), span * heads, step, (dq, dk, dv))
    out.append((dk, dv))
  return dq.swapaxes(1, 2), tuple(out)
