"""The run's configuration: every key, its meaning, range and only default.

YAML files override, the command line overrides them, nothing else holds a default. ``Literal`` is not
understood by OmegaConf 2.3, so choices are strings checked in ``__post_init__``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from multitask_rl.config.schema.ranges import at_least, one_of, within
from multitask_rl.errors import ConfigError

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CriticConfig",
    "EvalConfig",
    "GuardConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RayConfig",
    "RolloutConfig",
    "RunConfig",
    "SchedulerConfig",
    "ScoringConfig",
    "TrackingConfig",
]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of full training (needs the extra ``peft``)."""

    rank: int = 0
    """0 = train all weights."""
    alpha: float = 32.0
    """Scale of the adapters: their update is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout before the adapters, in [0, 1)."""
    target_modules: str = "all-linear"
    """As ``peft`` reads it: ``all-linear`` or a comma-separated list of module names."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("model.lora.rank", self.rank, 0)
        at_least("model.lora.alpha", self.alpha, 0.0, strict=True)
        within("model.lora.dropout", self.dropout, "[0, 1)")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The shared actor."""

    name_or_path: str = ""
    """Directory or Hugging Face id of a causal language model with its tokenizer."""
    dtype: str = "auto"
    """Dtype of the weights: ``auto`` (float32 on CPU, bfloat16 on CUDA), ``float32``, ``bfloat16``. The
    optimizer moves bfloat16 weights through float32 masters, and their gradients add up in float32."""
    autocast: bool = False
    """bfloat16 autocast in the training forward and in the ``hf`` engine."""
    compile: bool = False
    """Fuse norms and feed-forward blocks by ``torch.compile``: faster steps after a first one that takes up
    to a minute. On a CPU it needs a C++ compiler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    activation_offload: bool = False
    """Keep what the backward pass needs in host memory (CUDA): less device memory, more time."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Contexts beyond the trained length: ``{type: yarn, factor: 4.0}``; types are ``linear``, ``ntk``,
    ``yarn`` and ``dynamic``, further keys those of ``transformers``' ``rope_parameters``; empty = as the
    model is."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    reference_decay: float = 1.0
    """The KL's reference after each step: decay * reference + (1 - decay) * actor, in [0, 1]; 1 = the actor
    as it was at the start."""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        """Check choices."""
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        within("model.reference_decay", self.reference_decay, "[0, 1]")
        if self.reference_decay < 1.0 and self.lora.rank > 0:
            raise ConfigError(
                "model.reference_decay below 1 needs a reference of its own, but with model.lora.rank > 0 "
                "the base model is the reference; set model.reference_decay=1 or model.lora.rank=0"
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The value function of tasks whose algorithm needs one."""

    trunk: str = "actor"
    """``actor``: heads on the actor's last hidden state; ``separate``: an own copy of the model."""
    learning_rate: float = 0.0
    """Learning rate of heads and own trunk; 0 = 10 x the actor's."""

    def __post_init__(self) -> None:
        """Check choices."""
        one_of("critic.trunk", self.trunk, ("actor", "separate"))
        at_least("critic.learning_rate", self.learning_rate, 0.0)


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """How the actor is sampled; a task's ``sampling`` overrides the last five."""

    engine: str = "hf"
    """Entry point of ``multitask_rl.rollout_engines``."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out (training) with a count; 0 = the model's limit less the response."""
    max_batch_tokens: int = 65536
    """Prompt and response tokens generated at once at most (memory)."""
    max_staleness: int = 0
    """Updates between sampling and learning at most: 0 = one after the other; 1 = the next rollout runs while
    rewards come in and the update is made; more = as many rollouts ahead, for slow rewards."""
    max_new_tokens: int = 256
    """Longest response, in tokens."""
    temperature: float = 1.0
    """> 0; the log-probabilities of training are taken under it too."""
    top_p: float = 1.0
    """Nucleus: sample from the likeliest tokens that hold this probability, in (0, 1]; 1 = off."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0 = off."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response."""
    engine_config: dict[str, Any] = field(default_factory=dict)
    """Keys of the engine's own ``Config`` (vLLM: ``max_num_seqs``, ``tensor_parallel_size``...)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("rollout.max_prompt_tokens", self.max_prompt_tokens, 0)
        at_least("rollout.max_batch_tokens", self.max_batch_tokens, 1)
        at_least("rollout.max_new_tokens", self.max_new_tokens, 1)
        at_least("rollout.max_staleness", self.max_staleness, 0)
        at_least("rollout.temperature", self.temperature, 0.0, strict=True)
        at_least("rollout.top_k", self.top_k, 0)
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"rollout.top_p must be in (0, 1], got {self.top_p!r}")


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """How much a step samples and how it is cut for the optimizer."""

    prompts_per_step: int = 32
    """Prompts of all tasks together; the scheduler splits them."""
    group_size: int = 8
    """Rollouts per prompt."""
    num_minibatches: int = 1
    """Optimizer steps per epoch over the step's samples."""
    num_epochs: int = 1
    """Passes over the step's samples."""
    tokens_per_microbatch: int = 16384
    """Token budget of one forward/backward."""
    layout: str = "auto"
    """``shared`` (samples one after another, a group's prompt once, attention in blocks), ``bucketed`` (rows
    sorted by length, right-padded), ``packed`` (no padding, a mask of tokens x tokens), or ``auto``:
    ``shared`` if the model can, else ``bucketed``. ``shared`` and ``packed`` are refused where the model
    cannot."""
    context_ranks: int = 1
    """Learner ranks (devices of ``device_map.actor``) that compute each sequence together, in parts; must
    divide their number. 1 = whole sequences."""
    refill_rounds: int = 1
    """Extra rounds of prompts for tasks whose groups gave no gradient; 0 = off."""
    quorum: float = 1.0
    """Share of a step's groups that must be scored for the step to go on; late ones join a later step within
    ``rollout.max_staleness`` (one update of it is kept for them) or are dropped. In (0, 1]."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for key in ("prompts_per_step", "group_size", "num_minibatches", "num_epochs", "context_ranks"):
            at_least(f"batch.{key}", getattr(self, key), 1)
        at_least("batch.tokens_per_microbatch", self.tokens_per_microbatch, 1)
        at_least("batch.refill_rounds", self.refill_rounds, 0)
        within("batch.quorum", self.quorum, "(0, 1]")
        one_of("batch.layout", self.layout, ("auto", "shared", "bucketed", "packed"))


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW over the actor (and critic)."""

    learning_rate: float = 1e-6
    """Peak learning rate of the actor."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 = off."""
    warmup_steps: int = 0
    """Training steps, as ``max_steps`` counts them, over which the learning rate rises from 0; all updates of
    a step (``batch.num_epochs``, ``batch.num_minibatches``) have one rate."""
    schedule: str = "constant"
    """After the warm-up: ``constant``, ``linear`` or ``cosine`` (to 0 at ``max_steps``)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("optimizer.learning_rate", self.learning_rate, 0.0, strict=True)
        for key in ("weight_decay", "max_grad_norm", "warmup_steps"):
            at_least(f"optimizer.{key}", getattr(self, key), 0.0)
        if len(self.betas) != 2:
            raise ConfigError(f"optimizer.betas must be two numbers, got {list(self.betas)!r}")
        for beta in self.betas:
            within("optimizer.betas", beta, "[0, 1)")
        one_of("optimizer.schedule", self.schedule, ("constant", "linear", "cosine"))


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """Who decides the tasks' weights."""

    policy: str = "deficit_learnability"
    """Entry point of ``multitask_rl.schedulers``."""
    min_weight: float | None = None
    """Floor of every task's share; None = 0.1, or 0.2 / number of tasks where that is smaller."""
    metric_key: str = "reward_score"
    """What the policy watches: ``reward_score`` (training reward) or a metric of the step's task stats."""
    policy_config: dict[str, Any] = field(default_factory=dict)
    """Further keys of the policy's ``Config``, such as ``patience`` of the policy ``patience``."""


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    """The guard over held-out abilities."""

    enabled: bool = True
    """Whether regressions are watched for at all."""
    plugin: str = "safety_guard"
    """Entry point of ``multitask_rl.guards``, ``module:Class`` or ``file.py:Class``."""
    monitor_metrics: list[str] = field(default_factory=list)
    """What is watched: a task (its primary metric), ``task/metric``, or a metric or reward, in every task
    that has it; empty = the primary metric of every task. Of ``safety_guard`` alone, as are
    ``threshold_delta``, ``absolute`` and ``max_rollbacks``."""
    threshold_delta: float = -0.15
    """Fall that counts as regression: fraction of the demonstrated level, or absolute."""
    absolute: bool = False
    """``threshold_delta`` is in the metric's own unit."""
    rollback_steps: int = 100
    """How far back a rollback may reach."""
    max_rollbacks: int = 3
    """After as many the run stops with exit code 3."""
    guard_config: dict[str, Any] = field(default_factory=dict)
    """Keys of the guard's own ``Config`` (of ``safety_guard``: detector, cooldown, confirmation)."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    every: int = 25
    """Steps between evaluations; 0 = only at the start and the end."""
    num_prompts: int = 256
    """Per task, always the same ones."""
    temperature: float = 1.0
    """0 = greedy."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("eval.every", self.every, 0)
        at_least("eval.num_prompts", self.num_prompts, 0)
        at_least("eval.temperature", self.temperature, 0.0)


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Atomic checkpoints with every controller's state."""

    every: int = 25
    """Steps between checkpoints; 0 = only at the end."""
    keep: int = 4
    """Newest kept; judged-good and best are kept besides."""
    resume: str = "auto"
    """``auto`` (newest in the output directory, if any), ``never``, or a checkpoint's directory."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(kw_only=True, slots=True)
class ScoringConfig:
    """The reward pool."""

    num_workers: int = 2
    """Killable worker processes for rewards written in Python."""
    max_concurrency: int = 8
    """Plugin calls under way at once over all tasks."""
    max_failure_rate: float = 0.5
    """Error budget per task over the last 200 samples: warn at half of it, stop the run above it."""
    retries: int = 2
    """Of ``infra`` failures only."""
    worker_memory_mb: int = 1024
    """What scoring may add to the memory of a worker process, in MiB, above what its plugin holds when it is
    ready; 0 = no limit. A response that passes it pays alone (see ``overrun`` of a reward)."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("scoring.num_workers", self.num_workers, 1)
        at_least("scoring.max_concurrency", self.max_concurrency, 1)
        at_least("scoring.retries", self.retries, 0)
        at_least("scoring.worker_memory_mb", self.worker_memory_mb, 0)
        within("scoring.max_failure_rate", self.max_failure_rate, "[0, 1]")


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Where numbers go."""

    trackers: list[str] = field(default_factory=lambda: ["console", "jsonl", "mlflow"])
    """Entry points of ``multitask_rl.trackers``."""
    experiment: str = "multitask-rl"
    """MLflow experiment."""
    run_name: str = ""
    """Empty = made from the time and the seed."""
    uri: str = ""
    """MLflow tracking URI; empty = ``sqlite:///<output_dir>/mlflow.db``."""
    store_rollouts: int = 8
    """Rollouts per task and step written to ``rollouts.jsonl``; -1 = all."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("tracking.store_rollouts", self.store_rollouts, -1)


@dataclass(kw_only=True, slots=True)
class RayConfig:
    """What ``executor=ray`` spreads over the cluster; ``RAY_ADDRESS`` names one, else this machine is it."""

    num_engines: int = 1
    """Replicas of the rollout engine, each an actor with its own weights."""
    gpus_per_engine: float = 0.0
    """GPUs of each replica; 0 = CPU."""
    num_reward_pools: int = 1
    """Reward pools, each an actor with its own workers."""

    def __post_init__(self) -> None:
        """Check ranges."""
        at_least("ray.num_engines", self.num_engines, 1)
        at_least("ray.gpus_per_engine", self.gpus_per_engine, 0.0)
        at_least("ray.num_reward_pools", self.num_reward_pools, 1)


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """A run."""

    tasks_file: str = ""
    """Path of the tasks file."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """Tasks given or overridden here: ``tasks.math.weight=2``."""
    output_dir: str = "runs/default"
    """Where checkpoints, metrics, events and rollouts are written."""
    max_steps: int = 100
    """Training steps (one batch of rollouts and its optimizer steps each)."""
    seed: int = 0
    """Seed of every random stream of the run."""
    executor: str = "local"
    """``local`` (in process) or ``ray``."""
    device_map: dict[str, str] = field(default_factory=dict)
    """Role -> devices: ``actor``, ``critic``, ``reward.<task>``, ``constraint.<task>``; default: cuda if
    there is one, else cpu. ``reference`` and ``rollout`` live on the actor's devices; others are refused.
    Each device of the actor (``cuda:0-3``, ``cpu:0-1``) is a learner rank with a copy of the weights; with a
    part of them where it says ``cuda:0-3 sharded`` (FSDP)."""
    profile: str = ""
    """``torch``: a trace of three steps and a memory report in ``<output_dir>/profile``; empty = off."""
    num_threads: int = 0
    """torch threads; 0 = torch's choice."""
    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        """Check ranges."""
        one_of("executor", self.executor, ("local", "ray"))
        one_of("profile", self.profile, ("", "torch"))
        at_least("max_steps", self.max_steps, 1)
        at_least("num_threads", self.num_threads, 0)
        if self.rollout_lag < 0:
            raise ConfigError(
                f"batch.quorum={self.batch.quorum:g} needs rollout.max_staleness >= 1: with 0 every late "
                "group would be too old for the next step; raise it, or set batch.quorum=1"
            )

    @property
    def rollout_lag(self) -> int:
        """Steps that sampling is ahead of learning; one update of the bound is kept for late groups."""
        return self.rollout.max_staleness - (self.batch.quorum < 1.0)
