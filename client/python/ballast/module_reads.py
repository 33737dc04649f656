"""Weights that are read from modules otherwise than by a forward: saved, averaged, compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ballast.patch import Patch

Read = Callable[[Iterable[Tensor], bool], None]


class ModuleReads:
    """Calls `read(parameters, False)`, which says that no forward does, before any nn.Module's state_dict() reads them or
    load_state_dict() writes them, before to() and its like (half(), share_memory()) convert or move them, before parameters()
    or named_parameters() hands each out, and before one is copied or pickled. Holds `read`'s object weakly. An attribute of a
    module that is read by its name is not seen, nor a list of parameters that was made before."""

    def __init__(self, read: Read):
        self._read = weakref.WeakMethod(read)
        _readers.hold(self)

    def tell(self, parameters: Iterable[Tensor]) -> None:
        read = self._read()
        if read is not None:
            read(parameters, False)

    def remove(self) -> None:
        """With the last one torch's own methods are put back."""
        _readers.release(self)


def _tell(parameters: list[Tensor]) -> None:
    for reader in _readers:
        reader.tell(parameters)


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method that reads the module's own parameters, and calls that of the modules below it."""

    def reading(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            _tell([parameter for parameter in self._parameters.values() if parameter is not None])
        return original(self, *args, **kwargs)

    return reading


def _named_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in original(self, *args, **kwargs):
            if not is_compiling():
                _tell([parameter])
            yield name, parameter

    return named_parameters


def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _tell([p for module in self.modules() for p in module._parameters.values() if p is not None])
        return original(self, *args, **kwargs)

    return load_state_dict


def _copied(original: Callable[..., Any]) -> Callable[..., Any]:
    def copied(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        _tell([self])
        return original(self, *args, **kwargs)

    return copied


_readers: Patch[ModuleReads] = Patch(
    (nn.Module, "state_dict", _reading),
    (nn.Module, "_apply", _reading),
    (nn.Module, "load_state_dict", _load_state_dict),
    (nn.Module, "named_parameters", _named_parameters),
    (nn.Parameter, "__deepcopy__", _copied),
    (nn.Parameter, "__reduce_ex__", _copied),
)
