"""Checkpoints and batches that are refused: each by name, in one sentence."""
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from branchreplay import hf, mesh
from branchreplay import model as layers
from branchreplay.config import ReplayConfig, UserError, preset
from tests.test_hf import CASES, REPLAY, checkpoint, load, rewrite  # noqa: F401, checkpoint is a fixture


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize('case, change, sentence', [
    ('dense_small', {'model_type': 'gpt2'}, "model_type 'gpt2' is not supported; use one of qwen3, "),
    ('dense_small', {'rope_parameters': {'rope_type': 'yarn'}}, "rope scaling 'yarn' is not"),
    ('dense_small', {'attention_bias': True}, 'attention_bias is true, but only false is supported'),
    ('dense_small', {'attention_dropout': 0.1}, 'attention_dropout is 0.1, but only 0 is supported'),
    ('dense_small', {'hidden_act': 'gelu'}, 'hidden_act is "gelu"'),
    ('dense_small', {'quantization_config': {'bits': 4}}, 'quantization_config is'),
    ('dense_small', {'layer_types': ['full_attention']}, 'does not list the 4 layers'),
    ('dense_small', {'layer_types': ['linear_attention'] * 4}, "layer type 'linear_attention' is not supported"),
    ('dense_small', {'layer_types': ['sliding_attention'] * 4}, 'sliding_window is null'),
    ('dense_small', {'hidden_size': 'wide'}, 'hidden_size is "wide"; it must be a positive number'),
    ('dense_small', {'num_key_value_heads': 3}, 'heads=4 is not a multiple of kv_heads=3'),
    ('dense_small', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor 0.5 is not supported'),
    ('hybrid_small', {'attn_output_gate': False}, 'attn_output_gate is false'),
    ('hybrid_small', {'vocab_size': None}, 'vocab_size is null'),
    ('hybrid_small', {'output_gate_type': 'sigmoid'}, 'output_gate_type is "sigmoid"'),
])
def test_what_the_model_would_not_compute_is_refused(checkpoint, case, change, sentence):
  folder = checkpoint(case)
  rewrite(folder, **change)
  with pytest.raises(UserError) as error:
    hf.read_config(folder)
  assert sentence in str(error.value) and str(folder / 'config.json') in str(error.value)


def test_config_json_that_is_none(tmp_path):
  with pytest.raises(UserError, match='cannot be read .No such file'):
    hf.read_config(tmp_path)
  for text in ('{', '[]'):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(UserError, match='is no JSON'):
      hf.read_config(tmp_path)


# ---------------------------------------------------------------- weights


def refused(folder, *sentences):
  with pytest.raises(UserError) as error:
    load(folder)
  assert all(text in str(error.value) for text in sentences), error.value


@pytest.mark.parametrize('size', [-8, 100, 4, 0])
def test_a_truncated_file_is_named(checkpoint, size):
  folder = checkpoint()
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:size])
  refused(folder, str(file), 'truncated or corrupt')


def test_a_corrupt_header_is_named(checkpoint):
  folder = checkpoint()
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtyqe"'))
  refused(folder, str(file), 'truncated or corrupt')


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt'])
def test_pickled_weights_are_refused(checkpoint, name):
  folder = checkpoint()
  (folder / 'model.safetensors').rename(folder / name)
  refused(folder, f'pickled weights ({name})', 'can run any code')


def test_no_weights_at_all(checkpoint, tmp_path):
  folder = checkpoint()
  (folder / 'model.safetensors').unlink()
  refused(folder, 'neither model.safetensors nor')
  with pytest.raises(UserError, match='is no folder'):
    hf.load(tmp_path / 'none', preset('tiny-dense'), mesh.make_mesh(1, 1), REPLAY)


def change_tensors(folder, change):
  tensors = load_file(folder / 'model.safetensors')
  change(tensors)
  save_file(tensors, folder / 'model.safetensors')


@pytest.mark.parametrize('change, sentences', [
    (lambda t: t.pop('model.layers.2.mlp.up_proj.weight'),
     ['lacks 1 tensors', 'model.layers.2.mlp.up_proj.weight']),
    (lambda t: [t.pop(k) for k in list(t) if '.3.' in k], ['lacks 11 tensors', 'layers.3.', 'and 8 more']),
    (lambda t: t.update({'model.layers.0.self_attn.q_proj.bias': np.ones(3, np.float32)}),
     ['no place for: model.layers.0.self_attn.q_proj.bias']),
    (lambda t: t.update({'model.norm.weight': np.ones(63, np.float32)}),
     ['model.norm.weight has shape [63]', '[64]']),
    (lambda t: t.update({'model.norm.weight': np.ones(64, np.int8)}), ['model.norm.weight is I8']),
])
def test_tensors_that_do_not_fit_are_named(checkpoint, change, sentences):
  folder = checkpoint()
  change_tensors(folder, change)
  refused(folder, str(folder), *sentences)


