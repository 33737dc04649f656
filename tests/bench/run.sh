#!/usr/bin/env bash
# Builds the preset release and runs every benchmark of tests/bench/benchmarks.json.
#
#   tests/bench/run.sh [--only NAME]... [--quick] [--json FILE] [--record] [--peers]
#
#   --only NAME   of the list, this one alone; several with several
#   --quick       short runs, for trying the benchmarks themselves out
#   --json FILE   one row a figure: name, value, unit, bound, ratio, n, machine, device, date, commit
#   --record      also write tests/bench/results/, which the README quotes
#   --peers       first fetch the optimizers of others that the CPU kernels are compared with (deploy/setup.sh peers);
#                 without it those that are there already take part
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly ROOT
readonly LOGS="$ROOT/build/bench-logs"

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"
# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

flag --only "the name of a benchmark"
flag --quick
flag --json "a file"
flag --record
flag --peers

main() {
  local argument peers=no passed=()
  parse_flags "$@"
  # The rest is for collect.py.
  for argument in "$@"; do
    if [[ $argument != --peers ]]; then passed+=("$argument"); fi
  done
  trap stop_children EXIT
  trap 'exit 130' INT TERM HUP
  "$ROOT/deploy/packages.sh"
  stage "python" "$ROOT/deploy/setup.sh" python
  stage "build release" "$ROOT/deploy/setup.sh" build release
  stage "python client" "$ROOT/deploy/setup.sh" client
  if [[ $peers == yes ]]; then stage "peers" "$ROOT/deploy/setup.sh" peers; fi
  run_child "$ROOT/.venv/bin/python" "$ROOT/tests/bench/collect.py" --build "$ROOT/build/release" "${passed[@]}"
}

main "$@"
