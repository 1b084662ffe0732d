"""A gated DeltaNet layer (arXiv:2412.06464) whose heads, not positions, are split over devices.

Letters: B branches, T positions of the segment over all devices, t = T/devices, D width,
k key dim, v value dim, W taps of the convolution.
"""
import jax.numpy as jnp
import numpy as np

from branchreplay import mesh
from branchreplay import model as layers
from branchreplay.config import ModelConfig
from branchreplay.deltanet import causal_conv, delta_rule


def delta_heads(model: ModelConfig, seq: int):
  """Which key and value heads each device runs: index arrays [seq, heads a device].

  Key heads stay shared by their group of value heads where they divide by `seq`;
  otherwise each value head gets a copy of its key head, and the last devices run
  copies of head 0 whose output is dropped.
  """
  group = model.delta_value_heads // model.delta_key_heads
  if model.delta_key_heads % seq == 0:
    key, value = np.arange(model.delta_key_heads), np.arange(model.delta_value_heads)
  else:
    value = np.zeros(-(-model.delta_value_heads // seq) * seq, int)
    value[:model.delta_value_heads] = np.arange(model.delta_value_heads)
    key = value // group
  return key.reshape(seq, -1), value.reshape(seq, -1)


def _own_heads(x, index):
  """The heads (axis 0) that this device runs."""
  return jnp.take(x, jnp.asarray(index)[mesh.seq_index()], axis=0)


def delta_layer(model: ModelConfig, block: layers.Block, h, delta, conv, length, wide: bool = False, known=None):
  """A gated DeltaNet layer over a segment of which this device has t positions.

  Args:
    h: [B, t, D]. length: i32 [B], valid positions of the segment.
    delta: [B, heads, k, v] and conv: [B, W-1, channels], the state before the
      segment of the heads that this device runs.
    wide: what devices exchange is float32 at least, not rounded to h's dtype.

  Returns h, delta and conv after the segment, and its products. Two all-to-alls:
  positions to heads and back.
  """
  known = known or (None, None)
  m, seq = model, mesh.seq_size()
  batch, t, _ = h.shape
  key, value = delta_heads(m, seq)
  (q, k, v, beta, decay, z), made = layers.delta_in(m, block, h, wide, known[0])

  def by_device(x, index):  # [B, t, heads, ...] -> [B, t, seq, channels]
    if not np.array_equal(index.reshape(-1), np.arange(x.shape[2])):
      x = jnp.take(x, index.reshape(-1), axis=2)
    return x.reshape(batch, t, seq, -1)

  parts = [by_device(q, key), by_device(k, key), by_device(v, value),
           by_device(beta[..., None], value), by_device(decay[..., None], value)]
  channels = np.cumsum([x.shape[-1] for x in parts])
  y = mesh.exchange(jnp.concatenate(parts, -1), 2, 1)[:, :, 0]  # [B, T, channels]
  steps = y.shape[1]

  p = block.mixer
  taps = [_own_heads(w.reshape(heads, -1, m.conv_width), index).reshape(-1, m.conv_width)
          for w, heads, index in zip(
              jnp.split(p.conv, np.cumsum([m.delta_key_heads * m.delta_key_dim] * 2)),
              (m.delta_key_heads, m.delta_key_heads, m.delta_value_heads), (key, key, value))]
  mixed, conv = causal_conv(y[..., :channels[2]], conv, jnp.concatenate(taps), length)
  valid = jnp.arange(steps)[:, None] < length[:, None, None]
  g, b = layers.delta_gates(y[..., channels[2]:channels[3]], y[..., channels[3]:],
                     _own_heads(p.a_log, value), _own_heads(p.dt_bias, value), valid)

  def heads(x, dim):  # [B, T, n*dim] -> [T, B, n, dim]
    return x.reshape(batch, steps, -1, dim).swapaxes(0, 1)

  q, k, v = (heads(x, dim) for x, dim in zip(
      jnp.split(mixed, channels[:2], -1), (m.delta_key_dim, m.delta_key_dim, m.delta_value_dim)))
  group = v.shape[2] // q.shape[2]
  fold = lambda x: x.reshape(steps, -1, *x.shape[3:])  # branches become heads
  q, k, v = fold(jnp.repeat(q, group, 2)), fold(jnp.repeat(k, group, 2)), fold(v)
  g, b = fold(g.swapaxes(0, 1)), fold(b.swapaxes(0, 1))
  o, after = delta_rule(q, k, v, g, b, delta.reshape(-1, *delta.shape[2:]), m.chunk)

  o = (o if wide else o.astype(h.dtype)).reshape(steps, batch, 1, -1).swapaxes(0, 1)  # [B, T, 1, n*v]
  o = mesh.exchange(o, 1, 2).reshape(batch, t, -1, m.delta_value_dim)
  o = o[:, :, :m.delta_value_heads]
  h, more = layers.delta_out(m, block, h, o, z, known[1])
  return h, after.reshape(delta.shape), conv, (made, more)
