"""transformers with gradient checkpointing: the whole sequence for each response, one at a time.

What TRL and most trainers run. Also what the other torch peers share.
"""
import numpy as np
from safetensors.numpy import save_file
import torch
import transformers

from experiments.peers import worker


def load(case, **options):
  """The model of a case, ready to be trained, with its layers checkpointed."""
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  model = transformers.AutoModelForCausalLM.from_pretrained(f'{case}/model', dtype=torch.float32, **options)
  model.gradient_checkpointing_enable({'use_reentrant': False})
  return model.train()


def tensors(case) -> dict:
  """The batch of a case as torch tensors."""
  return {key: torch.as_tensor(value).long() if value.dtype.kind == 'i' else torch.as_tensor(value)
          for key, value in worker.read_case(case).items()}


def about() -> dict:
  return {'torch': torch.__version__, 'transformers': transformers.__version__, 'threads': torch.get_num_threads()}


def gradient_writer(model):
  return lambda path: save_file({name: np.ascontiguousarray(p.grad.numpy()) for name, p in model.named_parameters()
                                 if p.grad is not None}, path)


def prepare(case):
  model, batch = load(case), tensors(case)
  lengths = batch['response_mask'].sum(1).tolist()

  def update(count=None):
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for g, n in enumerate(lengths[:count]):
      response, old, ref = (batch[key][g, :n] for key in ('responses', 'old_logprobs', 'ref_logprobs'))
      ids = torch.cat([batch['prompt'], response])[None]
      logits = model(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits[0, :-1]
      logp = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
      part = worker.token_loss(torch, logp, old, ref, batch['advantages'][g]).sum() / sum(lengths)
      part.backward()
      loss += part.item()
    return loss

  update(1)
  return update, gradient_writer(model), about()


if __name__ == '__main__':
  worker.serve(prepare)
