"""Whether a run fits chips that are not there: the compiler's own memory report for a TPU topology.

    .venv/bin/pip install libtpu==0.0.42.1
    bash launch.sh fit --model=qwen3.5-27b --prefix_len=2097152
    bash launch.sh fit --model=qwen3.5-27b --prefix_len=4456448 --lora_rank=16 --cotangent_dtype=bfloat16
    bash launch.sh fit --topology=cpu:8 --dtype=float32 --model=bench --prefix_len=32768 --segment_len=2048

Compiles capture, replay and pull of a group ahead of time, as stream.py runs them, with parameters and gradients
sharded over all chips, and prints bytes per chip of each. Nothing is run. Optimizer moments are counted, not compiled:
their bytes are in the row. Minutes a phase, each in a process of its own, because the compiler can abort. A v5p chip
has 102.8 GB. A phase that the compiler refuses has what it says in `refused`.
"""
import dataclasses
import json
import os
import subprocess
import sys
import time

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from branchreplay import accelerators, config, hf, lora, mesh, model, objectives, stream
from branchreplay.checks import check_model, check_replay
from branchreplay.config import ModelConfig, ObjectiveConfig, ReplayConfig, UserError
from experiments import common, memory, problems, resume

CHIP_GB = {'v5p': 102.8, 'v5e': 17.2, 'v4': 34.4, 'v6e': 34.4}  # high-bandwidth memory of a chip, 1e9 bytes
OF_REPLAY = ('segment_len', 'replay_batch', 'key_block', 'row_block', 'vocab_rows', 'mode', 'keep', 'accumulate_dtype',
             'cotangent_dtype', 'history_dtype', 'offload', 'shard_params')


@dataclasses.dataclass(frozen=True)
class Fit:
  model: str = 'qwen3.5-27b'  # preset, or a folder with a config.json
  repeats: int = 0  # of the preset's layer pattern, if more than 0
  topology: str = 'v5p:2x2x2'  # TPU kind and shape, or cpu:N of virtual devices; all chips are the seq axis
  prefix_len: int = 2097152  # positions of the prompt
  branches: int = 8  # responses
  branch_len: int = 1024  # tokens of a response
  segment_len: int = 8192  # positions of a prefix segment
  replay_batch: int = 1  # branches replayed at once
  key_block: int = 1024  # keys per block of the attention loops
  row_block: int = 2048  # query rows per block of the attention loops
  vocab_rows: int = 1024  # positions whose logits exist at once
  mode: str = 'exact'  # exact | detached | depth=K
  keep: str = 'state'  # state | attention | layers: what the pull need not compute again
  attention: str = 'blocks'  # blocks, or tokamax: its kernel for the chip
  accumulate_dtype: str = 'float32'  # sums of gradients, and of dK/dV
  cotangent_dtype: str = ''  # of dK/dV, if not accumulate_dtype
  history_dtype: str = ''  # of the recurrent states kept for the pull, if not float32
  shard_params: bool = True  # split parameters and gradients over the chips
  offload: bool = False  # keep dK/dV and the recurrent states kept for the pull in the host's memory
  lora_rank: int = 0  # of adapters beside frozen matrices; 0: all is trained
  phases: tuple[str, ...] = resume.PHASES  # capture, replay, pull
  here: bool = False  # compile in this process
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Fit())
  flags.set_default('dtype', 'bfloat16')


def chips(topology: str) -> list:
  """The devices of a topology that need not be there; UserError where the compiler is not, or knows no such one."""
  if topology.startswith('cpu:') and topology[4:].isdecimal() and int(topology[4:]):
    return mesh.make_mesh(1, int(topology[4:])).devices.flat
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
  except Exception as error:  # of several libraries, all without a type of their own
    raise UserError(f'no compiler for {topology!r} ({str(error).splitlines()[0]}); install libtpu==0.0.42.1, and name a topology such as v5p:2x2x2.')


def configurations(settings, seq: int) -> tuple[ModelConfig, ReplayConfig]:
  """The model and replay settings of a Fit or of plan.py's Plan, checked."""
  shape = hf.read_config(settings.model) if os.path.isdir(settings.model) else config.preset(settings.model)
  shape = dataclasses.replace(shape, lora_rank=settings.lora_rank, repeats=settings.repeats or shape.repeats)
  replay = ReplayConfig(branch_segment_len=settings.branch_len, prefix_capacity=settings.prefix_len,
                        branch_capacity=settings.branch_len,
                        **{name: getattr(settings, name) for name in OF_REPLAY})
  check_model(shape)
  check_replay(replay, seq, settings.branches)
  return shape, replay


