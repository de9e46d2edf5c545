"""Whether samples may stand one after another: the model has to tell them apart by their positions."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from multitask_rl.models.modes import evaluating
from multitask_rl.training.microbatch import make_microbatch

__all__ = ["supports_packing"]

logger = logging.getLogger(__name__)


@torch.no_grad()
def supports_packing(model: Any) -> bool:
    """Whether ``model`` gives packed samples the same logits as separate ones; tried on a few tokens.

    Models with another state than keys and values (Mamba), with learnt or added positions of their own (OPT,
    Bloom), or that build their mask in another way than by restarted positions do not.
    """
    config = model.config.get_text_config()
    # chunks are counted from the start of the row, and are wider than the probe's few tokens
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False
    size, device = int(config.vocab_size), next(model.parameters()).device
    sample, befores = [(7 * i + 3) % size for i in range(10)], ([5, 3, 9, 4, 2, 8], [1, 6, 4, 7, 9, 3])

    def score(*samples: list[int]) -> Tensor:
        """Return the logits at the last sample's tokens: the first ones show best what leaks."""
        prompts, responses = [s[:1] for s in samples], [s[1:] for s in samples]
        indices = list(range(len(samples)))
        batch = make_microbatch(indices, prompts, responses, layout="packed", pad_token_id=0).to(device)
        given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        column = batch.column[batch.sequence == len(samples) - 1]
        logits: Tensor = model(**given).logits[0, column].float()
        return logits

    try:
        with evaluating(model):
            alone = score(sample)
            first, second = (score([i % size for i in before], sample) for before in befores)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError) as error:
        logger.info("samples cannot be packed: %s", error)
        return False
    exact = next(model.parameters()).dtype == torch.float32
    scale = alone.abs().max().clamp(min=1e-6)
    gap, leak = float((first - alone).abs().max() / scale), float((first - second).abs().max() / scale)
    # the samples before change nothing: forwards of one shape, which hardly differ in rounding
    if not (gap <= (1e-3 if exact else 0.1) and leak <= (1e-5 if exact else 5e-3)):
        logger.info("samples cannot be packed: logits move by %.2g, by the samples before %.2g", gap, leak)
        return False
    return True
