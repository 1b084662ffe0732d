"""Checkpoints: config.json, presets, round trips, layouts, dtypes, memory."""
import dataclasses
import json
from pathlib import Path
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from branchreplay import hf, mesh
from branchreplay import model as layers
from branchreplay.config import PRESETS, ModelConfig, ReplayConfig, UserError, preset
from branchreplay.hf.config import make_config, shortest_pattern

CASES = Path(__file__).parent / 'cases'
NAMES = ('dense_small', 'dense_tied', 'hybrid_small', 'llama_small', 'mistral_small')
REPLAY = ReplayConfig(branch_capacity=64)
HYBRID = dataclasses.replace(preset('tiny-hybrid'), qk_norm=True)  # as Qwen3.5 has it; the preset has not
SHARDED = dataclasses.replace(REPLAY, shard_params=True)


def load(folder, seq=1, dtype='float32'):
  return hf.load(folder, hf.read_config(folder), mesh.make_mesh(1, seq), SHARDED, dtype)


def equal(a, b):
  """Same structure, dtypes and bytes."""
  def same(x, y):
    return x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
  return all(jax.tree.leaves(jax.tree.map(same, a, b)))


def rewrite(folder, **entries):
  """Changes config.json; an entry of None is taken out."""
  config = {**json.loads((folder / 'config.json').read_text()), **entries}
  (folder / 'config.json').write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.fixture
def checkpoint(tmp_path):
  """A private copy of the model of a case."""
  def copy(case='dense_small'):
    source = CASES / case / 'model'
    return Path(shutil.copytree(source, tmp_path / 'model', copy_function=shutil.copyfile))
  return copy


# ---------------------------------------------------------------- config.json


def test_config_of_the_cases():
  assert hf.read_config(CASES / 'dense_tied/model') == ModelConfig(
      vocab_size=192, width=64, mlp_width=192, repeats=2, head_dim=64, tied_embeddings=True)
  assert hf.read_config(CASES / 'hybrid_small/model') == ModelConfig(
      vocab_size=256, width=64, mlp_width=192, pattern=('deltanet',) * 3 + ('full',), repeats=1, head_dim=64,
      rope_theta=1e7, rotary_fraction=0.25, output_gate=True, delta_key_dim=64, delta_value_dim=64,
      norm_offset=1.0)
  llama = hf.read_config(CASES / 'llama_small/model')
  assert (llama.rope_scaling, llama.qk_norm, llama.norm_eps) == ((8.0, 1.0, 4.0, 64.0), False, 1e-5)
  mistral = hf.read_config(CASES / 'mistral_small/model')
  assert (mistral.pattern, mistral.repeats, mistral.window) == (('window',), 2, 16)


def test_shortest_pattern():
  assert shortest_pattern('aab' * 4) == ('a', 'a', 'b')
  assert shortest_pattern('aaa') == ('a',)
  assert shortest_pattern('aabaa') == tuple('aabaa')


@pytest.mark.parametrize('name', [name for name in PRESETS if name not in ('tiny-window', 'tiny-hybrid')])
def test_a_preset_survives_config_json(name, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(make_config(preset(name), 'float32', {})))
  assert hf.read_config(tmp_path) == preset(name)


def test_a_model_that_no_architecture_has_is_refused(tmp_path):
  with pytest.raises(UserError, match='no Hugging Face architecture'):
    hf.save(tmp_path, layers.init(preset('tiny-window'), jax.random.key(0)), preset('tiny-window'))


def test_parameter_counts_of_presets():
  """Exactly those of the published checkpoints; the text part of Qwen3.5 has about what its name says."""
  count = lambda name: sum(int(np.prod(x.shape)) for x in jax.tree.leaves(layers.shapes(preset(name))))
  right = {'qwen3-0.6b': 596_049_920, 'qwen3-8b': 8_190_735_360, 'llama-3.1-8b': 8_030_261_248}
  assert {name: count(name) for name in right} == right
  assert all(count(f'qwen3.5-{size}b') == pytest.approx(size * 1e9, rel=0.07) for size in (0.8, 4, 27))


