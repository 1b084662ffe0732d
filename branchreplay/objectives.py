"""Objectives: plain functions of score matrices. They never see the model.

An objective takes the scores of a group's tokens and the group's other matrices,
and returns a scalar loss and a dict of metrics. The engine differentiates it with
respect to the scores only. It is `separable` where the cotangent of a token
depends on that token's scores alone (sums over tokens with weights known
beforehand): then no separate score pass is needed.

Letters: G branches, R tokens of the longest branch; rho = pi / old; A advantage.
"""
import dataclasses
import functools
from typing import Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branchreplay.batch import Scores
from branchreplay.config import ObjectiveConfig, UserError


class Objective(NamedTuple):
  loss: Callable  # (Scores, Group) -> (scalar, metrics)
  separable: bool  # whether d loss / d scores[g, r] depends on scores[g, r] only


NEEDS_REFERENCE = ('dpo', 'dpo_norm', 'ipo')
PREFERENCES = (*NEEDS_REFERENCE, 'simpo')  # branch 2i is chosen over branch 2i + 1
BATCH_MEANS = ('dapo', 'cispo')  # papers' means are over all tokens of a batch, not of a group

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8; beyond it a ratio is clipped and its gradient is 0


# ---- pieces ----

def log_ratio(logprobs, old, mask):
  """log(pi / old), 0 where masked, limited to +-MAX_LOG_RATIO so that exp is finite."""
  return jnp.clip(jnp.where(mask > 0, logprobs - old, 0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs, ref, mask, kind: str = 'k3'):
  """Per-token estimate of KL(pi || ref) (Schulman 2020, "Approximating KL divergence").

  With d = log(pi / ref): k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. In a loss, k1's
  gradient is 0 in expectation unless it is weighted by the ratio.
  """
  d = jnp.where(mask > 0, logprobs - ref, 0)
  limited = log_ratio(ref, logprobs, mask)
  return {'k1': d, 'k2': d**2 / 2, 'k3': jnp.expm1(limited) - limited}[kind]


def masked_mean(values, mask, normalize: str, fixed_length: int = 0, denominator=None):
  """Mean of per-token values [G, R]; an all-masked group gives 0.

  token     sum / all tokens of the group, or / `denominator`: with a batch's tokens
            per group, means of groups or sums of micro-batches are the batch's token mean
  sequence  each branch averaged first (an empty one counts as 0), then the branches
  fixed     sum / (G fixed_length); fixed_length 0: R
  """
  values = jnp.where(mask > 0, values * mask, 0)
  if normalize == 'sequence':
    return (values.sum(1) / jnp.maximum(mask.sum(1), 1)).mean()
  if normalize == 'fixed':
    return values.sum() / (mask.shape[0] * (fixed_length or mask.shape[1]))
  return values.sum() / (jnp.maximum(mask.sum(), 1) if denominator is None else denominator)


def clipped_surrogate(rho, advantage, low: float, high: float):
  """-min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347 eq. 7), and where it clips."""
  limited = jnp.clip(rho, 1 - low, 1 + high) * advantage
  clipped = limited < rho * advantage
  return -jnp.where(clipped, lax.stop_gradient(limited), rho * advantage), clipped


def clipped_value_loss(values, old_values, returns, mask, clip: float, denominator=None):
  """Token mean of max((v - ret)^2, (V + clip(v - V, +-clip) - ret)^2) / 2 (arXiv:2005.12729).

  V: old_values, what the critic said before the update; all [G, R]. clip 0: no
  clipping. Returns the loss and the share of tokens whose clipped error counts.
  """
  real = lambda x: jnp.where(mask > 0, x, 0)
  values, old_values, returns = real(values), real(old_values), real(returns)
  error = (values - returns)**2
  limited = (jnp.clip(values, old_values - clip, old_values + clip) - returns)**2
  clipped = (limited > error) & (clip > 0)
  loss = masked_mean(jnp.where(clipped, limited, error) / 2, mask, 'token', denominator=denominator)
  return loss, masked_mean(clipped.astype(values.dtype), mask, 'token')


def importance_weights(trainer, sampler, mask, cap: float):
  """min(pi_trainer / pi_sampler, cap) [G, R], a constant, 1 where masked.

  Corrects for a sampler whose log-probs differ from the trainer's for the same
  parameters (truncated importance sampling; Ionides 2008). cap 0: all ones.
  """
  weights = jnp.minimum(jnp.exp(log_ratio(trainer, sampler, mask)), cap)
  return lax.stop_gradient(weights if cap else jnp.ones_like(weights))


# ---- policy gradient ----

def _old_logprobs(scores, group):
  """What ratios are taken to: the group's, or the policy's own, so that rho is exactly 1."""
  return lax.stop_gradient(scores.logprob) if group.old_logprobs is None else group.old_logprobs


def _token_ratio(scores, group):
  return jnp.exp(log_ratio(scores.logprob, _old_logprobs(scores, group), group.mask))


def _advantages(group):
  """[G, 1], or [G, R] where each token has its own."""
  return group.advantages if group.advantages.ndim == 2 else group.advantages[:, None]


def _policy_loss(config, scores, group, policy, rho, clipped):
  """Corrects for the sampler, adds KL and entropy, averages: (loss, metrics).

  policy, rho, clipped [G, R]: loss, ratio and whether it is clipped of each token.
  per token: w policy + kl_coef KL (times rho if kl_weighted) - entropy_coef entropy.
  Metrics, token means of the group: loss, kl, clipped, ratio, entropy; with
  sampler_logprobs also sampler_kl (k3 of KL(sampler || trainer)), sampler_gap
  (absolute difference, nats), sampler_capped (share of weights w that are capped).
  """
  mask, denominator = group.mask, group.denominator
  mean = lambda x: masked_mean(x.astype(rho.dtype), mask, 'token')
  metrics = {'clipped': mean(clipped), 'ratio': mean(rho), 'entropy': mean(scores.entropy)}
  sampler = group.sampler_logprobs
  if sampler is not None:
    old = lax.stop_gradient(_old_logprobs(scores, group))
    policy = policy * importance_weights(old, sampler, mask, config.importance_cap)
    capped = log_ratio(old, sampler, mask) > jnp.log(config.importance_cap or jnp.inf)
    metrics |= {'sampler_kl': mean(kl_estimate(sampler, old, mask)),
                'sampler_gap': mean(jnp.abs(old - sampler)), 'sampler_capped': mean(capped)}
  kl = jnp.zeros_like(rho)
  if group.ref_logprobs is not None:
    kl = kl_estimate(scores.logprob, group.ref_logprobs, mask, config.kl_kind)
  if config.kl_coef and config.kl_in == 'loss':
    if group.ref_logprobs is None:
      raise UserError(f'kl_coef={config.kl_coef} needs the log-probs of a reference policy; '
                      'give the group ref_logprobs or use kl_coef=0.')
    policy = policy + config.kl_coef * (rho * kl if config.kl_weighted else kl)
  if config.entropy_coef:
    policy = policy - config.entropy_coef * scores.entropy
  loss = masked_mean(policy, mask, config.normalize, config.fixed_length, denominator)
  return loss, {'loss': loss, 'kl': mean(kl), **metrics}


def reinforce(config: ObjectiveConfig, scores: Scores, group):
  """-A log pi (Williams 1992); with `advantages.rloo_advantages`, RLOO (arXiv:2402.14740).

  On-policy: old_logprobs only weight the KL. normalize='fixed' with fixed_length=1
  is the textbook's sum over a branch's tokens.
  """
  rho, policy = _token_ratio(scores, group), -_advantages(group) * scores.logprob
  return _policy_loss(config, scores, group, policy, rho, jnp.zeros_like(rho))


def grpo(config: ObjectiveConfig, scores: Scores, group):
  """Clipped policy gradient with a KL term (GRPO, arXiv:2402.03300 eq. 3; PPO's clip).

  loss = mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coef KL.
  The paper's mean is normalize='sequence'; 'token' is TRL's bnpo.
  """
  rho = _token_ratio(scores, group)
  policy, clipped = clipped_surrogate(rho, _advantages(group), config.clip_low, config.clip_high)
  return _policy_loss(config, scores, group, policy, rho, clipped)


def dapo(config: ObjectiveConfig, scores: Scores, group):
  """GRPO's loss averaged over tokens, with clip_high > clip_low (DAPO, arXiv:2503.14476 eq. 8).

  Its other parts: `advantages.informative`, `advantages.overlong_penalty`; the
  mean is over a whole batch's tokens where the groups have a `denominator`.
  """
  return grpo(dataclasses.replace(config, normalize='token'), scores, group)


def dr_grpo(config: ObjectiveConfig, scores: Scores, group):
  """GRPO's loss over a fixed length (Dr. GRPO, arXiv:2503.20783); A from `centered_advantages`."""
  return grpo(dataclasses.replace(config, normalize='fixed'), scores, group)


def gspo(config: ObjectiveConfig, scores: Scores, group):
  """GRPO with one ratio per branch (GSPO, arXiv:2507.18071 eq. 5): not separable.

  rho = exp(mean over the branch's tokens of log pi - log old); mean of branches.
  """
  mask = group.mask
  gap = jnp.where(mask > 0, scores.logprob - _old_logprobs(scores, group), 0)
  gap = gap.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)
  rho = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)) * jnp.ones_like(mask)
  policy, clipped = clipped_surrogate(rho, _advantages(group), config.clip_low, config.clip_high)
  config = dataclasses.replace(config, normalize='sequence')
  return _policy_loss(config, scores, group, policy, rho, clipped)


