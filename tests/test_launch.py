"""launch.sh: what it runs, what it installs and when, and its one-sentence refusals.

A stand-in for Python, a shell script that logs its calls, takes the place of the real
one, so that nothing is installed.
"""
import os
from pathlib import Path
import shutil
import subprocess

import pytest

ROOT = Path(__file__).resolve().parent.parent

# As `python -m venv` it makes an environment of itself; as pip it fails if told so.
STAND_IN = r'''#!/bin/bash
case "$*" in
  -c*) exit "${WRONG_VERSION:-0}" ;;
  --version) echo "Python 3.12.0" ;;
  "-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"; echo noise ;;
  "-m pip"*) echo "pip $*" >> "$LOG"; echo noise; exit "${PIP_STATUS:-0}" ;;
  *) echo "ran $*"; echo "in $PWD path $PYTHONPATH"
     if [[ -n ${SHOW:-} ]]; then for name in $SHOW; do echo "$name=${!name:-}"; done; fi ;;
esac
'''


@pytest.fixture
def repo(tmp_path):
  """A copy of launch.sh among empty experiments, and the stand-in."""
  root = tmp_path / 'my repo'
  (root / 'experiments').mkdir(parents=True)
  for name in ('common', '__init__', 'train', 'speed', 'gradient_parity'):
    script = name not in ('common', '__init__')
    (root / 'experiments' / f'{name}.py').write_text('  common.run(define, main)\n' if script else '')
  shutil.copy(ROOT / 'launch.sh', root)
  for file in ('requirements.txt', 'requirements-gpu.txt', 'requirements-tpu.txt'):
    shutil.copy(ROOT / file, root)
  stand_in = tmp_path / 'python'
  stand_in.write_text(STAND_IN)
  stand_in.chmod(0o755)
  return root


def launch(repo, *argv, cwd=None, **env):
  base = {key: value for key, value in os.environ.items() if key not in ('VENV', 'PYTHON', 'PYTHONPATH')}
  env = {**base, 'PYTHON': str(repo.parent / 'python'), 'LOG': str(repo.parent / 'log'), 'ACCELERATOR': 'none', **env}
  done = subprocess.run(['bash', str(repo / 'launch.sh'), *argv], cwd=cwd or repo, env=env,
                        capture_output=True, text=True)
  return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def installs(repo):
  log = repo.parent / 'log'
  return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize('argv, ran', [
    ([], '-m experiments.train'),
    (['--steps=3', '--name=a b'], '-m experiments.train --steps=3 --name=a b'),
    (['speed', '--branches=4'], '-m experiments.speed --branches=4'),
    (['gradient_parity'], '-m experiments.gradient_parity'),
])
def test_experiments_run_in_the_callers_folder(repo, tmp_path, argv, ran):
  status, out, _ = launch(repo, *argv, cwd=tmp_path)
  assert status == 0
  assert out == [f'ran {ran}', f'in {tmp_path} path {repo}']


def test_tests_run_in_the_repository(repo, tmp_path):
  _, out, _ = launch(repo, 'test', '-x', 'tests/test_a.py', cwd=tmp_path)
  assert out == [f'ran -m pytest --rootdir={repo} -o testpaths=tests -n 2 --dist loadfile --no-loadscope-reorder -m not slow -x tests/test_a.py',
                 f'in {repo} path {repo}']


@pytest.mark.parametrize('linked', [False, True])
def test_an_environment_that_is_not_its_own_is_left_alone(repo, tmp_path, linked):
  theirs = tmp_path / 'theirs' if linked else repo / '.venv'
  (theirs / 'bin').mkdir(parents=True)
  (theirs / 'bin' / 'python').write_text('theirs')
  if linked:  # even one that was made by launch.sh elsewhere, of other requirements
    (theirs / 'requirements.txt').write_text('other')
    (repo / '.venv').symlink_to(theirs)
  status, out, err = launch(repo)
  assert (status, out, len(err)) == (2, [], 1) and 'would be emptied; use it as it is with VENV=' in err[0]
  assert (theirs / 'bin' / 'python').read_text() == 'theirs' and installs(repo) == 0


def test_installs_once_and_says_so_in_one_line(repo):
  line = 'launch.sh: installing requirements.txt into .venv with Python 3.12.0.'
  status, out, err = launch(repo)
  assert status == 0 and len(out) == 2 and err == [line, 'noise', 'noise']
  assert launch(repo, 'speed')[2] == [] and installs(repo) == 1
  with open(repo / 'requirements.txt', 'a') as file:
    file.write('einops==0.8.1\n')
  assert launch(repo)[2][0] == line and installs(repo) == 2
  assert launch(repo)[2] == [] and installs(repo) == 2
  (repo / '.venv' / 'bin' / 'python').unlink()
  assert launch(repo)[0] == 0 and installs(repo) == 3


def test_a_failed_install_is_done_again(repo):
  status, out, err = launch(repo, PIP_STATUS='3')
  assert (status, out, err[-1]) == (1, [], 'launch.sh: the install failed; see above.')
  assert launch(repo)[0] == 0
  assert installs(repo) == 2


@pytest.mark.parametrize('name', ['sped', 'common', '__init__', '../x', 'train speed', ''])
def test_an_unknown_name_lists_the_experiments(repo, name):
  assert launch(repo, name, '--steps=3') == (2, [], [
      f"launch.sh: unknown experiment '{name}'; there are: gradient_parity, speed, train, and test."])
  assert not (repo / '.venv').exists()


