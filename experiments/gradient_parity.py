"""Compares the gradient of branch replay with plain autodiff on full sequences; one JSON row a setting.

    bash launch.sh gradient_parity --model=tiny-hybrid --prefix_len=1000 --branches=4 --branch_len=48 --dtype=float64
    bash launch.sh gradient_parity --case=DIR --dtype=float64 --grads_out=grads.safetensors

About a minute a setting. Expected: rel_l2 <= 1e-10 in float64 in mode exact. In float32 both
replay and full-sequence autodiff are measured against the float64 truth (rel_l2 and
rel_l2_full_sequence). The inputs are ragged: lengths 0, 1 and several segments. Lists make
a row each: --devices=1,2,8 --mode=exact,detached,depth=2.
"""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import config, gradients, hf, mesh, model, objectives, processes
from branchreplay.checks import check_mode, check_model, check_replay
from branchreplay.config import ObjectiveConfig, ReplayConfig, UserError
from experiments import common, problems


@dataclasses.dataclass(frozen=True)
class Parity:
  model: str = 'tiny-hybrid'  # preset, see config.py
  prefix_len: int = 1000  # tokens of the prompt
  branches: int = 4  # responses of the prompt
  branch_len: int = 48  # tokens of the longest response
  devices: tuple[str, ...] = ('8',)  # numbers of devices, one row each
  mode: tuple[str, ...] = ('exact',)  # exact | detached | depth=K, a row each
  segment_len: int = 256  # positions of a prefix segment
  branch_segment_len: int = 16  # positions of a branch segment
  replay_batch: int = 2  # branches replayed at once
  shard_params: bool = False  # split parameters and gradients over devices
  seed: int = 0  # of parameters and tokens
  out: str = ''  # JSONL file to append the rows to
  case: str = ''  # folder with model/ (Hugging Face) and batch.npz, instead of random inputs
  grads_out: str = ''  # safetensors file to write the gradient of a case to
  logprobs_out: str = ''  # npz file to write the log-probs of a case to


def define(flags):
  common.define_flags(flags, Parity())


def flat(grads) -> np.ndarray:
  return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(grads)])


def compare(got, want) -> dict:
  """Relative L2, cosine and largest absolute difference of two gradients."""
  a, b = flat(got), flat(want)
  norm = np.linalg.norm
  return {'rel_l2': norm(a - b) / norm(b), 'cosine': a @ b / (norm(a) * norm(b)), 'max_abs': np.abs(a - b).max()}


def objective_of():
  """The loss of the cases: clip 0.2, k3 KL of weight 0.04, mean over the group's tokens."""
  return objectives.make_objective('grpo', ObjectiveConfig(kl_coef=0.04))


def sizes_of(settings: Parity, dtype: str) -> ReplayConfig:
  return ReplayConfig(
      segment_len=settings.segment_len, branch_segment_len=settings.branch_segment_len,
      prefix_capacity=max(1, settings.prefix_len), branch_capacity=max(1, settings.branch_len),
      replay_batch=settings.replay_batch, shard_params=settings.shard_params,
      accumulate_dtype='float64' if dtype == 'float64' else 'float32')


def run(settings: Parity, problem, devices: int, dtype: str, mode: str = 'exact', full_sequence: bool = False):
  """The Result of replay, or of full sequences, on so many devices."""
  shape, group_of, params_of = problem
  replay = dataclasses.replace(sizes_of(settings, dtype), mode=mode)
  mesh_ = mesh.make_mesh(1, devices)
  check_replay(replay, devices, settings.branches)
  group = group_of(replay, dtype)
  function = gradients.gradient_function(mesh_, shape, replay, objective_of(), group, full_sequence)
  result = jax.block_until_ready(function(params_of(mesh_, replay, dtype), group))
  return processes.fetch(result)


def row_of(settings: Parity, mode: str, devices: int, dtype: str, result, reference, truth) -> dict:
  """reference: full sequences in `dtype`; truth: in float64."""
  row = {'mode': mode, **compare(result.grads, truth.grads),
         'loss': float(result.loss[0]), 'loss_reference': float(truth.loss[0]), 'devices': devices,
         'segment_len': settings.segment_len, 'dtype': dtype, 'model': settings.case or settings.model,
         'prefix_len': settings.prefix_len, 'branches': settings.branches, 'branch_len': settings.branch_len,
         'shard_params': settings.shard_params}
  if dtype != 'float64':
    row['rel_l2_full_sequence'] = compare(reference.grads, truth.grads)['rel_l2']
  return row


def problem_of(settings: Parity, dtype: str):
  """(model, group_of(replay, dtype), params_of(mesh, replay, dtype)): a case's, or random."""
  if settings.case:
    shape = hf.read_config(f'{settings.case}/model')
    group_of = lambda replay, dtype: jax.tree.map(
        lambda x: np.asarray(x)[None], hf.read_batch(settings.case, shape, replay, np.dtype(dtype)))
    return shape, group_of, lambda mesh_, replay, dtype: hf.load(f'{settings.case}/model', shape, mesh_, replay, dtype)
  shape = config.preset(settings.model)
  if settings.prefix_len < 0 or settings.branch_len < 1 or settings.branches < 1:
    raise UserError('prefix_len must be at least 0, branches and branch_len at least 1.')
  group_of = lambda replay, dtype: problems.random_group(
      shape, replay, settings.prefix_len, settings.branches, settings.branch_len, jnp.dtype(dtype),
      settings.seed, ragged=True)
  initial = model.init(shape, jax.random.key(settings.seed), jnp.dtype(dtype))
  return shape, group_of, lambda mesh_, replay, dtype: jax.tree.map(lambda x: x.astype(dtype), initial)


def main(flags):
  settings, dtype = common.from_flags(flags, Parity()), flags.dtype
  for mode in settings.mode:
    check_mode(mode)
  jax.config.update('jax_enable_x64', True)  # for the float64 truth
  if settings.case:
    settings = dataclasses.replace(settings, **hf.batch_sizes(settings.case))
  problem, devices = problem_of(settings, dtype), common.whole_numbers('devices', settings.devices, 1)
  check_model(problem[0])
  reference = run(settings, problem, max(devices), dtype, full_sequence=True)
  truth = reference if dtype == 'float64' else run(settings, problem, max(devices), 'float64', full_sequence=True)
  for mode in settings.mode:
    for count in devices:
      result = run(settings, problem, count, dtype, mode)
      row = common.provenance() | row_of(settings, mode, count, dtype, result, reference, truth)
      if settings.out:
        common.append_row(settings.out, row)
      common.emit(row)
  if settings.grads_out and processes.is_first():
    hf.write_gradients(settings.grads_out, result.grads, problem[0])
  if settings.logprobs_out and processes.is_first():
    np.savez(settings.logprobs_out, logprobs=np.asarray(result.scores.logprob[0][:, :settings.branch_len]))


if __name__ == '__main__':
  common.run(define, main, several=True)
