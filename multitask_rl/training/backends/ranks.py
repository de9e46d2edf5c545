"""A process's place among the learner ranks, and its collectives.

Rank = data index * peers + peer index. Peers are neighbours that compute the same samples: parts of each
sequence (``context``) or of each layer (``tensor``). The process groups are not torch's default group, which
an engine (vLLM) or the user's script may have made.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

_DISTRIBUTED: Any = torch.distributed  # type checkers do not know all of its names
_MEET_WITHIN = timedelta(minutes=3)
"""Limit of the ranks' start."""
_NUMBERS = itertools.count()
"""Torch keeps the names of groups, so that each group of this process needs another."""
_TIMEOUT = timedelta(hours=2)
"""Limit of one collective; rank 0 logs late ranks long before (``rank_connections.py``)."""


class _CopiesMesh(DeviceMesh):
    """A mesh [copies, parts]. Torch would cut it by this process's rank in the default group."""

    parts: DeviceMesh
    """Mesh of the ranks that together hold one copy of the models, with this rank."""

    def __getitem__(self, _names: Any) -> DeviceMesh:
        return self.parts


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Bytes that a rank sent, and seconds that it spent in collectives."""

    seconds: float = 0.0
    num_bytes: int = 0


class Ranks:
    """The collectives of ``rank`` (0 is the trainer's) among ``size`` ranks.

    ``context`` ranks share a sequence, or ``tensor`` ranks a layer: each divides ``size``, and one of them is
    1. ``parts`` ranks with different samples hold a copy of sharded weights together; 0 = all of them.
    The other ranks reach this one at ``address``. ``device``, of its tensors, decides between nccl and gloo.

    Raises:
        RuntimeError: another rank cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        context: int = 1,
        tensor: int = 1,
        parts: int = 0,
        *,
        address: str,
        store: Any,
        device: torch.device,
    ) -> None:
        self.rank, self.size, self.context, self.tensor = rank, size, context, tensor
        self.peers = peers = context * tensor
        self.copy_size = copy_size = (parts or size // peers) * peers
        """Neighbouring ranks that hold a copy of sharded models together."""
        self.device = device
        self.traffic = Traffic()
        """Traffic since the counter was last replaced."""
        self.before_sum: Callable[[], None] = lambda: None
        """Called when this rank is ready for the sum of gradients."""
        self.summed_at = 0.0
        """When the last sum of gradients ended (``time.monotonic``)."""
        self.on_close: Callable[[], None] = lambda: None
        """Called before the connections close; idempotent."""
        self._store = store
        self._mesh: DeviceMesh | None = None
        self._all: Any = self._group("all", rank, size, address)
        self._peers: Any = None
        self._data: Any = self._all
        if peers > 1:
            self._peers = self._group(f"peers/{rank // peers}", rank % peers, peers, address)
        if tensor > 1:
            self._data = self._group(f"data/{rank % peers}", rank // peers, size // peers, address)
        self._copy, self._mesh_groups = self._all, [self._data]
        if copy_size < size:
            copy, place = divmod(rank, copy_size)
            self._copy = self._group(f"copy/{copy}", place, copy_size, address)
            self._mesh_groups = [
                self._group(f"copies/{place}", copy, size // copy_size, address),
                self._group(f"parts/{copy}/{place % peers}", place // peers, copy_size // peers, address),
            ]

    @property
    def peer_index(self) -> int:
        """Number of this rank's part of every sequence or layer."""
        return self.rank % self.peers

    def _group(self, name: str, rank: int, size: int, address: str) -> Any:
        store = self.store(name)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            return c10d.ProcessGroupNCCL(store, rank, size, options)
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = _MEET_WITHIN
        # gloo's default, the address of the machine's name, often does not exist or is in another network
        options._devices = [gloo.create_device(hostname=address)]
        group = gloo(store, rank, size, options)
        group._set_default_timeout(_TIMEOUT)
        return group

    def store(self, name: str) -> Any:
        """Return a store of all ranks, for a process group called ``name``."""
        return c10d.PrefixStore(name, self._store)

    def mesh(self) -> DeviceMesh:
        """Return the mesh for torch's FSDP: the ranks with other samples and the same part of each layer.

        With several copies it is [copies, parts].
        """
        if self._mesh is None:
            kinds = c10d.ProcessGroup.BackendType
            kind = kinds.NCCL if self.device.type == "cuda" else kinds.GLOO
            names: list[Any] = []
            groups: dict[Any, Any] = {}
            for backend in self._mesh_groups:
                names.append(f"multitask_rl/{next(_NUMBERS)}")
                store = self.store(f"mesh/{len(names)}")
                group = groups[names[-1]] = c10d.ProcessGroup(store, backend.rank(), backend.size())
                group._set_group_name(names[-1])
                group._register_backend(torch.device(self.device.type), kind, backend)
                group._set_default_backend(kind)
                _DISTRIBUTED.distributed_c10d._register_process_group(names[-1], group)
            places = torch.arange(self.peer_index, self.size, self.peers)
            rows = places.view(-1, self.copy_size // self.peers)
            own: dict[str, Any] = {"_init_backend": False, "_rank": self.rank}
            parts = DeviceMesh(self.device.type, rows[self.rank // self.copy_size], **own)
            parts._dim_group_names, self._mesh = names[-1:], parts
            if len(names) > 1:
                self._mesh = _CopiesMesh(self.device.type, rows, mesh_dim_names=("copies", "parts"), **own)
                self._mesh._dim_group_names, self._mesh.parts = names, parts
                parts._pg_registry.update(groups)
            self._mesh._pg_registry.update(groups)
        return self._mesh

    def abort(self) -> None:
        """Make collectives under way on GPUs raise. Thread-safe. Those on CPUs raise when a process ends."""
        for group in {self._all, self._peers, self._data, self._copy, *self._mesh_groups} - {None}:
            group.abort()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.abort()
        self.on_close()
        if self._mesh is not None:
            self._mesh._pg_registry.clear()  # torch keeps meshes for ever
        self._mesh = self._all = self._peers = self._data = self._copy = self._store = None
        self._mesh_groups = []

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Copy ``tensors`` of rank ``root`` to every rank, in place."""
        for tensor in tensors:
            sent = tensor.detach().to(self.device).contiguous()
            self._all.broadcast(sent, root).wait()
            if self.rank != root:
                # onto itself, too: a float32 master sees by the version that its weight has changed
                tensor.copy_(sent)

    def sum(self, tensor: Tensor, at: int | None = None) -> None:
        """Sum a contiguous tensor on this rank's device over all ranks, in place.

        With ``at``, only this rank gets the sum; ``tensor`` of the other ranks is then undefined.
        """
        if at is None:
            self._all.allreduce([tensor]).wait()
            return
        self._all.reduce(tensor, at).wait()
        self.traffic.num_bytes += tensor.numel() * tensor.element_size()

    def most(self, number: int) -> int:
        """Return the largest ``number`` of any rank."""
        found = torch.tensor([number], device=self.device)
        self._all.allreduce(found, c10d.ReduceOp.MAX).wait()
        return int(found)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send ``tensor`` to ``rank``, which must call ``receive``."""
        self._all.send([tensor.detach().to(self.device).contiguous()], rank, 0).wait()

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return the tensor that ``rank`` sends, on the CPU; ``like`` has its shape and type."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self._all.recv([tensor], rank, 0).wait()
        return tensor.cpu()

    def gather(self, local: Tensor) -> Tensor:
        """Return ``local`` of the first copy's ranks, all of one shape: [peers, parts, ...] at rank 0."""
        size = self.copy_size if self.rank == 0 else 0
        parts = local.new_empty(self.peers, size // self.peers, *local.shape)
        if self.rank >= self.copy_size:
            return parts
        order = range(size)
        places = [parts[rank % self.peers, rank // self.peers] for rank in order]
        options = c10d.GatherOptions()
        options.rootRank = 0
        self._copy.gather([places] if places else [], [local], options).wait()
        return parts

    def gather_peers(self, local: Tensor) -> Tensor:
        """Return ``local`` of every peer, all of one shape: [peers, ...]."""
        sent = local.detach().contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.peers)]
        self._count(lambda: self._peers.allgather([parts], [sent]), sent, self.peers - 1)
        return torch.stack(parts)

    def sum_rows(self, parts: Tensor) -> Tensor:
        """Return this rank's row of the sum over the peers of ``parts`` [peers, ...]."""
        sent = [part.contiguous() for part in parts]
        own = torch.empty_like(sent[0])
        self._count(lambda: self._peers.reduce_scatter([own], [sent]), own, self.peers - 1)
        return own

    def sum_peers(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over the peers, in place."""
        self._count(lambda: self._peers.allreduce([tensor]), tensor, 1)

    def _count(self, start: Callable[[], Any], sent: Tensor, times: int) -> None:
        began = time.monotonic()
        start().wait()
        self.traffic.seconds += time.monotonic() - began
        self.traffic.num_bytes += sent.numel() * sent.element_size() * times


def host_store(host: str) -> tuple[Any, int]:
    """Return the store in which the ranks find each other, and its port; it listens only on ``host``."""
    with socket.socket() as listening:
        listening.bind((host, 0))
        port = int(listening.getsockname()[1])
        fd = listening.detach()
    return _DISTRIBUTED.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_MEET_WITHIN, master_listen_fd=fd
    ), port


def join_store(host: str, port: int) -> Any:
    """Return the store of rank 0, from another rank."""
    return _DISTRIBUTED.TCPStore(host, port, is_master=False, timeout=_MEET_WITHIN)
