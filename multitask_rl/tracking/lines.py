"""Records as JSON lines and back: what ``rollouts.jsonl`` and ``events.jsonl`` hold.

Strict JSON: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from multitask_rl.records import (
    Failure,
    NotApplicable,
    Prompt,
    RewardResult,
    Rollout,
    SamplingParams,
    Score,
    Scored,
    Turn,
    Verdict,
)


def _plain(value: Any) -> Any:
    """Return ``value`` with only JSON types in it; unknown objects become their ``str``."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    return str(value)


def dump_line(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of strict JSON with its newline."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _result_to_dict(result: RewardResult | Verdict) -> dict[str, Any]:
    if isinstance(result, Score):
        return {"value": result.value, "components": dict(result.components)}
    if isinstance(result, NotApplicable):
        return {"not_applicable": True}
    return {"failure": asdict(result)} if isinstance(result, Failure) else asdict(result)


def scored_to_dict(scored: Scored, step: int) -> dict[str, Any]:
    """Return everything that scoring again or reading needs; only the log-probabilities are left out."""
    rollout = scored.rollout
    prompt = rollout.prompt
    return {
        "step": step,
        "task": prompt.task,
        "prompt_id": prompt.prompt_id,
        "draw": prompt.draw,
        "sample": rollout.sample,
        "attempt": rollout.attempt,
        "prompt": prompt.text,
        "response": rollout.response,
        "reward": scored.reward,
        "breakdown": {name: _result_to_dict(result) for name, result in scored.breakdown.items()},
        "cost": scored.cost,
        "failure": asdict(scored.failure) if scored.failure else None,
        "finish_reason": rollout.finish_reason,
        "rejected": rollout.rejected,
        "verdicts": {name: _result_to_dict(verdict) for name, verdict in rollout.verdicts.items()},
        "policy_version": rollout.policy_version,
        "sampling": asdict(rollout.sampling),
        "row": dict(prompt.row),
        "prompt_ids": list(prompt.prompt_ids),
        "response_ids": list(rollout.response_ids),
        # an episode, turn by turn
        **({"turns": [asdict(t) for t in rollout.turns], "earned": rollout.earned} if rollout.turns else {}),
    }


def rollout_from_dict(line: Mapping[str, Any]) -> Rollout:
    """Rebuild the rollout of a line of ``rollouts.jsonl``: unscored, unjudged, without log-probabilities.

    Raises:
        KeyError: the line is not one that ``scored_to_dict`` wrote.
    """
    prompt = Prompt(
        task=line["task"],
        prompt_id=line["prompt_id"],
        draw=line["draw"],
        row=line["row"],
        text=line["prompt"],
        prompt_ids=list(line["prompt_ids"]),
    )
    return Rollout(
        prompt=prompt,
        sample=line["sample"],
        attempt=line["attempt"],
        response_ids=list(line["response_ids"]),
        response=line["response"],
        finish_reason=line["finish_reason"],
        policy_version=line["policy_version"],
        sampling=SamplingParams.from_json(line["sampling"]),
        turns=[Turn(**turn) for turn in line.get("turns", ())],
        earned=line.get("earned"),
    )
