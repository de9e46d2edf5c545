"""Opening a sandbox by name, and the instance that all rewards of a process share."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from multitask_rl.errors import ConfigError
from multitask_rl.plugins import SANDBOXES, load_plugin
from multitask_rl.sandbox.base import Sandbox

_lock = threading.Lock()
_shared: dict[tuple[str, ...], Sandbox] = {}
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock(), _shared={}))


def open_sandbox(name: str = "namespaces", **config: Any) -> Sandbox:
    """Return the sandbox behind the entry point ``name`` of the group ``multitask_rl.sandboxes``.

    Raises:
        PluginError: no such sandbox is installed.
        ConfigError: it does not take these settings.
        SandboxError: it cannot run on this machine.
    """
    factory = load_plugin(SANDBOXES, name, expects=("run", "submit", "map", "close"))
    try:
        sandbox: Sandbox = factory(**config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sandbox {name!r} refuses its settings {config!r}: {error}") from error
    return sandbox


def shared_sandbox(packages: tuple[str, ...] = ("numpy",)) -> Sandbox:
    """Return the built-in sandbox of this process; the first call opens it, the exit closes it.

    Any number of threads may use it at once. A forked child gets its own. There is one for each choice of
    third-party ``packages``.

    Raises:
        SandboxError: this machine cannot run it.
    """
    with _lock:
        if packages not in _shared:
            _shared[packages] = open_sandbox(workers=max(1, min(8, os.cpu_count() or 1)), packages=packages)
            atexit.register(_shared[packages].close)  # in a forked child it does nothing
        return _shared[packages]
