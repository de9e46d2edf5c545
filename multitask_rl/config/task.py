"""One task as the tasks file describes it, after reading and checking (``tasks_file.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

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
from multitask_rl.errors import ConfigError
from multitask_rl.records import SamplingParams

__all__ = [
    "PASS_RATE",
    "ConstraintSpec",
    "CurriculumSpec",
    "KLSpec",
    "MultiplierSpec",
    "RewardSpec",
    "TaskSpec",
]

PASS_RATE = "pass_rate"


@dataclass(kw_only=True, slots=True)
class RewardSpec(Settings):
    """One reward of a task."""

    plugin: str
    """Entry-point name, ``module:function``, ``file.py:function`` or a foreign prefix (``trl:...``)."""
    name: str = ""
    """Name in logs; default: the plugin's."""
    weight: float = 1.0
    """Weight in the task's reward; 0 = metric only."""
    overrun: float | None = None
    """Value of a response that passes the reward's limit of time or memory where the same row with an empty
    response does not. Default: the worst end of the declared range; without one 0, or a failure where lower
    values are better."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plugin's ``Config``."""
    device: str = ""
    """Device of a model-backed plugin; empty = from the device map, else its default."""


@dataclass(kw_only=True, slots=True)
class MultiplierSpec(Settings):
    """Controller of a constraint's Lagrange multiplier lambda."""

    mode: Annotated[str, OneOf("pid", "log")] = "pid"
    """``pid`` (damped, the default) or ``log`` (gradient ascent on log lambda, as Safe RLHF)."""
    setpoint: PositiveFraction = 0.6
    """Part of the limit that is the controller's aim for the mean cost. It is below 1 because the upper
    confidence bound, which is tested against the limit, lies above the mean."""
    smoothing: PositiveFraction = 0.2
    """Gain of the moving average of the cost."""
    initial_value: NotNegative = 0.0
    """lambda at the start."""
    max_value: Positive = 10.0
    """Bound of lambda."""
    proportional: NotNegative = 2.0
    """``pid``: factor of the present excess."""
    integral: NotNegative = 0.05
    """``pid``: factor of the summed excess, per step."""
    derivative: NotNegative = 2.0
    """``pid``: factor of the rise of the smoothed cost; a fall has no effect."""
    log_rate: Positive = 0.5
    """``log``: change of log lambda per unit of excess and step."""

    def __post_init__(self) -> None:
        """Check ranges, and that lambda starts within its bound."""
        Settings.__post_init__(self)
        if self.initial_value > self.max_value:
            raise ConfigError(
                f"initial_value must be <= max_value {self.max_value:g}, got {self.initial_value!r}"
            )


@dataclass(kw_only=True, slots=True)
class ConstraintSpec(Settings):
    """One constraint of a task."""

    plugin: str = ""
    """Entry-point name, ``module:function`` or ``file.py:function``; none in mode ``grammar``."""
    name: str = ""
    """Name in logs; default: the plugin's."""
    mode: Annotated[str, OneOf("reject", "penalty", "lagrangian", "grammar")] = "reject"
    """``reject``: refuse the response and sample again; ``penalty``: subtract ``weight * cost``;
    ``lagrangian``: a multiplier keeps the mean cost at ``limit``; ``grammar``: nothing else is sampled."""
    limit: Fraction | None = None
    """Every evaluation tests the held-out violation rate against it, by the upper end of its
    one-sided 95 % interval; ``lagrangian`` (needs it) also keeps the mean cost of training below it."""
    multiplier: MultiplierSpec = field(default_factory=MultiplierSpec)
    weight: NotNegative = 1.0
    """Weight of the cost (``penalty``)."""
    max_attempts: Count = 4
    """Responses sampled at most per slot, the first included (``reject``)."""
    stream_every: Natural = 0
    """Tokens between two looks at a response while it is generated; the first look that finds a violation
    ends it there. For limits that no later token can mend. 0 = judged when complete."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plugin's ``Config``; in mode ``grammar`` one of ``regex`` (the whole response matches),
    ``json_schema``, ``choices`` (a list of texts)."""
    device: str = ""
    """Device of a model-backed plugin; empty = from the device map, else its default."""


@dataclass(kw_only=True, slots=True)
class KLSpec(Settings):
    """The leash to the reference policy: the actor as it was at the start (see ``model.reference_decay``)."""

    coefficient: NotNegative = 0.0
    """beta; 0 = no reference model is kept for the task."""
    placement: Annotated[str, OneOf("reward", "loss")] = "reward"
    """``reward`` (k1 inside the reward: the unbiased choice, arXiv:2512.21852) or ``loss``."""
    estimator: Annotated[str, OneOf("k1", "k2", "k3")] = "k3"
    """Estimator in the loss: ``k2`` or ``k3``; ``k1`` belongs into the reward: as a loss it does nothing."""
    target: Positive | None = None
    """Nats per response; given = adaptive coefficient (Ziegler et al., arXiv:1909.08593), None = fixed."""
    horizon: Annotated[float, Range("[1, inf)")] = 100.0
    """Steps over which the adaptive controller corrects."""

    def __post_init__(self) -> None:
        """Check ranges, and that the adaptive controller has something to multiply."""
        Settings.__post_init__(self)
        if self.target is not None and self.coefficient == 0.0:
            raise ConfigError(
                f"kl.target = {self.target!r} needs a starting kl.coefficient > 0: the adaptive controller "
                "multiplies it, and 0 stays 0. Set for example kl.coefficient: 0.01."
            )


