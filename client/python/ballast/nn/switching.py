"""Layers of a model in the place of others."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ballast.errors import Rejected
from ballast.nn.coded_linear import CodedLinear
from ballast.nn.switchback import SwitchBackLinear


def switch(
    model: nn.Module, pattern: str | Iterable[str] = "*", layer: type[CodedLinear] = SwitchBackLinear, **options: Any
) -> list[str]:
    """Replaces each nn.Linear (or what else `layer` replaces) whose name matches by a `layer` with the same weight and bias,
    in place; returns their names.

    pattern: of the modules' names (fnmatch), or several: "blocks.*", or ["*.fc1", "*.fc2"]. options: of the layer, as
    variant="q". Subclasses of nn.Linear stay as they are. The parameters are the same objects, so that an optimizer
    may be made before; hooks of the module go over, too. A weight that another module has as well (a head that is tied to an
    embedding) is quantized by the layer, and not taken as it is served.

    Rejected, and nothing is replaced: a pattern that matches none; the model itself is one.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    everywhere = model.named_modules(remove_duplicate=False)
    linears: dict[str, Any] = {name: module for name, module in everywhere if layer.replaces(module)}
    if "" in linears:
        raise Rejected(
            f"the model is an {layer.replaced} itself, which cannot be replaced in place: write {layer.__name__} in its stead"
        )
    for one in patterns:
        if not any(fnmatchcase(name, one) for name in linears):
            known = ", ".join(list(linears)[:8]) + (", ..." if len(linears) > 8 else "")
            raise Rejected(f"switch: the pattern '{one}' matches no {layer.replaced}; there are {known or 'none'}")
    chosen = [name for name in linears if any(fnmatchcase(name, one) for one in patterns)]
    made: dict[int, CodedLinear] = {}
    for name in chosen:
        if id(linears[name]) not in made:  # a module may be in two places
            made[id(linears[name])] = _in_place_of(linears[name], layer, options)
    for name in chosen:
        put = made[id(linears[name])]
        _take_over(linears[name], put)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, put)
    _keep_read(model)
    return chosen


def _in_place_of(linear: Any, layer: type[CodedLinear], options: dict[str, Any]) -> CodedLinear:
    options = {**layer.options_of(linear), **options}
    return layer(linear.in_features, linear.out_features, linear.bias is not None, torch.device("meta"), **options)


def _take_over(linear: Any, made: CodedLinear) -> None:
    """Parameters, mode and hooks; whoever holds a hook's handle removes it here, too."""
    made.train(linear.training)
    made.weight, made.bias = linear.weight, linear.bias
    made.__dict__.update((name, kept) for name, kept in vars(linear).items() if "hook" in name and name in vars(made))


def _keep_read(model: nn.Module) -> None:
    """Where something else reads a layer's weight, that stays as it is: another module that has it, or another layer, which
    would want codes of its own. An encoder layer that would read it in evaluation is kept from that, and an encoder from
    making its input nested, which that reading alone takes."""
    readers: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers.setdefault(id(parameter), []).append(module)
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(m, CodedLinear) for m in module.children()
        ):
            module.activation_relu_or_gelu = 0  # which its fast path asks for
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, CodedLinear) for m in module.modules()):
            module.use_nested_tensor = False
    for reading in readers.values():
        for module in reading if len(reading) > 1 else []:
            if isinstance(module, CodedLinear):
                module.keep_weight()
