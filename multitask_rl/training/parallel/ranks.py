"""A process's place among the learner ranks, and what it does together with the others.

Process groups are made directly, not through ``torch.distributed``'s default group: an engine in the same
process (vLLM) or the user's own script may have one.

Rank = data index * context + context index: the ranks of a context group are neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

__all__ = ["Ranks", "Traffic", "host_store", "join_store"]

_STORE: Any = getattr(torch.distributed, "TCPStore")  # noqa: B009 - unknown to type checkers
BUCKET_CELLS = 2**24
"""Gradient numbers summed at once: 64 MiB in float32."""
_MEET_WITHIN = timedelta(minutes=3)
"""All ranks are started by then."""
_TIMEOUT = timedelta(hours=2)
"""Of one collective. Who is late is said long before, by rank 0 (``lines.py``)."""


@dataclass(kw_only=True, slots=True)
class Traffic:
    """What a rank sent, and how long it took."""

    seconds: float = 0.0
    num_bytes: int = 0


class Ranks:
    """The collectives of one rank.

    Args:
        rank: of this process; 0 is the trainer's.
        size: number of ranks.
        context: ranks that share a sequence; divides ``size``.
        address: where this rank can be reached by the others.
        store: see ``host_store`` and ``join_store``.
        device: of this rank's tensors; decides between nccl and gloo.

    Raises:
        RuntimeError: another rank cannot be reached.
    """

    def __init__(
        self, rank: int, size: int, context: int, *, address: str, store: Any, device: torch.device
    ) -> None:
        self.rank, self.size, self.context = rank, size, context
        self.device = device
        self.traffic = Traffic()
        """Since it was last replaced."""
        self.before_sum: Callable[[], None] = lambda: None
        """Called when this rank is ready for the sum of gradients."""
        self.summed_at = 0.0
        """When the last sum of gradients ended (``time.monotonic``)."""
        self._store = store
        self._all = self._group("all", rank, size, address)
        self._context: Any = None
        if context > 1:
            self._context = self._group(f"context/{rank // context}", rank % context, context, address)

    @property
    def context_index(self) -> int:
        """Which part of every sequence is this rank's."""
        return self.rank % self.context

    def _group(self, name: str, rank: int, size: int, address: str) -> Any:
        store = c10d.PrefixStore(name, self._store)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return c10d.ProcessGroupNCCL(store, rank, size, options)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _MEET_WITHIN
        # its own choice asks what the machine's name resolves to, which is often nothing or another network
        options._devices = [gloo.create_device(hostname=address)]
        group = gloo(store, rank, size, options)
        group._set_default_timeout(_TIMEOUT)
        return group

    # -- all ranks ------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank what rank 0 has in ``tensors``, in place."""
        with torch.no_grad():
            for tensor in tensors:
                sent = tensor.detach().to(self.device).contiguous()
                self._all.broadcast([sent]).wait()
                if self.rank and sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    def sum_gradients(self, actor: Sequence[nn.Parameter], critic: Sequence[nn.Parameter] = ()) -> None:
        """Sum the gradients of all ranks in place, in float32.

        A parameter that has a gradient on some rank gets one on every rank; where none has, it stays None.

        Args:
            actor: parameters whose gradients are parts.
            critic: parameters whose gradients every rank of a context group has whole.
        """
        parameters = [*actor, *critic]
        share = [1.0] * len(actor) + [1.0 / self.context] * len(critic)
        self.before_sum()
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        self._all.allreduce([present]).wait()  # also where early ranks wait for late ones
        began = time.monotonic()
        wanted = [(p, s) for p, s, n in zip(parameters, share, present.tolist(), strict=True) if n]
        for bucket in _buckets(wanted):
            flat = torch.cat([_flat_gradient(p, s, self.device) for p, s in bucket])
            self._all.allreduce([flat]).wait()
            self.traffic.num_bytes += flat.numel() * flat.element_size()
            for (parameter, _), part in zip(
                bucket, torch.split(flat, [p.numel() for p, _ in bucket]), strict=True
            ):
                found = part.view_as(parameter).to(parameter)
                if parameter.grad is None:
                    parameter.grad = found.clone()
                else:
                    parameter.grad.copy_(found)
        self.summed_at = time.monotonic()
        self.traffic.seconds += self.summed_at - began

    # -- ranks that share a sequence ------------------------------------------------------------------------

    def gather_context(self, local: Tensor) -> Tensor:
        """Return ``local`` of every rank of the context group, which all have its shape: [context, ...]."""
        began = time.monotonic()
        sent = local.detach().contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.context)]
        self._context.allgather([parts], [sent]).wait()
        self.traffic.seconds += time.monotonic() - began
        self.traffic.num_bytes += sent.numel() * sent.element_size() * (self.context - 1)
        return torch.stack(parts)

    def sum_context(self, parts: Tensor) -> Tensor:
        """Return this rank's row of the sum over the context group of ``parts`` [context, ...]."""
        began = time.monotonic()
        sent = [part.contiguous() for part in parts]
        own = torch.empty_like(sent[0])
        self._context.reduce_scatter([own], [sent]).wait()
        self.traffic.seconds += time.monotonic() - began
        self.traffic.num_bytes += own.numel() * own.element_size() * (self.context - 1)
        return own


def host_store(host: str) -> tuple[Any, int]:
    """Return the store in which the ranks find each other, and its port; it listens on ``host`` alone."""
    import socket

    with socket.socket() as listening:
        listening.bind((host, 0))
        port = int(listening.getsockname()[1])
        fd = listening.detach()
    return _STORE(
        host, port, is_master=True, wait_for_workers=False, timeout=_MEET_WITHIN, master_listen_fd=fd
    ), port


def join_store(host: str, port: int) -> Any:
    """Return the store of rank 0."""
    return _STORE(host, port, is_master=False, timeout=_MEET_WITHIN)


def _flat_gradient(parameter: nn.Parameter, share: float, device: torch.device) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), device=device)
    flat = parameter.grad.detach().reshape(-1).to(device=device, dtype=torch.float32)
    return flat if share == 1.0 else flat * share


def _buckets(
    wanted: Sequence[tuple[nn.Parameter, float]],
) -> Iterator[list[tuple[nn.Parameter, float]]]:
    bucket: list[tuple[nn.Parameter, float]] = []
    cells = 0
    for one in wanted:
        if bucket and cells + one[0].numel() > BUCKET_CELLS:
            yield bucket
            bucket, cells = [], 0
        bucket.append(one)
        cells += one[0].numel()
    if bucket:
        yield bucket
