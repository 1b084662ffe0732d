"""The measuring scripts: their rows hold what they claim, at small sizes."""
import json
import types

import pytest

from branchreplay import config
from branchreplay.config import TrainConfig
from experiments import common, gradient_parity, memory, precision, roofline, soak, train_tree, tree_speed, work


def rows_of(module, capsys, *flags):
  common.run(module.define, module.main, [module.__name__.split('.')[-1], *flags])
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_gradient_parity(capsys, tmp_path):
  sizes = ['--prefix_len=70', '--branches=4', '--branch_len=12', '--segment_len=32', '--branch_segment_len=8']
  rows = rows_of(gradient_parity, capsys, *sizes, '--devices=2', '--mode=exact,detached', '--dtype=float64',
                 f'--out={tmp_path}/rows.jsonl')
  assert [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()] == rows
  assert [(r['mode'], r['devices']) for r in rows] == [('exact', 2), ('detached', 2)]
  for row in rows:
    assert row['loss'] == pytest.approx(row['loss_reference'], rel=1e-12)
    assert row['rel_l2'] <= 1e-10 if row['mode'] == 'exact' else 0.01 < row['rel_l2'] < 1


def test_memory_is_flat_in_branches_and_grows_by_the_state(capsys):
  """Invariant 5, by XLA's own report."""
  sizes = ['--segment_len=512', '--branch_len=16', '--dtype=float32']
  two, eight = rows_of(memory, capsys, '--prefix_len=8192', '--branches=2,8', *sizes)
  short, = rows_of(memory, capsys, '--prefix_len=2048', '--branches=2', *sizes)
  assert (two['branches'], eight['branches']) == (2, 8) and eight['total_bytes'] <= 1.005 * two['total_bytes']
  slope = (two['total_bytes'] - short['total_bytes']) / (8192 - 2048)
  held = lambda row: row['state_bytes'] + row['cotangent_bytes']
  assert slope <= 1.10 * (held(two) - held(short)) / (8192 - 2048)


def test_roofline(capsys):
  sizes = ['--branch_len=8', '--segment_len=32', '--branches=2', '--rounds=1', '--matrix=64', '--products=2', '--virtual_devices=8', '--keep=layers']
  short, long = rows_of(roofline, capsys, '--model=tiny-dense', '--prefix_len=40,80', *sizes)
  for row in (short, long):
    capture, replay, pull = (sum(row['rates'][phase]) / 2 for phase in ('capture', 'replay', 'pull'))
    possible = {'capture': row['capture_s'] * capture, 'replay': row['replay_s'] * replay}
    possible['pull'] = (row['pull_s'] + row['replay_s']) * pull - possible['replay']
    for phase, flops in possible.items():
      assert row[f'{phase}_share'] == pytest.approx(row[f'{phase}_flops'] / flops)
    assert row['seconds'] == pytest.approx(sum(row[f'{phase}_s'] for phase in ('capture', 'replay', 'pull')))
  assert short['compile_s'] == long['compile_s'] and (short['prefix_len'], long['prefix_len'], long['capacity']) == (40, 80, 80)


@pytest.mark.slow
def test_precision_measures_each_variant(capsys):
  rows = rows_of(precision, capsys, '--prefix_len=300', '--variants=bfloat16,history', '--every_rounding')
  assert [(r['variant'], r['every_rounding'], r['segments']) for r in rows] == [('bfloat16', True, 2), ('history', True, 2)]
  assert 1e-3 < rows[0]['rel_l2'] < 5e-2 and 1e-8 < rows[1]['rel_l2'] < 1e-3


def test_phase_flops_make_up_an_update():
  """Keeping nothing, the phases together are work.py's exact update."""
  shape = config.preset('bench')
  linear, keys = work.prefix_flops(shape, 500)
  for keep, less in (('state', 0), ('attention', keys), ('layers', keys + linear + 3 * 20 * work.linear_flops(shape))):
    flops = roofline.phase_flops(shape, keep, 500, 3, 20)
    assert sum(flops.values()) == pytest.approx(work.update_work(shape, 500, 3, 20, 'exact')['flops'] - less)


