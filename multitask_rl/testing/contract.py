"""The contract suites of rewards and constraints, and what suites of all kinds share.

A suite returns a ``Finding`` per check: ``plugins check`` prints them, ``assert_*`` functions raise them.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import MultitaskRLError
from multitask_rl.records import Failure, FailureKind, NotApplicable, Rollout, Score, Verdict
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.grader import Grader
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.results import Result
from multitask_rl.testing.builders import make_rollout

P = ParamSpec("P")
NON_ANSWERS = {
    "empty": "",
    "blank": " \n\t ",
    "evasion": "I cannot determine the answer from the given information.",
    "evasion of a model": "As an AI language model, I am unable to help with that.",
    "exit(0)": "```python\nraise SystemExit(0)\n```",
    "broken text": "\x00\x07\ufffd \U0001f600 ßé 漢字 " + "(" * 2000,
    "endless text": "a" * 20000,
}
"""Responses that deserve nothing, by name."""

_GOLD_COLUMNS = ("gold", "reference", "answer", "solution")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a contract suite."""

    name: str
    passed: bool
    detail: str = ""
    """What was seen; why it failed."""


def run_check(name: str, check: Callable[[], str | None]) -> Finding:
    """Return the finding of ``check``, which returns what is wrong ("" or None = nothing) or raises it."""
    try:
        problem = check() or ""
        if not __debug__:
            problem = problem or "not checked: python -O leaves assertions out; check it without -O"
    except (AssertionError, MultitaskRLError) as error:
        problem = str(error) or type(error).__name__
    except Exception as error:  # noqa: BLE001 - any exception of a plugin is the finding
        problem = f"{type(error).__name__}: {error}"
    return Finding(name, not problem, problem)


def by_message(failed: Mapping[str, str], number: int) -> str:
    """Return each message of ``failed`` once, with the names of its responses, of ``number`` in all."""
    names: dict[str, list[str]] = {}
    for name, message in failed.items():
        names.setdefault(message, []).append(name)
    return "; ".join(
        f"{message}, for: {'all' if len(own) == number else ', '.join(own)}"
        for message, own in sorted(names.items())
    )


def assert_findings(findings: Sequence[Finding]) -> None:
    """Raise ``AssertionError`` with every check that failed, if one did."""
    failed = [f"  {f.name}: {f.detail or 'no'}" for f in findings if not f.passed]
    if failed:  # ``assert`` does nothing under ``python -O``
        raise AssertionError("the plugin breaks its contract:\n" + "\n".join(failed))


def asserting(check: Callable[P, Sequence[Finding]]) -> Callable[P, None]:
    """Return the function that calls ``check`` and raises what it finds (see ``assert_findings``)."""

    @wraps(check)
    def assert_contract(*arguments: P.args, **keywords: P.kwargs) -> None:
        assert_findings(check(*arguments, **keywords))

    return assert_contract


