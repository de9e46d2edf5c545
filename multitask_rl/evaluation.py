"""Held-out evaluation per task: fixed prompts, fixed seeds, so that two evaluations are paired."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.flow import DataFlow
from multitask_rl.records import Score, Scored, TaskEvaluation, Verdict
from multitask_rl.retries import ConstraintStage
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.satisfaction import constraint_metrics
from multitask_rl.stages import RewardStage, RolloutStage, Scorer
from multitask_rl.streaming import FLAGGED
from multitask_rl.task_run import TaskRun, render_rows
from multitask_rl.training.actor import Actor

__all__ = ["Evaluator", "mean_interval", "primary_value"]

logger = logging.getLogger(__name__)


class Evaluator:
    """Runs the same nodes as training over each task's held-out prompts, one response a prompt."""

    def __init__(
        self,
        actor: Actor,
        engine: RolloutEngine,
        scorer: Scorer,
        runs: Mapping[str, TaskRun],
        *,
        seed: int,
        temperature: float,
    ) -> None:
        self._actor = actor
        self._engine = engine
        self._scorer = scorer
        self._runs = runs
        self._seed = seed
        self._temperature = temperature

    def evaluate(
        self, step: int, *, tasks: Sequence[str] | None = None, purpose: str = "evaluation"
    ) -> dict[str, TaskEvaluation]:
        """Return the evaluation of each task (default: all).

        Args:
            step: training step, for the record.
            tasks: names.
            purpose: names the random streams; another purpose gives fresh samples of the same prompts.
        """
        names = list(self._runs if tasks is None else tasks)
        flow = self._flow(purpose)
        prompts = [p for n in names for p in render_rows(self._runs[n], self._runs[n].eval_rows, self._actor)]
        by_task: dict[str, list[Scored]] = {name: [] for name in names}
        for scored in flow(prompts):
            by_task[scored.rollout.task].append(scored)
        version = self._engine.policy_version
        return {name: _evaluation(self._runs[name], own, step, version) for name, own in by_task.items()}

    def _flow(self, purpose: str) -> DataFlow:
        rollout = RolloutStage(
            self._engine,
            self._runs,
            lambda ids: str(self._actor.tokenizer.decode(ids, skip_special_tokens=True)),
            seed=self._seed,
            scorer=self._scorer,
            purpose=purpose,
            group_size=1,
            temperature=self._temperature,
        )
        constraints = ConstraintStage(self._scorer, rollout, self._runs)
        return DataFlow([rollout, constraints, RewardStage(self._scorer, self._runs)])


def primary_value(metric: str, scored: Scored) -> float:
    """Return the primary metric of one record; NaN when it has none.

    Args:
        metric: ``reward``, the name of a reward, or ``<reward>/<component>``.
        scored: a served response (a refused one earns nothing: 0 reward is not NaN).
    """
    if scored.failure is not None or scored.rollout.failure is not None:
        return math.nan
    if scored.rollout.rejected:
        return 0.0
    if metric == "reward":
        return scored.reward if scored.reward is not None else math.nan
    name, _, component = metric.partition("/")
    result = scored.breakdown.get(name)
    if not isinstance(result, Score):
        return math.nan
    return result.components.get(component, math.nan) if component else result.value


def mean_interval(values: Sequence[float]) -> tuple[float, float, float, int]:
    """Return ``(mean, low, high, n)`` with the 95 % normal interval over the finite values.

    >>> mean_interval([0.0, 1.0, float("nan"), 0.0, 1.0])[0]
    0.5
    """
    finite = [v for v in values if math.isfinite(v)]
    n = len(finite)
    if n == 0:
        return math.nan, math.nan, math.nan, 0
    mean = math.fsum(finite) / n
    variance = math.fsum((v - mean) ** 2 for v in finite) / (n - 1) if n > 1 else 0.0
    half = 1.96 * math.sqrt(variance / n)
    return mean, mean - half, mean + half, n


def served(scored: Sequence[Scored]) -> list[Scored]:
    """Return the last attempt of every slot, in order: what a user would have seen."""
    last: dict[tuple[str, int], Scored] = {}
    for s in scored:
        last[(s.rollout.group_id, s.rollout.sample)] = s
    return list(last.values())


