"""Whether readers may follow a run: the option `follow` of the optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ballast.errors import Rejected

_MOST_READERS = 1024


@dataclass(frozen=True)
class Follow:
    """The option `follow` of the optimizers: that ballast.follow, ballast.Subscriber and `ballastctl follow` may keep up with
    the run. The daemon keeps what they read in its host memory, while somebody reads.

    every: after each step whose number is a multiple of this there is a version for them.
    readers: at a time, up to 1,024.
    """

    every: int = 1
    readers: int = 16

    def __post_init__(self) -> None:
        for name, value, most in (("every", self.every, 2**32 - 1), ("readers", self.readers, _MOST_READERS)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise Rejected(f"Follow({name}={value!r}): it must be a whole number from 1 to {most}")

    def spec(self) -> dict[str, Any]:
        """ballast.v1.FollowSpec, in Protobuf's JSON."""
        return {"every": self.every, "readers": self.readers}


def as_follow(given: Any) -> Follow | None:
    """The option as it is meant. Rejected if it is none."""
    if given is None or given is False:
        return None
    if given is True:
        return Follow()
    if isinstance(given, Follow):
        return given
    raise Rejected(f"follow={given!r}: it must be True, False or a ballast.Follow")
