"""From quotas to the records of a step's update: attempts, verdicts, rewards, refill, kept groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from .records import Answer, Attempt
from .settings import FAILED, OVER, ConstraintRule, Settings, Task
from .words import ended

MOST_TRIES = 3
"""Times that an episode begins with a world that fails; then it is given up."""


Fit = Callable[[list[int]], "list[int] | None"]
"""A prompt as it is used; None: it is too long."""
Prices = Mapping[str, Mapping[str, float]]
"""Task -> lagrangian constraint -> its lambda."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a world answers."""

    ids: Sequence[int] = ()
    """Between the actor's answer and its next; with ``is_anew`` all that it reads before it."""
    is_anew: bool = False
    is_done: bool = False
    reward: float | Mapping[str, float] | None = None
    fails: bool = False
    limits: Sequence[tuple[Sequence[str], int]] = ()
    """Of the next answer: texts that end it beside those of the task, and its most tokens (0 = any)."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What rewards and constraints say of a response."""

    value: Callable[[str, str, int, int, int, Sequence[int]], float | str | None]
    """Of task, plugin, draw, sample, attempt, response: value, ``FAILED``, ``OVER``; None: not applicable."""
    part: Callable[[Attempt, str], float | None]
    """Response, reward -> the part of its score that has a name, if there is one."""


class Call(Protocol):
    """A call of a tool. ``problem``: how it counts if it is not one that can be made."""

    @property
    def tool(self) -> str: ...
    @property
    def problem(self) -> str: ...


class World(Protocol):
    """What a step cannot know of prompts, responses and worlds. ``place``: draw, sample, attempt."""

    def prompt(self, task: str, draw: int) -> list[int]: ...
    def given(self, task: str, draw: int) -> list[int]:
        """The row's own answer, with its end token."""
        ...

    def spell(self, token: int) -> tuple[str, bool]:
        """Return a token's text, and whether it is a special one."""
        ...

    def write(
        self,
        task: str,
        place: tuple[int, int, int],
        turn: int,
        version: int,
        context: list[int],
        most: int,
        purpose: str = "",
    ) -> Answer:
        """Return what the policy would write if no stop string ended it."""
        ...

    def hear(self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]) -> Said:
        """The world's reply to the answers so far; to none of them what it says first."""
        ...

    def calls(self, ids: Sequence[int]) -> Sequence[Call]:
        """Return the calls of tools that an answer holds."""
        ...

    def call(self, task: str, place: tuple[int, int, int], tried: int, made: list[str], call: Call) -> bool:
        """Make a call, and add it to those ``made``; return whether it raises."""
        ...

    def told(self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]) -> Said:
        """Return what the actor is told of the calls of its last answer."""
        ...

    def earned(
        self, task: str, place: tuple[int, int, int], tried: int, made: Sequence[str]
    ) -> float | Mapping[str, float] | str | None:
        """Return what a world of tools gives the episode; ``FAILED``: it raises."""
        ...


def is_violated(rule: ConstraintRule, ids: Sequence[int], cost: object) -> bool:
    """Whether a look at these tokens is due, and ends the response."""
    is_due = rule.stream_every > 0 and len(ids) % rule.stream_every == 0
    return is_due and isinstance(cost, float) and cost > 0.4


def judge(task: Task, attempt: Attempt, asked: Asked) -> None:
    """Ask every constraint; above 0.4 it is violated. A failing judge makes the record a failed one.

    An episode has the verdict of its worst answer. One that exceeds the limits of the check is as bad as any.
    A violation that ended the response counts, whatever the judge says of earlier answers.
    """
    for rule in task.constraints:
        place = attempt.draw, attempt.index, attempt.attempt
        said = [asked.value(task.name, rule.name, *place, answer.ids) for answer in attempt.answers]
        costs = [1.0 if x == OVER else float(x) for x in said if x is not None and x != FAILED]
        ends_it = attempt.finish == "flagged" and is_violated(rule, attempt.answers[-1].ids, said[-1])
        if FAILED in said and not ends_it:
            attempt.verdicts[rule.name] = FAILED
            attempt.failed = attempt.lost = True
        else:
            attempt.verdicts[rule.name] = (max(costs), max(costs) > 0.4) if costs else None
    attempt.refused = any(
        rule.mode == "reject" and isinstance(v := attempt.verdicts[rule.name], tuple) and v[1]
        for rule in task.constraints
    )


