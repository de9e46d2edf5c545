"""Records for tests, with only what a test cares about spelled out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.records import Direction, Prompt, Rollout, SamplingParams, Statistic, TaskEvaluation
from multitask_rl.statistics.intervals import summarise


def make_prompt(
    text: str = "What is 2 + 2?",
    *,
    task: str = "task",
    row: Mapping[str, Any] | None = None,
    draw: int = 0,
) -> Prompt:
    """Return a prompt whose token ids are the characters' code points."""
    return Prompt(
        task=task,
        prompt_id=f"{task}/{draw}",
        draw=draw,
        row={} if row is None else row,
        text=text,
        prompt_ids=[ord(character) for character in text] or [0],
    )


def make_rollout(
    response: str = "4",
    *,
    prompt: Prompt | None = None,
    task: str = "task",
    row: Mapping[str, Any] | None = None,
    draw: int = 0,
    sample: int = 0,
    finish_reason: str = "stop",
    sampling: SamplingParams | None = None,
) -> Rollout:
    """Return a rollout of ``response`` to ``prompt`` (default: one made of ``task``, ``row``, ``draw``).

    Token ids are code points; every log-probability is -1.
    """
    return Rollout(
        prompt=prompt or make_prompt(task=task, row=row, draw=draw),
        sample=sample,
        response_ids=[ord(character) for character in response],
        rollout_logprobs=[-1.0] * len(response),
        response=response,
        finish_reason=finish_reason,
        sampling=sampling or SamplingParams(),
    )


def make_evaluation(
    values: Sequence[float],
    *,
    task: str = "task",
    metric: str = "reward",
    step: int = 0,
    direction: Direction = Direction.higher,
    metrics: Mapping[str, Statistic] | None = None,
) -> TaskEvaluation:
    """Return a held-out evaluation whose primary metric has ``values`` per prompt (NaN = failed)."""
    values = [float(value) for value in values]
    return TaskEvaluation(
        task=task,
        metric=metric,
        primary=summarise(values, direction=direction, keep=range(len(values))),
        step=step,
        policy_version=step,
        metrics=metrics or {},
    )
