"""Trains a small language model by GRPO on long prompts, with the exact shared-prefix gradient.

    bash launch.sh                                        needle in real text
    bash launch.sh train --task=recall --steps=200        synthetic recall, the same on every machine
    bash launch.sh train --mode=detached                  LongStraw's gradient: stopped at the prompt
    bash launch.sh train --full_sequence                  plain autodiff on every full sequence

Seen: held-out reward 0.391 after the supervised warm-up, 0.738 after 360 updates; the goal is 0.9.
The work directory holds config.json, metrics.jsonl, checkpoints and reward.png; the same
command takes a stopped run up where its last checkpoint is, bit for bit.
"""
import dataclasses
import os
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from branchreplay import batch, checkpoint, config, gradients, mesh, metrics, model, objectives, sample, tasks
from branchreplay.advantages import branch_advantages
from branchreplay.config import ObjectiveConfig, ReplayConfig, TrainConfig, UserError
from experiments import common, plots

REPLAY = ReplayConfig(segment_len=512, branch_segment_len=8, prefix_capacity=0, branch_capacity=0,
                      replay_batch=8)
MAY_CHANGE = ('train.steps', 'train.eval_every', 'train.eval_prompts', 'train.eval_samples',
              'train.checkpoint_every')


def define(flags):
  for default in (TrainConfig(), REPLAY, ObjectiveConfig()):
    common.define_flags(flags, default, skip=('accumulate_dtype',))
  common.define_flags(flags, Where())


@dataclasses.dataclass(frozen=True)
class Where:
  model: str = 'tiny-hybrid'  # preset, see config.py
  workdir: str = 'runs/train'  # folder of the run; a stopped run in it is taken up
  data: int | None = None  # devices of the data axis: groups side by side; 4 of 8, 1 if fewer
  seq: int | None = None  # devices of the seq axis; the rest


class Run(NamedTuple):
  """What stays the same over a run: configurations, compiled functions, the optimizer."""
  where: Where
  model: Any
  train: TrainConfig
  replay: ReplayConfig
  objective: ObjectiveConfig
  mesh: Any
  dtype: Any
  shardings: Any  # of the parameters


class Learner(NamedTuple):
  """What changes: a tree of arrays, saved and restored whole."""
  params: Any
  opt_state: Any
  key: Any  # random key of the next update's rollouts


# ---------------------------------------------------------------- set-up


def fit_mesh(where: Where) -> Where:
  """Fills in the data axis: on small virtual devices groups side by side cost fewer collectives."""
  if where.data is None:
    return dataclasses.replace(where, data=4 if where.seq is None and jax.device_count() % 8 == 0 else 1)
  return where


def make_run(flags) -> Run:
  """Configurations from flags, checked against each other and the devices."""
  where, train = fit_mesh(common.from_flags(flags, Where())), common.from_flags(flags, TrainConfig())
  objective = common.from_flags(flags, ObjectiveConfig())
  replay = common.from_flags(flags, REPLAY, skip=('accumulate_dtype',))
  fitted = dict(prefix_capacity=replay.prefix_capacity or train.prompt_len,
                branch_capacity=replay.branch_capacity or max(train.max_new_tokens, tasks.BRANCH_LEN),
                accumulate_dtype='float64' if flags.dtype == 'float64' else 'float32')
  replay = dataclasses.replace(replay, **fitted)
  shape = config.preset(where.model)
  config.check_model(shape)
  config.check_objective(objective)
  config.check_train(train, where.data)
  mesh_ = mesh.make_mesh(where.data, where.seq)
  config.check_replay(replay, mesh_.shape[mesh.SEQ], train.branches)
  if train.prompt_len > replay.prefix_capacity + 1:
    raise UserError(f'prompt_len={train.prompt_len} is longer than the capacity of {replay.prefix_capacity + 1}; '
                    f'raise --prefix_capacity to {train.prompt_len} or leave it at 0 to fit.')
  if train.max_new_tokens > replay.branch_capacity:
    raise UserError(f'max_new_tokens={train.max_new_tokens} is more than branch_capacity='
                    f'{replay.branch_capacity}; raise --branch_capacity or leave it at 0 to fit.')
  specs = mesh.parameter_specs(model.shapes(shape), mesh_.shape[mesh.SEQ], replay.shard_params)
  return Run(where, shape, train, replay, objective, mesh_, jnp.dtype(flags.dtype), mesh.shardings(mesh_, specs))


