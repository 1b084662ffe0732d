"""The same numbers as transformers, run here on the same weights; skipped where it is not installed.

transformers computes norms, RoPE and the delta rule in float32 whatever the model's
dtype, so agreement ends at about 1e-5; tests/test_hf_parity.py compares with its
float64 values, kept in tests/cases.
"""
import dataclasses
from pathlib import Path
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from branchreplay import hf, mesh
from branchreplay import model as layers
from branchreplay.config import ReplayConfig, preset
from branchreplay.full_sequence import hidden
from experiments import compare
from tests.test_hf_parity import relative, replayed
from tests.test_scripts import rows_of

try:
  import torch
  import transformers
except ImportError as error:
  pytest.skip(f'{error}; pip install -r experiments/peers/requirements-torch.txt', allow_module_level=True)

transformers.utils.logging.set_verbosity_error()
CASES = Path(__file__).parent / 'cases'
NAMES = ('dense_small', 'dense_tied', 'hybrid_small', 'llama_small', 'mistral_small')


def peer(folder, dtype='float32'):
  """The model of a folder in transformers; every tensor must find its place."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, dtype), output_loading_info=True)
  assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
  return model.eval()


def peer_logits(model, tokens):
  with torch.no_grad():
    ids = torch.as_tensor(tokens).long()[None]
    return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


def our_logits(folder, tokens):
  model = hf.read_config(folder)
  params = hf.load(folder, model, mesh.make_mesh(1, 1), ReplayConfig())

  def logits(params, tokens):
    x = layers.rms_norm(hidden(model, params, tokens), params.norm, model.norm_offset, model.norm_eps)
    return x @ layers.head_table(params).T

  with jax.numpy_rank_promotion('allow'):
    return np.asarray(jax.jit(logits)(params, jnp.asarray(tokens, jnp.int32)))


def close(got, right):
  np.testing.assert_allclose(got, right, rtol=0, atol=1e-4)


def tokens_for(folder, count=90):
  return np.random.default_rng(0).integers(1, hf.read_config(folder).vocab_size, count)


@pytest.mark.parametrize('case', NAMES)
def test_gradient(case):
  batch = np.load(CASES / case / 'batch.npz')
  model = peer(CASES / case / 'model', 'float64')
  prompt, count = torch.as_tensor(batch['prompt']).long(), batch['response_mask'].sum()
  for row, n in enumerate(batch['response_mask'].sum(1)):
    part = lambda key: torch.as_tensor(batch[key][row, :n])
    response, advantage = part('responses').long(), float(batch['advantages'][row])
    ids = torch.cat([prompt, response])[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, prompt.numel() - 1:-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
    rho, away = (logprobs - part('old_logprobs')).exp(), part('ref_logprobs') - logprobs
    gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
    ((0.04 * (away.exp() - away - 1) - gain).sum() / count).backward()
  right = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
  grads, _ = replayed(case, 'exact', 'float64', 1, 96, batch['responses'].shape[1])
  assert grads.keys() == right.keys()
  assert relative(grads, right) < 1e-4


@pytest.mark.parametrize('case', NAMES)
@pytest.mark.parametrize('shard_bytes', [10**9, 100_000])
def test_an_export_gives_the_same_logits(case, shard_bytes, tmp_path):
  folder = CASES / case / 'model'
  model = hf.read_config(folder)
  params = hf.load(folder, model, mesh.make_mesh(1, 8), ReplayConfig(shard_params=True))
  hf.save(tmp_path, params, model, folder, shard_bytes)
  tokens = tokens_for(folder)
  right = peer_logits(peer(folder), tokens)
  assert np.array_equal(peer_logits(peer(tmp_path), tokens), right)
  close(our_logits(tmp_path, tokens), right)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_a_model_begun_here(dtype, tmp_path):
  """config.json made from a preset alone, in each dtype."""
  model = dataclasses.replace(preset('tiny-hybrid'), qk_norm=True)  # as Qwen3.5 has it
  hf.save(tmp_path, layers.init(model, jax.random.key(0), jnp.dtype(dtype)), model)
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  assert config.dtype == getattr(torch, dtype)
  tokens = tokens_for(tmp_path)
  close(our_logits(tmp_path, tokens), peer_logits(peer(tmp_path), tokens))


def test_compare_runs_them(capsys):
  """The workers of compare.py, each in its own process."""
  pytest.importorskip('prefix_grouper')
  pytest.importorskip('trl')
  rows = rows_of(compare, capsys, f'--case={CASES}/dense_small', '--peers=hf,trl,prefix_grouper', '--rounds=1', f'--torch_venv={sys.prefix}')
  assert [row['peer'] for row in rows] == ['ours', 'hf', 'trl', 'prefix_grouper']
  assert all(row['rel_l2'] < 1e-4 and row['loss'] == pytest.approx(rows[0]['loss'], abs=1e-5) for row in rows)


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, num_hidden_layers=4, initializer_range=0.2)


def test_a_qwen3_with_windows_in_its_upper_layers(tmp_path):
  config = transformers.Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=2)
  transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
  assert hf.read_config(tmp_path).pattern == ('full', 'full', 'window', 'window')
  tokens = tokens_for(tmp_path)
  close(our_logits(tmp_path, tokens), peer_logits(peer(tmp_path), tokens))


def test_the_text_part_of_a_multimodal_model(tmp_path):
  text = {**SMALL, 'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 16,
          'linear_value_head_dim': 16, 'tie_word_embeddings': True,
          'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e7, 'partial_rotary_factor': 0.5,
                              'mrope_interleaved': True, 'mrope_section': [2, 1, 1]}}
  vision = {'depth': 1, 'hidden_size': 16, 'intermediate_size': 16, 'num_heads': 2, 'out_hidden_size': 32,
            'num_position_embeddings': 16}
  config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
  model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
  model.save_pretrained(tmp_path)
  assert any(name.startswith('model.visual.') for name in load_file(tmp_path / 'model.safetensors'))
  tokens = tokens_for(tmp_path)
  close(our_logits(tmp_path, tokens), peer_logits(model, tokens))
