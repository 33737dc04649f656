#!/usr/bin/env bash
# Sets up, builds, and runs every test.
#
#   tests/run.sh [--no-asan] [--only STAGE]
#
#   --no-asan      leave out the build with sanitizers (for a quick look; the closing line then counts fewer tests)
#   --only STAGE   after setting up, only this stage: ctest, asan, python, e2e, tidy
#
# Stages: the packages, .venv, preset dev and its ctest suite, the Python client and its tests, the end-to-end tests
# against a real daemon, the house rules, and the C++ tests again under address and undefined-behaviour sanitizers.
# A failing stage does not stop the next. Reports are in build/test-logs. The last line is the total over all suites;
# the exit code is 0 only if nothing failed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly LOGS="$ROOT/build/test-logs"
readonly PYTHON="$ROOT/.venv/bin/python"

asan=yes
only=""
declare -a FAILED_STAGES=()

# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}

parse_flags() {
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --no-asan) asan=no ;;
      --only)
        only=${2:-}
        [[ $only =~ ^(ctest|asan|python|e2e|tidy)$ ]] || fail "--only wants ctest, asan, python, e2e or tidy, not '$only'"
        shift
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      *) fail "unknown flag '$1' (see --help)" ;;
    esac
    shift
  done
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
  ctest --preset "$preset" --parallel "$(nproc)" --timeout 300 --no-tests=error --output-junit "$LOGS/$report" "$@"
}

# Files side by side, the tests of one in order.
run_pytest() {
  local report=$1
  shift
  OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -p no:cacheprovider --color=no -rs --numprocesses "$(nproc)" --dist loadfile \
    --junitxml "$LOGS/$report" "$@"
}

cpp_suites() {
  [[ -z $only || $only =~ ^(ctest|python|e2e)$ ]] || return 0
  try "build dev" "$ROOT/deploy/setup.sh" build dev || return 0
  if wanted ctest; then try "ctest" run_ctest dev ctest-dev.xml || true; fi
}

asan_suite() {
  wanted asan && [[ $asan == yes ]] || return 0
  try "build asan" "$ROOT/deploy/setup.sh" build asan || return 0
  try "ctest asan" run_ctest asan ctest-asan.xml || true
}

python_suites() {
  if wanted tidy; then try "tidy" run_pytest pytest-tidy.xml tests/tidy_test.py || true; fi
  if [[ -z $only || $only == python || $only == e2e ]]; then
    try "python client" "$ROOT/deploy/setup.sh" client || return 0
  fi
  if wanted python && [[ -d tests/python ]]; then try "pytest" run_pytest pytest-python.xml tests/python || true; fi
  if wanted e2e; then try "end to end" run_pytest pytest-e2e.xml tests/e2e || true; fi
}

# --- the closing --------------------------------------------------------------------------------------------------

report_missing_gpu() {
  if ! command -v nvcc >/dev/null; then
    echo "!! no nvcc: the formulas are NOT compiled for GPUs"
  elif ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "!! no GPU: nothing that would run on one was checked"
  fi
}

close() {
  local code=0
  echo
  echo "stages:"
  print_stage_times
  report_missing_gpu
  if [[ -x $PYTHON ]]; then
    "$PYTHON" "$ROOT/tests/count.py" "$LOGS" "${FAILED_STAGES[@]}" || code=$?
  else
    printf 'failed stages: %s\n0 passed, %d failed, 0 skipped\n' "${FAILED_STAGES[*]}" "${#FAILED_STAGES[@]}"
    code=1
  fi
  return "$code"
}

main() {
  parse_flags "$@"
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
    cpp_suites
    python_suites
    asan_suite
  fi
  close
}

main "$@"
