"""What can go wrong, as exceptions with one root, and what is no error: that the run went back.

Every message names what was wrong (run, tensor, step, got and wanted) and the fix. `code` is the daemon's word for the
kind of error, one of gRPC's status codes.
"""

from __future__ import annotations

import re
from typing import Any

from ballast.wording import in_python, seen

# As proto/rewound.h, and what it tells a client to do, which this one does.
_REWOUND = re.compile(r"rewound to step (\d+) ")
_TO_DO = re.compile(r"attach again without the token, .* go on with step (\d+)")


class BallastError(RuntimeError):
    """The root. Raised itself for what the others do not cover: the daemon's access file does not allow it (code PERMISSION_DENIED or
    UNAUTHENTICATED), another rank's loader failed (in_step()), or an error of Ballast's own."""

    def __init__(self, message: str, code: str = "INTERNAL"):
        super().__init__(seen(message))
        self.code = code


class Rejected(BallastError):
    """What was asked is wrong, or wrong now. Asking again without a change gives the same answer."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT"):
        super().__init__(message, code)


class AnotherDescription(Rejected):
    """The run has another description than this trainer has it by."""


class Unavailable(BallastError):
    """The daemon cannot be reached, or could not be reached again in time: within reconnect_timeout, or before the run
    gave this trainer up (rank_timeout). Who starts the trainer again takes the rank again."""

    def __init__(self, message: str, code: str = "UNAVAILABLE"):
        super().__init__(message, code)


class RunFenced(BallastError):
    """This trainer is out: another took its rank of the run over, or its session ended otherwise, as the message says."""

    def __init__(self, message: str, code: str = "ABORTED"):
        super().__init__(message, code)


class RunRewound(BallastError):
    """The run was taken back to an earlier step, by an operator, another rank or the daemon; or the daemon was started anew, and
    has read the run back from its disk, as it was after the last step but the open one, or an earlier one; or rank 0 put other
    weights or state in place of the run's, by load_state_dict(), and this trainer did not. Raised by the call under way:
    backward(), step() or whatever found out. By then this trainer has followed: it is a rank of the run again, its
    parameters hold the weights of that step, and what it registered with register_client_state is as it was in that step(),
    lr and the other options of param_groups too. The step that was being made is gone.

        try:
            loss.backward()
            optimizer.step()
        except ballast.RunRewound:
            pass               # the data loader was registered: the next batch is that of the next step
        if not optimizer.step_was_skipped:
            scheduler.step()   # as after any step(), in which the state was taken

    step: that the run is back at; the next one is step + 1.
    client_state: what was put back, by the name it is registered under; None if the step had none.
    """

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION", step: int = 0):
        super().__init__(message, code)
        self.step = step
        self.client_state: dict[str, Any] | None = None
        self.followed = False  # by this trainer


_REJECTIONS = {
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "NOT_FOUND",
    "DATA_LOSS",
    "UNIMPLEMENTED",
}


def from_status(code: str, message: str) -> BallastError:
    """The exception for a status of the daemon or of the client library."""
    if code == "FAILED_PRECONDITION" and (rewound := _REWOUND.match(message)):
        return RunRewound(_TO_DO.sub(r"the next step is \1", message), code, int(rewound[1]))
    message = in_python(message)
    if code in _REJECTIONS:
        return Rejected(message, code)
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Unavailable(message, code)
    if code == "ABORTED":
        return RunFenced(message, code)
    return BallastError(f"{code}: {message}", code)
