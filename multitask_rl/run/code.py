"""Source files of the plugins that judge and answer: were they edited while the run goes on, or since?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from multitask_rl.config.task import TaskSpec
from multitask_rl.plugins import source_file


class PluginCode:
    """The files of the tasks' rewards, constraints and environments."""

    def __init__(self, specs: Mapping[str, TaskSpec]) -> None:
        self._files: dict[str, dict[str, Path]] = {}
        for name, spec in specs.items():
            named = {f"rewards.{r.name}": r.plugin for r in spec.rewards}
            named |= {f"constraints.{c.name}": c.plugin for c in spec.constraints}
            named |= {"environment": spec.environment}
            found = ((what, source_file(reference)) for what, reference in named.items())
            self._files[name] = {what: file for what, file in found if file is not None}
        self.versions: dict[str, dict[str, str]] = {name: {} for name in specs}
        """Task -> plugin -> hash of its file, as it was at the last call of ``edited``."""
        self.edited()

    def edited(self) -> list[str]:
        """Return the plugins whose file was edited since the last call: place in the tasks, and file."""
        found = []
        for name, files in self._files.items():
            for what, file in files.items():
                with suppress(OSError):  # it is being replaced, or was moved: the next call sees what comes
                    version = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
                    if self.versions[name].setdefault(what, version) != version:
                        found.append(f"tasks.{name}.{what} ({file.name})")
                        self.versions[name][what] = version
        return found
