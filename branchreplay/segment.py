"""A segment's tokens, and what its attention layers see: the rows of all devices against the keys that lie on this one.

Letters: B branches, T positions of the segment over all devices, t = T/devices, S slots, D width,
K kv heads, G queries a kv head, H = K*G, h head_dim, R = B*T*G rows.
"""
from typing import Any

from flax import struct
from jax import lax
import jax.numpy as jnp

from branchreplay import attention, kernels, mesh, rope
from branchreplay.config import ModelConfig, ReplayConfig
from branchreplay.state import FAR, Slots

OWN_BLOCK = 64  # the least of own_block


@struct.dataclass
class Segment:
  tokens: Any  # i32 [B, t], this device's inputs
  length: Any  # i32 [B], valid positions of the whole segment; padding stands behind
  start: Any  # i32 [], position of the first
  block: int = struct.field(pytree_node=False, default=1)  # positions that see each other in attention; 1: causal
  wide: bool = struct.field(pytree_node=False, default=True)  # DeltaNet layers exchange float32 at least; a prefix's many tokens do not
  packed: Any = None  # (position, branch) i32 [1, T] of all devices' tokens where branches lie one behind another in a row


@struct.dataclass
class View:
  """What a segment's attention layers share: where its rows and its keys are."""
  segment: Segment
  tables: Any  # of rope.tables_of, for this device's positions
  position: Any  # i32 [t], positions of this device's rows
  rows: Any  # i32 [R], position of every row of all devices, R = B*T*G
  sight: Any  # i32 [R], the last position each sees; -1 of padding
  branch: Any  # i32 [R]
  cache: Slots  # slots of the prefix; unused ones at FAR
  own: Slots | None  # the node's slots, the segment's included; its k and v are not used. None: they are in the cache
  at: Any  # i32 [], the segment's first slot in `own`, or in the cache
  several: bool = struct.field(pytree_node=False)  # whether own slots are of several branches


def view_of(model: ModelConfig, cache: Slots, own: Slots | None, segment: Segment) -> View:
  """The View of `segment` on `cache`. own: the node's slots before the segment; None where the segment's are the last used ones of the cache."""
  batch, t = segment.tokens.shape
  group, steps = model.heads // model.kv_heads, t * mesh.seq_size()
  offset = jnp.arange(steps, dtype=jnp.int32)[None]
  position, branch = segment.packed or (segment.start + offset, jnp.arange(batch, dtype=jnp.int32)[:, None])
  valid = offset < segment.length[:, None]
  sees = position if segment.block == 1 else segment.start + (offset // segment.block + 1) * segment.block - 1
  whole = lambda x: jnp.broadcast_to(x, (batch, steps))
  at = cache.used - batch * t if own is None else own.used
  if own is not None:
    put = lambda x, y: lax.dynamic_update_slice_in_dim(x, mesh.own(whole(y), 1).reshape(-1), at, 0)
    own = own.replace(position=put(own.position, jnp.where(valid, position, FAR)), branch=put(own.branch, branch),
                      used=at + batch * t)
  filled = jnp.arange(cache.position.size) < cache.used
  of_rows = lambda x: jnp.repeat(whole(x).reshape(-1), group)
  mine = mesh.own(position, 1)[0]
  tables = rope.tables_of(model, mine, attention.at_least_f32(cache.k.dtype))
  return View(segment, tables, mine, of_rows(position), of_rows(jnp.where(valid, sees, -1)), of_rows(branch),
              cache.replace(position=jnp.where(filled, cache.position, FAR)), own, at,
              batch > 1 or segment.packed is not None)


def own_block(replay: ReplayConfig, view: View) -> int:
  """Keys in a block of a node's own, at most: few, so that few blocks hold two branches."""
  limit = replay.key_block // 2 if view.segment.packed else view.position.size  # a segment's slots
  return min(replay.key_block, max(limit, OWN_BLOCK))


def attention_problem(model, replay, view: View, k, v, layer, kind, chunk):
  """The rows of a layer of `kind`, and the keys they see: the cache, and own keys k, v [K, S, h] if there; `chunk` of a kernel's keys."""
  rows = attention.Rows(view.rows, view.sight, view.branch, model.window if kind == 'window' else None,
                        attention.largest_divisor(view.rows.size, replay.row_block))
  cache, own = view.cache, view.own

  def keys(k, v, position, branch, layer, limit, into):
    if replay.attention != 'blocks' and branch is None:
      return kernels.key_range(rows, k, v, position, layer, chunk, into)
    return attention.key_range(rows, k, v, position, branch, layer, attention.largest_divisor(position.size, limit), into)

  ranges = [keys(cache.k, cache.v, cache.position, None, layer, replay.key_block, jnp.int32(0) if replay.offload else layer)]
  if own is not None:
    ranges.append(keys(k[None], v[None], own.position, own.branch if view.several else None, jnp.int32(0),
                       own_block(replay, view), jnp.int32(0)))
  return rows, tuple(ranges)


def fold_rows(model, x):
  """[B, t, H, ...] -> [K, B*T*G, ...]: rows of all devices, by kv head."""
  batch, t, heads = x.shape[:3]
  x = x.reshape(batch, t, model.kv_heads, heads // model.kv_heads, *x.shape[3:])
  x = mesh.gather(jnp.moveaxis(x, 2, 0), 2)
  return x.reshape(model.kv_heads, -1, *x.shape[4:])


def unfold_rows(model, x):
  """[K, B, t, G, ...] -> [B, t, H, ...]."""
  x = jnp.moveaxis(x, 0, 2)
  return x.reshape(*x.shape[:2], model.heads, *x.shape[4:])


def row_shape(model, segment):
  """(K, B, T, G), which unfolds R."""
  batch, t = segment.tokens.shape
  return model.kv_heads, batch, t * mesh.seq_size(), model.heads // model.kv_heads


def head_major(x, dtype):
  """[B, t, K, h] -> [K, B*t, h]."""
  return jnp.moveaxis(x, 2, 0).reshape(x.shape[2], -1, x.shape[3]).astype(dtype)
