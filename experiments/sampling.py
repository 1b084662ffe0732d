"""Prompts sampled from and rewarded: what rollouts and evaluations share."""
import dataclasses

import jax
import numpy as np

from branchreplay import batch, mesh, processes, sample, tasks
from branchreplay.config import ReplayConfig
from experiments import sources
from experiments.training import Run


def stack_prompts(replay: ReplayConfig, prompts) -> sample.Prompts:
  """N prompts (each a list of tokens) as one `Prompts`, padded to the capacity; UserError for one that is longer."""
  prefixes, lengths = zip(*(batch.make_prefix(replay, p) for p in prompts))
  return sample.Prompts(np.stack(prefixes), np.stack(lengths), np.array([p[-1] for p in prompts], np.int32))


def sampling_of(run: Run) -> sample.Sampling:
  """How a run draws its tokens."""
  return sample.Sampling(np.float32(run.train.temperature), np.float32(run.train.top_p),
                         np.int32(run.source.stop_token))


def rewards_of(source: sources.Source, examples, rollout) -> np.ndarray:
  """Rewards [N, G] of sampled tokens; a user's function may be of chance, so that one process alone asks it."""
  tokens, length = processes.fetch((rollout.tokens, rollout.length))
  return processes.from_first(lambda: np.array([
      [source.reward(e, tokens[i, g, :length[i, g]]) for g in range(tokens.shape[1])] for i, e in enumerate(examples)]))


def held_out_rollout(run: Run, capacity: int):
  """The jitted rollout of held-out prompts of any length up to capacity; compiled once for all seeds and modes."""
  return sample.rollout_function(run.mesh, run.model, dataclasses.replace(run.replay, prefix_capacity=capacity),
                                 run.train.eval_samples, run.train.max_new_tokens, keep_captured=False)


def held_out_sampler(run: Run, capacity: int, rollout=None):
  """(params, prompt_len) -> held-out examples and rewards [examples, samples], prompts of any length up to capacity.

  Prompts of --data_file are as long as they are, whatever prompt_len says.
  rollout: of `held_out_rollout`, or None to make it.
  """
  rollout = rollout or held_out_rollout(run, capacity)
  train = run.train
  corpora = None if train.data_file else tasks.make_task(train.task, train.prompt_len).corpora
  replay = dataclasses.replace(run.replay, prefix_capacity=capacity)
  rows = run.mesh.shape[mesh.DATA]

  def sampled(params, prompt_len):
    source = run.source if train.data_file else sources.of_task(train, prompt_len, corpora)
    count = max(c for c in range(rows, min(train.eval_prompts, 8 * rows) + 1, rows) if train.eval_prompts % c == 0)
    examples, rewards = [source.example('test', i) for i in range(train.eval_prompts)], []
    for first in range(0, train.eval_prompts, count):
      part = examples[first:first + count]
      keys = jax.random.split(jax.random.fold_in(jax.random.key(train.seed + 2), first), count)
      out, _ = rollout(params, stack_prompts(replay, [e.prompt for e in part]), keys, sampling_of(run))
      rewards.append(rewards_of(source, part, out))
    return examples, np.concatenate(rewards)

  return sampled


def evaluator(run: Run, capacity: int, rollout=None):
  """(params, prompt_len) -> mean sampled reward on held-out prompts, see `held_out_sampler`."""
  sampled = held_out_sampler(run, capacity, rollout)
  return lambda params, prompt_len: float(np.nanmean(sampled(params, prompt_len)[1]))
