"""The guard: what a metric has shown it can do, the evidence that it has fallen since, and what follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from scipy.stats import binom, kendalltau, mannwhitneyu, norm
from scipy.stats import t as student

from .records import Number, number
from .settings import GuardRules

Confirm = Callable[[str], "tuple[int, Mapping[str, Number], Mapping[str, Number]] | None"]
"""Task -> step last judged good, and fresh values of the present weights and of those; None: there are none.
"""


@dataclass
class Detector:
    """CUSUM of ``(demonstrated - value) / error - k`` against the running maximum of a lower 95 % bound."""

    number_watched: int
    least_scale: float = 0.0
    """A fall counts as a part of at least this."""
    rules: GuardRules = field(default_factory=GuardRules)
    count: int = 0
    is_unit: bool = False
    average: float = 0.0
    average_weight: float = 0.0
    variance: float = 0.0
    scale: float = 0.0
    bounds: list[float] = field(default_factory=list)
    value: float = 0.0
    demonstrated: float | None = None
    cusum: float = 0.0
    slack: float = 0.0
    is_lower: bool = False
    measured_by: object = None
    """What its values are of; others are not compared with them."""
    good_step: int = -1
    """The last step that does not look like part of a fall: no evidence, and not below the average."""

    @property
    def z(self) -> float:
        """Quantile that the chance of 5 % over all metrics together amounts to."""
        chance = torch.tensor(1.0 - 0.05 / self.number_watched, dtype=torch.float64)
        return math.sqrt(2.0) * float(torch.erfinv(2.0 * chance - 1.0))

    @property
    def error(self) -> float:
        return math.sqrt(self.variance)

    @property
    def limit(self) -> float:
        own = self.rules.cusum_limit
        return own + math.log(self.number_watched) / (2.0 * max(self.slack, 1.0))

    @property
    def relevant_drop(self) -> float:
        if self.rules.absolute:
            return self.rules.drop
        return self.rules.drop * max(abs(self.demonstrated or 0.0), self.scale)

    def oriented(self, mean: float) -> float:
        """Higher is better; a rate that should fall is watched as ``1 - x``."""
        return (1.0 - mean if self.is_unit else -mean) if self.is_lower else mean

    def observe(self, number: Number, ends: tuple[float, float] | None, step: int = 0) -> None:
        """Add an evaluation; rates that should fall are watched as ``1 - x``, other metrics as ``-x``."""
        if not self.count:
            seen = number.by_prompt.values()
            self.is_unit = ends == (0.0, 1.0) or (ends is None and all(0.0 <= v <= 1.0 for v in seen))
        self.is_lower = number.direction != "higher"
        value = self.oriented(number.mean)
        error = max(number.error, math.sqrt((0.02 if self.is_unit else 1e-12) / number.n))
        scale = 0.0 if self.is_unit else max(self.least_scale, error * math.sqrt(number.n))
        self.demonstrated = self.lower_bound() if self.count else None
        self.count += 1
        gain = max(0.1, 1.0 / self.count)
        self.variance += gain * (error**2 - self.variance)
        self.scale += gain * (scale - self.scale)
        self.value = value
        if self.demonstrated is not None:
            self.slack = max(1.0, 0.5 * self.relevant_drop / self.error)
            self.cusum = max(0.0, self.cusum + (self.demonstrated - value) / self.error - self.slack)
        if self.demonstrated is None or (self.cusum == 0.0 and value >= self.average):
            self.good_step = step
        self.average += gain * (value - self.average)
        self.average_weight = (1.0 - gain) ** 2 * self.average_weight + gain**2
        self.bounds.append(self.average - self.z * self.error * math.sqrt(self.average_weight))

    def lower_bound(self) -> float:
        """Newest bound while there are few; from the fifth on the highest of the fourth and later ones."""
        first = self.rules.warmup
        return max(self.bounds[first - 1 :]) if len(self.bounds) > first else self.bounds[-1]

    @property
    def can_fall(self) -> bool:
        if self.count <= self.rules.warmup or self.demonstrated is None:
            return False
        return self.rules.absolute or not self.is_unit or self.demonstrated >= self.rules.min_demonstrated

    @property
    def alarms(self) -> bool:
        return self.can_fall and self.cusum > self.limit

    @property
    def is_good(self) -> bool:
        if self.demonstrated is None:
            return self.count > 0
        return self.value + self.z * self.error >= self.demonstrated and self.cusum <= 0.5 * self.limit


@dataclass
class Guard:
    """Detectors by what they watch: a task (its primary metric) or ``task/metric``."""

    watched: list[str]
    begin_at_zero: list[str] = field(default_factory=list)
    """Those whose best value is 0, where a part of the level means nothing."""
    rules: GuardRules = field(default_factory=GuardRules)

    def __post_init__(self) -> None:
        self.detectors = {key: self.new_detector(key) for key in self.watched}
        self.good: dict[str, Number] = {}
        self.since_good = 0
        self.measured_by: Mapping[str, object] = {}
        """Watched metric -> what its values are of."""

    def refit(self, watched: list[str], begin_at_zero: list[str], measured_by: Mapping[str, object]) -> None:
        """Watch other metrics from now on; those that were not watched begin afresh."""
        self.watched, self.begin_at_zero, self.measured_by = watched, begin_at_zero, measured_by
        self.detectors = {key: self.detectors.get(key) or self.new_detector(key) for key in watched}
        for detector in self.detectors.values():
            detector.number_watched = len(watched)
        self.good = {key: value for key, value in self.good.items() if key in watched}

    def new_detector(self, key: str) -> Detector:
        return Detector(len(self.watched), 1.0 if key in self.begin_at_zero else 0.0, self.rules)

    def observe(
        self, numbers: Mapping[str, Number], ends: Mapping[str, tuple[float, float] | None]
    ) -> tuple[bool, bool]:
        """Return whether there is an alarm, and whether the weights are judged good."""
        seen = self.see(numbers, ends)
        alarm = any(self.detectors[key].alarms for key in seen)
        return alarm, self.judge(numbers, seen, alarm)

    def see(
        self, numbers: Mapping[str, Number], ends: Mapping[str, tuple[float, float] | None], step: int = 0
    ) -> list[str]:
        """Return what has a value with an error."""
        for key in [key for key in self.watched if key in numbers]:
            now = self.measured_by.get(key)
            if self.detectors[key].measured_by != now:
                if self.detectors[key].count:
                    self.begin_anew(key)
                self.detectors[key].measured_by = now
        seen = [key for key in self.watched if key in numbers and math.isfinite(numbers[key].error)]
        for key in seen:
            self.detectors[key].observe(numbers[key], ends.get(key), step)
        return seen

    def begin_anew(self, key: str) -> None:
        """Forget values that are of something else than those from now on."""
        self.detectors[key] = self.new_detector(key)
        self.good.pop(key, None)

    def judge(self, numbers: Mapping[str, Number], seen: Sequence[str], alarm: bool) -> bool:
        """Return whether the weights are judged good."""
        had_values = [key for key, d in self.detectors.items() if d.count]
        good = not alarm and bool(seen) and len(had_values) == len(seen)
        good = good and all(self.detectors[key].is_good for key in seen)
        if self.since_good < self.rules.warmup:
            good = good and not any(self.is_below_good(key, numbers[key]) for key in seen)
        if good:
            self.since_good = 0
        elif set(had_values) <= set(seen):
            self.since_good += 1
        if good:
            self.good = {key: numbers[key] for key in self.watched if key in numbers}
        return good

    def is_below_good(self, key: str, number: Number) -> bool:
        """Compare with the evaluation last judged good, prompt by prompt, once falls can be detected."""
        detector, good = self.detectors[key], self.good.get(key)
        if good is None or not detector.can_fall:
            return False
        z, drop = fall(number, good)
        scale = 1.0 if self.rules.absolute else max(abs(detector.oriented(good.mean)), detector.scale)
        least = float(norm.isf(norm.sf(self.rules.confirm_z) / len(self.watched)))
        return z > least and drop > self.rules.drop * scale


@dataclass
class ActingGuard(Guard):
    """One that answers alarms: what it confirms, which step it goes back to, and what it changes then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.good_at = 0
        self.fresh: dict[str, list[tuple[Number, Number]]] = {}
        """Watched metric with an alarm -> fresh values of the present and of the good weights."""
        self.rungs: dict[str, int] = {}
        self.rollbacks: list[int] = []
        self.cooldown_until = -1
        self.factors: dict[str, float] = {}
        self.victim = ""
        self.began = 0
        self.slowed, self.slowed_at = 1.0, 0
        self.is_restored = False
        self.fallen, self.fall_began = "", 0
        self.history: list[dict[str, tuple[int, float, float, float]]] = []
        """By task of every step: its number, groups that teach, groups to train on, training reward."""
        self.snapshots: list[tuple[int, dict[str, Detector]]] = []

    def refit(self, watched: list[str], begin_at_zero: list[str], measured_by: Mapping[str, object]) -> None:
        super().refit(watched, begin_at_zero, measured_by)
        self.fresh = {key: own for key, own in self.fresh.items() if key in watched}
        self.rungs = {key: rung for key, rung in self.rungs.items() if key in watched}

    def forget_all_but(self, trained: Sequence[str]) -> None:
        """Forget steps of tasks that are not trained any more; answer no fall of a task that is gone."""
        self.history = [{name: x[name] for name in x if name in trained} for x in self.history]
        there = {*trained, *(key.partition("/")[0] for key in self.watched)}
        self.factors = {name: factor for name, factor in self.factors.items() if name in there}
        if self.victim not in there:
            self.factors, self.victim = {}, ""

    def forget_rewards(self, tasks: Sequence[str]) -> None:
        """Take the training rewards so far as not known: those to come are others."""
        for own in self.history:
            own |= {name: (*own[name][:3], math.nan) for name in tasks if name in own}

    def begin_anew(self, key: str) -> None:
        super().begin_anew(key)
        self.fresh.pop(key, None)
        self.rungs.pop(key, None)
        if self.victim == key.partition("/")[0] and self.fallen in ("", key):
            self.factors, self.victim = {}, ""  # what its fall was answered with is over

    def note_step(self, step: int, seen: Mapping[str, tuple[float, float, float]]) -> None:
        """Add a step; forget those of tasks that are not trained any more."""
        self.history = [{name: x[name] for name in x if name in seen} for x in self.history]
        self.history.append({name: (step, *own) for name, own in seen.items()})
        del self.history[: -2 * self.rules.rollback_steps]

    def rate(self, step: int) -> float:
        """Factor on the learning rate: it is held after a rollback, and then rises."""
        rules, after = self.rules, step - self.slowed_at
        if after < rules.lr_hold_steps or self.slowed == 1.0:
            return self.slowed
        way = (after - rules.lr_hold_steps) / max(1, rules.lr_rewarm_steps)
        return self.slowed + (1.0 - self.slowed) * min(1.0, way) if rules.lr_rewarm_steps else 1.0

    def decide(
        self,
        step: int,
        numbers: Mapping[str, Number],
        ends: Mapping[str, tuple[float, float] | None],
        confirm: Confirm,
    ) -> tuple[str, bool]:
        """Return what is done (``warn`` and "" change nothing), and whether the weights are judged good."""
        is_cooling = step < self.cooldown_until
        for detector in self.detectors.values():
            detector.cusum *= not is_cooling
        seen = self.see(numbers, ends, step)
        for detector in self.detectors.values():
            detector.cusum *= not is_cooling or self.is_restored
        alarmed = [key for key in seen if self.detectors[key].alarms]
        alarmed.sort(key=lambda key: (self.detectors[key].cusum - self.detectors[key].limit, key))
        action = ""
        for key in reversed(alarmed):
            action = self.answer(key, step, numbers, confirm)
            if action != "warn":
                break
        if not alarmed:
            self.fresh = {}
        is_good = self.judge(numbers, seen, bool(alarmed))
        if is_good:
            self.good_at = step
            if self.victim and step > self.began and step >= self.cooldown_until:
                self.rungs = {key: n for key, n in self.rungs.items() if key.partition("/")[0] != self.victim}
                self.factors, self.victim = {}, ""
        self.snapshots.append((step, copy.deepcopy(self.detectors)))
        return action, is_good

    def answer(self, key: str, step: int, numbers: Mapping[str, Number], confirm: Confirm) -> str:
        """Confirm an alarm; then take the next rung of the ladder, or stop."""
        detector, victim = self.detectors[key], key.partition("/")[0]
        is_confirmed, good_step = self.confirms(key, numbers[key], confirm)
        if not is_confirmed:
            if not self.has_changed(key, good_step):
                return "warn"
            if self.rules.on_changed_task == "stop":
                self.note_fall(key, step)
                return "stop"
            self.detectors[key] = self.new_detector(key)  # the present level is the reference from now on
            for _, states in self.snapshots:
                states.pop(key, None)
            self.good.pop(key, None)
            self.fresh.pop(key, None)
            return "warn"
        self.note_fall(key, step)
        ladder = self.rules.ladder
        fell = (detector.demonstrated or 0.0) - detector.value
        is_large = fell >= 2.0 * detector.relevant_drop
        rung = len(ladder) - 1 if is_large else self.rungs.get(key, 0)
        self.rungs[key] = rung + 1
        action = ladder[min(rung, len(ladder) - 1)]
        if action == "rollback":
            self.rollbacks = [at for at in self.rollbacks if step - at < self.rules.rollback_window]
            if len(self.rollbacks) >= self.rules.max_rollbacks:
                return "stop"
        since = [self.fall_began, detector.good_step]
        if self.rollbacks and self.trained == [victim] and self.has_risen(victim, since):
            return "stop"
        self.change(action, victim, self.culprit(victim, since), step)
        self.fresh = {}
        for name, own in self.detectors.items():
            if action == "rollback" or name == key:
                own.cusum = 0.0
        return action

    def confirms(self, key: str, now: Number, confirm: Confirm) -> tuple[bool, int | None]:
        """Whether a paired comparison confirms the fall; and the step of the good weights, evaluated anew."""
        rules = self.rules
        if not rules.confirm:
            return True, None
        found = confirm(key.partition("/")[0])
        if found is not None and key in found[1] and key in found[2]:
            self.fresh.setdefault(key, []).append((found[1][key], found[2][key]))
            z, _ = fall(*self.averaged(key))
            return z > rules.confirm_z, found[0]
        if key not in self.good:
            return True, None
        z, _ = fall(now, self.good[key])
        detector = self.detectors[key]
        is_overwhelming = found is None and detector.cusum > 2.0 * detector.limit
        return z > rules.stored_z or is_overwhelming, found[0] if found else None

    def averaged(self, key: str) -> tuple[Number, Number]:
        """Fresh values of the present and of the good weights, by prompt the means over all evaluations."""
        found = []
        for side in zip(*self.fresh[key], strict=True):
            values: dict[object, list[float]] = {}
            for own in side:
                for prompt, value in own.by_prompt.items():
                    values.setdefault(prompt, []).append(value)
            means = [math.fsum(x) / len(x) for x in values.values()]
            mean = number(means, list(values), side[0].direction, None)
            assert mean is not None
            found.append(mean)
        return found[0], found[1]

    def has_changed(self, key: str, good_step: int | None) -> bool:
        """Whether the good weights score lower now than when they were judged good: not the actor fell."""
        states = [own[key] for at, own in self.seen_of(key) if at == good_step]
        if key not in self.fresh or not states:
            return False
        _, now = self.averaged(key)
        drop = states[-1].value - self.detectors[key].oriented(now.mean)
        z = drop / max(math.hypot(states[-1].error, now.error), 1e-12)
        return z > self.rules.confirm_z and drop >= 0.5 * self.detectors[key].relevant_drop

    def values(self, key: str) -> list[tuple[int, float, float]]:
        """Step, value and error of the evaluations that had a value."""
        return [(at, own[key].value, own[key].error) for at, own in self.seen_of(key)]

    def seen_of(self, key: str) -> list[tuple[int, dict[str, Detector]]]:
        now = self.detectors[key].measured_by if key in self.detectors else None
        known = [(at, own) for at, own in self.snapshots if key in own and own[key].count]
        return [(at, own) for at, own in known if own[key].measured_by == now]

    def note_fall(self, key: str, step: int) -> None:
        detector = self.detectors[key]
        seen = [*self.values(key), (step, detector.value, detector.error)]
        near = [at for at, _, _ in seen[:-1] if step - at <= self.rules.rollback_steps]
        found = best_step(near, seen, detector.good_step)
        self.fall_began = detector.good_step if found is None else min(found, detector.good_step)
        self.fallen = key

    @property
    def trained(self) -> list[str]:
        """Tasks of which a step had prompts."""
        names = dict.fromkeys(name for own in self.history for name in own)
        return [n for n in names if any(own[n][2] > 0.0 for own in self.history if n in own)]

    def has_risen(self, task: str, since: Sequence[int]) -> bool:
        """Whether the training reward rose: by trend over five steps, or against the eight steps before."""
        seen = [x[task] for x in self.history if task in x]
        own = [(x[0], round(x[3], 9)) for x in seen if math.isfinite(x[3])]
        for start in since:
            rewards = [reward for step, reward in own if step > start]
            if len(rewards) >= 5:
                trend = kendalltau(range(len(rewards)), rewards, alternative="greater")
                if trend.pvalue < 0.023:
                    return True
        after = [reward for step, reward in own if step >= max(since)]
        before = [reward for step, reward in own if step < max(since)][-8:]
        if min(len(after), len(before)) < 3:
            return False
        return bool(mannwhitneyu(after, before, alternative="greater").pvalue < 0.023)

    def culprit(self, victim: str, since: Sequence[int]) -> str:
        """The victim if its reward rose, else the other task with most groups that taught; "" if none did."""
        if self.history and victim in self.history[-1] and self.has_risen(victim, since):
            return victim
        sums = {
            name: math.fsum(x[name][1] for x in self.history if name in x and x[name][0] >= min(since))
            for name in (self.history[-1] if self.history else {})
        }
        able = {name: total for name, total in sums.items() if total > 0.0}
        others = [name for name in able if name != victim] or list(able)
        return max(others, key=lambda name: (able[name], name), default="")

    def change(self, action: str, victim: str, culprit: str, step: int) -> None:
        rules, is_rollback = self.rules, action == "rollback"
        times = len(self.rollbacks) + 1 if is_rollback else 1
        self.factors, self.victim = {}, victim
        if len(self.trained) != 1:
            self.factors[victim] = rules.victim_factor
            if culprit:
                is_frozen = action == "freeze" or (is_rollback and culprit == victim)
                self.factors[culprit] = 0.0 if is_frozen else rules.culprit_factor**times
        self.began, self.is_restored = step, False
        if is_rollback:
            self.slowed, self.slowed_at = rules.lr_factor**times, step
            self.cooldown_until = step + rules.cooldown_steps * 2 ** (times - 1)

    def target(self, good: Sequence[int], step: int) -> int | None:
        """Which of the checkpoints judged ``good`` a rollback restores."""
        near = [at for at in good if 0 <= step - at <= self.rules.rollback_steps]
        return best_step(near, self.values(self.fallen), self.fall_began)

    def rolled_back(self, target: int) -> None:
        """Know what was known at ``target``; the rollback counts, and its changes are in force from there."""
        self.snapshots = [own for own in self.snapshots if own[0] <= target]
        for key in self.watched:
            known, now = self.snapshots[-1][1].get(key), self.detectors[key].measured_by
            if known is None or known.measured_by != now:
                known = None
                self.good.pop(key, None)
                self.rungs.pop(key, None)
            self.detectors[key] = copy.deepcopy(known) or self.new_detector(key)
            self.detectors[key].measured_by = now
        for detector in self.detectors.values():
            detector.cusum, detector.number_watched = 0.0, len(self.watched)
        self.since_good = 0
        if target < self.good_at:
            self.good, self.good_at = {}, target
        self.history = [own for own in self.history if all(x[0] < target for x in own.values())]
        self.rollbacks.append(self.began)
        self.cooldown_until += target - self.began
        self.began = self.slowed_at = target
        self.is_restored = True


