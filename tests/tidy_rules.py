"""The house rules as functions: each takes the tree's sources and returns one line for every violation.

tidy_test.py applies them to this repository and, to prove that each can fail, to small planted trees.
"""

import ast
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

CPP = {".h", ".cc", ".cu", ".cuh"}
OWN_FOLDERS = {"proto", "kernels", "server", "client", "tests", "ballast"}


@dataclass(frozen=True)
class Source:
    path: str  # from the repository's root, with forward slashes
    text: str

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix

    @property
    def folder(self) -> str:
        return self.path.split("/")[0]

    @property
    def is_cpp(self) -> bool:
        return self.suffix in CPP

    @property
    def is_shell(self) -> bool:
        return self.suffix == ".sh" or self.text.startswith(("#!/usr/bin/env bash", "#!/bin/bash", "#!/bin/sh"))


def list_files(root: Path) -> list[Path]:
    """The files that git knows or would take; without git, all but build products."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        return [root / name for name in sorted(set(listed.split("\0"))) if name and (root / name).is_file()]
    ignored = {"build", ".venv", ".git", "__pycache__", ".pytest_cache", "dist"}
    return sorted(p for p in root.rglob("*") if p.is_file() and not ignored & set(p.relative_to(root).parts))


def read_tree(root: Path) -> list[Source]:
    sources = []
    for path in list_files(root):
        try:
            sources.append(Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a picture
    return sources


def without_comments(text: str) -> str:
    """C++ with comments and the insides of literals blanked; line numbers stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''

    def blank(match):
        kept = '""' if match.group()[0] in "R\"'" else ""
        return kept + "\n" * match.group().count("\n")

    # A quote between digits (1'000'000) separates thousands.
    return re.sub(pattern, blank, re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "", text), flags=re.DOTALL)


# --- who may include whom -------------------------------------------------------------------------------------------


