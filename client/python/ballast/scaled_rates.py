"""Learning rates that a loop has multiplied by lr_scale, before the daemon does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ballast.errors import Rejected


class ScaledRates:
    """The lr that each of param_groups began with. timm's schedulers, and loops such as MAE's, multiply what they set by the
    "lr_scale" that they find in a group; here that is an option, which the daemon multiplies by. Both would count it twice.
    """

    def __init__(self) -> None:
        self._began: list[float] = []

    def note(self, lr: Any) -> None:
        """Of a group that was added."""
        self._began.append(float(lr))

    def refuse_scaled(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Rejected if, since they began, the lr of all groups was multiplied by one number and by each one's lr_scale. Where
        all have the same scale nobody can tell, and with a schedule that does not look at it they have the number alone.
        """
        scales = [float(group["lr_scale"]) for group in groups]
        if len(set(scales)) < 2:
            return
        began = self._began if all(self._began) else [1.0] * len(groups)
        factors = [float(group["lr"]) / then for group, then in zip(groups, began)]
        largest = max(range(len(scales)), key=scales.__getitem__)
        common = factors[largest] / scales[largest]
        if common > 0 and all(math.isclose(f, common * s, rel_tol=1e-6) for f, s in zip(factors, scales)):
            at = next(place for place, scale in enumerate(scales) if scale != scales[largest])
            raise Rejected(
                "lr of each of param_groups was multiplied by its lr_scale, as timm's schedulers do, and some loops by hand, and the "
                f"daemon multiplies by it too (param_groups[{at}]: {groups[at]['lr']} times {scales[at]}). Let one "
                "of the two do it: a loop of your own sets group['lr'] = lr and leaves lr_scale out; for timm's schedulers write "
                "group['lr'] = lr * group.pop('lr_scale') for each group before the optimizer is made",
                "FAILED_PRECONDITION",
            )
