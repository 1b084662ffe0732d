"""The planner against the compiler's own reports, and its sentences."""
import dataclasses
import json
from pathlib import Path

import pytest

from branchreplay.config import UserError
from experiments import plan
from experiments.plan import Plan

RESULTS = Path(__file__).parent.parent / 'experiments' / 'results'
ROWS = [json.loads(line) for line in (RESULTS / 'fit.jsonl').read_text().splitlines()]


@pytest.mark.parametrize('row', ROWS, ids=lambda r: f'{r["model"]}-{r["topology"]}-{r["prefix_len"]}')
def test_bytes_are_within_a_tenth_of_the_compilers(row):
  names = {f.name for f in dataclasses.fields(Plan)} & row.keys() - {'device', 'devices', 'out'}
  settings = Plan(devices=row['chips'], device='cpu', **{name: row[name] for name in names})
  made = plan.plan(settings, row['dtype'])
  reports = [phase for phase in ('capture', 'replay', 'pull') if row.get(f'{phase}_bytes')]
  assert reports
  for phase in reports:
    assert made[f'{phase}_phase_bytes'] == pytest.approx(row[f'{phase}_bytes'], rel=0.10), phase
  assert made['adam_bytes'] == pytest.approx(row['adam_bytes'], rel=0.01)


def test_the_longest_prefix_fits_and_one_segment_more_does_not():
  settings = Plan(model='qwen3-0.6b', device='h100', devices=4, branches=4)
  longest = plan.plan(settings, 'bfloat16')['longest_prefix']
  assert longest > 10**5
  assert plan.plan(dataclasses.replace(settings, prefix_len=longest), 'bfloat16')['fits']
  assert not plan.plan(dataclasses.replace(settings, prefix_len=longest + 2 * settings.segment_len), 'bfloat16')['fits']


def test_parts_are_where_they_belong():
  base = Plan(model='qwen3.5-0.8b', prefix_len=2**20)
  whole = plan.plan(base, 'bfloat16')
  lora = plan.plan(dataclasses.replace(base, lora_rank=8), 'bfloat16')
  assert lora['gradients_bytes'] < 0.02 * whole['gradients_bytes'] and lora['cotangent_bytes'] == whole['cotangent_bytes']
  half = plan.plan(dataclasses.replace(base, cotangent_dtype='bfloat16'), 'bfloat16')
  assert half['cotangent_bytes'] == pytest.approx(whole['cotangent_bytes'] / 2, rel=0.05)
  host = plan.plan(dataclasses.replace(base, offload=True), 'bfloat16')
  moved = whole['cotangent_bytes'] + whole['history_bytes'] - host['cotangent_bytes'] - host['history_bytes']
  assert host['host_bytes'] == moved > 0.9 * (whole['cotangent_bytes'] + whole['history_bytes'])
  kept = plan.plan(dataclasses.replace(base, keep='auto', device='h200'), 'bfloat16')
  assert kept['keep'] == 'layers' and kept['kept_bytes'] > 0


def test_time_by_a_measured_row(tmp_path):
  rates = {'capture': 1e9, 'replay': 2e9, 'pull': 4e9}
  row = {'model': 'bench'} | {f'{p}_s': 2.0 for p in rates} | {f'{p}_flops': 2 * r for p, r in rates.items()}
  (tmp_path / 'rows.jsonl').write_text(json.dumps(row) + '\n')
  made = plan.plan(Plan(model='bench', device='cpu', devices=2, prefix_len=8192, calibrate=str(tmp_path / 'rows.jsonl')), 'float32')
  for phase, rate in rates.items():
    assert made[f'{phase}_s'] == pytest.approx(made[f'{phase}_flops'] / rate)


def test_measured_seconds_are_foreseen_from_one_run():
  """The committed rows of roofline.py: of its longest prefix, by which the planner is calibrated, and of shorter ones."""
  file = RESULTS / 'roofline.jsonl'
  for row in map(json.loads, file.read_text().splitlines()):
    if row['prefix_len'] >= 8192:
      names = {f.name for f in dataclasses.fields(Plan)} & row.keys() - {'device', 'out', 'repeats'}
      made = plan.plan(Plan(device='cpu', calibrate=str(file), **{name: row[name] for name in names}), row['dtype'])
      assert made['seconds'] == pytest.approx(row['seconds'], rel=0.30)


@pytest.mark.parametrize('changes, sentence', [
    ({'device': 'abacus'}, "unknown device 'abacus'"), ({'efficiency': 0.0}, 'efficiency above 0'),
    ({'model': 'bench', 'calibrate': 'nowhere.jsonl'}, 'cannot read rows'), ({'cotangent_dtype': 'float8'}, 'unknown cotangent_dtype')])
def test_mistakes_are_one_sentence(changes, sentence):
  with pytest.raises(UserError, match=sentence):
    plan.plan(dataclasses.replace(Plan(prefix_len=16384, model='qwen3-0.6b'), **changes), 'bfloat16')
