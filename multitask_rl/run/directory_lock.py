"""One training run to an output directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TextIO

from multitask_rl.errors import ConfigError

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Held from its making to ``release``, or to the end of the process.

    Args:
        directory: made if it is missing.

    Raises:
        ConfigError: another process that lives has it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / ".lock"
        self._file: TextIO | None = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(self._file)
            # a child that outlives a killed trainer for a moment still has its files open
            if holder is None or not _is_gone(*holder):
                self.release()
                who = "another process" if holder is None else f"process {holder[1]} on {holder[0]}"
                raise ConfigError(
                    f"output_dir {str(directory)!r}: {who} trains into it; wait for that run or end it, or "
                    "choose another output_dir"
                ) from error
        except OSError:
            return  # a file system without locks
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps([socket.gethostname(), os.getpid()]))
        self._file.flush()

    def is_lost(self) -> bool:
        """Whether the directory, or the file in it that is locked, was deleted or replaced since."""
        if self._file is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _holder(file: TextIO) -> tuple[str, int] | None:
    """Return host and process that wrote the file."""
    file.seek(0)
    with contextlib.suppress(ValueError, TypeError):
        host, pid = json.load(file)
        return str(host), int(pid)
    return None


def _is_gone(host: str, pid: int) -> bool:
    if host != socket.gethostname() or pid == os.getpid():
        return pid == os.getpid()  # one of this process that was left open
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
