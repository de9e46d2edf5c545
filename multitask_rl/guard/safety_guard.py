"""SafetyGuard: watches held-out abilities, and takes the run back when one of them falls.

evaluation -> detector per metric (CUSUM against a demonstrated level) -> paired confirmation -> decision.
The guard decides and remembers; the trainer restores, changes what ``lr_factor`` and ``weight_factors`` say,
and raises ``GuardStop`` on ``stop``. Training rewards decide nothing here: their mixture moves with the
weights, and a hacked reward rises while the ability falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

from multitask_rl.config.build import build_dataclass, suggest
from multitask_rl.config.located_yaml import Where
from multitask_rl.errors import ConfigError
from multitask_rl.guard.confirmation import Confirmation
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision, RollbackAdjustments
from multitask_rl.guard.detector import DetectorSettings
from multitask_rl.guard.history import StepHistory
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.watch import Watch, build_watches
from multitask_rl.records import Event, TaskEvaluation, TaskStats

__all__ = ["SafetyGuard"]

_MAX_SNAPSHOTS = 64
_PLAIN_STATE = ("rollbacks", "cooldown_until", "adjusted_at", "step", "good_until", "judged_good")

Confirm = Callable[[str], tuple[TaskEvaluation, TaskEvaluation]]
"""``confirm(task)`` evaluates the current weights and those last judged good afresh, same prompts and seeds
for both and new ones at every call; returns ``(current, reference)``."""


class SafetyGuard:
    """Decide after every held-out evaluation whether the run may go on from these weights.

    ``bind`` once; per step ``record_step``; per evaluation ``observe``; after a rollback ``rolled_back``.

    Args:
        monitor_metrics: ``task`` (its primary metric) or ``task/metric``; None or empty = the primary metric
            of every task.
        threshold_delta: the fall that counts as regression: a fraction of the demonstrated level, or in the
            metric's unit with ``absolute``. The sign is ignored, 0 is refused.
        rollback_steps: how far back a rollback may reach.
        absolute: see ``threshold_delta``.
        max_rollbacks: after as many within ``rollback_window`` steps the next one stops the run.
        guard_config: further keys, see ``SafetyGuardConfig``.

    Raises:
        ConfigError: an unknown key or a value out of range.
    """

    Config: ClassVar[type[SafetyGuardConfig]] = SafetyGuardConfig

    def __init__(
        self,
        monitor_metrics: Sequence[str] | None = None,
        threshold_delta: float = -0.15,
        rollback_steps: int = 100,
        absolute: bool = False,
        max_rollbacks: int = 3,
        **guard_config: Any,
    ) -> None:
        if not 0.0 < abs(threshold_delta) < math.inf or (not absolute and abs(threshold_delta) >= 1.0):
            allowed = (
                "a number other than 0" if absolute else "a fraction between -1 and 0, e.g. -0.15 for 15 %"
            )
            raise ConfigError(f"guard.threshold_delta must be {allowed}, got {threshold_delta!r}")
        if rollback_steps < 1 or max_rollbacks < 0:
            raise ConfigError(
                f"guard.rollback_steps must be >= 1 and guard.max_rollbacks >= 0, got {rollback_steps!r} and "
                f"{max_rollbacks!r}"
            )
        self.monitor_metrics = list(monitor_metrics or ())
        self.threshold = abs(threshold_delta)
        self.rollback_steps = rollback_steps
        self.absolute = absolute
        self.max_rollbacks = max_rollbacks
        self.config = build_dataclass(SafetyGuardConfig, guard_config, Where(path=("guard", "guard_config")))
        self.bind({})

    def bind(self, tasks: Mapping[str, bool]) -> None:
        """Learn which tasks are evaluated; called once by the trainer before the first step.

        Args:
            tasks: name -> whether its primary metric is better when higher.

        Raises:
            ConfigError: ``monitor_metrics`` names an unknown task.
        """
        for entry in self.monitor_metrics if tasks else ():
            name = entry.partition("/")[0]
            if name not in tasks:
                raise ConfigError(
                    f"guard.monitor_metrics: {entry!r} is not a task or task/metric{suggest(name, tasks)} "
                    f"(tasks: {', '.join(tasks)})"
                )
        self._watches = build_watches(
            self.monitor_metrics if tasks else (), tasks, self.config.lower_is_better
        )
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
        self._rollbacks: list[int] = []
        self._rungs: dict[str, int] = {}
        self._warned: set[str] = set()
        self._cooldown_until = -1
        self._adjustments = RollbackAdjustments()
        self._adjusted_at = 0
        self._step = 0
        self._good_until = 0
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
        self._step = step
        events = self._feed(step, evaluations)
        decision = self._decide(step, evaluations, confirm)
        events += decision.events
        if decision.judged_good:
            self._confirmation.remember_good(evaluations)
            events += self._end_adjustments(step)
        self._judged_good = decision.judged_good
        self._snapshots.append((step, {w.key: w.state_dict() for w in self._watches}))
        del self._snapshots[:-_MAX_SNAPSHOTS]
        return replace(decision, events=events)

    def rollback_target(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
        """Return the checkpoint to restore: the newest judged good, at most ``rollback_steps`` back.

        Among those, one from before the fall began (as the CUSUM dates it) is preferred. None when no
        checkpoint in reach was judged good; the trainer then goes on with the adjustments alone.
        """
        good = [c for c in checkpoints if c.judged_good and 0 <= self._step - c.step <= self.rollback_steps]
        before = [c for c in good if c.step <= self._good_until]
        return max(before or good, key=lambda c: c.step, default=None)

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
        length = self._cooldown_until - self._adjusted_at
        self._adjusted_at, self._cooldown_until = step, step + length
        reason = (
            f"rolled back from step {self._step} to {target.step}; learning rate x "
            f"{self._adjustments.lr_factor:g} for {self._adjustments.lr_hold_steps} steps, task shares x "
            f"{dict(self._adjustments.weight_factors) or 'unchanged'}, data of the window "
            f"{'skipped' if self._adjustments.skip_data else 'seen again'}"
        )
        data = {"from": self._step, "to": target.step, "rollbacks": len(self._rollbacks)}
        return [
            Event(step=step, source="guard", kind="rolled_back", reason=reason, data=data, task=self._victim)
        ]

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate that is in force at ``step``."""
        return self._adjustments.lr_factor_after(step - self._adjusted_at)

    def weight_factors(self) -> dict[str, float]:
        """Return the factors on the scheduler's shares in force (``set_factors``); missing = 1."""
        return dict(self._adjustments.weight_factors)

    def metrics(self) -> dict[str, float]:
        """Return value, reference, CUSUM and its limit per watched metric, as ``guard/<task>/...``."""
        values: dict[str, float] = {
            "guard/judged_good": float(self._judged_good),
            "guard/rollbacks": float(len(self._rollbacks)),
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
            "adjustments": asdict(self._adjustments),
            "rungs": dict(self._rungs),
            "warned": sorted(self._warned),
            **{name: getattr(self, f"_{name}") for name in _PLAIN_STATE},
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
        self._confirmation.load_state_dict(state["confirmation"], names)
        self._history.load_state_dict(state["history"], names)
        self._snapshots = [
            (at, {rename(key): saved for key, saved in snapshot.items()})
            for at, snapshot in state["snapshots"]
        ]
        adjustments = dict(state["adjustments"])
        adjustments["weight_factors"] = {rename(t): f for t, f in adjustments["weight_factors"].items()}
        adjustments |= {role: rename(adjustments[role]) for role in ("victim", "culprit")}
        self._adjustments = RollbackAdjustments(**adjustments)
        self._rungs = {rename(key): rung for key, rung in state["rungs"].items()}
        self._warned = {rename(key) for key in state["warned"]}
        for name in _PLAIN_STATE:
            setattr(self, f"_{name}", state[name])

    @property
    def _victim(self) -> str:
        return self._adjustments.victim

    def _feed(self, step: int, evaluations: Mapping[str, TaskEvaluation]) -> list[Event]:
        """Give every watch its evaluation; evidence does not add up during the cooldown."""
        events = []
        for watch in self._watches:
            evaluation = evaluations.get(watch.task)
            seen = evaluation is not None and watch.observe(evaluation, self._settings)
            missing = f"{watch.key}#missing"
            if not seen and missing not in self._warned:
                self._warned.add(missing)
                reason = f"{watch.key} has no value at step {step}: these weights are not judged good"
                events.append(Event(step=step, source="guard", kind="warn", reason=reason, task=watch.task))
            elif seen:
                self._warned.discard(missing)
            if step < self._cooldown_until:
                watch.detector.cusum = 0.0
        return events

    def _decide(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None
    ) -> GuardDecision:
        settings = self._settings
        watched = [w for w in self._watches if w.has_reference(settings, self.config.min_reference)]
        alarmed = [w for w in watched if w.detector.alarms(settings)]
        if alarmed:
            watch = max(alarmed, key=lambda w: (w.detector.cusum - w.detector.limit(settings), w.key))
            return self._answer_alarm(watch, step, evaluations, confirm)
        self._confirmation.forget_fresh()
        complete = all(f"{w.key}#missing" not in self._warned for w in self._watches)
        good = complete and bool(self._watches) and all(w.detector.is_good(settings) for w in self._watches)
        for watch in watched:
            above = watch.detector.cusum > 0.5 * watch.detector.limit(settings)
            if above and watch.key not in self._warned:
                self._warned.add(watch.key)
                return self._build(GuardAction.warn, watch, step, "is falling; not yet a regression")
            if watch.detector.cusum == 0.0:
                self._warned.discard(watch.key)
        return GuardDecision(judged_good=good)

    def _answer_alarm(
        self, watch: Watch, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None
    ) -> GuardDecision:
        """Confirm the alarm; then take the next rung of the ladder, or stop."""
        statistics = watch.statistics(self._settings)
        confirmed, extra = self._confirmation.test(watch, evaluations[watch.task], statistics, confirm)
        statistics |= extra
        if not confirmed:
            text = "looks lower, but a paired comparison does not confirm it"
            return self._build(GuardAction.warn, watch, step, text, statistics)
        self._good_until = watch.detector.good_step
        action = self._next_rung(watch, statistics)
        text = "has regressed"
        if action is GuardAction.rollback:
            self._rollbacks = [at for at in self._rollbacks if step - at < self.config.rollback_window]
            if len(self._rollbacks) >= self.max_rollbacks:
                text = (
                    f"has regressed again after {len(self._rollbacks)} rollbacks within "
                    f"{self.config.rollback_window} steps"
                )
                return self._build(GuardAction.stop, watch, step, text, statistics)
            self._rollbacks.append(step)
        self._adjust(watch, action, step)
        return self._build(action, watch, step, text, statistics)

    def _next_rung(self, watch: Watch, statistics: Mapping[str, float]) -> GuardAction:
        ladder = self.config.ladder
        rung = self._rungs.get(watch.key, 0)
        if statistics["drop"] >= 2.0 * statistics["relevant_drop"]:
            rung = len(ladder) - 1
        self._rungs[watch.key] = rung + 1
        return GuardAction(ladder[min(rung, len(ladder) - 1)])

    def _adjust(self, watch: Watch, action: GuardAction, step: int) -> None:
        """Put into force what changes from here on, and start the cooldown."""
        config = self.config
        times = max(1, len(self._rollbacks)) if action is GuardAction.rollback else 1
        culprit = self._history.find_culprit(watch.task, self._good_until)
        factors = {watch.task: config.victim_factor}
        if culprit:
            frozen = action is GuardAction.freeze
            factors[culprit] = 0.0 if frozen else config.culprit_factor**times
        is_rollback = action is GuardAction.rollback
        self._adjustments = RollbackAdjustments(
            skip_data=config.skip_data and is_rollback,
            lr_factor=config.lr_factor**times if is_rollback else 1.0,
            lr_hold_steps=config.lr_hold_steps if is_rollback else 0,
            lr_rewarm_steps=config.lr_rewarm_steps if is_rollback else 0,
            weight_factors=factors,
            victim=watch.task,
            culprit=culprit,
        )
        self._adjusted_at = step
        self._confirmation.forget_fresh()
        if is_rollback:
            self._cooldown_until = step + config.cooldown_steps * 2 ** (times - 1)
            for other in self._watches:
                other.detector.cusum = 0.0
        else:
            watch.detector.cusum = 0.0

    def _end_adjustments(self, step: int) -> list[Event]:
        """Lift the factors once the victim is as good as before and the cooldown is over."""
        held = max(self._cooldown_until, self._adjusted_at + 1)
        if not self._victim or step < held:
            return []
        reason = f"{self._victim} has recovered: task shares follow the scheduler alone again"
        event = Event(step=step, source="guard", kind="recovered", reason=reason, task=self._victim)
        self._rungs = {k: n for k, n in self._rungs.items() if k.partition("/")[0] != self._victim}
        self._adjustments = RollbackAdjustments()
        return [event]

    def _build(
        self,
        action: GuardAction,
        watch: Watch,
        step: int,
        text: str,
        statistics: Mapping[str, float] | None = None,
    ) -> GuardDecision:
        numbers = dict(statistics or watch.statistics(self._settings))
        reason = (
            f"{watch.key} {text}: {numbers['value']:.3f} against a demonstrated {numbers['reference']:.3f} "
            f"(evidence {numbers['cusum']:.1f}, limit {numbers['cusum_limit']:.1f})"
        )
        adjustments = self._adjustments
        if action in (GuardAction.warn, GuardAction.stop):
            adjustments = RollbackAdjustments()
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
