"""The contract suite of rollout engines; needs torch.

``check_engine`` tests a plugin on a tiny model, ``assert_engine_contract`` a built engine on any model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.models.actor import Actor
from multitask_rl.models.sampling import keep_top, suppress
from multitask_rl.plugins import ROLLOUT_ENGINES, load_plugin
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, Watch, collect
from multitask_rl.testing.contract import Finding, asserting, run_check

_PLAIN = SamplingParams(max_new_tokens=24)
_FILTERED = SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, top_k=20)
_GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-=>;,!. "


@torch.no_grad()
def sampled_logprobs(
    model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], sampling: SamplingParams
) -> Tensor:
    """Return the log-probabilities of ``response_ids`` under the distribution that is sampled: [T] float32.

    They are on the CPU, wherever ``model`` is. Temperature 0 counts as temperature 1 without filters.
    """
    logits = _logits(model, prompt_ids, response_ids)
    tokens = torch.tensor(list(response_ids))
    if sampling.suppressed_ids:
        logits = suppress(logits, torch.tensor(sampling.suppressed_ids))
    if sampling.temperature > 0:
        logits = keep_top(logits / sampling.temperature, sampling.top_k, sampling.top_p, keep=tokens)
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return logprobs


def _logits(model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
    """Return the logits of ``response_ids``: [T, V] float32, on the CPU."""
    ids = torch.tensor([[*prompt_ids, *response_ids]], device=next(model.parameters()).device)
    logits: Tensor = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float().cpu()
    return logits


def tiny_actor(seed: int = 0) -> Actor:
    """Return an actor of 46 tokens, width 32 and two layers, with random weights."""
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", *_CHARACTERS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    shape = transformers.Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    return Actor(transformers.Qwen2ForCausalLM(shape), tokenizer, ModelConfig())


def check_engine(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about an engine (``rollout.engine``, ``rollout.engine_config``) on a tiny model."""
    engine_class: type[RolloutEngine] = load_plugin(ROLLOUT_ENGINES, plugin, expects=RolloutEngine)
    actor = tiny_actor()
    settings = RolloutConfig(engine=plugin, engine_config=dict(config or {}))
    findings: list[Finding] = []

    def answers() -> str:
        with tempfile.TemporaryDirectory() as directory:
            engine = engine_class.build(actor, settings, seed=0, output_dir=Path(directory))
            findings.extend(check_built_engine(engine, actor.model, actor.tokenizer))
            engine.close()
        return ""

    return [run_check("is built, answers requests and closes", answers), *findings]


