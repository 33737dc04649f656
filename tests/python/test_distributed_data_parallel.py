"""Two processes whose modules are in DistributedDataParallel end where torch's AdamW ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import Program, kept
from models import distance

TEN = [1] * 10
ACCUMULATED = [3] * 10
RAGGED = [3, 3, 1, 3, 2, 3]
THREE = {"gradient_accumulation_steps": 3}
IN_CODES = {"formats": {"*.weight": {"serving": "int8-tensor"}}}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"steps": TEN},
    "the optimizer made before": {"steps": TEN, "optimizer_first": True},
    "in another module": {"steps": TEN, "wrap": "inner"},
    "several modules in DDP": {"steps": TEN, "wrap": "parts"},
    "static graph": {"steps": TEN, "ddp": {"static_graph": True}},
    "unused parameters": {"steps": TEN, "model": "branches", "ddp": {"find_unused_parameters": True}},
    "gradients as views of buckets": {"steps": TEN, "ddp": {"gradient_as_bucket_view": True}},
    "compiled": {"steps": TEN, "compile": True},
    "staged": {"steps": TEN, "options": {"commit": "staged"}},
    "forward waits": {"steps": TEN, "options": {"overlap_forward": True}},
    "buffers": {"steps": TEN, "model": "norm"},
    "buffers, under no_sync": {"steps": ACCUMULATED, "model": "norm", "no_sync": True, "options": THREE},
    "accumulated": {"steps": ACCUMULATED, "options": THREE},
    "accumulated under no_sync": {"steps": ACCUMULATED, "no_sync": True, "options": THREE},
    "fewer in some steps, under no_sync": {"steps": RAGGED, "no_sync": True, "options": THREE},
    "saved and rolled back by torch.distributed.checkpoint": {"steps": TEN, "checkpoint": "own"},
    "the same, by rank 0 for all": {"steps": TEN, "checkpoint": "full"},
    "layers in int8": {"steps": TEN, "model": "int8", "options": IN_CODES, "nearness": 0.02},
    "the same, the optimizer made before": {
        "steps": TEN,
        "model": "int8",
        "options": IN_CODES,
        "nearness": 0.02,
        "optimizer_first": True,
    },
    "the same, in parts": {
        "steps": TEN,
        "model": "int8",
        "options": IN_CODES,
        "nearness": 0.02,
        "wrap": "parts",
    },
    "the same, taken up again": {
        "steps": TEN,
        "model": "int8",
        "options": IN_CODES,
        "nearness": 1.0,  # torch's ends before
        "again": TEN,
    },
    "static graph under no_sync": {
        "steps": ACCUMULATED,
        "no_sync": True,
        "options": THREE,
        "ddp": {"static_graph": True},
        "theirs": {"ddp": {}},  # torch's fails where the first micro-batch is under no_sync
    },
}


ranks = kept("wrapped")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_in_ddp_end_where_torch_does(case: str, ranks: Program, run: str, tmp_path: Path) -> None:
    answers = ranks.ask({"world": 2, "run": run, "store": str(tmp_path / "store"), "case": CASES[case]})
    assert all(isinstance(answer, list) for answer in answers), answers
    (ours, theirs), (of_rank_1, theirs_of_rank_1) = answers
    for name, values in ours.items():
        assert distance(values, theirs[name]) < CASES[case].get("nearness", 1e-6), name
        assert distance(of_rank_1[name], theirs_of_rank_1[name]) < CASES[case].get("nearness", 1e-6), name
        assert "running" in name or values == of_rank_1[name]
