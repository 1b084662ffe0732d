"""Capture of a prefix and its pullback: loops of extend and retract.

`scan_prefix` has a custom VJP, so `state, pullback = jax.vjp(scan_prefix, ...)`
is all there is to it: forward keeps the state and the recurrent state before
each segment, and of the activations what ReplayConfig.keep says (nothing unless
asked); backward replays the segments in reverse order.
Trip counts are traced: one compilation serves every length up to the capacity.
"""
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from branchreplay import mesh
from branchreplay import state as states
from branchreplay.attention import at_least_f32
from branchreplay.config import ALL_SEGMENTS, KEEPS, ModelConfig, ReplayConfig
from branchreplay.lora import trainable
from branchreplay.model import Params, product_channels
from branchreplay.replay import extend, retract
from branchreplay.segment import Segment
from branchreplay.state import Recurrent, State, StateCotangent


@struct.dataclass
class Captured:
  """A captured prefix: its state, and what the pullback needs besides."""
  state: State
  history: Recurrent  # leaves [n, M, 1, ...], the recurrent state before each segment
  kept: Any = None  # of each segment's forward, leaves [n, repeats, 1, t, ...]; see ReplayConfig.keep


CAPTURED_SPEC = Captured(states.STATE_SPEC, Recurrent(P(None, None, None, mesh.SEQ), P(None, None, None, None, mesh.SEQ)),
                         P(None, None, None, mesh.SEQ))
# Captures of N prefixes, stacked in front.
STACKED_CAPTURED = jax.tree.map(lambda s: P(mesh.DATA, *s), CAPTURED_SPEC,
                                is_leaf=lambda s: isinstance(s, P))


def kept_of_position(model: ModelConfig, dtype) -> dict[str, int]:
  """Bytes that each of config.KEEPS holds of a position, and `products`, as branches' may be, too."""
  item, lse = jnp.dtype(dtype).itemsize, jnp.dtype(at_least_f32(dtype)).itemsize
  attended = model.repeats * model.attention_per_repeat * model.heads * (model.head_dim * item + lse)
  inputs = attended + model.layers * model.width * item
  return {'state': 0, 'attention': attended, 'layers': inputs, 'products': inputs + product_channels(model) * item}


def kept_bytes(model: ModelConfig, replay: ReplayConfig, seq: int, dtype) -> dict[str, int]:
  """Bytes a device that each of config.KEEPS holds beside the state of a prefix as long as the capacity."""
  positions = replay.prefix_segments * replay.segment_len // seq
  return {keep: positions * kept_of_position(model, dtype)[keep] for keep in KEEPS}


def segment_count(prefix, length):
  return (length + prefix.shape[1] * mesh.seq_size() - 1) // (prefix.shape[1] * mesh.seq_size())


def _segment(prefix, length, i) -> Segment:
  size = prefix.shape[1] * mesh.seq_size()
  tokens = lax.dynamic_index_in_dim(prefix, i, 0, True)
  return Segment(tokens, jnp.clip(length - i * size, 0, size)[None], jnp.int32(i * size), wide=False)


def _node(model, count, recurrent, dtype) -> State:
  return State(states.empty_slots(model, count, dtype), recurrent)


def _run_segment(model, replay, params, split, prefix, length, i, slots, recurrent):
  """Segment i forward: the node after it, and what the configuration keeps of it (None for nothing)."""
  segment, node = _segment(prefix, length, i), _node(model, prefix.shape[1], recurrent, params.embed.dtype)
  node, _, kept = extend(model, replay, params, split, slots, node, segment, '' if replay.kept == 'state' else 'layers', outputs=False)
  if replay.kept == 'attention':
    kept = [place.attention for place in kept]
  return node, kept


def empty_captured(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, prefix) -> Captured:
  """The capture of `prefix` i32 [n, t] before its first segment."""
  n, count, dtype = *prefix.shape, params.embed.dtype
  slots = states.empty_slots(model, states.slot_count(replay, prefix.size), dtype)
  recurrent = states.empty_recurrent(model, dtype)
  delta, conv = recurrent.delta, recurrent.conv
  history = Recurrent(mesh.zeros((n, *delta.shape), replay.history_dtype or delta.dtype, replay.offload),
                      mesh.zeros((n, *conv.shape), conv.dtype, replay.offload))
  run = lambda slots, recurrent: _run_segment(model, replay, params, split, prefix, jnp.int32(count), jnp.int32(0), slots, recurrent)
  kept = jax.eval_shape(run, slots, recurrent)[1] if replay.kept != 'state' else None
  return Captured(State(slots, recurrent), history, jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), kept))


def capture_segments(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, prefix, length,
                     captured: Captured, first, last) -> Captured:
  """Runs segments first..last-1 forward on the capture of those before them."""
  def step(i, captured):
    put = lambda h, x: lax.dynamic_update_index_in_dim(h, x, i, 0)
    slots, recurrent = captured.state.slots, captured.state.recurrent
    before = jax.tree.map(lambda h, x: x.astype(h.dtype), captured.history, recurrent)
    history = jax.tree.map(put, captured.history, mesh.to_host(before) if replay.offload else before)
    node, new = _run_segment(model, replay, params, split, prefix, length, i, slots, recurrent)
    return Captured(State(states.append(slots, node.slots), node.recurrent), history,
                    jax.tree.map(put, captured.kept, new))

  return lax.fori_loop(jnp.int32(first), jnp.int32(last), step, captured)


