"""What training scripts share: set-up from flags, the optimizer, the run's checkpoints.

`experiments/train.py` is the loop itself and reads top to bottom; `warmup.py` is what comes before it.
"""
import contextlib
import dataclasses
import io
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from branchreplay import accelerators, checkpoint, config, hf, lora, mesh, metrics, model, objectives, processes, tasks
from branchreplay.checks import check_model, check_objective, check_replay, check_train
from branchreplay.config import ObjectiveConfig, ReplayConfig, TrainConfig, UserError
from experiments import adapters, common, guards, sources

REPLAY = ReplayConfig(segment_len=512, branch_segment_len=8, prefix_capacity=0, branch_capacity=0,
                      replay_batch=8, keep='auto', attention='auto')
NO_ROWS = types.SimpleNamespace(write=lambda row: None)  # the writer of all processes but the first


def define(flags):
  for default in (TrainConfig(), REPLAY, ObjectiveConfig()):
    common.define_flags(flags, default, skip=('accumulate_dtype', 'block_len'))  # sampled branches are causal
  common.define_flags(flags, Where())


@dataclasses.dataclass(frozen=True)
class Where:
  model: str = 'tiny-hybrid'  # preset, see config.py
  workdir: str = 'runs/train'  # folder of the run; a stopped run in it is taken up
  data: int | None = None  # devices of the data axis: groups side by side; 4 of 8, 1 if fewer
  seq: int | None = None  # devices of the seq axis; the rest
  out: str = ''  # JSONL file to append the closing row to


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
  source: sources.Source  # of prompts and rewards
  attention: str  # which kernel attends, and why: a line that is said once the run is open


class Opened(NamedTuple):
  """A run's work directory while it is this process's."""
  workdir: Any
  manager: Any  # of checkpoints
  writer: Any  # of metrics rows
  stop: Any  # knows of SIGTERM, see `common.Stop`
  start: int | None  # updates done before; None: a new run
  learner: Any  # of the last checkpoint, or new


class Learner(NamedTuple):
  """What changes: a tree of arrays, all of it saved and restored but frozen parameters."""
  params: Any
  opt_state: Any
  key: Any  # random key of the next update's rollouts
  cursor: Any  # i32 [], the next training example
  reference: Any = None  # parameters of the reference policy, where a KL term needs them


# ---------------------------------------------------------------- set-up


def fit_mesh(where: Where) -> Where:
  """Fills in the data axis: on small virtual devices groups side by side cost fewer collectives."""
  if where.data is None:
    return dataclasses.replace(where, data=4 if where.seq is None and jax.device_count() % 8 == 0 else 1)
  return where


def make_run(flags, kind: str = 'answer') -> Run:
  """Configurations from flags, checked against each other and the devices.

  kind: what a record of --data_file has beside its prompt, see data.py.
  """
  where, train = fit_mesh(common.from_flags(flags, Where())), common.from_flags(flags, TrainConfig())
  objective = common.from_flags(flags, config.objective_preset(train.objective), only_given=True)
  replay = common.from_flags(flags, REPLAY, skip=('accumulate_dtype', 'block_len'))
  fitted = dict(prefix_capacity=replay.prefix_capacity or train.prompt_len,
                branch_capacity=replay.branch_capacity or max(train.max_new_tokens, tasks.BRANCH_LEN),
                accumulate_dtype='float64' if flags.dtype == 'float64' else 'float32')
  replay = dataclasses.replace(replay, **fitted)
  shape = hf.read_config(train.init) if train.init else config.preset(where.model)
  shape = dataclasses.replace(shape, critic=train.objective == 'ppo', lora_rank=train.lora_rank, lora_alpha=train.lora_alpha,
                              lora_targets=train.lora_targets)
  if train.lora_rank and not train.init:
    raise UserError('LoRA adapts a model that is trained already; name its checkpoint folder with --init.')
  check_model(shape)
  check_objective(objective)
  objectives.make_objective(train.objective, objective)
  if train.objective in objectives.PREFERENCES and train.branches < 2:
    raise UserError(f'{train.objective} compares branches; raise --branches from {train.branches} to 2 or more.')
  check_train(train, where.data)
  if train.offline and kind == 'pairs':
    raise UserError('preference pairs are ready-made already; leave --offline out.')
  if train.offline and objective.kl_coef and objective.kl_in == 'reward':
    raise UserError('ready-made responses come without a sampler\'s log-probs, which --kl_in=reward reads; use --kl_in=loss.')
  mesh_ = mesh.make_mesh(where.data, where.seq)
  check_replay(replay, mesh_.shape[mesh.SEQ], train.branches)
  replay = common.fit_keep(shape, replay, mesh_.shape[mesh.SEQ], flags.dtype, train.groups_at_once)
  said = []
  shape, replay = accelerators.settle(shape, replay, flags.dtype, mesh_.devices.flat[0], said.append)
  if train.prompt_len > replay.prefix_capacity + 1:
    raise UserError(f'prompt_len={train.prompt_len} is longer than the capacity of {replay.prefix_capacity + 1}; '
                    f'raise --prefix_capacity to {train.prompt_len} or leave it at 0 to fit.')
  if train.max_new_tokens > replay.branch_capacity:
    raise UserError(f'max_new_tokens={train.max_new_tokens} is more than branch_capacity='
                    f'{replay.branch_capacity}; raise --branch_capacity or leave it at 0 to fit.')
  specs = mesh.parameter_specs(model.shapes(shape), mesh_.shape[mesh.SEQ], replay.shard_params)
  if train.data_file:
    source = sources.of_file(train, sources.pick_tokenizer(train, shape.vocab_size),
                             'offline' if train.offline else kind)
  else:
    source = sources.of_task(train, train.prompt_len)
  return Run(where, shape, train, replay, objective, mesh_, jnp.dtype(flags.dtype), mesh.shardings(mesh_, specs), source,
             *said)


