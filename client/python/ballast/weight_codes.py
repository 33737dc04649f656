"""Weights that a layer computes in as they are served: codes of one byte, in place of the parameter's own memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ballast.served_codes import ServedCodes


class WeightCodes:
    """What a layer of ballast.nn asks for its weight, and gets once a run has brought it.

    While `served` is None the parameter has its weights, in its own dtype, and the layer makes codes of them. From take()
    to give_back() the codes are the weights, and the parameter has no memory but one NaN, of which all its elements are:
    whatever reads it but the layer sees that, and whatever writes to it is refused by torch.

    format: what the layer computes in, by the wire's name.
    """

    def __init__(self, format: str):
        self.format = format
        self.served: ServedCodes | None = None
        self._standing_in: Tensor | None = None

    def stands_in(self, weight: Tensor) -> bool:
        """Whether the codes are the weights, and nobody has given the parameter memory since."""
        return self._standing_in is not None and weight.data_ptr() == self._standing_in.data_ptr()

    def is_written_to(self, weight: Tensor) -> bool:
        """Whether somebody has filled what stands in with a number, as torch lets a whole tensor be; seen on a CPU."""
        stands = self._standing_in if self.stands_in(weight) else None
        return stands is not None and stands.device.type == "cpu" and not stands.isnan().item()

    def take(self, weight: Tensor, served: ServedCodes) -> None:
        """From now on `served`, on the parameter's device, are its weights: what it had is free."""
        self.served = served
        if self.stands_in(weight) and not self.is_written_to(weight):
            return
        with torch.inference_mode(False):
            self._standing_in = torch.full((1,), torch.nan, dtype=weight.dtype, device=weight.device)
            weight.data = self._standing_in.expand(weight.shape)

    def give_back(self, weight: Tensor) -> None:
        """The parameter has the weights again, in its own dtype. Nothing where it has them."""
        if self.served is not None and self.stands_in(weight):
            with torch.inference_mode(False):
                weight.data = self.served.decode(weight.dtype)
        self.served = self._standing_in = None


# By parameter, for as long as that lives: who has asked. Not an attribute: torch would save one with the parameter.
_asked: Any = WeakTensorKeyDictionary()


def ask_for_codes(layer: nn.Module, codes: WeightCodes) -> None:
    """The layer computes with its parameter `weight` in such codes, for as long as both live and it has that parameter."""
    ask_no_more(layer)
    _asked[layer.weight] = [*_asked.get(layer.weight, []), (weakref.ref(layer), codes)]


def ask_no_more(layer: nn.Module) -> None:
    """The layer computes with the weight itself."""
    weight = layer.weight
    others = [
        (one, codes) for one, codes in _asked.pop(weight, []) if one() not in (None, layer) or codes.stands_in(weight)
    ]
    if others:
        _asked[weight] = others


def codes_of(weight: Tensor) -> WeightCodes | None:
    """What its layer has asked for. None: no layer has, or several have the weight, of which each would want its own."""
    asking = [codes for layer, codes in _asked.get(weight, []) if _has(layer(), weight)]
    return asking[0] if len(asking) == 1 else None


def _has(layer: nn.Module | None, weight: Tensor) -> bool:
    """Not one that was pruned, or parametrized, since: it reads the weight by another name."""
    return layer is not None and layer._parameters.get("weight") is weight


def is_standing_in(weight: Tensor) -> bool:
    """Whether this parameter has no memory of its own, since codes are its weights."""
    return any(codes.stands_in(weight) for _, codes in _asked.get(weight, []))


def give_weights_back(weight: Tensor) -> None:
    """The parameter has memory again, whoever has taken it, and whether the layer is there or not."""
    if not _asked:  # each gradient comes here, and a look costs more
        return
    for _, codes in _asked.get(weight, []):
        if codes.stands_in(weight):
            codes.give_back(weight)
