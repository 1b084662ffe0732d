"""Starts the processes of a run on this host, ends them together, and says in one sentence why.

    bash launch.sh train --processes=2 --virtual_devices=4                                 both on this host
    bash launch.sh train --processes=2 --process_id=0 --coordinator=host-a:8476            on host-a
    bash launch.sh train --processes=2 --process_id=1 --coordinator=host-a:8476            on another
    srun bash launch.sh train                                                              a process a task
    bash launch.sh train --processes=4 --coordinator=train-0.train:8476                    in each pod of an indexed job

The launcher does no work of its own: each process is a child, which JAX may abort when it loses another.
"""
import json
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import NamedTuple

from absl import flags as absl_flags
import jax

from branchreplay.config import UserError

WORKER = 'BRANCHREPLAY_WORKER'  # tells a child what it is, as JSON
SLURM_STEP = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_LOCALID')
HEARTBEAT_SECONDS = 60  # without one, a process counts as lost
GRACE_SECONDS = 5  # in which the others may end by themselves
LOST = 75  # status of a process whose collective failed for want of another


class Place(NamedTuple):
  """A process among those of a run."""
  count: int
  index: int | None  # None: all of them are to be started here
  coordinator: str | None = None  # host:port of process 0; None: JAX asks Slurm
  devices: list[int] | None = None  # accelerators of this host that are this process's; None: JAX decides


def define(flags: absl_flags.FlagValues) -> None:
  absl_flags.DEFINE_integer('processes', None, 'processes of the run, over all hosts', lower_bound=1, flag_values=flags)
  absl_flags.DEFINE_integer('process_id', None, 'which of them this is, from 0; without it all are started here',
                            lower_bound=0, flag_values=flags)
  absl_flags.DEFINE_string('coordinator', None, 'host:port of process 0, or JAX_COORDINATOR_ADDRESS', flag_values=flags)
  absl_flags.DEFINE_integer('join_seconds', 120, 'in which all processes must have found each other', lower_bound=1,
                            flag_values=flags)


# ---------------------------------------------------------------- who we are


def find_place(processes: int | None, process_id: int | None, coordinator: str | None, environment) -> Place | None:
  """The place that flags, Slurm or an indexed Kubernetes job give; None for a run of one process."""
  slurm, index = _slurm(environment), environment.get('JOB_COMPLETION_INDEX')
  coordinator = coordinator or environment.get('JAX_COORDINATOR_ADDRESS')
  if slurm:
    processes = _same('--processes', processes, 'SLURM_NTASKS', slurm.count)
    process_id = _same('--process_id', process_id, 'SLURM_PROCID', slurm.index)
  elif index is not None and (coordinator or (processes or 1) > 1):
    process_id = _same('--process_id', process_id, 'JOB_COMPLETION_INDEX', _number('JOB_COMPLETION_INDEX', index))
  if processes is None and (coordinator or process_id is not None):
    raise UserError('one process of several is asked for (by --coordinator, JAX_COORDINATOR_ADDRESS or --process_id), '
                    'but not how many there are; give --processes.')
  if (processes or 1) == 1 and not process_id:
    return None
  if process_id is not None and process_id >= processes:
    raise UserError(f'process {process_id} is none of {processes}; they are numbered from 0 to {processes - 1}.')
  if coordinator and process_id is None:
    raise UserError(f'which of the {processes} processes this is, is not said; give --process_id beside the coordinator, '
                    'or leave both out to start all of them here.')
  if coordinator and not re.fullmatch(r'(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d{1,5}', coordinator):
    raise UserError(f'the coordinator {coordinator!r} is not of the form host:port.')
  if not coordinator and process_id is not None and not slurm:
    raise UserError(f'process {process_id} of {processes} does not know where the others are; give all of them '
                    '--coordinator=HOST:PORT, with the host of process 0 and a free port there.')
  return Place(processes, process_id, coordinator, slurm.devices if slurm else None)


def _slurm(environment) -> Place | None:
  """The task of a Slurm job step; None outside one, and in one of a single task.

  A task that is alone on its node has all of its accelerators, others one each, as JAX deals them out.
  """
  if not all(name in environment for name in SLURM_STEP):
    return None
  count, index = (_number(name, environment[name]) for name in ('SLURM_NTASKS', 'SLURM_PROCID'))
  alone = re.fullmatch(r'1(\(x\d+\))?', environment.get('SLURM_STEP_TASKS_PER_NODE', ''))
  accelerators = environment.get('SLURM_GPUS_ON_NODE')
  devices = list(range(_number('SLURM_GPUS_ON_NODE', accelerators))) if alone and accelerators else None
  return Place(count, index, devices=devices) if count > 1 else None


def _number(name: str, text: str) -> int:
  if not text.isdecimal():
    raise UserError(f'the environment has {name}={text!r}; it must be a whole number.')
  return int(text)


def _same(flag: str, given: int | None, name: str, value: int) -> int:
  """`value`, of the environment variable `name`; UserError where the flag contradicts it."""
  if given not in (None, value):
    raise UserError(f'{flag}={given} contradicts {name}={value} in the environment; leave the flag out.')
  return value


# ---------------------------------------------------------------- the launcher


