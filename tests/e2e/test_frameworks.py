"""Unmodified HF Trainer, TRL, Accelerate and Lightning, and a recipe as torchtune's: each trains as with torch's AdamW, or
is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from framework_accounts import compare, told_by

# By process: importing a framework takes longer than training with it.
GROUPS = {
    "transformers": [
        "hf_trainer",
        "hf_trainer_unclipped",
        "hf_trainer_class",
        "hf_trainer_bf16",
        "hf_checkpointing",
        "hf_checkpointing_reentrant",
        "hf_adapters",
        "hf_adapters_class",
        "hf_best",
        "hf_trains_on",
        "hf_goes_back",
        "hf_interrupted",
        "hf_average",
        "sft_trainer",
        "reward_trainer",
        "dpo_trainer",
        "grpo_trainer",
    ],
    "accelerate": ["recipe", "accelerate_loop", "accelerate_goes_back", "accelerate_released", "accelerate_skips"],
    "lightning": [
        "lightning_loop",
        "lightning_bf16",
        "lightning_average",
        "lightning_gan",
        "lightning_gan_untoggled",
    ],
}
TELL_NORMS = ["recipe", "accelerate_loop", "accelerate_goes_back", *GROUPS["transformers"]]
# What each is refused with: why, and what to write instead.
REFUSED = {
    "transformers": {
        "hf_trains_on_unasked": ["were changed after step 16", "load_state_dict()", "changed_weights='upload'"]
    },
    "accelerate": {
        "accelerate_clips_values": ["clip_grad_value_ cannot clip", "clip_grad_norm_, max_grad_norm="],
        "accelerate_clips_each_backward": [
            "got a gradient after the norm of step 1 was asked for",
            "run every backward() of a step before",
        ],
    },
    "lightning": {
        "lightning_clips_values": ["clip_grad_value_ cannot clip", "clip_grad_norm_, max_grad_norm="],
        "lightning_looks_at_gradients": [
            "of 'model.model.embed_tokens.weight' has left for the daemon",
            "clip_grad_norm_(",
        ],
    },
}


# With the linear layers in int8, in the codes that the daemon serves, against the same layers and torch's optimizer: how
# many layers hold codes at the end. One loop ends with weights that it loads, one moves the model to the CPU.
IN_INT8 = {"hf_checkpointing": 2 * 7, "accelerate_goes_back": 2 * 7, "hf_trains_on": 0, "lightning_loop": 0}


@pytest.fixture(scope="module", params=GROUPS)
def accounts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What torch's and ballast's optimizers did in the loops of one group."""
    group = request.param
    folder = tmp_path_factory.mktemp(group)
    with Daemon(folder, "--max_runs", "64") as daemon:
        theirs = told_by("torch", GROUPS[group], folder / "torch")
        ours = told_by("ballast", [*GROUPS[group], *REFUSED[group]], folder / "ballast", "--server", daemon.server)
    return group, ours, theirs


def test_each_trains_as_with_torchs_optimizer(accounts: Any, subtests: Any) -> None:
    group, all_ours, all_theirs = accounts
    for loop in GROUPS[group]:
        with subtests.test(loop):
            compare(loop, all_ours[loop], all_theirs[loop])
            assert (loop in TELL_NORMS) == bool(all_theirs[loop]["norms"])


def test_what_cannot_work_is_refused_by_name(accounts: Any, subtests: Any) -> None:
    group, all_ours, _ = accounts
    for loop, words in REFUSED[group].items():
        with subtests.test(loop):
            for said in words:
                assert said in all_ours[loop].get("refused", "it was not refused")


def test_layers_in_served_codes_train_as_with_torchs_optimizer(tmp_path: Path, subtests: Any) -> None:
    with Daemon(tmp_path) as daemon:
        theirs = told_by("torch", list(IN_INT8), tmp_path / "torch", "--int8")
        ours = told_by("ballast", list(IN_INT8), tmp_path / "ballast", "--int8", "--server", daemon.server)
    for loop, served in IN_INT8.items():
        with subtests.test(loop):
            compare(loop, ours[loop], theirs[loop], int8=True)
            assert (ours[loop]["served"], theirs[loop]["served"]) == (served, 0)
