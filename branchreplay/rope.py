"""Rotary position embeddings (arXiv:2104.09864), right to 1e-6 at 8 million positions."""
import jax.numpy as jnp
import numpy as np

from branchreplay.config import ModelConfig


def frequencies(model: ModelConfig) -> np.ndarray:
  """Radians per position [rotary_dim/2], float64; with `rope_scaling` as in Llama 3.1.

  There wavelengths over positions/low are stretched by `factor`, those under
  positions/high are kept, and those between are blended.
  """
  frequency = model.rope_theta ** (-np.arange(0, model.rotary_dim, 2) / max(model.rotary_dim, 1))
  if not model.rope_scaling:
    return frequency
  factor, low, high, positions = model.rope_scaling
  kept = np.clip((positions * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
  return frequency * (kept + (1 - kept) / factor)


RADIX = 2048  # positions are split as RADIX * high + low


def tables_of(model: ModelConfig, position, dtype):
  """cos and sin [..., rotary_dim/2] at `position`, right to 1e-6 at 8 million.

  A float32 product position * frequency is off by up to 0.1 rad at a million.
  The angles of the two digits of a position stand in float64 tables made on the
  host; the device adds them by the angle-sum identity.
  """
  frequency = frequencies(model)
  low = np.arange(RADIX)[:, None] * frequency
  high = np.arange(0, model.max_positions, RADIX)[:, None] * frequency
  digit = lambda table, i: (jnp.asarray(np.cos(table), dtype)[i], jnp.asarray(np.sin(table), dtype)[i])
  (c0, s0), (c1, s1) = digit(low, position % RADIX), digit(high, position // RADIX)
  return c0 * c1 - s0 * s1, s0 * c1 + c0 * s1


def rotate(x, tables):
  """Applies RoPE (half-split layout) to x [..., t, heads, h]; tables [t, rotary/2]."""
  cos, sin = (table[:, None] for table in tables)
  half = cos.shape[-1]
  a, b = (x[..., i * half:(i + 1) * half].astype(cos.dtype) for i in (0, 1))
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
  return jnp.concatenate([turned, x[..., 2 * half:]], -1)
