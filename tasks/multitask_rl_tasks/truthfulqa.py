"""Task ``truthfulqa``."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl.seeding import random_stream
from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_LETTER = r"(?i:\banswer(?:[*_\s]*:|\s+is\b:?))[*_\s(\[$]*(?:\\boxed\{)?([A-Z])(?![^\W_]|')|\A\W*([A-Z])\W*\Z"


class TruthfulQA(SourcedTask):
    """TruthfulQA (arXiv:2109.07958), single-answer multiple choice; evaluation only.

    Options are shuffled by the question's text (the data puts the right one first): equal in every run.
    """

    licence: ClassVar[str] = "Apache-2.0"
    files: ClassVar[tuple[str, ...]] = ("truthfulqa.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference", "options")
    hub_config: ClassVar[str] = "multiple_choice"
    hub_splits: ClassVar[Mapping[str, str]] = {"test": "validation"}
    evaluation_only: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "truthfulqa/truthful_qa"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\n\n{options}\n\nEnd with 'Answer: ' and the letter of the right option.",
            "rewards": [plugin_entry("exact_match", pattern=_LETTER)],
            "primary_metric": "exact_match",
            "evaluation_only": True,
            "split": "test",
            "eval_split": "test",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``mc1_targets`` (hub) or ``mc1`` with the right option first."""
        question = str(row.get("question") or row["prompt"])
        targets = row.get("mc1_targets")
        if targets:
            pairs = list(zip(targets["choices"], targets["labels"], strict=True))
        else:
            pairs = [(text, int(i == 0)) for i, text in enumerate(row["mc1"])]
        random_stream(0, "truthfulqa-options", question).shuffle(pairs)
        letters = string.ascii_uppercase[: len(pairs)]
        return {
            "id": row.get("id") or f"truthfulqa-{index}",
            "prompt": question,
            "options": "\n".join(
                f"{letter}. {text}" for letter, (text, _) in zip(letters, pairs, strict=True)
            ),
            "reference": next(letter for letter, (_, right) in zip(letters, pairs, strict=True) if right),
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return a sentence that names the right letter."""
        return f"Answer: {row['reference']}"