@dataclass(kw_only=True, slots=True)
class CurriculumSpec(Settings):
    """Difficulty pools: which of the task's prompts are drawn more often."""

    by: str = ""
    """``pass_rate`` (observed, per prompt) or a column of the rows (a level, a length); empty = every prompt
    equally often."""
    pools: Annotated[int, Range("[2, inf)")] = 5
    """Pools at most."""
    floor: Fraction = 0.1
    """Part of the draws that stays uniform over the prompts; the rest follows learnability."""


@dataclass(kw_only=True, slots=True)
class TaskSpec(Settings):
    """A task: data, prompt, rewards, constraints, algorithm, and its share of the run."""

    name: str
    """Name in metrics, logs and on the command line."""
    type: str = "grpo"
    """Algorithm: an entry point of ``multitask_rl.algorithms``."""
    dataset: str = ""
    """Path (.jsonl, .jsonl.gz, .json, .parquet), Hugging Face id, ``plugin:<task plugin>``,
    ``reasoning_gym:<generator>``; empty = given in Python."""
    dataset_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the task plugin's ``Config``, keywords of ``datasets.load_dataset`` (Hugging Face id), or the
    generator's keys and ``size`` (reasoning-gym)."""
    split: str = "train"
    """Split to train on; rows with another ``split`` column are left out, rows without one are not."""
    eval_dataset: str = ""
    """Held-out data; empty = ``dataset`` with ``eval_split``, or a hashed 10 % held out of it."""
    eval_split: str = ""
    """Split to evaluate on, not the one trained on; empty = first of ``validation``, ``dev`` with rows, else
    held out. Guard, scheduler and best checkpoint choose by it: ``test`` is read only where it is named."""
    prompt: str = "{prompt}"
    """Template over the row's columns; with ``chat`` it becomes the user's message."""
    system: str = ""
    """System message (chat only); replaces that of rows which are chat messages."""
    chat: bool | None = None
    """Use the tokenizer's chat template; None = if it has one."""
    weight: NotNegative = 1.0
    """Initial weight: its share of a step's prompts is in proportion to it; 0 = not trained, unless it
    has a ``min_share``."""
    min_share: Fraction | None = None
    """Floor of its share of a step's prompts; None = the scheduler's ``min_weight``."""
    loss_weight: NotNegative = 1.0
    """Factor on the task's loss, after normalisation."""
    group_size: Count | None = None
    """Rollouts per prompt; None = the run's ``batch.group_size``."""
    sampling: SamplingParams | None = None
    """None = the run's ``rollout`` settings; keys given override them one by one."""
    sampling_keys: tuple[str, ...] = field(default=(), metadata={"derived": True})
    """Which keys of ``sampling`` the tasks file gave; empty = all of them count."""
    kl: KLSpec = field(default_factory=KLSpec)
    curriculum: CurriculumSpec = field(default_factory=CurriculumSpec)
    rewards: list[RewardSpec] = field(default_factory=list)
    """What a response is worth: plugins, their weights and configuration; a plain name is enough."""
    constraints: list[ConstraintSpec] = field(default_factory=list)
    """What a response must not do, and what happens if it does."""
    algorithm_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the algorithm's ``Config``."""
    device: str = ""
    """Device of its model-backed plugins that name none themselves."""
    evaluation_only: bool = False
    """Never trained; evaluated and guarded."""
    primary_metric: str = "reward"
    """``reward``, the name of one of its rewards, or a ``reward/component``."""
    higher_is_better: bool | None = None
    """Direction of the primary metric; None = as its reward declares."""
    target: float = 1.0
    """Level of the primary metric at which the task counts as learnt (schedulers)."""
    renamed_from: str = ""
    """Name of the task in an older checkpoint."""
    source: str = field(default="", metadata={"derived": True})
    """``file:line`` of its definition, for errors."""

    @property
    def judged(self) -> list[ConstraintSpec]:
        """Constraints that judge a response; a grammar does not, it decides what can be sampled."""
        return [c for c in self.constraints if c.mode != "grammar"]

    @property
    def grammar(self) -> str:
        """JSON text of the grammar's configuration; empty without one (see ``SamplingParams.grammar``)."""
        return next((json.dumps(c.config) for c in self.constraints if c.mode == "grammar"), "")

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """Return how the task is sampled, given the run's ``default``."""
        if self.sampling is None:
            result = default
        elif not self.sampling_keys:
            result = self.sampling
        else:
            result = replace(default, **{key: getattr(self.sampling, key) for key in self.sampling_keys})
        return replace(result, grammar=self.grammar) if self.grammar else result
