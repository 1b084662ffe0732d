"""How far cut gradients are from the exact one: over prompt length, stage of training, layer and kind of parameter.

    bash launch.sh fidelity --out=experiments/results/fidelity.jsonl

The same groups (a document, its question, the right answer and wrong ones, GRPO advantages) at
three stages of one model: random, warm (after the supervised warm-up), trained (after --steps of
GRPO). A row a stage, length and mode: relative L2 distance to the exact gradient and cosine, whole
and by layer and kind; the gradient is the mean over --documents. About 15 minutes.
"""
import dataclasses

import jax
import numpy as np

from branchreplay import batch, gradients, objectives, tasks
from branchreplay.advantages import group_advantages
from branchreplay.checks import check_mode
from experiments import common, rollouts, sampling, study, train, training


@dataclasses.dataclass(frozen=True)
class Study:
  lengths: tuple[str, ...] = ('256', '1024', '4096', '16384')  # tokens of the prompt
  modes: tuple[str, ...] = ('detached', 'depth=1', 'depth=4')  # what is set against exact
  stages: tuple[str, ...] = ('random', 'warm', 'trained')  # of the model
  documents: int = 8  # groups whose mean gradient is measured


def define(flags):
  training.define(flags)
  common.define_flags(flags, Study())
  for name, value in (('prompt_len', 512), ('steps', 150), ('segment_len', 128), ('eval_every', 50),
                      ('learning_rate', 2e-3), ('warmup_reward', 0.42), ('out', 'runs/fidelity.jsonl')):
    flags.set_default(name, value)


def group_of(run, replay, task: tasks.Task, index: int):
  """The group of one document: the right answer and other digits, and their advantages."""
  found = tasks.example(task, 'test', index, run.train.seed)
  right = int(found.answer[0])
  digits = [right] + [ord('0') + (right - ord('0') + i) % 10 for i in range(1, run.train.branches)]
  rewards = [float(d == right) for d in digits]
  return batch.make_group(run.model, replay, found.prompt, [[d, tasks.STOP_TOKEN] for d in digits],
                          advantages=group_advantages(rewards), dtype=run.dtype)


def distances(got: dict, want: dict) -> dict:
  """Relative L2 and cosine of two dicts of arrays, flattened together."""
  a, b = (np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in d.values()]) for d in (got, want))
  norms = np.linalg.norm(a), np.linalg.norm(b)
  return {'rel_l2': np.linalg.norm(a - b) / norms[1] if norms[1] else None,
          'cosine': a @ b / (norms[0] * norms[1]) if norms[0] and norms[1] else None}


def leaves(model, grads) -> dict[tuple[str, str], np.ndarray]:
  """(layer, kind) -> gradient: layers by number and kind of mixer, kinds by the parameter's name."""
  out = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
    names = [getattr(k, 'name', getattr(k, 'idx', None)) for k in path]
    if names[0] != 'blocks':
      out[names[0], names[0]] = np.asarray(leaf)
      continue
    place, kind = names[1], '.'.join(map(str, names[2:]))
    for r in range(model.repeats):
      layer = r * len(model.pattern) + place
      out[f'{layer} {model.pattern[place]}', f'{model.pattern[place]}.{kind}' if 'mixer' in kind else kind] = leaf[r]
  return out


def compare(model, got, exact) -> dict:
  """Distances of a gradient to the exact one: whole, by layer and by kind."""
  a, b = leaves(model, got), leaves(model, exact)
  by = lambda at: {name: distances(*({k: v for k, v in d.items() if k[at] == name} for d in (a, b)))
                   for name in dict.fromkeys(k[at] for k in b)}
  return distances(a, b) | {'by_layer': by(0), 'by_kind': by(1)}


def stages(run, names):
  """(stage, parameters on the mesh), in the order of training."""
  optimizer = training.training_optimizer(run)
  learner, sampler = training.make_learner(run, optimizer), sampling.held_out_sampler(run, run.replay.prefix_capacity)
  if 'random' in names:
    yield 'random', learner.params
  if 'warm' in names or 'trained' in names:
    learner = study.start_learner(run, optimizer, study.warm_start(run, sampler))
  if 'warm' in names:
    yield 'warm', learner.params
  if 'trained' in names:
    functions = rollouts.make_functions(run, optimizer, sampler)
    for step in range(run.train.steps):
      learner, row = train.train_step(run, functions, learner, step)
      if step % 10 == 0:
        common.log(f'training: update {step}/{run.train.steps}  sampled reward {row["reward"]:.3f}')
    yield 'trained', learner.params


def main(flags):
  settings = common.from_flags(flags, Study())
  lengths = common.whole_numbers('lengths', settings.lengths, 1)
  for mode in settings.modes:
    check_mode(mode)
  common.check_known('stage', settings.stages, ('random', 'warm', 'trained'))
  run = training.make_run(flags)
  objective = objectives.make_objective('grpo', run.objective)
  replay = dataclasses.replace(run.replay, prefix_capacity=max(lengths))
  functions, source = {}, common.provenance() | {'task': run.train.task, 'seed': run.train.seed,
                                                 'model': run.where.model, 'segment_len': replay.segment_len,
                                                 'documents': settings.documents}
  corpora = tasks.make_task(run.train.task, max(lengths)).corpora
  for stage, params in stages(run, settings.stages):
    for length in lengths:
      task = tasks.make_task(run.train.task, length, corpora)
      groups = batch.stack([group_of(run, replay, task, i) for i in range(settings.documents)])
      for mode in ('exact', *settings.modes):
        if mode not in functions:
          functions[mode] = gradients.gradient_function(
              run.mesh, run.model, dataclasses.replace(replay, mode=mode), objective, groups)
        grads = jax.device_get(functions[mode](params, groups).grads)
        if mode == 'exact':
          exact = grads
          continue
        row = source | {'stage': stage, 'prompt_len': length, 'mode': mode} | compare(run.model, grads, exact)
        common.append_row(run.where.out, row)
        common.emit({k: row[k] for k in ('stage', 'prompt_len', 'mode', 'rel_l2', 'cosine')})


if __name__ == '__main__':
  common.run(define, main)
