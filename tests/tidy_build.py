"""House rules about what is built: functions of the tree's sources, as in tidy_rules.py."""

import re
from pathlib import Path


def unbuilt_tests(sources: list) -> list[str]:
    """A test that no CMakeLists.txt names never runs."""
    lists = {Path(source.path).parent: source.text for source in sources if Path(source.path).name == "CMakeLists.txt"}
    wrong = []
    for path in (Path(source.path) for source in sources if source.path.endswith("_test.cc")):
        if not re.search(rf"\b{path.stem.removesuffix('_test')}(_test(\.cc)?)?(?=[\s)])", lists.get(path.parent, "")):
            wrong.append(f"{path}: {path.parent}/CMakeLists.txt does not name it, so it never runs")
    return wrong
