"""A run's work directory: config.json and Orbax checkpoints that hold all of its state."""
import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
import re
import shutil
import time

from absl import logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from branchreplay import processes, seals
from branchreplay.config import UserError
from branchreplay.metrics import plain

_FROM_DISK = re.compile('No space left on device|Disk quota exceeded|Read-only file system|Input/output error|Permission denied')


def claim_workdir(path: str | os.PathLike, config: dict, may_change=()) -> Path:
  """Makes the work directory `path`, or takes up the run in it; returns it as absolute.

  Its config.json is `config`. Keys in `may_change` (nested ones joined by dots) may differ
  from the run's so far. UserError, and nothing written, where another run or other files are.
  """
  path, config = Path(path).resolve(), plain(config)
  file, part = path / 'config.json', path / f'config.json.{os.getpid()}'
  try:
    path.mkdir(parents=True, exist_ok=True)
    if file.exists():
      changed = _differences(_flat(json.loads(file.read_text())), _flat(config))
      refused = [text for key, text in changed.items() if key not in may_change]
      if refused:
        raise UserError(f'{path} holds a run of another configuration ({"; ".join(refused)}); '
                        'give another --workdir or delete that one.')
    elif any(not entry.name.startswith('config.json') for entry in path.iterdir()):
      raise UserError(f'{path} holds files but no config.json, so it is no work directory; '
                      'give another --workdir.')
    if (path / 'lock').exists():
      with only_writer(path):  # UserError where another process is at work
        pass
    part.write_text(json.dumps(config, indent=2, allow_nan=False) + '\n')
    part.replace(file)  # a kill leaves no half-written config
  except OSError as error:
    raise UserError(f'{path} cannot be a work directory ({error.strerror}); give another --workdir.')
  except ValueError:
    raise UserError(f'{file} is not a JSON object; repair it or give another --workdir.')
  return path


@contextlib.contextmanager
def only_writer(workdir: Path):
  """Keeps other processes from the work directory; UserError where one is at work in it."""
  with open(workdir / 'lock', 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      raise UserError(f'another process is training in {workdir}; wait for it, or give another --workdir.')
    yield


def _flat(config: dict, prefix: str = '') -> dict:
  """{'a': {'b': 1}} as {'a.b': '1'}; ValueError for no dict."""
  if not isinstance(config, dict):
    raise ValueError(config)
  flat = {}
  for key, value in config.items():
    inner = isinstance(value, dict)
    flat |= _flat(value, f'{prefix}{key}.') if inner else {prefix + key: json.dumps(value)}
  return flat


def _differences(held: dict, asked: dict) -> dict:
  """key -> what it is in either dict, for the keys that differ."""
  return {key: f'{key} is {held.get(key, "absent")} there and {asked.get(key, "absent")} here'
          for key in sorted(held.keys() | asked.keys()) if held.get(key) != asked.get(key)}


def fingerprint(tree) -> str:
  """Of every bit of a tree of arrays (no scalars), however they lie on devices."""
  def words(x):
    bits = jax.lax.bitcast_convert_type(x, f'uint{8 * min(4, x.dtype.itemsize)}').astype(jnp.uint32)
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return (bits * (2 * place + 1)).sum(dtype=jnp.uint32)
  sums = processes.fetch(jax.jit(lambda leaves: [words(x) for x in leaves])(jax.tree.leaves(tree)))
  return hashlib.sha256(repr([int(x) for x in sums]).encode()).hexdigest()


def open_checkpoints(workdir: Path, keep: int = 2) -> ocp.CheckpointManager:
  """Manager of the last `keep` checkpoints in `workdir`; `with` waits for saves at its end."""
  return ocp.CheckpointManager(
      Path(workdir).resolve() / 'checkpoints',  # a relative one would fail in the background
      options=ocp.CheckpointManagerOptions(
          preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True),
      item_handlers={'state': ocp.StandardCheckpointHandler(), 'meta': ocp.JsonCheckpointHandler()})


class NotSaved(Exception):
  """A checkpoint could not be written; earlier ones are as they were. Its text is one sentence."""


def save(manager: ocp.CheckpointManager, step: int, state, meta: dict) -> bool:
  """Saves `state`, a tree of arrays, and the JSON dict `meta`, and seals them; False if `step` is held.

  Raises NotSaved where the disk refuses.
  """
  folder, verbosity = manager.directory / str(step), logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)  # Orbax logs the traceback of what is raised here
  try:
    saved = manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(plain(meta))))
    manager.wait_until_finished()
    if saved and processes.is_first():  # all have written
      seals.seal(Path(folder))
  except Exception as error:  # of the file system, and as Orbax and TensorStore pass it on
    if not isinstance(error, OSError) and not _FROM_DISK.search(str(error)):
      raise
    for part in (Path(folder), *Path(manager.directory).glob(f'{step}.*')):  # in the way of the next
      shutil.rmtree(part, ignore_errors=True)
    reason = _FROM_DISK.search(str(error))
    raise NotSaved(f'the checkpoint of step {step} could not be written to {manager.directory} '
                   f'({reason.group() if reason else error})') from None
  finally:
    logging.set_verbosity(verbosity)
  return saved


