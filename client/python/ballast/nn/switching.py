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
    may be made before; hooks of the module go over, too. A weight that a module of another kind has as well (a head that is
    tied to an embedding) is quantized by the layer, and not taken as it is served.

    Rejected, and nothing is replaced: a pattern that matches none; the model itself is one.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    linears: dict[str, Any] = {name: module for name, module in model.named_modules() if layer.replaces(module)}
    if "" in linears:
        raise Rejected(
            f"the model is an {layer.replaced} itself, which cannot be replaced in place: write {layer.__name__} in its stead"
        )
    for one in patterns:
        if not any(fnmatchcase(name, one) for name in linears):
            known = ", ".join(list(linears)[:8]) + (", ..." if len(linears) > 8 else "")
            raise Rejected(f"switch: the pattern '{one}' matches no {layer.replaced}; there are {known or 'none'}")
    chosen = [name for name in linears if any(fnmatchcase(name, one) for one in patterns)]
    made = {name: _in_place_of(linears[name], layer, options) for name in chosen}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, module)
    _keep_tied(model, made.values())
    return chosen


def _in_place_of(linear: Any, layer: type[CodedLinear], options: dict[str, Any]) -> CodedLinear:
    options = {**layer.options_of(linear), **options}
    made = layer(linear.in_features, linear.out_features, linear.bias is not None, torch.device("meta"), **options)
    made.train(linear.training)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(made, name).update(getattr(linear, name))
    made.weight, made.bias = linear.weight, linear.bias
    return made


def _keep_tied(model: nn.Module, made: Iterable[CodedLinear]) -> None:
    """Layers whose weight another module reads too go on with the weight itself."""
    readers: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers.setdefault(id(parameter), []).append(module)
    for layer in made:
        if not all(isinstance(module, CodedLinear) for module in readers[id(layer.weight)]):
            layer.keep_weight()
