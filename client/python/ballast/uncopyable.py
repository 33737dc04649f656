"""An object that is a connection to a daemon, and so can neither be copied nor pickled."""

from __future__ import annotations

from typing import Any, NoReturn

from ballast.errors import Rejected


class Uncopyable:
    """Copying or pickling it, by whatever protocol, raises Rejected."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Rejected(
            f"ballast.{type(self).__name__} cannot be copied or pickled: it is a connection to a daemon. Save its state_dict(), or make "
            "another optimizer"
        )
