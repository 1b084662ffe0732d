"""TRL's GRPO step: GRPOTrainer's own loss on ready responses, one a micro-batch, with gradient checkpointing.

The trainer is called as its training loop calls it after generation, with micro-batches of one response
(`per_device_train_batch_size=1`, gradients accumulated over the group). Its loss `dapo` is the mean over
the group's tokens; its default of weighting the KL by the ratio is switched off, as no other peer has it.
"""
from importlib.metadata import version
import tempfile

from datasets import Dataset
from tokenizers import models, Tokenizer
import transformers
from trl import GRPOConfig, GRPOTrainer

from experiments.peers import hf, worker


def make_trainer(model, branches, longest, scratch) -> GRPOTrainer:
  """A trainer that is never asked to generate: its tokenizer, reward and prompts are never read."""
  vocabulary = {'<pad>': 0, '<eos>': 1, '<prompt>': 2}
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token='<pad>')), pad_token='<pad>', eos_token='<eos>')
  settings = GRPOConfig(
      output_dir=scratch, loss_type='dapo', epsilon=worker.CLIP, epsilon_high=worker.CLIP, use_bias_correction_kl=False,
      beta=0.0, temperature=1.0, per_device_train_batch_size=1, gradient_accumulation_steps=branches,
      num_generations=branches, max_completion_length=longest, gradient_checkpointing=True,
      gradient_checkpointing_kwargs={'use_reentrant': False}, use_cpu=True, bf16=False, report_to='none')
  trainer = GRPOTrainer(model=model, args=settings, processing_class=tokenizer,
                        reward_funcs=lambda completions, **_: [0.0] * len(completions),
                        train_dataset=Dataset.from_dict({'prompt': ['<prompt>'] * branches}))
  trainer.beta = worker.KL_COEF  # set here, because given above it loads a reference model; the batch has its log-probs
  trainer.current_gradient_accumulation_steps = branches  # as its training loop sets it
  return trainer


def prepare(case):
  model, batch = hf.load(case), hf.tensors(case)
  prompt, mask = batch['prompt'][None], batch['response_mask']
  with tempfile.TemporaryDirectory() as scratch:
    trainer = make_trainer(model, *mask.shape, scratch)

  def update(count=None):
    model.zero_grad(set_to_none=True)
    loss = 0.0
    for g in range(len(mask))[:count]:
      one = lambda key: batch[key][g:g + 1]
      part = trainer.compute_loss(model, {
          'prompt_ids': prompt, 'prompt_mask': prompt.new_ones(prompt.shape), 'completion_ids': one('responses'),
          'completion_mask': one('response_mask'), 'advantages': one('advantages'),
          'old_per_token_logps': one('old_logprobs'), 'ref_per_token_logps': one('ref_logprobs'),
          'num_items_in_batch': mask.sum()})
      part.backward()
      loss += part.item()
    return loss

  update(1)
  return update, hf.gradient_writer(model), hf.about() | {'trl': version('trl')}


if __name__ == '__main__':
  worker.serve(prepare)
