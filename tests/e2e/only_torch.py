"""A folder with torch and what it needs, and nothing else, made of links to the tests' own: for environments that are
otherwise empty."""

import re
from importlib import metadata
from pathlib import Path


def requirements(name: str, seen: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """The distribution and all that it needs and that is installed, extras left out."""
    if name.lower() in seen:
        return seen
    try:
        seen[name.lower()] = distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another platform
        return seen
    for line in distribution.requires or ():
        if "extra ==" not in line:
            requirements(re.match(r"[\w.-]+", line)[0], seen)
    return seen


def link_torch(folder: Path) -> None:
    """Fills the folder."""
    folder.mkdir(parents=True)
    for distribution in {**requirements("torch", {}), **requirements("numpy", {})}.values():
        tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            target = Path(distribution.locate_file(top))
            if target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)
