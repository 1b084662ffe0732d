"""Flash kernels of kept libraries behind the forward/backward pair of attention.py.

`pair(name)` gives (forward, backward) with attention.py's signatures. A range's keys go
through a kernel in chunks, with a traced trip count: chunks that no row sees cost nothing,
and nothing is copied but one chunk of one layer. A chunk that every row sees needs no mask;
in another a row sees the valid keys of start..end. Partial results merge by log-sum-exp, so
keys that no kernel can mask (of several branches, which lie interleaved) stay on attention.py.

Kernels: tokamax's splash (TPU), Mosaic GPU (sm90, sm100; 16 bits) and Triton, and cuDNN. They
are fed the merged log-sum-exp of all ranges and devices in the backward; where a library's
public function takes none its private one is called, so versions are pinned.

Letters: K kv heads, R query rows, C keys of a chunk, h head_dim.
"""
import dataclasses
import functools
from typing import Any, Callable

from absl import flags
from flax import struct
from jax import lax
import jax.numpy as jnp

from branchreplay import attention
from branchreplay.attention import KeyRange, Rows, at_least_f32, largest_divisor
from branchreplay.state import FAR

LANES = 128  # rows and keys of a kernel call come in multiples of it
CHUNK = 4096  # keys of a forward kernel call at most; below 2**15, see _splash_mask
CHUNK_BACK = 1024  # of a backward's: splash writes a dq of all rows for each 1,024 keys, so that a larger one costs memory
NEVER = 1e30  # log-sum-exp of a row that sees nothing: its weights are 0


@struct.dataclass
class Visible:
  """Which keys of a chunk a row sees: those from its start to its end that are valid."""
  start: Any  # i32 [R]
  end: Any  # i32 [R]
  valid: Any  # bool [C]


@dataclasses.dataclass(frozen=True)
class Kernel:
  """q, o, do [K, R, h], k, v [K, C, h], lse and delta float32 [K, R]; R and C multiples of LANES.

  visible is a Visible, or None: every row sees every key. A row that sees nothing may get anything
  in o and lse; in the backward its lse is NEVER.
  """
  attend: Callable  # q, k, v, visible -> o, lse
  attend_back: Callable  # q, k, v, visible, lse, do, delta -> dq, dk, dv
  masks: bool = True  # whether it takes a Visible


def pair(name: str):
  """(forward, backward) of attention.py for 'blocks', else the same by the kernel called `name`."""
  if name == 'blocks':
    return attention.forward, attention.backward
  kernel = KERNELS[name]()
  return functools.partial(forward, kernel), functools.partial(backward, kernel)


# ---------------------------------------------------------------- chunks of keys


def key_range(rows: Rows, k, v, position, layer, chunk: int, into=None) -> KeyRange:
  """`attention.key_range` of one branch's keys in chunks of at most `chunk`; padding rows among others do not narrow what is `whole`."""
  rows = rows.replace(sight=jnp.where((rows.sight < 0) & (rows.sight.max() >= 0), FAR - 1, rows.sight))
  return attention.key_range(rows, k, v, position, None, layer, largest_divisor(position.size, chunk), into)


def _visible(rows: Rows, position) -> tuple[Visible, Any]:
  """What rows see of keys at `position` [C], and which rows see any; valid positions ascend."""
  valid = position < FAR
  filled = lax.cummax(jnp.where(valid, position, -1))
  find = lambda at: jnp.searchsorted(filled, at, side='right', method='compare_all').astype(jnp.int32)
  end = find(rows.sight)
  start = jnp.zeros_like(end) if rows.window is None else find(rows.position - rows.window)
  count = jnp.pad(jnp.cumsum(valid, dtype=jnp.int32), (1, 0))
  return Visible(_pad(start, 0), _pad(end, 0), valid), count[end] > count[start]


def _pad(x, axis: int, value=0):
  """`value` behind `axis` up to a multiple of LANES."""
  widths = [(0, -n % LANES if i == axis else 0) for i, n in enumerate(x.shape)]
  return jnp.pad(x, widths, constant_values=value)


def _chunk(keys: KeyRange, c, dtype):
  """k, v [K, C, h] and position [C] of chunk c, padded."""
  at = attention.index(keys.layer, 0, c * keys.block, 0)
  cut = lambda x: lax.dynamic_slice(x, at, (1, x.shape[1], keys.block, x.shape[3]))[0].astype(dtype)
  position = lax.dynamic_slice_in_dim(keys.position, c * keys.block, keys.block)
  return _pad(cut(keys.k), 1), _pad(cut(keys.v), 1), _pad(position, 0, FAR)


def _add_chunk(total, update, keys: KeyRange, c):
  """Adds [K, C, h] to chunk c of the layer's [L, K, S, h], in place."""
  at = attention.index(keys.into, 0, c * keys.block, 0)
  update = update[None, :, :keys.block]
  old = lax.dynamic_slice(total, at, update.shape)
  return lax.dynamic_update_slice(total, (old.astype(update.dtype) + update).astype(total.dtype), at)


