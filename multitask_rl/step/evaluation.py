"""Held-out evaluation per task: fixed prompts, fixed seeds, so that two evaluations are paired."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.constraints.satisfaction import constraint_metrics
from multitask_rl.models.actor import Actor
from multitask_rl.records import Scored, Statistic, TaskEvaluation
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.scoring.stats import ScoreTally
from multitask_rl.statistics.definitions import served
from multitask_rl.step.constraint_stage import sampling_stages
from multitask_rl.step.flow import DataFlow
from multitask_rl.step.stages import Scorer
from multitask_rl.step.task_state import TaskState, render_rows
from multitask_rl.tracking.record_files import RecordFile

__all__ = ["Evaluator"]


class Evaluator:
    """Runs the same nodes as training over each task's held-out prompts, one response a prompt."""

    def __init__(
        self,
        actor: Actor,
        engine: RolloutEngine,
        scorer: Scorer,
        tasks: Mapping[str, TaskState],
        *,
        seed: int,
        temperature: float,
    ) -> None:
        self._actor = actor
        self._engine = engine
        self._scorer = scorer
        self._tasks = tasks
        self._seed = seed
        self._temperature = temperature
        self.tally = ScoreTally()
        """What was scored of each task; a trainer adds the records of its steps."""

    def evaluate(
        self,
        step: int,
        *,
        tasks: Sequence[str] | None = None,
        purpose: str = "evaluation",
        must_score: bool = False,
    ) -> dict[str, TaskEvaluation]:
        """Return the evaluation of each task (default: all).

        Args:
            step: training step, for the record.
            tasks: names.
            purpose: names the random streams; another purpose gives fresh samples of the same prompts.
            must_score: a task of which no sample was scored is an error.

        Raises:
            RewardError: a task's error budget is spent; with ``must_score``, it has no scored sample.
        """
        names = list(self._tasks if tasks is None else tasks)
        stages = sampling_stages(
            self._actor,
            self._engine,
            self._scorer,
            self._tasks,
            seed=self._seed,
            purpose=purpose,
            group_size=1,
            temperature=self._temperature,
        )
        prompts = [
            p for n in names for p in render_rows(self._tasks[n], self._tasks[n].eval_rows, self._actor)
        ]
        by_task: dict[str, list[Scored]] = {name: [] for name in names}
        for scored in DataFlow(stages)(prompts):
            by_task[scored.rollout.task].append(scored)
            self.tally.note([scored])
        self._scorer.metrics()  # the step that follows counts its own samples alone
        if must_score:
            self.tally.check()
        version = self._engine.policy_version
        return {name: _evaluation(self._tasks[name], own, step, version) for name, own in by_task.items()}


def append_evaluations(file: Path, evaluations: Mapping[str, TaskEvaluation]) -> None:
    """Append one line per task to ``evaluations.jsonl``.

    Raises:
        CheckpointError: it cannot be written.
    """
    with contextlib.closing(RecordFile(file)) as record:
        record.append(json.dumps(evaluation_row(evaluation)) + "\n" for evaluation in evaluations.values())


def evaluation_row(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Return the evaluation as JSON data; a value that failed is null."""
    primary = evaluation.primary
    low, high = primary.interval
    return {
        "step": evaluation.step,
        "task": evaluation.task,
        "metric": evaluation.metric,
        "policy_version": evaluation.policy_version,
        "prompts": evaluation.prompts,
        **_numbers(primary),
        "low": _plain(low),
        "high": _plain(high),
        "metrics": {k: _numbers(s) for k, s in evaluation.metrics.items()},
        "values": [_plain(v) for v in primary.values],
    }


def _numbers(statistic: Statistic) -> dict[str, Any]:
    return {
        "mean": _plain(statistic.mean),
        "n": statistic.n,
        "error": _plain(statistic.error),
        "direction": statistic.direction.value,
    }


def _evaluation(task: TaskState, scored: list[Scored], step: int, version: int) -> TaskEvaluation:
    return TaskEvaluation(
        task=task.spec.name,
        metric=task.spec.primary_metric,
        primary=task.metrics.primary(scored),
        step=step,
        policy_version=version,
        prompts=_hash_prompts(served(scored)),
        num_failed=task.metrics.num_failed(scored),
        metrics={**task.metrics.describe(scored, held_out=True), **constraint_metrics(task.spec, scored)},
    )


def _hash_prompts(scored: Sequence[Scored]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for s in scored:
        digest.update(json.dumps([s.rollout.prompt.prompt_id, s.rollout.prompt.text]).encode())
    return digest.hexdigest()


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