def includes(source: Source) -> list[tuple[int, str, bool]]:
    """(line, name, quoted) of each #include."""
    found = []
    for number, line in enumerate(source.text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if match:
            found.append((number, match[2], match[1] == '"'))
    return found


MAY_INCLUDE = {
    "proto": {"proto", "ballast"},
    "kernels": {"kernels"},
    "server": {"server", "proto", "ballast", "kernels"},
    "client": {"client", "proto", "ballast"},
    "tests": OWN_FOLDERS,
}
# What kernels/ may take from outside: the standard library, the processor's and CUDA's headers; and the loader, by which a
# library of matrix products is found.
KERNELS_OUTSIDE = re.compile(
    r"[a-z_]+|(dlfcn|immintrin|x86intrin|cpuid|arm_neon|stdint|stddef|math|string)\.h|"
    r"(cuda|device_|driver_|vector_|cooperative_groups|cub/|cuda/|nv/)[\w/]*(\.h|\.cuh)?"
)


def dependency_direction(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        if not source.is_cpp or source.folder not in MAY_INCLUDE:
            continue
        allowed = set(MAY_INCLUDE[source.folder])
        if source.path.startswith("client/python/") and "numerics" in Path(source.path).stem:
            allowed |= {"kernels"}  # ballast.numerics binds the kernels and nothing else
        if source.path.startswith("tests/kernels/"):
            allowed = {"kernels", "tests"}
        if source.path.startswith("server/relay/"):
            allowed |= {"client"}  # it follows another daemon as a client does
        for line, name, quoted in includes(source):
            top = name.split("/")[0]
            if "/" in name and top in OWN_FOLDERS and top not in allowed:
                wrong.append(f"{source.path}:{line}: {source.folder} must not include {name}")
            elif source.folder == "kernels" and top != "kernels" and (quoted or not KERNELS_OUTSIDE.fullmatch(name)):
                wrong.append(f"{source.path}:{line}: kernels take the standard library and CUDA alone, not {name}")
    return wrong


# The rooms of server/, in order: each includes only itself and those before it, and what lies in server/ itself, all.
ROOMS = "base storage stability config spec step plan device store metrics follow access tls run convert relay slots nccl rpc shm ops".split()
PURE = {"stability", "spec", "step", "plan"}  # they decide: no threads, clocks or sockets
MESSAGES = {"storage", "config", "metrics", "convert", "relay", "nccl", "rpc", "shm", "ops", ""}  # Protobuf
TRANSPORTS = {"relay", "rpc", "shm", ""}  # gRPC
WORLD = re.compile(r"(yaml-cpp|prometheus|absl/synchronization|absl/time/clock|sys)/|Civet|thread$")


def room_of(path: str) -> str:
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def server_rooms(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        if not source.is_cpp or source.folder != "server":
            continue
        own = room_of(source.path)
        if own and own not in ROOMS:
            wrong.append(f"{source.path}: no room of that name; there are {', '.join(ROOMS)}")
            continue
        allowed = ROOMS[: ROOMS.index(own) + 1] if own else [*ROOMS, ""]
        for line, name, _ in includes(source):
            where = f"{source.path}:{line}"
            if name.startswith("server/") and room_of(name) not in allowed:
                wrong.append(f"{where}: {own} must not include {name}; it may: {', '.join(allowed)}")
            if own in PURE and WORLD.match(name):
                wrong.append(f"{where}: {own} decides, and must not include {name}")
            if own not in TRANSPORTS and (name.startswith(("grpc/", "grpcpp/")) or name.endswith(".grpc.pb.h")):
                wrong.append(f"{where}: only relay, rpc and shm include gRPC, here {name}")
            elif own not in MESSAGES and name.endswith(".pb.h"):
                wrong.append(f"{where}: only {', '.join(sorted(MESSAGES - {''}))} include messages, here {name}")
    return wrong


def include_paths(sources: list[Source]) -> list[str]:
    """Own headers are named from the repository's root."""
    paths = {source.path for source in sources}
    wrong = []
    for source in sources:
        if not source.is_cpp:
            continue
        beside = source.path.rsplit("/", 1)[0]
        for line, name, quoted in includes(source):
            if name.startswith(("./", "../")) or (quoted and name not in paths and f"{beside}/{name}" in paths):
                wrong.append(f'{source.path}:{line}: include "{beside}/{Path(name).name}", from the root, not "{name}"')
    return wrong


# --- sizes ----------------------------------------------------------------------------------------------------------

FILE_LINES, FUNCTION_LINES = 400, 70


def size_exempt(source: Source) -> bool:
    return source.folder == "kernels"  # a kernel is one thought and should not be cut up for a number


def file_length(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        lines = source.text.count("\n")
        counted = source.is_cpp or source.is_shell or source.suffix in {".py", ".proto"}
        if counted and not size_exempt(source) and lines > FILE_LINES:
            wrong.append(f"{source.path}: {lines} lines, {FILE_LINES} are the limit: split it by noun")
    return wrong


def kind_of_brace(head: str, before: str, enclosing: list[str]) -> str:
    """What a brace after `head` opens: a scope, a function's body, or a value (`a{1}`, with no space before it)."""
    if re.match(r"[\w>]", before):
        return "value"
    if re.match(r"(?:template\s*<.*>\s*)?(namespace|class|struct|union|enum|extern)\b", head, re.DOTALL):
        return "scope"
    is_body = "body" not in enclosing and ")" in head and not re.search(r"=\s*$", head)
    return "body" if is_body else "scope"


def cpp_functions(text: str) -> list[tuple[str, int, int]]:
    """(opening words, first line, last line) of each function body, by matching braces in code without comments.

    A body opens at a brace after a `)` (and perhaps const, noexcept, override, a result type or an initializer list)
    where the enclosing braces are namespaces and classes only.
    """
    code = re.sub(r"^[ \t]*#.*(?:\\\n.*)*$", "", without_comments(text), flags=re.MULTILINE)
    functions, open_braces, head_start = [], [], 0
    for position, character in enumerate(code):
        if character == "{":
            head = code[head_start:position].strip()
            kind = kind_of_brace(head, code[position - 1 : position], [kind for kind, _, _ in open_braces])
            open_braces.append((kind, head, code.count("\n", 0, position) + 1))
        elif character == "}" and open_braces:
            kind, head, line = open_braces.pop()
            if kind == "body":
                functions.append((" ".join(head.split())[:60], line, code.count("\n", 0, position) + 1))
            if kind == "value":
                continue  # what stood before it goes on: `S() : a{1} {`
        if character in "{};" and not (open_braces and open_braces[-1][0] == "value"):
            head_start = position + 1
    return functions


def python_functions(text: str) -> list[tuple[str, int, int]]:
    nodes = ast.walk(ast.parse(text))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, node.lineno, node.end_lineno) for node in nodes if isinstance(node, kinds)]


def shell_functions(text: str) -> list[tuple[str, int, int]]:
    found, name, start = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"(\w+)\(\) \{$", line):
            name, start = match[1], number
        elif line == "}" and name:
            found.append((name, start, number))
            name = ""
    return found


def function_length(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        if size_exempt(source):
            continue
        functions = []
        if source.is_cpp:
            functions = cpp_functions(source.text)
        elif source.suffix == ".py":
            functions = python_functions(source.text)
        elif source.is_shell:
            functions = shell_functions(source.text)
        for name, first, last in functions:
            if last - first + 1 > FUNCTION_LINES:
                wrong.append(f"{source.path}:{first}: {name}: {last - first + 1} lines, {FUNCTION_LINES} are the limit")
    return wrong


# --- words and names ------------------------------------------------------------------------------------------------

PROGRAM = re.compile(r"server/(main|config/\w*)\.cc|client/cpp/(ctl|examples)/.*")


@dataclass(frozen=True)
class Ban:
    pattern: str
    instead: str
    where: str  # a pattern over paths
    unless: str = "$^"
    in_comments: bool = False


BANS = [
    Ban(r"\bTO" r"DO\b|\bFIX" r"ME\b|\bX" r"XX\b", "do it, or leave it out", r".*", in_comments=True),
    Ban(
        r"\bsleep_(for|until)\b|\bu?sleep\(|\bSleepFor\b",
        "wait for the event: Notification, Mutex::Await",
        r"(tests|server|kernels)/.*",
    ),
    Ban(r"\busing\s+namespace\b", "name what you use", r".*\.(h|cuh)"),
    Ban(r"\bgetenv\b", "read it in config.cc or in a program's main file", r"(?!proto/nccl/).*", PROGRAM.pattern),
    Ban(r"catch\s*\(\s*\.\.\.\s*\)", "catch what the library throws", r"(server|client)/.*"),
    Ban(r"^\s*#\s*if(n?def\b|\s+defined)", "choose at run time, or in CMake", r"(server|client|proto)/.*"),
    Ban(
        r"(?<![\w.>])(std::|_)?exit\(", "return a Status to main", r"(server|client|proto|kernels)/.*", PROGRAM.pattern
    ),
]


def banned_words(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        readable = (
            source.is_cpp or source.is_shell or source.suffix in {".py", ".proto", ".md", ".txt", ".yml", ".yaml"}
        )
        for ban in BANS if readable else []:
            applies = ban.in_comments or source.is_cpp
            if not applies or not re.fullmatch(ban.where, source.path) or re.fullmatch(ban.unless, source.path):
                continue
            text = source.text if ban.in_comments else without_comments(source.text)
            for match in re.finditer(ban.pattern, text, re.MULTILINE):
                line = text.count("\n", 0, match.start()) + 1
                wrong.append(f"{source.path}:{line}: '{match.group().strip()}': {ban.instead}")
    return wrong


VAGUE = {"util", "utils", "common", "helper", "helpers", "misc", "manager", "managers"}


def vague_names(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        words = {word.lower() for part in Path(source.path).parts for word in re.split(r"[._-]", part)}
        for word in sorted(words & VAGUE):
            wrong.append(f"{source.path}: '{word}' says nothing: name the thing")
    return wrong


TOP_LEVEL = {"proto", "kernels", "server", "client", "deploy", "tests"} | {
    "CMakeLists.txt",
    "README.md",
    "docker-compose.yml",
}
# Demanded at the root by the tools, and the forges, that read them.
TOOLS = {"CMakePresets.json", "LICENSE", "SECURITY.md", ".clang-format", ".gitignore", ".ci"}


def top_level(sources: list[Source]) -> list[str]:
    names = sorted({source.folder for source in sources} - TOP_LEVEL - TOOLS)
    return [f"{name}: the root holds {', '.join(sorted(TOP_LEVEL))} and nothing else" for name in names]


FORBIDDEN = {
    r"/wor[k]/|/ro[o]t/|/hom[e]/\w": "a path of one machine",
    r"\b(pypi|pythonhosted|debian|ubuntu|pytorch|npmjs|crates|golang)\.(org|io|com)\b": "the host of a package registry",
    r"(?i)\bagen[t]s?\b|\blan[g]uage.model assistant": "the project speaks of itself alone",
    r"(?i)\bissues? #?\d+|\b(coding|work(ing)?) session\b|\bthis workplac[e]\b": "the project speaks of itself alone",
}


def forbidden_text(sources: list[Source]) -> list[str]:
    wrong = []
    for source in sources:
        if source.path == "LICENSE":
            continue
        for pattern, reason in FORBIDDEN.items():
            for match in re.finditer(pattern, source.text):
                line = source.text.count("\n", 0, match.start()) + 1
                wrong.append(f"{source.path}:{line}: '{match.group()}': {reason}")
    return wrong


# --- what deploy/ says of the daemon --------------------------------------------------------------------------------


def metric_names(sources: list[Source]) -> list[str]:
    """Every ballast_ metric that a rule or a dashboard reads is listed in server/metrics/METRICS.md."""
    listed = next((source.text for source in sources if source.path == "server/metrics/METRICS.md"), "")
    known = set(re.findall(r"\bballast_[a-z0-9_]+", listed))
    wrong = []
    for source in sources:
        if not source.path.startswith(("deploy/prometheus/", "deploy/grafana/")):
            continue
        for match in re.finditer(r"(?<![\w:/.-])ballast_[a-z0-9_]+(?![\w:])", source.text):
            name = match.group()
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            if name not in known and family not in known:
                line = source.text.count("\n", 0, match.start()) + 1
                wrong.append(f"{source.path}:{line}: {name} is not in server/metrics/METRICS.md")
    return wrong


def alerts_have_runbooks(sources: list[Source]) -> list[str]:
    """Each alert has a summary, a description and a runbook_url whose heading exists in deploy/README.md."""
    texts = {source.path: source.text for source in sources}
    headings = {title.lower() for title in re.findall(r"^#+ (\w+)$", texts.get("deploy/README.md", ""), re.MULTILINE)}
    wrong = []
    for path, text in texts.items():
        if not re.fullmatch(r"deploy/prometheus/alerts\.yml", path):
            continue
        for block in re.split(r"^\s*- alert: ", text, flags=re.MULTILINE)[1:]:
            name = block.split()[0]
            missing = [key for key in ("summary:", "description:", "runbook_url:", "severity:") if key not in block]
            wrong += [f"{path}: {name} has no {key[:-1]}" for key in missing]
            if not re.search(rf"runbook_url: .*#{name.lower()}\b", block) or name.lower() not in headings:
                wrong.append(f"{path}: {name}: no heading '{name}' in deploy/README.md, or runbook_url names another")
    return wrong


RULES = [
    dependency_direction,
    server_rooms,
    include_paths,
    file_length,
    function_length,
    banned_words,
    vague_names,
    top_level,
    forbidden_text,
    metric_names,
    alerts_have_runbooks,
]