def _choose(keys: KeyRange, c, whole, masked):
  """whole() where every row sees every key of chunk c, else masked()."""
  return masked() if keys.block % LANES else lax.cond(keys.whole[:, c].all(), whole, masked)


def _as_range(rows: Rows, k, v, position) -> KeyRange:
  """A chunk that a kernel cannot mask, for attention.py."""
  return attention.key_range(rows, k[None], v[None], position, None, jnp.int32(0), k.shape[1])


def _loop(keys: KeyRange, step, carry):
  """Folds the chunks that some row sees."""
  seen = attention._spans((keys.rows.last > 0)[None])
  return lax.fori_loop(seen.first[0], seen.last[0], step, carry)


# ---------------------------------------------------------------- the pair


def _merge(a, b):
  """Merges two partial results (o, lse) by log-sum-exp."""
  lse = jnp.logaddexp(a[1], b[1])
  weight = lambda x: jnp.exp(x - attention._finite(lse))[..., None]
  return a[0] * weight(a[1]) + b[0] * weight(b[1]), lse


def forward(kernel: Kernel, q, rows: Rows, ranges: tuple[KeyRange, ...]):
  """`attention.forward` by `kernel`; ranges of branches by attention.py."""
  count, dtype = q.shape[1], at_least_f32(q.dtype)
  padded = _pad(q, 1)

  def attend(k, v, visible, seen):
    o, lse = (x[:, :count].astype(dtype) for x in kernel.attend(padded, k, v, visible))
    return jnp.where(seen[:, None], o, 0), jnp.where(seen, lse, -jnp.inf)

  def step(c, found, keys):
    k, v, position = _chunk(keys, c, q.dtype)

    def masked():
      if not kernel.masks:
        return attention.divided(*attention.forward(q, rows, (_as_range(rows, k, v, position),)))
      return attend(k, v, *_visible(rows, position))

    return _merge(found, _choose(keys, c, lambda: attend(k, v, None, rows.sight >= 0), masked))

  found = jnp.zeros(q.shape, dtype), jnp.full(q.shape[:2], -jnp.inf, dtype)
  for keys in ranges:
    if keys.branch is None:
      found = _loop(keys, functools.partial(step, keys=keys), found)
    else:
      found = _merge(found, attention.divided(*attention.forward(q, rows, (keys,))))
  o, lse = found
  return o, lse, (lse > -jnp.inf).astype(dtype)


def backward(kernel: Kernel, q, rows: Rows, ranges: tuple[KeyRange, ...], lse, do, delta, cotangents):
  """`attention.backward` by `kernel`; ranges of branches by attention.py."""
  count, dtype = q.shape[1], at_least_f32(q.dtype)
  of_rows = [_pad(x, 1) for x in (jnp.where(jnp.isfinite(lse), lse, NEVER), do, delta)]
  padded = _pad(q, 1)

  def attend_back(k, v, visible):
    dq, dk, dv = kernel.attend_back(padded, k, v, visible, *of_rows)
    return dq[:, :count].astype(dtype), dk.astype(dtype), dv.astype(dtype)

  def step(c, carry, keys):
    k, v, position = _chunk(keys, c, q.dtype)

    def masked():
      if not kernel.masks:
        zero = jnp.zeros((1, *k.shape), dtype)
        dq, ((dk, dv),) = attention.backward(q, rows, (_as_range(rows, k, v, position),), lse, do, delta, ((zero, zero),))
        return dq, dk[0], dv[0]
      return attend_back(k, v, _visible(rows, position)[0])

    dq, dk, dv = _choose(keys, c, lambda: attend_back(k, v, None), masked)
    return carry[0] + dq, _add_chunk(carry[1], dk, keys, c), _add_chunk(carry[2], dv, keys, c)

  dq, out = jnp.zeros(q.shape, dtype), []
  for keys, (dk, dv) in zip(ranges, cotangents):
    if keys.branch is None:
      dq, dk, dv = _loop(keys, functools.partial(step, keys=keys), (dq, dk, dv))
    else:
      more, ((dk, dv),) = attention.backward(q, rows, (keys,), lse, do, delta, ((dk, dv),))
      dq = dq + more
    out.append((dk, dv))
  return dq, tuple(out)


# ---------------------------------------------------------------- the kernels


def _splash_mask(visible: Visible | None, rows: int):
  """splash's MaskInfo, mask function and segment ids of a Visible; start and end share an int32."""
  from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
  if visible is None:
    return splash.MaskInfo(*[None] * 7), None, None
  bits = 16
  mask = lambda row, key: (key < (row & (1 << bits) - 1)) & (key >= row >> bits)
  packed = visible.start << bits | visible.end
  segments = splash.SegmentIds(jnp.ones(rows, jnp.int32), visible.valid.astype(jnp.int32))
  return splash.MaskInfo(*[None] * 6, packed), mask, segments


