"""THE IDEA: a prefix segment and a branch are the same thing, tokens processed on a state.

  extend   runs a segment forward on a state and returns the state after it.
  retract  takes the cotangents of the segment's outputs and of the state after
           it, and returns the cotangent of the state before it; cotangents of
           earlier keys and values are added in place, parameter gradients too.

A state is the prefix's slots (`cache`, read-only here), the node's own slots and
its recurrent state (`node`). A prefix segment is a node whose slots are appended
to the cache afterwards, and which is pulled back from there (prefix.py); B branches
are replayed as one node of B*T slots, each seeing the cache and its own branch
(gradients.py); one decoded token is a segment of one valid position (sample.py).

Letters: B branches, T positions of the segment over all devices, t = T/devices,
L attention layers, M recurrent layers, K kv heads, G queries a kv head, h head_dim.
"""
from typing import Any

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

from branchreplay import attention, kernels, lora, mesh
from branchreplay import model as layers
from branchreplay.config import ModelConfig, ReplayConfig
from branchreplay.delta_layer import delta_layer
from branchreplay.model import Params
from branchreplay.segment import Segment, View, attention_problem, fold_rows, head_major, row_shape, unfold_rows, view_of
from branchreplay.state import Recurrent, Slots, State, StateCotangent


@struct.dataclass
class Kept:
  """What `retract` needs of a segment's forward at one place of the pattern; leaves [repeats, ...]."""
  h: Any  # [B, t, D], the layer's input
  attention: Any = None  # (o [B, t, H, h], lse [B, t, H]) of an attention layer
  products: Any = None  # the layer's matrix products, see model.py; None: to be made again


def _by_repeat(model, k, v, recurrent: Recurrent):
  """Leaves [L or M, ...] -> [repeats, layers a repeat, ...], to scan over repeats; None stays."""
  stack = lambda x, per: None if x is None else x.reshape(model.repeats, per, *x.shape[1:])
  attn, delta = model.attention_per_repeat, model.deltanet_per_repeat
  return stack(k, attn), stack(v, attn), stack(recurrent.delta, delta), stack(recurrent.conv, delta)


def _join(x):
  return None if x is None else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _unless(spare, work):
  """work(), or zeros where the traced bool `spare` says that nobody reads it; None: somebody does."""
  if spare is None:
    return work()
  return lax.cond(spare, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work)), work)


def _attend(model, replay, view: View, whole, h, k_own, v_own, layer, kind, known, spare):
  """An attention layer of `kind`: h after it, the node's keys and values with the segment's put in, (o, lse) and products.

  whole() is the layer's block; its two halves ask for it apart, so that no weight is gathered before its turn.
  spare: see `_unless`; of all but keys and values.
  """
  (q, k, v, gate), made = layers.attention_in(model, whole(), h, view.tables)
  put = lambda x, y: lax.dynamic_update_slice_in_dim(x, head_major(y, x.dtype), view.at, 1)
  k_own, v_own = put(k_own, k), put(v_own, v)

  def rest():
    if known is None:
      problem = attention_problem(model, replay, view, k_own, v_own, layer, kind, kernels.CHUNK)
      forward, _ = kernels.pair(replay.attention)
      o, lse = attention.merge(*forward(fold_rows(model, q), *problem), row_shape(model, view.segment))
      o, lse = unfold_rows(model, o).astype(h.dtype), unfold_rows(model, lse)
    else:
      o, lse = known
    return *layers.attention_out(model, whole(), h, o, gate), (o, lse)

  h, more, found = _unless(spare, rest)
  return h, k_own, v_own, found, (made, more)


def _spare(model: ModelConfig, outputs: bool, place: int, r):
  """Whether nobody reads what the layer at `place` of repeat r makes but keys and values: that of the last one, without `outputs`."""
  last = place == len(model.pattern) - 1 and model.pattern[place] != 'deltanet'
  return r == model.repeats - 1 if last and not outputs else None