def test_no_fitting_python_is_one_sentence(repo):
  status, out, err = launch(repo, WRONG_VERSION='1')
  assert (status, out) == (2, [])
  assert err == [f'launch.sh: no Python 3.11, 3.12 or 3.13 with venv among: {repo.parent}/python; '
                 'install one, or name it with PYTHON=/path/to/python3.']


def test_python_is_found_on_the_path(repo, tmp_path):
  folder = tmp_path / 'bin'
  folder.mkdir()
  for name in ('python3', 'python3.13'):
    (folder / name).write_text('#!/bin/bash\nexit 1\n')  # as a version that does not fit
    (folder / name).chmod(0o755)
  shutil.copy(tmp_path / 'python', folder / 'python3.12')
  env = {'PYTHON': '', 'PATH': f'{folder}:/usr/bin:/bin'}
  assert launch(repo, **env)[0] == 0
  assert (repo / '.venv' / 'bin' / 'python').read_text() == STAND_IN


def test_venv_is_used_as_it_is(repo, tmp_path):
  (tmp_path / 'mine' / 'bin').mkdir(parents=True)
  shutil.copy(tmp_path / 'python', tmp_path / 'mine' / 'bin' / 'python')
  status, out, err = launch(repo, 'test', cwd=tmp_path, VENV='mine')
  assert (status, err, installs(repo)) == (0, [], 0)
  assert out[0].startswith('ran -m pytest')
  assert launch(repo, cwd=tmp_path, VENV='absent') == (
      2, [], ["launch.sh: VENV=absent is no folder; name an environment's."])


GPU_SMI = "#!/bin/bash\necho 'GPU 0: a stand-in (UUID: none)'\n"


def test_a_gpu_is_seen_and_gets_its_requirements_and_defaults(repo, tmp_path):
  folder = tmp_path / 'bin'
  folder.mkdir()
  (folder / 'nvidia-smi').write_text(GPU_SMI)
  (folder / 'nvidia-smi').chmod(0o755)
  env = {'ACCELERATOR': '', 'PATH': f'{folder}:/usr/bin:/bin', 'XLA_FLAGS': '--mine=1',
         'SHOW': 'XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION NCCL_PROTO LIBTPU_INIT_ARGS'}
  status, out, err = launch(repo, **env)
  assert status == 0 and err[0] == 'launch.sh: installing requirements.txt and requirements-gpu.txt into .venv with Python 3.12.0.'
  assert out[2:] == ['XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true --mine=1', 'XLA_PYTHON_CLIENT_MEM_FRACTION=0.92',
                     'NCCL_PROTO=SIMPLE,LL,LL128', 'LIBTPU_INIT_ARGS=']
  assert str(repo / 'requirements-gpu.txt') in (repo.parent / 'log').read_text()
  assert launch(repo, **env)[2] == [] and installs(repo) == 1
  assert launch(repo, **env | {'NCCL_PROTO': 'LL'})[1][4] == 'NCCL_PROTO=LL'
  with open(repo / 'requirements-gpu.txt', 'a') as file:
    file.write('einops==0.8.1\n')
  assert launch(repo, **env)[0] == 0 and installs(repo) == 2


def test_a_tpu_and_a_cpu_get_their_own_defaults(repo):
  cpu = {'XLA_FLAGS': '--xla_cpu_prefer_vector_width=512 ', 'JAX_USE_SHARDY_PARTITIONER': '0',
         'MALLOC_MMAP_THRESHOLD_': '1073741824', 'MALLOC_TRIM_THRESHOLD_': '1073741824'}
  names = [*cpu, 'NCCL_PROTO', 'LIBTPU_INIT_ARGS']

  def told(*arguments, **env):
    _, out, _ = launch(repo, *arguments, **dict.fromkeys(names, '') | {'SHOW': ' '.join(names)} | env)
    return {name: value for name, value in (line.split('=', 1) for line in out if line.split('=')[0] in names) if value}

  assert 'requirements-tpu.txt' in launch(repo, ACCELERATOR='tpu')[2][0]
  tpu = told(ACCELERATOR='tpu')
  assert list(tpu) == ['LIBTPU_INIT_ARGS'] and '\\' not in tpu['LIBTPU_INIT_ARGS']
  assert tpu['LIBTPU_INIT_ARGS'].startswith('--xla_tpu_enable_async_collective_fusion=true --xla_tpu')
  assert told(ACCELERATOR='tpu', LIBTPU_INIT_ARGS='--mine') == {'LIBTPU_INIT_ARGS': '--mine'}
  assert told() == cpu
  mine = {'XLA_FLAGS': '--xla_cpu_prefer_vector_width=256', 'JAX_USE_SHARDY_PARTITIONER': '1',
          'MALLOC_MMAP_THRESHOLD_': '1', 'MALLOC_TRIM_THRESHOLD_': '2'}
  assert told(**mine) == mine
  assert told('test') == {'JAX_USE_SHARDY_PARTITIONER': '0'}  # tests/conftest.py's own
  assert launch(repo, ACCELERATOR='abacus') == (2, [], ['launch.sh: ACCELERATOR=abacus is unknown; use gpu, tpu or none.'])
