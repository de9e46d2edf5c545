"""Task ``math_easy``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class MathEasy(SourcedTask):
    """One- and two-step word problems (SVAMP, arXiv:2103.07191; MAWPS): a maths task for very small models.

    Short questions with a number as the answer; the last number of the response counts.
    """

    licence: ClassVar[str] = "MIT"
    files: ClassVar[tuple[str, ...]] = ("math_easy.jsonl",)

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "ChilleD/SVAMP"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\nAnswer with a number.",
            "rewards": [plugin_entry("math_answer")],
            "primary_metric": "math_answer",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``Body``, ``Question`` and ``Answer``."""
        number = float(row["Answer"])
        text = f"{row['Body']} {row['Question']}".strip()
        return {"prompt": text, "reference": str(int(number)) if number.is_integer() else str(number)}