def extend(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, cache: Slots,
           node: State, segment: Segment, keep: str = '', attended=None, outputs: bool = True):
  """Runs `segment` forward on (cache, node).

  Returns the node after it, the last layer's output h [B, t, D], and what `retract`
  needs, a `Kept` of each place in the pattern: without products for keep='layers',
  with them for 'products', None for ''. The cache is only read: own keys come out of
  the layer scan and are never copied into it.
  attended: the (o, lse) of each place from an earlier run, which spares attention.
  outputs: whether h is read; without, a last layer of attention ends at its keys and values.
  """
  view = view_of(model, cache, node.slots, segment)

  def repeat(h, xs):
    blocks, k, v, delta, conv, earlier, r = xs
    a, m, ks, vs, deltas, convs, kept = 0, 0, [], [], [], [], []
    for place, (block, is_split, kind, known) in enumerate(zip(blocks, split.blocks, model.pattern, earlier)):
      block, h = lax.optimization_barrier((block, h))  # no layer's weights are gathered before its turn
      whole = lambda block=block, is_split=is_split: mesh.gather_tree(block, is_split)
      kept.append(Kept(h))
      if kind == 'deltanet':
        h, d, c, made = delta_layer(model, whole(), h, delta[m], conv[m], segment.length, segment.wide)
        deltas, convs, m = deltas + [d], convs + [c], m + 1
      else:
        layer = r * model.attention_per_repeat + a
        h, k1, v1, found, made = _attend(model, replay, view, whole, h, k[a], v[a], layer, kind, known,
                                         _spare(model, outputs, place, r))
        kept[-1] = kept[-1].replace(attention=found)
        ks, vs, a = ks + [k1], vs + [v1], a + 1
      kept[-1] = kept[-1].replace(products=made if keep == 'products' else None)
    stack = lambda new, old: jnp.stack(new) if new else old
    out = (stack(ks, k), stack(vs, v), stack(deltas, delta), stack(convs, conv))
    return h, (out, kept if keep else None)

  h = layers.embed(params, split, segment.tokens)
  xs = (params.blocks, *_by_repeat(model, node.slots.k, node.slots.v, node.recurrent), attended or [None] * len(model.pattern),
        jnp.arange(model.repeats, dtype=jnp.int32))
  h, ((k, v, delta, conv), kept) = lax.scan(repeat, h, xs)
  own = view.own.replace(k=_join(k), v=_join(v))
  return State(own, Recurrent(_join(delta), _join(conv))), h, kept


def _add_at(grads, update, r):
  """Adds one repeat's gradients to the stacked ones, in place."""
  def add(total, x):
    old = lax.dynamic_index_in_dim(total, r, 0, False)
    return lax.dynamic_update_index_in_dim(total, old + x.astype(total.dtype), r, 0)
  return jax.tree.map(add, grads, update)


def _fetch_layer(x, layer):
  """One layer of x [L, ...], which lies in the host's memory, as [1, ...] on the device."""
  return mesh.to_device(lax.dynamic_slice_in_dim(x, layer, 1, 0))


def _put_layer(x, update, layer):
  return lax.dynamic_update_slice_in_dim(x, mesh.to_host(update), layer, 0)


def _attend_back(model, replay, view: View, trained, whole, kept: Kept, own, down, dh, dk, dv, layer, kind, spare):
  """The mirror of `_attend`: cotangents of `trained`, of the layer's input, of the cache's and own keys and values.

  whole(trained) is the layer's block. own, down: own keys and values [K, S, h] and their cotangents, pairs; of None where
  the cache holds them. dh None: of its keys and values alone; so where `spare` is true.
  """
  segment, apart = view.segment, view.own is not None
  known = kept.products or (None, None)
  first = lambda p, h: layers.attention_in(model, whole(p), h, view.tables, known[0])[0]

  def spent(x, at):
    """The segment's cotangents [B, t, K, h], of those in x [L, K, S, h] at `at`, on the device."""
    x = lax.dynamic_slice(x, attention.index(at, 0, view.at, 0), (1, model.kv_heads, segment.tokens.size, model.head_dim))
    x = mesh.to_device(x) if replay.offload else x
    return jnp.moveaxis(x.reshape(model.kv_heads, *segment.tokens.shape, -1), 0, 2).astype(kept.h.dtype)

  held = [x[None] for x in down] if apart else [dk, dv]  # what the segment's cotangents are summed in
  if dh is None:
    pull_in = jax.vjp(lambda p, h: first(p, h)[1:3], trained, kept.h)[1]
    return *pull_in(tuple(spent(x, 0 if apart else layer) for x in held)), dk, dv, down
  h, (o, lse) = kept.h, kept.attention
  last = lambda p, h, o, gate: layers.attention_out(model, whole(p), h, o, gate, known[1])[0]
  (q, _, _, gate), pull_in = jax.vjp(first, trained, h)
  dp_out, dh_out, do, dgate = _unless(spare, lambda: jax.vjp(last, trained, h, o, gate)[1](dh))
  if spare is not None:  # no row sees a key
    view = view.replace(sight=jnp.where(spare, -1, view.sight))
  dtype = lse.dtype
  delta = (o.astype(dtype) * do.astype(dtype)).sum(-1)
  lse, delta = jnp.split(fold_rows(model, jnp.concatenate([lse, delta])), 2, 1)  # one gather of both
  sums = (_fetch_layer(dk, layer), _fetch_layer(dv, layer)) if replay.offload else (dk, dv)
  _, backward = kernels.pair(replay.attention)
  dq, (sums, *others) = backward(
      fold_rows(model, q), *attention_problem(model, replay, view, *own, layer, kind, kernels.CHUNK_BACK),
      lse, fold_rows(model, do.astype(q.dtype)), delta, (sums, held) if apart else (sums,))
  dq = unfold_rows(model, mesh.scatter_sum(dq.reshape(*row_shape(model, segment), -1), 2))
  held, at = (others[0], 0) if apart else (sums, 0 if replay.offload else layer)
  dkv = [spent(x, at) for x in held]
  dp_in, dh_in = pull_in((dq.astype(q.dtype), *dkv, dgate))
  dk, dv = (_put_layer(dk, sums[0], layer), _put_layer(dv, sums[1], layer)) if replay.offload else sums
  dp = jax.tree.map(jnp.add, dp_in, dp_out)
  return dp, dh_in + dh_out, dk, dv, [x[0] for x in held] if apart else down


