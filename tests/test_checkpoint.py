"""Checkpoints give back the bytes that were saved; a work directory is never taken over."""
import errno
import functools
import json
import re
import shutil
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

from branchreplay import checkpoint
from branchreplay.config import UserError


@flax.struct.dataclass
class State:
  params: Any
  moments: Any
  step: jax.Array
  key: jax.Array


def make_state(devices: int = 8, width: int = 4, dtype=jnp.float32):
  mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ('data', 'seq'))
  split, whole = NamedSharding(mesh, P('seq')), NamedSharding(mesh, P())
  embed = jnp.arange(8 * width, dtype=dtype).reshape(8, width)
  params = {'embed': jax.device_put(embed, split),
            'blocks': (jax.device_put(jnp.full(3, 0.1, jnp.bfloat16), whole),)}
  moments = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params)
  return State(params, moments, jax.device_put(jnp.int32(7), whole), jax.random.key(3))


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert x.dtype == y.dtype and x.shape == y.shape
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize('devices', [1, 8])
def test_round_trip_on_as_many_or_fewer_devices(tmp_path, devices):
  meta = {'cursor': 3_000_000_000, 'seconds': np.float64(1.5)}
  with checkpoint.open_checkpoints(tmp_path) as manager:
    assert checkpoint.restore_latest(manager, abstract(make_state())) is None
    assert checkpoint.save(manager, 5, make_state(), meta)
  target = abstract(make_state(devices))
  with checkpoint.open_checkpoints(tmp_path) as manager:
    step, state, held = checkpoint.restore_latest(manager, target)
  assert (step, held) == (5, {'cursor': 3_000_000_000, 'seconds': 1.5})
  assert_same(state, make_state())
  assert state.params['embed'].sharding == target.params['embed'].sharding


def test_a_donated_step_after_an_async_save_does_not_change_it(tmp_path):
  step = jax.jit(lambda x: jax.tree.map(lambda a: a * 3 + 1, x), donate_argnums=0)
  make = lambda: make_state(width=250_000).params
  state, other = make(), make()
  step(other)  # compiled before, so that the donation comes at once
  assert all(x.is_deleted() for x in jax.tree.leaves(other))  # it does donate
  with checkpoint.open_checkpoints(tmp_path) as manager:
    checkpoint.save(manager, 1, state, {})
    for _ in range(3):
      state = step(state)
    jax.block_until_ready(state)
    manager.wait_until_finished()
    _, held, _ = checkpoint.restore_latest(manager, abstract(state))
  assert_same(held, make())
  assert float(state['embed'][0, 1]) == 40.0  # 1 -> 4 -> 13 -> 40