def abstract_group(shape, replay: ReplayConfig, branches: int, branch_len: int):
  """ShapeDtypeStructs of one stacked group, its prefix as long as the capacity."""
  short = dataclasses.replace(replay, prefix_capacity=replay.segment_len)
  group = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, problems.random_group(
      shape, short, 1, branches, branch_len, np.dtype('float32'), kl=False)))
  return group.replace(prefix=jax.ShapeDtypeStruct((1, replay.prefix_segments, replay.segment_len), jnp.int32))


def problem(settings: Fit, devices, dtype: str):
  """The steps of an update on `devices`, and the shapes of their arguments."""
  mesh_ = jax.sharding.Mesh(np.array(list(devices)).reshape(1, -1), (mesh.DATA, mesh.SEQ))
  shape, replay = configurations(settings, mesh_.size)
  shape, replay = accelerators.settle(shape, dataclasses.replace(replay, attention=settings.attention), dtype,
                                      mesh_.devices.flat[0], common.log)
  group, params = abstract_group(shape, replay, settings.branches, settings.branch_len), model.shapes(shape, dtype)
  steps = stream.make_steps(mesh_, shape, replay, objectives.make_objective('grpo', ObjectiveConfig()), group)
  split = mesh_.size if replay.shard_params else 1
  moments = 2 * 4 * sum(x.size for x in jax.tree.leaves(lora.trainable(shape, params))) // split
  sizes = {'chips': mesh_.size, 'adam_bytes': moments, 'params_bytes': memory.bytes_of(params) // split}
  return steps, stream.shapes_of(mesh_, replay, steps, params, group), sizes


def compile_phase(settings: Fit, phase: str, dtype: str) -> dict:
  """Bytes per chip of one phase, or why the compiler refuses it."""
  steps, shapes, sizes = problem(settings, chips(settings.topology), dtype)
  started, part = time.perf_counter(), {}
  try:
    report = stream.compiled(steps, phase, shapes).memory_analysis()
    part = {'bytes': common.program_bytes(report), 'temp_bytes': report.temp_size_in_bytes,
            'argument_bytes': report.argument_size_in_bytes, 'host_bytes': common.program_bytes(report, 'host_')}
  except jax.errors.JaxRuntimeError as error:
    part = {'bytes': None, 'refused': ' '.join(str(error).split())[:400]}
  return sizes | {f'{phase}_{name}': value for name, value in part.items()} | {
      f'{phase}_compile_s': time.perf_counter() - started}


def compiled_apart(phase: str) -> dict:
  """`compile_phase` in a process of its own, of the flags of this one."""
  done = subprocess.run([sys.executable, '-m', 'experiments.fit', *sys.argv[1:], '--here', f'--phases={phase}'],
                        stdout=subprocess.PIPE, text=True,
                        env=os.environ | {'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # it opens no chip, so it may run beside others
                                          'JAX_USE_SHARDY_PARTITIONER': '1'})  # as where the chips are, see launch.sh
  if done.returncode == 2:
    raise SystemExit(2)  # said already
  if done.returncode:
    return {f'{phase}_bytes': None, f'{phase}_refused': f'the compiler ended with status {done.returncode}'}
  return json.loads(done.stdout)


def main(flags):
  settings = common.from_flags(flags, Fit())
  common.check_known('phase', settings.phases, resume.PHASES)
  if settings.here:
    common.emit(compile_phase(settings, settings.phases[0], flags.dtype))
    return
  asked = {k: v for k, v in dataclasses.asdict(settings).items() if k not in ('here', 'phases')}
  row = common.provenance() | asked | {'dtype': flags.dtype}
  chip = CHIP_GB.get(settings.topology.split(':')[0])
  for phase in settings.phases:
    row |= (found := compiled_apart(phase))
    held = found[f'{phase}_bytes']
    common.log(f'{phase}: {held / 1e9:.3g} GB per chip' + (f' of {chip} GB' if chip else '') if held else
               f'{phase}: refused ({found[f"{phase}_refused"]})')
  if 'adam_bytes' in row:
    common.log(f'Adam moments in float32 would add {row["adam_bytes"] / 1e9:.3g} GB.')
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
