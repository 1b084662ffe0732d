"""The decoder as pure functions over typed weight trees; nothing stateful.

Letters: V vocabulary, D width, F mlp width, H = K*G query heads, K kv heads,
h head_dim, B branches, t this device's positions of a segment, T all devices'.
Layer kinds: full and sliding-window attention (grouped queries, optional q/k
RMSNorm and output gate, partial RoPE), and the pieces of a gated DeltaNet layer,
which delta_layer.py puts together. Functions on [B, t, D] are local to a device,
but for `embed`, `embed_backward` and `next_logits`, which gather over devices.
"""
import functools
from typing import Any
import zlib

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branchreplay import mesh, rope
from branchreplay.attention import at_least_f32
from branchreplay.config import ModelConfig
from branchreplay.lora import attach, linear, products


@struct.dataclass
class Attention:
  q: Any  # [D, H*h]
  k: Any  # [D, K*h]
  v: Any  # [D, K*h]
  out: Any  # [H*h, D]
  gate: Any = None  # [D, H*h]
  q_norm: Any = None  # [h]
  k_norm: Any = None  # [h]


@struct.dataclass
class DeltaNet:
  qkv: Any  # [D, C], C = 2*key_heads*k + value_heads*v channels
  z: Any  # [D, value_heads*v], the output gate
  beta: Any  # [D, value_heads]
  decay: Any  # [D, value_heads]
  conv: Any  # [C, W]
  a_log: Any  # [value_heads]
  dt_bias: Any  # [value_heads]
  norm: Any  # [v]
  out: Any  # [value_heads*v, D]


@struct.dataclass
class Mlp:
  gate: Any  # [D, F]
  up: Any  # [D, F]
  down: Any  # [F, D]


@struct.dataclass
class Block:
  norm: Any  # [D]
  mixer: Any  # Attention | DeltaNet
  mlp_norm: Any  # [D]
  mlp: Mlp


@struct.dataclass
class Params:
  embed: Any  # [V, D]
  blocks: tuple[Block, ...]  # one per place in the pattern; leaves [repeats, ...]
  norm: Any  # [D]
  head: Any = None  # [V, D]; None: tied to embed
  value: Any = None  # [D], the critic's head; None: no critic


def _is_shape(x):
  return isinstance(x, tuple) and isinstance(x[0], int)


def _shapes(model: ModelConfig) -> Params:
  m = model
  inner = m.heads * m.head_dim
  keys, values = m.delta_key_heads * m.delta_key_dim, m.delta_value_heads * m.delta_value_dim
  attention = Attention(
      q=(m.width, inner), k=(m.width, m.kv_heads * m.head_dim), v=(m.width, m.kv_heads * m.head_dim),
      out=(inner, m.width), gate=(m.width, inner) if m.output_gate else None,
      q_norm=(m.head_dim,) if m.qk_norm else None, k_norm=(m.head_dim,) if m.qk_norm else None)
  delta = DeltaNet(
      qkv=(m.width, 2 * keys + values), z=(m.width, values), beta=(m.width, m.delta_value_heads),
      decay=(m.width, m.delta_value_heads), conv=(2 * keys + values, m.conv_width),
      a_log=(m.delta_value_heads,), dt_bias=(m.delta_value_heads,), norm=(m.delta_value_dim,),
      out=(values, m.width))
  mlp = Mlp(gate=(m.width, m.mlp_width), up=(m.width, m.mlp_width), down=(m.mlp_width, m.width))
  blocks = tuple(Block((m.width,), delta if kind == 'deltanet' else attention, (m.width,), mlp)
                 for kind in m.pattern)
  blocks = jax.tree.map(lambda shape: (m.repeats, *shape), blocks, is_leaf=_is_shape)
  table = (m.vocab_size, m.width)
  return Params(table, blocks, (m.width,), None if m.tied_embeddings else table, (m.width,) if m.critic else None)


EMBED_STD = 0.04  # small, so that the first updates turn an embedding; at 1 the tasks learn at half the speed


