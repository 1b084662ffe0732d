"""Trains an agent of two turns on trees of trajectories: it opens a page, reads it, and answers.

    bash launch.sh train_tree                            pages of real text
    bash launch.sh train_tree --data_file=FILE.jsonl     ready-made trajectories of any number of turns

The prompt is a document with six facts #K=d and a question; the digit is the page to open. The tool returns
that page, which hides another fact and asks for it. --branches calls are sampled from the captured prompt,
--answers answers forked from the state behind each page; their trajectories are merged into a tree and every
distinct token is paid once. Advantages are taken a turn at a time. A record of --data_file is a tree,
{"trajectories": [{"messages": [{"role", "content"}, ...], "reward": number}, ...]} or nested (data.py); what role
assistant says is trained, tool results and others are not; --prefix_capacity (else --prompt_len) is to hold the
longest trajectory, whole segments for each of its nodes. A stopped run is taken up where its last checkpoint is.
"""
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from branchreplay import objectives, processes, sample, tasks, tree, trie, turns
from branchreplay.config import UserError
from branchreplay.turns import Trajectory
from experiments import common, plots, sampling, training, warmup
from experiments.training import Learner, Run

TURN_WISE = ('reinforce', 'grpo', 'dr_grpo')  # objectives that take an advantage for each token
MAY_CHANGE = ('train.steps', 'train.eval_every', 'train.eval_prompts', 'train.checkpoint_every')


@dataclasses.dataclass(frozen=True)
class Trees:
  answers: int = 4  # answers forked behind each page
  page_len: int = 48  # tokens of a page and its question
  segments: int = 256  # with data_file: segments of the largest tree


class Functions(NamedTuple):
  calls: Any  # rollouts of the first turn
  answers: Any  # of the second, forked behind the pages
  update: Any
  gradient: Any  # of stacked trees


def define(flags):
  training.define(flags)
  common.define_flags(flags, Trees())
  for name, value in (('workdir', 'runs/train_tree'), ('prompt_len', 256), ('segment_len', 32), ('samples', 0),
                      ('steps', 200), ('learning_rate', 2e-3), ('warmup_reward', 0.42), ('decay_start', 150), ('decay_steps', 50)):
    flags.set_default(name, value)


