"""The measuring scripts: their rows hold what they claim, at small sizes."""
import json

import pytest

from experiments import common, gradient_parity, memory


def rows_of(module, capsys, *flags):
  common.run(module.define, module.main, [module.__name__.split('.')[-1], *flags])
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


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


@pytest.mark.parametrize('module, flags, sentence', [
    (gradient_parity, ['--devices=0'], 'give whole numbers'), (gradient_parity, ['--mode=none'], "unknown mode 'none'"),
    (gradient_parity, ['--prefix_len=-1'], 'prefix_len must be at least 0'),
    (gradient_parity, ['--case=absent'], 'absent'), (memory, ['--branches=x'], 'give whole numbers'),
    (memory, ['--model=none'], "unknown model 'none'")])
def test_mistakes_end_in_one_sentence(capsys, module, flags, sentence):
  with pytest.raises(SystemExit) as stop:
    rows_of(module, capsys, '--dtype=float32', *flags)
  error = capsys.readouterr().err
  assert stop.value.code == 2 and sentence in error and 'Traceback' not in error