def score(task: Task, attempt: Attempt, asked: Asked) -> None:
    """Ask the rewards; a refused or failed attempt is not scored."""
    if attempt.refused or attempt.failed or not task.has_rewards:
        return
    place = attempt.draw, attempt.index, attempt.attempt
    for rule in task.rewards:
        if rule.is_of_world:  # nothing is no reward, unless a limit or a constraint cut the episode
            cut = 0.0 if attempt.finish in ("length", "flagged") else None
            earned = attempt.earned_by.get(rule.key) if rule.key else attempt.earned
            attempt.values[rule.name] = cut if earned is None else earned
            if earned is not None:
                attempt.parts |= {f"{rule.name}/{name}": x for name, x in attempt.earned_by.items()}
        else:
            value = asked.value(task.name, rule.name, *place, attempt.ids)
            part, name = asked.part(attempt, rule.name), "part"
            if value == OVER:
                value, part, name = rule.if_over, 1.0, "overrun"
                attempt.over |= {rule.name} if value != FAILED else set()
            attempt.values[rule.name] = value
            if part is not None and isinstance(value, float):
                attempt.parts[f"{rule.name}/{name}"] = part
    weighted = [rule for rule in task.rewards if rule.weight]
    said = [attempt.values[rule.name] for rule in weighted]
    if FAILED in said or (weighted and all(v is None for v in said)):
        attempt.failed = True
        return
    attempt.terms = [
        (rule.signed_weight, math.nan if v is None else float(v))
        for rule, v in zip(weighted, said, strict=True)
    ]
    costs = [rule for rule in task.constraints if not (rule.mode == "penalty" and rule.weight == 0.0)]
    if not task.rewards:
        attempt.reward = 1.0 - _cost(costs, attempt)
        return
    attempt.terms += [(-rule.weight, attempt.cost(rule.name)) for rule in costs if rule.mode == "penalty"]
    attempt.reward = math.fsum(w * v for w, v in attempt.terms if not math.isnan(v))


def _cost(rules: Sequence[object], attempt: Attempt) -> float:
    """Largest cost of the constraints of the first mode there is: lagrangian, penalty, reject."""
    value = overall_cost(rules, attempt)
    return 0.0 if math.isnan(value) else value


def overall_cost(rules: Sequence[object], attempt: Attempt) -> float:
    for mode in ("lagrangian", "penalty", "reject"):
        own = [attempt.cost(r.name) for r in rules if r.mode == mode]  # type: ignore[attr-defined]
        if own:
            return max((c for c in own if not math.isnan(c)), default=math.nan)
    return math.nan


def run_prompt(
    task: Task,
    draw: int,
    version: int,
    world: World,
    asked: Asked,
    fit: Fit,
    control: Sequence[int] = (),
    group_size: int | None = None,
    engine_fails: Callable[[str, int, int], bool] = lambda task, draw, index: False,
) -> list[Attempt]:
    """All attempts of all samples of one prompt; one that the engine lost is neither judged nor repeated."""
    most = max((r.max_attempts for r in task.constraints if r.mode == "reject"), default=1)
    found = []
    for index in range(group_size or task.group_size):
        for number in range(most):
            attempt = play(task, (draw, index, number), version, world, asked, fit, list(control))
            found.append(attempt)
            if number == 0 and attempt.finish != "flagged" and engine_fails(task.name, draw, index):
                attempt.lost = True
            if attempt.lost:
                attempt.failed = True
                break
            judge(task, attempt, asked)
            score(task, attempt, asked)
            if not attempt.refused:
                break
    return found


def given_answer(
    task: Task, draw: int, version: int, world: World, engine_fails: Callable[[str, int, int], bool]
) -> Attempt | None:
    """Return the row's answer, without reward and costs; None where it is longer than a response may be."""
    ids = world.given(task.name, draw)
    if len(ids) > task.max_new_tokens:
        return None
    answer = Answer(context=world.prompt(task.name, draw), ids=ids, logprobs=[], finish="stop")
    lost = engine_fails(task.name, draw, 0)
    own = {"task": task.name, "draw": draw, "index": 0, "attempt": 0, "version": version}
    return Attempt(**own, answers=[answer], finish="stop", lost=lost, failed=lost)  # type: ignore[arg-type]


def watched(task: Task, place: tuple[int, int, int], answer: Answer, asked: Asked, world: World) -> Answer:
    """The answer up to the first look at which a constraint is violated; none is at its end."""
    for length in range(1, len(answer.ids)):
        ids = answer.ids[:length]
        due = [c for c in task.constraints if c.stream_every and length % c.stream_every == 0]
        said = [asked.value(task.name, rule.name, *place, ids) for rule in due]
        if any(is_violated(rule, ids, cost) for rule, cost in zip(due, said, strict=True)):
            cut = ended(replace(answer, ids=ids, logprobs=answer.logprobs[:length]), [], world.spell)
            return replace(cut, finish="flagged")
    return answer


