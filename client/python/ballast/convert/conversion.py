"""ballast.convert.convert: from one format to another, by way of torch's state_dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ballast.checkpoint.folders import is_checkpoint
from ballast.convert import dcp_folder, dynamic8, flash8, safetensors_file, torch_file, trainer_folder
from ballast.convert.checkpoint import Checkpoint, Value, from_state_dict, slots_in
from ballast.convert.comparison import SlotError, bounds_of, compare
from ballast.convert.dcp_index import INDEX
from ballast.convert.formats import ALONE, FOLDERS, FORMATS, SYSTEMS, are_keys
from ballast.convert.lazy import LazyTensor
from ballast.convert.model_state import ModelState, model_file, read_model
from ballast.convert.names import assign_names, check_shapes_occur, need_names, need_order
from ballast.convert.output import check_free, replacing
from ballast.convert.progress import Progress
from ballast.convert.tree import find_optimizer
from ballast.errors import Rejected

AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """source: the format that IN was found to have. system: whose state it holds: "torch", "flashoptim" or
    "bitsandbytes". parameters, nbytes: of the state, before it is encoded. errors: by slot, where it was verified;
    else None."""

    source: str
    system: str
    parameters: int
    nbytes: int
    errors: tuple[SlotError, ...] | None


class VerifyFailed(Rejected):
    """What was written is not what was read, within the format's bound; it is deleted again. errors: by slot."""

    def __init__(self, errors: tuple[SlotError, ...], why: str = ""):
        told = "; ".join(str(error) for error in errors if not error.ok)
        super().__init__(f"verify: {told}. {why}OUT is not kept", "DATA_LOSS")
        self.errors = errors


@dataclass(frozen=True)
class _Choices:
    """What convert() was asked, but for IN and OUT."""

    to: str
    source_format: str | None
    names: tuple[Path, ...]
    part: str | None
    out_part: str
    state1: str | None
    drop: tuple[str, ...]


@dataclass(frozen=True)
class _Source:
    """What was read: the state as the file has it, and by torch's slots."""

    format: str
    system: str
    checkpoint: Checkpoint
    model: ModelState | None


def convert(
    source: AnyPath,
    out: AnyPath,
    to: str,
    *,
    source_format: str | None = None,
    names: Sequence[AnyPath] = (),
    part: str | None = None,
    out_part: str = "optimizer",
    state1: str | None = None,
    drop: Sequence[str] = (),
    overwrite: bool = False,
    verify: bool = False,
    progress: TextIO | None = None,
) -> Report:
    """Writes the optimizer's state in `source` to `out` in the format `to`. Needs no daemon; one or two tensors are in
    memory at a time. `out` is made whole or not at all.

    to, source_format: of FORMATS; source_format None: found out. names: a model's state dict (files or a folder), or a
    text file with a name a line: gives numbered parameters their names; and FlashOptim's low bits their upper halves.
    part: where in IN the optimizer is, as keys joined by dots; out_part: where in a folder of
    torch.distributed.checkpoint it is put. state1: what bitsandbytes' state1 is where there is no state2 (exp_avg,
    momentum_buffer, square_avg or sum). drop: slots to leave out. overwrite: replace an `out` that exists. verify:
    read `out` again and compare. progress: a stream to tell how far it is.

    Raises Rejected, saying what is wrong and what to do, where an argument or IN is not as needed; VerifyFailed;
    OSError as the file system's. May be called from any thread.
    """
    into, at = Path(out), Path(source)
    _check_format("to", to)
    if source_format is not None:
        _check_format("from", source_format)
    if state1 is not None and state1 not in ALONE:
        raise Rejected(f"--state1 {state1}: wanted {', '.join(ALONE)}")
    if not are_keys(out_part):
        raise Rejected(f"--out-part {out_part!r}: wanted keys joined by dots, as in app.optim")
    _check_places(at, into, to)
    check_free(into, overwrite)
    choices = _Choices(to, source_format, tuple(map(Path, names)), part, out_part, state1, tuple(drop))
    read = _read(at, choices)
    if to == "hf-trainer":
        trainer_folder.need_model(at, read.model)
    target = _encoded(read, to)
    errors: tuple[SlotError, ...] | None = None
    with replacing(into, overwrite) as partial:
        _with_progress("write", target, progress, lambda wrote: _write(partial, at, read, target, choices, wrote))
        if verify:
            errors = _verified(partial, read, choices, progress)
    nbytes = sum(tensor.nbytes for tensor in read.checkpoint.tensors())
    return Report(read.format, read.system, len(read.checkpoint.parameters), nbytes, errors)


