"""state_dict() and load_state_dict() of an optimizer, beside the options of its param_groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ballast.errors import Rejected
from ballast.membership import Membership
from ballast.moments import Moments, moments_of, slot_names, without_updates
from ballast.remote_state import Asked
from ballast.saved_state import FULL_STATE_PARAMETERS, TOKEN, SavedState, Token, digest_of
from ballast.session import Session
from ballast.settings import RunSettings
from ballast.shard import like, local_of
from ballast.starting_state import StartingState
from ballast.steps import Steps


class StateDicts:
    """Reads the run's state from the daemon, by this rank alone, and keeps what is loaded until the run takes it over.

    One thread at a time, with the lock of `steps`.
    """

    def __init__(self, settings: RunSettings, membership: Membership, steps: Steps, starting_state: StartingState):
        self._settings = settings
        self._membership = membership
        self._steps = steps
        self._starting_state = starting_state

    @property
    def begin_anew(self) -> bool:
        """Whether this trainer has neither joined the run nor loaded state for it."""
        brought = self._starting_state
        return self._membership.session is None and brought.saved is None and not brought.waiting

    # --- out --------------------------------------------------------------------------------------------------------

    def read(self, groups: Sequence[Mapping[str, Any]], asked: Asked | None) -> dict[str, Any]:
        """The "state" of these param_groups, and the token. Asked by torch.distributed.checkpoint: of parameters too that have
        seen no update."""
        whole = asked is not None
        parameters = [p for group in groups for p in group["params"]]
        saved, session = self._starting_state.saved, self._membership.session
        if saved is not None:
            held = {} if saved.token is None else {TOKEN: saved.token.fields()}
            return {"state": _shown(saved.as_state(parameters), parameters), **held}
        if session is None:
            self._membership.connected()
        if session is None or not session.weights.loaded:
            return {"state": self._unmade(groups)} if whole else {"state": {}, TOKEN: self._before_all.fields()}
        self._check_between(session)
        token = Token(session.run, session.step - 1, session.weights.generation)
        refers = self._refers(parameters)
        moments = {} if refers else {**self._starting_state.waiting, **self._state_of(session, groups, whole)}
        if asked is not Asked.TO_LOAD:  # rank 0 may have loaded, and replaced what the others are about to
            session.weights.check_current()  # nobody has rewound or replaced it, or taken the rank, until all was read
        if refers:
            return {"state": {}, TOKEN: token.fields()}
        state = SavedState(moments, None, False).as_state(parameters)
        token = session.weights.told = replace(token, digest=digest_of(state))
        return {"state": _shown(state, parameters), TOKEN: token.fields()}

    @property
    def _before_all(self) -> Token:
        """Of what is saved before the run has weights: loaded in the middle of it, that begins all moments anew."""
        return Token(self._settings.rank.run, 0)

    def _unmade(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
        named = [(p, slot_names(self._settings.rule.of(group).name)) for group in groups for p in group["params"]]
        unmade = {
            i: without_updates(local_of(p).shape, names).as_state()
            for i, (p, names) in enumerate(named)
            if p.requires_grad
        }
        return _shown(unmade, [p for p, _ in named])

    def _refers(self, parameters: Iterable[Tensor]) -> bool:
        if self._settings.saved_state is not None:
            return self._settings.saved_state == "reference"
        return sum(parameter.numel() for parameter in parameters) > FULL_STATE_PARAMETERS

    def _state_of(self, session: Session, groups: Sequence[Mapping[str, Any]], whole: bool) -> dict[int, Moments]:
        """Where SGD has no momentum it has no buffer, as torch's: the daemon's is the last gradient then."""
        state = session.weights.state()
        if whole:
            return state
        bare = [g for g in groups if self._settings.rule.of(g).name in ("sgd", "sgdw") and float(g["momentum"]) == 0]
        for key in {id(p) for group in bare for p in group["params"]} & state.keys():
            state[key] = replace(state[key], slots={}, names={})
        return {key: moments for key, moments in state.items() if moments.updates > 0}

    @staticmethod
    def _check_between(session: Session) -> None:
        """Tensors are updated one by one while backward goes on."""
        if session.begun and not session.staged and session.micro_batches.last:
            raise Rejected(
                f"state_dict() between backward() and step() of step {session.step}: some tensors are updated and some are "
                "not; call step() first",
                "FAILED_PRECONDITION",
            )

    # --- in ---------------------------------------------------------------------------------------------------------

    def take(
        self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]], rewind: Callable[[int], object]
    ) -> None:
        """What load_state_dict() is given, checked, but for the options. rewind: takes the run back to a step."""
        token = Token.of(state_dict)
        if token is not None and token.digest is None and token.generation is not None and not state_dict["state"]:
            self._go_to(token, rewind)
        elif state_dict["state"] or (token is not None and token.digest is not None):
            saved = SavedState(moments_of(state_dict, groups, self._settings.rule), token, False)
            state = saved.as_state(p for group in groups for p in group["params"])
            intact = token is not None and token.digest == digest_of(state)
            self._starting_state.bring(SavedState(saved.moments, token, intact))
        else:
            self._starting_state.bring(SavedState({}, None, False) if self._goes_back(token) else None)

    def _goes_back(self, token: Token | None) -> bool:
        """Whether what was saved before all is loaded by the trainer that has trained since. Another process, which has not,
        goes on with the run's moments."""
        session = self._membership.session
        before = token is not None and replace(token, run=self._before_all.run) == self._before_all
        return before and session is not None and session.weights.settled

    def _go_to(self, token: Token, rewind: Callable[[int], object]) -> None:
        """To the state that a reference means: where the run is, or a snapshot."""
        if token.run != self._settings.rank.run:
            raise Rejected(
                f"this state_dict refers to step {token.step} of run '{token.run}', and this optimizer trains run "
                f"'{self._settings.rank.run}': give run='{token.run}', or save with saved_state='full'"
            )
        session = self._steps.joined()
        now = (session.step - 1, session.weights.generation)
        if now == (token.step, token.generation):
            return
        status = session.weights.status_there()
        kept = [int(step) for step in status["snapshot_steps"]]
        if token.step not in kept:
            raise Rejected(
                f"this state_dict refers to step {token.step} of run '{token.run}', generation {token.generation}; the run "
                f"is at step {now[0]}, generation {now[1]}, and keeps snapshots of {kept or 'no step'}: the daemon no longer "
                "has that state. Save with saved_state='full' to load it anywhere, keep snapshots of more steps "
                "(snapshots=, snapshot_every=), or go on in another run, with the weights and without moments",
                "FAILED_PRECONDITION",
            )
        if now[1] != token.generation:
            warnings.warn(
                f"run '{token.run}' was rewound or replaced since step {token.step} was saved (generation {token.generation}, "
                f"now {now[1]}): it goes back to its latest step {token.step}",
                stacklevel=4,
            )
        self._starting_state.bring(None)
        if self._settings.rank.number == 0:
            rewind(token.step)
        else:
            self._steps.follow(session.weights.await_end("takes the run back to a snapshot"))


def _shown(state: Mapping[int, Mapping[str, Tensor]], parameters: list[Tensor]) -> dict[int, dict[str, Tensor]]:
    """As torch's optimizers show it: what is of a sharded parameter's elements is a DTensor sharded as it is."""
    return {
        index: {name: value if name == "step" else like(parameters[index], value) for name, value in one.items()}
        for index, one in state.items()
    }
