"""The records of a sample, from prompt to update: ``Prompt -> Rollout -> Scored -> TrainSample``.

Tensors appear only after ``TrainSample``. A record is never split into parallel lists, which a reorder could
misalign.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Annotated, Any, TypeVar

from multitask_rl.config.schema.ranges import (
    Count,
    Natural,
    NotEmpty,
    NotNegative,
    PositiveFraction,
    Settings,
)

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages."""
FLAGGED = "flagged"
"""Finish reason of a response that a streaming constraint ended."""


class FailureKind(StrEnum):
    """Cause of a failure. A failure is excluded from statistics and never counts as 0."""

    infra = "infra"
    """Infrastructure failed (worker killed, connection lost); the only kind that is retried."""
    timeout = "timeout"
    """The plugin exceeded its time limit."""
    data = "data"
    """The row lacks a column that the plugin needs, or the value is unusable."""
    grader = "grader"
    """The plugin raised, or returned something that is not a finite score in its range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A typed failure of one sample at one boundary."""

    kind: FailureKind
    message: str
    source: str = ""
    """Name of the plugin or stage that failed."""


class NotApplicable(Enum):
    """The reward does not apply to this sample: it is left out of the weighted sum and is not a failure."""

    NOT_APPLICABLE = "NOT_APPLICABLE"

    def __repr__(self) -> str:
        return self.value


NOT_APPLICABLE = NotApplicable.NOT_APPLICABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The value of one response under one reward, with its named parts."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts for the log (``{"tests": 0.5, "codebleu": 0.8}``); they do not add to ``value``."""
    answer: str = field(default="", compare=False)
    """The final answer that the reward read, in a form in which equal answers are equal texts: the majority
    of an evaluation counts it. Empty = none was found, or the reward reads none. Scores with other answers
    are equal."""


RewardResult = Score | Failure | NotApplicable


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a constraint for one rollout."""

    cost: float
    """The cost, in [0, 1]; 0 = satisfied."""
    violated: bool
    reason: str = ""
    applicable: bool = True
    """False: the constraint does not apply to the sample, which counts in no rate and no mean cost."""
    turn: int = 0
    """Turn of an episode that it judges, from 1; 0 = the whole response."""

    @property
    def badness(self) -> tuple[bool, bool, float]:
        """Sort key: a violation is worse than none; then the higher cost is worse."""
        return self.applicable, self.violated, self.cost

    def of_turn(self, number: int) -> Verdict:
        """Return the verdict on a response as one on the turn ``number`` of an episode."""
        return replace(self, turn=number, reason=f"turn {number}: {self.reason}" if self.reason else "")


@dataclass(kw_only=True, slots=True)
class SamplingSettings(Settings):
    """Sampling settings that the run (``rollout``) and every task (``sampling``) have."""

    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0 = greedy, allowed only with ``evaluation_only``. Other tasks are evaluated at
    ``eval.temperature``."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1 = off."""
    top_k: Natural = 0
    """Sample from this many most likely tokens; 0 = off."""
    stop: tuple[Annotated[str, NotEmpty()], ...] = ()
    """Strings that end the response; they may be special tokens. ``response_ids`` keep the matched text,
    ``response`` does not."""


