"""Names against numbers: a parameter of a converted checkpoint has its own name, or the conversion is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from ballast.convert import convert
from checkpoints import loaded, make_model, need_safetensors, saved


def names_in(path: Path) -> list[list[str]]:
    return [group["param_names"] for group in loaded(path)["param_groups"]]


def true_names(model: torch.nn.Module, optimizer: Any) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_models_order_gives_the_names(groups: int, tmp_path: Path) -> None:
    """Of two groups too: a matrix fits only the one, a vector only the other."""
    model, optimizer, source = saved(tmp_path / "in", groups=groups)
    convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "in" / "pytorch_model.bin"])
    assert names_in(tmp_path / "out.pt") == true_names(model, optimizer)


def test_a_name_that_may_be_of_either_group_is_refused(tmp_path: Path) -> None:
    model = make_model()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}])
    # Weights and biases that have the same shape: a LayerNorm's.
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(model.state_dict(), tmp_path / "model.bin")
    with pytest.raises(
        ballast.Rejected, match=r"0\.bias, of shape \(5,\), may belong to more than one of the 2 param_groups"
    ):
        convert(tmp_path / "optimizer.pt", tmp_path / "dcp", "dcp", names=[tmp_path / "model.bin"])
    (tmp_path / "names.txt").write_text("\n".join(name for group in true_names(model, optimizer) for name in group))
    convert(tmp_path / "optimizer.pt", tmp_path / "out.pt", "torch", names=[tmp_path / "names.txt"])
    assert names_in(tmp_path / "out.pt") == true_names(model, optimizer)
    # The list is checked against the model, where that is given too.
    reversed_list = [name for group in true_names(model, optimizer) for name in reversed(group)]
    (tmp_path / "names.txt").write_text("\n".join(reversed_list))
    with pytest.raises(
        ballast.Rejected, match=r"parameter 0, 5\.weight, has state of shape \(5, 6\).* has it as \(3, 3\)"
    ):
        given = [tmp_path / "names.txt", tmp_path / "model.bin"]
        convert(tmp_path / "optimizer.pt", tmp_path / "no.pt", "torch", names=given)


def test_another_models_names_are_refused(tmp_path: Path) -> None:
    model, _, source = saved(tmp_path / "in")
    less = {name: value for name, value in model.state_dict().items() if name != "0.bias"}
    torch.save(less, tmp_path / "less.bin")
    with pytest.raises(
        ballast.Rejected, match=r"8 parameters, the optimizer 9.*first that differs is 2\.weight, of shape \(4, 5\)"
    ):
        convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "less.bin"])
    moved = dict(reversed(list(model.state_dict().items())))
    torch.save(moved, tmp_path / "moved.bin")
    with pytest.raises(ballast.Rejected, match=r"parameter 0, 5\.weight, has state of shape \(5, 6\)"):
        convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "moved.bin"])
    (tmp_path / "twice.txt").write_text("a\nb\na\n")
    with pytest.raises(ballast.Rejected, match="--names: a is there twice"):
        convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "twice.txt"])
    with pytest.raises(ballast.Rejected, match="--names .*gone.bin: there is no such file"):
        convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "gone.bin"])


def test_names_are_demanded_where_they_are_needed(tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in")
    with pytest.raises(ballast.Rejected, match="--to dcp goes by names.*--names MODEL_STATE"):
        convert(source, tmp_path / "dcp", "dcp")
    # Trainer keeps the model beside its optimizer.
    convert(tmp_path / "in", tmp_path / "dcp", "dcp", verify=True)
    convert(tmp_path / "dcp", tmp_path / "out.pt", "torch")
    assert names_in(tmp_path / "out.pt") == [list(dict(make_model().named_parameters()))]


def test_safetensors_has_no_order(tmp_path: Path) -> None:
    need_safetensors()
    from safetensors.torch import save_file

    model, _, source = saved(tmp_path / "in")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ballast.Rejected, match="safetensors sorts names.*pytorch_model.bin"):
        convert(source, tmp_path / "dcp", "dcp", names=[tmp_path / "model.safetensors"])


def test_tied_and_whole_numbered_weights_are_no_parameters(tmp_path: Path) -> None:
    model, optimizer, source = saved(tmp_path / "in")
    state = model.state_dict()
    state["head.weight"] = state["4.weight"]
    state["steps_seen"] = torch.tensor(3)
    torch.save({"model": state, "epoch": 1}, tmp_path / "model.ckpt")
    convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "model.ckpt"])
    assert names_in(tmp_path / "out.pt") == true_names(model, optimizer)


def test_shards_of_a_model_are_read_by_their_index(tmp_path: Path) -> None:
    model, optimizer, source = saved(tmp_path / "in")
    (tmp_path / "in" / "pytorch_model.bin").unlink()
    weights = list(model.state_dict().items())
    shards = {
        "pytorch_model-00001-of-00002.bin": dict(weights[:4]),
        "pytorch_model-00002-of-00002.bin": dict(weights[4:]),
    }
    for file, shard in shards.items():
        torch.save(shard, tmp_path / "in" / file)
    places = {name: file for file, shard in shards.items() for name in shard}
    index = tmp_path / "in" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}, sort_keys=True))
    convert(source, tmp_path / "out.pt", "torch", names=[tmp_path / "in"])
    assert names_in(tmp_path / "out.pt") == true_names(model, optimizer)
    index.write_text(json.dumps({"weight_map": {"0.weight": "../secret.bin"}}))
    with pytest.raises(ballast.Rejected, match=r"names \.\./secret\.bin, which is not in its folder"):
        convert(source, tmp_path / "no.pt", "torch", names=[index])


def test_names_that_the_optimizer_has_are_kept_and_checked(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "dcp", "dcp", verify=True)
    other = torch.nn.Sequential(torch.nn.Linear(6, 5))
    torch.save(other.state_dict(), tmp_path / "other.bin")
    with pytest.raises(ballast.Rejected, match=r"has no 1\.weight, which the optimizer has: it is another model's"):
        convert(tmp_path / "in.pt", tmp_path / "no.pt", "torch", names=[tmp_path / "other.bin"])


def test_weights_of_unknown_order_must_at_least_have_the_shapes(tmp_path: Path) -> None:
    need_safetensors()
    from safetensors.torch import save_file

    _, _, source = saved(tmp_path / "in", groups=2)
    save_file(torch.nn.Linear(6, 5).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ballast.Rejected, match="fewer weights of shape .* than the optimizer: it is another model's"):
        convert(source, tmp_path / "out", "hf-trainer", names=[tmp_path / "model.safetensors"])
