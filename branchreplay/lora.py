"""LoRA (arXiv:2106.09685): frozen matrices with a trained low-rank update beside them.

With `lora_rank` in the model's configuration each matrix named in `lora_targets` is an
`Adapted` node of the parameters. What is trained is a tree of its own: `trainable` keeps
the adapters (and a critic's head) and puts None where a leaf is frozen, so gradients and
optimizer moments of frozen leaves never exist. Letters: D inputs, F outputs, r rank.
"""
import functools
from typing import Any
import zlib

from flax import struct
import jax
import jax.numpy as jnp

from branchreplay.config import ModelConfig


@struct.dataclass
class Adapted:
  """weight + scale a b."""
  weight: Any  # [D, F], frozen
  a: Any  # [D, r]
  b: Any  # [r, F]
  scale: float = struct.field(pytree_node=False, default=1.0)  # alpha / r


def _is_adapted(x) -> bool:
  return isinstance(x, Adapted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, weight, wide):
  """x [..., D] times weight [D, F]; wide: as it is summed, float32 at least. Its cotangent is rounded to x's dtype."""
  return jnp.matmul(x, weight, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32) if wide else None)


def _product_backward(wide, saved, d):
  x, weight = saved
  d = d.astype(x.dtype)
  rows = lambda y: y.reshape(-1, y.shape[-1])
  return d @ weight.T, rows(x).T @ rows(d)  # autodiff's own d^T x, transposed: a CPU's compiler fuses what makes d into that


_product.defvjp(lambda x, weight, wide: (_product(x, weight, wide), (x, weight)), _product_backward)


def linear(x, weight, wide: bool = False):
  """x [..., D] times a matrix or an adapted one; wide: float32 at least, not rounded to x's dtype."""
  if _is_adapted(weight):
    return _product(x, weight.weight, wide) + _product(_product(x, weight.a, False), weight.b, wide) * weight.scale
  return _product(x, weight, wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _known(x, weight, product, wide):
  """`product`, which is linear(x, weight, wide), and pulled back as that."""
  return product


def _known_backward(wide, saved, d):
  x, weight, product = saved
  return *jax.vjp(lambda x, weight: linear(x, weight, wide), x, weight)[1](d), jnp.zeros_like(product)


_known.defvjp(lambda x, weight, product, wide: (product, (x, weight, product)), _known_backward)


def products(x, weights, known=None, wide: bool = False) -> tuple:
  """`linear` of x [..., D] and each of `weights` [D, F], None for None; known: they [..., F], of an earlier run, not made again."""
  make = lambda weight, product: linear(x, weight, wide) if product is None else _known(x, weight, product, wide)
  return tuple(w if w is None else make(w, y) for w, y in zip(weights, known or [None] * len(weights), strict=True))


def attach(model: ModelConfig, params, key):
  """`params` with adapters that change nothing yet: a normal with std D^-0.5, b zero."""
  def wrap(path, weight):
    if path[0].name != 'blocks' or path[-1].name not in model.lora_targets:
      return weight
    repeats, inputs, outputs = weight.shape
    k = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
    a = jax.random.normal(k, (repeats, inputs, model.lora_rank), jnp.float32) * inputs**-0.5
    return Adapted(weight, a.astype(weight.dtype), jnp.zeros((repeats, model.lora_rank, outputs), weight.dtype),
                   model.lora_alpha / model.lora_rank)
  return jax.tree_util.tree_map_with_path(wrap, params)


def trainable(model: ModelConfig, tree):
  """`tree`, parameters or a part or what is shaped like them, with None at frozen leaves."""
  if not model.lora_rank:
    return tree
  def keep(path, x):
    if _is_adapted(x):
      return x.replace(weight=None)
    return x if path[-1].name == 'value' else None
  return jax.tree_util.tree_map_with_path(keep, tree, is_leaf=_is_adapted)


def frozen(model: ModelConfig, tree):
  """`tree` with None at the leaves that are trained."""
  return jax.tree.map(lambda whole, part: whole if part is None else None, tree, trainable(model, tree))


def join(part, whole):
  """`whole` with the leaves that `part` has."""
  return jax.tree.map(lambda w, p: w if p is None else p, whole, part)


def off(params):
  """The parameters with adapters that change nothing: the reference policy, without a second copy."""
  return jax.tree.map(lambda x: x.replace(b=jnp.zeros_like(x.b)) if _is_adapted(x) else x, params, is_leaf=_is_adapted)


def folded(params):
  """The parameters with every adapter added to its matrix, as a checkpoint without adapters holds them."""
  def fold(x):
    if not _is_adapted(x):
      return x
    wide = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return (wide(x.weight) + wide(x.a) @ wide(x.b) * x.scale).astype(x.weight.dtype)
  return jax.tree.map(fold, params, is_leaf=_is_adapted)
