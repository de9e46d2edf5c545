"""What every rollout engine must do, as assertions an engine's author can run on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multitask_rl.models.sampling import keep_top, suppress
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import (
    Ended,
    Generation,
    GenerationRequest,
    RolloutEngine,
    Watch,
    collect,
)

__all__ = ["assert_engine_contract", "sampled_logprobs"]

_PLAIN = SamplingParams(max_new_tokens=24)
_FILTERED = SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, top_k=20)
_GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


@torch.no_grad()
def sampled_logprobs(
    model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], sampling: SamplingParams
) -> Tensor:
    """Return the log-probabilities of ``response_ids`` under the distribution that is sampled: [T] float32.

    Temperature 0 counts as temperature 1 without filters.
    """
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()
    tokens = torch.tensor(list(response_ids))
    if sampling.suppressed_ids:
        logits = suppress(logits, torch.tensor(sampling.suppressed_ids))
    if sampling.temperature > 0:
        logits = keep_top(logits / sampling.temperature, sampling.top_k, sampling.top_p, keep=tokens)
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return logprobs


def assert_engine_contract(
    engine: RolloutEngine, model: Any, tokenizer: Any, tolerance: float = 1e-4
) -> None:
    """Check ``engine`` against ``model``, whose weights it must hold, in eval mode on the CPU.

    The model must end some of its responses by itself within 24 tokens and none of them always. Its weights
    are changed on the way and put back, as are the engine's (at a later ``policy_version``).

    Args:
        engine: the engine, open.
        model: causal language model of ``transformers``.
        tokenizer: the tokenizer both use.
        tolerance: largest accepted distance of log-probabilities (nats).
    """
    requests = _requests(len(tokenizer))
    results = engine.generate(requests)
    _check_shape(requests, results, eos=int(tokenizer.eos_token_id))
    _check_logprobs(model, requests, results, tolerance)
    _check_company_does_not_matter(engine, requests, results)
    _check_greedy(model, requests[-1], results[-1])
    _check_suppressed(engine, model, requests[0], results[0], tolerance)
    _check_stop_strings(engine, tokenizer, requests[0], results[0])
    _check_update(engine, model, requests, results, tolerance)
    assert engine.generate([]) == [], "no request, no result"
    _check_stream(engine, requests)
    if engine.can_admit:
        _check_admission(engine, requests)
    if engine.can_watch:
        _check_watch(engine, requests, engine.generate(requests))


def _requests(size: int) -> list[GenerationRequest]:
    """Return ragged prompts, groups of one to eight, three distributions."""
    prompts = [
        [3 + (7 * i + 3 * j) % (size - 3) for j in range(length)] for i, length in enumerate((5, 1, 40, 17))
    ]
    return [
        GenerationRequest(prompt_ids=prompts[0], sampling=_PLAIN, seeds=[2**62 + i for i in range(8)]),
        GenerationRequest(prompt_ids=prompts[1], sampling=_FILTERED, seeds=[5, 6]),
        GenerationRequest(prompt_ids=prompts[2], sampling=_PLAIN, seeds=[7, 8, 9]),
        GenerationRequest(prompt_ids=prompts[3], sampling=_GREEDY, seeds=[1]),
    ]


def _check_shape(
    requests: Sequence[GenerationRequest], results: Sequence[Sequence[Generation]], eos: int
) -> None:
    assert len(results) == len(requests), "one list per request"
    for request, group in zip(requests, results, strict=True):
        assert len(group) == len(request.seeds), "one generation per seed"
        for generation in group:
            ids, limit = generation.response_ids, request.sampling.max_new_tokens
            assert 0 < len(ids) <= limit, f"{len(ids)} tokens, allowed are 1 to {limit}"
            assert len(generation.rollout_logprobs) == len(ids), "one log-probability per token"
            assert all(math.isfinite(x) and x <= 1e-6 for x in generation.rollout_logprobs)
            assert eos not in ids[:-1], "nothing after the end token"
            expected = "stop" if ids[-1] == eos else "length"
            assert generation.finish_reason == expected, f"{generation.finish_reason}, not {expected}"
    first = [tuple(generation.response_ids) for generation in results[0]]
    assert len(set(first)) == len(first), "eight seeds give eight different responses"
    reasons = {generation.finish_reason for group in results for generation in group}
    assert reasons == {"stop", "length"}, f"the model must show both endings, it shows {reasons}"


def _check_logprobs(
    model: Any,
    requests: Sequence[GenerationRequest],
    results: Sequence[Sequence[Generation]],
    tolerance: float,
) -> None:
    for request, group in zip(requests, results, strict=True):
        for generation in group:
            expected = sampled_logprobs(model, request.prompt_ids, generation.response_ids, request.sampling)
            distance = float((expected - torch.tensor(generation.rollout_logprobs)).abs().max())
            assert distance <= tolerance, f"log-probabilities off by {distance:.3g} under {request.sampling}"


def _check_suppressed(
    engine: RolloutEngine,
    model: Any,
    request: GenerationRequest,
    group: Sequence[Generation],
    tolerance: float,
) -> None:
    never = tuple(sorted({generation.response_ids[0] for generation in group}))
    params = (replace(request.sampling, suppressed_ids=never, temperature=t) for t in (1.0, 0.0))
    requests = [replace(request, sampling=sampling) for sampling in params]
    results = engine.generate(requests)
    for generation in (g for own in results for g in own):
        assert not set(never) & set(generation.response_ids), "suppressed_ids are never sampled"
    _check_logprobs(model, requests[:1], results[:1], tolerance)


def _check_company_does_not_matter(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    results: Sequence[Sequence[Generation]],
) -> None:
    again = engine.generate(list(reversed(requests)))[::-1]
    alone = [
        [
            engine.generate(
                [GenerationRequest(prompt_ids=request.prompt_ids, sampling=request.sampling, seeds=[seed])]
            )[0][0]
            for seed in request.seeds[:2]
        ]
        for request in requests
    ]
    assert _ids(again) == _ids(results), "the order of the requests changed the samples"
    assert _ids(alone) == [group[:2] for group in _ids(results)], "the batch's company changed the samples"


def _ids(results: Sequence[Sequence[Generation]]) -> list[list[list[int]]]:
    return [[generation.response_ids for generation in group] for group in results]


@torch.no_grad()
def _check_greedy(model: Any, request: GenerationRequest, group: Sequence[Generation]) -> None:
    ids = torch.tensor([[*request.prompt_ids, *group[0].response_ids]])
    best = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
    assert best.tolist() == group[0].response_ids, "temperature 0 takes the most likely token"


def _check_stream(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    parts = list(engine.generate_stream(requests))
    expected = engine.generate(requests)
    assert _ids(collect(requests, parts)) == _ids(expected), "a stream brings what a call brings"
    if type(engine).generate_stream is RolloutEngine.generate_stream:
        return
    assert len(parts) > 1, "samples are yielded as they end, not at the end of all"
    unfinished = iter(engine.generate_stream(requests))
    next(unfinished)
    del unfinished
    assert _ids(engine.generate(requests)) == _ids(expected), "a stream given up leaves nothing behind"


def _check_admission(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
    """Requests that join a stream give what they give alone, and leave those they join alone."""
    expected = engine.generate(requests)
    hurried = replace(requests[0], sampling=replace(requests[0].sampling, max_new_tokens=1))
    found: list[list[Ended]] = []
    for part in engine.generate_stream([hurried, requests[1]]):
        if not found:
            engine.admit(requests[2:])
        found.append(part)
    groups = collect([hurried, *requests[1:]], found)
    assert _ids(groups)[1:] == _ids(expected)[1:], "who joins changes nothing"
    assert sum(len(part) for part in found) == sum(len(request.seeds) for request in requests)


class _EndsOddSeeds:
    """Ends what has an odd seed at the first look; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        self.seen.extend(partial)
        return [seed % 2 == 1 for seed, _ in partial]


