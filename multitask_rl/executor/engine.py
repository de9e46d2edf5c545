"""Engine replicas as Ray actors behind ``RolloutEngine``.

Each sample has its own seed, so it is the same on every replica. Samples are yielded as they end. A replica
that dies or hangs is started again where there is room. Its unfinished samples, and no others, are repeated
by replicas that have nothing to do. A replica that has started joins with the newest weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitask_rl.attention.float32 import FLOAT32
from multitask_rl.config.run import ModelConfig, RayConfig, RolloutConfig
from multitask_rl.errors import ConfigError, EngineError
from multitask_rl.executor.group import ActorCall, ActorGroup
from multitask_rl.executor.replica import EngineReplica, without_monitors
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import MergedWeights
from multitask_rl.models.weights import WeightStream, cut_buckets, like_of
from multitask_rl.records import Event
from multitask_rl.rollout.base import Ended, GenerationRequest, RolloutEngine, most_tokens
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.training.balance import Homes, share_out

_LOG = logging.getLogger(__name__)
_LINE = 64
"""Bytes of a line of the processor's cache."""
_MOST_LOSSES = 3
"""So many replicas may be lost with one sample: then the sample is the likely cause."""
_BEAT_S = 2.0
"""A replica at work answers at least so often."""
_LATE = 2.0
"""A share is late after so many times the seconds of the shares that have ended."""
_LATE_S = 1.0
"""A share is not late before."""
_UPDATE_S = 10.0
"""An update of weights that most replicas have done is late after so many seconds, at least."""
_HOOK_EVERY_S = 1.0


