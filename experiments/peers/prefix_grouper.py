"""The prefix_grouper package: prompt and responses packed into one row, attention split into prefix and suffixes.

Its own hook for transformers expects flash-attention, so its PrefixGrouper.forward is called here
with torch's sdpa: causal for the prefix, a bottom-right causal mask for the suffixes, which also
hides their padding (on the right). Attention-only models: it has nothing for a recurrent state.
"""
from importlib.metadata import version

from prefix_grouper import PrefixGrouper
import torch
import transformers

from experiments.peers import hf, worker

NAME = 'prefix_grouper_sdpa'


def attention(module, query, key, value, attention_mask, scaling=None, prefix_grouper=None, **_):
  """An attention function of transformers that goes through the package."""
  def one(q, k, v, _):
    rows, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if rows == keys:
      o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    else:  # torch's CPU kernel takes grouped heads without a mask only
      mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
      k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
      o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return o.transpose(1, 2)
  return prefix_grouper.forward(one, query, key, value), None


def prepare(case):
  transformers.AttentionInterface.register(NAME, attention)
  model, batch = hf.load(case), hf.tensors(case)
  if set(getattr(model.config, 'layer_types', None) or ['full_attention']) != {'full_attention'}:
    raise SystemExit('prefix_grouper shares the prefix of attention layers only; this model has others.')
  model.config._attn_implementation = NAME
  prompt, responses, mask = batch['prompt'][None], batch['responses'], batch['response_mask']
  lengths = mask.sum(1).tolist()
  longest, known = max(lengths), torch.ones_like(prompt)

  def update():
    model.zero_grad(set_to_none=True)
    grouper = PrefixGrouper.from_ungrouped_masks(known, mask, group_sizes=len(lengths))
    ids = grouper.concat_input(prompt, known, responses, mask)
    start = prompt.shape[1]
    positions = torch.cat([torch.arange(start)] + [start + torch.arange(n) for n in lengths])[None]
    h = model.model(input_ids=ids, position_ids=positions, use_cache=False, attention_mask={'full_attention': None},
                    prefix_grouper=grouper).last_hidden_state
    _, _, suffix, suffix_mask = grouper.split_output(h, include_prefix_last=1)
    logp = torch.log_softmax(model.lm_head(suffix[:, :-1]), -1).gather(-1, responses[:, :longest, None])[..., 0]
    losses = worker.token_loss(torch, logp, batch['old_logprobs'][:, :longest], batch['ref_logprobs'][:, :longest],
                               batch['advantages'][:, None])
    loss = torch.where(suffix_mask[:, 1:].bool(), losses, 0.0).sum() / sum(lengths)
    loss.backward()
    return loss.item()

  update()
  return update, hf.gradient_writer(model), hf.about() | {'prefix_grouper': version('prefix_grouper')}


if __name__ == '__main__':
  worker.serve(prepare)
