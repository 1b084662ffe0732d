"""Gradients in steps, for scripts: progress on the way, and a killed run that goes on inside a capture or pull."""
import hashlib
from pathlib import Path
import shutil
import time

import jax
import numpy as np

from branchreplay import checkpoint, metrics, objectives, stream
from branchreplay.config import UserError
from experiments import common

PHASES = ('capture', 'replay', 'pull')


def progress(at_once: int, seconds: dict | None = None):
  """A `watch` for `stream.gradient`: waits for each step, adds its time to seconds[phase], says every 10 s how far it is."""
  seconds, clock = dict.fromkeys(PHASES, 0.0) if seconds is None else seconds, [time.perf_counter()]
  said = [clock[0]]

  def watch(phase, done, of, held=None):
    jax.block_until_ready(held)
    now = time.perf_counter()
    seconds[phase] += now - clock[0]
    if now - said[0] > 10:
      left = metrics.duration((now - clock[0]) / at_once * (of - done))
      common.log(f'{phase} {done}/{of} segments, {metrics.duration(seconds[phase])}, about {left} left at this pace')
      said[0] = now
    clock[0] = time.perf_counter()

  return watch


def gradient_in_steps(run, groups):
  """What `gradients.gradient_function` makes for groups shaped like `groups`, in steps, as run.train says.

  run: training.Run. With train.save_steps what is done is in the folder `stream` of its work directory.
  """
  if run.train.save_steps and jax.process_count() > 1:
    raise UserError('--save_steps writes from one process; leave it out, or use one.')
  objective = objectives.make_objective(run.train.objective, run.objective)
  steps, at_once = stream.make_steps(run.mesh, run.model, run.replay, objective, groups), run.train.stream

  def in_steps(params, groups):
    watch = progress(at_once)
    if not run.train.save_steps:
      return stream.gradient(steps, run.replay, params, groups, at_once, watch)
    shapes = stream.shapes_of(run.mesh, run.replay, steps, params, groups)
    return gradient(f'{run.where.workdir}/stream', run.train.save_steps, steps, shapes, run.model, run.replay, params, groups,
                    at_once, watch)

  return in_steps


def fingerprint(model, replay, params, groups) -> str:
  """What a saved step belongs to: the configuration, the groups, and every bit of the parameters."""
  digest = hashlib.sha256(repr((model, replay, checkpoint.fingerprint(params))).encode())
  for leaf in jax.tree.leaves(groups):
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()


def _read(manager, target, mark: str, wanted=lambda done: True):
  """(done, state, note) of the newest good checkpoint if it is of this very gradient and `wanted`; else None, and none are left."""
  try:
    found = checkpoint.restore_latest(manager, target, common.log)
    if found is not None and found[2].pop('mark') == mark and wanted(found[0]):
      return found
  except UserError as error:  # damaged, or of other sizes: what was saved is only time
    common.log(f'{error} It is not used.')
  for step in manager.all_steps():  # in the way of those to come
    manager.delete(step)
  return None


def gradient(folder: str, save_every: float, steps: stream.Steps, shapes: dict, model, replay, params, groups,
             at_once: int, watch=lambda phase, done, of: None, note: dict | None = None) -> stream.Result:
  """`stream.gradient` that saves what it holds to `folder` every `save_every` seconds, and goes on from there.

  shapes: of `stream.shapes_of`. watch(phase, done, of) is called after every step. note: of JSON values, saved
  too, and updated from what was saved.
  The folder is emptied at the end. What another gradient (other parameters, groups or
  sizes) left there is not used.
  """
  folder, mark = Path(folder).resolve(), fingerprint(model, replay, params, groups)
  note, pulled = {} if note is None else note, {name: shapes[name] for name in ('pulling', 'out')}
  with (checkpoint.only_writer(common.make_folder(str(folder))), checkpoint.open_checkpoints(folder / 'capture') as capture,
        checkpoint.open_checkpoints(folder / 'pull') as pull):
    begin, last = (0, 0, {}), [time.monotonic()]
    n, _ = stream.segments_of(replay, groups)
    found = _read(capture, {'captured': shapes['captured']}, mark)
    more = _read(pull, pulled, mark, wanted=lambda _: found is not None and found[0] == n)
    if found is not None:
      begin = (0, *found[:2]) if more is None else (2, more[0], found[1] | more[1])
      note.update((more or found)[2])
      common.log(f'{folder}: going on with the {PHASES[begin[0]]} after segment {begin[1]}.')

    def save(manager, done, tree):
      try:
        checkpoint.save(manager, done, tree, note | {'mark': mark})
      except checkpoint.NotSaved as error:
        common.log(f'{error}; going on without it.')
      last[0] = time.monotonic()

    def seen(phase, done, of, tree):
      jax.block_until_ready(tree)
      watch(phase, done, of)
      due = time.monotonic() - last[0] >= save_every
      if phase == 'capture' and (due or done == of):
        save(capture, done, tree)
      elif phase == 'pull' and due and done < of:
        save(pull, done, {k: tree[k] for k in pulled})

    result = jax.block_until_ready(stream.gradient(steps, replay, params, groups, at_once, seen, begin))
  for part in ('capture', 'pull'):
    shutil.rmtree(folder / part, ignore_errors=True)
  return result
