"""The gradient of a tree of trajectories, with memory for one path from the root to a leaf.

The same extend and retract as for a prefix (prefix.py), in depth-first order: a segment
is entered (extended, its slots appended to the path's) before what hangs on it, and left
(replayed, retracted) after it; then its slots are used again. Keys' cotangents of the
path are summed in place; the recurrent state's are summed over a node's children, one
sum a level. So every distinct position is paid once, whatever the number of leaves.

A group is a tree of depth one. It has a driver of its own (gradients.py), because its
branches are alike: several are replayed at once, by segments of another length, on a
state that stays as it is.

Letters: N trees, n segments of T positions, t = T/devices, p segments of the longest
path, G trajectories, R branch_capacity, S slots.
"""
from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from branchreplay import head, mesh
from branchreplay import model as layers
from branchreplay import state as states
from branchreplay.attention import at_least_f32
from branchreplay.batch import Scores
from branchreplay.config import ALL_SEGMENTS, ModelConfig, ReplayConfig, UserError
from branchreplay.gradients import Result, kept_of_branches
from branchreplay.model import Params
from branchreplay.objectives import Objective
from branchreplay.prefix import zero_gradients
from branchreplay.replay import extend, retract
from branchreplay.segment import Segment
from branchreplay.state import Recurrent, Slots, State, StateCotangent
from branchreplay.trie import Tree


@struct.dataclass
class Path:
  """The state along the path from a root to the segment at hand."""
  slots: Slots  # S slots; a segment's are overwritten by the next one at its place
  recurrent: Recurrent  # leaves [p + 1, M, 1, ...], before each segment of the path and after it


def _at(tree, i):
  return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), tree)


def _put(tree, x, i):
  return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b.astype(a.dtype), i, 0), tree, x)


def _root(model, replay, count, dtype) -> Path:
  """The empty path; `count` slots a segment on each device."""
  recurrent = states.empty_recurrent(model, dtype)
  stack = lambda x: jnp.zeros((replay.prefix_segments + 1, *x.shape), x.dtype)
  slots = states.empty_slots(model, states.slot_count(replay, replay.prefix_segments * count), dtype)
  return Path(slots, jax.tree.map(stack, recurrent))


def _extend(model, replay, params, split, tree: Tree, path: Path, s, keep: str):
  """Runs segment s on the path above it; the slots it saw, the segment, and what `extend` returns."""
  count, at = tree.tokens.shape[1], tree.path[s]
  above = path.slots.replace(used=at * count)
  before = _at(path.recurrent, at)
  segment = Segment(tree.tokens[s][None], tree.length[s][None], tree.start[s])
  node = State(states.empty_slots(model, count, path.slots.k.dtype), before)
  return above, before, segment, extend(model, replay, params, split, above, node, segment, keep=keep)


def _enter(tree, path, s, above, node) -> Path:
  """The path with segment s at its end."""
  return Path(states.append(above, node.slots), _put(path.recurrent, node.recurrent, tree.path[s] + 1))


def _put_scores(scores, own, s):
  """Writes all devices' scores [1, t] of segment s into [n, T]."""
  return jax.tree.map(lambda m, x: _put(m, mesh.gather(x[0], 0), s), scores, own)


def _zeros(tree: Tree, params, rows: int, columns: int) -> Scores:
  zeros = jnp.zeros((rows, columns), at_least_f32(params.embed.dtype))
  return Scores(zeros, zeros, None if params.value is None else zeros)


def of_trajectories(tree: Tree, scores: Scores) -> Scores:
  """Scores [n, T] of a tree's tokens -> [G, R] of its trajectories; transposes to a sum over them."""
  take = lambda x: jnp.where(tree.index >= 0, x.reshape(-1)[tree.index], 0)
  return jax.tree.map(take, scores)


def score_tree(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, tree: Tree) -> Scores:
  """Forward over the whole tree; scores [n, T], zero in segments of which no token is trained."""
  zeros = _zeros(tree, params, 1, tree.tokens.shape[1])

  def step(s, carry):
    path, scores = carry
    above, _, _, (node, h, _) = _extend(model, replay, params, split, tree, path, s, '')
    own = lax.cond(tree.trained[s], lambda h: head.scores(model, replay, params, split, h, tree.targets[s][None]),
                   lambda h: zeros, h)
    return _enter(tree, path, s, above, node), _put_scores(scores, own, s)

  start = (_root(model, replay, tree.tokens.shape[1], params.embed.dtype),
           _zeros(tree, params, len(tree.length), tree.tokens.shape[1] * mesh.seq_size()))
  return lax.fori_loop(jnp.int32(0), tree.count, step, start)[1]


