"""The gated delta rule in chunked form, with an initial state.

Letters: T positions, H heads, k key dim, v value dim, C positions of a chunk.
Per head and position: S <- exp(g) S + k (b (v - k^T exp(g) S))^T, o = S^T q
(Yang et al. 2024, arXiv:2412.06464; the chunked form solves one unit-triangular
system per chunk instead of C sequential steps).
"""
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branchreplay.attention import at_least_f32, largest_divisor


def unit(x):
  """x / |x| along the last axis, finite (with a finite gradient) at zero."""
  return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def invert_by_masks(a):
  """`invert_unit_lower` by products of whole matrices in which blocks are masked: what matrix units and TPUs' compiler like."""
  size, place = a.shape[-1], np.arange(a.shape[-1])
  inverse, s = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape), 1
  while s < size:
    block, odd = place // (2 * s), place // s % 2 == 1
    corners = (block[:, None] == block) & odd[:, None] & ~odd  # lower left, of the diagonal blocks of size 2s
    corner = jnp.where(corners, a, 0)
    inverse = inverse - (corner if s == 1 else inverse @ corner @ inverse)
    s *= 2
  return inverse


def invert_by_blocks(a, least: int = 16):
  """`invert_unit_lower` by products of the blocks themselves from size `least` on: a fifth of the work, for CPUs."""
  size = a.shape[-1]
  if size <= least or size % 2:
    return invert_by_masks(a)
  half = size // 2
  x, y = invert_by_blocks(jnp.stack([a[..., :half, :half], a[..., half:, half:]]), least)
  low = -y @ a[..., half:, :half] @ x
  return jnp.concatenate([jnp.concatenate([x, jnp.zeros_like(low)], -1), jnp.concatenate([low, y], -1)], -2)


@jax.custom_vjp
def invert_unit_lower(a):
  """Inverse of the unit lower triangular I + tril(a, -1); a [..., C, C].

  [[x, 0], [-y b x, y]] from the inverses x and y of the diagonal blocks, of twice
  the size at each step: as accurate as substitution. (LAPACK's batched solve blocks
  the CPU's thread pool, and the powers of the nilpotent part overflow when keys are
  correlated.)
  """
  return lax.platform_dependent(a, cpu=invert_by_blocks, default=invert_by_masks)


def _invert_forward(a):
  inverse = invert_unit_lower(a)
  return inverse, inverse


def _invert_backward(inverse, d):
  transposed = inverse.swapaxes(-1, -2)
  return (-jnp.tril(transposed @ d @ transposed, -1),)


invert_unit_lower.defvjp(_invert_forward, _invert_backward)


def delta_rule(q, k, v, g, b, state, chunk: int):
  """Runs the recurrence over a segment.

  Args:
    q, k: [T, H, k], normalised here. v: [T, H, v].
    g, b: [T, H], log decay (<= 0) and write strength; both 0 leaves the state alone.
    state: [H, k, v] before the segment.
    chunk: positions solved at once; the largest divisor of T up to it is used.

  Returns o [T, H, v] and the state after the segment, both float32 at least.
  """
  length, dtype = q.shape[0], at_least_f32(q.dtype)
  size = largest_divisor(length, chunk)
  q, k, v, g, b = (x.astype(dtype) for x in (q, k, v, g, b))
  q, k = unit(q) * q.shape[-1]**-0.5, unit(k)

  def chunks(x):  # [T, H, ...] -> [T/C, H, C, ...]
    return x.reshape(length // size, size, *x.shape[1:]).swapaxes(1, 2)

  q, k, v, g, b = (chunks(x) for x in (q, k, v, g, b))
  kb, vb = k * b[..., None], v * b[..., None]
  total = jnp.cumsum(g, -1)  # log decay since the chunk's start
  causal = jnp.tril(jnp.ones((size, size), bool))
  # A double where: the exponential above the diagonal would overflow, and its
  # derivative would be inf * 0.
  between = jnp.where(causal, total[..., :, None] - total[..., None, :], 0)
  decay = jnp.where(causal, jnp.exp(between), 0)
  system = jnp.einsum('nhik,nhjk->nhij', kb, k) * decay
  scores = jnp.einsum('nhik,nhjk->nhij', q, k) * decay
  right = jnp.concatenate([vb, kb * jnp.exp(total)[..., None]], -1)
  solved = invert_unit_lower(system) @ right
  u, w = solved[..., :v.shape[-1]], solved[..., v.shape[-1]:]
  q_in = q * jnp.exp(total)[..., None]
  k_out = k * jnp.exp(total[..., -1:] - total)[..., None]
  kept = jnp.exp(total[..., -1])[..., None, None]

  def step(state, x):
    u, w, q_in, scores, k_out, kept = x
    new = u - w @ state
    o = q_in @ state + scores @ new
    return state * kept + k_out.swapaxes(-1, -2) @ new, o

  state, o = lax.scan(step, state.astype(dtype), (u, w, q_in, scores, k_out, kept))
  return o.swapaxes(1, 2).reshape(length, o.shape[1], o.shape[3]), state


def causal_conv(x, tail, weight, length):
  """Depthwise causal convolution with SiLU, carried over segments.

  Args:
    x: [B, T, C] inputs. tail: [B, W-1, C] the inputs before them.
    weight: [C, W], oldest tap first. length: i32 [B] valid positions of x.

  Returns y [B, T, C], float32 at least (in bfloat16 its sum would double the squared error of
  the model's gradient), and the new tail: the last W-1 inputs that are real tokens.
  """
  width, steps, dtype = weight.shape[1], x.shape[1], at_least_f32(x.dtype)
  inputs = jnp.concatenate([tail.astype(x.dtype), x], 1)

  @jax.checkpoint  # nothing in float32 waits for the way back
  def convolve(inputs, taps):
    inputs, taps = inputs.astype(dtype), taps.astype(dtype)
    return jax.nn.silu(sum(inputs[:, j:j + steps] * taps[:, j] for j in range(width)))

  at = length[:, None] + jnp.arange(width - 1)
  return convolve(inputs, weight), jnp.take_along_axis(inputs, at[..., None], 1).astype(tail.dtype)
