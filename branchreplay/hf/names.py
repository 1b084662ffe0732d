"""Which tensor of a checkpoint holds which leaf of `Params`, and how their layouts differ.

A leaf is named by its path, such as blocks/0/mixer/q; leaves of blocks are stacked
over repeats, and a checkpoint has a tensor for each layer. Matrices are [in, out]
here and [out, in] there. Letters: H query heads, h head_dim, D width, C channels, W taps.
"""
from typing import NamedTuple

import jax
import numpy as np

from branchreplay import model as layers
from branchreplay.config import ModelConfig


class Tensor(NamedTuple):
  """A tensor of a checkpoint and what it holds of `Params`."""
  name: str
  leaves: tuple[str, ...]  # two where it is fused
  row: int | None  # of the stacked leaves; None where they are not stacked
  form: str  # plain | matrix | conv | query_gate
  shape: tuple[int, ...]


ATTENTION = {'q': 'q_proj', 'k': 'k_proj', 'v': 'v_proj', 'out': 'o_proj'}
DELTANET = {'qkv': 'in_proj_qkv', 'z': 'in_proj_z', 'beta': 'in_proj_b', 'decay': 'in_proj_a',
            'out': 'out_proj'}
MLP = {'gate': 'gate_proj', 'up': 'up_proj', 'down': 'down_proj'}


def _layer(model: ModelConfig, kind: str) -> list:
  """(name, leaves, form) of a layer's tensors."""
  def matrices(theirs, ours, table):
    return [(f'{theirs}.{name}.weight', (f'{ours}/{leaf}',), 'matrix') for leaf, name in table.items()]

  rows = [('input_layernorm.weight', ('norm',), 'plain')]
  if kind == 'deltanet':
    rows += matrices('linear_attn', 'mixer', DELTANET)
    rows += [('linear_attn.conv1d.weight', ('mixer/conv',), 'conv'),
             ('linear_attn.A_log', ('mixer/a_log',), 'plain'),
             ('linear_attn.dt_bias', ('mixer/dt_bias',), 'plain'),
             ('linear_attn.norm.weight', ('mixer/norm',), 'plain')]
  else:
    rows += matrices('self_attn', 'mixer', ATTENTION)
    if model.output_gate:
      rows[1] = ('self_attn.q_proj.weight', ('mixer/q', 'mixer/gate'), 'query_gate')
    if model.qk_norm:
      rows += [(f'self_attn.{x}_norm.weight', (f'mixer/{x}_norm',), 'plain') for x in 'qk']
  rows.append(('post_attention_layernorm.weight', ('mlp_norm',), 'plain'))
  return rows + matrices('mlp', 'mlp', MLP)


def tensors(model: ModelConfig) -> list[Tensor]:
  """The tensors of a checkpoint of `model`, layer by layer."""
  shapes = {path: leaf.shape for path, leaf in by_path(layers.shapes(model)).items()}

  def tensor(name, leaves, row, form):
    shape = shapes[leaves[0]][0 if row is None else 1:]
    shape = {'plain': shape, 'matrix': shape[::-1], 'query_gate': (2 * shape[-1], shape[0]),
             'conv': (shape[0], 1, shape[-1])}[form]
    return Tensor(name, leaves, row, form, shape)

  out = [tensor('model.embed_tokens.weight', ('embed',), None, 'plain')]
  for layer in range(model.layers):
    row, place = divmod(layer, len(model.pattern))
    for name, leaves, form in _layer(model, model.pattern[place]):
      paths = tuple(f'blocks/{place}/{leaf}' for leaf in leaves)
      out.append(tensor(f'model.layers.{layer}.{name}', paths, row, form))
  out.append(tensor('model.norm.weight', ('norm',), None, 'plain'))
  if not model.tied_embeddings:
    out.append(tensor('lm_head.weight', ('head',), None, 'plain'))
  return out


def by_path(tree) -> dict:
  """Path -> leaf of a tree like `Params`."""
  return {jax.tree_util.keystr(path, simple=True, separator='/'): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def to_leaves(model: ModelConfig, form: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
  """A checkpoint's tensor as the leaves it holds; views where that is possible."""
  if form == 'query_gate':  # [H*2*h, D]: each head's query, then its gate
    x = x.reshape(model.heads, 2, model.head_dim, -1)
    return tuple(x[:, i].reshape(model.heads * model.head_dim, -1).T for i in (0, 1))
  return ({'plain': lambda: x, 'matrix': lambda: x.T, 'conv': lambda: x[:, 0]}[form](),)


def from_leaves(model: ModelConfig, form: str, leaves) -> np.ndarray:
  """The inverse of `to_leaves`."""
  x = leaves[0]
  if form == 'query_gate':
    heads = [leaf.T.reshape(model.heads, 1, model.head_dim, -1) for leaf in leaves]
    return np.concatenate(heads, 1).reshape(2 * x.shape[1], -1)
  return {'plain': lambda: x, 'matrix': lambda: x.T, 'conv': lambda: x[:, None]}[form]()
