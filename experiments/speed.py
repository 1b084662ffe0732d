"""Times one update: exact, detached, full sequences, and one full sequence of a single branch.

    bash launch.sh speed --prefix_len=8192 --branch_len=128 --branches=16

Rounds are interleaved in one process and medians reported; compilation is excluded and
stated. About 10 minutes on 2 cores, most of them in the full-sequence updates. Expected:
exact at least 8 times faster than full sequences, at most 1.4 times one full sequence
(which runs on a single device that has all cores).
"""
import dataclasses
import time

import jax
import numpy as np

from branchreplay import accelerators, config, gradients, mesh, model, objectives
from branchreplay.checks import check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, problems


@dataclasses.dataclass(frozen=True)
class Speed:
  model: str = 'bench'  # preset, see config.py
  prefix_len: int = 8192  # tokens of the prompt
  branch_len: int = 128  # tokens of a response
  branches: int = 16  # responses of the prompt
  segment_len: int = 1024  # positions of a prefix segment
  replay_batch: int = 16  # branches replayed at once
  keep: str = 'auto'  # state | attention | layers | auto: what the way back need not compute again
  attention: str = 'auto'  # blocks | auto, tokamax or cudnn: kernels of an accelerator
  row_block: int = 256  # query rows per block of the attention loops
  key_block: int = 256  # keys per block of the attention loops
  devices: int = 2  # devices of the seq axis
  rounds: int = 3  # interleaved rounds; medians are reported
  full_rounds: int = 1  # of these, rounds in which full sequences run too
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Speed())
  flags.set_default('virtual_devices', Speed().devices)  # more would be more threads on the same cores


def variants(settings: Speed, dtype: str):
  """Name -> (compiled function, its arguments), and the seconds that compiling took."""
  shape = config.preset(settings.model)
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=settings.prefix_len,
      branch_capacity=settings.branch_len, replay_batch=settings.replay_batch, row_block=settings.row_block,
      key_block=settings.key_block, keep=settings.keep, attention=settings.attention)
  whole, alone = mesh.make_mesh(1, settings.devices), mesh.make_mesh(1, 1)
  check_replay(replay, settings.devices, settings.branches)
  replay = common.fit_keep(shape, replay, settings.devices, dtype)
  shape, replay = accelerators.settle(shape, replay, dtype, jax.devices()[0], common.log)
  objective = objectives.make_objective('grpo', ObjectiveConfig())
  params = model.init(shape, jax.random.key(0), dtype)
  made = {}
  for name, mode, branches in (('exact', 'exact', settings.branches), ('detached', 'detached', settings.branches),
                               ('full_sequence', 'exact', settings.branches), ('single_branch', 'exact', 1)):
    sizes = dataclasses.replace(replay, mode=mode)
    group = problems.random_group(shape, sizes, settings.prefix_len, branches, settings.branch_len,
                                  np.dtype('float32'), kl=False)
    started = time.perf_counter()
    function = gradients.gradient_function(alone if name == 'single_branch' else whole, shape, sizes, objective, group,
                                           full_sequence=name in ('full_sequence', 'single_branch'))
    compiled = function.lower(params, group).compile()
    made[name] = (compiled, jax.device_put((params, group), compiled.input_shardings[0]),
                  time.perf_counter() - started)
  return made


def main(flags):
  settings = common.from_flags(flags, Speed())
  if settings.rounds < 1 or not 0 <= settings.full_rounds <= settings.rounds:
    raise UserError('rounds must be at least 1, and full_rounds from 0 to rounds.')
  made = variants(settings, flags.dtype)
  seconds = {name: [] for name in made}
  for name, (function, arguments, _) in made.items():
    if name != 'full_sequence':  # its code is single_branch's, and a warm-up of it takes minutes
      jax.block_until_ready(function(*arguments))
  for round_ in range(settings.rounds):
    for name, (function, arguments, _) in made.items():
      if name == 'full_sequence' and round_ >= settings.full_rounds:
        continue
      started = time.perf_counter()
      jax.block_until_ready(function(*arguments))
      seconds[name].append(time.perf_counter() - started)
      common.log(f'round {round_ + 1}/{settings.rounds}: {name} {seconds[name][-1]:.2f} s')
  median = {name: float(np.median(s)) if s else None for name, s in seconds.items()}
  row = common.provenance() | dataclasses.asdict(settings) | {'dtype': flags.dtype}
  row |= {f'{name}_s': value for name, value in median.items()}
  row |= {'compile_s': {name: made[name][2] for name in made}, 'all_s': seconds,
          'exact_over_single_branch': median['exact'] / median['single_branch']}
  if median['full_sequence']:
    row['full_sequence_over_exact'] = median['full_sequence'] / median['exact']
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