def append_evaluations(file: Path, evaluations: Mapping[str, TaskEvaluation]) -> None:
    """Append one line per task to ``evaluations.jsonl``; what cannot be written is lost, not the run."""
    lines = [json.dumps(evaluation_row(evaluation)) + "\n" for evaluation in evaluations.values()]
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.writelines(lines)
    except OSError as error:
        logger.warning("%s lacks an evaluation: %s", file, error)


def evaluation_row(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Return the evaluation as JSON data; a value that failed is null."""
    mean, low, high, n = mean_interval(evaluation.values)
    return {
        "step": evaluation.step,
        "task": evaluation.task,
        "metric": evaluation.metric,
        "policy_version": evaluation.policy_version,
        "higher_is_better": evaluation.higher_is_better,
        "prompts": evaluation.prompts,
        "mean": _plain(mean),
        "low": _plain(low),
        "high": _plain(high),
        "n": n,
        "metrics": {k: _plain(v) for k, v in evaluation.metrics.items()},
        "values": [_plain(v) for v in evaluation.values],
    }


def _evaluation(run: TaskRun, scored: list[Scored], step: int, version: int) -> TaskEvaluation:
    final = served(scored)
    spec = run.spec
    return TaskEvaluation(
        task=spec.name,
        metric=spec.primary_metric,
        values=[primary_value(spec.primary_metric, s) for s in final],
        step=step,
        policy_version=version,
        higher_is_better=spec.higher_is_better,
        prompts=_hash_prompts(final),
        metrics={
            **describe(scored, final),
            # before the constraint intervened: what the actor itself does
            **constraint_metrics(spec, [s for s in scored if s.rollout.attempt == 0], final),
        },
    )


def describe(scored: Sequence[Scored], final: Sequence[Scored]) -> dict[str, float]:
    """Return the means that every scored set has: rewards one by one, lengths, refusals, failures.

    Args:
        scored: all attempts.
        final: the last attempt of every slot.
    """
    if not final:
        return {}
    numbers: dict[str, list[float]] = {"reward_mean": [s.reward for s in final if s.reward is not None]}
    for s in final:
        numbers.setdefault("length", []).append(len(s.rollout.response_ids))
        numbers.setdefault("truncated_rate", []).append(s.rollout.is_truncated)
        if s.rollout.sampling.grammar:
            # the end token is allowed after a sentence only
            numbers.setdefault("grammar/accepted_rate", []).append(s.rollout.finish_reason == "stop")
        failed = s.failure is not None or s.rollout.failure is not None
        numbers.setdefault("failure_rate", []).append(failed)
        for name, result in s.breakdown.items():
            if isinstance(result, Score):
                numbers.setdefault(f"reward/{name}", []).append(result.value)
                for part, value in result.components.items():
                    numbers.setdefault(f"reward/{name}/{part}", []).append(value)
    first = [s for s in scored if s.rollout.attempt == 0]
    if any(s.rollout.verdicts for s in first):
        numbers["cost"] = [s.cost for s in scored if s.concerned]
        numbers["flagged_rate"] = [s.rollout.finish_reason == FLAGGED for s in scored]
        for s in scored:
            for name, verdict in s.rollout.verdicts.items():
                if isinstance(verdict, Verdict) and verdict.applicable:
                    numbers.setdefault(f"cost/{name}", []).append(verdict.cost)
        numbers["rejection_rate"] = [s.rollout.rejected for s in scored]
        # before the constraint intervened: what the actor itself does
        numbers["violation_rate"] = [_violates(s) for s in first if _is_concerned(s)]
        numbers["served_violation_rate"] = [_violates(s) for s in final if _is_concerned(s)]
    return {name: math.fsum(v) / len(v) for name, v in numbers.items() if v}


def _hash_prompts(scored: Sequence[Scored]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for s in scored:
        digest.update(json.dumps([s.rollout.prompt.prompt_id, s.rollout.prompt.text]).encode())
    return digest.hexdigest()


def _violates(scored: Scored) -> bool:
    return any(isinstance(v, Verdict) and v.violated for v in scored.rollout.verdicts.values())


def _is_concerned(scored: Scored) -> bool:
    return any(isinstance(v, Verdict) and v.applicable for v in scored.rollout.verdicts.values())


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
