"""The state: all that later tokens need of earlier ones, and its cotangent.

Letters: L attention layers, M recurrent layers, K kv heads, S key slots of this
device, h head_dim, B branches, W convolution taps. Every device holds the keys
and values of its slice of each segment; recurrent heads are split over devices.
Slots are filled in order; a slot that holds nothing (padding, or not yet used)
stands at position FAR, later than any query.
"""
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from jax.sharding import PartitionSpec as P

from branchreplay import mesh
from branchreplay.attention import at_least_f32
from branchreplay.config import ModelConfig, ReplayConfig
from branchreplay.delta_layer import delta_heads

FAR = 2**30


@struct.dataclass
class Slots:
  """Keys and values with the position and branch of each slot."""
  k: Any  # [L, K, S, h]
  v: Any  # [L, K, S, h]
  position: Any  # i32 [S]
  branch: Any  # i32 [S]
  used: Any  # i32 [], slots filled on each device


@struct.dataclass
class Recurrent:
  """State of the gated DeltaNet layers; also the type of its cotangent."""
  delta: Any  # [M, B, heads, k, v]
  conv: Any  # [M, B, W-1, channels]


@struct.dataclass
class State:
  slots: Slots
  recurrent: Recurrent


@struct.dataclass
class StateCotangent:
  k: Any  # [L, K, S, h]
  v: Any  # [L, K, S, h]
  recurrent: Recurrent


# How a state lies over devices outside `shard_map`, S, heads and channels of all devices.
SLOTS_SPEC = Slots(P(None, None, mesh.SEQ), P(None, None, mesh.SEQ), P(mesh.SEQ), P(mesh.SEQ), P())
RECURRENT_SPEC = Recurrent(P(None, None, mesh.SEQ), P(None, None, None, mesh.SEQ))
STATE_SPEC = State(SLOTS_SPEC, RECURRENT_SPEC)


def slot_count(replay: ReplayConfig, positions: int) -> int:
  """Slots for `positions` positions a device: whole key blocks."""
  block = min(replay.key_block, max(positions, 1))
  return -(-max(positions, 1) // block) * block


def empty_slots(model: ModelConfig, count: int, dtype) -> Slots:
  shape = (model.repeats * model.attention_per_repeat, model.kv_heads, count, model.head_dim)
  far = jnp.full((count,), FAR, jnp.int32)
  return Slots(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), far, jnp.zeros_like(far), jnp.int32(0))


def empty_recurrent(model: ModelConfig, dtype) -> Recurrent:
  """The recurrent state before the first token, B=1."""
  key, value = delta_heads(model, mesh.seq_size())
  layers = model.repeats * model.deltanet_per_repeat
  channels = key.shape[1] * 2 * model.delta_key_dim + value.shape[1] * model.delta_value_dim
  return Recurrent(
      jnp.zeros((layers, 1, value.shape[1], model.delta_key_dim, model.delta_value_dim), at_least_f32(dtype)),
      jnp.zeros((layers, 1, model.conv_width - 1, channels), dtype))


def append(slots: Slots, node: Slots) -> Slots:
  """Writes all slots of a one-segment node behind the used ones, in place."""
  put = lambda x, y, axis: lax.dynamic_update_slice_in_dim(x, y, slots.used, axis)
  return Slots(put(slots.k, node.k, 2), put(slots.v, node.v, 2), put(slots.position, node.position, 0),
               put(slots.branch, node.branch, 0), slots.used + node.position.size)


def zero_cotangent(state: State, dtype, slots_dtype='', offload: bool = False) -> StateCotangent:
  """Zeros like `state`; sums of cotangents are kept in `dtype` at least, those of slots in `slots_dtype` if given.

  offload: those of slots lie in the host's memory.
  """
  zeros = lambda x: jnp.zeros(x.shape, jnp.promote_types(dtype, x.dtype))
  slots = lambda x: mesh.zeros(x.shape, slots_dtype or jnp.promote_types(dtype, x.dtype), offload)
  return StateCotangent(slots(state.slots.k), slots(state.slots.v), jax.tree.map(zeros, state.recurrent))
