"""The studies at tiny sizes: their rows hold what they claim, and figures are the same bytes again."""
import json
from pathlib import Path

import pytest

from branchreplay.config import preset
from experiments import common, convergence, drift, fidelity, figures, reproduce, work

TINY = ['--task=recall', '--prompt_len=64', '--prompts=2', '--branches=4', '--samples=6', '--data=1', '--seq=2',
        '--segment_len=16', '--warmup_updates=0', '--warmup_long_updates=0', '--eval_prompts=2', '--eval_samples=2',
        '--dtype=float32']


def rows_of(module, capsys, *flags):
  common.run(module.define, module.main, [module.__name__.split('.')[-1], *flags])
  return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def read(path):
  return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_exact_lies_on_full_sequence(capsys, tmp_path):
  out = tmp_path / 'convergence.jsonl'
  flags = [*TINY, f'--out={out}', '--arms=full-sequence,exact', '--seeds=3', '--times=1', '--steps=2', '--eval_every=1']
  closing, = rows_of(convergence, capsys, *flags)
  rows = read(out)
  curves = {arm: [r['sampled_crc'] for r in rows if r['arm'] == arm and r['kind'] == 'curve'] for arm in ('full-sequence', 'exact')}
  assert curves['exact'] == curves['full-sequence'] and [len(c) for c in curves['exact']] == [0, 1, 1]
  assert closing['same_samples'] == {'3': 2}
  assert {r['kind'] for r in rows} == {'curve', 'quality'} and all({'command', 'commit', 'jax', 'device', 'seed'} <= set(r) for r in rows)
  rows_of(convergence, capsys, *flags)
  assert read(out) == rows  # all done: nothing runs again

  made = [rows_of(figures, capsys, f'--rows={tmp_path}', f'--out={tmp_path / name}')[0]['figures'] for name in 'ab']
  assert made == [['convergence_recall', 'quality_recall']] * 2
  for file in (tmp_path / 'a').iterdir():
    assert file.suffix == '.png' or file.read_bytes() == (tmp_path / 'b' / file.name).read_bytes()


@pytest.mark.slow
def test_fidelity_and_drift(capsys, tmp_path):
  out = tmp_path / 'fidelity.jsonl'
  rows = rows_of(fidelity, capsys, *TINY, f'--out={out}', '--stages=random', '--lengths=64', '--modes=detached',
                 '--documents=2', '--steps=1')
  assert rows[0]['rel_l2'] > 0.01 and 0 < rows[0]['cosine'] < 1
  kinds = read(out)[0]['by_kind']
  assert kinds['head']['rel_l2'] == 0 and kinds['embed']['rel_l2'] > 0  # the output head sees responses only
  closing, = rows_of(drift, capsys, *TINY, f'--out={tmp_path / "drift.jsonl"}', '--anchors=1', '--updates=1,2', '--resample=4',
                     '--learning_rate=0.1', '--ramp_steps=0')
  assert all(v > 0 for v in closing['logprob'].values()) and len(read(tmp_path / 'drift.jsonl')) == 2


def test_work_by_hand(capsys):
  model = preset('tiny-dense')
  per_position = 2 * 2 * (64 * (2 * 128 + 2 * 64) + 3 * 64 * 128)  # two layers: q, out, k, v, MLP
  assert work.linear_flops(model) == per_position
  assert work.key_flops(model, 10, 2) == 4 * 4 * 32 * 2 * (11 + 12)
  window = preset('tiny-window')
  each = sum(min(p + 1, window.window) for p in range(90, 110))
  assert work.key_flops(window, 90, 20) == 4 * 4 * 16 * 2 * each
  last = 2 * (64 * 128 + 3 * 64 * 128), work.key_flops(model, 0, 50) / 2  # of two layers' second: out and MLP, and its keys
  assert work.prefix_flops(model, 50) == (50 * (per_position - last[0]), work.key_flops(model, 0, 50) - last[1])
  full, exact = (work.update_work(model, 1000, 8, 10, mode)['positions'] for mode in ('full-sequence', 'exact'))
  assert (full, exact) == (8080, 1080)
  row, = rows_of(work, capsys, '--dtype=float32', '--branches=16', '--ratios=2048')
  assert 15 < row['positions_ratio'] < 16 < row['flops_ratio'] < row['flops_ratio_detached']


def test_the_roofline_figure_is_of_one_capacity():
  """The fit over prefix length: rows of a shorter capture's own run, or of other depths, are not in it."""
  row = lambda p, capacity, repeats=0: {'model': 'bench', 'repeats': repeats, 'prefix_len': p, 'capacity': capacity, 'seconds': 1 + p + p * p} | {
      f'{phase}_{what}': 0.5 for phase in ('capture', 'replay', 'pull') for what in ('s', 'share')}
  table = figures.roofline_table([row(8, 8) | {'seconds': 9e9}, row(16, 16), row(2, 16), row(4, 16), row(8, 16), row(16, 16, 4)])
  assert [r['prefix_len'] for r in table] == [2, 4, 8, 16]
  assert all(abs(r['fitted'] / r['seconds'] - 1) < 1e-9 for r in table)


def test_reproduce_keeps_what_is_done(capsys, tmp_path, monkeypatch):
  monkeypatch.setitem(reproduce.PARTS, 'work', (1, ['work', '--branches=2', '--ratios=1,4']))
  for _ in range(2):
    rows_of(reproduce, capsys, '--dtype=float32', f'--out={tmp_path}', '--parts=work')
  assert len(read(tmp_path / 'work.jsonl')) == 2 and (tmp_path / 'work.done').is_file()


@pytest.mark.parametrize('module, flag, sentence', [
    (figures, '--only=none', "unknown figure 'none'"), (reproduce, '--parts=none', "unknown part 'none'"),
    (fidelity, '--stages=none', "unknown stage 'none'"), (convergence, '--seeds=x', 'give whole numbers'),
    (convergence, '--arms=none', "unknown mode 'none'"), (work, '--model=none', "unknown model 'none'")])
def test_mistakes_end_in_one_sentence(capsys, module, flag, sentence):
  with pytest.raises(SystemExit) as stop:
    rows_of(module, capsys, '--dtype=float32', flag)
  error = capsys.readouterr().err
  assert stop.value.code == 2 and sentence in error and 'Traceback' not in error


def test_committed_rows_say_where_they_come_from():
  """Every row file: command, versions, commit, device, and a seed where chance enters."""
  files = sorted((common.ROOT / 'experiments' / 'results').glob('*.jsonl'))
  assert files
  for file in files:
    rows = read(file)
    rows = [r for r in rows if r.get('stage') == 'start'] or rows  # metrics rows follow their start row
    for row in rows:
      assert {'command', 'commit', 'python', 'jax', 'numpy', 'platform', 'device', 'time'} <= set(row), file
    if file.stem not in ('memory', 'speed', 'work', 'gradient_parity', 'quickstart_metrics', 'fit', 'compare', 'roofline', 'receipts'):  # nothing is drawn, or seed 0
      assert all('seed' in row for row in rows), file
    assert not any('/tmp/' in row['command'] for row in rows), file  # a place of the machine that made it