def init(model: ModelConfig, key, dtype=jnp.float32) -> Params:
  """Random parameters: matrices normal with std fan_in^-0.5, embeddings EMBED_STD, norms at identity, values at 0."""
  def leaf(path, shape):
    name, text = path[-1].name, jax.tree_util.keystr(path)
    k = jax.random.fold_in(key, zlib.crc32(text.encode()))
    if name == 'a_log':  # decay rates 1..16 per unit of dt, as in Mamba 2
      return jnp.log(jax.random.uniform(k, shape, jnp.float32, 1, 16))
    if name == 'dt_bias':  # softplus(dt_bias) log-uniform in 0.001..0.1
      dt = jnp.exp(jax.random.uniform(k, shape, jnp.float32, np.log(1e-3), np.log(1e-1)))
      return dt + jnp.log(-jnp.expm1(-dt))
    if name.endswith('norm'):
      gated = text.endswith('.mixer.norm')  # never zero-centred
      return jnp.full(shape, 1.0 if gated else 1.0 - model.norm_offset, jnp.float32)
    if name == 'value':
      return jnp.zeros(shape, jnp.float32)
    fan_in = shape[-1] if name in ('embed', 'head', 'conv') else shape[-2]
    std = EMBED_STD if name == 'embed' else fan_in**-0.5
    return jax.random.normal(k, shape, jnp.float32) * std

  params = jax.tree_util.tree_map_with_path(lambda p, s: leaf(p, s).astype(dtype), _shapes(model), is_leaf=_is_shape)
  return attach(model, params, key) if model.lora_rank else params


@functools.lru_cache
def shapes(model: ModelConfig, dtype: str = 'float32') -> Params:
  """ShapeDtypeStructs of the parameters."""
  return jax.eval_shape(lambda k: init(model, k, jnp.dtype(dtype)), jax.eval_shape(lambda: jax.random.key(0)))


def product_channels(model: ModelConfig) -> int:
  """Channels that a position's matrix products have in all layers, but for the MLPs' last, which none needs again."""
  of_block = lambda block: [w[-1] for name, w in vars(block.mixer).items() if w and len(w) == 3 and name != 'conv']
  return model.repeats * sum(sum(of_block(block)) + 2 * model.mlp_width for block in _shapes(model).blocks)


# ---------------------------------------------------------------- pieces of a layer


@jax.custom_vjp
def _scaled(y, weight):
  """y [..., D] times weight [D], whose cotangent is summed over rows by a matrix product, as a CPU's compiler is slow to sum rows."""
  return y * weight


def _scaled_backward(saved, d):
  y, weight = saved
  rows = (y * d).reshape(-1, weight.size)
  return d * weight, jnp.matmul(jnp.ones((1, rows.shape[0]), rows.dtype), rows, precision=lax.Precision.HIGHEST)[0]


_scaled.defvjp(lambda y, weight: (y * weight, (y, weight)), _scaled_backward)


def rms_norm(x, weight, offset: float, eps: float):
  """RMSNorm along the last axis in float32 at least; the scale is offset + weight."""
  y = x.astype(at_least_f32(x.dtype))
  y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
  return _scaled(y, offset + weight.astype(y.dtype)).astype(x.dtype)


def _norm(model, x, weight):
  return rms_norm(x, weight, model.norm_offset, model.norm_eps)


def _heads(y, size: int):
  """A product split into heads: [..., n*size] -> [..., n, size]. (A TPU's compiler would rather have all layers' weights transposed.)"""
  return mesh.laid_out(y, *range(y.ndim)).reshape(*y.shape[:-1], -1, size)


# Each piece returns its matrix products too, as `products` takes them: with them it runs again without a product.


def mlp(model, block: Block, h, known=None):
  """Residual SwiGLU; h [..., D]."""
  x = _norm(model, h, block.mlp_norm)
  p = block.mlp
  made = gate, up = products(x, (p.gate, p.up), known)
  return h + linear(jax.nn.silu(gate) * up, p.down), made


def attention_in(model: ModelConfig, block: Block, h, tables, known=None):
  """(q [..., t, H, h] (scaled), k and v [..., t, K, h], gate [..., t, H*h] or None)."""
  p, x = block.mixer, _norm(model, h, block.norm)
  made = products(x, (p.q, p.k, p.v, p.gate), known)
  q, k, v = (_heads(y, model.head_dim) for y in made[:3])
  if model.qk_norm:
    q, k = _norm(model, q, p.q_norm), _norm(model, k, p.k_norm)
  q, k = rope.rotate(q, tables), rope.rotate(k, tables)
  return (q * model.head_dim**-0.5, k, v, made[3]), made


