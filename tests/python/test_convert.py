"""ballast.convert: from each format to each, as torch made it and as torch reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ballast
from ballast.convert import convert
from checkpoints import assert_same, loaded, make_model, need_safetensors, save_dcp, saved, train, two_groups

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True}),
    "tensor lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
}


@pytest.fixture(params=["safetensors", "dcp", "hf-trainer", "torch"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "safetensors":
        need_safetensors()
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_there_and_back_is_the_same_to_the_bit(kind: str, groups: int, way: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    _, optimizer, source = saved(tmp_path / "in", make, 1, **options)
    if groups == 2:
        _, optimizer, source = saved(tmp_path / "in", make, 2, **options)
    names = tmp_path / "names.txt"
    model = make_model()
    names_of = {id(p): name for name, p in model.named_parameters()}
    ordered = two_groups(model) if groups == 2 else [{"params": list(model.parameters())}]
    names.write_text("\n".join(names_of[id(p)] for group in ordered for p in group["params"]))
    given = [names, tmp_path / "in" / "pytorch_model.bin"]
    there = convert(source, tmp_path / "there", way, names=given, verify=True)
    assert (there.source, there.system, there.parameters) == ("torch", "torch", 9)
    assert there.errors is not None and all(error.error == 0 and error.ok for error in there.errors)
    convert(tmp_path / "there", tmp_path / "back.pt", "torch", verify=True)
    assert_same(optimizer.state_dict(), loaded(tmp_path / "back.pt"))


def test_training_goes_on_as_if_nothing_had_been_converted(tmp_path: Path) -> None:
    model, optimizer, source = saved(tmp_path / "in")
    convert(source, tmp_path / "dcp", "dcp", names=[tmp_path / "in" / "pytorch_model.bin"])
    convert(tmp_path / "dcp", tmp_path / "out.pt", "torch")
    other = make_model(seed=2)
    other.load_state_dict(model.state_dict())
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(loaded(tmp_path / "out.pt"))
    train(model, optimizer, seed=6)
    train(other, resumed, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("groups", [1, 2])
def test_dcp_load_finds_what_was_written(groups: int, tmp_path: Path) -> None:
    _, optimizer, source = saved(tmp_path / "in", groups=groups)
    convert(source, tmp_path / "dcp", "dcp", names=[tmp_path / "in" / "pytorch_model.bin"])
    other = make_model(seed=2)
    fresh = torch.optim.AdamW(two_groups(other) if groups == 2 else other.parameters(), lr=1.0)
    state = {"optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    assert_same(optimizer.state_dict(), fresh.state_dict())


def test_what_dcp_saved_becomes_torchs(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in", groups=2)
    report = convert(save_dcp(tmp_path / "dcp", model, optimizer), tmp_path / "out.pt", "torch", verify=True)
    assert report.source == "dcp"
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_the_place_in_a_dcp_folder_can_be_chosen(tmp_path: Path) -> None:
    _, optimizer, source = saved(tmp_path / "in")
    model = tmp_path / "in" / "pytorch_model.bin"
    convert(source, tmp_path / "dcp", "dcp", names=[model], out_part="app.optim", verify=True)
    keys = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata.keys()
    assert "app.optim.state.0.weight.exp_avg" in keys and "app.optim.param_groups.0.lr" in keys
    convert(tmp_path / "dcp", tmp_path / "out.pt", "torch", part="app.optim")
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_a_sharded_tensor_is_put_together(tmp_path: Path) -> None:
    """As two ranks of FSDP save it: each its rows, in a file of its own."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    index = dcp.FileSystemReader(folder).read_metadata()
    fqn = "optimizer.state.0.weight.exp_avg"
    whole = optimizer.state[model[0].weight]["exp_avg"]
    entry, parts = index.state_dict_metadata[fqn], {0: whole[:2], 2: whole[2:]}
    index.storage_data = {key: info for key, info in index.storage_data.items() if key.fqn != fqn}
    entry.chunks = [ChunkStorageMetadata(torch.Size([row, 0]), part.shape) for row, part in parts.items()]
    for row, part in parts.items():
        add_item(folder, index, fqn, torch.Size([row, 0]), part.clone(), f"__{row}_1.distcp")
    write_index(folder, index)
    convert(folder, tmp_path / "out.pt", "torch", verify=True)
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))
    entry.chunks.pop()
    write_index(folder, index)
    with pytest.raises(
        ballast.Rejected, match=r"chunks of optimizer\.state\.0\.weight\.exp_avg hold 12 of its 30 elements"
    ):
        convert(folder, tmp_path / "less.pt", "torch")


def add_item(folder: Path, index: Any, fqn: str, offsets: Any, value: Any, file: str) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    torch.save(value, folder / file)
    index.storage_data[MetadataIndex(fqn, offsets)] = _StorageInfo(file, 0, (folder / file).stat().st_size)


