"""The C++ client, thinly. Addresses and sizes are of memory that the caller keeps alive."""

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

class PendingStep:
    def wait(self, timeout_s: float) -> dict[str, Any] | None: ...

class PushQueue:
    def put(self, tensor: int, address: int, nbytes: int) -> int: ...
    def count_put(self) -> int: ...
    def announce(self, number: int, stream: int) -> None: ...
    def arrive(self, number: int) -> None: ...
    def cancel(self, number: int) -> None: ...
    def count_pushed(self) -> int: ...
    def await_pushed(self, count: int, timeout_s: float) -> bool: ...
    def drop(self) -> None: ...

class PendingMeasure:
    def wait(self, timeout_s: float) -> dict[str, Any] | None: ...

class Client:
    @staticmethod
    def connect(
        server: str,
        connect_timeout_s: float,
        reconnect_timeout_s: float,
        tls_ca: str = "",
        tls_certificate: str = "",
        tls_key: str = "",
        token_file: str = "",
    ) -> Client:
        """tls_...: files, as ballast.Tls has them; without tls_ca there is no TLS. token_file: of the token that calls bring."""

    def beside(self, timeout_s: float) -> Client:
        """Another connection to the same daemon, for calls that are made while this one is in use."""

    def close(self) -> None: ...
    @property
    def server(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def moved(self) -> int: ...
    def check_status(self) -> None: ...
    def get_server(self) -> dict[str, Any]: ...
    def create_run(self, spec_json: str) -> dict[str, Any]: ...
    def amend_run(self, spec_json: str) -> dict[str, Any]: ...
    def plan(self, spec_json: str) -> dict[str, Any]: ...
    def get_run(self, run_id: str) -> dict[str, Any]: ...
    def list_runs(self) -> dict[str, Any]: ...
    def get_history(self, run_id: str, after_step: int) -> dict[str, Any]: ...
    def delete_run(self, run_id: str, force: bool = False, keep_checkpoints: bool = False) -> dict[str, Any]: ...
    def checkpoint(self, run_id: str) -> dict[str, Any]: ...
    def list_checkpoints(self, run_id: str) -> dict[str, Any]: ...
    def tag_version(self, run_id: str, name: str, replace: bool = False) -> dict[str, Any]: ...
    def untag_version(self, run_id: str, name: str) -> None: ...
    def list_versions(self, run_id: str) -> dict[str, Any]: ...
    def rewind(self, run_id: str, to_step: int | None, steps_back: int | None, reason: str) -> dict[str, Any]: ...
    @property
    def shares_gpu(self) -> bool:
        """Whether gradients of more than 16 KiB go to memory of the daemon's GPU, so that those in a GPU's pass by the host."""

    def attach(
        self,
        run_id: str,
        rank: int,
        world: int,
        takeover: bool,
        wait_s: float,
        transport: str = "auto",
        join_timeout_s: float = 3600.0,
        shards: Sequence[tuple[int, int, bool] | None] | None = None,
        spec_sha256: str = "",
        gpu: int | None = None,
        gradient_buffer_bytes: int = 1 << 30,
    ) -> dict[str, Any]:
        """Gives back what this client holds of a rank before, unless a rewind has ended that, and attaches anew.

        gpu: torch's cuda:N in whose memory gradients may lie that are pushed; see shares_gpu. Rejected: there is none.
        spec_sha256: of the spec that the caller goes by; Rejected if the run has another one. Empty: the last that this
        client created or amended the run with.

        shards: by tensor, what this rank holds of it: (begin, end, contributes), elements [begin, end) of the
        row-major tensor; None: all of it. begin == end: nothing. `contributes`: whether this rank sends the gradient of
        its shard; it receives the shard's weights either way. Together the ranks must contribute to every element.

        Every address given to push, bind_weights, pull and pull_state is then of the shard alone, in elements and
        nbytes, and a tensor that the rank does not contribute to counts as absent: it need not, and must not, be
        pushed. load_weights stays of whole tensors. An empty shard takes no memory: it is not bound, and pull and
        pull_state, which may name it, bring nothing of it. Digests are of whole tensors, so pull takes none of a shard.
        They hold for this run until the client attaches again; what it contributes nothing to gets its weights after
        end_step. Raises Rejected for a shard that is not in its tensor, a list of another length than the run's
        tensors, ranks that leave a gap, a serving format with scales whose chunk would be cut, and a daemon that knows
        no shards."""

    def load_weights(
        self, slots: list[tuple[int, str, str, int, int]], updates: dict[int, int] = ..., replace: bool = False
    ) -> list[int]: ...
    def pull_state(
        self, run_id: str, places: list[tuple[int, str, int, int]], snapshot: int = 0, average: float | None = None
    ) -> dict[int, int]:
        """average: of the slot "master", the average with this decay in place of the weights."""

    def pull(
        self, run_id: str, places: list[tuple[int, int, int]], digests: dict[int, int] = ...
    ) -> dict[int, int]: ...
    def pull_served(self, run_id: str, places: list[tuple[int, int, int, int, int]]) -> dict[int, int]:
        """Codes and scales as the daemon serves them, of whole tensors: (tensor, address of the codes, nbytes, address of
        the fp32 scales, how many). Returns the step that they are of, by tensor."""

    def bind_weights(self, tensor: int, address: int, nbytes: int) -> None: ...
    def bind_served(self, tensor: int, codes: int, nbytes: int, scales: int, count: int) -> None: ...
    def begin_step(self, groups: list[dict[str, float]], loss_scale: float = 1.0, micro_batches: int = 1) -> None: ...
    def push(self, tensor: int, address: int, nbytes: int) -> BaseException | None:
        """Waits where as many gradients are kept here as may. Returns what a signal's handler has raised in that wait, as
        Ctrl-C's does: the gradient is pushed all the same."""

    def push_queue(self) -> PushQueue: ...
    def end_micro(self, loss: float | None, next_is_last: bool = False) -> None: ...
    def measure_step(self, loss: float | None = None) -> PendingMeasure: ...
    def end_step(
        self,
        loss: float | None,
        client_state: bytes = b"",
        groups: list[dict[str, float]] = [],
        max_grad_norm: float | None = None,
        discard: bool = False,
        gradient_flushed: float | None = None,
        gradient_overflowed: float | None = None,
    ) -> PendingStep: ...
    def await_weights(self, tensor: int, timeout_s: float) -> bool: ...

class Subscriber:
    """All calls but close(), rollback() and resume() from one thread at a time."""

    @staticmethod
    def open(
        server: str,
        run_id: str,
        every: int,
        marks_changed: bool,
        connect_timeout_s: float,
        reconnect_timeout_s: float,
        tls_ca: str = "",
        tls_certificate: str = "",
        tls_key: str = "",
        token_file: str = "",
        tag: str = "",
        average: float | None = None,
        format: str = "",
        wait_for_run_s: float = 0.0,
    ) -> Subscriber: ...
    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next version, whose weights are then here; None: it is not within timeout_s."""

    def await_next(self, timeout_s: float) -> bool:
        """Waits until next() has something to do or to tell, and changes no weights."""

    @property
    def readable(self) -> bool: ...
    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """By tensor: name, dtype as the wire names it, shape."""

    def read(self, places: Sequence[tuple[int, int, int]]) -> None:
        """(tensor, address, nbytes): the tensor's weights, in its dtype."""

    def count_changed(self, tensor: int) -> int: ...
    def read_changed(self, tensor: int, count: int, places: int, values: int, nbytes: int) -> None:
        """Addresses: of `count` int64, and of `nbytes` for as many elements in the tensor's dtype."""

    def rollback(self, tag: str) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...

def digest(address: int, nbytes: int) -> int: ...
def served_digest(master: str, serving: str, format: str, elements: int, columns: int, address: int) -> int | None: ...
def live_instances(kind: type[T]) -> list[T]: ...

class numerics:
    """A submodule: kernels/registry.h as it is. Indices are positions in the lists of registry()."""

    @staticmethod
    def registry() -> dict[str, Any]: ...
    @staticmethod
    def update(
        kernel: int,
        planes: list[int],
        grad: int,
        grad_format: int,
        n: int,
        rows: int,
        grad_scale: float,
        hyper: list[float],
        t: int,
        random_key: int,
        stochastic: bool,
        statistics: int,
    ) -> dict[str, Any]: ...
    @staticmethod
    def load(master: int, planes: list[int], format: int, source: int, n: int) -> bool: ...
    @staticmethod
    def serve(
        master: int, planes: list[int], format: int, scales: int, row_length: int, target: int, n: int
    ) -> None: ...
    @staticmethod
    def absmax(master: int, planes: list[int], first: int, last: int) -> float: ...
    @staticmethod
    def encode_slot(
        state: int, variance: bool, planes: list[int], source: int, n: int, random_key: int, stochastic: bool
    ) -> bool: ...
    @staticmethod
    def decode_slot(state: int, variance: bool, planes: list[int], target: int, n: int) -> None: ...
    @staticmethod
    def random_key(tensor_key: int, step: int) -> int: ...
    @staticmethod
    def tensor_key(name: str, seed: int) -> int: ...
