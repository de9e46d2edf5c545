"""The learner of a model in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.models.modes import evaluating
from multitask_rl.records import SamplingParams
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.backends.sharded import ShardedPasses, ShardedState, Shards, blocks, shard_model
from multitask_rl.training.backends.tensor import check_layers
from multitask_rl.training.credit import LearnerTask
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import assume_split, split_head
from multitask_rl.training.microbatch import make_microbatch
from multitask_rl.training.runner import ModelRunner, Passes
from multitask_rl.training.shared_prompt import supports_shared_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Traits", "check_probe", "check_shardable", "find_traits", "probe", "shard_learner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Results of trials on the whole model; with a part of it nothing can be tried."""

    shares_prompts: bool
    can_split_head: bool


def check_shardable(runner: ModelRunner, tensor: int = 1) -> None:
    """Refuse models that cannot be cut, or whose layers cannot be cut into ``tensor`` parts.

    Raises:
        ConfigError: what they are or have does not go with parts of weights.
    """
    model, where = runner.actor.model, "device_map.actor=... sharded"
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(f"{where} needs torch 2.13 or newer, this is {torch.__version__}")
    if runner.critic.trunk is not None or runner.average is not None or runner.actor.config.compile:
        raise ConfigError(
            f"{where}: a critic with a trunk of its own, a reference that moves or compiled blocks cannot be "
            "cut; take critic_trunk='actor', model.reference_decay=1 and model.compile=false"
        )
    odd = [name for name, p in model.named_parameters() if not p.dim() or not p.numel()]
    if odd:
        raise ConfigError(f"{where}: {odd[0]!r} of {type(model).__name__} is a single number or empty")
    if tensor > 1:
        check_layers(model, tensor)
    for block in [*blocks(model), model]:
        dtypes = {p.dtype for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ConfigError(
                f"{where}: {type(block).__name__} trains weights of {len(dtypes)} types ("
                f"{', '.join(sorted(map(str, dtypes)))}); set model.dtype=float32"
            )


@torch.no_grad()
def probe(model: Any, passes: Passes) -> Tensor:
    """Return log-probabilities of fixed tokens [12]; of a sharded model every rank calls this.

    Args:
        model: whole or sharded.
        passes: that ``model`` takes.

    Raises:
        ConfigError: the model cannot be run as it is cut.
    """
    size = int(model.config.get_text_config().vocab_size)
    ids = [(7 * i + 3) % size for i in range(24)]
    batch = make_microbatch([0], [ids[:12]], [ids[12:]], layout="bucketed", pad_token_id=0)
    batch = batch.to(next(model.parameters()).device)
    try:
        with evaluating(model):
            out = passes.forward(model, batch, [SamplingParams()], mask=None, pad_token_id=0)
            return out.logprobs.clone()
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"device_map.actor=... sharded: {type(model).__name__} cannot be computed in parts: {error}"
        ) from error


def check_probe(model: Any, found: Tensor, expected: Tensor) -> None:
    """Refuse a model that says something else in parts than whole.

    Raises:
        ConfigError: the log-probabilities differ by more than rounding.
    """
    gap = float((found - expected).abs().max())
    limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    if not gap <= limit:
        raise ConfigError(
            f"device_map.actor=... sharded: {type(model).__name__} computed in parts says something else "
            f"than whole: log-probabilities move by {gap:.2g}; leave tensor, or sharded, out"
        )


def find_traits(model: PreTrainedModel) -> Traits:
    """Try ``model``, which is whole."""
    return Traits(shares_prompts=supports_shared_prompts(model), can_split_head=split_head(model) is not None)


def shard_learner(
    actor: Actor,
    critic: Critic,
    reference: PreTrainedModel | None,
    tasks: Mapping[str, LearnerTask],
    config: RunConfig,
    ranks: Ranks,
    traits: Traits,
) -> tuple[InProcess, ShardedState]:
    """Return what computes this rank's part, and which rank has what of the optimizer's state.

    ``actor`` and ``reference`` are cut in place, the value heads stay whole. Every rank calls this at the
    same time.
    """
    spec = shard_model(actor.model, ranks)
    assume_split(actor.model, traits.can_split_head)
    if reference is not None:
        shard_model(reference, ranks)
        assume_split(reference, traits.can_split_head)
    shards = Shards(actor.model, ranks, spec)
    runner = ModelRunner(
        actor,
        critic,
        config,
        reference,
        passes=ShardedPasses(ranks),
        shares_prompts=traits.shares_prompts,
        is_whole=False,
    )
    own = InProcess(runner, tasks, config, [p for p in shards.local if p.requires_grad and p.numel()])
    state = ShardedState(ranks, shards, list(critic.parameters()) if critic.is_used else [])
    own.optimizer.share_out(state)
    return own, state
