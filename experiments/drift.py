"""Staleness: how wrong log-probs and loss are on a state captured some updates ago.

    bash launch.sh drift --out=experiments/results/drift.jsonl
    bash launch.sh drift --out=experiments/results/drift.jsonl --learning_rate=1e-4

From a warm start, GRPO goes on; at each anchor the held-out prompts are captured and branches
sampled, and after 1, 2, 4 and 8 updates those branches are scored on the old state and on a
fresh capture, both under the new parameters. Rows: mean absolute difference of the log-probs
(nats) and relative difference of the mean negative log-likelihood. About 3 minutes.
"""
import dataclasses

import jax
import numpy as np

from experiments import common, rollouts, sampling, study, train, training
from experiments.refresh import drift


@dataclasses.dataclass(frozen=True)
class Study:
  updates: tuple[str, ...] = ('1', '2', '4', '8')  # ages of the state, in updates
  anchors: int = 8  # captures that are let grow old, one after another


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('resample', 0), ('learning_rate', 2e-3), ('warmup_reward', 0.42), ('out', 'runs/drift.jsonl')):
    flags.set_default(name, value)


def anchor_groups(run, functions, learner, key):
  """Groups of branches sampled on held-out prompts under the learner's parameters."""
  size = run.mesh.shape['data']
  examples = [run.source.example('test', i) for i in range(run.train.prompts)]
  parts = [examples[i:i + size] for i in range(0, len(examples), size)]
  keys = jax.random.split(key, len(parts))
  return [rollouts.roll_out(run, functions, learner, part, k).groups for part, k in zip(parts, keys)]


def main(flags):
  settings = common.from_flags(flags, Study())
  ages = common.whole_numbers('updates', settings.updates, 1)
  run = training.make_run(flags)
  optimizer = training.training_optimizer(run)
  params = study.warm_start(run, sampling.held_out_sampler(run, run.replay.prefix_capacity))
  learner, functions = study.start_learner(run, optimizer, params), rollouts.make_functions(run, optimizer)
  capture, score = rollouts.capture_and_score(run, functions)
  source = common.provenance() | {'task': run.train.task, 'prompt_len': run.train.prompt_len, 'seed': run.train.seed,
                                  'learning_rate': run.train.learning_rate}
  found, step = {age: [] for age in ages}, 0
  for anchor in range(settings.anchors):
    groups = anchor_groups(run, functions, learner, jax.random.key(anchor))
    states = [capture(learner.params, g) for g in groups]
    for age in range(1, max(ages) + 1):
      learner, _ = train.train_step(run, functions, learner, step)
      step += 1
      if age in ages:
        stale = [score(learner.params, g, s).logprob for g, s in zip(groups, states)]
        fresh = [score(learner.params, g, None).logprob for g in groups]
        joined = jax.tree.map(lambda *x: np.concatenate(x), *groups)
        row = {'anchor': anchor, 'step': step, 'updates': age} | drift(joined, np.concatenate(stale), np.concatenate(fresh))
        found[age].append(row)
        common.append_row(run.where.out, source | row)
        common.log(f'anchor {anchor}, {age} updates: log-probs off by {row["logprob"]:.4f} nats, loss by {row["loss"]:.1%}')
  mean = lambda name: {age: float(np.mean([r[name] for r in rows])) for age, rows in found.items()}
  common.emit(source | {'anchors': settings.anchors, 'logprob': mean('logprob'), 'loss': mean('loss')})


if __name__ == '__main__':
  common.run(define, main)
