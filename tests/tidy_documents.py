"""The house rules on what documents name, as in tidy_rules.py: links, metrics, keys, variables and fields of messages exist."""

import posixpath
import re

from tidy_references import headings
from tidy_rules import CPP, Source

METRICS, CONFIG = "server/metrics/METRICS.md", "proto/ballast/v1/config.proto"
PART = r"(?:sum|count|bucket)"  # of a histogram
# What stands behind the word log, or event, as what it has or says: one name, or a list in which each may be explained.
NAMED_EVENTS = re.compile(
    r"(?<!kernel's )\b(?:log's\s+|(?:log(?:'s)?|event)\b[^.`]{0,120}?(?:\(|(?:under|line|says|last|has)\s+|:\s+))"
    r"((?:`[a-z_]+`(?:\s+\([^)]*\))?(?:,\s+|\s+and\s+|\s+or\s+)?)+)"
)


def documents(sources: list[Source]) -> list[Source]:
    return [source for source in sources if source.suffix == ".md"]


def text_of(sources: list[Source], path: str) -> str:
    return next((source.text for source in sources if source.path == path), "")


def place(source: Source, at: int) -> str:
    return f"{source.path}:{source.text.count(chr(10), 0, at) + 1}"


def anchor(heading: str) -> str:
    """As the forges make it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(sources: list[Source]) -> list[str]:
    """A link of a document leads to a file of the repository, and to a heading of it."""
    texts = {source.path: source.text for source in sources}
    wrong = []
    for source in documents(sources):
        for match in re.finditer(r"(?<!!)\]\((?![a-z]+:)([^)\s#]*)(?:#([^)\s]+))?\)", source.text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source.path), match[1]))
            path = path if match[1] else source.path
            # A picture is no text, and not among the sources.
            if path not in texts and not path.endswith((".png", ".svg")):
                wrong.append(f"{place(source, match.start())}: there is no {path}")
            elif match[2] and match[2] not in {anchor(heading) for heading in headings(texts[path])}:
                wrong.append(f"{place(source, match.start())}: {path} has no heading for #{match[2]}")
    return wrong


def document_metrics(sources: list[Source]) -> list[str]:
    """A metric that a document names is in METRICS.md, and so are the values of labels that stand behind it in braces. In the
    daemon's table of limits names begin without `ballast_`."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", text_of(sources, METRICS), re.MULTILINE)}
    wrong = []
    for source in documents(sources):
        named = [(m.start(), m[1], "") for m in re.finditer(r"\b(ballast_[a-z0-9_]+)\b(?!-\*)", source.text)]
        for line in re.finditer(r"^\| (?:[^|\n]*\| ){3}([^|\n]*)\| [^|\n]*\|$", limits_table(source), re.MULTILINE):
            at = source.text.index(line[0])
            named += [(at, f"ballast_{m[1]}", m[2] or "") for m in re.finditer(r"`(\w+_\w+)(?:\{(.*?)\})?`", line[1])]
            named += [(at, f"ballast_{m[1]}", "") for m in re.finditer(r"`([a-z]+)`", line[1])]
        for at, name, values in named:
            row = rows.get(re.sub(rf"_{PART}$", "", name), rows.get(name))
            if row is None and not name.endswith("_"):
                wrong.append(f"{place(source, at)}: {name} is not in {METRICS}")
            for value in filter(None, values.split(",")):
                if row is not None and not re.search(rf"\b{value}\b", row.split(" | ")[2]):
                    wrong.append(f"{place(source, at)}: {name} has no label with the value {value}")
    return wrong


def limits_table(source: Source) -> str:
    return source.text.partition("\n## Limits\n")[2].partition("\n## ")[0] if source.path == "server/README.md" else ""


def messages(text: str) -> dict[str, str]:
    """What stands between the braces of each message of a .proto file."""
    return dict(re.findall(r"^message (\w+) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))


def schema(sources: list[Source]) -> dict[str, set[str]]:
    """The keys of the configuration by their section; "" has those without one, and the sections themselves."""
    kinds = {
        name: dict(reversed(field) for field in re.findall(r"^  (?:repeated )?(\w+) (\w+) = ", body, re.MULTILINE))
        for name, body in messages(text_of(sources, CONFIG)).items()
    }
    top = kinds.get("DaemonConfig", {})
    return {"": set(top)} | {key: set(kinds[kind]) for key, kind in top.items() if kind in kinds}


def configuration_keys(sources: list[Source]) -> list[str]:
    """A key of the configuration that stands by itself in a document, `limits.lease` or `limits.caller_...`, is one."""
    keys = schema(sources)
    wrong = []
    for source in documents(sources):
        for match in re.finditer(r"`(?:--)?([a-z_]+)\.([a-z_]+)(\.\.\.)?(?:[: ][^`\n]*)?`", source.text):
            known = keys.get(match[1], {match[2]})
            if not any(key.startswith(match[2]) if match[3] else key == match[2] for key in known):
                wrong.append(f"{place(source, match.start())}: there is no key {match[1]}.{match[2]}")
    return wrong


def variables(sources: list[Source]) -> list[str]:
    """A variable BALLAST_... that a document names is a key's, or something other than a document knows it."""
    keys = {f"BALLAST_{section}_{key}".upper() for section, names in schema(sources).items() for key in names}
    known = {key.replace("__", "_") for key in keys}
    for source in sources:
        if source.suffix != ".md":
            known |= set(re.findall(r"\bBALLAST_[A-Z_]*[A-Z]\b", source.text))
    wrong = []
    for source in documents(sources):
        for match in re.finditer(r"\bBALLAST_[A-Z_]*[A-Z]\b(?!_)", source.text):
            if match[0] not in known:
                wrong.append(f"{place(source, match.start())}: nothing reads {match[0]}")
    return wrong


def message_fields(sources: list[Source]) -> list[str]:
    """Message.field in a document is a field of that message of the protocol."""
    fields: dict[str, set[str]] = {}
    for source in sources:
        if source.suffix == ".proto":
            fields |= {name: set(re.findall(r"(\w+) = \d+", body)) for name, body in messages(source.text).items()}
    wrong = []
    for source in documents(sources):
        for match in re.finditer(r"\b([A-Z]\w+)\.([a-z_]+)\b(?!\()", source.text):
            if match[2] not in fields.get(match[1], {match[2]}) and match[2] not in ("h", "proto"):
                wrong.append(f"{place(source, match.start())}: {match[1]} has no field {match[2]}")
    return wrong


def log_events(sources: list[Source]) -> list[str]:
    """An event of the log that a document or an alert names, "The log says why (`checkpoint`)", is one of the daemon's."""
    known = set()
    for source in sources:
        if source.path.startswith("server/") and source.suffix in CPP:
            for call in re.findall(r"\bLog\([^{;]*", source.text):
                known |= set(re.findall(r'"([a-z_]+)"', call))
    wrong = []
    for source in sources:
        for match in NAMED_EVENTS.finditer(source.text) if source.suffix in (".md", ".yml") else ():
            for name in re.findall(r"`([a-z_]+)`", re.sub(r"\([^)]*\)", "", match[1])):
                if name not in known:
                    wrong.append(f"{place(source, match.start(1))}: the daemon logs no event {name}")
    return wrong


RULES = [links, document_metrics, configuration_keys, variables, message_fields, log_events]
