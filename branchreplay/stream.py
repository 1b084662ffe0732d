"""The gradient in steps that the host drives, for prefixes whose capture and pull take minutes.

The same capture, replay and pull as `gradients.group_gradient`, compiled apart. The host
calls them some segments at a time, so that progress can be shown and what is done be saved
(experiments/resume.py). What goes from one call to the next is donated: nothing is held twice.

    steps = make_steps(mesh_, model, replay, objective, groups)
    captured = steps.open(params, groups)
    captured = steps.capture(params, groups, captured, first, last)      # for ranges of segments
    out, pulling = steps.replay(params, groups, captured, steps.zeros(params, captured), weight)
    pulling = steps.pull(params, groups, captured, pulling, first, last)  # counted from the prefix's end
    grads = steps.finish(pulling.grads)

Letters: N groups, one for each row of the mesh's `data` axis.
"""
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from branchreplay import mesh
from branchreplay import model as layers
from branchreplay import state as states
from branchreplay.batch import group_spec
from branchreplay.gradients import Result, replay_group
from branchreplay.objectives import Objective
from branchreplay.prefix import (
    STACKED_CAPTURED, capture_segments, empty_captured, pull_segments, segment_count, zero_gradients)
from branchreplay.state import StateCotangent


@struct.dataclass
class Pulling:
  """What a pull hands from step to step."""
  cotangent: StateCotangent  # [N, ...] of the state before the segments pulled so far
  grads: Any  # each device's share: [devices, ...], of leaves split over `seq` [N, ...]


ARGUMENTS = {
    'open': ('params', 'groups'), 'capture': ('params', 'groups', 'captured', 'segment', 'segment'), 'zeros': ('params', 'captured'),
    'replay': ('params', 'groups', 'captured', 'pulling', 'weight'),
    'pull': ('params', 'groups', 'captured', 'pulling', 'segment', 'segment'), 'finish': ('grads',)}


class Steps(NamedTuple):
  """Jitted functions; see the module."""
  open: Any
  capture: Any
  zeros: Any
  replay: Any
  pull: Any
  finish: Any
  specs: dict  # name of an argument -> its PartitionSpecs


def _take(tree):
  return jax.tree.map(lambda x: x[0], tree)


def _put(tree):
  return jax.tree.map(lambda x: x[None], tree)


def make_steps(mesh_, model, replay, objective: Objective, groups) -> Steps:
  """Steps for groups shaped like `groups`, [N] as many as the `data` axis has rows.

  `first` and `last` may lie past a prefix's segments, or past the pull's depth: nothing is done there.
  """
  seq = mesh_.shape[mesh.SEQ]
  shapes = layers.shapes(model)
  split = mesh.split_tree(shapes, seq, replay.shard_params)
  params, group = mesh.parameter_specs(shapes, seq, replay.shard_params), group_spec(groups)
  share = jax.tree.map(lambda s: P(mesh.DATA, *s) if mesh.SEQ in s else P((mesh.DATA, mesh.SEQ)), params,
                       is_leaf=lambda s: isinstance(s, P))
  row = P(mesh.DATA)
  slots = P(mesh.DATA, *states.SLOTS_SPEC.k)
  cotangent = StateCotangent(slots, slots, jax.tree.map(lambda s: P(mesh.DATA, *s), states.RECURRENT_SPEC,
                                                        is_leaf=lambda s: isinstance(s, P)))
  pulling, captured = Pulling(cotangent, share), STACKED_CAPTURED

  def open_(params, groups):
    return _put(empty_captured(model, replay, params, split, groups.prefix[0]))

  def capture(params, groups, captured, first, last):
    prefix, length = _take((groups.prefix, groups.prefix_length))
    last = jnp.minimum(last, segment_count(prefix, length))
    return _put(capture_segments(model, replay, params, split, prefix, length, _take(captured), first, last))

  def zeros(params, captured):
    cotangent = states.zero_cotangent(_take(captured).state, replay.accumulate_dtype, replay.cotangent_dtype, replay.offload)
    return Pulling(*_put((cotangent, zero_gradients(model, replay, params))))

  def replay_(params, groups, captured, pulling, weight):
    *out, cotangent, grads = replay_group(model, replay, objective, params, split, _take(groups), _take(captured),
                                          *_take((pulling.cotangent, pulling.grads)), weight)
    return _put(out), Pulling(*_put((cotangent, grads)))

  def pull(params, groups, captured, pulling, first, last):
    prefix, length = _take((groups.prefix, groups.prefix_length))
    last = jnp.minimum(last, jnp.minimum(segment_count(prefix, length), replay.pull_depth))
    return Pulling(*_put(pull_segments(model, replay, params, split, prefix, length, _take(captured),
                                       *_take((pulling.cotangent, pulling.grads)), first, last)))

  make = lambda f, specs, out, **options: mesh.sharded(mesh_, f, specs, out, **options)
  return Steps(
      open=make(open_, (params, group), captured),
      capture=make(capture, (params, group, captured, P(), P()), captured, donate_argnums=2),
      zeros=make(zeros, (params, captured), pulling),
      replay=make(replay_, (params, group, captured, pulling, P()), (row, pulling), donate_argnums=3),
      pull=make(pull, (params, group, captured, pulling, P(), P()), pulling, donate_argnums=3),
      finish=make(lambda grads: mesh.reduce_gradients(_take(grads), split), (share,), params),
      specs={'params': params, 'groups': group, 'captured': captured, 'pulling': pulling, 'out': row})


