"""AdamW whose two moments take one byte a number instead of four.

Each block of 256 numbers has one float32 scale, its largest magnitude. A code counts equal steps of the
square root of the first moment, and of the fourth root of the second: numbers down to a hundredth (first) or
a ten-thousandth (second) of the scale are kept within 8 %. Both are rounded at random so that they are right
on average; rounded to the nearest code, small ones would not decay, and weights without a gradient would
drift. The smallest code of the second moment is above 0, so that no update divides by 0: where gradients are
far below a thousandth of their block's, updates are not those of float32.

Sources: AdamW (arXiv:1711.05101, Algorithm 2) on the decoded moments; blocks as in Dettmers et al., "8-bit
Optimizers via Block-wise Quantization" (arXiv:2110.02861), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

BLOCK = 256
"""Numbers with one scale."""
SMALLEST = 4096
"""Numbers of a parameter below which its moments stay float32."""
AT_ONCE = 2**22
"""Numbers that are decoded at a time; a multiple of ``BLOCK``."""
FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""Torch's names of the moments; ``<name>_codes`` and ``<name>_scales`` are their packed forms."""
_LEVELS = {FIRST: 127, SECOND: 256}


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW with packed moments; ``params`` and ``lr`` as ``torch.optim.AdamW`` takes them."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(params, {"betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            state |= pack({"step": torch.tensor(0.0), FIRST: zeros, SECOND: zeros})
        state["step"] += 1
        step = int(state["step"])
        beta1, beta2 = group["betas"]
        rate = group["lr"] / (1 - beta1**step)
        # the same numbers for every parameter and process: a resumed run draws them again
        generator = torch.Generator(parameter.device).manual_seed(step)
        weights = parameter.detach().reshape(-1)
        grads = parameter.grad.reshape(-1).float()  # type: ignore[union-attr]
        for start in range(0, len(weights), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(weights)))
            grad = grads[part]
            first = _read(state, FIRST, part).lerp_(grad, 1 - beta1)
            second = _read(state, SECOND, part).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight = weights[part].mul_(1 - group["lr"] * group["weight_decay"])
            root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weight.addcdiv_(first, root, value=-rate)
            _write(state, FIRST, part, first, generator)
            _write(state, SECOND, part, second, generator)
        if weights.data_ptr() != parameter.data_ptr():  # not contiguous: ``reshape`` has made a copy
            parameter.copy_(weights.view_as(parameter))


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a parameter with packed moments, where they are large enough.

    What ``unpack`` returned is packed to the same codes.
    """
    found = {}
    for key, value in state.items():
        if key not in _LEVELS or value.numel() < SMALLEST:
            found[key] = value.clone(memory_format=torch.contiguous_format)
            continue
        blocks = -(-value.numel() // BLOCK)
        kind = torch.int8 if key == FIRST else torch.uint8
        found[f"{key}_codes"] = torch.zeros(blocks * BLOCK, dtype=kind, device=value.device)
        found[f"{key}_scales"] = torch.zeros(blocks, device=value.device)
        flat = value.reshape(-1)
        for start in range(0, len(flat), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(flat)))
            _write(found, key, part, flat[part].float(), None)
    return found


def unpack(state: Mapping[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
    """Return the state of a parameter of ``shape`` as torch's AdamW has it, decoded moments on the CPU."""
    found = {}
    for key, value in state.items():
        name, _, kind = key.rpartition("_")
        if kind == "codes":
            packed = {k: state[k].cpu() for k in (key, f"{name}_scales")}
            found[name] = _read(packed, name, slice(0, shape.numel())).view(shape)
        elif kind != "scales":
            found[key] = value
    return found


def _read(state: Mapping[str, Tensor], key: str, part: slice) -> Tensor:
    """Return numbers of a moment in float32; changing them does not change the state if it is packed."""
    if key in state:
        return state[key].view(-1)[part]
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    codes = state[f"{key}_codes"][blocks.start * BLOCK : blocks.stop * BLOCK].view(-1, BLOCK).float()
    scales = state[f"{key}_scales"][blocks].unsqueeze(-1)
    if key == FIRST:
        values = codes.div_(_LEVELS[FIRST])
        values = values.mul_(values.abs())
    else:
        values = codes.add_(1).div_(_LEVELS[SECOND]).square_().square_()
    return values.mul_(scales).view(-1)[: part.stop - part.start]


def _write(state: Mapping[str, Tensor], key: str, part: slice, values: Tensor, random: Any) -> None:
    """Store numbers of a moment; ``random``: generator to round them with, None = to the nearest code."""
    if key in state:
        if state[key].view(-1)[part].data_ptr() != values.data_ptr():
            state[key].view(-1)[part] = values
        return
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    rows = pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = rows.abs().amax(-1, keepdim=True)
    shares = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)
    levels, power, least = (_LEVELS[FIRST], 2, 0) if key == FIRST else (_LEVELS[SECOND], 4, 1)
    sizes = shares.abs()
    codes = sizes.pow(1 / power).mul_(levels)
    if random is None:
        codes.round_()
    else:
        # to the code below or above, with the chances that make the mean right
        codes.floor_()
        low, high = (codes / levels).pow_(power), ((codes + 1) / levels).pow_(power)
        above = sizes.sub_(low).div_(high.sub_(low))
        codes += torch.rand(above.shape, generator=random, device=above.device) < above
    codes = codes.clamp_(least, levels).sub_(least)
    if key == FIRST:
        codes.copysign_(shares)
    state[f"{key}_codes"][blocks.start * BLOCK : blocks.stop * BLOCK].copy_(codes.view(-1))
    state[f"{key}_scales"][blocks] = scales.squeeze(-1)
