"""A clock that a test sets, for one process: what an operator, NTP or a virtual machine that wakes up does to the time of day.

    clock = SetClock(folder)
    with Daemon(folder, environment=clock.environment): clock.set(-3600)

Each library finds the time moved, and so does the kernel's futex, whose waits may end at a time of day.
"""

import struct
import subprocess
from pathlib import Path

LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int64_t second = 1000000000, slice = 20000000;
static volatile int64_t* moved;
static long (*the_syscall)(long, ...);

__attribute__((constructor)) static void begin(void) {
  the_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  moved = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, open(getenv("MOVED_CLOCK"), O_RDONLY), 0);
}

static struct timespec timespec_of(int64_t ns) { return (struct timespec){ns / second, ns % second}; }
static int64_t ns_of(const struct timespec* time) { return time->tv_sec * second + time->tv_nsec; }

int clock_gettime(clockid_t id, struct timespec* time) {
  static int (*next)(clockid_t, struct timespec*);
  if (!next) next = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  if (next(id, time) != 0) return -1;
  if (moved && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) *time = timespec_of(ns_of(time) + *moved);
  return 0;
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return ns_of(&time);
}

long syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  const int until_time_of_day = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  if (number != SYS_futex || (a[1] & ~FUTEX_PRIVATE_FLAG) != until_time_of_day || a[3] == 0)
    return the_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  const int64_t until = ns_of((const struct timespec*)a[3]);
  for (;;) {
    const int64_t left = until - now();
    if (left <= 0) return errno = ETIMEDOUT, -1;
    const struct timespec end = timespec_of(now() - *moved + (left < slice ? left : slice));
    const long result = the_syscall(number, a[0], a[1], a[2], (long)&end, a[4], a[5]);
    if (result == 0 || errno != ETIMEDOUT) return result;
  }
}
"""


class SetClock:
    """environment: of the process whose clock it is."""

    def __init__(self, folder: Path):
        library, self._moved = folder / "set_clock.so", folder / "moved_clock"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
        subprocess.run(command, input=LIBRARY, text=True, check=True)
        self._moved.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(self._moved)}

    def set(self, seconds: int) -> None:
        """To so many more than it is."""
        with self._moved.open("r+b") as moved:
            moved.write(struct.pack("<q", seconds * 10**9))
