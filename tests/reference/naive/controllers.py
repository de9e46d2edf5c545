"""What is adjusted after a step: task weights, KL coefficients, multipliers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .settings import ConstraintRule, Settings, Task

NEAR = 1.0 - 1e-9
"""What is closer to a bound is at it but for rounding."""


@dataclass
class Average:
    """A moving average over prompts, with the error that its past differences suggest."""

    value: float = 0.0
    weight: float = 0.0
    """Its variance, in variances of one prompt."""
    variance: float = 0.0
    """Of one prompt, by the differences between steps."""
    steps: int = 0
    last: tuple[float, int] = (0.0, 0)

    def add(self, mean: float, prompts: int, gain: float) -> None:
        if self.steps:
            before, number = self.last
            seen = (mean - before) ** 2 / (1.0 / prompts + 1.0 / number)
            self.variance += max(0.02, 1.0 / self.steps) * (seen - self.variance)
        self.steps += 1
        self.last = mean, prompts
        self.value = (1.0 - gain) * self.value + gain * mean
        self.weight = (1.0 - gain) ** 2 * self.weight + gain**2 / prompts

    def error(self, width: float) -> float:
        """Standard error; the largest variance possible, ``width^2 / 4``, counts as four measured steps."""
        differences = min(max(0, self.steps - 1), 50)
        variance = (differences * self.variance + 4 * width**2 / 4) / (differences + 4)
        return math.sqrt(self.weight * variance)


@dataclass(frozen=True)
class Seen:
    """What one step showed of a task."""

    prompts: int
    informative: int
    mean: float
    """Of the reward over slots; NaN where no slot has one."""
    shown: Sequence[Sequence[float]]
    """Rewards of each group."""
    headroom: float
    """Mean over groups of at least two of their best reward less the mean of the rest; NaN without one."""
    std: float = math.nan
    """Mean over groups of at least two of the deviation of their rewards; NaN without one."""
    applied: Sequence[tuple[float, float]] = ()
    """Declared range of the rewards that applied to each slot."""
    cosines: Mapping[str, float] = field(default_factory=dict)
    """Of the task's gradient with those of others, in steps that compare them."""
    watched: tuple[float, tuple[float, float] | None, bool] | None = None
    """Another metric in place of the reward: value (NaN: none), declared range, whether lower is better."""

    @property
    def value(self) -> float:
        """What the policy watches; higher is better."""
        if self.watched is None:
            return self.mean
        value, ends, is_lower = self.watched
        return (sum(ends) - value if ends else -value) if is_lower else value


