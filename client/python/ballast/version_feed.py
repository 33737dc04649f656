"""A run's versions as they come, on a thread of their own, until somebody takes their weights."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ballast.errors import BallastError, Rejected
from ballast.progress import say
from ballast.subscriber import Subscriber, Version

# Between two looks at whether the feed was closed, while nothing comes; close() does not wait for it.
_GLANCE_S = 60.0


class VersionFeed:
    """Receives versions from `subscriber`, which is its own then, and whose weights are always those of `newest`.

    What goes wrong is raised by each call from then on; where nobody called, close() says it. Thread-safe.
    """

    def __init__(self, subscriber: Subscriber):
        self._subscriber = subscriber
        self._weights = threading.Lock()  # who holds it may read the weights, or let them change
        self._news = threading.Condition()
        self._newest: Version | None = None
        self._taken: Version | None = None
        self._changed: set[str] = set()  # names, since then
        self._error: BaseException | None = None
        self._told = False
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._receive, name=f"ballast follow {subscriber.run}", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Version | None:
        return self._newest

    @property
    def untaken(self) -> Version | None:
        """The newest, if take() would take it now."""
        version = self._newest
        return None if version is self._taken or not self._subscriber.readable else version

    def check(self) -> None:
        """Raises what has gone wrong."""
        if self._is_forked:
            raise Rejected(
                f"this process is a fork of the one that follows run '{self._subscriber.run}', and no versions come here: "
                "start it with the method 'spawn' and call ballast.follow() in it, or close() the follower here, and the "
                "module keeps its weights",
                "FAILED_PRECONDITION",
            )
        if self._error is not None:
            self._told = True
            raise self._error
        if self._closed:
            raise Rejected("this follower is closed", "FAILED_PRECONDITION")

    def take(self, write: Callable[[Subscriber, Version, set[str]], None]) -> Version | None:
        """Has write(subscriber, version, changed) read the newest version's weights, if they were not taken; changed: names of
        the tensors that are others since. None: there is nothing new, or it is not whole here at this moment."""
        self.check()
        with self._weights:
            version = self.untaken
            if version is None:
                return None
            write(self._subscriber, version, self._changed)
            self._taken, self._changed = version, set()
            return version

    def wait(self, seen: Version | None, timeout: float | None) -> bool:
        """Until there is another version than `seen`, or something has gone wrong. False: neither, in time."""
        with self._news:
            return self._news.wait_for(
                lambda: self._newest is not seen or self._error is not None or self._closed, timeout
            )

    def rollback(self, name: str) -> None:
        self.check()
        self._subscriber.rollback(name)

    def resume(self) -> None:
        self.check()
        self._subscriber.resume()

    @property
    def _is_forked(self) -> bool:
        """The thread and who holds the locks are the parent's then."""
        return os.getpid() != self._process

    def close(self) -> None:
        self._closed = True
        if self._is_forked:
            return
        with self._news:
            self._news.notify_all()
        self._subscriber.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._error is not None and not self._told:
            self._told = True
            say(f"following run '{self._subscriber.run}' had ended: {self._error}")

    def _receive(self) -> None:
        try:
            while not self._closed:
                if self._subscriber.await_next(_GLANCE_S):
                    self._receive_one()
        except BaseException as error:
            self._end(error)

    def _receive_one(self) -> None:
        with self._weights:
            version = self._subscriber.next(0)
            if version is None:  # it comes whole, and is written as it comes
                return
            self._changed.update(version.changed)
            self._newest = replace(version, tensors={})  # what could be read there changes from now on
        with self._news:
            self._news.notify_all()

    def _end(self, error: BaseException) -> None:
        closed = self._closed and isinstance(error, BallastError)
        with self._news:
            self._error = None if closed else error
            self._news.notify_all()


def deadline_of(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def left_until(deadline: float) -> float | None:
    """As a timeout; None: there is none."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
