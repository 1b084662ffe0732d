"""One update of branchreplay and of other people's systems on the same weights and batch, side by side.

    bash launch.sh compare --prefix_len=8192 --branches=16 --peers=hf,prefix_grouper
    bash launch.sh compare --case=DIR --peers=hf,tunix

Each system runs in a process of its own (experiments/peers/) on the same cores; rounds are
interleaved, medians reported, compilation and a first update excluded. Memory is what the process
holds at the peak of one more update, and how much that is above what it holds before, what earlier ones
freed handed back. rel_l2 is the distance of a peer's gradient from ours. The peers' packages are installed at first use, into
.venv-torch and .venv-tunix (1.6 GB each); --torch_venv, --tunix_venv name environments that have them.

Without --case a case is made of a preset of random weights: a Hugging Face folder and a batch of
ragged responses. Linux only. Expected on 2 cores at the first command: 15 minutes, ours 13 times faster than hf.
"""
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np
from safetensors.numpy import load_file

from branchreplay import config, hf, model
from branchreplay.config import UserError
from experiments import common
from experiments.peers.ours import Dials

PEERS = {  # name -> (the environment it runs in, what it changes of Dials)
    'ours': ('', {}), 'detached': ('', {'mode': 'detached'}), 'full_sequence': ('', {'full_sequence': True}),
    'hf': ('torch', None), 'trl': ('torch', None), 'prefix_grouper': ('torch', None), 'tunix': ('tunix', None)}


@dataclasses.dataclass(frozen=True)
class Compare:
  case: tuple[str, ...] = ()  # folders with model/ (Hugging Face) and batch.npz, instead of what follows
  model: str = 'bench'  # preset, see config.py
  prefix_len: tuple[str, ...] = ('8192',)  # tokens of the prompt, a case each
  branches: tuple[str, ...] = ('16',)  # responses, a case each
  branch_len: int = 128  # tokens of the longest response
  peers: tuple[str, ...] = ('hf', 'prefix_grouper')  # hf | trl | prefix_grouper | tunix | detached | full_sequence
  rounds: int = 3  # interleaved updates of each
  threads: int = 2  # cores that each may use
  torch_venv: str = ''  # environment of hf, trl and prefix_grouper; empty: .venv-torch, made at first use
  tunix_venv: str = ''  # environment of tunix; empty: .venv-tunix, made at first use
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Compare())
  common.define_flags(flags, Dials(), skip=('mode', 'full_sequence'))


def environment(name: str, given: str) -> str:
  """The Python of the peers' environment `name`, installed where `given` names none."""
  folder = Path(given) if given else common.ROOT / f'.venv-{name}'
  python, pins = folder / 'bin/python', common.ROOT / f'experiments/peers/requirements-{name}.txt'
  done = folder / pins.name
  if given and not python.exists():
    raise UserError(f'--{name}_venv={given}: there is no environment with bin/python; name one, or leave the flag out.')
  if not given and not (done.exists() and done.read_bytes() == pins.read_bytes()):
    common.log(f'installing {pins.name} into {folder.name}.')
    base = Path(sys.base_prefix) / 'bin/python3'
    for command in ([base, '-m', 'venv', '--clear', folder], [python, '-m', 'pip', 'install', '-qq', '--no-compile', '-r', pins]):
      if subprocess.run(command, stdout=2).returncode:
        raise UserError(f'the install of {pins.name} failed, see above; leave its peers out of --peers.')
    done.write_bytes(pins.read_bytes())
  return str(python)


