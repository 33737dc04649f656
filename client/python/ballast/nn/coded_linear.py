"""A linear layer whose weight may be the codes that the daemon serves."""

from __future__ import annotations

import glob
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ballast.errors import Rejected
from ballast.nn.products import Arithmetic, multiply
from ballast.served_codes import ServedCodes, encode
from ballast.weight_codes import WeightCodes, ask_for_codes, ask_no_more, codes_of

_COMPUTED = {torch.float32, torch.bfloat16, torch.float16}


class CodedLinear(nn.Linear):
    """nn.Linear that multiplies codes of 8 bits. Its weight and bias are those of an nn.Linear, and so is its state_dict().

    A run that serves the weight in `code_format` writes codes in its place with the first step: see `ballast.nn`. The
    parameter then holds one NaN, and no weights. state_dict() has them, decoded; a layer that is loaded, copied or moved
    (`to()`) has weights of its own again, until the next step. What else reads the parameter sees NaN: regularizers
    written by hand, averages by `parameters()`, a module that the weight is tied to.

    Rejected, by name: dtypes but fp32, bf16 and fp16; an input of another dtype than the weight, outside of autocast;
    weights that are not finite, on a CPU.
    """

    # What replaces() takes.
    replaced = "nn.Linear"
    # The wire's name of what it multiplies; None: codes with a scale that the daemon's do not have.
    code_format: str | None = None
    arithmetic: Arithmetic
    _keeps_weight = False
    # Shapes by so many on CUDA.
    _multiple = 8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self._codes = WeightCodes(self.code_format or "")
        super().__init__(in_features, out_features, bias, device, dtype)

    @classmethod
    def replaces(cls, module: nn.Module) -> bool:
        """Whether switch() may put such a layer in its place."""
        return type(module) is nn.Linear and "weight" in module._parameters  # else it was pruned, or the like

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        """What of such a module is an option of the layer."""
        return {}

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name == "weight" and param is not None:
            self._ask()

    def keep_weight(self) -> None:
        """The parameter keeps its weights, whatever they are served in: something else reads it too."""
        self._stand_back()
        self._keeps_weight = True

    @property
    def _parameter(self) -> Tensor | None:
        """The weight, where it is a parameter: not pruned, nor parametrized."""
        return self._parameters.get("weight")

    def _ask(self) -> None:
        weight = self._parameter
        # Of one column torch cannot tell whether something stands in.
        if weight is not None and self.code_format and not self._keeps_weight and weight.shape[-1] > 1:
            ask_for_codes(self, self._codes)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight, self.bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """weight: the layer's, or what its gradient is to go through."""
        x = self._computed(x)
        made = self.weight_codes()
        return multiply(x, weight, bias, made.codes, made.scales, self.arithmetic)

    @property
    def served(self) -> ServedCodes | None:
        """What was served, and is in the weight's place; None: the parameter has weights of its own."""
        weight = self._parameter
        return self._codes.served if weight is not None and self._codes.stands_in(weight) else None

    def weight_codes(self) -> ServedCodes:
        """What forward() multiplies: the codes that were served, or those of the weight as it is."""
        served = self._codes.served
        if (
            served is not None
            and self.weight.stride(-1) == 0
            and (is_compiling() or self._codes.stands_in(self.weight))
        ):
            return served
        made = self._encode(self.weight)
        told_by = made.scales if made.scales.numel() else self.weight
        real = type(told_by) in (Tensor, nn.Parameter) and told_by.device.type == "cpu"
        if real and not is_compiling() and not told_by.isfinite().all():
            raise Rejected("the weight of this layer holds a NaN or an infinity: no codes can be made of it")
        return made

    def _encode(self, weight: Tensor) -> ServedCodes:
        assert self.code_format is not None, "a layer without a format makes its own"
        return encode(weight, self.code_format)

    def _computed(self, x: Tensor) -> Tensor:
        """The input in the dtype of the output and of the weight's gradient: autocast's, else its own."""
        if x.is_nested:
            raise Rejected(
                f"a nested input for {self}: nn.TransformerEncoder makes one in evaluation with a padding mask. Call "
                "ballast.nn.switch on the encoder, or on a model that contains it, or write encoder.use_nested_tensor = False"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Rejected(
                f"an input of shape {tuple(x.shape)} for {self}: its last dimension is to be {self.in_features}"
            )
        kind = x.device.type
        dtype = _autocast_dtype(kind) or x.dtype
        if {dtype, x.dtype} - _COMPUTED or (_autocast_dtype(kind) is None and x.dtype != self.weight.dtype):
            raise Rejected(
                f"an input of {x.dtype} for {self}, whose weight is {self.weight.dtype}: both must be the same, and float32, "
                "bfloat16 or float16; or write torch.autocast"
            )
        self._check_shapes(kind)
        return x.to(dtype)

    def _check_shapes(self, kind: str) -> None:
        if kind == "cuda" and (self.in_features % self._multiple or self.out_features % self._multiple):
            raise Rejected(
                f"{self} on CUDA, whose 8-bit products take multiples of {self._multiple}: keep nn.Linear there, by another "
                "pattern of ballast.nn.switch"
            )

    # --- what torch does with modules -------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._stand_back()
        made = super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch declares none
        self._ask()  # to_empty() of a meta tensor makes another parameter
        return made

    def _stand_back(self) -> None:
        """The parameter has its weights, and nobody looks for it: torch may then put another into its place."""
        if self._parameter is not None:
            self._codes.give_back(self._parameter)
            ask_no_more(self)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        if prefix + "weight" in state_dict:
            self._stand_back()
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._ask()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        served = self.served
        if served is not None:
            destination[prefix + "weight"] = served.decode(self.weight.dtype)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_codes": WeightCodes(self._codes.format)}
        served = self.served
        if served is not None:
            weight = nn.Parameter(served.decode(self.weight.dtype), self.weight.requires_grad)
            state["_parameters"] = {**self._parameters, "weight": weight}
            # As unit-scaling's, but for its methods, which are of the parameter that had them.
            state["_of_weight"] = {name: value for name, value in vars(self.weight).items() if not callable(value)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        of_weight = state.pop("_of_weight", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call] # torch declares none
        if of_weight:
            vars(self.weight).update(of_weight)
        self._ask()


def served_formats(model: nn.Module) -> dict[str, dict[str, str]]:
    """The option `formats` that has the weights of the model's layers served in what they compute in. Rejected if no layer
    can take such: then nothing would be served so."""
    found: dict[str, dict[str, str]] = {}
    for name, parameter in model.named_parameters():
        codes = codes_of(parameter)
        if codes is not None and parameter.requires_grad:
            found[glob.escape(name)] = {"serving": codes.format}
    if not found:
        raise Rejected(
            "no layer of this model computes in codes that a daemon serves: call ballast.nn.switch(model, ...) first; "
            "Float8Linear takes them with scale=None"
        )
    return found


def _autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes matrix products in; None: it is off."""
    if kind == "meta":
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
