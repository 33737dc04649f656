"""The house rules on references from code and text to headings of documents and to files, as in tidy_rules.py."""

import ast
import io
import re
import tokenize

from tidy_rules import Source

LINE_END = r"[ \t]*\n[ \t]*(?:(?://|#|\*)[ \t]*)?"  # and what begins the next line of a comment
LITERAL_OR_COMMENT = (
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
)
FILE_NAME = r"(?<![\w./-])[\w./-]*\w\.(?:h|cc|cu|cuh|py|md|proto)\b(?![\w./-]*/)"


def headings(text: str) -> set[str]:
    """A document's headings; what begins with a # inside a block of code is none."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {title.strip() for title in re.findall(r"^#+ (.+)$", outside, re.MULTILINE)}


def references(sources: list[Source]) -> list[str]:
    """A document's path, a comma and a heading in quotes, in code or text: both exist. The path is from the root."""
    texts = {source.path: source.text for source in sources}
    wrong = []
    for source in sources:
        for match in re.finditer(rf'([\w./-]+\.md)`?,(?:{LINE_END}|[ \t])"([^"]{{1,120}})"', source.text):
            line = source.text.count("\n", 0, match.start()) + 1
            path, title = match[1], re.sub(LINE_END, " ", match[2])
            if path not in texts:
                wrong.append(f"{source.path}:{line}: there is no {path}")
            elif title not in headings(texts[path]):
                wrong.append(f"{source.path}:{line}: {path} has no heading '{title}'")
    return wrong


def python_comments(text: str) -> list[tuple[int, str]]:
    """Comments and docstrings."""
    found = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            found.append((node.body[0].lineno, ast.get_docstring(node, clean=False)))
    return found


def comments(source: Source) -> list[tuple[int, str]]:
    """What the source says to people, each with its first line: comments, or all of a text."""
    if source.suffix == ".md":
        return [(1, source.text)]
    if source.suffix == ".py":
        return python_comments(source.text)
    if not source.is_cpp and source.suffix not in {".proto", ".js"}:
        return []
    return [
        (source.text.count("\n", 0, match.start()) + 1, match["comment"])
        for match in re.finditer(LITERAL_OR_COMMENT, source.text, re.DOTALL)
        if match["comment"]
    ]


def stands_for_any(name: str) -> bool:
    """A placeholder has a part in capitals: kernels/rules/NAME.h, OUT/a.md. Documents themselves are in capitals."""
    *folders, file = name.split("/")
    return any(folder.isupper() for folder in folders) or (file.split(".")[0].isupper() and not file.endswith(".md"))


def file_names(sources: list[Source]) -> list[str]:
    """What a comment or a text names as a source or a document is in the repository; named by its path from the root,
    or by the end of that. Absolute paths and placeholders are not looked at."""
    endings = set()
    for source in sources:
        parts = source.path.split("/")
        endings |= {"/".join(parts[i:]) for i in range(len(parts))}
    wrong = []
    for source in sources:
        for first, text in comments(source):
            for match in re.finditer(FILE_NAME, text):
                name = re.sub(r"^(\.\.?/)+", "", match[0])
                if name not in endings and not name.startswith("/") and not stands_for_any(name):
                    line = first + text.count("\n", 0, match.start())
                    wrong.append(f"{source.path}:{line}: there is no file {name}")
    return wrong
