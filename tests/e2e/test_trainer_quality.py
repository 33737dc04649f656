"""The default formats cost nothing that a seed does not: HF Trainer's models are as good as with torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from daemon import Daemon
from framework_accounts import ask


def alike(losses: list[float], theirs: list[float]) -> bool:
    """Whether the mean over the seeds differs from that of torch's by less than torch's standard deviation over them."""
    return abs(fmean(losses) - fmean(theirs)) < stdev(theirs)


def test_default_formats_train_as_well_as_torchs_optimizer_and_the_rule_fails_what_does_not(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        losses = ask("trainer_quality.py", str(tmp_path), "--server", daemon.server)
    theirs = losses.pop("torch")
    assert alike(losses.pop("ballast"), theirs), losses
    assert losses
    for worse, values in losses.items():
        assert not alike(values, theirs), worse
