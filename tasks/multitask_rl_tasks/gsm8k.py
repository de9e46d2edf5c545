"""Task ``gsm8k``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class Gsm8k(SourcedTask):
    r"""GSM8K: grade-school word problems with a number as the answer (arXiv:2110.14168).

    Train and test as published; the answer counts in ``\boxed{}``, after "####" or "answer is".
    """

    licence: ClassVar[str] = "MIT"
    files: ClassVar[tuple[str, ...]] = ("gsm8k_train.jsonl", "gsm8k_test.jsonl")
    hub_config: ClassVar[str] = "main"

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "openai/gsm8k"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\n\nThink step by step, then give the final number as \\boxed{{number}}.",
            "rewards": [plugin_entry("math_answer", answer="marked")],
            "primary_metric": "math_answer",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``question`` and ``answer`` ("... #### 72")."""
        solution, _, number = str(row["answer"]).rpartition("####")
        return {
            "prompt": row["question"],
            "reference": number.strip().replace(",", ""),
            "solution": solution.strip(),
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return the final number in a box."""
        return f"So it is \\boxed{{{row['reference']}}}."
