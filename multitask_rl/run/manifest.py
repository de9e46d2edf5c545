"""The manifest of a directory: it shows whether a file was altered since the run wrote it.

``manifest.json`` holds size and hash of every file, facts about the whole, and the hash of its own contents.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitask_rl.errors import CheckpointError

FORMAT = 3
MANIFEST = "manifest.json"


def write_manifest(directory: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of all files below ``directory``, with ``facts`` (JSON data), and fsync all."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    listed = {str(p.relative_to(directory)): {"bytes": p.stat().st_size, "blake2b": _hash(p)} for p in files}
    contents = {"format": FORMAT, "facts": dict(facts or {}), "files": listed}
    text = json.dumps({**contents, "blake2b": _digest(contents)}, sort_keys=True)
    (directory / MANIFEST).write_text(text, encoding="utf-8")
    for path in (*directory.rglob("*"), directory):
        sync(path)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of ``directory``, without a check of the files.

    Raises:
        CheckpointError: the manifest is missing, cut off or altered, or has another format.
    """
    file = directory / MANIFEST
    manifest = read_json(file)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} has checkpoint format {manifest.get('format')!r}, this version reads {FORMAT}. Go "
            "on with the version that wrote it, or begin a new run from its weights: "
            "model.name_or_path=<checkpoint>/actor"
        )
    expected = manifest.pop("blake2b", None)
    if expected != _digest(manifest):
        raise CheckpointError(f"{file} was altered: its contents do not have the hash it ends with")
    return manifest


def check_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Check every file that ``manifest`` lists.

    Raises:
        CheckpointError: a file is missing, cut off, altered or unreadable.
    """
    for name, expected in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory} is incomplete: {name} is missing")
        try:
            size, found = file.stat().st_size, _hash(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if size != (whole := expected["bytes"]):
            raise CheckpointError(f"{file} is cut off or altered: {size} bytes instead of {whole}")
        if found != expected["blake2b"]:
            raise CheckpointError(f"{file} was altered: its hash is not that of {MANIFEST}")


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Raises:
        CheckpointError: the file is missing or cut off, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} is incomplete: {file.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is cut off or unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} does not hold an object")
    return value


def sync(path: Path) -> None:
    """Fsync the file or directory ``path``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(contents: Mapping[str, Any]) -> str:
    text = json.dumps(contents, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