def cispo(config: ObjectiveConfig, scores: Scores, group):
  """-min(rho, 1 + clip_high) A log pi, the ratio a constant (CISPO, arXiv:2506.13585 eq. 4).

  No token's gradient is dropped, only its weight is capped; no lower cap, token mean.
  """
  rho = _token_ratio(scores, group)
  weight = lax.stop_gradient(jnp.minimum(rho, 1 + config.clip_high))
  policy = -weight * _advantages(group) * scores.logprob
  config = dataclasses.replace(config, normalize='token')
  return _policy_loss(config, scores, group, policy, rho, rho > 1 + config.clip_high)


def ppo(config: ObjectiveConfig, scores: Scores, group):
  """PPO with a critic (arXiv:1707.06347 eq. 9): GRPO's clipped loss, token advantages, value loss.

  advantages [G, R] (`advantages.gae`, `advantages.whiten`) and returns [G, R] are made
  once a rollout. Without scores.value and returns: the policy's loss alone. Metrics:
  also policy_loss, value_loss, value_clipped (share of tokens).
  """
  loss, metrics = grpo(config, scores, group)
  returns = group.returns
  if (scores.value is None) != (returns is None):
    raise UserError('ppo with a critic needs the values of the model and the returns of the group; '
                    f'there are no {"values" if scores.value is None else "returns"}.')
  if returns is None:
    return loss, metrics
  old = group.old_values
  old = lax.stop_gradient(scores.value) if old is None else old
  value_loss, clipped = clipped_value_loss(scores.value, old, returns, group.mask, config.value_clip,
                                           group.denominator)
  total = loss + config.value_coef * value_loss
  return total, metrics | {'loss': total, 'policy_loss': loss, 'value_loss': value_loss,
                           'value_clipped': clipped}


