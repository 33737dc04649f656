"""A run's weights here and there, where every rank holds a part of each tensor: fully_shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ballast import _core
from ballast.binding import Binding
from ballast.errors import Rejected
from ballast.gathered import all_agree, gather, spread
from ballast.moments import Moments, zeros
from ballast.pulls import portions
from ballast.replaced import Replaced
from ballast.uploads import refuse_nonfinite, upload
from ballast.weights import Weights

_CONNECT_S = 15.0


class ShardedWeights(Weights):
    """As Weights, and: what is uploaded the ranks put together, tensor by tensor, and each then takes its part of what the
    daemon made of it, so that parts and daemon are equal to the bit. Digests, which are of whole tensors, tell nothing.

    agree(), settle(), have(), replace() and adopt() are collective: all ranks call them, in the same order and outside of backward();
    what one refuses all refuse.
    """

    def settle(self, policy: str | None, moments: Mapping[int, Moments]) -> None:
        if self._settled:
            return
        if policy == "client" or (policy is None and (not self._loaded or self.fresh)):
            self._upload(moments)
            self._take()
        else:
            self._refuse(moments, policy)
            self._compare()
        self._finish()

    def agreed(self, mine: bool) -> bool:
        return all_agree(mine, self._bindings[0].parameter)

    def agree(self, loading: bool, refused: Rejected | None) -> None:
        """That all ranks are at one state of the run: RunRewound on those that have not heard that it is at another one, for
        which the others wait. loading: whether a state waits to be taken over; Rejected where that is so on some ranks alone.
        refused: why this rank cannot begin a step; raised, and Rejected on the others.
        """
        while True:
            ours = [self.generation, int(loading), int(refused is not None)]
            (oldest, newest), (least, most), (_, refusing) = spread(ours, self._bindings[0].parameter)
            if self.generation < newest:
                raise self.await_end("is told of another state of the run")
            if oldest == newest:
                break
        if least != most:
            raise Rejected(
                f"load_state_dict() was called on some ranks of run '{self._rank.run}', and not on "
                f"{'others' if loading else 'this one'}: call it on every rank, with the same state_dict, or each with its part of "
                "it, as torch.distributed.checkpoint does",
                "FAILED_PRECONDITION",
            )
        if refusing:
            raise refused or Rejected(
                f"another rank of run '{self._rank.run}' cannot begin step {self._client.step}: its own error says why, and what "
                "to do on all ranks",
                "FAILED_PRECONDITION",
            )

    def have(self, moments: Mapping[int, Moments]) -> bool:
        return self.agreed(super().have(moments))

    def replace(self, moments: Mapping[int, Moments], only: Sequence[Binding] | None) -> Replaced:
        bindings = self._bindings if only is None else only
        self._refuse_nonfinite(bindings)
        complete = {id(b.parameter): self._complete(moments.get(id(b.parameter)), b) for b in bindings}
        whole, state = gather(bindings, complete, keep=self._rank.number == 0)
        self._by_rank_0(lambda: upload(self._client.load_weights, whole, state, True), "replace the weights")
        if self._rank.number > 0:
            self.await_end("replaces the run's weights")
        return Replaced(True)

    def _refuse_nonfinite(self, bindings: Sequence[Binding]) -> None:
        refused: Rejected | None = None
        for binding in bindings:
            binding.load()
        try:
            refuse_nonfinite(bindings, self._rank.run)
        except Rejected as error:  # raised below: the others wait to hear of it
            refused = error
        if self.agreed(refused is None):
            return
        raise refused or Rejected(
            "the weights of another rank's parts hold a NaN or an infinity, and were to take the place of run "
            f"'{self._rank.run}''s: nothing of it was replaced; its own error says which"
        )

    def _by_rank_0(self, work: Callable[[], object], what: str) -> None:
        """Has rank 0 do it, and the others wait. Where it raises, Rejected on the others."""
        failure: BaseException | None = None
        if self._rank.number == 0:
            try:
                work()
            except BaseException as error:  # raised below: the others wait to hear of it
                failure = error
        all_well = self.agreed(failure is None)
        if failure is not None:
            raise failure
        if not all_well:
            raise Rejected(
                f"rank 0 could not {what} of run '{self._rank.run}': its own error says why", "FAILED_PRECONDITION"
            )

    def adopt(self, replaced: Replaced) -> None:
        self._take()
        self._loaded = True
        self._finish()

    def differing(self, bindings: Iterable[Binding]) -> list[Binding]:
        suspects = list(bindings)
        self.follow(suspects)
        pairs = ((binding, theirs) for some in portions(suspects) for binding, theirs in self._parts_of(some))
        return [binding for binding, theirs in pairs if not _same_bits(binding.landing, theirs)]

    def _pull_state(self, places: list[tuple[int, str, int, int]]) -> dict[int, int]:
        """Of a tensor that this rank has no element of, nothing comes to its session, not even how many updates it has seen:
        that is asked over a connection of its own. Such tensors have fewer rows than there are ranks."""
        updates = super()._pull_state(places) if places else {}
        whole = {b.index: zeros(b.parameter.shape) for b in self._bindings if b.index not in updates}
        if not whole:
            return updates
        observer = self._client.beside(_CONNECT_S)
        try:
            first = {index: next(iter(self._state_names[index])) for index in whole}
            others = [(index, first[index], values.data_ptr(), values.nbytes) for index, values in whole.items()]
            return updates | observer.pull_state(self._rank.run, others)
        finally:
            observer.close()

    def _finish(self) -> None:
        for binding in self._bindings:
            binding.bind(self._client)
            binding.forget_errors()
            binding.last_seen.note()
        self._settled = True

    def _upload(self, moments: Mapping[int, Moments]) -> None:
        self._check_unmade()
        whole, state = gather(self._bindings, moments, keep=self._rank.number == 0)
        self._by_rank_0(lambda: upload(self._send, whole, state), "upload the weights")
        self._loaded = True

    def _compare(self) -> None:
        self.require()
        for binding in self._bindings:
            binding.load()
        differing = self.differing(self._bindings)
        if not self.agreed(not differing):
            which = (
                f"those of '{differing[0].name}' do" if differing else "not those of this rank's parts, but another's"
            )
            raise Rejected(
                f"the weights differ from those of run '{self._rank.run}' at step {self._client.step - 1}: {which}. Take the "
                "daemon's with weights='server', delete the run (ballast.delete_run(), start_over=True), or give another",
                "FAILED_PRECONDITION",
            )

    def _take(self) -> None:
        """The daemon's weights, in place of those that were uploaded: equal but for how the daemon stores and serves them,
        unless copies of HSDP differ."""
        refused: Rejected | None = None
        for binding in self._bindings:
            binding.load()
        for some in portions(self._bindings):
            for binding, theirs in self._parts_of(some):
                try:
                    self._compare_one(binding, theirs)
                except Rejected as error:
                    refused = refused or error
                binding.landing.copy_(theirs)
                binding.store()
        self._unlike.clear()
        all_well = self.agreed(refused is None)
        if refused is not None:
            raise refused
        if not all_well:
            raise Rejected("another rank's weights differ from those that were uploaded: its own error says which")

    def _parts_of(self, bindings: Iterable[Binding]) -> Iterable[tuple[Binding, Tensor]]:
        """With this rank's part of the daemon's weights, decoded to the parameter's dtype; of tensors that it has a part of."""
        decoded = {binding: binding.room() for binding in bindings if binding.nbytes}
        places = [(binding.index, part.data_ptr(), part.nbytes) for binding, part in decoded.items()]
        if places:
            self._client.pull(self._rank.run, places)
        return decoded.items()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return _core.digest(one.data_ptr(), one.nbytes) == _core.digest(other.data_ptr(), other.nbytes)
