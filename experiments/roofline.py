"""What capture, replay and pull reach of the machine's own matrix-multiply rate, over prefix length.

    bash launch.sh roofline --prefix_len=1024,2048,4096,8192,16384,32768,65536 --out=experiments/results/roofline.jsonl

One compilation serves all lengths (its seconds are in the row). The rate is that of products of square
matrices on all devices at once for about a second, before and after each round of a phase (a machine's rate
can change by a third from one minute to the next); a share is of what the mean of the two would have made of
the round's time, the median of the rounds. FLOPs are those of the matrix products that are run, recomputation
included, pairs that the causal mask hides left out, as in work.py. Pull is the exact update's time less the
detached one's, both on a capture made before. Half an hour on 2 cores, most of it at 65,536. Expected:
seconds that fit c + a P + b P^2 (c: what is cleared for a capture as long as the longest), at 32,768 capture,
replay and pull at about 60% of the rate or above.
"""
import dataclasses
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from branchreplay import accelerators, config, gradients, mesh, model, objectives
from branchreplay.checks import check_model, check_replay
from branchreplay.config import ModelConfig, ObjectiveConfig, ReplayConfig, UserError
from experiments import common, problems, work

PHASES = ('capture', 'replay', 'pull')


@dataclasses.dataclass(frozen=True)
class Roofline:
  model: str = 'bench'  # preset, see config.py
  repeats: int = 0  # of the preset's layer pattern, if more than 0
  prefix_len: tuple[str, ...] = ('8192', '32768')  # tokens of the prompt, a row each
  branch_len: int = 128  # tokens of a response
  branches: int = 4  # responses of the prompt
  segment_len: int = 1024  # positions of a prefix segment
  keep: str = 'auto'  # state | attention | layers | auto: what the way back need not compute again
  attention: str = 'auto'  # blocks | auto, tokamax or cudnn: kernels of an accelerator
  # Many rows for each copy of a block of keys, which a long prompt's come from memory; their scores fit a core's cache.
  row_block: int = 512  # query rows per block of the attention loops
  key_block: int = 128  # keys per block of the attention loops
  devices: int = 2  # devices of the seq axis
  rounds: int = 3  # medians are reported
  matrix: int = 1024  # rows and columns of the square matrices
  products: int = 48  # of them, one after another on each device: about a second on 2 cores
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Roofline())
  flags.set_default('virtual_devices', Roofline().devices)  # more would be more threads on the same cores


def seconds(function, *arguments) -> float:
  """Time of a call."""
  started = time.perf_counter()
  jax.block_until_ready(function(*arguments))
  return time.perf_counter() - started


def matmul_rate(mesh_, size: int, count: int, dtype: str):
  """Compiles a function that measures FLOPs a second of `count` products of `size` x `size` on each device, all devices together."""
  def local(a):
    return jax.lax.fori_loop(0, count, lambda _, x: a[0] @ x * (1 / size), a[0])[None]
  a = jnp.ones((mesh_.shape[mesh.SEQ], size, size), dtype)
  run = mesh.sharded(mesh_, local, (P(mesh.SEQ),), P(mesh.SEQ)).lower(a).compile()
  a = jax.device_put(a, run.input_shardings[0][0])
  return lambda: mesh_.shape[mesh.SEQ] * count * 2 * size**3 / seconds(run, a)


def phase_flops(shape: ModelConfig, keep: str, prefix_len: int, branches: int, branch_len: int) -> dict:
  """FLOPs of capture, replay and pull; a retract's linear layers count 3 forwards, 2 where their products are kept, its attention 2.5."""
  linear, keys = work.prefix_flops(shape, prefix_len)
  again = {'state': (1, 1), 'attention': (1, 0), 'layers': (0, 0)}[keep]
  replayed = 4 if gradients.kept_of_branches(keep) == 'layers' else 3
  head = 2.0 * shape.width * shape.vocab_size * branch_len * 4
  return {'capture': linear + keys,
          'replay': branches * (replayed * work.linear_flops(shape) * branch_len + 3.5 * work.key_flops(shape, prefix_len, branch_len) + head),
          'pull': (3 + again[0]) * linear + (2.5 + again[1]) * keys}


