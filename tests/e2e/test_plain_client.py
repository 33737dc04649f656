"""The wire is enough: a client made of proto/ and its PROTOCOL.md trains as the C++ client does, to the bit, cuts and all."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ballast
import pytest
import torch
from daemon import ROOT, Daemon, plain_environment, until
from least_squares import NAMES, LeastSquares, has_bias, rate
from plain_stubs import make_stubs
from plain_wire import digest_of

sys.path.append(str(ROOT / "tests" / "python"))
from proxy import Proxy  # noqa: E402

STEPS, TEAM_STEPS = 100, 17
RANKS = MICROS = 2
HERE = Path(__file__).resolve().parent
# Small, so that the weight has several chunks, and more bytes than its rank has credit.
LIMITS = ("--limits.chunk_bytes", "16KiB", "--limits.credit_bytes", "32KiB")
# One chunk at a time: ranks that send in different orders wait for what the daemon wants.
TIGHT = ("--limits.chunk_bytes", "16KiB", "--limits.credit_bytes", "16KiB")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    return make_stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon"), *TIGHT) as daemon:
        yield daemon


def run_plainly(stubs: Path, program: str, *arguments: str):
    """What it prints."""
    ended = subprocess.run(
        [sys.executable, HERE / program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**plain_environment(), "PYTHONPATH": os.pathsep.join([str(stubs), str(HERE)])},
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def train_plainly(stubs: Path, *arguments: str) -> list[dict]:
    """What each rank saw."""
    return run_plainly(stubs, "plain_trainer.py", *arguments)


def train_by_client(server: str, run: str) -> tuple[list[float], str]:
    """The losses, and a digest of the weights, of the C++ client given the very same gradients."""
    problem, losses = LeastSquares(), []
    parameters = [torch.nn.Parameter(torch.from_numpy(first.copy())) for first in problem.first]
    with ballast.AdamW(list(zip(NAMES, parameters)), server=server, run=run) as optimizer:
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            loss, gradients = problem.backward([parameter.detach().numpy() for parameter in parameters])
            losses.append(loss)
            sum((p * torch.from_numpy(gradient)).sum() for p, gradient in zip(parameters, gradients)).backward()
            optimizer.step(loss=loss)
    return losses, digest_of(parameter.detach().numpy() for parameter in parameters)


def train_rank_by_client(server: str, run: str, rank: int, dtype: torch.dtype, options: dict) -> str:
    """The same for a rank of a team, with micro-batches: a digest of the weights, as fp32."""
    problem = LeastSquares()
    parameters = [torch.nn.Parameter(torch.from_numpy(first.copy()).to(dtype)) for first in problem.first]
    team = {"rank": rank, "world": RANKS, "gradient_accumulation_steps": MICROS}
    with ballast.AdamW(list(zip(NAMES, parameters)), server=server, run=run, **team, **options) as optimizer:
        for step in range(1, TEAM_STEPS + 1):
            optimizer.param_groups[0]["lr"] = rate(step)
            before = [parameter.detach().float().numpy().copy() for parameter in parameters]
            for micro in range(MICROS):
                loss, gradients = problem.backward(before, rank * MICROS + micro, RANKS * MICROS)
                pairs = list(zip(parameters, gradients))[: 2 if has_bias(rank, micro) else 1]
                sum((p * torch.from_numpy(gradient).to(dtype)).sum() for p, gradient in pairs).backward()
            optimizer.step(loss=loss)
            assert optimizer.last_result.applied
    return digest_of(parameter.detach().float().numpy() for parameter in parameters)


def train_team_by_client(server: str, run: str, dtype: torch.dtype = torch.float32, **options) -> str:
    with ThreadPoolExecutor(RANKS) as ranks:
        digests = set(ranks.map(lambda rank: train_rank_by_client(server, run, rank, dtype, options), range(RANKS)))
    assert len(digests) == 1
    return digests.pop()


def team(run: str) -> list[str]:
    return [f"plain-{run}", run, str(TEAM_STEPS), "--ranks", str(RANKS), "--micros", str(MICROS)]


def test_generated_stubs_train_like_the_client(tmp_path, stubs):
    with Daemon(tmp_path, *LIMITS) as daemon:
        losses, digest = train_by_client(daemon.server, "client")
        [seen] = train_plainly(stubs, daemon.server, "plain", "client", str(STEPS))
    assert losses[-1] < 1e-3 * losses[0]
    assert seen["losses"] == losses
    assert seen["digest"] == digest
    assert seen["chunks_sent"] == 4 * STEPS
    assert seen["waits"] > 0 and seen["most_under_way"] <= seen["credit"]


@pytest.mark.parametrize("commit", ["release", "staged"])
def test_ranks_that_are_cut_in_every_step_train_like_the_client(commit, stubs, tight):
    options = {"max_grad_norm": 1.0} if commit == "staged" else {}
    digest = train_team_by_client(tight.server, commit, **options)
    ranks = train_plainly(stubs, tight.server, *team(commit), "--cut")
    assert [seen["digest"] for seen in ranks] == [digest] * RANKS
    assert sum(seen["cuts"] for seen in ranks) == TEAM_STEPS
    assert [seen["clipped"] for seen in ranks] == [commit == "staged"] * RANKS
    assert ranks[0]["out_of_order"] + ranks[1]["out_of_order"] > 0
    assert any(seen["most_under_way"] > seen["credit"] for seen in ranks)


def test_ranks_that_measure_and_clip_each_step_themselves_train_like_the_client(stubs, tight):
    digest = train_team_by_client(tight.server, "measured", max_grad_norm=1.0)
    ranks = train_plainly(stubs, tight.server, *team("measured"), "--measure", "--cut")
    assert [seen["digest"] for seen in ranks] == [digest] * RANKS
    assert [seen["clipped"] for seen in ranks] == [True] * RANKS
    assert sum(seen["cuts"] for seen in ranks) == TEAM_STEPS


@pytest.mark.parametrize(
    "dtype, options",
    [(torch.bfloat16, {}), (torch.float32, {"gradient_dtype": "bf16", "serving": "int8-row"})],
    ids=["bf16", "int8-row"],
)
def test_narrow_formats_train_like_the_client_over_a_connection_that_is_lost(dtype, options, stubs, tight):
    run = "wide" if options else "narrow"
    digest = train_team_by_client(tight.server, run, dtype, **options)
    with Proxy(tight.server) as proxy:
        proxy.cut_after(400_000)
        ranks = train_plainly(stubs, proxy.server, *team(run))
        assert proxy.was_cut.is_set()
    assert [seen["digest"] for seen in ranks] == [digest] * RANKS


def test_a_rank_that_comes_back_when_several_steps_have_closed_goes_on_after_them(stubs, tight):
    seen = run_plainly(stubs, "plain_away.py", tight.server, "away")
    assert seen["resume_step"] == 5
    assert seen["missed"] == [[2, "disagreement"], [3, "disagreement"], [4, "disagreement"]]
    assert seen["last"] == [[5, "STEP_OUTCOME_APPLIED"]] * 3
    assert len(set(seen["digests"])) == 1


# proto/PROTOCOL.md, "Attach", "The Train stream" and "Status codes".
REFUSALS = {
    "create again": ["OK", "FAILED_PRECONDITION"],
    "dtype fp8-e5m2": ["OK", "INVALID_ARGUMENT"],
    "attach": ["OK", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "INVALID_ARGUMENT"],
    "an unknown token": ["NOT_FOUND", "NOT_FOUND"],
    "an unknown run": "NOT_FOUND",
    "the rank is held": ["ALREADY_EXISTS", "OK", "ABORTED", "ABORTED"],
    "the rank is held, its stream gone": ["ALREADY_EXISTS+delay", "OK", "FAILED_PRECONDITION"],
    "half-close": ["OK", "OK", "FAILED_PRECONDITION", "ALREADY_EXISTS+delay"],
    "a second stream": "CANCELLED",
    "damaged": ["DATA_LOSS", "OK", "DATA_LOSS", "ABORTED"],
    "loading": [
        "FAILED_PRECONDITION",
        "FAILED_PRECONDITION",
        "DATA_LOSS",
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
    ],
    "a replacement is cut": ["INVALID_ARGUMENT", "False", "OK"],
    "rewound": ["FAILED_PRECONDITION", "FAILED_PRECONDITION", "True"],
    "no Open": "FAILED_PRECONDITION",
    "another step": "FAILED_PRECONDITION",
    "begun with other values": "FAILED_PRECONDITION",
    "values with StepEnd, release": "FAILED_PRECONDITION",
    "max_grad_norm with StepEnd, release": "FAILED_PRECONDITION",
    "max_grad_norm 0": "INVALID_ARGUMENT",
    "discard, release": "FAILED_PRECONDITION",
    "StepMeasure, release": "FAILED_PRECONDITION",
    "StepMeasure before MicroEnd": "FAILED_PRECONDITION",
    "StepMeasure after StepEnd": "FAILED_PRECONDITION",
    "no last micro-batch, release": "FAILED_PRECONDITION",
    "loss_scale 0": "INVALID_ARGUMENT",
    "scale 2": "INVALID_ARGUMENT",
    "scale 1": "FAILED_PRECONDITION",  # taken; it is the half-close that is refused
    "no format": "INVALID_ARGUMENT",
    "a chunk too many": "INVALID_ARGUMENT",
    "a byte too many": "INVALID_ARGUMENT",
    "absent and sent": "INVALID_ARGUMENT",
    "absent past the end": "INVALID_ARGUMENT",
    "not whole": "INVALID_ARGUMENT",
    "StepEnd before MicroEnd": "FAILED_PRECONDITION",
    "a micro-batch after the last": "FAILED_PRECONDITION",
    "a batch in a batch": "INVALID_ARGUMENT",
    "1,025 in a batch": "INVALID_ARGUMENT",
    "nothing in a message": "INVALID_ARGUMENT",
    "3 MiB in a message": "RESOURCE_EXHAUSTED",
}


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the document, its own heading left out."""
    text = (ROOT / "proto" / "PROTOCOL.md").read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_refusals_rules_and_formats_are_as_the_document_says(tmp_path, stubs):
    with Daemon(tmp_path, "--limits.chunk_bytes", "16KiB", "--max_runs", "100") as daemon:
        found = run_plainly(stubs, "plain_probes.py", daemon.server)
    assert found["probes"] == REFUSALS
    formats = rows_under("Formats")
    told = {name: [row[2] == "yes", row[3] == "yes"] for row in formats for name in re.findall("`(.*?)`", row[0])}
    assert found["formats"] == told
    rules = {
        rule: {name: float(value) for name, value in re.findall(r"(\w+) ([\d.e-]+)", hypers)}
        for names, hypers in rows_under("Rules and hyperparameters")
        for rule in re.findall("`(.*?)`", names)
    }
    assert found["rules"] == rules