@dataclass(kw_only=True, slots=True, unsafe_hash=True)  # a base of mutable settings cannot be frozen
class SamplingParams(SamplingSettings):
    """Sampling parameters of a response. The trainer uses the same: they are part of the sampled policy."""

    grammar: str = field(default="", metadata={"derived": True})
    """Grammar of the response, as JSON text of the configuration of a constraint in mode ``grammar``; empty =
    none. A token that cannot lead to a sentence has probability 0, and so has an early end."""
    suppressed_ids: tuple[int, ...] = field(default=(), metadata={"derived": True})
    """Tokens that always have probability 0: the control tokens, which appear in prompts only."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters from ``dataclasses.asdict`` after JSON, which turns tuples into lists."""
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One question of one task, rendered and tokenised."""

    task: str
    prompt_id: str
    """Stable over runs: ``<task>/<row id>``."""
    draw: int
    """Number of prompts drawn from this task's stream before this one; seeds its rollouts."""
    row: Mapping[str, Any]
    """The row of the data set, which rewards and constraints read (``reference``, ``tests``, ...)."""
    text: str
    """The prompt as the model sees it, after template and chat template."""
    prompt_ids: list[int]
    """[P] token ids of ``text``; a conditioned prompt carries its control token here."""
    is_conditioned: bool = False
    """``Algorithm.condition`` has changed ``prompt_ids``; so it does the other contexts of an episode."""
    is_cut: bool = False
    """It was too long: ``prompt_ids`` lacks its beginning (held-out prompts only)."""
    given_ids: list[int] | None = None
    """[T] the row's answer, which is trained on (type ``sft``); None = a response is sampled."""
    position: int = 0
    """Index in its batch. Responses end in any order; the batch is sorted by this index."""

    @property
    def row_id(self) -> str:
        """The row's id in its data set: ``prompt_id`` without the task's name, which a user may change."""
        return self.prompt_id.removeprefix(f"{self.task}/")

    @property
    def group_id(self) -> str:
        """Identifier of its group: equal for all rollouts of one draw of one prompt."""
        return f"{self.task}#{self.draw}"


@dataclass(kw_only=True, slots=True)
class Turn:
    """One answer of the actor in an episode, and what its world said before it."""

    num_tokens: int
    """Tokens of the answer: its part of the rollout's ``response_ids``."""
    given_ids: list[int] = field(default_factory=list)
    """[G] tokens between the answer before and this one, which the actor did not sample; empty in the first
    turn, whose world has spoken in the prompt."""
    context_ids: list[int] | None = None
    """[C] the whole context of the answer, where it is not the tokens before: the chat template has rewritten
    the conversation. The episode is then more than one training sample."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What the world said before the answer, as chat messages; in the first turn those behind the prompt."""
    response: str = ""
    """The answer as text, as ``Rollout.response``."""
    finish_reason: str = "stop"
    """Why the answer ended; see ``Rollout.finish_reason``."""
    info: dict[str, Any] = field(default_factory=dict)
    """``StepResult.info`` of the world's reply to the answer."""
    reward: float | Mapping[str, float] | None = None
    """``StepResult.reward`` of the world's reply to the answer."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled response with the engine's exact tokens, or an episode of several answers (``turns``).

    ``response_ids`` and ``rollout_logprobs`` of an episode hold the tokens of all answers, one after the
    other. Tokens of the world are in ``turns`` only. So metrics and losses, which read the former, contain
    only tokens that the actor sampled.
    """

    prompt: Prompt
    sample: int
    """Index within the group of the prompt: 0 .. group_size - 1."""
    attempt: int = 0
    """Number of earlier responses of this sample that a constraint has rejected."""
    response_ids: list[int] = field(default_factory=list)
    """[T] sampled ids, with the end-of-sequence token if it was sampled."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """[T] nats, under the sampling distribution (with temperature, top-k, top-p)."""
    response: str = ""
    """Decoded text without special tokens and stop strings."""
    finish_reason: str = "stop"
    """``stop`` (end token or stop string), ``length``, ``flagged`` (ended by a streaming constraint, or a
    partial response that such a constraint judges) or ``error``. Of an episode that of its last answer, but
    ``length`` if a limit of the episode cut it."""
    policy_version: int = 0
    """Training steps that the weights had made when they sampled it; of an episode, its first turn."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    verdicts: dict[str, Verdict | Failure] = field(default_factory=dict)
    """Constraint -> its result."""
    rejected: bool = False
    """A constraint in mode ``reject`` rejected it; another attempt follows unless the attempts ran out."""
    failure: Failure | None = None
    """The engine or the world failed; there is no response to score."""
    turns: list[Turn] = field(default_factory=list)
    """The turns of an episode, at least one; empty for a task of one turn."""
    earned: float | Mapping[str, float] | None = None
    """What the environment gave the whole episode; None = unscored."""
    token_limit: int = 0
    """Most sampled tokens of the episode; 0 = no episode."""
    world_s: float = 0.0
    """Seconds of the calls of the episode's world, from order to answer; the wait for a worker counts."""
    world_failures: Mapping[str, int] = field(default_factory=dict)
    """How many tries at the episode have failed, by ``FailureKind``."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation after the prompt: what the world said, and the answers (role ``assistant``)."""
        answers = self.turns or [Turn(num_tokens=len(self.response_ids), response=self.response)]
        return [m for t in answers for m in (*t.messages, {"role": "assistant", "content": t.response})]

    def answers(self) -> list[Rollout]:
        """Return the answers of an episode as responses of one turn each, as constraints judge them."""
        ends = itertools.accumulate((turn.num_tokens for turn in self.turns), initial=0)
        return [
            replace(
                self,
                response=turn.response,
                finish_reason=turn.finish_reason,
                response_ids=self.response_ids[a:b],
                rollout_logprobs=self.rollout_logprobs[a:b],
                turns=[turn],
            )
            for turn, (a, b) in zip(self.turns, itertools.pairwise(ends), strict=True)
        ]

    @property
    def max_response_tokens(self) -> int:
        """Most tokens that ``response_ids`` may have."""
        return self.token_limit or self.sampling.max_new_tokens

    @property
    def num_given(self) -> int:
        """Tokens after the prompt that the actor did not sample."""
        return sum(len(turn.given_ids) for turn in self.turns)

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
        """``Prompt.group_id``."""
        return self.prompt.group_id

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: the place of the record in its batch."""
        return (self.prompt.position, self.sample, self.attempt)

    @property
    def is_truncated(self) -> bool:
        """The response hit the token limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """The sampled tokens of a stored response, as a reader sees them: rounded."""

    texts: Sequence[str]
    """[T]"""
    logprobs: Sequence[float]
    """[T] ``Rollout.rollout_logprobs``; empty = the actor did not sample the response."""
    advantages: float | Sequence[float] | None
    """[T], or the one value of all tokens; None = the step did not train on the response."""


