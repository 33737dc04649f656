"""Small checkpoints made by torch itself, for the tests of ballast.convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

Kind = Callable[..., torch.optim.Optimizer]


def make_model(seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Matrices and vectors; the last two matrices have the same shape."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4, bias=False)]
    layers += [torch.nn.Linear(4, 3), torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)]
    return torch.nn.Sequential(*layers).to(dtype)


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As trainers make them: vectors do not decay."""
    parameters = list(model.parameters())
    matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    return [matrices, {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    for _ in range(steps):
        batch = torch.randn(8, first.shape[-1], generator=generator).to(first.dtype)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def trained(kind: Kind = torch.optim.AdamW, groups: int = 1, **options: Any) -> tuple[torch.nn.Module, Any]:
    model = make_model()
    options.setdefault("lr", 1e-2)
    optimizer = kind(two_groups(model) if groups == 2 else model.parameters(), **options)
    train(model, optimizer)
    return model, optimizer


def saved(folder: Path, kind: Kind = torch.optim.AdamW, groups: int = 1, **options: Any) -> tuple[Any, Any, Path]:
    """(model, optimizer, folder / optimizer.pt); the model is beside it as pytorch_model.bin."""
    model, optimizer = trained(kind, groups, **options)
    folder.mkdir(exist_ok=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model, optimizer, folder / "optimizer.pt"


def save_dcp(folder: Path, model: torch.nn.Module, optimizer: Any, flat: bool = False) -> Path:
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=False)
    )
    dcp.save({"optimizer": state, "model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder


def loaded(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same(wanted: dict[str, Any], got: dict[str, Any]) -> None:
    """Two state_dicts by number: tensors to the bit, and the options of groups; got may have names more."""
    assert len(wanted["param_groups"]) == len(got["param_groups"])
    for one, other in zip(wanted["param_groups"], got["param_groups"]):
        for option, value in one.items():
            assert other[option] == value and type(other[option]) is type(value), option
    assert wanted["state"].keys() == got["state"].keys()
    for key, state in wanted["state"].items():
        assert state.keys() == got["state"][key].keys()
        for slot, value in state.items():
            came = got["state"][key][slot]
            assert torch.is_tensor(came) == torch.is_tensor(value)
            assert (came.dtype, came.shape) == (value.dtype, value.shape) if torch.is_tensor(value) else came == value
            assert not torch.is_tensor(value) or torch.equal(came, value), (key, slot)


def need_safetensors() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed: run deploy/setup.sh python")