# ---- preferences: branch 2i is chosen over branch 2i + 1 ----

def _preference(scores, group, pair_loss, reference: bool = True, per_token: bool = False):
  """Mean of pair_loss(margin) over the pairs that hold tokens: (loss, metrics). Not separable.

  margin [G/2] = chosen - rejected, each the sum over its tokens of log(pi / ref)
  (reference False: of log pi), or with per_token their mean. Metrics: loss, margin,
  chosen and rejected (nats), accuracy (share of margins above 0).
  """
  mask = group.mask
  if mask.shape[0] % 2:
    raise UserError(f'a preference objective needs pairs, chosen before rejected; '
                    f'a group of {mask.shape[0]} branches has a branch without a partner.')
  if reference and group.ref_logprobs is None:
    raise UserError('this preference objective needs the log-probs of a reference policy; '
                    'give the group ref_logprobs or use simpo.')
  values = scores.logprob - group.ref_logprobs if reference else scores.logprob
  sums = jnp.where(mask > 0, values, 0).sum(1)
  if per_token:
    sums = sums / jnp.maximum(mask.sum(1), 1)
  chosen, rejected = sums[::2], sums[1::2]
  margin = chosen - rejected
  real = (mask[::2] > 0).any(1) | (mask[1::2] > 0).any(1)
  mean = lambda x: jnp.where(real, x, 0).sum() / jnp.maximum(real.sum(), 1)
  loss = mean(pair_loss(margin))
  return loss, {'loss': loss, 'margin': mean(margin), 'chosen': mean(chosen), 'rejected': mean(rejected),
                'accuracy': mean((margin > 0).astype(margin.dtype))}


