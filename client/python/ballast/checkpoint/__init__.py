"""Reads the checkpoints that a daemon writes to its disk (proto/CHECKPOINTS.md): without a daemon, and without torch.

    python -m ballast.checkpoint show /data/ballast             # what is there
    python -m ballast.checkpoint verify /data/ballast           # every byte of it

    import ballast.checkpoint

    checkpoint = ballast.checkpoint.open("/data/ballast/runs/my-run/000000000007-step-120")
    checkpoint.step, checkpoint.run_id, checkpoint.spec["groups"]
    for name in checkpoint.tensors():
        checkpoint.plane(name, "momentum")      # words as they are stored, mapped from the file
        checkpoint.weights(name)                # the master weights as fp32
        checkpoint.moment(name, "variance")     # v as fp32
    checkpoint.client_state(rank=0)             # bytes, or None
    checkpoint.verify()                         # what is wrong with it; (): nothing

Needs numpy alone; weights() and moment() decode with ballast.numerics, and so with the compiled core.
"""

from __future__ import annotations

from ballast.checkpoint.checkpoint import Checkpoint, open
from ballast.checkpoint.errors import CheckpointError, Damaged, NotACheckpoint, Stray, TooNew
from ballast.checkpoint.manifest import Manifest

__all__ = ["Checkpoint", "CheckpointError", "Damaged", "Manifest", "NotACheckpoint", "Stray", "TooNew", "open"]
