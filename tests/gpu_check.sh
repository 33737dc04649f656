#!/usr/bin/env bash
# What only a GPU can show, in one command and within eight minutes: the CPU's bits, no bad access to memory, the speed.
#
#   tests/gpu_check.sh [--build-only | --built] [--arch NN] [--kernels FILE] [--results FILE]
#
#   --build-only     compile everything; needs no GPU
#   --built          compile nothing: run what --build-only left in build/gpu-check, here or on another machine (gpu_identity,
#                    gpu_bench and built.txt there)
#   --arch NN        for compute capability N.N (default: this GPU's; without one 90)
#   --kernels FILE   the CPU's kernels are not compiled but taken from FILE, the archive that another build has just made of
#                    them (build/dev/kernels/libballast_kernels.a)
#   --results FILE   default tests/bench/results/gpu.md
#
# Needs bash and python3 and, but with --built, g++ and nvcc, nothing else. Builds into build/gpu-check with the options of
# kernels/CMakeLists.txt. What neither its sources nor its command have changed of is not compiled again. Then it runs, all
# at the same time: the identity of CPU and GPU (tests/kernels/cuda/gpu_identity.cc), and a small part of it under
# compute-sanitizer's memcheck and racecheck. Then, one after the other and alone: the benchmark (tests/bench/gpu_bench.cc),
# while nvidia-smi says the GPU's clocks and power; the daemon's device layer, its bits and its speed
# (tests/bench/gpu_device_bench.cc), where `deploy/setup.sh portable` has put it into build/portable; optimizers of others as
# far as python3 can import them (tests/bench/gpu_peers.py); training against the daemon of build/portable
# (tests/bench/gpu_training.py); a trainer whose model is on the GPU (tests/bench/gpu_trainer.py); a module there that follows a
# run (tests/bench/gpu_follower.py); and layers in 8 bits on it (tests/bench/gpu_layers.py). No setting of the GPU is changed.
#
# Every part has a budget; what does not fit is stopped, and FILE says so; a sanitizer that is stopped is "not finished", and
# no failure unless it had found something. A part that cannot run is skipped loudly. Logs are in build/gpu-check/logs.
#
# Exit codes: 0 all that ran passed, 1 something failed or ran out of time, 2 a wrong flag, 77 there is no GPU.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
readonly BUILD="build/gpu-check"
readonly LOGS="$BUILD/logs"
readonly FOUND="$BUILD/found" # what gpu_report.py makes the results file of
readonly PARTS="build identity memcheck racecheck benchmark device peers training trainer follower layers"
readonly SECONDS_MOST=465
readonly CUDA_PARTS=4
readonly PYTHON=${PYTHON:-python3}

build_only=no
built=no
arch=""
kernels=""
results="tests/bench/results/gpu.md"

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"
# shellcheck source=deploy/stages.sh
. "$ROOT/deploy/stages.sh"

flag --build-only
flag --built
flag --arch "a compute capability without its dot, 90 say" '[0-9]+[af]?'
flag --kernels "a file"
flag --results "a file"

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

ask_gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

choose_arch() {
  [[ -z $arch ]] || return 0
  if has_gpu; then
    arch=$(ask_gpu compute_cap | tr -d .)
    [[ $arch =~ ^[0-9]+$ ]] || fail "nvidia-smi does not say this GPU's compute capability: name it with --arch"
    ((arch >= 80)) || fail "the kernels need compute capability 8.0, this GPU has $arch"
  else
    arch=90
  fi
}

# --- the build ------------------------------------------------------------------------------------------------------

# The options of one isa, as in kernels/CMakeLists.txt; of a new one without any it shows when it is compiled.
isa_options() {
  local order="-mtune=znver3 -fschedule-insns -fsched-pressure"
  case $1 in
    avx512) echo "-DBALLAST_UNIT=avx512_unit -mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl $order" \
      "-Wno-maybe-uninitialized -Wno-uninitialized" ;;
    avx2) echo "-DBALLAST_UNIT=avx2_unit -mavx2 -mfma $order" ;;
    scalar) echo "-fno-tree-vectorize -DBALLAST_UNIT=scalar_unit" ;;
  esac
}

# Whether this machine's processor has the isa, or the choice among isas, of that name.
has_isa() {
  if [[ $(uname -m) == x86_64 ]]; then [[ $1 != choice_other ]]; else [[ ! $1 =~ ^(avx|choice_x86) ]]; fi
}