def _splash(interpret: bool) -> Kernel:
  """tokamax's splash kernel for TPUs, at its private functions: the public ones take no merged log-sum-exp."""
  from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
  lowest = float(jnp.finfo(jnp.float32).min)
  block = lambda n, limit=1024: LANES * largest_divisor(n // LANES, limit // LANES)

  def config(rows, keys):
    # Of a TPU's 16 MiB of scoped memory the backward takes about 11 at head_dim 256. Each of its blocks of keys writes a dq
    # of its own, so they are as large as fit. Base 2 would round q * log2(e) to q's dtype.
    return splash.SplashConfig(
        block_q=block(rows), block_kv=block(keys), block_q_dkv=block(rows, 512), block_kv_dkv=block(keys),
        block_kv_dkv_compute=block(block(keys), 512), use_base2_exp=False, interpret=interpret)

  def attend(q, k, v, visible):
    info, mask, segments = _splash_mask(visible, q.shape[1])
    o, stats = splash._splash_attention_forward(
        info, q, k, v, segments, None, mask_value=lowest, is_mqa=False, config=config(q.shape[1], k.shape[1]),
        save_residuals=True, mask_function=mask, fwd_mask_sparsity=1.0)
    return o, stats['logsumexp']

  def attend_back(q, k, v, visible, lse, do, delta):
    info, mask, segments = _splash_mask(visible, q.shape[1])
    sizes = config(q.shape[1], k.shape[1])
    return splash._splash_attention_bwd_dkv(
        q, k, v, segments, lse, do, delta, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute, is_mqa=False, mask_info=info, mask_value=lowest, mask_function=mask,
        config=sizes, dkv_mask_sparsity=1.0)

  return Kernel(attend, attend_back)


def _output_of(do, delta):
  """float32 o with sum(o * do) = delta, all a backward wants of it: every term of the sum has delta's sign."""
  square = (do.astype(delta.dtype)**2).sum(-1)
  return do.astype(delta.dtype) * jnp.where(square > 0, delta / jnp.where(square > 0, square, 1), 0)[..., None]


def _tokamax_gpu(name: str) -> Kernel:
  """An attention op of tokamax for GPUs: kv heads are its batch, of one head each."""
  from tokamax._src.ops.attention import api, base
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # else the library would take the command line for its own flags
  op = api.IMPLEMENTATIONS[name]
  split = lambda *arrays: [x[:, :, None] for x in arrays]

  def call(op, *arrays, **options):  # the cache of tuned block sizes knows no shapes of ours, and says so at length
    return op.replace(config=op.bind(*arrays, **options).heuristics_config)(*arrays, **options)

  def options(q, visible):
    mask = None if visible is None else base.Mask(
        visible.valid[None, None], k_start=visible.start[None], k_end=visible.end[None])
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    return {'logits_scale': 1.0, 'mask': mask, 'precision': precision}

  def attend(q, k, v, visible):
    o, (top, total) = call(op, *split(q, k, v), **options(q, visible), return_residuals=True)
    return o[:, :, 0], (top + jnp.log(total))[:, 0]

  def attend_back(q, k, v, visible, lse, do, delta):
    arguments = op.bind(*split(q, k, v), **options(q, visible)).arguments
    stats = lse[:, None], jnp.ones_like(lse[:, None])
    found = call(op.vjp, stats, *split(_output_of(do, delta), do), **arguments)
    return tuple(found[name][:, :, 0] for name in 'qkv')

  return Kernel(attend, attend_back)


def _cudnn() -> Kernel:
  """cuDNN's flash attention, by jax; chunks that need a mask are left to attention.py."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn
  options = dict(scale=1.0, seed=42, dropout_rate=0.0, variadic_args=(False, False), mask_type=cudnn.MaskType.NO_MASK,
                 layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None)

  def attend(q, k, v, visible):
    o, lse = cudnn.dot_product_attention(*(x[:, :, None] for x in (q, k, v)), return_residual=True)
    return o[:, :, 0], lse[:, 0]

  def attend_back(q, k, v, visible, lse, do, delta):
    o = _output_of(do, delta).astype(q.dtype)
    o, do, q, k, v = (x[:, :, None] for x in (o, do, q, k, v))
    none = [jnp.zeros(0, q.dtype)] * 7
    found = cudnn._dot_product_attention_bwd_rule(
        **options, is_training=True, return_residual=False, res=(q, k, v, *none, lse[:, None], o), grad_output=do)
    return tuple(x[:, :, 0] for x in found[:3])

  return Kernel(attend, attend_back, masks=False)


KERNELS = {  # made when asked for: nothing is imported before
    'splash': lambda: _splash(False),
    'splash_interpret': lambda: _splash(True),
    'mosaic_gpu': lambda: _tokamax_gpu('mosaic_gpu'),
    'triton': lambda: _tokamax_gpu('triton'),
    'cudnn': _cudnn,
}
