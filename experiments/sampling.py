"""Prompts sampled from and rewarded: what rollouts and evaluations share."""
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from branchreplay import batch, mesh, processes, sample, tasks
from branchreplay.config import ReplayConfig
from experiments import sources, training
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


class Sampler(NamedTuple):
  """A compiled rollout, of training, of evaluations or of both."""
  rollout: Any  # see `sample.rollout_function`
  replay: ReplayConfig  # of which its prompts have the capacity
  samples: int  # responses to a prompt


def make_sampler(run: Run, capacity: int, samples: int, keep_captured: bool = False) -> Sampler:
  """The sampler of prompts of up to `capacity` positions; compiled at its first call."""
  replay = dataclasses.replace(run.replay, prefix_capacity=capacity)
  rollout = sample.rollout_function(run.mesh, run.model, replay, samples, run.train.max_new_tokens, keep_captured)
  return Sampler(rollout, replay, samples)


def training_samples(train) -> int:
  """Responses sampled for a prompt that is trained on."""
  return train.samples or train.branches


def held_out_sampler(run: Run, capacity: int) -> Sampler:
  """The sampler of held-out prompts of any length up to `capacity`; one does for all seeds and modes."""
  return make_sampler(run, capacity, run.train.eval_samples or training_samples(run.train))


def respond(run: Run, sampler: Sampler, params, examples, key):
  """(Rollout, captured or None): responses to the examples' prompts."""
  prompts = stack_prompts(sampler.replay, [e.prompt for e in examples])
  return sampler.rollout(params, prompts, jax.random.split(key, len(examples)), sampling_of(run))


def held_out(run: Run, sampler: Sampler):
  """(params, prompt_len) -> held-out examples and rewards [examples, samples].

  Prompts of --data_file are as long as they are, whatever prompt_len says. As many go in a
  call as in training, where --eval_prompts is a multiple of that: the same program serves both.
  """
  train = run.train
  corpora = None if train.data_file else tasks.make_task(train.task, train.prompt_len).corpora
  count = math.gcd(train.eval_prompts, run.mesh.shape[mesh.DATA] * train.groups_at_once)
  key = training.on_mesh(run, jax.random.key(train.seed + 2))  # as training's lies, or all would compile anew

  def sampled(params, prompt_len):
    source = run.source if train.data_file else sources.of_task(train, prompt_len, corpora)
    examples, rewards = [source.example('test', i) for i in range(train.eval_prompts)], []
    for first in range(0, train.eval_prompts, count):
      part = examples[first:first + count]
      out, _ = respond(run, sampler, params, part, jax.random.fold_in(key, first))
      rewards.append(rewards_of(source, part, out))
    return examples, np.concatenate(rewards)

  return sampled


def evaluator(run: Run, sampler: Sampler):
  """(params, prompt_len) -> mean sampled reward on held-out prompts, see `held_out`."""
  sampled = held_out(run, sampler)
  return lambda params, prompt_len: float(np.nanmean(sampled(params, prompt_len)[1]))