@dataclass
class Trace:
    """What the scheduler has seen of a task."""

    drawn: int = 0
    """Prompts, those of steps without a reward too."""
    prompts: int = 0
    mean: Average = field(default_factory=Average)
    informative: Average = field(default_factory=Average)
    above: Average = field(default_factory=Average)
    """Headroom."""
    within: Average = field(default_factory=Average)
    """Deviation of rewards in groups."""
    lowest: list[float] = field(default_factory=list)
    """Smallest reward of each group, of the three smallest."""
    highest: list[float] = field(default_factory=list)
    applied: list[tuple[float, float]] = field(default_factory=list)
    """The narrowest range that holds those of all slots so far, if any."""
    offset: float = 0.0
    offset_variance: float = 0.0
    evaluations: int = 0
    watches_another: bool = False
    """The level is that of another metric than the reward."""
    earned: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Then ``lowest`` and ``highest`` are empty, and this is what three groups have reached."""

    def observe(self, seen: Seen, smoothing: float, averaged: float) -> None:
        """Gain ``min(smoothing, n / averaged)``, a plain mean over prompts at first."""
        self.drawn += seen.prompts
        gain = max(min(smoothing, seen.prompts / averaged), seen.prompts / self.drawn)
        self.informative.add(seen.informative / seen.prompts, seen.prompts, gain)
        value, self.watches_another = seen.value, seen.watched is not None
        if math.isnan(value):
            return
        self.prompts += seen.prompts
        gain = max(min(smoothing, seen.prompts / averaged), seen.prompts / self.prompts)
        self.mean.add(value, seen.prompts, gain)
        if not math.isnan(seen.headroom) and not self.watches_another:
            self.above.add(seen.headroom, seen.prompts, gain if self.above.steps else 1.0)
        if not math.isnan(seen.std):
            self.within.add(seen.std, seen.prompts, gain if self.within.steps else 1.0)
        if seen.watched is not None:
            lowest, highest = self.earned
            lowest, highest = (
                lowest + [min(own) for own in seen.shown],
                highest + [max(x) for x in seen.shown],
            )
            self.earned = sorted(lowest)[:3], sorted(highest)[-3:]
            if (ends := seen.watched[1]) is not None:
                low, high = self.applied[0] if self.applied else ends
                self.applied = [(min(low, ends[0]), max(high, ends[1]))]
            return
        self.lowest = sorted(self.lowest + [min(own) for own in seen.shown])[:3]
        self.highest = sorted(self.highest + [max(own) for own in seen.shown])[-3:]
        if ranges := [*self.applied, *seen.applied]:
            self.applied = [(min(low for low, _ in ranges), max(high for _, high in ranges))]

    @property
    def informative_rate(self) -> float:
        return self.informative.value if self.informative.steps else 1.0

    def calibrate(self, held_out: float, error: float) -> None:
        """The smoothed difference between held-out and training reward."""
        if self.prompts and math.isfinite(held_out):
            self.evaluations += 1
            gain = max(0.3, 1.0 / self.evaluations)
            self.offset += gain * (held_out - self.mean.value - self.offset)
            known = error if math.isfinite(error) else 0.0
            self.offset_variance = (1.0 - gain) ** 2 * self.offset_variance + (gain * known) ** 2

    def ends(self, declared: tuple[float, float] | None) -> tuple[float, float]:
        """The declared range; else what three groups have reached or passed; [0, 1] until rewards differ."""
        if self.watches_another:
            return self.applied[0] if self.applied else (min(0.0, self.mean.value), max(1.0, self.mean.value))
        if declared is not None:
            low, high = self.applied[0] if self.applied else declared
            if low < high:
                return low, high
        if self.lowest and self.lowest[-1] < self.highest[0]:
            return self.lowest[-1], self.highest[0]
        return min(0.0, self.mean.value), max(1.0, self.mean.value)

    def place(self, value: float, declared: tuple[float, float] | None) -> float:
        """Place in [0, 1] of the range."""
        low, high = self.ends(declared)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def level(self, declared: tuple[float, float] | None) -> float:
        return self.place(self.mean.value + self.offset, declared)

    def level_error(self, declared: tuple[float, float] | None) -> float:
        low, high = self.ends(declared)
        return math.hypot(self.mean.error(high - low), math.sqrt(self.offset_variance)) / (high - low)


def raised(wanted: Mapping[str, float], floors: Mapping[str, float]) -> dict[str, float]:
    """What is below its floor is raised to it, the rest scaled down."""
    held: set[str] = set()
    while True:
        free = 1.0 - math.fsum(floors[n] for n in held)
        rest = math.fsum(w for n, w in wanted.items() if n not in held)
        shares = {
            n: floors[n] if n in held else (w * free / rest if rest else 0.0) for n, w in wanted.items()
        }
        low = {n for n in wanted if n not in held and shares[n] < floors[n]}
        if not low:
            return shares
        held |= low


def apportioned(
    shares: Mapping[str, float], total: int, carry: Mapping[str, float], ranks: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, float]]:
    """Whole numbers by largest remainder, what rounding took or gave before included; the new ``carry``.

    What one without a share is owed goes to the others.
    """
    active = [name for name, share in shares.items() if share > 0.0]
    carried = {name: carry.get(name, 0.0) for name in active}
    rest = total - math.fsum(carried.values())
    owed = {name: shares[name] * rest + carried[name] for name in active}
    counts = {name: max(0, math.floor(owed.get(name, 0.0))) for name in shares}
    while (left := total - sum(counts.values())) != 0:
        able = active if left > 0 else [name for name in active if counts[name] > 0]
        remainder = {name: round(owed[name] - counts[name], 9) for name in able}
        extreme = max(remainder.values()) if left > 0 else min(remainder.values())
        first = min((n for n in able if remainder[n] == extreme), key=lambda n: (ranks[n], n))
        counts[first] += 1 if left > 0 else -1
    return counts, {name: owed[name] - counts[name] for name in active}


@dataclass
class Scheduler:
    settings: Settings
    ranks: Mapping[str, int]
    """Which of two equal remainders comes first."""
    traces: dict[str, Trace] = field(default_factory=dict)
    carry: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    """Of the guard."""

    def __post_init__(self) -> None:
        tasks = self.settings.trained
        weights = {t.name: t.weight for t in tasks}
        total = math.fsum(weights.values())
        active = [t for t in tasks if weights[t.name] > 0.0 or t.min_share]
        floor = self.settings.min_weight
        if floor is None:
            floor = min(0.1, 0.2 / len(active))
        self.floors = {t.name: floor if t.min_share is None else t.min_share for t in active}
        prior = {t.name: weights[t.name] / total or self.floors[t.name] for t in active}
        self.prior = {name: p / math.fsum(prior.values()) for name, p in prior.items()}
        self.traces = {name: Trace() for name in self.prior}
        self.config = self.settings.of_policy
        self.logits = {name: math.log(p) for name, p in self.prior.items()}
        self.start = dict.fromkeys(self.prior, 0.0)
        """Distance to the target after the first ten steps."""
        self.dead_steps = dict.fromkeys(self.prior, 0)
        self.held: set[str] = set()
        """By the gate."""
        self.arms = dict(self.prior)
        """Values of the bandit, sum 1."""
        self.largest = dict.fromkeys(self.prior, 0.001)
        """Recent change of the level."""
        self.best = dict.fromkeys(self.prior, -1.0)
        """Level; with the steps since, and the factor on the weight that plateaus have made."""
        self.waited = dict.fromkeys(self.prior, 0)
        self.scale = dict.fromkeys(self.prior, 1.0)
        self.cosines: dict[str, list[float]] = {name: [] for name in self.prior}
        """Means over the other tasks, comparison by comparison."""

    def refit(self, ranks: Mapping[str, int], fresh: Sequence[str] = ()) -> Scheduler:
        """Return a scheduler for the present tasks and weights.

        It keeps what this one learnt of tasks that stay, as factors on their weights. New tasks begin afresh,
        and so do those of other rewards, ``fresh``.
        """
        new = Scheduler(self.settings, ranks)
        kept = [name for name in new.prior if name in self.prior and name not in fresh]
        for own in ("traces", "start", "dead_steps", "largest", "best", "waited", "scale", "cosines"):
            getattr(new, own).update({name: getattr(self, own)[name] for name in kept})
        for name in kept:
            new.logits[name] += self.logits[name] - math.log(self.prior[name])
            new.arms[name] *= self.arms[name] / self.prior[name]
        total = math.fsum(new.arms.values())
        new.arms = {name: value / total for name, value in new.arms.items()}
        new.held = {name for name in kept if name in self.held}
        new.carry = {t.name: self.carry[t.name] for t in self.settings.trained if t.name in self.carry}
        new.factors = {name: factor for name, factor in self.factors.items() if name in new.prior}
        return new

    def observe(self, seen: Mapping[str, Seen]) -> None:
        """Learn from one step."""
        progress = {}
        for name, own in seen.items():
            if name not in self.traces or own.prompts == 0:
                continue
            trace, declared = self.traces[name], self.settings[name].range_of("reward")
            before = trace.mean.value if trace.mean.steps else None
            trace.observe(own, self.config["smoothing"], self.config["prompts_averaged"])
            if math.isnan(own.value):
                continue
            now = trace.place(trace.mean.value, declared)
            progress[name] = 0.0 if before is None else now - trace.place(before, declared)
            if trace.mean.steps <= 10:
                self.start[name] = self.deficit(name)
        learn = {"mt_grpo": self.descend, "bandit": self.pull, "patience": self.wait}
        if progress and self.settings.policy in learn:
            learn[self.settings.policy](progress)
        for name, own in seen.items():
            if found := {o: c for o, c in own.cosines.items() if name in self.prior and o in self.prior}:
                mass = math.fsum(self.prior[o] for o in found)
                self.cosines[name].append(math.fsum(self.prior[o] * c for o, c in found.items()) / mass)
        for name, own in seen.items():
            if name in self.traces and own.prompts:
                self.gate(name)

    def descend(self, progress: Mapping[str, float]) -> None:
        """``xi_k <- xi_k - beta z_k (s_k - sum_j z_j s_j)``, ``s = progress + lambda level``, z = softmax."""
        names = [name for name in self.traces if self.traces[name].prompts]
        total = math.fsum(math.exp(self.logits[name]) for name in names)
        z = {name: math.exp(self.logits[name]) / total for name in names}
        levels = self.cleared(
            {name: min(self.level(name), self.settings[name].target) for name in names},
            {name: self.level_error(name) for name in names},
        )
        s = {name: progress.get(name, 0.0) + self.config["level_weight"] * levels[name] for name in names}
        mean = math.fsum(z[name] * s[name] for name in names)
        for name in names:
            self.logits[name] -= self.config["rate"] * z[name] * (s[name] - mean)

    def pull(self, progress: Mapping[str, float]) -> None:
        """``v <- v exp(eta g)``, then ``v <- (1 - share) v / sum(v) + share prior``.

        ``g``: the change of the level over the largest recent one of any task (less by 1 % a step, at least
        0.001), or over two errors of a level where that is more.
        """
        for name, change in progress.items():
            self.largest[name] = max(0.99 * self.largest[name], abs(change), 0.001)
        unit = max(*self.largest.values(), *(2.0 * self.level_error(name) for name in progress))
        for name, change in progress.items():
            self.arms[name] *= math.exp(self.config["rate"] * change / unit)
        total, share = math.fsum(self.arms.values()), self.config["share"]
        self.arms = {n: (1.0 - share) * v / total + share * self.prior[n] for n, v in self.arms.items()}

    def wait(self, progress: Mapping[str, float]) -> None:
        """After ``patience`` steps without a rise: at the target lower the weight, below it raise it."""
        config, most = self.config, self.config["max_change"]
        for name in progress:
            self.waited[name] += 1
            if self.level(name) > self.best[name] + config["min_delta"]:
                self.best[name], self.waited[name] = self.level(name), 0
            elif self.waited[name] >= config["patience"]:
                is_lowered = config["literal"] or self.level(name) >= self.settings[name].target
                change = config["factor"] if is_lowered else 1.0 / config["factor"]
                self.scale[name] = min(most, max(1.0 / most, self.scale[name] * change))
                self.waited[name] = 0

    def spread(self, name: str) -> tuple[float, float]:
        """Deviation in groups as a part of the range, and its error; of single responses sqrt(p (1 - p))."""
        trace, level = self.traces[name], self.level(name)
        if not trace.within.steps:
            return math.sqrt(level * (1.0 - level)), self.level_error(name)
        low, high = trace.ends(self.settings[name].range_of("reward"))
        if trace.watches_another:
            lowest, highest = trace.earned
            low, high = self.settings[name].range_of("reward") or (
                (lowest[-1], highest[0]) if lowest and lowest[-1] < highest[0] else (0.0, 1.0)
            )
        # the largest deviation of numbers in a range is half of it
        return trace.within.value / (high - low), trace.within.error((high - low) / 2.0) / (high - low)

    def transfer(self, name: str) -> tuple[float, float]:
        """Smoothed mean cosine with the other tasks, and its error: one of variance 1 counts as measured."""
        found, rate = self.cosines[name], self.config["smoothing"]
        mean = square = 0.0
        for n, value in enumerate(found, 1):
            gain = max(rate, 1.0 / n)
            mean, square = mean + gain * (value - mean), square + gain * (value**2 - square)
        if not found:
            return 0.0, 0.0
        n = len(found)
        variance = (n * max(0.0, square - mean**2) + 1.0) / (n + 1)
        return mean, math.sqrt(variance * max(1.0 / n, rate / (2.0 - rate)))

    def _by_spread(self) -> dict[str, float]:
        """``prior exp(s / temperature)``, ``s`` the spread, of ``tac`` times 1 + alpha transfer, cleared."""
        alpha = self.config.get("alpha", 0.0)
        scores, errors = {}, {}
        for name in self.traces:
            if self.traces[name].prompts:
                (spread, error), (transfer, doubt) = self.spread(name), self.transfer(name)
                factor = max(0.0, 1.0 + alpha * transfer)
                scores[name] = spread * factor
                errors[name] = math.hypot(factor * error, spread * alpha * doubt)
        if not scores:
            return {}
        cleared, t = self.cleared(scores, errors), self.config["temperature"]
        top = max(cleared.values())
        return {name: self.prior[name] * math.exp((s - top) / t) for name, s in cleared.items()}

    def gate(self, name: str) -> None:
        """Hold a task far from its target after 200 steps with under 2 % informative groups, up to 5 %."""
        rate = self.traces[name].informative_rate
        is_learnt = self.level(name) >= 0.9 * self.settings[name].target
        self.dead_steps[name] = self.dead_steps[name] + 1 if rate < 0.02 and not is_learnt else 0
        if self.dead_steps[name] >= 200:
            self.held.add(name)
        elif rate > 0.05 or is_learnt:
            self.held.discard(name)

    def deficit(self, name: str) -> float:
        return max(0.0, self.settings[name].target - self.level(name))

    def level_error(self, name: str) -> float:
        return self.traces[name].level_error(self.settings[name].range_of("reward"))

    def level(self, name: str) -> float:
        return self.traces[name].level(self.settings[name].range_of("reward"))

    def informative_rate(self, name: str) -> float:
        return self.traces[name].informative_rate if name in self.traces else 1.0

    def certainty(self, name: str) -> float:
        """n / (n + 100) after n prompts of the task."""
        n = self.traces[name].prompts
        return n / (n + self.config["prior_prompts"]) if n else 0.0

    def cleared(self, values: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
        """Noise taken off: ``m + (v - m) max(0, 1 - (2 e / (v - m))^2)``, e the error of ``v - m``."""
        q = {name: self.prior[name] * self.certainty(name) for name in values}
        total = math.fsum(q.values())
        q = {name: x / total for name, x in q.items()}
        mean = math.fsum(q[name] * v for name, v in values.items())
        result = {}
        for name, v in values.items():
            # the task itself is part of the mean
            own = ((1.0 - q[name]) * errors[name]) ** 2
            others = math.fsum((q[o] * errors[o]) ** 2 for o in values if o != name)
            distance = v - mean
            kept = 1.0 - 4.0 * (own + others) / distance**2 if distance else 0.0
            result[name] = mean + distance * max(0.0, kept)
        return result

    def _preferences(self) -> dict[str, float]:
        seen = [name for name, trace in self.traces.items() if trace.prompts]
        if self.settings.policy == "mt_grpo":
            return {name: math.exp(self.logits[name]) for name in seen}
        if self.settings.policy == "patience":
            return {name: self.prior[name] * self.scale[name] for name in seen}
        if self.settings.policy == "bandit":
            part = self.config["exploration"]
            return {name: (1.0 - part) * self.arms[name] + part * self.prior[name] for name in seen}
        if self.settings.policy in ("learnability", "tac"):
            return self._by_spread()
        return self._by_way() if self.settings.policy == "straggler" else self._by_deficit()

    def _by_way(self) -> dict[str, float]:
        """``prior r^e`` with ``r`` the part of the way to the target that is left, cleared."""
        left, errors = {}, {}
        for name in self.traces:
            if self.traces[name].prompts:
                start = self.start[name]
                left[name] = self.deficit(name) / start if start > 1e-6 else 0.0
                # of the level now and of the one at the start
                errors[name] = (
                    self.level_error(name) * math.hypot(1.0, left[name]) / start if left[name] else 0.0
                )
        if not any(left.values()):
            return {}
        cleared = self.cleared(left, errors)
        return {name: self.prior[name] * r ** self.config["exponent"] for name, r in cleared.items()}

    def _by_deficit(self) -> dict[str, float]:
        """``prior s^a`` with ``s`` the distance to the target times what the groups teach, cleared."""
        scores, errors = {}, {}
        for name, trace in self.traces.items():
            if not trace.prompts:
                continue
            deficit = self.deficit(name)
            rate = max(trace.informative_rate, 0.02)
            learnable, error = 1.0, 0.0
            if rate < 0.25 * NEAR:
                learnable = math.sqrt(rate / 0.25)
                error = min(0.5, 0.5 * learnable * trace.informative.error(1.0) / rate)
            low, high = trace.ends(self.settings[name].range_of("reward"))
            if trace.above.steps and deficit > 0.0:
                # of a group that teaches, as a part of the way that is left
                part = trace.above.value / (high - low) / rate / deficit
                if part < 0.25 * NEAR:
                    doubt = trace.above.error(high - low) / (high - low) / rate / deficit
                    learnable, error = learnable * part / 0.25, min(0.5, learnable * doubt / 0.25)
            learnable = max(learnable, math.sqrt(0.02 / 0.25))
            scores[name] = deficit * learnable
            errors[name] = math.hypot(learnable * self.level_error(name), deficit * error)
        top = max(scores.values(), default=0.0)
        if not top > 0.0:
            return {}
        cleared = self.cleared(scores, errors)
        return {n: self.prior[n] * (s / top) ** self.config["sharpness"] for n, s in cleared.items()}

    def _wanted(self) -> dict[str, float]:
        """The prior, moved as far as is certain towards what the policy wants."""
        if self.settings.policy == "static":
            return dict(self.prior)
        if self.settings.policy == "uniform":
            return {name: 1.0 / len(self.prior) for name in self.prior}
        preferences = self._preferences()
        total = math.fsum(preferences.values())
        if not total > 0.0:
            return dict(self.prior)
        mass = math.fsum(self.prior[name] for name in preferences)
        moves = {n: self.certainty(n) * (mass * p / total - self.prior[n]) for n, p in preferences.items()}
        up = math.fsum(m for m in moves.values() if m > 0.0)
        down = -math.fsum(m for m in moves.values() if m < 0.0)
        if min(up, down) <= 0.0:
            return dict(self.prior)
        return {
            n: p + moves.get(n, 0.0) * min(up, down) / (up if moves.get(n, 0.0) > 0.0 else down)
            for n, p in self.prior.items()
        }

    def shares(self) -> dict[str, float]:
        """The shares of the policy, raised to the floors, times the guard's factors, raised again.

        A task that the gate holds gets its floor alone, and enough to notice that it can be learnt again;
        all of them held, shares are the weights. A task whose factor is 0 has no floor.
        """
        wanted, floors = self._wanted(), dict(self.floors)
        if len(self.held) == len(wanted):
            wanted = dict(self.prior)
        elif self.settings.policy not in ("static", "uniform"):
            for name in self.held:
                wanted[name] = 0.0
                floors[name] = max(floors[name], min(0.02, 0.4 / len(floors)))
        shares = raised(wanted, floors)
        factors = {name: self.factors.get(name, 1.0) for name in shares}
        if any(factors.values()):
            scaled = {name: share * factors[name] for name, share in shares.items()}
            if not any(scaled.values()):
                scaled = {name: self.prior[name] * factors[name] for name in shares}
            scaled = {name: share for name, share in scaled.items() if share > 0.0}
            shares = raised(scaled, floors)
        total = math.fsum(shares.values())
        return {t.name: shares.get(t.name, 0.0) / total for t in self.settings.trained}

    def quotas(self) -> dict[str, int]:
        total = self.settings.prompts_per_step
        counts, self.carry = apportioned(self.shares(), total, self.carry, self.ranks)
        return counts

    def carry_over(self, short: Mapping[str, int]) -> None:
        """Owe a task the groups it was short of, one step's worth at most, at the expense of all by share."""
        shares, total = self.shares(), self.settings.prompts_per_step
        owed = {
            name: min(float(n), max(0.0, shares[name] * total - self.carry.get(name, 0.0)))
            for name, n in short.items()
        }
        everything = math.fsum(owed.values())
        for name, share in shares.items():
            if share > 0.0:
                self.carry[name] = self.carry.get(name, 0.0) + owed.get(name, 0.0) - share * everything


