"""Settings of ``safety_guard``: the keys of ``guard.guard_config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from multitask_rl.config.schema.ranges import (
    Count,
    Fraction,
    Natural,
    NotNegative,
    OneOf,
    Positive,
    PositiveFraction,
    Range,
    Settings,
)

_RUNGS = ("reweight", "freeze", "rollback")


@dataclass(kw_only=True, slots=True)
class SafetyGuardConfig(Settings):
    """Keys of ``guard_config``."""

    cusum_limit: Positive = 5.0
    """h: CUSUM above which a metric raises an alarm, in standard errors."""
    warmup: Count = 4
    """Evaluations before the guard acts."""
    min_demonstrated: NotNegative = 0.05
    """With a relative ``threshold_delta``, a metric in [0, 1] raises no alarm while its demonstrated value is
    below this."""
    cooldown_steps: Natural = 100
    """Steps after a rollback in which evidence does not add up over evaluations: only one that alone exceeds
    the limit raises an alarm; if there were no weights to go back to, none does. Doubled by each further
    rollback in the window."""
    rollback_window: Count = 1000
    """Steps over which ``max_rollbacks`` are counted."""
    confirm: bool = True
    """Act on an alarm only if a paired test confirms it."""
    confirm_z: Annotated[float, Range("[0, 30]")] = 3.09
    """Normal quantile a fresh paired evaluation must exceed (3.09 = one in a thousand)."""
    stored_z: float = 2.33
    """``confirm_z`` where no fresh evaluation is possible: the test then compares the evaluation that raised
    the alarm with the one last judged good. It is not independent of the alarm and only has to agree."""
    on_changed_task: Annotated[str, OneOf("stop", "warn")] = "stop"
    """What follows when the good weights score lower now than when they were judged good. Then the actor has
    not regressed: the world, the reward or the data of the task has changed."""
    ladder: list[Annotated[str, OneOf(*_RUNGS)]] = field(default_factory=lambda: ["rollback"])
    """What confirmed alarms do, one rung further each time while a task has not recovered: any of
    ``reweight``, ``freeze``, ``rollback``, in this order. A fall of twice the threshold goes to the last."""
    skip_data: bool = True
    """After a rollback, do not train again on the data between the checkpoint and the alarm."""
    lr_factor: PositiveFraction = 0.5
    """Factor on the learning rate after a rollback (to the power of the rollbacks in the window)."""
    lr_hold_steps: Natural = 50
    """Steps after a rollback at ``lr_factor``."""
    lr_rewarm_steps: Natural = 50
    """Steps after those, over which the factor rises linearly to 1."""
    culprit_factor: Fraction = 0.5
    """Factor on the share of the task held to be the cause (to the power of the rollbacks in the window)."""
    victim_factor: Annotated[float, Range("[1, inf)")] = 2.0
    """Factor on the share of the task that regressed, until it has recovered."""
    act_on_hacking: bool = True
    """Lower the share of a task whose training reward rises while its held-out metric falls."""
    hacking_z: Positive = 4.0
    """Fall of the held-out metric, in standard errors, above which it counts as hacking."""
    kl_budget: NotNegative = 0.0
    """Warn when a task's KL to the reference exceeds it, nats per response; 0 = no budget."""
    min_entropy_fraction: NotNegative = 0.3
    """Warn when a task's entropy falls below this part of what it was at the start."""
    max_length_ratio: Annotated[float, Range("(1, inf)")] = 3.0
    """Warn when a task's responses become this many times longer or shorter than at the start."""
    webhook: str = ""
    """``http(s)://`` address that every alert is posted to as JSON; a token for it is read from the
    environment variable ``MULTITASK_RL_WEBHOOK_TOKEN``. Empty = none."""
    directions: dict[str, Annotated[str, OneOf("higher", "lower")]] = field(default_factory=dict)
    """Direction of metrics that declare none: name without the task, e.g. ``length`` -> ``higher`` or
    ``lower``."""

    def __post_init__(self) -> None:
        """Check ranges, the address and the order of the rungs."""
        Settings.__post_init__(self)
        if self.webhook and not self.webhook.startswith(("http://", "https://")):
            raise ValueError(f"webhook must start with http:// or https://, got {self.webhook!r}")
        if not self.ladder or self.ladder != [rung for rung in _RUNGS if rung in self.ladder]:
            raise ValueError(f"ladder must be some of {', '.join(_RUNGS)} in this order, got {self.ladder!r}")