def test_older_forms_of_config_json(checkpoint):
  folder = checkpoint('llama_small')
  new = hf.read_config(folder)
  scaling = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
             'original_max_position_embeddings': 64}
  rewrite(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=1e4, head_dim=None)
  assert hf.read_config(folder) == dataclasses.replace(new, head_dim=8)
  rewrite(folder, rope_scaling=None, rope_theta=None)
  assert hf.read_config(folder).rope_scaling == ()


def test_layers_that_config_json_gives_by_rule(checkpoint):
  folder = checkpoint('dense_small')
  rewrite(folder, layer_types=None, use_sliding_window=True, sliding_window=32, max_window_layers=1)
  assert hf.read_config(folder).pattern == ('full', 'window', 'window', 'window')
  rewrite(folder, use_sliding_window=False)
  assert hf.read_config(folder).pattern == ('full',)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize('case', NAMES)
def test_names_layouts_and_bytes_survive(case, tmp_path):
  """Loaded over 8 devices and written again: the very tensors of the case, and no others."""
  folder = CASES / case / 'model'
  params, model = load(folder, 8), hf.read_config(folder)
  right = load_file(folder / 'model.safetensors')
  got = dict(hf.to_hf_tensors(params, model))
  assert got.keys() == right.keys() and all(np.array_equal(got[name], right[name]) for name in right)
  hf.save(tmp_path / 'a', params, model, folder)
  assert hf.read_config(tmp_path / 'a') == model
  assert equal(load(tmp_path / 'a', 1), params)


def test_parameters_lie_where_the_engine_wants_them():
  folder, devices = CASES / 'hybrid_small/model', mesh.make_mesh(1, 8)
  shapes = layers.shapes(hf.read_config(folder))
  wanted = mesh.shardings(devices, mesh.parameter_specs(shapes, 8, True))
  params = load(folder, 8)
  assert jax.tree.map(lambda x: x.sharding, params) == wanted
  kind = lambda x: (x.shape, x.dtype)
  assert jax.tree.map(kind, params) == jax.tree.map(kind, shapes)


def test_query_and_gate_alternate_by_head():
  folder = CASES / 'hybrid_small/model'
  fused = load_file(folder / 'model.safetensors')['model.layers.3.self_attn.q_proj.weight']  # [H*2*h, D]
  mixer = load(folder).blocks[3].mixer
  assert np.array_equal(mixer.q[0, :, 64:128], fused[128:192].T)  # head 1
  assert np.array_equal(mixer.gate[0, :, 64:128], fused[192:256].T)


@pytest.mark.parametrize('shard_bytes', [10**9, 300_000, 1])
def test_a_second_export_has_the_same_bytes(shard_bytes, tmp_path):
  folder = tmp_path / 'source'
  shutil.copytree(CASES / 'dense_tied/model', folder, copy_function=shutil.copyfile)
  (folder / 'tokenizer.json').write_text('{"a": 1}')
  rewrite(folder, eos_token_id=7)
  params, model = load(folder), hf.read_config(folder)
  hf.save(tmp_path / 'a', params, model, folder, shard_bytes)
  hf.save(tmp_path / 'b', load(tmp_path / 'a', 8), model, tmp_path / 'a', shard_bytes)
  files = sorted(f.name for f in (tmp_path / 'a').iterdir())
  assert files == sorted(f.name for f in (tmp_path / 'b').iterdir())
  assert all((tmp_path / 'a' / f).read_bytes() == (tmp_path / 'b' / f).read_bytes() for f in files)
  assert json.loads((tmp_path / 'a/config.json').read_text())['eos_token_id'] == 7
  weights = [f for f in files if f.endswith('.safetensors')]
  assert len(weights) == {10**9: 1, 300_000: 3, 1: 24}[shard_bytes]
  assert ('model.safetensors.index.json' in files) == (len(weights) > 1) and 'tokenizer.json' in files


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32', 'float64'])
def test_dtypes_on_disk(dtype, tmp_path):
  """Any float type is read, and cast to the one asked for; each survives a round trip."""
  model, devices = HYBRID, mesh.make_mesh(1, 8)
  params = layers.init(model, jax.random.key(0), jnp.dtype(dtype))
  hf.save(tmp_path, params, model)
  again = hf.load(tmp_path, model, devices, SHARDED, dtype)
  assert equal(again, params)
  cast = hf.load(tmp_path, model, devices, SHARDED, 'float32')
  assert equal(cast, jax.tree.map(lambda x: np.asarray(x).astype(np.float32), params))


