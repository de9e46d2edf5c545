"""Settings of a run with the documented defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAILED = "failed"
OVER = "over"
"""A response exceeds the limits of its check."""

_BASE = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "truncated_is": 2.0,
    "mask_truncated": False,
    "entropy_coefficient": 0.0,
    "aggregation": "token",
}
_GROUP = _BASE | {"clip_high": 0.28, "normalisation": "task"}
_PLAIN = _GROUP | {"clip_high": 0.2, "normalisation": "none", "aggregation": "constant"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _GROUP,
    "dr_grpo": _PLAIN,
    "rloo": _PLAIN,
    "opo": _PLAIN,
    "dapo": _GROUP | {"normalisation": "group", "overlong_buffer": 0, "overlong_weight": 1.0},
    "gspo": _GROUP
    | {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": 0.0,
        "normalisation": "group",
        "aggregation": "sequence",
    },
    "cispo": _GROUP | {"clip_low": 1.0, "clip_high": 4.0, "normalisation": "group"},
    "reinforce_pp": _GROUP | {"clip_high": 0.2, "group_baseline": True},
    "gdpo": _GROUP | {"normalisation": "group"},
    "constrained_decoding": _GROUP | {"rejected_reward": 0.0},
    "ppo": _BASE
    | {
        "gamma": 1.0,
        "gae_lambda": 0.95,
        "value_coefficient": 0.5,
        "value_clip": 0.2,
        "popart": False,
        "popart_rate": 3e-4,
    },
    "reward_conditioned": _BASE | {"quantiles": 5, "buffer_size": 2048},
    "sft": _BASE,
    "distill": _BASE | {"exact": True},
}
"""Configuration of every algorithm, as its page says."""

_AVERAGES = {"smoothing": 0.1, "prompts_averaged": 1, "prior_prompts": 20}

OF_CONSTRAINTS = ("cost", "constraint/", "flagged_", "rejection_", "violation_", "served_violation_")
"""Beginnings of the names of metrics of constraints."""

POLICIES: dict[str, dict[str, float]] = {
    "deficit_learnability": _AVERAGES | {"prompts_averaged": 100, "sharpness": 4.0},
    "straggler": _AVERAGES | {"exponent": 1.5},
    "mt_grpo": _AVERAGES | {"smoothing": 0.2, "rate": 1.0, "level_weight": 0.5},
    "learnability": _AVERAGES | {"smoothing": 0.2, "temperature": 0.1},
    "tac": _AVERAGES | {"smoothing": 0.2, "temperature": 0.1, "alpha": 1.0, "gradients_every": 2},
    "bandit": _AVERAGES | {"rate": 0.1, "share": 0.01, "exploration": 0.1},
    "patience": _AVERAGES
    | {"patience": 50, "min_delta": 0.01, "factor": 0.7, "max_change": 10.0, "literal": False},
    "static": _AVERAGES,
    "uniform": _AVERAGES,
}
"""Configuration of every policy of the scheduler, as its page says."""


@dataclass(kw_only=True)
class RewardRule:
    name: str
    weight: float = 1.0
    low: float = -math.inf
    high: float = math.inf
    higher_is_better: bool = True
    is_of_world: bool = False
    """What the world of an episode gave."""
    key: str = ""
    """Name of what it takes of that; empty = the sum."""
    overrun: float | None = None
    """Value of a response that exceeds the limits of the check; None = the worst there is."""
    version: int = 0
    """Of its plugin and its configuration: another number is another rule."""

    @property
    def definition(self) -> object:
        """What its values are computed from."""
        own = (self.is_of_world, self.key, self.version, self.low, self.high, self.higher_is_better)
        return *own, self.overrun

    @property
    def if_over(self) -> float | str:
        """The bad end of its declared range, by its part in the sum; without one 0, if more is better."""
        if self.overrun is not None:
            return self.overrun
        more_is_better = self.higher_is_better and self.weight >= 0.0
        worst = self.low if more_is_better else self.high
        if math.isfinite(worst):
            return worst
        return 0.0 if more_is_better else FAILED

    @property
    def signed_weight(self) -> float:
        """Weight in the sum: subtracted where lower values are better."""
        return self.weight if self.higher_is_better else -self.weight


@dataclass(kw_only=True)
class ConstraintRule:
    name: str
    mode: str
    weight: float = 1.0
    limit: float = 0.1
    max_attempts: int = 4
    stream_every: int = 0
    """Tokens between two looks at a response that is being written; 0 = none."""
    multiplier: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    """As of a reward."""

    @property
    def definition(self) -> object:
        """What its costs are computed from."""
        return self.version, self.stream_every


@dataclass(kw_only=True)
class Curriculum:
    by: str
    """``pass_rate``, or a column of the rows."""
    pools: int = 5
    floor: float = 0.1


@dataclass(kw_only=True)
class Task:
    name: str
    type: str = "grpo"
    config: dict[str, Any] = field(default_factory=dict)
    """Of the algorithm; completed by ``DEFAULTS``."""
    rewards: list[RewardRule] = field(default_factory=list)
    constraints: list[ConstraintRule] = field(default_factory=list)
    weight: float = 1.0
    min_share: float | None = None
    evaluation_only: bool = False
    is_reported: bool = False
    """Its held-out rows are of the split ``test``: guard, scheduler and best checkpoint do not read them."""
    target: float = 1.0
    loss_weight: float = 1.0
    group_size: int = 4
    max_new_tokens: int = 5
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end a response; without own ones those of the run."""
    kl_coefficient: float = 0.0
    kl_placement: str = "reward"
    kl_estimator: str = "k3"
    kl_target: float | None = None
    kl_horizon: float = 100.0
    higher_is_better: bool = True
    primary_metric: str = "reward"
    grammar: dict[str, Any] = field(default_factory=dict)
    """As the tasks file says it."""
    sentences: list[list[int]] | None = None
    """Of its grammar: all that a response may be, without the end token."""
    max_turns: int = 0
    """Most answers of an episode; 0 = no world, one response."""
    has_tools: bool = False
    """Its world answers calls of tools; the first answer without one ends the episode."""
    max_tool_calls: int = 0
    """Those that are made; 0 = any number."""
    eval_samples: int = 1
    solved_at: float | None = None
    """None: the good end of the range of the primary metric."""
    max_episode_tokens: int = 0
    """0 = ``max_turns`` whole answers."""
    curriculum: Curriculum | None = None
    given: dict[str, Any] = field(init=False)
    """``config`` without the defaults."""

    def __post_init__(self) -> None:
        self.given = self.config
        self.config = DEFAULTS[self.type] | self.config

    def __deepcopy__(self, _: object) -> Task:
        return self

    def become(self, kind: str, config: dict[str, Any]) -> None:
        """Learn by another algorithm, or with another configuration of it."""
        self.type, self.given, self.config = kind, config, DEFAULTS[kind] | config

    @property
    def definitions(self) -> dict[str, object]:
        """What metrics are computed from: values of other settings are not compared (docs/definitions.md).

        By metric, and ``rule/<constraint>`` for the costs of one. Without a name it is the primary metric.
        """
        world = (self.max_turns, self.max_tool_calls, self.max_episode_tokens) if self.max_turns else None
        weighed = [(r.definition, r.weight) for r in self.rewards if r.weight]
        weighed += [(c.definition, -c.weight) for c in self.constraints if c.mode == "penalty" and c.weight]
        judges: list[object] = [
            (c.name, c.definition, c.mode, c.max_attempts, c.weight > 0.0) for c in self.constraints
        ]
        is_trained_on = self.type == "constrained_decoding" and any(
            c.mode == "reject" for c in self.constraints
        )
        rejected = self.given.get("rejected_reward"), is_trained_on
        found: dict[str, object] = {f"reward/{r.name}": (r.definition, world) for r in self.rewards}
        found["reward"] = (sorted(weighed, key=repr), rejected, world) if self.rewards else (judges, world)
        found["constraint"] = judges, world
        found |= {f"rule/{c.name}": (c.definition, world) for c in self.constraints}
        of = self.primary_metric.partition("/")[0]
        of = of if of == "reward" else f"reward/{of}"
        found[""] = (self.primary_metric, found[of]) if self.has_rewards else None
        found["solved"] = found[""], self.solved_at, self.higher_is_better
        return found

    def measured_by(self, metric: str = "") -> object:
        """What of an evaluation's metric a resume may change; without a name, of the primary one.

        That is its definition, which way is better, the split, the temperature of responses and the control
        token. A task that is only evaluated keeps its own temperature; that of others is 1.
        """
        definitions = self.definitions
        own = "/".join(metric.split("/")[:2])
        if metric.startswith(OF_CONSTRAINTS):
            own = "constraint"
        elif metric == "reward_mean":
            own = "reward"
        temperature = self.temperature if self.evaluation_only and self.has_rewards else 1.0
        is_higher = metric or self.higher_is_better
        control = self.config["quantiles"] if self.type == "reward_conditioned" else 0
        return definitions.get(own), is_higher, self.is_reported, temperature, control

    def can_be_watched(self, metric: str) -> bool:
        """Whether a metric of evaluations exists now, and controllers read it."""
        if metric.startswith("reward/"):
            return not self.is_reported and metric.removeprefix("reward/") in [r.name for r in self.rewards]
        return not self.is_reported and (not metric.startswith(OF_CONSTRAINTS) or bool(self.constraints))

    @property
    def has_rewards(self) -> bool:
        """Whether a reward or a constraint says something of its responses."""
        return bool(self.rewards or self.constraints)

    @property
    def needs_reward(self) -> bool:
        return self.type not in ("sft", "distill")

    @property
    def most_tokens(self) -> int:
        """Of a response, or of all answers of an episode."""
        return self.max_episode_tokens or max(1, self.max_turns) * self.max_new_tokens

    def range_of(self, name: str) -> tuple[float, float] | None:
        """Declared range of ``reward`` (penalties included) or of one of the rewards; None without one.

        A part of a reward has none.
        """
        if "/" in name:
            return None
        if name != "reward":
            rule = next(r for r in self.rewards if r.name == name)
            return (rule.low, rule.high) if math.isfinite(rule.high - rule.low) else None
        if not self.rewards:
            return (0.0, 1.0) if self.constraints else None
        ends = [(r.signed_weight * r.low, r.signed_weight * r.high) for r in self.rewards if r.weight]
        if not all(math.isfinite(x) for pair in ends for x in pair):
            return None
        price = math.fsum(c.weight for c in self.constraints if c.mode == "penalty")
        return sum(min(pair) for pair in ends) - price, sum(max(pair) for pair in ends)