# One line a unit, the longest to compile first: object, source, compiler and its options. Every source there is, so that
# none is forgotten: an object's folder is the program that it is linked into, or `kernels`, linked into both.
units() { cuda_units && if [[ -z $kernels ]]; then kernel_units; fi && program_units; }

cuda_units() {
  local part source cuda="nvcc -std=c++20 -O3 -gencode=arch=compute_$arch,code=sm_$arch --fmad=false"
  cuda+=" --expt-relaxed-constexpr -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error"
  cuda+=" -DBALLAST_CUDA_PARTS=$CUDA_PARTS"
  for ((part = 0; part < CUDA_PARTS; part++)); do
    echo "kernels/updates_$part kernels/cuda/cuda_updates.cu $cuda -DBALLAST_UNIT=cuda_unit_$part -DBALLAST_PART=$part"
  done
  for source in kernels/cuda/*.cu; do
    if [[ $source == */cuda_updates.cu ]]; then continue; fi # in parts
    echo "kernels/$(basename "$source" .cu) $source $cuda -DBALLAST_UNIT=cuda_unit"
  done
}

kernel_units() {
  local name source isa="g++ -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
  for source in kernels/cpu/*.cc; do
    name=$(basename "$source" .cc)
    if has_isa "$name"; then echo "kernels/$name $source $isa $(isa_options "$name")"; fi
  done
  for source in kernels/*.cc kernels/matrix/*.cc; do
    echo "kernels/$(basename "$source" .cc) $source $isa"
  done
}

program_units() {
  local source host="g++ -O2 -ffp-contract=off -fno-math-errno"
  for source in tests/kernels/cuda/gpu_identity*.cc; do
    echo "gpu_identity/$(basename "$source" .cc) $source $host"
  done
  for source in gpu_bench gpu_matrices; do
    echo "gpu_bench/$source tests/bench/$source.cc $host"
  done
}

# OBJECT COMMAND...: one hash of the command, its compiler and what the object was made of.
hash_of_inputs() {
  local object=$1 sources
  shift
  sources=$(sed 's/\\$//' "$object.d" | tr -s ' ' '\n' | sed '/:$/d;/^$/d' | sort -u) || return 0
  # shellcheck disable=SC2086 # words
  { printf '%s ' "$@" "$("$1" --version)" && cat $sources; } 2>/dev/null | sha256sum
}

# OBJECT SOURCE COMPILER OPTION...; nothing where neither the command nor what it reads has changed.
compile() {
  local object="$OBJECTS/$1.o" source=$2 standard=(-std=c++20 -Wall -Wextra -Wno-missing-field-initializers) command
  shift 2
  if [[ $1 == nvcc ]]; then standard=(); fi
  command=("$@" "${standard[@]}" -I. -isystem "$CUDA_INCLUDE" -MMD -MF "$object.d" -c "$source")
  if [[ -f $object && -f $object.inputs && $(<"$object.inputs") == "$(hash_of_inputs "$object" "${command[@]}")" ]]; then
    return 0
  fi
  echo "$source -> $object"
  rm -f "$object.inputs"
  mkdir -p "$(dirname "$object")"
  ${CCACHE:+"$CCACHE"} "${command[@]}" -o "$object" || return 1
  hash_of_inputs "$object" "${command[@]}" >"$object.inputs"
}

# PROGRAM: from its own objects and those of the kernels.
link() {
  local objects
  mapfile -t objects < <(units | sed -n "s,^\(\($1\|kernels\)/[^ ]*\) .*,$OBJECTS/\1.o,p")
  nvcc -o "$BUILD/$1" "${objects[@]}" ${kernels:+"$kernels"}
}

find_cuda() {
  command -v nvcc >/dev/null || fail "no nvcc on PATH or in /usr/local/cuda/bin"
  CUDA_INCLUDE=$(nvcc --dryrun -c -x cu /dev/null -o /dev/null 2>&1 | sed -n 's/.*INCLUDES="-I\([^" ]*\).*/\1/p')
  [[ -f $CUDA_INCLUDE/cuda_runtime.h ]] || fail "nvcc names no folder with cuda_runtime.h: '$CUDA_INCLUDE'"
}

# SECONDS: what compiling may take.
build_programs() {
  OBJECTS="$BUILD/sm_$arch"
  CCACHE=$(command -v ccache || true)
  export OBJECTS CUDA_INCLUDE CCACHE
  export -f compile hash_of_inputs
  units | sed 's/ *$//' | timeout --kill-after=5 "$1" xargs -P "$(nproc)" -L 1 bash -c 'compile "$@"' compile || return 1
  link gpu_identity && link gpu_bench || return 1
  cp "$FOUND/built.txt" "$BUILD/built.txt"
}

