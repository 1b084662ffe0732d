"""Several processes: who they are, how they start and end together, and that they compute what one does."""
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from branchreplay import mesh, processes
from branchreplay.config import UserError
from experiments import common, launcher, train
from experiments.launcher import Place
from tests import eight_devices

SLURM = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'n[3-4]', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '2',
         'SLURM_LOCALID': '0', 'SLURM_STEP_TASKS_PER_NODE': '2(x2)', 'SLURM_GPUS_ON_NODE': '4'}
POD, NAMED = {'JOB_COMPLETION_INDEX': '1'}, {'JAX_COORDINATOR_ADDRESS': 'host:1'}


@pytest.mark.parametrize('flags, environment, place', [
    ((None, None, None), {}, None),
    ((1, None, None), {}, None),
    ((1, 0, 'host:1'), {}, None),
    ((3, None, None), {}, Place(3, None)),
    ((3, 0, 'host:1'), {}, Place(3, 0, 'host:1')),
    ((3, 2, '[fe80::1]:80'), {}, Place(3, 2, '[fe80::1]:80')),
    ((3, 2, None), NAMED, Place(3, 2, 'host:1')),
    ((None, None, None), SLURM, Place(4, 2)),
    ((4, 2, 'host:1'), SLURM, Place(4, 2, 'host:1')),
    ((None, None, None), SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x4)'}, Place(4, 2, None, [0, 1, 2, 3])),
    ((None, None, None), SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, None),
    ((None, None, None), {'SLURM_NTASKS': '4', 'SLURM_PROCID': '0'}, None),  # a batch script, no task of a step
    ((2, None, 'host:1'), POD, Place(2, 1, 'host:1')),
    ((2, None, None), POD | NAMED, Place(2, 1, 'host:1')),
    ((None, None, None), POD, None),  # pods that work on their own
])
def test_places(flags, environment, place):
  assert launcher.find_place(*flags, environment) == place


@pytest.mark.parametrize('flags, environment, sentence', [
    ((None, 1, None), {}, 'not how many there are; give --processes'),
    ((None, None, None), NAMED, 'not how many there are; give --processes'),
    ((None, None, 'host:1'), POD, 'not how many there are; give --processes'),
    ((2, 2, 'host:1'), {}, 'process 2 is none of 2'),
    ((1, 1, 'host:1'), {}, 'process 1 is none of 1'),
    ((2, None, 'host:1'), {}, 'which of the 2 processes this is'),
    ((2, 0, 'host'), {}, 'not of the form host:port'),
    ((2, 0, None), {}, 'does not know where the others are'),
    ((2, None, None), POD, 'process 1 of 2 does not know where the others are'),
    ((2, 0, 'host:1'), POD, '--process_id=0 contradicts JOB_COMPLETION_INDEX=1'),
    ((2, None, None), SLURM, '--processes=2 contradicts SLURM_NTASKS=4'),
    ((None, None, None), SLURM | {'SLURM_PROCID': 'x'}, "SLURM_PROCID='x'; it must be a whole number"),
])
def test_settings_that_are_missing_or_contradict_each_other(flags, environment, sentence):
  with pytest.raises(UserError, match=sentence.replace('[', r'\[')):
    launcher.find_place(*flags, environment)


def test_one_process_tells_itself(monkeypatch):
  assert processes.is_first() and processes.from_all(3).tolist() == [3] and processes.on_this_host() == 1
  assert processes.from_first(lambda: (None, [2])) == (None, [2])
  np.testing.assert_array_equal(processes.fetch({'x': jax.numpy.arange(3)})['x'], [0, 1, 2])
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(UserError, match='2 processes hold 8 devices and all take part, but data=1 x seq=4 are 4'):
    mesh.make_mesh(1, 4)


# A process of a run, without JAX: argument i is what process i does.
STAND_IN = '''
import json, os, signal, sys, time
told = json.loads(os.environ['BRANCHREPLAY_WORKER'])
print('process', told['index'], told['count'], flush=True)
deed = sys.argv[1 + told['index']]
if deed == 'wait':
  time.sleep(60)
if deed == 'lose':
  open(told['log'], 'w').write('JAX distributed service detected fatal errors')
  os.abort()
if deed == 'stop':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  os.kill(told['launcher'], signal.SIGTERM)
  time.sleep(60)
if deed == 'part':
  sys.exit(75)
if deed == 'die':
  os.kill(os.getpid(), signal.SIGKILL)
sys.exit(deed or 0)  # a status, or what to say
'''


@pytest.mark.parametrize('deeds, status, out, err', [
    (['', ''], 0, 'process 0 2\n', ''),
    (['wait', 'die'], 1, 'process 0 2\n', 'process 1 of 2 was ended by SIGKILL, and the others with it; what a checkpoint holds is kept.\n'),
    (['die', 'lose'], 1, 'process 0 2\n', 'process 0 of 2 was ended by SIGKILL, and the others with it; what a checkpoint holds is kept.\n'),
    (['part', 'die'], 1, 'process 0 2\n', 'process 1 of 2 was ended by SIGKILL, and the others with it; what a checkpoint holds is kept.\n'),
    (['part', 'wait'], 1, 'process 0 2\n', 'process 0 of 2 has lost another one, which has ended or cannot be reached; see what that one says.\n'),
    (['no good', 'no good'], 1, 'process 0 2\n', 'no good\n'),
    (['wait', 'no room'], 1, 'process 0 2\n', 'process 1 of 2: process 1 2\nno room\n'),
    (['stop', 'wait'], 0, 'process 0 2\n',
     'stopped; nothing was left to save: the same command goes on from its last checkpoint, or begins anew.\n'),
])
def test_processes_end_together_and_one_sentence_says_why(tmp_path, deeds, status, out, err):
  (tmp_path / 'stand_in.py').write_text(STAND_IN)
  script = f'from experiments import launcher\nraise SystemExit(launcher.launch(launcher.Place(2, None), "stand_in", {deeds}, 9))'
  started = time.monotonic()
  done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True,
                        env=os.environ | {'PYTHONPATH': f'{tmp_path}:{common.ROOT}'})
  assert (done.returncode, done.stdout, done.stderr) == (status, out, err)
  assert time.monotonic() - started < 30