def _sigmoid_loss(config, margin, target=0.0):
  """-(1 - s) log sigmoid(x) - s log sigmoid(-x), x = preference_beta margin - target, s label_smoothing."""
  x, smoothing = config.preference_beta * margin - target, config.label_smoothing
  return (1 - smoothing) * jax.nn.softplus(-x) + smoothing * jax.nn.softplus(x)


def dpo(config: ObjectiveConfig, scores: Scores, group):
  """-log sigmoid(preference_beta margin) (DPO, arXiv:2305.18290 eq. 7), labels smoothed."""
  return _preference(scores, group, functools.partial(_sigmoid_loss, config))


def dpo_norm(config: ObjectiveConfig, scores: Scores, group):
  """DPO on means over tokens instead of sums (Tulu 3, arXiv:2411.15124)."""
  return _preference(scores, group, functools.partial(_sigmoid_loss, config), per_token=True)


def simpo(config: ObjectiveConfig, scores: Scores, group):
  """DPO on mean log-probs less target_margin, without a reference (SimPO, arXiv:2405.14734 eq. 6)."""
  pair_loss = functools.partial(_sigmoid_loss, config, target=config.target_margin)
  return _preference(scores, group, pair_loss, reference=False, per_token=True)


def ipo(config: ObjectiveConfig, scores: Scores, group):
  """(margin - 1 / (2 preference_beta))^2, sums over tokens (IPO, arXiv:2310.12036 eq. 17)."""
  goal = 1 / (2 * config.preference_beta)
  return _preference(scores, group, lambda margin: (margin - goal)**2)


# ---- supervised ----

def negative_log_likelihood(config: ObjectiveConfig, scores: Scores, group):
  """Supervised loss on masked branch tokens. Metrics: loss (nats a token)."""
  loss = masked_mean(-scores.logprob, group.mask, config.normalize, config.fixed_length,
                     group.denominator)
  return loss, {'loss': loss}


def make_objective(name: str, config: ObjectiveConfig) -> Objective:
  """The objective called `name`, with its coefficients; UserError lists the names."""
  separable = {'reinforce': reinforce, 'rloo': reinforce, 'grpo': grpo, 'dapo': dapo, 'dr_grpo': dr_grpo,
               'cispo': cispo, 'ppo': ppo, 'nll': negative_log_likelihood}
  coupled = {'gspo': gspo, 'dpo': dpo, 'dpo_norm': dpo_norm, 'ipo': ipo, 'simpo': simpo}
  functions = separable | coupled
  if name not in functions:
    raise UserError(f'unknown objective {name!r}; use {", ".join(functions)}.')
  return Objective(functools.partial(functions[name], config), name in separable)
