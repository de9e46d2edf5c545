"""Results of deterministic plugins, kept by content: the same response to the same row is scored once."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from multitask_rl.records import Rollout
from multitask_rl.scoring.grader import Result

__all__ = ["ResultCache", "RowDigests"]

MAX_ENTRIES = 65536


class RowDigests:
    """Digests of the prompts of one call to the pool, each computed once (a group shares its prompt)."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}

    def key(self, plugin: bytes, rollout: Rollout) -> bytes:
        """Return the cache key of ``rollout`` under ``plugin`` (digest of plugin, version, configuration).

        Everything a deterministic plugin may read is in it, except log-probabilities and verdicts: one that
        reads those declares ``deterministic=False``.
        """
        prompt = rollout.prompt
        digest = self._digests.get(id(prompt))
        if digest is None:
            content = repr((prompt.task, prompt.text, _stable(prompt.row)))
            digest = self._digests[id(prompt)] = hashlib.blake2b(content.encode(), digest_size=16).digest()
        key = hashlib.blake2b(plugin, digest_size=16)
        key.update(digest)
        key.update(rollout.finish_reason.encode())
        key.update(array("q", rollout.response_ids).tobytes())
        key.update(b"\0")
        key.update(rollout.response.encode(errors="surrogatepass"))
        return key.digest()


class ResultCache:
    """The most recently used results. Not thread-safe: the pool's lock covers it."""

    def __init__(self, size: int = MAX_ENTRIES) -> None:
        self._size = size
        self._results: OrderedDict[bytes, Result] = OrderedDict()

    def get(self, key: bytes) -> Result | None:
        """Return the result kept under ``key``, if any."""
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: bytes, result: Result) -> None:
        """Keep ``result``; failures are never to be kept."""
        self._results[key] = result
        if len(self._results) > self._size:
            self._results.popitem(last=False)


def _stable(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((str(key), repr(value)) for key, value in row.items())
