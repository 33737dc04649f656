"""What a tensor's weights were when they were last known to be the daemon's."""

from __future__ import annotations

from torch import Tensor

from ballast import _core
from ballast.shard import local_of

# So much of a tensor is remembered by its digest: each time that it is noted, the part that comes next.
_PART_BYTES = 1024


class LastSeen:
    """A parameter's version, memory and a digest of a part of it, as they were noted. It costs no copy.

    Of a sharded parameter they are those of this rank's part; who changes it in place moves its version, or the part's.

    torch moves a tensor's version at each change in place, but not at one through `.data` or numpy: of those only such as
    reach into the part, or give the parameter other memory, are seen, and none of memory on a device.
    """

    __slots__ = ("_parameter", "_version", "_address", "_readable", "_begin", "_nbytes", "_digest")

    def __init__(self, parameter: Tensor):
        self._parameter = parameter
        self._address, self._readable, self._begin = -1, 0, 0
        self.note()

    def note(self) -> None:
        """As it is now."""
        p = local_of(self._parameter)
        self._version, address = self._versions(p), p.data_ptr()
        if address != self._address:
            there = p.nbytes if p.is_contiguous() else p.element_size()  # where codes are the weights it is one element
            self._readable = there if address and p.is_cpu else 0
            self._address = address
        begin = self._begin + _PART_BYTES
        self._begin = begin if begin < self._readable else 0
        self._nbytes = min(_PART_BYTES, self._readable - self._begin)
        if self._nbytes:
            self._digest = _core.digest(address + self._begin, self._nbytes)

    def written(self) -> None:
        """Before the client moves the version by one: weights are written here from now on, until they are noted. Asked again
        where Ctrl-C came before it, or after it and before the next."""
        self._version = self._versions(local_of(self._parameter)) + 1
        self._nbytes = 0

    @property
    def moved(self) -> bool:
        """Whether the version or the memory is another: perhaps the weights are as they were all the same. A version that is
        still to be moved is none."""
        p = local_of(self._parameter)
        return self._versions(p) > self._version or p.data_ptr() != self._address

    def _versions(self, local: Tensor) -> int:
        p = self._parameter
        return p._version if local is p else p._version + local._version

    @property
    def touched(self) -> bool:
        """Whether it has moved, or its part is another."""
        if self.moved:
            return True
        return self._nbytes > 0 and _core.digest(self._address + self._begin, self._nbytes) != self._digest
