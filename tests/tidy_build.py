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


TYPE = re.compile(r"^(?:struct|class|enum(?: class)?) (?:alignas\(\w+\) )?(\w+\b)(?!:)(?: final)?\s*(?::[^;{]*)?\{")


def type_names(sources: list) -> list[str]:
    """Programs link the client and the daemon together: two types of one name would be one to the linker, which takes
    the inline functions of either for both."""
    places: dict[str, set[str]] = {}
    for source in sources:
        if not source.is_cpp or source.folder == "tests":
            continue
        spaces: list[str] = []
        for line in source.text.splitlines():
            if opened := re.match(r"(?:inline )?namespace\s*([\w:]*)\s*\{", line):
                spaces.append(opened[1])
            elif line.startswith("}  // namespace"):
                spaces.pop()
            elif (named := TYPE.match(line)) and "" not in spaces:
                places.setdefault("::".join([*spaces, named[1]]), set()).add(source.path)
    return [f"{min(files)}: {name} is a type of {max(files)}, too" for name, files in places.items() if len(files) > 1]
