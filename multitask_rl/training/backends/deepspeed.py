"""Learner ranks that divide gradients, optimizer state and weights as DeepSpeed does (ZeRO-2, ZeRO-3).

DeepSpeed holds the actor, and in stage 3 the reference. Value heads are divided as among other ranks
(``shared_state.py``). All ranks make every pass together, and DeepSpeed sums gradients in each backward pass.

Source: Rajbhandari et al., "ZeRO" (arXiv:1910.02054).
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from multitask_rl.boundary.printable import counted
from multitask_rl.config.devices import actor_devices, torchrun_size
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.ranges import OneOf, Settings
from multitask_rl.errors import CheckpointError, ConfigError, MissingExtraError, TrainingError, is_installed
from multitask_rl.models.actor import Actor
from multitask_rl.training.backend import TokenMeans, UpdateResult, Weighted
from multitask_rl.training.backends.build import TorchBackend, refused_in_parts
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.backends.sharded import ShardedPasses, Shards
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.forward import TokenOutputs, forward_tokens
from multitask_rl.training.microbatch import MicroBatch
from multitask_rl.training.optimizer import ActorCriticOptimizer

_OLDEST = "0.19.8"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WHERE = "training.backend=deepspeed"
_BUCKET = 500_000_000
"""Most gradients that DeepSpeed sums at a time: it allocates a buffer for as many as it is told."""


class ZeroGroup(RankGroup):
    """``RankGroup`` whose ranks cut the models by DeepSpeed."""

    def step(self, active: Sequence[Weighted], factor: float, compared: Sequence[str] = ()) -> UpdateResult:
        """See ``TrainingBackend``."""
        if not active:  # DeepSpeed would move the weights by their momentum
            return UpdateResult(loss=0.0, norms={}, means=TokenMeans())
        return super().step(active, factor, compared)


class DeepSpeedBackend(TorchBackend):
    """Learns in ranks on the devices of ``device_map.actor``, with DeepSpeed's ZeRO (extra ``deepspeed``)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``training.backend_config``."""

        stage: Annotated[int, OneOf(2, 3)] = 2
        """2 = ranks divide gradients and optimizer state; 3 = the weights of actor and reference, too."""

    @classmethod
    def group(cls, *args: Any, **options: Any) -> RankGroup:
        """Return the ranks."""
        return ZeroGroup(*args, **{**options, "shards": ZeroShards})

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """See ``TrainingBackend``."""
        cls.settings(config)
        actor = actor_devices(config)
        if len(actor.names) < 2 or actor.is_sharded:
            raise ConfigError(
                f"{_WHERE}: device_map.actor={str(actor)!r}: name several devices without sharded or tensor "
                "(cuda:0-3, cpu:0-1); training.backend_config.stage says what they divide"
            )
        dtype = config.model.dtype
        if dtype not in ("auto", "float32") or (dtype == "auto" and actor.kind == "cuda"):
            raise ConfigError(f"{_WHERE}: model.dtype={dtype}: only float32 is supported; set it")
        wants = {
            "executor": config.executor != "local",
            "torchrun": torchrun_size() > 0,
            "rollout.engine=vllm": config.rollout.engine == "vllm",  # both need torch's default process group
            "optimizer.moments": config.optimizer.moments != "float32",
        }
        for key in [*(key for key, is_wanted in wants.items() if is_wanted), *refused_in_parts(config)]:
            raise ConfigError(
                f"{_WHERE} does not work with {key}; leave that at its default, or set "
                "training.backend=torch (device_map.actor='... sharded' divides weights as stage 3 does)"
            )
        if not is_installed("deepspeed") or Version(version("deepspeed")) < Version(_OLDEST):
            raise MissingExtraError(
                f"{_WHERE} needs DeepSpeed {_OLDEST} or newer: pip install 'multitask-rl[deepspeed]'"
            )

    @classmethod
    def num_parts(cls, config: RunConfig) -> int:
        """See ``TrainingBackend``."""
        return len(actor_devices(config).names) if cls.settings(config).stage == 3 else 1

    @classmethod
    def learner_bytes(cls, config: RunConfig, trainable: int, whole: Mapping[str, float]) -> dict[str, float]:
        """See ``TrainingBackend``. Stages 2 and 3 divide gradients, moments and a copy of the weights."""
        size = len(actor_devices(config).names)
        return {
            "gradients": whole["gradients"] / size,
            "optimizer": (whole["optimizer"] + 4 * trainable) / size,
            "sum of gradients": 4.0 * min(_BUCKET, trainable),
        }

    @classmethod
    def has_parts(cls, config: RunConfig) -> bool:
        """See ``TrainingBackend``."""
        return True