def _delta_back(model, segment: Segment, trained, whole, kept: Kept, before, dh, dafter):
  """A DeltaNet layer pulled back: cotangents of `trained`, its input and the state before; dh None: of the state after alone."""
  f = lambda p, h, d, c: delta_layer(
      model, whole(p), h, d, c, segment.length, segment.wide, kept.products)[dh is None:3]
  out, pull = jax.vjp(f, trained, kept.h, *before)
  dp, dh, ddelta, dconv = pull(jax.tree.map(lambda c, o: c.astype(o.dtype), (dh, *dafter)[dh is None:], out))
  return dp, dh, ddelta, dconv


def retract(model: ModelConfig, replay: ReplayConfig, params: Params, split: Params, cache: Slots,
            own: Slots | None, before: Recurrent, segment: Segment, kept, dh, dk, dv,
            dnode: StateCotangent, grads: Params):
  """Pulls a segment back: the mirror of `extend`, layer by layer in reverse.

  Args:
    cache, segment, kept: as they were given to and came from `extend`.
    own: the node's slots after the segment; None where the segment's are in `cache`, its last used ones.
    before: the node's recurrent state before the segment.
    dh: [B, t, D], cotangent of the segment's output h; None for none: the last layer is pulled back from its
      keys, values and state alone.
    dk, dv: [L, K, S, h], cotangents of the cache's keys and values; in the host's memory with replay.offload.
    dnode: cotangent of the node after the segment; its k and v are None where `own` is.
    grads: gradients so far, each device's share where a leaf is whole.

  Returns dk, dv, the cotangent of the node before the segment (the segment's own
  slots, in it or in dk and dv, are spent), and grads.
  """
  view = view_of(model, cache, own and own.replace(used=own.used - segment.tokens.size), segment)
  outputs = dh is not None
  if not outputs and model.repeats > 1:  # layers are one loop: the last one's body is every one's
    dh = jnp.zeros((*segment.tokens.shape, model.width), params.embed.dtype)

  def repeat(carry, xs):
    dh, dk, dv, grads = carry
    blocks, (*slots, delta, conv), (*dslots, ddelta, dconv), kept, r = xs
    a, m = model.attention_per_repeat, model.deltanet_per_repeat
    grads = list(grads)
    for i in reversed(range(len(model.pattern))):
      # No layer is run again before the one after it is done with, its weights' gradient added.
      block, place, dh, grads = lax.optimization_barrier((blocks[i], kept[i], dh, grads))
      kind, trained = model.pattern[i], lora.trainable(model, block)
      whole = lambda p, block=block, is_split=split.blocks[i]: mesh.gather_tree(lora.join(p, block), is_split)
      if kind == 'deltanet':
        m -= 1
        dp, dh, d, c = _delta_back(model, segment, trained, whole, place, (delta[m], conv[m]), dh, (ddelta[m], dconv[m]))
        ddelta, dconv = ddelta.at[m].set(d.astype(ddelta.dtype)), dconv.at[m].set(c.astype(dconv.dtype))
      else:
        a -= 1
        layer = r * model.attention_per_repeat + a
        mine, down = jax.tree.map(lambda x: x[a], (slots, dslots))
        dp, dh, dk, dv, down = _attend_back(model, replay, view, trained, whole, place, mine, down, dh, dk, dv, layer, kind,
                                            _spare(model, outputs, i, r))
        dslots = jax.tree.map(lambda x, d: x.at[a].set(d), dslots, down)
      grads[i] = _add_at(grads[i], dp, r)
    return (dh, dk, dv, tuple(grads)), (*dslots, ddelta, dconv)

  slots = (own.k, own.v) if own else (None, None)
  state, down = _by_repeat(model, *slots, before), _by_repeat(model, dnode.k, dnode.v, dnode.recurrent)
  xs = (params.blocks, state, down, kept, jnp.arange(model.repeats, dtype=jnp.int32))
  carry = dh, dk, dv, grads.blocks
  if dh is None:
    (dh, dk, dv, blocks), down = repeat(carry, jax.tree.map(lambda x: x.squeeze(0), xs))  # refuses a repeated pattern
    down = jax.tree.map(lambda x: x[None], down)
  else:
    (dh, dk, dv, blocks), down = lax.scan(repeat, carry, xs, reverse=True)
  grads = layers.embed_backward(grads.replace(blocks=blocks), split, segment.tokens, dh)
  k, v, delta, conv = (_join(x) for x in down)
  return dk, dv, StateCotangent(k, v, Recurrent(delta, conv)), grads