def write_index(folder: Path, index: Any) -> None:
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_a_flat_state_dict_has_no_order_until_the_model_gives_it(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer, flat=True)
    with pytest.raises(ballast.Rejected, match="flat state_dict has names and no order.*--names MODEL_STATE"):
        convert(folder, tmp_path / "out.pt", "torch")
    convert(folder, tmp_path / "out.pt", "torch", names=[tmp_path / "in" / "pytorch_model.bin"], verify=True)
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_a_flat_state_dict_of_two_groups_wants_a_list(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in", groups=2)
    folder = save_dcp(tmp_path / "dcp", model, optimizer, flat=True)
    with pytest.raises(ballast.Rejected, match="more than one param_group.*text file"):
        convert(folder, tmp_path / "out.pt", "torch", names=[tmp_path / "in" / "pytorch_model.bin"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = tmp_path / "names.txt"
    listed.write_text("\n".join(names[id(p)] for group in optimizer.param_groups for p in group["params"]))
    convert(folder, tmp_path / "out.pt", "torch", names=[listed])
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_trainers_folder_keeps_its_other_files(tmp_path: Path) -> None:
    _, optimizer, _ = saved(tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5}')
    convert(tmp_path / "checkpoint-5", tmp_path / "out", "hf-trainer", verify=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "optimizer.pt",
        "pytorch_model.bin",
        "trainer_state.json",
    }
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out" / "optimizer.pt"))


def test_a_trainers_folder_from_elsewhere_has_the_models_weights(tmp_path: Path) -> None:
    need_safetensors()
    from safetensors.torch import load_file

    model, optimizer, source = saved(tmp_path / "in")
    with pytest.raises(ballast.Rejected, match="hf-trainer wants the model's weights.*--names MODEL_STATE"):
        convert(source, tmp_path / "out", "hf-trainer")
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", "hf-trainer", names=[tmp_path / "in" / "pytorch_model.bin"])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    # Of a model whose order is unknown the weights are taken as well, and no names.
    convert(source, tmp_path / "again", "hf-trainer", names=[tmp_path / "out" / "model.safetensors"])
    assert "param_names" not in loaded(tmp_path / "again" / "optimizer.pt")["param_groups"][0]


def test_trainer_under_fsdp_keeps_a_sharded_folder(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    (tmp_path / "checkpoint-5").mkdir()
    save_dcp(tmp_path / "checkpoint-5" / "optimizer_0", model, optimizer)
    report = convert(tmp_path / "checkpoint-5", tmp_path / "out.pt", "torch")
    assert report.source == "hf-trainer"
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_one_of_several_optimizers_is_chosen_by_its_place(tmp_path: Path) -> None:
    _, first, _ = saved(tmp_path / "in")
    _, second, _ = saved(tmp_path / "in", torch.optim.SGD, momentum=0.9)
    torch.save({"optimizer_states": [first.state_dict(), second.state_dict()], "epoch": 3}, tmp_path / "last.ckpt")
    with pytest.raises(ballast.Rejected, match="2 optimizers.*--part: optimizer_states.0, optimizer_states.1"):
        convert(tmp_path / "last.ckpt", tmp_path / "out.pt", "torch")
    with pytest.raises(
        ballast.Rejected, match="--part epoch: there is no optimizer's state_dict there.*: optimizer_states.0"
    ):
        convert(tmp_path / "last.ckpt", tmp_path / "out.pt", "torch", part="epoch")
    convert(tmp_path / "last.ckpt", tmp_path / "out.pt", "torch", part="optimizer_states.1")
    assert_same(second.state_dict(), loaded(tmp_path / "out.pt"))
    with pytest.raises(ballast.Rejected, match="no optimizer's state_dict.*but: 0.weight"):
        convert(tmp_path / "in" / "pytorch_model.bin", tmp_path / "none.pt", "torch")


def test_a_slot_is_left_out_when_that_is_asked(tmp_path: Path) -> None:
    _, _, source = saved(tmp_path / "in", torch.optim.Adam, amsgrad=True)
    convert(source, tmp_path / "out.pt", "torch", drop=["max_exp_avg_sq"], verify=True)
    assert loaded(tmp_path / "out.pt")["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ballast.Rejected, match="--drop master: no parameter of .* has it"):
        convert(source, tmp_path / "other.pt", "torch", drop=["master"])


def test_parameters_without_state_stay_without(tmp_path: Path) -> None:
    need_safetensors()
    model = make_model()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out.safetensors", "safetensors", verify=True)
    convert(tmp_path / "out.safetensors", tmp_path / "out.pt", "torch", verify=True)
    assert 4 not in optimizer.state_dict()["state"]
    assert_same(optimizer.state_dict(), loaded(tmp_path / "out.pt"))


def test_what_two_ranks_of_fsdp2_saved_becomes_torchs_and_goes_back(tmp_path: Path) -> None:
    def run(what: str) -> None:
        program = Path(__file__).with_name("sharded.py")
        done = subprocess.run([sys.executable, "-B", program, what, tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run("save")
    full = loaded(tmp_path / "full.pt")
    convert(tmp_path / "dcp", tmp_path / "out.pt", "torch", verify=True)
    converted = loaded(tmp_path / "out.pt")
    assert [group["param_names"] for group in converted["param_groups"]] == [g["params"] for g in full["param_groups"]]
    names = [name for group in full["param_groups"] for name in group["params"]]
    for index, name in enumerate(names):
        for slot, value in full["state"][name].items():
            assert torch.equal(converted["state"][index][slot], value), (name, slot)
    convert(tmp_path / "out.pt", tmp_path / "converted", "dcp", verify=True)
    run("load")
    again = loaded(tmp_path / "again.pt")
    assert again["param_groups"] == full["param_groups"]
    assert all(
        torch.equal(again["state"][n][slot], v) for n, state in full["state"].items() for slot, v in state.items()
    )
