"""What `import ballast` shows."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys

import pytest
import torch

import ballast

PUBLIC = set(
    "Adam AdamW CollageLight CollagePlus Follow Follower GradScaler Joined Lion Muon Optimizer RunOptions SGD SpikeEvent Spikes StableAdamW "
    "StepResult StepTiming Subscriber Tls Version WeightPatch delete_run follow nn numerics umup_scales BallastError Rejected RunFenced RunRewound Unavailable".split()
)
FUNCTIONS = {"delete_run", "follow", "umup_scales"}
RULES = [
    ballast.Adam,
    ballast.AdamW,
    ballast.CollageLight,
    ballast.CollagePlus,
    ballast.Lion,
    ballast.Muon,
    ballast.SGD,
]
RULES.append(ballast.StableAdamW)


def test_dir_shows_the_public_names_and_no_others() -> None:
    assert set(dir(ballast)) == PUBLIC | {"__version__"} == set(ballast.__all__)


def test_dir_needs_no_torch() -> None:
    program = "import sys, ballast; print(len(dir(ballast)), ballast.numerics.__name__, 'torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [str(len(dir(ballast))), "ballast.numerics", "False"]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_a_docstring_of_its_own(name: str) -> None:
    text = getattr(ballast, name).__doc__ if name in FUNCTIONS else vars(getattr(ballast, name))["__doc__"]
    assert text and len(text.split()) > 5


@pytest.mark.parametrize("rule", RULES)
def test_the_help_of_an_optimizer_names_every_option(rule: type) -> None:
    text = pydoc.plain(pydoc.render_doc(rule))
    arguments = set(inspect.signature(rule).parameters) - {"options"}
    missing = {name for name in arguments | set(ballast.RunOptions.__annotations__) if name not in text}
    assert missing == set()
    assert "foreach" not in arguments or "mean nothing here" in text


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ballast' has no attribute 'Adamw'"):
        ballast.Adamw


@pytest.mark.parametrize("version", ["2.3.1+cpu", "1.13.0"])
def test_an_older_torch_is_refused_by_its_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=f"torch 2.4 or later, and this is {re.escape(version)}"):
        ballast.AdamW  # noqa: B018
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git12345")
    assert ballast.AdamW.__name__ == "AdamW"
