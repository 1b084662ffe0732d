"""What every peer shares: a case's batch, the loss, the meter, and the conversation with `compare`.

A peer is a process of its own. It prepares an update and serves it: a line on stdin is a
command, the answer is one line of JSON on stdout.

    update          runs one update -> seconds and loss, as in a loop of them
    memory          runs one update with freed memory handed back before it -> memory
    gradient FILE   writes the gradient of the last update to a safetensors file, under the checkpoint's names

What all of them compute, with m the mask, T = sum m over the group, A the advantages:

    rho = exp(logp - old);  k3 = exp(ref - logp) - (ref - logp) - 1
    loss = -(1/T) sum m (min(rho A, clip(rho, 0.8, 1.2) A) - 0.04 k3)
"""
import ctypes
import gc
import json
import os
from pathlib import Path
import sys
import threading
import time

import numpy as np

CLIP, KL_COEF = 0.2, 0.04


def read_case(folder) -> dict:
  """The arrays of `folder`/batch.npz; see branchreplay.hf.read_batch."""
  with np.load(Path(folder) / 'batch.npz', allow_pickle=False) as file:
    return {key: file[key] for key in file.files}


def token_loss(xp, logp, old, ref, advantage):
  """The loss of each token; xp is torch or jax.numpy."""
  rho, away = xp.exp(logp - old), ref - logp
  gain = xp.minimum(rho * advantage, xp.clip(rho, 1 - CLIP, 1 + CLIP) * advantage)
  return KL_COEF * (xp.exp(away) - away - 1) - gain


def resident() -> float:
  """MiB of this process in memory (Linux)."""
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20


def _give_back() -> None:
  """Returns freed memory to the system, so that what stays resident is in use."""
  gc.collect()
  try:
    ctypes.CDLL('libc.so.6').malloc_trim(0)
  except (OSError, AttributeError):
    pass


def timed(update) -> dict:
  """Runs update(): its wall and CPU seconds."""
  gc.collect()
  wall, cpu = time.perf_counter(), time.process_time()
  loss = update()
  return {'seconds': time.perf_counter() - wall, 'cpu_s': time.process_time() - cpu, 'loss': float(loss)}


def weighed(update) -> dict:
  """Runs update(): resident MiB before it and at its peak (every 5 ms)."""
  _give_back()
  before = peak = resident()
  stop = threading.Event()

  def sample():
    nonlocal peak
    while not stop.wait(0.005):
      peak = max(peak, resident())

  thread = threading.Thread(target=sample, daemon=True)
  thread.start()
  update()
  peak = max(peak, resident())
  stop.set()
  thread.join()
  return {'before_mib': before, 'peak_mib': peak}


def serve(prepare) -> None:
  """Serves prepare(case) -> (update, write_gradient, about) until stdin ends; the case is the first argument."""
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # what a library prints is no answer
  answer = lambda row: print(json.dumps(row), file=answers, flush=True)
  started = time.perf_counter()
  update, write_gradient, about = prepare(sys.argv[1])
  answer(about | {'loaded_mib': resident(), 'prepare_s': time.perf_counter() - started})
  for line in sys.stdin:
    command, _, argument = line.strip().partition(' ')
    if command == 'update':
      answer(timed(update))
    elif command == 'memory':
      answer(weighed(update))
    else:
      write_gradient(argument)
      answer({})