@pytest.mark.parametrize('place, sentence', [
    ('gone.safetensors', "names 'gone.safetensors', which is missing"),
    ('../model.safetensors', 'outside the folder'),
    ('/etc/model.safetensors', 'outside the folder'),
    ('pytorch_model.bin', 'is no safetensors file'),
    (3, 'has no weight_map'),
])
def test_an_index_that_points_wrong(checkpoint, place, sentence):
  folder = checkpoint()
  (folder / 'model.safetensors').rename(folder / 'part.safetensors')
  index = folder / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': {'model.norm.weight': place}}))
  refused(folder, str(index), sentence)


def test_an_index_that_promises_too_much(checkpoint):
  folder = checkpoint()
  (folder / 'model.safetensors').rename(folder / 'part.safetensors')
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'x': 'part.safetensors'}}))
  refused(folder, 'places x in part.safetensors, which lacks them')


def test_exports_spare_what_is_there(tmp_path):
  model = preset('tiny-dense')
  params = layers.init(model, jax.random.key(0))
  hf.save(tmp_path / 'a', params, model, shard_bytes=100_000)
  with pytest.raises(UserError, match='holds other weights'):
    hf.save(tmp_path / 'a', params, model)
  with pytest.raises(UserError, match='export to another folder'):
    hf.save(tmp_path / 'a', params, model, source=tmp_path / 'a')


def test_float64_without_64_bits():
  with jax.enable_x64(False), pytest.raises(UserError, match='64-bit'):
    load(CASES / 'dense_tied/model', dtype='float64')


# ---------------------------------------------------------------- batch.npz


def write_batch(folder, **changes):
  held = {**np.load(CASES / 'dense_small/batch.npz'), **changes}
  np.savez(folder / 'batch.npz', **{k: v for k, v in held.items() if v is not None})


def read(folder, **sizes):
  replay = ReplayConfig(**{'branch_capacity': 32, **sizes})
  return hf.read_batch(folder, hf.read_config(CASES / 'dense_small/model'), replay, np.float64)


def test_batch(tmp_path):
  mask = np.load(CASES / 'dense_small/batch.npz')['response_mask'].copy()
  mask[0, 3] = 0  # a token inside that does not count
  mask[2] = 0
  write_batch(tmp_path, response_mask=mask)
  group = read(tmp_path)
  assert group.length.tolist() == [23, 18, 0, 7] and int(group.prefix_length) == 202
  assert group.mask.dtype == np.float64 and np.array_equal(group.mask[:, :23], mask)
  held = np.load(tmp_path / 'batch.npz')
  assert np.array_equal(group.targets[0, :23], held['responses'][0])
  assert np.array_equal(group.inputs[1, 1:18], held['responses'][1, :17])
  assert group.inputs[1, 0] == held['prompt'][-1]
  assert np.array_equal(group.old_logprobs[1, :18], held['old_logprobs'][1, :18].astype(np.float64))


@pytest.mark.parametrize('changes, sentence', [
    ({'advantages': None, 'prompt': None}, 'lacks prompt, advantages; it needs'),
    ({'advantages': np.zeros((4, 23), np.float32)}, 'advantages has shape [4, 23]'),
    ({'old_logprobs': np.zeros((4, 22), np.float32)}, 'old_logprobs has shape [4, 22], responses [4, 23]'),
    ({'responses': np.zeros(4, np.int32)}, 'responses has shape [4]; it must be [branches, tokens]'),
    ({'prompt': np.zeros(0, np.int32)}, 'prompt has shape [0]'),
    ({'prompt': np.zeros(3)}, 'prompt is float64; it must be integers'),
    ({'response_mask': np.full((4, 23), 2)}, 'other values than 0 and 1'),
    ({'advantages': np.full(4, np.nan)}, 'advantages must be finite'),
    ({'responses': np.array([[{}]])}, 'is no archive of plain arrays'),
    ({'prompt': np.full(5, 256)}, 'token id 256, outside the vocabulary of 256'),
])
def test_bad_batches(tmp_path, changes, sentence):
  write_batch(tmp_path, **changes)
  with pytest.raises(UserError) as error:
    read(tmp_path)
  assert sentence in str(error.value)


def test_batches_that_are_none_or_too_long(tmp_path):
  with pytest.raises(UserError, match='cannot be read'):
    read(tmp_path)
  for content in (b'', b'PK\3\4 no archive', b'text'):
    (tmp_path / 'batch.npz').write_bytes(content)
    with pytest.raises(UserError, match='is no archive of plain arrays'):
      read(tmp_path)
  write_batch(tmp_path)
  with pytest.raises(UserError, match='raise --branch_capacity to 23'):
    read(tmp_path, branch_capacity=16, branch_segment_len=16)
