"""The gradient of a group: capture, (score,) objective, replay, pull.

`group_gradient` equals plain autodiff on every full sequence
(`full_sequence.full_sequence_gradient`, same signature), and pays the prefix's
forward and backward once. Both run inside `shard_map`; `gradient_function` makes
a jitted function of a batch of groups from either.

Letters: N groups, G branches, R branch capacity.
"""
import dataclasses
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from branchreplay import branches, head, mesh
from branchreplay import model as layers
from branchreplay import state as states
from branchreplay.attention import at_least_f32
from branchreplay.batch import Scores, group_spec
from branchreplay.branches import MicroBatch
from branchreplay.full_sequence import full_sequence_gradient
from branchreplay.model import Params
from branchreplay.objectives import Objective
from branchreplay.prefix import STACKED_CAPTURED, Captured, capture, pull, zero_gradients
from branchreplay.replay import extend, retract
from branchreplay.state import Recurrent, Slots, State, StateCotangent


@struct.dataclass
class Result:
  """Of a batch of N groups; the gradient is that of the mean of the groups' losses."""
  loss: Any  # [N]
  metrics: Any  # dict of [N]
  scores: Scores  # [N, G, R]
  grads: Params


def _padded(x, rows):
  return jnp.pad(x, [(0, rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _open_node(model, replay, captured: Captured, part: MicroBatch) -> State:
  """A node of a micro-batch that starts at the captured state."""
  slots = part.rows * part.segments * part.width // mesh.seq_size()
  slots = states.empty_slots(model, states.slot_count(replay, slots), captured.state.slots.k.dtype)
  spread = lambda x: jnp.broadcast_to(x, (x.shape[0], part.rows, *x.shape[2:]))
  return State(slots, jax.tree.map(spread, captured.state.recurrent))


def score_branches(model, replay, params: Params, split: Params, group, captured: Captured) -> Scores:
  """Forward of every branch on the captured state; scores [G, R], no graph."""
  replay, group = _grid(model, replay, group)
  count, index = branches.micro_batches(model, replay, group.length)
  cache = captured.state.slots

  def micro(i, scores):
    part = branches.micro_batch(model, replay, group, index, i)

    def step(j, carry):
      node, scores = carry
      node, h, _ = extend(model, replay, params, split, cache, node, branches.segment(replay, part, j))
      own = head.scores(model, replay, params, split, h, branches.own_columns(part, part.targets, j))
      return node, jax.tree.map(lambda m, x: branches.put_columns(part, m, x, j), scores, own)

    n = branches.segment_count(part)
    return lax.fori_loop(jnp.int32(0), n, step, (_open_node(model, replay, captured, part), scores))[1]

  return lax.fori_loop(0, count, micro, _zero_scores(group, params))


def _zero_scores(group, params):
  zeros = jnp.zeros(group.inputs.shape, at_least_f32(params.embed.dtype))
  return Scores(zeros, zeros, None if params.value is None else zeros)


def _grid(model, replay, group):
  """No more branches at once than there are, and the group's tokens padded to whole micro-batches of a row each."""
  count = group.inputs.shape[0]
  replay = dataclasses.replace(replay, replay_batch=min(replay.replay_batch, count))
  rows = count if branches.are_packed(model, replay) else -(-count // replay.replay_batch) * replay.replay_batch
  return replay, group.replace(
      **{name: _padded(getattr(group, name), rows) for name in ('inputs', 'targets', 'length')})


def kept_of_branches(keep: str) -> str:
  """What is kept of a micro-batch's forward, whose tokens are few: matrix products too where each layer's input is kept of the prefix."""
  return 'products' if keep == 'layers' else 'layers'


@struct.dataclass
class Forward:
  """A micro-batch run forward on the captured state, but for its last segment."""
  slots: Slots  # of the segments run
  before: Recurrent  # [segments, ...], the state before each
  made: Any  # (h, kept) [segments - 1, ...] of each, for `retract`; None: to be made again


def _run_forward(model, replay, params, split, part: MicroBatch, captured: Captured) -> Forward:
  """Runs all segments but the last, which is run where it is pulled back; with keep=layers none is run again."""
  cache, node = captured.state.slots, _open_node(model, replay, captured, part)
  n, more = branches.segment_count(part), part.segments - 1
  keep = 'products' if replay.keep == 'layers' and more else ''
  put = lambda total, x, j: jax.tree.map(lambda t, x: lax.dynamic_update_index_in_dim(t, x, j, 0), total, x)
  run = lambda j, node: extend(model, replay, params, split, cache, node, branches.segment(replay, part, j), keep, outputs=bool(keep))
  room = lambda tree, count: jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), tree)
  made = room(jax.eval_shape(run, jnp.int32(0), node)[1:], more) if keep else None

  def step(j, carry):
    node, before, made = carry
    before = put(before, node.recurrent, j)
    node, *new = run(j, node)
    return node, before, put(made, tuple(new), j) if keep else None

  carry = node, room(node.recurrent, more + 1), made
  node, before, made = lax.fori_loop(jnp.int32(0), n - 1, step, carry) if more else carry
  return Forward(node.slots, put(before, node.recurrent, n - 1), made)


def replay_branches(model, replay, params: Params, split: Params, group, captured: Captured, dscores_of,
                    cotangent: StateCotangent, grads: Params):
  """Replays every branch, a micro-batch at a time, and sums what they send into the state.

  dscores_of(scores) -> Scores [G, R]: the objective's cotangents, given matrices
  that are right for the segment at hand (and zero where not yet replayed).
  Returns scores [G, R], the cotangent of the captured state, and grads.
  """
  replay, group = _grid(model, replay, group)
  count, index = branches.micro_batches(model, replay, group.length)
  cache = captured.state.slots

  def micro(i, carry):
    scores, dk, dv, drecurrent, grads = carry
    part = branches.micro_batch(model, replay, group, index, i)
    done, n = _run_forward(model, replay, params, split, part, captured), branches.segment_count(part)
    take = lambda tree, j: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, 0, False), tree)
    own = lambda matrix, j: branches.own_columns(part, matrix, j)

    def backward(step, carry):
      scores, slots, dnode, dk, dv, grads = carry
      j = n - 1 - step
      segment, before = branches.segment(replay, part, j), take(done.before, j)
      at = lambda j: State(slots.replace(used=jnp.int32(j * segment.tokens.size)), before)
      run = lambda: extend(model, replay, params, split, cache, at(j), segment, kept_of_branches(replay.keep))
      node, h, kept = run() if done.made is None else lax.cond(j == n - 1, run, lambda: (at(j + 1), *take(done.made, j)))
      targets = own(part.targets, j)
      new = head.scores(model, replay, params, split, h, targets)
      scores = jax.tree.map(lambda m, x: branches.put_columns(part, m, x, j), scores, new)
      slopes = jax.tree.map(lambda d: own(branches.of_micro_batch(part, d), j), dscores_of(scores))
      dh, grads = head.scores_backward(model, replay, params, split, h, targets, slopes, grads)
      dk, dv, dnode, grads = retract(model, replay, params, split, cache, node.slots, before, segment, kept,
                                     dh, dk, dv, dnode, grads)
      return scores, node.slots, dnode, dk, dv, grads

    dnode = states.zero_cotangent(State(done.slots, take(done.before, 0)), replay.accumulate_dtype)
    carry = scores, done.slots, dnode, dk, dv, grads
    scores, _, dnode, dk, dv, grads = backward(0, carry) if part.segments == 1 else lax.fori_loop(jnp.int32(0), n, backward, carry)
    add = lambda total, x: total + x.sum(1, keepdims=True).astype(total.dtype)
    return scores, dk, dv, jax.tree.map(add, drecurrent, dnode.recurrent), grads

  start = (_zero_scores(group, params), cotangent.k, cotangent.v, cotangent.recurrent, grads)
  scores, dk, dv, drecurrent, grads = lax.fori_loop(0, count, micro, start)
  return scores, StateCotangent(dk, dv, drecurrent), grads


