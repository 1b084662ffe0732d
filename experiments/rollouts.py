"""Rollouts: branches sampled, rewarded and made into groups ready for an objective.

`experiments/train.py` is the loop that calls them.
"""
from typing import Any, NamedTuple

import jax
import numpy as np

from branchreplay import batch, gradients, objectives, processes
from branchreplay.advantages import (
    branch_advantages, gae, overlong_penalty, penalized_rewards, preference_order, token_rewards, whiten,
    widest_subset)
from branchreplay.config import UserError
from experiments import resume, sampling, training
from experiments.training import Learner, Run


class Functions(NamedTuple):
  sampler: sampling.Sampler
  update: Any
  compiled: dict  # gradient and score functions, made at first use


class Batch(NamedTuple):
  """What came of one dispatch of prompts: N groups of sampled, rewarded branches."""
  groups: Any
  captured: Any  # of their prefixes, under the parameters that sampled; or None
  rewards: np.ndarray  # [N, S] of all samples, the task's own
  shaped: np.ndarray  # [N, G] of the branches trained on, with what length and KL take off
  cut: int  # prompts that were cut on the left
  tokens: int = 0  # sampled, of all N S responses


def pair_up(groups, rewards):
  """Branches in pairs, the better one first; pairs of equal rewards are masked."""
  orders, reals = zip(*(preference_order(r) for r in rewards))
  order = np.stack(orders)
  take = lambda x: np.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)
  changed = {name: take(getattr(groups, name)) for name in (
      'inputs', 'targets', 'length', 'mask', 'advantages', 'sampler_logprobs', 'ref_logprobs')
             if getattr(groups, name) is not None}
  return groups.replace(**changed | {'mask': changed['mask'] * np.stack(reals)[..., None]})


def informative(data: Batch) -> np.ndarray:
  """Which groups have a gradient, bool [N]: rewards differ."""
  return np.any(data.groups.advantages != 0, 1)


def samples_first(train) -> bool:
  """Whether the update begins when all is sampled, not a dispatch at a time."""
  return bool(train.resample or train.stream) or train.objective == 'ppo' or train.refresh_every > 1


def make_functions(run: Run, optimizer, shared: sampling.Sampler | None = None) -> Functions:
  """The jitted functions of a run.

  Rollouts keep their captures for the update, unless that begins when all is sampled; then `shared`, the
  evaluations' sampler, is training's too if it samples as many, and one program less is compiled.
  """
  keep, samples = not (run.train.full_sequence or samples_first(run.train)), sampling.training_samples(run.train)
  if keep or shared is None or shared.samples != samples:
    shared = sampling.make_sampler(run, run.replay.prefix_capacity, samples, keep)
  return Functions(shared, training.update_function(optimizer), {})


def batch_function(run: Run, functions: Functions, kind: str, groups):
  """The jitted function `kind` for groups of this shape.

  captured, fresh: the gradient on given captures or its own; score, score_captured: as numpy; capture.
  """
  key = kind, jax.tree.structure(groups)
  if key not in functions.compiled:
    if kind == 'capture':
      made = gradients.capture_function(run.mesh, run.model, run.replay, groups)
    elif run.train.stream and kind == 'fresh':
      made = resume.gradient_in_steps(run, groups)
    elif kind.startswith('score'):
      score = gradients.score_function(run.mesh, run.model, run.replay, groups, kind == 'score_captured')
      made = lambda *arguments: processes.fetch(score(*arguments))
    else:
      made = gradients.gradient_function(
          run.mesh, run.model, run.replay, objectives.make_objective(run.train.objective, run.objective), groups,
          full_sequence=run.train.full_sequence, with_captured=kind == 'captured')
    functions.compiled[key] = made
  return functions.compiled[key]


class Responses(NamedTuple):
  """Rewarded responses to N prompts, S each: rows of arrays of any lengths."""
  tokens: list  # [N][S] of i32 [length]
  logprobs: list | None  # [N][S] of the sampler's log-probs [length], nats; None: not known
  rewards: np.ndarray  # [N, S]
  captured: Any  # of the prompts' prefixes, or None


def sampled(run: Run, functions: Functions, learner: Learner, examples, key) -> Responses:
  """Responses decoded from the policy, rewarded by the source."""
  rollout, captured = sampling.respond(run, functions.sampler, learner.params, examples, key)
  rollout = processes.fetch(rollout)
  rows = lambda x: [[row[:n] for row, n in zip(*group)] for group in zip(x, rollout.length)]
  return Responses(rows(rollout.tokens), rows(rollout.logprobs), sampling.rewards_of(run.source, examples, rollout), captured)


def offline(run: Run, examples) -> Responses:
  """The responses and rewards of the records; UserError for one with fewer than `branches`."""
  for e in examples:
    if len(e.answer[0]) < run.train.branches:
      raise UserError(f'{e.where}: {len(e.answer[0])} responses, and --branches={run.train.branches} are trained on; '
                      'lower it or add responses.')
  most = max(len(e.answer[0]) for e in examples)
  pad = lambda rewards: np.append(rewards, np.full(most - len(rewards), np.nan))  # never chosen before real ones
  return Responses([e.answer[0] for e in examples], None, np.array([pad(e.answer[1]) for e in examples]), None)


