"""A long run watched: memory, compilations and throughput over 2,000 updates with prompts of many lengths.

    bash launch.sh soak --out=experiments/results/soak.jsonl

The quickstart's training loop, with its evaluations and checkpoints, on prompts of 16 lengths up to
--prompt_len in turn and responses of 1 to 6 tokens; --resample is 0, so that updates cost alike. A row
every 100 updates: resident memory of the process and bytes of live device arrays, programs compiled
since the last row, median seconds of an update. The closing row compares the last tenth with the
second (the first compiles). About 20 minutes on 2 cores, which should be idle.
"""
import dataclasses
import gc
import tempfile
import types

import jax
import numpy as np

from branchreplay import checkpoint, metrics, tasks
from branchreplay.config import UserError
from experiments import common, rollouts, sampling, sources, train, training, warmup

COMPILED = '/jax/core/compile/backend_compile_duration'


@dataclasses.dataclass(frozen=True)
class Soak:
  every: int = 100  # updates a row
  lengths: int = 16  # different prompt lengths, from a part of prompt_len to all of it


def define(flags):
  training.define(flags)
  common.define_flags(flags, Soak())
  for name, value in (('steps', 2000), ('resample', 0), ('max_new_tokens', 6), ('decay_start', 1000), ('decay_steps', 1000),
                      ('learning_rate', 2e-3), ('warmup_reward', 0.42), ('eval_every', 100), ('checkpoint_every', 100)):
    flags.set_default(name, value)


def ragged(train_config, count: int) -> sources.Source:
  """Examples of `count` prompt lengths in turn; held-out ones are of the full length."""
  full = train_config.prompt_len
  lengths = [max(tasks.MIN_PROMPT_LEN, full * (i + 1) // count) for i in range(count)]
  corpora = tasks.make_task(train_config.task, full).corpora
  of_length = {n: sources.of_task(train_config, n, corpora) for n in (full, *lengths)}
  pick = lambda split, index: full if split == 'test' else lengths[index % count]
  return of_length[full]._replace(example=lambda split, index: of_length[pick(split, index)].example(split, index))


def resident_bytes() -> int:
  """Resident memory of this process."""
  with open('/proc/self/status', encoding='ascii') as file:
    return 1024 * int(next(line for line in file if line.startswith('VmRSS')).split()[1])


def watched(writer, every: int, rows: list):
  """A metrics writer like `writer` that appends a row to `rows` every so many updates."""
  seen, compiled = [], []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, seconds, **_: compiled.append(seconds) if name == COMPILED else None)

  def write(row):
    writer.write(row)
    if row['stage'] != 'rl':
      return
    seen.append(row)
    if len(seen) == every:
      gc.collect()
      rows.append({'step': row['step'], 'resident_bytes': resident_bytes(),
                   'live_bytes': sum(x.nbytes for x in jax.live_arrays()), 'compiled': len(compiled),
                   'update_s': float(np.median([r['seconds'] for r in seen])),
                   'positions': sum(r['positions'] for r in seen), 'skipped': sum(r['skipped'] for r in seen)})
      common.log('  '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v:,}' for k, v in rows[-1].items()))
      seen.clear()
      compiled.clear()

  return types.SimpleNamespace(write=write)


def compare(rows: list[dict]) -> dict:
  """The last tenth of the rows over the second tenth, as ratios; programs compiled after the first tenth."""
  tenth = max(1, len(rows) // 10)
  early, late = rows[tenth:2 * tenth], rows[-tenth:]
  ratio = lambda name: float(np.median([r[name] for r in late]) / np.median([r[name] for r in early]))
  return {f'{name}_ratio': ratio(name) for name in ('resident_bytes', 'live_bytes', 'update_s')} | {
      'compiled_later': sum(r['compiled'] for r in rows[tenth:]), 'skipped': sum(r['skipped'] for r in rows)}


def main(flags):
  settings, run = common.from_flags(flags, Soak()), training.make_run(flags)
  if settings.every < 1 or settings.lengths < 1 or run.train.steps < 2 * settings.every:
    raise UserError('give --every and --lengths of at least 1, and --steps of at least twice --every.')
  run = run._replace(source=ragged(run.train, settings.lengths))
  rows, optimizer = [], training.training_optimizer(run)
  sampler = sampling.held_out_sampler(run, run.replay.prefix_capacity)
  evaluate, functions = sampling.evaluator(run, sampler), rollouts.make_functions(run, optimizer, sampler)
  with tempfile.TemporaryDirectory() as folder:
    workdir = checkpoint.claim_workdir(folder, training.resolved(run))
    with (checkpoint.open_checkpoints(workdir) as manager, metrics.JsonlWriter(workdir / 'metrics.jsonl') as writer,
          common.sigterm('stopped; the soak begins anew.') as stop):
      learner = training.make_learner(run, optimizer)
      params = warmup.warm_up(run, evaluate, writer)
      learner = training.on_mesh(run, learner._replace(params=params, opt_state=jax.jit(optimizer.init)(params)))
      learner = train.reinforce(run, functions, learner, 0, watched(writer, settings.every, rows), manager, evaluate, stop)
  same = common.provenance() | {'seed': run.train.seed, 'task': run.train.task, 'prompt_len': run.train.prompt_len}
  closing = same | {'steps': run.train.steps, 'lengths': settings.lengths,
                    'held_out_reward': evaluate(learner.params, run.train.prompt_len)} | compare(rows)
  if run.where.out:
    for row in [same | r for r in rows] + [closing]:
      common.append_row(run.where.out, row)
  common.emit(closing)


if __name__ == '__main__':
  common.run(define, main)
