"""What can go wrong, as three exceptions with one root.

Every message names what was wrong (run, tensor, step, got and wanted) and the mend. `code` is the daemon's word for the
kind of error, one of gRPC's status codes.
"""


class BallastError(RuntimeError):
    """The root. Raised itself for what the others do not cover, which is an error of Ballast's own."""

    def __init__(self, message: str, code: str = "INTERNAL"):
        super().__init__(message)
        self.code = code


class Rejected(BallastError):
    """What was asked is wrong, or wrong now. Asking again without a change gives the same answer."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT"):
        super().__init__(message, code)


class Unavailable(BallastError):
    """The daemon cannot be reached, or could not be reached again in time."""

    def __init__(self, message: str, code: str = "UNAVAILABLE"):
        super().__init__(message, code)


class RunFenced(BallastError):
    """Another trainer took this rank of the run over; this one is out."""

    def __init__(self, message: str, code: str = "ABORTED"):
        super().__init__(message, code)


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
    if code in _REJECTIONS:
        return Rejected(message, code)
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Unavailable(message, code)
    if code == "ABORTED":
        return RunFenced(message, code)
    return BallastError(f"{code}: {message}", code)
