"""``python_tool``: an interpreter for each episode, in the sandbox; for mathematics with a tool.

The state of an episode is the list of its calls. A call is a fresh program that runs the earlier calls first,
without their output. So a waiting episode holds no process, and every call has the sandbox's full isolation
and limits: a cell serves one program at a time, so living interpreters would need a cell each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from multitask_rl.config.schema.ranges import Count, Positive, Settings
from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import shared_sandbox
from multitask_rl.sandbox.base import Ending, Limits, Outcome, Program

_RAN_TO_ITS_END = 42
_HARNESS = """
import ast, io, linecache, os, random, sys, traceback, types

class Nowhere(io.TextIOBase):
    def write(self, text):
        return len(text)

def run(number, source):
    name = f"call {number}"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        tree = compile(source, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        trail = error.__traceback__.tb_next
        traceback.print_exception(type(error), error, trail, file=sys.stdout)

def main(calls, seed):
    screen, leave = sys.stdout, os._exit
    random.seed(seed)
    library = "num" + "py"  # the whole name would make the sandbox load it for every program
    if any(library in source for source in calls):
        try:
            __import__(library).random.seed(seed)
        except ImportError:
            pass
    for number, source in enumerate(calls, 1):
        sys.stdout = sys.stderr = Nowhere() if number < len(calls) else screen
        run(number, source)
    try:
        screen.flush()
    finally:
        leave(STATUS)

module = sys.modules["__main__"] = types.ModuleType("__main__")
names = module.__dict__
""".replace("STATUS", str(_RAN_TO_ITS_END))
"""Runs the calls as an interactive interpreter does: an error ends a call, not the interpreter."""


class PythonTool:
    """An environment with one tool, ``python``. Rewards come from plugins, such as ``math_answer``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``environment_config``."""

        timeout: Positive = 5.0
        """CPU seconds of a call; the wall-clock limit is 2 x + 1."""
        total_timeout: Positive = 10.0
        """CPU seconds that all calls of an episode may need together (each runs the earlier ones again)."""
        memory_mb: Count = 512
        """Address space of the interpreter, MiB."""
        max_output_chars: Count = 4000
        """Longest result; the middle of a longer one is left out."""
        packages: list[str] = field(default_factory=lambda: ["numpy"])
        """Third-party packages that the calls may import, with those that they need (sympy: also mpmath)."""
        seed: int = 0
        """Of ``random`` and of numpy's global generator at the start of an episode."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._calls: list[str] = []
        self._spent_s = 0.0
        self._failure = ""

    def reset(self, **row: Any) -> None:
        """Begin with an empty interpreter; the environment adds nothing to the prompt."""
        self._calls, self._spent_s, self._failure = [], 0.0, ""

    def python(self, code: str) -> str:
        """Run Python code. The state (variables, functions, imports) stays for the next call.

        Args:
            code: Python source. The result is what it prints, and the value of its last line.
        """
        config = self.config
        cpu_s = min(config.timeout, config.total_timeout - self._spent_s)
        if cpu_s <= 0:
            return f"Not run: the calls have used their {config.total_timeout:g} s of computing time."
        calls, again_s = [*self._calls, code], 1.5 * self._spent_s
        outcome = shared_sandbox(tuple(config.packages)).run(
            Program(
                source=f"{_HARNESS}\nmain({calls!r}, {config.seed!r})\n",
                limits=Limits(cpu_s=cpu_s + again_s, wall_s=2 * cpu_s + 1 + again_s, mem_mb=config.memory_mb),
            )
        )
        if outcome.ending is Ending.infrastructure_error:
            self._failure = outcome.message
            return "The sandbox failed; the code was not run."
        text = self._shown(outcome.stdout_text)
        if outcome.exit_code == _RAN_TO_ITS_END:
            self._calls, self._spent_s = calls, outcome.cpu_s
            return text or "(no output)"
        return f"{text}\n{_end_of(outcome, cpu_s)} What this call changed is lost.".lstrip()

    def get_reward(self) -> None:
        """Return None: the environment judges nothing.

        Raises:
            SandboxError: the sandbox failed in this episode.
        """
        if self._failure:
            raise SandboxError(f"python_tool: the sandbox failed: {self._failure}")

    def _shown(self, text: str) -> str:
        text, half = text.strip(), self.config.max_output_chars // 2
        left_out = len(text) - 2 * half
        if len(text) <= self.config.max_output_chars:
            return text
        return f"{text[:half]}\n[{left_out} characters left out]\n{text[len(text) - half :]}"


def _end_of(outcome: Outcome, cpu_s: float) -> str:
    if outcome.ending is Ending.timeout:
        return f"The code was stopped at the time limit of {cpu_s:g} s."
    return f"The code ended the interpreter ({outcome.ending}: {outcome.message or 'without an error'})."
