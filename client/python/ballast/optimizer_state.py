"""The state of an optimizer, in torch's interface: `state`, state_dict() and load_state_dict()."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ballast.errors import Rejected
from ballast.membership import Membership
from ballast.options import check_group, loaded_group
from ballast.remote_state import RemoteState
from ballast.settings import RunSettings
from ballast.starting_state import StartingState
from ballast.state_dicts import StateDicts
from ballast.steps import Steps


class OptimizerState(torch.optim.Optimizer):
    """What Optimizer has of it. Hooks on state dicts, torch's, hear of the whole dict."""

    _steps: Steps
    _membership: Membership
    _settings: RunSettings

    if TYPE_CHECKING:

        def rewind(self, steps: int | None = None, *, to: int | None = None) -> int: ...

    def _keep_state(
        self, settings: RunSettings, membership: Membership, steps: Steps, starting_state: StartingState
    ) -> None:
        """After torch's constructor, which makes a `state` of its own."""
        self._state_dicts = StateDicts(settings, membership, steps, starting_state)
        self._remote = RemoteState(settings.rank.run)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Always empty: state_dict() asks the daemon."""
        return self._remote

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if hasattr(self, "_remote") and (
            state or not self._state_dicts.begin_anew
        ):  # else torch's constructor makes one
            self._remote.replaced()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, in fp32 on the CPU: torch's optimizers and new runs go on from it. One rank alone may ask the daemon for
        it; no step is made. "master" beside the moments is the daemon's weight, where the parameter may hold less. Parameters
        without an update have no state; with saved_state="reference" none has. "ballast" tells run and step. Waits for the
        last step(). Rejected between backward() and step(). RunRewound, as from step(), if the run is at another step.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._steps.wait()
        with self._steps.lock, self._steps.following():
            read = {**self.options_dict(), **self._state_dicts.read(self.param_groups, self._remote.pop_asked())}
        return _through(self._optimizer_state_dict_post_hooks, self, read)

    def options_dict(self) -> dict[str, Any]:
        """state_dict() without state. Hooks do not hear of it."""
        with _unhooked(self, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"):
            return {**super().state_dict(), "state": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes lr and the other options of param_groups over, as LR schedulers need it. Options that it lacks keep
        their values, and so do master, state, rounding, serving and gradient_dtype: a run's formats are no part of its state.

        State that it holds, as torch's optimizers keep it, goes to the run with the parameters' weights at the next first
        gradient: into a new run, or in the middle of one, after a rollback; steps count on. Every rank loads the same
        before the same step; rank 0's is sent. A parameter without state is begun anew, and so are all by what this
        optimizer saved before its first step; without any "state" options alone are taken else. A reference takes the run to
        its step. Gradients of a staged step that is open are to be dropped, by zero_grad(). Rejected while another step is
        open, and of state that has no place.
        """
        self.load_unhooked(_through(self._optimizer_load_state_dict_pre_hooks, self, dict(state_dict)))

    def load_unhooked(self, state_dict: dict[str, Any]) -> None:
        """load_state_dict() that those hooks do not hear of which may change what is loaded."""
        self._steps.wait()
        session = self._membership.session
        if session is not None and session.step_open and not session.staged:
            raise Rejected(f"step {session.step} is open: call step() first", "FAILED_PRECONDITION")
        saved, sizes = list(state_dict["param_groups"]), [len(group["params"]) for group in self.param_groups]
        kept = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        if len(saved) == len(kept):  # else torch says what is wrong
            saved = [loaded_group(ours, theirs, self._settings.rule) for ours, theirs in zip(kept, saved)]
            for group in saved:
                check_group(group, self._settings.rule)
        if [len(group["params"]) for group in saved] == sizes:  # else likewise
            with self._steps.lock:
                self._state_dicts.take(state_dict, self.param_groups, lambda step: self.rewind(to=step))
        with _unhooked(self, "_optimizer_load_state_dict_pre_hooks"):
            super().load_state_dict({"state": {}, "param_groups": saved})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For torch's load_state_dict() alone. The groups change in place: a wrapper that has a copy of __dict__, such as
        Lightning's, sees the same ones."""
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            group.clear()
            group.update(loaded)


def _through(
    hooks: Mapping[int, Callable[..., Any]], optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """What torch's hooks of state dicts make of one."""
    for hook in hooks.values():
        made = hook(optimizer, state_dict)
        state_dict = state_dict if made is None else made
    return state_dict


@contextmanager
def _unhooked(optimizer: torch.optim.Optimizer, *names: str) -> Iterator[None]:
    """Within it torch does not call these hooks: they are called for the whole dict."""
    kept = {name: getattr(optimizer, name) for name in names}
    try:
        for name in names:
            setattr(optimizer, name, {})
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)
