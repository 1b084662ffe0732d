"""Tunix: its Qwen3 and its grpo_loss_fn, layers rematerialised, one response a micro-batch.

Its "token-mean" normalises inside each call, so a response's loss is weighted by its share of
the group's tokens here (its own trainer averages micro-batches unweighted); kl_loss_mode is
k3 (its default is k1). Limits of 0.1.7: RoPE theta is 1e6 whatever the config says, attention
scores are materialised off TPU, no recurrent layers.
"""
from importlib.metadata import version
import json
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import algo_core, common

from experiments.peers import worker


def load(case):
  with open(f'{case}/model/config.json') as file:
    c = json.load(file)
  theta = c.get('rope_theta') or c['rope_parameters']['rope_theta']
  if c['model_type'] != 'qwen3' or theta != 1_000_000:
    raise SystemExit('Tunix 0.1.7 has Qwen3 with RoPE theta 1e6 only.')
  config = qwen3.ModelConfig(
      num_layers=c['num_hidden_layers'], vocab_size=c['vocab_size'], embed_dim=c['hidden_size'],
      hidden_dim=c['intermediate_size'], num_heads=c['num_attention_heads'], head_dim=c['head_dim'],
      num_kv_heads=c['num_key_value_heads'], rope_theta=theta, norm_eps=c['rms_norm_eps'],
      use_tied_embedding=c['tie_word_embeddings'], dtype=jnp.float32, param_dtype=jnp.float32,
      remat_config=qwen3.RematConfig.DECODER)
  return qwen3_params.create_model_from_safe_tensors(f'{case}/model', config, dtype=jnp.float32)


def hf_tensor(path, g):
  """A gradient of Tunix by its path -> the checkpoint's name, and its layout [out, in]."""
  path, g = [str(p) for p in path if p != 'value'], np.asarray(g)
  fixed = {'embedder': ('model.embed_tokens.weight', g), 'final_norm': ('model.norm.weight', g),
           'lm_head': ('lm_head.weight', g.T)}
  if path[0] in fixed:
    return fixed[path[0]]
  if path[-2] == 'o_proj':  # [heads, head_dim, out]
    g = g.reshape(-1, g.shape[-1]).T
  elif path[-2].endswith('_proj'):  # [in, heads, head_dim] or [in, out]
    g = g.reshape(g.shape[0], -1).T
  part = 'self_attn' if path[2] == 'attn' else path[2]
  return '.'.join(['model.layers', path[1], part, *path[3:-1], 'weight']), g


def prepare(case):
  batch = worker.read_case(case)
  graph, params, rest = nnx.split(load(case), nnx.Param, ...)
  algo = types.SimpleNamespace(beta=worker.KL_COEF, epsilon=worker.CLIP, epsilon_high=worker.CLIP, loss_algo='grpo',
                               loss_agg_mode='token-mean', temperature=1.0, kl_loss_mode='low_var_kl', kl_clamp_value=None)
  total, gradient = batch['response_mask'].sum(), None

  def loss_of(params, prompt, response, mask, advantage, old, ref):
    example = common.TrainExample(
        prompt_ids=prompt, prompt_mask=jnp.ones_like(prompt), completion_ids=response, completion_mask=mask,
        advantages=advantage, ref_per_token_logps=ref, old_per_token_logps=old)
    loss, _ = algo_core.grpo_loss_fn(nnx.merge(graph, params, rest), example, algo, pad_id=0, eos_id=-1)
    return loss * mask.sum() / total

  @jax.jit
  def step(params, sums, *data):
    loss, grads = jax.value_and_grad(loss_of)(params, *data)
    return loss, jax.tree.map(jnp.add, sums, grads)

  def update(count=None):
    nonlocal gradient
    gradient, loss = jax.tree.map(jnp.zeros_like, params), 0.0
    for g in range(batch['responses'].shape[0])[:count]:
      row = [batch[key][g:g + 1] for key in ('responses', 'response_mask', 'advantages', 'old_logprobs', 'ref_logprobs')]
      part, gradient = step(params, gradient, batch['prompt'][None], *row)
      loss += float(part)
    jax.block_until_ready(gradient)
    return loss

  update(1)
  write = lambda path: save_file({name: np.ascontiguousarray(g) for name, g in (
      hf_tensor(k, v[...]) for k, v in nnx.to_flat_state(gradient))}, path)
  return update, write, {'tunix': version('google-tunix'), 'jax': jax.__version__}


if __name__ == '__main__':
  worker.serve(prepare)
