#!/usr/bin/env bash
# Trains against one daemon for a long time, killing trainers at random moments, and watches what the daemon holds;
# before that, a million random inputs for the kernels (some minutes; tests/fuzz says how to let libFuzzer look), a
# minute of random messages and one of random sessions, 20,000 seeds of the step machine's simulator (a minute), and two
# trainings of two ranks whose connections are cut a thousand times (a minute each). Then the daemon's peak memory with
# 200 million parameters is compared with the plan.
#
#   tests/soak.sh [--minutes N] [--seed N]    (default: 10 minutes, a seed that is printed)
#
# Expects the build and .venv that tests/run.sh makes. Passes if the daemon outlives it all, its memory, file descriptors
# and threads are level at the end, its log has no error, and SIGTERM ends it with 0.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 0
    ;;
esac
[[ -x $ROOT/.venv/bin/python && -x $ROOT/build/dev/server/ballastd ]] || {
  echo "soak.sh: nothing is built yet: run tests/run.sh once" >&2
  exit 1
}
"$ROOT/build/dev/tests/fuzz/kernels_fuzz" 1000000 "$((RANDOM * 1000000))"
for target in edge_fuzz session_fuzz shm_fuzz; do
  "$ROOT/build/dev/tests/fuzz/$target" --seconds 60 "$ROOT/tests/fuzz/corpus/$target" "$((RANDOM * 1000000))"
done
"$ROOT/build/dev/tests/server/step_simulator" --seeds "$((RANDOM * 1000000))" 20000
for kind in "" forgetful staged "staged forgetful"; do
  # shellcheck disable=SC2086 # words
  "$ROOT/build/dev/tests/chaos/chaos" "$RANDOM" 500 1000 $kind
done
for commit in release staged; do
  "$ROOT/.venv/bin/python" "$ROOT/tests/e2e/memory.py" 200000000 "$commit"
done
exec "$ROOT/.venv/bin/python" "$ROOT/tests/soak.py" "$@"
