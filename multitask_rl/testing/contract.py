"""The contract suites for rewards and constraints: an author's test runs them, ``plugins check`` prints them.

Every check is a finding with a name, so that a report can say what holds and what does not, and why.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.records import Failure, FailureKind, NotApplicable, Rollout, Score, Verdict
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.grader import Grader
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.results import Result
from multitask_rl.testing.builders import make_rollout

__all__ = [
    "NON_ANSWERS",
    "Finding",
    "assert_constraint_contract",
    "assert_findings",
    "assert_reward_contract",
    "check_constraint",
    "check_reward",
]

NON_ANSWERS = (
    "",
    " \n\t ",
    "I cannot determine the answer from the given information.",
    "As an AI language model, I am unable to help with that.",
    "```python\nraise SystemExit(0)\n```",
    "\x00\x07\ufffd \U0001f600 ßé 漢字 " + "(" * 2000,
    "a" * 20000,
)
"""Empty, blank, two evasions, a program that only exits, broken text, endless text."""

_GOLD_COLUMNS = ("gold", "reference", "answer", "solution")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    name: str
    passed: bool
    detail: str = ""
    """What was seen; why it failed."""


def assert_reward_contract(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    gold: str | None = None,
    config: Mapping[str, Any] | None = None,
    full: float | None = None,
) -> None:
    """Assert that a reward keeps its contract.

    Args:
        plugin: reference as in a tasks file, or a built reward.
        row: a row of the data it is for.
        gold: a response that deserves the full score; None = the row's ``reference`` or ``answer``, if any.
        config: keys of its ``Config``.
        full: the score of ``gold``; None = its declared maximum; without one, at least any non-answer's.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_reward(plugin, row=row, gold=gold, config=config, full=full))


def assert_constraint_contract(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    accepted: str | None = None,
    violating: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Assert that a constraint keeps its contract.

    Args:
        plugin: reference as in a tasks file, or a built constraint.
        row: a row of the data it is for.
        accepted: a response it must let through.
        violating: a response it must refuse.
        config: keys of its ``Config``.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_constraint(plugin, row=row, accepted=accepted, violating=violating, config=config))


def check_reward(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    gold: str | None = None,
    config: Mapping[str, Any] | None = None,
    full: float | None = None,
) -> list[Finding]:
    """Return the findings behind ``assert_reward_contract``.

    A plugin named by a text runs in a worker process first. One that hangs or ends its process there is not
    called in this one.
    """
    if isinstance(plugin, str):
        known = gold or _gold_of(row) or "4"
        works = _pool("reward", plugin, config, _rollouts([known, *NON_ANSWERS], row))
        if not works.passed:
            return [works]
    grader, prompt_text = _grader("reward", plugin, config), str(row.get("prompt", "What is 2 + 2?"))
    guessed = "" if gold is not None else _gold_column(row)
    gold = _gold_of(row) if gold is None else gold
    hostile = _rollouts([*NON_ANSWERS, prompt_text], row)
    findings, results = _common(grader, hostile)
    worst = [r.value for r in results if isinstance(r, Score)]
    if gold is not None:
        if guessed and full is None and not _compares(grader, gold, row, guessed):
            name = "the gold answer earns at least as much as any non-answer"
            findings.append(
                Finding(name, True, f"it does not judge by {guessed!r}: no answer is the right one")
            )
        else:
            findings.append(_gold(grader, _rollouts([gold], row), full, worst))
    high = grader.traits.high
    if math.isfinite(high):
        paid = [i for i, r in enumerate(results) if isinstance(r, Score) and r.value >= high]
        named = [
            "empty",
            "blank",
            "evasion",
            "evasion",
            "exit(0)",
            "broken text",
            "endless text",
            "prompt echo",
        ]
        detail = "full score for: " + ", ".join(named[i] for i in paid) if paid else ""
        findings.append(Finding("non-answers earn less than the full score", not paid, detail))
    findings.append(_missing_columns(grader, row))
    if isinstance(plugin, str):
        grader.close()
        findings.append(works)
    return findings


