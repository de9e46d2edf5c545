"""One training run to an output directory."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from multitask_rl.errors import ConfigError

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """A lock on a directory, held until ``release`` or the end of the process.

    Args:
        directory: made if it is missing. ``.lock`` in it is locked and names host and process of the holder.

    Raises:
        ConfigError: another living process holds it.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / ".lock"
        self._lock = FileLock(self._path, timeout=0)
        self._locked: os.stat_result | None = None
        """The file that is locked; None on a file system without locks, and where a dead process holds it."""
        try:
            self._lock.acquire()
        except Timeout as error:
            host, process = _holder(self._path)
            # a child that outlives a killed trainer for a moment still has its files open
            if _is_running(host, process):
                holder = f"process {process} on {host}" if process else "another process"
                raise ConfigError(
                    f"output_dir {str(directory)!r}: {holder} trains into it; wait for that run or end it, "
                    "or choose another output_dir"
                ) from error
            return
        except (OSError, NotImplementedError):
            return
        self._path.write_text(json.dumps([socket.gethostname(), os.getpid()]), encoding="utf-8")
        self._locked = self._path.stat()

    def is_lost(self) -> bool:
        """Whether the directory, or the file in it that is locked, was deleted or replaced since."""
        try:
            return self._locked is not None and not os.path.samestat(self._locked, self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Let other processes have the directory. Idempotent."""
        self._lock.release(force=True)
        self._locked = None


def _holder(path: Path) -> tuple[str, int]:
    """Return host and process that wrote ``path``; process 0 if it does not say."""
    try:
        host, process = json.loads(path.read_text(encoding="utf-8"))
        return str(host), int(process)
    except (OSError, ValueError, TypeError):
        return "", 0


def _is_running(host: str, process: int) -> bool:
    """Whether the process may be alive; this process itself does not count."""
    if not process or host != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()