# What the programs are made of and by, for those who run them, maybe elsewhere.
describe_build() {
  printf 'CUDA compiler: %s\n' "$(nvcc --version | sed -n 's/.*release \([^,]*\), \(V[^ ]*\).*/\2/p')"
  printf 'compiled for: sm_%s\n' "$arch"
  printf 'C++ compiler: %s\n' "$(g++ --version | head -n 1)"
  if [[ -n $kernels ]]; then printf 'kernels of the CPU: %s\n' "$kernels"; fi
  printf 'commit: %s\n' "$(git describe --always --dirty 2>/dev/null || echo unknown)"
}

# Instead of the build.
find_built() {
  local program
  for program in gpu_identity gpu_bench; do
    [[ -x $BUILD/$program ]] || fail "there is no $BUILD/$program: tests/gpu_check.sh --build-only makes it"
  done
  cp "$BUILD/built.txt" "$FOUND/built.txt" 2>/dev/null ||
    printf '%s: unknown\n' "CUDA compiler" "compiled for" "C++ compiler" commit >"$FOUND/built.txt"
}

# --- the parts ------------------------------------------------------------------------------------------------------

note_part() { printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4:-}" >>"$FOUND/parts.tsv"; }

skip_part() {
  printf '!! SKIPPED: %s: %s\n' "$1" "$2"
  note_part "$1" skipped "" "$2"
}

# timeout leads the process group that is stopped with the script only if it is the child itself, and else has one of its own.
within() { exec timeout --kill-after=5 "$@"; }

# SECONDS TOOL COMMAND...: under a tool that slows it down. Stopped without a finding it is not finished, which is no failure.
sanitized_within() {
  local seconds=$1 tool=$2 code=0
  shift 2
  timeout --kill-after=5 "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "$@" &
  trap 'kill "$!" && wait "$!"' TERM
  wait "$!" || code=$?
  [[ $code == 124 || $code == 137 ]] || return "$code"
  if grep -qE '^========= (Invalid|Error|ERROR|Race|Program hit)' "$LOGS/$tool.log"; then return 9; fi
  echo "not finished: stopped after $seconds s, without a finding until then"
}

# part NAME SECONDS COMMAND...: within that many seconds, or what is left of all; a failure does not stop the script.
# RUNNER SECONDS COMMAND... runs it. With MAY_SKIP=yes, code 77 says that it cannot run here; else that is a failure.
part() {
  local name=$1 budget=$2 code=0 verdict=FAILED started=$SECONDS left=$((SECONDS_MOST - SECONDS)) last
  shift 2
  ((left < budget)) && budget=$left
  if ((budget < 10)); then
    printf '!! OUT OF TIME: %s: nothing is left for it\n' "$name"
    note_part "$name" "OUT OF TIME" "" "nothing was left for it"
    return 1
  fi
  stage "$name" "${RUNNER:-within}" "$budget" "$@" || code=$?
  last=$(tail -n 1 "$LOGS/${name// /-}.log" | tr '\t' ' ')
  case $code in
    0)
      verdict=passed
      if [[ $last == "not finished"* ]]; then verdict="not finished"; fi
      ;;
    124 | 137)
      verdict="OUT OF TIME"
      last="stopped after its budget of $budget s"
      ;;
    77) if [[ ${MAY_SKIP:-no} == yes ]]; then verdict=skipped; fi ;;
    *) last="exit code $code: $last" ;;
  esac
  if [[ $verdict == skipped ]]; then
    skip_part "$name" "$last"
  else
    note_part "$name" "$verdict" $((SECONDS - started)) "$last"
  fi
  return "$code"
}

sanitize() {
  local tool=$1
  if ! command -v compute-sanitizer >/dev/null; then
    skip_part "$tool" "no compute-sanitizer on PATH"
    return 0
  fi
  RUNNER=sanitized_within part "$tool" 90 "$tool" "$BUILD/gpu_identity" --reduced
}

# Started by start_child: runs a part beside others, and says at its end, at once, what it has to say. A signal stops what it
# started in its turn.
beside() {
  local said="$LOGS/$2.said"
  CHILDREN=()
  trap stop_children EXIT
  trap 'exit 130' INT TERM HUP
  "$@" >"$said" 2>&1 || true
  cat "$said"
}