def resolved(run: Run) -> dict:
  """The whole configuration, as config.json holds it."""
  parts = {name: dataclasses.asdict(getattr(run, name)) for name in ('model', 'train', 'replay', 'objective')}
  return parts | {'mesh': dict(run.mesh.shape), 'dtype': run.dtype.name,
                  'preset': run.train.init or run.where.model}


@contextlib.contextmanager
def opened(run: Run, optimizer, may_change, **more):
  """Yields Opened: the run's work directory claimed (`more` joins its configuration), its learner restored or made.

  Of several processes the first claims it and writes the rows; all of them write checkpoints.
  """
  workdir = processes.from_first(lambda: checkpoint.claim_workdir(run.where.workdir, resolved(run) | more, may_change))
  if not all(processes.from_all((workdir / 'config.json').exists())):
    raise UserError(f'{workdir} is not the same folder on all hosts; give a --workdir that they share.')
  first = processes.is_first()
  with (checkpoint.only_writer(workdir) if first else contextlib.nullcontext(),
        checkpoint.open_checkpoints(workdir) as manager,
        common.sigterm('stopped before the first update; the same command begins anew, or where its checkpoint is.') as stop):
    start, learner = restore(run, manager, make_learner(run, optimizer))
    with metrics.JsonlWriter(workdir / 'metrics.jsonl', start or 0) if first else contextlib.nullcontext(NO_ROWS) as writer:
      common.log(run.attention)
      writer.write({'stage': 'start', 'step': start or 0} | common.provenance())
      yield Opened(workdir, manager, writer, stop, start, learner)


def updates(run: Run, held: 'Opened', learner: Learner, step_of, evaluate, shown: str) -> Learner:
  """step_of(learner, step) -> (learner, row) for every update left, with evaluations and checkpoints on the way.

  evaluate(learner) -> dict of an evaluation's row. shown: the value of a row that progress shows.
  Raises Stopped, with all saved, once a stop is asked for.
  """
  train, start = run.train, held.start or 0
  held.stop.save_first()
  with show_progress(train.steps, start) as progress:
    for step in range(start, train.steps):
      learner, row = step_of(learner, step)
      held.writer.write(row)
      progress.update(step + 1, row['positions'], row[shown], row['loss'])
      last = step + 1 == train.steps
      if last or (step + 1) % train.eval_every == 0:
        held.writer.write({'stage': 'eval', 'step': step + 1} | evaluate(learner))
      if not last and processes.from_all(held.stop.asked).any():
        save_and_stop(run, held.manager, step + 1, learner)
      if last or (step + 1) % train.checkpoint_every == 0:
        save(run, held.manager, step + 1, learner)
  return learner


def show_progress(steps: int, start: int) -> metrics.Progress:
  """Progress for people; of several processes the first shows it."""
  return metrics.Progress(steps, start, stream=None if processes.is_first() else io.StringIO())


def make_optimizer(run: Run, learning_rate: float, ramp: int, decay_start: int = 0, decay: int = 0):
  """AdamW behind a clip; the rate rises over `ramp` updates and falls to a tenth over `decay` from `decay_start`."""
  schedule = optax.linear_schedule(0.0, learning_rate, ramp) if ramp else optax.constant_schedule(learning_rate)
  if decay:
    fall = optax.linear_schedule(learning_rate, learning_rate / 10, decay)
    schedule = optax.join_schedules([schedule, fall], [max(ramp, decay_start)])
  inner = optax.chain(optax.clip_by_global_norm(run.train.clip_norm),
                      optax.adamw(schedule, b2=0.99, weight_decay=run.train.weight_decay))
  free = lambda params: lora.trainable(run.model, params)  # frozen leaves have no moments
  return optax.GradientTransformation(lambda params: inner.init(free(params)),
                                      lambda grads, state, params: inner.update(grads, state, free(params)))


