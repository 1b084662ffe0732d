"""What a GPU or TPU does: parity, speed, the longest prompt that fits, and GRPO steps of a real model's shape.

    bash launch.sh accelerator --out=experiments/results/accelerator.jsonl
    bash launch.sh accelerator --model=qwen3.5-4b --parts=step --step_len=131072

Random weights; all devices are the seq axis. Parts, a row or more each: `parity`, the kernel beside attention.py and
the exact gradient beside plain full sequences on the same chip, float32 and bfloat16; `speed`, what share of the chip's
peak and of its own matrix-multiply rate capture, replay and pull reach; `longest`, the longest prompt whose step fits,
within --within; `step`, a GRPO step (capture, replay of every branch, pull, AdamW) on given responses, sampling left
out. A setting that does not fit is a row that says so. Each part of --parts but parity runs in a process of its own,
so that one that runs out of memory leaves none behind. Not run yet on a chip: no figure is expected.
"""
import dataclasses
import json
import subprocess
import sys
import time

import jax
import numpy as np
import optax

from branchreplay import accelerators, config, gradients, mesh, model, objectives
from branchreplay.checks import check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, gradient_parity, problems, roofline

PARTS = ('parity', 'speed', 'longest', 'step')
PEAK = {'H100': 989e12, 'H200': 989e12, 'B200': 2250e12, 'A100': 312e12, 'TPU v4': 275e12, 'TPU v5 lite': 197e12,
        'TPU v5': 459e12, 'TPU v6 lite': 918e12}  # bfloat16 FLOPs a second of a chip, dense, as its vendor gives them


@dataclasses.dataclass(frozen=True)
class Accelerator:
  model: str = 'qwen3.5-0.8b'  # preset of speed, longest and step, see config.py
  parts: tuple[str, ...] = PARTS  # parity | speed | longest | step
  attention: str = 'auto'  # blocks | auto, tokamax or cudnn
  speed_len: tuple[str, ...] = ('32768', '131072')  # tokens of the prompt in speed, a row each
  step_len: tuple[str, ...] = ('131072', '524288', '1048576')  # tokens of the prompt in step, a row each
  branches: int = 8  # responses
  branch_len: int = 1024  # tokens of a response
  segment_len: int = 8192  # positions of a prefix segment
  replay_batch: int = 2  # branches replayed at once
  accumulate_dtype: str = 'float32'  # sums of gradients and of dK/dV
  within: float = 1.1  # longest: most by which a prompt that did not fit is longer
  rounds: int = 3  # medians are reported
  matrix: int = 8192  # speed: rows and columns of the square matrices
  alone: bool = False  # run in this process
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Accelerator())
  flags.set_default('dtype', 'bfloat16')
  flags.set_default('virtual_devices', 1)


def parity_rows(settings: Accelerator):
  """The kernel's errors by head_dim, window and dtype; then the gradient's of a small hybrid and a small window model."""
  for dtype in ('float32', 'bfloat16'):
    for head_dim, window in ((64, None), (128, None), (128, 700), (256, None)):
      shape = dataclasses.replace(config.preset('bench'), head_dim=head_dim)
      replay = accelerators.settle(shape, ReplayConfig(attention=settings.attention), dtype, jax.devices()[0], common.log)[1]
      yield {'kernel': replay.attention, 'head_dim': head_dim, 'window': window, 'dtype': dtype,
             'rel_l2': accelerators.errors(replay.attention, head_dim, dtype, window=window)}
  for name in ('bench-hybrid', 'tiny-window'):
    for dtype in ('float32', 'bfloat16'):
      yield gradient_row(settings, name, dtype)


