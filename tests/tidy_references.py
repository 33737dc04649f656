"""The house rule on references from code and text to a document's headings, as in tidy_rules.py."""

import re

from tidy_rules import Source

LINE_END = r"[ \t]*\n[ \t]*(?:(?://|#|\*)[ \t]*)?"  # and what begins the next line of a comment


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
