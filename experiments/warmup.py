"""The supervised warm-up that a run from scratch begins with."""
import dataclasses
import time
from typing import Any

from branchreplay import batch, gradients, mesh, objectives, tasks
from branchreplay.config import ObjectiveConfig
from experiments import common, training


def warm_up(run: training.Run, evaluate, writer) -> Any:
  """Supervised updates on questions and answers, short documents first; returns parameters.

  A document's six questions are six branches of one prefix: the same engine with
  another objective. It ends at a sampled reward on held-out prompts of `prompt_len`.
  """
  train, started = run.train, time.monotonic()
  replay = dataclasses.replace(run.replay, segment_len=-(-train.warmup_len // run.mesh.shape[mesh.SEQ])
                               * run.mesh.shape[mesh.SEQ], mode='exact')
  objective = objectives.make_objective('nll', ObjectiveConfig())
  optimizer = training.make_optimizer(run, train.warmup_learning_rate, 20)
  learner, update = training.make_learner(run, optimizer), training.update_function(optimizer)
  params, opt_state, cursor, gradient, loss = learner.params, learner.opt_state, 0, None, None
  corpora = tasks.make_task(train.task, train.prompt_len).corpora
  parts = [(train.warmup_len, train.warmup_prompts, train.warmup_updates),
           (train.prompt_len, train.prompts, train.warmup_long_updates)]
  reward = 0.0
  for length, prompts, updates in parts:
    task = tasks.make_task(train.task, length, corpora)
    for i in range(updates + 1):
      if i % (10 if reward < 0.5 * train.warmup_reward else 2) == 0:  # it rises late and steeply
        reward = evaluate(params, train.prompt_len)
        writer.write({'stage': 'warmup', 'step': 0, 'update': i, 'prompt_len': length, 'loss': loss, 'reward': reward,
                      'seconds': time.monotonic() - started})
        common.log(f'warm-up on prompts of {length}: update {i}/{updates}'
                   + (f'  loss {loss:.3f}' if loss is not None else '') + f'  held-out reward {reward:.3f} at {train.prompt_len}')
        if reward >= train.warmup_reward:
          return params
      if i == updates:
        break
      documents = [tasks.warmup_example(task, 'train', cursor + j, train.seed + 3) for j in range(prompts)]
      cursor += prompts
      groups = batch.stack([batch.make_group(
          run.model, replay, d.prompt, [b.tokens for b in d.branches], masks=[b.mask for b in d.branches],
          dtype=run.dtype) for d in documents])
      if gradient is None:
        gradient = gradients.gradient_function(run.mesh, run.model, replay, objective, groups)
      result = gradient(params, groups)
      params, opt_state, _, _ = update(params, opt_state, result.grads, result.loss.mean())
      loss = float(result.loss.mean())
  return params
