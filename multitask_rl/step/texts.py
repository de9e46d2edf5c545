"""Measures of held-out texts without a reward: loss, KL, turnover (docs/definitions.md).

- ``anchor``: loss and KL(initial actor || actor) on fixed texts; what was solved at first and is not now.
- ``sft`` without rewards: loss of the held-out answers.
- ``distill`` without rewards: KL(actor || teacher) on responses of the actor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from multitask_rl.algorithms.anchor import Anchor, measures_kl
from multitask_rl.data.rows import fingerprint
from multitask_rl.models.actor import Actor
from multitask_rl.records import (
    Direction,
    Prompt,
    Rollout,
    SamplingParams,
    Scored,
    Statistic,
    TaskEvaluation,
    TrainSample,
)
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.statistics.definitions import SAMPLING, is_comparable, measured
from multitask_rl.statistics.intervals import summarise
from multitask_rl.step.stages import RolloutStage
from multitask_rl.step.task_state import TaskState, render_answer_ids, render_rows
from multitask_rl.training.backend import TrainingBackend


@dataclass(kw_only=True, slots=True)
class TextMeter:
    """Measures anchors and tasks without rewards; ``backend`` has the initial weights and the teachers."""

    backend: TrainingBackend
    actor: Actor
    engine: RolloutEngine
    tasks: Mapping[str, TaskState]
    seed: int

    def measure(self, name: str, evaluation: TaskEvaluation, purpose: str) -> TaskEvaluation:
        """Return the evaluation with ``loss``, ``kl`` and, of scored responses, ``turnover``.

        Without rewards ``evaluation`` is empty, and ``loss`` or, with a teacher, ``kl`` becomes the primary
        metric. ``purpose`` names the random streams of responses.
        """
        task = self.tasks[name]
        algorithm = task.algorithm
        with_kl = measures_kl(algorithm) or algorithm.has_teacher
        max_tokens = algorithm.config.max_tokens if isinstance(algorithm, Anchor) else None
        samples = self._given(task, max_tokens, purpose)
        logprobs, kls = self.backend.score_texts(samples, with_kl=with_kl, task=name)
        found = {}
        if not algorithm.has_teacher:
            found["loss"] = _per_text([-own.mean().item() for own in logprobs])
        if kls is not None:
            # rounding may leave a KL of equal policies below 0; NaN must stay NaN
            found["kl"] = _per_text([max(own.mean().item(), 0.0) for own in kls])
        # the same prompts, whatever was sampled for them
        texts = [[s.prompt_ids, [] if algorithm.has_teacher else s.response_ids] for s in samples]
        digest = hashlib.blake2b(json.dumps(texts, default=list).encode(), digest_size=8).hexdigest()
        if task.spec.is_scored:
            turnover = self._turnover(task, evaluation)
            own = dict.fromkeys(found, digest)
            return replace(
                evaluation,
                metrics={**evaluation.metrics, **found, **turnover},
                definitions={**evaluation.definitions, **own},
            )
        metric = next(iter(found))
        known = dict(evaluation.definitions)
        if not (algorithm.has_teacher or task.spec.grammar):  # the texts are given, all tokens count
            known.pop(SAMPLING, None)
        return replace(
            evaluation,
            metric=metric,
            primary=found.pop(metric),
            prompts=digest,
            definitions=known,
            metrics=found,
            num_samples=1,
        )

    def _given(self, task: TaskState, max_tokens: int | None, purpose: str) -> list[TrainSample]:
        """Return the texts: those of the rows, responses of the initial actor, or (teacher) the actor's."""
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
        elif task.algorithm.has_teacher:
            texts = self._sample(task, prompts, purpose)
        else:
            times = Counter(p.row_id for p in prompts)
            keys = [
                p.row_id if times[p.row_id] == 1 else f"{p.row_id}/{fingerprint([p.row])}" for p in prompts
            ]
            known = task.anchor.responses
            missing = {key: p for key, p in zip(keys, prompts, strict=True) if key not in known}
            known |= zip(missing, self._sample(task, [*missing.values()], "anchor"), strict=True)
            texts = [known[key] for key in keys]
        samples, most = [], self.actor.max_length or None
        # what is trained is measured as it is trained: within grammar and suppressed tokens
        sampling = SamplingParams() if task.spec.kind == "anchor" else task.sampling
        for prompt, text in zip(prompts, texts, strict=True):
            context, ids = prompt.prompt_ids, text[:max_tokens]
            if plain:  # the first token stands alone where no token begins a text
                bos = self.actor.tokenizer.bos_token_id
                context, ids = ([bos], ids) if bos is not None else (ids[:1], ids[1:])
            ids = ids[: most and most - len(context)]  # the rest of a longer text has no position
            if ids:
                rollout = Rollout(prompt=prompt, sample=0, response_ids=ids, sampling=sampling)
                own = {"scored": Scored(rollout=rollout, reward=None), "rollout_logprobs": []}
                samples.append(TrainSample(prompt_ids=context, response_ids=ids, **own))  # type: ignore[arg-type]
        return samples

    def _sample(self, task: TaskState, prompts: Sequence[Prompt], purpose: str) -> list[list[int]]:
        """Return one response to each prompt, sampled at temperature 1, without ``top_k`` and ``top_p``.

        The task's grammar and suppressed tokens hold.
        """
        plain = replace(task, sampling=replace(task.sampling, temperature=1.0, top_k=0, top_p=1.0))
        stage = RolloutStage(
            self.engine,
            {task.spec.name: plain},
            self.actor.tokenizer.decode,
            seed=self.seed,
            purpose=purpose,
            group_sizes={task.spec.name: 1},
        )
        return [list(rollout.response_ids) for rollout in stage.process(list(prompts))] if prompts else []

    def _turnover(self, task: TaskState, evaluation: TaskEvaluation) -> dict[str, Statistic]:
        """Return per prompt: the share of responses solved at first, times the share not solved now."""
        solved = evaluation.metrics.get("pass@1")
        if solved is None:
            return {}
        own, now = task.anchor, measured(evaluation, "turnover")
        if not own.measured or not is_comparable(own.measured, now):
            own.solved = list(solved.values)
        own.measured = list(now)
        lost = [a * (1.0 - b) for a, b in zip(own.solved, solved.values, strict=True)]
        kept = range(len(lost))
        return {"turnover": summarise(lost, direction=Direction.lower, low=0.0, high=1.0, keep=kept)}


def _per_text(values: Sequence[float]) -> Statistic:
    """Return the statistic of non-negative numbers of texts of which lower ones are better."""
    kept = range(len(values))
    return summarise(values, direction=Direction.lower, low=0.0, high=math.inf, keep=kept)
