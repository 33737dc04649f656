"""The state of a run as an optimizer's state_dict() has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from ballast import _core
from ballast.errors import Rejected
from ballast.moments import Moments

# What the option saved_state may be; None is "full" up to so many parameters, which then take 8 or 12 GB of host memory.
SAVED_STATES = (None, "full", "reference")
FULL_STATE_PARAMETERS = 1_000_000_000
# The key that the token has in a state_dict.
TOKEN = "ballast"


def saved_state(given: Any) -> str | None:
    """The option, checked."""
    if given not in SAVED_STATES:
        raise Rejected(f"saved_state={given!r}: it must be 'full', 'reference' or None")
    return None if given is None else str(given)


@dataclass(frozen=True)
class Token:
    """Which state of which run a state_dict is of.

    generation: of the run; None: it is not told. digest: of the tensors beside it, so that a change of them is seen; None:
    there are none, and the state is with the daemon.
    """

    run: str
    step: int
    generation: int | None = None
    digest: str | None = None

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Token | None:
        """None where it has none. Rejected if it cannot be read."""
        fields = state_dict.get(TOKEN)
        if fields is None:
            return None
        try:
            return Token(**fields)
        except TypeError as error:
            raise Rejected(f"this state_dict's {TOKEN!r} is {fields!r}, which this version cannot read") from error


@dataclass(frozen=True)
class SavedState:
    """What load_state_dict() was given beside the options of param_groups, until the run has it.

    moments: by id(parameter). intact: the tensors are those that the token was made with.
    """

    moments: Mapping[int, Moments]
    token: Token | None
    intact: bool

    def is_told(self, told: Token | None, step: int) -> bool:
        """Whether this is what was `told` last of the state that the run has, after `step`. A token alone does not say so: a
        run may have been deleted and begun anew under its name."""
        return self.intact and told is not None and self.token == told and told.step == step

    def as_state(self, parameters: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        """The "state" of a torch state_dict of these parameters, in their order."""
        found = ((index, self.moments.get(id(parameter))) for index, parameter in enumerate(parameters))
        return {index: moments.as_state() for index, moments in found if moments is not None}


def digest_of(state: Mapping[int, Mapping[str, Tensor]]) -> str:
    """Of the bits of all tensors, which are contiguous and in host memory, their names and places."""
    whole = blake2b(digest_size=16)
    for index in sorted(state):
        for name in sorted(state[index]):
            tensor = state[index][name]
            whole.update(f"{index} {name} {_core.digest(tensor.data_ptr(), tensor.nbytes)};".encode())
    return whole.hexdigest()
