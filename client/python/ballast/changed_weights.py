"""Weights that the trainer changes by itself, and that the daemon's would overwrite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ballast.binding import Binding
from ballast.errors import Rejected
from ballast.shard import local_of
from ballast.weights import Weights

# The first is the default.
CHANGED_WEIGHTS = ("refuse", "upload", "overwrite")
# So many are named.
_NAMED = 3


def changed_weights(given: Any) -> str:
    """The option, checked."""
    if given is None:
        return CHANGED_WEIGHTS[0]
    if given not in CHANGED_WEIGHTS:
        raise Rejected(f"changed_weights={given!r}: it must be one of {', '.join(map(repr, CHANGED_WEIGHTS))}")
    return str(given)


class ChangedWeights:
    """Finds weights that were changed since the daemon's were written there, and refuses the step; or, with "upload",
    has them uploaded before it.

    What only looks changed is compared with the daemon's, so that weights which were changed and put back pass. With
    "overwrite" nothing is looked for. One thread at a time.
    """

    def __init__(self, run: str, policy: str, bindings: Sequence[Binding]):
        self._run = run
        self._looks = policy != "overwrite"
        self._uploads = policy == "upload"
        self._bindings = bindings
        self._overwritten: list[Binding] = []  # in the open step

    def refuse(self, weights: Weights, step: int) -> list[Binding] | None:
        """Before `step` begins: Rejected, naming the tensors, if any was changed. They stay as they are. With "upload"
        returns them, and None where none looks changed."""
        suspects = [b for b in self._bindings if b.last_seen.touched] if self._looks else []
        changed = self._differing(weights, suspects)
        if changed and not self._uploads:
            # Sharded parameters have no "upload".
            upload = "changed_weights='upload' to train on with them (not where each step puts them back), "
            raise Rejected(
                f"the weights of {_named(changed)} were changed after step {step - 1}, and not by run '{self._run}' (by "
                "load_state_dict(), an operation in place, p.data = ..., nn.Embedding(max_norm=...)): the daemon's would "
                f"overwrite them in step {step}. Nothing was sent. Call pull() to go on with the daemon's, rewind() to go on "
                f"with an earlier step's, make an optimizer with another run to train these, or give {'' if changed[0].shard else upload}"
                "changed_weights='overwrite' to lose such changes",
                "FAILED_PRECONDITION",
            )
        return changed if self._uploads and suspects else None

    def before_gradient(self, weights: Weights, binding: Binding) -> None:
        """In a step, before a gradient of the tensor is sent."""
        if self._looks and binding.last_seen.moved and self._differing(weights, [binding]):
            self._overwritten.append(binding)
            binding.last_seen.note()

    def before_end(self, step: int, staged: bool) -> None:
        """Before a step ends: Rejected, naming the tensors, if its weights would come to where a storage was before."""
        moved = [binding for binding in self._bindings if binding.was_moved] if staged else []
        if moved:
            raise Rejected(
                f"the memory of {_named(moved)} was moved while step {step} was open (by share_memory(), which a queue of "
                "torch.multiprocessing calls for what is put into it), and the step's weights would come to where it was: "
                "zero_grad(), now, drops the step. Move memory between step() and the next backward()",
                "FAILED_PRECONDITION",
            )

    def before_weights(self, binding: Binding) -> None:
        """Before the weights that a step brought count as those of the tensor."""
        if self._looks and binding.last_seen.moved:
            self._overwritten.append(binding)

    def tell(self, step: int) -> None:
        """At the end of `step`: Rejected, naming the tensors, if it has overwritten a change."""
        overwritten, self._overwritten = self._overwritten, []
        if overwritten:
            self._refuse_parts(overwritten, step)
            raise Rejected(
                f"the weights of {_named(overwritten)} were changed while step {step} was open, and not by run "
                f"'{self._run}': the step is made without the change, and the daemon's weights are in place. Leave the "
                "change out, or give changed_weights='overwrite' to lose such changes; with overlap_forward call wait() "
                "before weights are changed and put back",
                "FAILED_PRECONDITION",
            )

    def _refuse_parts(self, overwritten: Sequence[Binding], step: int) -> None:
        """Rejected if all that looks changed is part of a tensor that others are of too: torch has one version for them, which
        weights that come to the others move."""
        parameters = [binding.parameter for binding in self._bindings]
        storages = Counter(_storage(parameter) for parameter in parameters)
        if all(storages[_storage(binding.parameter)] > 1 for binding in overwritten):
            raise Rejected(
                f"{_named(overwritten)} were changed while step {step} was open, or are parts of one tensor (nn.Parameter of a "
                "slice, or of what chunk() returned), whose changes torch counts together, so that nobody can tell: the step is "
                "made, and the daemon's weights are in place. Give each part memory of its own, nn.Parameter(part.clone()), "
                "before making the optimizer, or changed_weights='overwrite' to lose such changes",
                "FAILED_PRECONDITION",
            )

    def forget(self) -> None:
        """The open step is gone."""
        self._overwritten.clear()

    def _differing(self, weights: Weights, suspects: list[Binding]) -> list[Binding]:
        """Those that are not as the daemon has them; the others are noted as they are."""
        differing = weights.differing(suspects) if suspects else []
        for binding in suspects:
            if binding not in differing:
                binding.last_seen.note()
        return differing


def _storage(parameter: Tensor) -> int:
    return local_of(parameter).untyped_storage().data_ptr()


def _named(bindings: Iterable[Binding]) -> str:
    names = list(dict.fromkeys(f"'{binding.name}'" for binding in bindings))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
