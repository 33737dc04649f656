"""Gradients on their way from a GPU to the daemon, which the trainer does not wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ballast import _core
from ballast.errors import Rejected
from ballast.pending import WAIT_SLICE_S

# Of the ring: so that a backward that is faster than the daemon need not wait for it soon.
_MOST_BYTES = 256 << 20
_ALIGNMENT = 256


def room_of(nbytes: int) -> int:
    """What a gradient of so many bytes takes of a ring."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def is_staged(gradient: Tensor) -> bool:
    """Whether a gradient leaves its device by way of GradientStaging. Not from AMD's, which torch calls "cuda" too."""
    return gradient.is_cuda and torch.version.hip is None


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


class Copies(Protocol):
    """How gradients come to the host. Tests have another than a GPU's."""

    def pinned(self, nbytes: int) -> Tensor:
        """So many bytes of host memory that the GPU can write to, uint8."""
        ...

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: _core.PushQueue, number: int) -> Copy:
        """Copies `source`, once what was asked of its device before is done, to `target`, pinned; then the gradient of that
        number arrives in the queue. shared: somebody else may write to its memory, and what the current stream is asked later
        waits for the copy."""
        ...

    def wait(self) -> None:
        """Until all copies that were started are done."""
        ...


class CudaCopies:
    """By a stream of its own on each GPU, beside the one that computes."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: _core.PushQueue, number: int) -> Copy:
        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch declares none
            done.record(stream)
            queue.announce(number, stream.cuda_stream)
        if shared:
            torch.cuda.current_stream(device).wait_event(done)
        event: Copy = done
        return event

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


@dataclass
class _Staged:
    """A gradient that may not be pushed yet: its number in the queue, where its bytes are in the ring, and the tensor that they
    are copied from."""

    number: int
    begin: int
    end: int
    source: Tensor | None  # until the copy is done
    copy: Copy | None = None  # until it is started


class GradientStaging:
    """A ring of pinned host memory. put() starts a gradient's copy and returns; what has arrived is pushed, in the order put,
    by a thread of _core.PushQueue. put() waits while there is no room in the ring, and raises what a push failed with. A
    gradient's memory on the GPU is held until a put() or flush() finds that its copy is done. One thread at a time.

    client: sends them. nbytes: of the ring, unless a gradient is larger; no more than 256 MiB. room_of() all gradients is
        enough for a step.
    """

    def __init__(self, client: _core.Client, nbytes: int, copies: Copies | None = None):
        self._client = client
        self._queue: _core.PushQueue | None = None
        self._copies = copies or CudaCopies()
        self._nbytes = min(nbytes, _MOST_BYTES)
        self._ring: Tensor | None = None
        self._staged: deque[_Staged] = deque()  # in the order put, and so in the ring, around it
        self._dropping = False

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
            self.flush()
            self._client.push(index, gradient.data_ptr(), gradient.nbytes)

    def put(self, index: int, gradient: Tensor) -> None:
        self._refuse_half_dropped()
        if self._queue is None:
            self._queue = self._client.push_queue()
        self._queue.await_pushed(0, 0)  # raises what failed
        self._let_go(self._queue)
        begin = self._room_for(self._queue, gradient.nbytes)
        staged = _Staged(self._queue.count_put(), begin, begin + room_of(gradient.nbytes), gradient)
        try:  # where an interrupt comes between two of these, nothing stays that would be waited for or overwritten
            self._staged.append(staged)
            self._start(self._queue, index, gradient, staged)
        except BaseException:
            self._copies.wait()
            self._queue.cancel(staged.number)
            if self._queue.count_put() <= staged.number and self._staged and self._staged[-1] is staged:
                self._staged.pop()
            raise

    def _start(self, queue: _core.PushQueue, index: int, gradient: Tensor, staged: _Staged) -> None:
        assert self._ring is not None  # _room_for() made it
        target = self._ring[staged.begin : staged.begin + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        queue.put(index, target.data_ptr(), gradient.nbytes)
        staged.copy = self._copies.start(gradient, target, _has_other_owners(gradient), queue, staged.number)

    def flush(self) -> None:
        """Waits until all are pushed. Rejected after a drop() that was interrupted."""
        self._refuse_half_dropped()
        if self._queue is not None:
            self._await(self._queue, len(self._staged))

    def drop(self) -> None:
        """Pushes no more of them. After an interrupt it is to be called again."""
        if self._queue is not None:
            self._dropping = True
            self._queue.drop()
            self._await(self._queue, len(self._staged))  # the ring's bytes are free when they have arrived
            self._dropping = False

    def _refuse_half_dropped(self) -> None:
        if self._dropping:
            raise Rejected(
                "the gradients of the open step were being dropped when that was interrupted: call zero_grad() again",
                "FAILED_PRECONDITION",
            )

    def _let_go(self, queue: _core.PushQueue) -> None:
        pushed = queue.count_pushed()
        while self._staged and self._staged[0].number < pushed:
            self._staged.popleft()
        for staged in self._staged:
            if staged.source is not None and not (staged.copy and staged.copy.query()):
                break
            staged.source = None

    def _await(self, queue: _core.PushQueue, count: int) -> None:
        """Until the first `count` of what is staged are pushed. What a GPU fails with is raised by its events."""
        if count == 0:
            return
        last = self._staged[count - 1].number
        while not queue.await_pushed(last + 1, WAIT_SLICE_S):
            self._let_go(queue)
            if self._staged and self._staged[0].copy is not None:
                self._staged[0].copy.query()
        self._let_go(queue)

    def _room_for(self, queue: _core.PushQueue, nbytes: int) -> int:
        """The first of so many bytes that nobody uses."""
        if self._ring is None or nbytes > self._ring.nbytes:
            self.flush()
            self._ring = self._copies.pinned(room_of(max(nbytes, self._nbytes)))
        while self._staged:
            tail, head, size = self._staged[0].begin, self._staged[-1].end, self._ring.nbytes
            if head > tail:  # in use: [tail, head)
                if head + nbytes <= size:
                    return head
                if nbytes <= tail:
                    return 0
            elif head + nbytes <= tail:  # in use: [tail, ...] and [0, head)
                return head
            self._await(queue, 1)
        return 0
