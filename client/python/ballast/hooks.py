"""What torch calls for an optimizer: with the gradients that backward makes, and before a forward reads weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ballast import sharding_watch, wrappers
from ballast.checkpointing import Checkpointing
from ballast.forward_reads import ForwardReads
from ballast.graph_forwards import GraphForwards
from ballast.guards import Owner, guard_clipping, release_clipping
from ballast.module_reads import ModuleReads


class Trainer(wrappers.Trainer, sharding_watch.Watcher, Owner, Protocol):
    """What is asked of it there."""


class TorchHooks:
    """Calls `receive(parameter)` as GradientHooks does and `read(parameters)` as ForwardReads and ModuleReads do, and has
    modules in DistributedDataParallel, fully_shard and torch's clipping know `trainer`, from cover() to remove(). Calls
    `prepare(module)` as GraphForwards does, from cover_forwards() on. Holds all of them weakly."""

    def __init__(
        self,
        receive: Callable[[Tensor], None],
        read: Callable[..., None],
        prepare: Callable[[nn.Module], None],
        overlap: bool,
        trainer: Trainer,
    ):
        """overlap: weights may be on their way outside of a backward() too, and every reader waits for them."""
        self._gradients = GradientHooks(receive)
        self._read = weakref.WeakMethod(read)
        self._prepare = weakref.WeakMethod(prepare)
        self._forwards: GraphForwards | None = None
        self._overlap = overlap
        self._reads: list[ForwardReads | ModuleReads | Checkpointing] = []
        self._trainer = weakref.ref(trainer)

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """From now on their gradients are received, and what reads weights is told of."""
        self._gradients.cover(parameters)
        trainer = self._trainer()
        if trainer is not None:
            wrappers.watch(trainer)
            guard_clipping(trainer)
            sharding_watch.watch(trainer)
        read = self._read()
        if read is None or self._reads:
            return
        if self._overlap:
            self._reads += [ForwardReads(read, again=False), ModuleReads(read)]
        else:  # a hook on all modules costs each of their calls a little: only where it is of use
            self._reads.append(Checkpointing(self._watch_recomputing))

    def replace(self, old: Tensor, new: Tensor) -> None:
        """`new` is in the place of a parameter that was covered."""
        self._gradients.uncover(old)
        self._gradients.cover([new])

    def cover_forwards(self) -> None:
        prepare = self._prepare()
        if prepare is not None and self._forwards is None:
            self._forwards = GraphForwards(prepare)

    def _watch_recomputing(self) -> None:
        read = self._read()
        if read is not None:
            self._reads.append(ForwardReads(read, again=True))

    def remove(self) -> None:
        wrappers.release(self._trainer())
        release_clipping(self._trainer())
        sharding_watch.release(self._trainer())
        self._gradients.remove()
        for reads in self._reads:
            reads.remove()
        self._reads.clear()
        if self._forwards is not None:
            self._forwards.remove()


class GradientHooks:
    """Calls `receive(parameter)` when a gradient has been accumulated, while backward goes on.

    Holds `receive`'s object weakly: hooks live as long as their parameters and must not keep an optimizer alive.
    """

    def __init__(self, receive: Callable[[Tensor], None]):
        # Compiled autograd calls it and does not trace it: what it sends is sent outside of any graph.
        self._hook = torch.compiler.disable(_forward_to(weakref.WeakMethod(receive)))  # type: ignore[no-untyped-call]
        self._handles: dict[int, Any] = {}

    def cover(self, parameters: Iterable[Tensor]) -> None:
        """Watches those that require a gradient and are not watched yet."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._handles:
                register: Any = parameter.register_post_accumulate_grad_hook  # torch declares no types for it
                self._handles[id(parameter)] = register(self._hook)

    def uncover(self, parameter: Tensor) -> None:
        handle = self._handles.pop(id(parameter), None)
        if handle is not None:
            handle.remove()

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _forward_to(receive: weakref.WeakMethod[Callable[[Tensor], None]]) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        method = receive()
        if method is not None:
            method(parameter)

    return hook
