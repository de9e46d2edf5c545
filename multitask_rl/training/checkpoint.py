"""Checkpoints: one directory a step, complete or not there.

``step_00000025/`` holds ``actor/`` (an ordinary Hugging Face directory: load it anywhere),
``tensors.safetensors`` (optimizer, value heads, random state), ``state.json`` (every controller, as data) and
``manifest.json`` (size and hash of each file). It is written aside, fsynced and renamed, so a crash leaves
the former ones as they were. Nothing in it is pickled.

``index.json`` beside them says which are judged good: the guard restores no other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "CheckpointEntry", "CheckpointStore"]

logger = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(kw_only=True, slots=True)
class CheckpointEntry:
    """A checkpoint in the index."""

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
        is_writer: nobody else writes there. False: what is half written is somebody's, and left alone.
    """

    def __init__(self, directory: Path, keep: int, *, is_writer: bool = True) -> None:
        self.directory = directory
        self.is_writer = is_writer
        self.keep = max(1, keep)
        self.entries: dict[int, CheckpointEntry] = {}
        self._read_index()

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
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "actor").mkdir(parents=True)
            save_actor(aside / "actor")
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside / "tensors.safetensors"
            )
            _write_json(aside / "state.json", dict(state))
            files = sorted(p for p in aside.rglob("*") if p.is_file())
            listed = {
                str(p.relative_to(aside)): {"bytes": p.stat().st_size, "blake2b": _hash(p)} for p in files
            }
            _write_json(aside / _MANIFEST, {"format": FORMAT, "step": entry.step, "files": listed})
            for file in (*files, aside / _MANIFEST, aside):
                _fsync(file)
            if final.exists():
                # a rollback repeats step numbers: the old one steps aside only when the new one is complete
                shutil.rmtree(final)
            os.replace(aside, final)
            _fsync(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {error.strerror or error}. Earlier checkpoints are "
                "intact; free space or choose another output_dir, then start again: the run resumes."
            ) from error
        self.entries[entry.step] = entry
        self._retain()
        self._write_index()
        return final

    def load(self, path: Path) -> Checkpoint:
        """Read and verify a checkpoint.

        Raises:
            CheckpointError: a file is missing, cut off or altered, or the format is another.
        """
        from safetensors.torch import load_file

        manifest = _read_json(path / _MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest.get('format')!r}, this version reads {FORMAT}"
            )
        for name, expected in manifest["files"].items():
            _verify(path / name, expected)
        return Checkpoint(
            path=path,
            state=_read_json(path / "state.json"),
            tensors=load_file(path / "tensors.safetensors"),
        )

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, None if there is none; broken ones are passed over."""
        for directory in sorted(self.directory.glob("step_*"), reverse=True):
            try:
                return self.load(directory)
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
        return None

    def judge(self, step: int, *, good: bool) -> None:
        """Note the guard's verdict on the checkpoint of ``step`` (no effect if there is none)."""
        if step in self.entries:
            self.entries[step].judged_good = good
            self._write_index()

    def forget_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``: a rollback has reverted their weights."""
        for newer in [s for s in self.entries if s > step]:
            shutil.rmtree(self.path(newer), ignore_errors=True)
            del self.entries[newer]
        self._write_index()

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints newer than ``step``, from which the run was resumed: they are another branch."""
        for newer in [s for s in self.entries if s > step]:
            path, number = self.path(newer), 1
            while (aside := path.with_name(f"abandoned_{number}_{path.name}")).exists():
                number += 1
            path.rename(aside)
            del self.entries[newer]
        self._write_index()

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
                shutil.rmtree(self.path(step), ignore_errors=True)
                del self.entries[step]

    def _read_index(self) -> None:
        for left in self.directory.glob(".writing_step_*") if self.is_writer else ():
            shutil.rmtree(left, ignore_errors=True)
        file = self.directory / "index.json"
        if file.exists():
            for row in _read_json(file)["checkpoints"]:
                entry = CheckpointEntry(**row)
                if self.path(entry.step).is_dir():
                    self.entries[entry.step] = entry

    def _write_index(self) -> None:
        rows = [asdict(self.entries[s]) for s in sorted(self.entries)]
        aside = self.directory / ".index.json"
        _write_json(aside, {"checkpoints": rows})
        os.replace(aside, self.directory / "index.json")


def _verify(file: Path, expected: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise CheckpointError(f"checkpoint {file.parent} is incomplete: {file.name} is missing")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(
            f"checkpoint file {file} is cut off or altered: {size} bytes instead of {expected['bytes']}"
        )
    if _hash(file) != expected["blake2b"]:
        raise CheckpointError(f"checkpoint file {file} was altered: its hash is not that of the manifest")


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, allow_nan=True, sort_keys=True), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {file.parent} is incomplete: {file.name} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint file {file} is cut off or unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint file {file} does not hold an object")
    return value


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
