"""Reruns every row of the README, a part at a time; hours in all, and takes a stopped run up again.

    bash launch.sh reproduce                         all parts, to runs/reproduce
    bash launch.sh reproduce --parts=drift,work      some of them
    bash launch.sh figures --rows=runs/reproduce --out=runs/reproduce/figures

A part is a command of the README, each runnable alone; minutes are those seen on 2 cores. A part
that ended is not run again: its last line is kept in PART.done. One that was stopped begins
anew, but for train, train_tree, objectives and convergence, which go on where they were.
"""
import dataclasses
import os
from pathlib import Path
import shutil
import subprocess
import sys

from branchreplay.config import UserError
from experiments import common

PARITY = ['gradient_parity', '--prefix_len=1000', '--branches=4', '--branch_len=48']
PARTS = {  # part: (minutes, the command after `bash launch.sh`)
    'quickstart': (4, ['train']),
    'quickstart_first': (1, ['train', '--steps=2', '--warmup_reward=0']),
    **{f'quickstart_{seed}': (4, ['train', f'--seed={seed}']) for seed in (1, 2)},
    **{f'parity_{model}_{dtype}': (8, [*PARITY, f'--model={model}', f'--dtype={dtype}', '--devices=1,2,8',
                                       '--mode=exact,detached,depth=2'])
       for dtype in ('float64', 'float32') for model in ('tiny-hybrid', 'tiny-dense', 'tiny-window')},
    'memory': (4, ['memory', '--model=tiny-hybrid', '--prefix_len=16384,65536', '--branches=2,8']),
    'speed_8192_16': (10, ['speed', '--model=tiny-dense', '--prefix_len=8192', '--branch_len=128', '--branches=16', '--rounds=2',
                           '--replay_batch=16']),
    'compare_8192': (15, ['compare', '--rounds=2']),  # these install what is compared with, 1.6 GB and more
    'compare_2048': (8, ['compare', '--prefix_len=2048', '--branches=4,16']),
    'compare_tunix': (6, ['compare', '--prefix_len=2048', '--branches=4,16', '--peers=tunix', '--rounds=1']),
    'compare_tunix_512': (3, ['compare', '--prefix_len=512', '--branches=16', '--peers=tunix', '--rounds=9']),
    'compare_512': (3, ['compare', '--prefix_len=512', '--branches=16']),
    'compare_trl': (4, ['compare', '--prefix_len=2048', '--branches=8', '--peers=hf,trl,prefix_grouper']),
    'compare_hybrid': (4, ['compare', '--model=bench-hybrid', '--prefix_len=2048', '--branches=8', '--peers=hf,trl']),
    'compare_tunix_8192': (6, ['compare', '--prefix_len=8192', '--branches=2', '--peers=tunix', '--rounds=1']),
    'compare_alone': (6, ['compare', '--prefix_len=2048,8192', '--branches=1', '--peers=full_sequence']),
    **{f'roofline_{n}_layers': (1, ['roofline', f'--repeats={n}', '--prefix_len=2048', '--rounds=1']) for n in (4, 16)},
    'roofline_32768': (4, ['roofline', '--prefix_len=32768']),
    'roofline': (8, ['roofline', '--prefix_len=1024,2048,4096,8192,16384,32768,65536', '--rounds=1']),
    'objectives': (25, ['objectives']),
    'convergence_recall': (35, ['convergence']),
    'convergence_needle': (35, ['convergence', '--task=needle']),
    'fidelity': (15, ['fidelity']),
    'drift': (4, ['drift']),
    'work': (1, ['work']),
    'block_diffusion': (6, ['block_diffusion']),
    'precision': (5, ['precision', '--prefix_len=8192', '--seeds=0,1,2,3,4,5,6,7', '--variants=bfloat16,full_sequence']),
    **{f'receipts_{g}': (20, ['receipts', f'--branches={g}']) for g in (2, 8)},
    'receipts_detached': (60, ['receipts', '--model=tiny-mixed', '--mode=detached']),
    'receipts_exact': (40, ['receipts', '--model=tiny-mixed', '--prefix_len=1048576']),
    'fuzz': (10, ['fuzz', '--seconds=600']),
    'kill_and_resume': (10, ['kill_and_resume']),
    'soak': (20, ['soak']),
    'tree_speed': (10, ['tree_speed']),
    'train_tree': (8, ['train_tree']),
}
RESUMED = ('train', 'train_tree', 'objectives', 'convergence')


@dataclasses.dataclass(frozen=True)
class Settings:
  out: str = 'runs/reproduce'  # folder of the rows
  parts: tuple[str, ...] = ()  # parts to run; none: all


def define(flags):
  common.define_flags(flags, Settings())


def file_of(part: str) -> str:
  """The JSONL file that a part's rows go to, as in experiments/results."""
  kind = part.split('_')[0]
  several = {'parity': 'gradient_parity'} | {name: name for name in ('quickstart', 'convergence', 'speed', 'compare', 'roofline', 'receipts')}
  return several.get(kind, part)


def run_part(part: str, folder: Path) -> None:
  """Runs one part in a process of its own; UserError where it fails."""
  minutes, command = PARTS[part]
  rows = folder / f'{file_of(part)}.jsonl'
  pending = rows if command[0] in RESUMED else folder / f'{part}.part'  # of a part that begins anew
  if pending != rows:
    pending.unlink(missing_ok=True)
  flags = [f'--out={pending}'] + ([f'--workdir={folder / part}'] if command[0].startswith('train') else [])
  common.log(f'{part}, about {minutes} minutes: bash launch.sh {" ".join(command)} --out={rows}')
  done = subprocess.run([sys.executable, '-m', f'experiments.{command[0]}', *command[1:], *flags],
                        stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise UserError(f'{part} ended with status {done.returncode}; see above, and run the same command to go on.')
  if command[0] == 'train':
    shutil.copy(folder / part / 'metrics.jsonl', folder / f'{part}_metrics.jsonl')
  if pending != rows:
    for line in pending.read_text().splitlines():
      with open(rows, 'a', encoding='utf-8') as file:
        file.write(line + '\n')
    pending.unlink()
  temporary = folder / f'{part}.tmp'
  temporary.write_text(done.stdout)
  os.replace(temporary, folder / f'{part}.done')


def main(flags):
  settings = common.from_flags(flags, Settings())
  common.check_known('part', settings.parts, PARTS)
  folder = common.make_folder(settings.out)
  parts = settings.parts or tuple(PARTS)
  for part in parts:
    if (folder / f'{part}.done').is_file():
      common.log(f'{part}: done already; remove {folder / part}.done to run it again.')
    else:
      run_part(part, folder)
  common.emit({'parts': parts, 'folder': settings.out})


if __name__ == '__main__':
  common.run(define, main)
