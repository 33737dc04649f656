"""What a step has to do with its optimizer."""

from __future__ import annotations

from typing import Any, Protocol


class Optimized(Protocol):
    """What a step reads of the optimizer, as it is then, and what is put back into it."""

    param_groups: list[dict[str, Any]]

    @property
    def synchronized(self) -> bool | None: ...
    def options_dict(self) -> dict[str, Any]: ...
    def load_unhooked(self, state_dict: dict[str, Any]) -> None: ...
