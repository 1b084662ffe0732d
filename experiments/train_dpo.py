"""Trains on preference pairs: a JSONL file of prompt, chosen and rejected; DPO and its kin.

    bash launch.sh train_dpo --init=CHECKPOINT --data_file=pairs.jsonl
    bash launch.sh train_dpo --model=tiny-hybrid --data_file=pairs.jsonl --objective=simpo --prompt_len=256

Chosen and rejected are two branches of one prefix: one capture serves both. The reference
policy's log-probs come from a second capture, under the parameters that the run began with.
A stopped run is taken up where its last checkpoint is. Differs from train.py in that nothing
is sampled; evaluation is the share of held-out pairs whose chosen response has the larger margin.
"""
import time

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import batch, gradients, objectives, processes
from branchreplay.config import UserError
from experiments import common, training
from experiments.training import Learner, Run

MAY_CHANGE = ('train.steps', 'train.eval_every', 'train.eval_prompts', 'train.checkpoint_every')


def define(flags):
  training.define(flags)
  for name, value in (('objective', 'dpo'), ('workdir', 'runs/train_dpo'), ('branch_capacity', 64),
                      ('steps', 100), ('learning_rate', 1e-4), ('decay_steps', 0)):
    flags.set_default(name, value)


def make_groups(run: Run, split: str, first: int, count: int) -> batch.Group:
  """Stacked groups of two branches, chosen before rejected."""
  pairs = [run.source.example(split, first + i) for i in range(count)]
  return batch.stack([batch.make_group(run.model, run.replay, pair.prompt, pair.answer, dtype=run.dtype)
                      for pair in pairs])


def functions_of(run: Run):
  """(gradient, with_reference, losses): what a step and an evaluation call."""
  objective, example = objectives.make_objective(run.train.objective, run.objective), make_groups(run, 'train', 0, 1)
  score = gradients.score_function(run.mesh, run.model, run.replay, example)

  def with_reference(reference, groups):
    if reference is None:
      return groups
    return groups.replace(ref_logprobs=processes.fetch(score(reference, groups).logprob))

  losses = jax.jit(jax.vmap(lambda scores, group: objective.loss(scores, group)[1]))
  if training.needs_reference(run):
    example = example.replace(ref_logprobs=np.zeros(example.mask.shape, run.dtype))
  gradient = gradients.gradient_function(run.mesh, run.model, run.replay, objective, example,
                                         run.train.full_sequence)
  bare = lambda groups: groups.replace(ref_logprobs=None)  # as `score` was made for
  return gradient, with_reference, lambda params, groups: losses(score(params, bare(groups)), groups)


def evaluate(run: Run, with_reference, losses, learner: Learner) -> dict:
  """Means over held-out pairs of the objective's metrics."""
  groups = with_reference(training.reference_of(run, learner), make_groups(run, 'test', 0, run.train.eval_prompts))
  return {name: float(np.mean(value)) for name, value in losses(learner.params, groups).items()}


def train_step(run: Run, functions, update, learner: Learner, step: int):
  """One update on `prompts` pairs; returns the learner and a metrics row."""
  started, (gradient, with_reference, _) = time.monotonic(), functions
  groups = with_reference(training.reference_of(run, learner), make_groups(run, 'train', int(learner.cursor), run.train.prompts))
  result = gradient(learner.params, groups)
  params, opt_state, norm, finite = update(learner.params, learner.opt_state, result.grads, result.loss.mean())
  row = {'stage': 'rl', 'step': step + 1, **{k: float(np.mean(v)) for k, v in result.metrics.items()},
         'grad_norm': float(norm), 'skipped': int(not finite),
         'positions': int(groups.prefix_length.sum() + groups.length.sum()),
         'positions_full_sequences': int(2 * groups.prefix_length.sum() + groups.length.sum()),
         'seconds': time.monotonic() - started}
  return learner._replace(params=params, opt_state=opt_state, cursor=learner.cursor + run.train.prompts), row


def main(flags):
  run = training.make_run(flags, kind='pairs')
  train = run.train
  if train.stream:
    raise UserError('ready pairs are trained in one program; leave --stream out.')
  if train.objective not in objectives.PREFERENCES or not train.data_file:
    raise UserError(f'give pairs with --data_file=FILE.jsonl and an --objective of {", ".join(objectives.PREFERENCES)}.')
  functions = functions_of(run)
  optimizer = training.training_optimizer(run)
  update = training.update_function(optimizer)
  step_of = lambda learner, step: train_step(run, functions, update, learner, step)
  held_out = lambda learner: evaluate(run, *functions[1:], learner)
  with training.opened(run, optimizer, MAY_CHANGE) as held:
    learner = held.learner
    if held.start is None:
      learner = learner._replace(reference=jax.tree.map(jnp.copy, learner.reference))
      held.writer.write({'stage': 'eval', 'step': 0} | held_out(learner))
    final = held_out(training.updates(run, held, learner, step_of, held_out, 'accuracy'))
  common.log(f'{train.objective} on {train.data_file}: {train.steps} updates of {train.prompts} pairs; of held-out '
             f'pairs {final["accuracy"]:.1%} have the larger margin on the chosen response.')
  row = common.provenance() | {
      'model': train.init or run.where.model, 'data_file': train.data_file, 'objective': train.objective,
      'mode': run.replay.mode, 'seed': train.seed, 'steps': train.steps, 'held_out': final}
  if run.where.out:
    common.append_row(run.where.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main, several=True)
