"""Trains a small language model by GRPO on long prompts, with the exact shared-prefix gradient.

    bash launch.sh                                        needle in real text
    bash launch.sh train --task=recall --steps=200        synthetic recall, the same on every machine
    bash launch.sh train --mode=detached                  LongStraw's gradient: stopped at the prompt
    bash launch.sh train --full_sequence                  plain autodiff on every full sequence

Seen in 3 minutes on 2 cores: held-out reward 0.67 after the supervised warm-up, 0.98 after 300 updates. (With
--warmup_reward=0.42 it ends between 0.57 and 0.96 by the seed, often sure of wrong answers.)
A prompt is answered 32 times and the 8 answers whose rewards differ most are trained on (--samples); prompts
whose rewards are all equal are passed over (--resample). SIGTERM saves first and exits 0.
The work directory holds config.json, metrics.jsonl, checkpoints and reward.png; the same
command takes a stopped run up where its last checkpoint is, bit for bit.
"""
import time
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchreplay import mesh, objectives, processes
from branchreplay.config import UserError
from experiments import common, guards, plots, rollouts, sampling, training, warmup
from experiments.refresh import Kept, refresh
from experiments.training import Learner, Run

MAY_CHANGE = ('train.steps', 'train.eval_every', 'train.eval_prompts', 'train.eval_samples',
              'train.checkpoint_every', 'train.on_nonfinite', 'train.stream', 'train.save_steps')

add_gradients = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)


define = training.define


def batch_weight(run: Run, batches: list[rollouts.Batch]) -> float:
  """What the sum of the dispatches' gradients is scaled by: to the mean over what counts.

  A dispatch's gradient is the mean over its N groups. With dynamic sampling groups of
  equal rewards count as little as their tokens do.
  """
  groups = sum(len(data.rewards) for data in batches)
  counts = [rollouts.informative(data) if run.train.resample else np.ones(len(data.rewards), bool) for data in batches]
  if run.train.objective in objectives.BATCH_MEANS:
    count = sum(np.sum(data.groups.mask * c[:, None, None]) for data, c in zip(batches, counts))
  else:
    count = sum(c.sum() for c in counts)
  return float(groups / len(batches) / max(count, 1))


class Sampled(NamedTuple):
  """What a step's rollouts gave: batches to train on, and what was seen on the way."""
  batches: list[rollouts.Batch]
  results: list  # of the batches, without gradients, where they are had from the rollouts' own captures
  total: Any  # the summed gradient, or None
  pool: list[rollouts.Batch]  # all dispatches


def sample_batches(run: Run, functions: rollouts.Functions, learner: Learner, key) -> Sampled:
  """Samples `prompts` groups; with `resample`, goes on until as many are informative."""
  train, pool, results, total = run.train, [], [], None
  size = run.mesh.shape[mesh.DATA] * train.groups_at_once
  least = train.prompts // size
  while len(pool) < least or (len(pool) < least + train.resample
                              and sum(rollouts.informative(data).sum() for data in pool) < train.prompts):
    first = int(learner.cursor) + len(pool) * size
    examples = [run.source.example('train', first + i) for i in range(size)]
    data = rollouts.roll_out(run, functions, learner, examples, jax.random.fold_in(key, len(pool)))
    if not rollouts.samples_first(train):
      result, total = add_gradient(run, functions, learner.params, data, total)
      results.append(result)
    pool.append(data._replace(captured=None))
  batches = rollouts.choose(pool, size, train.prompts) if train.resample else pool
  return Sampled(batches, results, total, pool)


def add_gradient(run: Run, functions: rollouts.Functions, params, data: rollouts.Batch, total):
  """Result without its gradient, and total (or None) plus the gradient."""
  if data.captured is None:
    result = rollouts.batch_function(run, functions, 'fresh', data.groups)(params, data.groups)
  else:
    result = rollouts.batch_function(run, functions, 'captured', data.groups)(params, data.groups, data.captured)
  total = result.grads if total is None else add_gradients(total, result.grads)
  return result.replace(grads=None), total


