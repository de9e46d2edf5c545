"""Task ``humaneval``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class HumanEval(SourcedTask):
    """HumanEval: complete a Python function from signature and docstring (arXiv:2107.03374); evaluation only.

    A body, or the whole function again, scores 1 if the published ``check`` passes.
    """

    licence: ClassVar[str] = "MIT"
    files: ClassVar[tuple[str, ...]] = ("humaneval.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference", "tests", "entry_point")
    evaluation_only: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "openai/openai_humaneval"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "Complete this Python function. Answer with one Python block.\n\n"
            "```python\n{prompt}```",
            "rewards": [plugin_entry("code_evaluator", evaluator="tests", timeout=10.0)],
            "primary_metric": "code_evaluator",
            "evaluation_only": True,
            "split": "test",
            "eval_split": "test",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``canonical_solution`` and ``test``."""
        return {
            "id": str(row["task_id"]).replace("/", "-"),
            "prompt": row["prompt"],
            "entry_point": row["entry_point"],
            "reference": row["canonical_solution"],
            "tests": [row["test"]],
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return the whole function in a fence."""
        return f"```python\n{row['prompt']}{row['reference']}```"
