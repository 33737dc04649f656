#!/usr/bin/env bash
# Builds programs twice from the working tree's files, in two folders, and compares them: the same sources are to give the
# same bits, wherever they lie, with the same compiler and libraries.
#
#   tests/reproducible.sh [TARGET...]    ballastctl, where none is named; ballastd takes ten times as long
#
#   --keep FOLDER   where the two are built, which stay there; otherwise a temporary folder
#
# The preset release, without CUDA, whose compiler is not part of the promise, and without ccache, which would hand out the
# first build's objects again. SOURCE_DATE_EPOCH is the last commit's. Exits with 1, and says where they differ, if they do.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly ROOT
# shellcheck source=deploy/options.sh
. "$ROOT/deploy/options.sh"

keep=""

flag --keep "a folder"
words anywhere

# copy_into FOLDER: what git has, as the files are now.
copy_into() {
  mkdir -p "$1"
  (cd "$ROOT" && git ls-files -z --cached --others --exclude-standard | tar -c --null -T - --ignore-failed-read) | tar -x -C "$1"
}

# build_in FOLDER TARGET...
build_in() {
  local folder=$1 target targets=()
  shift
  for target in "$@"; do targets+=(--target "$target"); done
  (cd "$folder" && cmake --preset release -D BALLAST_CUDA=OFF -D BALLAST_BENCH=OFF -D BALLAST_REVISION="$revision" &&
    cmake --build --preset release --parallel "$(nproc)" "${targets[@]}") >"$folder.log" 2>&1 ||
    fail "the build in $folder failed; its log ends with: $(tail -n 5 "$folder.log")"
}

program_of() { find "$1/build/release" -type f -perm -u+x -name "$2" -not -path '*/CMakeFiles/*'; }

main() {
  local one another name digests failed=0
  parse_flags "$@"
  [[ ${#WORDS[@]} -gt 0 ]] || WORDS=(ballastctl)
  revision=$(git -C "$ROOT" rev-parse --short=7 HEAD)
  SOURCE_DATE_EPOCH=$(git -C "$ROOT" log -1 --format=%ct)
  export SOURCE_DATE_EPOCH CCACHE_DISABLE=1
  if [[ -z $keep ]]; then
    keep=$(mktemp -d)
    trap 'rm -rf "$keep"' EXIT
  fi
  # Of different lengths: what is padded to a path's length differs then, too.
  one=$keep/one another=$keep/another/place/with/a/longer/name
  copy_into "$one"  # both before the first build: the tree may change while that takes its time
  copy_into "$another"
  build_in "$one" "${WORDS[@]}"
  build_in "$another" "${WORDS[@]}"
  for name in "${WORDS[@]}"; do
    digests=$(sha256sum <"$(program_of "$one" "$name")")
    if cmp "$(program_of "$one" "$name")" "$(program_of "$another" "$name")"; then
      echo "$name: the same bits twice, sha256 ${digests%% *}"
    else
      echo "$name: other bits in another folder"
      failed=1
    fi
  done
  return "$failed"
}

main "$@"