@dataclass(kw_only=True)
class Anchor:
    """Held-out texts of which every evaluation measures the loss, and the KL to the initial weights."""

    name: str
    has_answers: bool = True
    """The rows have the texts; else the actor writes them once."""
    is_plain: bool = False
    """The answers are whole texts, without a prompt and an end."""
    has_kl: bool = True
    max_tokens: int = 512
    max_new_tokens: int = 5
    stop: tuple[str, ...] = ()


@dataclass(kw_only=True)
class GuardRules:
    """What a guard that acts goes by; the documented defaults."""

    drop: float = 0.15
    """Fall that matters: a part of the demonstrated value, or in the metric's unit with ``absolute``."""
    absolute: bool = False
    rollback_steps: int = 100
    max_rollbacks: int = 3
    rollback_window: int = 1000
    warmup: int = 4
    cusum_limit: float = 5.0
    min_demonstrated: float = 0.05
    cooldown_steps: int = 100
    confirm: bool = True
    confirm_z: float = 3.09
    stored_z: float = 2.33
    on_changed_task: str = "stop"
    ladder: Sequence[str] = ("rollback",)
    skip_data: bool = True
    lr_factor: float = 0.5
    lr_hold_steps: int = 50
    lr_rewarm_steps: int = 50
    culprit_factor: float = 0.5
    victim_factor: float = 2.0