def _check_format(option: str, name: str) -> None:
    if name not in FORMATS:
        raise Rejected(f"--{option} {name}: wanted one of {', '.join(FORMATS)}")


def _check_places(source: Path, out: Path, to: str) -> None:
    if not source.exists():
        raise Rejected(f"{source}: there is no such file or folder")
    inside, around = out.resolve(), source.resolve()
    if inside == around or around.is_relative_to(inside):
        raise Rejected(f"OUT {out} is IN, or holds it: write the result beside it")
    if to == "hf-trainer" and inside.is_relative_to(around):
        raise Rejected(f"OUT {out} lies in IN, whose files are copied: write the result beside it")


# --- in -------------------------------------------------------------------------------------------------------------


def container_of(path: Path) -> str:
    """What a path is, by its first bytes or its files: "torch", "safetensors", "dcp" or "hf-trainer". Rejected if
    none."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return "dcp"
        if trainer_folder.is_folder(path):
            return "hf-trainer"
        if is_checkpoint(path):
            raise Rejected(
                f"{path} is a checkpoint of a daemon, and no optimizer wrote it: ballast.checkpoint.open() reads its weights and "
                "moments, and a trainer that goes on with the run saves them by state_dict()"
            )
        raise Rejected(
            f"{path} is a folder with neither {INDEX} (torch.distributed.checkpoint) nor optimizer.pt (Trainer): give "
            "the folder that holds one of these"
        )
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(b"PK\x03\x04") or path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return "torch"
    if start[8:] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    raise Rejected(f"{path} is neither a file of torch.save nor safetensors: give what an optimizer was saved to")


_READERS: dict[str, Callable[[Path], Any]] = {
    "torch": torch_file.read_tree,
    "safetensors": safetensors_file.read_tree,
    "dcp": dcp_folder.read_tree,
    "hf-trainer": trainer_folder.read_tree,
}


def _read(path: Path, choices: _Choices) -> _Source:
    """IN, by torch's slots, without what is dropped, with names where they are given."""
    container, wanted = container_of(path), choices.source_format
    if wanted is not None and wanted not in SYSTEMS and wanted != container:
        raise Rejected(f"--from {wanted}: {path} is {container}")
    tree = find_optimizer(_READERS[container](path), choices.part, str(path))
    checkpoint = from_state_dict(tree, str(path), choices.drop)
    system = _system_of(checkpoint)
    if wanted in SYSTEMS and wanted != system:
        raise Rejected(f"--from {wanted}: {path} holds {system}'s state")
    model = read_model(choices.names) if choices.names else None
    if model is None and container == "hf-trainer":
        model = _model_beside(path, checkpoint, choices.to)
    if model is not None:
        checkpoint = _named(checkpoint, model, choices)
    by_slots = _by_torchs_slots(checkpoint, model, choices)
    if never := set(choices.drop) - slots_in(tree) - _slots(by_slots):
        raise Rejected(
            f"--drop {sorted(never)[0]}: no parameter of {path} has it; there are {', '.join(_slots(by_slots))}"
        )
    parameters = [replace(p, state=_without(p.state, choices.drop)) for p in by_slots.parameters]
    return _Source(container, system, replace(by_slots, parameters=parameters), model)


def _named(checkpoint: Checkpoint, model: ModelState, choices: _Choices) -> Checkpoint:
    if model.order is None and not checkpoint.is_named and (choices.to == "hf-trainer" or not choices.names):
        check_shapes_occur(checkpoint, model)  # its weights are wanted, and no names
        return checkpoint
    return assign_names(checkpoint, model)


def _model_beside(folder: Path, checkpoint: Checkpoint, to: str) -> ModelState | None:
    """The model that Trainer keeps with its optimizer, where the conversion does not go without: for names, of a file
    that has their order, and for master weights."""
    found = model_file(folder)
    slots = _slots(checkpoint)
    for_names = to == "dcp" and not checkpoint.is_named and found is not None and ".bin" in found.name
    for_masters = flash8.BITS in slots or (to == "flashoptim" and "master" in slots)
    return read_model([found]) if found is not None and (for_names or for_masters) else None


def _without(state: dict[str, Value], drop: Sequence[str]) -> dict[str, Value]:
    return {slot: value for slot, value in state.items() if slot not in drop}


