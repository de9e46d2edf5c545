"""The contract suites of guards, scheduler policies, algorithms and tasks; see ``contract`` for the others.

Each plays what the trainer does with a plugin of the kind, on numbers of its own, and returns findings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from multitask_rl.algorithms.base import Algorithm, CreditBatch, TokenBatch
from multitask_rl.config.run import GuardConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import parse_tasks, validate_tasks
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.data import load_rows
from multitask_rl.data.row_check import check_rows
from multitask_rl.errors import MultitaskRLError
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision
from multitask_rl.plugins import ALGORITHMS, GUARDS, TASKS, build_plugin, load_plugin
from multitask_rl.records import Scored, TaskEvaluation, TaskStats
from multitask_rl.testing.builders import make_evaluation, make_rollout
from multitask_rl.testing.contract import Finding, assert_findings

__all__ = [
    "assert_algorithm_contract",
    "assert_guard_contract",
    "assert_scheduler_contract",
    "assert_task_contract",
    "check_algorithm",
    "check_guard",
    "check_scheduler",
    "check_task",
]

_TASKS = ("first", "second")
_LEVELS = [0.6] * 8 + [0.05] * 6
"""Held-out levels of the first task: steady, then it is lost."""


def assert_guard_contract(plugin: str, config: Mapping[str, Any] | None = None) -> None:
    """Assert that a guard keeps its contract.

    Args:
        plugin: as ``guard.plugin``.
        config: as ``guard.guard_config``.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_guard(plugin, config))


def assert_scheduler_contract(plugin: str, config: Mapping[str, Any] | None = None) -> None:
    """Assert that a scheduler policy (``scheduler.policy``, ``scheduler.policy_config``) keeps its contract.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_scheduler(plugin, config))


def assert_algorithm_contract(plugin: str, config: Mapping[str, Any] | None = None) -> None:
    """Assert that an algorithm (``type``, ``algorithm_config`` of a task) keeps its contract; needs torch.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_algorithm(plugin, config))


def assert_task_contract(plugin: str, config: Mapping[str, Any] | None = None) -> None:
    """Assert that a task (``dataset: plugin:<name>``, ``dataset_config``) keeps its contract.

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_task(plugin, config))


def check_guard(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings behind ``assert_guard_contract``."""
    guard_class: type[Guard] = load_plugin(GUARDS, plugin, expects=Guard)
    settings = GuardConfig(plugin=plugin, guard_config=dict(config or {}))

    def build(tasks: Sequence[str] = _TASKS) -> Guard:
        guard = guard_class.build(settings)
        guard.bind(tasks, {task: {"reward": True} for task in tasks})
        return guard

    def resume() -> str:
        guard, seen = build(), list[CheckpointInfo]()
        for index in range(6):
            _judge(guard, index, _LEVELS[index], seen)
        other, seen_by_other = build(), list(seen)
        other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
        for index in range(6, len(_LEVELS)):
            decisions = [
                _judge(own, index, _LEVELS[index], infos)
                for own, infos in ((guard, seen), (other, seen_by_other))
            ]
            if decisions[0] != decisions[1]:
                return f"after a resume it decides {decisions[1]}, without one {decisions[0]}"
        return _differ(guard.state_dict(), other.state_dict())

    def no_result() -> str:
        guard = build()
        guard.observe(0, {})
        decision: Any = guard.observe(2, {_TASKS[0]: make_evaluation([math.nan] * 8, task=_TASKS[0], step=2)})
        return "weights without a result are judged good" if decision.judged_good else ""

    def renamed() -> str:
        guard = build()
        for index in range(6):
            _judge(guard, index, _LEVELS[index], [])
        build(("other", _TASKS[1])).load_state_dict(
            json.loads(json.dumps(guard.state_dict())), {_TASKS[0]: "other"}
        )
        return ""

    return [
        _try("decides on every evaluation, and its factors and metrics are in range", partial(_play, build)),
        _try("its state travels as JSON, and a resumed run decides alike", resume),
        _try("an evaluation without a result is judged, not good", no_result),
        _try("its state is taken by a run that renamed a task", renamed),
    ]


