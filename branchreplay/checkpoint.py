"""A run's work directory: config.json and Orbax checkpoints that hold all of its state."""
import json
import os
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from branchreplay.config import UserError
from branchreplay.metrics import plain


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
    part.write_text(json.dumps(config, indent=2, allow_nan=False) + '\n')
    part.replace(file)  # a kill leaves no half-written config
  except OSError as error:
    raise UserError(f'{path} cannot be a work directory ({error.strerror}); give another --workdir.')
  except ValueError:
    raise UserError(f'{file} is not a JSON object; repair it or give another --workdir.')
  return path


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


def open_checkpoints(workdir: Path, keep: int = 2) -> ocp.CheckpointManager:
  """Manager of the last `keep` checkpoints in `workdir`; `with` waits for saves at its end."""
  return ocp.CheckpointManager(
      Path(workdir).resolve() / 'checkpoints',  # a relative one would fail in the background
      options=ocp.CheckpointManagerOptions(
          preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True),
      item_handlers={'state': ocp.StandardCheckpointHandler(), 'meta': ocp.JsonCheckpointHandler()})


def save(manager: ocp.CheckpointManager, step: int, state, meta: dict) -> bool:
  """Starts saving `state`, a tree of arrays, and the JSON dict `meta`; False if `step` is held.

  The next step may take the arrays as donated: what is saved is what they hold now.
  """
  return manager.save(step, args=ocp.args.Composite(
      state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(plain(meta))))


def restore_latest(manager: ocp.CheckpointManager, target) -> tuple[int, object, dict] | None:
  """(step, state, meta) of the last whole checkpoint; None where there is none.

  `target`: `jax.ShapeDtypeStruct`s with shardings. UserError, before a read, if it does not fit.
  """
  if (step := manager.latest_step()) is None:
    return None
  _check_fit(manager, step, manager.item_metadata(step).state.tree, target)
  items = manager.restore(step, args=ocp.args.Composite(
      state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()))
  return step, items.state, items.meta


def restore_part(manager: ocp.CheckpointManager, name: str, target) -> tuple[int, object] | None:
  """(step, state[name]) of the last whole checkpoint, read alone; None where there is none."""
  if (step := manager.latest_step()) is None:
    return None
  _check_fit(manager, step, manager.item_metadata(step).state.tree[name], target)
  item = {name: target}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    state = reader.restore(manager.directory / str(step) / 'state', args=ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True))
  return step, state[name]


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