@dataclass(kw_only=True, slots=True)
class Scored:
    """A rollout with the results of its rewards and constraints."""

    rollout: Rollout
    reward: float | None
    """Weighted sum of the applicable rewards minus penalties; of a task of constraints alone 1 - ``cost``.
    None = no reward: it failed (see ``failure``), or the response was rejected or is not scored."""
    breakdown: dict[str, RewardResult] = field(default_factory=dict)
    """Reward -> result that its plugin returned."""
    terms: Sequence[tuple[float, float]] = ()
    """(weight, value) of each summand of ``reward``: rewards (negative weight if lower is better), then
    penalties, in the same order in all records of a task; NaN = not applicable."""
    cost: float = 0.0
    """Largest cost, in [0, 1], of the constraints of one mode: ``lagrangian``; if the task has none,
    ``penalty`` with a weight; if it has none, ``reject``. 0 = none of them applies."""
    concerned: bool = True
    """False: none of the constraints behind ``cost`` applies, so the mean ``cost`` leaves the sample out."""
    failure: Failure | None = None
    """The first failure that made ``reward`` None."""
    tokens: TokenRecord | None = None
    """Set before trackers get the record; None = not set yet."""

    def check_reward(self) -> None:
        """Convert ``reward`` to a float unless it is None: a stage may have set a tensor or a NumPy number.

        Raises:
            ValueError: it is a text, NaN or infinite.
            TypeError: it is no number.
        """
        given: Any = self.reward
        if given is not None:
            self.reward = math.nan if isinstance(given, (str, bytes)) else float(given)
            if not math.isfinite(self.reward):
                raise ValueError(f"reward: expected a finite number, or None for no reward, got {given!r}")


def is_sum_of_terms(scored: Scored) -> bool:
    """Return whether the reward is the sum of ``terms``, but for rounding; True without terms."""
    applicable = [weight * value for weight, value in scored.terms if not math.isnan(value)]
    total = math.fsum(applicable)
    return not scored.terms or math.isclose(scored.reward or 0.0, total, rel_tol=1e-6, abs_tol=1e-9)


def concerned_cost(scored: Scored, constraint: str) -> float | None:
    """Return the cost of a record under ``constraint``; None if the constraint does not apply."""
    verdict = scored.rollout.verdicts.get(constraint)
    return verdict.cost if isinstance(verdict, Verdict) and verdict.applicable else None


