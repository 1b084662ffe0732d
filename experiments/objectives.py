"""Learning by several objectives from one warm start, on synthetic recall, over seeds.

    bash launch.sh objectives --out=experiments/results/objectives.jsonl

Every objective starts from the same parameters and sees the same prompts in the same order.
A run stopped and started again skips what is in --out already. Preference objectives pair the
better sampled branches with the worse. Rows: see study.py.
"""
import dataclasses
from pathlib import Path

from experiments import common, plots, study, training


@dataclasses.dataclass(frozen=True)
class Study:
  objectives: tuple[str, ...] = ('grpo', 'ppo', 'dpo')  # see objectives.py of branchreplay
  seeds: tuple[str, ...] = ('0', '1', '2')  # of parameters, data and sampling


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('task', 'recall'), ('prompt_len', 256), ('segment_len', 256), ('steps', 120),
                      ('eval_every', 20), ('eval_samples', 4), ('learning_rate', 1e-3), ('warmup_reward', 0.42), ('resample', 0),
                      ('out', 'runs/objectives.jsonl')):
    flags.set_default(name, value)


def main(flags):
  settings = common.from_flags(flags, Study())
  arms = {name: {'objective': name} for name in settings.objectives}
  rows = study.curves(flags, arms, 'objective', common.whole_numbers('seeds', settings.seeds))
  figure = plots.curves(Path(flags.out).with_suffix('.png'), rows, 'objective')
  common.log(f'Figure: {figure}')
  common.emit(common.provenance() | study.closing(rows, 'objective'))


if __name__ == '__main__':
  common.run(define, main)
