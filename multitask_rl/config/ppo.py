"""The few settings of a PPO run under the names that PPO trainers share, and the run they stand for.

``PPOConfig(batch_size=128, lr=1.5e-5)`` and the nested dictionary of ``get_ppo_default_config()`` are one
declaration: the dictionary holds the fields of the class.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from multitask_rl.config.devices import count_cuda_devices, torchrun_size
from multitask_rl.config.run import RunConfig, merged
from multitask_rl.config.schema.build import build_dataclass, build_parts
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.schema.ranges import Count, Natural, NotNegative, OneOf, Positive, Settings
from multitask_rl.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class PPORollout(Settings):
    """Settings of sampling: lengths, batch sizes, engine."""

    seq_len: Natural = 0
    """Longest prompt and response together, in tokens; 0 = ``seq_len`` of the run."""
    response_length: Natural = 0
    """Longest response, in tokens; 0 = 256, or half of ``seq_len`` where that is less."""
    batch_size_per_gpu: Natural = 0
    """Responses sampled per step and device; 0 = ``batch_size`` decides."""
    micro_batch_size_per_gpu: Natural = 0
    """Sequences of ``seq_len`` tokens sampled at once; 0 = the default token budget."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    engine: Annotated[str, OneOf("hf", "vllm")] = "hf"
    """Rollout engine."""
    num_workers: Count = 1
    """Engine replicas; more than one are Ray actors."""


@dataclass(kw_only=True, slots=True)
class PPOSharding(Settings):
    """Settings of the division of weights over devices."""

    enabled: bool = False
    """Each device holds a part of the weights, gradients and moments. Without effect on a single device."""
    sharding_strategy: Annotated[str, OneOf("FULL_SHARD", "NO_SHARD")] = "FULL_SHARD"
    """``FULL_SHARD`` (FSDP) or ``NO_SHARD`` (every device holds a copy)."""


@dataclass(kw_only=True, slots=True)
class PPOTraining(Settings):
    """Settings of the update of the actor."""

    seq_len: Natural = 0
    """Longest sequence of a forward pass, in tokens; 0 = that of the rollout. May not be below it."""
    micro_batch_size_per_gpu: Natural = 0
    """Sequences of ``seq_len`` tokens in one forward and backward pass; 0 = the default token budget."""
    lr: NotNegative = 0.0
    """Learning rate; 0 = ``lr`` of the run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp: PPOSharding = field(default_factory=PPOSharding)


@dataclass(kw_only=True, slots=True)
class PPOCritic(Settings):
    """Settings of the critic, the value function."""

    model_name: str = ""
    """Model whose trunk reads the values; empty = the actor's own trunk."""
    seq_len: Natural = 0
    """Longest sequence, in tokens; 0 = that of the rollout. May not be below it."""
    lr: NotNegative = 0.0
    """Learning rate; 0 = ten times the actor's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; on the actor's trunk it is the actor's as well."""


@dataclass(kw_only=True, slots=True)
class PPOHybridEngine(Settings):
    """Settings of a run in which sampling and learning share one set of weights."""

    overlap: bool = False
    """Sample the next batch while this one is learned from (staleness 1)."""
    enable_context_sharding: bool = False
    """All devices compute each sequence together, in parts. Not together with ``fsdp``, which then wins."""
    chunk_size: Natural = 0
    """Prompt tokens of one forward pass while sampling; 0 = the default."""


