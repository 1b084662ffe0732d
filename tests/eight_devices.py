"""Gradients of two groups on eight devices, of one process or several; test_processes.py runs it.

    python -m tests.eight_devices --processes=2 --virtual_devices=4 --dtype=float64 --out=FILE.npz
"""
import dataclasses

from absl import flags as absl_flags
import jax
import numpy as np

from branchreplay import gradients, mesh, model, objectives, processes
from experiments import common
from tests import engine

# data, seq, whether parameters are split, layers: across processes go those of `seq` first, then of `data`
LAYOUTS = ((1, 8, False, ('deltanet', 'full')), (2, 4, True, ('full',)))


def gradient(data: int, seq: int, shard_params: bool, pattern) -> np.ndarray:
  """The flat gradient of two groups, each on its row of the data axis where that has two."""
  shape = dataclasses.replace(engine.SMALL, pattern=pattern)
  replay = dataclasses.replace(engine.REPLAY, shard_params=shard_params, keep='layers', branch_capacity=8)
  groups = jax.tree.map(lambda *x: np.concatenate(x), engine.make(shape, 75, [7, 0, 3], seed=1, replay=replay),
                        engine.make(shape, 40, [3, 8, 1], seed=2, replay=replay))
  function = gradients.gradient_function(mesh.make_mesh(data, seq), shape, replay,
                                         objectives.make_objective('grpo', engine.OBJECTIVE), groups)
  params = model.init(shape, jax.random.key(0), np.dtype('float64'))
  return engine.flat(processes.fetch(function(params, groups)))


def gradients_of_all() -> dict[str, np.ndarray]:
  return {f'{data}x{seq}': gradient(data, seq, *more) for data, seq, *more in LAYOUTS}


def main(flags):
  found = gradients_of_all()
  if processes.is_first():
    np.savez(flags.out, processes=jax.process_count(), **found)


if __name__ == '__main__':
  common.run(lambda flags: absl_flags.DEFINE_string('out', '', 'npz file to write', flag_values=flags), main, several=True)