@dataclass(kw_only=True, slots=True)
class TrainSample:
    """A scored rollout as the learner packs it."""

    scored: Scored
    prompt_ids: Sequence[int]
    """[P] the context of the loss; differs from the rollout's if the algorithm changes the conditioning."""
    response_ids: Sequence[int]
    """[T] the sampled tokens: loss, statistics and every number of an algorithm are over these alone."""
    rollout_logprobs: Sequence[float]
    """[T] nats; empty = the sample is not on-policy data, so it has no importance ratio."""
    reward: float = 0.0
    """Scalar outcome of the response."""
    ref_prompt_ids: Sequence[int] | None = None
    """Context for the reference policy: ``prompt_ids`` without the control token at its front, which the
    contexts of later turns have too; None = ``prompt_ids``."""
    turns: Sequence[Turn] = ()
    """Of an episode: where tokens of the world stand between those of ``response_ids``."""

    @property
    def task(self) -> str:
        """Name of the task it belongs to."""
        return self.scored.rollout.task

    @property
    def answers(self) -> list[Sequence[int]]:
        """``response_ids`` turn by turn."""
        ends = list(itertools.accumulate(turn.num_tokens for turn in self.turns)) or [len(self.response_ids)]
        return [self.response_ids[a:b] for a, b in itertools.pairwise([0, *ends])]

    def behind_prompt(self) -> tuple[Sequence[int], Sequence[int] | None]:
        """Return all tokens behind the prompt, and which of them are sampled: positions [T], None = all."""
        if not any(turn.given_ids for turn in self.turns):
            return self.response_ids, None
        tokens: list[int] = []
        sampled: list[int] = []
        for turn, answer in zip(self.turns, self.answers, strict=True):
            tokens += turn.given_ids
            sampled += range(len(tokens), len(tokens) + len(answer))
            tokens += answer
        return tokens[: sampled[-1] + 1] if sampled else [], sampled

    def split(self) -> list[TrainSample]:
        """Return the samples to train on: this one, cut before each turn that has its own context.

        Parts without a sampled token are left out.
        """
        starts = [i for i, turn in enumerate(self.turns) if turn.context_ids is not None]
        if not starts:
            return [self]
        parts = []
        num_control = 0 if self.ref_prompt_ids is None else len(self.prompt_ids) - len(self.ref_prompt_ids)
        ends = list(itertools.accumulate((turn.num_tokens for turn in self.turns), initial=0))
        for first, last in itertools.pairwise([0, *(i for i in starts if i), len(self.turns)]):
            context = self.turns[first].context_ids
            ref = self.ref_prompt_ids
            if context is not None:
                ref = context[num_control:] if num_control else None
            own = slice(ends[first], ends[last])
            parts.append(
                replace(
                    self,
                    prompt_ids=self.prompt_ids if context is None else context,
                    ref_prompt_ids=ref,
                    response_ids=self.response_ids[own],
                    rollout_logprobs=self.rollout_logprobs[own],
                    turns=self.turns[first:last],
                )
            )
        return [part for part in parts if part.response_ids]


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
    """A mean over a population, which ``statistics/definitions.py`` and docs/definitions.md define."""

    mean: float
    """Mean of the values; NaN = no value."""
    n: int
    """Number of values, without records that failed or to which the metric does not apply."""
    error: float
    """Standard error of the mean; NaN with fewer than two values."""
    direction: Direction = Direction.none
    low: float = -math.inf
    """Declared smallest possible value."""
    high: float = math.inf
    """Declared largest possible value."""
    values: Sequence[float] = field(default=(), repr=False)
    """[prompts] mean per prompt in the order of the evaluation, NaN = not applicable or failed; empty in
    training. Values of two evaluations of the same prompts are paired."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % normal interval of the mean; the mean alone if the error is NaN."""
        half = 1.96 * self.error if math.isfinite(self.error) else 0.0
        return self.mean - half, self.mean + half

    @property
    def score(self) -> float:
        """The mean, turned so that higher is better; NaN without a direction."""
        return self.mean * self.direction.sign if self.direction.sign else math.nan


OVERRUN = "overrun"
"""The only score component of a response that exceeds the time or memory limit of its check."""

NUM_EXTREMES = 3
"""Groups that must reach a reward before it counts as an end of an undeclared range."""