def train_step(run: Run, functions: rollouts.Functions, learner: Learner, step: int):
  """Rollouts and `inner_epochs` updates on them; returns the learner and a metrics row."""
  train, started = run.train, time.monotonic()
  key, next_key = jax.random.split(learner.key)
  batches, results, total, pool = sample_batches(run, functions, learner, key)
  params, opt_state, weight, skipped = learner.params, learner.opt_state, batch_weight(run, batches), 0
  if train.objective == 'ppo':
    batches = rollouts.with_critic(run, functions, params, batches)
  kept, drifts, epochs = Kept([]), [], 0
  for epoch in range(train.inner_epochs):
    if epoch and batches[0].groups.old_logprobs is None:
      batches = [data._replace(groups=data.groups.replace(old_logprobs=processes.fetch(r.scores.logprob)))
                 for data, r in zip(batches, results)]
    if total is None:
      results = []
      if train.refresh_every > 1:
        kept = refresh(kept, params, [data.groups for data in batches], train.refresh_every, train.drift_bound,
                       *rollouts.capture_and_score(run, functions))
        batches = [data._replace(captured=c) for data, c in zip(batches, kept.captured)]
        drifts.append(kept.drift)
      for data in batches:
        result, total = add_gradient(run, functions, params, data, total)
        results.append(result)
    passes = epoch + 1
    if epoch and train.max_policy_kl and guards.moved([data.groups for data in batches], results) > train.max_policy_kl:
      break
    epochs += 1
    loss = jnp.mean(jnp.stack([r.loss.mean() for r in results]))
    params, opt_state, norm, taken = functions.update(params, opt_state, total, loss, weight)
    total, skipped = None, skipped + (not bool(taken))
  total_of = lambda count: int(sum(count(data) for data in pool))
  row = {'stage': 'rl', 'step': step + 1, 'reward': float(np.nanmean([data.rewards for data in pool])),
         **{name: float(np.mean([np.mean(r.metrics[name]) for r in results])) for name in results[0].metrics},
         **({'state_drift': max(drifts)} if drifts else {}), 'grad_norm': float(norm), 'skipped': skipped, 'epochs': epochs,
         'cut_prompts': total_of(lambda data: data.cut),
         'informative': total_of(lambda data: rollouts.informative(data).sum()), **positions(train, batches, passes),
         'sampled_crc': zlib.crc32(b''.join(data.groups.targets.tobytes() for data in pool)),
         'positions_sampled': total_of(lambda data: data.groups.prefix_length.sum() + data.tokens),
         'seconds': time.monotonic() - started}
  return learner._replace(params=params, opt_state=opt_state, key=next_key,
                          cursor=learner.cursor + total_of(lambda data: len(data.rewards))), row


def positions(train, batches: list[rollouts.Batch], passes: int) -> dict:
  """Positions that went through forward and backward, `passes` times, and those of full sequences.

  Rollouts go forward besides, also those of groups that dynamic sampling leaves out
  (`positions_sampled`).
  """
  tokens = int(sum(data.groups.length.sum() for data in batches)) * passes
  prefix = int(sum(data.groups.prefix_length.sum() for data in batches)) * passes
  return {'positions': prefix + tokens, 'positions_full_sequences': prefix * train.branches + tokens}


def reinforce(run: Run, functions: rollouts.Functions, learner: Learner, start: int, writer, manager, evaluate, stop):
  """All updates from `start` on; returns the learner. Raises Stopped, with all saved, once `stop.asked`."""
  train = run.train
  with training.show_progress(train.steps, start) as progress:
    for step in range(start, train.steps):
      before = learner
      try:
        learner, row = train_step(run, functions, learner, step)
        if row['skipped'] and train.on_nonfinite == 'stop' and not np.isfinite([row['loss'], row['grad_norm']]).all():
          raise UserError(f'the loss or gradient of update {step + 1} is not finite: '
                          'go on past it, from the last checkpoint, with --on_nonfinite=skip, or start anew in another --workdir with a lower '
                          '--learning_rate.')
      except UserError:  # also a reward function's; the parameters are those of before
        training.save(run, manager, step, learner._replace(key=before.key, cursor=before.cursor))
        raise
      writer.write(row)
      progress.update(step + 1, row['positions'], row['reward'], row['loss'])
      last = step + 1 == train.steps
      if last or (step + 1) % train.eval_every == 0:
        writer.write({'stage': 'eval', 'step': step + 1, 'reward': evaluate(learner.params, train.prompt_len)})
      if not last and processes.from_all(stop.asked).any():
        training.save_and_stop(run, manager, step + 1, learner)
      if last or (step + 1) % train.checkpoint_every == 0:
        training.save(run, manager, step + 1, learner)
  return learner


