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

LAYOUTS = ((1, 8, False), (2, 4, True))  # data, seq, whether parameters are split


def gradient(data: int, seq: int, shard_params: bool) -> np.ndarray:
  """The flat gradient of two groups, different ones on the rows of the data axis."""
  groups = jax.tree.map(lambda *x: np.concatenate(x), engine.make(engine.SMALL, 75, [17, 0, 9], seed=1),
                        engine.make(engine.SMALL, 40, [3, 24, 1], seed=2))
  replay = dataclasses.replace(engine.REPLAY, shard_params=shard_params)
  function = gradients.gradient_function(mesh.make_mesh(data, seq), engine.SMALL, replay,
                                         objectives.make_objective('grpo', engine.OBJECTIVE), groups)
  params = model.init(engine.SMALL, jax.random.key(0), np.dtype('float64'))
  return engine.flat(processes.fetch(function(params, groups)))


def main(flags):
  found = {f'{data}x{seq}': gradient(data, seq, shard) for data, seq, shard in LAYOUTS}
  if processes.is_first():
    np.savez(flags.out, processes=jax.process_count(), **found)


if __name__ == '__main__':
  common.run(lambda flags: absl_flags.DEFINE_string('out', '', 'npz file to write', flag_values=flags), main, several=True)