def gradient_row(settings: Accelerator, name: str, dtype: str) -> dict:
  """Relative L2 distance of gradients from full sequences in float32: by replay, and by full sequences in `dtype`."""
  shape = config.preset(name)
  replay = ReplayConfig(segment_len=256, branch_segment_len=64, prefix_capacity=1000, branch_capacity=128, replay_batch=2,
                        attention=settings.attention)
  shape, replay = accelerators.settle(shape, replay, dtype, jax.devices()[0], common.log)
  params = model.init(shape, jax.random.key(0))
  group = problems.random_group(shape, replay, 1000, 4, 128, np.dtype('float32'), ragged=True)

  def gradient(dtype, replay, full_sequence):
    function = gradients.gradient_function(mesh.make_mesh(), shape, replay, gradient_parity.objective_of(), group, full_sequence)
    return jax.device_get(function(jax.tree.map(lambda x: x.astype(dtype), params), group).grads)

  with jax.default_matmul_precision('highest'):
    blocks = dataclasses.replace(replay, attention='blocks')
    truth = gradient('float32', blocks, True)
    found = {'rel_l2': gradient(dtype, replay, False), 'rel_l2_blocks': gradient(dtype, blocks, False),
             'rel_l2_full_sequence': gradient(dtype, blocks, True)}
  return {'gradient_of': name, 'kernel': replay.attention, 'dtype': dtype} | {
      key: gradient_parity.compare(grads, truth)['rel_l2'] for key, grads in found.items()}


def speed_rows(settings: Accelerator, dtype: str):
  """roofline.py's row, at each length with a capacity of just that, beside the chip's peak."""
  for length in common.whole_numbers('speed_len', settings.speed_len, 1):
    asked = roofline.Roofline(model=settings.model, repeats=0, branch_len=settings.branch_len, branches=settings.branches,
                              segment_len=settings.segment_len, attention=settings.attention, devices=jax.device_count(),
                              rounds=settings.rounds, matrix=settings.matrix, products=1 if jax.default_backend() == 'cpu' else 48,
                              key_block=1024, row_block=1024)
    row = roofline.measure(asked, length, roofline.compiled_phases(asked, length, dtype), dtype)
    peak = next((flops for name, flops in PEAK.items() if name in jax.devices()[0].device_kind), None)
    if peak:
      row |= {f'{phase}_of_peak': row[f'{phase}_flops'] / row[f'{phase}_s'] / peak / jax.device_count()
              for phase in ('capture', 'replay', 'pull')}
    yield row


def step_row(settings: Accelerator, length: int, dtype: str, rounds: int) -> dict:
  """Seconds of a GRPO step on a prompt of `length` tokens, and its bytes; or that it does not fit."""
  shape, devices = config.preset(settings.model), jax.device_count()
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=length,
      branch_capacity=settings.branch_len, replay_batch=settings.replay_batch, accumulate_dtype=settings.accumulate_dtype,
      attention=settings.attention, shard_params=devices > 1, key_block=1024, row_block=1024)
  check_replay(replay, devices, settings.branches)
  shape, replay = accelerators.settle(shape, replay, dtype, jax.devices()[0], common.log)
  mesh_, objective = mesh.make_mesh(), objectives.make_objective('grpo', ObjectiveConfig())
  group = problems.random_group(shape, replay, length, settings.branches, settings.branch_len, np.dtype('float32'), kl=False)
  optimizer = optax.adamw(1e-6)
  gradient = gradients.gradient_function(mesh_, shape, replay, objective, group)

  def step(params, state, group):
    result = gradient(params, group)
    updates, state = optimizer.update(result.grads, state, params)
    return optax.apply_updates(params, updates), state, result.loss

  row = {'prefix_len': length, 'kernel': replay.attention, 'fits': False}
  try:
    laid = mesh.shardings(mesh_, mesh.parameter_specs(model.shapes(shape), devices, replay.shard_params))
    params = jax.jit(lambda key: model.init(shape, key, dtype), out_shardings=laid)(jax.random.key(0))
    whole = jax.sharding.NamedSharding(mesh_, jax.sharding.PartitionSpec())
    laid = optax.tree_utils.tree_map_params(optimizer, lambda _, s: s, jax.eval_shape(optimizer.init, params), laid,
                                            transform_non_params=lambda _: whole)
    state = jax.jit(optimizer.init, out_shardings=laid)(params)
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, group).compile()
    report, row['compile_s'] = compiled.memory_analysis(), time.perf_counter() - started
    row |= {'argument_bytes': report.argument_size_in_bytes, 'temp_bytes': report.temp_size_in_bytes}
    seconds = []
    for _ in range(rounds):
      started = time.perf_counter()
      params, state, loss = jax.block_until_ready(compiled(params, state, group))
      seconds.append(time.perf_counter() - started)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error) and 'out of memory' not in str(error).lower():
      raise
    return row
  positions = length + settings.branches * settings.branch_len
  return row | {'fits': True, 'step_s': float(np.median(seconds)), 'loss': float(loss[0]),
                'positions_per_s': positions / float(np.median(seconds))}