def test_the_text_part_of_a_multimodal_checkpoint(checkpoint):
  folder = checkpoint('hybrid_small')
  plain = load(folder)
  text = json.loads((folder / 'config.json').read_text())
  text['rope_parameters'] |= {'mrope_interleaved': True, 'mrope_section': [3, 3, 2]}
  whole = {'model_type': 'qwen3_5', 'architectures': ['Qwen3_5ForConditionalGeneration'], 'text_config': text,
           'vision_config': {'depth': 1}, 'tie_word_embeddings': False}
  (folder / 'config.json').write_text(json.dumps(whole))
  rename = lambda name: name.replace('model.', 'model.language_model.', 1)
  tensors = {rename(k): v for k, v in load_file(folder / 'model.safetensors').items()}
  tensors |= {'model.visual.blocks.0.attn.qkv.weight': np.ones((3, 3), np.float32),
              'mtp.fc.weight': np.ones((2, 2), np.float32)}
  save_file(tensors, folder / 'model.safetensors')
  assert equal(load(folder, 8), plain)


def test_a_tied_head_may_be_stored_but_must_be_the_embedding(checkpoint):
  folder = checkpoint('dense_tied')
  plain, file = load(folder), folder / 'model.safetensors'
  tensors = load_file(file)
  tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
  save_file(tensors, file)
  assert equal(load(folder), plain)
  tensors['lm_head.weight'][0, 0] += 1
  save_file(tensors, file)
  with pytest.raises(UserError, match='lm_head.weight differs from the embedding'):
    load(folder)


def test_loaded_parameters_can_be_donated():
  params = load(CASES / 'dense_tied/model', 8)
  right = jax.tree.map(lambda x: np.asarray(x) + 1, params)
  assert equal(jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params), right)


def test_gradients_keep_their_dtype(tmp_path):
  model = preset('tiny-dense')
  grads = layers.init(model, jax.random.key(0), jnp.float64)
  hf.write_gradients(tmp_path / 'g.safetensors', grads, model)
  held = load_file(tmp_path / 'g.safetensors')
  assert {x.dtype for x in held.values()} == {np.dtype('float64')}
  assert np.array_equal(held['model.layers.1.mlp.down_proj.weight'].T, grads.blocks[0].mlp.down[1])
  with pytest.raises(UserError, match='cannot be written'):
    hf.write_gradients(tmp_path / 'none/g.safetensors', grads, model)


MEASURE = '''
import sys
from pathlib import Path
import jax
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
from branchreplay import hf, mesh
from branchreplay.config import ReplayConfig
devices, model = mesh.make_mesh(1, 8), hf.read_config(sys.argv[1])
jax.block_until_ready(jax.numpy.zeros(8))
def peak():  # of this program alone: getrusage's begins with what the process that started it held
  return 1024 * next(int(line.split()[1]) for line in Path('/proc/self/status').read_text().splitlines() if line.startswith('VmHWM'))
before = peak()
params = hf.load(sys.argv[1], model, devices, ReplayConfig(shard_params=True), sys.argv[2])
jax.block_until_ready(params)
print(peak() - before, sum(x.nbytes for x in jax.tree.leaves(params)))
'''


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads the peak memory from /proc')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_peak_memory_is_the_result_and_the_largest_tensor(dtype, tmp_path):
  model = ModelConfig(vocab_size=16384, width=512, mlp_width=2048, repeats=20, heads=8, kv_heads=8,
                      head_dim=64)
  numbers = np.random.default_rng(0)
  tree = jax.tree.map(lambda x: numbers.random(x.shape, np.float32), layers.shapes(model))
  hf.save(tmp_path, tree, model)
  del tree
  root = Path(__file__).parent.parent
  done = subprocess.run([sys.executable, '-c', MEASURE, tmp_path, dtype], cwd=root, capture_output=True,
                        text=True)
  assert done.returncode == 0, done.stderr
  peak, size = map(int, done.stdout.split())
  assert 0.8 * size < peak < 1.3 * size + 16384 * 512 * 4
