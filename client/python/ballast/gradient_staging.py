"""Gradients on their way from a GPU to the daemon, which the trainer does not wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ballast.errors import Rejected

_LEAST_BYTES = 64 << 20
_ALIGNMENT = 256


def is_staged(gradient: Tensor) -> bool:
    """Whether a gradient leaves its device by way of GradientStaging."""
    return gradient.device.type == "cuda"


def refuse_capture(gradient: Tensor) -> None:
    """Rejected, before anything is done, if the gradient is made in a CUDA graph that is being captured."""
    if is_staged(gradient) and torch.cuda.is_current_stream_capturing():
        raise Rejected(
            "a CUDA graph is being captured, in which no gradient can leave for the daemon: capture forward() and backward() "
            "by torch.cuda.make_graphed_callables(), which returns gradients outside of it, or train without torch.cuda.graph()"
        )


# Of a gradient that nobody else knows: itself, what it was made from by detach(), and who asks.
_OWNERS_OF_ITS_OWN = 3


def _has_other_owners(gradient: Tensor) -> bool:
    """Whether it may be written to by others: it was set by hand, or its memory is another tensor's too, as that of a graphed
    callable's gradients is. True where torch cannot tell, and of what a later micro-batch adds, which autograd holds, too.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    by_hand = torch._C._current_graph_task_id() == -1
    return by_hand or count is None or count(gradient.untyped_storage()._cdata) > _OWNERS_OF_ITS_OWN


class Copy(Protocol):
    """A copy that was started, as torch.cuda.Event has it."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Copies(Protocol):
    """How gradients come to the host. Tests have another than a GPU's."""

    def pinned(self, nbytes: int) -> Tensor:
        """So many bytes of host memory that the GPU can write to, uint8."""
        ...

    def start(self, source: Tensor, target: Tensor, shared: bool) -> Copy:
        """Copies `source`, once what was asked of its device before is done, to `target`, pinned. shared: somebody else may
        write to its memory, and what the current stream is asked later waits for the copy."""
        ...


class CudaCopies:
    """By a stream of its own on each GPU, beside the one that computes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self, source: Tensor, target: Tensor, shared: bool) -> Copy:
        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch declares none
            done.record(stream)
        if shared:
            torch.cuda.current_stream(device).wait_event(done)
        event: Copy = done
        return event


@dataclass
class _Staged:
    """One gradient: where its bytes are in the ring, and the tensor that they are copied from."""

    index: int
    begin: int
    end: int  # what follows may begin here
    nbytes: int
    source: Tensor
    copy: Copy


class GradientStaging:
    """A ring of pinned host memory. put() starts a gradient's copy and returns; what has arrived is pushed, in the order put,
    by the next put() or flush(). The ring holds 64 MiB, or the largest gradient: put() waits while there is no room. A gradient's
    memory on the GPU is held until it is pushed. One thread at a time.

    push(index, address, nbytes): sends a gradient, and is done with its bytes when it returns.
    """

    def __init__(self, push: Callable[[int, int, int], None], copies: Copies | None = None, nbytes: int = _LEAST_BYTES):
        self._push = push
        self._copies = copies or CudaCopies()
        self._nbytes = nbytes
        self._ring: Tensor | None = None
        self._staged: deque[_Staged] = deque()
        self._head = 0  # where the next one may begin

    def before(self, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, but after the push of all gradients."""

        def flush_and_act(*arguments: Any) -> None:
            self.flush()
            act(*arguments)

        return flush_and_act

    def send(self, index: int, gradient: Tensor) -> None:
        """gradient: contiguous, as it is sent, in host memory or where it is_staged() from."""
        if is_staged(gradient):
            self.put(index, gradient)
        else:
            self._push(index, gradient.data_ptr(), gradient.nbytes)

    def put(self, index: int, gradient: Tensor) -> None:
        while self._staged and self._staged[0].copy.query():
            self._push_oldest()
        begin = self._room_for(gradient.nbytes)
        assert self._ring is not None  # _room_for() made it
        target = self._ring[begin : begin + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        copy = self._copies.start(gradient, target, _has_other_owners(gradient))
        end = begin + -(-gradient.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._staged.append(_Staged(index, begin, end, gradient.nbytes, gradient, copy))
        self._head = end

    def flush(self) -> None:
        """Waits until all have arrived, and pushes them."""
        while self._staged:
            self._push_oldest()

    def drop(self) -> None:
        """Pushes no more of them."""
        for staged in self._staged:
            staged.copy.synchronize()  # the ring's bytes are free only then
        self._staged.clear()

    def _push_oldest(self) -> None:
        oldest = self._staged[0]
        oldest.copy.synchronize()
        assert self._ring is not None
        try:
            self._push(oldest.index, self._ring.data_ptr() + oldest.begin, oldest.nbytes)
        except Exception:  # the step is over; after an interrupt it is not
            self._staged.popleft()
            raise
        self._staged.popleft()

    def _room_for(self, nbytes: int) -> int:
        """The first of so many bytes that nobody uses."""
        if self._ring is None or nbytes > self._ring.nbytes:
            self.flush()
            size = -(-max(nbytes, self._nbytes) // _ALIGNMENT) * _ALIGNMENT
            self._ring = self._copies.pinned(size)
        while True:
            if not self._staged:
                return 0
            tail, size = self._staged[0].begin, self._ring.nbytes
            if self._head > tail:  # in use: [tail, head)
                if self._head + nbytes <= size:
                    return self._head
                if nbytes <= tail:
                    return 0
            elif self._head + nbytes <= tail:  # in use: [tail, ...] and [0, head)
                return self._head
            self._push_oldest()
