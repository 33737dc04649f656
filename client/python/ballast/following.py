"""Whether readers may follow a run: the option `follow` of the optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ballast.errors import Rejected

_MOST_READERS = 1024
_MOST_TAGS = 256


@dataclass(frozen=True)
class Follow:
    """The option `follow` of the optimizers: that ballast.follow, ballast.Subscriber and `ballastctl follow` may keep up with
    the run. The daemon keeps what they read in its host memory, while somebody reads.

    every: after each step whose number is a multiple of this there is a version for them.
    readers: at a time, up to 1,024.
    tags: versions that optimizer.tag() may give names at a time, up to 256. Where the daemon writes the run to its disk they are
        files there, and its host memory has room for one while it is written; elsewhere each takes as much as all weights.
    averages: they may also follow the averages of the weights (ema=), each in as much memory again.
    formats: they may also follow the weights in these formats, whatever the run is served in, as ("bf16", "fp8-e4m3"): names as
        for the option `serving`, each with the memory of a run that is served in it.
    """

    every: int = 1
    readers: int = 16
    tags: int = 0
    averages: bool = False
    formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("every", self.every, 1, 2**32 - 1),
            ("readers", self.readers, 1, _MOST_READERS),
            ("tags", self.tags, 0, _MOST_TAGS),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise Rejected(f"Follow({name}={value!r}): it must be a whole number from {least} to {most}")
        if not isinstance(self.averages, bool):
            raise Rejected(f"Follow(averages={self.averages!r}): it must be True or False")
        object.__setattr__(self, "formats", _as_formats(self.formats))

    def spec(self) -> dict[str, Any]:
        """ballast.v1.FollowSpec, in Protobuf's JSON."""
        spec: dict[str, Any] = {"every": self.every, "readers": self.readers}
        if self.tags:
            spec["tags"] = self.tags
        if self.averages:
            spec["averages"] = True
        if self.formats:
            spec["formats"] = list(self.formats)
        return spec


def _as_formats(given: Any) -> tuple[str, ...]:
    formats = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (tuple, list)) else ()
    if any(not isinstance(format, str) or not format for format in formats) or (not formats and given not in ((), [])):
        raise Rejected(f"Follow(formats={given!r}): it must be names of formats, as ('bf16', 'fp8-e4m3')")
    return formats


def as_follow(given: Any) -> Follow | None:
    """The option as it is meant. Rejected if it is none."""
    if given is None or given is False:
        return None
    if given is True:
        return Follow()
    if isinstance(given, Follow):
        return given
    raise Rejected(f"follow={given!r}: it must be True, False or a ballast.Follow")
