"""Bytes per device of one exact update, by XLA's own report of the compiled program.

    bash launch.sh memory --model=tiny-hybrid --prefix_len=16384,65536 --branches=2,8

Nothing is run. About a minute a setting. Expected: from 2 to 8 branches the total grows by
less than 0.5%; its slope over the prefix is that of the state and its cotangent.
"""
import dataclasses

import jax
import numpy as np

from branchreplay import config, gradients, mesh, model, objectives, prefix, state
from branchreplay.checks import check_mode, check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig
from experiments import common, problems


@dataclasses.dataclass(frozen=True)
class Memory:
  model: str = 'tiny-hybrid'  # preset, see config.py
  prefix_len: tuple[str, ...] = ('16384', '65536')  # prompt lengths, one row each
  branches: tuple[str, ...] = ('2', '8')  # numbers of branches, one row each
  branch_len: int = 64  # tokens of a branch
  segment_len: int = 1024  # positions of a prefix segment
  replay_batch: int = 1  # branches replayed at once
  mode: str = 'exact'  # exact | detached | depth=K
  devices: int = 8  # devices of the seq axis
  out: str = ''  # JSONL file to append the rows to


def define(flags):
  common.define_flags(flags, Memory())


def bytes_of(tree) -> int:
  """Bytes of arrays or ShapeDtypeStructs."""
  return int(sum(np.prod(x.shape, dtype=np.int64) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def state_bytes(mesh_, shape, replay, params, group) -> tuple[int, int]:
  """Bytes per device of the captured state (history included) and of its cotangent."""
  split = mesh.split_tree(model.shapes(shape), mesh_.shape[mesh.SEQ], replay.shard_params)
  def capture(params, group):
    captured = prefix.capture(shape, replay, params, split, group.prefix[0], group.prefix_length[0])
    return captured, state.zero_cotangent(captured.state, replay.accumulate_dtype, replay.cotangent_dtype)
  # Inside shard_map shapes are a device's own; out_specs that split nothing keep them.
  spec = jax.sharding.PartitionSpec
  function = jax.shard_map(capture, mesh=mesh_, in_specs=(spec(), gradients.group_spec(group)), out_specs=spec(),
                           check_vma=False)
  captured, cotangent = jax.eval_shape(function, params, group)
  return bytes_of(captured), bytes_of(cotangent)


def measure(settings: Memory, prefix_len: int, branches: int, dtype: str) -> dict:
  shape = config.preset(settings.model)
  replay = ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_len, prefix_capacity=prefix_len,
      branch_capacity=settings.branch_len, replay_batch=settings.replay_batch, mode=settings.mode)
  mesh_ = mesh.make_mesh(1, settings.devices)
  check_replay(replay, settings.devices, branches)
  group = problems.random_group(shape, replay, 1, branches, settings.branch_len, np.dtype('float32'))
  params = model.shapes(shape, dtype)
  objective = objectives.make_objective('grpo', ObjectiveConfig(kl_coef=0.04))
  compiled = gradients.gradient_function(mesh_, shape, replay, objective, group).lower(params, group).compile()
  report = compiled.memory_analysis()
  held, cotangent = state_bytes(mesh_, shape, replay, params, group)
  return {'model': settings.model, 'prefix_len': prefix_len, 'branches': branches, 'devices': settings.devices,
          'segment_len': settings.segment_len, 'replay_batch': settings.replay_batch, 'mode': settings.mode,
          'dtype': dtype,
          'total_bytes': common.program_bytes(report),
          'temp_bytes': report.temp_size_in_bytes, 'state_bytes': held, 'cotangent_bytes': cotangent,
          'params_bytes': bytes_of(params)}


def main(flags):
  settings = common.from_flags(flags, Memory())
  check_mode(settings.mode)
  for prefix_len in common.whole_numbers('prefix_len', settings.prefix_len, 1):
    for branches in common.whole_numbers('branches', settings.branches, 1):
      row = common.provenance() | measure(settings, prefix_len, branches, flags.dtype)
      if settings.out:
        common.append_row(settings.out, row)
      common.emit(row)


if __name__ == '__main__':
  common.run(define, main)
