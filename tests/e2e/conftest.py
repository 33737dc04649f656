"""The order of the files: what takes longest begins first, so that it is not left alone at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "python"))  # for nursery.py and warm_python.py

# tests/run.sh runs files side by side.
LONGEST = (
    "frameworks",
    "wheel",
    "alerts_of_storage",
    "framework_resumes",
    "alerts_fired",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
