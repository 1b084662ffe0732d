#!/usr/bin/env bash
# Runs an experiment; makes .venv at first use, from requirements.txt.
#
#   bash launch.sh [--flag=value ...]        experiments/train.py
#   bash launch.sh NAME [--flag=value ...]   experiments/NAME.py
#   bash launch.sh test [pytest arguments]   the tests
#
# With --processes=2, under srun, or in an indexed Kubernetes job: one of several processes, see experiments/launcher.py.
#
# PYTHON=python3.12   makes .venv with this interpreter
# VENV=folder         uses this environment as it is, and installs nothing
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() { echo "launch.sh: $*" >&2; exit 2; }

# Prints the first Python of the right version that can make environments.
find_python() {
  local candidates=(python3 python3.13 python3.12 python3.11) candidate
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 with venv among: ${candidates[*]};" \
    "install one, or name it with PYTHON=/path/to/python3."
}

# The copy of requirements.txt in .venv is written last: an interrupted install is done again.
install() {
  local python
  cmp -s "$root/requirements.txt" "$venv/requirements.txt" && [[ -x $venv/bin/python ]] && return
  python=$(find_python)
  echo "launch.sh: installing requirements.txt into .venv with $("$python" --version)." >&2
  "$python" -m venv --clear "$venv" >&2
  # --no-compile: half the time; Python compiles what is imported when it is.
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile \
    -r "$root/requirements.txt" >&2 || { echo 'launch.sh: the install failed; see above.' >&2; exit 1; }
  cp "$root/requirements.txt" "$venv/requirements.txt"
}

name=train
if [[ $# -gt 0 && $1 != -* ]]; then
  name=$1
  shift
fi
names=''
for file in "$root"/experiments/[a-z]*.py; do  # scripts; others are their shared parts
  ! grep -q '^  common.run(' "$file" || names+="$(basename "$file" .py), "
done
[[ $name == test || -f $root/experiments/$name.py && ", $names" == *", $name, "* ]] ||
  fail "unknown experiment '$name'; there are: ${names}and test."

if [[ -n ${VENV:-} ]]; then
  venv=$(cd "$VENV" 2>/dev/null && pwd) || fail "VENV=$VENV is no folder; name an environment's."
else
  venv=$root/.venv
  install
fi
export PYTHONPATH=$root PYTHONSAFEPATH=1 TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
if [[ $name == test ]]; then
  cd "$root"
  # Two processes; a file's tests share what they compile, and tests/conftest.py puts long files first.
  exec "$venv/bin/python" -m pytest --rootdir="$root" -o testpaths=tests -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' "$@"
fi
exec "$venv/bin/python" -m "experiments.$name" "$@"
