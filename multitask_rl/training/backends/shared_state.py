"""ZeRO stage 1: every rank keeps the optimizer state of some whole parameters.

A parameter's gradient is summed at its owner, which moves the parameter and sends it to the other ranks.
A parameter that no rank gave a gradient (the value head of a task without samples) is left alone.

Source: Rajbhandari et al., "ZeRO" (arXiv:1910.02054), sec. 5.1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.balance import share_out

__all__ = ["SharedState"]

BUCKET_CELLS = 2**24
"""Numbers in one message: 64 MiB in float32."""


class SharedState:
    """Which rank owns which parameter, and how gradients and weights travel. The same on every rank.

    Gradients of ``actor`` are parts on every peer; those of ``critic`` are whole on every peer.
    """

    def __init__(
        self, ranks: Ranks, actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter] = ()
    ) -> None:
        self._ranks = ranks
        self.parameters = [*actor, *critic]
        self.numbered = {str(number): p for number, p in enumerate(self.parameters)}
        """The name of a parameter between ranks is its number."""
        self.names = {id(p): name for name, p in self.numbered.items()}
        self._share = [1.0] * len(actor) + [1.0 / ranks.peers] * len(critic)
        self._groups = [range(len(actor)), range(len(actor), len(self.parameters))]
        self._owner = [0] * len(self.parameters)
        for rank, share in enumerate(share_out([p.numel() for p in self.parameters], ranks.size)):
            for number in share:
                self._owner[number] = rank
        self._moving: list[int] = []

    def is_own(self, parameter: nn.Parameter) -> bool:
        """See ``StateSharing``."""
        number = self.names.get(id(parameter))
        return number is not None and self._owner[int(number)] == self._ranks.rank

    def sum_gradients(self) -> None:
        """See ``StateSharing``."""
        ranks = self._ranks
        ranks.before_sum()
        # the last flag keeps the tensor from being empty; early ranks wait for late ones here
        present = torch.tensor([*(float(p.grad is not None) for p in self.parameters), 0.0])
        present = present.to(ranks.device)
        ranks.sum(present)
        began = time.monotonic()
        self._moving = [number for number, n in enumerate(present.tolist()) if n]
        for owner, bucket in self._buckets():
            pieces = []
            for number in bucket:
                parameter, share = self.parameters[number], self._share[number]
                if parameter.grad is None:
                    pieces.append(torch.zeros(parameter.numel(), device=ranks.device))
                    continue
                grad = parameter.grad.detach().reshape(-1).to(device=ranks.device, dtype=torch.float32)
                pieces.append(grad if share == 1.0 else grad * share)
            flat = torch.cat(pieces)
            ranks.sum(flat, at=owner)
            for number, part in zip(bucket, self._split(flat, bucket), strict=True):
                parameter = self.parameters[number]
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
        squares = torch.zeros(len(self._groups), dtype=torch.float64, device=self._ranks.device)
        for place, group in enumerate(self._groups):
            own = [g for i in group if (g := self.parameters[i].grad) is not None]
            if own:
                squares[place] = nn.utils.get_total_norm(own, foreach=True).double() ** 2
        self._ranks.sum(squares)
        moving = set(self._moving)
        return [
            None if moving.isdisjoint(group) else float(norm)
            for norm, group in zip(squares.sqrt().tolist(), self._groups, strict=True)
        ]

    @torch.no_grad()
    def send_weights(self) -> None:
        """See ``StateSharing``."""
        ranks = self._ranks
        began = time.monotonic()
        for owner, bucket in self._buckets():
            chosen = [self.parameters[number] for number in bucket]
            if owner == ranks.rank:
                flat = torch.cat([p.reshape(-1).to(ranks.device) for p in chosen])
                ranks.traffic.num_bytes += flat.numel() * flat.element_size()
            else:
                size = sum(p.numel() for p in chosen)
                flat = torch.empty(size, dtype=chosen[0].dtype, device=ranks.device)
            ranks.broadcast([flat], root=owner)
            if owner != ranks.rank:
                for parameter, part in zip(chosen, self._split(flat, bucket), strict=True):
                    parameter.copy_(part)
        ranks.traffic.seconds += time.monotonic() - began

    def deal(self, name: str, value: Tensor) -> list[tuple[int, Tensor]]:
        """Return rank and part for each rank that keeps a part of ``value``, the state ``<number>|<key>``."""
        return [(self._owner[int(name.partition("|")[0])], value)]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the state ``<number>|<key>`` from the parts of the ranks, in their order."""
        return parts[0]

    def _split(self, flat: Tensor, bucket: Sequence[int]) -> list[Tensor]:
        chosen = [self.parameters[number] for number in bucket]
        parts = torch.split(flat, [p.numel() for p in chosen])
        return [part.view(p.shape) for part, p in zip(parts, chosen, strict=True)]

    def _buckets(self) -> Iterator[tuple[int, list[int]]]:
        """Yield owner and numbers of parameters that move, of one type and bounded size together."""
        waiting: dict[tuple[int, torch.dtype], list[int]] = {}
        cells: dict[tuple[int, torch.dtype], int] = {}
        for number in self._moving:
            parameter = self.parameters[number]
            key = (self._owner[number], parameter.dtype)
            if key in waiting and cells[key] + parameter.numel() > BUCKET_CELLS:
                yield key[0], waiting.pop(key)
                cells[key] = 0
            waiting.setdefault(key, []).append(number)
            cells[key] = cells.get(key, 0) + parameter.numel()
        for (owner, _), bucket in waiting.items():
            yield owner, bucket
