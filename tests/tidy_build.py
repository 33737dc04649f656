"""House rules about what is built: functions of the tree's sources, as in tidy_rules.py."""

import re
from pathlib import Path


def unbuilt_tests(sources: list) -> list[str]:
    """A test that no CMakeLists.txt names never runs."""
    lists = {Path(source.path).parent: source.text for source in sources if Path(source.path).name == "CMakeLists.txt"}
    wrong = []
    for path in (Path(source.path) for source in sources if source.path.endswith("_test.cc")):
        folder = next((folder for folder in path.parents if folder in lists), path.parent)
        room = "".join(f"{part}/" for part in path.parent.relative_to(folder).parts)
        name = path.stem.removesuffix("_test")
        if not re.search(rf"(?<![\w/]){room}{name}(_test(\.cc)?)?(?=[\s)])", lists.get(folder, "")):
            wrong.append(f"{path}: {folder}/CMakeLists.txt does not name it, so it never runs")
    return wrong