def held_shapes(mesh_, replay, steps: Steps, params, groups) -> dict:
  """ShapeDtypeStructs with shardings of what is held between steps: params, groups, captured, pulling."""
  lay = lambda name, tree: mesh.abstract(mesh_, steps.specs[name], tree)
  params, groups = lay('params', params), lay('groups', groups)
  on_host = lambda tree: jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind('pinned_host')), tree)
  captured = lay('captured', jax.eval_shape(steps.open, params, groups))
  if replay.offload:
    captured = captured.replace(history=on_host(captured.history))
  pulling = lay('pulling', jax.eval_shape(steps.zeros, params, captured))
  if replay.offload:
    k, v = on_host((pulling.cotangent.k, pulling.cotangent.v))
    pulling = pulling.replace(cotangent=pulling.cotangent.replace(k=k, v=v))
  return {'params': params, 'groups': groups, 'captured': captured, 'pulling': pulling}


def shapes_of(mesh_, replay, steps: Steps, params, groups) -> dict:
  """ShapeDtypeStructs with shardings of all that ARGUMENTS names, and of what replay puts `out`."""
  held = held_shapes(mesh_, replay, steps, params, groups)
  held |= {'grads': held['pulling'].grads, 'segment': jax.ShapeDtypeStruct((), jnp.int32),
           'weight': jax.ShapeDtypeStruct((), jnp.float32)}
  out = jax.eval_shape(steps.replay, *[held[name] for name in ARGUMENTS['replay']])[0]
  return held | {'out': mesh.abstract(mesh_, steps.specs['out'], out)}


def compiled(steps: Steps, name: str, shapes: dict):
  """The step called `name`, compiled ahead for the shapes of `shapes_of`."""
  return getattr(steps, name).lower(*[shapes[argument] for argument in ARGUMENTS[name]]).compile()


def segments_of(replay, groups) -> tuple[int, int]:
  """Segments that the longest prefix of the groups has, and how many of them are pulled through."""
  n = -(-int(np.max(groups.prefix_length)) // replay.segment_len)
  return n, min(n, replay.pull_depth)


def gradient(steps: Steps, replay, params, groups, at_once: int, watch=lambda phase, done, of, held: None,
             begin=(0, 0, {})) -> Result:
  """The Result of `gradients.gradient_function`, `at_once` segments a call.

  watch(phase, done, of, held) is called after every step of the phases capture, replay and pull;
  held: what the next step begins with, gone once that has begun. begin: a (phase number, done, held) to go on from.
  """
  phase, done, held = begin
  span = lambda first: (np.int32(first), np.int32(first + at_once))
  n, depth = segments_of(replay, groups)
  captured = held['captured'] if held else steps.open(params, groups)
  if phase == 0:
    for first in range(done, n, at_once):
      captured = steps.capture(params, groups, captured, *span(first))
      watch('capture', min(first + at_once, n), n, {'captured': captured})
    done = 0
  if phase < 2:
    out, pulling = steps.replay(params, groups, captured, steps.zeros(params, captured), np.float32(1 / len(groups.prefix_length)))
    watch('replay', 1, 1, {'captured': captured, 'pulling': pulling, 'out': out})
  else:
    pulling, out = held['pulling'], held['out']
  for first in range(done, depth, at_once):
    pulling = steps.pull(params, groups, captured, pulling, *span(first))
    watch('pull', min(first + at_once, depth), depth, {'captured': captured, 'pulling': pulling, 'out': out})
  return Result(*out, steps.finish(pulling.grads))
