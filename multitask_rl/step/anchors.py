"""Anchors: what training changes on texts and prompts that no task trains on.

Each evaluation computes, on fixed texts, the loss of the actor and KL(initial actor || actor), and compares
what was solved at the first evaluation with what is solved now.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multitask_rl.algorithms.anchor import Anchor
from multitask_rl.models.actor import Actor
from multitask_rl.records import Direction, Prompt, Rollout, Scored, Statistic, TaskEvaluation, TrainSample
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.statistics.intervals import summarise
from multitask_rl.step.stages import RolloutStage
from multitask_rl.step.task_state import TaskState, render_answer_ids, render_rows
from multitask_rl.training.runner import ModelRunner


@dataclass(kw_only=True, slots=True)
class AnchorMeter:
    """Measures the anchors of a run; ``runner`` has the initial weights as its reference."""

    runner: ModelRunner
    actor: Actor
    engine: RolloutEngine
    tasks: Mapping[str, TaskState]
    seed: int

    def measure(self, name: str, evaluation: TaskEvaluation) -> TaskEvaluation:
        """Return the evaluation with ``loss``, ``kl`` and, of scored responses, ``turnover``.

        Without rewards ``evaluation`` is empty, and ``loss`` becomes the primary metric.
        """
        task = self.tasks[name]
        algorithm = task.algorithm
        assert isinstance(algorithm, Anchor)
        samples = self._given(task, algorithm.config.max_tokens)
        logprobs, kls = self.runner.score_texts(samples, against_reference=algorithm.config.kl)
        found = {"loss": _per_text([-own.mean().item() for own in logprobs])}
        if kls is not None:
            # rounding may leave a KL of equal policies below 0
            found["kl"] = _per_text([max(0.0, own.mean().item()) for own in kls])
        if task.spec.is_scored:
            turnover = self._turnover(task, evaluation)
            return replace(evaluation, metrics={**evaluation.metrics, **found, **turnover})
        given = [[sample.prompt_ids, sample.response_ids] for sample in samples]
        digest = hashlib.blake2b(json.dumps(given, default=list).encode(), digest_size=8).hexdigest()
        loss = found.pop("loss")
        return replace(evaluation, metric="loss", primary=loss, prompts=digest, metrics=found)

    def _given(self, task: TaskState, max_tokens: int) -> list[TrainSample]:
        """Return the fixed texts: those of the rows, or responses that the initial actor has sampled."""
        plain = task.spec.answer and not task.spec.prompt
        if plain:
            prompts = [
                Prompt(task=task.spec.name, prompt_id="", draw=i, row={}, text="", prompt_ids=[])
                for i in range(len(task.eval_rows))
            ]
        else:
            prompts = render_rows(task, task.eval_rows, self.actor)
        if task.spec.answer:
            texts = [render_answer_ids(task, row, self.actor) for row in task.eval_rows]
        else:
            texts = self._sampled(task, prompts)
        samples = []
        for prompt, text in zip(prompts, texts, strict=True):
            context, ids = prompt.prompt_ids, text[:max_tokens]
            if plain:  # the first token stands alone where no token begins a text
                bos = self.actor.tokenizer.bos_token_id
                context, ids = ([bos], ids) if bos is not None else (ids[:1], ids[1:])
            if ids:
                rollout = Rollout(prompt=prompt, sample=0, response_ids=ids)
                own = {"scored": Scored(rollout=rollout, reward=None), "rollout_logprobs": []}
                samples.append(TrainSample(prompt_ids=context, response_ids=ids, **own))  # type: ignore[arg-type]
        return samples

    def _sampled(self, task: TaskState, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the response to each prompt that was sampled at the task's first evaluation."""
        missing = [p for p in prompts if p.prompt_id not in task.anchor.responses]
        if missing:
            stage = RolloutStage(
                self.engine,
                self.tasks,
                lambda ids: str(self.actor.tokenizer.decode(ids)),
                seed=self.seed,
                purpose="anchor",
                group_sizes={task.spec.name: 1},
                temperature=1.0,
            )
            for rollout in stage.process(missing):
                task.anchor.responses[rollout.prompt.prompt_id] = list(rollout.response_ids)
        return [task.anchor.responses[p.prompt_id] for p in prompts]

    def _turnover(self, task: TaskState, evaluation: TaskEvaluation) -> dict[str, Statistic]:
        """Return per prompt: the share of responses solved at first, times the share not solved now."""
        solved = evaluation.metrics.get("pass@1")
        if solved is None:
            return {}
        if task.anchor.prompts != evaluation.prompts:
            task.anchor.prompts, task.anchor.solved = evaluation.prompts, list(solved.values)
        lost = [a * (1.0 - b) for a, b in zip(task.anchor.solved, solved.values, strict=True)]
        own = summarise(lost, direction=Direction.lower, low=0.0, high=1.0, keep=range(len(lost)))
        return {"turnover": own}


def _per_text(values: Sequence[float]) -> Statistic:
    """Return the statistic of non-negative numbers of texts of which lower ones are better."""
    kept = range(len(values))
    return summarise(values, direction=Direction.lower, low=0.0, high=math.inf, keep=kept)