def resolved(run: Run) -> dict:
  """The whole configuration, as config.json holds it."""
  parts = {name: dataclasses.asdict(getattr(run, name)) for name in ('model', 'train', 'replay', 'objective')}
  return parts | {'mesh': dict(run.mesh.shape), 'dtype': run.dtype.name, 'preset': run.where.model}


def make_optimizer(run: Run, learning_rate: float, ramp: int, decay: int = 0):
  """AdamW behind a clip; the rate rises over `ramp` updates and falls to a tenth at update `decay`."""
  schedule = optax.linear_schedule(0.0, learning_rate, ramp) if ramp else optax.constant_schedule(learning_rate)
  if decay > ramp:
    fall = optax.linear_schedule(learning_rate, learning_rate / 10, decay - ramp)
    schedule = optax.join_schedules([schedule, fall], [ramp])
  return optax.chain(optax.clip_by_global_norm(run.train.clip_norm),
                     optax.adamw(schedule, b2=0.99, weight_decay=run.train.weight_decay))


def make_learner(run: Run, optimizer) -> Learner:
  """Initial parameters, laid over the mesh where they belong."""
  init = lambda key: model.init(run.model, key, run.dtype)
  params = jax.jit(init, out_shardings=run.shardings)(jax.random.key(run.train.seed))
  return on_mesh(run, Learner(params, jax.jit(optimizer.init)(params), jax.random.key(run.train.seed + 1)))


def on_mesh(run: Run, tree):
  """Lays leaves that are not on all of the mesh over it, so that restored ones lie where parameters do."""
  whole = NamedSharding(run.mesh, PartitionSpec())
  return jax.tree.map(
      lambda x: x if x.sharding.device_set == whole.device_set else jax.device_put(x, whole), tree)


def update_function(optimizer):
  """Jitted (learner parts, gradient, loss) -> params, opt_state, gradient norm, whether finite.

  Neither parameters nor moments are touched by a gradient or a loss that is not finite.
  """
  def update(params, opt_state, grads, loss):
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
    updates, new_state = optimizer.update(safe, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return keep(new_params, params), keep(new_state, opt_state), norm, finite
  return jax.jit(update, donate_argnums=(0, 1))


add_gradients = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)


# ---------------------------------------------------------------- rollouts


def stack_prompts(replay: ReplayConfig, prompts) -> sample.Prompts:
  prefixes, lengths = zip(*(batch.make_prefix(replay, p) for p in prompts))
  return sample.Prompts(np.stack(prefixes), np.stack(lengths), np.array([p[-1] for p in prompts], np.int32))


def sampling_of(train: TrainConfig) -> sample.Sampling:
  return sample.Sampling(np.float32(train.temperature), np.float32(train.top_p), np.int32(tasks.STOP_TOKEN))


def rewards_of(examples, rollout) -> np.ndarray:
  """Rewards [N, G] of sampled tokens by exact match."""
  tokens, length = np.asarray(rollout.tokens), np.asarray(rollout.length)
  return np.array([[tasks.exact_match(e.prompt, tokens[i, g, :length[i, g]], e.answer)
                    for g in range(tokens.shape[1])] for i, e in enumerate(examples)])


def evaluator(run: Run, capacity: int):
  """(params, prompt_len) -> mean sampled reward on held-out prompts, any length up to capacity."""
  train, corpora = run.train, tasks.make_task(run.train.task, run.train.prompt_len).corpora
  replay = dataclasses.replace(run.replay, prefix_capacity=capacity)
  rows = run.mesh.shape[mesh.DATA]
  rollout = sample.rollout_function(run.mesh, run.model, replay, train.eval_samples, train.max_new_tokens,
                                    keep_captured=False)

  def evaluate(params, prompt_len):
    task = tasks.make_task(train.task, prompt_len, corpora)
    count = max(c for c in range(rows, min(train.eval_prompts, 8 * rows) + 1, rows) if train.eval_prompts % c == 0)
    rewards = []
    for first in range(0, train.eval_prompts, count):
      examples = [tasks.example(task, 'test', i, train.seed) for i in range(first, first + count)]
      keys = jax.random.split(jax.random.fold_in(jax.random.key(train.seed + 2), first), count)
      out, _ = rollout(params, stack_prompts(replay, [e.prompt for e in examples]), keys, sampling_of(train))
      rewards.append(rewards_of(examples, out))
    return float(np.mean(rewards))

  return evaluate


