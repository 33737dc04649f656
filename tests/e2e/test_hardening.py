"""The programs are built so that a mistake in them is hard to make use of: read from the programs themselves."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemon import BALLASTCTL, BALLASTD, BUILD

X86 = platform.machine() == "x86_64"


def said(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


def missing(program: Path) -> set[str]:
    """What a program lacks."""
    segments, dynamic = said("readelf", "-hlW", program), said("readelf", "-dW", program)
    symbols = said("readelf", "--dyn-syms", "-W", program)
    start_of_main = said("objdump", "-d", "--no-show-raw-insn", "--disassemble=main", program)
    has = {
        "position independence": re.search(r"Type:\s+DYN", segments) and re.search(r"Flags:.*\bPIE\b", dynamic),
        "relro": "GNU_RELRO" in segments,
        "immediate binding": re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic),
        "a stack without code": re.search(r"GNU_STACK.*\bRW\s", segments),
        "no memory to write code to": not re.search(r"LOAD.*\bRWE\b", segments),
        "canaries": "__stack_chk_fail" in symbols,
        "checked calls of libc": set(re.findall(r"\b__\w+_chk\b", symbols)) - {"__stack_chk_fail"},
        "marked targets of calls": not X86 or re.search(r"<main>:\s+\w+:\s+endbr64", start_of_main),
    }
    return {name for name, found in has.items() if not found}


def needs(program: Path) -> None:
    if not program.exists() or not shutil.which("readelf") or not shutil.which("objdump"):
        pytest.skip("needs built programs, and readelf and objdump (package binutils)")
    if "BALLAST_SANITIZER:STRING=\n" not in (BUILD / "CMakeCache.txt").read_text():
        pytest.skip("programs under sanitizers have none of it")


@pytest.mark.parametrize("program", [BALLASTD, BALLASTCTL], ids=lambda path: path.name)
def test_the_programs_are_hardened(program):
    needs(program)
    assert missing(program) == set()


def test_one_that_is_not_would_be_found(tmp_path):
    needs(BALLASTD)
    source, program = tmp_path / "open.cc", tmp_path / "open"
    source.write_text(
        '#include <cstdio>\nint main(int, char** v) { char to[9]; std::sprintf(to, "%s", v[0]); std::puts(to); }\n'
    )
    flags = "-O2 -no-pie -U_FORTIFY_SOURCE -fno-stack-protector -Wl,-z,norelro,-z,lazy,-z,execstack"
    said("g++", *flags.split(), *(["-fcf-protection=none"] if X86 else []), "-o", program, source)
    wanted = {
        "position independence",
        "relro",
        "immediate binding",
        "a stack without code",
        "canaries",
        "checked calls of libc",
    }
    assert missing(program) >= wanted | ({"marked targets of calls"} if X86 else set())
