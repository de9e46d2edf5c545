"""Task ``toxicity``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_LABELS = ["hateful", "non-hateful"]


class Toxicity(SourcedTask):
    """HateCheck: is a text hateful? (arXiv:2012.15606); a functional test suite, evaluation only.

    Content warning: the texts hold slurs.
    """

    licence: ClassVar[str] = "CC BY 4.0"
    files: ClassVar[tuple[str, ...]] = ("toxicity_classify.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference", "labels")
    evaluation_only: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "Paul/hatecheck"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "Is this text hateful or non-hateful? Answer with one of the two.\n\nText: {prompt}",
            "rewards": [plugin_entry("label_match")],
            "primary_metric": "label_match",
            "evaluation_only": True,
            "split": "test",
            "eval_split": "test",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``test_case`` and ``label_gold``."""
        return {
            "prompt": row["test_case"],
            "reference": row["label_gold"],
            "labels": _LABELS,
            "kind": row.get("functionality"),
        }