def compiled_phases(settings: Roofline, longest: int, dtype: str):
  """The model and replay settings; `matmul_rate`; (capture, replay, replay and pull) compiled; a maker of arguments; seconds."""
  shape = config.preset(settings.model)
  shape = dataclasses.replace(shape, repeats=settings.repeats or shape.repeats)
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=longest,
      branch_capacity=settings.branch_len, replay_batch=settings.branches, keep=settings.keep, attention=settings.attention,
      row_block=settings.row_block, key_block=settings.key_block)
  mesh_ = mesh.make_mesh(1, settings.devices)
  check_model(shape)
  check_replay(replay, settings.devices, settings.branches)
  replay = common.fit_keep(shape, replay, settings.devices, dtype)
  shape, replay = accelerators.settle(shape, replay, dtype, jax.devices()[0], common.log)
  objective = objectives.make_objective('grpo', ObjectiveConfig())
  group_of = lambda length: problems.random_group(shape, replay, length, settings.branches, settings.branch_len,
                                                  np.dtype('float32'), kl=False)
  group, params = group_of(1), model.init(shape, jax.random.key(0), dtype)
  started = time.perf_counter()
  function = gradients.capture_function(mesh_, shape, replay, group)
  capture, captured = function.lower(params, group).compile(), jax.eval_shape(function, params, group)
  captured = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), captured, capture.output_shardings)
  update = lambda mode: gradients.gradient_function(
      mesh_, shape, dataclasses.replace(replay, mode=mode), objective, group, with_captured=True).lower(
          params, group, captured).compile()
  functions = capture, update('detached'), update('exact')
  took = time.perf_counter() - started
  arguments = lambda length: jax.device_put((params, group_of(length)), capture.input_shardings[0])
  common.log(f'compiled in {took:.0f} s, keep={replay.keep}')
  return shape, replay, matmul_rate(mesh_, settings.matrix, settings.products, dtype), functions, arguments, took


def measure(settings: Roofline, length: int, phases, dtype: str) -> dict:
  """The row of a prompt of `length` tokens; phases: of `compiled_phases`."""
  shape, replay, rate, (capture, detached, exact), arguments, took = phases
  params, group = arguments(length)
  captured = jax.block_until_ready(capture(params, group))
  found, rates = {}, {}
  for phase, function, given in (('capture', capture, ()), ('replay', detached, (captured,)), ('pull', exact, (captured,))):
    found[phase], rates[phase] = [], [rate()]
    for _ in range(settings.rounds):
      found[phase].append(seconds(function, params, group, *given))
      rates[phase].append(rate())
  flops = phase_flops(shape, replay.keep, length, settings.branches, settings.branch_len)
  took_s = {phase: float(np.median(s)) for phase, s in found.items()}
  # What products would have made of a round's time, by the rates before and after it.
  possible = {phase: float(np.median(s * np.convolve(rates[phase], [0.5, 0.5], 'valid'))) for phase, s in found.items()}
  for of_phases in (took_s, possible):
    of_phases['pull'] -= of_phases['replay']  # `exact` is both
  row = common.provenance() | dataclasses.asdict(settings) | {
      'prefix_len': length, 'keep': replay.keep, 'kernel': replay.attention, 'dtype': dtype, 'capacity': length, 'compile_s': took,
      'matmul_flops_per_s': float(np.mean(sum(rates.values(), []))), 'rates': rates, 'seconds': sum(took_s.values())}
  for phase in PHASES:
    row |= {f'{phase}_s': took_s[phase], f'{phase}_flops': flops[phase], f'{phase}_share': flops[phase] / possible[phase]}
  return row


def main(flags):
  settings = common.from_flags(flags, Roofline())
  lengths = common.whole_numbers('prefix_len', settings.prefix_len, 1)
  if min(settings.rounds, settings.branches, settings.branch_len, settings.matrix, settings.products) < 1 or settings.repeats < 0:
    raise UserError('rounds, branches, branch_len, matrix and products must be at least 1, repeats at least 0.')
  phases = compiled_phases(settings, max(lengths), flags.dtype)
  for length in lengths:
    row = measure(settings, length, phases, flags.dtype) | {'capacity': max(lengths)}
    if settings.out:
      common.append_row(settings.out, row)
    common.emit(row)
    common.log(f'{length:>8,} positions: ' + ', '.join(
        f'{phase} {row[f"{phase}_s"]:.2f} s ({row[f"{phase}_share"]:.0%})' for phase in PHASES)
        + f' of {row["matmul_flops_per_s"] / 1e9:.0f} GFLOP/s')


if __name__ == '__main__':
  common.run(define, main)
