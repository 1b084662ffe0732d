"""Whether a run fits chips that are not there: the compiler's own memory report for a TPU topology.

    .venv/bin/pip install libtpu==0.0.42.1
    bash launch.sh fit --model=qwen3.5-27b --prefix_len=2097152
    bash launch.sh fit --model=qwen3.5-27b --prefix_len=4456448 --lora_rank=16 --accumulate_dtype=bfloat16

Compiles one exact update of a group (capture, replay of every branch, pull) ahead of time, with parameters
and gradients sharded, and prints bytes per chip. Optimizer moments are counted, not compiled: their bytes are in the
row. Nothing is run. Minutes a setting; each is compiled in a process of its own, because the compiler can abort. A
v5p chip has 102.8 GB.
"""
import dataclasses
import subprocess
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from branchreplay import config, gradients, lora, mesh, model, objectives
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, memory, problems

CHIP_GB = {'v5p': 102.8, 'v5e': 17.2, 'v4': 34.4, 'v6e': 34.4}  # high-bandwidth memory of a chip, 1e9 bytes


@dataclasses.dataclass(frozen=True)
class Fit:
  model: str = 'qwen3.5-27b'  # preset, see config.py
  topology: str = 'v5p:2x2x2'  # TPU kind and shape; all chips are the seq axis
  prefix_len: int = 2097152  # positions of the prompt
  branches: int = 8  # responses
  branch_len: int = 1024  # tokens of a response
  segment_len: int = 8192  # positions of a prefix segment
  replay_batch: int = 1  # branches replayed at once
  key_block: int = 1024  # keys per block of the attention loops
  row_block: int = 2048  # query rows per block of the attention loops
  vocab_rows: int = 1024  # positions whose logits exist at once
  mode: str = 'exact'  # exact | detached | depth=K
  accumulate_dtype: str = 'float32'  # sums of gradients and of dK/dV
  lora_rank: int = 0  # of adapters beside frozen matrices; 0: all is trained
  here: bool = False  # compile in this process
  out: str = ''  # JSONL file to append the row to


def define(flags):
  common.define_flags(flags, Fit())
  flags.set_default('dtype', 'bfloat16')


def chips(topology: str) -> list:
  """The devices of a topology that need not be there; UserError where the compiler is not, or knows no such one."""
  try:
    return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
  except Exception as error:  # of several libraries, all without a type of their own
    raise UserError(f'no compiler for {topology!r} ({str(error).splitlines()[0]}); install libtpu==0.0.42.1, and name a topology such as v5p:2x2x2.')


def measure(settings: Fit, dtype: str) -> dict:
  """Compiles the update; bytes per chip."""
  devices = chips(settings.topology)
  mesh_ = jax.sharding.Mesh(np.array(devices).reshape(1, -1), (mesh.DATA, mesh.SEQ))
  shape = dataclasses.replace(config.preset(settings.model), lora_rank=settings.lora_rank)
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=settings.prefix_len,
      branch_capacity=settings.branch_len, shard_params=True,
      **{k: getattr(settings, k) for k in ('replay_batch', 'key_block', 'row_block', 'vocab_rows', 'mode', 'accumulate_dtype')})
  config.check_model(shape)
  config.check_replay(replay, len(devices), settings.branches)
  group = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, problems.random_group(
      shape, dataclasses.replace(replay, prefix_capacity=settings.segment_len), 1, settings.branches, settings.branch_len,
      np.dtype('float32'), kl=False)))
  prefix = jax.ShapeDtypeStruct((1, replay.prefix_segments, replay.segment_len), jnp.int32)
  params = model.shapes(shape, dtype)
  function = gradients.gradient_function(mesh_, shape, replay, objectives.make_objective('grpo', ObjectiveConfig()), group)
  report = function.lower(params, group.replace(prefix=prefix)).compile().memory_analysis()
  total = (report.argument_size_in_bytes + report.output_size_in_bytes + report.temp_size_in_bytes - report.alias_size_in_bytes)
  moments = 2 * 4 * sum(x.size for x in jax.tree.leaves(lora.trainable(shape, params))) // len(devices)
  return {'chips': len(devices), 'total_bytes': total, 'argument_bytes': report.argument_size_in_bytes,
          'temp_bytes': report.temp_size_in_bytes, 'output_bytes': report.output_size_in_bytes,
          'adam_bytes': moments, 'params_bytes': memory.bytes_of(params) // len(devices)}


def main(flags):
  settings = common.from_flags(flags, Fit())
  if not settings.here:
    done = subprocess.run([sys.executable, '-m', 'experiments.fit', *sys.argv[1:], '--here'], stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
      raise SystemExit(2)  # said already
    if done.returncode:
      raise UserError(f'the compiler ended with status {done.returncode}, see above: it does not fit, or the compiler cannot do it.')
    print(done.stdout, end='', flush=True)
    return
  asked = {k: v for k, v in dataclasses.asdict(settings).items() if k != 'here'}
  row = common.provenance() | asked | {'dtype': flags.dtype} | measure(settings, flags.dtype)
  row['command'] = row['command'].removesuffix(' --here')
  chip = CHIP_GB.get(settings.topology.split(':')[0])
  fits = '' if chip is None else f' of {chip} GB'
  common.log(f'{row["total_bytes"] / 1e9:.1f} GB per chip{fits}; Adam moments in float32 would add {row["adam_bytes"] / 1e9:.1f} GB.')
  if settings.out:
    common.append_row(settings.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
