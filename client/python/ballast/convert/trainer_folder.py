"""Folders of Hugging Face's Trainer (checkpoint-500 and its like): optimizer.pt beside the model's files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast.convert import dcp_folder, safetensors_file, torch_file
from ballast.convert.dcp_index import INDEX
from ballast.convert.lazy import LazyTensor
from ballast.convert.model_state import FILES, ModelState, model_file
from ballast.errors import Rejected

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SHARDED = "optimizer_0"  # under FSDP: a folder of torch.distributed.checkpoint


def is_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in OPTIMIZERS) or (folder / SHARDED / INDEX).is_file()


def read_tree(folder: Path) -> Any:
    """What its optimizer's file or folder holds. Rejected if it has none."""
    for name in OPTIMIZERS:
        if (folder / name).is_file():
            return torch_file.read_tree(folder / name)
    if (folder / SHARDED / INDEX).is_file():
        return dcp_folder.read_tree(folder / SHARDED)
    raise Rejected(
        f"{folder} holds none of {', '.join(OPTIMIZERS)} and no folder {SHARDED}: it is no checkpoint of Trainer's "
        "with an optimizer (save_only_model leaves it out, DeepSpeed keeps it elsewhere)"
    )


def need_model(source: Path, model: ModelState | None) -> None:
    """Rejected unless there are weights to put beside the optimizer: `source` is Trainer's, or the model is given."""
    if not is_folder(source) and not (model and model.weights):
        raise Rejected(
            "--to hf-trainer wants the model's weights too: give them with --names MODEL_STATE, or convert a folder "
            "of Trainer's"
        )


def write_tree(
    folder: Path, tree: dict[str, Any], source: Path, model: ModelState | None, wrote: Callable[[int], object]
) -> None:
    """Writes optimizer.pt into an empty folder. The rest is copied from `source` where that is Trainer's, else the
    model's weights are written as model.safetensors. OSError as the file system's."""
    torch_file.write_tree(folder / OPTIMIZERS[0], tree, wrote)
    if is_folder(source):
        _copy_rest(source, folder)
    elif model is not None:
        safetensors_file.write_tensors(folder / FILES[0], _untied(model.weights), {}, lambda nbytes: None)


def _copy_rest(source: Path, folder: Path) -> None:
    def left_out(at: str, names: list[str]) -> set[str]:
        return {*OPTIMIZERS, SHARDED} & set(names) if Path(at) == source else set()

    try:
        shutil.copytree(source, folder, ignore=left_out, dirs_exist_ok=True)
    except shutil.Error as error:  # of all files; it has no strerror
        first, _, why = error.args[0][0]
        raise Rejected(f"{first} of IN could not be copied: {why}", "RESOURCE_EXHAUSTED") from None


def _untied(weights: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """A tensor that has two names once, under the first: the model ties them again when it loads."""
    first: dict[int, str] = {}
    for name, weight in weights.items():
        first.setdefault(id(weight), name)
    return {name: weights[name] for name in first.values()}
