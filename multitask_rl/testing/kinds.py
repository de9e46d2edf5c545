"""The contract suites of guards, scheduler policies, algorithms, tasks and trackers.

Each suite calls a plugin as the trainer does, on numbers of its own.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.algorithms.base import Algorithm, Credit, CreditBatch, LossOutput, TokenBatch, check_result
from multitask_rl.boundary.printable import counted
from multitask_rl.config.run import GuardConfig, TrackingConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.data import Rows, load_rows
from multitask_rl.data.render import check_rows
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision
from multitask_rl.plugins import (
    ALGORITHMS,
    GUARDS,
    SCHEDULERS,
    TASKS,
    TRACKERS,
    build_plugin,
    check_config_extends,
    load_plugin,
)
from multitask_rl.records import DatasetRecord, Event, Failure, FailureKind, Score, Scored, TaskStats
from multitask_rl.testing.builders import make_evaluation, make_rollout
from multitask_rl.testing.contract import Finding, run_check
from multitask_rl.tracking.base import Tracker

_TASKS = ("first", "second")
_LEVELS = [0.6] * 8 + [0.05] * 6
"""Held-out levels of the first task: steady, then it is lost."""


def check_guard(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a guard (``guard.plugin``, ``guard.guard_config``)."""
    guard_class: type[Guard] = load_plugin(GUARDS, plugin, expects=Guard)
    settings = GuardConfig(plugin=plugin, guard_config=dict(config or {}))

    def build(tasks: Sequence[str] = _TASKS) -> Guard:
        guard = guard_class.build(settings)
        guard.bind(tasks, {task: {"reward": True} for task in tasks})
        return guard

    def judge(guard: Guard, index: int, seen: list[CheckpointInfo]) -> str:
        """Make a step and an evaluation as the trainer does; return the decision as text."""
        step = 2 * index
        stats = {t: TaskStats(task=t, num_prompts=8, num_informative=4, reward_mean=0.5) for t in _TASKS}
        for at in (step - 2, step - 1):
            guard.record_step(max(0, at), stats)
        evaluations = {}
        for task, level in zip(_TASKS, (_LEVELS[index], 0.6), strict=True):
            values = [float((7 * i) % 64 < 64 * level) for i in range(64)]
            evaluations[task] = make_evaluation(values, task=task, step=step)
        decision = guard.observe(step, evaluations)
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

    def play() -> None:
        guard, seen = build(), list[CheckpointInfo]()
        for index in range(len(_LEVELS)):
            judge(guard, index, seen)
            factor = guard.lr_factor(index)
            assert 0.0 < factor <= 1.0, f"lr_factor is {factor!r}, expected a number in (0, 1]"
            factors = guard.weight_factors()
            is_right = factors.keys() <= set(_TASKS) and all(f >= 0.0 for f in factors.values())
            assert is_right, f"weight_factors holds {factors!r}; expected tasks it was bound to, numbers >= 0"
            numbers: Mapping[str, Any] = guard.metrics()
            wrong = {n: v for n, v in numbers.items() if not n.startswith("guard/")}
            wrong |= {n: v for n, v in numbers.items() if not isinstance(v, (int, float))}
            assert not wrong, f"metrics holds {wrong!r}; expected names guard/<name> and numbers"

    def resume() -> str:
        guard, seen = build(), list[CheckpointInfo]()
        for index in range(6):
            judge(guard, index, seen)
        other, seen_by_other = build(), list(seen)
        other.load_state_dict(_stored(guard))
        for index in range(6, len(_LEVELS)):
            decision, resumed = judge(guard, index, seen), judge(other, index, seen_by_other)
            assert decision == resumed, f"after a resume it decides {resumed}, without one {decision}"
        return _differ(guard.state_dict(), other.state_dict())

    def no_result() -> str:
        guard = build()
        guard.observe(0, {})
        decision: Any = guard.observe(2, {_TASKS[0]: make_evaluation([math.nan] * 8, task=_TASKS[0], step=2)})
        return "weights without a result are judged good" if decision.judged_good else ""

    def renamed() -> None:
        guard = build()
        for index in range(6):
            judge(guard, index, [])
        build(("other", _TASKS[1])).load_state_dict(_stored(guard), {_TASKS[0]: "other"})

    return [
        run_check("decides on every evaluation, and its factors and metrics are in range", play),
        run_check("its state travels as JSON, and a resumed run decides alike", resume),
        run_check("an evaluation without a result is judged, not good", no_result),
        run_check("its state is taken by a run that renamed a task", renamed),
    ]


