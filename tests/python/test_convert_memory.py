"""A checkpoint is converted in the memory of a few of its tensors, however many it has."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.convert import convert, dcp_folder
from checkpoints import saved

TENSORS, ELEMENTS = 24, 1 << 20  # of each of two moments: 192 MiB, 4 MiB each
# What the program may have at once besides what it had before and the files that it maps: seven tensors.
BUDGET = 28 << 20

# Data (memory of its own, and private mappings) is limited, so an allocation beyond the limit fails.
PROGRAM = """
import gc, re, resource, sys
from pathlib import Path
import torch
from ballast.convert import convert

torch.set_num_threads(1)
folder, tiny, budget = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ways = [("in.pt", "dcp"), ("dcp", "torch"), ("in.pt", "safetensors"), ("in.pt", "flashoptim")]
ways += [("in.pt", "bitsandbytes"), ("bitsandbytes", "torch"), ("flashoptim", "dcp")]


def go(folder, source, to):
    names, out = [folder / "names.txt"], folder / ("back" if (folder / to).exists() or to == "torch" else to)
    convert(folder / source, out, to, names=names, overwrite=True, verify=to != "safetensors")


def limited(mapped, work):
    gc.collect()
    used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + mapped + budget, resource.RLIM_INFINITY))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


for way in ways:  # what is imported and kept for good is in memory afterwards
    go(tiny, *way)
for source, to in ways:
    size = (folder / source).stat().st_size if (folder / source).is_file() else 0
    # OUT is mapped too when it is compared: a file of moments as they are, or of one byte an element.
    made = {"torch": 2 * 4, "bitsandbytes": 2 * 1.1, "flashoptim": 2 * 1.1}.get(to, 0) * int(sys.argv[4])
    limited(size + int(made), lambda: go(folder, source, to))
    print(source, to)
try:
    limited(0, lambda: torch.load(folder / "in.pt", weights_only=True))
except RuntimeError as error:
    print("a whole checkpoint does not fit:", "memory" in str(error))
"""


def write(folder: Path, tensors: int, elements: int) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    state: dict[int, dict[str, Any]] = {}
    for index in range(tensors):
        m = torch.randn(elements, generator=generator)
        state[index] = {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": m.square()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(state)}]
    torch.save({"state": state, "param_groups": groups}, folder / "in.pt")
    (folder / "names.txt").write_text("\n".join(f"layers.{index}.weight" for index in state))


def test_a_conversion_holds_a_few_tensors_in_memory(tmp_path: Path) -> None:
    write(tmp_path / "large", TENSORS, ELEMENTS)
    write(tmp_path / "tiny", 2, 5000)
    arguments = [tmp_path / "large", tmp_path / "tiny", BUDGET, TENSORS * ELEMENTS]
    command = [sys.executable, "-B", "-c", PROGRAM, *map(str, arguments)]
    # A tensor's memory goes back when it is freed: by itself malloc keeps some, more or less as threads come to free it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "in.pt dcp",
        "dcp torch",
        "in.pt safetensors",
        "in.pt flashoptim",
        "in.pt bitsandbytes",
        "bitsandbytes torch",
        "flashoptim dcp",
        "a whole checkpoint does not fit: True",
    ]


@pytest.mark.parametrize("to", ["torch", "dcp", "flashoptim", "bitsandbytes"])
def test_what_was_read_is_let_go_before_more_is_read(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at most: one of IN and one of OUT where they are compared."""
    saved(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "dcp", "dcp")
    alive: list[weakref.ref[torch.Tensor]] = []
    most = [0]
    read = dcp_folder._read_tensor

    def counted(*arguments: Any) -> torch.Tensor:
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(dcp_folder, "_read_tensor", counted)
    convert(tmp_path / "dcp", tmp_path / "out", to, verify=True)
    assert len(alive) >= 27 and most[0] <= 2
