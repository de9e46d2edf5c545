"""The records that travel from a prompt to an update, one per sample, whole.

``Prompt -> Rollout -> Scored -> TrainSample``; tensors appear only after ``TrainSample``.
A record is never split into parallel lists that a reorder could tear apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from multitask_rl.config.schema.ranges import Count, Natural, NotNegative, PositiveFraction, Settings

__all__ = [
    "FLAGGED",
    "NOT_APPLICABLE",
    "NUM_EXTREMES",
    "OVERRUN",
    "Direction",
    "Event",
    "Failure",
    "FailureKind",
    "NotApplicable",
    "Prompt",
    "RewardResult",
    "Rollout",
    "SamplingParams",
    "Score",
    "Scored",
    "Statistic",
    "TaskEvaluation",
    "TaskStats",
    "TrainSample",
    "Verdict",
    "concerned_cost",
]

FLAGGED = "flagged"
"""Finish reason of a response that a streaming constraint ended."""


class FailureKind(StrEnum):
    """Why something could not be judged. A failure is masked from the statistics, never a 0."""

    infra = "infra"
    """The machinery failed (worker killed, connection lost); the only kind that is retried."""
    timeout = "timeout"
    """The time limit of the plugin passed."""
    data = "data"
    """The row lacks what the plugin needs, or holds it in an unusable form."""
    grader = "grader"
    """The plugin raised, or returned something that is not a finite score in its range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A typed failure of one sample at one boundary."""

    kind: FailureKind
    message: str
    source: str = ""
    """Name of the plugin or stage it came from."""


class NotApplicable:
    """This reward is not for this sample: left out of the weighted sum, not counted as failure."""

    _instance: NotApplicable | None = None

    def __new__(cls) -> NotApplicable:
        """Return the one instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __reduce__(self) -> tuple[type[NotApplicable], tuple[()]]:
        return (NotApplicable, ())

    def __repr__(self) -> str:
        return "NOT_APPLICABLE"


NOT_APPLICABLE = NotApplicable()


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The value of one response under one reward, with its named parts."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts for the log (``{"tests": 0.5, "codebleu": 0.8}``); they do not add to ``value``."""


RewardResult = Score | Failure | NotApplicable


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a constraint says of one rollout."""

    cost: float
    """In [0, 1]; 0 = satisfied."""
    violated: bool
    reason: str = ""
    applicable: bool = True
    """False: the constraint does not concern the sample; it counts in no rate and no mean cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(Settings):
    """How the engine draws tokens; part of the policy, so the trainer uses the same values."""

    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    temperature: NotNegative = 1.0
    """0 = greedy, which only a task with ``evaluation_only`` may be; others are evaluated at
    ``eval.temperature``."""
    top_p: PositiveFraction = 1.0
    """Nucleus: sample from the likeliest tokens that hold this probability; 1 = off."""
    top_k: Natural = 0
    """0 = off."""
    stop: tuple[str, ...] = ()
    """Strings that end the response, special tokens among them; the matched text is kept in the ids, cut from
    ``response``."""
    grammar: str = field(default="", metadata={"derived": True})
    """What a response may be: JSON text of the configuration of a constraint in mode ``grammar``; empty =
    anything. A token that leads to no sentence of it has probability 0, as has an end before one."""
    suppressed_ids: tuple[int, ...] = field(default=(), metadata={"derived": True})
    """Tokens with probability 0 whatever the logits: the control tokens, which belong to prompts alone."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return what ``dataclasses.asdict`` gave and JSON has made lists of."""
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One question of one task, rendered and tokenised."""

    task: str
    prompt_id: str
    """Stable over runs: ``<task>/<row id>``."""
    draw: int
    """How many prompts this task's stream had given before this one (the seed of its rollouts)."""
    row: Mapping[str, Any]
    """The row of the data set: what rewards and constraints read (``reference``, ``tests``, ...)."""
    text: str
    """The prompt as the model sees it, after template and chat template."""
    prompt_ids: list[int]
    """[P] token ids of ``text``; a conditioned prompt carries its control token here."""
    position: int = 0
    """Place in the batch it is sampled with: responses end in any order and are put back into this one."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled response, token-exact as the engine produced it."""

    prompt: Prompt
    sample: int
    """Index within the group of the prompt: 0 .. group_size - 1."""
    attempt: int = 0
    """0, or how many earlier responses of this sample a constraint has rejected."""
    response_ids: list[int] = field(default_factory=list)
    """[T] sampled ids, with the end-of-sequence token if it was sampled."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """[T] nats, under the distribution that was sampled (temperature, top-k, top-p applied)."""
    response: str = ""
    """Decoded text without special tokens and stop strings."""
    finish_reason: str = "stop"
    """``stop`` (end token or stop string), ``length``, ``flagged`` (ended by a streaming constraint; so is
    the partial response called that one looks at) or ``error``."""
    policy_version: int = 0
    """Number of optimizer steps of the weights that sampled it."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    verdicts: dict[str, Verdict | Failure] = field(default_factory=dict)
    """By constraint name."""
    rejected: bool = False
    """A constraint in mode ``reject`` refused it; another attempt follows unless they ran out."""
    failure: Failure | None = None
    """The engine could not produce it; no response to score."""

    @property
    def task(self) -> str:
        """Name of the task it belongs to."""
        return self.prompt.task

    @property
    def row(self) -> Mapping[str, Any]:
        """The data set's row."""
        return self.prompt.row

    @property
    def group_id(self) -> str:
        """Rollouts of one draw of one prompt share it; statistics of a group never leave it."""
        return f"{self.prompt.task}#{self.prompt.draw}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts the records of a batch."""
        return (self.prompt.position, self.sample, self.attempt)

    @property
    def is_truncated(self) -> bool:
        """The response hit the token limit."""
        return self.finish_reason == "length"


