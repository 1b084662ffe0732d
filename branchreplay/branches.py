"""How a micro-batch of branches lies in segments.

A row each, where layers carry a recurrent state along the row; otherwise one behind
another in a single row (packed), so that no segment is spent on what is behind the
end of a short branch: attention knows a token by its position and branch alone.
Packed branches are as many as fit the fewest segments that hold the longest one: where
that is one segment, no branch is cut and nothing is carried from segment to segment.

Letters: G branches of the group, B of the micro-batch (G where packed, others empty), R branch
capacity, T positions of a segment in a row over all devices, t = T/devices.
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
  width: int = struct.field(pytree_node=False)  # T
  segments: int = struct.field(pytree_node=False)  # at most


def are_packed(model: ModelConfig, replay: ReplayConfig) -> bool:
  """Whether branches lie in one row: where nothing runs along it, no recurrent state, no block that a segment would cut."""
  return model.deltanet_per_repeat == 0 and replay.block_len == 1


def most_segments(model: ModelConfig, replay: ReplayConfig) -> int:
  """Segments of a micro-batch, at most."""
  return -(-replay.branch_segments // replay.replay_batch) if are_packed(model, replay) else replay.branch_segments


def micro_batches(model: ModelConfig, replay: ReplayConfig, length):
  """How many micro-batches branches of `length` i32 [G] are, and where packed the one of each, i32 [G]: in order, each as full as it gets."""
  if not are_packed(model, replay):
    return -(-length.size // replay.replay_batch), None
  room = most_segments(model, replay) * replay.replay_batch * replay.branch_segment_len
  if length.size * replay.branch_segments * replay.branch_segment_len <= room:  # all fit, however long they are
    return 1, jnp.zeros_like(length)

  def place(carry, tokens):
    used, i = carry
    fits = used + tokens <= room
    used, i = jnp.where(fits, used + tokens, tokens), i + (1 - fits.astype(jnp.int32))
    return (used, i), i

  (_, last), index = lax.scan(place, (jnp.int32(0), jnp.int32(0)), length)
  return last + 1, index


def micro_batch(model: ModelConfig, replay: ReplayConfig, group, index, i) -> MicroBatch:
  """Micro-batch i: branches whose `index` it is, or where that is None the i-th replay_batch of them, to which the group is padded."""
  batch, width, segments = replay.replay_batch, replay.branch_segment_len, most_segments(model, replay)
  if are_packed(model, replay):
    return MicroBatch(group.inputs, group.targets, jnp.where(index == i, group.length, 0), jnp.int32(0), group.prefix_length,
                      1, width * batch, segments)
  take = lambda x: lax.dynamic_slice_in_dim(x, i * batch, batch, 0)
  return MicroBatch(take(group.inputs), take(group.targets), take(group.length), i * batch, group.prefix_length,
                    batch, width, segments)


def _tokens(part: MicroBatch):
  """Tokens in each row, i32 [rows]."""
  return part.length if part.rows == part.length.size else part.length.sum(keepdims=True, dtype=jnp.int32)


def segment_count(part: MicroBatch):
  """Segments that hold all tokens, i32 []; 1 where there are never more."""
  return 1 if part.segments == 1 else (_tokens(part).max() + part.width - 1) // part.width


def _places(part: MicroBatch, j):
  """Branch and column in [B, R] of all devices' tokens of segment j, i32 [rows, T]; column R: none."""
  at = (j * part.width + jnp.arange(part.width, dtype=jnp.int32))[None]
  if part.rows == part.length.size:
    branch, column = jnp.broadcast_to(jnp.arange(part.rows, dtype=jnp.int32)[:, None], (part.rows, part.width)), at
  else:
    ends = jnp.cumsum(part.length, dtype=jnp.int32)
    branch = jnp.minimum(jnp.searchsorted(ends, at, side='right').astype(jnp.int32), part.length.size - 1)
    column = at - (ends - part.length)[branch]
  return branch, jnp.where(at < _tokens(part)[:, None], column, part.inputs.shape[1])


def segment(replay: ReplayConfig, part: MicroBatch, j) -> Segment:
  """Segment j: this device's tokens."""
  branch, column = _places(part, j)
  packed = None if part.rows == part.length.size else (part.start + column, branch)
  return Segment(own_columns(part, part.inputs, j), jnp.clip(_tokens(part) - j * part.width, 0, part.width),
                 jnp.int32(part.start + j * part.width), replay.block_len, packed=packed)


def own_columns(part: MicroBatch, matrix, j):
  """What a matrix [B, R] holds of this device's tokens of segment j, [rows, t]; 0 at padding."""
  branch, column = (mesh.own(x, 1) for x in _places(part, j))
  return matrix.at[branch, column].get(mode='fill', fill_value=0)


def of_micro_batch(part: MicroBatch, matrix):
  """Its branches' rows of a matrix [G, R]."""
  return lax.dynamic_slice_in_dim(matrix, part.row, part.length.size)


def put_columns(part: MicroBatch, matrix, own, j):
  """Writes all devices' `own` [rows, t] of segment j into a matrix [G, R]."""
  branch, column = _places(part, j)
  return matrix.at[part.row + branch, column].set(mesh.gather(own, 1).astype(matrix.dtype), mode='drop')
