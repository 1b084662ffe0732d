"""Parameters and gradients -> safetensors under Hugging Face names.

What is written depends on the arguments only: a second export has the same bytes.
A file appears under its name when it is whole.
"""
import dataclasses
import json
import os
from pathlib import Path
import shutil

import jax
from jax import lax
import numpy as np

from branchreplay import lora
from branchreplay.config import ModelConfig, UserError
from branchreplay.hf import names
from branchreplay.hf.config import make_config, read_json
from branchreplay.hf.reading import INDEX, ONE_FILE
from branchreplay.model import Params

DTYPES = {'float64': 'F64', 'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}
COPIED = ('tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
          'vocab.json', 'merges.txt', 'tokenizer.model', 'chat_template.jinja', 'chat_template.json',
          'generation_config.json')


def to_hf_tensors(tree: Params, model: ModelConfig):
  """Yields (name, array) of `tree`, parameters or what is shaped like them, layer by layer.

  One tensor at a time is brought to the host.
  """
  leaves = names.by_path(tree)
  for tensor in names.tensors(model):
    parts = [_host(leaves[path], tensor.row) for path in tensor.leaves]
    yield tensor.name, np.ascontiguousarray(names.from_leaves(model, tensor.form, parts))


def _host(leaf, row: int | None) -> np.ndarray:
  if isinstance(leaf, jax.Array):
    if not leaf.is_fully_addressable:
      raise UserError('weights are written by one process that holds them all; '
                      'export from a checkpoint.')
    return np.asarray(leaf if row is None else _row(leaf, np.int32(row)))
  return leaf if row is None else leaf[row]


@jax.jit
def _row(leaf, i):
  return lax.dynamic_index_in_dim(leaf, i, 0, False)


def write_gradients(path, grads: Params, model: ModelConfig) -> None:
  """Writes a gradient to one safetensors file, under the parameters' names, in its own dtype."""
  _write(Path(path), _plan(grads, model), (array for _, array in to_hf_tensors(grads, model)))


def save(folder, params: Params, model: ModelConfig, source=None,
         shard_bytes: int = 5_000_000_000) -> None:
  """Writes a checkpoint folder that `load` and transformers read.

  Args:
    source: the checkpoint folder that the training began with, or None. Its
      tokenizer files are copied, and what its config.json says besides the shape.
    shard_bytes: weights over it are split into files of about that size, with an index.

  LoRA adapters are added to their matrices. UserError for a model that no architecture has, or a folder with other weights.
  """
  if model.lora_rank:
    params, model = lora.folded(params), dataclasses.replace(model, lora_rank=0)
  folder = Path(folder)
  base = read_json(Path(source) / 'config.json') if source is not None else {}
  if source is not None and folder.resolve() == Path(source).resolve():
    raise UserError(f'{folder} is the checkpoint that the training began with; '
                    'export to another folder.')
  plan = _plan(params, model)
  dtype = next(dtype for dtype, code in DTYPES.items() if code == plan[0][1])
  config = make_config(model, dtype, base)
  shards = _shards(plan, shard_bytes)
  _claim(folder, shards)
  tensors = to_hf_tensors(params, model)
  for file, part in shards.items():
    _write(folder / file, part, (next(tensors)[1] for _ in part))
  if len(shards) > 1:
    index = {'metadata': {'total_size': sum(_size(entry) for entry in plan)},
             'weight_map': {name: file for file, part in shards.items() for name, *_ in part}}
    _write_json(folder / INDEX, index)
  for name in COPIED:
    if source is not None and (Path(source) / name).is_file():
      shutil.copyfile(Path(source) / name, folder / name)
  _write_json(folder / 'config.json', config)


def _plan(tree: Params, model: ModelConfig) -> list:
  """(name, dtype code, shape) of every tensor."""
  leaves = names.by_path(tree)
  return [(t.name, DTYPES[leaves[t.leaves[0]].dtype.name], t.shape) for t in names.tensors(model)]


def _size(entry) -> int:
  return int(np.prod(entry[2])) * {'F64': 8, 'F32': 4}.get(entry[1], 2)


def _shards(plan: list, limit: int) -> dict:
  """File name -> its entries, in order; one file where they fit."""
  parts, total = [[]], 0
  for entry in plan:
    if parts[-1] and total + _size(entry) > limit:
      parts.append([])
      total = 0
    parts[-1].append(entry)
    total += _size(entry)
  if len(parts) == 1:
    return {ONE_FILE: parts[0]}
  return {f'model-{i + 1:05}-of-{len(parts):05}.safetensors': part for i, part in enumerate(parts)}


def _claim(folder: Path, shards: dict) -> None:
  """Makes `folder`; UserError where weights lie that this export would leave beside its own."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'{folder} cannot be made ({error.strerror}); export to another folder.')
  ours = {*shards, *([INDEX] if len(shards) > 1 else [])}
  others = sorted({f.name for f in folder.glob('*.safetensors*')} - ours)
  if others:
    raise UserError(f'{folder} holds other weights ({others[0]}); export to an empty folder.')


def _write_json(file: Path, value: dict) -> None:
  try:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + '\n', encoding='utf-8')
  except OSError as error:
    raise UserError(f'{file} cannot be written ({error.strerror}); choose another place.')


def _write(file: Path, plan: list, arrays) -> None:
  """Writes the arrays as one safetensors file: header length, JSON header, bytes."""
  header, at = {'__metadata__': {'format': 'pt'}}, 0
  for entry in plan:
    name, dtype, shape = entry
    header[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [at, at + _size(entry)]}
    at += _size(entry)
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # the data are aligned
  part = file.with_name(f'{file.name}.{os.getpid()}')
  try:
    with open(part, 'wb') as out:
      out.write(len(text).to_bytes(8, 'little') + text)
      for array in arrays:
        out.write(array.reshape(-1).view(np.uint8).data)
    part.replace(file)
  except OSError as error:
    part.unlink(missing_ok=True)
    raise UserError(f'{file} cannot be written ({error.strerror}); choose another place.')
