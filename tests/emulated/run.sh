#!/usr/bin/env bash
# Runs one static executable on an emulated processor that has AVX-512 (a Skylake-X: F, CD, BW, DQ and VL), so that
# AVX-512 code can be checked on a machine whose own processor lacks it. Bochs emulates the whole machine; a small Linux
# boots in it from a CD image whose initial file system holds busybox and the executable.
#
#   tests/emulated/run.sh [FLAG...] EXECUTABLE [ARGUMENT...]
#
#   --timeout SECONDS   give up after so long, boot included (default 900); exits 124
#   --memory MIB        the machine's memory (default 512)
#   --kernel FILE       a Linux bzImage (default: Debian's linux-image-cloud-amd64, downloaded once, never installed)
#   --verbose           show the kernel's messages as well, on stderr
#
# The program's stdout and stderr come out on stdout as they are written; the exit code is the program's.
# 125: the emulation itself failed. The packages: deploy/packages.sh emulator.
#
# Bochs uses one core: some 15 s of it to boot, then 70 million scalar instructions a second or 1.7 million rounds of a
# 16-lane load, division, fused multiply-add and store. What avx512_check.cc tries comes out as on a real processor
# to the bit, with one exception, which it names.
set -euo pipefail

readonly EXIT_TIMEOUT=124 EXIT_BROKEN=125
readonly CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/ballast/emulator"
readonly KERNEL_PACKAGE=linux-image-cloud-amd64
# Bochs 2.7's later models (corei7_icelake_u, tigerlake) do not get this kernel to boot.
readonly CPU_MODEL=corei7_skylake_x
readonly END_LINE=ballast-exit
# Emulated instructions a second of emulated time: what the guest's clock goes by, not a speed limit.
readonly INSTRUCTIONS_PER_SECOND=50000000
# clearcpuid: XSAVEC and XSAVES, whose sizes Bochs 2.7 reports wrongly, for which Linux would switch AVX off.
readonly KERNEL_PARAMETERS="console=ttyS0 quiet panic=-1 nokaslr nopku clearcpuid=321,323 mitigations=off tsc=reliable
  no_timer_check cryptomgr.notests acpi=off pci=off nosmp edd=off"

timeout=900
memory=512
kernel=
verbose=no
work=
emulator=
display_reader=
started_at=$SECONDS

# The program's own exit code may be any other.
readonly EXIT_FAILED=$EXIT_BROKEN EXIT_REFUSED=$EXIT_BROKEN
# shellcheck source=deploy/options.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../deploy/options.sh"

flag --timeout "seconds" '[0-9]+'
flag --memory "a number of MiB" '[0-9]+'
flag --kernel "a file"
flag --verbose
words last # the executable and its arguments

# shellcheck disable=SC2317  # the trap calls it
clean_up() {
  [[ -z $emulator ]] || kill -KILL "$emulator" 2>/dev/null || true
  [[ -z $display_reader ]] || kill "$display_reader" 2>/dev/null || true
  [[ -z $work ]] || rm -rf "$work"
}

require_packages() {
  local file
  for file in /usr/bin/bochs /usr/share/bochs/BIOS-bochs-latest /usr/share/bochs/VGABIOS-lgpl-latest \
    /usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so /usr/lib/ISOLINUX/isolinux.bin \
    /usr/lib/syslinux/modules/bios/ldlinux.c32 /usr/bin/genisoimage /usr/bin/cpio /bin/busybox /usr/bin/readelf; do
    [[ -e $file ]] || fail "$file is missing: run deploy/packages.sh emulator"
  done
}

require_static() {
  [[ -f $1 && -x $1 ]] || fail "$1 is not an executable file"
  readelf --program-headers "$1" >/dev/null 2>&1 || fail "$1 is not an ELF executable"
  ! readelf --program-headers "$1" | grep -q INTERP || fail "$1 is linked dynamically: link it with -static"
}

