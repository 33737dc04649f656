"""Messages name the options as they are written in Python, wherever the text comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ballast
from ballast import errors
from ballast.result import StepResult
from ballast.step_warnings import StepWarnings
from ballast.wording import in_python
from models import layered

ROOT = Path(__file__).parents[2]
# Where what the daemon and the client tell a trainer is written.
PLACES = (
    *(f"server/{room}" for room in ("convert", "plan", "run", "spec", "stability", "step", "store")),
    *(f"client/cpp/{room}" for room in ("stream", "transport", "wire")),
)
# What no option, and nothing else that is written in Python, is called.
FOREIGN = re.compile(
    r"\w+_timeout_s\b|\brun_id\b|(?<![A-Z_])(?!BALLAST_|CUDA_)[A-Z]+_[A-Z]+_|\bRunSpec|rewind\.\w|with LoadState|LoadState is for|=true\b|"
    r"\baccumulation is|dynamic_loss_scale|StepBegin\.|StepEnd\.(discard|client_state)|Step(Begin|End) of|"
    r"but StepBegin|not sent (StepEnd|MicroEnd)|checkpoint\.(every|retain)|checkpoint is given"
)


def texts() -> set[str]:
    """The sentences in these sources: string literals, adjacent ones as one."""
    found = set()
    for place in PLACES:
        for path in sorted((ROOT / place).glob("*.cc")):
            code = re.sub(r"^\s*(//|#include).*$", "", path.read_text(), flags=re.MULTILINE)
            for literals in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', code):
                text = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literals)).replace('\\"', '"')
                if " " in text.strip():
                    found.add(text)
    return found


def test_no_text_of_the_daemon_keeps_a_name_of_the_wire() -> None:
    found = texts()
    assert len(found) > 200 and any(FOREIGN.search(text) for text in found), "the sources are read"
    foreign = {text: in_python(text) for text in found if FOREIGN.search(in_python(text))}
    assert foreign == {}


SAID = {
    "; use another run_id, or delete the run": "; use another run, or delete the run",
    "see its log, or raise reconnect_timeout_s": "see its log, or raise reconnect_timeout",
    "attach with takeover=true; else give another run_id": "attach with takeover=True; else give another run",
    "AmendRun has added 2 tensors, from 'a' on, that have no weights yet: send them with LoadState "
    "(LoadStateRequest.replace) before the next step": "add_param_group() or requires_grad_() has added 2 tensors, from 'a' "
    "on, that have no weights yet: load_state_dict() of a checkpoint sends them",
    "AmendRun: seed is 7, asked for is 8": "seed is 7, asked for is 8",
    "with on_lost_rank = LOST_RANK_POLICY_CONTINUE goes": "with on_lost_rank='continue' goes",
    "commit is COMMIT_MODE_RELEASE, asked for is COMMIT_MODE_STAGED": "commit is 'release', asked for is 'staged'",
    "is stopped (nonfinite = stop) since": "is stopped (nonfinite='stop') since",
    "create it with RunSpec.rewind.snapshots of 1": "create it with snapshots of 1",
    "another spec: checkpoint.every_steps is 5, asked for is 6": "another spec: checkpoint_every_steps is 5, asked for is 6",
    "checkpoint.every_seconds is 600, asked for is 0": "checkpoint_every_seconds is 600, asked for is 0",
    "checkpoint.retain is 2, asked for is 3": "checkpoints_kept is 2, asked for is 3",
    "checkpoint is given, but this daemon has no storage": "checkpoint_every_steps, checkpoint_every_seconds, "
    "checkpoints_kept or durability is given, but this daemon has no storage",
    "checkpoint.durability is DURABILITY_MODE_JOURNAL, asked for is DURABILITY_MODE_CHECKPOINT": "durability is 'journal', "
    "asked for is 'checkpoint'",
    "accumulation is 1, asked for is 2": "gradient_accumulation_steps is 1, asked for is 2",
    "another spec: ranks is 2, asked for is 1": "another spec: world is 2, asked for is 1",
    'groups[0].hyper["eps"] is 1e-08': "groups[0].eps is 1e-08",
    "groups[0].hyper['eps'] is 0; wanted": "groups[0].eps is 0; wanted",
    "groups[1].gradient is 'bf16'": "groups[1].gradient_dtype is 'bf16'",
    "StepBegin of step 3: rank 1 gives lr = 2": "step 3: rank 1 gives lr = 2",
    "ranks 0, 2 discarded it (StepEnd.discard)": "ranks 0, 2 discarded it (zero_grad() after backward())",
    "rank 1's run 'run_id' and tensor 'accumulation is'": "rank 1's run 'run_id' and tensor 'accumulation is'",
    'tensors[0].name is "run_id", asked for': 'tensors[0].name is "run_id", asked for',
}


@pytest.mark.parametrize("there", SAID)
def test_a_text_is_said_in_the_words_of_the_options(there: str) -> None:
    assert in_python(there) == SAID[there]
    assert str(errors.from_status("UNAVAILABLE", there)) == SAID[there]
    assert str(errors.from_status("UNKNOWN", there)) == f"UNKNOWN: {SAID[there]}"


def test_a_result_is_said_in_the_words_of_the_options(adamw: Callable[..., ballast.AdamW]) -> None:
    model = layered(seed=1)
    optimizer = adamw(model.named_parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    last = optimizer._membership.connected().get_run(optimizer.run)["status"]["last_result"]
    last |= {"detail": "raise step_timeout_s", "warnings": ["a smaller rank_timeout_s"]}
    result = StepResult.from_fields(last, [])
    assert (result.detail, result.warnings) == ("raise step_timeout", ("a smaller rank_timeout",))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"rank_timeout": 1.5}, "rank_timeout is 60, asked for is 1.5; use another run,"),
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 1, asked for is 2"),
        ({}, {"world": 2, "rank": 0}, "world is 1, asked for is 2"),
        ({}, {"commit": "staged"}, "commit is 'release', asked for is 'staged'"),
        ({}, {"snapshots": 2}, "snapshots is unset, asked for is"),
        ({"snapshots": 1}, {"snapshots": 2}, "snapshots is 1, asked for is 2"),
        ({}, {"on_lost_rank": "continue"}, "on_lost_rank is 'wait', asked for is 'continue'"),
        ({}, {"eps": 1e-3}, r"groups\[0\]\.eps is"),
        ({}, {"gradient_dtype": "bf16"}, r"groups\[0\]\.gradient_dtype is"),
    ],
    ids=str,
)
def test_another_description_of_a_run_is_refused_by_the_options_name(
    first: dict[str, Any], second: dict[str, Any], message: str, adamw: Callable[..., ballast.AdamW]
) -> None:
    adamw([("w", nn.Parameter(torch.zeros(3)))], **first).connect()
    with pytest.raises(ballast.Rejected, match=message):
        adamw([("w", nn.Parameter(torch.zeros(3)))], **second).connect()


@pytest.mark.parametrize(
    "option",
    [
        {"connect_timeout": "3"},
        {"reconnect_timeout": -1},
        {"join_timeout": True},
        {"seed": -1},
        {"seed": "one"},
        {"takeover": 2},
        {"server": 7700},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type_is_refused_by_its_name(
    option: dict[str, Any], adamw: Callable[..., ballast.AdamW]
) -> None:
    (name,) = option
    with pytest.raises(ballast.Rejected, match=f"^{name}=.*: it must be"):
        adamw([nn.Parameter(torch.zeros(3))], **option)


def test_a_warning_names_a_few_of_many_tensors() -> None:
    names = tuple(f"layers.{i}" for i in range(20_000))
    result = StepResult(3, "ABORTED", "timeout", "rank 1", 0, 1, names, (), 0, 0, (), (), 0, None)
    with pytest.warns(UserWarning) as said:
        StepWarnings("r").tell(result)
    assert str(said[0].message) == (
        "run 'r', step 3 ended ABORTED (timeout: rank 1); not applied: layers.0, layers.1, layers.2 and 19997 more"
    )


def test_a_kind_is_told_once_a_minute_with_how_many_were_passed_over() -> None:
    result = StepResult(3, "ABORTED", "timeout", "rank 1", 0, 1, (), (), 0, 0, ("something",), (), 0, None)
    at_s = 0.0
    told = StepWarnings("r", now_s=lambda: at_s)
    with pytest.warns(UserWarning) as said:
        for at_s in (0, 1, 59, 60, 61):
            told.tell(result)
    lines = [str(warning.message) for warning in said]
    assert lines[:2] == ["run 'r', step 3 ended ABORTED (timeout: rank 1)", "run 'r', step 3: something"]
    assert lines[2:] == [f"{line} (and 2 more like it since the last warning)" for line in lines[:2]]
