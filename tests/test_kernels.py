"""Flash kernels against attention.py, run on a CPU by the Pallas interpreter; which is picked where."""
import contextlib
import dataclasses
import functools
import re
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import accelerators, attention, config, kernels, mesh
from branchreplay.config import ReplayConfig, UserError
from branchreplay.state import FAR
from experiments import accelerator
from tests import engine
from tests.test_scripts import rows_of

CPU, TPU = jax.devices()[0], types.SimpleNamespace(platform='tpu')
GPU = lambda capability: types.SimpleNamespace(platform='gpu', compute_capability=capability)


@pytest.fixture
def splash():
  pytest.importorskip('tokamax')
  return 'splash_interpret'


@pytest.fixture
def triton(monkeypatch):
  """tokamax's Triton kernels, interpreted: no bounds are checked in ours, and a program id is read outside of branches."""
  pytest.importorskip('tokamax')
  from jax.experimental import pallas as pl
  from tokamax._src import gpu_utils
  from tokamax._src.ops.attention import pallas_triton_vjp
  from tokamax._src.pallas import block

  def unchecked(ref):
    assert not any(ref.bounds_checked)
    return (None,) * ref.ndim

  def backward(*args, kernel=pallas_triton_vjp._bwd_kernel, **kwargs):
    first = pl.program_id(0)
    with mock.patch.object(pl, 'program_id', lambda axis: {0: first}[axis]):
      kernel(*args, **kwargs)

  monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))
  monkeypatch.setattr(gpu_utils, 'has_triton_support', lambda device=None: True)
  monkeypatch.setattr(block.BlockRef, 'inbounds_masks', property(unchecked))
  monkeypatch.setattr(pallas_triton_vjp, '_bwd_kernel', backward)
  with jax.enable_x64(False):  # as it is wherever a kernel runs
    yield 'triton'


def check(name, rows, slots, window=None, head_dim=64):
  """Results by the kernel called `name` against attention.py's, float32."""
  problem = accelerators.problem(head_dim, jnp.float32, rows, slots, window)
  run = lambda name: jax.jit(functools.partial(accelerators.attend, name))(*problem)
  want, got = run('blocks'), run(name)
  for key, x in want.items():
    np.testing.assert_array_equal(np.isfinite(got[key]), np.isfinite(x))
    finite = np.isfinite(x)
    np.testing.assert_allclose(np.asarray(got[key])[finite], np.asarray(x)[finite], rtol=1e-5, atol=1e-5, err_msg=key)
  seen = np.isfinite(want['lse'])
  assert seen.any() and (rows < 8 or not seen.all())


# Lengths that are no multiples of a kernel's blocks, a single row and key, chunks that need no mask; padding rows in most.
SIZES = [(130, 300, None), (24, 48, 9), (1, 1, None), (136, kernels.CHUNK + 512, 700)]


@pytest.mark.parametrize('rows, slots, window', SIZES)
def test_splash_equals_blocks(splash, rows, slots, window):
  check(splash, rows, slots, window)


@pytest.mark.parametrize('rows, slots, window', SIZES[:3])
def test_triton_equals_blocks(triton, rows, slots, window):
  check(triton, rows, slots, window)


@pytest.mark.parametrize('name, calls', [
    ('splash', ['tpu_custom_call'] * 4), ('triton', ['__gpu$xla.gpu.triton'] * 4), ('mosaic_gpu', ['mosaic_gpu_v2'] * 6),
    ('cudnn', ['__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'])])
def test_kernels_are_lowered_for_a_chip_that_is_not_here(monkeypatch, name, calls):
  """Forward and backward, masked and not; a mesh names the TPU, tokamax and jax are told of an sm90 with cuDNN."""
  pytest.importorskip('tokamax')
  from jax._src.cudnn import fused_attention_stablehlo as cudnn
  from tokamax._src import gpu_utils
  monkeypatch.setattr(gpu_utils, '_compute_capability', lambda device=None: 9.0)
  monkeypatch.setattr(gpu_utils, 'has_triton_support', lambda device=None: True)
  monkeypatch.setattr(gpu_utils, 'has_mosaic_gpu_support', lambda device=None: True)
  monkeypatch.setattr(cudnn, 'check_cudnn_version', lambda: 91000)
  monkeypatch.setattr(cudnn, 'check_compute_capability', lambda capability: True)
  monkeypatch.setattr(cudnn, 'is_cuda_compute_capability_equal', lambda capability: False)
  tpu = jax.sharding.AbstractMesh((1,), ('seq',), abstract_device=jax.sharding.AbstractDevice('TPU v5', 1, 'tpu'))
  with jax.enable_x64(False), jax.sharding.use_abstract_mesh(tpu) if name == 'splash' else contextlib.nullcontext():
    problem = accelerators.problem(128, jnp.bfloat16, 256, 2 * kernels.CHUNK)
    traced = jax.jit(functools.partial(accelerators.attend, name)).trace(*problem)
    text = traced.lower(lowering_platforms=('tpu' if name == 'splash' else 'cuda',)).as_text()
  assert sorted(re.findall(r'custom_call @([\w$.]+)', text)) == calls


