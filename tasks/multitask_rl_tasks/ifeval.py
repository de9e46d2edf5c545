"""Task ``ifeval``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class IFEval(SourcedTask):
    """IFEval: instructions whose fulfilment a program can check (arXiv:2311.07911); evaluation only.

    The share of a prompt's instructions followed; ``ifeval/all`` says whether all of them were.
    """

    licence: ClassVar[str] = "Apache-2.0"
    files: ClassVar[tuple[str, ...]] = ("ifeval.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "tests")
    hub_splits: ClassVar[Mapping[str, str]] = {"test": "train"}
    evaluation_only: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "google/IFEval"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}",
            "rewards": [plugin_entry("ifeval")],
            "primary_metric": "ifeval/all",
            "evaluation_only": True,
            "split": "test",
            "eval_split": "test",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``instruction_id_list`` and ``kwargs`` (the hub pads them with nulls)."""
        names, keywords = row["instruction_id_list"], row["kwargs"]
        tests = [
            {"instruction_id": name, "kwargs": {k: v for k, v in (given or {}).items() if v is not None}}
            for name, given in zip(names, keywords, strict=True)
        ]
        return {"id": f"ifeval-{row['key']}", "prompt": row["prompt"], "tests": tests}

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return None: the data holds no responses."""
        return None
