"""Options of a step that contradict each other are refused by the constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ballast
from models import layered

AdamW = Callable[..., ballast.AdamW]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"commit": "release", "max_grad_norm": 1.0}, "commit='release' and max_grad_norm=1.0"),
        ({"commit": "release", "nonfinite": "skip_step"}, "commit='release' and nonfinite='skip_step'"),
        ({"commit": "sometimes"}, "commit='sometimes': it must be one of 'auto', 'release', 'staged'"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore': it must be one of 'skip_tensor'"),
        ({"on_torn": "retry"}, "on_torn='retry': it must be one of 'close', 'rewind'"),
        ({"on_torn": "rewind"}, "on_torn='rewind' goes back to a snapshot, but snapshots=0"),
        ({"on_lost_rank": "ignore"}, "on_lost_rank='ignore': it must be one of 'wait', 'continue'"),
        ({"rank_timeout": 0}, "rank_timeout=0: it must be above 0 and at most 1e6 seconds"),
        ({"step_timeout": -1.0}, "step_timeout=-1.0: it must be None or above 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: it must be None or a finite number above 0"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf"),
    ],
)
def test_contradictory_and_strange_options_are_refused(options: Any, message: str, adamw: AdamW) -> None:
    with pytest.raises(ballast.Rejected, match=message):
        adamw(layered(seed=1).named_parameters(), **options)
