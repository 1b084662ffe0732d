"""experiments/train.py as a user runs it: mistakes in one sentence, exact resume, guarded updates."""
import json
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from branchreplay import batch
from branchreplay.config import PRESETS, ReplayConfig, TrainConfig
from experiments import common, rollouts, sampling, train, training

TINY = ['--task=recall', '--prompt_len=64', '--prompts=2', '--branches=4', '--data=1', '--seq=2', '--segment_len=32',
        '--warmup_updates=1', '--warmup_long_updates=1', '--warmup_prompts=2', '--eval_prompts=2', '--eval_samples=2',
        '--checkpoint_every=2', '--resample=0', '--samples=6', '--warmup_reward=2']


def run(tmp_path, *flags):
  common.run(train.define, train.main, ['train', f'--workdir={tmp_path}', '--dtype=float32', *flags])


@pytest.mark.parametrize('flags, sentence', [
    (['--model=huge'], "unknown model 'huge'"),
    (['--no_such_flag=1'], "Unknown command line flag 'no_such_flag'"),
    (['--steps=many'], '--steps=many'),
    (['--prompt_len=2048', '--prefix_capacity=512'], 'prompt_len=2048 is longer than the capacity of 513'),
    (['--branches=0'], 'branches=0; it must be at least 1'),
    (['--seq=16', '--data=1'], '16 devices asked for .* --virtual_devices=16'),
    (['--segment_len=12', '--data=1', '--seq=8'], 'segment_len=12 is not divisible by the 8 devices'),
    (['--mode=approximate'], "unknown mode 'approximate'"),
    (['--task=chess'], "unknown task 'chess'"),
    (['--on_nonfinite=ignore'], "unknown on_nonfinite 'ignore'"),
    (['--learning_rate=inf'], 'learning_rate=inf; it must be finite'),
    (['--offline', '--data_file=a', '--eval_file=b', '--kl_coef=0.1', '--kl_in=reward'], "a sampler's log-probs"),
    (['--samples=4'], 'samples=4 is less than branches=8'),
    (['--full_sequence', '--refresh_every=2'], 'full sequences have no state to keep'),
    (['--prompts=6', '--data=4', '--seq=2'], 'prompts=6 is not a multiple'),
])
def test_mistakes_end_in_one_sentence(tmp_path, capsys, flags, sentence):
  with pytest.raises(SystemExit) as stop:
    run(tmp_path / 'run', *flags)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert 'Traceback' not in error and len(error.strip().splitlines()) == 1
  assert re.search(sentence, error)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('flags, programs', [
    (['--resample=1', '--eval_samples=0'], 1),
    (['--resample=1', '--eval_samples=2'], 2),
    (['--resample=0', '--eval_samples=0'], 2),  # training's keeps its captures
])
def test_training_and_evaluations_sample_by_one_program(tmp_path, monkeypatch, flags, programs):
  made, make = [], sampling.make_sampler
  monkeypatch.setattr(sampling, 'make_sampler', lambda *arguments: made.append(make(*arguments)) or made[-1])
  run(tmp_path, *TINY, '--steps=2', *flags)
  assert [sampler.rollout._cache_size() for sampler in made] == [1] * programs
  assert len(rows(tmp_path, 'rl')) == 2


def rows(folder, stage):
  lines = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  return [{k: v for k, v in row.items() if k != 'seconds'} for row in lines if row['stage'] == stage]


def saved(folder, step):
  """Leaves of a checkpoint, random keys as their words, and its cursor."""
  handler = ocp.Checkpointer(ocp.StandardCheckpointHandler())
  tree = handler.restore(folder / 'checkpoints' / str(step) / 'state')
  words = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
  return [np.asarray(words(x)) for x in jax.tree.leaves(tree)]


def test_a_run_taken_up_again_is_bit_for_bit_a_straight_one(tmp_path, capsys):
  """With a KL term and two epochs a rollout on one capture, so that reference and old log-probs are in it."""
  straight, stopped, flags = tmp_path / 'straight', tmp_path / 'stopped', [*TINY, '--kl_coef=0.1', '--inner_epochs=2', '--refresh_every=2']
  run(straight, *flags, '--steps=4')
  shutil.copytree(straight, stopped)
  shutil.rmtree(stopped / 'checkpoints' / '4')  # as if killed after the checkpoint of update 2
  run(stopped, *flags, '--steps=4', f'--out={tmp_path}/rows.jsonl')
  output = capsys.readouterr()
  assert 'going on after update 2' in output.err
  closing = [json.loads(line) for line in output.out.splitlines()]
  assert closing[0]['held_out_reward'] == closing[1]['held_out_reward']
  assert json.loads((tmp_path / 'rows.jsonl').read_text()) == closing[1]
  assert rows(straight, 'rl') == rows(stopped, 'rl') and [r['step'] for r in rows(stopped, 'rl')] == [1, 2, 3, 4]
  assert len(rows(straight, 'start')) == 1 and len(rows(stopped, 'start')) == 2
  assert any(r['kl'] > 0 for r in rows(stopped, 'rl'))
  for a, b in zip(saved(straight, 4), saved(stopped, 4), strict=True):
    np.testing.assert_array_equal(a, b)
  assert sum(np.abs(a - b).sum() for a, b in zip(saved(stopped, 2), saved(stopped, 4))) > 0

  before = {p: p.stat().st_mtime_ns for p in stopped.rglob('*')}
  with pytest.raises(SystemExit) as stop:
    run(stopped, *flags, '--steps=4', '--learning_rate=0.1')
  assert stop.value.code == 2 and 'holds a run of another configuration' in capsys.readouterr().err
  assert before == {p: p.stat().st_mtime_ns for p in stopped.rglob('*')}


