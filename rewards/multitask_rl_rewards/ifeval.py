"""``ifeval``: the share of a prompt's verifiable instructions that the response follows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.ifeval_checks import CHECKS
from multitask_rl_rewards.text import answer_of, data_failure

_NAME = "ifeval"


class IFEval:
    """Value: share of instructions followed; component ``all``: 1 if every one was (prompt-level accuracy).

    ``tests`` of a row: ``[{"instruction_id", "kwargs"}]``. A response without a word follows nothing. The
    checks see form, not sense, as the published ones do: ``0`` is JSON, ``a******b`` two responses, the end
    phrase alone a response that ends with it. A policy finds such texts: pair the reward with one that reads.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, needs=("tests",), timeout_s=10.0)
    one_by_one: ClassVar[bool] = True

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one result per rollout; an unknown or malformed instruction is a ``data`` failure."""
        return [_score_one(rollout) for rollout in rollouts]


def _score_one(rollout: Rollout) -> RewardResult:
    tests = rollout.row.get("tests")
    if isinstance(tests, str) or not isinstance(tests, Sequence) or not tests:
        return data_failure("the row has no instructions in `tests`: a response cannot follow none", _NAME)
    text = answer_of(rollout)
    followed, has_words = list[bool](), re.search(r"\w", text) is not None
    for test in tests:
        result = _follows(text, test)
        if isinstance(result, Failure):
            return result
        followed.append(result and has_words)
    return Score(value=sum(followed) / len(followed), components={"all": float(all(followed))})


def _follows(text: str, test: Any) -> bool | Failure:
    name = test.get("instruction_id") if isinstance(test, Mapping) else None
    check = CHECKS.get(str(name))
    if check is None:
        return data_failure(f"unknown instruction {name!r}; known: {', '.join(CHECKS)}", _NAME)
    keywords = {key: value for key, value in (test.get("kwargs") or {}).items() if value is not None}
    try:
        return check(text, **keywords)
    except (TypeError, ValueError) as error:
        return data_failure(f"instruction {name} with {keywords}: {error}", _NAME)
