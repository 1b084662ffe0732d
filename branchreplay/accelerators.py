"""Which attention runs on a chip: `settle` picks the kernel, tries it, and says so in one line.

Letters: K kv heads, R query rows, S key slots, h head_dim.
"""
import dataclasses
import importlib.util
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import attention, kernels
from branchreplay.config import ATTENTIONS, ModelConfig, ReplayConfig, UserError
from branchreplay.state import FAR

DELTA_CHUNK = 64  # positions of a delta-rule chunk on an accelerator: half the sequential steps of the CPU's 32, and
                  # matrices that fill its matrix units; the rule is under 1% of a real model's FLOPs, so no kernel of its own
TOLERANCE = {'float32': 1e-5, 'bfloat16': 2e-2}  # of a kernel's relative L2 error, at the highest matmul precision


def settle(model: ModelConfig, replay: ReplayConfig, dtype, device, say: Callable) -> tuple[ModelConfig, ReplayConfig]:
  """`model` and `replay` fit for `device`, with attention a kernel's name or 'blocks'; says in one line which, and why.

  The device need not be there (of a topology of `jax.experimental.topologies`; inside `mesh.sharded` on a mesh of such
  devices kernels are traced for them); one that is runs the kernel once beside attention.py, and a kernel that
  refuses, or whose results differ, is not used.
  """
  if replay.attention not in ATTENTIONS:
    raise UserError(f'unknown attention {replay.attention!r}; use {", ".join(ATTENTIONS)}.')
  dtype = jnp.dtype(dtype)
  name, why = _pick(replay.attention, dtype, device)
  while name != 'blocks' and (problem := _problem(name, model.head_dim, dtype, device)):
    name, why = 'triton' if name == 'mosaic_gpu' else 'blocks', f'{name} {problem}'
  say(f'attention: {name} ({why}).')
  if device.platform != 'cpu':
    model = dataclasses.replace(model, chunk=max(model.chunk, DELTA_CHUNK))
  return model, dataclasses.replace(replay, attention=name)


def _pick(asked: str, dtype, device) -> tuple[str, str]:
  """The kernel to try, and why."""
  platform = device.platform
  if asked == 'blocks':
    return 'blocks', 'asked for'
  if dtype.itemsize > 4:
    return 'blocks', f'no kernel computes in {dtype.name}'
  if asked == 'cudnn':
    served = platform == 'gpu' and dtype.itemsize == 2
    return ('cudnn', 'asked for') if served else ('blocks', f'cuDNN serves 16 bits on a GPU, not {dtype.name} on a {platform}')
  if asked == 'auto' and platform == 'cpu':
    return 'blocks', 'a CPU has no flash kernel'
  if importlib.util.find_spec('tokamax') is None:
    if asked == 'auto':
      return 'blocks', 'tokamax is not installed'
    raise UserError('--attention=tokamax is not installed; pip install tokamax==0.0.12, or use --attention=auto.')
  if platform == 'tpu':
    return 'splash', "tokamax's kernel for TPUs"
  if platform == 'cpu':
    return 'splash_interpret', "tokamax's kernel for TPUs, interpreted: for tests"
  modern = float(device.compute_capability) in (9.0, 10.0) and dtype.itemsize == 2
  return ('mosaic_gpu', "tokamax's kernel for sm90 and sm100") if modern else ('triton', "tokamax's kernel for GPUs")


def _problem(name: str, head_dim: int, dtype, device) -> str | None:
  """Why a kernel is not to be used on a chip that is here, else None."""
  if device.platform == 'cpu' or device not in jax.devices():
    return None
  try:
    worst = np.max(list(errors(name, head_dim, dtype).values()))
  except Exception as error:  # of several libraries and compilers, without a type of their own
    return f'refuses: {str(error).strip().splitlines()[0][:200]}'
  return f'is {worst:.1e} off' if not worst <= TOLERANCE[dtype.name] else None


def problem(head_dim: int, dtype, rows: int, slots: int, window: int | None = None, heads: int = 2, seed: int = 0):
  """Rows and a layer's keys as a segment behind a prefix has them: (Rows, q, k, v, position, do).

  The last rows are padding, some slots in the middle and at the end hold nothing; q [K, R, h], k, v [1, K, S, h].
  """
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  at = np.arange(slots, dtype=np.int32)
  of_rows = np.arange(rows, dtype=np.int32) + (slots - rows if slots > rows else 0)
  position = np.where((at >= slots - slots // 8) | ((at >= slots // 4) & (at < slots // 4 + slots // 16)), FAR, at)
  sight = np.where(np.arange(rows) >= rows - rows // 8, -1, of_rows)
  of = attention.Rows(jnp.asarray(of_rows), jnp.asarray(sight), jnp.zeros(rows, jnp.int32), window,
                      attention.largest_divisor(rows, 128))
  return (of, draw(heads, rows, head_dim) * head_dim**-0.5, draw(1, heads, slots, head_dim), draw(1, heads, slots, head_dim),
          jnp.asarray(position), draw(heads, rows, head_dim))


def attend(name: str, rows: attention.Rows, q, k, v, position, do) -> dict:
  """o, lse, dq, dk, dv of a `problem` by the pair called `name`."""
  forward, backward = kernels.pair(name)
  def keys(chunk):
    if name == 'blocks':
      return attention.key_range(rows, k, v, position, None, jnp.int32(0), attention.largest_divisor(position.size, 256))
    return kernels.key_range(rows, k, v, position, jnp.int32(0), chunk)

  o, lse = attention.divided(*forward(q, rows, (keys(kernels.CHUNK),)))
  do = do.astype(q.dtype)
  zero = jnp.zeros(k.shape, attention.at_least_f32(k.dtype))
  dq, ((dk, dv),) = backward(q, rows, (keys(kernels.CHUNK_BACK),), lse, do, (o * do.astype(o.dtype)).sum(-1), ((zero, zero),))
  return {'o': o, 'lse': lse, 'dq': dq, 'dk': dk, 'dv': dv}


def errors(name: str, head_dim: int, dtype, rows: int = 512, slots: int = 9216, window: int | None = None) -> dict:
  """Relative L2 distance of a kernel's results in `dtype` from attention.py's in float32, on this chip; inf for an lse of other rows."""
  made = problem(head_dim, jnp.float32, rows, slots, window)
  cast = lambda x: x.astype(dtype).astype(jnp.float32)
  of, q, k, v, position, do = made[0], *map(cast, made[1:4]), made[4], cast(made[5])
  with jax.default_matmul_precision('highest'):
    want = jax.jit(lambda *x: attend('blocks', *x))(of, q, k, v, position, do)
    got = jax.jit(lambda *x: attend(name, *x))(of, *(x.astype(dtype) for x in (q, k, v)), position, do)
  want, got = ({n: np.asarray(x, np.float64) for n, x in part.items()} for part in (want, got))
  if not np.array_equal(np.isfinite(want['lse']), np.isfinite(got['lse'])):
    return {'lse': np.inf}
  want, got = ({n: np.where(np.isfinite(x), x, 0) if n == 'lse' else x for n, x in part.items()} for part in (want, got))
  return {n: float(np.linalg.norm(got[n] - want[n]) / np.linalg.norm(want[n])) for n in want}
