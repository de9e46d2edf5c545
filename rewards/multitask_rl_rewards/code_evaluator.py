"""``code_evaluator``: programs scored by running their tests in the sandbox, by CodeBLEU, or by both."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.schema.ranges import NotNegative, OneOf, Range, Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError, MissingExtraError, import_extra
from multitask_rl.records import Failure, FailureKind, RewardResult, Rollout, Score
from multitask_rl.sandbox.base import (
    AssertsTask,
    Limits,
    Program,
    StdioTask,
    StdioTest,
    undefined_names,
)
from multitask_rl_rewards.code_blocks import (
    CodeBlock,
    bound_by,
    complete_program,
    defines,
    extract_code,
    is_beginning,
    parsed,
    parses,
)
from multitask_rl_rewards.text import answer_of, data_failure

_NAME = "code_evaluator"


class CodeEvaluator:
    """Score the program in a response.

    * ``tests``: share of the row's tests passed. ``tests`` holds statements (``assert f(1) == 2``; with
      ``entry_point``, else the function they call; optional ``setup``, and ``exports``: further names the
      program has to define for the tests) or ``{"stdin", "stdout"}`` pairs of
      texts, not both. Programs run in the sandbox, their tests outside their process; a death or a time-out
      fails the tests that were left.
    * ``codebleu``: likeness to ``reference``. Nothing runs, so a program that is similar and wrong scores.
      Where the prompt is the beginning of the program, only what follows it is compared, without comments.
    * ``mixed``: weighted mean of both.

    The program is the fenced block of the response (``code_blocks.extract_code``). Without a fence the
    whole response is tried as code: prose, or more than 20,000 characters, scores 0, like an empty response.
    A sandbox that failed is an ``infra`` failure, never a score.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, timeout_s=120.0)

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``code_evaluator`` in a tasks file."""

        evaluator: Annotated[str, OneOf("tests", "codebleu", "mixed")] = "tests"
        """See above."""
        timeout: Annotated[float, Range("(0, 3600)")] = 10.0
        """CPU seconds of one run of a program (a stdio test is one run); wall-clock limit 2 x + 1."""
        memory_mb: Annotated[int, Range("[16, inf)")] = 512
        """Address space of a program, MiB."""
        tests_weight: NotNegative = 0.8
        """Weight of the tests in ``mixed``."""
        codebleu_weight: NotNegative = 0.2
        """Weight of CodeBLEU in ``mixed``."""
        language: str = "python"
        """Language of CodeBLEU; tests run Python only."""
        all_or_nothing: bool = False
        """A program earns its tests' value only if it passes all of them. If false, a program that gives one
        answer whatever it reads earns the share of the tests that expect this answer."""

    def __init__(self, config: Config) -> None:
        """Check the configuration.

        Raises:
            ConfigError: both weights are 0, or the language cannot run or is unknown.
            MissingExtraError: CodeBLEU is wanted and not installed.
        """
        if config.evaluator != "codebleu" and config.language != "python":
            raise ConfigError(
                f"{_NAME}: tests run Python only, got `language: {config.language}`. Use `evaluator: "
                "codebleu`, or leave `language` at python."
            )
        if config.tests_weight + config.codebleu_weight <= 0:
            raise ConfigError(f"{_NAME}: `tests_weight` and `codebleu_weight` must have a positive sum.")
        self.config = config
        self._runs, self._compares = config.evaluator != "codebleu", config.evaluator != "tests"
        self._limits = Limits(cpu_s=config.timeout, wall_s=2 * config.timeout + 1, mem_mb=config.memory_mb)
        needs = ("tests",) * self._runs + ("reference",) * self._compares
        # A backstop behind the sandbox's own limits: ten runs that all hang.
        self.traits = replace(type(self).traits, needs=needs, timeout_s=10 * self._limits.wall_s)  # type: ignore[misc]
        if self._compares:
            _codebleu(config.language)

    def warm_up(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxError: it cannot run here.
        """
        if self._runs:
            _sandbox()

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return per rollout a score in [0, 1], with components ``tests`` and ``codebleu``, or a failure."""
        blocks = [program_in(answer_of(r), r.row, self.config.language) for r in rollouts]
        tested = self._run_tests(rollouts, blocks) if self._runs else [None] * len(rollouts)
        return [
            self._combine(rollout, block, fraction)
            for rollout, block, fraction in zip(rollouts, blocks, tested, strict=True)
        ]

    def _run_tests(self, rollouts: Sequence[Rollout], blocks: Sequence[str]) -> list[float | Failure | None]:
        """Return the share of tests passed per rollout, or its failure."""
        results: list[float | Failure | None] = [0.0] * len(rollouts)
        programs: dict[int, Program] = {}
        for i, (rollout, source) in enumerate(zip(rollouts, blocks, strict=True)):
            task = sandbox_task(rollout.row)
            if isinstance(task, Failure):
                results[i] = task
            elif source:
                programs[i] = Program(source=source, task=task, limits=self._limits)
        if programs:
            outcomes = _sandbox().map(programs.values())
            for i, outcome in zip(programs, outcomes, strict=True):
                fraction = outcome.pass_fraction
                if fraction is None:
                    message = f"sandbox: {outcome.message}"
                    results[i] = Failure(kind=FailureKind.infra, message=message, source=_NAME)
                else:
                    results[i] = float(fraction == 1.0) if self.config.all_or_nothing else fraction
        return results

    def _combine(self, rollout: Rollout, source: str, tested: float | Failure | None) -> RewardResult:
        if isinstance(tested, Failure):
            return tested
        parts: dict[str, float] = {} if tested is None else {"tests": tested}
        if self._compares:
            reference = _reference(rollout.row)
            if isinstance(reference, Failure):
                return reference
            own = [_own_part(program, rollout.row) for program in (reference, source)]
            parts["codebleu"] = _codebleu(self.config.language).compute_codebleu(*own, self.config.language)[
                "codebleu"
            ]
        weights = {"tests": self.config.tests_weight, "codebleu": self.config.codebleu_weight}
        if len(parts) == 1:
            return Score(value=next(iter(parts.values())), components=parts)
        value = sum(weights[name] * part for name, part in parts.items()) / sum(weights.values())
        return Score(value=min(value, 1.0), components=parts)


def program_in(response: str, row: Mapping[str, Any], language: str = "python") -> str:
    """Return the whole program of a response to ``row``, empty if it has none."""
    entry_point = _entry_point(row)
    block: CodeBlock = extract_code(response, language, entry_point)
    if not block.code or language != "python":
        return block.code
    program = complete_program(block.code, str(row.get("prompt") or ""), entry_point)
    return program if block.is_fenced or parses(program) else ""


def sandbox_task(row: Mapping[str, Any]) -> AssertsTask | StdioTask | Failure:
    """Return the tests of a row as a task of the sandbox, or a ``data`` failure."""
    tests = row.get("tests")
    if isinstance(tests, str) or not isinstance(tests, Sequence) or not tests:
        return data_failure("the row has no `tests`: a program cannot pass none", _NAME)
    try:
        if all(isinstance(test, Mapping) for test in tests):
            return StdioTask(tests=[_stdio_test(test["stdin"], test["stdout"]) for test in tests])
        if not all(isinstance(test, str) for test in tests):
            raise TypeError("they are neither all statements (text) nor all stdin/stdout pairs")
        statements = list(tests)
        entry_point = str(row.get("entry_point") or _called_name(statements))
        setup = str(row.get("setup") or "")
        if any(defines(statement, "check") for statement in statements):
            # HumanEval: the tests are a function ``check(candidate)``, to be called.
            setup, statements = "\n".join([setup, *statements]), [f"check({entry_point})"]
        exports, setup = _lend_names(row, entry_point, setup, statements)
        return AssertsTask(entry_point=entry_point, asserts=statements, setup=setup, exports=exports)
    except KeyError as error:
        return data_failure(f"a stdin/stdout test lacks the key {error}", _NAME)
    except (SyntaxError, ValueError, TypeError) as error:
        return data_failure(f"its tests cannot be used: {error}", _NAME)


def _lend_names(
    row: Mapping[str, Any], entry_point: str, setup: str, statements: Sequence[str]
) -> tuple[list[str], str]:
    """Return the names the program lends to the tests, and the set-up with all others that the row defines.

    A program lends what the row's ``exports`` name, and classes that the row's ``reference`` defines: the
    tests make instances for it. Helpers come from a prompt that is code, modules as the reference imports
    them.

    Raises:
        ValueError: the tests use a name that the row nowhere defines.
    """
    exports = [str(name) for name in row.get("exports") or ()]
    wanted = set(undefined_names([setup, *statements])) - {entry_point, *exports}
    if not wanted:
        return exports, setup
    prompt, reference = (_statements(row.get(key)) for key in ("prompt", "reference"))
    helpers = [node for node in prompt if not bound_by(node) & {entry_point}]
    if wanted & {name for node in helpers for name in bound_by(node)}:
        wanted -= {name for node in helpers for name in bound_by(node)}
    else:
        helpers = []
    imports = [n for n in reference if isinstance(n, (ast.Import, ast.ImportFrom)) and bound_by(n) & wanted]
    wanted -= {name for node in imports for name in bound_by(node)}
    classes = sorted(wanted & {node.name for node in reference if isinstance(node, ast.ClassDef)})
    if missing := sorted(wanted - set(classes)):
        raise ValueError(
            f"they use {', '.join(missing)}, which the row does not define; import or define it in `setup`, "
            "or name it in `exports` if the program has to define it"
        )
    return [*exports, *classes], "\n".join([*map(ast.unparse, [*helpers, *imports]), setup])


def _statements(source: Any) -> list[ast.stmt]:
    """Return the statements of a text of the row; none if it is not code."""
    try:
        return parse_python(str(source or "")).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _stdio_test(stdin: Any, stdout: Any) -> StdioTest:
    if not isinstance(stdin, (str, bytes)) or not isinstance(stdout, str):
        raise TypeError(f"stdin and stdout must be text, got {stdin!r:.40} and {stdout!r:.40}")
    return StdioTest(stdin=stdin, stdout=stdout)


def _entry_point(row: Mapping[str, Any]) -> str:
    """Return the name that the program has to define; empty if neither the row nor its tests have it."""
    if given := row.get("entry_point"):
        return str(given)
    task = sandbox_task(row)
    return task.entry_point if isinstance(task, AssertsTask) else ""


def _called_name(statements: Sequence[str]) -> str:
    """Return the first function that the tests call and Python does not have."""
    for node in ast.walk(parse_python("\n".join(statements))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and not hasattr(builtins, node.func.id)
        ):
            return node.func.id
    raise ValueError("no `entry_point`, and the tests call no function of the program")


def _reference(row: Mapping[str, Any]) -> str | Failure:
    reference = row.get("reference")
    if not isinstance(reference, str) or not reference.strip():
        return data_failure("CodeBLEU needs a program in `reference`; the row has none", _NAME)
    return complete_program(reference, str(row.get("prompt") or ""), _entry_point(row))


def _own_part(program: str, row: Mapping[str, Any]) -> str:
    """Return what a program has beyond a prompt that is its beginning, as ``ast.unparse`` writes it.

    Of the entry point that is the body. If the prompt is no beginning, the program is returned as it stands.
    """
    prompt, entry_point = str(row.get("prompt") or ""), _entry_point(row)
    if not is_beginning(prompt, entry_point):
        return program
    given, tree = parsed(prompt), parsed(program)
    if not given or not tree:
        return program.removeprefix(prompt.rstrip())
    try:
        shared = set(map(ast.dump, _unfolded(given, entry_point)))
        own = [node for node in _unfolded(tree, entry_point) if ast.dump(node) not in shared]
        return "\n".join(map(ast.unparse, own))
    except RecursionError:
        return program.removeprefix(prompt.rstrip())


def _unfolded(tree: ast.Module, function: str) -> Iterator[ast.stmt]:
    """Yield the statements of a program, in place of ``function`` those of its body without the docstring."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            yield from node.body[ast.get_docstring(node) is not None :]
        else:
            yield node


def _sandbox() -> Any:
    from multitask_rl.sandbox import shared_sandbox

    return shared_sandbox()


def _codebleu(language: str) -> Any:
    needs = f"{_NAME}: CodeBLEU comes from codebleu, with tree-sitter 0.22"
    codebleu_score = import_extra("multitask_rl_rewards.codebleu_score", "eval", needs)
    if language not in codebleu_score.LANGUAGES:
        allowed = ", ".join(codebleu_score.LANGUAGES)
        raise ConfigError(f"{_NAME}: `language` must be one of {allowed}; got {language!r}.")
    try:
        codebleu_score.load_language(language)
    except (ImportError, TypeError) as error:
        extra = "eval" if language == "python" else "codebleu-languages"
        raise MissingExtraError(
            f"{_NAME}: the grammar of {language}, of the series tree-sitter 0.22 reads, cannot be loaded "
            f"({error}). Install it with: pip install 'multitask-rl[{extra}]'"
        ) from error
    return codebleu_score
