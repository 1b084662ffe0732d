"""What every script shares: flags from dataclasses, user mistakes as one sentence, rows.

A script has `define(flags)`, which adds its flags to the given absl FlagValues, and
`main(flags)`; its last lines are

    if __name__ == '__main__':
      common.run(define, main)
"""
import contextlib
import dataclasses
import datetime
import inspect
import math
import os
from pathlib import Path
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import types
import typing

from absl import flags as absl_flags
import jax
import jaxlib
import numpy as np

from branchreplay import config, prefix, processes
from branchreplay.branches import most_segments
from branchreplay.config import UserError
from branchreplay.metrics import strict_json
from experiments import launcher

ROOT = Path(__file__).resolve().parent.parent
DEFINE = {bool: absl_flags.DEFINE_bool, int: absl_flags.DEFINE_integer, float: absl_flags.DEFINE_float,
          str: absl_flags.DEFINE_string, tuple: absl_flags.DEFINE_list}


def define_flags(flags: absl_flags.FlagValues, config, prefix: str = '', skip=()) -> None:
  """Adds a flag --<prefix><field> for each field of the frozen dataclass `config`.

  Defaults are the values of `config`, help texts the comments beside the fields.
  Fields may be int, float, bool, str, one of these or None, or tuple[str, ...]
  (commas on the command line); others, and those in `skip`, get no flag.
  """
  comments = dict(re.findall(r'^ +(\w+):[^#\n]*#\s*(.*)$', inspect.getsource(type(config)), re.M))
  for name, kind in _kinds(config, skip).items():
    default, text = getattr(config, name), comments.get(name, '')
    DEFINE[kind](prefix + name, list(default) if kind is tuple else default, text, flag_values=flags)


def from_flags(flags: absl_flags.FlagValues, config, prefix: str = '', skip=(), only_given: bool = False):
  """`config` with the values of the flags that `define_flags` made; UserError for NaN.

  only_given: only of flags that the command line gives, so that others stay as `config` has them.
  """
  values = {}
  for name, kind in _kinds(config, skip).items():
    if only_given and not flags[prefix + name].present:
      continue
    value = flags[prefix + name].value
    if kind is float and value is not None and math.isnan(value):
      raise UserError(f'flag --{prefix}{name}={value}: it must be a number.')
    values[name] = tuple(value) if kind is tuple else value
  return dataclasses.replace(config, **values)


def _kinds(config, skip) -> dict:
  """Field -> the type of its flag, for the fields that have one."""
  kinds = {}
  for name, hint in typing.get_type_hints(type(config)).items():
    if isinstance(hint, types.UnionType) and types.NoneType in hint.__args__:
      hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
    kind = tuple if hint == tuple[str, ...] else hint
    if kind in DEFINE and name not in skip:
      kinds[name] = kind
  return kinds


def run(define, main, argv: list[str] | None = None, several: bool = False) -> None:
  """Parses flags, sets JAX up before a backend starts and calls `main(flags)`.

  Adds --dtype and --virtual_devices, whose defaults `define` may change with `flags.set_default`,
  and the launcher's flags; only a script that says `several` runs as several processes. A user's
  mistake ends the process with status 2 and one sentence on stderr, an interrupt with 130, a closed pipe
  with 141 as it would a shell's command, a script that SIGTERM stopped with 0; any other exception is ours and passes.
  """
  argv = sys.argv if argv is None else argv
  flags = absl_flags.FlagValues()
  absl_flags.DEFINE_bool('help', False, 'show this text', short_name='h', flag_values=flags)
  absl_flags.DEFINE_integer('virtual_devices', 8, 'devices a CPU is seen as', lower_bound=1,
                            flag_values=flags)
  absl_flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16', 'float64'],
                         'dtype of the parameters', flag_values=flags)
  launcher.define(flags)
  define(flags)
  try:
    extra = flags(argv)[1:]
    if flags.help:
      print(inspect.getmodule(main).__doc__ or '', flags.get_help(include_special_flags=False), sep='\n', flush=True)
      return
    if extra:
      raise UserError(f'unexpected argument {extra[0]!r}; flags are written --name=value.')
    if jax.config.jax_num_cpu_devices != flags.virtual_devices:
      jax.config.update('jax_num_cpu_devices', flags.virtual_devices)
    if flags.dtype == 'float64':
      jax.config.update('jax_enable_x64', True)
    if told := launcher.told():
      launcher.join(told)
    elif place := launcher.find_place(flags.processes, flags.process_id, flags.coordinator, os.environ):
      if not several:
        raise UserError('this script runs as one process; start it once, without --processes.')
      module = sys.modules[main.__module__].__spec__.name
      raise SystemExit(launcher.launch(place, module, argv[1:], flags.join_seconds))
    main(flags)
  except (UserError, absl_flags.Error) as error:
    _leave(2, str(error))
  except RuntimeError as error:
    if not str(error).startswith('Unable to initialize backend'):
      raise
    _leave(2, str(error))
  except Stopped as stopped:
    _leave(0, str(stopped))
  except KeyboardInterrupt:
    _leave(130, 'interrupted by the user.')
  except BrokenPipeError:  # who read the output, as `| head` does, has gone
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own last flush is silent
    raise SystemExit(141) from None


def _leave(status: int, sentence: str) -> typing.NoReturn:
  sentence = ' '.join(sentence.split()).rstrip()
  if status or processes.is_first():  # stopping is said once, a mistake by whoever meets it
    print(sentence if sentence.endswith(('.', '?')) else sentence + '.', file=sys.stderr, flush=True)
  if status:
    launcher.leave(status)
  raise SystemExit(status) from None