def start(module, *flags):
  """Two processes of four devices."""
  env = os.environ | {'PYTHONPATH': str(common.ROOT), 'JAX_COMPILATION_CACHE_DIR': os.environ['BRANCHREPLAY_TEST_CACHE']}
  return subprocess.Popen([sys.executable, '-m', module, '--processes=2', '--virtual_devices=4', *flags], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_coordinator_that_is_not_there(tmp_path):
  process = start('tests.eight_devices', '--process_id=1', '--coordinator=127.0.0.1:9', '--join_seconds=1')
  out, err = process.communicate()
  assert (process.returncode, out) == (2, '')
  assert err == ('process 1 of 2: the 2 processes did not find each other at 127.0.0.1:9 within 1 seconds; start all of them, '
                 'and see that the address can be reached and its port is free.\n')


def test_two_processes_have_the_gradient_of_one(tmp_path):
  process = start('tests.eight_devices', '--dtype=float64', f'--out={tmp_path}/two.npz')
  one = eight_devices.gradients_of_all()
  out, err = process.communicate()
  assert (process.returncode, out, err) == (0, '', '')
  two = np.load(tmp_path / 'two.npz')
  assert two['processes'] == 2 and set(one) == {'1x8', '2x4'}
  for layout, gradient in one.items():
    assert np.linalg.norm(two[layout] - gradient) <= 1e-12 * np.linalg.norm(gradient) and np.linalg.norm(gradient) > 0.1


TINY = ['--model=tiny-dense', '--data_file=prompts.jsonl', '--reward=bytes_reward:score', '--prompt_len=32', '--prompts=2',
        '--branches=4', '--samples=0', '--resample=0', '--data=2', '--seq=4', '--segment_len=32', '--eval_prompts=2',
        '--eval_samples=2', '--checkpoint_every=2', '--dtype=float32']


@pytest.fixture
def files(tmp_path, monkeypatch):
  """The current folder has prompts and a reward that depends on the response."""
  monkeypatch.chdir(tmp_path)
  Path('prompts.jsonl').write_text(''.join(json.dumps({'prompt': f'the fact is {i}', 'answer': str(i)}) + '\n' for i in range(20)))
  Path('bytes_reward.py').write_text('def score(prompt, response, answer):\n  return sum(response.encode()) % 7 / 7\n')


def run(*flags):
  common.run(train.define, train.main, ['train', *TINY, *flags])


def rows(workdir: str) -> list[dict]:
  file = Path(workdir, 'metrics.jsonl')
  lines = file.read_text().splitlines() if file.exists() else []
  return [row for row in map(json.loads, lines) if row['stage'] == 'rl']


def process_of(parent: int, index: int) -> int:
  """The launcher's child that is process `index`."""
  children = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(parent)], capture_output=True, text=True).stdout.split()
  return next(int(c) for c in children if f'"index": {index}'.encode() in Path(f'/proc/{c}/environ').read_bytes())


def assert_same_updates(got: list[dict], want: list[dict]) -> None:
  for a, b in zip(got, want, strict=True):
    assert a['sampled_crc'] == b['sampled_crc'] and a['grad_norm'] > 0.01
    for name in ('step', 'reward', 'loss', 'grad_norm', 'entropy', 'kl', 'positions'):
      assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_two_processes_take_up_the_run_of_one_stop_when_asked_and_are_taken_up_by_one(files):
  run('--workdir=run', '--steps=2')
  process = start('experiments.train', *TINY, '--steps=200', '--workdir=run')
  while process.poll() is None and len(rows('run')) < 4:
    time.sleep(0.1)
  process.terminate()
  out, err = process.communicate()
  last = len(rows('run'))
  assert (process.returncode, out) == (0, '') and 'going on after update 2' in err
  assert err.splitlines()[-1] == f'stopped after update {last}, which is saved; the same command goes on from there.'
  assert Path(f'run/checkpoints/{last}/checksums.json').exists() and err.count('stopped') == 1
  for workdir in ('one', 'run'):
    run(f'--workdir={workdir}', f'--steps={last + 1}')
  assert_same_updates(rows('run'), rows('one'))


def test_a_run_of_two_processes_is_that_of_one_and_ends_with_any(files):
  process = start('experiments.train', *TINY, '--steps=200', '--workdir=two')
  run('--workdir=one', '--steps=2')
  while process.poll() is None and len(rows('two')) < 3:
    time.sleep(0.1)
  os.kill(process_of(process.pid, 1), signal.SIGKILL)
  out, err = process.communicate()
  assert (process.returncode, out) == (1, '')
  assert err.splitlines()[-1] == ('process 1 of 2 was ended by SIGKILL, and the others with it; what a checkpoint holds is kept.')
  assert 'Traceback' not in err and err.count('step 1/200') == 1  # process 0 alone speaks
  assert any((p / 'checksums.json').exists() for p in Path('two/checkpoints').iterdir())
  assert_same_updates(rows('two')[:2], rows('one')[:2])
