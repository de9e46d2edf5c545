"""The optimizer's state of a model in parts: each rank has that of its own part (``sharded.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.backends.shared_state import SharedState

__all__ = ["ShardedState"]


class ShardedState:
    """What ``SharedState`` is for whole models. Value heads are whole on every rank and have an owner.

    Args:
        ranks: all of them.
        shards: of the actor.
        critic: value heads.
    """

    def __init__(self, ranks: Ranks, shards: Shards, critic: Sequence[nn.Parameter]) -> None:
        self._ranks, self._shards = ranks, shards
        self._heads = SharedState(ranks, [], critic)
        self._trained = [number for number, p in enumerate(shards.local) if p.requires_grad]
        self._num_sharded = len(self._trained)
        self.parameters = [*(shards.local[number] for number in self._trained), *critic]
        self.names = {id(p): str(number) for number, p in enumerate(self.parameters)}
        """``id(parameter)`` -> its number, by which ranks speak of it."""

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Its state is in this process."""
        number = self.names.get(id(parameter))
        return number is not None and (int(number) < self._num_sharded or self._heads.is_own(parameter))

    def sum_gradients(self) -> None:
        """Take the parts of the gradient, which have arrived summed; sum those of the value heads.

        Raises:
            TrainingError: the other ranks have ended.
        """
        self._heads.check_open()
        self._shards.take_gradients()
        self._heads.sum_gradients()

    def norms(self) -> list[float | None]:
        """Return the norm of the whole gradient of actor and critic; None where no rank had any."""
        total = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        # what no peer has cut every peer has
        for is_cut, share in ((True, 1.0), (False, 1.0 / self._ranks.tensor)):
            found = [
                grad
                for number in self._trained
                if (grad := self._shards.local[number].grad) is not None
                and self._shards.is_cut(number) == is_cut
            ]
            if found:
                total[0] += share * nn.utils.get_total_norm(found, foreach=True).double() ** 2
                total[1] = 1.0
        self._ranks.sum(total)
        norm, number = float(total[0].sqrt()), float(total[1])
        return [norm if number else None, self._heads.norms()[1]]

    def send_weights(self) -> None:
        """Give every rank the value heads; parts of the model are moved by whoever has them."""
        self._heads.send_weights()

    def deal(self, name: str, value: Tensor) -> list[tuple[int, Tensor]]:
        """Return which ranks are to have (what of) the whole state ``value`` of ``<number>|<key>``."""
        number = int(name.partition("|")[0])
        if number >= self._num_sharded:
            return self._heads.deal(f"{number - self._num_sharded}|", value)
        if value.dim():
            parts = self._shards.cut(self._trained[number], value)
            return [(rank, part) for rank, part in enumerate(parts) if part.numel()]
        return [(rank, value) for rank in self._shards.holders(self._trained[number])]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole of what the ranks, in their order, have of ``<number>|<key>``."""
        number = int(name.partition("|")[0])
        if number >= self._num_sharded or not parts[0].dim():
            return parts[0]
        return self._shards.join(self._trained[number], parts)

    def check_open(self) -> None:
        """Raise if the other ranks, and their parts of the state, are gone."""
        self._heads.check_open()

    def close(self) -> None:
        """The other ranks end. Idempotent."""
        self._heads.close()
