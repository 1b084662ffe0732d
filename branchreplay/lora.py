"""LoRA (arXiv:2106.09685): frozen matrices with a trained low-rank update beside them.

With `lora_rank` in the model's configuration each matrix named in `lora_targets` is an
`Adapted` node of the parameters. What is trained is a tree of its own: `trainable` keeps
the adapters (and a critic's head) and puts None where a leaf is frozen, so gradients and
optimizer moments of frozen leaves never exist. Letters: D inputs, F outputs, r rank.
"""
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


@jax.custom_vjp
def _wide_product(x, weight):
  """x @ weight as it is summed, float32 at least; its cotangent is rounded to x's dtype, so that both ways multiply in that."""
  return jnp.matmul(x, weight, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _wide_backward(saved, d):
  x, weight = saved
  return jax.vjp(jnp.matmul, x, weight)[1](d.astype(x.dtype))


_wide_product.defvjp(lambda x, weight: (_wide_product(x, weight), (x, weight)), _wide_backward)


def linear(x, weight, wide: bool = False):
  """x [..., D] times a matrix or an adapted one; wide: float32 at least, not rounded to x's dtype."""
  product = _wide_product if wide else jnp.matmul
  if _is_adapted(weight):
    return product(x, weight.weight) + product(x @ weight.a, weight.b) * weight.scale
  return product(x, weight)


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