@dataclass(kw_only=True, slots=True)
class Scored:
    """A rollout with what its rewards and constraints said."""

    rollout: Rollout
    reward: float | None
    """Weighted sum of the applicable rewards (minus penalties); None = failed, masked everywhere."""
    breakdown: dict[str, RewardResult] = field(default_factory=dict)
    """By reward name, as each plugin returned it."""
    terms: Sequence[tuple[float, float]] = ()
    """Weight and value of each summand of ``reward``: the weighted rewards (negative weight where lower is
    better), then the penalties; the same places in all records of a task, NaN = not applicable."""
    cost: float = 0.0
    """Largest constraint cost, in [0, 1]."""
    concerned: bool = True
    """False: no constraint that ``cost`` comes from applies to the sample; it counts in no mean cost."""
    failure: Failure | None = None
    """The first failure that made ``reward`` None."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts the records of a batch."""
        return self.rollout.order


def concerned_cost(scored: Scored, constraint: str) -> float | None:
    """Return the cost of a record under the constraint of that name; None where it does not apply."""
    verdict = scored.rollout.verdicts.get(constraint)
    return verdict.cost if isinstance(verdict, Verdict) and verdict.applicable else None


@dataclass(kw_only=True, slots=True)
class TrainSample:
    """A scored rollout with its credit: what the learner packs."""

    scored: Scored
    prompt_ids: Sequence[int]
    """[P] the context of the loss; differs from the rollout's where an algorithm re-conditions."""
    response_ids: Sequence[int]
    """[T]"""
    rollout_logprobs: Sequence[float]
    """[T] nats; empty = the sample is not on-policy data (no ratio is formed)."""
    reward: float = 0.0
    """Scalar outcome of the response."""
    ref_prompt_ids: Sequence[int] | None = None
    """Context for the reference policy; None = ``prompt_ids`` (a reference knows no control token)."""

    @property
    def task(self) -> str:
        """Name of the task it belongs to."""
        return self.scored.rollout.task