def _system_of(checkpoint: Checkpoint) -> str:
    states = [parameter.state for parameter in checkpoint.parameters]
    if any(map(dynamic8.is_state, states)):
        return "bitsandbytes"
    return "flashoptim" if any(map(flash8.is_state, states)) else "torch"


def _by_torchs_slots(checkpoint: Checkpoint, model: ModelState | None, choices: _Choices) -> Checkpoint:
    parameters = []
    for index, parameter in enumerate(checkpoint.parameters):
        label, state = checkpoint.label(index), parameter.state
        if dynamic8.is_state(state):
            state = dynamic8.decode(state, choices.state1, label)
        elif flash8.is_state(state):
            options = checkpoint.groups[parameter.group]
            state = flash8.decode(parameter, options, _weight(model, parameter.name), label)
        parameters.append(replace(parameter, state=state))
    # What FlashOptim calls the width of its low bits says nothing of a master weight that is whole.
    groups = [{k: v for k, v in options.items() if k != flash8.WIDTH} for options in checkpoint.groups]
    return Checkpoint(parameters, groups, checkpoint.ordered)


def _weight(model: ModelState | None, name: str | None) -> LazyTensor | None:
    return None if model is None or name is None else model.weights.get(name)


# --- out ------------------------------------------------------------------------------------------------------------


def _encoded(read: _Source, to: str) -> Checkpoint:
    """The state as the format has it. Rejected if the format lacks what it needs: names, or an order."""
    checkpoint = read.checkpoint
    if to == "dcp":
        need_names(checkpoint, to)
    elif to != "safetensors":
        need_order(checkpoint, to)
    if to not in SYSTEMS:
        return checkpoint
    parameters, has_masters = [], set()
    for index, parameter in enumerate(checkpoint.parameters):
        label, state = checkpoint.label(index), parameter.state
        if to == "bitsandbytes":
            made: dict[str, Value] = dynamic8.encode(state, label)
        else:
            made = flash8.encode(state, _weight(read.model, parameter.name), label)
            has_masters |= {parameter.group} if flash8.BITS in made else set()
        parameters.append(replace(parameter, state=made))
    groups = [dict(options) for options in checkpoint.groups]
    for number in has_masters:
        groups[number][flash8.WIDTH] = 3
    if to == "bitsandbytes":
        groups = [dynamic8.options_for(options) for options in groups]
    return Checkpoint(parameters, groups, checkpoint.ordered)


def _write(
    partial: Path, source: Path, read: _Source, target: Checkpoint, choices: _Choices, wrote: Callable[[int], object]
) -> None:
    to = choices.to
    by_name = to == "dcp" or (to == "safetensors" and target.is_named)
    tree: dict[str, Any] = target.as_state_dict(by_name)
    if to in FOLDERS:
        partial.mkdir()
    if to == "dcp":
        for key in reversed(choices.out_part.split(".")):
            tree = {key: tree}
        dcp_folder.write_tree(partial, tree, wrote)
    elif to == "hf-trainer":
        trainer_folder.write_tree(partial, tree, source, read.model, wrote)
    elif to == "safetensors":
        safetensors_file.write_tree(partial, tree, wrote)
    else:
        torch_file.write_tree(partial, tree, wrote)


def _verified(partial: Path, read: _Source, choices: _Choices, progress: TextIO | None) -> tuple[SlotError, ...]:
    tree = find_optimizer(_READERS[_container_for(choices.to)](partial), None, str(partial))
    came = from_state_dict(tree, str(partial))
    single = "momentum_buffer" if "momentum_buffer" in _slots(read.checkpoint) else "exp_avg"
    again = replace(choices, state1=single, drop=())
    got = _by_torchs_slots(came, read.model, again)
    bounds = bounds_of(choices.to)
    errors: tuple[SlotError, ...] = _with_progress(
        "verify", read.checkpoint, progress, lambda compared: compare(read.checkpoint, got, bounds, compared)
    )
    if not all(error.ok for error in errors):
        raise VerifyFailed(errors, flash8.COARSE if choices.to == "flashoptim" else "")
    return errors


def _slots(checkpoint: Checkpoint) -> set[str]:
    return {slot for parameter in checkpoint.parameters for slot in parameter.state}


def _container_for(to: str) -> str:
    return "torch" if to in SYSTEMS else to


def _with_progress(
    title: str, checkpoint: Checkpoint, stream: TextIO | None, work: Callable[[Callable[[int], None]], Any]
) -> Any:
    bar = Progress(title, sum(tensor.nbytes for tensor in checkpoint.tensors()), stream)
    try:
        return work(bar.advance)
    finally:
        bar.close()