def test_the_last_are_kept_and_a_held_step_is_not_saved_again(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with checkpoint.open_checkpoints('run', keep=2) as manager:  # relative
    for step in (1, 2, 3, 4):
      assert checkpoint.save(manager, step, {'x': jnp.full(2, step)}, {})
    assert not checkpoint.save(manager, 4, {'x': jnp.zeros(2)}, {})
    manager.wait_until_finished()
    assert manager.all_steps() == [3, 4]
    _, state, _ = checkpoint.restore_latest(manager, abstract({'x': jnp.zeros(2, int)}))
  assert state['x'].tolist() == [4, 4]
  assert (tmp_path / 'run' / 'checkpoints' / '4').is_dir()


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
  with checkpoint.open_checkpoints(tmp_path) as manager:
    for step in (1, 2):
      checkpoint.save(manager, step, {'x': jnp.full(2, step)}, {})
  last = tmp_path / 'checkpoints' / '2'
  last.rename(last.with_name('2.orbax-checkpoint-tmp'))  # its name until it is whole
  with checkpoint.open_checkpoints(tmp_path) as manager:
    step, state, _ = checkpoint.restore_latest(manager, abstract({'x': jnp.zeros(2, int)}))
    assert step == 1 and state['x'].tolist() == [1, 1]
    assert checkpoint.save(manager, 2, {'x': jnp.full(2, 9)}, {})
    manager.wait_until_finished()
    assert checkpoint.restore_latest(manager, abstract(state))[0] == 2


def saved(tmp_path, steps=(1, 2, 3)):
  with checkpoint.open_checkpoints(tmp_path, keep=9) as manager:
    for step in steps:
      checkpoint.save(manager, step, {'x': jnp.full(500, step)}, {})


def restored(tmp_path, log):
  with checkpoint.open_checkpoints(tmp_path, keep=9) as manager:
    return checkpoint.restore_latest(manager, abstract({'x': jnp.zeros(500, int)}), log)


def files(folder):
  return sorted(p for p in folder.rglob('*') if p.is_file())


@pytest.mark.parametrize('damage, sentence', [
    ('flip', 'is changed'), ('truncate', 'is changed'), ('remove', 'is missing|never finished')])
def test_damage_to_any_file_is_seen_and_an_earlier_checkpoint_taken(tmp_path, damage, sentence):
  saved(tmp_path / 'whole')
  names = [p.relative_to(tmp_path / 'whole') for p in files(tmp_path / 'whole' / 'checkpoints' / '3')]
  assert len(names) > 5
  for i, name in enumerate(names):
    copy = tmp_path / f'{damage}-{i}'
    shutil.copytree(tmp_path / 'whole', copy)
    held = (copy / name).read_bytes()
    if damage == 'remove':
      (copy / name).unlink()
    elif held:
      at = len(held) // 2
      (copy / name).write_bytes(held[:at] + (bytes([held[at] ^ 1]) + held[at + 1:] if damage == 'flip' else b''))
    else:
      continue  # an empty file has nothing to change
    said = []
    step, state, _ = restored(copy, said.append)
    assert step == 2 and np.all(state['x'] == 2), name
    assert len(said) == 1 and (name.name == 'checksums.json' or re.search(sentence, said[0])), said
    assert [p.name[:2] for p in (copy / 'damaged').iterdir()] == ['3-']
    with checkpoint.open_checkpoints(copy, keep=9) as manager:
      assert checkpoint.save(manager, 3, {'x': jnp.full(500, 3)}, {})  # nothing in its way
    assert restored(copy, said.append)[0] == 3 and len(said) == 1


def test_no_good_checkpoint_stops_and_changes_nothing(tmp_path):
  saved(tmp_path, steps=(1, 2))
  for step in (1, 2):
    (tmp_path / 'checkpoints' / str(step) / 'checksums.json').write_text('{}')
  before = {p: p.read_bytes() for p in files(tmp_path)}
  with pytest.raises(UserError, match='no checkpoint in .* is whole'):
    restored(tmp_path, lambda text: None)
  assert {p: p.read_bytes() for p in files(tmp_path)} == before


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
  saved(tmp_path, steps=(1,))
  full = lambda folder: (_ for _ in ()).throw(OSError(errno.ENOSPC, 'No space left on device'))
  with checkpoint.open_checkpoints(tmp_path) as manager:
    with monkeypatch.context() as patch:
      patch.setattr(checkpoint.seals, 'seal', full)
      with pytest.raises(checkpoint.NotSaved, match='step 2 could not be written .*No space left on device'):
        checkpoint.save(manager, 2, {'x': jnp.zeros(500, int)}, {})
    assert checkpoint.save(manager, 3, {'x': jnp.full(500, 3)}, {})
  assert restored(tmp_path, lambda text: None)[0] == 3
  assert not (tmp_path / 'checkpoints' / '2').exists()


def test_a_second_writer_is_refused(tmp_path):
  path = checkpoint.claim_workdir(tmp_path, CONFIG)
  with checkpoint.only_writer(path):
    for second in (lambda: checkpoint.claim_workdir(path, CONFIG), lambda: checkpoint.only_writer(path).__enter__()):
      with pytest.raises(UserError, match='another process is training in'):
        second()
  assert checkpoint.claim_workdir(path, CONFIG) == path


def without_block(state):
  return state.replace(params={'embed': state.params['embed']})


@pytest.mark.parametrize('target, sentence', [
    (functools.partial(make_state, width=8), r'moments/1/0/mu/embed is float32\[8, 4\] there and '
                                             r'float32\[8, 8\] here'),
    (lambda: make_state().replace(step=jnp.int64(0)), r'step is int32\[\] there and int64\[\] here'),
    (lambda: without_block(make_state()), r'params/blocks/0 is bfloat16\[3\] there and absent here'),
    (lambda: make_state().replace(key=jax.random.key(0, impl='rbg')),
     r'key is uint32\[2\] there and uint32\[4\] here'),
])
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, target, sentence):
  with checkpoint.open_checkpoints(tmp_path) as manager:
    checkpoint.save(manager, 1, make_state(), {})
    manager.wait_until_finished()
    with pytest.raises(UserError, match=sentence):
      checkpoint.restore_latest(manager, abstract(target()))


CONFIG = {'steps': 10, 'lr': 1e-3, 'model': {'pattern': ('full', 'window'), 'width': 64}}


def test_claim_and_resume(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = checkpoint.claim_workdir('runs/a', CONFIG)
  assert path == tmp_path / 'runs' / 'a'
  held = json.loads((path / 'config.json').read_text())
  assert held == {'steps': 10, 'lr': 1e-3, 'model': {'pattern': ['full', 'window'], 'width': 64}}
  (path / 'metrics.jsonl').write_text('{}\n')
  assert checkpoint.claim_workdir(path, CONFIG) == path
  assert checkpoint.claim_workdir(path, {**CONFIG, 'steps': 20}, may_change=('steps',)) == path
  assert json.loads((path / 'config.json').read_text()) == {**held, 'steps': 20}
  assert sorted(p.name for p in path.iterdir()) == ['config.json', 'metrics.jsonl']


def test_another_configuration_is_refused_and_nothing_is_written(tmp_path):
  checkpoint.claim_workdir(tmp_path, CONFIG)
  before = (tmp_path / 'config.json').read_bytes()
  other = {'steps': 20, 'lr': 2e-3, 'seed': 1, 'model': {'pattern': ('full',), 'width': 64}}
  with pytest.raises(UserError) as error:
    checkpoint.claim_workdir(tmp_path, other, may_change=('steps',))
  assert str(error.value) == (
      f'{tmp_path} holds a run of another configuration (lr is 0.001 there and 0.002 here; '
      'model.pattern is ["full", "window"] there and ["full"] here; seed is absent there and 1 here); '
      'give another --workdir or delete that one.')
  assert (tmp_path / 'config.json').read_bytes() == before


def test_a_directory_of_other_files_is_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('x')
  with pytest.raises(UserError, match='holds files but no config.json'):
    checkpoint.claim_workdir(tmp_path, CONFIG)
  assert [p.name for p in tmp_path.iterdir()] == ['thesis.tex']


@pytest.mark.parametrize('text', ['{"steps": 1', '[1]'])
def test_a_broken_config_is_refused(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UserError, match='config.json is not a JSON object'):
    checkpoint.claim_workdir(tmp_path, CONFIG)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
  (tmp_path / 'run').write_text('x')
  with pytest.raises(UserError, match='run cannot be a work directory'):
    checkpoint.claim_workdir(tmp_path / 'run', CONFIG)