# What checks bits shares the GPU: only what it finds matters, not how long it takes.
check_bits() {
  local pid
  start_child beside part identity 150 "$BUILD/gpu_identity" --json "$FOUND/identity.json"
  start_child beside sanitize memcheck
  start_child beside sanitize racecheck
  for pid in "${!CHILDREN[@]}"; do
    wait "$pid" || true # all_well knows
    unset "CHILDREN[$pid]"
  done
}

# About twice a second, until it is stopped.
sample_clocks() {
  while sleep 0.5; do
    ask_gpu clocks.sm,clocks.mem,power.draw,temperature.gpu || true
  done >"$FOUND/clocks.csv"
}

benchmark() {
  local sampler
  start_child sample_clocks
  sampler=$CHILD
  part benchmark 75 "$BUILD/gpu_bench" --seconds 55 --json "$FOUND/bench.jsonl" || true
  stop_child "$sampler"
}

device() {
  local program=build/portable/bin/gpu_device_bench
  if [[ ! -x $program ]]; then
    skip_part device "there is no $program: deploy/setup.sh portable makes it, where nvcc is"
    return 0
  fi
  part device 60 "$program" --seconds 35 --json "$FOUND/device.jsonl" || true
}

train() {
  MAY_SKIP=yes part training 100 "$PYTHON" tests/bench/gpu_training.py build/portable || true
  if grep -q . "$LOGS/training.log" 2>/dev/null; then cp "$LOGS/training.log" "$FOUND/training.txt"; fi
}

trainer() {
  MAY_SKIP=yes part trainer 130 "$PYTHON" tests/bench/gpu_trainer.py build/portable --json "$FOUND/trainer.jsonl" || true
}

follower() {
  MAY_SKIP=yes part follower 60 "$PYTHON" tests/bench/gpu_follower.py build/portable --json "$FOUND/follower.jsonl" || true
}

layers() {
  MAY_SKIP=yes part layers 120 "$PYTHON" tests/bench/gpu_layers.py build/portable --json "$FOUND/layers.jsonl" || true
}

run_parts() {
  check_bits
  benchmark
  device
  MAY_SKIP=yes part peers 50 "$PYTHON" tests/bench/gpu_peers.py --seconds 35 --json "$FOUND/peers.jsonl" || true
  train
  trainer
  follower
  layers
}

# Whether every part has said how it went, and none that it failed; from the file, since some ran in shells of their own.
all_well() {
  local name
  for name in $PARTS; do
    grep -q "^$name"$'\t''\(passed\|skipped\|not finished\)'$'\t' "$FOUND/parts.tsv" || return 1
  done
}

describe_machine() {
  printf 'GPU: %s\n' "$(ask_gpu name)"
  printf 'its memory: %s\n' "$(ask_gpu memory.total)"
  printf 'driver: %s\n' "$(ask_gpu driver_version)"
  printf 'processor: %s, %s cores\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)"
  printf 'date: %s\n' "$(date -u +%Y-%m-%d)"
  cat "$FOUND/built.txt"
}

# With --built there is nothing to do but to look for it.
build() {
  if [[ $built == yes ]]; then
    find_built
    note_part build skipped "" "--built"
    return
  fi
  [[ -z $kernels || -f $kernels ]] || fail "there is no $kernels, which --kernels names"
  find_cuda
  choose_arch
  describe_build >"$FOUND/built.txt"
  if stage build build_programs "$1"; then
    note_part build passed "$SECONDS"
  else
    note_part build FAILED "$SECONDS" "$(tail -n 1 "$LOGS/build.log")"
    return 1
  fi
}

main() {
  local compiled=yes
  parse_flags "$@"
  [[ $build_only == no || $built == no ]] || refuse "--build-only and --built exclude each other"
  cd "$ROOT"
  if [[ $build_only == no ]] && ! has_gpu; then
    echo "!! NO GPU: NOTHING WAS CHECKED (nvidia-smi lists none; --build-only compiles without one)"
    exit 77
  fi
  trap stop_children EXIT
  trap 'exit 130' INT TERM HUP
  rm -rf "$LOGS" "$FOUND"
  mkdir -p "$LOGS" "$FOUND"
  PATH="$PATH:/usr/local/cuda/bin" # nvcc and compute-sanitizer
  if [[ $build_only == yes ]]; then
    build 3600
    exit
  fi
  build 240 || compiled=no
  describe_machine >"$FOUND/machine.txt"
  if [[ $compiled == yes ]]; then run_parts; fi
  "$PYTHON" tests/bench/gpu_report.py "$FOUND" "$results"
  cat "$results"
  all_well
}

main "$@"
