"""safetensors -> sharded parameters, tensor by tensor.

The host holds one tensor at a time: a stacked leaf is filled on its devices, row
by row, in place.
"""
import contextlib
import dataclasses
import functools
import os
from pathlib import Path, PurePosixPath

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
from safetensors import SafetensorError, safe_open

from branchreplay import lora, mesh
from branchreplay import model as layers
from branchreplay.config import ModelConfig, ReplayConfig, UserError
from branchreplay.hf import names
from branchreplay.hf.config import read_json
from branchreplay.model import Params

ONE_FILE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
PICKLED = ('.bin', '.pt', '.pth', '.ckpt', '.pkl')
FLOATS = ('F64', 'F32', 'F16', 'BF16')
UNUSED = ('mtp.', 'model.visual.')  # a multimodal checkpoint's other parts


def load(folder, model: ModelConfig, mesh_: jax.sharding.Mesh, replay: ReplayConfig,
         dtype='float32') -> Params:
  """Parameters of a checkpoint folder, in `dtype`, sharded as the engine wants them.

  With a lora_rank, adapters that change nothing yet stand beside its matrices.
  Peak host memory beyond the result is about the largest tensor. UserError names
  the file or the tensors where something is missing, too much, corrupt or misshapen.
  """
  if model.lora_rank:
    base = load(folder, dataclasses.replace(model, lora_rank=0), mesh_, replay, dtype)
    shapes = layers.shapes(model, jnp.dtype(dtype).name)
    return jax.device_put(lora.attach(model, base, jax.random.key(0)), mesh.shardings(
        mesh_, mesh.parameter_specs(shapes, mesh_.shape[mesh.SEQ], replay.shard_params)))
  dtype = jnp.dtype(dtype)
  if dtype == np.float64 and not jax.config.jax_enable_x64:
    raise UserError('float64 parameters need 64-bit JAX; run with --dtype=float64 or JAX_ENABLE_X64=1.')
  shapes = layers.shapes(model, dtype.name)
  specs = mesh.parameter_specs(shapes, mesh_.shape[mesh.SEQ], replay.shard_params)
  shardings = names.by_path(mesh.shardings(mesh_, specs))
  whole, done = names.by_path(shapes), {}
  with open_weights(folder) as held:
    wanted = names.tensors(model)
    _check_names(folder, model, held, wanted)
    for tensor in wanted:
      parts = names.to_leaves(model, tensor.form, _read(held, tensor))
      for path, part in zip(tensor.leaves, parts):
        if tensor.row is None:
          done[path] = _place(part, shardings[path], dtype)
          continue
        if path not in done:
          done[path] = _zeros(whole[path].shape, dtype, shardings[path])()
        row = _place(part, NamedSharding(mesh_, P(*shardings[path].spec[1:])), dtype)
        done[path] = _row_setter(shardings[path])(done[path], row, np.int32(tensor.row))
  if model.critic:  # checkpoints have no value head
    done['value'] = _zeros(whole['value'].shape, dtype, shardings['value'])()
  return jax.tree.unflatten(jax.tree.structure(shapes), [done[path] for path in whole])


def _place(x: np.ndarray, sharding, dtype):
  """`x` on its devices; transposed and cast a device's slice at a time."""
  return jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index].astype(dtype, order='C', copy=False))


@functools.lru_cache
def _zeros(shape, dtype, sharding):
  return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.lru_cache
def _row_setter(sharding):
  """(stack, row, i) -> stack with its row i set, in place."""
  return jax.jit(lambda stack, row, i: lax.dynamic_update_index_in_dim(stack, row, i, 0),
                 donate_argnums=0, out_shardings=sharding)


# ---------------------------------------------------------------- files