def whole_numbers(name: str, values, least: int = 0) -> list[int]:
  """The values of the list flag `name`; UserError unless whole numbers of at least `least`, one or more."""
  if not values or not all(v.isdecimal() and int(v) >= least for v in values):
    raise UserError(f'--{name}={",".join(values)}: give whole numbers of at least {least}, with commas between.')
  return [int(v) for v in values]


def check_known(what: str, given, known) -> None:
  """UserError that lists the `known` names of a `what` where one of `given` is none of them."""
  if unknown := set(given) - set(known):
    raise UserError(f'unknown {what} {min(unknown)!r}; there are {", ".join(known)}.')


def make_folder(path: str) -> Path:
  """The folder --out names, made where it is not there; UserError where it cannot be."""
  try:
    Path(path).mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'cannot write to {path!r} ({error.strerror}); choose another --out.')
  return Path(path)


class Stopped(Exception):
  """The run was asked to stop and did; its text is one sentence on how to go on."""


class Stop:
  """What a run knows of SIGTERM: `asked`, whether it came."""

  def __init__(self, sentence: str):
    self.asked, self._at_once = False, sentence

  def save_first(self) -> None:
    """From here on there is something to save before stopping."""
    self._at_once = None
    if in_main_thread():  # which alone gets signals
      signal.signal(signal.SIGTERM, self.handle)

  def handle(self, *_) -> None:
    self.asked = True
    if self._at_once:
      raise Stopped(self._at_once)


def in_main_thread() -> bool:
  return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def sigterm(sentence: str):
  """Yields a Stop; SIGTERM raises Stopped(sentence) until `save_first()` is called.

  Until then one process of several is simply ended, even where it waits for another: its launcher
  says the sentence. Whether to stop is for all of them to agree on, see `processes.from_all`.
  """
  stop = Stop(sentence)
  if not in_main_thread():
    yield stop
    return
  before = signal.getsignal(signal.SIGTERM)
  if jax.process_count() == 1:
    signal.signal(signal.SIGTERM, stop.handle)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)


def emit(row: dict) -> None:
  """Prints a row as one line of strict JSON on stdout; of several processes the first does."""
  if processes.is_first():
    print(strict_json(row), flush=True)


def device_bytes() -> int:
  """Memory of one device: an accelerator's own, or its share of the machine's."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit']
  sharing = jax.local_device_count() * processes.on_this_host()
  return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // sharing


def program_bytes(report, of: str = '') -> int:
  """Bytes a device of a compiled program, of its `memory_analysis()`: arguments, outputs and temporaries, donated ones once.

  of: 'host_' for those in the host's memory.
  """
  size = lambda part: getattr(report, f'{of}{part}_size_in_bytes')
  return size('argument') + size('output') + size('temp') - size('alias')


def fit_keep(model, replay, seq: int, dtype, captures: int = 1):
  """`replay` with keep=auto settled: the most that fits in an eighth of a device's memory, `captures` times and of a micro-batch.

  Of all its memory, so that a run taken up on the same machine does as it did before; of the
  process that has least.
  """
  if replay.keep != 'auto':
    return replay
  room, sizes = device_bytes() // 8, prefix.kept_bytes(model, replay, seq, dtype)
  tokens = replay.replay_batch * most_segments(model, replay) * replay.branch_segment_len // seq
  of_branches = lambda keep: tokens * prefix.kept_of_position(model, dtype)['products'] if keep == 'layers' else 0
  fitting = sum(captures * sizes[keep] + of_branches(keep) <= room for keep in config.KEEPS)  # they grow
  return dataclasses.replace(replay, keep=config.KEEPS[processes.from_all(fitting).min() - 1])


def append_row(path: str | os.PathLike, row: dict) -> None:
  """Appends a row to the JSONL file `path`, made with its folders where it is not there; of several processes the first does."""
  if not processes.is_first():
    return
  try:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a', encoding='utf-8') as file:
      file.write(strict_json(row) + '\n')
  except OSError as error:
    raise UserError(f'cannot write {os.fspath(path)!r} ({error.strerror}); choose another place.')


def provenance() -> dict:
  """Where a row comes from: command, versions, commit, devices, CPU cores, UTC time."""
  device = jax.devices()[0]
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  return {
      'command': command(),
      'commit': commit(),
      'python': platform.python_version(), 'jax': jax.__version__, 'jaxlib': jaxlib.__version__,
      'numpy': np.__version__,
      'platform': device.platform, 'device': device.device_kind, 'devices': jax.device_count(),
      'processes': jax.process_count(),
      'cpu_cores': cores,
      'time': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
  }


def command() -> str:
  """The command of this process, as a user gives it."""
  return shlex.join(['bash', 'launch.sh', Path(sys.argv[0]).stem, *sys.argv[1:]])


def commit() -> str | None:
  """Short hash of the commit, `+dirty` if any file but results differs; None outside git."""
  def git(*arguments):
    return subprocess.run(['git', '-C', str(ROOT), *arguments], capture_output=True, text=True,
                          check=True).stdout.strip()
  try:
    changes = git('status', '--porcelain', '--', '.', ':!experiments/results')
    return git('rev-parse', '--short', 'HEAD') + ('+dirty' if changes else '')
  except (OSError, subprocess.CalledProcessError):
    return None


def log(text: str) -> None:
  """Says something to the user, on stderr: stdout is for rows. Of several processes the first does."""
  if processes.is_first():
    print(text, file=sys.stderr, flush=True)
