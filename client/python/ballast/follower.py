"""Modules whose weights are a run's, as they are trained elsewhere."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ballast.errors import Rejected
from ballast.followed_parameters import FollowedParameters, Names, listed
from ballast.module_calls import ModuleCalls
from ballast.stream_order import StreamOrder
from ballast.subscriber import Subscriber, Version
from ballast.tls import Tls
from ballast.uncopyable import Uncopyable
from ballast.version_feed import VersionFeed, deadline_of, left_until
from ballast.weak_registry import WeakRegistry
from ballast.weights_gate import WeightsGate

# How long a forward waits for those of other threads, so that it has newer weights: they may wait for it, or take long.
_PATIENCE_S = 10.0


def follow(
    model: nn.Module,
    *,
    server: str | None = None,
    run: str | None = None,
    every: int = 1,
    average: float | None = None,
    format: str | None = None,
    on_version: Callable[[Version], object] | None = None,
    names: Names | None = None,
    tls: Tls | None = None,
    token_file: str | os.PathLike[str] | None = None,
    connect_timeout: float = 10.0,
    reconnect_timeout: float = 15.0,
    wait_for_run: float = 0.0,
    at: str | None = None,
) -> Follower:
    """Keeps a module's parameters up to date with a run that is trained elsewhere, by an optimizer with follow=True.

        follower = ballast.follow(model, server="node7:7700", run="my-run")
        follower.wait()                # until the first version is in the module
        for batch in batches:
            model(batch)               # with the newest weights that have come
        with follower.held():          # with the same weights throughout
            loss = sum(model.loss(batch) for batch in held_out)

    A thread receives; the module gets the newest version when its forward begins, or in update() and wait(), and never while
    a forward is under way, in whatever thread: one that begins waits for the others then. `model` is the module that is called. Its
    buffers, and parameters that the trainer does not train, stay as they are. What others write to the parameters, or put in their
    place, is there until the next version. A copy of the module follows nothing.

    On a GPU forwards may be in streams of their own, and are done before weights change; a backward is not, but within held(). A
    CUDA graph that was captured of the module reads the weights where they are: replay it within held(), too. While one is
    captured weights do not change.

    every: no version nearer to the last one than so many steps. on_version: called with each version that has come into the
    module, by the thread that put it there.
    average: as ballast.Subscriber's: the module gets an average of the weights.
    format: likewise: a module in bfloat16 follows a run that trains in float32 with format="bf16".
    names: where the module's parameters are named otherwise than the run's tensors: {the run's name: the module's}, or a
    function; None for a name leaves a tensor out. What DistributedDataParallel and torch.compile put before names makes no
    difference.
    at: the name of a version (optimizer.tag): the module gets that one and keeps it, until resume().
    The others are as ballast.Subscriber's. Rejected, naming them, if tensors have no parameter in the module, or one of another
    shape or dtype.
    """
    if not isinstance(model, nn.Module):
        raise Rejected(f"follow({type(model).__name__}): it must be a torch.nn.Module")
    subscriber = Subscriber(
        server,
        run,
        every,
        average=average,
        format=format,
        tls=tls,
        token_file=token_file,
        connect_timeout=connect_timeout,
        reconnect_timeout=reconnect_timeout,
        wait_for_run=wait_for_run,
        at=at,
    )
    try:
        return Follower(model, subscriber, names, on_version)
    except BaseException:
        subscriber.close()
        raise


class Follower(Uncopyable):
    """A module that follows a run: what ballast.follow returns. Ends with close(), a `with` block, its deletion together with
    its module's, or the program; the module keeps the weights that it has then.

    What goes wrong in the thread that receives, such as a run that was deleted, is raised by the module's next forward, and by
    update() and wait(), each time until close(). Thread-safe.
    """

    def __init__(
        self,
        module: nn.Module,
        subscriber: Subscriber,
        names: Names | None,
        on_version: Callable[[Version], object] | None,
    ):
        self.run = subscriber.run
        self._module = module
        self._names = names
        self._on_version = on_version
        self._specs = subscriber.specs
        self._parameters = FollowedParameters(self.run, self._specs, module, names)
        _check_followed_once(self)
        self._version: Version | None = None
        self._gate = WeightsGate()
        self._order = StreamOrder()
        self._calls = ModuleCalls()
        untraced: Any = torch.compiler.disable  # torch declares no types for it
        self._hooks = [
            module.register_forward_pre_hook(_Hook(untraced(self._before)), prepend=True),
            module.register_forward_hook(_Hook(untraced(self._after)), always_call=True),
        ]
        self._feed = VersionFeed(subscriber)
        self._closing = weakref.finalize(self, self._feed.close)

    @property
    def version(self) -> Version | None:
        """The one that the module has the weights of; None: still its own."""
        return self._version

    @property
    def step(self) -> int | None:
        """Of the version that the module has."""
        return None if self._version is None else self._version.step

    @property
    def generation(self) -> int | None:
        """Likewise. A rewind of the run begins another one."""
        return None if self._version is None else self._version.generation

    @property
    def staleness_s(self) -> float | None:
        """For how long there have been the weights that the module has, by this machine's clock."""
        return None if self._version is None else self._version.staleness_s

    @property
    def lag(self) -> int:
        """Steps from the version that the module has to the newest that has come."""
        newest = self._feed.newest
        return 0 if newest is None or self._version is None else max(0, newest.step - self._version.step)

    @property
    def unfollowed(self) -> list[str]:
        """Names of the module's parameters that the run does not train."""
        return list(self._parameters.unfollowed)

    def update(self) -> bool:
        """Puts the newest version that has come into the module, once no forward is under way. False: there is no newer one.
        Rejected within a forward or held() of this thread."""
        self._leave_lost()
        self._feed.check()
        if self._order.capturing(self._parameters.devices):
            raise Rejected(
                "weights cannot be changed while a CUDA graph is captured: update() before", "FAILED_PRECONDITION"
            )
        with self._gate.changing(patience=None):
            version = self._feed.take(self._write)
            self._parameters.await_copies()
        return self._tell(version)

    def wait(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Until a version of this step or a later one is in the module; without a step, until there is one at all. False: it
        is not within `timeout` seconds. As update()."""
        return self._update_until(lambda version: step is None or version.step >= step, timeout)

    def rollback(self, name: str, timeout: float | None = None) -> bool:
        """Puts the version of this name, which the trainer has given it with optimizer.tag(), into the module, which keeps it
        until resume(). False: it is not there within `timeout` seconds; it comes as any version does then. Rejected, with
        the names that there are, if it is none of them; then all is as before. Otherwise as update()."""
        before = self._version
        self._feed.rollback(name)
        return self._update_until(lambda version: version.tag == name and version is not before, timeout)

    def resume(self) -> None:
        """The module gets the newest versions again, as they come."""
        self._feed.resume()

    def _update_until(self, wanted: Callable[[Version], bool], timeout: float | None) -> bool:
        deadline = deadline_of(timeout)
        while True:
            seen = self._feed.newest
            self.update()
            if self._version is not None and wanted(self._version):
                return True
            if not self._feed.wait(seen, left_until(deadline)) and time.monotonic() >= deadline:
                self._feed.check()
                return False

    @contextmanager
    def held(self) -> Iterator[Version | None]:
        """A block in which the module's weights stay those of one version, the newest that has come by now: for several forwards
        that belong together, such as an evaluation, or the generation of a text. Of this thread; others may hold them, too.
        """
        self._leave_lost()
        self._renew()
        self._enter(holds=True)
        try:
            yield self._version
        finally:
            self._leave_lost()
            self._leave()

    def close(self) -> None:
        """Ends the connection; the module keeps its weights. Later nothing."""
        _open.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._closing()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what the module's calls do -----------------------------------------------------------------------------------

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._leave_lost()
        call = self._calls.begin()  # _after is called whatever becomes of this, but an interrupt
        self._renew()
        self._enter()
        call.inside = True

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        call = self._calls.end()
        if call is not None and call.inside:
            self._leave()

    def _leave_lost(self) -> None:
        for call in self._calls.take_lost():
            if call.inside:
                self._leave()

    def _enter(self, holds: bool = False) -> None:
        self._gate.enter(holds)
        try:
            self._order.begin_use(self._parameters.devices)
        except BaseException:
            self._gate.leave()
            raise

    def _leave(self) -> None:
        try:
            self._order.end_use(self._parameters.devices)
        finally:
            self._gate.leave()

    def _renew(self) -> None:
        """The newest version, once other threads' forwards are over; not while somebody holds the weights, nor while what is asked
        of a GPU is recorded and not done."""
        self._feed.check()
        if self._feed.untaken is None or self._order.capturing(self._parameters.devices):
            return
        with self._gate.changing(_PATIENCE_S) as alone:
            version = self._feed.take(self._write) if alone else None
        self._tell(version)

    def _write(self, subscriber: Subscriber, version: Version, changed: set[str]) -> None:
        if subscriber.specs is not self._specs or not self._parameters.are_of(self._module):
            # The run was amended, or the module converted, or has other parameters.
            self._parameters = FollowedParameters(self.run, subscriber.specs, self._module, self._names)
            self._specs = subscriber.specs
        devices = self._parameters.devices
        self._order.begin_change(devices)
        try:
            subscriber.write(self._parameters, changed)
        finally:
            self._order.end_change(devices)
        self._version = version

    def _tell(self, version: Version | None) -> bool:
        if version is not None and self._on_version is not None:
            self._on_version(version)
        return version is not None


_open: WeakRegistry[Follower] = WeakRegistry()
_opening = threading.Lock()


def _check_followed_once(follower: Follower) -> None:
    """Else each would put its own version's weights over those of the other's. Until close() the next one is checked against it."""
    with _opening:
        for other in _open:
            if both := follower._parameters.shared_with(other._parameters):
                raise Rejected(
                    f"the module's parameters of {listed(both)} follow run '{other.run}' already: close() that follower first",
                    "FAILED_PRECONDITION",
                )
        _open.add(follower)


class _Hook:
    """Around the forwards of a followed module. Copies of the module, and what is unpickled of it, have _NoHook there."""

    def __init__(self, call: Callable[..., None]):
        self._call = call

    def __call__(self, *call: Any) -> None:
        self._call(*call)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, *call: Any) -> None:
        pass
