"""Longer contexts than the model was trained for: scaled rotary position embeddings.

The scaling becomes part of the model's configuration (``rope_parameters`` of ``transformers`` 5), and so of
checkpoints and of engines that start from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from multitask_rl.errors import ConfigError

TYPES = ("linear", "ntk", "dynamic", "yarn")


def scale_rope(config: Any, scaling: Mapping[str, Any]) -> None:
    """Let ``config`` (of ``transformers``) cover ``factor`` times the positions it covers now.

    Args:
        config: a model's configuration, changed in place, before the model is built from it.
        scaling: ``factor`` > 1; ``type``: ``linear`` (positions divided by the factor, arXiv:2306.15595),
            ``ntk`` (base multiplied by ``factor ** (d / (d - 2))``, d rotated dimensions), ``dynamic`` (as
            ``ntk``, with the factor that the longest sequence so far needs) or ``yarn`` (all
            arXiv:2309.00071); further keys go into ``rope_parameters``.

    Raises:
        ConfigError: unknown type, no factor above 1, or a model without (one kind of) rotary positions.
    """
    kind, factor = scaling.get("type"), scaling.get("factor")
    if kind not in TYPES:
        raise ConfigError(f"model.rope_scaling: type is {kind!r}; allowed: {', '.join(TYPES)}")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 1:
        raise ConfigError(
            f"model.rope_scaling: factor is {factor!r}; it must be a number > 1 (4.0: four times the length)"
        )
    text = config.get_text_config()
    old = getattr(text, "rope_parameters", None)
    if old and "rope_type" not in old and "type" in old:
        raise ConfigError(
            "config.rope_scaling = {...} replaces all rotary parameters in transformers 5, so no model can "
            "be built from it; load the configuration again and call scale_rope(config, {...}) instead"
        )
    if not old or "rope_theta" not in old or text.to_dict().get("alibi"):
        raise ConfigError(
            f"model.rope_scaling: a {config.model_type} model has no rotary positions, or several kinds of "
            "them; leave model.rope_scaling empty"
        )
    if old.get("rope_type", "default") != "default":
        raise ConfigError(
            f"model.rope_scaling: the model already scales its positions ({old['rope_type']}, factor "
            f"{old.get('factor')}); leave model.rope_scaling empty, or undo it in the model's config.json"
        )
    length = int(text.max_position_embeddings)
    further = {k: v for k, v in scaling.items() if k not in ("type", "factor")}
    new = {**old, "rope_type": kind, "factor": float(factor), **further}
    if kind == "ntk":
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        dimensions = int(head * old.get("partial_rotary_factor", 1.0))
        theta = old["rope_theta"] * factor ** (dimensions / (dimensions - 2))
        new = {**old, "rope_theta": theta, **further}
    if kind == "yarn":
        new.setdefault("original_max_position_embeddings", length)
    text.rope_parameters = new
    # for the other two, transformers and vLLM multiply the trained length by the factor themselves
    if kind in ("ntk", "yarn"):
        text.max_position_embeddings = int(length * factor)


def check_positions(model: Any) -> None:
    """Refuse a model that was built before its configuration was scaled.

    It computes with its first positions, and its checkpoints would be loaded with others.
    """
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False)).get("original_inv_freq")
        if own is None:
            continue
        try:
            fresh = type(module)(module.config)
        except (AttributeError, TypeError):  # made of other arguments than a configuration
            continue
        expected = fresh.original_inv_freq.to(own)
        # a model converted to 16 bits has rounded frequencies
        if fresh.rope_type != module.rope_type or not torch.allclose(own, expected, rtol=0.02, atol=1e-7):
            raise ConfigError(
                f"the {type(model).__name__} was built before its configuration was scaled, so it still has "
                "its first positions; call scale_rope(config, {...}) first, then load the model with "
                "from_pretrained(name, config=config)"
            )


def context_length(config: Any) -> int:
    """Return the longest sequence that the positions of ``config`` cover, scaled; 0 = no known limit.

    With ``longrope`` (Phi-3, Phi-4) this is the original length. The frequencies change where an input is
    longer, also those of its first tokens, whose keys are in the cache; samples and updates would disagree.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second: MPT
    length = next((int(own) for name in names if (own := getattr(text, name, None))), 0)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])
    return int(length * rope["factor"]) if rope.get("rope_type") in ("linear", "dynamic") else length
