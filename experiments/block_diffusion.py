"""Branches that are not autoregressive: masked digits filled in block by block, on a shared prompt.

    bash launch.sh block_diffusion --out=experiments/results/block_diffusion.jsonl

A branch states all facts of a document, `#K=d`, a block of four bytes each, in a random order with
digits masked out; the model predicts them (masked diffusion with one noise level; blocks see
themselves in both directions and what is before, as in block diffusion, arXiv:2503.09573). Supervised,
from scratch, with the exact gradient and with the one stopped at the prompt. Rows: the probability
of the right digit on held-out documents with all digits masked. About 4 minutes.
"""
import dataclasses
import time

import numpy as np

from branchreplay import batch, gradients, objectives, tasks
from experiments import common, plots, study, training

BLOCK = len('#K=d')
MASK = 0  # a byte that no document holds
NOISE = 0.75  # share of digits that are masked in training


@dataclasses.dataclass(frozen=True)
class Study:
  arms: tuple[str, ...] = ('exact', 'detached')  # modes of the gradient
  seeds: tuple[str, ...] = ('0',)  # of parameters and data


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('task', 'recall'), ('prompt_len', 128), ('segment_len', 64), ('prompts', 16), ('branches', 4),
                      ('branch_capacity', tasks.FACTS * BLOCK), ('steps', 300), ('eval_every', 25),
                      ('learning_rate', 5e-3), ('decay_steps', 0), ('out', 'runs/block_diffusion.jsonl')):
    flags.set_default(name, value)


def group_of(run, task, split: str, index: int, noise: float):
  """One document and `branches` noised statements of its facts."""
  found = tasks.warmup_example(task, split, index, run.train.seed)
  facts = [b.tokens[1:1 + BLOCK] for b in found.branches]  # without the newlines around
  rng = np.random.default_rng([run.train.seed, tasks.SPLITS.index(split), index])
  inputs, targets, masks = [], [], []
  for _ in range(run.train.branches):
    target = np.concatenate([facts[i] for i in rng.permutation(len(facts))])
    mask = (np.arange(target.size) % BLOCK == BLOCK - 1) & (rng.random(target.size) < noise)
    targets.append(target), masks.append(mask), inputs.append(np.where(mask, MASK, target))
  return batch.make_masked_group(run.model, run.replay, found.prompt, inputs, targets, masks, dtype=run.dtype)


def stacked(run, task, split, first, count, noise):
  return batch.stack([group_of(run, task, split, i, noise) for i in range(first, first + count)])


def learn(run, task, write) -> None:
  """Supervised updates from scratch; a row at every evaluation."""
  optimizer, train = training.training_optimizer(run), run.train
  learner, update = training.make_learner(run, optimizer), training.update_function(optimizer)
  params, opt_state, started = learner.params, learner.opt_state, time.monotonic()
  held_out = stacked(run, task, 'test', 0, train.eval_prompts, 1.0)
  score = gradients.score_function(run.mesh, run.model, run.replay, held_out)
  groups = stacked(run, task, 'train', 0, train.prompts, NOISE)
  gradient = gradients.gradient_function(run.mesh, run.model, run.replay,
                                         objectives.make_objective('nll', run.objective), groups)
  for step in range(train.steps + 1):
    if step % train.eval_every == 0 or step == train.steps:
      logprob, real = np.asarray(score(params, held_out).logprob), held_out.mask > 0
      right = float(np.exp(logprob[real]).mean())
      write({'step': step, 'reward': right, 'seconds': time.monotonic() - started})
      common.log(f'{run.replay.mode}, seed {train.seed}: update {step}/{train.steps}  probability of the right digit {right:.3f}')
    if step < train.steps:
      groups = stacked(run, task, 'train', step * train.prompts, train.prompts, NOISE)
      result = gradient(params, groups)
      params, opt_state, _, _ = update(params, opt_state, result.grads, result.loss.mean())


def main(flags):
  settings = common.from_flags(flags, Study())
  for seed in common.whole_numbers('seeds', settings.seeds):
    for arm in settings.arms:
      run = study.configure(flags, seed=seed, mode=arm)
      replay = dataclasses.replace(run.replay, block_len=BLOCK, branch_segment_len=tasks.FACTS * BLOCK)
      run, task = run._replace(replay=replay), tasks.make_task(run.train.task, run.train.prompt_len)
      source = common.provenance() | {'kind': 'curve', 'arm': arm, 'seed': seed, 'prompt_len': run.train.prompt_len}
      learn(run, task, lambda row: common.append_row(run.where.out, source | row))
  rows = plots.read_rows(run.where.out)
  common.emit(common.provenance() | study.closing(rows, 'arm'))


if __name__ == '__main__':
  common.run(define, main)
