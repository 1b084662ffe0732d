"""What a run says about itself: strict JSON rows on disk, progress for people."""
import json
import math
import os
import sys
import time

import numpy as np
import tqdm

from branchreplay.config import UserError


def plain(value):
  """`value` as plain JSON types; arrays become (nested) lists, NaN and infinities None.

  TypeError for what JSON cannot hold.
  """
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  if isinstance(value, dict):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if not hasattr(value, '__array__'):
    raise TypeError(f'{type(value).__name__} has no JSON form: {value!r}')
  array = np.asarray(value)
  if array.dtype.kind in 'OcmM':
    raise TypeError(f'an array of {array.dtype} has no JSON form')
  if array.dtype.kind not in 'biufSU':  # bfloat16 and the float8s
    array = array.astype(np.float64)
  return plain(array.tolist())


def strict_json(value) -> str:
  """One line of JSON that every parser reads: `plain(value)` without NaN or Infinity."""
  return json.dumps(plain(value), allow_nan=False)


class JsonlWriter:
  """Appends rows to a JSONL file; a row is on disk when `write` returns.

  A row's `step` counts the updates done, as a checkpoint's step does. Opening at
  `step` cuts the file before its first row of a later step or half-written line,
  so a resumed run has each row once. UserError where the file cannot be written.
  """

  def __init__(self, path: str | os.PathLike, step: int = 0):
    try:
      self._file = open(path, 'ab+')
    except OSError as error:
      raise UserError(f'cannot write {os.fspath(path)!r} ({error.strerror}); choose another place.')
    self._file.truncate(_end_of_rows(self._file, step))

  def write(self, row: dict) -> None:
    self._file.write(strict_json(row).encode() + b'\n')
    self._file.flush()

  def close(self) -> None:
    self._file.close()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()


def _end_of_rows(file, step: int) -> int:
  """Bytes up to the first row past `step`, or up to the first line that is no whole row."""
  file.seek(0)
  end = 0
  for line in file:
    try:
      row = json.loads(line)
    except ValueError:
      break
    if not line.endswith(b'\n') or not isinstance(row, dict) or row.get('step', 0) > step:
      break
    end += len(line)
  return end


class Progress:
  """A bar on a terminal; elsewhere a line at the first step, every `seconds` and at the end.

  Rates are over the steps since the text was last shown. The clock starts when the
  first step has ended, so that they hold no compilation.
  """

  def __init__(self, steps: int, start: int = 0, seconds: float = 10.0, stream=None,
               clock=time.monotonic):
    """`steps`: the last step's number; `start`: steps done before this process."""
    self._stream = stream or sys.stderr
    self._bar = None
    if self._stream.isatty():
      seconds = min(seconds, 0.5)
      self._bar = tqdm.tqdm(total=steps, initial=start, file=self._stream, dynamic_ncols=True,
                            bar_format='{percentage:3.0f}%|{bar}| {desc}')
    self._steps, self._seconds, self._clock = steps, seconds, clock
    self._positions = 0
    self._shown = None  # time, step and positions when the text was last shown

  def update(self, step: int, positions: int, reward=None, loss=None) -> None:
    """Says that `step` has ended and has processed `positions` positions."""
    self._positions += positions
    now, last = self._clock(), self._shown
    if self._bar is not None:
      self._bar.update(step - self._bar.n)
    if last is not None and now - last[0] < self._seconds and step < self._steps:
      return
    parts = [f'step {step}/{self._steps}']
    parts += [f'{name} {float(value):.4g}' for name, value in (('reward', reward), ('loss', loss))
              if value is not None]
    if last is not None and step > last[1]:
      elapsed = max(now - last[0], 1e-9)
      parts.append(f'{(self._positions - last[2]) / elapsed:,.0f} positions/s')
      parts.append(f'{duration((self._steps - step) * elapsed / (step - last[1]))} left')
    self._show('  '.join(parts))
    self._shown = now, step, self._positions

  def _show(self, text: str) -> None:
    if self._bar is None:
      print(text, file=self._stream, flush=True)
    else:
      self._bar.set_description_str(text)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.close()


def duration(seconds: float) -> str:
  """Seconds as people read them: 42s, 3m05s, 2h07m."""
  seconds = round(seconds)
  minutes, hours = seconds // 60, seconds // 3600
  if hours:
    return f'{hours}h{minutes % 60:02d}m'
  return f'{minutes}m{seconds % 60:02d}s' if minutes else f'{seconds}s'
