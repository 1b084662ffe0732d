"""A gradient killed between two steps goes on from the last one saved, and from nothing else."""
import dataclasses

import jax
import numpy as np
import pytest

from branchreplay import mesh, objectives, stream
from experiments import resume
from tests import engine


class Killed(Exception):
  pass


def test_goes_on_after_a_kill(tmp_path, capsys):
  shape, replay = engine.SMALL, dataclasses.replace(engine.REPLAY, prefix_capacity=128)
  group, params = engine.make(shape, 125, [7, 3], replay=replay), engine.parameters(shape)
  steps = stream.make_steps(mesh.make_mesh(1, 2), shape, replay, objectives.make_objective('grpo', engine.OBJECTIVE), group)
  shapes = stream.shapes_of(mesh.make_mesh(1, 2), replay, steps, params, group)
  steps = steps._replace(**{name: stream.compiled(steps, name, shapes) for name in stream.ARGUMENTS})
  done, note = [], {}

  def run(params, stop_at=None):
    def watch(phase, segments, of):
      done.append((phase, segments))
      note['steps'] = note.get('steps', 0) + 1
      if done[-1] == stop_at:
        raise Killed
    del done[:]
    note.clear()
    placed = jax.device_put((params, group), steps.open.input_shardings[0])
    return resume.gradient(str(tmp_path), 0.0, steps, shapes, shape, replay, *placed, 1, watch, note)

  want, every = run(params), list(done)
  assert every == [*(('capture', i) for i in (1, 2, 3, 4)), ('replay', 1), *(('pull', i) for i in (1, 2, 3, 4))]
  assert [p.name for p in tmp_path.iterdir()] == ['lock']
  for stop_at in (('capture', 3), ('capture', 4), ('pull', 1), ('pull', 3)):
    with pytest.raises(Killed):
      run(params, stop_at)
  got = run(params)
  said = [line.split('going on with the ')[1] for line in capsys.readouterr().err.splitlines()]
  assert said == ['capture after segment 2.', 'capture after segment 3.', 'capture after segment 4.', 'pull after segment 2.']
  assert done == [('pull', 3), ('pull', 4)] and note == {'steps': len(every)}
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)

  with pytest.raises(Killed):
    run(params, ('pull', 3))
  other = jax.tree.map(lambda x: x * 1.5, params)
  run(other)
  assert done == every  # what other parameters left is not theirs