def make_case(folder: Path, settings: Compare, prefix_len: int, branches: int) -> None:
  """Random weights of a preset, and a batch whose lengths fall evenly from branch_len to a third of it."""
  shape, rng = config.preset(settings.model), np.random.default_rng(0)
  hf.save(folder / 'model', model.init(shape, jax.random.key(0)), shape)
  lengths = np.linspace(settings.branch_len, max(1, settings.branch_len // 3), branches).round().astype(int)
  mask = (np.arange(settings.branch_len) < lengths[:, None]).astype(np.int32)
  near = lambda: (mask * (0.3 * rng.normal(size=mask.shape) - np.log(shape.vocab_size))).astype(np.float32)
  advantages = rng.normal(size=branches).astype(np.float32)
  tokens = lambda *size: rng.integers(1, shape.vocab_size, size, np.int32)  # 0 is padding to some
  np.savez(folder / 'batch.npz', prompt=tokens(prefix_len), responses=tokens(*mask.shape) * mask, response_mask=mask,
           advantages=advantages, old_logprobs=near(), ref_logprobs=near())


class Peer:
  """A running peer; see experiments/peers/worker.py for what is said."""

  def __init__(self, name: str, command: list[str], threads: int):
    cores = ','.join(str(c) for c in sorted(os.sched_getaffinity(0))[:threads])
    env = os.environ | {'PYTHONPATH': str(common.ROOT), 'OMP_NUM_THREADS': str(threads), 'JAX_PLATFORMS': 'cpu'}
    self.name, self.errors = name, tempfile.TemporaryFile('w+')
    self.process = subprocess.Popen(['taskset', '-c', cores, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=self.errors, text=True, env=env)
    self.about = self._read()

  def _read(self) -> dict:
    for line in self.process.stdout:
      if line.startswith('{'):  # what a library prints while it is imported is no answer
        return json.loads(line)
    self.errors.seek(0)
    reason = re.sub(r'^[\w.]*(Error|Exception): ', '', self.errors.read().strip().rsplit('\n', 1)[-1])
    raise UserError(f'{self.name} cannot run this case: {reason or f"it ended with status {self.process.wait()}"}')

  def ask(self, command: str) -> dict:
    self.process.stdin.write(command + '\n')
    self.process.stdin.flush()
    return self._read()

  def close(self):
    self.process.stdin.close()
    self.process.wait()


def distance(got: dict, want: dict) -> float:
  """Relative L2 of gradients by name; a tensor that one of them lacks counts as zero."""
  flat = lambda x, name, like: np.zeros(like[name].size) if name not in x else x[name].astype(np.float64).reshape(-1)
  names = sorted(set(got) | set(want))
  a, b = (np.concatenate([flat(x, n, got if n in got else want) for n in names]) for x in (got, want))
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def start(name: str, case: str, settings: Compare, dials: Dials, pythons: dict) -> Peer:
  kind, changes = PEERS[name]
  if kind:
    command = [pythons[kind], '-m', f'experiments.peers.{name}', case]
  else:
    changed = dataclasses.replace(dials, **changes)
    command = [sys.executable, '-m', 'experiments.peers.ours', case, json.dumps(dataclasses.asdict(changed))]
  return Peer(name, command, settings.threads)


def measure(case: str, settings: Compare, dials: Dials, pythons: dict):
  """Yields a row a system: ours first."""
  with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
    peers = []
    for name in ('ours', *settings.peers):
      peers.append(start(name, case, settings, dials, pythons))
      stack.callback(peers[-1].close)
      common.log(f'{name} is ready after {peers[-1].about["prepare_s"]:.0f} s')
    seen = {peer.name: [] for peer in peers}
    for round_ in range(settings.rounds):
      for peer in peers:
        seen[peer.name].append(peer.ask('update'))
        common.log(f'round {round_ + 1}/{settings.rounds}: {peer.name} {seen[peer.name][-1]["seconds"]:.2f} s')
    memory, gradients = {peer.name: peer.ask('memory') for peer in peers}, {}
    for peer in peers:
      peer.ask(f'gradient {scratch}/{peer.name}')
      gradients[peer.name] = load_file(f'{scratch}/{peer.name}')
    middle = {name: {key: float(np.median([s[key] for s in rows])) for key in rows[0]} for name, rows in seen.items()}
    for peer in peers:
      row = middle[peer.name] | memory[peer.name]
      yield {'peer': peer.name, **row, 'update_mib': row['peak_mib'] - row['before_mib'],
             'all_s': [s['seconds'] for s in seen[peer.name]], 'over_ours': row['seconds'] / middle['ours']['seconds'],
             'rel_l2': distance(gradients[peer.name], gradients['ours']), **peer.about}


def main(flags):
  settings, dials = common.from_flags(flags, Compare()), common.from_flags(flags, Dials(), skip=('mode', 'full_sequence'))
  common.check_known('peer', settings.peers, [name for name in PEERS if name != 'ours'])
  config.preset(settings.model)
  if not sys.platform.startswith('linux'):
    raise UserError('compare reads memory from /proc and gives cores with taskset; run it on Linux.')
  if min(settings.rounds, settings.threads, settings.branch_len) < 1:
    raise UserError('rounds, threads and branch_len must be at least 1.')
  given = {'torch': settings.torch_venv, 'tunix': settings.tunix_venv}
  sizes = [(p, g) for p in common.whole_numbers('prefix_len', settings.prefix_len, 1)
           for g in common.whole_numbers('branches', settings.branches, 1)]
  for case in settings.case:
    hf.read_config(f'{case}/model')
    hf.batch_sizes(case)
  pythons = {kind: environment(kind, given[kind]) for kind in sorted({PEERS[name][0] for name in settings.peers} - {''})}
  with tempfile.TemporaryDirectory() as scratch:
    cases = list(settings.case)
    for prefix_len, branches in sizes if not cases else ():
      cases.append(f'{scratch}/P{prefix_len}_G{branches}')
      make_case(Path(cases[-1]), settings, prefix_len, branches)
    for case in cases:
      about = common.provenance() | {'case': Path(case).name, 'model_type': hf.read_config(f'{case}/model').pattern,
                                     'threads': settings.threads, **hf.batch_sizes(case)}
      for row in measure(case, settings, dials, pythons):
        row = about | row
        if settings.out:
          common.append_row(settings.out, row)
        common.emit(row)
        common.log(f'{row["case"]:>12} {row["peer"]:>14} {row["seconds"]:8.2f} s {row["update_mib"]:8.0f} MiB '
                   f'{row["over_ours"]:6.2f} x  rel_l2 {row["rel_l2"]:.1e}')


if __name__ == '__main__':
  common.run(define, main)
