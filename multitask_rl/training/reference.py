"""A reference policy that follows the actor: the KL then bounds the speed of change, not the distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multitask_rl.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AveragedReference:
    """Exponential moving average of the actor: ``reference <- decay * reference + (1 - decay) * actor``.

    ``model`` is the reference, at first a copy of the actor, and is updated in place. ``decay`` is in [0, 1]:
    1 = fixed, 0 = the actor after the last update. Averages are float32: bfloat16 would lose small steps.

    Source: Rame et al., "WARP" (arXiv:2406.16768), sec. 3.1.
    """

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        self._decay = decay
        self._scored = dict(model.named_parameters())
        self._averages = {name: p.detach().float() for name, p in self._scored.items()}

    @torch.no_grad()
    def ema_update(self, actor: PreTrainedModel) -> None:
        """Move one update towards the weights of ``actor``."""
        for name, parameter in actor.named_parameters():
            average = self._averages[name]
            average.lerp_(parameter.detach().to(average), 1.0 - self._decay)
        self._copy_to_model()

    def _copy_to_model(self) -> None:
        for name, parameter in self._scored.items():
            if parameter.data_ptr() != self._averages[name].data_ptr():  # float32: the average is the weight
                parameter.copy_(self._averages[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for a checkpoint."""
        return dict(self._averages)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore ``tensors``; none (the checkpoint had a fixed reference) change nothing.

        Raises:
            CheckpointError: they belong to another model.
        """
        if not tensors:
            return
        for name, average in self._averages.items():
            if name not in tensors or tensors[name].shape != average.shape:
                raise CheckpointError(f"the reference in the checkpoint belongs to another model: {name!r}")
            average.copy_(tensors[name])
        self._copy_to_model()
