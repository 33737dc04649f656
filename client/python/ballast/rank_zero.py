"""Rank 0 of a run, which uploads for all: how long the others wait for it, and what they say of that."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from ballast import _core
from ballast.errors import AnotherDescription, Rejected, RunRewound, Unavailable
from ballast.progress import Patience, pauses
from ballast.rank import Rank

# How long rank 0 may take from creating the run to its first gradient, and to a replacement of the run's weights; when the
# others say that they wait for that; the pauses between two of their looks, which double.
_WAIT_S = 300.0
_TOLD_AFTER_S = 10.0
# How long it may take from the first of several daemons to the last.
_PART_AFTER_PART_S = 10.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
SAME_WEIGHTS = "call load_state_dict(), or to change the same weights"
# What rank 0 does that changes the run, and what every rank is to do.
RUN_CHANGED = ("has made the same change to the run", "make that change")
READERS_CHANGED = ("lets readers follow the run (follow=)", "give its optimizer the same follow=")

# What the daemon says to a client that attaches by another spec than the run has.
_ANOTHER_SPEC = "is not the one that this client goes by"

_Found = TypeVar("_Found")


def await_upload(rank: Rank, loaded: Callable[[], bool]) -> None:
    """Until rank 0 has uploaded the first weights, as `loaded` then says. Unavailable if it does not."""
    deadline = time.monotonic() + _WAIT_S
    patience = Patience(lambda: f"waiting for rank 0 of run '{rank.run}' to upload its weights")
    for _ in pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
        patience.look()
        if time.monotonic() > deadline:
            raise Unavailable(
                f"rank 0 of run '{rank.run}' has not uploaded its weights for {_WAIT_S:.0f} s: it does so at its first "
                "gradient. Start it, or look at what it waits for",
                "DEADLINE_EXCEEDED",
            )
        if loaded():
            return


def await_end(client: _core.Client, rank: Rank, what: str, same: str = SAME_WEIGHTS) -> RunRewound:
    """Until the session has ended, as rank 0 `what`, and every rank is to do the `same`. Unavailable if it does not come to
    that."""

    def ended() -> RunRewound | None:
        try:
            client.check_status()
        except RunRewound as rewound:
            return rewound
        return None

    return _await(rank, what, same, ended)


def await_change(
    client: _core.Client,
    rank: Rank,
    spec_sha256: str,
    why: tuple[str, str] = RUN_CHANGED,
    whole: Callable[[], bool] = lambda: True,
) -> None:
    """Until the run goes by another description than this one, for a session that has ended: perhaps by a rewind before.
    Unavailable as above. why: what rank 0 does that changes it, and what every rank is to do. whole: whether all of several
    daemons have it, which rank 0 changes one after another; what is not so for long is another change."""
    what, same = why
    seen: list[float] = []

    def changed() -> bool | None:
        try:
            if client.get_run(rank.run)["spec_sha256"] == spec_sha256:
                return None
        except Rejected as error:  # the parts do not make up one run, for now
            if error.code != "FAILED_PRECONDITION":
                raise
            return None
        seen.append(time.monotonic())
        return whole() or seen[-1] > seen[0] + _PART_AFTER_PART_S or None

    _await(rank, what, same, changed)


def await_followed(client: _core.Client, rank: Rank, spec: str) -> None:
    """Until the run is no longer as this description says, for rank 0 lets readers follow it otherwise. Where it is not so now,
    nothing. Unavailable as above."""
    try:
        spec_sha256 = client.create_run(spec)["spec_sha256"]
    except Rejected as error:
        if error.code != "FAILED_PRECONDITION":
            raise
        return
    await_change(client, rank, spec_sha256, READERS_CHANGED)


def _await(rank: Rank, what: str, same: str, look: Callable[[], _Found | None]) -> _Found:
    """What `look` returns, once that is not None."""
    began = time.monotonic()
    told = False
    for _ in pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S):
        if time.monotonic() >= began + _WAIT_S:
            break
        found = look()
        if found is not None:
            return found
        if not told and time.monotonic() > began + _TOLD_AFTER_S:
            told = True
            warnings.warn(
                f"rank {rank.number} of run '{rank.run}' waits until rank 0 {what}: every rank is to {same}, before the same "
                "step",
                stacklevel=4,
            )
    raise Unavailable(
        f"rank {rank.number} of run '{rank.run}' has waited for {_WAIT_S:.0f} s until rank 0 {what}: it does so at its next "
        f"first gradient. Every rank is to {same}, before the same step",
        "DEADLINE_EXCEEDED",
    )


def refuse_amended(error: Rejected, client: _core.Client, rank: Rank, spec_sha256: str) -> None:
    """AnotherDescription, with what to do about it, if that is why the rank was refused which goes by this one."""
    if error.code != "FAILED_PRECONDITION":
        return
    if _ANOTHER_SPEC not in str(error) and client.get_run(rank.run)["spec_sha256"] == spec_sha256:
        return
    raise AnotherDescription(
        f"run '{rank.run}' has another description than rank {rank.number} goes by: a rank has added or unfrozen "
        "parameters, or changed an option of param_groups such as eps, and this one has not, or was interrupted in it. "
        "Make the same change on every rank before the same step, and call backward() again",
        "FAILED_PRECONDITION",
    ) from error
