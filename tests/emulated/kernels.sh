#!/usr/bin/env bash
# The kernels' identity test on an emulated processor with AVX-512: every kernel of the registry in the isas scalar,
# AVX2 and AVX-512, bit for bit. For machines whose own processor lacks AVX-512; elsewhere tests/run.sh does it.
#
#   tests/emulated/kernels.sh [--timeout SECONDS] [GTEST_FLAG...]     (default: 3600 s)
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly ROOT BUILD="$ROOT/build/emulated"

# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"

timeout=3600
declare -a own=() gtest=()

flag --timeout "seconds" '[0-9]+'

for argument in "$@"; do
  if [[ $argument == --gtest_* ]]; then gtest+=("$argument"); else own+=("$argument"); fi
done
parse_flags "${own[@]}"

cmake -S "$ROOT/kernels" -B "$BUILD" -G Ninja -DBALLAST_TESTS=ON -DCMAKE_EXE_LINKER_FLAGS=-static \
  -DCMAKE_CXX_FLAGS=-DBALLAST_SHORT_IDENTITY >/dev/null
cmake --build "$BUILD" --target identity_test
"$ROOT/tests/emulated/run.sh" --timeout "$timeout" "$BUILD/tests/kernels/identity_test" "${gtest[@]}"
