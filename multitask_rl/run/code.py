"""Source files of plugins: were they edited while the run goes on, or since?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.plugins import source_file

RUN = ""
"""The run itself, in place of a task's name."""


class PluginCode:
    """The files of plugins: of the tasks, and with ``config`` of the scheduler's policy and the guard."""

    def __init__(self, specs: Mapping[str, TaskSpec], config: RunConfig | None = None) -> None:
        named: dict[str, dict[str, str]] = {}
        if config is not None:
            named[RUN] = {"scheduler.policy": config.scheduler.policy}
            named[RUN] |= {"guard.plugin": config.guard.plugin} if config.guard.enabled else {}
        for name, spec in specs.items():
            named[name] = {f"rewards.{r.name}": r.plugin for r in spec.rewards}
            named[name] |= {f"constraints.{c.name}": c.plugin for c in spec.constraints}
            named[name] |= {"environment": spec.environment, "type": spec.type}
        self._files: dict[str, dict[str, Path]] = {}
        for name, references in named.items():
            found = ((what, source_file(reference)) for what, reference in references.items())
            self._files[name] = {what: file for what, file in found if file is not None}
        self.versions: dict[str, dict[str, str]] = {name: {} for name in named}
        """Task, or ``RUN`` -> plugin -> hash of its file, as it was at the last call of ``edited``."""
        self.edited()

    def edited(self) -> list[str]:
        """Return the plugins whose file was edited since the last call: place in the settings, and file."""
        found = []
        for name, files in self._files.items():
            for what, file in files.items():
                with suppress(OSError):  # it is being replaced, or was moved: the next call sees what comes
                    version = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
                    if self.versions[name].setdefault(what, version) != version:
                        found.append(f"{place_of(name, what)} ({file.name})")
                        self.versions[name][what] = version
        return found


def place_of(name: str, what: str) -> str:
    """Return the place in the settings of the plugin ``what`` of a task or of ``RUN``."""
    return what if name == RUN else f"tasks.{name}.{what}"
