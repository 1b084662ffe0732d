"""Rows are strict JSON and stand once; progress shows right rates and time left."""
import io
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import metrics
from branchreplay.config import UserError


@pytest.mark.parametrize('value, text', [
    (float('nan'), 'null'), (float('-inf'), 'null'), (np.float32(np.inf), 'null'),
    (jnp.array([1.5, jnp.nan]), '[1.5, null]'), (np.float32(0.5), '0.5'), (np.float64(0.25), '0.25'),
    (jnp.bfloat16(1.5), '1.5'), (jnp.ones((2, 1), jnp.bfloat16), '[[1.0], [1.0]]'),
    (np.int64(3_000_000_000), '3000000000'), (3_000 * 1_000_000, '3000000000'),
    (np.bool_(True), 'true'), (True, 'true'), (None, 'null'), (np.str_('a'), '"a"'),
    (Path('runs/a'), '"runs/a"'), ((1, 'é\n'), '[1, "\\u00e9\\n"]'),
    ({'a': {'b': float('nan')}, 2: []}, '{"a": {"b": null}, "2": []}'),
])
def test_strict_json(value, text):
  assert metrics.strict_json(value) == text


@pytest.mark.parametrize('value', [object(), np.complex64(1), np.array([object()]), {'a': {1, 2}}])
def test_what_json_cannot_hold_is_refused(value):
  with pytest.raises(TypeError, match='no JSON form'):
    metrics.strict_json(value)


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_when_written(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = metrics.JsonlWriter(path)
  writer.write({'step': 1, 'loss': jnp.float32(0.5)})
  writer.write({'step': 2, 'loss': float('nan')})
  assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n'
  writer.close()


@pytest.mark.parametrize('torn', ['', '{"step": 5, "lo', '{"step": 2}'])
def test_resume_has_each_row_once(tmp_path, torn):
  path = tmp_path / 'metrics.jsonl'
  with metrics.JsonlWriter(path) as writer:
    for step in (1, 2, 3, 4):
      writer.write({'step': step, 'run': 0})
  with open(path, 'a') as file:
    file.write(torn)
  with metrics.JsonlWriter(path, step=2) as writer:
    for step in (3, 4, 5):
      writer.write({'step': step, 'run': 1})
  assert rows(path) == [{'step': s, 'run': int(s > 2)} for s in (1, 2, 3, 4, 5)]


def test_half_written_row_is_cut_and_rows_without_step_stay(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"note": "start"}\n{"step": 1}\n{"step": 2}')  # no newline: a kill in the write
  with metrics.JsonlWriter(path, step=2) as writer:
    writer.write({'step': 3})
  assert rows(path) == [{'note': 'start'}, {'step': 1}, {'step': 3}]


def test_a_new_run_starts_an_empty_file(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n')
  metrics.JsonlWriter(path).close()
  assert path.read_bytes() == b''


def test_unwritable_file_is_a_user_error(tmp_path):
  with pytest.raises(UserError, match='cannot write .*absent/metrics.jsonl'):
    metrics.JsonlWriter(tmp_path / 'absent' / 'metrics.jsonl')


class Terminal(io.StringIO):
  def isatty(self):
    return True


def run_progress(stream, seconds_per_step, steps=6, start=0, **options):
  """Steps of 100 positions each; the first takes 50 s more, as a compilation does."""
  now = [0.0]
  progress = metrics.Progress(steps, start, stream=stream, clock=lambda: now[0], **options)
  with progress:
    for step in range(start + 1, steps + 1):
      now[0] += seconds_per_step + 50 * (step == start + 1)
      progress.update(step, positions=100, reward=jnp.float32(0.5), loss=-1 / 3)
  return stream.getvalue()


def test_plain_lines():
  text = run_progress(io.StringIO(), 5.0, seconds=10.0)
  assert text.splitlines() == [
      'step 1/6  reward 0.5  loss -0.3333',
      'step 3/6  reward 0.5  loss -0.3333  20 positions/s  15s left',
      'step 5/6  reward 0.5  loss -0.3333  20 positions/s  5s left',
      'step 6/6  reward 0.5  loss -0.3333  20 positions/s  0s left']


def test_plain_lines_of_a_resumed_run():
  text = run_progress(io.StringIO(), 100.0, steps=40, start=37, seconds=10.0)
  assert text.splitlines() == [
      'step 38/40  reward 0.5  loss -0.3333',
      'step 39/40  reward 0.5  loss -0.3333  1 positions/s  1m40s left',
      'step 40/40  reward 0.5  loss -0.3333  1 positions/s  0s left']


def test_bar_on_a_terminal():
  text = run_progress(Terminal(), 5.0)
  assert '\r 50%|' in text and 'step 3/6  reward 0.5  loss -0.3333  20 positions/s  15s left' in text
  assert '100%|' in text


def test_missing_values_are_left_out():
  stream = io.StringIO()
  metrics.Progress(2, stream=stream).update(1, 10, loss=float('nan'))
  assert stream.getvalue() == 'step 1/2  loss nan\n'


@pytest.mark.parametrize('seconds, text', [
    (0.4, '0s'), (42, '42s'), (59.6, '1m00s'), (185, '3m05s'), (7645, '2h07m'), (100 * 3600, '100h00m')])
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text
