"""safetensors: the header is written first, then one tensor after the other; read through the package of that name.

An optimizer's state is the tensors state.NAME.SLOT, NAME being a parameter's name or number; what is no tensor, and
the param_groups, is JSON in the header's __metadata__ under "ballast.optimizer". The layout of the file is the
format's own: 8 bytes with the header's length, the header (JSON, padded with spaces to a multiple of 8), the tensors
without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ballast.convert.lazy import LazyTensor, constant, raw_bytes
from ballast.errors import Rejected

KEY = "ballast.optimizer"
LARGEST_HEADER = 100_000_000  # bytes; readers of the format refuse more
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


# --- tensors by name ------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """All tensors by name, mapped from the file, and the __metadata__. Their order means nothing: writers sort them.
    Rejected if the package is not installed or the file is not as the format says."""
    package: Any = _package(path)
    try:
        file = package.safe_open(str(path), framework="pt", device="cpu")
        metadata = dict(file.metadata() or {})
        return {name: _lazy(file, name, path) for name in file.keys()}, metadata
    except package.SafetensorError as error:
        raise Rejected(f"{path} cannot be read as safetensors: {error}") from None


def _package(path: Path) -> Any:
    try:
        return import_module("safetensors")
    except ModuleNotFoundError as error:
        if error.name != "safetensors":
            raise
        raise Rejected(
            f"{path}: to read safetensors the package safetensors is needed: pip install safetensors (or "
            "ballast-optim[convert])"
        ) from None


def _lazy(file: Any, name: str, path: Path) -> LazyTensor:
    part = file.get_slice(name)
    dtype = _NAMES.get(part.get_dtype())
    if dtype is None:
        raise Rejected(f"{path}: {name} has dtype {part.get_dtype()}: converted are {', '.join(_NAMES)}")
    return LazyTensor(tuple(part.get_shape()), dtype, lambda: file.get_tensor(name))


def write_tensors(
    path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str], wrote: Callable[[int], object]
) -> None:
    """Writes them, larger dtypes first so that each is aligned. One tensor is in memory at a time; wrote(n) is called
    after each, with its bytes. Rejected if a dtype or the header does not fit the format; OSError as the file
    system's."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    order = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    offset = 0
    for name, tensor in order:
        if tensor.dtype not in _DTYPES:
            raise Rejected(f"{name} has dtype {tensor.dtype}: safetensors files are written with {', '.join(_NAMES)}")
        end = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise Rejected(f"the header would have {len(text)} bytes, and safetensors files have {LARGEST_HEADER} at most")
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in order:
            file.write(raw_bytes(tensor.read()))
            wrote(tensor.nbytes)


# --- an optimizer's state -------------------------------------------------------------------------------------------


def read_tree(path: Path) -> dict[str, Any]:
    """The state_dict in a file that write_tree() made. Rejected if it is another: it would have no param_groups."""
    tensors, metadata = read_tensors(path)
    if KEY not in metadata:
        raise Rejected(
            f"{path} has no {KEY!r} in its __metadata__, so it holds no param_groups: of safetensors files only those "
            "that ballast.convert wrote are read as an optimizer's state"
        )
    try:
        rest = json.loads(metadata[KEY])
        groups = [{option: _from_json(value) for option, value in group.items()} for group in rest["param_groups"]]
        keys = [key for group in groups for key in group["params"]]
        state: dict[Any, dict[str, Any]] = {key: {} for key in keys}
        by_text = {str(key): key for key in keys}
        for text, slot, value in rest["numbers"]:
            state[by_text[text]][slot] = value
        for name, tensor in tensors.items():
            text, _, slot = name.removeprefix("state.").rpartition(".")
            state[by_text[text]][slot] = tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Rejected(f"{path}: {KEY!r} in its __metadata__ is damaged: {error!r}") from None
    return {"state": {key: own for key, own in state.items() if own}, "param_groups": groups}


def write_tree(path: Path, tree: dict[str, Any], wrote: Callable[[int], object]) -> None:
    """Writes a state_dict whose tensors are LazyTensor; as write_tensors()."""
    tensors: dict[str, LazyTensor] = {}
    numbers = []
    for key, state in tree["state"].items():
        for slot, value in state.items():
            if "." in slot:
                raise Rejected(f"parameter {key}: slot {slot!r} has a dot, which separates names here: --drop {slot}")
            if isinstance(value, LazyTensor):
                tensors[f"state.{key}.{slot}"] = value
            else:
                numbers.append([str(key), slot, value])
    groups = [
        {option: _to_json(value, f"param_groups[{number}]['{option}']") for option, value in group.items()}
        for number, group in enumerate(tree["param_groups"])
    ]
    rest = json.dumps({"version": 1, "param_groups": groups, "numbers": numbers})
    write_tensors(path, tensors, {KEY: rest}, wrote)


def _to_json(value: Any, label: str) -> Any:
    """A tuple and a tensor of one number as a dict that says so: JSON has neither."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_to_json(one, label) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(one, label) for one in value]}
    if isinstance(value, LazyTensor) and value.is_scalar and value.dtype in _DTYPES:
        return {"tensor": value.item(), "dtype": _DTYPES[value.dtype]}
    raise Rejected(f"{label} is {type(value).__name__}: a safetensors file holds numbers, text and lists of them")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(one) for one in value["tuple"])
    return constant(torch.tensor(value["tensor"], dtype=_NAMES[value["dtype"]], device="cpu"))