class ZeroPasses(ShardedPasses):
    """Passes through models in DeepSpeed's ``engines`` (``id(model)`` -> engine), in ZeRO's ``stage``."""

    settings = _WHERE

    def __init__(self, ranks: Ranks, engines: Mapping[int, Any], stage: int) -> None:
        super().__init__(ranks)
        self._engines, self._stage = engines, stage

    def forward(
        self, model: Any, batch: MicroBatch, *args: Any, want_logits: bool = False, **options: Any
    ) -> TokenOutputs:
        """See ``Passes``. In stage 3 logits are not computed in slices: each would gather the head once."""
        every, found = want_logits or self._stage == 3, dict[str, Any]()
        kind = self._ranks.device.type
        autocast = torch.autocast(
            kind,
            torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

        def act() -> Tensor:
            with autocast:  # on a GPU DeepSpeed's engine turns off what is on around it
                found.update(vars(forward_tokens(model, batch, *args, want_logits=every, **options)))
            logprobs: Tensor = found["logprobs"]
            return logprobs

        engine = self._engines.get(id(model))
        # DeepSpeed sees one output: ranks whose losses read other numbers of them would fall out of step
        found["logprobs"] = act() if engine is None else engine(act)
        return TokenOutputs(**{**found, "logits": found["logits"] if want_logits else None})


class _Pass(nn.Module):
    """A module whose forward pass is any function that runs ``model``: the head is read outside of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, act: Callable[[], Tensor]) -> Tensor:
        return act()


class ZeroShards(Shards):
    """This rank's part of the actor, as DeepSpeed keeps it. A parameter is named by its number."""

    settings = _WHERE
    begins_empty = False

    @classmethod
    def cut_models(
        cls, actor: Actor, whole: InProcess, config: RunConfig, ranks: Ranks
    ) -> tuple[Shards, InProcess, SharedState]:
        """See ``Shards``; in stage 2 the reference stays whole."""
        shards, runner = cls(actor, config, ranks), copy.copy(whole.runner)
        engines = {id(actor.model): shards.engine}
        if runner.reference is not None and shards.stage == 3:
            engines[id(runner.reference)] = shards.hold(runner.reference, None)
        runner.actor, runner.passes = actor, ZeroPasses(ranks, engines, shards.stage)
        own, critic = InProcess(runner, whole.tasks, config, []), list(runner.critic.parameters())
        own.optimizer = ZeroOptimizer(shards, critic, config, ranks.size)
        return shards, own, ZeroState(ranks, shards, critic)

    def __init__(self, actor: Actor, config: RunConfig, ranks: Ranks) -> None:
        if {p.dtype for p in actor.model.parameters()} != {torch.float32}:
            raise ConfigError(f"{_WHERE} holds float32 weights alone: set model.dtype=float32")
        self._ranks, self._config = ranks, config
        self.stage: int = DeepSpeedBackend.settings(config).stage
        self._deepspeed = _join(ranks)
        self.utils = self._deepspeed.utils
        named = dict(actor.model.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.shapes = {p: p.shape for p in self.parameters}
        self._met = set()
        self._kept = []
        self.trained = [p for p in self.parameters if p.requires_grad]
        rule = config.optimizer
        options: Any = {"eps": rule.adam_eps, "weight_decay": rule.weight_decay, "fused": True}
        adamw = torch.optim.AdamW(self.trained, rule.learning_rate, (rule.betas[0], rule.betas[1]), **options)
        self.engine = self.hold(actor.model, adamw)
        self._note_gradients(named)

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Return DeepSpeed's engine of ``model``, which trains it with ``optimizer``, if any."""
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,  # a step follows any number of backward passes
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": max(1, min(_BUCKET, sum(self.shapes[p].numel() for p in self.trained))),
                # small weights would stay whole beside their parts
                "stage3_param_persistence_threshold": 0,
            },
            "gradient_clipping": self._config.optimizer.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        given: Any = {"optimizer": optimizer} if optimizer is not None else {}
        engine, *_ = self._deepspeed.initialize(
            model=_Pass(model).eval(), config=settings, dist_init_required=False, **given
        )
        return engine

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer around AdamW."""
        return self.engine.optimizer

    @property
    def masters(self) -> list[Tensor]:
        """The float32 weights that this rank's AdamW moves, flat."""
        zero = self.zero
        parts = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        return list(parts)

    def step(self, rate: float) -> float | None:
        """Move the weights at the learning rate ``rate``; return the norm of the gradient before clipping.

        The norm is infinite where nothing was moved.

        Raises:
            TrainingError: a weight got no gradient in any rank.
        """
        found = zip(self.names, self.parameters, self._count_met(), strict=True)
        missing = [name for name, parameter, number in found if parameter.requires_grad and not number]
        if missing:
            raise TrainingError(
                f"{_WHERE}: {counted(len(missing), 'weight')} got no gradient in this update, the first is "
                f"{missing[0]!r}. DeepSpeed would move them by their momentum, as nothing else here does; "
                "set training.backend=torch with device_map.actor='... sharded'"
            )
        for group in self.zero.param_groups:
            group["lr"] = rate
        self.engine.step()
        return float("inf") if self.zero.overflow else float(self.engine.get_global_grad_norm())

    def _whole(self, parameter: nn.Parameter, changed_at: int | None = None) -> Any:
        """Return the context in which ``parameter`` is whole; then the values of a rank are divided again."""
        gathered = self._deepspeed.zero.GatheredParameters
        return gathered([parameter], modifier_rank=changed_at, enabled=self.stage == 3)

    @torch.no_grad()
    def gather(self, number: int) -> Tensor:
        """See ``Shards``."""
        parameter = self.parameters[number]
        with self._whole(parameter):
            return parameter.detach().clone() if self._ranks.rank == 0 else torch.empty(0)

    def shape(self, number: int) -> list[int]:
        """See ``Shards``."""
        return list(self.shapes[self.parameters[number]])

    def _set(self, number: int, whole: Tensor) -> None:
        parameter = self.parameters[number]
        with self._whole(parameter, changed_at=0):
            parameter.copy_(whole)
        if parameter.requires_grad:
            self.utils.safe_set_full_fp32_param(parameter, whole.float())

    def _held(self) -> list[Tensor]:
        parts = [p.ds_tensor if self.stage == 3 else p.data for p in self.parameters]
        return [*parts, *(master.data for master in self.masters)]

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield AdamW's state of each of this rank's masters; missing ones are made."""
        for number, master in enumerate(self.masters):
            state = self.zero.optimizer.state[master]
            if not state:
                state["step"] = torch.zeros((), device=master.device)
                state |= {key: torch.zeros_like(master) for key in _MOMENTS}
                if self.stage == 2:
                    link = self.utils.lazy_init_hp_params_optimizer_state
                    link(self.zero.bit16_groups[number], master, self.zero.optimizer.state)
            yield state


class ZeroState(SharedState):
    """Divides the optimizer state of value heads among ranks; DeepSpeed divides that of the actor."""

    def __init__(self, ranks: Ranks, shards: ZeroShards, critic: Sequence[nn.Parameter]) -> None:
        super().__init__(ranks, (), critic)
        self._num_trained = len(shards.trained)
        self._number([*shards.trained, *critic])
        self.move_actor: Callable[[], float | None] = lambda: None
        """Moves the actor and returns the norm of its gradient."""

    def sum_gradients(self) -> None:
        """See ``StateSharing``."""
        super().sum_gradients()
        for parameter in self.groups[1]:
            if parameter.grad is not None:
                parameter.grad /= self._ranks.size

    def norms(self) -> list[float | None]:
        """See ``StateSharing``. The actor moves here, unless its norm is not finite.

        The gradient of a value head that is not finite makes that of the trunk so.
        """
        return [self.move_actor(), super().norms()[1]]

    def deal(self, number: int, value: Tensor) -> list[tuple[int, Tensor]]:
        """See ``SharedState``."""
        if number >= self._num_trained:
            return super().deal(number, value)
        return [(rank, value) for rank in range(self._ranks.size)]

    def is_first(self, number: int) -> bool:
        """See ``SharedState``."""
        return self._ranks.rank == 0 or number >= self._num_trained


class ZeroOptimizer(ActorCriticOptimizer):
    """AdamW of the value heads here, of the actor in DeepSpeed; state is that of ``ActorCriticOptimizer``."""

    def __init__(self, shards: ZeroShards, critic: list[nn.Parameter], config: RunConfig, size: int) -> None:
        super().__init__([], critic, config.optimizer, config.critic)
        self._shards, self._size = shards, size

    @property
    def loss_scale(self) -> float:
        """Number of ranks: DeepSpeed takes the mean of their gradients."""
        return float(self._size)

    @property
    def state_bytes(self) -> int:
        """See ``ActorCriticOptimizer``; all of DeepSpeed's float32 weights count."""
        states = [*self._shards.masters, *(v for s in self._shards.states() for v in s.values())]
        return super().state_bytes + sum(int(v.numel() * v.element_size()) for v in states)

    def step(self, factor: float) -> dict[str, float] | None:
        """See ``ActorCriticOptimizer``."""
        assert isinstance(self.sharing, ZeroState)
        self.sharing.move_actor = partial(self._shards.step, factor * self._rates[0])
        return super().step(factor)

    def tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """See ``ActorCriticOptimizer``; all ranks call this, and each gets whole tensors."""
        found = super().tensors(names)
        number = max((float(state["step"]) for state in self._shards.states()), default=0.0)
        utils = self._shards.utils
        for parameter in self._shards.trained if number else ():
            name, shape = names[id(parameter)], self._shards.shapes[parameter]
            found[f"{name}|step"] = torch.tensor(number)
            for key in _MOMENTS:
                value = utils.safe_get_full_optimizer_state(parameter, key)
                found[f"{name}|{key}"] = value.detach().reshape(shape).clone()
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """See ``ActorCriticOptimizer``.

        Raises:
            CheckpointError: AdamW has counted another number of steps for some weights than for others.
        """
        shards, utils = self._shards, self._shards.utils
        trained, found = set(shards.trained), dict[nn.Parameter, dict[str, Tensor]]()
        others = dict(tensors)
        for name in tensors:
            owner, _, key = name.rpartition("|")
            parameter = parameters.get(owner)
            if parameter is not None and parameter in trained:
                found.setdefault(parameter, {})[key] = others.pop(name)
        super().load_tensors(others, parameters)
        counts = {float(found.get(p, {}).get("step", 0.0)) for p in shards.trained}
        if len(counts) > 1:
            raise CheckpointError(
                f"{_WHERE}: the checkpoint's AdamW has made {sorted(counts)} steps with different weights, "
                "and DeepSpeed counts those of all together; resume with training.backend=torch"
            )
        for state in shards.states():
            state["step"].fill_(max(counts))
        for parameter in shards.trained:
            values, shape = found.get(parameter, {}), shards.shapes[parameter]
            for key in _MOMENTS:
                value = values.get(key, torch.zeros(()))
                whole = value.to(parameter.device, torch.float32).expand(shape).contiguous()
                utils.safe_set_full_optimizer_state(parameter, whole, key)


def _join(ranks: Ranks) -> Any:
    """Return DeepSpeed, which communicates over torch's default process group of ``ranks``.

    Raises:
        ConfigError: this process has a default process group of its own.
    """
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"{_WHERE} needs torch's default process group, and this process has one already (of an engine, "
            "or of the script); start the run in a process without it"
        )
    kind = ranks.device.type
    os.environ.setdefault("DS_ACCELERATOR", kind)
    os.environ["LOCAL_RANK"] = str(ranks.device.index or 0 if kind == "cuda" else ranks.rank)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that it still calls
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # its kernel for CPUs would be compiled for minutes; gloo does the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # it numbers modules and weights by counters of the process, and compares the numbers among ranks
    numbering = deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module
    numbering.__defaults__[0][0] = 0
    deepspeed.zero.Init.param_id = 0
    backend, store = "nccl" if kind == "cuda" else "gloo", ranks.store("deepspeed")
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
    deepspeed.init_distributed(backend, dist_init_required=False)

    def leave() -> None:
        if torch.distributed.is_initialized():
            deepspeed.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None

    ranks.on_close = leave
    return deepspeed
