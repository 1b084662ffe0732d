"""One exact gradient of a prompt as long as memory holds: seconds of each phase, and the process's peak memory.

    bash launch.sh receipts --model=tiny-window --prefix_len=2097152 --branches=2
    bash launch.sh receipts --model=tiny-mixed --prefix_len=2097152 --mode=detached --save=runs/detached
    bash launch.sh receipts --model=tiny-mixed --prefix_len=1048576 --save=runs/exact

The prompt goes by `at_once` segments a call (stream.py), with progress on the way. With --save=FOLDER
what a call hands to the next is saved there every --save_every seconds, and the same command goes on
from there after a kill, its seconds included; the peak memory is the last process's. Compilation is excluded and stated.
Expected, on 2 idle cores: 20 minutes for the first, of recurrent and sliding-window layers; an hour for the second, whose full
attention looks at 2.2e12 pairs of positions, and less for the third, which looks at a quarter of them and pulls back. (Where
attention is the last layer, as in tiny-hybrid, a prompt needs only its keys and values, and the same takes a minute.)
"""
import dataclasses
import time

import jax
import numpy as np

from branchreplay import config, mesh, model, objectives, stream
from branchreplay.checks import check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, problems, resume


@dataclasses.dataclass(frozen=True)
class Receipt:
  model: str = 'tiny-window'  # preset, see config.py
  prefix_len: int = 2097152  # tokens of the prompt
  branches: int = 2  # responses of the prompt
  branch_len: int = 64  # tokens of a response
  segment_len: int = 8192  # positions of a prefix segment
  at_once: int = 4  # segments of a call
  mode: str = 'exact'  # exact | detached | depth=K
  keep: str = 'auto'  # state | attention | layers | auto: what the pull need not compute again
  cotangent_dtype: str = ''  # of dK/dV of the prefix's slots: bfloat16 halves them
  row_block: int = 512  # query rows per block of the attention loops
  key_block: int = 512  # keys per block of the attention loops
  devices: int = 8  # devices of the seq axis
  save: str = ''  # folder that a killed run goes on from
  save_every: float = 300.0  # seconds between two saves
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Receipt())


def peak_bytes() -> int | None:
  """Peak resident memory of this process so far; None where the system does not tell."""
  try:
    with open('/proc/self/status', encoding='ascii') as file:
      return next(int(line.split()[1]) * 1024 for line in file if line.startswith('VmHWM'))
  except (OSError, StopIteration):
    return None


def main(flags):
  settings = common.from_flags(flags, Receipt())
  if min(settings.at_once, settings.prefix_len, settings.branch_len) < 1:
    raise UserError('at_once, prefix_len and branch_len must be at least 1.')
  shape = config.preset(settings.model)
  if settings.prefix_len > shape.max_positions:
    raise UserError(f'prefix_len={settings.prefix_len} is past the {shape.max_positions} positions that RoPE tables serve.')
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=settings.prefix_len,
      branch_capacity=settings.branch_len,
      **{k: getattr(settings, k) for k in ('mode', 'keep', 'cotangent_dtype', 'row_block', 'key_block')})
  mesh_ = mesh.make_mesh(1, settings.devices)
  check_replay(replay, settings.devices, settings.branches)
  replay = common.fit_keep(shape, replay, settings.devices, flags.dtype)
  group = problems.random_group(shape, replay, settings.prefix_len, settings.branches, settings.branch_len,
                                np.dtype('float32'), kl=False)
  params = model.init(shape, jax.random.key(0), flags.dtype)
  steps = stream.make_steps(mesh_, shape, replay, objectives.make_objective('grpo', ObjectiveConfig()), group)
  started = time.perf_counter()
  shapes = stream.shapes_of(mesh_, replay, steps, params, group)
  made = steps._replace(**{name: stream.compiled(steps, name, shapes) for name in stream.ARGUMENTS})
  report = {phase: common.program_bytes(getattr(made, phase).memory_analysis()) for phase in resume.PHASES}
  took = time.perf_counter() - started
  params, group = jax.device_put((params, group), made.open.input_shardings[0])
  common.log(f'compiled in {took:.0f} s, keep={replay.keep}; {max(report.values()) / 1e9:.3f} GB a device.')
  seconds = dict.fromkeys(resume.PHASES, 0.0)
  watch = resume.progress(settings.at_once, seconds)
  if settings.save:
    result = resume.gradient(settings.save, settings.save_every, made, shapes, shape, replay, params, group, settings.at_once, watch, seconds)
  else:
    result = jax.block_until_ready(stream.gradient(made, replay, params, group, settings.at_once, watch))
  norm = float(np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(result.grads))))
  row = common.provenance() | dataclasses.asdict(settings) | {
      'keep': replay.keep, 'dtype': flags.dtype, 'compile_s': took, **{f'{k}_s': v for k, v in seconds.items()},
      'seconds': sum(seconds.values()), 'peak_process_bytes': peak_bytes(),
      **{f'{k}_bytes': v for k, v in report.items()}, 'loss': float(result.loss[0]), 'gradient_norm': norm}
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
