"""Models that fully_shard (FSDP2) has sharded end where torch's AdamW ends, and go on with any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ballast
from ballast import checkpoint
from conftest import Program, kept
from daemon import Daemon
from durable import checkpoints
from models import distance
from sharded_model import Blocks
from torchs_average import TorchsAverage

STAGED = {"commit": "staged"}
EXACT = {"master": "fp32", "state": "fp32"}
# Elements of the model, and of the tied one, whose head is the embedding.
ELEMENTS = 2 * 11 * 6 + 3 * (6 * 13 + 13 + 13 * 6 + 6)
TIED = ELEMENTS - 11 * 6

CASES: dict[str, dict[str, Any]] = {
    "one rank": {"world": 1},
    "two ranks": {"world": 2},
    "four ranks": {"world": 4},
    "eight ranks, of which some have no part of a tensor": {"world": 8},
    "staged": {"world": 2, "options": STAGED},
    "over gRPC": {"world": 2, "options": {"transport": "grpc"}},
    "clipped": {"world": 2, "options": STAGED, "clip": 0.1},
    "clipped at eight ranks": {"world": 8, "options": STAGED, "clip": 0.1},
    "the norm alone": {"world": 2, "options": STAGED, "clip": float("inf")},
    "accumulated in the daemon": {"world": 2, "micros": 3, "options": {"gradient_accumulation_steps": 3}},
    "accumulated in the daemon, staged": {"world": 2, "micros": 3, "options": STAGED},
    "accumulated by FSDP": {"world": 2, "micros": 3, "no_sync": True},
    "accumulated by FSDP, staged": {"world": 2, "micros": 3, "no_sync": True, "options": STAGED},
    "a loss that is scaled": {"world": 2, "scale": 1024.0, "options": {"loss_scale": 1024.0}},
    "computed in bf16": {"world": 2, "mixed": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
    "reduced in bf16": {"world": 2, "mixed": {"param_dtype": "bf16", "reduce_dtype": "bf16"}},
    "two copies of two parts": {"world": 4, "replicas": 2},
    "two copies, in another order": {"world": 4, "replicas": 2, "mesh": [[1, 3], [0, 2]]},
    "two copies of two parts, staged and clipped": {"world": 4, "replicas": 2, "options": STAGED, "clip": 0.1},
    "kept in host memory by FSDP": {"world": 2, "offloaded": True},
    "activation checkpointing": {"world": 2, "checkpointed": True},
    "tied embeddings": {"world": 2, "tied": True},
    "tied embeddings and activation checkpointing": {"world": 4, "tied": True, "checkpointed": True},
    "the optimizer made before": {"world": 2, "optimizer": "before"},
    "evaluated before each step": {"world": 2, "evaluated": True},
    "evaluated before each step, in one group": {"world": 2, "evaluated": True, "one group": True},
    "gathered before each forward, in one group": {"world": 2, "gathered": "whole", "one group": True},
    "being gathered before each forward": {"world": 2, "gathered": "under way"},
    "parameters put into param_groups": {"world": 2, "optimizer": "swapped"},
}

# Eight ranks on two cores take half a second for a step.
STEPS = {1: 20, 2: 20, 4: 10, 8: 6}

Order = Callable[..., list[Any]]


program = kept("fully_sharded")


@pytest.fixture
def order(program: Program, daemon: Daemon, run: str, tmp_path: Path) -> Order:
    """What each rank answers."""
    stores = iter(range(100))

    def carry_out(
        job: str, world: int, case: dict[str, Any], server: str = "", name: str = "", answers_text: bool = False
    ) -> list[Any]:
        wanted = {"job": job, "world": world, "case": case, "store": str(tmp_path / f"store-{next(stores)}")}
        answers: list[Any] = program.ask({**wanted, "server": server or daemon.server, "run": run + name})
        if job != "refused" and not answers_text:
            assert all(not isinstance(answer, str) for answer in answers), answers
        return answers

    return carry_out


@pytest.mark.parametrize("name", CASES)
def test_sharded_models_end_where_torchs_do_and_each_element_moves_once(name: str, order: Order) -> None:
    case = {"steps": STEPS[CASES[name]["world"]], **CASES[name]}
    # In bf16 a weight that differs by a millionth may round to another: then activations do by a 256th.
    allowed = 1e-3 if "mixed" in case else 1e-6
    answers = order("both", case["world"], case)
    for ours, theirs in answers:
        assert ours["weights"] == answers[0][0]["weights"]
        for tensor, values in ours["weights"].items():
            assert distance(values, theirs["weights"][tensor]) < allowed, tensor
        for one, other in zip(ours["steps"], theirs["steps"], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=allowed)
            assert one.get("norm", 0) == pytest.approx(other.get("norm", 0), rel=1e-5)
    assert_moved_once(case, [ours for ours, _ in answers])


def assert_moved_once(case: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    """Every element has left once for each gradient that FSDP made, and returned once to each copy."""
    elements = TIED if case.get("tied") else ELEMENTS
    sent = 1 if case.get("no_sync") else case.get("micros", 1)
    for step in range(case["steps"]):
        assert sum(one["pushed"][step] for one in ours) == 4 * elements * sent
        assert sum(one["pulled"][step] for one in ours) == 4 * elements * case.get("replicas", 1)


def test_the_norm_of_a_sharded_model_is_torchs_and_the_same_on_all_ranks(order: Order) -> None:
    case = {"steps": 3, "options": STAGED, "clip": 0.1}
    answers = order("both", 4, case)
    norms = [[step["norm"] for step in ours["steps"]] for ours, _ in answers]
    assert all(one == norms[0] for one in norms) and min(norms[0]) > 0.1
    assert norms[0] == pytest.approx([step["norm"] for step in answers[0][1]["steps"]], rel=1e-5)


# --- going on with another number of ranks ----------------------------------------------------------------------------

# Formats of their own, but without chance, which depends on the step's number in its run.
NEAREST = {"rounding": "nearest"}


# Whose matrices the daemon has whole, and of which each rank holds rows.
MUON = {"kind": "Muon"}
MUONS = {"adamw": ["embed*", "head*"], "adamw_lr": 1e-3}


def at_one_rank(order: Order, options: dict[str, Any], **more: Any) -> Any:
    (answer,) = order("nudged", 1, {"before": [0, 1, 2, 3, 4, 5], "options": options, **more}, name="-alone")
    return answer


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_sharded_matrices_make_the_steps_of_whole_ones(commit: str, order: Order) -> None:
    options = {**MUONS, "commit": commit}
    answers = order("nudged", 4, {**MUON, "before": [0, 1, 2, 3, 4, 5], "options": options})
    assert answers[0] == at_one_rank(order, options, **MUON)
    slots = {name: set(state) for name, state in answers[0]["moments"].items()}
    assert "momentum_buffer" in slots["blocks.0.0.weight"] and "exp_avg_sq" in slots["embed.weight"]


@pytest.mark.parametrize(
    "first, second, commit", [(2, 4, "release"), (2, 4, "staged"), (8, 2, "staged"), (4, 1, "release")]
)
def test_another_world_goes_on_in_a_daemon_that_lives(first: int, second: int, commit: str, order: Order) -> None:
    options = {"max_world": max(first, second), "commit": commit}
    order("nudged", first, {"before": [0, 1, 2], "options": options})
    answers = order("nudged", second, {"before": [3, 4, 5], "options": {**options, "weights": "server"}})
    assert answers[0] == at_one_rank(order, {**options})


@pytest.mark.parametrize("kind, own", [({}, {}), (MUON, MUONS)], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("first, second", [(2, 4), (8, 2)])
def test_another_world_goes_on_from_files_with_a_new_daemon(
    first: int, second: int, kind: dict[str, Any], own: dict[str, Any], order: Order, tmp_path: Path
) -> None:
    folder, options = str(tmp_path / "saved"), {**NEAREST, **own}
    order("nudged", first, {**kind, "before": [0, 1, 2], "save": folder, "options": options})
    with Daemon() as another:
        case = {**kind, "load": folder, "before": [3, 4, 5], "options": options, "seed": 2}
        answers = order("nudged", second, case, another.server)
    assert answers[0] == at_one_rank(order, options, **kind)


def test_a_rollback_in_the_middle_of_a_run(order: Order, tmp_path: Path) -> None:
    case = {"before": [0, 1, 2], "save": str(tmp_path / "saved"), "after": [3, 4, 5], "back": True, "options": NEAREST}
    assert order("nudged", 4, case)[0] == at_one_rank(order, NEAREST)


def test_more_ranks_than_the_run_has_memory_for_are_refused(order: Order) -> None:
    order("nudged", 1, {"before": [0]})
    answers = order("refused", 2, {"what": "more ranks", "options": {"weights": "server"}})
    assert all("has memory for 1 ranks, and world=2" in answer and "max_world=2" in answer for answer in answers)


# --- rewinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"clip": 1.0}])
def test_a_rewind_within_backward_is_heard_by_all_ranks_at_its_end(more: dict[str, Any], order: Order) -> None:
    options = {**EXACT, "snapshots": 4, "snapshot_every": 1, **(STAGED if more else {})}
    case = {"steps": 5, "to": 2, "options": options, **more}
    answers = order("rewound", 2, {**case, "at": 3})
    undisturbed = order("rewound", 2, {**case, "at": -1}, name="-undisturbed")
    for answer, wanted in zip(answers, undisturbed):
        assert answer["heard"] == [2] and wanted["heard"] == []
        assert answer["weights"] == wanted["weights"]


@pytest.mark.parametrize("more", [{}, {"gathered": "whole"}, {"gathered": "under way", "one group": True}])
def test_a_rewind_of_one_rank_alone_is_heard_by_the_others_before_they_read_its_weights(
    more: dict[str, Any], order: Order
) -> None:
    options = {**EXACT, "snapshots": 4, "snapshot_every": 1}
    case = {"steps": 5, "to": 2, "options": options, "by rank 0": True, **more}
    answers = order("rewound", 3, {**case, "at": 4})
    undisturbed = order("rewound", 3, {**case, "at": -1}, name="-undisturbed")
    for answer, wanted in zip(answers, undisturbed):
        assert answer["heard"] == [2] and wanted["heard"] == []
        assert answer["weights"] == wanted["weights"]


@pytest.mark.parametrize("more", [{}, {"clip": 1.0}])
def test_a_daemon_that_is_killed_within_backward_is_followed_by_all_ranks(
    more: dict[str, Any], order: Order, tmp_path: Path
) -> None:
    options = {**EXACT, **(STAGED if more else {})}
    storage = tmp_path / "storage"
    storage.mkdir()
    journal = {"durability": "journal_sync", "checkpoint_every_seconds": 1e6, "reconnect_timeout": 60}
    with Daemon(storage=storage) as doomed:
        killed = {"pid": doomed.pid, "port": doomed.port, "storage": str(storage)}
        case = {"steps": 5, "at": 3, "options": options | journal, "killed": killed, **more}
        answers = order("rewound", 2, case, server=doomed.server)
    undisturbed = order("rewound", 2, {"steps": 5, "at": -1, "options": options, **more}, name="-undisturbed")
    for answer, wanted in zip(answers, undisturbed):
        assert answer["heard"] == [3] and wanted["heard"] == []
        assert answer["weights"] == wanted["weights"]


# --- another process ----------------------------------------------------------------------------------------------------


def test_another_process_goes_on_with_the_weights_of_the_state_that_is_put_back(order: Order) -> None:
    case = {"steps": 5, "at": 3, "keeping": 2, "options": EXACT}
    answers = order("resumed", 2, case)
    undisturbed = order("rewound", 2, {"steps": 5, "at": -1, "options": EXACT}, name="-undisturbed")
    for answer, wanted in zip(answers, undisturbed):
        assert answer["found"] and answer["place"] == 5
        assert answer["weights"] == wanted["weights"]


def test_where_one_rank_alone_has_kept_its_state_all_are_told_what_to_do(order: Order) -> None:
    answers = order("resumed", 2, {"steps": 5, "at": 3, "keeping": 1, "options": EXACT}, answers_text=True)
    assert all("the weights differ from those of run" in answer for answer in answers), answers


# --- readers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_a_sharded_run_that_was_begun_without_follow_gets_it(commit: str, order: Order, run: str) -> None:
    options = {"commit": commit}
    with Daemon() as one:
        order("nudged", 2, {"before": [0, 1, 2], "options": options}, server=one.server)
        more = {"follow": True, "weights": "server"}
        answers = order("nudged", 2, {"before": [3, 4, 5], "options": {**options, **more}}, server=one.server)
        with ballast.Subscriber(one.server, run) as reader:
            version = reader.next(60)
            assert version is not None and version.step == 6
            for name, weights in answers[0]["weights"].items():
                assert version.tensors[name].flatten().tolist() == weights, name
    assert answers[0] == at_one_rank(order, options)


# --- averages ----------------------------------------------------------------------------------------------------------

DECAYS = [0.9, 0.999]


def by_name(weights: dict[str, Any], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """In the shapes of the model."""
    return {name: torch.tensor(weights[name]).view(p.shape) for name, p in model.named_parameters()}


def newest(server: str, run: str, decay: float, step: int) -> dict[str, torch.Tensor]:
    """An average as who is not of the run reads it."""
    with ballast.Subscriber(server, run, average=decay) as reader:
        version = reader.next(60)
        assert version is not None and version.step == step
        return dict(version.tensors)


@pytest.mark.parametrize(
    "world, more, options",
    [(2, {}, {}), (2, {}, STAGED), (4, {"replicas": 2}, {}), (8, {}, {})],
    ids=["two ranks", "staged", "two copies of two parts", "ranks without a part"],
)
def test_the_averages_of_a_sharded_run_are_torchs_and_leave_its_training(
    world: int, more: dict[str, Any], options: dict[str, Any], order: Order, run: str
) -> None:
    case = {"steps": 12, **more}
    kept = {**case, "options": {**EXACT, **options, "ema": DECAYS}, "followed": True}
    with Daemon() as one:
        ours = order("averaged", world, kept, server=one.server)
        read = {decay: newest(one.server, run, decay, step=12) for decay in DECAYS}
    plain = order("averaged", world, {**case, "options": {**EXACT, **options}})
    for answer in ours:
        assert answer["weights"] == plain[0]["weights"] and answer["averages"] == ours[0]["averages"]
        assert "which is sharded" in answer["refused"] and "averaged()" in answer["refused"]
    model = Blocks({})
    theirs = [TorchsAverage(model, decay) for decay in DECAYS]
    for weights in ours[0]["weights"]:
        with torch.no_grad():
            for name, value in by_name(weights, model).items():
                model.get_parameter(name).copy_(value)
        for average in theirs:
            average.update(model)
    for average in theirs:
        averaged = by_name(ours[0]["averages"][str(average.decay)], model)
        average.check(averaged)
        for name, values in averaged.items():
            assert torch.equal(read[average.decay][name], values), name


def test_averages_of_a_sharded_run_go_on_from_a_checkpoint(order: Order, tmp_path: Path) -> None:
    options = {**EXACT, "ema": DECAYS}
    undisturbed = order("averaged", 2, {"steps": 6, "options": options}, name="-undisturbed")
    with Daemon(storage=tmp_path) as first:
        case = {"steps": 3, "options": options, "checkpoint": True}
        before = order("averaged", 2, case, server=first.server, name="-kept")
    (folder,) = (tmp_path / "runs").iterdir()
    stored = checkpoint.open(checkpoints(tmp_path, folder.name)[-1])
    for decay in DECAYS:
        for name, average in before[0]["averages"][str(decay)].items():
            assert stored.average(name, decay).ravel().tolist() == average, (name, decay)
    with Daemon(storage=tmp_path) as second:
        case = {"begins": 3, "steps": 6, "options": {**options, "weights": "server"}}
        after = order("averaged", 2, case, server=second.server, name="-kept")
    for answer, wanted in zip(after, undisturbed):
        assert answer["averages"] == wanted["averages"]
        assert answer["weights"] == wanted["weights"][3:]


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, world, case, message",
    [
        ("half a mesh", 4, {}, "its mesh must have every rank of the run once"),
        ("ranks that descend", 4, {"mesh": [[3, 1], [0, 2]]}, "Write ranks that ascend"),
        ("unequal copies", 4, {"replicas": 2}, "differ from those that"),
        ("unequal state", 2, {}, "the ranks have loaded different state of 'embed.weight'"),
        ("state of one rank", 2, {}, "load_state_dict() was called on some ranks of run"),
        ("changed weights", 2, {}, "the weights of 'embed.weight' were changed after step 1"),
        ("scaled weights", 2, {"options": {"serving": "int8-row"}}, "of parameter 'embed.weight', which is sharded"),
        ("rank and world", 2, {"options": {"rank": 0, "world": 1}}, "whose ranks are torch.distributed's"),
    ],
)
def test_what_ranks_cannot_do_together_is_refused_on_all(
    what: str, world: int, case: dict[str, Any], message: str, order: Order
) -> None:
    answers = order("refused", world, {"what": what, **case})
    assert len(answers) == world and all(message in answer for answer in answers), answers


@pytest.mark.parametrize(
    "loads, there, elsewhere",
    [
        (True, "the weights of 'embed.weight' hold a NaN", "another rank's parts hold a NaN"),
        (
            False,
            "the weights of 'embed.weight' were changed after step 1",
            "cannot begin step 2: its own error says why",
        ),
    ],
)
def test_weights_that_one_rank_has_spoilt_are_refused_on_all_and_the_run_goes_on(
    loads: bool, there: str, elsewhere: str, order: Order
) -> None:
    answers = order("spared", 2, {"loads": loads})
    assert elsewhere in answers[0][0] and there in answers[1][0], answers
    assert all(answer[1:] == ["APPLIED", 2, True] for answer in answers), answers


def test_a_rank_that_has_left_the_loop_is_awaited_with_a_word_and_missed_when_it_ends(order: Order) -> None:
    _, (said, raised) = order("left", 2, {})
    assert "waits until all ranks come to the same point" in said and "optimizer.in_step(loader)" in said
    assert "a step with sharded parameters: torch.distributed cannot reach the other ranks" in raised
