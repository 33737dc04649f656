"""The trainer's own state, kept by the daemon between two steps: of the LR scheduler, the data loader, random numbers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ballast.errors import Rejected


class ClientStates:
    """Named pieces of state, as one string of bytes and back.

    Written by torch.save and read with weights_only=True, so that what comes from the network runs no code: containers,
    numbers, strings, bytes and tensors.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        self._schedulers: list[LRScheduler] = []
        self._tried: set[str] = set()  # known to be read back

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, name: str, get: Any, set: Callable[[Any], object] | None) -> None:
        if name in self._pieces:
            raise Rejected(f"client state '{name}' is registered already: give each its own name")
        if set is None:
            if not hasattr(get, "state_dict") or not hasattr(get, "load_state_dict"):
                raise Rejected(
                    f"client state '{name}': {type(get).__name__} has no state_dict() and load_state_dict(); give two "
                    "functions, get and set"
                )
            if isinstance(get, LRScheduler) and not isinstance(get, ReduceLROnPlateau):
                self._schedulers.append(get)
            get, set = get.state_dict, get.load_state_dict
        self._pieces[name] = get, set

    def collect(self, optimizer: Callable[[], Any]) -> bytes:
        """All of it now, and the optimizer's state_dict. Empty if nothing is registered."""
        if not self._pieces:
            return b""
        state = {name: get() for name, (get, _) in self._pieces.items()}
        for name in self._pieces.keys() - self._tried:
            self._try(name, state[name])
        return _write({"optimizer": optimizer(), "registered": state})

    def restore(self, state: bytes, optimizer: Callable[[Any], object]) -> dict[str, Any]:
        """Puts back the optimizer's and what is registered under the names in `state`; returns the pieces by name."""
        whole = _read(state)
        optimizer(whole["optimizer"])
        pieces: dict[str, Any] = whole["registered"]
        for name, piece in pieces.items():
            if name in self._pieces:
                self._pieces[name][1](piece)
        return pieces

    def step_schedulers(self) -> None:
        """Those registered as objects, but ReduceLROnPlateau, which needs the figure that it watches."""
        for scheduler in self._schedulers:
            scheduler.step()

    def lacking(self, pieces: Iterable[str]) -> list[str]:
        """The registered names that are not among these."""
        return [name for name in self._pieces if name not in set(pieces)]

    def _try(self, name: str, piece: Any) -> None:
        try:
            _read(_write(piece))
        except (pickle.UnpicklingError, pickle.PicklingError, TypeError, AttributeError) as error:
            raise Rejected(
                f"client state '{name}' cannot be kept: only dicts, lists, tuples, numbers, strings, bytes and tensors are "
                f"read back ({str(error).splitlines()[0]})"
            ) from error
        self._tried.add(name)


def _write(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _read(state: bytes) -> Any:
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