def newest_good(manager: ocp.CheckpointManager, log=lambda text: None) -> tuple[int | None, list[int]]:
  """(newest step whose checkpoint is as it was sealed, newer steps that are damaged); (None, []) without checkpoints.

  `log` gets a sentence of each damaged one. UserError where checkpoints are there and none is good.
  """
  bad = []
  for step in sorted(manager.all_steps(), reverse=True):
    if (problem := seals.fault(Path(manager.directory / str(step)))) is None:
      return step, bad
    log(f'the checkpoint of step {step} in {manager.directory} is damaged ({problem}); an earlier one is looked for.')
    bad.append(step)
  if bad:
    raise UserError(f'no checkpoint in {manager.directory} is whole; put a copy of one in its place, or give another '
                    '--workdir.')
  return None, []


def restore_latest(manager: ocp.CheckpointManager, target, log=lambda text: None) -> tuple[int, object, dict] | None:
  """(step, state, meta) of the newest good checkpoint; None where there is none. See `newest_good`.

  Damaged newer ones are moved to the folder `damaged`, out of the way of those to come.
  `target`: `jax.ShapeDtypeStruct`s with shardings. UserError, before a read, if it does not fit.
  """
  step, bad = processes.from_first(lambda: newest_good(manager, log))
  if step is None:
    return None
  _check_fit(manager, step, manager.item_metadata(step).state.tree, target)
  processes.from_first(lambda: _put_aside(manager, bad))
  if bad:
    manager.reload()
  items = manager.restore(step, args=ocp.args.Composite(
      state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()))
  return step, items.state, items.meta


def _put_aside(manager, steps: list[int]) -> None:
  aside = Path(manager.directory).parent / 'damaged'
  for step in steps:
    aside.mkdir(exist_ok=True)
    os.replace(manager.directory / str(step), aside / f'{step}-{time.time_ns()}')


def restore_part(manager: ocp.CheckpointManager, name: str, target, log=lambda text: None) -> tuple[int, object, dict] | None:
  """(step, state[name], meta) of the newest good checkpoint, no more of it read; None where there is none."""
  step, _ = newest_good(manager, log)
  if step is None:
    return None
  _check_fit(manager, step, manager.item_metadata(step).state.tree[name], target)
  item = {name: target}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    state = reader.restore(manager.directory / str(step) / 'state', args=ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True))
  return step, state[name], manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta


def _check_fit(manager, step: int, tree, target) -> None:
  for text in _differences(_leaves(tree), _leaves(target)).values():
    raise UserError(f'the checkpoint {manager.directory / str(step)} does not fit this model '
                    f'({text}); give another --workdir.')


def _leaves(tree) -> dict:
  """Path -> dtype and shape of each leaf; a random key counts as the words it is saved as."""
  def describe(leaf):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f'{leaf.dtype}{list(leaf.shape)}'
  return {jax.tree_util.keystr(path, simple=True, separator='/'): describe(leaf)
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