def segments_for(run: Run, length: int) -> int:
  return -(-length // run.replay.segment_len)


def fitted(run: Run, settings: Trees, branch_capacity: int) -> Run:
  """The run with room for the longest path of a tree (prefix_capacity) and for a response's tokens (branch_capacity; 0: fit)."""
  train, path = run.train, run.replay.prefix_capacity
  if train.data_file:
    columns = branch_capacity or path
  else:  # the prompt, a node for each token of both turns, the page
    nodes = segments_for(run, train.prompt_len) + segments_for(run, settings.page_len + train.max_new_tokens)
    path = max(path, (nodes + 2 * train.max_new_tokens) * run.replay.segment_len)
    columns = max(branch_capacity, settings.page_len + 2 * train.max_new_tokens)
  wide = -(-columns // run.replay.branch_segment_len) * run.replay.branch_segment_len
  return run._replace(replay=dataclasses.replace(run.replay, prefix_capacity=path, branch_capacity=wide))


# ---------------------------------------------------------------- rollouts


def sample_lookups(run: Run, settings: Trees, functions: Functions, params, lookups, key):
  """Trajectories [N][G] of responses to N lookups, G = branches x answers, and their rewards [N, G]."""
  count, calls_each = len(lookups), run.train.branches
  keys = jax.random.split(key, 2 * count).reshape(2, count)
  rollout, captured = functions.calls(params, sampling.stack_prompts(run.replay, [x.prompt for x in lookups]), keys[0],
                                         sampling.sampling_of(run))
  tokens, length = processes.fetch((rollout.tokens, rollout.length))
  calls = [[tokens[n, c, :length[n, c]] for c in range(calls_each)] for n in range(count)]
  pages = [[tasks.open_page(x, call) for call in row] for x, row in zip(lookups, calls)]
  forked = functions.answers(params, captured, forks_of(run, settings, lookups, calls, pages),
                             jax.vmap(lambda k: jax.random.split(k, calls_each))(keys[1]), sampling.sampling_of(run))
  tokens, length = processes.fetch((forked.tokens, forked.length))
  found, rewards = [], []
  for n, x in enumerate(lookups):
    row, score = [], []
    for c, (call, page) in enumerate(zip(calls[n], pages[n])):
      for k in range(settings.answers):
        answer = tokens[n, c, k, :length[n, c, k]] if page.size else page
        row.append(Trajectory(np.concatenate([call, page, answer]), np.concatenate(
            [np.ones(call.size), np.zeros(page.size), np.ones(answer.size)])))
        score.append(tasks.exact_match(x.prompt, answer, x.answer) if page.size else 0.0)
    found.append(row)
    rewards.append(score)
  return found, np.array(rewards)


def forks_of(run: Run, settings: Trees, lookups, calls, pages) -> sample.Forks:
  """The nodes behind each call: the call and its page; of a call that opens nothing, one token that is not used."""
  size = run.replay.segment_len
  room = segments_for(run, settings.page_len + run.train.max_new_tokens) * size
  tokens = np.zeros((len(lookups), len(calls[0]), room), np.int32)
  length, last = np.zeros((2, *tokens.shape[:2]), np.int32)
  for n, x in enumerate(lookups):
    for c, (call, page) in enumerate(zip(calls[n], pages[n])):
      node = np.concatenate([x.prompt[-1:], call, page]) if page.size else x.prompt[-1:]
      length[n, c], last[n, c] = node.size - 1, node[-1]
      tokens[n, c, :node.size - 1] = node[:-1]
  start = np.array([x.prompt.size - 1 for x in lookups], np.int32)
  return sample.Forks(tokens.reshape(*tokens.shape[:2], -1, size), length, start, last)


def make_trees(run: Run, settings: Trees, prompts, trajectories, rewards) -> trie.Tree:
  """Stacked trees of N x G trajectories, each with its turns' advantages; a record's missing ones are empty."""
  train, replay = run.train, run.replay
  if train.data_file:
    segments, levels = settings.segments, replay.prefix_segments
  else:
    segments = replay.prefix_segments + train.branches * (replay.prefix_segments + settings.answers * train.max_new_tokens)
    levels = 1 + 2 * train.max_new_tokens
  made = []
  for prompt, row, reward in zip(prompts, trajectories, rewards):
    more = [np.zeros(0, np.int32)] * (width(run, settings) - len(row))
    made.append(trie.make_tree(
        run.model, replay, prompt, [t.tokens for t in row] + more, masks=[t.mask for t in row] + more,
        advantages=turns.turn_advantages(row, reward) + more, dtype=run.dtype, segments=segments, levels=levels))
  return jax.tree.map(lambda *x: np.stack(x), *made)


def width(run: Run, settings: Trees) -> int:
  """Trajectories of a tree."""
  return run.train.branches if run.train.data_file else run.train.branches * settings.answers


def gather_trees(run: Run, settings: Trees, functions: Functions, task, params, split: str, first: int, count: int, key):
  """(stacked trees, rewards, a list of [G]) of examples first, first + 1, ...: sampled, or a record's."""
  if run.train.data_file:
    records = [run.source.example(split, first + i) for i in range(count)]
    for r in records:
      if len(r.answer[1]) > run.train.branches:
        raise UserError(f'{r.where}: {len(r.answer[1])} trajectories, and --branches={run.train.branches}; raise it.')
    prompts, trajectories = zip(*(turns.split_prompt(r.answer[0]) for r in records))
    rewards = [r.answer[1] for r in records]
  else:
    lookups = [tasks.lookup_example(task, split, first + i, run.train.seed, settings.page_len) for i in range(count)]
    prompts = [x.prompt for x in lookups]
    trajectories, rewards = sample_lookups(run, settings, functions, params, lookups, key)
  return make_trees(run, settings, prompts, trajectories, rewards), rewards


# ---------------------------------------------------------------- training


def make_functions(run: Run, settings: Trees, optimizer) -> Functions:
  """The jitted functions; every tree of the run has the shapes of the empty ones here."""
  train = run.train
  empty = make_trees(run, settings, [np.zeros(1, np.int32)], [[]], [[]])
  objective = objectives.make_objective(train.objective, run.objective)
  calls = sample.rollout_function(run.mesh, run.model, run.replay, train.branches, train.max_new_tokens, keep_captured=True)
  answers = sample.fork_function(run.mesh, run.model, run.replay, settings.answers, train.max_new_tokens)
  return Functions(calls, answers, training.update_function(optimizer),
                   tree.tree_function(run.mesh, run.model, run.replay, objective, empty))


def train_step(run: Run, settings: Trees, functions: Functions, task, learner: Learner, step: int):
  """One update on `prompts` trees; returns the learner and a metrics row."""
  started, (key, next_key) = time.monotonic(), jax.random.split(learner.key)
  trees, rewards = gather_trees(run, settings, functions, task, learner.params, 'train', int(learner.cursor),
                                run.train.prompts, key)
  result = functions.gradient(learner.params, trees)
  params, opt_state, norm, taken = functions.update(learner.params, learner.opt_state, result.grads, result.loss.mean())
  linear = trees.group.prefix_length[:, None] + trees.group.length
  row = {'stage': 'rl', 'step': step + 1, 'reward': float(np.mean([np.mean(r) for r in rewards])),
         **{k: float(np.mean(v)) for k, v in result.metrics.items()}, 'grad_norm': float(norm), 'skipped': int(not taken),
         'positions': int(trees.length.sum()), 'positions_full_sequences': int((linear * (trees.group.length > 0)).sum()),
         'seconds': time.monotonic() - started}
  return learner._replace(params=params, opt_state=opt_state, key=next_key, cursor=learner.cursor + run.train.prompts), row


def evaluate(run: Run, settings: Trees, functions: Functions, task, params) -> dict:
  """Of held-out prompts: the mean reward of what is sampled, or for records how much likelier a token of the best trajectory is than one of the worst, nats."""
  train, rewards, margins = run.train, [], []
  for first in range(0, train.eval_prompts, train.prompts):
    key = jax.random.fold_in(jax.random.key(train.seed + 2), first)
    trees, found = gather_trees(run, settings, functions, task, params, 'test', first, train.prompts, key)
    rewards += [np.mean(r) for r in found]
    if train.data_file:
      scores, mask = processes.fetch(functions.gradient(params, trees).scores.logprob), trees.group.mask
      mean = (scores * mask).sum(-1) / np.maximum(mask.sum(-1), 1)
      margins += [m[np.argmax(r)] - m[np.argmin(r)] for m, r in zip(mean, found)]
  return {'margin': float(np.mean(margins))} if train.data_file else {'reward': float(np.mean(rewards))}


def check(run: Run, settings: Trees) -> None:
  """UserError for what trees of trajectories cannot be trained with."""
  train = run.train
  if train.objective not in TURN_WISE or training.needs_reference(run):
    raise UserError(f'trees are trained by an --objective of {", ".join(TURN_WISE)}, with --kl_coef=0; change it.')
  if train.full_sequence or train.samples or train.inner_epochs > 1 or train.offline or train.stream:
    raise UserError('trees are trained once on all that is sampled; leave --full_sequence, --samples, --inner_epochs, --offline and --stream out.')
  if settings.answers < 1 or train.eval_prompts % train.prompts:
    raise UserError('--answers must be at least 1, and --eval_prompts a multiple of --prompts.')


def main(flags):
  settings, run = common.from_flags(flags, Trees()), training.make_run(flags, kind='trees')
  run = fitted(run, settings, flags.branch_capacity)
  train = run.train
  check(run, settings)
  task = None if train.data_file else tasks.make_task(train.task, train.prompt_len)
  if task:
    tasks.lookup_example(task, 'train', 0, train.seed, settings.page_len)  # a page too short is said at once
  optimizer = training.training_optimizer(run)
  functions = make_functions(run, settings, optimizer)
  held_out = lambda learner: evaluate(run, settings, functions, task, learner.params)
  with training.opened(run, optimizer, MAY_CHANGE, trees=dataclasses.asdict(settings)) as held:
    learner = held.learner
    if held.start is None:
      if not (train.data_file or train.init):  # single questions first, as the quickstart does
        sampler = sampling.held_out_sampler(run, run.replay.prefix_capacity)
        params = warmup.warm_up(run, sampling.evaluator(run, sampler), held.writer)
        learner = training.on_mesh(run, learner._replace(params=params, opt_state=jax.jit(optimizer.init)(params)))
      held.writer.write({'stage': 'eval', 'step': 0} | held_out(learner))
    step_of = lambda learner, step: train_step(run, settings, functions, task, learner, step)
    training.updates(run, held, learner, step_of, held_out, 'reward')
  if processes.is_first():
    finish(run, settings, held.workdir)


def finish(run: Run, settings: Trees, workdir) -> None:
  """Summary in words, and the closing row."""
  train, rows = run.train, plots.read_rows(workdir / 'metrics.jsonl')
  updates, evals = ([r for r in rows if r['stage'] == stage] for stage in ('rl', 'eval'))
  name = 'margin' if train.data_file else 'reward'
  positions, full = (sum(r[k] for r in updates) for k in ('positions', 'positions_full_sequences'))
  common.log(f'{train.objective} on trees of {width(run, settings)} trajectories, {len(updates)} updates: held-out {name} '
             f'{evals[0][name]:.3f}, now {evals[-1][name]:.3f}.\n{positions:,} positions went through forward and backward; '
             f'each trajectory in full would take {full:,}, {full / max(positions, 1):.1f} times as many.')
  row = common.provenance() | {
      'model': train.init or run.where.model, 'task': train.data_file or train.task, 'objective': train.objective,
      'seed': train.seed, 'steps': train.steps, 'prompt_len': train.prompt_len, 'trajectories': width(run, settings),
      'curve': {r['step']: r[name] for r in evals}, 'positions': positions, 'positions_full_sequences': full,
      'seconds': sum(r['seconds'] for r in updates)}
  if run.where.out:
    common.append_row(run.where.out, row)
  common.emit(row)


if __name__ == '__main__':
  common.run(define, main, several=True)
