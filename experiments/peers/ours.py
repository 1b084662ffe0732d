"""branchreplay on a case; settings come as JSON, a `Dials`, in the second argument."""
import dataclasses
import json
import sys

import jax
import numpy as np

from branchreplay import batch as batches
from branchreplay import gradients, hf, mesh, objectives
from branchreplay.checks import check_replay
from branchreplay.config import ModelConfig, ObjectiveConfig, ReplayConfig
from experiments import common
from experiments.peers import worker


@dataclasses.dataclass(frozen=True)
class Dials:
  """How branchreplay runs a case."""
  mode: str = 'exact'  # exact | detached | depth=K
  full_sequence: bool = False  # plain autodiff on full sequences instead, ours
  devices: int = 2  # virtual devices that share the cores
  segment_len: int = 1024  # positions of a prefix segment
  replay_batch: int = 16  # branches replayed at once, at most
  branch_segment_len: int = 0  # response tokens of each of them replayed at once; 0: their mean rounded up to eights, the longest where layers are recurrent
  keep: str = 'layers'  # state | attention | layers | auto: what the way back need not compute again
  row_block: int = 256  # query rows per block of the attention loops
  key_block: int = 128  # keys per block of the attention loops


def sizes_of(dials: Dials, model: ModelConfig, tokens: int, prefix_len: int, branches: int, branch_len: int) -> ReplayConfig:
  """`tokens` of all responses together."""
  up = lambda n: -(-n // dials.devices) * dials.devices
  batch = min(dials.replay_batch, branches)
  once = dials.branch_segment_len or (branch_len if model.deltanet_per_repeat else -(-max(tokens, 1) // (8 * branches)) * 8)
  return ReplayConfig(
      segment_len=min(dials.segment_len, up(max(prefix_len - 1, 1))), branch_segment_len=up(once),
      prefix_capacity=max(prefix_len - 1, 1), branch_capacity=branch_len, mode=dials.mode, keep=dials.keep,
      replay_batch=batch, row_block=dials.row_block, key_block=dials.key_block)


def prepare(case):
  dials = Dials(**json.loads(sys.argv[2]))
  if dials.full_sequence:  # a device runs whole branches
    dials = dataclasses.replace(dials, devices=min(dials.devices, hf.batch_sizes(case)['branches']))
  jax.config.update('jax_num_cpu_devices', dials.devices)
  model, mesh_ = hf.read_config(f'{case}/model'), mesh.make_mesh(1, dials.devices)
  replay = sizes_of(dials, model, hf.response_tokens(case), **hf.batch_sizes(case))
  check_replay(replay, dials.devices, hf.batch_sizes(case)['branches'])
  replay = common.fit_keep(model, replay, dials.devices, 'float32')
  group = batches.stack([hf.read_batch(case, model, replay, np.float32)])
  params = hf.load(f'{case}/model', model, mesh_, replay, 'float32')
  objective = objectives.make_objective('grpo', ObjectiveConfig(
      clip_low=worker.CLIP, clip_high=worker.CLIP, kl_coef=worker.KL_COEF))
  function = gradients.gradient_function(mesh_, model, replay, objective, group, dials.full_sequence)
  result = None

  def update():
    nonlocal result
    result = None  # the last gradient's memory
    result = jax.block_until_ready(function(params, group))
    return result.loss[0]

  update()
  write = lambda path: hf.write_gradients(path, result.grads, model)
  return update, write, {'jax': jax.__version__, 'dials': dataclasses.asdict(dials) | {'keep': replay.keep}}


if __name__ == '__main__':
  worker.serve(prepare)