def check_scheduler(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a scheduler policy (``scheduler.policy``, ``scheduler.policy_config``)."""
    load_plugin(SCHEDULERS, plugin, expects=("Config", "update", "weights"))

    def build(tasks: Sequence[str] = ("a", "b", "c")) -> DynamicTaskWeightScheduler:
        scheduler = DynamicTaskWeightScheduler(policy=plugin, **dict(config or {}))
        scheduler.bind(tasks)
        return scheduler

    def learn(scheduler: DynamicTaskWeightScheduler, steps: range) -> None:
        for step in steps:
            rewards = {"a": 0.9, "b": 0.02 * step, "c": math.nan}
            stats = {
                t: TaskStats(
                    task=t,
                    num_prompts=8,
                    num_informative=4 * (t != "c"),
                    reward_mean=r,
                    lowest=(0.0,),
                    highest=(1.0,),
                )
                for t, r in rewards.items()
                if t in scheduler.tasks and not (t == "a" and step % 2)
            }
            scheduler.update(stats, step)
            weights = scheduler.weights()
            is_whole = math.isclose(math.fsum(weights.values()), 1.0, abs_tol=1e-9)
            is_right = is_whole and min(weights.values()) >= 0.0
            assert is_right, f"weights are {weights!r}; expected shares that sum to 1"

    def resume() -> str:
        first, second = build(), build()
        learn(first, range(10))
        second.load_state_dict(_stored(first))
        learn(first, range(10, 20))
        learn(second, range(10, 20))
        return _differ(first.weights(), second.weights())

    def order() -> str:
        first, second = build(), build(("c", "b", "a"))
        learn(first, range(10))
        learn(second, range(10))
        there, here = second.weights(), first.weights()
        return "" if all(math.isclose(here[t], there[t]) for t in here) else f"{here!r} and {there!r}"

    def renamed() -> None:
        first = build()
        learn(first, range(10))
        build(("other", "b")).load_state_dict(_stored(first), {"a": "other"})

    def alone() -> str:
        scheduler = build(("a",))
        learn(scheduler, range(3))
        return _differ(scheduler.weights(), {"a": 1.0})

    return [
        run_check(
            "shares sum to 1 after every step, also where a task gave nothing",
            lambda: learn(build(), range(30)),
        ),
        run_check("its state travels as JSON, and a resumed run goes on alike", resume),
        run_check("the order of the tasks changes nothing", order),
        run_check("its state is taken by a run that renamed a task and dropped one", renamed),
        run_check("one task alone gets everything", alone),
    ]


def check_algorithm(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about an algorithm (``type``, ``algorithm_config`` of a task); needs torch."""
    import torch

    algorithm_class: type[Algorithm] = load_plugin(ALGORITHMS, plugin, expects=Algorithm)
    check_config_extends(algorithm_class, "type")

    def build() -> Algorithm:
        algorithm: Algorithm = build_plugin(algorithm_class, config or {}, where="algorithm_config")
        algorithm.bind(range(3, 3 + algorithm.num_control_tokens))
        return algorithm

    def train(algorithm: Algorithm, rewards: Sequence[float]) -> tuple[Any, Any]:
        """Return advantages and the gradient of the mean loss."""
        texts = ("a", "bc", "def", "gh")
        rollouts = [make_rollout(texts[i % 4], draw=i // 4, sample=i % 4) for i in range(8)]
        scored = [Scored(rollout=r, reward=reward) for r, reward in zip(rollouts, rewards, strict=True)]
        samples = algorithm.select(scored)
        assert samples, "select() returned no sample for eight scored rollouts"
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
        check_result(credit, Credit, number, "credit()")
        logprobs = (old + 0.01).requires_grad_()
        result = algorithm.loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=credit.advantages,
                sequence=torch.repeat_interleave(torch.arange(len(samples)), lengths),
                num_sequences=len(samples),
                rollout_logprobs=old if algorithm.on_policy else None,
                exact_kl=logprobs.exp() if algorithm.wants_exact_kl else None,
                values=None if values is None else (values + 0.1).requires_grad_(),
                old_values=values,
                returns=credit.returns,
            )
        )
        check_result(result, LossOutput, number, "loss()")
        loss = result.loss
        assert not credit.advantages.requires_grad, "advantages carry a gradient"
        assert bool(credit.advantages.isfinite().all()), "advantages are NaN or infinite"
        assert bool(loss.isfinite().all()), "losses are NaN or infinite"
        torch.autograd.backward(loss.mean())
        return credit.advantages, logprobs.grad

    if not algorithm_class.trains:
        return [run_check("it is built", lambda: "" if build() else "nothing was built")]
    differing = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]

    def gradient() -> str:
        grad = train(build(), differing)[1]
        return "" if grad is not None and bool(grad.any()) else "no gradient reaches logprobs"

    def twice() -> str:
        first, second = train(build(), differing), train(build(), differing)
        return "" if torch.equal(first[0], second[0]) else "equal samples gave different advantages"

    def state() -> str:
        algorithm, other = build(), build()
        train(algorithm, differing)
        other.load_state_dict(_stored(algorithm))
        return _differ(algorithm.state_dict(), other.state_dict())

    return [
        run_check("rewards that differ move the policy", gradient),
        run_check("equal rewards give no NaN", lambda: train(build(), [1.0] * 8) and None),
        run_check("equal samples give equal advantages", twice),
        run_check("its state travels as JSON", state),
    ]


