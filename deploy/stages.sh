# Sourced by quickstart.sh, tests/run.sh, tests/soak.sh and tests/gpu_check.sh: stages that are timed and logged, and
# children that never outlive the script. The script that sources it sets LOGS (a folder) first and calls `stop_children` from its exit trap.
#
#   stage NAME COMMAND...   runs COMMAND with its output in LOGS/NAME.log; on failure shows the log's end, returns its code
#   print_stage_times       one line a stage
#   run_child COMMAND...    runs COMMAND in a process group of its own and waits; a signal to this script interrupts the wait
#   start_child COMMAND...  the same without waiting; its process id is in CHILD
#   stop_child PID [SECONDS]   SIGTERM to the group, SIGKILL after SECONDS (default 10); safe to call twice
#   stop_children           stop_child for everything started here
# shellcheck shell=bash

# The screen, for messages of signal traps: a trap runs under whatever redirection the interrupted command had.
exec 3>&1

declare -a STAGE_TIMES=()
declare -A CHILDREN=()
CHILD=""

# Job control, switched on for the fork only, gives the child a process group of its own: a compiler started by ninja
# started by cmake ends with its group, and Ctrl-C on the terminal reaches the script alone, which then stops the groups.
start_child() {
  set -m
  "$@" </dev/null 3>&- &
  CHILD=$!
  set +m
  CHILDREN[$CHILD]=1
}

run_child() {
  local code=0
  start_child "$@"
  wait "$CHILD" || code=$?
  unset "CHILDREN[$CHILD]"
  return "$code"
}

group_lives() { kill -0 -- "-$1" 2>/dev/null; }

stop_child() {
  local pid=$1 tenths=$((10 * ${2:-10}))
  unset "CHILDREN[$pid]"
  group_lives "$pid" || return 0
  kill -TERM -- "-$pid" 2>/dev/null || true
  while group_lives "$pid" && ((tenths-- > 0)); do
    sleep 0.1
  done
  kill -KILL -- "-$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}

stop_children() {
  local pid
  for pid in "${!CHILDREN[@]}"; do stop_child "$pid"; done
}

stage() {
  local name=$1 log started=$SECONDS code=0
  shift
  mkdir -p "$LOGS"
  log="$LOGS/${name// /-}.log"
  printf '%-16s' "$name"
  run_child "$@" >"$log" 2>&1 || code=$?
  STAGE_TIMES+=("$(printf '%-16s %4d s' "$name" $((SECONDS - started)))")
  if [[ $code -eq 0 ]]; then
    printf 'done in %d s\n' $((SECONDS - started))
  else
    printf 'FAILED (exit %d) after %d s; the end of %s:\n' "$code" $((SECONDS - started)) "$log"
    tail -n 40 "$log" | sed 's/^/    /'
  fi
  return "$code"
}

print_stage_times() {
  printf '  %s\n' "${STAGE_TIMES[@]}"
}
