"""A reader that keeps up with a run's weights, version after version."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ballast import _core
from ballast.errors import Rejected
from ballast.followed_parameters import FollowedParameters
from ballast.parameters import DTYPES
from ballast.rank import run_id, seconds
from ballast.server_address import standing
from ballast.text import text
from ballast.tls import Tls, files_of
from ballast.uncopyable import Uncopyable
from ballast.weight_patch import WeightPatch

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Tensors(Mapping[str, Tensor]):
    """A version's weights by name: each access makes a new tensor on the CPU, in the run's dtype, or the subscriber's `format`
    where that is one. Rejected once the
    subscriber has gone on to another version."""

    def __init__(self, subscriber: Subscriber, number: int):
        self._subscriber = subscriber
        self._number = number

    def __getitem__(self, name: str) -> Tensor:
        return self._subscriber._read(name, self._number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._subscriber._places)

    def __len__(self) -> int:
        return len(self._subscriber._places)


@dataclass(frozen=True)
class Version:
    """The weights of all of a run's tensors after one step, as a reader gets them.

    step, generation: which; after a rewind steps are counted anew, in a later generation, and of a run that was deleted and begun
        anew under its name both are.
    base_step: of the version that it came as a change of; None: it came whole.
    changed: names of the tensors that may be others than in the version before.
    changed_ratio: of the elements, how many are others; 1 where it came whole.
    received_bytes: that have come for it; whole_bytes: if all had. skipped: versions in between that did not come.
    closed_unix_s: when its step closed, by the daemon's clock.
    tensors: a Subscriber's weights, by name, until it has gone on to the next version; dict(version.tensors) keeps them. Of a
        Follower's version they are the module's parameters, and here are none.
    tag: the name that it was asked for by (rollback, at); None: it is the newest.
    """

    step: int
    generation: int
    base_step: int | None
    changed: tuple[str, ...]
    changed_ratio: float
    received_bytes: int
    whole_bytes: int
    skipped: int
    closed_unix_s: float
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    tag: str | None = None

    @property
    def staleness_s(self) -> float:
        """For how long there have been these weights, by this machine's clock."""
        return max(0.0, time.time() - self.closed_unix_s)