def replay_group(model, replay, objective: Objective, params: Params, split: Params, group, captured: Captured,
                 cotangent: StateCotangent, grads: Params, weight=1.0):
  """All of `group_gradient` between capture and pull; `cotangent` of the captured state and `grads` are added to.

  Returns loss, metrics, scores [G, R], the cotangent of the captured state, and grads.
  """
  count = group.inputs.shape[0]
  slope = jax.grad(lambda s: objective.loss(s, group)[0] * weight)
  unpad = lambda scores: jax.tree.map(lambda s: s[:count], scores)
  cotangents = lambda scores: jax.tree.map(lambda d, s: _padded(d, s.shape[0]), slope(unpad(scores)), scores)
  if not objective.separable:
    scores = score_branches(model, replay, params, split, group, captured)
    fixed = cotangents(scores)
    cotangents = lambda _: fixed
  scores, cotangent, grads = replay_branches(model, replay, params, split, group, captured, cotangents,
                                             cotangent, grads)
  scores = unpad(scores)
  loss, metrics = objective.loss(scores, group)
  return loss, metrics, scores, cotangent, grads


def group_gradient(model, replay, objective: Objective, params: Params, split: Params, group, grads: Params,
                   weight=1.0, captured: Captured | None = None):
  """Loss, metrics, scores [G, R] and gradient of one group; the prefix is paid once.

  Args:
    group: a `batch.Group`, its prefix this device's slice [n, t].
    grads: gradients so far; weight times this group's are added, each device's
      share where a leaf is not split (`mesh.reduce_gradients` sums them).
    captured: the prefix's capture under these very parameters, or None to make it.

  replay.mode: exact pulls the state's cotangent back through the whole prefix,
  detached drops it (LongStraw's gradient), depth=K pulls the last K segments.
  """
  if captured is None:
    captured = capture(model, replay, params, split, group.prefix, group.prefix_length)
  cotangent = states.zero_cotangent(captured.state, replay.accumulate_dtype, replay.cotangent_dtype, replay.offload)
  loss, metrics, scores, cotangent, grads = replay_group(model, replay, objective, params, split, group, captured, cotangent,
                                                         grads, weight)
  if replay.pull_depth:
    grads = pull(model, replay, params, split, group.prefix, group.prefix_length, captured, cotangent,
                 grads, replay.pull_depth)
  return loss, metrics, scores, grads