def _out(model, block: Block, h, o, known):
  """Projection of o [..., n], residual and MLP."""
  known = known or (None, None)
  made = products(o, (block.mixer.out,), known[0])
  h, more = mlp(model, block, h + made[0], known[1])
  return h, (made, more)


def attention_out(model: ModelConfig, block: Block, h, o, gate, known=None):
  """Output gate, projection, residual and MLP; o [..., t, H, h] -> h [..., t, D]."""
  o = o.reshape(*h.shape[:-1], -1)
  if gate is not None:
    o = o * jax.nn.sigmoid(gate)
  return _out(model, block, h, o.astype(h.dtype), known)


def delta_in(model: ModelConfig, block: Block, h, wide: bool = False, known=None):
  """(q, k [..., key_heads, k], v [..., value_heads, v], beta, decay [..., value_heads], z like v); wide: all but z float32 at least."""
  p, x = block.mixer, _norm(model, h, block.norm)
  keys = model.delta_key_heads * model.delta_key_dim
  known = known or (None, None)
  made = products(x, (p.qkv, p.beta, p.decay), known[0], wide), products(x, (p.z,), known[1])
  (qkv, beta, decay), (z,) = made
  key_heads = lambda y: y.reshape(*y.shape[:-1], model.delta_key_heads, model.delta_key_dim)
  value_heads = lambda y: y.reshape(*y.shape[:-1], model.delta_value_heads, model.delta_value_dim)
  return (key_heads(qkv[..., :keys]), key_heads(qkv[..., keys:2 * keys]), value_heads(qkv[..., 2 * keys:]),
          beta, decay, _heads(z, model.delta_value_dim)), made


def delta_gates(beta, decay, a_log, dt_bias, valid):
  """Log decay g and write strength b, both 0 at padding; `valid` broadcasts to beta."""
  dtype = at_least_f32(beta.dtype)
  b = jax.nn.sigmoid(beta.astype(dtype))
  g = -jnp.exp(a_log.astype(dtype)) * jax.nn.softplus(decay.astype(dtype) + dt_bias.astype(dtype))
  return jnp.where(valid, g, 0), jnp.where(valid, b, 0)


def delta_out(model: ModelConfig, block: Block, h, o, z, known=None):
  """Gated RMSNorm, projection, residual and MLP; o, z [..., value_heads, v]."""
  o = rms_norm(o, block.mixer.norm, 0.0, model.norm_eps) * jax.nn.silu(z)
  return _out(model, block, h, o.astype(h.dtype).reshape(*h.shape[:-1], -1), known)


# ---------------------------------------------------------------- embedding and head


def embed(params: Params, split: Params, tokens):
  """tokens i32 [B, t] -> [B, t, D]; a split table is looked up where its rows lie."""
  if not split.embed:
    return params.embed[tokens]
  rows = params.embed.shape[0]
  index = mesh.gather(tokens, 1) - mesh.seq_index() * rows
  here = (index >= 0) & (index < rows)
  found = jnp.where(here[..., None], params.embed[jnp.clip(index, 0, rows - 1)], 0)
  return mesh.scatter_sum(found, 1)


def embed_backward(grads: Params, split: Params, tokens, dh) -> Params:
  """Adds dh [B, t, D] to the gradient of the embedding rows of `tokens`."""
  table = grads.embed
  if table is None:  # frozen
    return grads
  if not split.embed:
    return grads.replace(embed=table.at[tokens].add(dh.astype(table.dtype)))
  index = mesh.gather(tokens, 1) - mesh.seq_index() * table.shape[0]
  index = jnp.where((index >= 0) & (index < table.shape[0]), index, table.shape[0])
  dh = mesh.gather(dh, 1).astype(table.dtype)
  return grads.replace(embed=table.at[index].add(dh, mode='drop'))


def head_table(params: Params):
  return params.embed if params.head is None else params.head


def next_logits(model: ModelConfig, params: Params, split: Params, h):
  """Logits [B, V] on every device, of the segment's first position; h [B, t, D]."""
  x = _norm(model, mesh.gather(h, 1)[:, 0], params.norm)
  is_split = split.embed if params.head is None else split.head
  logits = (x @ head_table(params).T).astype(at_least_f32(x.dtype))
  return mesh.gather(logits, 1) if is_split else logits
