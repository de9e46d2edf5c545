"""Training step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multitask_rl.api.rl_trainer import PPOTrainer
from multitask_rl.config.ppo import PPOConfig
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.step.metrics import StepReport
from multitask_rl.trainer import Trainer


class PPORoleUpdater(PPOTrainer):
    """Updates actor and critic one step at a time: ``for _ in range(100): report = updater.update()``.

    Args:
        model: an actor, a model, or the pair that ``get_actor_critic`` returns; None = ``config.model_name``
        engine: ``hybrid`` (the engine of ``config``, which samples from the weights that are trained) or
            ``vllm``.
        overlap_comm: sample the next batch while this one is learned from and weights are sent (staleness 1).
            False: as ``config`` says.
        config: as of ``PPOTrainer``.
        prompts: as of ``RLTrainer.train``.
        further: as of ``RLTrainer`` (``reward_fn``, ``tasks``, ``data``, ``tokenizer``).

    Raises:
        ConfigError: an unknown engine or setting.
    """

    def __init__(
        self,
        model: Any = None,
        engine: str = "hybrid",
        overlap_comm: bool = False,
        *,
        config: PPOConfig | Mapping[str, Any] | None = None,
        prompts: Any = None,
        **further: Any,
    ) -> None:
        if engine not in ("hybrid", "vllm"):
            raise ConfigError(f"engine must be 'hybrid' or 'vllm', got {engine!r}")
        if isinstance(model, tuple):
            model, further["critic"] = model
        super().__init__(config, model=model, **further)
        if isinstance(self.config, RunConfig):
            raise ConfigError("PPORoleUpdater takes a PPOConfig; for a RunConfig call Trainer.train_step")
        own = self.config  # it is the caller's: the changes go into copies
        if engine == "vllm":
            self.config = replace(own, rollout=replace(own.rollout, engine="vllm"))
        if overlap_comm:
            self.config = replace(self.config, hybrid_engine=replace(own.hybrid_engine, overlap=True))
        self._prompts = prompts

    @property
    def trainer(self) -> Trainer:
        """The run that ``update`` drives; made on first use (see ``open``)."""
        if self.run is None:
            self.run = self.open(self._prompts)
        return self.run

    def update(self) -> StepReport:
        """Make one step: sample, score, update actor and critic. See ``Trainer.train_step``."""
        return self.trainer.train_step()

    def close(self) -> None:
        """End the run. Idempotent."""
        if self.run is not None:
            self.run.close()
