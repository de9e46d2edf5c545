"""The lock that lets one training run at a time write into an output directory."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import psutil
from filelock import FileLock, Timeout

from multitask_rl.errors import ConfigError


class DirectoryLock:
    """A lock on a directory, held until ``release`` or the end of the process.

    A second lock of the same process takes it over, and sets ``is_taken`` of the first one: a notebook may
    make a new run where it left one open. Where the file system has no locks, nothing is locked.

    Args:
        directory: made if it is missing. Its file ``.lock`` names host and process of the holder.

    Raises:
        ConfigError: another process holds it, and is not known to be dead.
    """

    _newest: ClassVar[WeakValueDictionary[Path, DirectoryLock]] = WeakValueDictionary()
    """Directory -> last lock of this process."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / ".lock"
        self._lock = FileLock(self._path, timeout=0)
        self._locked: os.stat_result | None = None
        """The locked file; None if the file system has no locks, or a dead process holds the lock."""
        self.is_taken = False
        """A later one of this process has taken it over."""
        former = self._newest.get(directory.resolve())
        self._newest[directory.resolve()] = self
        if former is not None:
            former.is_taken = True
            if former._locked is not None and not former.is_lost():
                self._lock, former._lock = former._lock, self._lock
                self._locked, former._locked = former._locked, None
                return
        try:
            self._lock.acquire()
        except Timeout as error:
            try:
                host, number = json.loads(self._path.read_text(encoding="utf-8"))
                process = int(number)
            except (OSError, ValueError, TypeError):
                host, process = "", 0
            is_here = process > 0 and host == socket.gethostname()
            is_dead = is_here and (process == os.getpid() or not psutil.pid_exists(process))
            # a child process that outlives a killed trainer still has its files open
            if not is_dead:
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
        """Whether the directory or the locked file was deleted or replaced."""
        try:
            return self._locked is not None and not os.path.samestat(self._locked, self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Unlock the directory. Idempotent."""
        self._lock.release(force=True)
        self._locked = None
