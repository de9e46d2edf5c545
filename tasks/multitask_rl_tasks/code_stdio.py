"""Task ``code_stdio``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from multitask_rl.sandbox.base import StdioTask
from multitask_rl_rewards.code_evaluator import sandbox_task
from multitask_rl_tasks.sourced import Row, SourceConfig, SourcedTask, plugin_entry


class CodeStdio(SourcedTask):
    """Programming-contest problems: a program reads standard input and prints the answer.

    CodeContests (arXiv:2203.07814) from the hub, or any rows with ``{"stdin", "stdout"}`` tests.

    A program earns 1 if it passes all tests of the row, else 0. A row whose tests all expect one output is
    left out: a program that prints this output passes them. Tests whose input stands in the prompt are left
    out where the others expect at least two outputs; they become ``public_tests`` if the row has none.

    Limits: where all tests stand in the prompt, a program may choose among the outputs by heart; a problem
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
            "rewards": [plugin_entry("code_evaluator", evaluator="tests", timeout=10.0, all_or_nothing=True)],
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
        found = self.adopt(
            {"id": str(row["name"]), "prompt": row["description"], "tests": tests, "public_tests": public}
        )
        if found is None:
            return None
        first, *others = found["tests"]
        other = next((test for test in others if _differ([first, test])), None)
        others.sort(key=lambda test: test is not other)  # the cut leaves two outputs
        return {**found, "tests": [first, *others][: max(2, self.config.max_tests)]}

    def adopt(self, row: Mapping[str, Any]) -> Row | None:
        """Return the row with the tests that count; None where one output passes all."""
        if not isinstance(sandbox_task(row), StdioTask):
            return dict(row)  # the reward says what is wrong with its tests
        tests, prompt = row["tests"], f"\n{_lines(row['prompt'])}\n"
        hidden = [test for test in tests if f"\n{_lines(test['stdin'])}\n" not in prompt]
        if not _differ(hidden):
            return dict(row) if _differ(tests) else None
        shown = [test for test in tests if test not in hidden]
        return {**row, "tests": hidden, "public_tests": row.get("public_tests") or shown}

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return None: the data holds no solutions."""
        return None


def _differ(tests: Iterable[Mapping[str, Any]]) -> bool:
    return len({_lines(test["stdout"]) for test in tests}) > 1


def _lines(text: Any) -> str:
    """Return a text without the white space around its lines."""
    return "\n".join(line.strip() for line in str(text).strip().splitlines())