def check_task(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a task (``dataset: plugin:<name>``, ``dataset_config``)."""
    load_plugin(TASKS, plugin, expects=("settings", "rows"))
    entry = {"dataset": f"plugin:{plugin}", **({"dataset_config": dict(config)} if config else {})}

    def load(split: str) -> tuple[TaskSpec, Rows]:
        spec = parse_tasks({"tasks": {"task": dict(entry)}}, plugin)["task"]
        return spec, load_rows(spec, split)

    def rows() -> str:
        sizes = []
        for split in ("train", "eval"):
            spec, part = load(split)
            check_rows(spec, part)
            sizes.append(len(part))
        return "" if all(sizes) else f"{counted(sizes[0], 'row')} to train on, {sizes[1]} held out"

    def again() -> str:
        same = list(load("train")[1]) == list(load("train")[1])
        return "" if same else "it gave other rows when asked again"

    return [
        run_check("its settings are those of a task, and its rows fit them", rows),
        run_check("it gives the same rows again", again),
    ]


def check_tracker(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a tracker (``tracking.trackers``); ``config``: keys of ``tracking``."""
    methods = ("start", "log_metrics", "log_event", "log_rollouts", "finish")
    tracker_class: Callable[..., Tracker] = load_plugin(TRACKERS, plugin, expects=methods)
    settings = TrackingConfig(**{"trackers": [plugin], **(config or {})})
    parameters = {"seed": 3, "max_steps": 4, "tasks": {"math": {"rewards": ["exact_match"]}}}
    metrics = {"task/math/reward_mean": 0.5, "macro/reward_mean": math.nan, "task/a:b c/weight": math.inf}
    event = Event(step=1, source="guard", kind="alarm", reason="it fell", data={"drop": math.nan})
    failure = Failure(kind=FailureKind.timeout, message="30 s", source="slow")
    scored = [
        Scored(rollout=make_rollout("4"), reward=1.0, breakdown={"exact": Score(value=1.0)}),
        Scored(rollout=make_rollout("\x1b[2J"), reward=None, breakdown={"exact": failure}, failure=failure),
    ]

    def record(directory: str, run_id: str | None, resume_step: int | None, status: str) -> str | None:
        tracker = tracker_class(output_dir=Path(directory), config=settings, run_id=run_id)
        given = copy.deepcopy((parameters, metrics, event, scored))
        tracker.start(given[0], resume_step)
        for step in ((resume_step or 0) + 1, (resume_step or 0) + 2):
            tracker.log_metrics(given[1], step)
            tracker.log_event(given[2])
            tracker.log_rollouts(given[3], step)
        tracker.log_rollouts([], 9)
        tracker.log_datasets([DatasetRecord("math", False, "math.jsonl", 90, lambda: "0f")])
        tracker.log_checkpoint(Path(directory, "actor"), 2, is_best=True, judged_good=False)
        assert repr(given) == repr((parameters, metrics, event, scored)), "it changed what it was given"
        tracker.log_page("<!doctype html><title>a run</title>")
        tracker.finish(status)
        identity: Any = tracker.run_id
        assert identity is None or isinstance(identity, str), f"run_id is {identity!r}, no text"
        return identity

    def resume(step: int) -> str:
        with tempfile.TemporaryDirectory() as directory:
            first = record(directory, None, None, "failed")
            second = record(directory, first, step, "finished")
        return "" if first == second else f"run_id {first!r} became {second!r}"

    return [
        run_check("records a run, also numbers that are not finite and failed rollouts", lambda: resume(1)),
        run_check("goes on under its run_id where a run was killed before its first step", lambda: resume(0)),
    ]


def _stored(part: Any) -> Any:
    """Return the state of ``part`` as a checkpoint gives it back."""
    return json.loads(json.dumps(part.state_dict()))


def _differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    a, b = (json.dumps(x, sort_keys=True) for x in (first, second))
    return "" if a == b else f"{a[:200]} and {b[:200]}"
