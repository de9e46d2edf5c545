"""The settings of one task; ``tasks_file.py`` builds and checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from multitask_rl.config.schema.ranges import (
    Count,
    Finite,
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

PASS_RATE = "pass_rate"


def short_name(plugin: str) -> str:
    """Return ``f`` for ``a.b:f``, ``bleu`` for ``evaluate:bleu``."""
    return plugin.rsplit(":", 1)[-1].rsplit("/", 1)[-1].replace(".", "_")


@dataclass(kw_only=True, slots=True)
class RewardSpec(Settings):
    """One reward of a task."""

    plugin: str
    """Entry-point name, ``module:function``, ``file.py:function`` or a foreign prefix (``trl:...``)."""
    name: str = ""
    """Name in metrics; default: the last part of ``plugin``: ``f`` of ``a.b:f``."""
    weight: float = 1.0
    """Weight in the task's reward; 0 = metric only."""
    overrun: float | None = None
    """Value of a response that exceeds the reward's limit of time or memory while an empty response does not.
    Default: the worst end of the declared range. Without a range: 0, or a failure if lower is better, as it
    is with a negative weight."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plugin's ``Config``."""
    range: list[Finite] | None = None
    """Smallest and largest value, for a plugin that declares no range: an environment, or a function of
    another library. A value outside is a ``grader`` failure. It must lie within what the plugin declares."""
    device: str = ""
    """Device of a plugin with a model; empty = from the device map, else its default."""

    def __post_init__(self) -> None:
        """Check ranges; fill in the name."""
        Settings.__post_init__(self)
        self.name = self.name or short_name(self.plugin)
        if self.range is not None and (len(self.range) != 2 or self.range[0] >= self.range[1]):
            raise ConfigError(
                f"range must be two numbers, the smallest value and a larger one, got {list(self.range)!r}"
            )


@dataclass(kw_only=True, slots=True)
class MultiplierSpec(Settings):
    """Controller of a constraint's Lagrange multiplier lambda."""

    mode: Annotated[str, OneOf("pid", "log")] = "pid"
    """``pid`` (damped, the default) or ``log`` (gradient ascent on log lambda, as Safe RLHF)."""
    setpoint: PositiveFraction = 0.6
    """Target of the mean cost, as a part of the limit. It is below 1 because the upper confidence bound, not
    the mean, is tested against the limit."""
    smoothing: PositiveFraction = 0.2
    """Gain of the moving average of the cost."""
    initial_value: NotNegative = 0.0
    """lambda at the start."""
    max_value: Positive = 10.0
    """Bound of lambda."""
    proportional: NotNegative = 2.0
    """``pid``: factor of the current excess."""
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
    """Name in metrics; default: the last part of ``plugin``: ``f`` of ``a.b:f``."""
    mode: Annotated[str, OneOf("reject", "penalty", "lagrangian", "grammar")] = "reject"
    """``reject``: refuse the response and sample again; ``penalty``: subtract ``weight * cost``;
    ``lagrangian``: a multiplier keeps the mean cost below ``limit``; ``grammar``: mask tokens in sampling."""
    limit: Fraction | None = None
    """Highest violation rate: every evaluation compares it with the upper end of the rate's one-sided 95 %
    interval. ``lagrangian`` requires it and also keeps the mean cost of training below it."""
    multiplier: MultiplierSpec = field(default_factory=MultiplierSpec)
    weight: NotNegative = 1.0
    """Weight of the cost (``penalty``)."""
    max_attempts: Count = 4
    """Most responses sampled per slot, the first included (``reject``)."""
    stream_every: Natural = 0
    """Tokens between two checks of a response during generation; a violation ends it at once. For violations
    that no later token can undo. 0 = only complete responses are judged."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the plugin's ``Config``; in mode ``grammar`` one of ``regex`` (the whole response matches),
    ``json_schema``, ``choices`` (a list of texts)."""
    device: str = ""
    """Device of a plugin with a model; empty = from the device map, else its default."""

    def __post_init__(self) -> None:
        """Check ranges; fill in the name."""
        Settings.__post_init__(self)
        self.name = self.name or short_name(self.plugin) or "grammar"


