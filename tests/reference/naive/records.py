"""What passes through a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Answer:
    """What the policy wrote in one go: a whole response, or its part of an episode."""

    context: list[int]
    """Everything before it."""
    ids: list[int]
    logprobs: list[float]
    finish: str
    is_anew: bool = False
    """Its context is not what was before, as the world began the conversation anew."""
    text: str = ""
    """As worlds and rewards read it."""


@dataclass(kw_only=True)
class Attempt:
    """One response to one prompt; a sample has several where a constraint refused the earlier ones."""

    task: str
    draw: int
    index: int
    attempt: int
    answers: list[Answer]
    """One, or those of an episode."""
    finish: str
    version: int
    earned: float | None = None
    """What the world of an episode gave: the sum."""
    earned_by: dict[str, float] = field(default_factory=dict)
    """Its parts with names."""
    made: list[str] = field(default_factory=list)
    """Calls of tools that were made, those that raised included."""
    facts: Counter[str] = field(default_factory=Counter)
    """Calls by name, and those that were refused by kind."""
    lost: bool = False
    """The engine, the world or a judge failed: no update uses the response."""
    verdicts: dict[str, tuple[float, bool] | str | None] = field(default_factory=dict)
    """Constraint -> cost and violated, ``FAILED``, or None where it does not concern the response."""
    refused: bool = False
    failed: bool = False
    values: dict[str, float | str | None] = field(default_factory=dict)
    """Reward -> value."""
    parts: dict[str, float] = field(default_factory=dict)
    """``reward/part`` -> value."""
    over: set[str] = field(default_factory=set)
    """Rewards whose check it exceeds."""
    reward: float | None = None
    terms: list[tuple[float, float]] = field(default_factory=list)
    """Weight and value of each summand of the reward; NaN where it is not applicable."""

    @property
    def ids(self) -> list[int]:
        return [i for answer in self.answers for i in answer.ids]

    @property
    def group(self) -> tuple[str, int]:
        return self.task, self.draw

    @property
    def slot(self) -> tuple[str, int, int]:
        return self.task, self.draw, self.index

    @property
    def name(self) -> tuple[str, int, int, int]:
        return self.task, self.draw, self.index, self.attempt

    def cost(self, constraint: str) -> float:
        """Cost under a constraint; NaN where there is none."""
        verdict = self.verdicts.get(constraint)
        return verdict[0] if isinstance(verdict, tuple) else math.nan


@dataclass(kw_only=True)
class Sample:
    """What an update learns from. Lists and tensors [T] are over the tokens that the policy wrote."""

    task: str
    group: tuple[str, int]
    name: tuple[str, int, int, int]
    answers: list[Answer]
    """With the contexts that the loss reads."""
    ids: list[int]
    reward: float
    rollout_logprobs: list[float] | None
    """None: not sampled by the policy."""
    num_control: int = 0
    """Tokens at the front of every context that a reference does not read."""
    is_masked: bool = False
    """Its tokens are not in the loss, nor in the number of tokens that divides it."""
    is_choice: list[bool] = field(default_factory=list)
    """[T] False: a grammar forced the token."""
    fraction: float = 1.0
    """Of a sample, as a part of an episode that began anew is less than one."""
    terms: list[tuple[float, float]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    """One per multiplier; NaN where the constraint does not concern the response."""
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    is_active: bool = True
    """False: the loss is known not to depend on it; it counts in the denominator only."""

    @property
    def num_counted(self) -> int:
        """Tokens in the loss."""
        return 0 if self.is_masked else sum(self.is_choice)

    def take(self, places: Sequence[int]) -> Sample:
        """The same with the tokens at ``places`` alone."""
        index = torch.tensor(places, dtype=torch.long)
        tensors = ("advantages", "old_logprobs", "reference_logprobs", "old_values", "returns")
        own = {name: value[index] for name in tensors if (value := getattr(self, name)) is not None}
        logprobs = self.rollout_logprobs
        return replace(
            self,
            ids=[self.ids[i] for i in places],
            is_choice=[self.is_choice[i] for i in places],
            rollout_logprobs=None if logprobs is None else [logprobs[i] for i in places],
            **own,
        )

    def parts(self) -> list[Sample]:
        """A sample for each conversation of an episode, weighing by its tokens in the loss."""
        found: list[Sample] = []
        end = 0
        for answer in self.answers:
            end += len(answer.ids)
            if answer.is_anew or not found:
                found.append(replace(self.take([]), answers=[]))
            answers = [*found[-1].answers, answer]
            found[-1] = replace(
                self.take(range(end - sum(len(a.ids) for a in answers), end)), answers=answers
            )
        total = self.num_counted
        for part in found:
            part.fraction = part.num_counted / total if total else len(part.ids) / len(self.ids)
        return [part for part in found if part.ids]


@dataclass(frozen=True, kw_only=True)
class Number:
    """A metric: mean over its own population, size of it, standard error, which way is better."""

    mean: float
    n: int
    error: float
    direction: str
    by_prompt: Mapping[object, float] = field(default_factory=dict)
    """Those without a value may be missing."""


def number(
    values: Sequence[float],
    prompts: Sequence[object],
    direction: str,
    ends: tuple[float, float] | None,
) -> Number | None:
    """Mean of the finite values with its standard error; None where there are none.

    Prompts are independent, responses to one prompt are not: the error of a ratio of sums over prompts.
    A rate (values at the two ends of the range only; 0 and 1 where none is declared; not without an upper
    end) has at least the error with two more events and two more non-events.
    """
    known = [(v, p) for v, p in zip(values, prompts, strict=True) if math.isfinite(v)]
    if not known:
        return None
    n = len(known)
    mean = math.fsum(v for v, _ in known) / n
    excess: dict[object, float] = {}
    for v, p in known:
        excess[p] = excess.get(p, 0.0) + v - mean
    units = len(excess)
    error = math.nan
    if units > 1:
        error = math.sqrt(units / (units - 1) * math.fsum(x * x for x in excess.values())) / n
    low, high = ends or (0.0, 1.0)
    if low < high < math.inf and all(v in (low, high) for v, _ in known):
        events = sum(v == high for v, _ in known)
        rate = (events + 2) / (n + 4)
        least = (high - low) * math.sqrt(rate * (1.0 - rate) / (n + 4))
        error = least if math.isnan(error) else max(error, least)
    means = {p: math.fsum(v for v, q in known if q == p) / sum(q == p for _, q in known) for _, p in known}
    return Number(mean=mean, n=n, error=error, direction=direction, by_prompt=means)
