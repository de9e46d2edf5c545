"""Progress of a worker, in memory that it shares with the trainer."""

from __future__ import annotations

import mmap
import struct

__all__ = ["Progress"]

_PROGRESS = struct.Struct("=II")


class Progress:
    """Call and rollout that a worker is scoring, in shared memory.

    It identifies the rollout that caused a hang or a crash, even if the process can no longer send.
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _PROGRESS.size)

    def set(self, call: int, index: int) -> None:
        """Note that the rollout ``index`` of ``call`` is begun."""
        _PROGRESS.pack_into(self._memory, 0, call, index)

    def get(self, call: int) -> int:
        """Return the index of the rollout of ``call`` that was begun last; 0 = none yet."""
        noted, index = _PROGRESS.unpack_from(self._memory, 0)
        return int(index) if noted == call else 0

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()
