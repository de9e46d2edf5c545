"""Sampling from one copy of the actor's weights, for an engine that samples from the actor's own tensors.

An overlapped run samples the next batch during an update, which must not change the engine's weights. Of a
sharded actor no process has all weights. The copy may also hold the weights of linear layers in bfloat16: on
a CPU sampling is faster, and the importance weights correct the difference. ``update_weights`` fills the copy
again. On a CPU with instructions for bfloat16 these weights are kept in the order that oneDNN multiplies in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitask_rl.config.run import RolloutConfig
from multitask_rl.models.actor import Actor, warn_of_slow_bfloat16
from multitask_rl.plugins import build_config
from multitask_rl.rollout.base import RolloutEngine, WrappedEngine
from multitask_rl.rollout.hf import HFConfig


def sampling_weights(engine: type[RolloutEngine], config: RolloutConfig) -> str:
    """Return ``rollout.engine_config.weights`` of the engine ``hf``; ``actor`` for others."""
    settings = build_config(engine, config.engine_config, where="rollout.engine_config")
    return settings.weights if isinstance(settings, HFConfig) else "actor"


def build_engine(
    engine: type[RolloutEngine],
    actor: Actor,
    config: RolloutConfig,
    *,
    seed: int,
    output_dir: Path,
    copies: bool = False,
) -> RolloutEngine:
    """Return ``engine.build(...)``, over a copy of the actor where one is needed.

    Args:
        engine: class of the engine.
        actor: of the run.
        config: ``rollout`` of the run.
        seed: of the run.
        output_dir: of the run.
        copies: the actor's own weights cannot be sampled from (``RunPlan.samples_from_copy``).
    """
    kind = sampling_weights(engine, config)
    if not engine.shares_weights or (kind == "actor" and not copies):
        return engine.build(actor, config, seed=seed, output_dir=output_dir)
    double = copy.copy(actor)
    # autocast keeps its casts of weights with requires_grad only; others it casts again for every token
    double.model = copy.deepcopy(actor.model).requires_grad_(True).eval()
    double.place(str(actor.device))
    if kind == "bfloat16":
        setting = "rollout.engine_config.weights"
        warn_of_slow_bfloat16(f"{setting}=bfloat16", f"{setting}=actor", str(actor.model.device))
        double.config = replace(actor.config, autocast=True)
    built = engine.build(double, config, seed=seed, output_dir=output_dir)
    if kind == "bfloat16":
        # adapters are small, and an embedding that the output head is tied to stays as it is
        linear = [n for n, m in double.model.named_modules() if type(m) is nn.Linear and "lora_" not in n]
        for name in linear:  # names: a list of modules would keep all weights in float32 until the end
            module: Any = double.model.get_submodule(name)
            if can_pack(module.weight.device):
                double.model.set_submodule(name, PackedLinear(module))
            else:
                module.weight = nn.Parameter(module.weight.detach().to(torch.bfloat16))
    return SnapshotEngine(built, source=actor, double=double.model)


def can_pack(device: torch.device) -> bool:
    """Return whether ``PackedLinear`` works on ``device``: an x86 CPU with instructions for bfloat16."""
    known = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return device.type == "cpu" and bool(known and torch.backends.mkldnn.enabled)


class PackedLinear(nn.Module):
    """A linear layer in bfloat16, for inference, whose weight has the order in which oneDNN multiplies it.

    ``nn.Linear`` brings its weight into this order at every call, which counts most in products of few rows.
    The outputs are the same, bit for bit.

    Args:
        linear: what to compute; its bias is shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.pack(linear.weight)

    def pack(self, weight: Tensor) -> None:
        """Take over ``weight`` [out, in] of any dtype."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(torch.bfloat16))

    @property
    def weight(self) -> Tensor:
        """[out, in] bfloat16, a new tensor in the ordinary order."""
        whole: Tensor = self._packed.to_dense()
        return whole

    def forward(self, states: Tensor) -> Tensor:
        """Return [..., out] bfloat16 of ``states`` [..., in]."""
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            states.to(torch.bfloat16), self._packed, bias, "none", [], ""
        )
        return out


class SnapshotEngine(WrappedEngine):
    """Samples with ``engine`` from ``double``, a copy of the model of ``source``.

    ``update_weights`` copies the present weights of ``source`` into it.
    """

    def __init__(self, engine: RolloutEngine, *, source: Actor, double: Any) -> None:
        super().__init__(engine)
        self._source, self._double = source, double
        self._packed = {
            f"{name}.weight": module
            for name, module in double.named_modules()
            if isinstance(module, PackedLinear)
        }

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Copy the present weights of ``source``; ``weights`` is empty and not read."""
        own = self._double.state_dict()
        for name, value in self._source.changing_weights().items():
            if name in self._packed:
                self._packed[name].pack(value)
            else:
                own[name].copy_(value)
        super().update_weights(weights, policy_version)