@pytest.mark.parametrize("serving", ["fp32", "bf16", "int8-row"])
def test_a_reader_made_of_the_protocol_has_the_weights_that_are_served(serving, stubs, tight):
    run = f"followed-{serving}"
    problem = LeastSquares()
    dtype = torch.bfloat16 if serving == "bf16" else torch.float32
    parameters = [torch.nn.Parameter(torch.from_numpy(first.copy()).to(dtype)) for first in problem.first]
    options = {"server": tight.server, "run": run, "follow": True}
    if serving == "int8-row":
        options["serving"] = serving
    with ballast.AdamW(list(zip(NAMES, parameters)), **options) as optimizer, ThreadPoolExecutor(1) as reader:
        reading = None
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = 1e-5 if step > 3 else 1e-2
            _, gradients = problem.backward([parameter.detach().float().numpy() for parameter in parameters])
            sum((p * torch.from_numpy(g).to(dtype)).sum() for p, g in zip(parameters, gradients)).backward()
            optimizer.step()
            if step == 3:
                reading = reader.submit(run_plainly, stubs, "plain_follower.py", tight.server, run, str(STEPS))
            if step == 4:
                until("somebody follows", lambda: f'ballast_followers{{run_id="{run}"}} 1' in tight.get("/metrics")[1])
        seen = reading.result()
    assert seen["digest"] == digest_of(parameter.detach().float().numpy() for parameter in parameters)
    assert seen["versions"][0]["whole"] and seen["versions"][-1]["step"] == STEPS
    assert any(not version["whole"] for version in seen["versions"])
