"""Gradients on their way from a GPU to the daemon, which the trainer does not wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ballast import _core
from ballast.errors import Rejected
from ballast.pending import WAIT_SLICE_S

# Of the ring: so that a backward that is faster than the daemon need not wait for it soon.
_MOST_BYTES = 256 << 20
# Of that on the GPU, from where a gradient goes on at the speed of its memory.
_MOST_BYTES_THERE = 64 << 20
# A gradient that is no larger goes with others in one message, which is host memory.
_SMALL_BYTES = 16 << 10
_ALIGNMENT = 256


def room_of(nbytes: int) -> int:
    """What a gradient of so many bytes takes of a ring."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def is_staged(gradient: Tensor) -> bool:
    """Whether a gradient leaves its device by way of GradientStaging. Not from AMD's, which torch calls "cuda" too."""
    return gradient.is_cuda and torch.version.hip is None


def gpu_of(parameters: Iterable[Tensor], transport: str) -> int:
    """The number of the GPU that they are all on, as the transport wants it. Rejected if they are not on one, or on AMD's."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or not next(iter(devices)).type == "cuda" or torch.version.hip is not None:
        found = ", ".join(sorted(str(device) for device in devices))
        raise Rejected(
            f"transport={transport!r}: all parameters must be on one GPU, NVIDIA's, and are on {found}; leave it out"
        )
    index: int | None = next(iter(devices)).index
    return torch.cuda.current_device() if index is None else index


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

    def there(self, nbytes: int, gradient: Tensor) -> Tensor:
        """As many of the memory of the gradient's GPU."""
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

    def there(self, nbytes: int, gradient: Tensor) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=gradient.device)

    def start(self, source: Tensor, target: Tensor, shared: bool, queue: _core.PushQueue, number: int) -> Copy:
        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if target.is_cuda:
                target.record_stream(stream)  # which may write there when the ring is gone
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


class _Ring:
    """Memory through which gradients go, each behind the one before, around it."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes  # that it has, or will have
        self.memory: Tensor | None = None


@dataclass
class _Staged:
    """A gradient that may not be pushed yet: its number in the queue, in which ring its bytes are and where, and the tensor that
    they are copied from."""

    ring: _Ring
    number: int
    begin: int
    end: int
    source: Tensor | None  # until the copy is done
    copy: Copy | None = None  # until it is started


class GradientStaging:
    """A ring of pinned host memory. put() starts a gradient's copy and returns; what has arrived is pushed, in the order put,
    by a thread of _core.PushQueue. put() waits while there is no room in the ring, and raises what a push failed with. A
    gradient's memory on the GPU is held until a put() or flush() finds that its copy is done. One thread at a time.

    Where the daemon shares a GPU's memory, gradients that are not small have a ring on the GPU instead, of at most 64 MiB.

    client: sends them. nbytes: of the ring, unless a gradient is larger; no more than 256 MiB. room_of() all gradients is
        enough for a step.
    """

    def __init__(self, client: _core.Client, nbytes: int, copies: Copies | None = None):
        self._client = client
        self._queue: _core.PushQueue | None = None
        self._copies = copies or CudaCopies()
        self._here, self._there = _Ring(min(nbytes, _MOST_BYTES)), _Ring(min(nbytes, _MOST_BYTES_THERE))
        self._staged: deque[_Staged] = deque()  # in the order put, and so in each ring, around it
        self._dropping = False

    def before(self, act: Callable[..., None]) -> Callable[..., None]:
        """`act`, but after the push of all gradients."""

        def flush_and_act(*arguments: Any) -> None:
            self.flush()
            act(*arguments)

        return flush_and_act

    def send(self, index: int, gradient: Tensor) -> BaseException | None:
        """gradient: contiguous, as it is sent, in host memory or where it is_staged() from. Returns what Ctrl-C has raised while
        it was sent, which it is."""
        if is_staged(gradient):
            self.put(index, gradient)
            return None
        self.flush()
        return self._client.push(index, gradient.data_ptr(), gradient.nbytes)

    def put(self, index: int, gradient: Tensor) -> None:
        self._refuse_half_dropped()
        if self._queue is None:
            self._queue = self._client.push_queue()
        self._queue.await_pushed(0, 0)  # raises what failed
        self._let_go(self._queue)
        ring = self._there if gradient.nbytes > _SMALL_BYTES and self._client.shares_gpu else self._here
        begin = self._room_for(self._queue, ring, gradient)
        staged = _Staged(ring, self._queue.count_put(), begin, begin + room_of(gradient.nbytes), gradient)
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
        memory = staged.ring.memory
        assert memory is not None  # _room_for() made it
        target = memory[staged.begin : staged.begin + gradient.nbytes].view(gradient.dtype).view(gradient.shape)
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

    def _room_for(self, queue: _core.PushQueue, ring: _Ring, gradient: Tensor) -> int:
        """The first of so many bytes of the ring that nobody uses."""
        nbytes = gradient.nbytes
        if ring.memory is None or nbytes > ring.nbytes:
            self.flush()
            room = room_of(max(nbytes, ring.nbytes))  # the ring's once it is there: memory may run short
            ring.memory = self._copies.there(room, gradient) if ring is self._there else self._copies.pinned(room)
            ring.nbytes = room
        while first := next((staged for staged in self._staged if staged.ring is ring), None):
            last = next(staged for staged in reversed(self._staged) if staged.ring is ring)
            tail, head = first.begin, last.end
            if head > tail:  # in use: [tail, head)
                if head + nbytes <= ring.nbytes:
                    return head
                if nbytes <= tail:
                    return 0
            elif head + nbytes <= tail:  # in use: [tail, ...] and [0, head)
                return head
            self._await(queue, 1)
        return 0
