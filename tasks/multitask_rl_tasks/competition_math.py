"""Task ``math``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl.data.readers import read_dataset_dict
from multitask_rl_rewards.math_answer import last_boxed
from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry

_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class CompetitionMath(SourcedTask):
    """MATH: competition problems with LaTeX answers (arXiv:2103.03874); test on MATH-500 (arXiv:2305.20050).

    Training rows: the training part of MATH from ``train_source``, or the file's own rows.
    """

    licence: ClassVar[str] = "MIT (the problems' authors are named by AoPS; contested)"
    files: ClassVar[tuple[str, ...]] = ("math500.jsonl",)

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "HuggingFaceH4/MATH-500"
        """Hugging Face id, file or directory."""
        train_source: str = "EleutherAI/hendrycks_math"
        """Hugging Face id of the training problems, used with the default ``source``."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\n\nThink step by step, then give the final answer as \\boxed{{answer}}.",
            "rewards": [plugin_entry("math_answer", answer="boxed")],
            "primary_metric": "math_answer",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``problem`` with ``answer`` or, in the training part, the last box of ``solution``."""
        answer = row.get("answer") or last_boxed(str(row.get("solution") or ""))
        if not answer:
            return None
        return {
            "prompt": row["problem"],
            "reference": answer,
            "level": row.get("level"),
            "subject": row.get("subject"),
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return the reference in a box."""
        return f"So it is $\\boxed{{{row['reference']}}}$."

    def _raw(self, split: str) -> Iterator[Mapping[str, Any]]:
        if split == "train" and self.config.source == type(self).Config().source:
            for subject in _SUBJECTS:
                yield from read_dataset_dict(self.config.train_source, {"name": subject}).get("train", ())
        else:
            yield from super()._raw(split)
