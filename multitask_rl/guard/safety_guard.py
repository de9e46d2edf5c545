"""SafetyGuard: watches held-out metrics, and rolls the run back when one of them falls.

evaluation -> detector per metric (CUSUM against its demonstrated value) -> paired confirmation -> decision.
Training rewards do not decide: a hacked reward rises while the ability falls.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from multitask_rl.boundary.printable import counted
from multitask_rl.config.run import GuardConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.guard.base import Confirm, Guard
from multitask_rl.guard.decision import (
    CheckpointInfo,
    GuardAction,
    GuardDecision,
    RollbackAdjustments,
    choose_step,
)
from multitask_rl.guard.hacking import HackingDetector, Observation, StepHistory
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.watched_metric import DetectorSettings, WatchedMetric, build_watched
from multitask_rl.records import Direction, Event, TaskEvaluation, TaskStats, rename_task, rename_tasks
from multitask_rl.statistics.definitions import is_comparable
from multitask_rl.statistics.intervals import compare_paired, summarise

_DEFAULTS = GuardConfig()
_MAX_SNAPSHOTS = 64
_GOES_ON = "; set guard.guard_config.on_changed_task=warn to go on with the task as it is"
_OVERWHELMING = 2.0
"""Evidence above this multiple of its limit needs no confirmation by the stored evaluations."""


class SafetyGuard(Guard):
    """Decides after every held-out evaluation whether the run may go on from these weights.

    Args:
        monitor_metrics, threshold_delta, rollback_steps, absolute, max_rollbacks: see ``GuardConfig``.
        guard_config: further keys, see ``SafetyGuardConfig``.

    Raises:
        ConfigError: an unknown key or a value out of range.
    """

    Config: ClassVar[type[SafetyGuardConfig]] = SafetyGuardConfig

    def __init__(
        self,
        monitor_metrics: Sequence[str] | None = None,
        threshold_delta: float = _DEFAULTS.threshold_delta,
        rollback_steps: int = _DEFAULTS.rollback_steps,
        absolute: bool = _DEFAULTS.absolute,
        max_rollbacks: int = _DEFAULTS.max_rollbacks,
        **guard_config: Any,
    ) -> None:
        self._section = GuardConfig(
            monitor_metrics=list(monitor_metrics or ()),
            threshold_delta=threshold_delta,
            absolute=absolute,
            max_rollbacks=max_rollbacks,
            rollback_steps=rollback_steps,
        )
        self.rollback_steps = rollback_steps
        self.config = build_dataclass(SafetyGuardConfig, guard_config, Where(path=("guard", "guard_config")))
        self.webhook = self.config.webhook
        self.bind(())

    @classmethod
    def build(cls, config: GuardConfig) -> SafetyGuard:
        """Return the guard that the run configuration describes."""
        given = asdict(config)
        del given["enabled"], given["plugin"], given["guard_config"]
        return cls(**given, **config.guard_config)

    def bind(self, tasks: Collection[str], metrics: Mapping[str, Mapping[str, bool]] | None = None) -> None:
        """Set the evaluated tasks and reset the state.

        Without ``metrics`` an unknown ``task/metric`` shows at the first evaluation only, as an alarm event.

        Raises:
            ConfigError: ``monitor_metrics`` names an unknown task or metric, or one without a direction.
        """
        section = self._section
        entries = section.monitor_metrics if tasks else ()
        self._tasks = set(tasks)
        self._watched = build_watched(entries, tasks, self.config.directions, metrics)
        self._settings = DetectorSettings(
            drop=abs(section.threshold_delta),
            absolute=section.absolute,
            limit=self.config.cusum_limit,
            num_metrics=max(1, len(self._watched)),
            warmup=self.config.warmup,
        )
        self._good: dict[str, list[float]] = {}
        """Values per prompt of the evaluation that was last judged good, by watched metric."""
        self._good_at, self._since_good = 0, 0
        """Step of the evaluation last judged good, and number of evaluations since."""
        self._fresh: dict[str, list[list[list[float]]]] = {}
        """Metric with an alarm -> values per prompt of each fresh evaluation: first those of the present
        weights, then those of the good weights."""
        self._history = StepHistory(2 * self.rollback_steps)
        self._snapshots: list[tuple[int, dict[str, Any]]] = []
        self._rungs: dict[str, int] = {}
        self._rollbacks: list[int] = []
        """Steps of the rollbacks within the window."""
        self._cooldown_until = -1
        """First step at which evidence accumulates again."""
        self._adjustments = RollbackAdjustments()
        self._began = 0
        """First step under the present adjustments."""
        self._slowed = RollbackAdjustments()
        """Adjustments of the last rollback; only their learning rate counts. Neither a recovery nor a milder
        action ends them."""
        self._slowed_at = 0
        self._is_restored = False
        """A rollback with these adjustments was completed: the run goes on from good weights."""
        self._hacking = HackingDetector(self.config)
        self._warned: set[str] = set()
        self._step = 0
        self._good_until = 0
        self._fallen = ""
        self._judged_good = False

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Record the statistics of the step that started from ``step``, to find the cause of a fall."""
        self._history.record(step, stats)

    def observe(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None = None
    ) -> GuardDecision:
        """Judge the weights of ``step`` by their held-out evaluations, by task.

        ``confirm`` evaluates present and good weights again before an alarm counts; without it the stored
        evaluations are compared.
        """
        previous, self._step = self._step, step
        events = []
        # evidence does not add up during the cooldown; one evaluation alone may still exceed the limit
        is_cooling = step < self._cooldown_until
        for metric in self._watched:
            if is_cooling:
                metric.detector.cusum = 0.0
            evaluation, before = evaluations.get(metric.task), metric.measured
            if evaluation is not None and (event := metric.begin_anew(evaluation)):
                is_fallen = self._adjustments.victim == metric.task and self._fallen in ("", metric.key)
                if is_fallen:  # what its fall was answered with is over
                    self._adjustments = RollbackAdjustments()
                    told = f"{event.reason}; task shares follow the scheduler alone again"
                    event = replace(event, reason=told)
                events.append(event)
                self._rungs.pop(metric.key, None)
                self._good.pop(metric.key, None)
                self._fresh.pop(metric.key, None)
                self._hacking.forget()  # another scale would look as if one value rose and the other fell
                if not is_comparable(before[1:3], metric.measured[1:3]):  # other sampling or prompts
                    self._history.forget([metric.task], "length", "entropy")
                    self._hacking.begin_anew(metric.task)
            missing = f"{metric.key}#missing"
            if evaluation is not None and metric.observe(evaluation, self._settings):
                self._warned.discard(missing)
            elif missing not in self._warned:
                self._warned.add(missing)
                events.append(metric.missing_event(step, evaluation))
            if is_cooling and not self._is_restored:
                metric.detector.cusum = 0.0
        decision = self._decide(step, evaluations, confirm)
        signs = self._signs_of_hacking(since=previous)
        hacked = next((event for event in signs if event.kind == "hacking"), None)
        is_free = decision.action is GuardAction.keep and not self._adjustments.victim
        if hacked is not None and is_free and self.config.act_on_hacking:
            self._adjust(GuardAction.reweight, victim=hacked.task, culprit=hacked.task, step=step)
            place, reason = signs.index(hacked), hacked.reason + self._until_recovered()
            signs[place] = hacked = replace(hacked, reason=reason)
            decision = GuardDecision(
                action=GuardAction.reweight,
                task=hacked.task,
                reason=hacked.reason,
                statistics=hacked.data,
                adjustments=self._adjustments,
            )
        events += [*decision.events, *signs]
        known = [metric for metric in self._watched if metric.detector.count]
        if decision.judged_good:
            self._since_good, self._good_at = 0, step
        elif all(f"{metric.key}#missing" not in self._warned for metric in known):
            self._since_good += 1
        if decision.judged_good:
            known = [metric for metric in self._watched if metric.task in evaluations]
            found = {metric.key: metric.find(evaluations[metric.task]) for metric in known}
            self._good = {key: list(value.values) for key, value in found.items() if value is not None}
            victim = self._adjustments.victim
            if victim and step > self._began and step >= self._cooldown_until:
                rungs = self._rungs.items()
                self._rungs = {key: rung for key, rung in rungs if key.partition("/")[0] != victim}
                self._adjustments = RollbackAdjustments()
                reason = f"{victim} has recovered: task shares follow the scheduler alone again"
                events.append(Event(step=step, source="guard", kind="recovered", reason=reason, task=victim))
        self._judged_good = decision.judged_good
        self._snapshots.append((step, {metric.key: metric.state_dict() for metric in self._watched}))
        del self._snapshots[:-_MAX_SNAPSHOTS]
        return replace(decision, events=events)

    def forget_rewards(self, tasks: Collection[str]) -> None:
        """See ``Guard``."""
        self._history.forget(tasks, "reward")
        if tasks:
            self._hacking.forget()

    def forget_tasks(self, tasks: Collection[str]) -> None:
        """See ``Guard``. A task not evaluated either loses its factor; if it is the victim, all tasks do."""
        self._history.remove(tasks)
        gone, now = set(tasks) - self._tasks, self._adjustments
        factors = {task: factor for task, factor in now.weight_factors.items() if task not in gone}
        is_over = now.victim in gone
        self._adjustments = RollbackAdjustments() if is_over else replace(now, weight_factors=factors)

    def rollback_target(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
        """Return the checkpoint to restore: judged good, and at most ``rollback_steps`` old.

        None = there is none, or none is better than the present weights (``choose_step``).
        """
        good = {c.step: c for c in checkpoints if c.judged_good}
        steps = [step for step in good if 0 <= self._step - step <= self.rollback_steps]
        chosen = choose_step(steps, self._values(self._fallen), fell_after=self._good_until)
        return None if chosen is None else good[chosen]

    def _values(self, key: str) -> list[tuple[int, float, float]]:
        """Return (step, value, standard error) of the evaluations in ``_seen``."""
        return [(at, state["value"], state["error"]) for at, state in self._seen(key)]

    def _seen(self, key: str) -> list[tuple[int, dict[str, Any]]]:
        """Return (step, state of the metric's detector) of evaluations that measured what it measures now.

        Evaluations before its first value are left out.
        """
        now = next((metric.measured for metric in self._watched if metric.key == key), ())
        states = [(at, own[key]) for at, own in self._snapshots if key in own]
        known = [(at, own["detector"]) for at, own in states if is_comparable(own["measured"], now)]
        return [(at, detector) for at, detector in known if detector["count"]]

    def rolled_back(self, target: CheckpointInfo, *, step: int) -> list[Event]:
        """Restore the detectors to their state at ``target``, with CUSUM 0; return the event to log.

        A metric begins anew if it was not watched then, or if a resume or a change of its task has redefined
        it since. The rollback counts towards ``max_rollbacks``.
        """
        self._snapshots = [(at, state) for at, state in self._snapshots if at <= target.step]
        self._since_good = 0
        if target.step < self._good_at:  # values of weights that are undone are nothing to compare with
            self._good, self._good_at = {}, target.step
        present = {metric.key: metric.measured for metric in self._watched}
        restored = self._snapshots[-1][1] if self._snapshots else {}
        self._restore(restored)
        for metric in self._watched:
            if metric.key not in restored or not is_comparable(metric.measured, present[metric.key]):
                metric.forget()
                metric.measured = present[metric.key]
                self._rungs.pop(metric.key, None)
                self._good.pop(metric.key, None)
            metric.detector.cusum = 0.0
        shares = "".join(f"{change}, " for change in self._changed_shares())
        self._history.rewind(target.step)
        self._hacking.forget()
        self._rollbacks.append(self._began)
        self._cooldown_until += step - self._began
        self._began = self._slowed_at = step
        self._is_restored, change = True, self._adjustments
        reason = (
            f"rolled back from step {self._step} to {target.step}; learning rate x {change.lr_factor:g} for "
            f"{counted(change.lr_hold_steps, 'step')}, {shares}data of the window "
            f"{'skipped' if change.skip_data else 'seen again'}"
        )
        data = {"from": self._step, "to": target.step, "rollbacks": len(self._rollbacks)}
        kind, self._step = "rolled_back", step
        return [Event(step=step, source="guard", kind=kind, reason=reason, data=data, task=change.victim)]

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate that is in force at ``step``."""
        return self._slowed.lr_factor_after(step - self._slowed_at)

    def weight_factors(self) -> dict[str, float]:
        """Return the current factors on the scheduler's shares."""
        return dict(self._adjustments.weight_factors)

    def metrics(self) -> dict[str, float]:
        """Return ``guard/judged_good``, ``guard/rollbacks`` and per watched metric ``guard/<key>/...``.

        These are ``value``, ``demonstrated``, ``cusum`` and ``cusum_limit``.
        """
        values = {"guard/judged_good": float(self._judged_good)}
        values["guard/rollbacks"] = float(len(self._rollbacks))
        for metric in self._watched:
            if metric.detector.count:
                statistics = metric.statistics(self._settings)
                for name in ("value", "demonstrated", "cusum", "cusum_limit"):
                    values[f"guard/{metric.key}/{name}"] = statistics[name]
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        state = {
            "watched": {metric.key: metric.state_dict() for metric in self._watched},
            "confirmation": {
                "good": self._good,
                "good_at": self._good_at,
                "since_good": self._since_good,
                "fresh": self._fresh,
            },
            "history": self._history.state_dict(),
            "snapshots": [list(snapshot) for snapshot in self._snapshots],
            "response": {
                "rungs": self._rungs,
                "adjustments": asdict(self._adjustments),
                "rollbacks": self._rollbacks,
                "cooldown_until": self._cooldown_until,
                "began": self._began,
                "slowed": asdict(self._slowed),
                "slowed_at": self._slowed_at,
                "is_restored": self._is_restored,
            },
            "hacking": self._hacking.state_dict(),
            "warned": sorted(self._warned),
            "step": self._step,
            "good_until": self._good_until,
            "judged_good": self._judged_good,
            "fallen": self._fallen,
        }
        return _copy(state)

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict`` after ``bind``, at a resume; tasks added since start fresh.

        ``renamed``: old task name -> new.
        """
        state = _copy(state)
        self._restore(rename_tasks(state["watched"], renamed))
        self._good = rename_tasks(state["confirmation"]["good"], renamed)
        self._good_at = state["confirmation"]["good_at"]
        self._since_good = state["confirmation"]["since_good"]
        self._fresh = rename_tasks(state["confirmation"]["fresh"], renamed)
        self._history.load_state_dict(state["history"], renamed)
        self._snapshots = [(at, rename_tasks(snapshot, renamed)) for at, snapshot in state["snapshots"]]
        own = state["response"]
        saved = own["adjustments"]
        saved["weight_factors"] = rename_tasks(saved["weight_factors"], renamed)
        saved |= {role: rename_task(saved[role], renamed) for role in ("victim", "culprit")}
        self._rungs, self._adjustments = rename_tasks(own["rungs"], renamed), RollbackAdjustments(**saved)
        self._slowed, self._slowed_at = RollbackAdjustments(**own["slowed"]), own["slowed_at"]
        self._rollbacks, self._cooldown_until = own["rollbacks"], own["cooldown_until"]
        self._began, self._is_restored = own["began"], own["is_restored"]
        self._hacking.load_state_dict(state["hacking"], renamed)
        self._warned = {rename_task(key, renamed) for key in state["warned"]}
        self._step, self._good_until = state["step"], state["good_until"]
        self._judged_good, self._fallen = state["judged_good"], rename_task(state["fallen"], renamed)

    def _restore(self, watched: Mapping[str, Mapping[str, Any]]) -> None:
        for metric in self._watched:
            if metric.key in watched:
                metric.load_state_dict(watched[metric.key])

    def _decide(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None
    ) -> GuardDecision:
        settings = self._settings
        seen = [metric for metric in self._watched if f"{metric.key}#missing" not in self._warned]
        able = [metric for metric in seen if metric.can_fall(settings, self.config.min_demonstrated)]
        alarmed = [metric for metric in able if metric.detector.alarms(settings)]
        if alarmed:
            alarmed.sort(key=lambda m: (m.detector.cusum - m.detector.limit(settings), m.key), reverse=True)
            answers = (self._answer_alarm(metric, step, evaluations, confirm) for metric in alarmed)
            first = next(answers)
            if first.action is not GuardAction.warn:
                return first
            # it was not confirmed, or its task has changed: the next alarm is answered
            return next((own for own in answers if own.action is not GuardAction.warn), first)
        self._fresh = {}
        for metric in able:
            above = metric.detector.cusum > 0.5 * metric.detector.limit(settings)
            if above and metric.key not in self._warned:
                self._warned.add(metric.key)
                return self._build(GuardAction.warn, metric, step, "is falling; not yet a regression")
            if metric.detector.cusum == 0.0:
                self._warned.discard(metric.key)
        # the demonstrated value is a cautious bound: weights above it may be far below the last good ones.
        # A lower level that lasts, and is no regression, is the new one
        if self._since_good < settings.warmup:
            for metric in able:
                former = self._good.get(metric.key)
                z, evaluation = self.config.confirm_z, evaluations[metric.task]
                test = metric.fall_since(evaluation, former, z, settings) if former else None
                if test is None:
                    continue
                if step < self._cooldown_until:
                    return GuardDecision(judged_good=False)
                text = (
                    f"is {test.drop:.3f} lower than when last judged good, on the same prompts (z "
                    f"{test.z:.1f}); not yet a regression"
                )
                numbers = metric.statistics(settings) | {"z": test.z, "paired_drop": test.drop}
                return self._build(GuardAction.warn, metric, step, text, numbers)
        # a metric that never had a value (its rewards fail, its name is misspelt) does not count
        complete = len(seen) == sum(metric.detector.count > 0 for metric in self._watched)
        good = complete and bool(seen) and all(metric.detector.is_good(settings) for metric in seen)
        return GuardDecision(judged_good=good)

    def _answer_alarm(
        self,
        metric: WatchedMetric,
        step: int,
        evaluations: Mapping[str, TaskEvaluation],
        confirm: Confirm | None,
    ) -> GuardDecision:
        """Confirm the alarm; then take the next rung of the ladder, or stop.

        A rollback does not help a task that falls by its own training, unless its share goes to other tasks.
        So a task that is trained alone stops the run at its second fall of this kind.
        """
        statistics = metric.statistics(self._settings)
        is_confirmed, good = self._confirms(metric, evaluations[metric.task], statistics, confirm)
        if not is_confirmed and (text := self._find_change(metric, good, statistics)):
            action = GuardAction(self.config.on_changed_task)
            if action is GuardAction.stop:
                self._note_fall(metric, step)
            else:  # the changed task goes on: forget all values of the former one
                metric.forget()
                for _, states in self._snapshots:
                    states.pop(metric.key, None)
                self._good.pop(metric.key, None)
                self._fresh.pop(metric.key, None)
            return self._build(action, metric, step, text, statistics)
        if not is_confirmed:
            text = "looks lower, but a paired comparison does not confirm it"
            return self._build(GuardAction.warn, metric, step, text, statistics)
        self._note_fall(metric, step)
        action = self._choose(metric.key, statistics, step)
        if action is GuardAction.stop:
            times = len(self._rollbacks)
            text = f"has regressed again after {counted(times, 'rollback')}" if times else "has regressed"
            return self._build(action, metric, step, text, statistics)
        since = [self._good_until, metric.detector.good_step]
        is_alone = self._history.trained == [metric.task]
        if self._rollbacks and is_alone and self._history.has_risen(metric.task, since):
            text = (
                "has regressed again while its training reward rose, and no other task could get its share: "
                "it would fall once more"
            )
            return self._build(GuardAction.stop, metric, step, text, statistics)
        culprit = self._history.find_culprit(metric.task, since)
        self._adjust(action, victim=metric.task, culprit=culprit, step=step)
        self._fresh = {}
        for fallen in self._watched if action is GuardAction.rollback else [metric]:
            fallen.detector.cusum = 0.0
        return self._build(action, metric, step, "has regressed", statistics)

    def _note_fall(self, metric: WatchedMetric, step: int) -> None:
        """Record which metric fell and since when; they determine the culprit and the rollback's target.

        The fall begins after the detector's ``good_step`` or earlier: an evaluation during the fall can look
        good, because a moving average lags behind a metric that rose fast.
        """
        seen = [*self._values(metric.key), (step, metric.detector.value, metric.detector.error)]
        steps = [at for at, _, _ in seen[:-1] if step - at <= self.rollback_steps]
        latest = metric.detector.good_step
        found = choose_step(steps, seen, fell_after=latest)
        self._good_until = latest if found is None else min(found, latest)
        self._fallen = metric.key

    def _confirms(
        self,
        metric: WatchedMetric,
        evaluation: TaskEvaluation,
        statistics: dict[str, float],
        confirm: Confirm | None,
    ) -> tuple[bool, TaskEvaluation | None]:
        """Return whether a paired test confirms the fall, and the fresh evaluation of the good weights.

        The numbers of the test are added to ``statistics``.

        A fresh evaluation samples from both weights with new seeds. It is independent of the detector: a
        false alarm passes only if both err by chance. Several fresh evaluations of one alarm are averaged per
        prompt: two or three show a fall that is too small for one. Fixed texts give the same values again: no
        new evidence. If no weights were judged good yet, there is nothing to compare with and the detector
        alone decides.
        """
        stored = metric.find(evaluation)
        if not self.config.confirm or stored is None:
            return True, None
        fresh = confirm(metric.task) if confirm is not None else None
        pair = [found for side in fresh or () if (found := metric.find(side)) is not None]
        if len(pair) == 2:
            if any(len(own.values) != len(self._fresh_means(metric.key)[0]) for own in pair):
                self._fresh[metric.key] = [[], []]  # the first of the alarm, or the task has other prompts
            for kept, found in zip(self._fresh[metric.key], pair, strict=True):
                kept.append(list(found.values))
            samples, limit = self._fresh_means(metric.key), self.config.confirm_z
        elif self._good.get(metric.key):
            samples, limit = [list(stored.values), self._good[metric.key]], self.config.stored_z
        else:
            return True, None
        test = compare_paired(*samples, direction=stored.direction)
        statistics |= {"z": test.z, "z_limit": limit, "paired_drop": test.drop}
        statistics["paired_prompts"] = float(test.num_prompts)
        overwhelming = fresh is None and statistics["cusum"] > _OVERWHELMING * statistics["cusum_limit"]
        return test.z > limit or overwhelming, fresh[1] if fresh else None

    def _fresh_means(self, key: str) -> list[list[float]]:
        """Return for the present and the good weights the mean of each prompt over the fresh evaluations."""
        sides = self._fresh.get(key, [[], []])
        return [[summarise(values).mean for values in zip(*side, strict=True)] for side in sides]

    def _find_change(
        self, metric: WatchedMetric, good: TaskEvaluation | None, statistics: dict[str, float]
    ) -> str:
        """Return a message if the good weights score lower now than at their own step, else "".

        The numbers of the test are added to ``statistics``. It compares independent means, because a snapshot
        keeps no values per prompt.
        """
        found = metric.find(good) if good is not None else None
        states = [state for at, state in self._seen(metric.key) if good and at == good.step]
        if good is None or found is None or not states or metric.key not in self._fresh:
            return ""
        # all evaluations of the good weights since the alarm began
        now, then = summarise(self._fresh_means(metric.key)[1]), states[-1]
        value = now.mean * found.direction.sign + (
            bool(metric.is_unit) and found.direction is Direction.lower
        )
        drop = then["value"] - value
        statistics["z_changed"] = drop / max(math.hypot(then["error"], now.error), 1e-12)
        if statistics["z_changed"] <= self.config.confirm_z or drop < 0.5 * statistics["relevant_drop"]:
            return ""
        return (
            f"has changed: the weights of step {good.step} scored {then['value']:.3f} there and score "
            f"{value:.3f} now, so its environment, reward or data is no longer what it was"
        )

    def _choose(self, key: str, statistics: Mapping[str, float], step: int) -> GuardAction:
        """Return the action on a confirmed fall of the watched metric ``key``: the next rung of the ladder.

        A fall of twice the threshold takes the last one. One rollback too many in the window becomes a stop.
        """
        last = len(self.config.ladder) - 1
        is_large = statistics["drop"] >= 2.0 * statistics["relevant_drop"]
        rung = last if is_large else self._rungs.get(key, 0)
        self._rungs[key] = rung + 1
        action = GuardAction(self.config.ladder[min(rung, last)])
        if action is GuardAction.rollback:
            self._rollbacks = [at for at in self._rollbacks if step - at < self.config.rollback_window]
            if len(self._rollbacks) >= self._section.max_rollbacks:
                return GuardAction.stop
        return action

    def _adjust(self, action: GuardAction, *, victim: str, culprit: str, step: int) -> None:
        """Set the adjustments from ``step`` on; a rollback also starts the cooldown."""
        config = self.config
        is_rollback = action is GuardAction.rollback
        times = len(self._rollbacks) + 1 if is_rollback else 1
        # a task that is trained alone has the whole share, whatever the factor
        is_alone = len(self._history.trained) == 1
        factors = {} if is_alone else {victim: config.victim_factor}
        if culprit and not is_alone:
            # a task that causes its own fall would fall again, more slowly, with half of its share
            is_frozen = action is GuardAction.freeze or (is_rollback and culprit == victim)
            factors[culprit] = 0.0 if is_frozen else config.culprit_factor**times
        self._adjustments = RollbackAdjustments(weight_factors=factors, victim=victim, culprit=culprit)
        self._began, self._is_restored = step, False
        if is_rollback:
            self._adjustments = replace(
                self._adjustments,
                skip_data=config.skip_data,
                lr_factor=config.lr_factor**times,
                lr_hold_steps=config.lr_hold_steps,
                lr_rewarm_steps=config.lr_rewarm_steps,
            )
            self._slowed, self._slowed_at = self._adjustments, step
            self._cooldown_until = step + config.cooldown_steps * 2 ** (times - 1)

    def _changed_shares(self) -> list[str]:
        """Return a text per trained task with a factor: ``share of TASK x FACTOR``."""
        factors, trained = self.weight_factors().items(), self._history.trained
        return [f"share of {task} x {factor:g}" for task, factor in factors if task in trained]

    def _until_recovered(self) -> str:
        """Return the last part of a reason: the changed shares, and how long they hold; "" without any."""
        changes = self._changed_shares()
        return f"; {', '.join(changes)} until {self._adjustments.victim} has recovered" if changes else ""

    def _signs_of_hacking(self, since: int) -> list[Event]:
        """Return the new signs in the steps from ``since`` on, of tasks whose primary metric is watched."""
        events = []
        for metric in self._watched:
            if not metric.metric and metric.detector.count:
                means = self._history.means_since(metric.task, since)
                seen = metric.detector
                point = Observation(
                    train_reward=means.pop("reward"), value=seen.value, error=seen.error, **means
                )
                events += self._hacking.observe(metric.task, point, self._step)
        return events

    def _build(
        self,
        action: GuardAction,
        metric: WatchedMetric,
        step: int,
        text: str,
        statistics: Mapping[str, float] | None = None,
    ) -> GuardDecision:
        numbers = dict(statistics or metric.statistics(self._settings))
        value, demonstrated = (metric.in_own_unit(numbers[name]) for name in ("value", "demonstrated"))
        reason = (
            f"{metric.key} {text}: {value:.3f} against a demonstrated {demonstrated:.3f} "
            f"(evidence {numbers['cusum']:.1f}, limit {numbers['cusum_limit']:.1f})"
        )
        if action in (GuardAction.reweight, GuardAction.freeze):
            reason += self._until_recovered()
        if action is GuardAction.stop and "z_changed" in numbers:
            reason += _GOES_ON
        acts = action not in (GuardAction.warn, GuardAction.stop)
        changes = self._adjustments if acts else RollbackAdjustments()
        data = {**numbers, "metric": metric.key, "culprit": changes.culprit}
        event = Event(step=step, source="guard", kind=str(action), reason=reason, task=metric.task, data=data)
        return GuardDecision(
            action=action,
            task=metric.task,
            metric=metric.metric,
            reason=reason,
            statistics=numbers,
            adjustments=changes,
            events=[event],
        )


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    # with 1,000 tasks ``copy.deepcopy`` takes ten times as long
    copied: dict[str, Any] = pickle.loads(pickle.dumps(dict(state)))
    return copied