@contextlib.contextmanager
def open_weights(folder):
  """Name -> (open file, name in the file, path) of a folder's tensors.

  Names of a multimodal checkpoint are those of its text part alone. The files are
  read, not mapped: pages of a mapped file would count as this process's memory.
  """
  folder = Path(folder)
  held = {}
  with contextlib.ExitStack() as stack:
    for file, indexed in _files(folder).items():
      try:
        opened = stack.enter_context(safe_open(file, 'np', backend='pread'))
      except (SafetensorError, OSError) as error:
        raise UserError(f'{file} is truncated or corrupt ({error}); download it again.')
      inside = set(opened.keys())
      if indexed and indexed - inside:
        raise UserError(f'{folder / INDEX} places {_some(indexed - inside)} in {file.name}, which lacks '
                        'them; download both again.')
      for name in indexed or inside:
        if not (name.startswith(UNUSED) or name.endswith('rotary_emb.inv_freq')):
          held[name.replace('model.language_model.', 'model.', 1)] = (opened, name, file)
    yield held


def _files(folder: Path) -> dict:
  """File -> names that the index places in it (None: there is no index)."""
  if not folder.is_dir():
    raise UserError(f'{folder} is no folder; name one with config.json and safetensors files.')
  if (folder / ONE_FILE).is_file():
    return {folder / ONE_FILE: None}
  index = folder / INDEX
  if not index.is_file():
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLED)
    if pickled:
      raise UserError(f'{folder} holds pickled weights ({pickled[0]}), which can run any code when '
                      'loaded; convert them to safetensors.')
    raise UserError(f'{folder} holds neither {ONE_FILE} nor {INDEX}; name a checkpoint folder.')
  places, files = read_json(index).get('weight_map'), {}
  if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
    raise UserError(f'{index} has no weight_map of tensor names to file names; download it again.')
  for name, file in places.items():
    # By its text: a file of the folder may be a link to elsewhere, as in the hub's cache.
    if os.path.isabs(file) or '..' in PurePosixPath(file).parts:
      raise UserError(f'{index} names {file!r}, outside the folder; correct the index.')
    if not file.endswith('.safetensors'):
      raise UserError(f'{index} names {file!r}, which is no safetensors file; convert the weights.')
    if not (folder / file).is_file():
      raise UserError(f'{index} names {file!r}, which is missing; download it.')
    files.setdefault(folder / file, set()).add(name)
  return files


def _some(items) -> str:
  """The first three of `items` and how many more there are."""
  items = sorted(items)
  more = f' and {len(items) - 3} more' if len(items) > 3 else ''
  return ', '.join(items[:3]) + more


def _check_names(folder, model, held: dict, wanted) -> None:
  """UserError where tensors are missing, too many, misshapen or of a dtype that is not read."""
  names_wanted = {tensor.name for tensor in wanted}
  if missing := names_wanted - held.keys():
    raise UserError(f'{folder} lacks {len(missing)} tensors of this model: {_some(missing)}; '
                    'use the config.json that belongs to the weights.')
  extra = held.keys() - names_wanted
  if model.tied_embeddings and 'lm_head.weight' in extra:
    _check_tied(held)
    extra -= {'lm_head.weight'}
  if extra:
    raise UserError(f'{folder} holds {len(extra)} tensors that this model has no place for: '
                    f'{_some(extra)}; use the config.json that belongs to the weights.')
  for tensor in wanted:
    opened, name, file = held[tensor.name]
    found = opened.get_slice(name)
    shape, kind = tuple(found.get_shape()), found.get_dtype()
    if shape != tensor.shape:
      raise UserError(f'{file}: {name} has shape {list(shape)}, this model needs {list(tensor.shape)}; '
                      'use the config.json that belongs to the weights.')
    if kind not in FLOATS:
      raise UserError(f'{file}: {name} is {kind}; only {", ".join(FLOATS)} are read, '
                      'so use unquantised weights.')


def _check_tied(held: dict) -> None:
  """A head that is stored although it is tied must be the embedding, byte by byte."""
  head, table = (opened.get_tensor(name) for opened, name, _ in
                 (held['lm_head.weight'], held['model.embed_tokens.weight']))
  if head.dtype != table.dtype or head.shape != table.shape or head.tobytes() != table.tobytes():
    raise UserError(f'{held["lm_head.weight"][2]}: lm_head.weight differs from the embedding it is tied '
                    'to; set tie_word_embeddings to false.')


def _read(held: dict, tensor) -> np.ndarray:
  opened, name, file = held[tensor.name]
  try:
    return opened.get_tensor(name)
  except (SafetensorError, OSError) as error:
    raise UserError(f'{file}: {name} cannot be read ({error}); download the file again.')
