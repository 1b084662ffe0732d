"""What the dropped term costs: learning with the exact gradient, on full sequences, and with the gradient cut.

    bash launch.sh convergence --out=experiments/results/convergence.jsonl
    bash launch.sh convergence --out=experiments/results/convergence.jsonl --task=needle

GRPO from one warm start a seed, with the same prompts and random keys: full sequences by plain
autodiff, branch replay in mode exact, detached (LongStraw's gradient) and depth=K (the last K
segments of the prompt). exact must lie on full-sequence: `sampled_crc` of a curve row are
checksums of the tokens sampled for each update, equal as long as the two agree to the token.
Rows: see study.py; quality rows go to 8 times the trained length.
"""
import dataclasses
from pathlib import Path

from experiments import common, plots, study, training


@dataclasses.dataclass(frozen=True)
class Study:
  arms: tuple[str, ...] = ('full-sequence', 'exact', 'detached', 'depth=1', 'depth=4')  # what to compare
  seeds: tuple[str, ...] = ('0', '1', '2')  # of parameters, data and sampling
  times: tuple[str, ...] = ('1', '2', '4', '8')  # lengths of the last evaluation over the trained one


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('task', 'recall'), ('prompt_len', 256), ('segment_len', 32), ('steps', 150),
                      ('eval_every', 25), ('eval_prompts', 128), ('eval_samples', 4), ('learning_rate', 2e-3),
                      ('warmup_reward', 0.42), ('out', 'runs/convergence.jsonl')):
    flags.set_default(name, value)


def flags_of(arm: str) -> dict:
  """Values of the flags that make an arm."""
  full = arm == 'full-sequence'
  return {'full_sequence': full, 'mode': 'exact' if full else arm}


def agreement(rows: list[dict], task: str) -> dict[int, int]:
  """Seed -> updates for which full-sequence and exact sampled the same tokens."""
  found = {}
  for r in rows:
    if r['kind'] == 'curve' and r['task'] == task and r['arm'] in ('full-sequence', 'exact'):
      found.setdefault((r['seed'], r['arm']), {})[r['step']] = r['sampled_crc']
  counts = {}
  for seed in sorted({s for s, arm in found if (s, 'exact') in found and (s, 'full-sequence') in found}):
    a, b = (sum((crcs for _, crcs in sorted(found[seed, arm].items())), []) for arm in ('exact', 'full-sequence'))
    same = [x == y for x, y in zip(a, b)]
    counts[seed] = same.index(False) if False in same else len(same)
  return counts


def main(flags):
  settings, task = common.from_flags(flags, Study()), flags.task
  rows = study.curves(flags, {arm: flags_of(arm) for arm in settings.arms}, 'arm',
                      common.whole_numbers('seeds', settings.seeds), common.whole_numbers('times', settings.times, 1))
  rows = [r for r in rows if r['task'] == task]
  figure = plots.curves(Path(flags.out).with_name(f'{Path(flags.out).stem}_{task}.png'), rows, 'arm')
  common.log(f'Figure: {figure}')
  common.emit(common.provenance() | study.closing(rows, 'arm') | {'task': task, 'same_samples': agreement(rows, task)})


if __name__ == '__main__':
  common.run(define, main)
