"""What this rank holds of a parameter that fully_shard (FSDP2) has sharded: a torch DTensor.

A rank's part is some rows, [begin, end) of the elements of the whole tensor in row-major order; it may have none. A run has
whole tensors, whatever the number of ranks. Without FSDP2 in the process nothing of it is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ballast.errors import Rejected


@dataclass(frozen=True)
class Shard:
    """Elements [begin, end) of a tensor. contributes: whether this rank sends their gradient; it receives their weights in
    any case. Replicas of HSDP have the same gradient, and the first sends it."""

    begin: int
    end: int
    contributes: bool

    @property
    def wire(self) -> tuple[int, int, bool]:
        """As _core.Client.attach takes it."""
        return self.begin, self.end, self.contributes


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor, of whatever kind."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # without it there is none
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Any) -> Tensor:
    """The tensor whose memory this rank has: of a DTensor its part, else itself. Of no graph, and no copy."""
    if type(tensor) is torch.nn.Parameter or not is_sharded(tensor):
        plain: Tensor = tensor
        return plain
    local: Tensor = tensor._local_tensor  # to_local() of a leaf is another in each call
    return local


def like(parameter: Any, local: Tensor) -> Tensor:
    """`local` as this rank's part of a DTensor that is sharded as `parameter` is; `local` itself of a plain one. Shares the
    memory. Of local's dtype and device."""
    if not is_sharded(parameter):
        return local
    spec: Any = parameter._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor
    # The constructor, as FSDP2 uses it: from_local() would compute with `local`, and move it to the mesh's device.
    made: Tensor = kind(local, replace(spec, tensor_meta=meta), requires_grad=False)
    return made


def replicated(parameter: Any, value: Tensor) -> Tensor:
    """A value that all ranks have, as torch gives it for `parameter`: a DTensor on its mesh, if it is one."""
    if not is_sharded(parameter):
        return value
    tensors = sys.modules["torch.distributed.tensor"]
    mesh: Any = parameter.device_mesh
    made: Tensor = tensors.DTensor.from_local(value, mesh, [tensors.Replicate()] * mesh.ndim, run_check=False)
    return made


def part_of(parameter: Tensor, value: Tensor) -> Tensor | None:
    """This rank's part of `value`, a tensor of the parameter's shape: whole, or sharded as the parameter is. None: it is
    sharded otherwise. Of a plain parameter that is all of it."""
    if is_sharded(value):
        same = is_sharded(parameter) and _layout(value) == _layout(parameter)
        return local_of(value) if same else None
    if not is_sharded(parameter):
        return value
    shard = shard_of(parameter)
    assert shard is not None
    return value.reshape(-1)[shard.begin : shard.end].view(local_of(parameter).shape)


def whole_of(parameter: Any, local: Tensor) -> Tensor:
    """The tensor that `local`, and the other ranks' likewise, are the parts of; in host memory, contiguous. Collective: all
    ranks of the parameter's mesh call it in the same order."""
    mesh: Any = parameter.device_mesh
    with torch.no_grad():
        whole: Any = like(parameter, local.detach().to(mesh.device_type))
        gathered: Tensor = whole.full_tensor()
        return gathered.to("cpu").contiguous()


def shard_of(parameter: Any) -> Shard | None:
    """None: all of it. Of a parameter that is fit, as why_unfit() says."""
    if not is_sharded(parameter):
        return None
    mesh: Any = parameter.device_mesh
    row = parameter.numel() // parameter.shape[0]
    rows, first = _rows(parameter)
    coordinate = mesh.get_coordinate()
    return Shard(first * row, (first + rows) * row, mesh.ndim == 1 or coordinate[0] == 0)


def in_parts(parameter: Any) -> bool:
    """Whether several ranks have parts of it."""
    return is_sharded(parameter) and parameter.device_mesh.size(-1) > 1


def _rows(parameter: Tensor) -> tuple[int, int]:
    """How many rows this rank has, and the first."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = _layout(parameter)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return (shape[0], offset[0]) if shape[0] else (0, 0)


def _layout(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tuple(tensor.placements)


# The first torch of which we know that FSDP copies a gradient to pinned memory before hooks are called, not meanwhile.
_WAITS_FOR_HOST = TorchVersion("2.13")


# --- what cannot be trained -----------------------------------------------------------------------------------------


def why_unfit(parameter: Tensor) -> str | None:
    """What is wrong with how a DTensor is sharded, and what to write; None: nothing."""
    mesh, placements = _layout(parameter)
    tensors = sys.modules["torch.distributed.tensor"]
    rows, copies = tensors.Shard(0), tensors.Replicate()
    if placements != (rows,) and placements != (copies, rows):
        return (
            f"is a DTensor with placements {tuple(map(str, placements))} on a mesh of {mesh.ndim} dimensions: a run takes "
            "what fully_shard makes of a plain parameter, (Shard(0),), or (Replicate(), Shard(0)) on a mesh of two. Leave "
            "tensor parallelism and shard_placement_fn= out"
        )
    if not (mesh.mesh.diff(dim=-1) > 0).all():  # torch numbers a process group's ranks so, whatever the mesh says
        return (
            f"is sharded over a mesh with ranks {mesh.mesh.tolist()}: FSDP deals parts out in the order of the ranks, and DTensors "
            "tell them in that of the mesh. Write ranks that ascend, in each row"
        )
    if mesh.get_coordinate() is None:
        return "is sharded over a mesh that this process is not part of: give its optimizer to those that are"
    if tuple(local_of(parameter).shape) != (_rows(parameter)[0], *parameter.shape[1:]):
        return (
            f"has {tuple(local_of(parameter).shape)} of {tuple(parameter.shape)} here, and its placements say "
            f"{_rows(parameter)[0]} rows: give what fully_shard has made"
        )
    if torch.__version__ < _WAITS_FOR_HOST and local_of(parameter).is_pinned():
        return (
            f"is kept in pinned host memory by FSDP, which in torch {torch.__version__} may say that a gradient is there before "
            f"it is: give CPUOffloadPolicy(pin_memory=False), or take torch {_WAITS_FOR_HOST} or later"
        )
    return None


def check_shards(named: Iterable[tuple[str, Any]], rank: int, world: int) -> bool:
    """Whether the parameters of a run are sharded. Rejected, naming which, if some are and others are not, and unless all
    are sharded over the ranks of the run, as these are numbered by torch.distributed."""
    pairs = list(named)
    sharded = [(name, parameter) for name, parameter in pairs if is_sharded(parameter)]
    if not sharded:
        return False
    for name, parameter in pairs:
        if not is_sharded(parameter):
            raise Rejected(
                f"parameter '{name}' is not sharded, and '{sharded[0][0]}' is: FSDP takes the mean of the gradients of what it "
                "shards, and leaves this one's different on each rank. Have fully_shard(model) shard it too (no "
                "ignored_params=), freeze it, or give it to an optimizer with a run of its own, which takes the mean"
            )
    _check_ranks(rank, world)
    for name, parameter in sharded:
        ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
        if ranks != list(range(world)):
            raise Rejected(
                f"parameter '{name}' is sharded over ranks {_few(ranks)}, and the run has world={world}: its mesh must have "
                "every rank of the run once. Leave mesh= of fully_shard out, or give it all ranks"
            )
    return True


def _check_ranks(rank: int, world: int) -> None:
    there = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    if (rank, world) != there:
        raise Rejected(
            f"rank={rank} and world={world} with sharded parameters, whose ranks are torch.distributed's: this process is "
            f"rank {there[0]} of {there[1]} there. Leave rank= and world= out"
        )


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