@dataclass(kw_only=True, slots=True)
class TaskStats:
    """Statistics of one task in one training step; input of schedulers."""

    task: str
    num_prompts: int
    """Groups scored this step (before filtering)."""
    num_informative: int
    """Learnable groups: rewards, or costs that have a multiplier above 0, differ within the group. The
    algorithm decides for groups of one reward, and for all groups of tasks that need no reward."""
    reward_mean: float
    """Mean reward over the step's slots, rejected ones included; NaN without slots."""
    num_trainable: int | None = None
    """Groups with a response that may be trained on: not failed; rejected only where the algorithm trains
    on rejected responses. None = all."""
    reward_std: float = 0.0
    """Mean over groups of the reward's standard deviation; NaN without a group of two."""
    headroom: float = math.nan
    """Mean over groups of the best reward minus the mean of the others; NaN without a group of two."""
    lowest: Sequence[float] = ()
    """The ``NUM_EXTREMES`` smallest of the groups' lowest rewards, ascending."""
    highest: Sequence[float] = ()
    """The ``NUM_EXTREMES`` largest of the groups' highest rewards, descending."""
    reward_range: tuple[float, float] | None = None
    """Declared ends of the reward of these slots, by the rewards and penalties that applied to them; None =
    without slots, or a weighted reward declares no range."""
    shift: float = 0.0
    """Mean reward of uniformly drawn prompts minus ``reward_mean``; 0 unless a curriculum draws."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Every other per-task number of the step by name (``length``, ``kl``, ``rejection_rate``...)."""
    statistics: Mapping[str, Statistic] = field(default_factory=dict)
    """Metrics that are means over the step's responses, with n, error and direction (``reward_mean``,
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
    """Hash of the prompts in their order: evaluations with the same hash are paired."""
    num_samples: int = 1
    """Responses per prompt; a value of a prompt is their mean."""
    num_failed: int = 0
    """Responses whose scoring failed; to others without a value the primary metric does not apply."""
    definitions: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what metrics are computed from (``statistics/definitions.py``); empty = not known."""
    metrics: Mapping[str, Statistic] = field(default_factory=dict)
    """Further metrics (``violation_rate``, ``reward/<name>``, ``length``...)."""

    @property
    def values(self) -> Sequence[float]:
        """[n] the primary metric per prompt, always in the same order; NaN = failed or not applicable."""
        return self.primary.values

    def statistic(self, metric: str = "") -> Statistic | None:
        """Return a metric by name (empty = the primary metric); None if the evaluation lacks it."""
        return self.metrics.get(metric) if metric else self.primary


def rename_tasks(
    by_task: Mapping[str, T], renamed: Mapping[str, str] | None, known: Collection[str] | None = None
) -> dict[str, T]:
    """Return ``by_task`` with renamed keys (``task``, ``task/...``); only of tasks ``known`` (None = all).

    A renamed task that takes the name of one that was removed earlier does not take its values.
    """
    renamed = renamed or {}
    gone = set(renamed.values()) - renamed.keys()
    own = {key: value for key, value in by_task.items() if key.partition("/")[0] not in gone}
    found = {rename_task(key, renamed): value for key, value in own.items()}
    return {key: value for key, value in found.items() if known is None or key in known}


def rename_task(key: str, renamed: Mapping[str, str] | None) -> str:
    """Return ``key`` (``task`` or ``task/...``) with the task's present name."""
    task, slash, rest = key.partition("/")
    return f"{(renamed or {}).get(task, task)}{slash}{rest}"


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """The rows that a task trains on, or is evaluated on."""

    task: str
    is_held_out: bool
    source: str
    """Name of the data set in the tasks file."""
    num_rows: int | None
    """Number of rows; None = streamed, so not known."""
    digest: Callable[[], str]
    """Computes a hash of all rows, which it reads; of a streamed data set, of the first rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One decision of the run, with its source, its reason and the numbers behind it."""

    step: int
    source: str
    """``scheduler``, ``guard``, ``kl``, ``multiplier``, ``rewards``, ``run``..."""
    kind: str
    """``reweight``, ``alarm``, ``rollback``, ``stop``, ``warn``..."""
    reason: str
    """One sentence for a person."""
    task: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the decision, JSON-able (metric, old, new, statistic)."""
