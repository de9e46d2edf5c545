"""Numbers of the run's configuration: what is refused, and that what is meant to be allowed is."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from multitask_rl.algorithms.rloo import RLOO
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RayConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    TrackingConfig,
)
from multitask_rl.config.schema.ranges import OneOf, Range
from multitask_rl.errors import ConfigError
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.plugins import build_plugin
from multitask_rl.records import SamplingParams


@pytest.mark.parametrize(
    ("section", "key", "value", "told"),
    [
        (EvalConfig, "every", -1, "EvalConfig.every must be >= 0, got -1"),
        (EvalConfig, "num_prompts", -1, "EvalConfig.num_prompts must be >= 0, got -1"),
        (EvalConfig, "temperature", -1.0, "EvalConfig.temperature must be >= 0, got -1.0"),
        (EvalConfig, "temperature", math.nan, "EvalConfig.temperature must be >= 0, got nan"),
        (CheckpointConfig, "every", -1, "CheckpointConfig.every must be >= 0, got -1"),
        (CheckpointConfig, "keep", 0, "CheckpointConfig.keep must be >= 1, got 0"),
        (OptimizerConfig, "learning_rate", math.inf, "OptimizerConfig.learning_rate must be > 0, got inf"),
        (OptimizerConfig, "max_grad_norm", -1.0, "OptimizerConfig.max_grad_norm must be >= 0, got -1.0"),
        (OptimizerConfig, "weight_decay", -0.1, "OptimizerConfig.weight_decay must be >= 0, got -0.1"),
        (OptimizerConfig, "warmup_steps", -1, "OptimizerConfig.warmup_steps must be >= 0, got -1"),
        (OptimizerConfig, "betas", [0.9], "optimizer.betas must be two numbers, got [0.9]"),
        (OptimizerConfig, "betas", [0.9, 1.0], "OptimizerConfig.betas[1] must be in [0, 1), got 1.0"),
        (ScoringConfig, "num_workers", 0, "ScoringConfig.num_workers must be >= 1, got 0"),
        (ScoringConfig, "max_concurrency", 0, "ScoringConfig.max_concurrency must be >= 1, got 0"),
        (ScoringConfig, "retries", -1, "ScoringConfig.retries must be >= 0, got -1"),
        (
            ScoringConfig,
            "max_failure_rate",
            math.nan,
            "ScoringConfig.max_failure_rate must be in [0, 1], got nan",
        ),
        (ScoringConfig, "max_failure_rate", 1.1, "ScoringConfig.max_failure_rate must be in [0, 1], got 1.1"),
        (RolloutConfig, "max_prompt_tokens", -1, "RolloutConfig.max_prompt_tokens must be >= 0, got -1"),
        (RolloutConfig, "max_batch_tokens", 0, "RolloutConfig.max_batch_tokens must be >= 1, got 0"),
        (BatchConfig, "quorum", 0.0, "BatchConfig.quorum must be in (0, 1], got 0.0"),
        (CriticConfig, "learning_rate", -1.0, "CriticConfig.learning_rate must be >= 0, got -1.0"),
        (LoraConfig, "rank", -1, "LoraConfig.rank must be >= 0, got -1"),
        (LoraConfig, "alpha", 0.0, "LoraConfig.alpha must be > 0, got 0.0"),
        (LoraConfig, "dropout", 1.0, "LoraConfig.dropout must be in [0, 1), got 1.0"),
        (TrackingConfig, "store_rollouts", -2, "TrackingConfig.store_rollouts must be >= -1, got -2"),
        (RayConfig, "gpus_per_engine", -2.0, "RayConfig.gpus_per_engine must be >= -1, got -2.0"),
        (SafetyGuardConfig, "lr_factor", 2.0, "SafetyGuardConfig.lr_factor must be in (0, 1], got 2.0"),
        (SafetyGuardConfig, "culprit_factor", 1.5, "culprit_factor must be in [0, 1], got 1.5"),
        (SafetyGuardConfig, "victim_factor", 0.5, "SafetyGuardConfig.victim_factor must be >= 1, got 0.5"),
        (RunConfig, "num_threads", -1, "RunConfig.num_threads must be >= 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_told(section: type[Any], key: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        section(**{key: value})


@pytest.mark.parametrize("section", [RolloutConfig, SamplingParams])
def test_an_empty_stop_string_is_refused(section: type[Any]) -> None:
    """Every response holds the empty text."""
    with pytest.raises(ConfigError, match=r"\.stop\[1\] must be not empty, got ''"):
        section(stop=["END", ""])


def test_a_text_is_no_list_of_texts() -> None:
    with pytest.raises(ConfigError, match=r"RolloutConfig\.stop must be a list, got 'END'"):
        RolloutConfig(stop="END")  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    assert EvalConfig(every=0, num_prompts=0, temperature=0.0).every == 0
    OptimizerConfig(max_grad_norm=0.0, betas=[0.0, 0.0])
    ScoringConfig(max_failure_rate=1.0, retries=0)
    ScoringConfig(max_failure_rate=0.0)
    ModelConfig(reference_decay=1.0, lora=LoraConfig(dropout=0.0))
    BatchConfig(quorum=1.0)


class Timed:
    @dataclass
    class Config:
        timeout_s: Annotated[float, Range("(0, inf)")] = 5.0
        modes: list[Annotated[str, OneOf("fast", "exact")]] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config


class Patient(Timed):
    @dataclass
    class Config(Timed.Config):
        timeout_s: float = 60.0


def test_a_plugin_declares_ranges_on_the_fields_of_its_config() -> None:
    assert build_plugin(Timed, {"timeout_s": 1, "modes": ["fast"]}, where="tasks.a").config.timeout_s == 1.0
    with pytest.raises(ConfigError, match=r"^tasks\.a\.timeout_s must be > 0, got 0\.0$"):
        build_plugin(Timed, {"timeout_s": 0}, where="tasks.a")
    with pytest.raises(ConfigError, match=r"modes\[1\] must be one of fast, exact, got 'exat'; did"):
        build_plugin(Timed, {"modes": ["fast", "exat"]}, where="tasks.a")


def test_python_may_give_parts_as_mappings_and_gets_the_errors_of_a_file() -> None:
    given: Any = {"group_size": 4}, {"lora": {"rank": 2}}
    config = RunConfig(batch=given[0], model=given[1])
    assert config == RunConfig(batch=BatchConfig(group_size=4), model=ModelConfig(lora=LoraConfig(rank=2)))
    wrong: Any = {"group_sise": 4}, {"group_size": "4"}, 2.5, "7"
    with pytest.raises(ConfigError, match=r"RunConfig: batch.group_sise: unknown key .*'group_size'\?"):
        RunConfig(batch=wrong[0])
    with pytest.raises(ConfigError, match=r"RunConfig: batch.group_size: expected a whole number, got '4'"):
        RunConfig(batch=wrong[1])
    with pytest.raises(ConfigError, match=r"BatchConfig\.prompts_per_step must be a whole number, got 2\.5"):
        BatchConfig(prompts_per_step=wrong[2])
    with pytest.raises(ConfigError, match=r"RunConfig\.max_steps must be a whole number, got '7'"):
        RunConfig(max_steps=wrong[3])  # said so although it has a range, too
    with pytest.raises(ConfigError, match=r"OptimizerConfig\.adam_eps must be a number, got '7'"):
        OptimizerConfig(adam_eps=wrong[3])
    with pytest.raises(ConfigError, match=r"RunConfig\.seed must be a whole number, got '7'"):
        RunConfig(seed=wrong[3])


def test_another_default_keeps_the_range_of_the_base() -> None:
    with pytest.raises(ConfigError, match=r"timeout_s must be > 0, got -1\.0"):
        build_plugin(Patient, {"timeout_s": -1}, where="tasks.a")
    with pytest.raises(ConfigError, match="aggregation must be one of token, sequence, constant"):
        RLOO.Config(aggregation="mean")
