"""Learning curves of several settings (arms) from one warm start, over seeds: what objectives.py and convergence.py share.

A seed's warm-up is done once and every arm starts from its parameters, with the same prompts in
the same order and the same random keys. An arm's rows are appended to --out when it ends; a
run stopped and started again does over what was not finished and skips the rest. Kinds of row:

    curve    at an evaluation: held-out reward, mean sampled reward since the last one
    quality  after the last update: held-out reward at several times the trained length, by where
             in the document the asked fact stands
"""
import os
from pathlib import Path
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import metrics
from branchreplay.config import UserError
from experiments import common, plots, rollouts, sampling, train, training, warmup

DEPTHS = 5  # parts of a document that quality rows tell apart


def configure(flags, **values):
  """The Run of the flags with other values."""
  for name, value in values.items():
    flags[name].value = value
  return training.make_run(flags)


def warm_start(run, sampler: sampling.Sampler):
  """Parameters after the supervised warm-up of a run, on the host; see `sampling.evaluator`."""
  with tempfile.TemporaryDirectory() as folder:
    with metrics.JsonlWriter(Path(folder) / 'metrics.jsonl') as writer:
      return jax.device_get(warmup.warm_up(run, sampling.evaluator(run, sampler), writer))


def start_learner(run, optimizer, params) -> training.Learner:
  """A learner whose parameters are `params`; PPO's critic begins at 0."""
  learner = training.make_learner(run, optimizer)
  start = params.replace(value=learner.params.value)
  start = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), start, learner.params)
  reference = jax.tree.map(jnp.copy, start) if training.needs_reference(run) else None
  return learner._replace(params=start, reference=reference)


def learn(run, functions, sampled, params, write, times=()):
  """An arm's updates from the warm start `params`; rows at every evaluation, and of quality at the end."""
  optimizer = training.training_optimizer(run)
  learner, every, steps = start_learner(run, optimizer, params), run.train.eval_every, run.train.steps
  since, positions, seconds = [], 0, 0.0
  for step in range(steps + 1):
    if step % every == 0 or step == steps:
      reward = float(np.nanmean(sampled(learner.params, run.train.prompt_len)[1]))
      write({'kind': 'curve', 'step': step, 'reward': reward, 'positions': positions, 'seconds': seconds,
             'sampled_reward': float(np.mean([r['reward'] for r in since])) if since else None,
             'sampled_crc': [r['sampled_crc'] for r in since]})
      common.log(f'update {step}/{steps}  held-out reward {reward:.3f}')
      since = []
    if step < steps:
      began = time.monotonic()
      learner, row = train.train_step(run, functions, learner, step)
      jax.block_until_ready(learner.params)
      since.append(row)
      positions, seconds = positions + row['positions'], seconds + time.monotonic() - began
  for k in times:
    examples, rewards = sampled(learner.params, k * run.train.prompt_len)
    part = np.array([int(e.depth * DEPTHS) for e in examples])
    write({'kind': 'quality', 'step': steps, 'times': k, 'reward': float(rewards.mean()),
           'by_depth': [float(rewards[part == i].mean()) if (part == i).any() else None for i in range(DEPTHS)]})
  return learner


def curves(flags, arms: dict[str, dict], by: str, seeds: list[int], times=()) -> list[dict]:
  """Runs every arm (name -> values of flags) for every seed; all rows of --out.

  by: the key of a row that holds the arm's name.
  """
  runs = {name: configure(flags, **values) for name, values in arms.items()}  # a mistake is found before any work
  run = next(iter(runs.values()))
  out, steps = run.where.out, run.train.steps
  if not out:
    raise UserError('name a file for the rows with --out.')
  rows = plots.read_rows(out) if os.path.exists(out) else []
  done = {(r['task'], r[by], r['seed']) for r in rows if r['step'] == steps and r.get('last')}
  capacity = max((1, *times)) * run.replay.prefix_capacity
  functions, sampler = {}, sampling.held_out_sampler(run, capacity)
  for seed in seeds:
    todo = [name for name in arms if (run.train.task, name, seed) not in done]
    first = configure(flags, seed=seed, **next(iter(arms.values())))
    params = warm_start(first, sampler) if todo else None
    for name in todo:
      this = configure(flags, seed=seed, **arms[name])
      if name not in functions:  # what they compile depends on no seed
        functions[name] = rollouts.make_functions(this, training.training_optimizer(this))
      common.log(f'{by} {name}, seed {seed}:')
      found = []
      learn(this, functions[name], sampling.held_out(this, sampler), params, found.append, times)
      same = common.provenance() | {'task': this.train.task, 'prompt_len': this.train.prompt_len, by: name, 'seed': seed}
      for row in found:
        common.append_row(out, same | row | {'last': row is found[-1]})
  return plots.read_rows(out)


def closing(rows: list[dict], by: str) -> dict:
  """Held-out rewards of the seeds before and after, by arm."""
  ends = lambda name, step: list({r['seed']: r['reward'] for r in rows if r['kind'] == 'curve'
                                  and r[by] == name and r['step'] == step}.values())
  last = max(r['step'] for r in rows)
  names = dict.fromkeys(r[by] for r in rows)
  return {'steps': last, 'warm_start': {n: ends(n, 0) for n in names}, 'held_out_reward': {n: ends(n, last) for n in names}}