def check_reward(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    gold: str | None = None,
    config: Mapping[str, Any] | None = None,
    full: float | None = None,
) -> list[Finding]:
    """Check that a reward keeps its contract.

    A plugin named by a text runs in a worker process first. If it hangs or ends that process, it is not
    called in this one.

    Args:
        plugin: reference as in a tasks file, or a built reward.
        row: a row of the data it is for.
        gold: a response that deserves the full score; None = the row's ``gold``, ``reference``, ``answer`` or
            ``solution``, if any.
        config: keys of its ``Config``.
        full: the score of ``gold``; None = the best value that the reward declares. Without one, ``gold``
            has to score at least as well as every non-answer.

    Returns:
        The findings. ``assert_reward_contract`` raises an ``AssertionError`` that lists those that failed.
    """
    columns = (c for c in _GOLD_COLUMNS if isinstance(row.get(c), (str, int, float)))
    column = next(columns, "") if gold is None else ""
    answer = str(row[column]) if column else gold
    prompt = str(row.get("prompt", "What is 2 + 2?"))

    def pays(grader: Grader, results: Sequence[Result]) -> list[Finding]:
        findings, traits = [], grader.traits
        sign, top = (1, traits.high) if traits.higher_is_better else (-1, traits.low)
        wanted = top if full is None and math.isfinite(top) else full
        if answer is not None:
            at_least = "the gold answer scores at least as well as any non-answer"
            result = grader.grade(_rollouts([answer], row))[0]
            # a reward of form or length does not read the column
            other = {**row, column: f"not {row[column]}"} if column else row
            compares = not column or full is not None or math.isfinite(top)
            if all(isinstance(own, NotApplicable) for own in (result, *results)):
                detail = "every result is None, which says that it does not apply; return a number, or "
                detail += "give a row that it judges: --row"
                findings.append(Finding("a response gets a score", False, detail))
            elif not compares and [result] == grader.grade(_rollouts([answer], other)):
                detail = f"it does not judge by {column!r}: no answer is the right one"
                findings.append(Finding(at_least, True, detail))
            elif not isinstance(result, Score):
                findings.append(Finding("the gold answer earns the full score", False, _show(result)))
            elif wanted is not None:
                is_full = math.isclose(result.value, wanted, abs_tol=1e-6)
                detail = f"{result.value:g}, expected {wanted:g}"
                findings.append(Finding("the gold answer earns the full score", is_full, detail))
            else:
                best = max((sign * r.value for r in results if isinstance(r, Score)), default=-math.inf)
                findings.append(Finding(at_least, sign * result.value >= best, f"{result.value:g}"))
        if math.isfinite(top):
            named = zip([*NON_ANSWERS, "prompt echo"], results, strict=True)
            paid = [name for name, r in named if isinstance(r, Score) and sign * (r.value - top) >= 0]
            detail = f"full score for: {', '.join(paid)}" if paid else ""
            findings.append(Finding("non-answers earn less than the full score", not paid, detail))
        return findings

    return _findings("reward", plugin, config, row, prompt, answer or "4", pays)


