"""The run's configuration: every key with its meaning, range and only default.

YAML files override it, and the command line overrides them. The section ``scheduler`` is declared beside its
class. Choices are ``OneOf``, because OmegaConf 2.3 does not understand ``Literal``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from multitask_rl.config.schema.build import build_dataclass, build_parts
from multitask_rl.config.schema.located_yaml import load_yaml
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
from multitask_rl.curriculum.scheduler import SchedulerConfig as SchedulerConfig
from multitask_rl.errors import ConfigError
from multitask_rl.records import SamplingSettings

RECORD = "config.yaml"
"""File of a run's output directory that holds its configuration."""


@dataclass(kw_only=True, slots=True)
class LoraConfig(Settings):
    """Low-rank adapters instead of full training (needs the extra ``peft``)."""

    rank: Natural = 0
    """0 = train all weights."""
    alpha: Positive = 32.0
    """Scale of the adapters: their update is multiplied by alpha / rank."""
    dropout: Annotated[float, Range("[0, 1)")] = 0.0
    """Dropout before the adapters in an update. Sampling has none, so the metric ``mismatch`` is above 0."""
    target_modules: str = "all-linear"
    """Modules that get adapters: ``all-linear`` or a comma-separated list of names."""


@dataclass(kw_only=True, slots=True)
class ModelConfig(Settings):
    """Settings of the shared actor: weights, dtype, adapters, attention."""

    name_or_path: str = ""
    """Directory or Hugging Face id of a causal language model with its tokenizer; a directory of adapters is
    merged into the model that they name."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """Dtype of the weights; ``auto``: float32 on CPU, bfloat16 on CUDA. The optimizer updates bfloat16 and
    float16 weights through float32 copies, and sums their gradients in float32. With float16 it scales the
    loss, so that small gradients do not vanish."""
    attn_implementation: str = "auto"
    """Attention of ``transformers``: ``auto`` (``sdpa``, or the model's own), ``sdpa``, ``eager``,
    ``flash_attention_2``, ``flash_attention_3``, ``flex_attention``, or a kernel of the hub (``owner/name``).
    Only with ``sdpa`` and ``eager`` does a group share its prompt."""
    autocast: bool = False
    """bfloat16 autocast in the training forward and in the ``hf`` engine."""
    compile: bool = False
    """Fuse norms and feed-forward blocks with ``torch.compile``. The first step takes up to a minute more,
    later steps are faster. On a CPU it needs a C++ compiler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Keep saved activations in host memory (CUDA): less device memory, more time."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Contexts beyond the trained length: ``{type: yarn, factor: 4.0}``. Types are ``linear``, ``ntk``,
    ``yarn`` and ``dynamic``; further keys are ``rope_parameters`` of ``transformers``. Empty = unchanged."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    reference_decay: Fraction = 1.0
    """After each step the reference of the KL becomes decay * reference + (1 - decay) * actor; 1 = the
    initial actor for the whole run. It begins at the initial actor with the first task that has a KL, also
    if a resume adds this task."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        """Check ranges, and that no two settings exclude each other."""
        build_parts(self)
        Settings.__post_init__(self)
        if self.autocast and self.dtype == "float16":
            raise ConfigError(
                "model.autocast computes in bfloat16 and cannot be combined with model.dtype=float16; set "
                "model.autocast=false, or model.dtype=float32 or bfloat16"
            )
        if self.reference_decay < 1.0 and self.lora.rank > 0:
            raise ConfigError(
                "model.reference_decay below 1 needs a reference of its own, but with model.lora.rank > 0 "
                "the base model is the reference; set model.reference_decay=1 or model.lora.rank=0"
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig(Settings):
    """The value function of tasks whose algorithm needs one."""

    trunk: Annotated[str, OneOf("actor", "separate")] = "actor"
    """``actor``: heads on the actor's last hidden state; ``separate``: a model of its own, all of whose
    weights are trained, also beside an actor with adapters."""
    name_or_path: str = ""
    """``separate``: directory or Hugging Face id of the critic's model, which must have the actor's
    tokenizer; empty = a copy of the actor."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """``separate``: dtype of its weights; ``auto`` = as the actor's."""
    gradient_checkpointing: bool = False
    """``separate``: recompute its activations in the backward pass."""
    learning_rate: NotNegative = 0.0
    """Learning rate of the heads and a separate trunk; 0 = 10 x the actor's."""

    def __post_init__(self) -> None:
        """Check ranges, and that a model of its own is asked for where one is described."""
        Settings.__post_init__(self)
        own: dict[str, object] = {
            "name_or_path": self.name_or_path,
            "dtype": self.dtype if self.dtype != "auto" else "",
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        for key, value in own.items():
            if self.trunk == "actor" and value:
                raise ConfigError(
                    f"critic.{key}={value!r} is for a critic with a model of its own; set "
                    "critic.trunk=separate, or leave it out: heads on the actor's model follow model.*"
                )


@dataclass(kw_only=True, slots=True)
class RolloutConfig(SamplingSettings):
    """How the actor is sampled; a task's ``sampling`` overrides the first five keys."""

    temperature: Positive = 1.0
    """Sampling temperature. The log-probabilities of training are computed at the same temperature."""

    engine: str = "hf"
    """Entry point of ``multitask_rl.rollout_engines``."""
    max_prompt_tokens: Natural = 1024
    """Training leaves out longer prompts and counts them. Held-out ones lose their beginning, and a warning
    tells of it. 0 = the model's limit minus the response."""
    max_batch_tokens: Count = 65536
    """Most prompt and response tokens in one generation batch; limits memory."""
    prefill_tokens: Count = 8192
    """Prompt tokens of one forward pass of the engine ``hf``, over all rows: bounds the memory of long
    prompts. vLLM has its own bound."""
    max_staleness: Natural = 0
    """Most updates between sampling and learning. 0 = stages run one after another; 1 = the next rollout runs
    beside rewards and update; more = as many rollouts ahead, for slow rewards."""
    environment_workers: Count = 2
    """Processes that hold the worlds of tasks with an environment; each holds many episodes."""
    lockstep: bool = False
    """Sample the next turns when the worlds of all episodes have answered. Without it, the time that worlds
    take decides which turns share a pass of the model, and rounding with it: a repeated run is equal up to
    that. With it the same seed gives the same run, and all episodes wait for the slowest world."""
    engine_config: dict[str, Any] = field(default_factory=dict)
    """Keys of the engine's own ``Config`` (vLLM: ``max_num_seqs``, ``tensor_parallel_size``...)."""


@dataclass(kw_only=True, slots=True)
class BatchConfig(Settings):
    """How much a step samples, and how its samples are divided for the optimizer."""

    prompts_per_step: Count = 32
    """Prompts of all tasks together; the scheduler divides them among the tasks."""
    group_size: Count = 8
    """Rollouts per prompt."""
    num_minibatches: Count = 1
    """Optimizer steps per epoch over the step's samples."""
    num_epochs: Count = 1
    """Passes over the step's samples."""
    tokens_per_microbatch: Count = 16384
    """Token budget of one forward/backward."""
    layout: Annotated[str, OneOf("auto", "shared", "bucketed", "packed")] = "auto"
    """``shared``: samples one after another, a group's prompt once, attention in blocks. ``bucketed``: rows
    sorted by length, right-padded. ``packed``: no padding, a mask of tokens x tokens. ``auto``: ``shared`` if
    the model supports it, else ``bucketed``. A layout that the model does not support is refused."""
    context_ranks: Count = 1
    """Learner ranks (devices of ``device_map.actor``) that share each sequence; must divide the number of
    ranks. 1 = whole sequences."""
    refill_rounds: Natural = 1
    """Extra rounds of prompts for tasks whose groups gave no gradient; 0 = off."""
    quorum: PositiveFraction = 1.0
    """Share of a step's groups that must be sampled and scored before the update. Late groups join a later
    step within ``rollout.max_staleness`` (one update of it is reserved for them), or are dropped."""


@dataclass(kw_only=True, slots=True)
class TrainingConfig(Settings):
    """Which code computes the updates, and in which processes."""

    backend: str = "torch"
    """Entry point of ``multitask_rl.training_backends``, ``module:Class`` or ``file.py:Class``. ``torch``:
    this process, or a learner rank on each device of ``device_map.actor``."""
    backend_config: dict[str, Any] = field(default_factory=dict)
    """Keys of the backend's own ``Config``."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig(Settings):
    """AdamW over the actor (and critic)."""

    learning_rate: Positive = 1e-6
    """Peak learning rate of the actor."""
    betas: list[Annotated[float, Range("[0, 1)")]] = field(default_factory=lambda: [0.9, 0.99])
    """AdamW's decay rates of the two moments."""
    adam_eps: Positive = 1e-8
    """AdamW's addend to the root of the second moment; larger: smaller updates where gradients are small."""
    moments: Annotated[str, OneOf("float32", "int8", "host")] = "float32"
    """How AdamW's two moments are kept: 4 bytes a number each, or 1 with a scale for each block of 256;
    ``host``: 4 bytes each in host memory, beside float32 masters of the weights, where AdamW then runs."""
    weight_decay: NotNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""
    warmup_steps: Natural = 0
    """Training steps over which the learning rate rises from 0. All updates of a step have the same rate."""
    schedule: Annotated[str, OneOf("constant", "linear", "cosine")] = "constant"
    """After the warm-up: ``constant``, ``linear`` or ``cosine`` (to 0 at ``max_steps``)."""

    def __post_init__(self) -> None:
        """Check ranges, and that there is a decay rate for each moment."""
        Settings.__post_init__(self)
        if len(self.betas) != 2:
            raise ConfigError(f"optimizer.betas must be two numbers, got {list(self.betas)!r}")


@dataclass(kw_only=True, slots=True)
class GuardConfig(Settings):
    """Settings of the guard, which watches held-out metrics."""

    enabled: bool = True
    """Whether the guard runs."""
    plugin: str = "safety_guard"
    """Entry point of ``multitask_rl.guards``, ``module:Class`` or ``file.py:Class``."""
    monitor_metrics: list[str] = field(default_factory=list)
    """Watched metrics: a task (its primary metric), ``task/metric``, or a metric or reward of every task that
    has it; empty = the primary metric of every task. Only ``safety_guard`` reads this, ``threshold_delta``,
    ``absolute`` and ``max_rollbacks``."""
    threshold_delta: float = -0.15
    """Fall that counts as a regression: a fraction of the demonstrated value, or in the metric's unit with
    ``absolute``. The sign is ignored, 0 is refused."""
    absolute: bool = False
    """``threshold_delta`` is in the metric's own unit."""
    rollback_steps: Count = 100
    """How far back a rollback may reach."""
    max_rollbacks: Natural = 3
    """Rollbacks allowed within ``rollback_window`` steps; one more stops the run with exit code 3."""
    guard_config: dict[str, Any] = field(default_factory=dict)
    """Keys of the guard's own ``Config`` (of ``safety_guard``: detector, cooldown, confirmation)."""

    def __post_init__(self) -> None:
        """Check ranges, and that ``threshold_delta`` is a fall."""
        Settings.__post_init__(self)
        fall = abs(self.threshold_delta)
        if not 0.0 < fall < math.inf or (not self.absolute and fall >= 1.0):
            fraction = "a fraction between -1 and 0, e.g. -0.15 for 15 %"
            allowed = "a number other than 0" if self.absolute else fraction
            raise ConfigError(f"guard.threshold_delta must be {allowed}, got {self.threshold_delta!r}")


@dataclass(kw_only=True, slots=True)
class EvalConfig(Settings):
    """When and on how many held-out prompts tasks are evaluated."""

    every: Natural = 25
    """Steps between evaluations; 0 = only at the start and the end."""
    num_prompts: Natural = 256
    """Most held-out prompts per task, drawn once by ``seed``: the same ones during a run; 0 = none."""
    temperature: NotNegative = 1.0
    """Sampling temperature of evaluations; 0 = greedy."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Settings):
    """When checkpoints are written, how many are kept, and what a run resumes from."""

    every: Natural = 25
    """Steps between checkpoints; 0 = only at the start and the end. With a guard, further ones hold weights
    judged good, so that a rollback can reach them."""
    keep: Count = 4
    """Number of newest checkpoints kept; the two newest judged good and the best are kept too."""
    resume: str = "auto"
    """``auto`` (newest in the output directory, if any), ``never``, or a checkpoint's directory."""


@dataclass(kw_only=True, slots=True)
class ScoringConfig(Settings):
    """Settings of the reward pool, which scores responses in workers."""

    num_workers: Count = 2
    """Killable worker processes for rewards written in Python."""
    max_concurrency: Count = 8
    """Most plugin calls at the same time, over all tasks."""
    max_failure_rate: Fraction = 0.5
    """Highest share of failures in the last 200 samples of a task; more stops the run, half of it warns."""
    retries: Natural = 2
    """Times that a call is repeated after a failure of kind ``infra``."""
    worker_memory_mb: Natural = 1024
    """Memory in MiB that scoring may add to a worker process after its plugin is built; 0 = no limit. A
    response that exceeds it gets the reward's ``overrun``; other responses are not affected."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig(Settings):
    """Where metrics are recorded."""

    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl", "mlflow"])
    """Entry points of ``multitask_rl.trackers``."""
    console: Annotated[str, OneOf("auto", "lines", "json", "quiet")] = "auto"
    """``auto`` = a live view on a terminal and in a notebook, else lines; ``lines``; ``json`` = a JSON object
    per line; ``quiet`` = warnings and the end alone."""
    experiment: str = "multitask-rl"
    """MLflow experiment."""
    run_name: str = ""
    """Empty = made from the name of ``output_dir``, the time and the seed."""
    uri: str = ""
    """MLflow tracking URI; empty = that of the environment variable ``MLFLOW_TRACKING_URI``, without it the
    SQLite file ``mlflow.db`` beside ``output_dir``, which runs share."""
    store_rollouts: Annotated[int, Range("[-1, inf)")] = 8
    """Rollouts per task and step written to ``rollouts.jsonl``; -1 = all."""


@dataclass(kw_only=True, slots=True)
class RayConfig(Settings):
    """Parts that ``executor=ray`` runs on the cluster of ``RAY_ADDRESS``; without it, on this machine."""

    num_engines: Count = 1
    """Replicas of the rollout engine, each an actor with its own weights."""
    min_engines: Natural = 0
    """Replicas that the cluster must have room for at the start; the others join when it has. 0 = all."""
    engine_timeout_s: Positive = 600.0
    """Seconds without a decode step or an answer until a replica is killed and replaced. The time before its
    first step, in which it loads and compiles, does not count."""
    room_timeout_s: Positive = 1800.0
    """Seconds for which a run without any replica waits for room in the cluster before it ends."""
    gpus_per_engine: Annotated[float, Range("[-1, inf)")] = -1.0
    """GPUs of each replica, 0.5 = half of one, 0 = CPU; -1 = one if the actor is on a GPU, else CPU."""
    num_reward_pools: Count = 1
    """Reward pools, each an actor with its own workers."""


@dataclass(kw_only=True, slots=True)
class RunConfig(Settings):
    """All settings of a run: tasks, model, rollout, optimizer, controllers, records."""

    tasks_file: str = ""
    """Path of the tasks file."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Tasks given or overridden here: ``tasks.math.weight=2``."""
    output_dir: str = "runs/default"
    """Where checkpoints, metrics, events and rollouts are written."""
    max_steps: Count = 100
    """Training steps (one batch of rollouts and its optimizer steps each)."""
    seed: int = 0
    """Seed of every random stream of the run."""
    executor: Annotated[str, OneOf("local", "ray")] = "local"
    """``local`` (in process) or ``ray``."""
    device_map: dict[str, str] = field(default_factory=dict)
    """Role -> devices: ``actor``, ``critic``, ``reward.<task>``, ``constraint.<task>``; default: cuda if
    there is one, else cpu. ``reference`` and ``rollout`` use the actor's devices. Each device of the actor
    (``cuda:0-3``, ``cpu:0-1``) is a learner rank with a copy of the weights, or with a part of them
    (``cuda:0-3 sharded``, FSDP; ``cuda:0-3 sharded offload``: in host memory)."""
    profile: Annotated[str, OneOf("", "torch")] = ""
    """``torch``: a trace of three steps and a memory report in ``<output_dir>/profile``; empty = off."""
    num_threads: Natural = 0
    """torch threads; 0 = torch's choice, at most the cores that a container's limit allows."""
    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        """Build parts that are given as mappings; check ranges, and that late groups can still be used."""
        build_parts(self)
        Settings.__post_init__(self)
        if self.rollout_lag < 0:
            raise ConfigError(
                f"batch.quorum={self.batch.quorum:g} needs rollout.max_staleness >= 1: with 0 every late "
                "group would be too old for the next step; raise it, or set batch.quorum=1"
            )

    @property
    def rollout_lag(self) -> int:
        """Steps that sampling runs ahead of learning; one update of the bound is reserved for late groups."""
        return self.rollout.max_staleness - (self.batch.quorum < 1.0)


def recorded_config(run: Path) -> RunConfig:
    """Return the recorded configuration of the run in directory ``run``, to continue it.

    The tasks come from the record, not from the run's tasks file, which may have changed since. A fork that
    has no checkpoint of its own yet begins from the other run's again.

    Raises:
        ConfigError: the record cannot be read, or holds no tasks.
    """
    document, where = load_yaml(run / RECORD)
    tasks = document.get("tasks") if isinstance(document, Mapping) else None
    if not isinstance(tasks, Mapping):
        raise ConfigError(f"{where.file}: it holds no tasks; give the run's tasks file with tasks_file=PATH")
    for name, task in tasks.items():
        if not isinstance(task, Mapping):
            raise ConfigError(f"{where.at('tasks', name)}: expected a mapping, got {task!r}")
    given = {name: as_given(task) for name, task in tasks.items()}
    config = build_dataclass(RunConfig, {**document, "tasks_file": "", "tasks": given}, where)
    if config.checkpoint.resume != "never" and not any((run / "checkpoints").glob("step_*")):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys with their values, as ``model.lora.rank``; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``; mappings that both have are merged, too."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def as_given(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded task with the keys of a tasks file."""
    given = {k: v for k, v in task.items() if k not in ("name", "source", "sampling_keys", "former_names")}
    sampling, keys = task.get("sampling"), task.get("sampling_keys")
    if keys and isinstance(sampling, Mapping) and isinstance(keys, list):
        given["sampling"] = {key: value for key, value in sampling.items() if key in keys}
    return given
