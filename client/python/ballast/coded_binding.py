"""One tensor of a run whose layer computes in the codes that the daemon serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.errors import Rejected
from ballast.parameters import NamedParameter
from ballast.shard import is_sharded
from ballast.served_codes import ServedCodes, room_for
from ballast.weight_codes import WeightCodes, codes_of

_WRITTEN_TO = 0  # a digest that no weights have, but by chance


class CodedBinding(Binding):
    """As Binding, until the first weights have landed: then they are the layer's, as they came, and the parameter's own
    memory is free. What is uploaded and compared is decoded for as long as that takes.
    """

    as_served = True

    def __init__(self, index: int, entry: NamedParameter, formats: Mapping[str, Any], held: WeightCodes):
        super().__init__(index, entry, formats)
        self._held = held
        self._landed: ServedCodes | None = None

    @property
    def _codes(self) -> ServedCodes | None:
        """What the weights are; None: the parameter has them itself."""
        return self._held.served if self._held.stands_in(self.parameter) else None

    def follow(self) -> bool:
        codes = self._codes
        if codes is None:  # what lands goes to the same place, whatever memory the parameter has until then
            super().follow()
        else:
            self._memory = None  # it would keep what the parameter had
        if codes is not None and self.on_host:
            self._landed = codes
        elif self._landed is None:
            self._landed = room_for(self._held.format, self.shape, self.parameter.device.type == "cuda")
        return not self._is_bound

    @property
    def _target(self) -> object:
        return self._landed

    @property
    def place(self) -> tuple[int, ...]:
        assert self._landed is not None, "follow() comes first"
        codes, scales = self._landed.codes, self._landed.scales
        return self.index, codes.data_ptr(), codes.nbytes, scales.data_ptr(), scales.numel()

    def bind(self, client: _core.Client) -> None:
        client.bind_served(*self.place)
        self._bound, self._bound_place = self._target, self.place
        if self._codes is not None:
            self._landing = None

    def move_version(self) -> None:
        super().move_version()
        codes = self._codes
        if codes is not None:  # which a compiled backward keeps, and not the weight
            for part in (codes.codes, codes.scales):
                torch.autograd.graph.increment_version(part)

    def store(self, waits: bool = True) -> None:
        assert self._landed is not None, "follow() comes first"
        self._memory = self._landing = None
        codes, device = self._codes, self.parameter.device
        if codes is None or self.on_host or codes.codes.device != device:
            codes = self._landed.to(device)
        else:
            codes.copy_(self._landed, non_blocking=not waits and device.type == "cuda")
        self._held.take(self.parameter, codes)

    # --- the weights, decoded ---------------------------------------------------------------------------------------

    def load(self) -> None:
        if self._codes is None:
            super().load()
        self.follow()

    @property
    def landing(self) -> Tensor:
        codes = self._codes
        if codes is not None and self._landing is None:
            self._landing = self._decoded(codes)
        return super().landing

    def digest(self) -> int:
        self.follow()
        codes = self._codes
        if codes is None:
            return super().digest()
        if self._held.is_written_to(self.parameter):
            return _WRITTEN_TO
        weights = self._decoded(codes)
        return _core.digest(weights.data_ptr(), weights.nbytes)

    def served_digest(self) -> int | None:
        self.follow()
        codes = self._codes
        return super().served_digest() if codes is None else _digest_of(codes)

    def is_served_of(self, master: Tensor) -> bool:
        if self._codes is None:
            return super().is_served_of(master)
        return self._served(master, "fp32") == self.served_digest()

    def _decoded(self, codes: ServedCodes) -> Tensor:
        return codes.decode(self.parameter.dtype).to("cpu")


def _digest_of(served: ServedCodes) -> int:
    """As the daemon's: of the codes, and where there are scales of both digests."""
    codes, scales = served.codes.cpu(), served.scales.cpu()
    digests = [_core.digest(part.data_ptr(), part.nbytes) for part in (codes, scales)]
    if not scales.numel():
        return digests[0]
    both = np.array(digests, np.uint64)
    return _core.digest(both.ctypes.data, both.nbytes)


def bind_all(
    tensors: Iterable[NamedParameter], formats: Iterable[Mapping[str, Any]], error_feedback: bool
) -> list[Binding]:
    """The bindings of a run's tensors, in its order: of codes where they are served and the tensor's layer computes in them.
    error_feedback: the option."""
    bindings = [_bind(index, *pair) for index, pair in enumerate(zip(tensors, formats))]
    for binding in bindings if error_feedback else []:
        binding.feed_back_errors()
    return bindings


def _bind(index: int, entry: NamedParameter, formats: Mapping[str, Any]) -> Binding:
    held = _wanted(entry, formats)
    return Binding(index, entry, formats) if held is None else CodedBinding(index, entry, formats, held)


def check_codes(tensors: Iterable[NamedParameter], formats: Iterable[Mapping[str, Any]]) -> None:
    """Rejected if a layer computes in other codes than its weight is to be served in."""
    for entry, one in zip(tensors, formats):
        held = _wanted(entry, one)
        if held is not None and held.format != one["serving"]:
            raise Rejected(
                f"serving='{one['serving']}' of parameter '{entry.name}', whose layer computes in {held.format}: it would be "
                f"rounded twice. Write {{'{entry.name}': {{'serving': '{held.format}'}}}} in formats, or leave serving out for it"
            )


def _wanted(entry: NamedParameter, formats: Mapping[str, Any]) -> WeightCodes | None:
    return None if formats["serving"] is None or is_sharded(entry.parameter) else codes_of(entry.parameter)
