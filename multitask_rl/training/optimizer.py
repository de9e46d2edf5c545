"""AdamW over actor and critic, its schedule, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitask_rl.config.run import CriticConfig, OptimizerConfig
from multitask_rl.errors import CheckpointError
from multitask_rl.training.eight_bit import EightBitAdamW, pack, unpack
from multitask_rl.training.masters import Masters

MASTER = "master"
LOSS_SCALE = "loss_scale"
FIRST_SCALE, SMALLEST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**-8, 2.0**24
GROWTH = 2.0 ** (1 / 64)
"""Factor on the loss scale after each step: it doubles in 64 steps."""
SHRINKAGE = 0.25
"""Factor on the loss scale after an overflow."""


def schedule_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate's factor in the training step ``step`` (0 = the first), in (0, 1].

    Linear warm-up, then constant, linear or cosine decay that would reach 0 at ``max_steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class StateSharing:
    """How processes divide the optimizer's state; in this class one process has all of it.

    ``ActorCriticOptimizer.step`` calls ``sum_gradients`` and ``norms``, applies the gradients of this
    process's own parameters, and calls ``send_weights``.
    """

    def __init__(self, actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter]) -> None:
        self.groups = (actor, critic)

    def sum_gradients(self) -> None:
        """Sum each parameter's gradients of all processes, in float32, in the process that has its state."""

    def norms(self) -> list[float | None]:
        """Return the gradient norms of actor and critic over all processes; None without a gradient."""
        found = [[p.grad for p in group if p.grad is not None] for group in self.groups]
        return [float(nn.utils.get_total_norm(g, foreach=True)) if g else None for g in found]

    def send_weights(self) -> None:
        """Send moved weights to all processes."""


