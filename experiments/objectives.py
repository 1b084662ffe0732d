"""Learning by several objectives from one warm start, on synthetic recall, over seeds.

    bash launch.sh objectives --out=experiments/results/objectives.jsonl

A seed's warm-up is done once and every objective starts from its parameters, with the same
prompts in the same order. One row an evaluation; a run stopped and started again skips what
is in --out already. Preference objectives pair the better sampled branches with the worse.
"""
import dataclasses
import os
from pathlib import Path
import tempfile
import time

import jax
import jax.numpy as jnp

from branchreplay import metrics
from branchreplay.config import UserError
from experiments import common, plots, train, training


@dataclasses.dataclass(frozen=True)
class Study:
  objectives: tuple[str, ...] = ('grpo', 'ppo', 'dpo')  # see objectives.py of branchreplay
  seeds: tuple[str, ...] = ('0', '1', '2')  # of parameters, data and sampling


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('task', 'recall'), ('prompt_len', 256), ('segment_len', 256), ('steps', 120),
                      ('eval_every', 20), ('out', 'runs/objectives.jsonl')):
    flags.set_default(name, value)


def configure(flags, **values):
  """The Run of the flags with other values."""
  for name, value in values.items():
    flags[name].value = value
  return training.make_run(flags)


def warm_start(flags, seed: int):
  """Parameters after the supervised warm-up of a seed, on the host."""
  run = configure(flags, seed=seed, objective='grpo')
  with tempfile.TemporaryDirectory() as folder:
    with metrics.JsonlWriter(Path(folder) / 'metrics.jsonl') as writer:
      return jax.device_get(training.warm_up(run, training.evaluator(run, run.replay.prefix_capacity), writer))


def learn(flags, objective: str, seed: int, params, write) -> None:
  """One objective's updates from the warm start; a row at every evaluation."""
  run, started = configure(flags, seed=seed, objective=objective), time.monotonic()
  optimizer = training.training_optimizer(run)
  learner = training.make_learner(run, optimizer)
  place = lambda x, like: jax.device_put(x, like.sharding)
  start = params.replace(value=learner.params.value)  # PPO's critic begins at 0
  start = jax.tree.map(place, start, learner.params)
  reference = jax.tree.map(jnp.copy, start) if training.needs_reference(run) else None
  learner = learner._replace(params=start, reference=reference)
  functions = train.make_functions(run, optimizer)
  evaluate = training.evaluator(run, run.replay.prefix_capacity)
  positions = 0
  for step in range(run.train.steps + 1):
    if step % run.train.eval_every == 0 or step == run.train.steps:
      reward = evaluate(learner.params, run.train.prompt_len)
      write({'objective': objective, 'seed': seed, 'step': step, 'reward': reward, 'positions': positions,
             'seconds': time.monotonic() - started})
      common.log(f'{objective}, seed {seed}: update {step}/{run.train.steps}  held-out reward {reward:.3f}')
    if step < run.train.steps:
      learner, row = train.train_step(run, functions, learner, step)
      positions += row['positions']


def main(flags):
  study = common.from_flags(flags, Study())
  if not all(s.isdecimal() for s in study.seeds):
    raise UserError(f'--seeds={",".join(study.seeds)}: give whole numbers, as in --seeds=0,1,2.')
  for objective in study.objectives:
    run = configure(flags, objective=objective)  # an unknown one is refused before any work
  out = run.where.out
  rows = plots.read_rows(out) if os.path.exists(out) else []
  done = {(r['objective'], r['seed']) for r in rows if r['step'] == run.train.steps}
  source = common.provenance() | {'task': run.train.task, 'prompt_len': run.train.prompt_len, 'mode': run.replay.mode}
  for seed in map(int, study.seeds):
    todo = [o for o in study.objectives if (o, seed) not in done]
    params = warm_start(flags, seed) if todo else None
    for objective in todo:
      learn(flags, objective, seed, params, lambda row: common.append_row(out, source | row))
  rows = plots.read_rows(out)
  figure = plots.curves(Path(out).with_suffix('.png'), rows, 'objective')
  last = {o: [r['reward'] for r in rows if r['objective'] == o and r['step'] == run.train.steps]
          for o in study.objectives}
  common.log(f'Figure: {figure}')
  common.emit(source | {'steps': run.train.steps, 'held_out_reward': last,
                        'warm_start': sorted({r['reward'] for r in rows if r['step'] == 0})})


if __name__ == '__main__':
  common.run(define, main)
