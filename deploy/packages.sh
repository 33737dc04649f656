#!/usr/bin/env bash
# The one place that lists the distribution packages Ballast uses, and installs those that are missing.
#
#   deploy/packages.sh                     install what building and testing need (groups build libs tests data)
#   deploy/packages.sh build libs          only these groups
#   deploy/packages.sh --list [GROUP...]   print the names, one a line, and do nothing
#   deploy/packages.sh --check [GROUP...]  say what is missing; exit 1 if anything is
#
# Debian 12 and Ubuntu 24.04. It asks dpkg first and runs apt-get only when something is missing, so a second run takes
# a fraction of a second and needs no rights.
set -euo pipefail

# The compiler and the tools around it. python3-dev and -venv: the Python client is built against Debian's Python.
readonly PACKAGES_BUILD="g++ cmake ninja-build pkg-config ccache git python3-dev python3-venv"

# What the daemon and the clients link. gRPC and Protobuf: the wire. Abseil: Status, Mutex. prometheus-cpp: the metrics'
# text format; CivetWeb: the port that serves it. yaml-cpp: the configuration. xxHash: digests of weights.
# ISA-L: CRC32C of chunks. OpenSSL: TLS, digests of specs. RE2: patterns of layers. zlib: the example's images. OpenBLAS, which is
# looked for at run time: matrix products of the rule muon. GoogleTest, Google Benchmark: the preset dev builds tests and
# benchmarks too.
readonly PACKAGES_LIBS="libgrpc++-dev libgrpc-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev
  prometheus-cpp-dev libcivetweb-dev libyaml-cpp-dev libxxhash-dev libisal-dev libssl-dev libre2-dev zlib1g-dev
  libopenblas0-pthread libgtest-dev libgmock-dev libbenchmark-dev"

# promtool comes in the package prometheus, amtool in prometheus-alertmanager; the services of neither are started, the
# tests run both programs themselves.
# clang-format and shellcheck read the sources. Fashion-MNIST, 30 MB, for the C++ example. e2fsprogs and xfsprogs make the
# file systems on which tests cut the power. openssl makes certificates of other dates than ballastctl does. systemd has
# systemd-analyze, which reads the unit, and brings libseccomp2; in a container it starts nothing. iproute2 makes network
# namespaces.
readonly PACKAGES_TESTS="prometheus prometheus-alertmanager clang-format shellcheck dataset-fashion-mnist e2fsprogs xfsprogs
  openssl systemd iproute2"

# The text that the quick start's model reads: the King James Bible, public domain, 4.4 MB.
readonly PACKAGES_DATA="bible-kjv"

# Fashion-MNIST, 30 MB, for the study of formats, tests/studies/codec_study/study.py; not installed by default.
readonly PACKAGES_STUDY="dataset-fashion-mnist"

# What a built ballastd and ballastctl need to run and nothing else; the container installs these. Debian 12's names.
readonly PACKAGES_RUNTIME="libgrpc++1.51 libgrpc29 libprotobuf32 libabsl20220623 libprometheus-cpp-core1.0 libcivetweb1
  libyaml-cpp0.7 libxxhash0 libisal2 libssl3 libc-ares2 libre2-9 zlib1g libstdc++6 libopenblas0-pthread"

# From NVIDIA's repository, which the image for GPUs has; not installed by default. Matrix products of the rule muon on a GPU,
# and on the CPU beside it.
readonly PACKAGES_CUDA="libcublas-13-0 libopenblas0-pthread"

# clang with libFuzzer, for tests/fuzz; not installed by default.
readonly PACKAGES_FUZZ="clang libclang-rt-14-dev"

# What tests/emulated/run.sh needs to run AVX-512 code on a processor without it; not installed by default.
readonly PACKAGES_EMULATOR="bochs bochs-term bochsbios isolinux syslinux-common genisoimage cpio busybox-static binutils"

# Chromium, for tests/e2e/test_page.py; not installed by default, for Ubuntu has it as a snap alone.
readonly PACKAGES_BROWSER="chromium-headless-shell"

readonly DEFAULT_GROUPS="build libs tests data"
readonly GRPC_NEEDED="1.51"
# Try a download three times; wait for another apt-get rather than fail on its lock.
readonly APT_OPTIONS=(-o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)

list=no
check=no

# Beside this script: the container copies these two alone.
# shellcheck source=deploy/options.sh
. "$(dirname "${BASH_SOURCE[0]}")/options.sh"

flag --list
flag --check
words anywhere

group_packages() {
  case "$1" in
    build) echo "$PACKAGES_BUILD" ;;
    libs) echo "$PACKAGES_LIBS" ;;
    tests) echo "$PACKAGES_TESTS" ;;
    data) echo "$PACKAGES_DATA" ;;
    runtime) echo "$PACKAGES_RUNTIME" ;;
    cuda) echo "$PACKAGES_CUDA" ;;
    study) echo "$PACKAGES_STUDY" ;;
    fuzz) echo "$PACKAGES_FUZZ" ;;
    emulator) echo "$PACKAGES_EMULATOR" ;;
    browser) echo "$PACKAGES_BROWSER" ;;
    *) refuse "unknown group '$1' (build, libs, tests, data, runtime, cuda, study, fuzz, emulator, browser)" ;;
  esac
}

