"""Results of deterministic plugins by content: the same response to the same row is scored once."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from multitask_rl.records import Rollout
from multitask_rl.scoring.results import Result

__all__ = ["ResultCache", "content_key"]

MAX_ENTRIES = 65536


def content_key(plugin: bytes, rollout: Rollout, prompts: dict[int, bytes]) -> bytes:
    """Return the cache key of ``rollout`` under ``plugin`` (digest of plugin, version, configuration).

    It covers everything that a deterministic plugin may read, except log-probabilities and verdicts: a plugin
    that reads those declares ``deterministic=False``. ``prompts`` keeps the digests of prompts by ``id``.
    """
    prompt = rollout.prompt
    digest = prompts.get(id(prompt))
    if digest is None:
        row = sorted((str(key), repr(value)) for key, value in prompt.row.items())
        content = repr((prompt.task, prompt.text, row))
        digest = prompts[id(prompt)] = hashlib.blake2b(content.encode(), digest_size=16).digest()
    key = hashlib.blake2b(plugin, digest_size=16)
    key.update(digest)
    key.update(rollout.finish_reason.encode())
    key.update(array("q", rollout.response_ids).tobytes())
    key.update(b"\0")
    key.update(rollout.response.encode(errors="surrogatepass"))
    return key.digest()


class ResultCache:
    """The most recently used results. Not thread-safe: the pool's lock covers it."""

    def __init__(self) -> None:
        self._results: OrderedDict[bytes, Result] = OrderedDict()

    def get(self, key: bytes) -> Result | None:
        """Return the result under ``key``, if any."""
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: bytes, result: Result) -> None:
        """Keep ``result``, which is no failure."""
        self._results[key] = result
        if len(self._results) > MAX_ENTRIES:
            self._results.popitem(last=False)