def plain():
  """A Kernel of plain softmax, as a stand-in for one that takes no masks: each chunk alone, all keys seen."""
  def attend(q, k, v, visible):
    assert visible is None
    a = q @ k.swapaxes(1, 2)
    return jax.nn.softmax(a) @ v, jax.nn.logsumexp(a, -1)

  def attend_back(q, k, v, visible, lse, do, delta):
    p = jnp.exp(q @ k.swapaxes(1, 2) - lse[..., None])
    o = kernels._output_of(do, delta)
    ds = p * (do @ v.swapaxes(1, 2) - (o * do).sum(-1, keepdims=True))
    return ds @ k, ds.swapaxes(1, 2) @ q, p.swapaxes(1, 2) @ do

  return kernels.Kernel(attend, attend_back, masks=False)


@pytest.mark.parametrize('rows, slots, window', [(130, 300, None), (136, 1024, None), (40, 2048, 400)])
def test_what_a_kernel_cannot_mask_is_left_to_blocks(monkeypatch, rows, slots, window):
  """And the merge of chunks, with the merged log-sum-exp in the backward; needs no library."""
  monkeypatch.setitem(kernels.KERNELS, 'plain', plain)
  monkeypatch.setattr(kernels, 'CHUNK', 256)
  monkeypatch.setattr(kernels, 'CHUNK_BACK', 128)
  check('plain', rows, slots, window)


def test_chunks_that_no_row_sees_are_not_touched(monkeypatch):
  """They are NaN; of the others some are whole and some are not."""
  monkeypatch.setitem(kernels.KERNELS, 'plain', plain)
  monkeypatch.setattr(kernels, 'CHUNK', 256)
  monkeypatch.setattr(kernels, 'CHUNK_BACK', 128)
  rows, q, k, v, position, do = accelerators.problem(16, jnp.float32, 40, 1024)
  position = jnp.arange(1024, dtype=jnp.int32)
  rows = rows.replace(position=rows.position - 400, sight=jnp.where(rows.sight < 0, -1, rows.sight - 400))
  keys = kernels.key_range(rows, k, v, position, jnp.int32(0), 128)
  assert keys.whole.all(0).tolist() == [True] * 4 + [False] * 4
  poison = lambda x: x.at[:, :, 768:].set(jnp.nan)
  run = jax.jit(lambda k, v: accelerators.attend('plain', rows, q, k, v, position, do))
  for got, want in zip(jax.tree.leaves(run(poison(k), poison(v))), jax.tree.leaves(run(k, v))):
    np.testing.assert_array_equal(got, want)


def test_the_gradient_by_a_kernel_is_that_by_blocks(splash):
  """On 1 and 2 devices; a prefix of three segments, ragged branches two at a time; float32."""
  shape = dataclasses.replace(engine.SMALL, pattern=('full',))
  sizes = dict(accumulate_dtype='float32', branch_capacity=8)
  group = engine.make(shape, 70, [8, 3, 1, 0], replay=dataclasses.replace(engine.REPLAY, **sizes))
  group = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, group)
  want = engine.gradient(shape, group, 1, dtype='float32', **sizes)
  for devices in (1, 2):
    got = engine.gradient(shape, group, devices, dtype='float32', attention=splash, **sizes)
    assert engine.distance(got, want) < 1e-5 and float(got.loss[0]) == pytest.approx(float(want.loss[0]), abs=1e-5)


def settled(attention, dtype, device, found=True):
  """(kernel, the line)."""
  lines = []
  with mock.patch.object(accelerators.importlib.util, 'find_spec', lambda name: found or None):
    replay = accelerators.settle(config.preset('bench'), ReplayConfig(attention=attention), dtype, device, lines.append)[1]
  assert len(lines) == 1 and lines[0].startswith(f'attention: {replay.attention} (')
  return replay.attention, lines[0]


@pytest.mark.parametrize('asked, dtype, device, name, why', [
    ('auto', 'float32', CPU, 'blocks', 'no flash kernel'), ('blocks', 'bfloat16', TPU, 'blocks', 'asked for'),
    ('auto', 'bfloat16', TPU, 'splash', 'TPU'), ('tokamax', 'float32', TPU, 'splash', 'TPU'),
    ('tokamax', 'float32', CPU, 'splash_interpret', 'interpreted'), ('tokamax', 'float64', CPU, 'blocks', 'float64'),
    ('auto', 'bfloat16', GPU('9.0'), 'mosaic_gpu', 'sm90'), ('auto', 'bfloat16', GPU('8.0'), 'triton', 'GPU'),
    ('auto', 'float32', GPU('9.0'), 'triton', 'GPU'), ('cudnn', 'bfloat16', GPU('9.0'), 'cudnn', 'asked for'),
    ('cudnn', 'float32', GPU('9.0'), 'blocks', '16 bits'), ('cudnn', 'bfloat16', CPU, 'blocks', 'on a cpu')])
def test_the_kernel_is_picked_by_platform_with_a_line(asked, dtype, device, name, why):
  got, line = settled(asked, dtype, device)
  assert got == name and why in line