def _play(build: Callable[[], Guard]) -> str:
    guard, seen = build(), list[CheckpointInfo]()
    for index, level in enumerate(_LEVELS):
        _judge(guard, index, level, seen)
        factor = guard.lr_factor(index)
        if not 0.0 < factor <= 1.0:
            return f"lr_factor is {factor!r}, expected a number in (0, 1]"
        if wrong := {t: f for t, f in guard.weight_factors().items() if t not in _TASKS or not f >= 0.0}:
            return f"weight_factors holds {wrong!r}; expected tasks it was bound to, and numbers >= 0"
        if wrong := {k: v for k, v in guard.metrics().items() if not (k.startswith("guard/") and _number(v))}:
            return f"metrics holds {wrong!r}; expected names guard/<name> and numbers"
    return ""


def _judge(guard: Guard, index: int, level: float, seen: list[CheckpointInfo]) -> str:
    """Make a step and an evaluation as the trainer does; return the decision as text."""
    step = 2 * index
    stats = {t: TaskStats(task=t, num_prompts=8, num_informative=4, reward_mean=0.5) for t in _TASKS}
    for at in (step - 2, step - 1):
        guard.record_step(max(0, at), stats)
    decision = guard.observe(
        step, {_TASKS[0]: _evaluation(0, level, step), _TASKS[1]: _evaluation(1, 0.6, step)}
    )
    assert isinstance(decision, GuardDecision), f"observe returned {decision!r}, expected a GuardDecision"
    text = f"{decision.action} {decision.task} {decision.judged_good}"
    if decision.action is GuardAction.rollback:
        target = guard.rollback_target(list(seen))
        assert target is None or target in seen, (
            f"rollback_target returned {target!r}, not one of those offered"
        )
        if target is not None:
            guard.rolled_back(target, step=target.step)
            text += f" to {target.step}"
    seen.append(CheckpointInfo(step=step, judged_good=decision.judged_good))
    return text


def _evaluation(task: int, level: float, step: int) -> TaskEvaluation:
    values = [float((7 * i) % 64 < 64 * level) for i in range(64)]
    return make_evaluation(values, task=_TASKS[task], step=step)


