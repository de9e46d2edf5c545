"""Programming-contest problems: a program reads standard input and prints the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class CodeStdio(SourcedTask):
    """CodeContests (arXiv:2203.07814) from the hub, or any rows with ``{"stdin", "stdout"}`` tests.

    Limits: public sample tests often stand in the prompt, so a program may print them by heart; a problem
    that accepts several answers is judged by the one in the data.
    """

    licence: ClassVar[str] = "CC BY 4.0 (CodeContests); other sources by their platforms"
    files: ClassVar[tuple[str, ...]] = ("code_stdio.jsonl",)
    columns: ClassVar[tuple[str, ...]] = ("prompt", "tests")

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

        source: str = "deepmind/code_contests"
        """Hugging Face id, file or directory."""
        max_tests: int = 10
        """Tests per problem at most, the hidden ones first (hub rows only)."""

    config: Config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "{prompt}\n\nWrite a Python program that reads standard input and prints the answer. "
            "Answer with one Python block.",
            "rewards": [plugin_entry("code_evaluator", evaluator="tests", timeout=10.0)],
            "primary_metric": "code_evaluator",
        }

    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Translate ``description`` and the test columns of CodeContests."""
        tests: list[dict[str, str]] = []
        public: list[dict[str, str]] = []
        for column in ("private_tests", "generated_tests", "public_tests"):
            cases = row.get(column) or {"input": [], "output": []}
            pairs = zip(cases["input"], cases["output"], strict=True)
            public = [{"stdin": stdin, "stdout": stdout} for stdin, stdout in pairs]
            tests += public
        if not tests:
            return None
        return {
            "id": str(row["name"]),
            "prompt": row["description"],
            "tests": tests[: self.config.max_tests],
            "public_tests": public,
        }

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return None: the data holds no solutions."""
        return None
