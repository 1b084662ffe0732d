"""A group of branches from a case folder's batch.npz, with everything an update needs."""
from pathlib import Path

import numpy as np

from branchreplay.batch import Group, make_group
from branchreplay.config import ModelConfig, ReplayConfig, UserError

INTEGERS = ('prompt', 'responses', 'response_mask')
NUMBERS = ('advantages', 'old_logprobs', 'ref_logprobs')


def read_batch(folder, model: ModelConfig, replay: ReplayConfig, dtype=np.float32) -> Group:
  """The group in `folder`/batch.npz; a branch ends at the last 1 of its mask.

  prompt [P], responses [G, R], response_mask [G, R] of 0 and 1, advantages [G],
  old_logprobs and ref_logprobs [G, R]. UserError names what is missing or wrong.
  """
  batch = _batch(folder)
  masks = batch['response_mask']
  lengths = _lengths(masks)
  rows = lambda key: [row[:n] for row, n in zip(batch[key], lengths)]
  return make_group(model, replay, batch['prompt'], rows('responses'), masks=rows('response_mask'),
                    advantages=batch['advantages'], old_logprobs=rows('old_logprobs'),
                    ref_logprobs=rows('ref_logprobs'), dtype=dtype)


def _lengths(masks) -> list[int]:
  """Tokens of each response, up to the last 1 of its mask."""
  return [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in masks]


def response_tokens(folder) -> int:
  """Tokens of all responses in `folder`/batch.npz together; errors as `read_batch`."""
  return sum(_lengths(_batch(folder)['response_mask']))


def batch_sizes(folder) -> dict:
  """prefix_len, branches and branch_len of the group in `folder`/batch.npz; errors as `read_batch`."""
  batch = _batch(folder)
  branches, branch_len = batch['responses'].shape
  return {'prefix_len': batch['prompt'].size, 'branches': branches, 'branch_len': branch_len}


def _batch(folder) -> dict:
  """The checked arrays of `folder`/batch.npz."""
  file = Path(folder) / 'batch.npz'
  batch = _arrays(file)
  _check(file, batch)
  return batch


def _arrays(file: Path) -> dict:
  try:
    with np.load(file, allow_pickle=False) as held:
      missing = [key for key in INTEGERS + NUMBERS if key not in held]
      if missing:
        raise UserError(f'{file} lacks {", ".join(missing)}; it needs {", ".join(INTEGERS + NUMBERS)}.')
      return {key: held[key] for key in INTEGERS + NUMBERS}
  except UserError:
    raise
  except OSError as error:
    reason = error.strerror or error
    raise UserError(f'{file} cannot be read ({reason}); name a case folder that holds it.')
  except Exception as error:  # a damaged archive fails in as many ways as zip files have fields
    raise UserError(f'{file} is no archive of plain arrays ({error}); write it with numpy.savez.')


def _check(file: Path, batch: dict) -> None:
  matrix = batch['responses'].shape
  if len(matrix) != 2:
    raise UserError(f'{file}: responses has shape {list(matrix)}; it must be [branches, tokens].')
  shapes = {'response_mask': matrix, 'advantages': matrix[:1], 'old_logprobs': matrix,
            'ref_logprobs': matrix}
  for key, shape in shapes.items():
    if batch[key].shape != shape:
      raise UserError(f'{file}: {key} has shape {list(batch[key].shape)}, responses {list(matrix)}; '
                      f'it must be {list(shape)}.')
  if batch['prompt'].ndim != 1 or not batch['prompt'].size:
    raise UserError(f'{file}: prompt has shape {list(batch["prompt"].shape)}; '
                    'it must be a row of token ids.')
  for key in INTEGERS:
    if not np.issubdtype(batch[key].dtype, np.integer):
      raise UserError(f'{file}: {key} is {batch[key].dtype}; it must be integers.')
  if not np.isin(batch['response_mask'], (0, 1)).all():
    raise UserError(f'{file}: response_mask holds other values than 0 and 1.')
  for key in NUMBERS:
    if not np.issubdtype(batch[key].dtype, np.floating) or not np.isfinite(batch[key]).all():
      raise UserError(f'{file}: {key} must be finite floating-point numbers.')
