"""A run's weights here and there: made the same before the first step, and pulled at any time between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.errors import Rejected, RunRewound
from ballast.kept_masters import kept_masters
from ballast.moments import MASTER, Moments, without_updates, zeros
from ballast.progress import Transfer
from ballast.pulls import portions, pull_to, pulled
from ballast.rank import Rank
from ballast.rank_zero import SAME_WEIGHTS, await_end, await_upload
from ballast.replaced import Amended, Replaced
from ballast.saved_state import Token
from ballast.status import status_of
from ballast.uploads import refuse_nonfinite, same, upload
from ballast.weight_codes import give_weights_back
from ballast.weight_copies import WeightCopies

# A share of the largest weight: more than any format's rounding, less than another seed's or step's weights differ by.
_STORED_ERROR = 0.1


class Weights:
    """The handshake about weights and state of one attachment. One thread at a time.

    generation: of the run, when this was attached to it. told: the token of the last state_dict() since then; None: there
    was none. state_names: by tensor the slots that its rule keeps, by torch's names. copies: to GPUs, of weights that have landed.
    """

    def __init__(
        self,
        client: _core.Client,
        rank: Rank,
        bindings: Sequence[Binding],
        attached: Mapping[str, Any],
        state_names: Sequence[dict[str, str]],
        copies: WeightCopies,
    ):
        self._client, self._copies, self._state_names = client, copies, state_names
        self.generation: int = attached["generation"]
        self.told: Token | None = None
        self._rank = rank
        self._bindings = self.bindings = bindings
        self._digests: list[int] = attached["digests"]
        self._loaded: bool = attached["weights_loaded"]
        self._settled = False
        self._unlike: dict[int, int] = {}  # digests of tensors that the daemon serves otherwise than they are here

    @property
    def settled(self) -> bool:
        return self._settled

    @property
    def loaded(self) -> bool:
        """Whether the run had weights when this was last known."""
        return self._loaded

    @property
    def fresh(self) -> bool:
        """Whether the run has made no step."""
        return self._client.step == 1

    def settle(self, policy: str | None, moments: Mapping[int, Moments]) -> None:
        """Makes the weights here and there the same, before the first gradient; nothing when that was done.

        policy: "client" uploads, "match" and "server" compare; None uploads to a run that made no step, else compares.
        moments: by id(parameter), what is uploaded with its weights.
        """
        if self._settled:
            return
        unmade = not self._loaded or self.fresh
        if policy is None and unmade and self._rank.number > 0:
            stored = [binding.served_digest() for binding in self._bindings]
            if not self._loaded:
                await_upload(self._rank, self.loaded_there)
                self._loaded = True
            self._compare_stored(stored)
        elif policy == "client" or (policy is None and unmade):
            self._upload(moments)
        else:
            if policy is not None or self._rank.number == 0:  # else they go nowhere in any case
                self._refuse(moments, policy)
            self._compare()
        for binding in self._bindings:
            binding.bind(self._client)
            binding.last_seen.note()
        self._settled = True

    def take(self) -> None:
        """Instead of settling: the daemon's, for a trainer that follows it."""
        self.pull()
        for binding in self._bindings:
            binding.forget_errors()
            binding.bind(self._client)
        self._settled = True

    def follow(self, bindings: Iterable[Binding]) -> None:
        """Brings the bindings to where the parameters are now. Once settled, weights of the tensors land there."""
        for binding in bindings:
            if binding.follow() and self._settled:
                binding.bind(self._client)

    def agreed(self, mine: bool) -> bool:
        """Whether all ranks that decide together say so; each decides alone."""
        return mine

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
        brought = set(indices)
        for binding in self._bindings:
            binding.settle_errors(binding.index in brought)
            if binding.index in brought:
                self._unlike.pop(binding.index, None)
        return [self._bindings[index] for index in sorted(self._unlike)]

    def differing(self, bindings: Iterable[Binding]) -> list[Binding]:
        """Those whose weights here are neither those that the daemon has now nor those that were uploaded. Only what
        differs, or is served narrower than it is here, travels."""
        suspects = list(bindings)
        self.follow(suspects)
        differing = []
        for some in portions(suspects):
            ours = {binding.index: binding.digest() for binding in some}
            some = [binding for binding in some if self._unlike.get(binding.index) != ours[binding.index]]
            decoded = {binding.index: binding.room() for binding in some}
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
        self.follow(wanted)
        self._copies.wait()  # from where the daemon's land
        steps = pull_to(wanted, self._client, self._rank.run)
        for binding in wanted:
            binding.store()
            binding.move_version()
            binding.last_seen.note()
            self._unlike.pop(binding.index, None)
        return max(steps.values(), default=self._client.step - 1)

    def let_go(self) -> None:
        """After the connection was closed: parameters have weights of their own."""
        for binding in self._bindings:
            give_weights_back(binding.parameter)

    def _refuse(self, moments: Mapping[int, Moments], policy: str | None) -> None:
        if moments:
            raise Rejected(
                f"run '{self._rank.run}' has weights and moments already, and load_state_dict() was given others: leave "
                f"that call out, or weights={policy!r}, which keeps the run's, or give a new run",
                "FAILED_PRECONDITION",
            )

    def _check_unmade(self) -> None:
        if self._client.step > 1:
            lacks = ". It lacks those of what was added: load_state_dict() of a checkpoint sends them"
            raise Rejected(
                f"run '{self._rank.run}' is at step {self._client.step - 1}: weights can be uploaded before its first step only; "
                f"take the daemon's with weights='server', or give another run{'' if self._loaded else lacks}",
                "FAILED_PRECONDITION",
            )

    def _upload(self, moments: Mapping[int, Moments]) -> None:
        self._check_unmade()
        ours = [binding.digest() for binding in self._bindings]
        served = upload(self._send, self._bindings, moments)
        self._unlike = {index: one for index, (one, other) in enumerate(zip(ours, served)) if one != other}
        self._loaded, self._digests = True, served

    def _send(self, slots: list[tuple[int, str, str, int, int]], updates: dict[int, int]) -> list[int]:
        total = sum(slot[-1] for slot in slots)
        with Transfer(f"uploading weights of run '{self._rank.run}'", total, lambda: self._client.moved):
            return self._client.load_weights(slots, updates)

    # --- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[int, Moments]:
        """By id(parameter), what the daemon keeps of each tensor: its moments, and its weights where they are more than the
        parameter holds."""
        found, places = {}, []
        for binding in self._bindings:
            shape = binding.shape
            slots = {slot: zeros(shape) for slot in self._state_names[binding.index]}
            master = zeros(shape) if binding.holds_less else None
            for slot, values in (slots if master is None else {**slots, MASTER: master}).items():
                if values.nbytes:
                    places.append((binding.index, slot, values.data_ptr(), values.nbytes))
            found[binding.index] = slots, master
        updates = self._pull_state(places)
        return {
            id(self._bindings[index].parameter): Moments(slots, updates[index], self._state_names[index], master)
            for index, (slots, master) in found.items()
        }

    def average(self, decay: float, bindings: Iterable[Binding]) -> dict[int, Tensor]:
        """By index, the average of each tensor's weights, fp32 in host memory; of a sharded one this rank's part."""
        found = {binding.index: zeros(binding.shape) for binding in bindings}
        places = [(index, MASTER, values.data_ptr(), values.nbytes) for index, values in found.items() if values.nbytes]
        if places:
            self._client.pull_state(self._rank.run, places, 0, decay)
        return found

    def _pull_state(self, places: list[tuple[int, str, int, int]]) -> dict[int, int]:
        return self._client.pull_state(self._rank.run, places)

    def have(self, moments: Mapping[int, Moments]) -> bool:
        """Whether these are the run's, to the bit, and nobody has replaced them since this was attached."""
        if not self.loaded_there():
            return False
        theirs = {key: state for key, state in self.state().items() if state.updates or key in moments}
        equal = theirs.keys() == moments.keys() and all(same(state, moments[key]) for key, state in theirs.items())
        return equal and not self.outdated

    def replace(self, moments: Mapping[int, Moments], only: Sequence[Binding] | None) -> Replaced:
        """As Session.replace, up to the session's end."""
        if self._rank.number > 0:
            stored = [binding.served_digest() for binding in self._bindings]
            if not self._settled and stored == self._digests:
                return Replaced(False, stored=stored)  # rank 0 was here before this one came
            self.await_end("replaces the run's weights")
            return Replaced(True, stored=stored)
        bindings = self._bindings if only is None else only
        if only is None:
            moments = {id(b.parameter): self._complete(moments.get(id(b.parameter)), b) for b in bindings}
        ours = {binding.index: binding.digest() for binding in bindings}
        refuse_nonfinite(bindings, self._rank.run)
        masters = {} if only is None else kept_masters(only, self._client, self._rank.run)
        served = upload(self._client.load_weights, bindings, moments, True, masters=masters)
        unlike = {index: digest for index, digest in self._unlike.items() if index not in ours}
        unlike |= {index: digest for index, digest in ours.items() if digest != served[index]}
        return Replaced(True, unlike)

    def _complete(self, state: Moments | None, binding: Binding) -> Moments:
        """With zeros for what a state_dict lacks of a tensor that has seen no update."""
        none = without_updates(binding.shape, self._state_names[binding.index])
        if state is None:
            return none
        return state if state.slots else Moments(none.slots, 0, none.names, state.master)  # as torch would begin

    def adopt(self, replaced: Replaced) -> None:
        """Instead of settling: what is here took the place of the daemon's."""
        for binding in self._bindings:
            binding.load()
            binding.forget_errors()
        if replaced.stored is not None:
            self._compare_stored(replaced.stored)
        self._unlike |= replaced.unlike
        for binding in self._bindings:
            binding.bind(self._client)
            binding.last_seen.note()
        self._loaded = self._settled = True

    @property
    def outdated(self) -> bool:
        """Whether the run was replaced or rewound since this was attached to it."""
        return int(self.status_there()["generation"]) != self.generation

    def bring(self, added: Sequence[Binding], moments: Mapping[int, Moments]) -> Replaced:
        """In a run that was amended: as replace(), of the tensors that were added, which have no weights there."""
        if not added:
            return Replaced(False)
        if self._rank.number == 0 and not self._loaded:
            ours = {binding.index: binding.digest() for binding in added}
            served = upload(self._client.load_weights, added, moments, True)
            return Replaced(True, {index: digest for index, digest in ours.items() if digest != served[index]})
        kept = len(self._bindings) - len(added)
        stored = [None] * kept + [binding.served_digest() for binding in added]
        if not self._loaded:
            self.await_end("uploads the weights of what was added", "add the same parameters")
        return Replaced(not self._loaded, stored=stored)

    def go_on(self, amended: Amended, brought: Replaced) -> bool:
        """Instead of settling: the weights before have made all but the added ones the same here and there, and `brought` those.
        False, and nothing is settled, where they are to be taken: the run has others by now, as its generation and step tell of
        tensors that it stores or serves otherwise."""
        past, added = amended.weights, amended.added
        for binding in added:
            binding.load()
        if brought.stored is not None:
            self._compare_stored(brought.stored, added)
        self._unlike |= past._unlike | brought.unlike
        converted = [one for one, known in zip(self._bindings, past._bindings) if not one.kept_as(known)]
        least = 1 + bool(added)  # by the amendment, and the upload of what came: on one daemon up to each
        raised = range(least, least * len(self._client.server.split(",")) + 1)
        recoded = any(one.as_served != known.as_served for one, known in zip(self._bindings, past._bindings))
        other = self.generation - past.generation not in raised or self._client.step != amended.step
        if converted and (recoded or other):  # recoded: a layer begins or ends to compute in codes
            return False
        for one in converted:  # and rounded; what was touched and put back is known by its digest
            if self._digests[one.index : one.index + 1] == [one.served_digest()]:
                one.last_seen.note()
        self._unlike |= {one.index: one.digest() for one in converted if not one.last_seen.touched}
        kept = self._bindings[: len(self._bindings) - len(added)]
        if self.differing(binding for binding in kept if not binding.last_seen.touched):  # by the trainer itself
            return False
        for binding in self._bindings:
            binding.follow()
            binding.bind(self._client)
        for binding in added:
            binding.last_seen.note()
        self._loaded = self._settled = True
        return True

    def check_current(self) -> None:
        """Raises what ended the session, if it is over: what was read of the run since then is not of this trainer's step."""
        self._client.check_status()
        if self.outdated:
            raise self.await_end("is told of another state of the run")

    def await_end(self, what: str, same: str = SAME_WEIGHTS) -> RunRewound:
        """Until the session has ended, as rank 0 `what`, and every rank is to do the `same`. Unavailable if it does not come
        to that."""
        return await_end(self._client, self._rank, what, same)

    # --- the first upload -------------------------------------------------------------------------------------------

    def loaded_there(self) -> bool:
        """Whether the run has weights by now."""
        return bool(self.status_there()["weights_loaded"])

    def status_there(self) -> Mapping[str, Any]:
        return status_of(self._client, self._rank.run)

    def _compare(self) -> None:
        self.require()
        for binding, served in zip(self._bindings, self._digests):
            ours, theirs = binding.digest(), self._digest_there(binding) if binding.served_narrower else served
            if ours == theirs:
                continue
            if binding.served_digest() != served:
                self.check_current()  # by what weights='server' has pulled since, they are those of a rewind
                raise Rejected(
                    f"the weights of '{binding.name}' differ from those of run '{self._rank.run}' at step "
                    f"{self._client.step - 1}: digest {ours:016x} here, {theirs:016x} there. Take the daemon's with "
                    "weights='server', delete the run (ballast.delete_run(), start_over=True), or give another",
                    "FAILED_PRECONDITION",
                )
            # What was uploaded, not rounded yet as the daemon has it: the steps so far have changed nothing.
            self._unlike[binding.index] = ours

    def _compare_stored(self, stored: Sequence[int | None], only: Iterable[Binding] | None = None) -> None:
        """With what rank 0 uploaded, as the daemon stores and serves it: equal but for that rounding. Of `only` these tensors.

        stored: the digests of what is here, so rounded, by index. Only what the daemon has otherwise is pulled.
        """
        for some in portions(self._bindings if only is None else only):
            decoded = {binding.index: binding.room() for binding in some}
            places = [(index, landed.data_ptr(), landed.nbytes) for index, landed in decoded.items()]
            digests = {binding.index: stored[binding.index] or 0 for binding in some}
            pulled = self._client.pull(self._rank.run, places, digests)
            for binding in some:
                if binding.index in pulled:
                    self._compare_one(binding, decoded[binding.index])
                elif binding.served_narrower or binding.digest() != stored[binding.index]:
                    self._unlike[binding.index] = binding.digest()

    def _compare_one(self, binding: Binding, theirs: Tensor) -> None:
        ours = binding.landing
        if not torch.equal(ours, theirs):
            self._unlike[binding.index] = binding.digest()
        if not (ours.float() - theirs.float()).abs().max() <= _STORED_ERROR * theirs.float().abs().max():  # or is a NaN
            raise Rejected(
                f"the weights of '{binding.name}' differ from those that rank 0 uploaded to run "
                f"'{self._rank.run}': make the model from the same seed or checkpoint on every rank",
                "FAILED_PRECONDITION",
            )

    def _digest_there(self, binding: Binding) -> int:
        decoded = pulled(binding, self._client, self._rank.run)
        return _core.digest(decoded.data_ptr(), decoded.nbytes)
