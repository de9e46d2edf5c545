"""Task ``mbpp``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class Mbpp(SourcedTask):
    """MBPP: short Python functions with asserts as tests (arXiv:2108.07732).

    The prompt shows one of a row's tests, so that name and signature are known.

    A program earns 1 if it passes all tests, the shown one among them, else 0. In 7 of the 974 rows all
    tests expect one value.
    """

    licence: ClassVar[str] = "CC BY 4.0"
    files: ClassVar[tuple[str, ...]] = ("mbpp.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference", "tests", "entry_point", "example")
    hub_config: ClassVar[str] = "full"
    hub_splits: ClassVar[Mapping[str, str]] = {s: s for s in ("train", "validation", "test", "prompt")}

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "google-research-datasets/mbpp"
        """Hugging Face id, file or directory."""

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\n\nThe program must pass tests like\n{example}\n\n"
            "Answer with one Python block.",
            "rewards": [plugin_entry("code_evaluator", evaluator="tests", timeout=10.0, all_or_nothing=True)],
            "primary_metric": "code_evaluator",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate columns of the hub (``text``, ``code``, ``test_list``) or rows without ``example``."""
        tests = list(row.get("test_list") or row.get("tests") or ())
        if not tests:
            return None
        code = row.get("code") or row.get("reference")
        defined = re.findall(r"^(?:def|class)\s+(\w+)", str(code), re.MULTILINE)
        called = (name for name in defined if any(re.search(rf"\b{name}\s*\(", test) for test in tests))
        return {
            **row,
            "id": row.get("id") or f"mbpp-{row.get('task_id', index)}",
            "prompt": row.get("text") or row.get("prompt"),
            "reference": code,
            "tests": tests,
            "setup": row.get("test_setup_code") or row.get("setup") or "",
            "entry_point": row.get("entry_point") or next(called, ""),
            "example": tests[0],
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return the reference in a fence."""
        return f"```python\n{row['reference']}\n```"
