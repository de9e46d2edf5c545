"""SafetyGuard: watches held-out abilities, and takes the run back when one of them falls.

evaluation -> detector per metric (CUSUM against a demonstrated level) -> paired confirmation -> decision.
The guard decides and remembers; the trainer restores, changes what ``lr_factor`` and ``weight_factors`` say,
and raises ``GuardStop`` on ``stop``. Training rewards decide nothing here: their mixture moves with the
weights, and a hacked reward rises while the ability falls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from multitask_rl.config.run import GuardConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.guard.base import Confirm, Guard
from multitask_rl.guard.confirmation import Confirmation
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision, RollbackAdjustments
from multitask_rl.guard.detector import DetectorSettings
from multitask_rl.guard.hacking import HackingMonitor, Observation
from multitask_rl.guard.history import StepHistory
from multitask_rl.guard.response import Response
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.target import choose_target
from multitask_rl.guard.watch import MetricWatch, build_watches
from multitask_rl.records import Event, TaskEvaluation, TaskStats

__all__ = ["SafetyGuard"]

_DEFAULTS = GuardConfig()
_MAX_SNAPSHOTS = 64


class SafetyGuard(Guard):
    """Decide after every held-out evaluation whether the run may go on from these weights.

    ``bind`` once; per step ``record_step``; per evaluation ``observe``; after a rollback ``rolled_back``.

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
        given = GuardConfig(
            monitor_metrics=list(monitor_metrics or ()),
            threshold_delta=threshold_delta,
            rollback_steps=rollback_steps,
            absolute=absolute,
            max_rollbacks=max_rollbacks,
        )
        self.monitor_metrics = given.monitor_metrics
        self.threshold = abs(given.threshold_delta)
        self.rollback_steps = given.rollback_steps
        self.absolute = given.absolute
        self.max_rollbacks = given.max_rollbacks
        self.config = build_dataclass(SafetyGuardConfig, guard_config, Where(path=("guard", "guard_config")))
        self.webhook = self.config.webhook
        self.bind(())

    @classmethod
    def build(cls, config: GuardConfig) -> SafetyGuard:
        """Return the guard that the run configuration describes."""
        return cls(
            monitor_metrics=config.monitor_metrics,
            threshold_delta=config.threshold_delta,
            rollback_steps=config.rollback_steps,
            absolute=config.absolute,
            max_rollbacks=config.max_rollbacks,
            **config.guard_config,
        )

    def bind(self, tasks: Collection[str], metrics: Mapping[str, Mapping[str, bool]] | None = None) -> None:
        """Learn which tasks are evaluated; called by the trainer when the guard is added, and at the start.

        Args:
            tasks: their names.
            metrics: by task, the metrics that its evaluations can have and whether each has a direction;
                None = not known, they are then checked by the first evaluation.

        Raises:
            ConfigError: ``monitor_metrics`` names what is not there, or a metric without a direction.
        """
        entries = self.monitor_metrics if tasks else ()
        self._watches = build_watches(entries, tasks, self.config.directions, metrics)
        self._settings = DetectorSettings(
            drop=self.threshold,
            absolute=self.absolute,
            limit=self.config.cusum_limit,
            num_metrics=max(1, len(self._watches)),
            warmup=self.config.warmup,
        )
        self._confirmation = Confirmation(self.config)
        self._history = StepHistory(2 * self.rollback_steps)
        self._snapshots: list[tuple[int, dict[str, Any]]] = []
        self._response = Response(self.config, self.max_rollbacks)
        self._hacking = HackingMonitor(self.config)
        self._warned: set[str] = set()
        self._step = 0
        self._good_until = 0
        self._fallen = ""
        self._judged_good = False

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Note what the step from the weights of ``step`` was made of, to name the cause of a fall."""
        self._history.record(step, stats)

    def observe(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None = None
    ) -> GuardDecision:
        """Judge the weights of ``step`` by their held-out evaluation.

        Args:
            step: step of the weights evaluated.
            evaluations: by task; tasks that are not watched are ignored.
            confirm: fresh paired evaluation on demand (see ``Confirm``); None = the stored evaluations of now
                and of the weights last judged good are compared.
        """
        previous, self._step = self._step, step
        events = self._feed(step, evaluations)
        decision = self._decide(step, evaluations, confirm)
        signs = self._look_for_hacking(previous)
        if decision.action is GuardAction.keep:
            decision = self._answer_hacking(decision, signs)
        events += [*decision.events, *signs]
        if decision.judged_good:
            self._confirmation.remember_good(self._watches, evaluations)
            events += self._lift_adjustments()
        self._judged_good = decision.judged_good
        self._snapshots.append((step, {w.key: w.state_dict() for w in self._watches}))
        del self._snapshots[:-_MAX_SNAPSHOTS]
        return replace(decision, events=events)

    def rollback_target(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
        """Return the checkpoint to restore: judged good, at most ``rollback_steps`` back (``choose_target``).

        None when there is none; the trainer then goes on with the adjustments alone.
        """
        good = [c for c in checkpoints if c.judged_good and 0 <= self._step - c.step <= self.rollback_steps]
        states = [(at, own[self._fallen]["detector"]) for at, own in self._snapshots if self._fallen in own]
        seen = [(at, state["value"], state["error"]) for at, state in states]
        return choose_target(good, seen, fell_after=self._good_until)

    def rolled_back(self, target: CheckpointInfo, *, step: int) -> list[Event]:
        """Take note that the run goes on from ``target``, its next step being numbered from ``step``.

        Restores the detectors as they were at ``target``; keeps the count of rollbacks, which the checkpoint
        must not undo (do not load the checkpoint's guard state).
        """
        saved = [state for at, state in self._snapshots if at <= target.step]
        for watch in self._watches:
            if saved and watch.key in saved[-1]:
                watch.load_state_dict(saved[-1][watch.key])
            watch.detector.cusum = 0.0
        self._snapshots = [(at, state) for at, state in self._snapshots if at <= target.step]
        self._history.rewind(target.step)
        self._hacking.forget()
        self._response.resume_at(step)
        change = self._response.adjustments
        reason = (
            f"rolled back from step {self._step} to {target.step}; learning rate x {change.lr_factor:g} for "
            f"{change.lr_hold_steps} steps, task shares x {dict(change.weight_factors)}, data of the window "
            f"{'skipped' if change.skip_data else 'seen again'}"
        )
        data = {"from": self._step, "to": target.step, "rollbacks": len(self._response.rollbacks)}
        kind, self._step = "rolled_back", step
        return [Event(step=step, source="guard", kind=kind, reason=reason, data=data, task=change.victim)]

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate that is in force at ``step``."""
        return self._response.lr_factor(step)

    def weight_factors(self) -> dict[str, float]:
        """Return the factors on the scheduler's shares in force (``set_factors``); missing = 1."""
        return dict(self._response.adjustments.weight_factors)

    def metrics(self) -> dict[str, float]:
        """Return value, reference, CUSUM and its limit per watched metric, as ``guard/<task>/...``."""
        values: dict[str, float] = {
            "guard/judged_good": float(self._judged_good),
            "guard/rollbacks": float(len(self._response.rollbacks)),
        }
        for watch in self._watches:
            statistics = watch.statistics(self._settings) if watch.detector.count else {}
            for name in ("value", "reference", "cusum", "cusum_limit"):
                if name in statistics:
                    values[f"guard/{watch.key}/{name}"] = statistics[name]
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "watches": {w.key: w.state_dict() for w in self._watches},
            "confirmation": self._confirmation.state_dict(),
            "history": self._history.state_dict(),
            "snapshots": [list(snapshot) for snapshot in self._snapshots],
            "response": self._response.state_dict(),
            "hacking": self._hacking.state_dict(),
            "warned": sorted(self._warned),
            "step": self._step,
            "good_until": self._good_until,
            "judged_good": self._judged_good,
            "fallen": self._fallen,
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict`` after ``bind``, at a resume; tasks added since start fresh.

        Not for a rollback: use ``rolled_back``, which keeps the count of rollbacks.

        Args:
            state: what ``state_dict`` returned.
            renamed: old name -> new name.
        """
        names = renamed or {}

        def rename(key: str) -> str:
            task, slash, metric = key.partition("/")
            return f"{names.get(task, task)}{slash}{metric}"

        watches = {rename(key): saved for key, saved in state["watches"].items()}
        for watch in self._watches:
            if watch.key in watches:
                watch.load_state_dict(watches[watch.key])
        self._confirmation.load_state_dict(state["confirmation"], rename)
        self._history.load_state_dict(state["history"], names)
        self._snapshots = [
            (at, {rename(key): saved for key, saved in snapshot.items()})
            for at, snapshot in state["snapshots"]
        ]
        self._response.load_state_dict(state["response"], rename)
        self._hacking.load_state_dict(state["hacking"], names)
        self._warned = {rename(key) for key in state["warned"]}
        self._step, self._good_until = state["step"], state["good_until"]
        self._judged_good, self._fallen = state["judged_good"], rename(state["fallen"])

    def _feed(self, step: int, evaluations: Mapping[str, TaskEvaluation]) -> list[Event]:
        """Give every watch its evaluation.

        Evidence does not add up during the cooldown. One evaluation alone may still be too much (a fall of
        about twice the threshold): what broke the run is there still, and good weights are being spoiled.
        """
        events = []
        is_cooling = step < self._response.cooldown_until
        for watch in self._watches:
            if is_cooling:
                watch.detector.cusum = 0.0
            evaluation = evaluations.get(watch.task)
            seen = evaluation is not None and watch.observe(evaluation, self._settings)
            missing = f"{watch.key}#missing"
            if not seen and missing not in self._warned:
                self._warned.add(missing)
                events.append(watch.tell_missing(step, evaluation))
            elif seen:
                self._warned.discard(missing)
            if is_cooling and not self._response.is_restored:
                watch.detector.cusum = 0.0
        return events

    def _decide(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None
    ) -> GuardDecision:
        settings = self._settings
        seen = [w for w in self._watches if f"{w.key}#missing" not in self._warned]
        watched = [w for w in seen if w.has_reference(settings, self.config.min_reference)]
        alarmed = [w for w in watched if w.detector.alarms(settings)]
        if alarmed:
            watch = max(alarmed, key=lambda w: (w.detector.cusum - w.detector.limit(settings), w.key))
            return self._answer_alarm(watch, step, evaluations, confirm)
        self._confirmation.forget_fresh()
        # one that never had a value (its rewards fail, its name is misspelt) says nothing about the weights
        complete = len(seen) == sum(w.detector.count > 0 for w in self._watches)
        good = complete and bool(seen) and all(w.detector.is_good(settings) for w in seen)
        for watch in watched:
            above = watch.detector.cusum > 0.5 * watch.detector.limit(settings)
            if above and watch.key not in self._warned:
                self._warned.add(watch.key)
                return self._build(GuardAction.warn, watch, step, "is falling; not yet a regression")
            if watch.detector.cusum == 0.0:
                self._warned.discard(watch.key)
        return GuardDecision(judged_good=good)

    def _answer_alarm(
        self,
        watch: MetricWatch,
        step: int,
        evaluations: Mapping[str, TaskEvaluation],
        confirm: Confirm | None,
    ) -> GuardDecision:
        """Confirm the alarm; then take the next rung of the ladder, or stop."""
        statistics = watch.statistics(self._settings)
        confirmed, extra = self._confirmation.test(watch, evaluations[watch.task], statistics, confirm)
        statistics |= extra
        if not confirmed:
            text = "looks lower, but a paired comparison does not confirm it"
            return self._build(GuardAction.warn, watch, step, text, statistics)
        self._good_until, self._fallen = watch.detector.good_step, watch.key
        action = self._response.choose(watch.key, statistics, step)
        if action is GuardAction.stop:
            times = len(self._response.rollbacks)
            text = f"has regressed again after {times} rollbacks" if times else "has regressed"
            return self._build(action, watch, step, text, statistics)
        culprit = self._history.find_culprit(watch.task, self._good_until)
        self._response.adjust(action, victim=watch.task, culprit=culprit, step=step)
        self._confirmation.forget_fresh()
        for fallen in self._watches if action is GuardAction.rollback else [watch]:
            fallen.detector.cusum = 0.0
        return self._build(action, watch, step, "has regressed", statistics)

    def _look_for_hacking(self, since: int) -> list[Event]:
        """Read the signs of the steps since the last evaluation."""
        events = []
        for watch in self._watches:
            if not watch.metric and watch.detector.count:
                seen = partial(self._history.mean_since, watch.task, since=since)
                point = Observation(
                    train_reward=seen("reward"),
                    value=watch.detector.value,
                    error=watch.detector.error,
                    length=seen("length"),
                    entropy=seen("entropy"),
                    kl=seen("kl"),
                    prompts=math.nan if self.weight_factors().get(watch.task) == 0.0 else seen("prompts"),
                )
                events += self._hacking.observe(watch.task, point, self._step)
        return events

    def _answer_hacking(self, decision: GuardDecision, signs: Sequence[Event]) -> GuardDecision:
        """Lower the share of the first task that is being hacked, unless something is already in force."""
        hacked = [event for event in signs if event.kind == "hacking"]
        if not hacked or not self.config.act_on_hacking or self._response.adjustments.victim:
            return decision
        task = hacked[0].task
        self._response.adjust(GuardAction.reweight, victim=task, culprit=task, step=self._step)
        return GuardDecision(
            action=GuardAction.reweight,
            task=task,
            reason=hacked[0].reason,
            statistics=hacked[0].data,
            adjustments=self._response.adjustments,
        )

    def _lift_adjustments(self) -> list[Event]:
        victim = self._response.lift(self._step)
        if not victim:
            return []
        reason = f"{victim} has recovered: task shares follow the scheduler alone again"
        return [Event(step=self._step, source="guard", kind="recovered", reason=reason, task=victim)]

    def _build(
        self,
        action: GuardAction,
        watch: MetricWatch,
        step: int,
        text: str,
        statistics: Mapping[str, float] | None = None,
    ) -> GuardDecision:
        numbers = dict(statistics or watch.statistics(self._settings))
        reason = (
            f"{watch.key} {text}: {numbers['value']:.3f} against a demonstrated {numbers['reference']:.3f} "
            f"(evidence {numbers['cusum']:.1f}, limit {numbers['cusum_limit']:.1f})"
        )
        acts = action not in (GuardAction.warn, GuardAction.stop)
        adjustments = self._response.adjustments if acts else RollbackAdjustments()
        data = {**numbers, "metric": watch.key, "culprit": adjustments.culprit}
        event = Event(step=step, source="guard", kind=str(action), reason=reason, task=watch.task, data=data)
        return GuardDecision(
            action=action,
            task=watch.task,
            metric=watch.metric,
            reason=reason,
            statistics=numbers,
            adjustments=adjustments,
            events=[event],
        )
