#!/usr/bin/env bash
# From a fresh machine to a model trained through Ballast, in one command that asks nothing.
#
#   deploy/quickstart.sh [--recipe NAME] [--steps N] [--seeds N] [--results FOLDER] [--keep] [--crash]
#
#   --recipe NAME     what the model computes in: plain (fp32, default), switchback (int8), fp8, unit-scaled (fp8 without a loss
#                     scale), collage (bf16); see client/python/examples/recipes.py
#   --steps N         optimizer steps a training run makes (default 300)
#   --seeds N         training runs a side, each from its own seed (default 1)
#   --results FOLDER  where figures, picture and logs go, in place of an earlier run's (default build/quickstart)
#   --keep            leave the daemon running at the end
#   --crash           instead: kill daemon and trainer (kill -9) in the middle, start both again, and compare the end with
#                     that of a training that nobody disturbed, to the bit
#   --help            this text
#
# It installs what is missing, builds the daemon and the Python client, starts the daemon, trains a small language model
# on the King James Bible through it, then the same model from the same seed with torch's own AdamW in fp32, and prints
# both side by side. No GPU is needed. A second run skips what is done. It ends what it started, also on Ctrl-C.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly PYTHON="$ROOT/.venv/bin/python"
# The one that tests/run.sh builds, where it is there already; else the one that is compiled soonest.
PRESET=quick
if [[ -f $ROOT/build/dev/CMakeCache.txt ]]; then PRESET=dev; fi
readonly PRESET
readonly BALLASTD="$ROOT/build/$PRESET/server/ballastd"
readonly BALLASTCTL="$ROOT/build/$PRESET/client/cpp/ballastctl"
readonly DAEMON_THREADS=1

recipe=plain
steps=300
seeds=1
results="$ROOT/build/quickstart"
keep=no
crash=no
daemon_pid=""
grpc_port=""
ops_port=""

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"
# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

flag --recipe "plain, switchback, fp8, unit-scaled or collage" 'plain|switchback|fp8|unit-scaled|collage'
flag --steps "a whole number of at least 1" '[1-9][0-9]*'
flag --seeds "a whole number of at least 1" '[1-9][0-9]*'
flag --results "a folder"
flag --keep
flag --crash

on_exit() {
  stop_children
}

on_signal() {
  printf '\ninterrupted: stopping what was started\n' >&3
  exit 130
}

# --- the daemon -----------------------------------------------------------------------------------------------------

# The wanted port, or a free one where something listens on it already.
free_port() {
  "$PYTHON" - "$1" <<'PY'
import socket, sys

for port in (int(sys.argv[1]), 0):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        print(probe.getsockname()[1])
        break
PY
}

choose_ports() {
  grpc_port=$(free_port 7700)
  ops_port=$(free_port 9464)
  [[ $grpc_port == 7700 ]] || echo "port 7700 is taken: the daemon listens on $grpc_port"
  [[ $ops_port == 9464 ]] || echo "port 9464 is taken: metrics are on $ops_port"
}

daemon_is_ready() {
  (
    exec 4<>"/dev/tcp/127.0.0.1/$ops_port" &&
      printf 'GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n' >&4 &&
      grep -q ' 200 ' <&4
  ) 2>/dev/null
}

run_daemon() {
  exec "$BALLASTD" --listen "127.0.0.1:$grpc_port" --ops_http.listen "127.0.0.1:$ops_port" --device cpu \
    --threads "$DAEMON_THREADS" --log.format json >"$LOGS/ballastd.log" 2>&1
}

start_daemon() {
  local attempt
  choose_ports
  start_child run_daemon
  daemon_pid=$CHILD
  for ((attempt = 0; attempt < 600; attempt++)); do
    if daemon_is_ready; then return; fi
    kill -0 "$daemon_pid" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$LOGS/ballastd.log" >&2
  fail "the daemon did not become ready; its log is $LOGS/ballastd.log"
}

daemon_rss_kib() { sed -n 's/^VmRSS:[[:space:]]*\([0-9]*\) kB/\1/p' "/proc/$daemon_pid/status"; }