def main(flags):
  run = training.make_run(flags)
  train = run.train
  optimizer = training.training_optimizer(run)
  sampler = sampling.held_out_sampler(run, (1 if train.data_file else 4) * run.replay.prefix_capacity)
  evaluate, functions = sampling.evaluator(run, sampler), rollouts.make_functions(run, optimizer, sampler)
  started = time.monotonic()
  with training.opened(run, optimizer, MAY_CHANGE) as held:
    start, learner = held.start, held.learner
    if start is None:
      start = 0
      if train.data_file or train.init:  # a warm-up is for the tasks, from scratch
        params = learner.params
      else:
        params = warmup.warm_up(run, evaluate, held.writer)
      held.writer.write({'stage': 'eval', 'step': 0, 'reward': evaluate(params, train.prompt_len)})
      reference = jax.tree.map(jnp.copy, params) if training.keeps_reference(run) else None
      learner = training.on_mesh(run, learner._replace(
          params=params, opt_state=jax.jit(optimizer.init)(params), reference=reference))
      training.save(run, held.manager, 0, learner)
    held.stop.save_first()
    learner = reinforce(run, functions, learner, start, held.writer, held.manager, evaluate, held.stop)
    finish(run, held.workdir, learner, evaluate, time.monotonic() - started)


def finish(run: Run, workdir, learner: Learner, evaluate, seconds: float) -> None:
  """Evaluates at 1x, 2x and 4x the trained length; figure, summary in words, one row."""
  train = run.train
  held_out = {f'{k}x': evaluate(learner.params, k * train.prompt_len)
              for k in ((1,) if train.data_file else (1, 2, 4))}
  if not processes.is_first():
    return
  rows = plots.read_rows(workdir / 'metrics.jsonl')
  before = next((r['reward'] for r in rows if r['stage'] == 'eval' and r['step'] == 0), None)
  updates = [r for r in rows if r['stage'] == 'rl']
  positions = sum(r['positions'] for r in updates)
  full = sum(r['positions_full_sequences'] for r in updates)
  mode = 'full sequences' if train.full_sequence else run.replay.mode
  figure = plots.training(workdir / 'reward.png', rows, train.branches)
  common.log(
      f'{train.objective} on {train.data_file or train.task}: {len(updates)} updates of {train.prompts} prompts of '
      f'{train.prompt_len} positions, {train.branches} branches each, on {run.mesh.size} devices, mode {mode}.\n'
      f'Held-out reward {before:.3f} {"before" if train.data_file else "after the warm-up"}, now '
      + ', '.join(f'{r:.3f} at {k} the trained length' for k, r in held_out.items()) + '.\n'
      f'{positions:,} positions went through forward and backward; full sequences would take {full:,}, '
      f'{full / max(positions, 1):.1f} times as many.\nCurve: {figure}')
  row = common.provenance() | {
      'model': train.init or run.where.model, 'task': train.data_file or train.task, 'objective': train.objective,
      'mode': mode, 'seed': train.seed, 'mesh': dict(run.mesh.shape), 'steps': train.steps, 'prompt_len': train.prompt_len, 'prompts': train.prompts, 'branches': train.branches,
      'reward_after_warmup': before, 'held_out_reward': held_out, 'positions': positions,
      'positions_full_sequences': full, 'first_update_s': updates[0]['seconds'] if updates else None, 'seconds': seconds}
  if run.where.out:
    common.append_row(run.where.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main, several=True)