def check_constraint(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    accepted: str | None = None,
    violating: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return the findings behind ``assert_constraint_contract``; see ``check_reward``."""
    if isinstance(plugin, str):
        works = _pool("constraint", plugin, config, _rollouts(["4", *NON_ANSWERS], row))
        if not works.passed:
            return [works]
    grader = _grader("constraint", plugin, config)
    findings, _ = _common(grader, _rollouts([*NON_ANSWERS, str(row.get("prompt", "Hello"))], row))
    for text, violated in ((accepted, False), (violating, True)):
        if text is not None:
            verdict = grader.grade(_rollouts([text], row))[0]
            word = "refuses the violating" if violated else "lets the accepted"
            right = isinstance(verdict, Verdict) and verdict.violated is violated
            findings.append(Finding(f"{word} response", right, _show(verdict)))
    findings.append(_missing_columns(grader, row))
    if isinstance(plugin, str):
        grader.close()
        findings.append(works)
    return findings


def _common(grader: Grader, rollouts: list[Rollout]) -> tuple[list[Finding], list[Result]]:
    """Run the checks that rewards and constraints share; return the results of ``rollouts`` too."""
    began = time.monotonic()
    results = grader.grade(rollouts)
    seconds = time.monotonic() - began
    failures = [r for r in results if isinstance(r, Failure) and r.kind is FailureKind.grader]
    limit = grader.traits.timeout_s * len(rollouts)
    findings = [
        Finding(
            "hostile responses are graded without an error",
            not failures,
            "; ".join(sorted({f.message for f in failures})),
        ),
        Finding(
            "within its time limit", seconds <= limit, f"{1000 * seconds / len(rollouts):.2f} ms per response"
        ),
        _same(
            "a response's result does not depend on its batch",
            results,
            [grader.grade([r])[0] for r in rollouts],
        )
        if grader.traits.deterministic
        else Finding(
            "a response's result does not depend on its batch", True, "declares that it is not deterministic"
        ),
        Finding("an empty batch gives no result", grader.grade([]) == []),
    ]
    if grader.traits.deterministic:
        findings.append(_same("deterministic, as it declares", results, grader.grade(rollouts)))
        findings.append(_threads(grader, rollouts, results))
    findings.append(_pickles(results))
    return findings, results


def _gold(grader: Grader, rollouts: list[Rollout], full: float | None, worst: Sequence[float]) -> Finding:
    result = grader.grade(rollouts)[0]
    name = "the gold answer earns the full score"
    if not isinstance(result, Score):
        return Finding(name, False, _show(result))
    value = result.value
    best_wrong = max(worst, default=-math.inf)
    if full is None and math.isfinite(grader.traits.high) and grader.traits.higher_is_better:
        full = grader.traits.high
    if full is not None:
        return Finding(name, math.isclose(value, full, abs_tol=1e-6), f"{value:g}, expected {full:g}")
    return Finding(
        "the gold answer earns at least as much as any non-answer", value >= best_wrong, f"{value:g}"
    )


def _compares(grader: Grader, gold: str, row: Mapping[str, Any], column: str) -> bool:
    """Whether the reward of ``gold`` depends on the row's ``column``; one of form or length does not."""
    if math.isfinite(grader.traits.high):
        return True
    other = {**row, column: f"not {row[column]}"}
    return grader.grade(_rollouts([gold], row)) != grader.grade(_rollouts([gold], other))


def _missing_columns(grader: Grader, row: Mapping[str, Any]) -> Finding:
    name = "a row without its columns is a data failure"
    result = grader.grade([make_rollout("4", row={})])[0]
    if isinstance(result, Failure):
        detail = f"{result.kind.value}: {result.message}"
        return Finding(name, result.kind is FailureKind.data, detail)
    return Finding(name, not grader.traits.needs, "" if not row else "it reads no column, or has defaults")


def _pool(kind: str, plugin: str, config: Mapping[str, Any] | None, rollouts: list[Rollout]) -> Finding:
    """Grade through the pool: the plugin starts in a worker, rollouts and results travel."""
    spec = TaskSpec(name="task")
    if kind == "reward":
        spec.rewards = [RewardSpec(plugin=plugin, name="plugin", config=config or {})]
    else:
        spec.constraints = [ConstraintSpec(plugin=plugin, name="plugin", config=config or {})]
    with RewardPool({"task": spec}, ScoringConfig(max_failure_rate=1.0), seed=0, devices={}) as pool:
        if kind == "reward":
            results: list[Any] = [s.breakdown["plugin"] for s in pool.score(rollouts)]
        else:
            results = [v["plugin"] for v in pool.judge(rollouts)]
    machinery = (FailureKind.infra, FailureKind.timeout)
    broken = [r for r in results if isinstance(r, Failure) and r.kind in machinery]
    overruns = pool.metrics()["task"]["reward_overrun_rate"] * len(rollouts)
    detail = _show(broken[0]) if broken else ""
    if overruns:
        detail = f"{overruns:.0f} of {len(rollouts)} hostile responses pass its limit of time or memory"
    return Finding("works in a worker process", not detail, detail)


def _gold_of(row: Mapping[str, Any]) -> str | None:
    column = _gold_column(row)
    return str(row[column]) if column else None


def _gold_column(row: Mapping[str, Any]) -> str:
    return next((c for c in _GOLD_COLUMNS if isinstance(row.get(c), (str, int, float))), "")


def _threads(grader: Grader, rollouts: list[Rollout], expected: list[Result]) -> Finding:
    others: list[list[Result]] = []
    threads = [threading.Thread(target=lambda: others.append(grader.grade(rollouts))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    name = "the same from another thread (no signals, no global state)"
    return next((f for o in others if not (f := _same(name, expected, o)).passed), Finding(name, True))


def _pickles(results: list[Result]) -> Finding:
    try:
        same = pickle.loads(pickle.dumps(results)) == results
    except Exception as error:  # noqa: BLE001 - whatever pickling a foreign object raises is the finding
        return Finding("its results can travel between processes", False, f"{type(error).__name__}: {error}")
    return Finding("its results can travel between processes", same)


def _same(name: str, first: Sequence[Result], second: Sequence[Result]) -> Finding:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    detail = (
        f"{len(pairs)} of {len(first)} differ, e.g. {_show(pairs[0][0])} and {_show(pairs[0][1])}"
        if pairs
        else ""
    )
    return Finding(name, not pairs, detail)


def _grader(kind: str, plugin: str | Any, config: Mapping[str, Any] | None) -> Grader:
    if not isinstance(plugin, str):
        return Grader(kind, plugin, type(plugin).__name__)
    built = find_plugin(kind, plugin, "check").build(config or {})
    grader = Grader(kind, built, plugin)
    grader.warm_up()
    return grader


def _rollouts(texts: Sequence[str], row: Mapping[str, Any]) -> list[Rollout]:
    return [make_rollout(text, row=row, draw=index) for index, text in enumerate(texts)]


def _show(result: Any) -> str:
    if isinstance(result, Score):
        return f"{result.value:g}"
    if isinstance(result, NotApplicable):
        return "not applicable"
    if isinstance(result, Failure):
        return f"{result.kind.value} failure: {result.message}"
    return repr(result)


def assert_findings(findings: Sequence[Finding]) -> None:
    """Raise ``AssertionError`` with every check that failed, if one did."""
    failed = [f"  {f.name}: {f.detail or 'no'}" for f in findings if not f.passed]
    assert not failed, "the plugin breaks its contract:\n" + "\n".join(failed)