record_daemon_memory() {
  printf '{"rss_before_kib": %d, "rss_after_kib": %d, "threads": %d}\n' "$1" "$2" "$DAEMON_THREADS" >"$RESULTS/daemon.json"
}

# --- training -------------------------------------------------------------------------------------------------------

train() {
  local optimizer=$1 seed=$2
  run_child env OMP_NUM_THREADS=1 "$PYTHON" "$ROOT/client/python/examples/king_james.py" --optimizer "$optimizer" \
    --recipe "$recipe" --steps "$steps" --seed "$seed" --server "127.0.0.1:$grpc_port" --json "$RESULTS/$optimizer-$seed.json" ||
    fail "training ($optimizer, seed $seed) failed; the daemon's log is $LOGS/ballastd.log"
}

train_all() {
  local optimizer=$1 seed started=$SECONDS
  for ((seed = 1; seed <= seeds; seed++)); do train "$optimizer" "$seed"; done
  STAGE_TIMES+=("$(printf '%-16s %4d s' "train $optimizer" $((SECONDS - started)))")
}

prepare() {
  local started=$SECONDS packages=(run)
  # In the foreground and unlogged: sudo may have to ask for a password.
  "$ROOT/deploy/packages.sh" build libs data || exit 1
  STAGE_TIMES+=("$(printf '%-16s %4d s' packages $((SECONDS - started)))")
  echo "(full logs: $LOGS)"
  # The package unit-scaling is among what the tests need.
  if [[ $recipe == unit-scaled ]]; then packages=(); fi
  stage "python" "$ROOT/deploy/setup.sh" python "${packages[@]}"
  stage "build" "$ROOT/deploy/setup.sh" build "$PRESET" ballastd ballastctl
  stage "python client" "$ROOT/deploy/setup.sh" client
  stage "data" "$PYTHON" -c "import sys; sys.path.insert(0, '$ROOT/client/python/examples'); import king_james; king_james.load_text()"
}

finish() {
  echo
  echo "  metrics: curl -s http://127.0.0.1:$ops_port/metrics"
  echo "  runs:    ${BALLASTCTL#"$ROOT/"} --server 127.0.0.1:$grpc_port runs"
  if [[ $keep == yes ]]; then
    unset "CHILDREN[$daemon_pid]"
    disown "$daemon_pid" 2>/dev/null || true
    echo "  the daemon stays up, as asked; stop it with: kill $daemon_pid"
  else
    stop_child "$daemon_pid"
    echo "  (the daemon is stopped again; --keep leaves it up)"
  fi
}

crash_and_compare() {
  echo "training twice, $steps steps each; the second time daemon and trainer are killed"
  run_child env OMP_NUM_THREADS=1 "$PYTHON" "$ROOT/deploy/quickstart_crash.py" --daemon "$BALLASTD" --steps "$steps" \
    --results "$RESULTS" || fail "what came back is not what was there; the logs are in $LOGS"
}

main() {
  local rss_before
  parse_flags "$@"
  RESULTS=$(realpath -m -- "$results")
  LOGS="$RESULTS/logs"
  trap on_exit EXIT
  trap on_signal INT TERM HUP
  cd "$ROOT"
  mkdir -p "$LOGS"
  rm -f "$RESULTS"/{ballast-,torch-,daemon}*.json "$RESULTS"/loss.png
  prepare
  if [[ $crash == yes ]]; then
    crash_and_compare
    return
  fi
  start_daemon
  rss_before=$(daemon_rss_kib)
  echo "training, $steps steps each; on this machine's $(nproc) cores: torch 1 thread, the daemon $DAEMON_THREADS"
  train_all ballast
  record_daemon_memory "$rss_before" "$(daemon_rss_kib)"
  train_all torch
  echo
  "$PYTHON" "$ROOT/deploy/quickstart_report.py" "$RESULTS"
  finish
  echo
  echo "  stages:"
  print_stage_times | sed 's/^/  /'
}

main "$@"