class ActorCriticOptimizer:
    """One AdamW with a parameter group for the actor and one for the critic.

    Parameters without a gradient in a step neither decay nor move by momentum (a value head whose task had no
    sample); nor does a group whose whole gradient is zero. Weights below float32 move through float32
    masters, with ``optimizer.moments=host`` all weights.

    ``scales_loss``: a model computes in float16, where small gradients vanish and large ones overflow.
    """

    def __init__(
        self,
        actor: list[nn.Parameter],
        critic: list[nn.Parameter],
        config: OptimizerConfig,
        critic_config: CriticConfig,
        *,
        scales_loss: bool = False,
    ) -> None:
        self._rates = [config.learning_rate, critic_config.learning_rate or 10.0 * config.learning_rate]
        self.parameters = (actor, critic)
        self._max_grad_norm = config.max_grad_norm
        on_host = config.moments == "host"
        self._masters = Masters((p for group in self.parameters for p in group), on_host=on_host)
        self._is_packed = config.moments == "int8"
        kind = EightBitAdamW if self._is_packed else partial(torch.optim.AdamW, fused=True)
        self._adamw = kind(
            [
                {"params": [p for p in group if p not in self._masters], "lr": rate}
                for group, rate in zip(self.parameters, self._rates, strict=True)
            ],
            betas=(config.betas[0], config.betas[1]),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )
        self.scales_loss = scales_loss
        self._first_scale = self._scale = FIRST_SCALE if scales_loss else 1.0
        self.sharing = StateSharing(actor, critic)
        """How processes divide the state; each updates only its own parameters."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments and masters."""
        states = [v for s in self._adamw.state.values() for v in s.values() if isinstance(v, Tensor)]
        return sum(v.numel() * v.element_size() for v in (*states, *self._masters.tensors().values()))

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in backward passes; ``step`` divides gradients by it. A power of 2: exact."""
        return 2.0 ** math.floor(math.log2(self._scale))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.parameters:
            for parameter in group:
                parameter.grad = None

    def step(self, factor: float) -> dict[str, float] | None:
        """Clip and apply the gradients, summed over all processes, at ``factor`` times the learning rates.

        Returns:
            ``grad_norm`` (and ``critic_grad_norm``) before clipping; None when a gradient was not finite, in
            which case nothing was applied, and the next loss scale is smaller.

        Raises:
            TrainingError: another process has ended.
        """
        for group in self.parameters if self.scales_loss else ():  # they may be on two devices
            grads = [p.grad for p in group if p.grad is not None]
            if grads:  # a step without a gradient moves nothing
                torch._foreach_div_(grads, self.loss_scale)
        self.sharing.sum_gradients()
        norms = self.sharing.norms()
        if not all(norm is None or math.isfinite(norm) for norm in norms):
            self.zero_grad()
            self._rescale(SHRINKAGE)
            return None
        self._rescale(GROWTH)
        for group, norm in zip(self.parameters, norms, strict=True):
            for parameter in group if norm == 0.0 else ():
                parameter.grad = None  # momentum and decay alone move nothing
        moved = [self._masters.take_gradients(group) for group in self.parameters]
        for params, norm in zip(moved, norms, strict=True):
            if norm is not None and self._max_grad_norm > 0:
                total = torch.tensor(norm)
                nn.utils.clip_grads_with_norm_(params, self._max_grad_norm, total, foreach=True)
        for active, params, rate in zip(self._adamw.param_groups, moved, self._rates, strict=True):
            active["params"], active["lr"] = params, rate * factor
        self._adamw.step()
        self._masters.give_weights()
        self.sharing.send_weights()
        names = ("grad_norm", "critic_grad_norm")
        return {name: norm for name, norm in zip(names, norms, strict=True) if norm is not None}

    def _rescale(self, factor: float) -> None:
        if self.scales_loss:
            self._scale = min(max(self._scale * factor, SMALLEST_SCALE), LARGEST_SCALE)

    def tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the state in this process for a checkpoint, ``<parameter name>|<key>`` -> tensor.

        Moments are float32 whatever ``optimizer.moments`` is, so that a run may change it.

        ``names``: ``id(parameter)`` -> parameter name.
        """
        state: dict[str, Tensor] = {}
        owners = self._masters.owners()
        for moved, values in self._adamw.state.items():
            name = names[id(owners.get(moved, moved))]
            for key, value in unpack(values, moved.shape).items():
                state[f"{name}|{key}"] = torch.as_tensor(value)
        for name in names.values() if self.scales_loss else ():  # ranks keep the state of different ones
            state[f"{name}|{LOSS_SCALE}"] = torch.tensor(self._scale, dtype=torch.float64)
        for parameter, master in self._masters.tensors().items():
            if parameter.dtype != torch.float32:  # else the weight says the same
                state[f"{names[id(parameter)]}|{MASTER}"] = master
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Restore what ``tensors()`` returned, to ``parameters`` by name.

        Parameters that ``tensors`` lacks (a new task's head) start without state. Saved state of parameters
        that are not in ``parameters`` is ignored.

        Raises:
            CheckpointError: a tensor has another shape than its parameter.
        """
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for parameter, key, value in fitting_state(tensors, parameters):
            state.setdefault(parameter, {})[key] = value
        self._adamw.state.clear()
        self._masters.clear()
        self._scale = self._first_scale  # of a state from before the first update
        for parameter, values in state.items():
            scale = values.pop(LOSS_SCALE, None)
            if self.scales_loss and scale is not None:
                self._scale = float(scale)
            if not values:
                continue  # not one update moved it yet
            moved = self._masters.load(parameter, values.pop(MASTER, None))
            found = {
                key: value.to(moved.device, moved.dtype if value.dim() else value.dtype, copy=True)
                for key, value in values.items()
            }
            self._adamw.state[moved] = pack(found) if self._is_packed else found


def fitting_state(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
    """Yield parameter, key and value of saved state, without parameters that are not here.

    Raises:
        CheckpointError: a tensor has another shape than its parameter.
    """
    for name, value in tensors.items():
        owner, _, key = name.rpartition("|")
        parameter = parameters.get(owner)
        if parameter is None:
            continue
        if value.dim() and value.shape != parameter.shape:
            raise CheckpointError(
                f"optimizer state {name!r} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(parameter.shape)}; the checkpoint belongs to another model"
            )
        yield parameter, key, value