class Direction(Enum):
    """Which way a metric gets better."""

    higher = "higher"
    lower = "lower"
    none = "none"
    """Neither: a length, an entropy."""

    @property
    def sign(self) -> int:
        """1, -1, or 0: ``sign * value`` is better the higher it is."""
        return {"higher": 1, "lower": -1, "none": 0}[self.value]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """A mean over a population with all that is needed to judge it (``intervals.summarise`` makes it).

    Which records are the population of which metric: ``statistics/definitions.py``, docs/definitions.md.
    """

    mean: float
    """NaN: nothing to measure."""
    n: int
    """Size of the population: values behind the mean, without those that failed or are not concerned."""
    error: float
    """Standard error of the mean over its own population; NaN where one value or none is known."""
    direction: Direction = Direction.none
    low: float = -math.inf
    """Smallest value there can be, where it is declared."""
    high: float = math.inf
    """Largest value there can be, where it is declared."""
    values: Sequence[float] = ()
    """[prompts] mean per prompt in the order of the evaluation, NaN = not concerned or failed; empty = none
    were kept (training). Of two evaluations of the same prompts they are pairs."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % normal interval of the mean; the mean alone where there is no error."""
        half = 1.96 * self.error if math.isfinite(self.error) else 0.0
        return self.mean - half, self.mean + half

    @property
    def score(self) -> float:
        """The mean, turned so that higher is better; NaN without a direction."""
        return self.mean * self.direction.sign if self.direction.sign else math.nan


OVERRUN = "overrun"
"""Component of the score of a response that passes the limits of its check; it has no other one."""

NUM_EXTREMES = 3
"""Groups that have to show a reward before it counts as an end of the range where none is declared."""


@dataclass(kw_only=True, slots=True)
class TaskStats:
    """What one training step saw of one task; what schedulers learn from."""

    task: str
    num_prompts: int
    """Groups scored this step (before filtering)."""
    num_informative: int
    """Groups whose rewards, or costs with a multiplier, differ (of one rollout: groups the algorithm learns
    from)."""
    reward_mean: float
    """Mean reward over the step's slots, refused ones included; NaN when there was none."""
    reward_std: float = 0.0
    """Mean over groups of the reward's standard deviation."""
    lowest: Sequence[float] = ()
    """Smallest reward of a group, of the ``NUM_EXTREMES`` groups where it is smallest, ascending."""
    highest: Sequence[float] = ()
    """Largest reward of a group, of the ``NUM_EXTREMES`` groups where it is largest, descending."""
    shift: float = 0.0
    """What ``reward_mean`` lies below that of prompts drawn evenly, because a curriculum chose them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Every other per-task number of the step by name (``length``, ``kl``, ``rejection_rate``...)."""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    """Those that are means over the step's responses, with n, error and direction (``reward_mean``,
    ``cost/<constraint>``, ``violation_rate``...)."""


@dataclass(kw_only=True, slots=True)
class TaskEvaluation:
    """One held-out evaluation of one task: fixed prompts, fixed sampling seed (paired over time)."""

    task: str
    metric: str
    """Name of the primary metric."""
    primary: Statistic
    """The primary metric, with its values per prompt."""
    step: int
    policy_version: int
    prompts: str = ""
    """Hash of the prompts in their order: evaluations with the same one are paired."""
    num_failed: int = 0
    """Prompts that failed to be scored; to others without a value the primary metric is not applicable."""
    metrics: Mapping[str, Statistic] = field(default_factory=dict)
    """Further metrics (``violation_rate``, ``reward/<name>``, ``length``...)."""

    @property
    def values(self) -> Sequence[float]:
        """[n] the primary metric per prompt, always in the same order; NaN = failed or not applicable."""
        return self.primary.values

    def statistic(self, metric: str = "") -> Statistic | None:
        """Return a metric by name; empty = the primary one; None: the evaluation has none of that name."""
        return self.metrics.get(metric) if metric else self.primary


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One decision of the run: what was decided, by whom, why, from what to what."""

    step: int
    source: str
    """``scheduler``, ``guard``, ``kl``, ``multiplier``, ``rewards``, ``run``..."""
    kind: str
    """``reweight``, ``alarm``, ``rollback``, ``stop``, ``warn``..."""
    reason: str
    """One sentence for a person."""
    task: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able numbers behind it (metric, old, new, statistic)."""
