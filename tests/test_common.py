"""Flags mirror dataclasses, a mistake is one sentence and status 2, rows are strict JSON."""
import contextlib
import dataclasses
import io
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from absl import flags as absl_flags
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchreplay import config, prefix
from branchreplay.config import ReplayConfig, UserError
from experiments import common


@dataclasses.dataclass(frozen=True)
class Config:
  steps: int = 3  # updates, all told
  lr: float = 1e-3
  shard: bool = False
  mode: str = 'exact'  # exact | depth=K
  pattern: tuple[str, ...] = ('full',)
  seq: int | None = None  # devices
  inner: dict = dataclasses.field(default_factory=dict)  # has no flag


def parse(config, *argv, prefix='', skip=()):
  flags = absl_flags.FlagValues()
  common.define_flags(flags, config, prefix, skip)
  flags(['x', *argv])
  return common.from_flags(flags, config, prefix, skip)


def test_defaults_come_from_the_instance():
  config = Config(steps=7, pattern=('window', 'full'), shard=True, inner={'a': 1})
  assert parse(config) == config
  assert parse(ReplayConfig(segment_len=8)) == ReplayConfig(segment_len=8)


def test_values_have_the_fields_types():
  config = parse(Config(), '--steps=5', '--lr=2', '--shard', '--mode=depth=2', '--pattern=deltanet,full',
                 '--seq=4')
  assert config == Config(5, 2.0, True, 'depth=2', ('deltanet', 'full'), 4)
  assert isinstance(config.lr, float) and isinstance(config.pattern, tuple)


def test_prefix_and_skip():
  assert parse(Config(), '--eval_steps=5', prefix='eval_') == Config(steps=5)
  with pytest.raises(absl_flags.Error, match="'steps'"):
    parse(Config(), '--steps=5', skip=('steps',))


def test_nan_is_refused():
  with pytest.raises(UserError, match='--lr=nan'):
    parse(Config(), '--lr=nan')


def run(capsys, *argv, main=lambda flags: None, define=lambda flags: None):
  """Status, stdout and stderr of a script, in this process."""
  def define_all(flags):
    common.define_flags(flags, Config())
    define(flags)
  try:
    common.run(define_all, main, ['x', *argv])
    status = 0
  except SystemExit as error:
    status = error.code
  return status, *capsys.readouterr()


def test_main_gets_the_flags(capsys):
  main = lambda flags: common.emit(dataclasses.asdict(common.from_flags(flags, Config())))
  status, out, err = run(capsys, '--steps=5', main=main)
  assert (status, err) == (0, '')
  assert json.loads(out) == {'steps': 5, 'lr': 1e-3, 'shard': False, 'mode': 'exact',
                             'pattern': ['full'], 'seq': None, 'inner': {}}


@pytest.mark.parametrize('argv, sentence', [
    (['--stesp=5'], "Unknown command line flag 'stesp'. Did you mean: steps ?"),
    (['--steps=many'], "flag --steps=many: invalid literal for int() with base 10: 'many'."),
    (['--steps'], 'Missing value for flag --steps.'),
    (['--virtual_devices=0'], 'flag --virtual_devices=0: 0 is not a positive integer.'),
    (['--dtype=float8'], 'flag --dtype=float8: value should be one of <float32|bfloat16|float64>.'),
    (['5'], "unexpected argument '5'; flags are written --name=value."),
])
def test_a_wrong_command_line_is_one_sentence(capsys, argv, sentence):
  def main(flags):
    raise AssertionError('main must not run')
  assert run(capsys, *argv, main=main) == (2, '', sentence + '\n')


@pytest.mark.parametrize('error, status, sentence', [
    (UserError('branches=0;\n a group needs one.'), 2, 'branches=0; a group needs one.'),
    (RuntimeError("Unable to initialize backend 'cuda': none"), 2,
     "Unable to initialize backend 'cuda': none."),
    (KeyboardInterrupt(), 130, 'interrupted by the user.'),
])
def test_mistakes_and_interrupts_in_main(capsys, error, status, sentence):
  def main(flags):
    raise error
  assert run(capsys, main=main) == (status, '', sentence + '\n')


@pytest.mark.parametrize('kind', [ValueError, RuntimeError, OSError])
def test_our_own_errors_keep_their_traceback(capsys, kind):
  def main(flags):
    raise kind('a bug')
  with pytest.raises(kind, match='a bug'):
    run(capsys, main=main)


