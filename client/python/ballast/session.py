"""A trainer's place in a run: attaching to it, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ballast import _core, refused_gradients
from ballast.amending import Amending
from ballast.awaited import AwaitedRanks
from ballast.binding import Binding
from ballast.coded_binding import bind_all
from ballast.changed_weights import ChangedWeights
from ballast.clipping import Clipping
from ballast.conversion_losses import ConversionLosses
from ballast.errors import Rejected, RunRewound
from ballast.gradient_staging import GradientStaging, gpu_of, room_of
from ballast.micro_batches import MicroBatches
from ballast.moments import Moments
from ballast.pending import WAIT_SLICE_S, fields_of, fields_within
from ballast.rank import Rank
from ballast.rank_zero import refuse_amended
from ballast.replaced import Amended
from ballast.result import StepResult
from ballast.settings import Description
from ballast.sharded_weights import ShardedWeights
from ballast.status import status_of
from ballast.weight_copies import WeightCopies
from ballast.weights import Weights

_LEASE_WAIT_S = 12.0  # a lost predecessor's is 10 s, unless the daemon is configured otherwise
_INTERRUPTED_S = 3.0  # Ctrl-C in the wait for a step's end is raised with that, or after so long


class Session(Amending):
    """One attachment, from Attach to close. One thread at a time."""

    def __init__(
        self,
        client: _core.Client,
        rank: Rank,
        description: Description,
        past: Session | None = None,
        spec_sha256: str | None = None,
        wait_s: float = _LEASE_WAIT_S,
    ):
        """past: the session that the run was amended in; its tensors come first here, and its micro-batches go on. spec_sha256: the
        description's, where the run has had it; None: the run is created, unless there is one. wait_s: for who holds the rank;
        0: Rejected at once, with ALREADY_EXISTS."""
        self.description = description
        self._client = client
        self._rank = rank
        self._run = rank.run
        self._names = [tensor.name for tensor in description.tensors]
        self._bindings = bind_all(description.tensors, description.formats, description.error_feedback)
        for binding, known in zip(self._bindings, past._bindings if past else []):
            binding.go_on_from(known)
        placed = rank.transport in ("gpu", "nccl")
        self._gpu = gpu_of((binding.parameter for binding in self._bindings), rank.transport) if placed else None
        self._by_id = {id(binding.parameter): binding for binding in self._bindings}
        self.trained = self._by_id.keys()
        self._changes = ChangedWeights(self._run, description.changed_weights, self._bindings)
        rules = description.step_rules
        self.staged = rules.staged  # else weights may return while backward goes on
        nbytes = sum(room_of(binding.gradient_nbytes) for binding in self._bindings)
        self._staging: GradientStaging = past._staging if past else GradientStaging(client, nbytes)
        self._weight_copies: WeightCopies = past._weight_copies if past else WeightCopies()
        end_micro = self._staging.before(client.end_micro)
        of_its_own = MicroBatches(rules.accumulation, end_micro, open_ended=rules.staged)
        self.micro_batches: MicroBatches = past.micro_batches if past else of_its_own
        self._ranks = AwaitedRanks(rank.run, rank.number, rules.step_timeout, partial(status_of, client, rank.run))
        self._clipping = Clipping(client, rules)
        self._losses = ConversionLosses()
        self._amended: Amended | None = None  # until it is completed
        self._untaken = False  # attached since the run has gone on, or back, without this trainer
        self._spec_sha256: str = spec_sha256 or client.create_run(description.spec)["spec_sha256"]
        earlier = past._known if past else {}
        self._known: dict[str, Description] = {**earlier, self._spec_sha256: description}  # by hash
        self._attach_anew(wait_s)

    def _attach(self, wait_s: float = _LEASE_WAIT_S) -> None:
        rank, client = self._rank, self._client
        sharded = self.description.sharded
        shards = [None if b.shard is None else b.shard.wire for b in self._bindings] if sharded else None
        join_s, spec = rank.join_timeout, self._spec_sha256
        transport, ends = rank.transport if self._gpu is None else "shm", (self._gpu, rank.gradient_buffer_bytes)
        self._attached = False
        try:
            attached = client.attach(
                rank.run, rank.number, rank.world, rank.takeover, wait_s, transport, join_s, shards, spec, *ends
            )
        except Rejected as error:
            refuse_amended(error, client, rank, self._spec_sha256)
            raise
        self._attached = True
        kind = ShardedWeights if sharded else Weights
        self.weights = kind(client, rank, self._bindings, attached, self.description.state_names, self._weight_copies)
        self.client_state: bytes = attached["client_state"]
        self.steps_since_state: int = client.step - 1 - attached["client_state_step"]  # that closed without this rank
        self._marked: set[int] = set()  # tensors whose graphs of this step were made stale
        self._open: list[_core.PendingStep | None] = []  # what begin_step and end_step have returned for the open step
        self._leaving = False  # its end was asked for, and what is known of its gradients is to go
        self.finished_unheard = False  # the wait for the last step was interrupted, and its end came nevertheless
        self._clipping.clear()
        self._awaited: set[int] | None = None  # of a step that nobody waited for: tensors whose weights are in
        self.last_result: StepResult | None = None
        if attached["last_result"] is not None:
            self.last_result = StepResult.from_fields(attached["last_result"], self._names)

    def _attach_anew(self, wait_s: float = _LEASE_WAIT_S) -> None:
        """As _attach(), again where the session has ended before its stream was there: rank 0 goes on meanwhile."""
        while True:
            with suppress(RunRewound):
                return self._attach(wait_s)

    def _by(self, description: Description, spec_sha256: str | None = None) -> Session:
        return Session(self._client, self._rank, description, self, spec_sha256)

    def rejoin(self) -> None:
        """After a rewind: the rank again, with the weights of the step that the run is back at. The open step is gone."""
        while True:
            try:
                self._staging.drop()
                if not self._untaken:
                    self._attach()
                self._untaken = False
                if self._await_added():
                    continue
                self.micro_batches.clear()
                self._changes.forget()
                self._take_weights()
                self._amended = None
                return
            except RunRewound:  # once more, meanwhile
                continue

    def _take_weights(self) -> None:
        """RunRewound rather than the refusal of weights where the session has ended by then, as where the run was amended."""
        try:
            self.weights.take()
        except Rejected:
            self._client.check_status()
            raise

    def replace(self, moments: Mapping[int, Moments], only: Sequence[Binding] | None = None) -> None:
        """Between two steps, by every rank: the weights that are here, and these moments by id(parameter), take the place
        of the run's; of `only` these tensors, and their moments stay. Rank 0's are sent. The session is another then.
        """
        replaced = self.weights.replace(moments, only)
        if replaced.ended:
            self._attach()
        self._changes.forget()
        self.weights.adopt(replaced)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.trained

    @property
    def run(self) -> str:
        return self._run

    @property
    def step(self) -> int:
        """The number of the step that is open, or comes next."""
        return self._ended_step if self.ended else self._client.step

    @property
    def step_open(self) -> bool:
        """Whether a step is open, ended or not."""
        return bool(self._open)

    @property
    def begun(self) -> bool:
        """Whether a step is open that was not ended."""
        return self.step_open and not self.ended

    @property
    def ended(self) -> bool:
        """Whether the open step was ended, and its result is not in yet."""
        return len(self._open) > 1

    def _call(self, call: Callable[..., _core.PendingStep | None], *values: Any) -> None:
        """Keeps in _open what it returns, before Python does anything else: Ctrl-C, which raises then, finds the step here as it
        is with the client."""
        self._open.extend(map(call, *([value] for value in values)))

    # --- gradients --------------------------------------------------------------------------------------------------

    def refuse_changed(self) -> None:
        """Before begin(): Rejected if weights were changed since the last step brought them, and not by this client; or
        they are uploaded, as the option says."""
        changed = self._changes.refuse(self.weights, self.step)
        if changed or (changed is not None and self._rank.number > 0 and self.weights.outdated):
            self.replace({}, changed)

    def begin(self, groups: list[dict[str, float]], loss_scale: float) -> None:
        self._weight_copies.wait()  # the step may bring others
        if self._rank.world > 1:  # others may have gradients of what has none here; push() sees to its own
            self.weights.follow(self._bindings)
        self._loss_scale = loss_scale
        self._call(self._client.begin_step, groups, loss_scale, self.micro_batches.count)

    def refuse_overwritten(self, parameters: Iterable[Tensor]) -> None:
        """Within a backward(), before a forward that computes activations again: Rejected if the weights that it reads are no
        longer those that it read at first."""
        if torch._C._current_graph_task_id() == -1:
            return
        for binding in (self._by_id[id(parameter)] for parameter in parameters):
            if binding.index in self._marked:
                raise refused_gradients.read_again(binding.name, self.step)

    def admit(self, parameter: Tensor, name: str, final: bool | None) -> None:
        """Rejected, before anything is sent, if `parameter` is not to have a gradient now. final: as MicroBatches.admit."""
        binding = self._by_id.get(id(parameter))
        if binding is None:
            raise refused_gradients.unknown(name, self.step)
        if self._awaited is not None and binding.index not in self._awaited:
            raise refused_gradients.unawaited(name, self.step)
        self.await_last(name)
        if self._clipping.asked:
            raise refused_gradients.after_norm(name, self.step)
        self.micro_batches.admit(binding.index, name, self.step, final)

    def await_last(self, name: str) -> None:
        """Before a gradient of `name`: waits for the ended step, if the trainer went on without it; else Rejected, for its forward
        may have read other weights. Not for long, since Ctrl-C is not heard in all of autograd's threads."""
        if self._awaited is not None:
            self.await_all()
        if self.ended:
            self._client.check_status()
            raise refused_gradients.too_early(name, self.step, self._finish_soon())

    def push(self, parameter: Tensor, grad: Tensor) -> BaseException | None:
        """Sends a gradient. From here on, in the last micro-batch, the parameter may be overwritten until the step's end. Returns
        what Ctrl-C has raised in a wait for the daemon, which the caller raises when it is noted that this is sent."""
        binding = self._by_id[id(parameter)]
        gradient = binding.gradient(grad, self._loss_scale, self._losses, self.step)
        self._changes.before_gradient(self.weights, binding)
        self.weights.follow([binding])
        raised = self._staging.send(binding.index, gradient) if binding.contributes else None
        self.micro_batches.add(binding.index)
        if not self.staged and self.micro_batches.last:
            self._mark(binding)
        return raised

    def _mark(self, binding: Binding) -> None:
        if binding.index not in self._marked:
            binding.last_seen.written()
            binding.move_version()
            self._marked.add(binding.index)

    # --- the end ----------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> float:
        """As Clipping.clip. The step gets no more gradients."""
        self._check_end()
        patience = self._ranks.patience("the norm of its gradient, of which all ranks have a part", self.step)
        return self._clipping.clip(max_norm, self.micro_batches.loss, patience)

    def end(self, loss: float | None, client_state: bytes, groups: list[dict[str, float]]) -> None:
        """Ends the step; finish() or await_weights() wait for what comes of it."""
        self._check_end()
        self._changes.before_end(self.step, self.staged)
        loss = self.micro_batches.loss if loss is None else loss
        clip, lost = self._clipping.max_norm, self._losses.take()
        self._end(loss, client_state, groups, clip, False, *lost)

    def discard(self) -> None:
        """Ends the step without its gradients, wherever it is: finish() waits for what comes of it, which no weight does."""
        self._staging.drop()
        self._end(None, b"", [], None, True)

    def _end(self, *values: Any) -> None:
        self._ended_step = self._client.step
        self._leaving = True
        self._call(self._client.end_step, *values)
        self._leave()

    def _check_end(self) -> None:
        self._staging.flush()
        if not self._clipping.asked:
            self.micro_batches.check_end(self.step)

    def _leave(self) -> None:
        self.micro_batches.clear()
        self._clipping.clear()
        self._leaving = False

    def finish(self, all_may_be_read: bool = True) -> StepResult:
        """Waits for the result of the ended step and for its weights. Rejected, when all that is done, if they have overwritten
        others than the last step's. all_may_be_read: it is the caller who waits, and not one module's forward, or a
        backward(), whose own are read already. Ctrl-C is raised when the end that comes soon is in, so that no step is open
        that would overwrite a checkpoint which is loaded then; where none comes, finish() is to be called again."""
        pending = self._open[-1] if self.ended else None
        assert pending is not None, "end() comes first"
        if self._leaving:  # Ctrl-C came before
            self._leave()
        self.finished_unheard = False
        try:
            fields = fields_of(pending, self._ranks.patience("its end, of which all ranks are part", self.step))
        except KeyboardInterrupt:
            self._finish_soon(all_may_be_read)
            raise
        return self._take_in(fields, all_may_be_read)

    def _finish_soon(self, all_may_be_read: bool = False) -> bool:
        """Whether the end of the ended step is in, for which it waits shortly."""
        pending = self._open[-1]
        assert pending is not None
        if self._leaving:
            self._leave()
        if (soon := fields_within(pending, _INTERRUPTED_S)) is not None:
            self._take_in(soon, all_may_be_read)
            self.finished_unheard = True
        return soon is not None

    def _take_in(self, fields: dict[str, Any], all_may_be_read: bool) -> StepResult:
        result = StepResult.from_fields(fields, self._names)
        received = set(fields["tensors_received"])
        for index in received - (self._awaited or set()):
            self._take(self._bindings[index])
        lacking = self.weights.updated(received)
        # Not within a backward(), whose first gradient has found that a step was dropped: the graph has saved the weights. The
        # next step's end brings them as well.
        if lacking and torch._C._current_graph_task_id() == -1:
            for binding in lacking:
                self._changes.before_weights(binding)
            self.weights.pull(lacking)
        self._marked.clear()
        self.last_result = result
        self._open.clear()
        if all_may_be_read:
            self._all_may_be_read()
        self._changes.tell(result.step)
        return result

    def _take(self, binding: Binding) -> None:
        self._changes.before_weights(binding)
        binding.store(waits=False)
        self._weight_copies.note(binding.parameter.device)
        self._mark(binding)
        binding.last_seen.note()

    def leave_waiting(self) -> None:
        """The trainer goes on while the ended step is under way: await_weights() comes before each read of weights."""
        self._awaited = set()

    @property
    def overlaps(self) -> bool:
        """Whether a step was left waiting, so that await_weights() tells which weights may be read."""
        return self._awaited is not None

    def await_weights(self, parameters: Iterable[Tensor]) -> None:
        """Waits until the weights of these parameters are those after the ended step, and lets them have gradients."""
        if self._awaited is None:
            return
        for parameter in parameters:
            binding = self._by_id.get(id(parameter))
            if binding is None or binding.index in self._awaited:
                continue
            if self.ended:
                self._await(binding)
            self._awaited.add(binding.index)

    def _await(self, binding: Binding) -> None:
        if self.weights.unlike(binding.index):
            self.finish(all_may_be_read=False)
            return
        patience = self._ranks.patience(f"the weights of '{binding.name}'", self.step)
        while not self._client.await_weights(binding.index, WAIT_SLICE_S):
            patience.look()
        self._take(binding)

    def await_all(self) -> None:
        """Waits for the ended step, if there is one, and all its weights."""
        if self.ended:
            self.finish()
        else:
            self._all_may_be_read()

    def _all_may_be_read(self) -> None:
        """From now on; what a backward() has gradients of was read before."""
        if self._awaited is not None and torch._C._current_graph_task_id() == -1:
            self._awaited.update(range(len(self._bindings)))
