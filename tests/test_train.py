"""experiments/train.py as a user runs it: mistakes in one sentence, exact resume, guarded updates."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import common, train

TINY = ['--task=recall', '--prompt_len=64', '--prompts=2', '--branches=4', '--data=1', '--seq=2', '--segment_len=32',
        '--warmup_updates=1', '--warmup_long_updates=1', '--warmup_prompts=2', '--eval_prompts=2', '--eval_samples=2',
        '--checkpoint_every=2']


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
    (['--prompts=6', '--data=4', '--seq=2'], 'prompts=6 is not a multiple'),
])
def test_mistakes_end_in_one_sentence(tmp_path, capsys, flags, sentence):
  with pytest.raises(SystemExit) as stop:
    run(tmp_path / 'run', *flags)
  assert stop.value.code == 2
  error = capsys.readouterr().err
  assert 'Traceback' not in error and len(error.strip().splitlines()) == 1
  import re
  assert re.search(sentence, error)
  assert not (tmp_path / 'run').exists()


def test_a_run_taken_up_again_has_the_rows_of_a_straight_one(tmp_path, capsys):
  run(tmp_path / 'straight', *TINY, '--steps=4')
  run(tmp_path / 'stopped', *TINY, '--steps=2')
  run(tmp_path / 'stopped', *TINY, '--steps=4')
  output = capsys.readouterr()
  assert 'going on after update 2' in output.err
  rows = [json.loads(line) for line in output.out.splitlines()]
  assert rows[0]['held_out_reward'] == rows[2]['held_out_reward']

  def last(name):
    lines = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != 'seconds'} for row in lines if row['stage'] == 'rl']
  assert last('straight') == last('stopped') and [r['step'] for r in last('straight')] == [1, 2, 3, 4]


@pytest.mark.parametrize('loss, grad', [(np.nan, 1.0), (0.0, np.inf), (0.0, np.nan)])
def test_nothing_non_finite_reaches_the_parameters(loss, grad):
  optimizer = optax.adamw(0.1)
  params = {'w': jnp.ones(3)}
  state = optimizer.init(params)
  update = train.update_function(optimizer)
  copy = lambda tree: jax.tree.map(jnp.copy, tree)
  new, new_state, _, finite = update(copy(params), copy(state), {'w': jnp.array([1.0, grad, 1.0])}, jnp.array(loss))
  assert not finite
  for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((new, new_state))):
    np.testing.assert_array_equal(a, b)
  new, _, _, finite = update(copy(params), copy(state), {'w': jnp.ones(3)}, jnp.array(0.0))
  assert finite and np.all(np.asarray(new['w']) < 1)