def capture_function(mesh_, model, replay, group):
  """Jitted (params, groups) -> stacked captures of the groups' prefixes, for several uses."""
  split, specs = _layout(mesh_, model, replay)

  def local(params, groups):
    step = lambda _, group: (None, capture(model, replay, params, split, group.prefix, group.prefix_length))
    return lax.scan(step, None, groups)[1]

  return mesh.sharded(mesh_, local, (specs, group_spec(group)), STACKED_CAPTURED)


def score_function(mesh_, model, replay, group, with_captured: bool = False):
  """Jitted (params, groups[, captured]) -> Scores [N, G, R] of stacked groups: old or reference log-probs.

  With `with_captured`, on captures that may be of other parameters (a stale state).
  """
  split, specs = _layout(mesh_, model, replay)

  def local(params, groups, captured=None):
    def step(_, xs):
      group, captured = xs
      if captured is None:
        captured = capture(model, replay, params, split, group.prefix, group.prefix_length)
      scores = score_branches(model, replay, params, split, group, captured)
      return None, jax.tree.map(lambda s: s[:group.inputs.shape[0]], scores)
    return lax.scan(step, None, (groups, captured))[1]

  in_specs = (specs, group_spec(group)) + ((STACKED_CAPTURED,) if with_captured else ())
  return mesh.sharded(mesh_, local, in_specs, P(mesh.DATA))


def _layout(mesh_, model, replay):
  """Which leaves of the parameters are split over `seq`, and their PartitionSpecs."""
  shapes, seq = layers.shapes(model), mesh_.shape[mesh.SEQ]
  return (mesh.split_tree(shapes, seq, replay.shard_params),
          mesh.parameter_specs(shapes, seq, replay.shard_params))


def gradient_function(mesh_, model, replay, objective: Objective, group, full_sequence: bool = False,
                      with_captured: bool = False):
  """Jitted (params, groups[, captured]) -> Result, for stacked groups shaped like `group`.

  The groups of a device row (`data` axis) go one after another and their
  gradients are summed. With `with_captured`, stacked captures of the groups' prefixes.
  full_sequence: by plain autodiff on full sequences.
  """
  rows = mesh_.shape[mesh.DATA]
  split, specs = _layout(mesh_, model, replay)
  one = full_sequence_gradient if full_sequence else group_gradient

  def local(params, groups, captured=None):
    count = groups.prefix_length.shape[0]

    def step(grads, xs):
      group, captured = xs
      loss, metrics, scores, grads = one(model, replay, objective, params, split, group, grads,
                                         1 / (count * rows), captured)
      return grads, (loss, metrics, scores)

    grads, out = lax.scan(step, zero_gradients(model, replay, params), (groups, captured))
    return Result(*out, mesh.reduce_gradients(grads, split))

  in_specs = (specs, group_spec(group)) + ((STACKED_CAPTURED,) if with_captured else ())
  out_specs = Result(P(mesh.DATA), P(mesh.DATA), P(mesh.DATA), specs)
  return mesh.sharded(mesh_, local, in_specs, out_specs)