def check_constraint(
    plugin: str | Any,
    *,
    row: Mapping[str, Any],
    accepted: str | None = None,
    violating: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Check that a constraint keeps its contract; see ``check_reward``.

    Args:
        plugin: reference as in a tasks file, or a built constraint.
        row: a row of the data it is for.
        accepted: a response it must let through.
        violating: a response it must refuse.
        config: keys of its ``Config``.
    """

    def judges(grader: Grader, results: Sequence[Result]) -> list[Finding]:
        findings = []
        for text, violated in ((accepted, False), (violating, True)):
            if text is not None:
                verdict = grader.grade(_rollouts([text], row))[0]
                name = f"{'refuses the violating' if violated else 'lets the accepted'} response"
                is_right = isinstance(verdict, Verdict) and verdict.violated is violated
                findings.append(Finding(name, is_right, _show(verdict)))
        if grader.explains:
            asked = _rollouts([violating or "4", *NON_ANSWERS.values()], row)
            texts = grader.explain(asked, [Verdict(cost=1.0, violated=True)] * len(asked))
            problem = texts.message if isinstance(texts, Failure) else ""
            if grader.traits.isolate:
                problem = problem or "no run asks it: it does not declare isolate=False"
            findings.append(Finding("explains each violation with a text", not problem, problem))
        return findings

    prompt = str(row.get("prompt", "Hello"))
    return _findings("constraint", plugin, config, row, prompt, "4", judges)


assert_reward_contract = asserting(check_reward)
assert_constraint_contract = asserting(check_constraint)


def _findings(
    kind: str,
    plugin: str | Any,
    config: Mapping[str, Any] | None,
    row: Mapping[str, Any],
    prompt: str,
    answer: str,
    own: Callable[[Grader, Sequence[Result]], list[Finding]],
) -> list[Finding]:
    """Run the checks that rewards and constraints share, and those of ``own`` on results of non-answers."""
    works = []
    texts = list(NON_ANSWERS.values())
    if isinstance(plugin, str):
        works = [_works_in_worker(kind, plugin, config, _rollouts([answer, *texts], row))]
        if not works[0].passed:
            return works
        grader = Grader(kind, find_plugin(kind, plugin, "check").build(config or {}), plugin)
        grader.warm_up()
    else:
        grader = Grader(kind, plugin, type(plugin).__name__)
    rollouts = _rollouts([*texts, prompt], row)
    before = [_texts(rollout.row) for rollout in rollouts]
    began = time.monotonic()
    results = grader.grade(rollouts)
    seconds = time.monotonic() - began
    pairs = zip(before, (_texts(rollout.row) for rollout in rollouts), strict=True)
    changed = sorted({name for old, new in pairs for name, _ in old ^ new})

    def same(others: Sequence[Result]) -> str:
        pairs = [(a, b) for a, b in zip(results, others, strict=True) if a != b]
        example = " and ".join(map(_show, pairs[0])) if pairs else ""
        return f"{len(pairs)} of {len(results)} differ, e.g. {example}" if pairs else ""

    def threads() -> str:
        with ThreadPoolExecutor(2) as pool:
            return "; ".join(filter(None, map(same, pool.map(grader.grade, [rollouts, rollouts]))))

    def travel() -> str:
        return "" if pickle.loads(pickle.dumps(results)) == results else "pickling changes them"

    is_deterministic = grader.traits.deterministic
    errors = {
        name: result.message
        for name, result in zip([*NON_ANSWERS, "prompt echo"], results, strict=True)
        if isinstance(result, Failure) and result.kind is FailureKind.grader
    }
    unread = [r.message for r in results if isinstance(r, Failure) and r.kind is FailureKind.data]
    called = "is called: the row has the columns that it reads"
    if len(unread) == len(results):  # no other check would test anything
        grader.close()
        told = f"{unread[0]}; give a row that has it: --row '{{...}}', or row=...; nothing else was checked"
        return [Finding(called, False, told)]
    broken = by_message(errors, len(results))
    limit, per_response = grader.traits.timeout_s * len(rollouts), 1000 * seconds / len(rollouts)
    alone = "a response's result does not depend on its batch"
    findings = [
        Finding(called, True),
        Finding("hostile responses are graded without an error", not errors, broken),
        Finding("within its time limit", seconds <= limit, f"{per_response:.2f} ms per response"),
        run_check(alone, lambda: same([grader.grade([rollout])[0] for rollout in rollouts]))
        if is_deterministic
        else Finding(alone, True, "not tried, it does not declare deterministic=True"),
        Finding("an empty batch gives no result", grader.grade([]) == []),
        Finding(
            "leaves the rows as they are",
            not changed,
            f"it changes {', '.join(changed)}, which other responses and plugins read; change a copy"
            if changed
            else "",
        ),
    ]
    if is_deterministic:
        again = "the same from another thread (no signals, no global state)"
        findings.append(run_check("deterministic, as it declares", lambda: same(grader.grade(rollouts))))
        findings.append(run_check(again, threads))
    findings.append(run_check("its results can travel between processes", travel))
    findings += own(grader, results)
    lacking = grader.grade([make_rollout("4", row={})])[0]
    if isinstance(lacking, Failure) and lacking.message in errors.values():
        passed, detail = True, "not tried, it fails on rows with them"
    elif isinstance(lacking, Failure):
        passed, detail = lacking.kind is FailureKind.data, f"{lacking.kind.value}: {lacking.message}"
        detail += "" if passed else "; name what it reads: as a parameter, or in `needs` of its traits"
    else:
        passed, detail = not grader.traits.needs, "it reads no column, or has defaults" if row else ""
    findings.append(Finding("a row without its columns is a data failure", passed, detail))
    if isinstance(plugin, str):
        grader.close()
    return findings + works


def _works_in_worker(
    kind: str, plugin: str, config: Mapping[str, Any] | None, rollouts: list[Rollout]
) -> Finding:
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
        detail = f"{overruns:.0f} of {len(rollouts)} hostile responses exceed its limit of time or memory"
    return Finding("works in a worker process", not detail, detail)


def _rollouts(texts: Sequence[str], row: Mapping[str, Any]) -> list[Rollout]:
    return [make_rollout(text, row=row, draw=index) for index, text in enumerate(texts)]


def _texts(row: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Return the columns of a row with their values as texts, which always compare."""
    return {(str(name), repr(value)) for name, value in row.items()}


def _show(result: Any) -> str:
    if isinstance(result, Score):
        return f"{result.value:g}"
    if isinstance(result, NotApplicable):
        return "not applicable"
    if isinstance(result, Failure):
        return f"{result.kind.value} failure: {result.message}"
    return repr(result)
