"""Stored samples as the page reads them: columns to filter by, and texts in compressed chunks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

CHUNK = 256
"""Samples of one chunk."""
_MOST_CHARACTERS = 100_000
"""Most characters of one text in the page; the rest is in ``rollouts.jsonl``."""
_MOST_OF_A_COLUMN = 2_000
"""Characters of one column of the row of the data set."""
_TEXTS = ("sample", "attempt", "breakdown", "failure", "finish_reason", "verdicts", "turns")
_NAMED = ("task", "prompt", "failure")
_REJECTED, _VIOLATED, _JUDGED, _FAILED, _TRUNCATED = 1, 2, 4, 8, 16


class Samples:
    """Collects lines of ``rollouts.jsonl``, oldest first; ``former``: former name -> name of a task."""

    def __init__(self, former: Mapping[str, str] | None = None) -> None:
        self._former = former or {}
        kinds = ("step", "draw", "reward", "length", "flags", *_NAMED, "violated")
        self.columns: dict[str, list[Any]] = {name: [] for name in kinds}
        """Name -> a value per sample. ``task``, ``prompt``, ``failure``: indices of ``names`` (-1: none).
        ``violated`` has a bit per constraint, ``flags`` one for REJECTED, VIOLATED, ... in ``run.js``."""
        self._names: dict[str, dict[str, int]] = {name: {} for name in (*_NAMED, "constraint")}
        self.texts = Chunks()
        """Prompt, response, results, ... of each sample, besides its columns."""
        self.tokens = Chunks()
        """What ``TokenRecord`` holds, or None where the run did not store it."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def names(self) -> dict[str, list[str]]:
        """The names that the columns count by."""
        return {kind: list(found) for kind, found in self._names.items()}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one stored sample.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is no line that a run wrote.
        """
        verdicts, failure = line.get("verdicts") or {}, line.get("failure")
        reward = line.get("reward")
        violated = [name for name, verdict in verdicts.items() if verdict.get("violated")]
        applied = [v for v in verdicts.values() if "failure" not in v and v.get("applicable", True)]
        flags = _REJECTED if line.get("rejected") else 0
        flags |= (_VIOLATED if violated else 0) | (_JUDGED if applied else 0) | (_FAILED if failure else 0)
        flags |= _TRUNCATED if line.get("finish_reason") == "length" else 0
        row = {
            "step": int(line["step"]),
            "draw": int(line.get("draw", 0)),
            "reward": None if reward is None else float(f"{float(reward):.4g}"),
            "length": len(line.get("response_ids", ())),
            "flags": flags,
            "task": self._index("task", self._former.get(str(line["task"]), str(line["task"]))),
            "prompt": self._index("prompt", str(line.get("prompt_id", ""))),
            "failure": self._index("failure", str(failure["kind"])) if failure else -1,
            # a browser's integers have 32 bits
            "violated": sum(1 << min(self._index("constraint", name), 30) for name in set(violated)),
        }
        text = {key: line[key] for key in _TEXTS if key in line}
        for key in ("prompt", "response"):
            text[key] = clipped(str(line[key]), _MOST_CHARACTERS)
        given = {k: v for k, v in (line.get("row") or {}).items() if k != "prompt"}
        text["row"] = {
            key: value if isinstance(value, int | float) else clipped(_text(value), _MOST_OF_A_COLUMN)
            for key, value in given.items()
            if value is not None
        }
        for key, value in row.items():
            self.columns[key].append(value)
        self.texts.add(text)
        self.tokens.add(line.get("tokens"))

    def _index(self, kind: str, name: str) -> int:
        return self._names[kind].setdefault(name, len(self._names[kind]))


class Chunks:
    """Lists of ``CHUNK`` values each (the last has fewer), as deflated JSON."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._last: list[Any] = []

    def add(self, value: object) -> None:
        """Add a value behind the others."""
        self._last.append(value)
        if len(self._last) == CHUNK:
            self._full.append(deflated(self._last))
            self._last = []

    def packed(self) -> list[bytes]:
        """Return all chunks."""
        return [*self._full, *([deflated(self._last)] if self._last else [])]


def deflated(value: object) -> bytes:
    """Return a value as deflated JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return zlib.compress(text.encode(errors="replace"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def clipped(text: str, most: int) -> str:
    """Return the first ``most`` characters, and how many more there are."""
    left = len(text) - most
    return text if left <= 0 else f"{text[:most]} ... ({left:,} characters more are in rollouts.jsonl)"
