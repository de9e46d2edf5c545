"""One training step after the other, from task weights to new weights."""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .controllers import KL, Multiplier, Scheduler, Seen
from .credit import CreditState, credit
from .experience import (
    Asked,
    Prices,
    World,
    credited_rewards,
    given_answer,
    groups_of,
    is_informative,
    is_trainable,
    keep,
    missing,
    outcome,
    run_prompt,
)
from .guard import ActingGuard, Guard
from .loss import (
    TokenSums,
    allowed_tokens,
    can_matter,
    exact_kl,
    minibatches,
    outputs,
    token_losses,
    token_weights,
    values_of,
)
from .model import before_each_token, logits_of, merged, scores_of
from .optimizer import AdamW, clipped, schedule
from .pools import Pools
from .quantiles import check_draws
from .records import Answer, Attempt, Number, Sample, number
from .renaming import renamed
from .settings import Anchor, Settings, Task
from .statistics import (
    Refused,
    applied_ranges,
    describe,
    majority,
    primary,
    shown_by_group,
    solved_rates,
    step_statistics,
)
from .words import ended

T = TypeVar("T")


class Teacher:
    """Says with which gradients and weights to go on after each update; by default with one's own."""

    def gradients(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return own

    def weights(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return own


@dataclass(kw_only=True)
class Given:
    """What a step cannot know: the world, and choices made by chance."""

    world: World
    asked: Asked
    shuffle: Callable[[str, int, int, int], list[int]]
    """(task, step, epoch, number of samples) -> their order."""
    ranks: Mapping[str, int]
    is_late: Callable[[str, int], int] = lambda task, draw: 0
    """How many steps after its sampling a group is scored."""
    engine_fails: Callable[[str, int, int], bool] = lambda task, draw, index: False
    """Whether the first attempt of a sample was lost."""
    past: Sequence[Mapping[str, Seen]] = ()
    """What the scheduler has seen before the first step, as from a longer run."""
    held_out: dict[str, int] = field(default_factory=dict)
    """Number of held-out prompts of each task."""
    held_out_world: World | None = None
    confirming_world: Callable[[str], World] | None = None
    """The same with the random numbers of the confirmation of that name."""
    read: Callable[[Attempt, str], str] = lambda attempt, reward: ""
    """Response, reward -> the answer that the reward reads in it."""
    teachers: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Weights of the teacher of each task that has one."""
    replay: Callable[[str], list[tuple[tuple[int, int], int]]] = lambda task: []
    """task -> what chance drew from its buffer in this step: draw and sample, quantile."""
    order: Callable[[str], list[int]] = lambda task: []
    """task -> its rows in the order of their first draws, where a curriculum chooses."""
    column: Callable[[str], Mapping[int, float | str] | None] = lambda task: None
    """task -> the column that sorts its rows into pools; None: the pass rate does."""
    chosen: dict[str, dict[int, int]] = field(default_factory=dict)
    """Task with a curriculum -> row of each draw, told by the run."""
    kept: Callable[[int], Sequence[bool]] = lambda width: [True] * width
    """Width of an adapter's input -> what dropout leaves of it."""
    compared: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """Task -> ``grad_norm`` and cosines that the product found in this step."""


@dataclass(kw_only=True)
class Update:
    """One optimizer step."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    loss: float


@dataclass(kw_only=True)
class Result:
    """What a step did."""

    quotas: dict[str, int]
    shares: dict[str, float]
    drawn: list[Attempt]
    kept: list[Attempt]
    samples: list[Sample]
    updates: list[Update]
    metrics: dict[str, dict[str, float]]
    numbers: dict[str, dict[str, Number]]
    margin: float
    """How close the closest discontinuous decision was."""
    parts: dict[str, Tensor]
    """Each task's part of the actor's gradient in the first update, where the step compares them."""


@dataclass(kw_only=True)
class Checkpoint:
    version: int
    is_good: bool | None
    """None: its weights were not judged."""
    score: float | None
    score_of: list[str]
    """What the score is the mean of: scores of something else are not compared with it."""
    state: dict[str, object]
    """Attribute of the run -> value."""


OF_A_CHECKPOINT = ("weights", "refused", "step_number", "version", "scheduler", "optimizer", "credit_states")
OF_A_CHECKPOINT += ("kls", "multipliers", "draws", "buffers", "reference", "pools", "written", "evaluated_at")
OF_A_CHECKPOINT += ("left_out", "unmeasured", "measured_by", "definitions", "types")
OF_A_TASK = ("refused", "credit_states", "kls", "multipliers", "draws", "left_out", "buffers", "pools")
OF_A_TASK += ("written",)
"""Attributes with a value per task."""


@dataclass
class Batch:
    began: int
    """Step in which it was sampled."""
    shares: dict[str, float]
    quotas: dict[str, int]
    attempts: list[Attempt]
    drawn_before: dict[str, int]
    """Prompts that each task had drawn."""
    left_out_before: dict[str, int]
    moved: dict[str, float]
    """What its quotas took from, or added to, what each task is owed."""


@dataclass
class Run:
    settings: Settings
    given: Given
    weights: dict[str, Tensor]
    """Of actor and critic (names under ``critic.``)."""
    noise: float = 0.0
    """Relative deviation of noise on the weights of every forward pass and on advantages: 0, or what a
    precision rounds by, which shows how far rounding alone moves the results."""

    def __post_init__(self) -> None:
        self.step_number = self.version = 0
        self.begin_tasks()
        self.scheduler = Scheduler(self.settings, self.given.ranks)
        self.optimizer = AdamW(self.settings)
        self.first_weights = dict(self.weights)
        """Of each part of the models when it was added."""
        self.ahead: deque[Batch] = deque()
        self.late: list[tuple[int, list[Attempt]]] = []
        """Step at which it is scored, group."""
        own = {n: w.clone() for n, w in self.weights.items() if not n.startswith("critic.")}
        self.reference = self.initial = dict(merged(own))
        self.margins: list[float] = []
        self.guard = Guard(*self.watched())
        if self.settings.acting:
            self.guard = ActingGuard(*self.watched(), self.settings.acting)
        self.guard.refit(*self.watched(), self.measured_by)
        self.evaluations = 0
        self.evaluated_at = self.saved_at = -1
        self.known: tuple[int, float | None, bool | None, list[str]] = (-1, None, None, [])
        """Step, score, verdict and what the score is of, of the weights that were evaluated last."""
        self.num_confirmations = 0
        self.checkpoints: dict[int, Checkpoint] = {}
        """By step."""
        self.speakers = {self.fingerprint(): 0}
        """Weights -> the newest version that had them."""
        self.unmeasured: list[str] = []
        """Tasks and anchors of which the run has no evaluation yet."""
        self.looks: dict[str, Number] = {}
        """Their first evaluation, where none of all is due."""
        for seen in self.given.past:
            self.scheduler.observe(seen)
        self.parts: dict[str, Tensor] | None = None

    def watched(self) -> tuple[list[str], list[str]]:
        """What the guard watches, and what of it begins at 0."""
        anchors = self.settings.anchors
        names = [t.name for t in self.settings.tasks if not t.is_reported] + [a.name for a in anchors]
        return [*names, *self.settings.watched], [f"{a.name}/kl" for a in anchors]

    def begin_tasks(self) -> None:
        """Let every task begin."""
        self.refused: dict[str, Refused] = {t.name: {} for t in self.settings.tasks}
        self.credit_states = {t.name: CreditState() for t in self.settings.tasks}
        self.measured_by: dict[str, object] = {t.name: t.measured_by() for t in self.settings.tasks}
        """Task or ``task/metric`` -> what its values are of."""
        for key in self.settings.watched:
            name, _, metric = key.partition("/")
            if name in self.measured_by:
                self.measured_by[key] = self.settings[name].measured_by(metric)
        self.definitions = {t.name: t.definitions for t in self.settings.tasks}
        self.types = {t.name: t.type for t in self.settings.tasks}
        self.kls = {t.name: KL(t, t.kl_coefficient) for t in self.settings.tasks}
        self.multipliers = {
            t.name: [Multiplier(c) for c in t.constraints if c.mode == "lagrangian"]
            for t in self.settings.tasks
        }
        self.draws = {t.name: 0 for t in self.settings.tasks}
        self.left_out = {t.name: 0 for t in self.settings.tasks}
        """Prompts, and given answers, that were too long."""
        self.buffers: dict[str, list[Attempt]] = {t.name: [] for t in self.settings.tasks}
        late_steps = self.settings.max_staleness if self.settings.quorum < 1.0 else 0
        self.pools = {
            t.name: Pools(t.curriculum, self.given.order(t.name), self.given.column(t.name), late_steps)
            for t in self.settings.tasks
            if t.curriculum
        }
        self.written: dict[str, dict[int, list[int]]] = {a.name: {} for a in self.settings.anchors}
        """What the actor wrote for an anchor without given texts."""

    @property
    def lag(self) -> int:
        """Steps for which is sampled ahead; a quorum keeps one update of the bound for late groups."""
        return max(0, self.settings.max_staleness - (self.settings.quorum < 1.0))

    @property
    def many_updates(self) -> bool:
        return self.settings.num_minibatches * self.settings.num_epochs > 1

    # ------------------------------------------------------------------ experience

    def fit(self, prompt: list[int]) -> list[int] | None:
        """The prompt of a step, as it is."""
        return prompt if len(prompt) <= self.settings.max_prompt_tokens else None

    def shortened(self, prompt: list[int]) -> list[int]:
        """A held-out prompt, of which the end is kept."""
        return prompt[-self.settings.max_prompt_tokens :]

    def draw(self, counts: Mapping[str, int]) -> list[Attempt]:
        found = []
        for task in self.settings.trained:
            left = counts.get(task.name, 0)
            while left:
                number = self.draws[task.name]
                self.draws[task.name] += 1
                if task.name in self.pools and number not in self.given.chosen[task.name]:
                    rows = self.pools[task.name].next(left, number)
                    self.given.chosen[task.name] |= dict(enumerate(rows, number))
                control = []
                if self.fit(self.given.world.prompt(task.name, number)) is None:
                    self.left_out[task.name] += 1
                    continue
                if task.type == "sft":
                    given = given_answer(
                        task, number, self.version, self.given.world, self.given.engine_fails
                    )
                    found += [given] if given else []
                    left -= given is not None
                    self.left_out[task.name] += given is None
                    continue
                left -= 1
                if task.type == "reward_conditioned" and self.buffers[task.name]:
                    control = [self.settings.first_control_token + task.config["quantiles"] - 1]
                found += run_prompt(
                    task,
                    number,
                    self.version,
                    self.given.world,
                    self.given.asked,
                    self.fit,
                    control,
                    engine_fails=self.given.engine_fails,
                )
        return found

    def split_late(
        self, attempts: list[Attempt], began: int
    ) -> tuple[list[Attempt], list[tuple[int, list[Attempt]]]]:
        """Groups that are scored when the quorum is reached, and those that come later, with the step."""
        groups = groups_of([a for a in attempts if self.settings[a.task].type != "sft"])
        needed = math.ceil(self.settings.quorum * len(groups) - 1e-9)
        # what waits is a reward, and refused responses have none
        asked = [name for name, own in groups.items() if any(not a.refused for a in own)]
        due = {g: began + self.given.is_late(*g) for g in asked}
        waiting = [g for g in asked if self.settings.quorum < 1.0 and due[g] > self.step_number]
        waiting = waiting[max(0, needed - (len(groups) - len(waiting))) :]
        return [a for a in attempts if a.group not in waiting], [(due[g], groups[g]) for g in waiting]

    def experience(self) -> tuple[Batch, list[Attempt], list[Attempt]]:
        """Return quotas, everything drawn, and what is kept."""
        settings = self.settings
        stop = settings.max_steps
        for every in (settings.eval_every, settings.checkpoint_every):
            if every:  # what is sampled does not reach over an evaluation or a checkpoint
                stop = min(stop, (self.step_number // every + 1) * every)
        last = min(self.step_number + self.lag, stop - 1)
        while self.step_number + len(self.ahead) <= last:
            shares, before, draws = self.scheduler.shares(), self.scheduler.carry, dict(self.draws)
            left_out = dict(self.left_out)
            quotas = self.scheduler.quotas()
            moved = {n: x - before.get(n, 0.0) for n, x in self.scheduler.carry.items()}
            self.ahead.append(
                Batch(self.step_number, shares, quotas, self.draw(quotas), draws, left_out, moved)
            )
        batch = self.ahead.popleft()
        quotas = batch.quotas
        drawn, late = self.split_late(batch.attempts, batch.began)
        if self.lag == 0:
            for _ in range(settings.refill_rounds):
                open_groups = _count(g[0].task for _, g in late)
                rate_of = self.scheduler.informative_rate
                more = missing(settings, drawn, quotas, open_groups, rate_of, self.prices)
                if not more:
                    break
                found, later = self.split_late(self.draw(more), self.step_number)
                drawn, late = drawn + found, late + later
        betas = {name: kl.beta for name, kl in self.kls.items()}
        kept = keep(settings, drawn, quotas, betas, self.prices)
        entitled = dict(quotas)
        waiting, dropped = [], Counter[str]()
        for due, group in self.late:
            task, version = group[0].task, group[-1].version
            if self.version - version > settings.max_staleness:
                entitled[task] += 1  # given up, and owed
                dropped[task] += 1
            elif due <= self.step_number:
                entitled[task] += 1
                drawn, kept = drawn + group, kept + group
            else:
                waiting.append((due, group))
        for due, group in late:
            entitled[group[0].task] -= 1
            waiting.append((due, group))
        self.late = waiting
        self.settle(kept, entitled, dropped)
        return batch, drawn, kept

    def reopen(self) -> None:
        """Go on from a checkpoint: it leaves out what is sampled ahead, and owes late groups."""
        for name, pools in self.pools.items():
            if self.ahead and self.ahead[0].drawn_before[name] < self.draws[name]:
                first = self.ahead[0].drawn_before[name]
                pools.undo(first)
                for draw in range(first, self.draws[name]):
                    del self.given.chosen[name][draw]
            pools.forget_late()
        if self.ahead:
            self.draws = dict(self.ahead[0].drawn_before)
            self.left_out = dict(self.ahead[0].left_out_before)
        for batch in self.ahead:
            for name, x in batch.moved.items():
                self.scheduler.carry[name] -= x
        self.ahead.clear()
        self.scheduler.carry_over(_count(group[0].task for _, group in self.late))
        self.late = []
        if self.settings.acting:
            self.save()

    def refit(self, given: Given, weights: Mapping[str, Tensor]) -> None:
        """Go on with the tasks that the settings have now; ``weights`` begin what a model gets for new ones.

        New tasks begin afresh, and what was known of those that are gone is dropped.
        """
        self.given = given
        first = self.first_weights
        self.first_weights = {
            n: first[n] if n in first and first[n].shape == w.shape else w for n, w in weights.items()
        }
        redefined = self.fit_state()
        self.guard.refit(*self.watched(), self.measured_by)
        if isinstance(self.guard, ActingGuard):
            self.guard.forget_rewards(redefined)
            self.guard.forget_all_but([task.name for task in self.settings.trained])

    def fit_state(self) -> list[str]:
        """Fit what a checkpoint holds to the present tasks; return those whose reward is another one."""
        before, measured_by = {key: getattr(self, key) for key in OF_A_TASK}, self.measured_by
        definitions, types = self.definitions, self.types
        self.begin_tasks()
        for key, own in before.items():
            now = getattr(self, key)
            if key not in ("multipliers", "kls", "pools"):
                now |= {name: value for name, value in own.items() if name in now}
        fresh = []
        for task in self.settings.tasks:
            if task.name in definitions:
                is_fresh = self.fit_task(task, before, definitions[task.name], types[task.name])
                fresh += [task.name] if is_fresh else []
        known = [*before["refused"], *before["written"]]
        names = [owner.name for owner in [*self.settings.tasks, *self.settings.anchors]]
        changed = [n for n in names if n in self.measured_by and measured_by.get(n) != self.measured_by[n]]
        self.unmeasured = [n for n in names if n not in known or n in [*changed, *self.unmeasured]]
        self.scheduler = self.scheduler.refit(self.given.ranks, fresh)
        self.weights = fitted(self.weights, self.first_weights)
        first = merged({n: w for n, w in self.first_weights.items() if not n.startswith("critic.")})
        self.reference, self.initial = fitted(self.reference, first), fitted(self.initial, first)
        self.begin_reference()
        self.optimizer.fit(self.first_weights)
        self.speakers[self.fingerprint()] = self.version
        return fresh

    def begin_reference(self) -> None:
        """Let the averaged reference begin with the first task that needs it."""
        if not any(t.kl_coefficient for t in self.settings.trained if t.name in self.scheduler.prior):
            self.reference = self.initial

    def fit_task(
        self, task: Task, before: Mapping[str, Any], definitions: Mapping[str, object], former_type: str
    ) -> bool:
        """Let what is of other settings begin afresh; return whether the reward is another one.

        ``before``: attributes of the run at the checkpoint; ``definitions`` and type are the task's then.
        """
        name, now = task.name, task.definitions
        redefined = {key for key in now if key in definitions and definitions[key] != now[key]}
        is_fresh = "reward" in redefined
        if name in before["pools"] and name in self.pools:
            if is_fresh:
                self.pools[name].last = before["pools"][name].last
            else:
                self.pools[name] = before["pools"][name]
        kl = before["kls"][name]
        if task.kl_target is not None and kl.start == task.kl_coefficient:
            self.kls[name].beta = kl.beta
        former = {m.rule.name: m for m in before["multipliers"][name]}
        for m in self.multipliers[name]:
            if f"rule/{m.rule.name}" not in redefined and m.rule.name in former:
                m.go_on(former[m.rule.name])
        if former_type != task.type:
            self.credit_states[name], self.buffers[name] = CreditState(), []
        state = self.credit_states[name]
        kept = [f"cost/{m.rule.name}" for m in self.multipliers[name] if m.rule.name in former]
        kept = [key for key in kept if f"rule{key.removeprefix('cost')}" not in redefined]
        state.scales = {key: own for key, own in state.scales.items() if key in ["reward", *kept]}
        if is_fresh:
            self.buffers[name] = []
            state.forget_rewards()
        if any(key in ("", "reward") or key.startswith("reward/") for key in redefined):
            self.refused[name] = {}
        known = ["reward", "primary", *(r.name for r in task.rewards)]
        self.refused[name] = {k: x for k, x in self.refused[name].items() if k.partition("/")[0] in known}
        return is_fresh

    def rename(self, names: Mapping[str, str]) -> None:
        """Go on with tasks of other names, former name -> name; ``settings`` and ``given`` have them."""
        for key, value in vars(self).items():
            if key not in ("settings", "given"):
                setattr(self, key, renamed(value, names))
        saved = [c.state["scheduler"] for c in self.checkpoints.values()]
        for scheduler in [self.scheduler, *saved]:
            scheduler.ranks = self.given.ranks  # type: ignore[attr-defined]

    def settle(
        self, kept: Sequence[Attempt], entitled: Mapping[str, int], dropped: Mapping[str, int]
    ) -> None:
        """Owe every task the groups of its quota without a gradient, but not one that has next to none.

        Without refill, owe those ``dropped`` alone.
        """
        if not self.settings.refill_rounds:
            self.scheduler.carry_over(dropped)
            return
        short = {}
        for task in self.settings.trained:
            lacks = entitled[task.name] - self.num_informative(task, kept)
            if lacks > 0 and self.scheduler.informative_rate(task.name) >= 0.05:
                short[task.name] = lacks
        self.scheduler.carry_over(short)

    @property
    def prices(self) -> Prices:
        return {name: {m.rule.name: m.value for m in own} for name, own in self.multipliers.items()}

    def num_informative(self, task: Task, attempts: Sequence[Attempt]) -> int:
        own = groups_of([a for a in attempts if a.task == task.name])
        return sum(is_informative(task, g, self.prices) for g in own.values())

    # ------------------------------------------------------------------ credit

    def samples_of(self, kept: Sequence[Attempt]) -> list[Sample]:
        found = []
        for task in self.settings.tasks:
            own = [a for a in kept if a.task == task.name and is_trainable(task, a)]
            chosen = (
                self.replayed(task.name, own) if task.type == "reward_conditioned" else [(a, -1) for a in own]
            )
            for a, quantile in chosen:
                reward = outcome(task, a)
                first = self.settings.first_control_token
                control = [first + quantile] if task.type == "reward_conditioned" else []
                answers = []
                for answer in a.answers:
                    plain = [i for i in answer.context if i < first]
                    answers.append(replace(answer, context=[*control, *plain]))
                is_choice = [True] * len(a.ids)
                if task.sentences is not None and task.type != "ppo":
                    is_choice = [
                        len(allowed) > 1
                        for answer in answers
                        for allowed in allowed_tokens(self.settings, task.sentences, answer.ids)
                    ]
                is_sampled = task.type not in ("reward_conditioned", "sft")
                found.append(
                    Sample(
                        task=task.name,
                        group=a.group,
                        name=a.name,
                        answers=answers,
                        ids=a.ids,
                        reward=0.0 if reward is None else reward,
                        rollout_logprobs=[x for own in answers for x in own.logprobs] if is_sampled else None,
                        num_control=len(control),
                        is_masked=task.config["mask_truncated"] and a.finish == "length",
                        is_choice=is_choice,
                        terms=list(a.terms) or [(w, math.nan) for w, _ in self.empty_terms(task.name)],
                        costs=[a.cost(m.rule.name) for m in self.multipliers[task.name]],
                    )
                )
        return found

    def empty_terms(self, name: str) -> list[tuple[float, float]]:
        task = self.settings[name]
        if not task.rewards:  # the reward is 1 less the largest cost, no sum
            return []
        rewards = [(r.signed_weight, math.nan) for r in task.rewards if r.weight]
        return rewards + [(-c.weight, math.nan) for c in task.constraints if c.mode == "penalty" and c.weight]

    def replayed(self, name: str, own: Sequence[Attempt]) -> list[tuple[Attempt, int]]:
        """Samples drawn from the buffer; what chance drew is given, and has to be a possible draw."""
        task, buffer = self.settings[name], self.buffers[name]
        buffer += own
        del buffer[: -task.config["buffer_size"]]
        if not own:
            return []
        by_name = {(a.draw, a.index): a for a in buffer}
        chosen = [(by_name[which], quantile) for which, quantile in self.given.replay(name)]
        check_draws(task, buffer, chosen, len(own))
        return chosen

    def look(self, samples: Sequence[Sample]) -> None:
        """What the models say of the samples before the update."""
        for task in self.settings.tasks:
            own = [s for s in samples if s.task == task.name]
            needs_reference = task.kl_coefficient > 0.0 and task.type != "reward_conditioned"
            needs_reference |= task.type == "distill" and not task.config["exact"]
            if not own or not (self.many_updates or task.type == "ppo" or needs_reference):
                continue
            with torch.no_grad():
                weights = self.rounded(self.weights)
                found = outputs(self.settings, weights, own, self.margins)
                for s, (_, logits) in zip(own, found, strict=True):
                    s.old_logprobs = scores_of(logits, s.ids)[0]
                if needs_reference:
                    other = self.given.teachers.get(task.name, self.reference)
                    found_there = outputs(self.settings, self.rounded(other), own, self.margins)
                    for s, (_, logits) in zip(own, found_there, strict=True):
                        s.reference_logprobs = scores_of(logits, s.ids)[0]
                if task.type == "ppo":
                    hidden = [h for h, _ in found]
                    values = values_of(self.settings, weights, self.critic(weights), own, hidden)
                    for s, v in zip(own, values, strict=True):
                        s.old_values = v

    @staticmethod
    def critic(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n.removeprefix("critic."): w for n, w in weights.items() if n.startswith("critic.")}

    def give_credit(self, samples: Sequence[Sample], metrics: dict[str, dict[str, float]]) -> None:
        for task in self.settings.tasks:
            own = [s for s in samples if s.task == task.name]
            if not own:
                continue
            if own[0].reference_logprobs is not None and task.type != "distill":
                gaps = [float((s.old_logprobs - s.reference_logprobs).sum()) for s in own]  # type: ignore[operator]
                metrics[task.name]["kl"] = math.fsum(gaps) / len(gaps)
            beta = self.kls[task.name].beta
            multipliers = {m.rule.name: m.value for m in self.multipliers[task.name]}
            in_reward = beta if task.kl_placement == "reward" else 0.0
            out = credit(task, self.credit_states[task.name], own, multipliers, in_reward)
            metrics[task.name] |= out.metrics
            if out.value_rescale is not None:
                a, b = out.value_rescale
                head = f"critic.{task.name}"
                self.weights[f"{head}.weight"] = a * self.weights[f"{head}.weight"]
                self.weights[f"{head}.bias"] = a * self.weights[f"{head}.bias"] + b
            if self.noise:  # an advantage is a difference of numbers as large as the task's largest
                size = self.noise * max(float(s.advantages.abs().max()) for s in own)  # type: ignore[union-attr]
                for s in own:
                    a = s.advantages
                    assert a is not None
                    s.advantages = torch.where(a == 0.0, a, a + size * torch.randn(1, dtype=a.dtype))
            for s in own:
                if not self.many_updates:
                    s.old_logprobs = None

    def rounded(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights as one forward pass sees them."""
        if not self.noise:
            return dict(weights)
        return {n: w * (1.0 + self.noise * torch.randn(w.shape, dtype=w.dtype)) for n, w in weights.items()}

    # ------------------------------------------------------------------ update

    def update(
        self, samples: Sequence[Sample], shares: Mapping[str, float], teacher: Teacher, sums: TokenSums
    ) -> list[Update]:
        settings, updates = self.settings, []
        factor = schedule(settings, self.step_number)
        if isinstance(self.guard, ActingGuard):
            factor *= self.guard.rate(self.step_number)
        elif self.evaluations:
            factor *= settings.guard_rate
        for epoch in range(settings.num_epochs):
            order = {
                t.name: self.given.shuffle(
                    t.name, self.step_number, epoch, sum(s.task == t.name for s in samples)
                )
                for t in settings.tasks
            }
            parts = minibatches(settings, samples, order)
            for part in parts:
                active = [
                    (s, w) for s, w in zip(part, token_weights(settings, parts, part, shares), strict=True)
                ]
                active = [(s, w) for s, w in active if s.is_active]
                if active:
                    updates += self.one_update(active, factor, teacher, sums)
        return updates

    def one_update(
        self, active: Sequence[tuple[Sample, float]], factor: float, teacher: Teacher, sums: TokenSums
    ) -> list[Update]:
        """Make an update, if a gradient is not zero: momentum alone moves nothing."""
        settings = self.settings
        leaves = {n: w.detach().clone() for n, w in self.rounded(self.weights).items()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(not settings.lora_rank or "lora_" in name or name.startswith("critic."))
        actor = {n: w for n, w in leaves.items() if not n.startswith("critic.")}
        betas = {name: kl.beta for name, kl in self.kls.items()}
        losses = token_losses(
            settings,
            self.dropped(actor),
            self.critic(leaves),
            self.rounded(self.reference),
            {name: self.rounded(own) for name, own in self.given.teachers.items()},
            [s for s, _ in active],
            betas,
            sums,
            self.margins,
        )
        loss = sum((w * own.sum() for (_, w), own in zip(active, losses, strict=True)), torch.zeros(()))
        parts: dict[str, Tensor] = {}
        if self.parts is not None and not self.parts:
            trained = [w for w in actor.values() if w.requires_grad]
            for name in dict.fromkeys(s.task for s, _ in active):
                pairs = zip(active, losses, strict=True)
                own_loss = sum((w * x.sum() for (s, w), x in pairs if s.task == name), torch.zeros(()))
                own_parts = torch.autograd.grad(own_loss, trained, retain_graph=True, materialize_grads=True)
                parts[name] = torch.cat([g.flatten() for g in own_parts])
        loss.backward()  # type: ignore[no-untyped-call]
        found = {n: w.grad for n, w in leaves.items() if w.grad is not None}
        gradients: dict[str, Tensor] = {}
        for is_critic in (False, True):
            own = {n: g for n, g in found.items() if n.startswith("critic.") == is_critic}
            if any(bool(g.any()) for g in own.values()):
                gradients |= clipped(settings, own)[0]
        if not gradients:
            return []
        self.parts = parts or self.parts
        rate = settings.learning_rate * factor
        critic_rate = (settings.critic_learning_rate or 10.0 * settings.learning_rate) * factor
        applied = teacher.gradients(gradients)
        own_actor = {n: g for n, g in applied.items() if not n.startswith("critic.")}
        own_critic = {n: g for n, g in applied.items() if n.startswith("critic.")}
        moved = self.optimizer.step(self.weights, own_actor, rate)
        moved = self.optimizer.step(moved, own_critic, critic_rate)
        self.weights = teacher.weights(moved)
        return [Update(gradients=gradients, weights=moved, loss=float(loss.detach()))]

    def dropped(self, actor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the forward pass that trains: adapters read a part of their input, scaled up."""
        rate, found = self.settings.lora_dropout, dict(actor)
        for name, weight in actor.items():
            if rate and ".lora_A." in name:
                kept = torch.tensor(self.given.kept(weight.shape[1]), dtype=weight.dtype)
                found[name] = weight * kept / (1.0 - rate)
        return found

    # ------------------------------------------------------------------ evaluation

    def evaluate(self) -> tuple[dict[str, Number], bool, bool]:
        """Return metrics by ``task`` and ``task/metric``, whether the guard alarms, whether all is good."""
        everything, ends = self.measure_all()
        numbers, ends = self.not_of_tests(everything), self.not_of_tests(ends)
        self.calibrate(numbers)
        self.evaluations += 1
        self.unmeasured = []
        if factors := self.settings.guard_factors:
            own = factors[min(self.evaluations, len(factors)) - 1]
            self.scheduler.factors = {t.name: own[t.name] for t in self.settings.tasks if t.name in own}
        return everything, *self.guard.observe(numbers, ends)

    def look_at_new(self) -> None:
        """Evaluate what is new since a resume, before it is trained on; no controller reads it."""
        world = self.given.held_out_world
        assert world is not None
        self.looks = {}
        for task in [*self.settings.tasks, *self.settings.anchors]:
            if task.name in self.unmeasured:
                self.looks |= self.measure(task, world)[0]
        self.unmeasured = []

    def not_of_tests(self, found: Mapping[str, T]) -> dict[str, T]:
        """What controllers read: nothing of a split ``test``."""
        hidden = [t.name for t in self.settings.tasks if t.is_reported]
        return {key: x for key, x in found.items() if key.partition("/")[0] not in hidden}

    def measure_all(self) -> tuple[dict[str, Number], dict[str, tuple[float, float] | None]]:
        """Return metrics by ``task`` and ``task/metric``, and their ranges."""
        numbers: dict[str, Number] = {}
        ends: dict[str, tuple[float, float] | None] = {}
        world = self.given.held_out_world
        assert world is not None
        for task in [*self.settings.tasks, *self.settings.anchors]:
            found, ranges = self.measure(task, world)
            numbers, ends = numbers | found, ends | ranges
        return numbers, ends

    def measure(
        self, task: Task | Anchor, world: World
    ) -> tuple[dict[str, Number], dict[str, tuple[float, float] | None]]:
        """The same of one task."""
        if isinstance(task, Anchor):
            numbers = self.measure_anchor(task)
            return numbers, dict.fromkeys(numbers, (0.0, math.inf))
        if not task.has_rewards:
            main = self.measure_texts(task, world)
            return ({task.name: main} if main is not None else {}), {task.name: (0.0, math.inf)}
        control = []
        if task.type == "reward_conditioned":
            control = [self.settings.first_control_token + task.config["quantiles"] - 1]
        version = self.speakers[self.fingerprint()]
        attempts = [
            attempt
            for i in range(self.given.held_out[task.name])
            for attempt in run_prompt(
                task, i, version, world, self.given.asked, self.shortened, control, task.eval_samples
            )
        ]
        memory = self.refused[task.name]
        own = {f"{task.name}/{k}": v for k, v in describe(task, attempts, memory).items()}
        rates = solved_rates(task, attempts, memory)
        own |= {f"{task.name}/{k}": v for k, v in rates.items()}
        most = majority(task, attempts, memory, self.given.read)
        own |= {} if most is None else {f"{task.name}/maj@{task.eval_samples}": most}
        main = primary(task, attempts, memory)
        ends = {task.name: task.range_of(task.primary_metric)}
        for name in own:
            metric = name.removeprefix(f"{task.name}/")
            is_reward = metric.startswith("reward/") or metric == "reward_mean"
            of = "reward" if metric == "reward_mean" else metric.removeprefix("reward/")
            ends[name] = task.range_of(of) if is_reward else (0.0, 1.0) if metric != "length" else None
        return own | ({task.name: main} if main is not None else {}), ends

    def calibrate(self, numbers: Mapping[str, Number]) -> None:
        for name, trace in self.scheduler.traces.items():
            if (mean := numbers.get(f"{name}/reward_mean")) is not None:
                trace.calibrate(mean.mean, mean.error)

    def fingerprint(self) -> float:
        """Of the actor's weights."""
        return math.fsum(float(w.sum()) for n, w in self.weights.items() if not n.startswith("critic."))

    def inspect(self) -> tuple[dict[str, Number], str, bool]:
        """Evaluate and save what is due, and do what the guard says.

        Return metrics, ``rollback``, ``stop`` or "", and whether all is good. Where no evaluation is due,
        new tasks have one.
        """
        guard, step, settings = self.guard, self.step_number, self.settings
        assert isinstance(guard, ActingGuard)
        is_first = self.evaluated_at < 0
        is_due = is_first or (settings.eval_every > 0 and step % settings.eval_every == 0)
        numbers: dict[str, Number] = {}
        is_evaluated = is_due and self.evaluated_at != step
        is_good = False
        self.looks = {}
        if not is_evaluated:
            self.look_at_new()
        self.unmeasured = []
        if is_evaluated:
            numbers, ends = self.measure_all()
            read = self.not_of_tests(numbers)
            action, is_good = guard.decide(step, read, self.not_of_tests(ends), self.confirm)
            self.calibrate(read)
            self.evaluations, self.evaluated_at = self.evaluations + 1, step
            self.known = (
                step,
                self.score(read),
                is_good,
                [f"{t.name}/{self.measured_by[t.name]}" for t in self.counted()],
            )
            if action == "stop":
                return numbers, action, is_good
            is_back = action == "rollback" and self.roll_back()
            self.scheduler.factors = guard.factors
            if is_back:
                self.save()
                return numbers, "rollback", is_good
        saves = is_first or (settings.checkpoint_every > 0 and step % settings.checkpoint_every == 0)
        if not saves and is_evaluated and is_good:
            reach = max(1, guard.rules.rollback_steps // 2)
            newest = max((at for at, c in self.checkpoints.items() if c.is_good), default=-math.inf)
            saves = step - newest >= min(settings.checkpoint_every or reach, reach)
        if is_evaluated if self.saved_at == step else saves:
            self.save()
        return numbers, "", is_good

    def score(self, numbers: Mapping[str, Number]) -> float | None:
        """The mean of the tasks' primary metrics: of those with rewards, if there are any; none of a test."""
        counted = self.counted()
        if not counted or any(t.name not in numbers for t in counted):
            return None
        own = [numbers[t.name] for t in counted]
        return math.fsum(x.mean * (1.0 if x.direction == "higher" else -1.0) for x in own) / len(own)

    def counted(self) -> list[Task]:
        """The tasks whose mean is the score."""
        read = [t for t in self.settings.tasks if not t.is_reported]
        return [t for t in read if t.has_rewards] or read

    def save(self) -> None:
        """Keep a checkpoint, and of the others the newest, the best and two judged good.

        After a change of tasks the best before it stays, too.
        """
        step, before = self.step_number, self.scheduler
        self.saved_at = step
        self.scheduler = copy.deepcopy(before)
        self.scheduler.carry_over(_count(group[0].task for _, group in self.late))  # it leaves them out
        state = copy.deepcopy({name: getattr(self, name) for name in OF_A_CHECKPOINT})
        self.scheduler = before
        at, score, is_good, names = self.known
        if at != step:
            score, is_good, names = None, None, []
        self.checkpoints[step] = Checkpoint(
            version=self.version, is_good=is_good, score=score, score_of=sorted(names), state=state
        )
        newest = sorted(self.checkpoints, reverse=True)
        kept = [at for at in newest if self.checkpoints[at].is_good][:2]
        kept += newest[: self.settings.checkpoint_keep]
        kept_of: list[int] = []
        scores = {at: c.score for at in newest if (c := self.checkpoints[at]).score is not None}
        while scores and len(kept_of) < 2:
            of = set(self.checkpoints[next(iter(scores))].score_of)
            own = {at: score for at, score in scores.items() if set(self.checkpoints[at].score_of) == of}
            kept_of.append(max(own, key=lambda at: (own[at], at)))
            scores = {at: score for at, score in scores.items() if at not in own}
        kept += kept_of
        self.checkpoints = {at: c for at, c in self.checkpoints.items() if at in kept}

    def roll_back(self) -> bool:
        """Go back to the guard's target, if there is one; what was drawn since is not drawn again."""
        guard = self.guard
        assert isinstance(guard, ActingGuard)
        target = guard.target([at for at, c in self.checkpoints.items() if c.is_good], self.step_number)
        if target is None:
            return False
        self.ahead.clear()
        self.late = []
        draws = dict(self.draws)
        for name, value in copy.deepcopy(self.checkpoints[target].state).items():
            setattr(self, name, value)
        self.fit_state()
        for name, first in [(task.name, self.draws[task.name]) for task in self.settings.trained]:
            chosen = self.given.chosen.get(name, {})
            if guard.rules.skip_data:
                if name in self.pools:
                    rows = {draw: chosen[draw] for draw in range(first, draws[name])}
                    self.pools[name].skip(rows)
            else:
                for draw in range(first, draws[name]):
                    chosen.pop(draw, None)
        if guard.rules.skip_data:
            self.draws |= {task.name: draws[task.name] for task in self.settings.trained}
        self.checkpoints = {at: c for at, c in self.checkpoints.items() if at <= target}
        self.saved_at = target
        own = self.checkpoints[target]
        self.known = target, own.score, own.is_good, own.score_of
        guard.rolled_back(target)
        return True

    def confirm(self, name: str) -> tuple[int, dict[str, Number], dict[str, Number]] | None:
        """Evaluate a task anew, with these weights and with those last judged good."""
        good = max((at for at, c in self.checkpoints.items() if c.is_good), default=None)
        if good is None:
            return None
        self.num_confirmations += 1
        assert self.given.confirming_world is not None
        world = self.given.confirming_world(f"confirmation/{self.step_number}/{self.num_confirmations}")
        task = next(t for t in [*self.settings.tasks, *self.settings.anchors] if t.name == name)
        now, before = self.measure(task, world)[0], self.weights
        own = self.checkpoints[good].state["weights"]
        assert isinstance(own, dict)
        own = fitted(own, self.first_weights)
        self.weights = {n: w if n.startswith("critic.") else own[n] for n, w in before.items()}
        then = self.measure(task, world)[0]
        self.weights = before
        return good, now, then

    def measure_anchor(self, anchor: Anchor) -> dict[str, Number]:
        """Loss under the actor and KL(initial actor, actor), each text's mean over its tokens."""
        world, memory = self.given.held_out_world, self.written[anchor.name]
        assert world is not None
        texts = []
        for i in range(self.given.held_out[anchor.name]):
            context, ids = self.shortened(world.prompt(anchor.name, i)), world.given(anchor.name, i)
            if not anchor.has_answers:
                if i not in memory:
                    place, most = (i, 0, 0), anchor.max_new_tokens
                    said = world.write(anchor.name, place, 0, self.version, context, most, "anchor")
                    memory[i] = ended(said, anchor.stop, world.spell).ids
                ids = memory[i]
            if anchor.is_plain:
                text = ids[:-1][: anchor.max_tokens]
                context, ids = text[:1], text[1:]
            if ids := ids[: anchor.max_tokens]:
                texts.append((context, ids))
        models = (merged(self.weights), self.reference if anchor.has_kl else {})
        losses, kls = [], []
        for context, ids in texts:
            heads = (self.settings.num_heads, self.settings.num_key_value_heads)
            logits = [
                logits_of(own, before_each_token(own, [context], [ids], *heads)[0]) for own in models if own
            ]
            losses.append(-float(scores_of(logits[0], ids)[0].mean()))
            if anchor.has_kl:
                kls.append(float(exact_kl(logits[1], logits[0]).mean()))
        found = {anchor.name: losses} | ({f"{anchor.name}/kl": kls} if kls else {})
        known = {key: number(own, range(len(own)), "lower", (0.0, math.inf)) for key, own in found.items()}
        return {key: own for key, own in known.items() if own is not None}

    def measure_texts(self, task: Task, world: World) -> Number | None:
        """Of a task without rewards: the mean loss of given answers, or the KL to the teacher of its own."""
        samples = []
        for i in range(self.given.held_out[task.name]):
            context = self.shortened(world.prompt(task.name, i))
            ids = world.given(task.name, i)
            if task.type == "distill":
                version = self.speakers[self.fingerprint()]
                said = world.write(task.name, (i, 0, 0), 0, version, context, task.max_new_tokens)
                ids = ended(said, task.stop, world.spell).ids
            answer = Answer(context=context, ids=ids, logprobs=[], finish="stop")
            samples.append(
                Sample(
                    task=task.name,
                    group=(task.name, i),
                    name=(task.name, i, 0, 0),
                    answers=[answer],
                    ids=ids,
                    reward=0.0,
                    rollout_logprobs=None,
                )
            )
        with torch.no_grad():
            own = [logits for _, logits in outputs(self.settings, self.weights, samples, [])]
            if task.type == "distill":
                teacher = outputs(self.settings, self.given.teachers[task.name], samples, [])
                values = [float(exact_kl(a, b).mean()) for a, (_, b) in zip(own, teacher, strict=True)]
            else:
                values = [-float(scores_of(a, s.ids)[0].mean()) for a, s in zip(own, samples, strict=True)]
        return number(values, [s.group for s in samples], "lower", (0.0, math.inf))

    # ------------------------------------------------------------------ the step

    def step(self, teacher: Teacher) -> Result:
        """Make one step; ``teacher`` may replace gradients and weights of each update."""
        settings = self.settings
        self.margins = []
        batch, drawn, kept = self.experience()
        metrics: dict[str, dict[str, float]] = {t.name: {} for t in settings.trained}
        samples = self.samples_of(kept)
        self.look(samples)
        self.give_credit(samples, metrics)
        samples = [part for s in samples for part in s.parts()]
        for s in samples:
            s.is_active = can_matter(settings[s.task], self.kls[s.task].beta, s)
        sums = TokenSums()
        every = settings.of_policy.get("gradients_every", 0)
        is_compared = every > 0 and self.step_number % every == 0 and len(settings.trained) > 1
        self.parts = {} if is_compared else None
        updates = self.update(samples, self.loss_shares(batch.quotas, kept, samples), teacher, sums)
        decay = settings.reference_decay
        now = merged(self.weights)
        self.reference = {n: decay * w + (1.0 - decay) * now[n] for n, w in self.reference.items()}
        self.begin_reference()
        self.version += 1
        self.speakers[self.fingerprint()] = self.version
        numbers = {}
        for task in settings.trained:
            own = metrics[task.name]
            own |= sums.means(task.name)
            own |= {f"multiplier/{m.rule.name}": m.value for m in self.multipliers[task.name]}
            own["kl_coefficient"] = self.kls[task.name].beta
            own["overlong_prompts"] = float(self.left_out[task.name])
        num_trained = {task.name: self.num_informative(task, kept) for task in settings.trained}
        num_drawn, seen = len({a.group for a in drawn}), {}
        compared = self.given.compared() if self.parts is not None else {}
        for task in settings.trained:
            attempts = [a for a in drawn if a.task == task.name]
            n, spread, mean, std, headroom, own_numbers = step_statistics(
                task, attempts, self.refused[task.name], self.prices
            )
            shown = shown_by_group(task, attempts, self.refused[task.name])
            own = metrics[task.name]
            even = mean
            if (pools := self.pools.get(task.name)) is not None:
                judged = {g[1]: credited_rewards(task, a) for g, a in groups_of(attempts).items()}
                if judged:
                    pools.observe(judged, {g[1]: x for g, x in shown.items()}, self.step_number)
                    even += pools.shift()
                    own |= pools.metrics()
            seen[task.name] = Seen(
                n,
                spread,
                even,
                list(shown.values()),
                headroom,
                std,
                applied_ranges(task, attempts),
                {o.removeprefix("cosine/"): c for o, c in compared.get(task.name, {}).items() if "/" in o},
            )
            numbers[task.name] = own_numbers
            own |= {"reward_std": std, "informative_rate": spread / n if n else math.nan}
            if math.isfinite(headroom):
                own["headroom"] = headroom
            own |= {
                "weight": batch.shares[task.name],
                "share_requested": batch.quotas[task.name] / max(1, sum(batch.quotas.values())),
                "share_sampled": n / max(1, num_drawn),
                "share_trained": num_trained[task.name] / max(1, sum(num_trained.values())),
            }
            if "kl" in own:
                self.kls[task.name].update(own["kl"])
            for m in self.multipliers[task.name]:
                if (cost := own_numbers.get(f"cost/{m.rule.name}")) is not None:
                    m.update(cost.mean)
        self.scheduler.observe(seen)
        if isinstance(self.guard, ActingGuard):
            self.guard.note_step(self.step_number, self.noted(batch, drawn, seen))
        self.step_number += 1
        return Result(
            quotas=batch.quotas,
            shares=batch.shares,
            drawn=drawn,
            kept=kept,
            samples=samples,
            updates=updates,
            metrics=metrics,
            numbers=numbers,
            margin=min(self.margins, default=math.inf),
            parts=self.parts or {},
        )

    def noted(
        self, batch: Batch, drawn: Sequence[Attempt], seen: Mapping[str, Seen]
    ) -> dict[str, tuple[float, float, float]]:
        """Of each task: groups that teach, groups to train on (NaN: it has no share), training reward."""
        found = {}
        for task in self.settings.trained:
            own = groups_of([a for a in drawn if a.task == task.name])
            able = float(sum(any(is_trainable(task, a) for a in g) for g in own.values()))
            prompts = able if batch.shares[task.name] else math.nan
            found[task.name] = float(seen[task.name].informative), prompts, seen[task.name].mean
        return found

    def loss_shares(
        self, quotas: Mapping[str, int], kept: Sequence[Attempt], samples: Sequence[Sample]
    ) -> dict[str, float]:
        """A task's part of the loss: its quota among those trained on; without one its late groups."""
        parts = {}
        for name in {s.task for s in samples}:
            parts[name] = quotas.get(name) or len({a.group for a in kept if a.task == name})
        return {name: part / sum(parts.values()) for name, part in parts.items()}


def fitted(own: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``own`` with the names and rows of ``first``: a new row is the mean of the others."""
    found = {}
    for name, new in first.items():
        rows = own.get(name, new)
        more = rows.mean(dim=0).expand(len(new) - len(rows), *new.shape[1:])
        found[name] = torch.cat([rows, more])
    return found


def _count(names: object) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:  # type: ignore[attr-defined]
        found[name] = found.get(name, 0) + 1
    return found