class Subscriber(Uncopyable):
    """Keeps up with a run's weights: an evaluator's or an inference engine's end.

        for version in ballast.Subscriber(server="node7:7700", run="my-run"):
            print(version.step, version.changed_ratio, version.tensors["head.weight"].norm())

    The run's optimizer has follow=True. All weights are kept here once, in host memory, as the daemon serves them; of a
    version that changes the last one only the changes come. A reader holds no step up: one that is slow gets fewer versions.
    A lost connection is made again by itself for reconnect_timeout seconds. To keep a module up to date: ballast.follow.

    server, tls, token_file: as the optimizers' options; run: its name, default $BALLAST_RUN. every: no version nearer to
    the last one than so many steps. patches: for patches(); takes a bit of memory for each parameter. at: begins as after
    rollback(at). average: the decay of an average of the weights that the run keeps (ema=, with
    ballast.Follow(averages=True)), to follow in place of the weights. format: one of ballast.Follow(formats=...), to follow the
    weights in; "bf16", "fp16" and "fp32" are the tensors' dtype, others are decoded to that of the run.
    wait_for_run: for how many seconds a run is waited for that its trainer has not begun yet. Raises Rejected if there is no such
    run, or it cannot be followed; Unavailable if no daemon answers. One thread at a time, but for close(), rollback() and resume().
    """

    def __init__(
        self,
        server: str | None = None,
        run: str | None = None,
        every: int = 1,
        *,
        patches: bool = False,
        at: str | None = None,
        average: float | None = None,
        format: str | None = None,
        tls: Tls | None = None,
        token_file: str | os.PathLike[str] | None = None,
        connect_timeout: float = 10.0,
        reconnect_timeout: float = 15.0,
        wait_for_run: float = 0.0,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every < 2**64:
            raise Rejected(f"every={every!r}: it must be a whole number of at least 1")
        if average is not None and (isinstance(average, bool) or not isinstance(average, float)):
            raise Rejected(f"average={average!r}: it must be the decay of an average that the run keeps, as 0.999")
        if format is not None and (not isinstance(format, str) or not format):
            raise Rejected(
                f"format={format!r}: it must be the name of a format that the run may be followed in, as 'bf16'"
            )
        self.run = run_id(run)
        waits = seconds("connect_timeout", connect_timeout), seconds("reconnect_timeout", reconnect_timeout)
        address = standing(server)
        files = files_of(tls, address, token_file)
        self._core = _core.Subscriber.open(
            address,
            self.run,
            every,
            bool(patches),
            *waits,
            *files,
            tag=text("at", at or ""),
            average=average,
            format=text("format", format or ""),
            wait_for_run_s=seconds("wait_for_run", wait_for_run),
        )
        self._number = 0  # of the version that is here
        self._changed: tuple[str, ...] = ()  # names, in it
        self._came_whole = False
        self._places: dict[str, int] = {}
        self.specs: list[tuple[str, str, tuple[int, ...]]] = []  # by tensor: name, dtype, shape
        self._learn()
        self._closing = weakref.finalize(self, self._core.close)

    def __iter__(self) -> Iterator[Version]:
        return self

    def __next__(self) -> Version:
        version = self.next()
        assert version is not None, "without a timeout"
        return version

    def next(self, timeout: float | None = None) -> Version | None:
        """The next version; None: there is none within `timeout` seconds. Waits as long as it takes without one.

        Raises Rejected, with code NOT_FOUND, if the run was deleted; Unavailable if the daemon was lost for longer than
        reconnect_timeout."""
        fields = self._core.next(math.inf if timeout is None else timeout)
        return None if fields is None else self._tell(fields)

    def await_next(self, timeout: float) -> bool:
        """Waits until next() has something to do or to tell. The weights that are here stay meanwhile."""
        return self._core.await_next(timeout)

    @property
    def readable(self) -> bool:
        """Whether a version is here: not before the first, nor while one comes whole, which begins within next()."""
        return self._core.readable

    def patches(self) -> Iterator[WeightPatch]:
        """What the version that next() returned last has changed of the one before, tensor by tensor: all else is as it was.

            reader = ballast.Subscriber(server="node7:7700", run="my-run", patches=True)
            for version in reader:
                load_checkpoint_weight_patches(model, [CheckpointWeightPatch(*patch) for patch in reader.patches()])  # vLLM's

        All have indices, or, where the version came whole (base_step is None), none has. For an engine that has what the reader
        had: with the first version it gets all. Where a tensor's scale has changed (int8), its elements come as changed.
        Rejected without patches=True, and once next() was called again."""
        number, whole = self._number, self._came_whole
        for name in self._changed:
            self._expect(number, f"a patch of tensor '{name}'")
            yield self._patch(name, whole)

    def write(self, parameters: FollowedParameters, names: Iterable[str]) -> None:
        """Puts the weights of the tensors of these names into `parameters`."""
        parameters.write(self._core, sorted(self._places[name] for name in names if name in self._places))

    def rollback(self, name: str) -> None:
        """Goes to the version of this name, which the trainer has given it with optimizer.tag(), and stays there: next() returns
        it, with `tag`, and then none, until resume(). One that had come already may be returned before it. Rejected, with
        the names that there are, if it is none of them; then all is as before."""
        self._core.rollback(text("name", name))

    def resume(self) -> None:
        """Goes on with the newest versions."""
        self._core.resume()

    def close(self) -> None:
        """Ends the connection, at once; a next() of another thread raises. Later nothing."""
        self._closing()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, fields: Mapping[str, Any]) -> Version:
        if fields["respecified"]:
            self._learn()
        self._number += 1
        self._changed = tuple(self.specs[i][0] for i in fields["changed"])
        self._came_whole = fields["base_step"] is None
        return Version(
            step=fields["step"],
            generation=fields["generation"],
            base_step=fields["base_step"],
            changed=self._changed,
            changed_ratio=fields["changed_elements"] / max(1, fields["elements"]),
            received_bytes=fields["received_bytes"],
            whole_bytes=fields["whole_bytes"],
            skipped=fields["skipped"],
            closed_unix_s=fields["closed_unix_s"],
            tensors=Tensors(self, self._number),
            tag=fields["tag"] or None,
        )

    def _learn(self) -> None:
        self.specs = self._core.tensors()
        self._places = {name: i for i, (name, _, _) in enumerate(self.specs)}

    def _read(self, name: str, number: int) -> Tensor:
        self._expect(number, f"tensor '{name}'", ", or keep dict(version.tensors)")
        place = self._places[name]
        _, dtype, shape = self.specs[place]
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        self._core.read([(place, tensor.data_ptr(), tensor.nbytes)])
        return tensor

    def _patch(self, name: str, whole: bool) -> WeightPatch:
        place = self._places[name]
        _, wire_dtype, shape = self.specs[place]
        dtype = _DTYPES[wire_dtype]
        count = self._core.count_changed(place)
        indices, values = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=dtype)
        self._core.read_changed(place, count, indices.data_ptr(), values.data_ptr(), values.nbytes)
        return WeightPatch(name, shape, dtype, values, None if whole and count == math.prod(shape) else indices)

    def _expect(self, number: int, what: str, instead: str = "") -> None:
        if number != self._number:
            raise Rejected(
                f"{what} of a version that is no longer here, for next() was called since: read it before{instead}",
                "FAILED_PRECONDITION",
            )
