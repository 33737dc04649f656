"""Which parameters of a module a run's tensors are, and their weights on the way there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ballast import _core
from ballast.errors import Rejected
from ballast.parameters import DTYPES
from ballast.shard import is_sharded

# The run's name of a tensor: the module's name of its parameter, or None, which leaves the tensor out.
Names = Mapping[str, str | None] | Callable[[str], str | None]

_MOST_NAMED = 5  # names in an error
# What wrappers put before names: DistributedDataParallel and DataParallel, torch.compile.
_PREFIXES = ("module.", "_orig_mod.")


def listed(names: Sequence[str]) -> str:
    """A few of them, for a message."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def bare(name: str) -> str:
    """Without what wrappers have put into it."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name.replace("._orig_mod.", ".")


class FollowedParameters:
    """The parameters of a module that a run's tensors are, by tensor. Rejected, by name, if a tensor is none, or does not
    fit. names: as ballast.follow takes it. One thread at a time.

    unfollowed: names of the module's parameters that the run does not have.
    """

    def __init__(self, run: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]], module: nn.Module, names: Any):
        self.names = [name for name, _, _ in tensors]
        self._tensors = tensors
        of_module = dict(module.named_parameters(remove_duplicate=False))
        self._parameters = _matched(run, self.names, of_module, names)
        _check_fit(run, tensors, self._parameters)
        self._ids = {id(parameter) for parameter in self._parameters.values()}
        self.unfollowed = [name for name, p in module.named_parameters() if id(p) not in self._ids]
        self._left: dict[int, tuple[int, int]] = {}  # by tensor: its mark when write() had written it
        self._staging = Staging()

    def __len__(self) -> int:
        return len(self._parameters)

    def shared_with(self, other: FollowedParameters) -> list[str]:
        """Names of the tensors whose parameters are followed there, too."""
        return [self.names[i] for i, parameter in self._parameters.items() if id(parameter) in other._ids]

    def are_of(self, module: nn.Module) -> bool:
        """Whether the module has all of them still, and they fit."""
        its_own = {id(parameter) for parameter in module.parameters()}
        return self._ids <= its_own and not any(
            _why_unfit(parameter, *self._tensors[i][1:]) for i, parameter in self._parameters.items()
        )

    @property
    def devices(self) -> set[torch.device]:
        """Where they are now; before torch has used a GPU that is the host, and nothing is looked through."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch declares none
            return {torch.device("cpu")}
        return {parameter.device for parameter in self._parameters.values()}

    def await_copies(self) -> None:
        """Until the weights are where write() has put them, for whoever reads them from another stream of a GPU."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def write(self, subscriber: _core.Subscriber, tensors: Iterable[int]) -> None:
        """Puts the subscriber's weights of these tensors into their parameters, and of those that others have written to since;
        those on a GPU get them in the order of its current stream."""
        places = []
        for i in sorted({*tensors, *self._overwritten()} & self._parameters.keys()):
            parameter = self._parameters[i]
            weights = parameter.detach()
            if weights.device.type == "cpu" and weights.is_contiguous():
                places.append((i, weights.data_ptr(), weights.nbytes))
            else:
                self._staging.write(subscriber, i, weights)
            if not parameter.is_inference():
                torch.autograd.graph.increment_version(parameter)
            self._left[i] = _mark(parameter)
        if places:
            subscriber.read(places)

    def _overwritten(self) -> list[int]:
        return [i for i, parameter in self._parameters.items() if self._left.get(i) != _mark(parameter)]


def _mark(parameter: Tensor) -> tuple[int, int]:
    """Where its weights are, and how often torch has changed them; it does not count that of inference tensors."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


