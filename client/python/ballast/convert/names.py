"""Which name each of an optimizer's numbered parameters has. A name that is not certain is not given."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ballast.convert.checkpoint import Checkpoint, Parameter
from ballast.convert.model_state import ModelState
from ballast.errors import Rejected

LIST = (
    "write the optimizer's parameter names into a text file, one a line, group after group, and give it as --names "
    "FILE.txt"
)


def assign_names(checkpoint: Checkpoint, model: ModelState) -> Checkpoint:
    """The checkpoint with the model's names, or, if it has names, in the model's order where its own is not known.

    A text file has the optimizer's order. A model's is that of an optimizer with one param_group; with more, each
    group is taken to have the model's order, and names are dealt out as long as shapes leave one way. Rejected, by
    name, if counts or shapes differ, or there is more than one way.
    """
    if checkpoint.is_named:
        _check_shapes(checkpoint, model)
        return checkpoint if checkpoint.ordered else _put_in_order(checkpoint, model)
    names = model.order
    if names is None:
        raise Rejected(
            f"--names {model.where}: safetensors sorts names, so their order is not the model's, by which the "
            f"optimizer numbers parameters: give the model as torch.save wrote it (pytorch_model.bin), or {LIST}"
        )
    if len(names) != len(checkpoint.parameters):
        raise Rejected(_why_counts_differ(checkpoint, model, names))
    if len(checkpoint.groups) > 1 and not model.listed:
        names = _dealt_out(checkpoint, model, names)
    parameters = [replace(parameter, name=name) for name, parameter in zip(names, checkpoint.parameters)]
    named = Checkpoint(parameters, checkpoint.groups)
    _check_shapes(named, model)
    return named


def _why_counts_differ(checkpoint: Checkpoint, model: ModelState, names: list[str]) -> str:
    first = ""
    for name, parameter in zip(names, checkpoint.parameters):
        if len(checkpoint.groups) == 1 and not _fits(parameter, model, name):
            first = f" The first that differs is {name}, of shape {model.shape(name)}, for {parameter.shape}."
            break
    return (
        f"--names {model.where} has {len(names)} parameters, the optimizer {len(checkpoint.parameters)}: buffers or "
        f"frozen parameters may be among them.{first} Give the model of this optimizer, or {LIST}"
    )


def _fits(parameter: Parameter, model: ModelState, name: str) -> bool:
    shape = model.shape(name)
    return shape is None or parameter.shape is None or parameter.shape == shape


def _check_shapes(checkpoint: Checkpoint, model: ModelState) -> None:
    for index, parameter in enumerate(checkpoint.parameters):
        name = str(parameter.name)
        if not model.has(name):
            raise Rejected(f"--names {model.where} has no {name}, which the optimizer has: it is another model's")
        if not _fits(parameter, model, name):
            raise Rejected(
                f"{checkpoint.label(index)}, has state of shape {parameter.shape}, and --names {model.where} has it as "
                f"{model.shape(name)}: it is another model's, or its parameters are in another order: {LIST}"
            )


def check_shapes_occur(checkpoint: Checkpoint, model: ModelState) -> None:
    """Rejected unless the model has a weight of the shape of each parameter: all that can be told without names."""
    left = Counter(weight.shape for weight in model.weights.values())
    left.subtract(parameter.shape for parameter in checkpoint.parameters if parameter.shape is not None)
    if lacking := [shape for shape, count in left.items() if count < 0]:
        raise Rejected(
            f"{model.where} has fewer weights of shape {lacking[0]} than the optimizer: it is another model's"
        )


def _dealt_out(checkpoint: Checkpoint, model: ModelState, names: list[str]) -> list[str]:
    """The names, group after group. Each in turn goes to the group whose next parameter has its shape; where that is
    more than one group's, it is not known which, and rejected."""
    groups: list[list[Parameter]] = [[] for _ in checkpoint.groups]
    for parameter in checkpoint.parameters:
        groups[parameter.group].append(parameter)
    dealt: list[list[str]] = [[] for _ in groups]
    for name in names:
        waiting = [n for n, group in enumerate(groups) if len(dealt[n]) < len(group)]
        fitting = [n for n in waiting if _fits(groups[n][len(dealt[n])], model, name)]
        if len(fitting) != 1:
            why = "may belong to more than one of" if fitting else "fits none of"
            raise Rejected(
                f"--names {model.where}: {name}, of shape {model.shape(name)}, {why} the {len(groups)} param_groups: "
                f"{LIST}"
            )
        dealt[fitting[0]].append(name)
    return [name for group in dealt for name in group]


def _put_in_order(checkpoint: Checkpoint, model: ModelState) -> Checkpoint:
    """Of a flat state_dict, which has no order: the model's where there is one group, or the text file's."""
    if model.order is None or (len(checkpoint.groups) > 1 and not model.listed):
        return checkpoint
    place = {name: index for index, name in enumerate(model.order)}
    if lost := [parameter.name for parameter in checkpoint.parameters if parameter.name not in place]:
        raise Rejected(f"--names {model.where} does not list {lost[0]}, which the optimizer has")
    parameters = sorted(checkpoint.parameters, key=lambda parameter: place[str(parameter.name)])
    numbers = list(dict.fromkeys(parameter.group for parameter in parameters))
    moved = [replace(parameter, group=numbers.index(parameter.group)) for parameter in parameters]
    if any(a.group > b.group for a, b in zip(moved, moved[1:])):
        raise Rejected(f"--names {model.where}: parameters with the same options do not follow each other: {LIST}")
    return Checkpoint(moved, [checkpoint.groups[number] for number in numbers])


def need_names(checkpoint: Checkpoint, to: str) -> None:
    """Rejected unless all parameters have names."""
    if not checkpoint.is_named:
        raise Rejected(
            f"--to {to} goes by names, and the optimizer's parameters are numbered: give the model's state dict with "
            f"--names MODEL_STATE, or {LIST}"
        )


def need_order(checkpoint: Checkpoint, to: str) -> None:
    """Rejected unless the order of parameters is known."""
    if not checkpoint.ordered:
        raise Rejected(
            f"--to {to} goes by number, and a flat state_dict has names and no order: give the model as torch.save "
            f"wrote it with --names MODEL_STATE, or, if there is more than one param_group, {LIST}"
        )