class _EndsOddSeeds:
    """A monitor that ends responses of odd seeds at the first look and records what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        self.seen.extend(partial)
        return [seed % 2 == 1 for seed, _ in partial]


def _ids(results: Sequence[Sequence[Generation]]) -> list[list[list[int]]]:
    return [[generation.response_ids for generation in group] for group in results]


@torch.no_grad()
def check_built_engine(
    engine: RolloutEngine, model: Any, tokenizer: Any, tolerance: float = 1e-4
) -> list[Finding]:
    """Check that ``engine`` keeps its contract with ``model``, whose weights it holds.

    The model must end some of its responses by itself within 24 tokens and none of them always. Its weights
    are changed on the way and put back, as are the engine's (at a later ``policy_version``).

    Args:
        engine: the engine, open.
        model: causal language model of ``transformers``, in eval mode.
        tokenizer: the tokenizer both use.
        tolerance: largest accepted distance of log-probabilities (nats).

    Returns:
        The findings. ``assert_engine_contract`` raises an ``AssertionError`` that lists those that failed.
    """
    size, eos = len(tokenizer), int(tokenizer.eos_token_id)
    prompts = [
        [3 + (7 * i + 3 * j) % (size - 3) for j in range(length)] for i, length in enumerate((5, 1, 40, 17))
    ]
    requests = [
        GenerationRequest(prompt_ids=prompts[0], sampling=_PLAIN, seeds=[2**62 + i for i in range(8)]),
        GenerationRequest(prompt_ids=prompts[1], sampling=_FILTERED, seeds=[5, 6]),
        GenerationRequest(prompt_ids=prompts[2], sampling=_PLAIN, seeds=[7, 8, 9]),
        GenerationRequest(prompt_ids=prompts[3], sampling=_GREEDY, seeds=[1]),
    ]
    results = engine.generate(requests)

    def shape() -> None:
        assert [len(group) for group in results] == [8, 2, 3, 1], "one list per request, one sample per seed"
        for request, group in zip(requests, results, strict=True):
            for sample in group:
                ids, limit = sample.response_ids, request.sampling.max_new_tokens
                assert 0 < len(ids) <= limit, f"{len(ids)} tokens, allowed are 1 to {limit}"
                assert len(sample.rollout_logprobs) == len(ids), "one log-probability per token"
                assert all(math.isfinite(x) and x <= 1e-6 for x in sample.rollout_logprobs), "they are <= 0"
                assert eos not in ids[:-1], "nothing after the end token"
                expected = "stop" if ids[-1] == eos else "length"
                assert sample.finish_reason == expected, f"{sample.finish_reason}, not {expected}"
        assert len({tuple(s.response_ids) for s in results[0]}) == 8, "eight seeds, eight responses"
        reasons = {sample.finish_reason for group in results for sample in group}
        assert reasons == {"stop", "length"}, f"the model must show both endings, it shows {reasons}"
        assert engine.generate([]) == [], "no request, no result"

    def logprobs(
        asked: Sequence[GenerationRequest] = requests, given: Sequence[Sequence[Generation]] = results
    ) -> None:
        for request, group in zip(asked, given, strict=True):
            for sample in group:
                expected = sampled_logprobs(model, request.prompt_ids, sample.response_ids, request.sampling)
                distance = float((expected - torch.tensor(sample.rollout_logprobs)).abs().max())
                assert distance <= tolerance, f"off by {distance:.3g} under {request.sampling}"

    def company() -> None:
        again = engine.generate(requests[::-1])[::-1]
        assert _ids(again) == _ids(results), "the order of the requests changed the samples"
        alone = [[engine.generate([replace(r, seeds=[s])])[0][0] for s in r.seeds[:2]] for r in requests]
        assert _ids(alone) == [group[:2] for group in _ids(results)], "the batch changed the samples"

    def greedy() -> None:
        prompt, response = requests[3].prompt_ids, results[3][0].response_ids
        assert _logits(model, prompt, response).argmax(-1).tolist() == response

    def suppressed() -> None:
        never = tuple(sorted({sample.response_ids[0] for sample in results[0]}))
        params = [replace(_PLAIN, suppressed_ids=never, temperature=t) for t in (1.0, 0.0)]
        asked = [replace(requests[0], sampling=sampling) for sampling in params]
        given = engine.generate(asked)
        sampled = {token for group in _ids(given) for ids in group for token in ids}
        assert not sampled.intersection(never), "suppressed_ids were sampled"
        logprobs(asked[:1], given[:1])

    def stop_strings() -> None:
        longest = max(range(8), key=lambda index: len(results[0][index].response_ids))
        ids = results[0][longest].response_ids
        middle = len(ids) // 2
        stop = tokenizer.decode(ids[middle : middle + 2], skip_special_tokens=False)
        assert stop, "the model must produce text"
        ends = range(1, len(ids) + 1)
        end = next(e for e in ends if stop in tokenizer.decode(ids[:e], skip_special_tokens=False))
        sampling = replace(_PLAIN, stop=("never this\n\n", stop))
        asked = replace(requests[0], sampling=sampling, seeds=[requests[0].seeds[longest]])
        ((stopped,),) = engine.generate([asked])
        assert stopped.response_ids == ids[:end], "a stop string ends the response and stays in the ids"
        assert len(stopped.rollout_logprobs) == end
        assert stopped.finish_reason == "stop"

    def update() -> None:
        def push(version: int) -> None:
            weights, seen = {}, set()  # as the actor gives them: a tensor under two names once
            for name, value in model.state_dict().items():
                if value.data_ptr() not in seen:
                    seen.add(value.data_ptr())
                    weights[name] = value
            engine.update_weights(weights, version)
            assert engine.policy_version == version, "the version follows the weights"

        version = engine.policy_version
        before = {name: value.clone() for name, value in model.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(0.1 * parameter.std() * noise)
        try:
            push(version + 1)
            updated = engine.generate(requests)
            assert _ids(updated) != _ids(results), "other weights, other samples"
            logprobs(requests, updated)
        finally:
            model.load_state_dict(before)
            push(version + 2)
        assert _ids(engine.generate(requests)) == _ids(results), "the old weights give the old samples"

    def stream() -> None:
        parts = list(engine.generate_stream(requests))
        assert _ids(collect(requests, parts)) == _ids(results), "a stream brings what a call brings"
        if type(engine).generate_stream is not RolloutEngine.generate_stream:
            assert len(parts) > 1, "samples are yielded as they end, not at the end of all"
            unfinished = iter(engine.generate_stream(requests))
            next(unfinished)
            del unfinished
            assert _ids(engine.generate(requests)) == _ids(results), "an abandoned stream leaves nothing"

    def admission() -> None:
        hurried = replace(requests[0], sampling=replace(_PLAIN, max_new_tokens=1))
        found: list[list[Ended]] = []
        for part in engine.generate_stream([hurried, requests[1]]):
            if not found:
                engine.admit(requests[2:])
            found.append(part)
        groups = collect([hurried, *requests[1:]], found)
        assert _ids(groups)[1:] == _ids(results)[1:], "admitted requests change no sample"
        assert sum(len(part) for part in found) == 14, "each sample comes once"

    def watch() -> None:
        every, monitor = 3, _EndsOddSeeds()
        watched = engine.generate([replace(r, watch=Watch(monitor=monitor, every=every)) for r in requests])
        assert monitor.seen, "the monitor sees responses"
        assert all(len(ids) % every == 0 for _, ids in monitor.seen), f"after every {every} tokens"
        for request, whole, own in zip(requests, results, watched, strict=True):
            for seed, expected, sample in zip(request.seeds, whole, own, strict=True):
                if seed % 2 == 0 or len(expected.response_ids) <= every:
                    assert sample.response_ids == expected.response_ids, "other responses do not change"
                    continue
                assert sample.finish_reason == "flagged"
                assert sample.response_ids == expected.response_ids[:every], "its last token included"
                pairs = zip(sample.rollout_logprobs, expected.rollout_logprobs[:every], strict=True)
                assert max(abs(a - b) for a, b in pairs) < 1e-3, "log-probabilities of the whole response"
        assert _ids(engine.generate(requests)) == _ids(results), "the next call is not concerned"

    checks = {
        "one sample per seed, with its log-probabilities and its ending": shape,
        "log-probabilities are those of the sampled distribution": logprobs,
        "a sample does not depend on its batch": company,
        "temperature 0 takes the most likely token": greedy,
        "suppressed tokens are never sampled": suppressed,
        "a stop string ends a response": stop_strings,
        "samples follow an update of the weights": update,
        "a stream brings each sample once": stream,
    }
    if engine.can_admit:
        checks["requests may join an open stream"] = admission
    if engine.can_watch:
        checks["a monitor may end responses"] = watch
    return [run_check(name, check) for name, check in checks.items()]


assert_engine_contract = asserting(check_built_engine)