@dataclass(kw_only=True)
class Settings:
    tasks: list[Task]
    stop: tuple[str, ...] = ()
    """Of the run: those of tasks and anchors that name none."""
    anchors: list[Anchor] = field(default_factory=list)
    guard_factors: list[dict[str, float]] = field(default_factory=list)
    """What the guard multiplies shares by, task by task, from each evaluation on; the last ones stay."""
    guard_rate: float = 1.0
    """... and the learning rate, from the first one on."""
    acting: GuardRules | None = None
    """Of a guard that acts; None: it only judges."""
    checkpoint_every: int = 0
    checkpoint_keep: int = 4
    prompts_per_step: int = 8
    max_prompt_tokens: int = 1024
    """Longer ones are not trained on; held-out ones lose their beginning."""
    num_minibatches: int = 1
    num_epochs: int = 1
    refill_rounds: int = 1
    quorum: float = 1.0
    max_staleness: int = 0
    max_steps: int = 100
    learning_rate: float = 1e-6
    critic_learning_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    reference_decay: float = 1.0
    eval_every: int = 0
    watched: list[str] = field(default_factory=list)
    """Metrics of tasks, beside their primary ones: ``task/metric``."""
    critic_trunk: str = "actor"
    policy: str = "deficit_learnability"
    policy_config: dict[str, float] = field(default_factory=dict)
    """Of the scheduler's policy; what is missing has the default of ``POLICIES``."""
    min_weight: float | None = None
    num_heads: int = 4
    num_key_value_heads: int = 2
    first_control_token: int = 32
    quantiles_before: int = 0
    """Most quantiles of a task that the run had: its vocabulary never shrinks."""
    end_token: int = 1
    lora_rank: int = 0
    """0 = all weights are trained."""
    lora_dropout: float = 0.0

    @property
    def trained(self) -> list[Task]:
        """Tasks that may have prompts in a step."""
        return [task for task in self.tasks if not task.evaluation_only]

    @property
    def of_policy(self) -> dict[str, float]:
        return POLICIES[self.policy] | self.policy_config

    @property
    def control_tokens(self) -> list[int]:
        """Tokens that stand in prompts alone: they have probability 0 in every task's responses."""
        own = [t.config["quantiles"] for t in self.tasks if t.type == "reward_conditioned"]
        number = max([self.quantiles_before, *own])
        return list(range(self.first_control_token, self.first_control_token + number))

    def __deepcopy__(self, _: object) -> Settings:
        """Every copy of a part of the run has the same ones."""
        return self

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tasks and anchors other names: former name -> name."""
        for owner in [*self.tasks, *self.anchors]:
            owner.name = names.get(owner.name, owner.name)
        keys = [key.partition("/") for key in self.watched]
        self.watched = [names.get(name, name) + slash + rest for name, slash, rest in keys]
        self.guard_factors = [{names.get(n, n): f for n, f in own.items()} for own in self.guard_factors]

    def __getitem__(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)
