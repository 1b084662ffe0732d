"""Fault injection: a training run killed again and again ends with the very bytes of one left alone.

    bash launch.sh kill_and_resume --out=experiments/results/kill_and_resume.jsonl

A small run is started in a process of its own and killed at random moments, by SIGKILL, by SIGTERM
and by SIGKILL in the middle of a checkpoint write, and the same command is given again each time.
Its last checkpoint and its metrics rows (but for times) must equal those of an uninterrupted
run. About 12 minutes; processes share a compilation cache, so that a restart takes seconds.
"""
import dataclasses
import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import orbax.checkpoint as ocp

from branchreplay.config import UserError
from experiments import common, plots

RUN = ['--task=recall', '--prompt_len=64', '--prompts=2', '--branches=4', '--samples=8', '--data=1', '--seq=2',
       '--segment_len=32', '--warmup_updates=2', '--warmup_long_updates=0', '--warmup_prompts=2', '--eval_prompts=2',
       '--eval_samples=2', '--eval_every=20', '--checkpoint_every=5', '--kl_coef=0.1', '--inner_epochs=2']
KINDS = ('SIGKILL', 'SIGTERM', 'checkpoint')  # the last: SIGKILL while a checkpoint is being written
TIMES = ('seconds', 'time', 'commit', 'command')  # what may differ in a row


@dataclasses.dataclass(frozen=True)
class Settings:
  kills: int = 20  # times the run is killed
  steps: int = 160  # updates of the run, so many that every kill finds it at work
  seed: int = 0  # of the moments
  grace: float = 30.0  # seconds that SIGTERM may take
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Settings())


def start(workdir: Path, steps: int, cache: Path, log):
  """The training process."""
  environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(cache), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
  return subprocess.Popen([sys.executable, '-m', 'experiments.train', f'--workdir={workdir}', f'--steps={steps}', *RUN],
                          env=environment, stdout=subprocess.DEVNULL, stderr=log)


def rows_in(workdir: Path) -> int:
  file = workdir / 'metrics.jsonl'
  return file.read_bytes().count(b'\n') if file.exists() else 0


def kill(process, kind: str, workdir: Path, moment: random.Random, grace: float) -> dict:
  """Kills the process at a random moment of its training; what happened."""
  before, more = rows_in(workdir), moment.randint(1, 12)
  while process.poll() is None and rows_in(workdir) < before + more:
    time.sleep(0.01)
  time.sleep(moment.random() * 0.3)
  if kind == 'checkpoint':
    while process.poll() is None and not list((workdir / 'checkpoints').glob('*orbax-checkpoint-tmp*')):
      time.sleep(0.001)
  if process.poll() is None:
    process.send_signal(signal.SIGTERM if kind == 'SIGTERM' else signal.SIGKILL)
  started = time.monotonic()
  try:
    status = process.wait(timeout=grace)
  except subprocess.TimeoutExpired:
    process.kill()
    raise UserError(f'SIGTERM was not obeyed within {grace} seconds.')
  return {'kind': kind, 'status': status, 'seconds': time.monotonic() - started, 'rows': rows_in(workdir)}


def last_checkpoint(workdir: Path, step: int) -> list[np.ndarray]:
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    tree = reader.restore(workdir / 'checkpoints' / str(step) / 'state')
  flat = []
  def walk(x):
    if isinstance(x, dict):
      for key in sorted(x):
        walk(x[key])
    elif isinstance(x, (list, tuple)):
      for item in x:
        walk(item)
    elif x is not None:
      flat.append(np.asarray(x if not hasattr(x, '_base_array') else x._base_array))
  walk(tree)
  return flat


def comparable(workdir: Path) -> list[str]:
  rows = [r for r in plots.read_rows(workdir / 'metrics.jsonl') if r['stage'] != 'start']
  return [json.dumps({k: v for k, v in r.items() if k not in TIMES}) for r in rows]


def finish(workdir: Path, steps: int, cache: Path, log) -> None:
  if start(workdir, steps, cache, log).wait():
    raise UserError(f'the run in {workdir} failed; see {log.name}.')


def main(flags):
  settings = common.from_flags(flags, Settings())
  moment, events = random.Random(settings.seed), []
  with tempfile.TemporaryDirectory() as folder:
    folder = Path(folder)
    straight, killed, cache = folder / 'straight', folder / 'killed', folder / 'cache'
    with open(folder / 'log', 'w') as log:
      finish(straight, settings.steps, cache, log)
      for i in range(settings.kills):
        process = start(killed, settings.steps, cache, log)
        events.append(kill(process, KINDS[i % len(KINDS)], killed, moment, settings.grace))
        common.log(f'kill {i + 1}/{settings.kills}: {events[-1]["kind"]} at row {events[-1]["rows"]}, status {events[-1]["status"]}')
      finish(killed, settings.steps, cache, log)
      sentences = [line for line in (folder / 'log').read_text().splitlines() if line.startswith('stopped')]
    a, b = (last_checkpoint(w, settings.steps) for w in (straight, killed))
    same_state = len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))
    same_rows = comparable(straight) == comparable(killed)
  row = common.provenance() | dataclasses.asdict(settings) | {
      'events': events, 'same_state': same_state, 'leaves': len(a), 'same_rows': same_rows, 'sentences': len(sentences),
      'in_training': sum(e['status'] == -9 for e in events) + len(sentences)}  # a run that had ended dies of nothing
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)
  if not (same_state and same_rows):
    raise UserError('the killed run ended differently from the uninterrupted one; see same_state and same_rows in the row.')


if __name__ == '__main__':
  common.run(define, main)