# ---------------------------------------------------------------- supervised warm-up


def warm_up(run: Run, evaluate, writer) -> Any:
  """Supervised updates on questions and answers, short documents first; returns parameters.

  A document's six questions are six branches of one prefix: the same engine with
  another objective. Each part ends at a sampled reward on held-out prompts.
  """
  train, started = run.train, time.monotonic()
  replay = dataclasses.replace(run.replay, segment_len=-(-train.warmup_len // run.mesh.shape[mesh.SEQ])
                               * run.mesh.shape[mesh.SEQ], mode='exact')
  objective = objectives.make_objective('nll', run.objective)
  optimizer = make_optimizer(run, train.warmup_learning_rate, 20)
  learner, update = make_learner(run, optimizer), update_function(optimizer)
  params, opt_state, cursor, gradient = learner.params, learner.opt_state, 0, None
  corpora = tasks.make_task(train.task, train.prompt_len).corpora
  parts = [(train.warmup_len, train.warmup_prompts, train.warmup_updates, train.warmup_short_reward, 10),
           (train.prompt_len, train.prompts, train.warmup_long_updates, train.warmup_reward, 2)]
  for length, prompts, updates, enough, every in parts:
    task, reward = tasks.make_task(train.task, length, corpora), None
    for i in range(updates):
      documents = [tasks.warmup_example(task, 'train', cursor + j, train.seed + 3) for j in range(prompts)]
      cursor += prompts
      groups = batch.stack([batch.make_group(
          run.model, replay, d.prompt, [b.tokens for b in d.branches], masks=[b.mask for b in d.branches],
          dtype=run.dtype) for d in documents])
      if gradient is None:
        gradient = gradients.gradient_function(run.mesh, run.model, replay, objective, groups)
      result = gradient(params, groups)
      loss = result.loss.mean()
      params, opt_state, _, _ = update(params, opt_state, result.grads, loss)
      if (i + 1) % every == 0:
        reward = evaluate(params, length)
        writer.write({'stage': 'warmup', 'step': 0, 'update': i + 1, 'prompt_len': length, 'loss': float(loss),
                      'reward': reward, 'seconds': time.monotonic() - started})
        common.log(f'warm-up, prompts of {length}: update {i + 1}/{updates}  loss {float(loss):.3f}  '
                   f'held-out reward {reward:.3f}')
        if reward >= enough:
          break
  return params


# ---------------------------------------------------------------- reinforcement learning


class Functions(NamedTuple):
  rollout: Any
  update: Any
  reference: Any  # parameters of the reference policy, or None
  compiled: dict  # gradient and score functions, made at first use


def batch_function(run: Run, functions: Functions, kind: str, groups):
  """The jitted function `kind` for groups of this shape: captured, fresh or score."""
  if kind not in functions.compiled:
    if kind == 'score':
      made = gradients.score_function(run.mesh, run.model, run.replay, groups)
    else:
      made = gradients.gradient_function(
          run.mesh, run.model, run.replay, objectives.make_objective(run.train.objective, run.objective), groups,
          full_sequence=run.train.full_sequence, with_captured=kind == 'captured')
    functions.compiled[kind] = made
  return functions.compiled[kind]


def one_round(run: Run, functions: Functions, params, examples, key, step: int):
  """Rollouts, rewards and the gradient of one dispatch of prompts.

  The capture that served the rollouts serves the gradient too: one prefix forward.
  Returns the Result, the groups (for further epochs), and rewards [N, G].
  """
  train = run.train
  prompts = [e.prompt for e in examples]
  rollout, captured = functions.rollout(params, stack_prompts(run.replay, prompts),
                                        jax.random.split(key, len(examples)), sampling_of(train))
  rewards = rewards_of(examples, rollout)
  tokens, length = np.asarray(rollout.tokens), np.asarray(rollout.length)
  groups = batch.stack([batch.make_group(
      run.model, run.replay, p, [tokens[i, g, :length[i, g]] for g in range(train.branches)],
      advantages=branch_advantages(train.objective, rewards[i], train.drop_nonfinite_rewards),
      dtype=run.dtype) for i, p in enumerate(prompts)])
  if functions.reference is not None:
    groups = groups.replace(ref_logprobs=np.zeros(groups.mask.shape, run.dtype))
    scores = batch_function(run, functions, 'score', groups)(functions.reference, groups)
    groups = groups.replace(ref_logprobs=np.asarray(scores.logprob))
  if train.full_sequence:
    return batch_function(run, functions, 'fresh', groups)(params, groups), groups, rewards
  return batch_function(run, functions, 'captured', groups)(params, groups, captured), groups, rewards


def train_step(run: Run, functions: Functions, learner: Learner, task, step: int):
  """One batch of rollouts and `inner_epochs` updates; returns the learner and a metrics row."""
  train = run.train
  started, (key, next_key) = time.monotonic(), jax.random.split(learner.key)
  params, opt_state = learner.params, learner.opt_state
  size = run.mesh.shape[mesh.DATA] * train.groups_at_once
  rounds, rewards, seen = [], [], []
  for first in range(0, train.prompts, size):
    examples = [tasks.example(task, 'train', step * train.prompts + first + i, train.seed) for i in range(size)]
    result, groups, reward = one_round(run, functions, params, examples, jax.random.fold_in(key, first), step)
    rounds.append(result.replace(grads=None))
    total = result.grads if first == 0 else add_gradients(total, result.grads)
    rewards.append(reward)
    seen.append(groups)
  mean = lambda name: float(np.mean([np.mean(r.metrics[name]) for r in rounds]))
  skipped = 0
  for epoch in range(train.inner_epochs):
    if epoch:
      total = None
      for i, groups in enumerate(seen):
        groups = groups.replace(old_logprobs=np.asarray(rounds[i].scores.logprob))
        again = batch_function(run, functions, 'fresh', groups)(params, groups)
        total = again.grads if total is None else add_gradients(total, again.grads)
    count = len(rounds)
    scaled = jax.tree.map(lambda g: g / count, total)
    loss = jnp.mean(jnp.stack([r.loss.mean() for r in rounds]))
    params, opt_state, norm, finite = functions.update(params, opt_state, scaled, loss)
    skipped += not bool(finite)
  tokens = int(sum(np.sum(g.length) for g in seen))
  prefix = int(sum(np.sum(g.prefix_length) for g in seen))
  row = {'stage': 'rl', 'step': step + 1, 'reward': float(np.mean(rewards)), 'loss': mean('loss'),
         'kl': mean('kl'), 'clipped': mean('clipped'), 'entropy': mean('entropy'), 'grad_norm': float(norm),
         'skipped': skipped, 'positions': (prefix + tokens) * train.inner_epochs,
         'positions_full_sequences': (prefix * train.branches + tokens) * train.inner_epochs,
         'seconds': time.monotonic() - started}
  return Learner(params, opt_state, next_key), row


def reinforce(run: Run, learner: Learner, optimizer, start: int, reference, writer, manager, evaluate):
  """All updates from `start` on; returns the learner."""
  train = run.train
  task = tasks.make_task(train.task, train.prompt_len)
  rollout = sample.rollout_function(run.mesh, run.model, run.replay, train.branches, train.max_new_tokens,
                                    keep_captured=not train.full_sequence)
  functions = Functions(rollout, update_function(optimizer), reference, {})
  with metrics.Progress(train.steps, start) as progress:
    for step in range(start, train.steps):
      learner, row = train_step(run, functions, learner, task, step)
      writer.write(row)
      progress.update(step + 1, row['positions'], row['reward'], row['loss'])
      if row['skipped'] and train.on_nonfinite == 'stop':
        raise UserError(f'the loss or gradient of update {step + 1} is not finite; the parameters are untouched: '
                        'lower --learning_rate, or go on past such updates with --on_nonfinite=skip.')
      last = step + 1 == train.steps
      if last or (step + 1) % train.eval_every == 0:
        writer.write({'stage': 'eval', 'step': step + 1, 'reward': evaluate(learner.params, train.prompt_len)})
      if last or (step + 1) % train.checkpoint_every == 0:
        checkpoint.save(manager, step + 1, learner._asdict(), {'next_example': (step + 1) * train.prompts})
  return learner


# ---------------------------------------------------------------- main


def main(flags):
  run = make_run(flags)
  train = run.train
  optimizer = make_optimizer(run, train.learning_rate, train.ramp_steps, train.decay_steps)
  task = tasks.make_task(train.task, train.prompt_len)  # fails early
  del task
  workdir = checkpoint.claim_workdir(run.where.workdir, resolved(run), MAY_CHANGE)
  evaluate = evaluator(run, 4 * run.replay.prefix_capacity)
  started = time.monotonic()
  with checkpoint.open_checkpoints(workdir) as manager:
    learner = make_learner(run, optimizer)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), learner._asdict())
    found = checkpoint.restore_latest(manager, target)
    start = found[0] if found else 0
    with metrics.JsonlWriter(workdir / 'metrics.jsonl', start) as writer:
      if found:
        learner = Learner(**found[1])
        common.log(f'{workdir}: going on after update {start}.')
      else:
        params = warm_up(run, evaluate, writer)
        writer.write({'stage': 'eval', 'step': 0, 'reward': evaluate(params, train.prompt_len)})
        learner = on_mesh(run, Learner(params, jax.jit(optimizer.init)(params), learner.key))
        checkpoint.save(manager, 0, learner._asdict(), {'next_example': 0})
      reference = None
      if run.objective.kl_coef:
        reference = jax.tree.map(jnp.copy, learner.params)
      learner = reinforce(run, learner, optimizer, start, reference, writer, manager, evaluate)
      finish(run, workdir, learner, evaluate, time.monotonic() - started)


