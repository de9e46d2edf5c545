"""Checkpoints: one directory a step, complete or not there.

``step_00000025/`` holds ``actor/`` (an ordinary Hugging Face directory: load it anywhere),
``tensors.safetensors`` (optimizer, value heads, random state), ``state.json`` (every controller, as data) and
``manifest.json`` (size and hash of each file and of itself, and the guard's verdict: it restores none but
the good). All of it is checked whenever a checkpoint is read.
It is written aside, fsynced and renamed, so a crash leaves the former ones as they were, and it is removed
by being renamed first. The directories are all there is: nothing beside them can disagree with them.
Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.errors import CheckpointError, disk_errors
from multitask_rl.training.manifest import check_files, read_json, read_manifest, sync, write_manifest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "CheckpointEntry", "CheckpointStore"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class CheckpointEntry:
    """What is known of a checkpoint without reading it; part of its manifest."""

    step: int
    judged_good: bool | None = None
    """The guard's verdict on these weights; None = not evaluated."""
    score: float | None = None
    """Macro mean of the held-out primary metrics, for ``best``."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """What a checkpoint directory holds, read and verified."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def actor_dir(self) -> Path:
        """Directory of the actor's weights and tokenizer."""
        return self.path / "actor"


class CheckpointStore:
    """The checkpoints of one run, with retention: newest ``keep``, newest judged-good, best.

    Args:
        directory: of the checkpoints.
        keep: how many of the newest are kept.
        is_writer: no other process writes there. False: it is only read, and another process may be writing.
    """

    def __init__(self, directory: Path, keep: int, *, is_writer: bool = True) -> None:
        self.directory = directory
        self.keep = max(1, keep)
        if is_writer:
            self._put_back()
        self.entries: dict[int, CheckpointEntry] = _read_entries(directory, self._on_disk())

    def path(self, step: int) -> Path:
        """Directory of the checkpoint of ``step``."""
        return self.directory / f"step_{step:08d}"

    def save(
        self,
        entry: CheckpointEntry,
        *,
        save_actor: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write the checkpoint of ``entry.step`` atomically, then apply the retention.

        Raises:
            CheckpointError: the directory cannot be written (read-only, full); what is there is left alone.
        """
        from safetensors.torch import save_file

        final = self.path(entry.step)
        aside = self.directory / f".writing_{final.name}"
        try:
            with disk_errors(f"the checkpoint {final}"):
                self._clear()
                (aside / "actor").mkdir(parents=True)
                save_actor(aside / "actor")
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
                    aside / "tensors.safetensors",
                )
                _write_json(aside / "state.json", dict(state))
                write_manifest(aside, {"entry": asdict(entry)})
                self._put_in_place(aside, final)
                self.entries[entry.step] = entry
                self._retain()
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk is needed for the next try
            raise
        return final

    def _put_in_place(self, aside: Path, final: Path) -> None:
        if final.exists():
            # directories cannot be exchanged in one go: ``_put_back`` ends what a crash leaves here
            os.replace(final, final.with_name(f".replaced_{final.name}"))
        try:
            os.replace(aside, final)
        finally:
            self._put_back()
        sync(self.directory)

    def load(self, path: Path) -> Checkpoint:
        """Read and verify a checkpoint.

        Raises:
            CheckpointError: a file is missing, cut off or altered, or the format is another.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        check_files(path, read_manifest(path))
        try:
            tensors = load_file(path / "tensors.safetensors")
        except SafetensorError as error:
            raise CheckpointError(f"{path / 'tensors.safetensors'} cannot be read: {error}") from error
        return Checkpoint(path=path, state=read_json(path / "state.json"), tensors=tensors)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, None if there is none; broken ones are passed over."""
        for step in sorted(self.entries, reverse=True):
            try:
                return self.load(self.path(step))
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
        return None

    def forget_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``: a rollback has reverted their weights.

        Raises:
            CheckpointError: they cannot be removed; a resumed run would take them up.
        """
        with disk_errors(f"{self.directory}, to remove the checkpoints after step {step},"):
            for newer in self._after(step):
                self._remove(newer)

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints newer than ``step``, from which the run was resumed: they are another branch.

        Raises:
            CheckpointError: they cannot be renamed.
        """
        with disk_errors(f"{self.directory}, to set aside the checkpoints after step {step},"):
            for newer in self._after(step):
                path, number = self.path(newer), 1
                while (aside := path.with_name(f"abandoned_{number}_{path.name}")).exists():
                    number += 1
                path.rename(aside)
                self.entries.pop(newer, None)
            sync(self.directory)

    def _retain(self) -> None:
        newest_first = sorted(self.entries, reverse=True)
        kept = set(newest_first[: self.keep])
        good = [s for s in newest_first if self.entries[s].judged_good]
        kept.update(good[:2])
        scored = [e for e in self.entries.values() if e.score is not None]
        if scored:
            kept.add(max(scored, key=lambda e: (e.score, e.step)).step)
        for step in newest_first:
            if step not in kept:
                self._remove(step)

    def _on_disk(self) -> list[int]:
        found = (re.fullmatch(r"step_(\d+)", p.name) for p in self.directory.glob("step_*"))
        return sorted(int(match[1]) for match in found if match)

    def _after(self, step: int) -> list[int]:
        """Steps after ``step``, newest first, of broken checkpoints too."""
        return [s for s in reversed(self._on_disk()) if s > step]

    def _remove(self, step: int) -> None:
        """Rename, then delete: a crash in the middle leaves no half of a checkpoint under its name."""
        path = self.path(step)
        gone = path.with_name(f".removed_{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        if path.exists():
            os.replace(path, gone)
            sync(self.directory)
        self.entries.pop(step, None)
        shutil.rmtree(gone, ignore_errors=True)

    def _put_back(self) -> None:
        """Restore each replaced checkpoint whose successor is missing; delete the others."""
        for replaced in self.directory.glob(".replaced_step_*"):
            final = replaced.with_name(replaced.name.removeprefix(".replaced_"))
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                with disk_errors(str(final)):
                    os.replace(replaced, final)

    def _clear(self) -> None:
        """Delete leftovers of interrupted saves and deletions."""
        for pattern in (".writing_step_*", ".removed_step_*"):
            for left in self.directory.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)


def _read_entries(directory: Path, steps: list[int]) -> dict[int, CheckpointEntry]:
    """Return the entries of complete checkpoints."""
    entries: dict[int, CheckpointEntry] = {}
    for step in steps:
        path = directory / f"step_{step:08d}"
        try:
            entry = CheckpointEntry(**read_manifest(path)["facts"]["entry"])
            if entry.step != step:
                raise CheckpointError(f"it holds step {entry.step}: its name was changed")
        except (CheckpointError, KeyError, TypeError) as error:
            logger.warning("%s: %s; it is left alone", path, error)
            continue
        entries[step] = entry
    return entries


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, allow_nan=True, sort_keys=True), encoding="utf-8")
