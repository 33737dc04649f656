"""Messages of the daemon and of the C++ client, with the names that the Python options have."""

from __future__ import annotations

import re

# "groups[0].hyper['eps']" is "groups[0].eps" here.
_HYPER = re.compile(r"""\.hyper\[['"]?(\w+)['"]?\]""")
# Values of the wire's enumerations, which the options have in small letters.
_VALUE = re.compile(
    r"( = )?\b(?:COMMIT_MODE|NONFINITE_POLICY|TORN_POLICY|LOST_RANK_POLICY|DURABILITY_MODE|SPIKE_ACTION|SPIKE_KIND)_([A-Z_]+)"
)
# What is said there, and what is said here.
_WORDS = [
    (re.compile(there), here)
    for there, here in (
        (r"\b(nonfinite|commit|on_torn|on_lost_rank) = ([a-z_]+)", r"\1='\2'"),
        (r"\btakeover=true\b", "takeover=True"),
        (r"\brun_id\b", "run"),
        (r"\b(\w+_timeout)_s\b", r"\1"),
        (r"\b(?:RunSpec\.)?rewind\.snapshots\b", "snapshots"),
        (r"\b(?:RunSpec\.)?rewind\.every\b", "snapshot_every"),
        (r"\brewind(?= is unset| is snapshots)", "snapshots"),
        (r"\bcheckpoint\.(every_(?:steps|seconds))\b", r"checkpoint_\1"),
        (r"\bcheckpoint\.retain\b", "checkpoints_kept"),
        (r"\bcheckpoint\.(durability|journal_steps)\b", r"\1"),
        (
            r"\bcheckpoint is given\b",
            "checkpoint_every_steps, checkpoint_every_seconds, checkpoints_kept or durability is given",
        ),
        (r"\bRunSpec\.accumulation\b|\baccumulation(?= is )", "gradient_accumulation_steps"),
        (r"\branks(?= is (?:\d|unset))", "world"),
        (r"\bdynamic_loss_scale(?: = true)?", "ballast.GradScaler"),
        (r"(?<=\])\.gradient\b", ".gradient_dtype"),
        (r"\bStepBegin\.loss_scale\b", "loss_scale"),
        (r"\bStepEnd\.client_state\b|\bEndStep: client_state\b", "the registered client state"),
        (r"\bhas sent nothing but StepBegin\b", "has begun it and sent nothing"),
        (r"\bhas not sent StepEnd\b", "has not called step()"),
        (r"\bhas not sent MicroEnd of\b", "has not ended"),
        (r"\bStep(?:Begin|End) of step\b", "step"),
        (r" \(StepEnd\.discard\)", " (zero_grad() after backward())"),
        (
            r"has no RunSpec\.follow, so nobody may follow it: create the run with follow, or amend it",
            "was begun without follow=True, so nobody may follow it: start its trainer again with follow=True in its optimizer",
        ),
        (r"its spec has no `follow` \(RunSpec\.follow\)", "it was begun without follow=True"),
        (r"\bfollow\.readers\b", "readers of ballast.Follow"),
        (r"\bfollow\.averages\b", "averages=True of ballast.Follow"),
        (r"\bfollow\.formats(\[\d+\])", r"formats\1 of ballast.Follow"),
        (r"\bfollow\.formats\b", "formats of ballast.Follow"),
        (r" \(RunSpec\.averages\)", " (ema=)"),
        (r"\baverages(?=\[\d\] is | has \d)", "ema"),
        (r"`ballastctl delete RUN`", "ballast.delete_run('RUN'), or `ballastctl delete RUN`"),
        (
            r"\ba trainer sends them with LoadState\b",
            "an optimizer with weights='client' sends them at its first gradient",
        ),
        (r"\bLoadState is for before\b", "weights are uploaded before"),
        (r"\bLoadState with replace is for\b", "weights and state are replaced"),
        (r"\bby a LoadState that\b", "by load_state_dict() that"),
        (r"\bAmendRun has added\b", "add_param_group() or requires_grad_() has added"),
        (
            r"send them with LoadState \(LoadStateRequest\.replace\) before the next step",
            "load_state_dict() of a checkpoint sends them",
        ),
        (r"\bAmendRun: | \(AmendRun\)", ""),
        (r"\bAmendRun is for between\b", "a run's tensors and options change between"),
        (
            r"send all of the tensors that it had begun with another \(LoadStateRequest\.replace\)",
            "load all of it again",
        ),
    )
]
# Names of runs and tensors: they stay as they are.
_QUOTED = re.compile(r"""((?<!\w)'[^']*'|"[^"]*")""")
# What a terminal obeys, or nobody sees, as proto/utf8.cc has it; but for the ends of lines and tabs.
_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def seen(text: str) -> str:
    """`text` to be shown to a person: it may hold names that somebody else has chosen, as the tensors of a run that is followed."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def in_python(text: str) -> str:
    """`text` in the words of the options, as a user of this package writes them."""
    pieces = _QUOTED.split(_HYPER.sub(r".\1", text))
    pieces[::2] = map(_said_here, pieces[::2])
    return "".join(pieces)


def _said_here(text: str) -> str:
    text = _VALUE.sub(lambda found: f"{'=' if found[1] else ''}'{found[2].lower()}'", text)
    for there, here in _WORDS:
        text = there.sub(here, text)
    return text
