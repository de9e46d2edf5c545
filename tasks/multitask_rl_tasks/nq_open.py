"""Task ``nq_open``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class NQOpen(SourcedTask):
    """NQ-open: questions people asked, answered from memory in a few words (arXiv:1906.00300).

    Exact match with any accepted answer; word overlap as a metric.
    """

    licence: ClassVar[str] = "CC BY-SA 3.0"
    files: ClassVar[tuple[str, ...]] = ("nq_open.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "answers")
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "validation"}

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "google-research-datasets/nq_open"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}?\nAnswer in a few words.",
            "rewards": [
                plugin_entry("exact_match", reference_column="answers"),
                plugin_entry("f1", weight=0.0, reference_column="answers"),
            ],
            "primary_metric": "exact_match",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``question`` and the list ``answer``."""
        return {"prompt": row["question"], "answers": list(row["answer"])}

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return the first accepted answer."""
        return str(row["answers"][0])