def launch(place: Place, module: str, arguments: list[str], join_seconds: int) -> int:
  """Runs the processes that belong here, `python -m module arguments`, to their end; returns the status to leave with.

  When one fails the others are ended. SIGTERM is passed on to all.
  """
  places = [place]
  if place.index is None:
    coordinator = f'127.0.0.1:{_free_port()}'
    places = [Place(place.count, i, coordinator, [i]) for i in range(place.count)]
  with tempfile.TemporaryDirectory() as folder:
    workers = [Worker(p, Path(folder), module, arguments, join_seconds) for p in places]
    asked = []

    def terminate(*_):
      asked.append(True)
      for worker in reversed(workers):  # process 0, which the others watch, last
        worker.process.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
      _wait(workers, asked)
    except KeyboardInterrupt:
      print('interrupted by the user.', file=sys.stderr, flush=True)
      return 130
    finally:
      signal.signal(signal.SIGTERM, before)
      for worker in workers:
        worker.end()
    return _verdict(workers, bool(asked), join_seconds)


class Worker:
  """A process of the run, as its launcher sees it."""

  def __init__(self, place: Place, folder: Path, module: str, arguments: list[str], join_seconds: int):
    self.place, self.status = place, None  # status: None too where the launcher ended it
    self.said, self.log = folder / f'{place.index}.said', folder / f'{place.index}.log'
    told = place._asdict() | {'log': str(self.log), 'join_seconds': join_seconds, 'launcher': os.getpid()}
    with open(self.said, 'wb') as said:
      out = {} if place.index == 0 else {'stdin': subprocess.DEVNULL, 'stdout': said, 'stderr': said}
      self.process = subprocess.Popen([sys.executable, '-m', module, *arguments],
                                      env=os.environ | {WORKER: json.dumps(told)}, **out)

  def poll(self) -> int | None:
    self.status = self.process.poll()
    return self.status

  def end(self) -> None:
    if self.poll() is None:
      self.process.kill()
      self.process.wait()

  @property
  def lost_others(self) -> bool:
    """Whether it ended for want of another process, by a collective or by JAX's heartbeats."""
    aborted = self.status == -signal.SIGABRT and 'JAX distributed service detected fatal errors' in self.written
    return aborted or self.status == LOST

  @property
  def written(self) -> str:
    """What other than Python it wrote."""
    return self.log.read_text(errors='replace') if self.log.exists() else ''


def _free_port() -> int:
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return found.getsockname()[1]


def _wait(workers: list[Worker], asked: list) -> None:
  """Returns when all have ended, or one has failed and the others had time to see it too."""
  while None in (states := [w.poll() for w in workers]):
    if any(states):
      deadline = time.monotonic() + (0 if min(filter(None, states)) < 0 and not asked else GRACE_SECONDS)
      while None in [w.poll() for w in workers] and time.monotonic() < deadline:
        time.sleep(0.05)
      return
    time.sleep(0.05)


def _verdict(workers: list[Worker], asked: bool, join_seconds: int) -> int:
  """The launcher's own status; says on stderr what process 0 has not said itself."""
  say = lambda text: print(text, file=sys.stderr, flush=True)
  failed = sorted((w for w in workers if w.status), key=lambda w: (w.lost_others, w.status < 0, w.place.index))
  if not failed:
    return 0
  worker = failed[0]
  place, status = worker.place, worker.status
  if asked and status == -signal.SIGTERM:
    say('stopped; nothing was left to save: the same command goes on from its last checkpoint, or begins anew.')
    return 0
  name = f'process {place.index} of {place.count}'
  if worker.lost_others:
    if 'RegisterTask' in worker.written:
      say(f'{name}: the {place.count} processes did not find each other at {place.coordinator or "the first node"} within '
          f'{join_seconds} seconds; start all of them, and see that the address can be reached and its port is free.')
      return 2
    say(f'{name} has lost another one, which has ended or cannot be reached; see what that one says.')
    return 1
  if status > 0:
    if place.index:
      say(f'{name}: {worker.said.read_text(errors="replace").strip()}')
    return status
  if status != -signal.SIGKILL:
    say('\n'.join(worker.written.splitlines()[-20:]))
  say(f'{name} was ended by {signal.Signals(-status).name}, and the others with it; what a checkpoint holds is kept.')
  return 1


# ---------------------------------------------------------------- a process


def told() -> dict | None:
  """What the launcher tells this process of itself; None where there is none."""
  return json.loads(os.environ.pop(WORKER)) if WORKER in os.environ else None


def join(told: dict) -> None:
  """Makes this process one of the run: from here on JAX sees the devices of all."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's to answer
  _apart(told['log'])
  threading.Thread(target=_follow, args=(told['launcher'],), daemon=True).start()
  sys.excepthook = _leave_with
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM for itself
  jax.distributed.initialize(
      told['coordinator'], told['count'], told['index'], told['devices'],
      cluster_detection_method='deactivate' if told['coordinator'] else 'slurm',
      initialization_timeout=told['join_seconds'], heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


def leave(status: int) -> None:
  """Ends one process of several at once: others, which may be waiting for it, are the launcher's to end."""
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave_with(kind, error, trace) -> None:
  if issubclass(kind, jax.errors.JaxRuntimeError) and 'Gloo' in str(error):
    leave(LOST)  # the launcher knows better which process ended, and how
  traceback.print_exception(kind, error, trace)
  leave(1)


def _apart(log: str) -> None:
  """Keeps stdout and stderr for Python: what Gloo and JAX's aborts write to them goes to the file `log`."""
  sys.stdout, sys.stderr = (open(os.dup(fd), 'w', buffering=1) for fd in (1, 2))
  with open(log, 'ab') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _follow(launcher: int) -> None:
  """Ends this process where its launcher is gone."""
  while os.getppid() == launcher:
    time.sleep(1)
  os._exit(1)
