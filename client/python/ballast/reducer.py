"""The reducer of a DistributedDataParallel module, switched off and on again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# Of a module with static_graph=True: that its first backward() has asked for the reduction that follows it.
_ASKED = "_static_graph_delay_allreduce_enqueued"


class SilentReducer:
    """Stands where the module has its reducer: asked to reduce gradients it does nothing. All else is the reducer's, so
    that no_sync(), the broadcasts of buffers and who else calls the reducer go on as ever.

    The reducer itself watches the parameters still; it leaves gradients alone unless a forward has prepared it.
    """

    def __init__(self, module: nn.parallel.DistributedDataParallel):
        self._asked = getattr(module, _ASKED, None)
        self._reducer: Any = module.reducer
        self._reducer._reset_state()  # an earlier forward may have prepared it
        setattr(module, "reducer", self)

    def restore(self, module: nn.parallel.DistributedDataParallel) -> None:
        """The module's gradients are reduced again, from its next forward on."""
        setattr(module, "reducer", self._reducer)
        if self._asked is not None:
            setattr(module, _ASKED, self._asked)

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        pass

    def _install_post_backward_futures(self, futures: list[Any]) -> None:
        """Of buffers that a hook sends around: the reducer would wait for them after backward."""
        torch.futures.wait_all(futures)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