def play(
    task: Task,
    place: tuple[int, int, int],
    version: int,
    world: World,
    asked: Asked,
    fit: Fit,
    control: list[int],
) -> Attempt:
    """One response, or one episode: answers in turn with the world until it or a limit ends them.

    A world that fails ends the try; the last try may fail too, and the episode is lost. So it is, without
    another try, where what the world says first makes the prompt too long.
    """
    draw, index, number = place
    own = Attempt(
        task=task.name, draw=draw, index=index, attempt=number, version=version, answers=[], finish="stop"
    )
    if not task.max_turns:
        prompt = [*control, *(fit(world.prompt(task.name, draw)) or [])]
        written = world.write(task.name, place, 0, version, prompt, task.max_new_tokens)
        own.answers = [watched(task, place, ended(written, task.stop, world.spell), asked, world)]
        own.finish = own.answers[0].finish
        return own
    for tried in range(MOST_TRIES):
        own.answers, own.earned, own.finish = [], None, "error"
        own.made, own.facts, own.earned_by = [], Counter(), {}
        said = world.hear(task.name, place, tried, [])
        fitted = fit([*said.ids] if said.is_anew else [*world.prompt(task.name, draw), *said.ids])
        if fitted is None and not said.fails:
            break
        context = [*control, *(fitted or [])]
        while not said.fails:
            room = task.most_tokens - len(own.ids)
            is_cut = bool(own.answers) and (len(own.answers) >= task.max_turns or room < 1)
            is_flagged = bool(own.answers) and own.answers[-1].finish == "flagged"
            if said.is_done or is_cut or is_flagged:
                own.finish = own.answers[-1].finish if said.is_done or is_flagged else "length"
                if task.has_tools:
                    earned = world.earned(task.name, place, tried, own.made)
                    if isinstance(earned, str):
                        break
                    earn(own, earned)
                return own
            most = min([task.max_new_tokens, room, *(own for _, own in said.limits if own)])
            stops = [*task.stop, *(text for own, _ in said.limits for text in own)]
            written = world.write(task.name, place, len(own.answers), version, context, most)
            answer = watched(task, place, ended(written, stops, world.spell), asked, world)
            answer.is_anew = said.is_anew
            own.answers.append(answer)
            if answer.finish == "flagged":  # the world does not hear it
                continue
            if task.has_tools:
                said = use_tools(task, own, tried, world)
            else:
                said = world.hear(task.name, place, tried, own.answers)
            if not said.fails:
                earn(own, said.reward)
            context = [*control, *said.ids] if said.is_anew else [*context, *answer.ids, *said.ids]
    own.lost, own.finish = True, "error"
    return own


def earn(own: Attempt, reward: float | Mapping[str, float] | None) -> None:
    """Add what the world gives: a number, or numbers by name, whose sum counts."""
    if isinstance(reward, Mapping):
        own.earned_by |= {name: own.earned_by.get(name, 0.0) + x for name, x in reward.items()}
        reward = math.fsum(reward.values())
    if reward is not None:
        own.earned = (own.earned or 0.0) + reward


def use_tools(task: Task, own: Attempt, tried: int, world: World) -> Said:
    """Make the calls of the last answer in order; beyond the limit they are refused."""
    place = own.draw, own.index, own.attempt
    calls = world.calls(own.answers[-1].ids)
    for call in calls:
        if 0 < task.max_tool_calls <= len(own.made):
            own.facts["wrong_calls/over_limit"] += 1
        elif call.problem:
            own.facts[f"wrong_calls/{call.problem}"] += 1
        else:
            own.facts[f"tool_calls/{call.tool}"] += 1
            if world.call(task.name, place, tried, own.made, call):
                own.facts[f"tool_errors/{call.tool}"] += 1
    return world.told(task.name, place, tried, own.answers) if calls else Said(is_done=True)


def is_trainable(task: Task, attempt: Attempt) -> bool:
    """Whether the task's algorithm may learn from the attempt."""
    if attempt.lost:
        return False
    if attempt.refused:
        return task.type == "constrained_decoding"
    return not task.needs_reward or attempt.reward is not None