def replay_tree(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, tree: Tree, dscores_of,
                grads: Params):
  """Enters and leaves every segment in depth-first order; scores [n, T] and grads.

  dscores_of(scores) -> Scores [n, T]: the objective's cotangents, right for the segment
  at hand where `scores` are (the others' are zero until they are left).
  """
  count = tree.tokens.shape[1]
  own = lambda x, at: lax.dynamic_slice_in_dim(x, at * count, count, 2)

  def enter(s, path):
    above, _, _, (node, _, _) = _extend(model, replay, params, split, tree, path, s, '')
    return _enter(tree, path, s, above, node)

  def train(s, h, scores, grads):
    targets = tree.targets[s][None]
    scores = _put_scores(scores, head.scores(model, replay, params, split, h, targets), s)
    mine = jax.tree.map(lambda d: mesh.own(d[s], 0)[None], dscores_of(scores))
    return scores, *head.scores_backward(model, replay, params, split, h, targets, mine, grads)

  def leave(i, carry):
    path, scores, dk, dv, drecurrent, grads = carry
    s = tree.order[i]
    path = lax.fori_loop(tree.enter[i], s, enter, path)
    above, before, segment, (node, h, kept) = _extend(model, replay, params, split, tree, path, s, kept_of_branches(replay.keep))
    scores, dh, grads = lax.cond(
        tree.trained[s], train, lambda s, h, scores, grads: (scores, jnp.zeros_like(h), grads), s, h, scores, grads)
    at, level = tree.path[s], tree.level[s]
    path = path.replace(slots=states.append(above, node.slots))
    dk, dv, dbefore, grads = retract(model, replay, params, split, path.slots, None, before, segment, kept, dh, dk, dv,
                                     StateCotangent(None, None, _at(drecurrent, level)), grads)
    spent = lambda x: lax.dynamic_update_slice_in_dim(x, jnp.zeros_like(own(x, at)), at * count, 2)
    upward = lambda d: jax.tree.map(lambda x: jnp.where(tree.first[s], x, 0), d)
    onward = jax.tree.map(lambda x: jnp.where(tree.first[s], 0, x), dbefore.recurrent)
    drecurrent = _put(drecurrent, onward, level)
    summed = jax.tree.map(jnp.add, _at(drecurrent, level - 1), upward(dbefore.recurrent))
    return path, scores, spent(dk), spent(dv), _put(drecurrent, summed, level - 1), grads

  path = _root(model, replay, count, params.embed.dtype)
  zero = states.zero_cotangent(State(path.slots, _at(path.recurrent, 0)), replay.accumulate_dtype)
  sums = jax.tree.map(lambda x: jnp.zeros((tree.levels + 1, *x.shape), x.dtype), zero.recurrent)
  scores = _zeros(tree, params, len(tree.length), count * mesh.seq_size())
  carry = lax.fori_loop(jnp.int32(0), tree.count, leave, (path, scores, zero.k, zero.v, sums, grads))
  return carry[1], carry[-1]


def tree_gradient(model: ModelConfig, replay: ReplayConfig, objective: Objective, params: Params, split: Params,
                  tree: Tree, grads: Params, weight=1.0):
  """Loss, metrics, scores [G, R] and gradient of one tree: that of training on each trajectory in full.

  grads: gradients so far; weight times this tree's are added, see `gradients.group_gradient`.
  """
  loss = lambda scores: objective.loss(of_trajectories(tree, scores), tree.group)
  dscores_of = jax.grad(lambda scores: loss(scores)[0] * weight)
  if not objective.separable:
    fixed = dscores_of(score_tree(model, replay, params, split, tree))
    dscores_of = lambda _: fixed
  scores, grads = replay_tree(model, replay, params, split, tree, dscores_of, grads)
  return *loss(scores), of_trajectories(tree, scores), grads


def tree_spec(tree: Tree) -> Tree:
  """PartitionSpecs of stacked trees: N over `data`, segment positions over `seq`."""
  specs = jax.tree.map(lambda _: P(mesh.DATA), tree)
  return specs.replace(tokens=P(mesh.DATA, None, mesh.SEQ), targets=P(mesh.DATA, None, mesh.SEQ))


def tree_function(mesh_, model: ModelConfig, replay: ReplayConfig, objective: Objective, tree: Tree):
  """Jitted (params, trees) -> gradients.Result of stacked trees shaped like `tree`.

  Raises UserError for a mode other than exact, and for offload.
  """
  if replay.offload:
    raise UserError('the state of a tree is written while it is read, so it stays on the devices; leave --offload out.')
  if replay.pull_depth != ALL_SEGMENTS:
    raise UserError(f'mode={replay.mode} has no meaning for a tree, whose inner nodes are trained; use mode=exact.')
  rows, seq = mesh_.shape[mesh.DATA], mesh_.shape[mesh.SEQ]
  split = mesh.split_tree(layers.shapes(model), seq, replay.shard_params)
  specs = mesh.parameter_specs(layers.shapes(model), seq, replay.shard_params)

  def local(params, trees):
    def step(grads, tree):
      loss, metrics, scores, grads = tree_gradient(model, replay, objective, params, split, tree, grads,
                                                   1 / (len(trees.count) * rows))
      return grads, (loss, metrics, scores)

    grads, out = lax.scan(step, zero_gradients(model, replay, params), trees)
    return Result(*out, mesh.reduce_gradients(grads, split))

  return mesh.sharded(mesh_, local, (specs, tree_spec(tree)),
                      Result(P(mesh.DATA), P(mesh.DATA), P(mesh.DATA), specs))