@dataclass(kw_only=True, slots=True)
class KLSpec(Settings):
    """KL to the reference policy: the initial actor, unless ``model.reference_decay`` moves it."""

    coefficient: NotNegative = 0.0
    """beta; 0 = no reference model is kept for the task."""
    placement: Annotated[str, OneOf("reward", "loss")] = "reward"
    """``reward``: k1 in the reward, unbiased (arXiv:2512.21852); ``loss``: ``estimator`` in the loss."""
    estimator: Annotated[str, OneOf("k1", "k2", "k3")] = "k3"
    """Estimator in the loss. ``k1`` has an expected gradient of 0 there: use it in the reward."""
    target: Positive | None = None
    """Nats per response for an adaptive coefficient (Ziegler et al., arXiv:1909.08593); None = fixed."""
    horizon: Annotated[float, Range("[1, inf)")] = 100.0
    """Steps over which the adaptive controller corrects."""

    def __post_init__(self) -> None:
        """Check ranges, and that an adaptive coefficient starts above 0."""
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
    """``pass_rate`` (observed, per prompt) or a column of the rows (a level, a length); empty = all prompts
    equally often."""
    pools: Annotated[int, Range("[2, inf)")] = 5
    """Largest number of pools."""
    floor: Fraction = 0.1
    """Share of draws that is uniform over the prompts; the rest follows learnability."""


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
    """Keys of the task plugin's ``Config``, keywords of ``datasets.load_dataset`` (Hugging Face id;
    ``streaming: true`` reads rows while they are used), or the generator's keys and ``size``
    (reasoning-gym)."""
    split: str = "train"
    """Split to train on: rows whose column ``split`` has this value, and rows without that column."""
    select: Mapping[str, Any] = field(default_factory=dict)
    """Which rows of the data, the held-out data included, belong to the task: column -> its value, or a list
    of values; empty = all."""
    eval_dataset: str = ""
    """Held-out data; empty = ``dataset`` with ``eval_split``, or a hashed 10 % held out of it."""
    eval_split: str = ""
    """Split to evaluate on; empty = the first of ``validation``, ``dev`` that has rows, else held-out rows.
    It selects weights and checkpoints, so ``test`` is read only if it is named."""
    prompt: str = "{prompt}"
    """Template over the row's columns; with ``chat`` it becomes the user's message."""
    system: str = ""
    """System message (chat only); replaces the system message of rows that are chat messages."""
    chat: bool | None = None
    """Whether to use the tokenizer's chat template; None = if it has one."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking: false}``. A variable that the template does
    not read is an error."""
    tools_column: str = ""
    """Column of the rows with the tools that the chat template shows: a list of JSON schemas, or its JSON
    text; empty = no tools but those of the environment."""
    weight: NotNegative = 1.0
    """Initial weight; the share of a step's prompts is proportional to it. 0 = not trained, unless
    ``min_share`` is above 0."""
    min_share: Fraction | None = None
    """Least share of a step's prompts; None = the scheduler's ``min_weight``."""
    loss_weight: NotNegative = 1.0
    """Factor on the task's loss, after normalisation."""
    group_size: Count | None = None
    """Rollouts per prompt; None = the run's ``batch.group_size``."""
    sampling: SamplingParams | None = None
    """Sampling settings that replace those of ``rollout``, key by key; None = the run's."""
    sampling_keys: tuple[str, ...] = field(default=(), metadata={"derived": True})
    """Keys of ``sampling`` that the tasks file gave; empty = all."""
    kl: KLSpec = field(default_factory=KLSpec)
    curriculum: CurriculumSpec = field(default_factory=CurriculumSpec)
    rewards: list[RewardSpec] = field(default_factory=list)
    """Reward plugins with weights and configuration; a name is enough."""
    constraints: list[ConstraintSpec] = field(default_factory=list)
    """Constraint plugins, and what follows a violation."""
    environment: str = ""
    """World or tools that the actor talks to over several turns: entry-point name, ``module:Class``,
    ``file.py:Class`` or a foreign prefix; empty = one prompt, one response. A task with an environment and
    without rewards gets the reward ``environment``: what the environment gives."""
    environment_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the environment's ``Config``, or its keyword arguments."""
    max_turns: Count = 8
    """Most answers of the actor in an episode; the world replies to the last one, too."""
    max_tool_calls: Natural = 0
    """Most tool calls of an episode; 0 = no limit. Further calls are refused with a text that asks for the
    answer, and count as wrong (``over_limit``)."""
    turn_timeout_s: Positive = 30.0
    """Longest call of an environment, in seconds; afterwards its process is killed, and the episode begins
    again."""
    max_response_tokens: Natural = 0
    """Most sampled tokens of an episode; 0 = ``max_turns`` times ``max_new_tokens``."""
    algorithm_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the algorithm's ``Config``."""
    device: str = ""
    """Device of the task's plugins with a model that name no device."""
    evaluation_only: bool = False
    """Whether the task is only evaluated and guarded, never trained. It reads the held-out split or, of data
    without one, every row: also those that another task trains on."""
    primary_metric: str = "reward"
    """``reward``, the name of one of its rewards, or a ``reward/component``."""
    higher_is_better: bool | None = None
    """Direction of the primary metric; None = as its reward declares."""
    target: Fraction = 1.0
    """Level at which a scheduler treats the task as learnt: the place of its reward between the least (0) and
    the most (1) that it can be."""
    teacher: str = ""
    """Type ``distill``: the model whose distribution the actor learns. A directory of transformers, a run
    (its newest checkpoint), a checkpoint, adapters or a hub id, with the actor's vocabulary."""
    answer: str = ""
    """Template over the row's columns: the given response of types ``sft`` and ``anchor``. Default of
    ``sft``: ``{answer}``, or the last message of a chat that ends with one of the assistant. An anchor with
    ``prompt: ""`` reads it as plain text."""
    eval_samples: Count = 1
    """k responses per held-out prompt. A prompt's value is their mean (avg@k); above 1, ``pass@j`` for powers
    j of two and j = k, and ``maj@k``, are reported."""
    solved_at: float | None = None
    """Value of the primary metric from which on a response solves its prompt (``pass@k``); None = the good
    end of its declared range, and no ``pass@k`` without one."""
    renamed_from: str = ""
    """Name of the task in an older checkpoint."""
    source: str = field(default="", metadata={"derived": True})
    """``file:line`` of its definition, for errors."""

    def __post_init__(self) -> None:
        """Check ranges; an anchor is never trained, ``sft`` has an answer."""
        Settings.__post_init__(self)
        self.evaluation_only = self.evaluation_only or self.kind == "anchor"
        if self.kind == "sft" and not self.answer:
            self.answer = "{answer}"

    @property
    def where(self) -> str:
        """Its place for messages: ``tasks.yaml:3: tasks.math``, or ``tasks.math`` if it is from Python."""
        return ": ".join(part for part in (self.source, f"tasks.{self.name}") if part)

    @property
    def kind(self) -> str:
        """``type`` without its module, in small letters: ``anchor``, ``sft``, ``distill`` have own rules."""
        return self.type.rpartition(":")[2].lower()

    @property
    def is_scored(self) -> bool:
        """Responses are scored; else held-out rows give a ``loss`` or, of type ``distill``, a ``kl``."""
        return bool(self.rewards or self.judged)

    @property
    def judged(self) -> list[ConstraintSpec]:
        """Constraints that judge responses: all but a grammar."""
        return [c for c in self.constraints if c.mode != "grammar"]

    @property
    def grammar(self) -> str:
        """JSON text of the grammar's configuration; empty without one (see ``SamplingParams.grammar``)."""
        return next((json.dumps(c.config) for c in self.constraints if c.mode == "grammar"), "")

    @property
    def has_own_temperature(self) -> bool:
        """Whether evaluations take the temperature of ``sampling`` and not ``eval.temperature``.

        So it is for a task that is only evaluated and whose ``sampling`` gives one.
        """
        own = self.sampling is not None and (not self.sampling_keys or "temperature" in self.sampling_keys)
        return self.evaluation_only and own

    def evaluated_at(self, sampling: SamplingParams, temperature: float) -> SamplingParams:
        """Return ``sampling`` as evaluations take it: at ``temperature``, unless the task has its own."""
        return sampling if self.has_own_temperature else replace(sampling, temperature=temperature)

    def sampling_params(self, default: SamplingParams) -> SamplingParams:
        """Return the task's sampling parameters, given the run's ``default``."""
        if self.sampling is None:
            result = default
        elif not self.sampling_keys:
            result = self.sampling
        else:
            own = {key: value for key, value in asdict(self.sampling).items() if key in self.sampling_keys}
            result = replace(default, **own)
        return replace(result, grammar=self.grammar) if self.grammar else result