def finish(run: Run, workdir, learner: Learner, evaluate, seconds: float) -> None:
  """Evaluates at 1x, 2x and 4x the trained length; figure, summary in words, one row."""
  train = run.train
  rows = plots.read_rows(workdir / 'metrics.jsonl')
  held_out = {f'{k}x': evaluate(learner.params, k * train.prompt_len) for k in (1, 2, 4)}
  before = next((r['reward'] for r in rows if r['stage'] == 'eval' and r['step'] == 0), None)
  updates = [r for r in rows if r['stage'] == 'rl']
  positions = sum(r['positions'] for r in updates)
  full = sum(r['positions_full_sequences'] for r in updates)
  figure = plots.training(workdir / 'reward.png', rows, train.branches)
  common.log(
      f'GRPO on {train.task}: {len(updates)} updates of {train.prompts} prompts of {train.prompt_len} positions, '
      f'{train.branches} branches each, on {run.mesh.size} devices, mode '
      f'{"full sequences" if train.full_sequence else run.replay.mode}.\n'
      f'Held-out reward {before:.3f} after the warm-up, {held_out["1x"]:.3f} now '
      f'({held_out["2x"]:.3f} at 2x and {held_out["4x"]:.3f} at 4x the trained length).\n'
      f'{positions:,} positions went through forward and backward; full sequences would take {full:,}, '
      f'{full / max(positions, 1):.1f} times as many.\nCurve: {figure}')
  common.emit(common.provenance() | {
      'task': train.task, 'mode': 'full' if train.full_sequence else run.replay.mode, 'seed': train.seed,
      'steps': train.steps, 'prompt_len': train.prompt_len, 'prompts': train.prompts, 'branches': train.branches,
      'reward_after_warmup': before, 'held_out_reward': held_out, 'positions': positions,
      'positions_full_sequences': full, 'seconds': seconds})


if __name__ == '__main__':
  common.run(define, main)
