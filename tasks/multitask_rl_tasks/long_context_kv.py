"""Task ``long_context_kv``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl.config.schema.ranges import Count
from multitask_rl.seeding import random_stream
from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class LongContextKV(SourcedTask):
    """Key-value retrieval from a long JSON object (arXiv:2307.03172, section 3): made here, or from a file.

    Find one UUID among many. Without a ``source`` the rows are drawn from a seed, other ones per split.
    """

    licence: ClassVar[str] = "MIT"
    files: ClassVar[tuple[str, ...]] = ("longcontext_kv.jsonl",)

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = ""
        """File or directory; empty = make the rows."""
        num_keys: Count = 75
        """Pairs per object of the rows made here; about 80 characters each."""
        num_rows: Count = 500
        """Rows per split made here."""
        seed: int = 0
        """Of the rows made here."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}",
            "rewards": [plugin_entry("exact_match", pattern=_UUID, normalise=False)],
            "primary_metric": "exact_match",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Return the row as it is: no other format is known."""
        return dict(row)

    def _raw(self, split: str) -> Iterator[Mapping[str, Any]]:
        if self.config.source:
            yield from super()._raw(split)
        elif split in ("train", "validation", "test"):
            for index in range(self.config.num_rows):
                yield self._make(split, index)

    def _make(self, split: str, index: int) -> Row:
        stream = random_stream(self.config.seed, "long_context_kv", split, index)
        names = [
            str(uuid.UUID(int=stream.getrandbits(128), version=4)) for _ in range(2 * self.config.num_keys)
        ]
        pairs = dict(zip(names[::2], names[1::2], strict=True))
        position = stream.randrange(self.config.num_keys)
        key = names[2 * position]
        lines = json.dumps(pairs).replace('", "', '",\n "')
        prompt = (
            "Extract the value corresponding to the specified key in the JSON object below.\n\n"
            f'JSON data:\n{lines}\n\nKey: "{key}"\nCorresponding value:'
        )
        return {"prompt": prompt, "reference": pairs[key], "position": position, "split": split}