def test_without_the_library_auto_falls_back_and_a_wish_ends_in_one_sentence():
  assert settled('auto', 'bfloat16', TPU, found=False)[0] == 'blocks'
  with pytest.raises(UserError, match=r'^--attention=tokamax is not installed; pip install tokamax==[\d.]+, or use --attention=auto\.$'):
    settled('tokamax', 'bfloat16', TPU, found=False)
  with pytest.raises(UserError, match=r"^unknown attention 'flash'; use auto, blocks, tokamax, cudnn\.$"):
    settled('flash', 'float32', CPU)


@pytest.mark.parametrize('wrong, name', [({}, 'mosaic_gpu'), ({'mosaic_gpu'}, 'triton'), ({'mosaic_gpu', 'triton'}, 'blocks')])
def test_a_kernel_that_refuses_or_is_off_is_not_used(monkeypatch, wrong, name):
  """A chip that is here is tried."""
  def errors(kernel, *_):
    if kernel == 'triton' and kernel in wrong:
      raise NotImplementedError('no such head_dim\nat line 3')
    return {'o': 1e-3, 'dq': np.nan if kernel in wrong else 1e-3}
  chip = GPU('9.0')
  monkeypatch.setattr(accelerators, 'errors', errors)
  monkeypatch.setattr(accelerators.jax, 'devices', lambda: [chip])
  got, line = settled('auto', 'bfloat16', chip)
  assert got == name and '\n' not in line
  assert not wrong or ('nan off' if name == 'triton' else 'triton refuses: no such head_dim)') in line


def test_errors_see_a_wrong_kernel(monkeypatch):
  monkeypatch.setitem(kernels.KERNELS, 'plain', plain)
  good = accelerators.errors('plain', 16, jnp.float32, 64, 256)
  assert max(good.values()) < 1e-5
  scaled = lambda: dataclasses.replace(plain(), attend_back=lambda *x: jax.tree.map(lambda g: 1.01 * g, plain().attend_back(*x)))
  monkeypatch.setitem(kernels.KERNELS, 'plain', scaled)
  monkeypatch.setattr(kernels, 'CHUNK', 256)
  monkeypatch.setattr(kernels, 'CHUNK_BACK', 128)
  bad = accelerators.errors('plain', 16, jnp.float32, 64, 1024)
  assert bad['o'] < 1e-5 < 1e-4 < bad['dk']


def test_positions_far_away_are_no_keys():
  """FAR in between and at the end; a window, rows that see nothing."""
  position = jnp.array([FAR, 0, 1, FAR, 2, 3, 4, FAR], jnp.int32)
  rows = attention.Rows(jnp.array([0, 3, 4, 9]), jnp.array([0, 3, -1, 9]), jnp.zeros(4, jnp.int32), 3, 4)
  visible, seen = kernels._visible(rows, position)
  at = np.arange(8)
  got = (at >= visible.start[:4, None]) & (at < visible.end[:4, None]) & np.asarray(visible.valid)
  want = (np.asarray(position) <= np.asarray(rows.sight)[:, None]) & (np.asarray(position) > np.asarray(rows.position)[:, None] - 3)
  np.testing.assert_array_equal(got, want)
  assert seen.tolist() == want.any(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize('limit, want', [(10_000, (9728, 10240)), (64, (64, 128)), (10, (0, 64))])
def test_longest_is_found_between_what_fits_and_what_does_not(limit, want):
  row = accelerator.longest_row(lambda length: length <= limit, 1024, 64, 1.1)
  assert (row['longest_len'], row['too_long_len']) == want
  assert row['longest_len'] <= limit < row['too_long_len']


def test_accelerator_makes_its_rows(capsys):
  row, = rows_of(accelerator, capsys, '--parts=step', '--alone', '--model=tiny-dense', '--step_len=100', '--segment_len=32', '--branches=2',
                 '--branch_len=8', '--rounds=1', '--dtype=float32', '--virtual_devices=8')
  assert row['fits'] and row['kernel'] == 'blocks' and row['step_s'] > 0 and np.isfinite(row['loss']) and row['part'] == 'step'


def test_longest_needs_an_accelerator(capsys):
  with pytest.raises(SystemExit) as stop:
    rows_of(accelerator, capsys, '--parts=longest', '--virtual_devices=8')
  assert stop.value.code == 2
  assert 'no GPU or TPU was found' in capsys.readouterr().err


def test_a_parity_row_keeps_its_own_dtype(monkeypatch):
  monkeypatch.setattr(accelerator, 'parity_rows', lambda settings: iter([{'kernel': 'blocks', 'dtype': 'float32'}]))
  row, = accelerator.rows_here(accelerator.Accelerator(parts=('parity',)), 'bfloat16')
  assert row['dtype'] == 'float32' and row['part'] == 'parity'


def test_layouts_are_asked_of_a_tpu_alone():
  traced = jax.jit(jax.grad(lambda x: mesh.laid_out(x, 1, 0).sum())).trace(jnp.ones((2, 3)))
  asked = {platform: traced.lower(lowering_platforms=(platform,)).as_text().count('LayoutConstraint') for platform in ('cpu', 'tpu')}
  assert asked['cpu'] == 0 < asked['tpu']
