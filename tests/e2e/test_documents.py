"""The command lines of ballastd and ballastctl that the documents and the alerts show are ones that the programs know, and their
exit codes those that the programs tell. Nothing of what they do is done."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
from daemon import BALLASTCTL, BALLASTD, ROOT, plain_environment

pytestmark = pytest.mark.skipif(not BALLASTCTL.exists(), reason="needs built programs")

SHOWING = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "client/python/README.md", "server/README.md")),
    *(path for path in (ROOT / "proto").glob("*.md")),
    *(path for path in (ROOT / "deploy").rglob("*") if path.suffix in (".md", ".yml", ".yaml", ".service")),
]
WORD = r"""(?:'[^']*'|"[^"]*"|[^\s`'"|;#)(]+)"""
FLAG = r"--[a-z][\w.-]*"


@functools.cache
def help_of(program: Path, *command: str) -> str:
    told = subprocess.run(
        [program, *command, "--help"], capture_output=True, text=True, timeout=30, env=plain_environment()
    )
    assert told.returncode == 0, (command, told.stderr)
    return told.stdout


def flags_of(program: Path, *command: str) -> set[str]:
    return set(re.findall(rf"^  ({FLAG})", help_of(program, *command), re.MULTILINE))


@functools.cache
def commands() -> set[str]:
    listed = help_of(BALLASTCTL).partition("\ncommands:\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^  (\w+)", listed, re.MULTILINE))


def shown(text: str, program: str) -> list[str]:
    """The words behind the program's name, in code: a span, or a line of a block or of a comment, up to its end or a comment."""
    spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"(?<!`)`([^`]{1,200})`(?!`)", text)]
    lines = re.findall(rf"^(?:    |# ?|#   )(?:\w+/)*({program} .*)$", text, re.MULTILINE)
    found = [re.match(rf"(?:\S*/)?{program}((?: {WORD})*)", code) for code in (*spans, *lines)]
    return [match[1] for match in found if match and match[1]]


def unknown_to_ctl(words: str) -> str:
    """What is wrong with what stands behind `ballastctl`; empty: nothing."""
    asked = re.sub(rf"^(?: --(?:server|timeout|tls-\w+|token-file) {WORD})*", "", words).split()
    if not asked or asked[0].startswith("--"):
        return ", ".join(set(re.findall(FLAG, words)) - flags_of(BALLASTCTL))
    if asked[0] not in commands():
        return f"no command {asked[0]}"
    return ", ".join(set(re.findall(rf"(?<= ){FLAG}", words)) - flags_of(BALLASTCTL, asked[0]))


def unknown_to_daemon(words: str) -> str:
    return ", ".join(set(re.findall(rf"(?<= ){FLAG}", words)) - flags_of(BALLASTD))


UNKNOWN_TO = {"ballastctl": unknown_to_ctl, "ballastd": unknown_to_daemon}


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_line_that_is_shown_is_known(path):
    text = path.read_text()
    wrong = [(words, said) for name, of in UNKNOWN_TO.items() for words in shown(text, name) if (said := of(words))]
    assert wrong == []


def test_many_are_shown():
    told = "".join(path.read_text() for path in SHOWING)
    assert len(shown(told, "ballastctl")) > 60 and len(shown(told, "ballastd")) > 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("`ballastctl --server a:1,b:2 restor RUN`", "no command restor"),
        ("`ballastctl --server RELAY\n   delete RUN --now --force`", "--now"),
        ("    build/ballastctl token new --name a  # --days 3\n", ""),
        ("    ballastctl token new --nome a\n", "--nome"),
        ("`ballastctl` and `ballastctl rewind RUN`", ""),
        ("`ballastctl --jason`", "--jason"),
    ],
)
def test_a_wrong_one_is_found(text, said):
    assert [unknown_to_ctl(words) for words in shown(text, "ballastctl")] == [said]


def test_a_wrong_flag_of_the_daemon_is_found():
    assert [unknown_to_daemon(words) for words in shown("`ballastd --limits.leese 3s`", "ballastd")] == [
        "--limits.leese"
    ]


def test_exit_codes_are_told_alike():
    """By the program that has them, by its help, and by the document."""
    enum = re.search(r"enum ExitCode \{(.*?)\}", (ROOT / "server" / "main.cc").read_text(), re.DOTALL)
    document = re.search(
        r"^Exit codes: (.*?)\n\n", (ROOT / "server" / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    told = re.search(r"Exit codes: (.*)\Z", help_of(BALLASTD), re.DOTALL)
    codes = [set(re.findall(r"\b\d+\b", found[1])) for found in (enum, document, told)]
    assert len(codes[0]) == 8 and codes[0] == codes[1] == codes[2]


def losses_of_the_study() -> dict[str, list[tuple[str, float]]]:
    """Of each pair of formats, on each task: the loss beyond fp32's, and the largest update."""
    text = (ROOT / "tests" / "studies" / "results" / "codec_study.md").read_text()
    found: dict[str, list[tuple[str, float]]] = {}
    for table in text.split("| master + state | held-out loss |")[1:]:
        for row in re.findall(r"^\| (.*) \|$", table.partition("\n\n")[0], re.MULTILINE)[1:]:
            name, _, beyond, *_, update = row.split(" | ")
            found.setdefault(name, []).append((beyond, float(update)))
    return found


def test_the_losses_that_are_told_are_the_studys():
    text = (
        (ROOT / "tests" / "bench" / "README.md")
        .read_text()
        .partition("\n**Quality**")[2]
        .partition("\n\nThe default")[0]
    )
    study = losses_of_the_study()
    rows = [row.split(" | ") for row in re.findall(r"^\| (.* \+ .*) \|$", text, re.MULTILINE)[1:]]
    for name, text_loss, image_loss, updates in rows:
        known = study[re.sub(r"\*\*|,(?! lr)| \(default\)", "", name)]
        told = [float(update.replace(",", "")) for update in updates.split(", ")]
        assert [text_loss, image_loss] == [loss for loss, _ in known], name
        assert told == [update for _, update in known], name
    assert len(rows) == 6
