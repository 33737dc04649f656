"""Runs a program under what a unit of systemd's forbids its calls, where there is no systemd to do it:

    unit_sandbox.py UNIT... -- PROGRAM [ARGUMENT...]

SystemCallFilter, RestrictAddressFamilies, RestrictNamespaces, MemoryDenyWriteExecute and NoNewPrivileges of the files, which
add up as a unit and its drop-ins do. Stricter than the unit: what it would refuse ends the program with SIGSYS, so that none
of its calls is refused unnoticed. Not laid on: users, capabilities, and all that changes which files and devices there are.
"""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pyseccomp as seccomp

PROT_WRITE, PROT_EXEC = 2, 4
# CLONE_NEW of time, mount, cgroup, uts, ipc, user, pid and net: clone takes them in its first argument.
NAMESPACES = 0x80 | 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000


def settings(units: list[Path]) -> dict[str, list[str]]:
    """The lines of [Service], each setting's in their order."""
    found: dict[str, list[str]] = {}
    for line in "\n".join(unit.read_text() for unit in units).splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", ";")):
            found.setdefault(name, []).append(value)
    return found


@functools.cache
def listed_groups() -> dict[str, list[str]]:
    """systemd's groups of calls, as they are printed: calls, and other groups' names."""
    told = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager"], capture_output=True, text=True, check=True
    )
    groups: dict[str, list[str]] = {}
    for line in told.stdout.splitlines():
        if line.startswith("@"):
            groups[name := line.strip()] = []
        elif line.startswith("    ") and not line.strip().startswith("#"):
            groups[name].append(line.strip())
    return groups


def calls_of(word: str) -> set[str]:
    if not word.startswith("@"):
        return {word}
    return {call for part in listed_groups()[word] for call in calls_of(part)}


def allowed_calls(lines: list[str]) -> set[str]:
    """What a unit's SystemCallFilter leaves; the first line says what there is, later ones add or, with ~, take away."""
    calls = calls_of("@default")
    for line in lines:
        words = {call for word in line.removeprefix("~").split() for call in calls_of(word)}
        calls = calls - words if line.startswith("~") else calls | words
    return calls


def conditions(unit: dict[str, list[str]]) -> dict[str, list[seccomp.Arg]]:
    """Of the calls that are allowed with certain arguments alone: each Arg is one way."""
    found = {"clone": [seccomp.Arg(0, seccomp.MASKED_EQ, NAMESPACES, 0)]} if "RestrictNamespaces" in unit else {}
    if families := unit.get("RestrictAddressFamilies"):
        names = " ".join(families).split()
        found["socket"] = [seccomp.Arg(0, seccomp.EQ, int(getattr(socket, name))) for name in names]
    if unit.get("MemoryDenyWriteExecute", ["false"])[-1] == "true":
        not_executable = seccomp.Arg(2, seccomp.MASKED_EQ, PROT_EXEC, 0)
        found["mmap"] = [not_executable, seccomp.Arg(2, seccomp.MASKED_EQ, PROT_WRITE, 0)]
        found |= {name: [not_executable] for name in ("mprotect", "pkey_mprotect")}
    return found


def confine(unit: dict[str, list[str]]) -> None:
    """For good; also of what this process starts."""
    rules = seccomp.SyscallFilter(seccomp.KILL_PROCESS)
    only = conditions(unit)
    for call in sorted(allowed_calls(unit["SystemCallFilter"])):
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, call) < 0:
            continue  # another architecture's
        if call == "clone3" and "RestrictNamespaces" in unit:
            rules.add_rule(seccomp.ERRNO(38), call)  # ENOSYS, as systemd says: glibc then takes clone
        for argument in only.get(call, []):
            rules.add_rule(seccomp.ALLOW, call, argument)
        if call not in only and not (call == "clone3" and "RestrictNamespaces" in unit):
            rules.add_rule(seccomp.ALLOW, call)
    rules.load()


def main() -> None:
    cut = sys.argv.index("--")
    unit = settings([Path(name) for name in sys.argv[1:cut]])
    confine(unit)
    os.execv(sys.argv[cut + 1], sys.argv[cut + 1 :])


if __name__ == "__main__":
    main()
