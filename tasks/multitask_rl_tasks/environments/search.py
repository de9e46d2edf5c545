"""``search``: BM25 over documents of a local file, through the package ``bm25s``; for questions."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.ranges import Count, Settings
from multitask_rl.data.readers import read_file
from multitask_rl.errors import ConfigError, DataError, import_extra, path_errors

_lock = threading.Lock()


class Search:
    """An environment with one tool, ``search``. Rewards come from plugins, such as ``exact_match``.

    All episodes of a process share one index of a file.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``environment_config``."""

        documents: str = ""
        """File of the documents (.jsonl, .jsonl.gz, .json, .parquet), one a row. Required."""
        text: str = "text"
        """Column with a document's text."""
        title: str = "title"
        """Column with its title, which is searched too; rows may lack it."""
        results: Count = 3
        """Documents that a search returns, at most."""
        max_chars: Count = 1000
        """Characters of a document that are shown."""

    def __init__(self, config: Config) -> None:
        """Read and index the documents, unless this process has done so.

        Raises:
            ConfigError: no file is named.
            DataError: the file is missing, empty, or has a row without text.
            MissingExtraError: ``bm25s`` is not installed.
        """
        if not config.documents:
            raise ConfigError("search: `documents`, a file with the documents, is required.")
        self.config = config
        path = Path(config.documents).expanduser().resolve()
        with path_errors("search: the file of the documents", path, "one that can be read", DataError):
            changed = os.stat(path).st_mtime_ns
        with _lock:
            self._index = _Index(str(path), changed, config.text, config.title)

    def reset(self, **row: Any) -> None:
        """Begin an episode; the world adds nothing to the prompt."""

    def search(self, query: str) -> str:
        """Search the documents for words and return the best ones.

        Args:
            query: A few words that the documents should have.
        """
        found = self._index.best(query, self.config.results)
        if not found:
            return "No document has any of these words."
        return "\n\n".join(
            f"[{number}] {title}".rstrip() + f"\n{self._shown(text)}"
            for number, (title, text) in enumerate(found, 1)
        )

    def _shown(self, text: str) -> str:
        return text if len(text) <= self.config.max_chars else f"{text[: self.config.max_chars]}..."


@functools.lru_cache(maxsize=8)
class _Index:
    """Documents with their BM25 scores by word; ``changed``, the file's time, has a new file read."""

    def __init__(self, path: str, changed: int, text: str, title: str) -> None:
        self._library = import_extra("bm25s", "search", "search ranks documents through bm25s")
        self._documents: list[tuple[str, str]] = []
        for number, row in enumerate(read_file(path), 1):
            body = row.get(text)
            if not isinstance(body, str) or not body.strip():
                raise DataError(
                    f"search: row {number} of {path} has no text in `{text}`; its columns: {', '.join(row)}"
                )
            head = row.get(title)
            self._documents.append(("" if head is None else str(head), body.strip()))
        self._scores = self._library.BM25()
        self._scores.index(
            self._words([f"{head}\n{body}" for head, body in self._documents]), show_progress=False
        )

    def best(self, query: str, count: int) -> Sequence[tuple[str, str]]:
        """Return title and text of the documents that share words with ``query``, best first."""
        (words,) = self._words([query])
        if not words:
            return []
        scores = self._scores.get_scores(words)
        order = (-scores).argsort(kind="stable")[:count]
        return [self._documents[i] for i in order if scores[i] > 0]

    def _words(self, texts: list[str]) -> list[list[str]]:
        found: list[list[str]] = self._library.tokenize(
            texts, stopwords="en", return_ids=False, show_progress=False
        )
        return found