@pytest.mark.slow
def test_tree_speed(capsys):
  sizes = ['--prompt_len=100', '--turn_lens=40,9', '--fan_outs=2,3', '--leaves=2,6', '--segment_len=32', '--devices=2', '--rounds=1']
  shared, apart = rows_of(tree_speed, capsys, *sizes, '--dtype=float32')
  assert (shared['trajectories'], shared['trajectory_len']) == (6, 149)
  assert shared['distinct_positions'] == 99 + 2 * 40 + 6 * 9 and apart['distinct_positions'] == 6 * 148
  assert max(shared['rel_l2'], apart['rel_l2']) < 1e-4


def test_soak_prompts_are_ragged_and_held_out_ones_whole():
  source = soak.ragged(TrainConfig(task='recall', prompt_len=320), 4)
  assert [len(source.example('train', i).prompt) for i in range(5)] == [80, 160, 240, 320, 80]
  assert len(source.example('test', 1).prompt) == 320


def test_soak_sees_growth_slowing_and_compilations():
  still = [{'resident_bytes': 100, 'live_bytes': 10, 'update_s': 1.0, 'compiled': i == 0, 'skipped': 0} for i in range(20)]
  assert soak.compare(still) == {'resident_bytes_ratio': 1, 'live_bytes_ratio': 1, 'update_s_ratio': 1, 'compiled_later': 0, 'skipped': 0}
  worse = soak.compare([r | {'resident_bytes': 100 + i, 'update_s': 1 + i / 10, 'compiled': 1} for i, r in enumerate(still)])
  assert worse['resident_bytes_ratio'] > 1.1 and worse['update_s_ratio'] > 2 and worse['compiled_later'] == 18


def test_soak_rows_are_of_the_updates_between_them():
  written, rows = [], []
  writer = soak.watched(types.SimpleNamespace(write=written.append), 2, rows)
  for step in range(1, 6):
    writer.write({'stage': 'rl', 'step': step, 'seconds': float(step), 'positions': 10, 'skipped': step == 3})
    writer.write({'stage': 'eval', 'step': step, 'reward': 0.0})
  assert len(written) == 10 and [r['step'] for r in rows] == [2, 4]
  assert [r['update_s'] for r in rows] == [1.5, 3.5] and [r['skipped'] for r in rows] == [0, 1]
  assert all(r['resident_bytes'] > 2**20 for r in rows)


@pytest.mark.parametrize('module, flags, sentence', [
    (tree_speed, ['--fan_outs=2'], 'as many --turn_lens as --fan_outs'), (tree_speed, ['--leaves=3'], 'no multiple of the 4 inner turns'),
    (soak, ['--steps=100'], 'at least twice --every'), (train_tree, ['--answers=0'], '--answers must be at least 1'),
    (train_tree, ['--page_len=5'], 'page_len=5 cannot hold'), (train_tree, ['--kl_coef=0.1'], 'with --kl_coef=0'),
    (gradient_parity, ['--devices=0'], 'give whole numbers'), (gradient_parity, ['--mode=none'], "unknown mode 'none'"),
    (gradient_parity, ['--prefix_len=-1'], 'prefix_len must be at least 0'),
    (gradient_parity, ['--case=absent'], 'absent'), (memory, ['--branches=x'], 'give whole numbers'),
    (memory, ['--model=none'], "unknown model 'none'")])
def test_mistakes_end_in_one_sentence(capsys, module, flags, sentence):
  with pytest.raises(SystemExit) as stop:
    rows_of(module, capsys, '--dtype=float32', *flags)
  error = capsys.readouterr().err
  assert stop.value.code == 2 and sentence in error and 'Traceback' not in error
