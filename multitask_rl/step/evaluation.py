"""Held-out evaluation per task: fixed prompts, fixed seeds, so that two evaluations are paired."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from multitask_rl.constraints.satisfaction import constraint_metrics
from multitask_rl.executor.scorer import RunScorer
from multitask_rl.models.actor import Actor
from multitask_rl.records import TaskEvaluation
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.scoring.stats import ScoreTally
from multitask_rl.statistics.definitions import SAMPLING, definitions, sampling_hash
from multitask_rl.step.flow import DataFlow
from multitask_rl.step.stages import SamplingStages
from multitask_rl.step.task_state import TaskState, render_rows
from multitask_rl.step.texts import TextMeter


@dataclass
class Evaluator:
    """Runs the sampling stages of training over each task's held-out prompts.

    ``eval_samples`` of the task is the number of responses per prompt. The first response does not depend on
    that number.
    """

    actor: Actor
    engine: RolloutEngine
    scorer: RunScorer
    tasks: Mapping[str, TaskState]
    temperature: float
    meter: TextMeter
    stages: Callable[..., SamplingStages]
    """``sampling_stages`` of the run; lacks what is of one evaluation."""
    tally: ScoreTally = field(init=False, default_factory=ScoreTally)
    """Counts of scored records by task; the trainer adds those of its steps."""

    def evaluate(
        self,
        step: int,
        *,
        tasks: Sequence[str] | None = None,
        purpose: str = "evaluation",
        must_score: bool = False,
    ) -> dict[str, TaskEvaluation]:
        """Return the evaluation of each task (default: all).

        Another ``purpose`` gives new samples of the same prompts.

        Raises:
            RewardError: a task's error budget is spent; with ``must_score``, it has no scored sample.
        """
        names = list(self.tasks if tasks is None else tasks)
        sizes = {name: self.tasks[name].spec.eval_samples for name in names}
        stages = self.stages(purpose=purpose, group_sizes=sizes, temperature=self.temperature)
        scored_names = [n for n in names if self.tasks[n].spec.is_scored]
        prompts = [
            p for n in scored_names for p in render_rows(self.tasks[n], self.tasks[n].eval_rows, self.actor)
        ]
        # before environments add to the prompts: one that fails adds nothing, which would change the hash
        digests = {name: hashlib.blake2b(digest_size=8) for name in names}
        for prompt in prompts:
            cut_to = [self.tasks[prompt.task].max_prompt_tokens] if prompt.is_cut else []
            digests[prompt.task].update(json.dumps([prompt.row_id, prompt.text, *cut_to]).encode())
        scored = DataFlow(stages)(prompts)
        self.tally.note(scored)
        self.scorer.metrics()  # begins a new count, so that the next step's numbers are its own
        if must_score:
            self.tally.check()
        version = self.engine.policy_version
        found: dict[str, TaskEvaluation] = {}
        for name in names:
            task, own = self.tasks[name], [s for s in scored if s.rollout.task == name]
            condition = task.algorithm.condition([], evaluation=True)
            found[name] = TaskEvaluation(
                task=name,
                metric=task.spec.primary_metric,
                primary=task.metrics.primary(own),
                step=step,
                policy_version=version,
                prompts=digests[name].hexdigest(),
                definitions=definitions(task.spec) | {SAMPLING: sampling_hash(task.eval_sampling, condition)},
                num_samples=task.spec.eval_samples,
                num_failed=task.metrics.num_failed(own),
                metrics={**task.metrics.describe(own, held_out=True), **constraint_metrics(task.spec, own)},
            )
            if task.spec.kind == "anchor" or not task.spec.is_scored:
                found[name] = self.meter.measure(name, found[name], purpose)
        return found
