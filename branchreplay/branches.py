"""How a micro-batch of branches lies in segments.

A row each, where layers carry a recurrent state along the row; otherwise one behind
another in a single row (packed), so that no segment is spent on what is behind the
end of a short branch: attention knows a token by its position and branch alone.

Letters: G branches of the group, B of the micro-batch, R branch capacity, T positions
of a segment in a row over all devices, t = T/devices.
"""
from typing import Any

from flax import struct
from jax import lax
import jax.numpy as jnp

from branchreplay import mesh
from branchreplay.config import ModelConfig, ReplayConfig
from branchreplay.segment import Segment


@struct.dataclass
class MicroBatch:
  inputs: Any  # i32 [B, R]
  targets: Any  # i32 [B, R]
  length: Any  # i32 [B]
  row: Any  # i32 [], of the first branch in matrices [G, R]
  start: Any  # i32 [], position of a branch's first token
  rows: int = struct.field(pytree_node=False)  # of a segment: B, or 1 where branches are packed


def micro_batch(model: ModelConfig, replay: ReplayConfig, group, row, batch: int) -> MicroBatch:
  """Branches row..row+batch-1 of a group, packed where nothing runs along a row: no recurrent state, no block that a segment would cut."""
  packed = model.deltanet_per_repeat == 0 and replay.block_len == 1
  take = lambda x: lax.dynamic_slice_in_dim(x, row, batch, 0)
  return MicroBatch(take(group.inputs), take(group.targets), take(group.length), row, group.prefix_length,
                    1 if packed else batch)


def _row_tokens(replay: ReplayConfig, part: MicroBatch):
  """Tokens in each row, i32 [rows], and T."""
  batch = part.length.size
  tokens = part.length if part.rows == batch else part.length.sum(keepdims=True, dtype=jnp.int32)
  return tokens, replay.branch_segment_len * batch // part.rows


def segment_count(replay: ReplayConfig, part: MicroBatch):
  """Segments that hold all tokens, i32 []."""
  tokens, size = _row_tokens(replay, part)
  return (tokens.max() + size - 1) // size


def _places(replay: ReplayConfig, part: MicroBatch, j):
  """Branch and column in [B, R] of all devices' tokens of segment j, i32 [rows, T]; column R: none."""
  tokens, size = _row_tokens(replay, part)
  at = (j * size + jnp.arange(size, dtype=jnp.int32))[None]
  if part.rows == part.length.size:
    branch, column = jnp.broadcast_to(jnp.arange(part.rows, dtype=jnp.int32)[:, None], (part.rows, size)), at
  else:
    ends = jnp.cumsum(part.length, dtype=jnp.int32)
    branch = jnp.minimum(jnp.searchsorted(ends, at, side='right').astype(jnp.int32), part.length.size - 1)
    column = at - (ends - part.length)[branch]
  return branch, jnp.where(at < tokens[:, None], column, part.inputs.shape[1])


def segment(replay: ReplayConfig, part: MicroBatch, j) -> Segment:
  """Segment j: this device's tokens."""
  tokens, size = _row_tokens(replay, part)
  branch, column = _places(replay, part, j)
  packed = None if part.rows == part.length.size else (part.start + column, branch)
  return Segment(own_columns(replay, part, part.inputs, j), jnp.clip(tokens - j * size, 0, size),
                 jnp.int32(part.start + j * size), replay.block_len, packed=packed)


def own_columns(replay: ReplayConfig, part: MicroBatch, matrix, j):
  """What a matrix [B, R] holds of this device's tokens of segment j, [rows, t]; 0 at padding."""
  branch, column = (mesh.own(x, 1) for x in _places(replay, part, j))
  return matrix.at[branch, column].get(mode='fill', fill_value=0)


def of_micro_batch(part: MicroBatch, matrix):
  """Its branches' rows of a matrix [G, R]."""
  return lax.dynamic_slice_in_dim(matrix, part.row, part.length.size)


def put_columns(replay: ReplayConfig, part: MicroBatch, matrix, own, j):
  """Writes all devices' `own` [rows, t] of segment j into a matrix [G, R]."""
  branch, column = _places(replay, part, j)
  return matrix.at[part.row + branch, column].set(mesh.gather(own, 1).astype(matrix.dtype), mode='drop')