# The kernel is unpacked, not installed: installing would change what this machine boots.
find_kernel() {
  local package
  if [[ -n $kernel ]]; then
    [[ -r $kernel ]] || fail "cannot read the kernel $kernel"
    return
  fi
  kernel=$CACHE/vmlinuz
  [[ ! -s $kernel ]] || return 0
  package=$(apt-cache depends "$KERNEL_PACKAGE" | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p')
  [[ -n $package ]] || fail "apt-get knows no $KERNEL_PACKAGE: run apt-get update, or name a kernel with --kernel"
  echo "run.sh: downloading $package (27 MB, once)" >&2
  (cd "$work" && apt-get -o Acquire::Retries=3 download -qq "$package" 2>/dev/null) ||
    fail "cannot download $package: run apt-get update, or name a kernel with --kernel"
  dpkg-deb --extract "$work/$package"_*.deb "$work/package"
  mkdir -p "$CACHE"
  # A name of its own first, so that two runs at once never see half a kernel.
  cp "$work/package/boot/vmlinuz"-* "$kernel.$$"
  mv "$kernel.$$" "$kernel"
}

# The program has the second serial port to itself; the kernel's messages and the end line go to the first.
write_init() {
  cat <<EOF
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t tmpfs none /tmp
/bin/busybox stty -F /dev/ttyS1 115200 raw -echo
cd /tmp
(exec /program ${*@Q}) </dev/null >/dev/ttyS1 2>&1
echo "$END_LINE \$?"
exec /bin/busybox sleep 1000000
EOF
}

make_disc() {
  local executable=$1 root=$work/root disc=$work/disc
  shift
  mkdir -p "$root"/{bin,dev,proc,tmp} "$disc/isolinux"
  cp /bin/busybox "$root/bin/busybox"
  cp "$executable" "$root/program"
  write_init "$@" >"$root/init"
  chmod 755 "$root/init" "$root/program"
  (cd "$root" && find . | cpio --quiet --create --format=newc) >"$disc/initrd"
  cp "$kernel" "$disc/kernel"
  cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$disc/isolinux"
  printf 'DEFAULT ballast\nPROMPT 0\nLABEL ballast\n KERNEL /kernel\n APPEND initrd=/initrd %s\n' \
    "$(tr -s '[:space:]' ' ' <<<"$KERNEL_PARAMETERS")" >"$disc/isolinux/isolinux.cfg"
  genisoimage -quiet -o "$work/disc.iso" -b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table "$disc"
}

write_machine() {
  cat <<EOF
config_interface: textconfig
display_library: term
cpu: model=$CPU_MODEL, count=1, ips=$INSTRUCTIONS_PER_SECOND, reset_on_triple_fault=0
memory: guest=$memory, host=$memory
romimage: file=/usr/share/bochs/BIOS-bochs-latest, options=fastboot
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path="$work/disc.iso", status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev="$work/console"
com2: enabled=1, mode=file, dev="$work/output"
clock: sync=none
log: "$work/log"
panic: action=fatal
error: action=ignore
info: action=ignore
sound: waveoutdrv=dummy, waveindrv=dummy
speaker: enabled=0
EOF
}

# Debian's Bochs has its debugger compiled in and waits for a command: "c" lets the machine run.
# setsid: its text display would otherwise take hold of the terminal.
start_emulator() {
  write_machine >"$work/machine"
  echo c >"$work/commands"
  : >"$work/console"
  : >"$work/output"
  TERM=linux setsid bochs -q -f "$work/machine" -rc "$work/commands" </dev/null >"$work/display" 2>&1 &
  emulator=$!
}

# Bochs draws its text display on a pseudo-terminal that it names and nobody reads: once that is full, the machine
# stands still for ever. Reads it, from the moment it is named until the emulator ends.
drain_display() {
  local terminal
  [[ -z $display_reader ]] || return 0
  terminal=$(sed -n 's/.*connected to screen "\([^"]*\)".*/\1/p' "$work/display" | head -n 1)
  [[ -c $terminal ]] || return 0
  cat "$terminal" >/dev/null 2>&1 &
  display_reader=$!
  disown "$display_reader"
}

# Sets program_exit, or leaves it empty: the emulator ended, the kernel panicked or time is up.
await_end() {
  program_exit=
  while [[ -z $program_exit ]] && kill -0 "$emulator" 2>/dev/null; do
    sleep 0.2
    drain_display
    program_exit=$(tr -d '\r' <"$work/console" | sed -n "s/^$END_LINE \([0-9]*\)$/\1/p")
    ! grep -qa 'Kernel panic' "$work/console" || break
    ((SECONDS - started_at < timeout)) || break
  done
}

report_failure() {
  if ((SECONDS - started_at >= timeout)); then
    echo "run.sh: no end after $timeout s (see --timeout)" >&2
    exit "$EXIT_TIMEOUT"
  fi
  tail -n 20 "$work/console" >&2
  grep -ahs 'PANIC' "$work/display" "$work/log" >&2 || true
  fail "the emulated machine stopped before the program's end; its last messages are above"
}

run_program() {
  local printer
  start_emulator
  tail --bytes=+1 --follow --sleep-interval=0.2 --pid="$emulator" "$work/output" &
  printer=$!
  await_end
  # disown: the shell need not announce that its job was killed.
  disown "$emulator"
  kill -KILL "$emulator" 2>/dev/null || true
  wait "$printer" || true
  [[ $verbose == no ]] || cat "$work/console" >&2
  [[ -n $program_exit ]] || report_failure
}

main() {
  parse_flags "$@"
  set -- "${WORDS[@]}"
  [[ $# -ge 1 ]] || refuse "name an executable (see --help)"
  require_packages
  require_static "$1"
  trap clean_up EXIT
  work=$(mktemp --directory --tmpdir ballast-emulated.XXXXXX)
  find_kernel
  make_disc "$@"
  run_program
  exit "$program_exit"
}

main "$@"
