#!/usr/bin/env bash
# The long forms of the tests, one after the other, and a table of how they went.
#
#   tests/soak.sh [--minutes N] [--seed N] [--only PART] [--record]
#
#   --minutes N   of the part in which trainers are killed (default: 10)
#   --seed N      of all that is drawn (default: one that is printed)
#   --only PART   only the parts whose name begins so
#   --record      the table is also written to tests/bench/results/soak.md; with --only, what that says of the other parts
#                 stays
#
# Parts: the builds that tests/run.sh leaves out, that of tests/gpu_check.sh by itself among them; all C++ tests of preset dev,
# most of which tests/run.sh runs under sanitizers alone; the programs built twice, to the bit the same; the tests of strands,
# devices and files under the thread sanitizer; the daemon's work on a GPU, played on the CPU under the address sanitizer;
# libFuzzer on the kernels, on everything at the edge and on what is read back from a disk, 60 s each (tests/fuzz.py), under
# sanitizers; 20,000 seeds of the step machine's simulator, and 20,000 of runs on several daemons; two ranks whose connections
# are cut a thousand times in 500 steps, in four kinds of run; the daemon's peak memory with 200 million parameters against the
# plan; 64 ranks of one run as processes, one of them killed and the run rewound, against one trainer; daemons whose network
# fails, each in a namespace; real power cuts under a daemon that writes checkpoints, on ext4 and XFS (needs root), with and
# without its syncs; 300 kill -9 of a daemon in training, and 100 drains, with the digests of an undisturbed training in the
# end; trainers killed at random moments, during which the daemon's memory, file descriptors and threads must stay level and
# its log free of errors; and a healthy hour, in which no alert may fire. About two hours.
#
# Expects the .venv that tests/run.sh makes; builds preset dev, installs clang and builds the fuzzers. Passes if every part does.
# Reports are in build/soak.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly LOGS="$ROOT/build/soak"
readonly DEV="$ROOT/build/dev/tests" PYTHON="$ROOT/.venv/bin/python"
readonly RECORD="$ROOT/tests/bench/results/soak.md"

minutes=10
seed=$RANDOM
only=""
record=no
declare -a ROWS=()
MACHINE=""
failed=0

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"
# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

flag --minutes "a whole number" '[0-9]+'
flag --seed "a whole number" '[0-9]+'
flag --only "the name of a part"
flag --record

last_line() { grep -v '^[[:space:]]*$' "$LOGS/${1// /-}.log" | tail -n 1; }

# part NAME COMMAND...: its last line says what it found.
part() {
  local name=$1 started=$SECONDS verdict=passed
  [[ $name == "$only"* ]] || return 0
  if ! stage "$@"; then
    verdict=FAILED
    failed=1
  fi
  if grep -q '^NOT RUN' "$LOGS/${name// /-}.log"; then verdict="NOT RUN"; fi
  ROWS+=("| $name | $verdict | $((SECONDS - started)) s | $(last_line "$name") | seed $seed, $MACHINE, $(date +%F) |")
}

# The quick start's build, and each source by itself: tests/run.sh compiles several together, so that one may lack an
# #include that its neighbour has.
build_others() {
  cd "$ROOT" && deploy/setup.sh build quick ballastd ballastctl &&
    cmake --preset quick -B build/separate -D CMAKE_UNITY_BUILD=OFF -D CMAKE_DISABLE_PRECOMPILE_HEADERS=ON &&
    cmake --build build/separate --parallel "$(nproc)" --target ballastd --target ballastctl
}

test_dev() {
  cd "$ROOT" && ctest --preset dev --parallel "$((2 * $(nproc)))" --timeout 900 --no-tests=error
}

# As on a machine that has no other build, whose kernels tests/run.sh takes.
build_for_gpu() {
  if PATH="$PATH:/usr/local/cuda/bin" command -v nvcc; then
    "$ROOT/tests/gpu_check.sh" --build-only
  else
    echo "NOT RUN: no nvcc"
  fi
}

# Under the thread sanitizer: the C++ tests of all that does not go through gRPC, whose locks it cannot see.
sanitize_threads() {
  cd "$ROOT" && deploy/setup.sh build tsan tsan_check ops_test server_unit_test &&
    ctest --preset tsan --parallel "$(nproc)" --timeout 1800 --no-tests=error --tests-regex '^(TsanCheck|ops_test|server_unit_test)'
}