def roll_out(run: Run, functions: Functions, learner: Learner, examples, key) -> Batch:
  """Groups of rewarded branches of the examples' prompts: sampled, or those of the records."""
  train, objective = run.train, run.objective
  found = offline(run, examples) if train.offline else sampled(run, functions, learner, examples, key)
  kept = np.stack([widest_subset(r, train.branches) for r in found.rewards])  # [N, G]
  pick = lambda rows: [[row[g] for g in chosen] for row, chosen in zip(rows, kept)]
  tokens, shaped = pick(found.tokens), np.take_along_axis(found.rewards, kept, 1)
  length = np.array([[len(t) for t in row] for row in tokens])
  logprobs = [None] * len(examples) if found.logprobs is None else pick(found.logprobs)
  groups = batch.stack([batch.make_group(run.model, run.replay, e.prompt, t, sampler_logprobs=l, dtype=run.dtype)
                        for e, t, l in zip(examples, tokens, logprobs)])
  reference = training.reference_of(run, learner)
  if reference is not None:
    scores = batch_function(run, functions, 'score', groups)(reference, groups)
    groups = groups.replace(ref_logprobs=scores.logprob)
  if train.overlong_buffer:
    shaped = shaped + overlong_penalty(length, train.max_new_tokens, train.overlong_buffer)
  if objective.kl_coef and objective.kl_in == 'reward' and train.objective != 'ppo':
    kl = objectives.kl_estimate(groups.sampler_logprobs, groups.ref_logprobs, groups.mask, objective.kl_kind)
    shaped = np.stack([penalized_rewards(*x, objective.kl_coef) for x in zip(shaped, kl, groups.mask)])
  advantages = [branch_advantages(train.objective, r, train.drop_nonfinite_rewards) for r in shaped]
  groups = groups.replace(advantages=np.array(advantages, run.dtype))
  if train.objective in objectives.PREFERENCES:
    groups = pair_up(groups, shaped)
  elif train.objective == 'nll':  # rejection sampling: the better branches are imitated
    groups = groups.replace(mask=groups.mask * (groups.advantages > 0)[..., None])
  if train.objective in objectives.BATCH_MEANS:  # what to divide by is known when the batch is whole
    groups = groups.replace(denominator=np.ones(len(examples), run.dtype))
  return Batch(groups, found.captured, found.rewards, shaped, sum(getattr(e, 'cut', False) for e in examples),
               0 if train.offline else sum(len(t) for row in found.tokens for t in row))


def with_critic(run: Run, functions: Functions, params, batches: list[Batch]) -> list[Batch]:
  """PPO's token advantages, whitened over all batches, and what its critic is to learn."""
  objective, out = run.objective, []
  for data in batches:
    groups = data.groups
    scores = batch_function(run, functions, 'score', groups)(params, groups)
    rewards = np.stack([token_rewards(*x) for x in zip(data.shaped, groups.mask)])
    if objective.kl_coef and objective.kl_in == 'reward':
      kl = objectives.kl_estimate(scores.logprob, groups.ref_logprobs, groups.mask, objective.kl_kind)
      rewards = penalized_rewards(rewards, kl, groups.mask, objective.kl_coef)
    advantages, returns = gae(rewards.astype(run.dtype), scores.value, groups.mask, objective.gamma, objective.lam)
    out.append(groups.replace(advantages=advantages, returns=np.asarray(returns), old_values=scores.value,
                              old_logprobs=scores.logprob))
  white = whiten(np.concatenate([g.advantages for g in out]), np.concatenate([g.mask for g in out]))
  parts = np.split(np.asarray(white), len(out))
  return [data._replace(groups=g.replace(advantages=p)) for data, g, p in zip(batches, out, parts)]


def choose(pool: list[Batch], size: int, most: int) -> list[Batch]:
  """Batches of `size` groups with the informative ones of `pool`, at most `most`, filled up with others."""
  all_ = jax.tree.map(lambda *x: np.concatenate(x), *(data._replace(cut=np.zeros(0), tokens=np.zeros(0)) for data in pool))
  good = informative(all_)
  count = min(max(1, -(-int(good.sum()) // size)) * size, most)
  order = np.argsort(~good, kind='stable')[:count]
  return [jax.tree.map(lambda x: x[order[i:i + size]], all_._replace(cut=None, tokens=None)) for i in range(0, count, size)]


def capture_and_score(run: Run, functions: Functions):
  """What `refresh` calls."""
  capture = lambda params, groups: batch_function(run, functions, 'capture', groups)(params, groups)
  def score(params, groups, captured):
    if captured is None:
      return batch_function(run, functions, 'score', groups)(params, groups)
    return batch_function(run, functions, 'score_captured', groups)(params, groups, captured)
  return capture, score