list_packages() {
  local group packages
  for group in "$@"; do
    packages=$(group_packages "$group")
    tr -s '[:space:]' '\n' <<<"$packages"
  done
}

missing_packages() {
  local wanted installed
  wanted=$(list_packages "$@" | sort -u)
  # shellcheck disable=SC2016  # the dollar signs are dpkg-query's
  installed=$(dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' | sed -n 's/ installed$//p' | sort -u)
  comm -23 <(echo "$wanted") <(echo "$installed")
}

require_apt() {
  command -v apt-get >/dev/null && command -v dpkg-query >/dev/null && return
  fail "no apt-get here: Ballast builds on Debian 12 and Ubuntu 24.04. Elsewhere use the container:" \
    "docker build -f deploy/Dockerfile -t ballast ."
}

distribution() {
  # shellcheck disable=SC1091
  (. /etc/os-release && echo "${PRETTY_NAME:-${ID:-unknown}}") 2>/dev/null || echo unknown
}

# Ubuntu 22.04 ships gRPC 1.30, whose API lacks what Ballast calls: say so here rather than in the compiler.
require_grpc() {
  local offered
  offered=$(apt-cache policy libgrpc++-dev | sed -n 's/^ *Candidate: *//p')
  [[ -n $offered && $offered != "(none)" ]] ||
    fail "$(distribution) offers no libgrpc++-dev (on Ubuntu, is the component 'universe' switched on?)"
  dpkg --compare-versions "$offered" ge "$GRPC_NEEDED" ||
    fail "$(distribution) offers gRPC $offered; Ballast needs $GRPC_NEEDED or later." \
      "Use Debian 12, Ubuntu 24.04, or the container: docker build -f deploy/Dockerfile -t ballast ."
}

# Runs a command as root, or says which command somebody with the rights must run.
as_root() {
  if [[ $(id -u) -eq 0 ]]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    fail "root rights are needed and there is no sudo. Run as root: $*"
  fi
}

# Some packages (prometheus) start a service when installed. A policy of exit code 101 keeps every service stopped
# while apt-get runs; where such a policy exists already (containers have one), it is left alone.
readonly POLICY=/usr/sbin/policy-rc.d
policy_is_ours=no

forbid_services() {
  [[ -e $POLICY ]] && return
  policy_is_ours=yes
  # shellcheck disable=SC2016  # $1 belongs to the inner shell
  as_root sh -c 'printf "#!/bin/sh\nexit 101\n" >"$1" && chmod 755 "$1"' sh "$POLICY"
}

allow_services() {
  [[ $policy_is_ours == yes ]] || return 0
  policy_is_ours=no
  as_root rm -f "$POLICY"
}

# Ballast wants the programs, not services that start at the next boot. Only those that it has just brought: one that was
# there before is somebody's.
disable_services() {
  local package
  [[ -d /run/systemd/system ]] || return 0
  for package in "$@"; do
    case "$package" in
      prometheus | prometheus-alertmanager) as_root systemctl disable --quiet "$package" 2>/dev/null || true ;;
    esac
  done
}

install_packages() {
  local packages=("$@")
  echo "installing: ${packages[*]}"
  as_root apt-get "${APT_OPTIONS[@]}" update -q
  if [[ " ${packages[*]} " == *" libgrpc++-dev "* ]]; then require_grpc; fi
  trap allow_services EXIT
  forbid_services
  as_root apt-get "${APT_OPTIONS[@]}" install -q -y --no-install-recommends "${packages[@]}" ||
    fail "apt-get failed; its message is above. The command was: apt-get install --no-install-recommends ${packages[*]}"
  allow_services
  disable_services "${packages[@]}"
}

report_cuda() {
  if command -v nvcc >/dev/null; then
    echo "nvcc: $(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') (kernels for GPUs are built as well)"
  else
    echo "nvcc: not found (it is optional: without it nothing is compiled for GPUs)"
  fi
}

main() {
  local groups group missing
  parse_flags "$@"
  groups=("${WORDS[@]}")
  # shellcheck disable=SC2206  # the default is a list of words
  [[ ${#groups[@]} -gt 0 ]] || groups=($DEFAULT_GROUPS)
  for group in "${groups[@]}"; do group_packages "$group" >/dev/null; done
  if [[ $list == yes ]]; then
    list_packages "${groups[@]}"
    return
  fi
  require_apt
  missing=$(missing_packages "${groups[@]}")
  if [[ -z $missing ]]; then
    if [[ " ${groups[*]} " == *" libs "* ]]; then require_grpc; fi
    echo "packages: all present ($(distribution); groups ${groups[*]})"
  elif [[ $check == yes ]]; then
    fail "missing: ${missing//$'\n'/ }"
  else
    # shellcheck disable=SC2086  # one name a line, no spaces in names
    install_packages $missing
  fi
  if [[ " ${groups[*]} " == *" build "* ]]; then report_cuda; fi
}

main "$@"
