"""Checkpoints: one directory per step, complete or absent.

``step_00000025/`` holds ``actor/`` (an ordinary Hugging Face directory), ``tensors.safetensors`` (optimizer,
value heads, random state), ``state.json`` (every controller, as data) and ``manifest.json`` (sizes, hashes,
the guard's verdict). Reading checks all of it. Nothing is pickled. A checkpoint is written aside, fsynced and
renamed, and renamed before it is deleted, so that a crash leaves the other checkpoints intact.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.errors import CheckpointError, ConfigError, PluginError, disk_errors
from multitask_rl.run.manifest import check_files, read_json, read_manifest, sync, write_manifest

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class CheckpointEntry:
    """What the manifest of a checkpoint says about it."""

    step: int
    judged_good: bool | None = None
    """The guard's verdict on these weights; None = not evaluated."""
    judged_by: str = ""
    """Class of that guard; empty = not known, or none."""
    score: float | None = None
    """Macro mean of the held-out primary metrics; the highest is the best."""
    score_of: list[str] = field(default_factory=list)
    """The tasks in it, each with metric, direction and definition: scores of others are not compared."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """Verified contents of a checkpoint."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def actor_dir(self) -> Path:
        """Directory of the actor's weights and tokenizer."""
        return self.path / "actor"


