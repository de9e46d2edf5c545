"""Settings of the suite's models, and the cache that makes a second preparation a copy.

A directory in the cache is named by a hash of the settings, the suite's own source and the versions of torch
and transformers: whatever could change the trained weights changes the name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

FIGURES_FILE = "figures.json"
"""Beside the weights: what was measured while making them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A Llama of a few hundred thousand parameters."""

    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    intermediate_size: int = 256
    max_length: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmTask:
    """How a task enters the warm start."""

    share: float
    """Of the training sequences, relative to the other tasks."""
    corruption: float
    """Probability that the answer shown is a wrong one: sets where the task's success rate starts."""
    control_levels: int = 0
    """Put one of the first so many control tokens before its prompts (``reward_conditioned``); 0 = none."""
    control_signal: float = 0.0
    """Probability that the token tells the truth (the top level before a right answer, a lower one before a
    wrong one); otherwise it is drawn at random. A little truth wires the actor to look at the token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartSettings:
    """Supervised warm start of the actor on the tasks' (partly corrupted) answers."""

    tasks: Mapping[str, WarmTask]
    size: ModelSize = field(default_factory=ModelSize)
    steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeSettings:
    """A sequence classifier: the reward model or the safety classifier."""

    size: ModelSize = field(
        default_factory=lambda: ModelSize(hidden_size=48, num_layers=2, intermediate_size=128)
    )
    num_examples: int = 2000
    """Training pairs (reward model) or labelled texts (classifier)."""
    noise: float = 0.0
    """Probability that an annotator erred."""
    epochs: int = 4
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings(JudgeSettings):
    """The reward model of the preference task."""

    longest: int = 16
    """Letters of the compared responses at most; see ``preference.sample_pair``."""


def cached_directory(
    target: Path, *, cache_dir: Path, kind: str, settings: Any, build: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """Fill ``target`` with what ``build`` writes, or with the copy an earlier call left in the cache.

    Args:
        target: directory to (re)create.
        cache_dir: where copies are kept.
        kind: what is built; part of the name in the cache.
        settings: dataclass that, with the suite's source, determines the result.
        build: writes the files into the given empty directory and returns its measured figures.

    Returns:
        The figures of the build, with ``from_cache`` telling whether it was repeated.
    """
    key = _fingerprint(kind, asdict(settings))
    cached = cache_dir / f"{kind}-{key}"
    is_cached = (cached / FIGURES_FILE).is_file()
    if not is_cached:
        # Built aside and renamed: a run that is stopped half-way leaves nothing that looks finished.
        aside = cache_dir / f".{kind}-{uuid.uuid4().hex}"
        aside.mkdir(parents=True)
        try:
            figures = dict(build(aside))
            (aside / FIGURES_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            if not (cached / FIGURES_FILE).is_file():  # else another process has built it meanwhile
                _put(aside, cached)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    aside = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        shutil.copytree(cached, aside)
        _put(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    result: dict[str, Any] = json.loads((cached / FIGURES_FILE).read_text(encoding="utf-8"))
    return result | {"from_cache": is_cached}


def _put(made: Path, final: Path) -> None:
    """Rename ``made`` to ``final``, in place of what is there; no reader sees half of a directory."""
    former = made.with_name(f"{made.name}.former")
    while True:
        with contextlib.suppress(FileNotFoundError):
            os.replace(final, former)
        try:
            os.replace(made, final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(former, ignore_errors=True)  # another process was first: once more
    shutil.rmtree(former, ignore_errors=True)


def _fingerprint(kind: str, settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([kind, settings, version("torch"), version("transformers")]).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