# What a wrong pointer or length of the daemon's would have a GPU's kernels do.
sanitize_gpu() {
  cd "$ROOT" && cmake --preset asan -D BALLAST_SANITIZE_LOCKSTEP=ON &&
    cmake --build --preset asan --parallel "$(nproc)" --target server_unit_test --target server_long_test --target server_gpu_rpc_test &&
    ctest --preset asan --timeout 1800 --no-tests=error --tests-regex '^server_(unit|long|gpu_rpc)_test\.'
}

build_fuzzers() {
  "$ROOT/deploy/packages.sh" fuzz
  "$ROOT/deploy/setup.sh" build fuzz fuzzers
}

# What is mounted is seen by this program and its children alone, and goes with them.
cut_power() {
  "$PYTHON" "$ROOT/tests/python/power.py" --missing || return 0
  unshare --mount --propagation private "$PYTHON" "$ROOT/tests/python/power.py" --seed "$seed"
}

all_parts() {
  local target kind commit
  part "other builds" build_others
  part "ctest" test_dev
  part "gpu build" build_for_gpu
  part "reproducible" "$ROOT/tests/reproducible.sh" ballastctl ballastd
  part "sanitized threads" sanitize_threads
  part "sanitized gpu" sanitize_gpu
  part "fuzzers" build_fuzzers
  for target in $("$PYTHON" "$ROOT/tests/fuzz.py" --list); do
    part "fuzz $target" "$PYTHON" "$ROOT/tests/fuzz.py" --only "$target" --seconds 60 --seed "$((seed + 1))" # 0 is any
  done
  part "simulator" "$DEV/server/step_simulator" --seeds "$seed" 20000
  part "simulator parts" "$DEV/server/step_simulator" --parts "$seed" 20000
  for kind in "" " forgetful" " staged" " staged forgetful"; do
    # shellcheck disable=SC2086 # words
    part "cuts${kind:- release}" "$DEV/chaos/chaos" "$seed" 500 1000 $kind
  done
  for commit in release staged; do
    part "memory $commit" "$PYTHON" "$ROOT/tests/e2e/memory.py" 200000000 "$commit"
  done
  for target in grpc auto; do
    part "64 ranks $target" "$PYTHON" "$ROOT/tests/e2e/many_ranks.py" 64 "$target"
  done
  part "network partitions" "$PYTHON" "$ROOT/tests/e2e/partitions.py"
  part "power cuts" cut_power
  part "killed daemons" "$PYTHON" "$ROOT/tests/python/lives.py" kills 300 --seed "$seed"
  part "drains" "$PYTHON" "$ROOT/tests/python/lives.py" drains 100 --seed "$seed"
  part "killed trainers" "$PYTHON" "$ROOT/tests/soak.py" --minutes "$minutes" --seed "$seed"
  part "healthy hour" "$PYTHON" "$ROOT/tests/e2e/healthy_hour.py"
}

table() {
  cat <<END
# The long tests, last run

By \`tests/soak.sh --record\`, each part on the day and machine that its row names. A missed sync that nothing notices is the
last, of the run's folder after the checkpoint is renamed: what the others keep is kept by later ones as well, since ext4 and
XFS write their log in order; \`tests/server/storage/\` has a disk on which each is missed.

| part | | took | it says | seen |
| --- | --- | --- | --- | --- |
END
  printf '%s\n' "${ROWS[@]}"
}

# The table that is there, with the rows of these parts in the place of those that it has of them, or below.
merged_table() {
  [[ -n $only && -f $RECORD ]] || {
    table
    return
  }
  awk -F ' [|] ' 'NR == FNR { rows[$1] = $0; parts[++count] = $1; next }
                  $1 in rows { print rows[$1]; delete rows[$1]; next }
                  { print }
                  END { for (i = 1; i <= count; ++i) if (parts[i] in rows) print rows[parts[i]] }' \
    <(printf '%s\n' "${ROWS[@]}") "$RECORD"
}

main() {
  parse_flags "$@"
  trap stop_children EXIT
  trap 'exit 130' INT TERM HUP
  [[ -x $PYTHON ]] || fail "there is no .venv yet: run tests/run.sh once"
  MACHINE=$("$PYTHON" -c 'import sys; sys.path.insert(0, sys.argv[1]); import collect; print(collect.machine())' \
    "$ROOT/tests/bench")
  rm -rf "$LOGS"
  mkdir -p "$LOGS"
  printf 'seed %s\n' "$seed"
  stage "build dev" "$ROOT/deploy/setup.sh" build dev || fail "preset dev cannot be built"
  all_parts
  [[ ${#ROWS[@]} -gt 0 ]] || fail "--only $only: no such part"
  table
  if [[ $record == yes ]]; then
    merged_table >"$LOGS/soak.md"
    cp "$LOGS/soak.md" "$RECORD"
  fi
  return "$failed"
}

main "$@"
