"""``code_repair``: write a program, see which public tests fail, repair it; hidden tests decide."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.schema.ranges import Count, Natural, Range, Settings
from multitask_rl.environments.base import Message, StepResult
from multitask_rl.errors import DataError, SandboxError
from multitask_rl.records import Failure
from multitask_rl.sandbox import shared_sandbox
from multitask_rl.sandbox.base import AssertsTask, Limits, Outcome, Program, StdioTask
from multitask_rl_rewards.code_evaluator import program_in, sandbox_task
from multitask_rl_rewards.text import strip_thinking

_SHOWN_TESTS = 3
_SHOWN_CHARS = 300


class CodeRepair:
    """The actor writes a program, reads which public tests fail, and repairs it.

    The rows' column ``tests`` has what ``code_evaluator`` reads: statements, or stdin/stdout pairs.

    Public tests are those of the row's column ``public_tests``, else the first ``public`` ones; the others
    are hidden. A column that leaves no hidden test does not count. At least one test is hidden: a row with a
    single test has no public one, and its first program ends the episode.

    A program earns the share of hidden tests that it passes, and half of that if it fails a public test. The
    reward of a step is the change: an episode earns what its last program does, wherever it ends.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``environment_config``."""

        public: Count = 1
        """Public tests of a row without the column ``public_tests``."""
        repairs: Natural = 3
        """Repairs after the first program; the task's ``max_turns`` has to allow one turn more."""
        all_or_nothing: bool = False
        """A program earns 1 if it passes all tests, public and hidden, else 0."""
        timeout: Annotated[float, Range("(0, 3600)")] = 5.0
        """CPU seconds of one run of a program; the wall-clock limit is 2 x + 1."""
        memory_mb: Annotated[int, Range("[16, inf)")] = 512
        """Address space of a program, MiB."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._row: Mapping[str, Any] = {}
        self._public: AssertsTask | StdioTask | None
        self._hidden: AssertsTask | StdioTask
        self._shown: list[str] = []
        self._repairs = 0
        self._share = 0.0

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Divide the row's tests into public and hidden ones; return no message beside the prompt.

        Raises:
            DataError: the row has no usable tests.
        """
        _task(row, row.get("tests"))
        tests = [test for i, test in enumerate(row["tests"]) if test not in row["tests"][:i]]
        own = row.get("public_tests")
        public = list(own) if isinstance(own, Sequence) else []
        if not public or all(test in public for test in tests):
            public = tests[: min(self.config.public, len(tests) - 1)]
        self._hidden = _task(row, [test for test in tests if test not in public])
        self._public = _task(row, [_telling(test) for test in public]) if public else None
        self._shown = [test if isinstance(test, str) else f"Input:\n{test['stdin']}" for test in public]
        self._row, self._repairs, self._share = row, -1, 0.0
        return []

    def step(self, message: Message) -> StepResult:
        """Run the program of the message; ``info`` has the share of public tests and the repairs so far.

        Raises:
            SandboxError: the sandbox failed.
        """
        self._repairs += 1
        is_last = self._repairs >= self.config.repairs
        source = program_in(strip_thinking(message["content"]), self._row)
        if not source:
            text, passed, reward = "No Python program found. Answer with one Python block.", 0.0, 0.0
        else:
            limits = Limits(
                cpu_s=self.config.timeout, wall_s=2 * self.config.timeout + 1, mem_mb=self.config.memory_mb
            )
            tasks = [task for task in (self._hidden, self._public) if task]
            hidden, *public = shared_sandbox().map(
                Program(source=source, task=task, limits=limits) for task in tasks
            )
            passed, share = min(map(_share, public), default=1.0), _share(hidden)
            if self.config.all_or_nothing:
                share = float(share == passed == 1.0)
            elif passed < 1.0:
                share /= 2
            reward, self._share = share - self._share, share
            text = "\n\n".join(map(self._report, public))
        is_done = is_last or passed == 1.0 or self._public is None
        return StepResult(
            messages=() if is_done else [{"role": "user", "content": text}],
            done=is_done,
            reward=reward,
            info={"public_passed": passed, "repairs": self._repairs},
        )

    def _report(self, outcome: Outcome) -> str:
        failed = [
            f"{test[:_SHOWN_CHARS]}\n{result.message[:_SHOWN_CHARS]}"
            for test, result in zip(self._shown, outcome.tests, strict=False)
            if not result.is_passed
        ]
        head = f"{len(failed)} of {len(outcome.tests)} public tests failed."
        tail = "Repair the program and answer with one Python block."
        return "\n\n".join([head, *failed[:_SHOWN_TESTS], tail])


def _task(row: Mapping[str, Any], tests: Any) -> AssertsTask | StdioTask:
    task = sandbox_task({**row, "tests": tests})
    if isinstance(task, Failure):
        raise DataError(f"code_repair: {task.message}")
    return task


def _share(outcome: Outcome) -> float:
    if outcome.pass_fraction is None:
        raise SandboxError(f"code_repair: the sandbox failed: {outcome.message}")
    return outcome.pass_fraction


def _telling(statement: Any) -> Any:
    """Return ``assert a == b`` with a message that gives the value of ``a``; anything else as it is."""
    match parse_python(statement.strip()).body if isinstance(statement, str) else []:
        case [ast.Assert(test=ast.Compare(left=left, ops=[_]) as test, msg=None)]:
            named = ast.unparse(ast.NamedExpr(target=ast.Name("_value", ast.Store()), value=left))
            rest = ast.unparse(test).removeprefix(ast.unparse(left))
            return f"assert ({named}){rest}, {ast.unparse(left)!r} + f' is {{_value!r:.{_SHOWN_CHARS}}}'"
    return statement
