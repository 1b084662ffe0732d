"""Guards of training: gradients that spike are skipped, epochs end where the policy has moved too far."""
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from branchreplay import processes

LEAST = 8  # norms to have seen before one can be called a spike


class SpikeState(NamedTuple):
  inner: Any
  norms: Any  # [W], of the last gradients that were taken, NaN where there was none yet
  spiked: Any  # bool [], whether the last one was skipped


def skip_spikes(inner: optax.GradientTransformation, factor: float, window: int = 32) -> optax.GradientTransformation:
  """Leaves parameters and moments alone at a gradient whose norm is above `factor` medians of the last `window`."""

  def init(params):
    return SpikeState(inner.init(params), jnp.full(window, jnp.nan), jnp.bool_(False))

  def update(grads, state, params):
    norm = optax.tree.norm(grads).astype(state.norms.dtype)
    seen = jnp.isfinite(state.norms).sum()
    spiked = (seen >= LEAST) & (norm > factor * jnp.nanmedian(state.norms))
    updates, new = inner.update(grads, state.inner, params)
    keep = lambda old, new: jax.tree.map(lambda o, n: jnp.where(spiked, o, n), old, new)
    norms = jnp.where(spiked, state.norms, jnp.roll(state.norms, 1).at[0].set(norm))
    return jax.tree.map(lambda u: jnp.where(spiked, 0, u), updates), SpikeState(keep(state.inner, new), norms, spiked)

  return optax.GradientTransformation(init, update)


def spiked(opt_state) -> jax.Array:
  """Whether the last update was skipped as a spike; False for an optimizer without the guard."""
  return opt_state.spiked if isinstance(opt_state, SpikeState) else jnp.bool_(False)


def moved(groups: list, results: list) -> float:
  """Mean k1 estimate of KL(old || policy) over the batches' tokens, nats (where there are old log-probs)."""
  gaps, counts = 0.0, 0.0
  for g, r in zip(groups, results):
    if g.old_logprobs is not None:
      gaps += float(np.sum((np.asarray(g.old_logprobs) - processes.fetch(r.scores.logprob)) * (g.mask > 0)))
      counts += float(np.sum(g.mask > 0))
  return gaps / max(counts, 1.0)