def check_scheduler(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings behind ``assert_scheduler_contract``."""

    def build(tasks: Sequence[str] = ("a", "b", "c")) -> DynamicTaskWeightScheduler:
        scheduler = DynamicTaskWeightScheduler(policy=plugin, **dict(config or {}))
        scheduler.bind(tasks)
        return scheduler

    def learn(scheduler: DynamicTaskWeightScheduler, steps: range) -> str:
        for step in steps:
            rewards = {"a": 0.9, "b": 0.02 * step, "c": math.nan}
            known = {t: r for t, r in rewards.items() if t in scheduler.tasks and not (t == "a" and step % 2)}
            scheduler.update(
                {
                    t: TaskStats(
                        task=t,
                        num_prompts=8,
                        num_informative=4 * (t != "c"),
                        reward_mean=r,
                        lowest=(0.0,),
                        highest=(1.0,),
                    )
                    for t, r in known.items()
                },
                step,
            )
            weights = scheduler.weights()
            if (
                not math.isclose(math.fsum(weights.values()), 1.0, abs_tol=1e-9)
                or min(weights.values()) < 0.0
            ):
                return f"weights are {weights!r}; expected shares that sum to 1"
        return ""

    def resume() -> str:
        first, second = build(), build()
        learn(first, range(10))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        learn(first, range(10, 20))
        learn(second, range(10, 20))
        return _differ(first.weights(), second.weights())

    def order() -> str:
        first, second = build(), build(("c", "b", "a"))
        learn(first, range(10))
        learn(second, range(10))
        there, here = second.weights(), first.weights()
        return "" if all(math.isclose(here[t], there[t]) for t in here) else f"{here!r} and {there!r}"

    def renamed() -> str:
        first = build()
        learn(first, range(10))
        build(("other", "b")).load_state_dict(json.loads(json.dumps(first.state_dict())), {"a": "other"})
        return ""

    def alone() -> str:
        scheduler = build(("a",))
        return learn(scheduler, range(3)) or _differ(scheduler.weights(), {"a": 1.0})

    return [
        _try(
            "shares sum to 1 after every step, also where a task gave nothing",
            lambda: learn(build(), range(30)),
        ),
        _try("its state travels as JSON, and a resumed run goes on alike", resume),
        _try("the order of the tasks changes nothing", order),
        _try("its state is taken by a run that renamed a task and dropped one", renamed),
        _try("one task alone gets everything", alone),
    ]


def check_algorithm(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings behind ``assert_algorithm_contract``."""
    import torch

    algorithm_class: type[Algorithm] = load_plugin(ALGORITHMS, plugin, expects=Algorithm)

    def build() -> Algorithm:
        algorithm: Algorithm = build_plugin(algorithm_class, config or {}, where="algorithm_config")
        algorithm.bind(range(3, 3 + algorithm.num_control_tokens))
        return algorithm

    def scored(rewards: Sequence[float]) -> list[Scored]:
        texts = ("a", "bc", "def", "gh")
        rollouts = [make_rollout(texts[i % 4], draw=i // 4, sample=i % 4) for i in range(8)]
        return [Scored(rollout=r, reward=reward) for r, reward in zip(rollouts, rewards, strict=True)]

    def train(algorithm: Algorithm, rewards: Sequence[float]) -> tuple[Any, Any]:
        """Return advantages and the gradient of the mean loss."""
        samples = algorithm.select(scored(rewards))
        lengths = torch.tensor([len(s.response_ids) for s in samples])
        number = int(lengths.sum())
        old = torch.linspace(-2.0, -0.5, number)
        values = torch.linspace(0.0, 1.0, number) if algorithm.needs_critic else None
        credit = algorithm.credit(
            CreditBatch(
                rewards=torch.tensor([s.reward for s in samples]),
                groups=torch.tensor([s.scored.rollout.prompt.draw for s in samples]),
                lengths=lengths,
                old_logprobs=old,
                values=values,
            )
        )
        logprobs = (old + 0.01).requires_grad_()
        loss = algorithm.loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=credit.advantages,
                sequence=torch.repeat_interleave(torch.arange(len(samples)), lengths),
                num_sequences=len(samples),
                rollout_logprobs=old if algorithm.on_policy else None,
                exact_kl=logprobs * 0.0 if algorithm.wants_exact_kl else None,
                values=None if values is None else (values + 0.1).requires_grad_(),
                old_values=values,
                returns=credit.returns,
            )
        ).loss
        assert credit.advantages.shape == loss.shape == (number,), (
            f"advantages {tuple(credit.advantages.shape)}, loss {tuple(loss.shape)}, expected one per token, "
            f"{number}"
        )
        assert not credit.advantages.requires_grad, "advantages carry a gradient"
        assert bool(credit.advantages.isfinite().all() and loss.isfinite().all()), "NaN or infinite"
        torch.autograd.backward(loss.mean())
        return credit.advantages, logprobs.grad

    differing, equal = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], [1.0] * 8

    def gradient() -> str:
        grad = train(build(), differing)[1]
        return "" if grad is not None and bool(grad.any()) else "no gradient reaches logprobs"

    def twice() -> str:
        first, second = train(build(), differing), train(build(), differing)
        return "" if torch.equal(first[0], second[0]) else "equal samples gave different advantages"

    def state() -> str:
        algorithm, other = build(), build()
        train(algorithm, differing)
        other.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
        return _differ(algorithm.state_dict(), other.state_dict())

    return [
        _try("rewards that differ move the policy", gradient),
        _try("equal rewards give no NaN", lambda: "" if train(build(), equal) else "?"),
        _try("equal samples give equal advantages", twice),
        _try("its state travels as JSON", state),
    ]


def check_task(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings behind ``assert_task_contract``."""
    load_plugin(TASKS, plugin, expects=("settings", "rows"))
    entry = {"dataset": f"plugin:{plugin}", **({"dataset_config": dict(config)} if config else {})}

    def spec() -> TaskSpec:
        return parse_tasks({"tasks": {"task": dict(entry)}}, plugin)["task"]

    def rows() -> str:
        own = spec()
        validate_tasks({"task": own}, need_data=True)
        train, held_out = load_rows(own, "train"), load_rows(own, "eval")
        for part in (train, held_out):
            check_rows(own, part)
        return (
            "" if len(train) and len(held_out) else f"{len(train)} rows to train on, {len(held_out)} held out"
        )

    def again() -> str:
        first, second = (load_rows(replace(spec()), "train") for _ in range(2))
        return "" if list(first) == list(second) else "it gave other rows when asked again"

    return [
        _try("its settings are those of a task, and its rows fit them", rows),
        _try("it gives the same rows again", again),
    ]


def _try(name: str, check: Callable[[], str]) -> Finding:
    """Return the finding of ``check``, which returns what is wrong ("" = nothing) or raises it."""
    try:
        problem = check()
    except MultitaskRLError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is the finding
        problem = f"{type(error).__name__}: {error}"
    return Finding(name, not problem, problem)


def _differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    a, b = (json.dumps(x, sort_keys=True) for x in (first, second))
    return "" if a == b else f"{a[:200]} and {b[:200]}"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))