@dataclass(slots=True)
class _Share:
    """The samples, as (request, index in it), that a replica was given."""

    samples: set[tuple[int, int]]
    work: list[tuple[int, list[int]]]
    """The requests as the replica numbers them, with their samples."""
    tokens: float
    """Most tokens that the samples take."""
    began: float
    is_late: bool = False

    @classmethod
    def of(cls, samples: Collection[tuple[int, int]], requests: Sequence[GenerationRequest]) -> _Share:
        """Return the share of ``samples``, which begins now."""
        work: dict[int, list[int]] = {}
        for i, j in sorted(samples):
            work.setdefault(i, []).append(j)
        tokens = sum(most_tokens(_samples(requests[i], chosen)) for i, chosen in work.items())
        return cls(set(samples), list(work.items()), tokens, time.monotonic())

    def seconds_left(self, paces: Sequence[tuple[float, float]]) -> float:
        """Return the seconds until the share is late; infinity if that is unknown, or it ``is_late``."""
        if self.is_late or not paces:
            return math.inf
        usual = max(seconds * max(1.0, self.tokens / tokens) for seconds, tokens in paces)
        return self.began + max(_LATE_S, _LATE * usual) - time.monotonic()


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
        ray: RayConfig,
    ) -> None:
        directory = (output_dir / "ray_start").resolve()
        actor.save_for_engine(directory)
        num_gpus = float(actor.device.type == "cuda") if ray.gpus_per_engine < 0 else ray.gpus_per_engine
        if not num_gpus and config.engine == "vllm" and torch.cuda.is_available():
            raise ConfigError(
                "ray.gpus_per_engine=0: vLLM's build for CUDA computes on a GPU, and all replicas of a node "
                "would start on its first one; give each a GPU (1) or a part of one (0.5)"
            )
        device = self._device = "cuda" if num_gpus else "cpu"
        self._base: WeightStream | None = None
        """Below adapters, in the object store."""
        # names of their own: Ray pickles what the function reads, and must not pickle the actor
        tokenizer, autocast = actor.tokenizer, actor.config.autocast
        attention = actor.model.config._attn_implementation.replace(FLOAT32, "sdpa")
        places = {name: own.data_ptr() % _LINE for name, own in actor.model.named_parameters()}

        def build(index: int) -> tuple[RolloutEngine, Actor]:
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
            copy.engine_start = directory
            own = directory / f"replica-{index}"
            return build_engine(engine, copy, config, seed=seed, output_dir=own), copy

        beat_s = min(_BEAT_S, ray.engine_timeout_s / 4)
        self.can_watch, self.can_constrain = engine.can_watch, engine.can_constrain
        self._limit_s, self._room_within_s = ray.engine_timeout_s, ray.room_timeout_s
        self._homes = Homes()
        self._ready: set[int] = set()
        """Replicas with the newest weights."""
        self._joining: dict[Any, ActorCall] = {}
        """What the replicas that are started do: ``load``, then ``update_weights``."""
        self._deaths = Counter[int]()
        """Replica -> number of its deaths since it was ready."""
        self._events: list[tuple[str, str]] = []
        self._absent = set(range(ray.num_engines))
        """Replicas that are not ready, and not because they take weights."""
        number = min(ray.min_engines or ray.num_engines, ray.num_engines)
        self._between_steps: Callable[[], None] = lambda: None
        self._group: ActorGroup | None = ActorGroup(
            "rollout replica",
            lambda index: EngineReplica(partial(build, index), beat_s),
            ray.num_engines,
            num_cpus=1.0,
            num_gpus=num_gpus,
            started=number,
        )
        try:
            self._set_weights(actor.state_dict(), actor.policy_version)
            for index in range(number):
                self._load(index)
            self._wait_for(number)
        except BaseException:
            self.close()
            raise
        self._events.clear()

    def _actors(self) -> ActorGroup:
        """Return the replicas, dead or alive; ``EngineError`` once they are closed."""
        if self._group is None:
            raise EngineError("the Ray engine is closed")
        return self._group

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end, from all replicas (see ``RolloutEngine``)."""
        group = self._actors()
        sent, monitors = without_monitors(requests)
        unfinished = {(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))}
        shares: dict[int, _Share] = {}
        """Busy replica -> its share."""
        waiting: set[tuple[int, int]] = set()
        """Samples of replicas that were lost or are late, not yet given to another."""
        calls: dict[Any, ActorCall] = {}
        losses = Counter[tuple[int, int]]()
        paces: list[tuple[float, float]] = []
        """Seconds and most tokens of the shares that have ended."""

        def advance(index: int, answer: Sequence[bool] | None = None) -> None:
            calls[group.submit(index, "advance", answer)] = ActorCall(index, "advance", self._limit_s)

        def begin(index: int, samples: Collection[tuple[int, int]]) -> None:
            if samples:
                shares[index] = share = _Share.of(samples, requests)
                group.submit(index, "begin", [_samples(sent[i], chosen) for i, chosen in share.work])
                advance(index)

        try:
            if unfinished:
                self._wait_for(1)
                for index, chosen in self._homes.deal(requests, sorted(self._ready)).items():
                    begin(index, [(i, j) for i in chosen for j in range(len(requests[i].seeds))])
            while unfinished and (calls or waiting):
                self._between_steps()
                waiting &= unfinished
                idle = sorted(self._ready - shares.keys())
                for index, share in shares.items():
                    if idle and share.seconds_left(paces) <= 0:
                        share.is_late = True
                        if behind := share.samples & unfinished:
                            waiting |= behind
                            told = f"rollout replica {index} is late: others sample what it has not ended"
                            self._tell("late", f"{told} ({len(behind)} of {len(share.samples)} samples)")
                if waiting and idle:
                    again = sorted(waiting)
                    costs = [requests[i].sampling.max_new_tokens for i, _ in again]
                    for index, places in zip(idle, share_out(costs, len(idle)), strict=True):
                        begin(index, [again[place] for place in places])
                    waiting.clear()
                if not calls:
                    self._wait_for(1)
                    continue
                # an idle replica takes over the samples of one that gets late
                left = [share.seconds_left(paces) for share in shares.values() if idle]
                found = self._next(calls, min([_HOOK_EVERY_S, *left]))
                if found is None:
                    continue
                index, result, has_died = found
                if has_died:
                    lost = shares.pop(index).samples & unfinished
                    waiting |= lost
                    losses.update(lost)
                    if max(losses.values(), default=0) >= _MOST_LOSSES:
                        raise EngineError(
                            f"{_MOST_LOSSES} rollout replicas died on the same requests, the last is "
                            f"{index}: {group.causes[index]}"
                        )
                    continue
                samples_ended, look, is_all = result
                ended: list[Ended] = []
                for request, sample, generation in samples_ended:
                    i, chosen = shares[index].work[request]
                    j = chosen[sample]
                    if (i, j) in unfinished:  # else another replica was first
                        unfinished.remove((i, j))
                        ended.append((i, j, generation))
                # the replica waits for this answer
                answer = None if look is None else monitors[look.monitor].check(look.partial)
                if is_all:
                    share = shares.pop(index)
                    paces.append((time.monotonic() - share.began, share.tokens))
                else:
                    advance(index, answer)
                if ended:
                    yield ended
        finally:
            if self._group is group:
                for call in calls.values():
                    group.submit(call.index, "stop")

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        """See ``RolloutEngine``; ``hook`` is called when a replica answers, and every second at least."""
        self._between_steps = hook
        return True

    def _next(self, calls: dict[Any, ActorCall], within: float = math.inf) -> tuple[int, Any, bool] | None:
        """Wait as ``ActorGroup.first`` for one of ``calls``, or a replica that joins; restart one that died.

        Returns:
            What ``first`` returns; None after ``within`` seconds, or if it was a replica that joins.
        """
        found = self._actors().poll(calls | self._joining, within)
        if found is None:
            return None
        reference, result, has_died = found
        if call := calls.pop(reference, None):
            if has_died:
                self._lose(call.index)
            return call.index, result, has_died
        call = self._joining.pop(reference)
        if has_died:
            self._lose(call.index)
        elif call.method == "load":
            self._send_weights(call.index)
        else:
            self._ready.add(call.index)
            self._deaths[call.index] = 0
            if call.index in self._absent:
                self._absent.remove(call.index)
                self._tell("joined", f"rollout replica {call.index} has joined, {self._number()}")
        return None

    def _number(self) -> str:
        number = len(self._actors())
        return f"{number - len(self._absent)} of {number} are at work"  # also those that take weights

    def _tell(self, kind: str, reason: str) -> None:
        _LOG.info("%s", reason)
        self._events.append((kind, reason))

    def health_events(self, step: int) -> list[Event]:
        """Return which replicas were lost or late, and which have joined, since the last call."""
        events, self._events = self._events, []
        return [Event(step=step, source="engine", kind=kind, reason=reason) for kind, reason in events]

    def _load(self, index: int) -> None:
        """Let the replica ``index`` build its engine, without a limit: it may have to wait for a node.

        An error ends the run only if no other replica is there.
        """
        # while weights travel the others are not ready, and yet there
        others = self._ready or any(c.method == "update_weights" for c in self._joining.values())
        call = ActorCall(index, "load", is_fatal=bool(others))
        self._joining[self._actors().submit(index, "load")] = call

    def _send_weights(self, index: int, silent_s: float = 0.0) -> None:
        sent = self._actors().submit(index, "update_weights", self._weights, self.policy_version)
        self._joining[sent] = ActorCall(index, "update_weights", self._limit_s, silent_s=silent_s)

    def _lose(self, index: int) -> None:
        """Start the dead replica ``index`` again; if it never was ready since, not before the next update."""
        group = self._actors()
        self._ready.discard(index)
        self._homes.leave(index)
        self._deaths[index] += 1
        self._absent.add(index)
        if self._deaths[index] <= 2:  # each update tries again
            self._tell("lost", f"rollout replica {index} is lost, {self._number()}: {group.causes[index]}")
        if self._deaths[index] == 1:
            group.replace(index)
            self._load(index)

    def _wait_for(self, number: int) -> None:
        """Wait until so many replicas are ready.

        Raises:
            EngineError: they die before they are, or there is no room for them.
        """
        group = self._actors()
        since = time.monotonic()
        while len(self._ready) < number:
            index, cause = next(reversed(group.causes.items()), (0, "it was not started"))
            if not self._joining:
                raise EngineError(f"rollout replica {index} died, was started again and died again: {cause}")
            self._next({}, 1.0)
            if any(group.is_placed(call.index) for call in self._joining.values()):
                since = time.monotonic()
            elif time.monotonic() - since > self._room_within_s:
                raise EngineError(
                    f"no rollout replica is left, and the Ray cluster had no room for one within "
                    f"{self._room_within_s:g} s (ray.room_timeout_s). The last, {index}: {cause}. The last "
                    "checkpoint is intact: add nodes and start the same command again"
                )

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        if not self._homes:
            return
        group = self._actors()
        self._homes.retain(conversations)
        for index in self._ready:  # that one died is found at the next call
            group.submit(index, "retain", list(conversations))

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Put ``weights`` into the object store once, bucket by bucket; every replica reads them there.

        Replicas that are not there are started; those started since the last update join. One that takes much
        longer than the others joins when it has the weights.
        """
        group = self._actors()
        self._set_weights(weights, policy_version)
        joining, self._joining = self._joining, {}
        had = dict.fromkeys(self._ready, 0.0)
        self._ready = set()
        for reference, call in joining.items():
            if call.method == "load":
                self._joining[reference] = call
            else:  # calls of one replica run in their order: the weights under way will be overwritten
                had[call.index] = call.silent_s
        for index, silent_s in had.items():
            self._send_weights(index, silent_s)
        for index in set(range(len(group))).difference(call.index for call in self._joining.values()):
            group.replace(index)
            self._load(index)
        began = last = time.monotonic()
        while any(call.method == "update_weights" for call in self._joining.values()):
            number, left = len(self._ready), math.inf
            if number and 2 * number >= len(had):
                left = began + max(_UPDATE_S, _LATE * (last - began)) - time.monotonic()
                if left < 0:
                    break
            self._next({}, left)
            last = time.monotonic() if len(self._ready) > number else last
        self._wait_for(1)

    def _set_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        import ray

        if isinstance(weights, MergedWeights) and weights.device.type == self._device:
            # the base weights never change: after the first time only the adapters travel
            self._base = self._base or _stored(weights.base)
            stored: WeightStream = weights.over(self._base)
        else:
            stored = _stored(weights)
        self._weights = ray.put(stored)
        self.policy_version = policy_version

    def close(self) -> None:
        """Stop the replicas."""
        if self._group is not None:
            self._group.close()
            self._group = None
            self._joining.clear()


def _placed(tensor: Tensor, place: int) -> Tensor:
    """Return a copy of ``tensor`` that begins ``place`` bytes behind a multiple of ``_LINE``.

    On some CPUs (seen with AVX2) the last bits of a product with one row depend on where the weights begin.
    """
    size = tensor.numel() * tensor.element_size()
    room = torch.empty(size + _LINE, dtype=torch.uint8)
    start = (place - room.data_ptr()) % _LINE
    return room[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _stored(weights: Mapping[str, Tensor]) -> WeightStream:
    """Put ``weights`` into the object store; return them as they are read there."""
    like = {name: tensor.detach().to("meta") for name, tensor in like_of(weights).items()}
    return WeightStream(like, StoredBuckets(weights))


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