@dataclass
class KL:
    """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) / horizon)."""

    task: Task
    beta: float
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.beta

    def update(self, kl: float) -> None:
        target = self.task.kl_target
        if target is not None and math.isfinite(kl):
            self.beta *= 1.0 + min(0.2, max(-0.2, kl / target - 1.0)) / self.task.kl_horizon


@dataclass
class Multiplier:
    """PID on the smoothed cost less its aim, or ascent on log lambda."""

    rule: ConstraintRule
    average: float | None = None

    def __post_init__(self) -> None:
        self.config = {
            "mode": "pid",
            "setpoint": 0.6,
            "smoothing": 0.2,
            "initial_value": 0.0,
            "max_value": 10.0,
            "proportional": 2.0,
            "integral": 0.05,
            "derivative": 2.0,
            "log_rate": 0.5,
        } | self.rule.multiplier
        self.value = self.integral = self.config["initial_value"]
        self.log_value = math.log(max(0.01, self.value))

    def go_on(self, former: Multiplier) -> None:
        """Go on from the value of ``former``, which may have had other settings."""
        self.average, self.integral, self.log_value = former.average, former.integral, former.log_value
        if former.config["mode"] != self.config["mode"]:
            self.integral, self.log_value = former.value, math.log(max(0.01, former.value))
        self.value = min(former.value, self.config["max_value"])

    def update(self, cost: float) -> None:
        config, before = self.config, self.average
        self.average = cost if before is None else before + config["smoothing"] * (cost - before)
        excess = self.average - config["setpoint"] * self.rule.limit
        most = config["max_value"]
        if config["mode"] == "log":
            low, high = math.log(0.01), math.log(most)
            self.log_value = min(high, max(low, self.log_value + config["log_rate"] * excess))
            self.value = min(most, math.exp(self.log_value)) if self.log_value > low else 0.0
            return
        rise = 0.0 if before is None else max(0.0, self.average - before)
        self.integral = min(most, max(0.0, self.integral + config["integral"] * excess))
        value = config["proportional"] * excess + self.integral + config["derivative"] * rise
        self.value = min(most, max(0.0, value))
