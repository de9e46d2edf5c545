"""ZeRO stage 1: every rank keeps the optimizer state of some whole parameters.

A parameter's gradient is summed at its owner, which moves the parameter and sends it to the other ranks.
A parameter that no rank gave a gradient (the value head of a task without samples) is left alone.

Source: Rajbhandari et al., "ZeRO" (arXiv:1910.02054), sec. 5.1.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.balance import share_out
from multitask_rl.training.optimizer import StateSharing

BUCKET_CELLS = 2**24
"""Numbers in one message: 64 MiB in float32."""


class SharedState(StateSharing):
    """Which rank owns which parameter, and how gradients and weights travel. The same on every rank.

    Gradients of ``actor`` are parts on every peer; those of ``critic`` are whole on every peer.
    """

    def __init__(
        self, ranks: Ranks, actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter] = ()
    ) -> None:
        super().__init__(actor, critic)
        self._ranks = ranks
        self.parameters = [*actor, *critic]
        self._number(self.parameters)
        self._share = dict.fromkeys(actor, 1.0) | dict.fromkeys(critic, 1.0 / ranks.peers)
        shares = share_out([p.numel() for p in self.parameters], ranks.size)
        self._owner = {self.parameters[i]: rank for rank, share in enumerate(shares) for i in share}
        self._moving: list[nn.Parameter] = []

    def _number(self, parameters: Sequence[nn.Parameter]) -> None:
        self.numbered = {str(number): p for number, p in enumerate(parameters)}
        """The name of a parameter between ranks is its number."""
        self.names = {id(p): name for name, p in self.numbered.items()}

    def sum_gradients(self) -> None:
        """See ``StateSharing``."""
        ranks = self._ranks
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)  # else the time until here is that of queueing the work
        ranks.before_sum()
        # the last flag keeps the tensor from being empty; early ranks wait for late ones here
        present = torch.tensor([*(float(p.grad is not None) for p in self.parameters), 0.0])
        present = present.to(ranks.device)
        ranks.sum(present)
        began = time.monotonic()
        self._moving = [p for p, n in zip(self.parameters, present.tolist(), strict=False) if n]
        for owner, bucket in self._buckets():
            pieces = []
            for parameter in bucket:
                if parameter.grad is None:
                    pieces.append(torch.zeros(parameter.numel(), device=ranks.device))
                    continue
                grad = parameter.grad.detach().reshape(-1).to(device=ranks.device, dtype=torch.float32)
                share = self._share[parameter]
                pieces.append(grad if share == 1.0 else grad * share)
            flat = torch.cat(pieces)
            ranks.sum(flat, at=owner)
            for parameter, part in _parts(flat, bucket):
                if owner != ranks.rank:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                parameter.grad.copy_(part)
        ranks.summed_at = time.monotonic()
        ranks.traffic.seconds += ranks.summed_at - began

    def norms(self) -> list[float | None]:
        """See ``StateSharing``."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for place, group in enumerate(self.groups):
            own = [p.grad for p in group if p.grad is not None]
            if own:
                squares[place] = nn.utils.get_total_norm(own, foreach=True).double() ** 2
        self._ranks.sum(squares)
        return [
            None if set(group).isdisjoint(self._moving) else float(norm)
            for norm, group in zip(squares.sqrt().tolist(), self.groups, strict=True)
        ]

    @torch.no_grad()
    def send_weights(self) -> None:
        """See ``StateSharing``."""
        ranks = self._ranks
        began = time.monotonic()
        for owner, bucket in self._buckets():
            if owner == ranks.rank:
                flat = torch.cat([p.reshape(-1).to(ranks.device) for p in bucket])
                ranks.traffic.num_bytes += flat.numel() * flat.element_size()
            else:
                size = sum(p.numel() for p in bucket)
                flat = torch.empty(size, dtype=bucket[0].dtype, device=ranks.device)
            ranks.broadcast([flat], root=owner)
            if owner != ranks.rank:
                for parameter, part in _parts(flat, bucket):
                    parameter.copy_(part)
        ranks.traffic.seconds += time.monotonic() - began

    def deal(self, number: int, value: Tensor) -> list[tuple[int, Tensor]]:
        """Return rank and part for each rank that keeps a part of ``value``, a state of this parameter."""
        return [(self._owner[self.numbered[str(number)]], value)]

    def is_first(self, number: int) -> bool:
        """Whether no rank before this one has the same part of the states of a parameter."""
        return True

    def join(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """Return a state of a parameter from the parts of the ranks, in their order."""
        return parts[0]

    def _buckets(self) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """Yield owner and parameters that move, of one type and bounded size together."""
        waiting: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        cells: Counter[tuple[int, torch.dtype]] = Counter()
        for parameter in self._moving:
            key = (self._owner[parameter], parameter.dtype)
            if key in waiting and cells[key] + parameter.numel() > BUCKET_CELLS:
                yield key[0], waiting.pop(key)
                cells[key] = 0
            waiting.setdefault(key, []).append(parameter)
            cells[key] += parameter.numel()
        for (owner, _), bucket in waiting.items():
            yield owner, bucket


def _parts(flat: Tensor, bucket: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
        yield parameter, part.view(parameter.shape)