@pytest.mark.slow
def test_gradients_in_steps_train_the_same(tmp_path):
  run(tmp_path / 'whole', *TINY, '--steps=2', '--entropy_coef=0.1')
  run(tmp_path / 'steps', *TINY, '--steps=2', '--entropy_coef=0.1', '--stream=1', '--save_steps=1e-6')
  for a, b in zip(rows(tmp_path / 'whole', 'rl'), rows(tmp_path / 'steps', 'rl'), strict=True):
    assert a['sampled_crc'] == b['sampled_crc'] and a['grad_norm'] > 0 and a['grad_norm'] == pytest.approx(b['grad_norm'], rel=1e-4)
  assert not list((tmp_path / 'steps' / 'stream').glob('*/*'))  # what a whole gradient left is gone


@pytest.mark.parametrize('loss, grad', [(np.nan, 1.0), (0.0, np.inf), (0.0, np.nan)])
def test_nothing_non_finite_reaches_the_parameters(loss, grad):
  optimizer = optax.adamw(0.1)
  params = {'w': jnp.ones(3)}
  state = optimizer.init(params)
  update = training.update_function(optimizer)
  copy = lambda tree: jax.tree.map(jnp.copy, tree)
  new, new_state, _, finite = update(copy(params), copy(state), {'w': jnp.array([1.0, grad, 1.0])}, jnp.array(loss))
  assert not finite
  for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((new, new_state))):
    np.testing.assert_array_equal(a, b)
  new, _, _, finite = update(copy(params), copy(state), {'w': jnp.ones(3)}, jnp.array(0.0))
  assert finite and np.all(np.asarray(new['w']) < 1)


def dispatch(rewards):
  """A Batch of groups of two branches of one token."""
  rewards = np.array(rewards, float)
  group = batch.make_group(PRESETS['tiny-dense'], ReplayConfig(branch_capacity=1, branch_segment_len=1), [1, 2], [[3], [4]])
  groups = batch.stack([group.replace(advantages=np.ptp(r) * np.array([1.0, -1.0])) for r in rewards])
  return rollouts.Batch(groups, None, rewards, rewards, 0)


def test_dynamic_sampling_chooses_the_informative_groups():
  pool = [dispatch([[0, 0], [1, 0]]), dispatch([[1, 1], [1, 1]]), dispatch([[0, 1], [0, 0]])]
  chosen = rollouts.choose(pool, 2, most=4)
  assert len(chosen) == 1 and chosen[0].rewards.tolist() == [[1, 0], [0, 1]]
  filled = rollouts.choose(pool[:2], 2, most=4)
  assert len(filled) == 1 and rollouts.informative(filled[0]).tolist() == [True, False]
  assert len(rollouts.choose(pool * 3, 2, most=4)) == 2  # six informative, four asked for
  assert len(rollouts.choose(pool[1:2], 2, most=4)) == 1  # none: a gradient of zero, not an error


@pytest.mark.parametrize('objective, resample, weight', [
    ('grpo', 0, 1 / 2), ('grpo', 4, 2 / 3), ('dapo', 0, 2 / 8), ('dapo', 4, 2 / 6)])
def test_gradients_are_scaled_to_the_mean_over_what_counts(objective, resample, weight):
  """Two dispatches of two groups, three of them informative, two tokens each."""
  run = SimpleNamespace(train=TrainConfig(objective=objective, resample=resample))
  pool = [dispatch([[0, 1], [1, 0]]), dispatch([[1, 1], [0, 1]])]
  assert train.batch_weight(run, pool) == pytest.approx(weight)


def test_preference_pairs_of_sampled_branches():
  groups = dispatch([[0, 1], [1, 1]]).groups
  paired = rollouts.pair_up(groups, np.array([[0.0, 1.0], [1.0, 1.0]]))
  assert paired.targets[:, :, 0].tolist() == [[4, 3], [3, 4]]
  assert paired.mask[:, :, 0].tolist() == [[1, 1], [0, 0]]