def outcome(task: Task, attempt: Attempt) -> float | None:
    """What the algorithm is credited; None: it has no reward to learn from."""
    if not is_trainable(task, attempt):
        return None
    if attempt.refused:
        return float(task.config["rejected_reward"])
    if attempt.reward is None:
        return None
    buffer = task.config.get("overlong_buffer", 0)
    if buffer:
        excess = len(attempt.ids) - (task.most_tokens - buffer)
        penalty = min(max(excess, 0) / buffer, 1.0)
        return attempt.reward - task.config["overlong_weight"] * penalty
    return attempt.reward


def groups_of(attempts: Sequence[Attempt]) -> dict[tuple[str, int], list[Attempt]]:
    found: dict[tuple[str, int], list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.group, []).append(attempt)
    return found


def credited_rewards(task: Task, group: Sequence[Attempt]) -> list[float]:
    return [r for a in group if (r := outcome(task, a)) is not None]


def differ(values: Sequence[float]) -> bool:
    """Whether values are not all equal; less than 1e-7 of their size is rounding."""
    return len(values) > 1 and max(values) - min(values) > 1e-7 * max(abs(v) for v in values)


def costs_differ(task: Task, group: Sequence[Attempt], prices: Prices) -> bool:
    """Whether a constraint that has a price tells the responses apart that it concerns."""
    trained = [a for a in group if outcome(task, a) is not None]
    for rule in task.constraints:
        if prices[task.name].get(rule.name, 0.0) > 0.0:
            costs = [c for a in trained if not math.isnan(c := a.cost(rule.name))]
            if differ(costs):
                return True
    return False


def is_informative(task: Task, group: Sequence[Attempt], prices: Prices) -> bool:
    """Whether the group gives the task's loss a gradient."""
    rewards = credited_rewards(task, group)
    if not task.needs_reward:
        return any(is_trainable(task, a) for a in group)
    if not rewards:
        return False
    if task.type in ("ppo", "gdpo", "reward_conditioned"):
        return True
    if task.type == "reinforce_pp" and not task.config["group_baseline"]:
        return True
    return differ(rewards) or costs_differ(task, group, prices)


def has_spread(task: Task, group: Sequence[Attempt], prices: Prices) -> bool:
    """What schedulers call learnable: rewards differ, or costs do; of one response the algorithm's word."""
    rewards = credited_rewards(task, group)
    if len(rewards) > 1 and task.needs_reward:
        return differ(rewards) or costs_differ(task, group, prices)
    return is_informative(task, group, prices)


def missing(
    settings: Settings,
    drawn: Sequence[Attempt],
    quotas: Mapping[str, int],
    late: Mapping[str, int],
    rate_of: Callable[[str], float],
    prices: Prices,
) -> dict[str, int]:
    """Prompts of another round: what lacks over the share of groups that give a gradient, at most three each.

    The share is this step's together with four groups of the smoothed one; under 5 % nothing is tried.
    """
    wanted = {}
    groups = groups_of(drawn)
    for task in settings.tasks:
        own = [g for (name, _), g in groups.items() if name == task.name]
        if not own:
            continue
        found = sum(is_informative(task, g, prices) for g in own)
        lacks = quotas[task.name] - found - late.get(task.name, 0)
        rate = (found + 4.0 * rate_of(task.name)) / (len(own) + 4.0)
        if lacks > 0 and rate >= 0.05:
            wanted[task.name] = math.ceil(lacks * min(1.0 / rate, 3.0) - 1e-9)
    return wanted


def keep(
    settings: Settings,
    drawn: Sequence[Attempt],
    quotas: Mapping[str, int],
    betas: Mapping[str, float],
    prices: Prices,
) -> list[Attempt]:
    """Each task's quota of groups: those with a gradient first, in order of drawing.

    With a KL or entropy term no group is passed over: all of them up to the last one that the quota of
    informative ones needs.
    """
    kept = []
    groups = groups_of(drawn)
    names = list(dict.fromkeys(name for name, _ in groups))
    for name in names:
        task, quota = settings[name], quotas[name]
        own = [g for (n, _), g in groups.items() if n == name]
        good = [g for g in own if is_informative(task, g, prices)]
        rest = [g for g in own if not is_informative(task, g, prices)]
        if betas[name] > 0.0 or task.config["entropy_coefficient"] > 0.0:
            chosen = own if len(good) < quota else own[: own.index(good[quota - 1]) + 1] if quota else []
        else:
            chosen = (good + rest)[:quota]
        kept += [a for group in chosen for a in group]
    return kept