def training_optimizer(run: Run):
  """The optimizer of what follows the warm-up, as the flags say."""
  t = run.train
  optimizer = make_optimizer(run, t.learning_rate, t.ramp_steps, t.decay_start, t.decay_steps)
  return guards.skip_spikes(optimizer, t.spike_factor) if t.spike_factor else optimizer


def restore(run: Run, manager, learner: Learner) -> tuple[int | None, Learner]:
  """(step, learner) of the last checkpoint, laid out as `learner` is; (None, learner) without one."""
  state = learner._asdict() | {'params': lora.trainable(run.model, learner.params)}
  target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  found = checkpoint.restore_latest(manager, target, common.log)
  if found is None:
    return None, learner
  step, state, meta = found
  params = adapters.rejoined(run.model, state['params'], meta, learner.params, run.train.init)
  common.log(f'{run.where.workdir}: going on after update {step}.')
  return step, Learner(**state | {'params': params})


def save(run: Run, manager, step: int, learner: Learner) -> bool:
  """Saves the learner; False, and a sentence, where the disk refuses: earlier checkpoints are kept.

  UserError instead where one of several processes is refused: the others cannot know.
  """
  try:
    state = learner._asdict() | {'params': lora.trainable(run.model, learner.params)}
    checkpoint.save(manager, step, state, adapters.mark(run.model, learner.params))
    return True
  except checkpoint.NotSaved as error:
    if jax.process_count() > 1:
      raise UserError(f'{error}; the last checkpoint is kept: make room, and give the same command again.')
    common.log(f'{error}; the last checkpoint is kept: make room before the next.')
    return False


def save_and_stop(run: Run, manager, step: int, learner: Learner):
  """Saves and raises Stopped, with a sentence on where the same command goes on."""
  where = 'which is saved; the same command goes on from there' if save(run, manager, step, learner) else (
      'which is not saved; the same command goes on from the last checkpoint')
  raise common.Stopped(f'stopped after update {step}, {where}.')


def needs_reference(run: Run) -> bool:
  """Whether the objective reads a reference policy: the warm-up's parameters."""
  return bool(run.objective.kl_coef) or run.train.objective in objectives.NEEDS_REFERENCE


def keeps_reference(run: Run) -> bool:
  """Whether the reference policy is a second copy of parameters; with LoRA it is the model with its adapters off."""
  return needs_reference(run) and not run.train.lora_rank


def reference_of(run: Run, learner: Learner):
  """Parameters of the reference policy; None where the objective reads none."""
  return lora.off(learner.params) if needs_reference(run) and run.train.lora_rank else learner.reference


def make_learner(run: Run, optimizer) -> Learner:
  """Initial parameters, or those of --init, laid over the mesh where they belong."""
  if run.train.init:
    params = hf.load(run.train.init, run.model, run.mesh, run.replay, run.dtype)
  else:
    init = jax.jit(model.init, static_argnums=(0, 2), out_shardings=run.shardings)  # not of a lambda, which would compile anew
    params = init(run.model, jax.random.key(run.train.seed), run.dtype)
  reference = params if keeps_reference(run) else None
  return on_mesh(run, Learner(params, jax.jit(optimizer.init)(params), jax.random.key(run.train.seed + 1),
                              jnp.int32(0), reference))


def on_mesh(run: Run, tree):
  """Lays leaves that are not on all of the mesh over it, so that restored ones lie where parameters do."""
  whole = NamedSharding(run.mesh, PartitionSpec())
  lay = jax.jit(lambda x: x, out_shardings=whole)  # device_put lays no key over several processes
  return jax.tree.map(lambda x: x if x.sharding.device_set == whole.device_set else lay(x), tree)


def update_function(optimizer):
  """Jitted (params, opt_state, gradient, loss, weight=1) -> params, opt_state, gradient norm, whether it was taken.

  weight: the gradient is scaled by it. Neither parameters nor moments are touched by
  a gradient or a loss that is not finite, nor by a spike where the optimizer guards against it.
  """
  def update(params, opt_state, grads, loss, weight=1.0):
    grads = jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
    updates, new_state = optimizer.update(safe, opt_state, params)
    new_params = jax.tree.map(lambda p, u: p if u is None else p + u.astype(p.dtype), params, updates)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return keep(new_params, params), keep(new_state, opt_state), norm, finite & ~guards.spiked(new_state)
  return jax.jit(update, donate_argnums=(0, 1))
