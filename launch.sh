#!/usr/bin/env bash
# Runs an experiment; makes .venv at first use, from requirements.txt, and on a GPU or TPU
# machine from requirements-gpu.txt or requirements-tpu.txt besides.
#
#   bash launch.sh [--flag=value ...]        experiments/train.py
#   bash launch.sh NAME [--flag=value ...]   experiments/NAME.py
#   bash launch.sh test [pytest arguments]   the tests
#
# With --processes=2, under srun, or in an indexed Kubernetes job: one of several processes, see experiments/launcher.py.
#
# ACCELERATOR=none    gpu, tpu or none instead of what is found here
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

# Prints gpu, tpu or none; a TPU's device files need a chip of Google's behind them.
find_accelerator() {
  if [[ -n ${ACCELERATOR:-} ]]; then
    [[ $ACCELERATOR =~ ^(gpu|tpu|none)$ ]] || fail "ACCELERATOR=$ACCELERATOR is unknown; use gpu, tpu or none."
    echo "$ACCELERATOR"
  elif [[ $(nvidia-smi -L 2>/dev/null) == 'GPU '* ]]; then
    echo gpu
  elif [[ -e /dev/accel0 || -e /dev/vfio/0 ]] && grep -qs 0x1ae0 /sys/bus/pci/devices/*/vendor; then
    echo tpu
  else
    echo none
  fi
}

# What XLA, NCCL and libtpu are told where the caller says nothing else; read before JAX starts.
machine_defaults() {
  case $1 in
    gpu)
      # A layer's weights are gathered while the one before it computes.
      [[ ${XLA_FLAGS:-} == *latency_hiding* ]] ||
        export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
      # The state is most of the memory: three quarters of it, the default, would shorten the longest prompt by as much.
      export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
      # Queries and merged outputs are small messages, a layer's weights large ones: NCCL may choose by size.
      export NCCL_PROTO=${NCCL_PROTO:-SIMPLE,LL,LL128}
      ;;
    tpu)
      # The same over ICI: gathers run as steps between the matrix products of the layer before.
      export LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:---xla_tpu_enable_async_collective_fusion=true \
--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true --xla_tpu_enable_async_collective_fusion_multiple_steps=true \
--xla_tpu_overlap_compute_collective_tc=true --xla_enable_async_all_gather=true}
      ;;
    none)
      # All is in shard_map, so that neither partitioner has anything to do; the older one takes 0.86 of the time to compile.
      export JAX_USE_SHARDY_PARTITIONER=${JAX_USE_SHARDY_PARTITIONER:-0}
      [[ $name != test ]] || return 0  # tests/conftest.py has them compile fast instead
      # Whole registers of a CPU that has AVX-512, where XLA's default is half of one: exponentials take 0.6 of the time.
      [[ ${XLA_FLAGS:-} == *prefer_vector_width* ]] ||
        export XLA_FLAGS="--xla_cpu_prefer_vector_width=512 ${XLA_FLAGS:-}"
      # glibc keeps up to 1 GiB of what an update frees; the system would clear those pages anew for each: 0.92 of the time.
      export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
      export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824}
      ;;
  esac
}

# The copy of the requirements in .venv is written last: an interrupted install is done again.
install() {
  local python file files=("$root/requirements.txt") options=() names=requirements.txt
  if [[ $1 != none ]]; then
    files+=("$root/requirements-$1.txt")
    names+=" and requirements-$1.txt"
  fi
  cat "${files[@]}" | cmp -s - "$venv/requirements.txt" && [[ -x $venv/bin/python ]] && return
  if [[ -L $venv ]] || [[ -e $venv && ! -e $venv/installing && ! -e $venv/requirements.txt ]]; then
    fail "$venv is not of launch.sh's making, and it would be emptied; use it as it is with VENV=$venv, or remove it."
  fi
  python=$(find_python)
  echo "launch.sh: installing $names into .venv with $("$python" --version)." >&2
  mkdir -p "$venv" && touch "$venv/installing"
  find "$venv" -mindepth 1 ! -path "$venv/installing" -delete
  "$python" -m venv "$venv" >&2
  for file in "${files[@]}"; do
    options+=(-r "$file")
  done
  # --no-compile: half the time; Python compiles what is imported when it is.
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile \
    "${options[@]}" >&2 || { echo 'launch.sh: the install failed; see above.' >&2; exit 1; }
  cat "${files[@]}" > "$venv/requirements.txt"
  rm "$venv/installing"
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

accelerator=$(find_accelerator)
machine_defaults "$accelerator"
if [[ -n ${VENV:-} ]]; then
  venv=$(cd "$VENV" 2>/dev/null && pwd) || fail "VENV=$VENV is no folder; name an environment's."
else
  venv=$root/.venv
  install "$accelerator"
fi
export PYTHONPATH=$root PYTHONSAFEPATH=1 TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
if [[ $name == test ]]; then
  cd "$root"
  # Two processes; a file's tests share what they compile, and tests/conftest.py puts long files first.
  exec "$venv/bin/python" -m pytest --rootdir="$root" -o testpaths=tests -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' "$@"
fi
exec "$venv/bin/python" -m "experiments.$name" "$@"
