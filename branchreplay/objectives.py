"""Objectives: plain functions of score matrices. They never see the model.

An objective takes the scores of a group's tokens and the group's other matrices,
and returns a scalar loss and a dict of metrics. The engine differentiates it with
respect to the scores only. One that is a sum over tokens with weights known
beforehand (all here) is `separable`: the cotangent of a token depends on that
token's scores alone, so no separate score pass is needed.
"""
import functools
from typing import Any, Callable, NamedTuple

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branchreplay.config import ObjectiveConfig, UserError


@struct.dataclass
class Scores:
  """What the model says of a group's tokens."""
  logprob: Any  # [G, R] nats
  entropy: Any  # [G, R] nats, of the distribution the token was drawn from


class Objective(NamedTuple):
  loss: Callable  # (Scores, Group) -> (scalar, metrics)
  separable: bool  # whether d loss / d scores[g, r] depends on scores[g, r] only


MAX_LOG_RATIO = 20.0  # exp(20) = 5e8; beyond it a ratio is clipped and its gradient is 0


def group_advantages(rewards, drop_nonfinite: bool = False) -> np.ndarray:
  """Group-normalised advantages (r - mean) / std [G], float64; GRPO, eq. in section 4.1.2.

  All rewards equal, or a group of one: zeros (the std is 0 up to rounding and
  must not be divided by). A non-finite reward raises UserError naming it, or with
  `drop_nonfinite` gets advantage 0 and does not count. std is the population's.
  """
  rewards = np.asarray(rewards, np.float64)
  good = np.isfinite(rewards)
  if not good.all() and not drop_nonfinite:
    at = int(np.flatnonzero(~good)[0])
    raise UserError(f'the reward of response {at} is {rewards[at]}; correct the reward function, '
                    'or drop such responses with --drop_nonfinite_rewards.')
  out = np.zeros_like(rewards)
  kept = rewards[good]
  if kept.size and kept.max() > kept.min():
    out[good] = (kept - kept.mean()) / kept.std()
  return out


def log_ratio(logprobs, old, mask):
  """log(pi / old), 0 where masked, limited to +-MAX_LOG_RATIO so that exp is finite."""
  return jnp.clip(jnp.where(mask > 0, logprobs - old, 0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs, ref, mask, kind: str = 'k3'):
  """Per-token estimate of KL(pi || ref) (Schulman 2020, "Approximating KL divergence")."""
  ratio = log_ratio(ref, logprobs, mask)  # log(ref / pi)
  return {'k1': -ratio, 'k2': ratio**2 / 2, 'k3': jnp.expm1(ratio) - ratio}[kind]


def masked_mean(values, mask, normalize: str):
  """Mean of per-token values [G, R]: over the group's tokens, or of sequence means.

  `token` divides by all tokens of the group, so that micro-batches add up;
  `sequence` averages each branch first (an empty one counts as 0). An all-masked
  group gives 0.
  """
  values = jnp.where(mask > 0, values * mask, 0)
  if normalize == 'token':
    return values.sum() / jnp.maximum(mask.sum(), 1)
  return (values.sum(1) / jnp.maximum(mask.sum(1), 1)).mean()


def grpo(config: ObjectiveConfig, scores: Scores, group):
  """Clipped policy gradient with a KL term (GRPO, arXiv:2402.03300 eq. 3; PPO's clip).

  loss = mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef k3,
  rho = pi / old. old_logprobs None: rho is exactly 1 (the first update of a rollout).
  Metrics: loss, kl, clipped (share of tokens), ratio (mean).
  """
  logprobs, mask, advantage = scores.logprob, group.mask, group.advantages[:, None]
  old = lax.stop_gradient(logprobs) if group.old_logprobs is None else group.old_logprobs
  rho = jnp.exp(log_ratio(logprobs, old, mask))
  limited = jnp.clip(rho, 1 - config.clip_low, 1 + config.clip_high)
  per_token = -jnp.minimum(rho * advantage, limited * advantage)
  kl = jnp.zeros_like(logprobs)
  if config.kl_coef and group.ref_logprobs is not None:
    kl = kl_estimate(logprobs, group.ref_logprobs, mask)
    per_token += config.kl_coef * kl
  loss = masked_mean(per_token, mask, config.normalize)
  mean = lambda x: masked_mean(x, mask, 'token')
  clipped = limited * advantage < rho * advantage
  return loss, {'loss': loss, 'kl': mean(kl), 'clipped': mean(clipped.astype(rho.dtype)), 'ratio': mean(rho)}


def negative_log_likelihood(config: ObjectiveConfig, scores: Scores, group):
  """Supervised loss on masked branch tokens. Metrics: loss (nats a token)."""
  loss = masked_mean(-scores.logprob, group.mask, config.normalize)
  return loss, {'loss': loss}


def make_objective(name: str, config: ObjectiveConfig) -> Objective:
  """The objective called `name`, with its coefficients; UserError lists the names."""
  functions = {'grpo': grpo, 'nll': negative_log_likelihood}
  if name not in functions:
    raise UserError(f'unknown objective {name!r}; use {", ".join(functions)}.')
  return Objective(functools.partial(functions[name], config), separable=True)
