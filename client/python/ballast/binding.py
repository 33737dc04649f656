"""One tensor of a run and the memory that its weights live in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ballast import _core
from ballast.bf16_words import are_served_of, to_flash24
from ballast.conversion_losses import ConversionLosses
from ballast.error_feedback import ErrorFeedback
from ballast.errors import Rejected
from ballast.gradient_staging import is_staged
from ballast.last_seen import LastSeen
from ballast.parameters import DTYPES, NamedParameter, check_trainable
from ballast.served_codes import may_be_served
from ballast.shard import in_parts, is_sharded, local_of, part_of, shard_of
from ballast.weight_codes import give_weights_back

# What a gradient may travel in, by the wire's name.
_GRADIENTS = {name: dtype for dtype, name in DTYPES.items()} | {"fp8-e5m2": torch.float8_e5m2}


def _host_memory_for(memory: Tensor) -> Tensor:
    """As much in host memory, pinned where a GPU copies from it. Also where it is made during an evaluation, it may be
    written to later."""
    with torch.inference_mode(False):
        return torch.empty_like(memory, device="cpu", pin_memory=memory.device.type == "cuda")


def in_memory(values: Tensor) -> Tensor:
    """The values as they are in memory, where torch says of some only that their sign is another, or that all are zero."""
    return values.clone() if values._is_zerotensor() else values.resolve_neg()


class Binding:
    """Where a tensor's weights land, in its own dtype: the parameter itself where the host can write to it, else a copy
    in host memory that is taken over in store(). Of a sharded parameter all that is of this rank's part.

    Keeps that memory alive, and sees when the parameter was given other memory (p.data = ..., model.to(...)), or its storage
    was: share_memory_(), which a torch.multiprocessing queue calls too, moves what every tensor of the storage has.

    shard: which part that is; None: all. contributes: whether this rank sends gradients of the tensor. shape: of the part.
    as_served: whether codes land as they are served, in `place` of five; else they are decoded.
    last_seen: noted whenever the parameter has the daemon's weights, and when it has what was uploaded.
    """

    as_served = False

    def __init__(self, index: int, entry: NamedParameter, formats: Mapping[str, Any]):
        self.index = index
        self.name = entry.name
        self.parameter = entry.parameter
        self.last_seen = LastSeen(entry.parameter)
        self.format = DTYPES[entry.parameter.dtype]
        self.served_narrower = formats["serving"] is not None  # the daemon's digest is of codes, not of these weights
        self._master = formats["master"]
        self._serving = formats["serving"] or self.format
        self._gradient = _GRADIENTS.get(formats["gradient_dtype"], entry.parameter.dtype)
        self.shard = shard_of(entry.parameter)
        if self._serving.startswith("int8") and in_parts(entry.parameter):
            raise Rejected(
                f"serving='{self._serving}' of parameter '{entry.name}', which is sharded: a scale goes with whole chunks, and the "
                "ranks get parts of them. Give 'fp8-e4m3', 'bf16' or 'fp16', or leave serving out"
            )
        self.contributes = self.shard is None or (self.shard.contributes and self.shard.end > self.shard.begin)
        self.shape = local_of(entry.parameter).shape
        whole = entry.parameter.shape
        self._columns = whole[-1] if len(whole) > 1 else 0
        self._group = entry.group
        self._feedback: ErrorFeedback | None = None
        self._memory: Tensor | None = None  # the parameter's, when landing was made
        self._bound: object = None  # what the client writes to: kept until it writes elsewhere
        self._bound_place: tuple[int, ...] = ()
        self._landing: Tensor | None = None

    def go_on_from(self, known: Binding) -> None:
        """What was known of the tensor before the run was amended."""
        self.last_seen = known.last_seen
        if self._feedback is not None and known._feedback is not None:
            self._feedback = known._feedback

    @property
    def on_host(self) -> bool:
        return self.parameter.is_cpu

    def follow(self) -> bool:
        """Brings `landing` to where the parameter is now; True if the client is not bound to it."""
        give_weights_back(self.parameter)  # of a layer that computed in codes, by another run
        p = local_of(self.parameter)
        if self._memory is not None and self._memory.data_ptr() == p.data_ptr() and self._memory.device == p.device:
            return not self._is_bound
        if DTYPES.get(p.dtype) != self.format or p.shape != self.shape:
            raise Rejected(
                f"parameter '{self.name}' became {p.dtype} {tuple(p.shape)}; its run has {self.format} "
                f"{tuple(self.shape)}: convert the model before making the optimizer"
            )
        check_trainable(NamedParameter(self.name, self.parameter, self._group), taken=True)
        self._memory = p.detach()
        self._landing = self._memory if self.on_host else _host_memory_for(self._memory)
        return True

    @property
    def _target(self) -> object:
        """What a client writes to that is bound now."""
        return self._landing

    @property
    def _is_bound(self) -> bool:
        return self._bound is self._target and self._bound_place == self.place

    @property
    def was_moved(self) -> bool:
        """Whether the client writes to where the storage was before, which is freed."""
        return self._bound is not None and self._bound is self._target and self._bound_place != self.place

    @property
    def landing(self) -> Tensor:
        assert self._landing is not None, "follow() comes first"
        return self._landing

    @property
    def nbytes(self) -> int:
        """Of the weights in the parameter's dtype."""
        return self.shape.numel() * self.parameter.element_size()

    def room(self) -> Tensor:
        """Host memory for so many."""
        return torch.empty(self.shape, dtype=self.parameter.dtype, device="cpu")

    @property
    def place(self) -> tuple[int, ...]:
        """Where they land, as _core.Client.pull takes it, or pull_served."""
        return self.index, self.landing.data_ptr(), self.landing.nbytes

    def bind(self, client: _core.Client) -> None:
        """From now on a step's weights land there."""
        if self.nbytes:
            client.bind_weights(*self.place)
        self._bound, self._bound_place = self._target, self.place

    def move_version(self) -> None:
        """torch is to see that the weights are others, or will be."""
        torch.autograd.graph.increment_version(self.parameter)

    def load(self) -> None:
        """Brings the landing up to the parameter's weights."""
        self.follow()
        if not self.on_host:
            self.landing.copy_(local_of(self.parameter).detach())

    def store(self, waits: bool = True) -> None:
        """Brings the parameter up to the weights that landed: on a device, or where it was given other memory since
        (p.data = ...). waits: until the landing may be overwritten; otherwise the device copies it in its own time, before it
        does anything that is asked of it later."""
        p = local_of(self.parameter)
        if self.on_host and p.data_ptr() == self.landing.data_ptr():
            return
        if p.dtype == self.landing.dtype and p.shape == self.shape:  # else the next step refuses what it became
            with torch.no_grad():
                p.copy_(self.landing, non_blocking=not waits and p.device.type == "cuda")

    def digest(self) -> int:
        """xxh3_64 of the weights, as the daemon computes it of those that it serves in the parameter's dtype."""
        self.load()
        return _core.digest(self.landing.data_ptr(), self.landing.nbytes)

    def served_digest(self) -> int | None:
        """The daemon's digest of the weights, had they been uploaded: rounded as it stores and serves them. None where
        that cannot be said."""
        self.load()
        return self._served(self.landing, self.format)

    def _served(self, weights: Tensor, format: str) -> int | None:
        return _core.served_digest(
            self._master, self._serving, format, weights.numel(), self._columns, weights.data_ptr()
        )

    @property
    def holds_less(self) -> bool:
        """Whether the parameter may hold less than the daemon's weight."""
        return self.format != "fp32" or self.served_narrower

    def kept_as(self, other: Binding) -> bool:
        """Whether the daemon stores and serves its weights as the other's."""
        return bool((self._master, self._serving) == (other._master, other._serving))

    def is_served_of(self, master: Tensor) -> bool:
        """Whether the weights that are here are what the daemon serves of this master, fp32 in host memory."""
        self.load()
        return self.serves(self.landing, master)

    def serves(self, weights: Tensor, master: Tensor) -> bool:
        """The same of other weights of the whole tensor, in the parameter's dtype and in host memory; or whether a run served
        them that stored and served its tensors otherwise, and from which master and weights have come."""
        served = self._served(master, "fp32")
        narrower = self.served_narrower
        own = self._served(weights, self.format) if narrower else _core.digest(weights.data_ptr(), weights.nbytes)
        if served is not None and served == own:
            return True
        if weights.dtype == torch.bfloat16 and are_served_of(weights, master):
            return True
        return any(torch.equal(one, weights) for one in may_be_served(master, weights.dtype))

    def to_load(self, master: Tensor, weights: Tensor) -> Tensor:
        """What is uploaded in fp32 so that the daemon has this master, and serves these weights of it, of the whole tensor."""
        return to_flash24(master, weights) if (self._master, self._serving) == ("flash24", "bf16") else master

    def feed_back_errors(self) -> None:
        """From now on what a gradient loses in its wire format is added to the next one. Nothing where that loses nothing."""
        if self._gradient not in (self.parameter.dtype, torch.float32):
            self._feedback = ErrorFeedback()

    def settle_errors(self, applied: bool) -> None:
        """The step has ended; applied: with this tensor's gradients."""
        if self._feedback is not None:
            self._feedback.settle(applied)

    def forget_errors(self) -> None:
        """The weights are those of another step."""
        if self._feedback is not None:
            self._feedback.forget()

    def gradient(self, grad: Tensor, loss_scale: float, losses: ConversionLosses, step: int) -> Tensor:
        """The gradient of this step, of a loss that was multiplied by loss_scale, as it is sent: in its wire format,
        contiguous; in host memory, or on a GPU from which it is staged. What is too large for that format becomes an infinity;
        `losses` counts that. Rejected if it is not of the parameter's kind."""
        if grad.layout != torch.strided:
            raise Rejected(
                f"the gradient of '{self.name}' has layout {grad.layout}: only dense gradients are supported "
                "(nn.Embedding with sparse=False)"
            )
        if is_sharded(grad):
            grad = self._part(grad)
        if grad.dtype != self.parameter.dtype or grad.shape != self.shape:
            raise Rejected(
                f"the gradient of '{self.name}' is {grad.dtype} {tuple(grad.shape)}, its weights are "
                f"{self.parameter.dtype} {tuple(self.shape)}: both must be the same"
            )
        own = in_memory(grad.detach())
        if self._feedback is not None:
            sent = self._feedback.round(own, self._gradient, loss_scale)
        elif own.dtype == self._gradient:  # to() costs as much as all else here, even where it does nothing
            sent = own
        else:
            sent = own.to(self._gradient)
            losses.count(step, own, sent)
        sent = sent.contiguous()
        return sent if sent.is_cpu or is_staged(sent) else sent.to("cpu")

    @property
    def gradient_nbytes(self) -> int:
        return self.shape.numel() * self._gradient.itemsize

    def _part(self, grad: Any) -> Tensor:
        part = part_of(self.parameter, grad)
        if part is None:
            raise Rejected(
                f"the gradient of '{self.name}' is a DTensor with placements {grad.placements}, and its weights are "
                "sharded otherwise: give it as they are (redistribute())"
            )
        return part
