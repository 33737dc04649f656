"""Versions of a run's weights that have names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast.errors import Rejected
from ballast.progress import Waiting
from ballast.text import text

if TYPE_CHECKING:
    from ballast.membership import Membership
    from ballast.settings import RunSettings
    from ballast.steps import Steps


class Tagging:
    """An optimizer whose weights can be given names, by which they are kept."""

    _settings: RunSettings
    _membership: Membership
    _steps: Steps

    def tag(self, name: str, *, replace: bool = False) -> int:
        """Gives the weights of the last step a name, and returns that step when they are kept.

            optimizer = ballast.AdamW(model.parameters(), follow=ballast.Follow(tags=4))
            if loss < best:
                optimizer.tag("best", replace=True)
            optimizer.tag(f"step-{step}")

        They stay as they are served now, whatever the training does later, until untag(): ballast.follow(model, at="best") and
        Follower.rollback("best") read them, and `ballastctl follow RUN --tag best` makes a file of them. Where the daemon
        writes the run to its disk they are a safetensors file beside its checkpoints, and survive it; elsewhere they are in
        its memory.

        name: 1 to 64 of a-z, 0-9, '-' and '.'. replace: it may be the name of other weights, which then have it no more.
        Called between two steps, by one rank or by all of them with the same name.

        Raises:
            Rejected: a step is open; the optimizer has no follow=Follow(tags=...), or as many names as that allows; the name
                is that of other weights, and replace is not set; the daemon's disk is full: all is as before, and the
                training may go on. Where one of several daemons fails, the message says which others have the name already:
                it cannot be read until it is given again.
        """
        steps, name = self._steps, text("name", name)
        with steps.lock, steps.following():
            session = steps.joined()
            steps.wait()
            if session.step_open:
                raise Rejected(f"step {session.step} is open: call step() first, then tag()", "FAILED_PRECONDITION")
            client, run = self._membership.connected(), self._settings.rank.run
            client.check_status()  # a rewind is heard of here
            with Waiting(f"waiting until the weights of run '{run}' are kept as '{name}'"):
                return int(client.tag_version(run, name, replace)["tag"]["id"]["step"])

    def untag(self, name: str) -> None:
        """Takes a name away; with their last one the weights that had it go. Rejected, with code NOT_FOUND, if there is no
        such name."""
        steps, name = self._steps, text("name", name)
        with steps.lock, steps.following():
            steps.joined()
            self._membership.connected().untag_version(self._settings.rank.run, name)

    def tags(self) -> dict[str, int]:
        """The names that the run's weights have, and of which step those are. Not those that cannot be read any more, as of before
        the run was amended: `ballastctl versions` says why."""
        steps = self._steps
        with steps.lock, steps.following():
            steps.joined()
            listed = self._membership.connected().list_versions(self._settings.rank.run)
        return {str(tag["name"]): int(tag["id"]["step"]) for tag in listed["tags"] if not tag["unreadable"]}