@dataclass(kw_only=True, slots=True)
class PPOConfig(Settings):
    """A PPO run: what ``RLTrainer`` and ``PPOTrainer`` take."""

    model_name: str = "gpt2"
    """Actor where no model is given: directory or Hugging Face id."""
    batch_size: Count = 32
    """Responses per step. A step never takes more prompts than there are."""
    mini_batch_size: Natural = 0
    """Responses per optimizer update; 0 = one update per pass over the batch."""
    epochs: Count = 1
    """Passes over a batch (not over the prompts: that is ``num_epochs`` of ``train``)."""
    group_size: Count = 1
    """Responses per prompt. Algorithms that compare responses of one prompt need at least 2."""
    lr: Positive = 1e-6
    """Learning rate of the actor."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL from the actor at the start, inside the reward; for tasks made of ``prompts``."""
    seq_len: Natural = 0
    """Longest prompt and response together, in tokens; cut to what the model covers; 0 = 1280."""
    max_steps: Natural = 0
    """Steps; 0 = as many as ``num_epochs`` passes over the prompts take."""
    output_dir: str = ""
    """Run directory; empty = a new one below ``runs``. A run directory that exists is resumed."""
    seed: int = 0
    rollout: PPORollout = field(default_factory=PPORollout)
    actor_train: PPOTraining = field(default_factory=PPOTraining)
    critic_train: PPOCritic = field(default_factory=PPOCritic)
    hybrid_engine: PPOHybridEngine = field(default_factory=PPOHybridEngine)
    run: dict[str, Any] = field(default_factory=dict)
    """Any key of ``RunConfig``, nested (``{"eval": {"every": 10}}``); overrides what the others say."""

    def __post_init__(self) -> None:
        """Read parts that are given as mappings, and check ranges."""
        build_parts(self)
        Settings.__post_init__(self)

    @classmethod
    def of(cls, config: PPOConfig | Mapping[str, Any] | None) -> PPOConfig:
        """Return ``config`` as a ``PPOConfig``; its keys, types and ranges are checked."""
        if isinstance(config, PPOConfig):
            return config
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"config: expected a mapping or a PPOConfig, got {config!r}")
        return build_dataclass(cls, config or {}, Where("config"))

    def run_config(self, *, num_prompts: int, num_epochs: int = 1, max_length: int = 0) -> RunConfig:
        """Return the run that these settings stand for.

        Args:
            num_prompts: training prompts of all tasks.
            num_epochs: passes over them, where ``max_steps`` is 0.
            max_length: longest sequence that the model covers; 0 = no limit known.
        """
        devices = max(1, torchrun_size() or count_cuda_devices())
        responses = self.rollout.batch_size_per_gpu * devices or self.batch_size
        prompts = max(1, min(math.ceil(responses / self.group_size), num_prompts))
        steps = self.max_steps or num_epochs * math.ceil(num_prompts / prompts)
        length = self.rollout.seq_len or self.seq_len or 1280
        for role, part in (("actor_train", self.actor_train), ("critic_train", self.critic_train)):
            if 0 < part.seq_len < length:
                raise ConfigError(
                    f"{role}.seq_len={part.seq_len} is below rollout.seq_len={length}: longer samples could "
                    "not be learned from; make them equal"
                )
        if 0 < max_length < length:
            logger.warning(
                "seq_len=%d is cut to the %d positions that the model covers; give it rope_scaling for more",
                length,
                max_length,
            )
            length = max_length
        response = self.rollout.response_length or min(256, length // 2)
        if response >= length:
            problem = f"rollout.response_length={response} leaves no room for a prompt in {length} tokens"
            raise ConfigError(problem)
        own_critic = self.critic_train.model_name
        given: dict[str, Any] = {
            "output_dir": self.output_dir or new_run_directory(),
            "max_steps": steps,
            "seed": self.seed,
            "model": {
                "name_or_path": self.model_name,
                "gradient_checkpointing": self.actor_train.gradient_checkpointing
                or (self.critic_train.gradient_checkpointing and not self.critic_train.model_name),
            },
            "critic": {
                "learning_rate": self.critic_train.lr,
                "trunk": "separate" if own_critic else "actor",
                "name_or_path": own_critic,
                "gradient_checkpointing": bool(own_critic) and self.critic_train.gradient_checkpointing,
            },
            "rollout": {
                "engine": self.rollout.engine,
                "max_prompt_tokens": length - response,
                "max_new_tokens": response,
                "temperature": self.rollout.temperature,
                "max_staleness": int(self.hybrid_engine.overlap),
            },
            "batch": {
                "prompts_per_step": prompts,
                "group_size": self.group_size,
                "num_minibatches": max(1, round(prompts * self.group_size / (self.mini_batch_size or 10**9))),
                "num_epochs": self.epochs,
            },
            "optimizer": {"learning_rate": self.actor_train.lr or self.lr},
            "tracking": {"trackers": ["console", "jsonl"]},
        }
        if self.rollout.micro_batch_size_per_gpu:
            given["rollout"]["max_batch_tokens"] = self.rollout.micro_batch_size_per_gpu * length
        if self.hybrid_engine.chunk_size:
            given["rollout"]["prefill_tokens"] = self.hybrid_engine.chunk_size
        if self.actor_train.micro_batch_size_per_gpu:
            given["batch"]["tokens_per_microbatch"] = self.actor_train.micro_batch_size_per_gpu * length
        if self.rollout.num_workers > 1:
            given |= {"executor": "ray", "ray": {"num_engines": self.rollout.num_workers}}
        if devices > 1:
            kind = "cuda" if count_cuda_devices() else "cpu"
            sharding = self.actor_train.fsdp
            is_sharded = sharding.enabled and sharding.sharding_strategy == "FULL_SHARD"
            given["device_map"] = {"actor": f"{kind}:0-{devices - 1}{' sharded' if is_sharded else ''}"}
            if self.hybrid_engine.enable_context_sharding and is_sharded:
                logger.warning(
                    "hybrid_engine.enable_context_sharding is off: devices that hold parts of the weights "
                    "(actor_train.fsdp) compute whole sequences; turn fsdp off to compute sequences in parts"
                )
            elif self.hybrid_engine.enable_context_sharding:
                given["batch"]["context_ranks"] = devices
        return build_dataclass(RunConfig, merged(given, self.run), Where("config", ("run",)))


def new_run_directory() -> str:
    """Return a run directory below ``runs`` that no run has."""
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"


def get_ppo_default_config() -> dict[str, Any]:
    """Return every setting of ``PPOTrainer`` with its default, as nested dictionaries to change.

    >>> get_ppo_default_config()["epochs"]
    1
    """
    return dataclasses.asdict(PPOConfig())