def capture(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, prefix,
            length) -> Captured:
  """Runs the prefix forward. prefix i32 [n, t] (this device's slice), length i32 [].

  With replay.keep it holds on to what the pull would compute again, see config.KEEPS.
  """
  return capture_segments(model, replay, params, split, prefix, length,
                          empty_captured(model, replay, params, split, prefix), 0, segment_count(prefix, length))


def advance(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, state: State, tokens, length,
            start) -> State:
  """The state after `length` more tokens, i32 [m, t] (this device's slice), the first at position `start`.

  Whole segments of slots are filled: the state has to have room for them.
  """
  def step(i, state):
    node = _node(model, tokens.shape[1], state.recurrent, state.slots.k.dtype)
    segment = _segment(tokens, length, i)
    node, _, _ = extend(model, replay, params, split, state.slots, node, segment.replace(start=start + segment.start),
                        outputs=False)
    return State(states.append(state.slots, node.slots), node.recurrent)

  return lax.fori_loop(jnp.int32(0), segment_count(tokens, length), step, state)


def pull_segments(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, prefix, length,
                  captured: Captured, cotangent: StateCotangent, grads: Params, first,
                  last) -> tuple[StateCotangent, Params]:
  """Pulls the cotangent of the state back through segments first..last-1, counted from the prefix's end.

  Returns the cotangent of the state before them and the gradients with theirs added.
  """
  dtype, count = params.embed.dtype, prefix.shape[1]
  n = segment_count(prefix, length)

  def step(j, carry):
    dk, dv, drecurrent, grads = carry
    i = n - 1 - j
    before, kept = jax.tree.map(lambda h: lax.dynamic_index_in_dim(h, i, 0, False), (captured.history, captured.kept))
    before = mesh.to_device(before) if replay.offload else before
    before = before.replace(conv=mesh.laid_out(before.conv, 2, 1, 0, 3))  # the history's own order, which pads no axis of W-1
    before = jax.tree.map(lambda x, like: x.astype(like.dtype), before, captured.state.recurrent)
    segment, at = _segment(prefix, length, i), i * count
    until = lambda used: captured.state.slots.replace(used=jnp.int32(used))
    if replay.kept != 'layers':
      _, _, kept = extend(model, replay, params, split, until(at), _node(model, count, before, dtype), segment, 'layers', kept,
                          outputs=False)
    dk, dv, dnode, grads = retract(model, replay, params, split, until(at + count), None, before, segment, kept, None, dk, dv,
                                   StateCotangent(None, None, drecurrent), grads)
    return dk, dv, dnode.recurrent, grads

  dk, dv, drecurrent, grads = lax.fori_loop(jnp.int32(first), jnp.int32(last), step,
                                            (cotangent.k, cotangent.v, cotangent.recurrent, grads))
  return StateCotangent(dk, dv, drecurrent), grads


def pull(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, prefix, length,
         captured: Captured, cotangent: StateCotangent, grads: Params, depth=ALL_SEGMENTS) -> Params:
  """Pulls the state's cotangent back through the last `depth` segments, once.

  Adds to `grads` (each device's share where a leaf is whole) and returns them.
  """
  last = jnp.minimum(segment_count(prefix, length), depth)
  return pull_segments(model, replay, params, split, prefix, length, captured, cotangent, grads, 0, last)[1]


def zero_gradients(model: ModelConfig, replay: ReplayConfig, params: Params) -> Params:
  """Zeros like `params` in the dtype that gradients are summed in; None where a leaf is frozen."""
  return jax.tree.map(
      lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, replay.accumulate_dtype)),
      trainable(model, params))


def scan_prefix(model: ModelConfig, replay: ReplayConfig, split: Params, prefix, length,
                params: Params) -> State:
  """The state after a prefix, differentiable in `params` with memory flat in activations.

      state, pullback = jax.vjp(functools.partial(scan_prefix, model, replay, split, prefix, length), params)
      grads, = pullback(dstate)

  Runs inside `shard_map`. The gradient of a leaf that is not split is this
  device's share: sum it with `mesh.reduce_gradients`.
  """
  @jax.custom_vjp
  def run(params):
    return capture(model, replay, params, split, prefix, length).state

  def forward(params):
    captured = capture(model, replay, params, split, prefix, length)
    return captured.state, (params, captured)

  def backward(saved, dstate):
    params, captured = saved
    cotangent = StateCotangent(dstate.slots.k, dstate.slots.v, dstate.recurrent)
    grads = pull(model, replay, params, split, prefix, length, captured, cotangent,
                 zero_gradients(model, replay, params))
    return (jax.tree.map(lambda p, g: jnp.zeros_like(p) if g is None else g.astype(p.dtype), params, grads),)

  run.defvjp(forward, backward)
  return run(params)
