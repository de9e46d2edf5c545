"""The actor written down once, so that an engine in another process or of another kind can start from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multitask_rl.models.actor import Actor

__all__ = ["save_for_engine"]


def save_for_engine(actor: Actor, directory: Path) -> None:
    """Write a plain Hugging Face directory: architecture, weights with adapters merged, tokenizer."""
    model = actor.model.get_base_model() if actor.config.lora.rank > 0 else actor.model
    model.save_pretrained(directory, state_dict=actor.state_dict(), safe_serialization=True)
    actor.tokenizer.save_pretrained(directory)
