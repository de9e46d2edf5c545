"""Engine replicas as Ray actors behind ``RolloutEngine``.

Each sample has its own seed, so it is the same on every replica. Samples are yielded as they end. A replica
that dies is restarted once with the newest weights; only its unfinished samples are repeated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.attention.float32 import FLOAT32
from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.executor.replica import EngineReplica, without_monitors
from multitask_rl.models.actor import Actor
from multitask_rl.models.weights import WeightStream, cut_buckets, like_of
from multitask_rl.rollout.base import Ended, GenerationRequest, RolloutEngine, most_tokens
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.training.balance import share_out

if TYPE_CHECKING:
    from torch import Tensor

_LINE = 64
"""Bytes of a line of the processor's cache."""


class RayEngine(RolloutEngine):
    """``RolloutEngine`` over replicas of the class ``engine``, each in a Ray actor of its own.

    The replicas load ``actor`` from ``<output_dir>/ray_start``, where it is written.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(
        self,
        engine: type[RolloutEngine],
        actor: Actor,
        config: RolloutConfig,
        *,
        seed: int,
        output_dir: Path,
        num_replicas: int,
        num_gpus: float = 0.0,
        num_cpus: float = 1.0,
    ) -> None:
        directory = (output_dir / "ray_start").resolve()
        actor.save_for_engine(directory)
        device = "cuda" if num_gpus else "cpu"
        # names of their own: Ray pickles what the function reads, and must not pickle the actor
        tokenizer, autocast = actor.tokenizer, actor.config.autocast
        attention = actor.model.config._attn_implementation.replace(FLOAT32, "sdpa")
        places = {name: own.data_ptr() % _LINE for name, own in actor.model.named_parameters()}

        def make(index: int) -> EngineReplica:
            from transformers import AutoModelForCausalLM

            if not directory.is_dir():
                raise EngineError(
                    f"the node of rollout replica {index} does not see {directory}; output_dir must lie on a "
                    "file system that all nodes of the cluster share"
                )
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype="auto", attn_implementation=attention
            )
            model.to(device).eval()
            if device == "cpu":
                for name, parameter in model.named_parameters():
                    parameter.data = _placed(parameter.data, places.get(name, 0))
            copy = Actor(model, tokenizer, ModelConfig(name_or_path=str(directory), autocast=autocast))
            own = directory / f"replica-{index}"
            return EngineReplica(build_engine(engine, copy, config, seed=seed, output_dir=own), copy)

        self.can_watch = engine.can_watch
        self._homes: dict[int, int] = {}
        """Conversation -> replica that sampled its last turn."""
        self._group: ActorGroup | None = ActorGroup(
            "rollout replica", make, num_replicas, num_cpus=num_cpus, num_gpus=num_gpus
        )
        self.update_weights(actor.state_dict(), actor.policy_version)

    def _open(self) -> ActorGroup:
        if self._group is None:
            raise EngineError("the Ray engine is closed")
        return self._group

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end, from all replicas (see ``RolloutEngine``)."""
        group = self._open()
        sent, monitors = without_monitors(requests)
        # per request the samples that have not ended, in order
        unfinished = [dict.fromkeys(range(len(request.seeds))) for request in requests]
        shares = self._shares(requests, len(group))
        # per replica its requests as it numbers them, with their samples
        given: dict[int, list[tuple[int, list[int]]]] = {}
        # call that has not returned -> replica
        under_way: dict[Any, int] = {}
        died: set[int] = set()

        def begin(index: int) -> None:
            given[index] = [(i, list(unfinished[i])) for i in shares[index] if unfinished[i]]
            asked = [_samples(sent[i], js) for i, js in given[index]]
            group.submit(index, "begin", asked)
            under_way[group.submit(index, "advance", None)] = index

        try:
            for index, share in enumerate(shares):
                if share:
                    begin(index)
            while under_way:
                index, result, has_died = group.first(under_way, "advance")
                if has_died:
                    if index in died:
                        raise EngineError(
                            f"rollout replica {index} died twice on the same requests: {group.causes[index]}"
                        )
                    died.add(index)
                    self._revive(group, [index])
                    begin(index)
                    continue
                samples_ended, look, is_all = result
                ended: list[Ended] = []
                for request, sample, generation in samples_ended:
                    i, samples = given[index][request]
                    del unfinished[i][samples[sample]]
                    ended.append((i, samples[sample], generation))
                # the replica waits for this answer
                answer = None if look is None else monitors[look.monitor].check(look.partial)
                if not is_all:
                    under_way[group.submit(index, "advance", answer)] = index
                if ended:
                    yield ended
        finally:
            if self._group is group and under_way:
                group.call("stop", dict.fromkeys(under_way.values(), ()))

    def _shares(self, requests: Sequence[GenerationRequest], number: int) -> list[list[int]]:
        """Return the requests of each replica: a turn goes where the turns before it were sampled."""
        homes = [next((self._homes[c] for c in r.conversations if c in self._homes), None) for r in requests]
        new = [i for i, home in enumerate(homes) if home is None]
        shares = [
            [new[i] for i in share] for share in share_out([most_tokens(requests[i]) for i in new], number)
        ]
        for i, home in enumerate(homes):
            if home is not None:
                shares[home].append(i)
        for home, share in enumerate(shares):
            for i in share:
                self._homes.update(dict.fromkeys(requests[i].conversations, home))
        return shares

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        if not self._homes:
            return
        group = self._open()
        self._homes = {c: home for c, home in self._homes.items() if c in conversations}
        _, dead = group.call("retain", dict.fromkeys(range(len(group)), (list(conversations),)))
        if dead:
            self._revive(group, dead)

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Put ``weights`` into the object store once, bucket by bucket; every replica reads them there."""
        group = self._open()
        like = {name: tensor.detach().to("meta") for name, tensor in like_of(weights).items()}
        self._weights = WeightStream(like, StoredBuckets(weights))
        self.policy_version = policy_version
        arguments = (self._weights, policy_version)
        _, dead = group.call("update_weights", dict.fromkeys(range(len(group)), arguments))
        if dead:
            self._revive(group, dead)

    def _revive(self, group: ActorGroup, dead: Sequence[int]) -> None:
        for index in dead:
            group.replace(index)
        arguments = (self._weights, self.policy_version)
        _, still_dead = group.call("update_weights", dict.fromkeys(dead, arguments))
        if still_dead:
            raise EngineError(
                f"rollout replica {still_dead[0]} died, was started again and died again: "
                f"{group.causes[still_dead[0]]}"
            )

    def close(self) -> None:
        """Stop the replicas."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _placed(tensor: Tensor, place: int) -> Tensor:
    """Return a copy of ``tensor`` that begins ``place`` bytes behind a multiple of ``_LINE``.

    On some CPUs (seen with AVX2) the last bits of a product with one row depend on where the weights begin.
    """
    import torch

    size = tensor.numel() * tensor.element_size()
    room = torch.empty(size + _LINE, dtype=torch.uint8)
    start = (place - room.data_ptr()) % _LINE
    return room[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class StoredBuckets:
    """The buckets of ``weights`` in Ray's object store; returns them as ``WeightStream`` asks for them."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        import ray

        self._places = {
            bucket[0]: ray.put({name: weights[name].detach().cpu() for name in bucket})
            for bucket in cut_buckets(like_of(weights))
        }

    def __call__(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the bucket of ``names``."""
        import ray

        found: Mapping[str, Tensor] = ray.get(self._places[names[0]])
        return found


def _samples(request: GenerationRequest, chosen: Sequence[int]) -> GenerationRequest:
    """Return the request for some of its samples."""
    return replace(
        request,
        seeds=[request.seeds[i] for i in chosen],
        conversations=[request.conversations[i] for i in chosen] if request.conversations else (),
    )
