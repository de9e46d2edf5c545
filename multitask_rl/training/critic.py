"""The critic: a value head per task on a shared trunk."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from multitask_rl.config.run import CriticConfig, LoraConfig, ModelConfig
from multitask_rl.errors import CheckpointError, ConfigError
from multitask_rl.models.actor import DTYPES, Actor, checkpoint_layers, learning, load_actor
from multitask_rl.training.forward import response_hidden
from multitask_rl.training.microbatch import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Critic(nn.Module):
    """Values of states, with one linear head per task, because tasks differ in the scale of their returns.

    With ``trunk="actor"`` the heads read the actor's last hidden state: one forward serves policy and value.
    With ``trunk="separate"`` they read that of a model of its own, on the critic's device: a copy of the
    actor, or the one that ``config`` names. Heads start at zero: the first advantages are the plain returns.
    """

    def __init__(self, config: CriticConfig | None = None, device: str = "cpu") -> None:
        super().__init__()
        self._config = config or CriticConfig()
        self.device = torch.device(device)
        self.trunk: PreTrainedModel | None = None
        self.heads = nn.ModuleDict()
        self._keys: dict[str, str] = {}
        self._actor: Actor | None = None
        """The actor that the trunk was made beside; None without a trunk, or with one given from outside."""

    def build(self, actor: Actor, tasks: Sequence[str]) -> None:
        """Add heads for ``tasks`` (in order) and, if it is separate, the trunk; existing heads stay.

        Raises:
            ConfigError: the critic's own model is not there, or its tokenizer is not the actor's.
        """
        if not tasks:
            return
        if self._config.trunk == "separate" and self.trunk is None:
            self._actor = actor
            self.trunk = self._load_trunk(actor).requires_grad_(True)
        width = actor.hidden_size
        if self.trunk is not None:
            width = int(self.trunk.config.get_text_config().hidden_size)
        for task in tasks:
            key = self._keys.setdefault(task, _key(task))
            if key not in self.heads:
                head = nn.Linear(width, 1, dtype=torch.float32).apply(_begin_anew)
                self.heads[key] = head.to(self.device)

    def _load_trunk(self, actor: Actor) -> PreTrainedModel:
        config = self._config
        if config.name_or_path:
            dtype = config.dtype if config.dtype != "auto" else str(actor.model.dtype).removeprefix("torch.")
            own = ModelConfig(
                name_or_path=config.name_or_path,
                dtype=dtype,
                attn_implementation=actor.config.attn_implementation,
                trust_remote_code=actor.config.trust_remote_code,
                lora=LoraConfig(),
            )
            loaded = load_actor(own, str(self.device))
            vocabulary, control = loaded.tokenizer.get_vocab(), set(actor.control_token_ids)
            known = {token: i for token, i in actor.tokenizer.get_vocab().items() if i not in control}
            if any(vocabulary.get(token) != i for token, i in known.items()):
                raise ConfigError(
                    f"critic.name_or_path {config.name_or_path!r} has another tokenizer than the actor, so "
                    "it cannot read the actor's tokens; take a model of the same family"
                )
            trunk = loaded.model
            rows = actor.model.get_input_embeddings().weight.shape[0]
            if trunk.get_input_embeddings().weight.shape[0] < rows:
                trunk.resize_token_embeddings(rows, mean_resizing=False)
        else:
            trunk = copy.deepcopy(actor.model).to(self.device)
            if config.dtype != "auto":
                trunk = trunk.to(DTYPES[config.dtype])
            if actor.config.gradient_checkpointing:
                checkpoint_layers(trunk, on=False)
        if config.gradient_checkpointing:
            checkpoint_layers(trunk)
        return trunk

    def learning(self) -> contextlib.AbstractContextManager[None]:
        """Put a trunk of its own, if there is one, into the mode of an update (see ``actor.learning``)."""
        return contextlib.nullcontext() if self.trunk is None else learning(self.trunk)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the trunk's last hidden states [N, H] before each response token (``separate`` only)."""
        assert self.trunk is not None, "the actor is the trunk"
        return response_hidden(self.trunk, batch.to(self.device))

    def values(self, task: str, hidden: Tensor) -> Tensor:
        """Return the values of ``hidden`` [N, H] under the head of ``task``: [N] float32."""
        head = self.heads[self._keys[task]]
        values: Tensor = head(hidden.to(device=self.device, dtype=torch.float32)).squeeze(-1)
        return values

    def rescale(self, task: str, scale: float, shift: float) -> None:
        """Change the values ``v`` of the head of ``task`` to ``scale * v + shift``; no other head changes."""
        with torch.no_grad():
            weight, bias = self.heads[self._keys[task]].parameters()
            weight.mul_(scale)
            bias.mul_(scale).add_(shift)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; tied weights of the trunk have one name."""
        kept: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
        for name, value in self.state_dict().items():
            kept.setdefault((value.data_ptr(), value.shape), (name, value.detach()))
        return dict(kept.values())

    def load_tensors(self, tensors: Mapping[str, Tensor], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``tensors``; ``renamed``: task, old -> new.

        Heads and a trunk that they lack begin anew: such a trunk is the critic's own model, or a copy of the
        actor as it is now. A head of a task that is gone is left out, and so is a trunk that no task needs.

        Raises:
            CheckpointError: the trunk in them is of another model.
        """
        own = self.state_dict()
        lacks_trunk = not any(name.startswith("trunk.") for name in tensors)
        if self.trunk is not None and self._actor is not None and lacks_trunk:
            self.trunk.load_state_dict(self._load_trunk(self._actor).state_dict())
        with torch.no_grad():
            self.heads.apply(_begin_anew)
            for name, value in tensors.items():
                target = rename_head(name, renamed or {})
                if target in own:
                    own[target].copy_(value)
                elif self.trunk is not None and name.startswith("trunk."):
                    raise CheckpointError(f"the critic in the checkpoint belongs to another model: {name!r}")


def _begin_anew(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)
        nn.init.zeros_(module.bias)


def rename_head(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name of a tensor (or of its optimizer state) after tasks were ``renamed`` (old -> new)."""
    for old, new in renamed.items():
        before, found, rest = name.partition(f"heads.{_key(old)}.")
        if found:
            return f"{before}heads.{_key(new)}.{rest}"
    return name


def _key(task: str) -> str:
    """Return the name of a task's head: a ``ModuleDict`` key has no dot and is no name of its methods."""
    return f"task_{task.replace('.', '_dot_')}"
