"""What ballast.convert is given that is not what it says: it is refused, by name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ballast
from ballast.convert import convert
from checkpoints import save_dcp, saved


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([((0, 0), (2, 6)), ((2, 0), (3, 6))], None),
        ([((0, 0), (5, 2)), ((0, 2), (5, 4))], None),
        ([((0, 0), (3, 6)), ((0, 0), (2, 6))], "two chunks of .*0.weight.* overlap"),
        ([((0, 0), (5, 3)), ((0, 2), (5, 3))], "two chunks of .*0.weight.* overlap"),
        ([((0, 0), (2, 6)), ((2, 0), (2, 6))], "hold 24 of its 30 elements"),
        ([((0, 0), (2, 6)), ((3, 0), (3, 6))], "lies outside the tensor"),
    ],
)
def test_each_element_of_a_sharded_tensor_is_in_one_chunk(chunks: Any, said: str | None, tmp_path: Path) -> None:
    """Else some would be whatever was in memory."""
    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    index = dcp.FileSystemReader(folder).read_metadata()
    entry = next(e for fqn, e in index.state_dict_metadata.items() if fqn.endswith("0.weight.exp_avg"))
    entry.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size(first), torch.Size(size)) for first, size in chunks]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ballast.Rejected, match=said or "a chunk of .*0.weight.exp_avg is not of the shape"):
        convert(folder, tmp_path / "out.safetensors", "safetensors")


def test_a_tensor_that_repeats_a_few_bytes_is_refused(tmp_path: Path) -> None:
    """A file of a kilobyte, and 4 TiB when it is read."""
    _, optimizer, _ = saved(tmp_path / "in")
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(
        ballast.Rejected, match=r"bad\.pt holds a tensor of shape \(1048576, 1048576\) that repeats 4 bytes"
    ):
        convert(tmp_path / "bad.pt", tmp_path / "out.pt", "torch")
    assert not (tmp_path / "out.pt").exists()


def test_an_index_whose_entries_are_no_tensors_is_refused(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path / "in")
    folder = save_dcp(tmp_path / "dcp", model, optimizer)
    index = dcp.FileSystemReader(folder).read_metadata()
    entry = next(e for fqn, e in index.state_dict_metadata.items() if fqn.endswith("exp_avg"))
    entry.chunks = None
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ballast.Rejected, match=r"\.metadata: what it says of .*exp_avg is damaged"):
        convert(folder, tmp_path / "out.pt", "torch")
