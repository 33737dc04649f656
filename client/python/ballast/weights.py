"""A run's weights here and there: made the same before the first step, and pulled at any time between steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.errors import Rejected, Unavailable
from ballast.moments import Moments
from ballast.progress import Patience, Transfer
from ballast.rank import Rank

# How long rank 0 may take from creating the run to its first gradient; the pauses between two looks of the others, which
# double.
_UPLOAD_WAIT_S = 300.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
# How much of them is compared at once.
_COMPARED_BYTES = 64 << 20
# A share of the largest weight: more than any format's rounding, less than another seed's or step's weights differ by.
_STORED_ERROR = 0.1


class Weights:
    """The handshake about weights of one attachment. One thread at a time."""

    def __init__(self, client: _core.Client, rank: Rank, bindings: Sequence[Binding], attached: Mapping[str, Any]):
        self._client = client
        self._rank = rank
        self._bindings = bindings
        self._digests: list[int] = attached["digests"]
        self._loaded: bool = attached["weights_loaded"]
        self._settled = False
        self._unlike: dict[int, int] = {}  # digests of tensors that the daemon serves otherwise than they are here

    @property
    def settled(self) -> bool:
        return self._settled

    def settle(self, policy: str | None, moments: Mapping[int, Moments]) -> None:
        """Makes the weights here and there the same, before the first gradient; nothing when that was done.

        policy: "client" uploads, "match" and "server" compare; None uploads to a run that made no step, else compares.
        moments: by id(parameter), what is uploaded with its weights.
        """
        if self._settled:
            return
        fresh = not self._loaded or self._client.step == 1
        if policy is None and fresh and self._rank.number > 0:
            stored = [binding.served_digest() for binding in self._bindings]
            self._await_upload()
            self._compare_stored(stored)
        elif policy == "client" or (policy is None and fresh):
            self._upload(moments)
        else:
            if policy is not None or self._rank.number == 0:  # else they go nowhere in any case
                self._refuse(moments)
            self._compare()
        for binding in self._bindings:
            self._bind(binding)
            binding.last_seen.note()
        self._settled = True

    def take(self) -> None:
        """Instead of settling: the daemon's, for a trainer that follows it."""
        self.pull()
        for binding in self._bindings:
            self._bind(binding)
        self._settled = True

    def follow(self, binding: Binding) -> None:
        """Brings the binding to where the parameter is now. Once settled, weights of the tensor land there."""
        if binding.follow() and self._settled:
            self._bind(binding)

    def _bind(self, binding: Binding) -> None:
        self._client.bind_weights(binding.index, binding.landing.data_ptr(), binding.landing.nbytes)

    def require(self) -> None:
        """Rejected if the daemon has no weights of this run yet."""
        if not self._loaded:
            raise Rejected(
                f"run '{self._rank.run}' has no weights yet: upload them with weights='client'", "FAILED_PRECONDITION"
            )

    def unlike(self, index: int) -> bool:
        """Whether the tensor's weights are served otherwise than they are here, until they are pulled or updated."""
        return index in self._unlike

    def updated(self, indices: Iterable[int]) -> list[Binding]:
        """A step has brought these tensors. Returns the others that are unlike, which are to be pulled."""
        for index in indices:
            self._unlike.pop(index, None)
        return [self._bindings[index] for index in sorted(self._unlike)]

    def differing(self, bindings: Iterable[Binding]) -> list[Binding]:
        """Those whose weights here are neither those that the daemon has now nor those that were uploaded. Only what
        differs, or is served narrower than it is here, travels."""
        suspects = list(bindings)
        for binding in suspects:
            self.follow(binding)
        differing = []
        for some in self._portions(suspects):
            ours = {binding.index: binding.digest() for binding in some}
            some = [binding for binding in some if self._unlike.get(binding.index) != ours[binding.index]]
            decoded = {binding.index: torch.empty_like(binding.landing) for binding in some}
            places = [(index, landed.data_ptr(), landed.nbytes) for index, landed in decoded.items()]
            known = {b.index: 0 if b.served_narrower else ours[b.index] for b in some}
            pulled = self._client.pull(self._rank.run, places, known) if some else {}
            for binding in some:
                theirs = decoded[binding.index]
                if binding.index in pulled and _core.digest(theirs.data_ptr(), theirs.nbytes) != ours[binding.index]:
                    differing.append(binding)
        return differing

    def pull(self, bindings: Iterable[Binding] | None = None) -> int:
        """Overwrites in place with the daemon's, all by default; returns the last step that they are of."""
        wanted = list(self._bindings if bindings is None else bindings)
        for binding in wanted:
            self.follow(binding)
        places = [(b.index, b.landing.data_ptr(), b.landing.nbytes) for b in wanted]
        total = sum(place[-1] for place in places)
        with Transfer(f"pulling weights of run '{self._rank.run}'", total, lambda: self._client.moved):
            steps = self._client.pull(self._rank.run, places)
        for binding in wanted:
            binding.store()
            torch.autograd.graph.increment_version(binding.parameter)
            binding.last_seen.note()
            self._unlike.pop(binding.index, None)
        return max(steps.values(), default=0)

    def _refuse(self, moments: Mapping[int, Moments]) -> None:
        if moments:
            raise Rejected(
                f"run '{self._rank.run}' has weights and moments already, and load_state_dict() was given others: leave "
                "that call out, or give a new run",
                "FAILED_PRECONDITION",
            )

    def _upload(self, moments: Mapping[int, Moments]) -> None:
        if self._client.step > 1:
            raise Rejected(
                f"run '{self._rank.run}' is at step {self._client.step}: weights can be uploaded before its first step only; "
                "take the daemon's with weights='server', or give another run",
                "FAILED_PRECONDITION",
            )
        ours = [binding.digest() for binding in self._bindings]
        slots = [(b.index, "weights", b.format, b.landing.data_ptr(), b.landing.nbytes) for b in self._bindings]
        updates = {}
        for binding in self._bindings:
            if (state := moments.get(id(binding.parameter))) is None:
                continue
            updates[binding.index] = state.updates
            for slot, values in state.slots.items():
                slots.append((binding.index, slot, "fp32", values.data_ptr(), values.nbytes))
        total = sum(slot[-1] for slot in slots)
        with Transfer(f"uploading weights of run '{self._rank.run}'", total, lambda: self._client.moved):
            served = self._client.load_weights(slots, updates)
        self._unlike = {index: one for index, (one, other) in enumerate(zip(ours, served)) if one != other}
        self._loaded, self._digests = True, served

    def _await_upload(self) -> None:
        """Until rank 0 has uploaded."""
        deadline = time.monotonic() + _UPLOAD_WAIT_S
        pause_s = _SHORTEST_PAUSE_S
        patience = Patience(lambda: f"waiting for rank 0 of run '{self._rank.run}' to upload its weights")
        while not self._loaded:
            patience.look()
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"rank 0 of run '{self._rank.run}' has not uploaded its weights for {_UPLOAD_WAIT_S:.0f} s: it does "
                    "so at its first gradient. Start it, or look at what it waits for",
                    "DEADLINE_EXCEEDED",
                )
            self._loaded = self._loaded_there()
            if not self._loaded:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _loaded_there(self) -> bool:
        """As the list of runs says, which has no specs: they may take megabytes."""
        for status in self._client.list_runs()["runs"]:
            if status["run_id"] == self._rank.run:
                return bool(status["weights_loaded"])
        self._client.get_run(self._rank.run)  # says why there is none
        return False

    def _compare(self) -> None:
        self.require()
        for binding, served in zip(self._bindings, self._digests):
            ours, theirs = binding.digest(), self._digest_there(binding) if binding.served_narrower else served
            if ours == theirs:
                continue
            if binding.served_digest() != served:
                raise Rejected(
                    f"the weights of '{binding.name}' differ from those of run '{self._rank.run}' at step "
                    f"{self._client.step - 1}: digest {ours:016x} here, {theirs:016x} there. Take the daemon's with "
                    "weights='server', delete the run (ballastctl), or give another run",
                    "FAILED_PRECONDITION",
                )
            # What was uploaded, not rounded yet as the daemon has it: the steps so far have changed nothing.
            self._unlike[binding.index] = ours

    def _compare_stored(self, stored: Sequence[int | None]) -> None:
        """With what rank 0 uploaded, as the daemon stores and serves it: equal but for that rounding.

        stored: the digests of what is here, so rounded. Only what the daemon has otherwise is pulled.
        """
        for some in self._portions(self._bindings):
            decoded = {binding.index: torch.empty_like(binding.landing) for binding in some}
            places = [(index, landed.data_ptr(), landed.nbytes) for index, landed in decoded.items()]
            digests = {binding.index: stored[binding.index] or 0 for binding in some}
            pulled = self._client.pull(self._rank.run, places, digests)
            for binding in some:
                if binding.index in pulled:
                    self._compare_one(binding, decoded[binding.index])
                elif binding.served_narrower or binding.digest() != stored[binding.index]:
                    self._unlike[binding.index] = binding.digest()

    def _portions(self, bindings: Iterable[Binding]) -> Iterator[list[Binding]]:
        """A few at a time, of so many bytes as are compared at once."""
        some: list[Binding] = []
        nbytes = 0
        for binding in bindings:
            nbytes += binding.landing.nbytes
            if some and nbytes > _COMPARED_BYTES:
                yield some
                some, nbytes = [], binding.landing.nbytes
            some.append(binding)
        if some:
            yield some

    def _compare_one(self, binding: Binding, theirs: Tensor) -> None:
        ours = binding.landing
        if not torch.equal(ours, theirs):
            self._unlike[binding.index] = binding.digest()
        if (ours.float() - theirs.float()).abs().max() > _STORED_ERROR * ours.float().abs().max():
            raise Rejected(
                f"the weights of '{binding.name}' differ from those that rank 0 uploaded to run "
                f"'{self._rank.run}': make the model from the same seed or checkpoint on every rank",
                "FAILED_PRECONDITION",
            )

    def _pulled(self, binding: Binding) -> Tensor:
        """The daemon's weights, decoded to the parameter's dtype."""
        decoded = torch.empty_like(binding.landing)
        self._client.pull(self._rank.run, [(binding.index, decoded.data_ptr(), decoded.nbytes)])
        return decoded

    def _digest_there(self, binding: Binding) -> int:
        decoded = self._pulled(binding)
        return _core.digest(decoded.data_ptr(), decoded.nbytes)
