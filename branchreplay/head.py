"""Log-probs, entropies and values of target tokens, a slice of positions at a time.

A forward/backward pair by hand: logits never exist for all positions, and where
the table [V, D] is split over `seq` each device makes the logits of its own rows
of the vocabulary (statistics are merged by max and sum).
"""
import jax
from jax import lax
import jax.numpy as jnp

from branchreplay import mesh
from branchreplay.attention import at_least_f32, largest_divisor
from branchreplay.batch import Scores
from branchreplay.model import Params, head_table, rms_norm


def _is_split(params, split):
  return split.embed if params.head is None else split.head


def _statistics(model, params, split, x, targets):
  """Of rows x [r, D] (normed) with targets [r]: logits and all that follows from them."""
  across = _is_split(params, split)
  table = head_table(params)
  all_sum = mesh.sum_over if across else lambda y: y
  all_max = mesh.max_over if across else lambda y: y
  first = mesh.seq_index() * table.shape[0] if across else 0
  z = lax.dot_general(x, table, (((1,), (1,)), ((), ())), preferred_element_type=at_least_f32(x.dtype))
  top = all_max(z.max(-1))
  e = jnp.exp(z - top[:, None])
  total = all_sum(e.sum(-1))
  lse, p = top + jnp.log(total), e / total[:, None]
  hot = (targets - first)[:, None] == jnp.arange(table.shape[0])
  logprob = all_sum(jnp.where(hot, z, 0).sum(-1)) - lse
  entropy = lse - all_sum((p * z).sum(-1))
  return z, lse, p, hot, logprob, entropy


def _slices(replay, rows):
  """How many slices this device's `rows` are processed in."""
  return rows // largest_divisor(rows, max(1, replay.vocab_rows // mesh.seq_size()))


def _shared(params, split, *arrays):
  """Rows of all devices where the vocabulary is split, this device's otherwise."""
  return [mesh.gather(a, 0) if _is_split(params, split) else a for a in arrays]


def values(params: Params, x):
  """The critic's values [...] of normed outputs x [..., D]; None without a critic."""
  return None if params.value is None else (x @ params.value).astype(at_least_f32(x.dtype))


def scores(model, replay, params: Params, split: Params, h, targets) -> Scores:
  """Scores [B, t] of `targets` i32 [B, t] under h [B, t, D]."""
  rows = targets.size
  count = _slices(replay, rows)

  def one(xs):
    h, targets = xs
    normed = rms_norm(h, params.norm, model.norm_offset, model.norm_eps)
    x, targets = _shared(params, split, normed, targets)
    *_, logprob, entropy = _statistics(model, params, split, x, targets)
    mine = lambda y: mesh.own(y, 0) if _is_split(params, split) else y
    return Scores(mine(logprob), mine(entropy), values(params, normed))

  out = lax.map(one, (h.reshape(count, rows // count, -1), targets.reshape(count, -1)))
  return jax.tree.map(lambda y: y.reshape(targets.shape), out)


def scores_backward(model, replay, params: Params, split: Params, h, targets, d: Scores, grads: Params):
  """Pulls cotangents d [B, t] of `scores` back; returns dh [B, t, D] and grads plus ours."""
  rows, across = targets.size, _is_split(params, split)
  count = _slices(replay, rows)
  table = head_table(params)

  def one(carry, xs):
    dtable, dnorm, dcritic = carry
    h, targets, d = xs
    normed, pull = jax.vjp(lambda w, h: rms_norm(h, w, model.norm_offset, model.norm_eps), params.norm, h)
    x, targets, dlogprob, dentropy = _shared(params, split, normed, targets, d.logprob, d.entropy)
    z, lse, p, hot, _, entropy = _statistics(model, params, split, x, targets)
    dz = dlogprob[:, None] * (hot - p)
    dz -= dentropy[:, None] * p * (z - lse[:, None] + entropy[:, None])
    dz = dz.astype(table.dtype)
    dx = dz @ table
    dx = mesh.scatter_sum(dx, 0) if across else dx
    if params.value is not None:
      dx = dx + d.value[:, None] * params.value
      dcritic = dcritic + (d.value @ normed).astype(dcritic.dtype)
    dw, dh = pull(dx.astype(normed.dtype))
    if dtable is not None:  # None: frozen
      dtable += lax.dot_general(dz, x, (((0,), (0,)), ((), ())), preferred_element_type=dtable.dtype)
      dnorm += dw.astype(dnorm.dtype)
    return (dtable, dnorm, dcritic), dh

  fold = lambda a: a.reshape(count, rows // count, *a.shape[2:])
  start = (head_table(grads), grads.norm, grads.value)
  (dtable, dnorm, dcritic), dh = lax.scan(one, start, jax.tree.map(fold, (h, targets, d)))
  grads = grads.replace(norm=dnorm, value=dcritic, **{'embed' if params.head is None else 'head': dtable})
  return dh.reshape(h.shape), grads