class Staging:
    """Host memory for weights that do not land where the host can write: two pieces in turn, so that one is filled while the
    other is copied from."""

    def __init__(self) -> None:
        self._pieces: list[Tensor | None] = [None, None]
        self._copied: list[Any] = [None, None]  # events of the GPU's
        self._turn = 0

    def write(self, subscriber: _core.Subscriber, tensor: int, weights: Tensor) -> None:
        turn, on_gpu = self._turn, weights.device.type == "cuda"
        self._turn = 1 - turn
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
            self._copied[turn] = None
        piece = self._pieces[turn]
        if piece is None or piece.numel() < weights.nbytes or (on_gpu and not piece.is_pinned()):
            with torch.inference_mode(False):  # it is written to outside of one, too
                piece = torch.empty(weights.nbytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._pieces[turn] = piece
        subscriber.read([(tensor, piece.data_ptr(), weights.nbytes)])
        host = piece[: weights.nbytes].view(weights.dtype).view(weights.shape)
        with torch.no_grad():
            weights.copy_(host, non_blocking=on_gpu)
        if on_gpu:
            make_event: Any = torch.cuda.Event  # torch declares no types for it
            self._copied[turn] = make_event()
            self._copied[turn].record(torch.cuda.current_stream(weights.device))


# --- which is which ----------------------------------------------------------------------------------------------------


def _matched(
    run: str, tensors: Sequence[str], of_module: Mapping[str, nn.Parameter], names: Any
) -> dict[int, nn.Parameter]:
    if isinstance(names, Mapping) and (unknown := [name for name in names if name not in tensors]):
        raise Rejected(f"names has {listed(unknown)}, and run '{run}' has no such tensor: it has {listed(tensors)}")
    without = _without_prefixes(of_module)
    matched, missing = {}, []
    for i, tensor in enumerate(tensors):
        name = _meant(names, tensor)
        if name is None:
            continue
        parameter = of_module.get(name)
        if parameter is None:
            parameter = without.get(bare(name))
        if parameter is None:
            missing.append(tensor)
        else:
            matched[i] = parameter
    if missing:
        raise _unmatched(run, missing, of_module)
    _check_once(run, tensors, matched)
    return matched


def _meant(names: Any, tensor: str) -> str | None:
    if names is None:
        return tensor
    name = names(tensor) if callable(names) else names.get(tensor, tensor)
    if name is not None and not isinstance(name, str):
        raise Rejected(f"names says {name!r} of tensor '{tensor}': it must be a parameter's name, or None")
    return name


def _without_prefixes(of_module: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """By bare name, where that is one parameter's alone."""
    found: dict[str, nn.Parameter] = {}
    twice = set()
    for name, parameter in of_module.items():
        if found.setdefault(bare(name), parameter) is not parameter:
            twice.add(bare(name))
    return {name: parameter for name, parameter in found.items() if name not in twice}


def _unmatched(run: str, missing: Sequence[str], of_module: Mapping[str, nn.Parameter]) -> Rejected:
    unnamed = all(name.startswith("param.") and name[6:].isdecimal() for name in missing)
    fix = (
        "the trainer has given its optimizer parameters without names: give it model.named_parameters()"
        if unnamed
        else "give names={the run's name: the module's name, or None to leave it out}"
    )
    return Rejected(
        f"run '{run}' has {listed(missing)}, and the module has no such parameter: it has {listed(list(of_module))}; {fix}"
    )


def _check_once(run: str, tensors: Sequence[str], matched: Mapping[int, nn.Parameter]) -> None:
    owners: dict[int, str] = {}
    for i, parameter in matched.items():
        other = owners.setdefault(id(parameter), tensors[i])
        if other != tensors[i]:
            raise Rejected(
                f"tensors '{other}' and '{tensors[i]}' of run '{run}' are one parameter of the module: the trainer has not "
                "tied them, so untie them here"
            )


# --- whether it fits ---------------------------------------------------------------------------------------------------


def _check_fit(
    run: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]], parameters: Mapping[int, nn.Parameter]
) -> None:
    wrong = []
    for i, parameter in parameters.items():
        name, dtype, shape = tensors[i]
        reason = _why_unfit(parameter, dtype, shape)
        if reason:
            wrong.append(f"'{name}' {reason}")
    if wrong:
        more = "" if len(wrong) <= _MOST_NAMED else f"; and {len(wrong) - _MOST_NAMED} more"
        raise Rejected(f"the module does not fit run '{run}': {'; '.join(wrong[:_MOST_NAMED])}{more}")


def _why_unfit(p: nn.Parameter, dtype: str, shape: tuple[int, ...]) -> str | None:
    if is_sharded(p):
        return "is sharded here (a DTensor): follow with a module that is whole"
    if p.is_meta:
        return "is on the meta device: give it memory first (to_empty)"
    if p.layout != torch.strided:
        return f"has layout {p.layout}: make it dense (to_dense())"
    if tuple(p.shape) != shape:
        return f"has shape {tuple(p.shape)} here and {shape} in the run"
    if DTYPES.get(p.dtype) != dtype:
        wanted = next((str(known) for known, name in DTYPES.items() if name == dtype), dtype)
        in_its_own = f", or follow it in that dtype (format='{DTYPES[p.dtype]}')" if p.dtype in DTYPES else ""
        return f"is {p.dtype} here and {wanted} in the run: convert the module (module.to({wanted})){in_its_own}"
    return None