def longest_row(fits, first: int, segment_len: int, within: float) -> dict:
  """The longest prompt of whole segments for which fits(length), from `first` on by doubling and halving, then between."""
  good, bad, length = 0, None, first
  while bad is None or (good and bad / good > within and bad - good > segment_len):
    if fits(length):
      good = length
    else:
      bad = length
    if bad is None:
      length = 2 * good
    elif good:
      length = max(good + segment_len, (good + bad) // 2 // segment_len * segment_len)
    elif bad > segment_len:
      length, bad = max(segment_len, bad // 2 // segment_len * segment_len), None
  return {'longest_len': good, 'too_long_len': bad}


def rows_here(settings: Accelerator, dtype: str):
  """The rows of the parts, made in this process; each says which part it is of."""
  for part in settings.parts:
    if part == 'parity':
      found = parity_rows(settings)
    elif part == 'speed':
      found = speed_rows(settings, dtype)
    else:
      lengths = common.whole_numbers('step_len', settings.step_len, 1)
      found = (step_row(settings, length, dtype, settings.rounds) for length in lengths)
    for row in found:
      yield common.provenance() | {'part': part, 'dtype': dtype, 'model': settings.model} | row


def run_alone(*extra: str):
  """Yields the rows, as they are made, of a process of its own with this one's flags and `extra`: it frees the chips, and none are held here meanwhile."""
  with subprocess.Popen([sys.executable, '-m', 'experiments.accelerator', *sys.argv[1:], '--out=', '--alone', *extra],
                        stdout=subprocess.PIPE, text=True) as process:
    yield from map(json.loads, process.stdout)
  if process.returncode == 2:
    raise SystemExit(2)  # said already
  if process.returncode:
    common.log(f'{" ".join(extra)} ended with status {process.returncode}, see above.')


def platform() -> str:
  """JAX's default backend, asked in a process of its own."""
  return subprocess.run([sys.executable, '-c', 'import jax; print(jax.default_backend())'],
                        stdout=subprocess.PIPE, text=True).stdout.strip()


def rows_apart(settings: Accelerator):
  """The rows of the parts, each setting in a process of its own."""
  for part in settings.parts:
    if part == 'parity':
      yield from run_alone('--parts=parity')
    elif part == 'longest':
      fitting = {}

      def fits(length):
        rows = run_alone('--parts=step', f'--step_len={length}', '--rounds=1')
        fitting.update({length: row for row in rows if row['fits']})
        return length in fitting

      row = longest_row(fits, 16 * settings.segment_len, settings.segment_len, settings.within)
      yield fitting.get(row['longest_len'], {}) | row | {'part': 'longest'}
    else:
      for length in common.whole_numbers(f'{part}_len', getattr(settings, f'{part}_len'), 1):
        yield from list(run_alone(f'--parts={part}', f'--{part}_len={length}')) or [{'part': part, 'prefix_len': length, 'fits': False}]


def main(flags):
  settings = common.from_flags(flags, Accelerator())
  common.check_known('part', settings.parts, PARTS)
  if min(settings.rounds, settings.branches, settings.branch_len, settings.matrix) < 1 or settings.within <= 1:
    raise UserError('rounds, branches, branch_len and matrix must be at least 1, within more than 1.')
  if settings.alone and 'longest' in settings.parts:
    raise UserError('the longest prompt is found by processes of their own; leave --alone out.')
  if 'longest' in settings.parts and platform() == 'cpu':
    raise UserError('no GPU or TPU was found, and a CPU does not say which prompt is too long; the other parts run here at '
                    'small sizes: --parts=parity, or --parts=speed,step --model=tiny-hybrid --speed_len=8192 --step_len=8192.')
  for row in rows_here(settings, flags.dtype) if settings.alone else rows_apart(settings):
    row['command'] = common.command()
    if settings.out:
      common.append_row(settings.out, row)
    common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