def test_a_closed_pipe_ends_quietly():
  command = f'{sys.executable} -m experiments.reproduce --help | true; exit ${{PIPESTATUS[0]}}'
  done = subprocess.run(['bash', '-c', command], cwd=common.ROOT, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (141, '')


def test_help(capsys):
  status, out, err = run(capsys, '--help', main=run)
  assert (status, err) == (0, '')
  assert out.startswith(__doc__)
  for text in ('--steps: updates, all told', "(default: '3')", '--mode: exact | depth=K',
               '--[no]shard', '--virtual_devices', '--dtype: <float32|bfloat16|float64>'):
    assert text in out
  assert '--inner' not in out


SCRIPT = '''
import jax
from experiments import common
def main(flags):
  common.emit({'devices': jax.device_count(), 'dtype': str(jax.numpy.zeros(1, float).dtype)})
common.run(lambda flags: flags.set_default('virtual_devices', 3), main)
'''


@pytest.mark.parametrize('argv, row', [
    ([], {'devices': 3, 'dtype': 'float32'}),
    (['--virtual_devices=5', '--dtype=float64'], {'devices': 5, 'dtype': 'float64'}),
])
def test_devices_and_dtype_are_set_before_jax_starts(argv, row):
  env = {**os.environ, 'PYTHONPATH': str(common.ROOT), 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', SCRIPT, *argv], env=env, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, '')
  assert json.loads(done.stdout) == row


def test_emit_is_one_strict_line(capsys):
  common.emit({'loss': jnp.float32('nan'), 'count': np.int64(3), 'x': jnp.arange(2)})
  assert capsys.readouterr().out == '{"loss": null, "count": 3, "x": [0, 1]}\n'


def test_append_row(tmp_path):
  path = tmp_path / 'results' / 'rows.jsonl'
  common.append_row(path, {'a': float('inf')})
  common.append_row(path, {'a': 2})
  assert path.read_text() == '{"a": null}\n{"a": 2}\n'
  with pytest.raises(UserError, match='cannot write'):
    common.append_row(tmp_path, {})


def test_provenance(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['/somewhere/experiments/speed.py', '--branches=4', '--name=a b'])
  row = common.provenance()
  assert row['command'] == "bash launch.sh speed --branches=4 '--name=a b'"
  assert (row['jax'], row['numpy']) == (jax.__version__, np.__version__)
  assert (row['platform'], row['devices']) == (jax.devices()[0].platform, jax.device_count())
  assert row['cpu_cores'] >= 1 and row['time'].endswith('+00:00')


def test_commit(tmp_path, monkeypatch):
  monkeypatch.setattr(common, 'ROOT', tmp_path)
  monkeypatch.setenv('GIT_CEILING_DIRECTORIES', str(tmp_path.parent))
  assert common.commit() is None
  git = lambda *a: subprocess.run(
      ['git', '-C', tmp_path, '-c', 'user.name=a', '-c', 'user.email=a@b', *a], check=True,
      capture_output=True, text=True).stdout.strip()
  git('init')
  assert common.commit() is None  # no commit yet
  (tmp_path / 'a.py').write_text('1')
  git('add', '.')
  git('commit', '--no-verify', '-m', 'a')
  short = git('rev-parse', '--short', 'HEAD')
  assert common.commit() == short
  results = tmp_path / 'experiments' / 'results'
  results.mkdir(parents=True)
  (results / 'speed.jsonl').write_text('{}')
  assert common.commit() == short  # a sweep's own rows change nothing
  Path(tmp_path / 'a.py').write_text('2')
  assert common.commit() == short + '+dirty'


def test_sigterm_stops_at_once_or_is_remembered():
  def main(flags):
    with common.sigterm('nothing to save yet') as stop:
      if flags.late:
        stop.save_first()
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(0.01)
      if stop.asked:
        raise common.Stopped('saved')
  before = signal.getsignal(signal.SIGTERM)
  for flag, sentence in (('--late=false', 'nothing to save yet.'), ('--late=true', 'saved.')):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as stop:
      common.run(lambda flags: absl_flags.DEFINE_bool('late', False, '', flag_values=flags), main, ['x', flag, '--dtype=float32'])
    assert stop.value.code == 0 and error.getvalue().strip() == sentence
  assert signal.getsignal(signal.SIGTERM) == before


def test_keep_auto_is_the_most_that_fits(monkeypatch):
  shape, replay = config.preset('bench'), ReplayConfig(keep='auto', prefix_capacity=8192)
  sizes = prefix.kept_bytes(shape, replay, 2, 'float32')
  assert 0 == sizes['state'] < sizes['attention'] < sizes['layers'] == 4096 * 4 * (4 * (64 * 4 + 4) + 256 * 4)
  products = 4 * 4 * (2 * 256 + 2 * 128 + 2 * 768)  # of a position, kept of branches
  layers = sizes['layers'] + 64 // 2 * (sizes['layers'] // 4096 + products)
  for room, captures, keep in ((layers, 1, 'layers'), (layers + sizes['layers'] - 1, 2, 'attention'), (layers - 1, 1, 'attention'),
                               (sizes['attention'] - 1, 1, 'state')):
    monkeypatch.setattr(common, 'device_bytes', lambda: 8 * room)
    assert common.fit_keep(shape, replay, 2, 'float32', captures).keep == keep
    assert common.fit_keep(shape, dataclasses.replace(replay, keep='attention'), 2, 'float32').keep == 'attention'