class CheckpointStore:
    """The checkpoints of one run. It keeps the newest ``keep``, the two newest judged good, and the best.

    After a change of tasks or metrics, whose scores are not compared, also the best of the former ones.

    ``is_writer``: only this process writes to ``directory``. False: this process only reads it.
    """

    def __init__(self, directory: Path, keep: int, *, is_writer: bool = True) -> None:
        self.directory = directory
        self.keep = max(1, keep)
        if is_writer:
            self._put_back()
        self.entries: dict[int, CheckpointEntry] = {}
        """Step -> entry, of complete checkpoints."""
        for step in self._on_disk():
            path = self.path(step)
            try:
                entry = self.read_entry(path)
                if entry.step != step:
                    raise CheckpointError(f"it holds step {entry.step}: its name was changed")
            except CheckpointError as error:
                logger.warning("%s: %s; it is left alone", path, error)
                continue
            self.entries[step] = entry

    @staticmethod
    def read_entry(path: Path) -> CheckpointEntry:
        """Return what the manifest of the checkpoint in the directory ``path`` says about it.

        Raises:
            CheckpointError: there is no manifest that can be read, or ``save`` did not write it.
        """
        manifest = read_manifest(path)
        try:
            return CheckpointEntry(**manifest["facts"]["entry"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}/manifest.json does not hold what a save writes ({type(error).__name__}: {error})"
            ) from error

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
        """Write the checkpoint of ``entry.step`` atomically, then delete those that need not be kept.

        Raises:
            CheckpointError: the directory cannot be written (read-only, full); its checkpoints stay.
            PluginError: a part of ``state`` is no JSON data.
        """
        from safetensors.torch import save_file

        final = self.path(entry.step)
        aside = self.directory / f".writing_{final.name}"
        try:
            with disk_errors(f"the checkpoint {final}"):
                # leftovers of interrupted saves and deletions
                for pattern in (".writing_step_*", ".removed_step_*"):
                    for left in self.directory.glob(pattern):
                        shutil.rmtree(left, ignore_errors=True)
                (aside / "actor").mkdir(parents=True)
                save_actor(aside / "actor")
                save_file(
                    {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
                    aside / "tensors.safetensors",
                )
                (aside / "state.json").write_text(_json(state), encoding="utf-8")
                write_manifest(aside, {"entry": asdict(entry)})
                if final.exists():
                    # two directories cannot swap in one operation: ``_put_back`` ends what a crash leaves
                    os.replace(final, final.with_name(f".replaced_{final.name}"))
                try:
                    os.replace(aside, final)
                finally:
                    self._put_back()
                sync(self.directory)
                self.entries[entry.step] = entry
                newest_first = sorted(self.entries, reverse=True)
                good = [s for s in newest_first if self.entries[s].judged_good]
                kept = {*good[:2], *self._best_of_tasks()[:2]}
                for step in newest_first[self.keep :]:
                    if step not in kept:
                        self._remove(step)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # frees the disk for the next try
            raise
        return final

    def best(self) -> int | None:
        """Return the step with the highest score among those of the newest one's tasks; None without any."""
        return next(iter(self._best_of_tasks()), None)

    def rename_tasks(self, renamed: Mapping[str, str]) -> None:
        """Let the scores of earlier checkpoints count as scores of the renamed tasks: former name -> name."""
        for entry in self.entries.values():
            parts = [own.partition(":") for own in entry.score_of]
            entry.score_of = sorted(f"{renamed.get(task, task)}{colon}{rest}" for task, colon, rest in parts)

    def _best_of_tasks(self) -> list[int]:
        """Return the step with the highest score for each set of tasks that scores are of, newest first."""
        best: dict[tuple[str, ...], CheckpointEntry] = {}
        for step in sorted(self.entries, reverse=True):
            entry = self.entries[step]
            if entry.score is not None:
                own = best.setdefault(tuple(entry.score_of), entry)
                if entry.score > (own.score or 0.0):
                    best[tuple(entry.score_of)] = entry
        return [entry.step for entry in best.values()]

    def load(self, path: Path) -> Checkpoint:
        """Read and verify a checkpoint.

        Raises:
            CheckpointError: a file is missing, cut off or altered, or has another format.
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
        """Return the newest complete checkpoint; None if there is none. Broken ones are skipped."""
        for step in sorted(self.entries, reverse=True):
            try:
                return self.load(self.path(step))
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
        return None

    def forget_after(self, step: int) -> None:
        """Remove checkpoints after ``step``, whose weights a rollback has reverted.

        Raises:
            CheckpointError: they cannot be removed, and a resumed run would load them.
        """
        with disk_errors(f"{self.directory}, to remove the checkpoints after step {step},"):
            for newer in self._after(step):
                self._remove(newer)

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints after ``step`` (-1: all) to ``abandoned_...``: the run has left their branch.

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

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is a checkpoint of the present branch of this run."""
        return path.resolve() in [self.path(step).resolve() for step in self._on_disk()]

    def _on_disk(self) -> list[int]:
        found = (re.fullmatch(r"step_(\d+)", p.name) for p in self.directory.glob("step_*"))
        return sorted(int(match[1]) for match in found if match)

    def _after(self, step: int) -> list[int]:
        """Return the steps after ``step``, newest first, including those of broken checkpoints."""
        return [s for s in reversed(self._on_disk()) if s > step]

    def _remove(self, step: int) -> None:
        """Rename, then delete: a crash leaves no half of a checkpoint under its name."""
        path = self.path(step)
        gone = path.with_name(f".removed_{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        if path.exists():
            os.replace(path, gone)
            sync(self.directory)
        self.entries.pop(step, None)
        shutil.rmtree(gone, ignore_errors=True)

    def _put_back(self) -> None:
        """Restore replaced checkpoints whose successor is missing; delete the others."""
        for replaced in self.directory.glob(".replaced_step_*"):
            final = replaced.with_name(replaced.name.removeprefix(".replaced_"))
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                with disk_errors(str(final)):
                    os.replace(replaced, final)


def _json(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(state), allow_nan=True, sort_keys=True)
    except (TypeError, ValueError) as error:
        for name, part in {
            **{f"tasks.{n}": own for n, own in state.get("tasks", {}).items()},
            **state,
        }.items():
            try:
                json.dumps(part, sort_keys=True)
            except (TypeError, ValueError):
                raise PluginError(
                    f"{name}: its state cannot be saved: {error}. state_dict of a plugin has to return JSON "
                    "data: texts, numbers, lists, and mappings whose keys are texts"
                ) from error
        raise


@contextlib.contextmanager
def telling_of_removal(path: Path) -> Iterator[None]:
    """Turn an error in the block, which reads the checkpoint ``path``, into one that says it was removed.

    Raises:
        CheckpointError: the block failed, and the checkpoint is not there any more.
    """
    try:
        yield
    except Exception as error:
        if (path / "manifest.json").exists():
            raise
        raise CheckpointError(
            f"{path} was removed while it was read: its run goes on, and keeps the newest checkpoints "
            "(checkpoint.keep), the best and the last judged good. Take one that is there, or copy it first"
        ) from error


def model_directory(name: str) -> str:
    """Return the model directory of a run (its newest checkpoint) or of a checkpoint, else ``name``.

    Raises:
        ConfigError: a run without a checkpoint.
    """
    path = Path(name)
    if (path / "checkpoints").is_dir():
        found = CheckpointStore(path / "checkpoints", keep=1, is_writer=False).newest()
        if found is None:
            raise ConfigError(f"{name} is a run without a checkpoint; give the directory of a model")
        path = found.actor_dir
    elif (path / "manifest.json").is_file() and (path / "actor").is_dir():
        path /= "actor"
    return name if path == Path(name) else str(path)