def best_step(steps: Sequence[int], seen: Sequence[tuple[int, float, float]], fell_after: int) -> int | None:
    """The newest of ``steps``, from before the fall if there is one, at which the metric was near its best.

    Its value is averaged over neighbouring evaluations. It is within an error of the best of the steps, and
    more than an error above the present one, the last of ``seen``.
    """
    averages = {}
    for i, (step, _, _) in enumerate(seen):
        near = [value for _, value, _ in seen[max(0, i - 1) : i + 2]]
        averages[step] = math.fsum(near) / len(near)
    _, value, error = seen[-1] if seen else (0, 0.0, 0.0)
    if any(step in averages for step in steps):
        steps = [step for step in steps if step in averages and averages[step] > value + error]
    before = [step for step in steps if step <= fell_after] or list(steps)
    if known := [averages[step] for step in before if step in averages]:
        before = [step for step in before if averages.get(step, -math.inf) >= max(known) - error]
    return max(before, default=None)


def fall(now: Number, then: Number) -> tuple[float, float]:
    """Of the mean, prompt by prompt: in normal quantiles, and in its unit; (0, 0) with too few prompts."""
    sign = 1.0 if now.direction == "higher" else -1.0
    smaller = min(len(now.by_prompt), len(then.by_prompt))
    both = [p for p in now.by_prompt if p in then.by_prompt]
    if smaller < 2:
        return 0.0, 0.0
    if 2 * len(both) < smaller:
        a, b = (sign * torch.tensor(list(x.by_prompt.values()), dtype=torch.float64) for x in (now, then))
        drop = float(b.mean() - a.mean())
        return _student(drop, math.hypot(_error(a), _error(b)), smaller - 1), drop
    if len(both) < 2:
        return 0.0, 0.0
    a, b = (sign * torch.tensor([x.by_prompt[p] for p in both], dtype=torch.float64) for x in (now, then))
    drops = b - a
    drop = float(drops.mean())
    if all(v in (0.0, 1.0) for v in (*a.abs().tolist(), *b.abs().tolist())):
        worse, better = int((drops == 1).sum()), int((drops == -1).sum())
        changes = binom(worse + better, 0.5)
        tail = float(changes.sf(max(worse, better)) + 0.5 * changes.pmf(max(worse, better)))
        return math.copysign(_one_sided_z(tail), worse - better) if worse != better else 0.0, drop
    return _student(drop, float(drops.std()) / math.sqrt(len(both)), len(both) - 1), drop


def _error(values: torch.Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _student(drop: float, error: float, degrees: int) -> float:
    if error == 0.0:
        return math.copysign(math.inf, drop) if drop else 0.0
    return _one_sided_z(float(student.sf(drop / error, degrees)))


def _one_sided_z(chance: float) -> float:
    return float(norm.isf(chance))
