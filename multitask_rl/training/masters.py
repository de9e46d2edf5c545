"""Float32 masters of bfloat16 and float16 weights, and of weights whose optimizer runs in host memory.

Neighbouring bfloat16 numbers differ by half a percent, so that usual updates would be lost to rounding. The
optimizer moves a float32 master; the weight is the rounded master. Gradients add up in float32, too.
If a master lies in host memory, so do its float32 gradient and its optimizer moments. The device then holds
only the weight, and its gradient until the optimizer step.

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv:1710.03740), section 3.1; Ren et al.,
"ZeRO-Offload" (arXiv:2101.06840), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_LOW = (torch.bfloat16, torch.float16)


class Masters:
    """The float32 masters of this process, by weight. A master is made at its weight's first update or load.

    Args:
        parameters: all trainable parameters. Those of bfloat16 or float16 get a master, and their gradients
            are float32 from now on.
        on_host: every parameter gets a master, and all masters lie in host memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._mastered = {p for p in parameters if on_host or p.dtype in _LOW}
        for parameter in self._mastered:
            parameter.grad_dtype = torch.float32
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: dict[nn.Parameter, int] = {}
        """``_version`` of each weight when it last equalled its rounded master."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """The parameter moves through a master."""
        return parameter in self._mastered

    def owners(self) -> dict[Tensor, nn.Parameter]:
        """Return a mapping: master -> the weight that is rounded from it."""
        return {master: parameter for parameter, master in self._masters.items()}

    def tensors(self) -> dict[nn.Parameter, Tensor]:
        """Return a mapping: weight -> its master, detached."""
        return {parameter: self._master(parameter).detach() for parameter in self._masters}

    @torch.no_grad()
    def take_gradients(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Move gradients from the weights to their masters; return the tensors that the optimizer updates.

        These are, for each parameter with a gradient, its master or, without a master, the parameter itself.
        """
        moved = []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter not in self._mastered:
                moved.append(parameter)
                continue
            master = self._master(parameter)
            master.grad, parameter.grad = parameter.grad.to(master.device, torch.float32), None
            moved.append(master)
        return moved

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round every master that has a gradient into its weight, and clear that gradient."""
        chosen = [(p, m) for p, m in self._masters.items() if m.grad is not None]
        if chosen:
            torch._foreach_copy_([p for p, _ in chosen], [m for _, m in chosen])
        for parameter, master in chosen:
            master.grad = None
            self._versions[parameter] = parameter._version

    def load(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        """Restore a saved ``master``, if given; return the tensor that the optimizer updates.

        It is the master, or ``parameter`` itself if it has none.
        """
        if parameter not in self._mastered:
            return parameter
        own = self._master(parameter)
        if master is not None:
            with torch.no_grad():
                own.copy_(master)
            self._versions[parameter] = -1
        return own

    def clear(self) -> None:
        """Drop all masters."""
        self._masters.clear()

    @torch.no_grad()
    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the master; it follows a weight that a checkpoint or ``Critic.rescale`` has set."""
        if parameter not in self._masters:
            device = "cpu" if self._on_host else parameter.device
            self._masters[parameter] = nn.Parameter(parameter.detach().to(device, torch.float32, copy=True))
            self._versions[parameter] = parameter._version
        master = self._masters[parameter]
        if self._versions[parameter] != parameter._version:
            self._versions[parameter] = parameter._version
            # an element that still equals its rounded master keeps the master's float32 digits
            weight = parameter.to(master.device)
            rounded = master.to(weight.dtype)
            if not torch.equal(rounded, weight):
                master.copy_(torch.where(rounded == weight, master, weight.float()))
        return master