def _check_watch(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    results: Sequence[Sequence[Generation]],
) -> None:
    every, monitor = 3, _EndsOddSeeds()
    watch = Watch(monitor=monitor, every=every)
    watched = engine.generate([replace(request, watch=watch) for request in requests])
    assert monitor.seen, "the monitor sees responses"
    assert all(len(ids) % every == 0 for _, ids in monitor.seen), f"after every {every} tokens"
    for request, whole, own in zip(requests, results, watched, strict=True):
        for seed, expected, generation in zip(request.seeds, whole, own, strict=True):
            if seed % 2 == 0 or len(expected.response_ids) <= every:
                assert generation.response_ids == expected.response_ids, "who is not ended is not changed"
                continue
            assert generation.finish_reason == "flagged"
            assert generation.response_ids == expected.response_ids[:every], "its last token included"
            distance = max(
                abs(a - b)
                for a, b in zip(generation.rollout_logprobs, expected.rollout_logprobs[:every], strict=True)
            )
            assert distance < 1e-3, "log-probabilities are those of the whole response"
    assert _ids(engine.generate(requests)) == _ids(results), "the next call is not concerned"


def _check_stop_strings(
    engine: RolloutEngine, tokenizer: Any, request: GenerationRequest, group: Sequence[Generation]
) -> None:
    longest = max(range(len(group)), key=lambda index: len(group[index].response_ids))
    ids = group[longest].response_ids
    middle = len(ids) // 2
    stop = tokenizer.decode(ids[middle : middle + 2], skip_special_tokens=False)
    assert stop, "the model must produce text"
    end = next(
        end
        for end in range(1, len(ids) + 1)
        if stop in tokenizer.decode(ids[:end], skip_special_tokens=False)
    )
    sampling = SamplingParams(max_new_tokens=_PLAIN.max_new_tokens, stop=("never this\n\n", stop))
    ((stopped,),) = engine.generate(
        [GenerationRequest(prompt_ids=request.prompt_ids, sampling=sampling, seeds=[request.seeds[longest]])]
    )
    assert stopped.response_ids == ids[:end], "a stop string ends the response and stays in the ids"
    assert len(stopped.rollout_logprobs) == end
    assert stopped.finish_reason == "stop"


@torch.no_grad()
def _check_update(
    engine: RolloutEngine,
    model: Any,
    requests: Sequence[GenerationRequest],
    results: Sequence[Sequence[Generation]],
    tolerance: float,
) -> None:
    version = engine.policy_version
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    try:
        engine.update_weights(_untied(model), version + 1)
        assert engine.policy_version == version + 1, "the version follows the weights"
        updated = engine.generate(requests)
        assert _ids(updated) != _ids(results), "other weights, other samples"
        _check_logprobs(model, requests, updated, tolerance)
    finally:
        model.load_state_dict(before)
        engine.update_weights(_untied(model), version + 2)
    assert _ids(engine.generate(requests)) == _ids(results), "the old weights give the old samples"


def _untied(model: Any) -> dict[str, Tensor]:
    """Return the state dict as the actor gives it: a tensor under two names once."""
    seen: set[int] = set()
    state = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            state[name] = value
    return state
