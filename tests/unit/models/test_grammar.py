"""Sampling and training under a grammar: one distribution, in the engine and in the trainer."""

import json
import re
import sys

import jsonschema
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from learner_benches import Bench, relative_difference
from model_builders import VOCABULARY, build_actor, build_byte_actor, build_tokenizer, sample_scored
from multitask_rl.algorithms.reinforce_pp import ReinforcePP
from multitask_rl.config.run import ModelConfig, RolloutConfig, RunConfig
from multitask_rl.errors import ConfigError, EngineError, MissingExtraError, TrainingError
from multitask_rl.models.actor import Actor
from multitask_rl.models.grammar import Grammars
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches
from multitask_rl.training.runner import ModelRunner

NUMBER = json.dumps({"regex": "[0-9]{1,3}"})
WORDS = json.dumps({"choices": ["yes", "no", "maybe", "yes!"]})
SENTENCE = json.dumps({"regex": "([a-z]{1,4} )*[a-z]+[.]"})
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 6},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "why", "sure"],
    "additionalProperties": False,
}
OBJECT = json.dumps({"json_schema": SCHEMA})


def engine_of(actor):
    return HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=None)


def request(grammar, *, seeds=range(20), limit=40, **sampling):
    return GenerationRequest(
        prompt_ids=[5, 6, 7],
        sampling=SamplingParams(max_new_tokens=limit, grammar=grammar, **sampling),
        seeds=list(seeds),
    )


def sample(actor, *requests):
    return engine_of(actor).generate(list(requests))


def text_of(actor, generation):
    return actor.tokenizer.decode(generation.response_ids, skip_special_tokens=True)


@pytest.mark.parametrize("build", [build_actor, build_byte_actor])
def test_every_response_is_a_sentence_of_its_grammar_in_a_mixed_batch(build):
    actor = build()
    numbers, words, free, sentences = sample(
        actor, request(NUMBER), request(WORDS), request(""), request(SENTENCE, limit=12)
    )
    for g in numbers:
        assert re.fullmatch("[0-9]{1,3}", text_of(actor, g))
        assert g.finish_reason == "stop"
        assert g.response_ids[-1] == actor.tokenizer.eos_token_id
    assert {text_of(actor, g) for g in words} == {"yes", "no", "maybe", "yes!"}
    assert {g.finish_reason for g in sentences} == {"stop", "length"}
    for g in sentences:
        whole = re.fullmatch("([a-z]{1,4} )*[a-z]+[.]", text_of(actor, g))
        assert bool(whole) == (g.finish_reason == "stop")
    assert any(not re.fullmatch("[a-z0-9 .]*", text_of(actor, g)) for g in free)


def test_json_responses_parse_and_follow_the_schema():
    actor = build_byte_actor()
    (group,) = sample(actor, request(OBJECT, limit=80))
    for g in group:
        assert g.finish_reason == "stop"
        jsonschema.validate(json.loads(text_of(actor, g)), SCHEMA)
    assert len({text_of(actor, g) for g in group}) > 10


def test_grammars_beside_a_row_change_nothing_for_it():
    actor = build_actor()
    alone = sample(actor, request(""))[0]
    beside = sample(actor, request(NUMBER), request(""), request(WORDS))[1]
    assert [g.response_ids for g in beside] == [g.response_ids for g in alone]
    one = sample(actor, request(WORDS, seeds=[7]))[0][0]
    assert one.response_ids == sample(actor, request(NUMBER), request(WORDS))[1][7].response_ids


def test_greedy_takes_the_likeliest_of_what_is_allowed():
    actor = build_actor()
    (group,) = sample(actor, request(NUMBER, seeds=[1, 2], temperature=0.0))
    assert group[0].response_ids == group[1].response_ids
    with torch.no_grad():
        logits = actor.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    digits = [VOCABULARY.index(c) for c in "0123456789"]
    assert group[0].response_ids[0] == digits[int(logits[digits].argmax())]


def test_a_single_allowed_token_has_log_probability_zero():
    actor = build_actor()
    (group,) = sample(actor, request(json.dumps({"choices": ["abcd", "xbcd"]})))
    for g in group:
        assert g.rollout_logprobs[0] < -0.1
        assert g.rollout_logprobs[1:] == [0.0] * 4


def test_the_allowed_tokens_are_those_of_the_choices_and_have_all_the_probability():
    actor = build_actor()
    choices = json.loads(WORDS)["choices"]
    for g in sample(actor, request(WORDS))[0]:
        mask = actor.grammars.token_mask([WORDS], [g.response_ids])
        ids = torch.tensor([[5, 6, 7, *g.response_ids[:-1]]])
        with torch.no_grad():
            logits = actor.model(input_ids=ids).logits[0, 2:]
        probabilities = mask.apply(logits).softmax(-1)
        for position in range(len(g.response_ids)):
            written = "".join(VOCABULARY[i] for i in g.response_ids[:position])
            going_on = {c[position] for c in choices if c.startswith(written) and c != written}
            expected = {VOCABULARY.index(c) for c in going_on} | ({1} if written in choices else set())
            found = probabilities[position].nonzero().squeeze(-1)
            assert set(found.tolist()) == expected
            assert float(probabilities[position].sum()) == pytest.approx(1.0, abs=1e-6)
            assert bool(mask.forced[position]) == (len(expected) == 1)


def test_engine_and_trainer_agree_under_a_grammar_in_every_layout():
    actor = build_byte_actor()
    settings = [
        (OBJECT, {"limit": 80}),
        (SENTENCE, {"limit": 7}),
        (WORDS, {"temperature": 0.6}),
        (NUMBER, {"temperature": 1.3, "top_p": 0.8}),
        ("", {"limit": 9}),
        (NUMBER, {"top_k": 3}),
    ]
    requests = [request(g, seeds=range(4), **keys) for g, keys in settings]
    pairs = [(r, g) for r, group in zip(requests, sample(actor, *requests), strict=True) for g in group]
    for layout in ("bucketed", "packed", "shared"):
        worst = 0.0
        for batch in build_microbatches(
            [r.prompt_ids for r, _ in pairs],
            [g.response_ids for _, g in pairs],
            max_tokens=300,
            layout=layout,
            pad_token_id=0,
        ):
            own = [pairs[i] for i in batch.indices]
            sampling = [r.sampling for r, _ in own]
            grammars, responses = [s.grammar for s in sampling], [g.response_ids for _, g in own]
            mask = actor.grammars.token_mask(grammars, responses) if any(grammars) else None
            with torch.no_grad():
                out = forward_tokens(actor.model, batch, sampling, mask=mask)
            expected = torch.tensor([p for _, g in own for p in g.rollout_logprobs])
            worst = max(worst, float((out.logprobs - expected).abs().max()))
        assert worst < 1e-5, layout


GRAMMARS = {"a": SENTENCE, "b": json.dumps({"regex": "[0-9 ]{2,30}[;,]"})}


def test_the_first_update_has_ratio_one_and_the_engines_log_probabilities():
    bench = Bench(num_epochs=2)
    report = bench.update(sample_scored(build_actor(), groups=3, top_p=0.9, grammars=GRAMMARS))
    for task in "ab":
        assert report.task_metrics[task]["mismatch_max"] < 1e-5
    once = Bench().update(sample_scored(build_actor(), groups=3, grammars=GRAMMARS))
    assert once.task_metrics["b"]["ratio"] == 1.0


@pytest.mark.parametrize("second", ["grpo", "reward_conditioned"])
def test_the_gradient_under_a_grammar_is_the_same_however_the_samples_are_cut(second):
    scored = sample_scored(build_actor(), groups=3, grammars=GRAMMARS)
    whole = Bench(second=second)
    cuts = [
        Bench(second=second, layout=layout, tokens=tokens)
        for layout, tokens in (("packed", 200), ("shared", 150), ("bucketed", 1))
    ]
    for bench in (whole, *cuts):
        bench.tasks["b"].algorithm.config.entropy_coefficient = 0.01
        bench.update(scored)
        assert all(bool(g.isfinite().all()) for g in bench.gradient.values())
        assert relative_difference(bench.gradient, whole.gradient) < 1e-5


def test_an_entropy_bonus_has_a_finite_gradient_where_tokens_have_probability_zero():
    bench = Bench()
    bench.tasks["b"].algorithm.config.entropy_coefficient = 0.01
    report = bench.update(sample_scored(build_actor(), "b", top_p=0.5), {"b": 1.0})
    assert bench.gradient
    assert all(bool(g.isfinite().all()) for g in bench.gradient.values())
    assert 0 < report.task_metrics["b"]["entropy"] < 3.8


def test_a_forced_token_teaches_nothing():
    scored = sample_scored(build_actor(), "b", grammars={"b": json.dumps({"regex": "abc=;"})})
    bench = Bench()
    bench.tasks["b"].algorithm.config.entropy_coefficient = 0.01
    bench.update(scored, {"b": 1.0})
    assert not any(c.has_gradient for c in bench.credited)
    assert not bench.gradient


def test_a_task_without_grammar_pays_nothing_and_learns_bitwise_the_same_beside_one():
    actor = build_actor()
    scored = sample_scored(actor, "b")
    assert actor._grammars is None
    runner = ModelRunner(actor, Critic(), RunConfig())
    samples = Bench().algorithms["b"].select(scored)
    assert all(s.response_ids is s.scored.rollout.response_ids for s in samples)
    free = [runner.forward(b, samples, want_logits=True).logits for b in runner.cut(samples)]
    assert actor._grammars is None
    for item in scored[::2]:
        # a grammar that allows whatever was written, so that the batches stay as they are
        item.rollout.sampling = SamplingParams(
            max_new_tokens=99, temperature=0.7, grammar=json.dumps({"regex": "(?s).*"})
        )
        item.rollout.response_ids[:] = [max(i, 2) for i in item.rollout.response_ids]
    mixed = [runner.forward(b, samples, want_logits=True) for b in runner.cut(samples)]
    assert actor._grammars is not None
    for batch, before, after in zip(runner.cut(samples), free, mixed, strict=True):
        plain = torch.tensor([not samples[i].scored.rollout.sampling.grammar for i in batch.indices])
        assert torch.equal(before[plain[batch.sequence]], after.logits[plain[batch.sequence]])


def test_a_response_that_does_not_follow_its_grammar_is_not_trained_on():
    actor = build_actor()
    ids = [VOCABULARY.index(c) for c in "12a"]
    with pytest.raises(TrainingError, match=r"does not follow its grammar.*at position 2"):
        actor.grammars.token_mask([NUMBER], [ids])


def test_control_tokens_added_later_are_known_and_never_allowed():
    actor = build_byte_actor()
    anything = json.dumps({"regex": "(?s).*"})
    before = actor.grammars
    control = actor.add_control_tokens(20)
    assert actor.grammars is not before
    mask = actor.grammars.token_mask([anything], [[control[0] - 1]])
    allowed = mask.apply(torch.zeros(1, actor.model.config.vocab_size))[0].isfinite()
    assert not allowed[control].any()
    assert not allowed[len(actor.tokenizer) :].any()
    assert bool(allowed[actor.tokenizer.eos_token_id])
    for g in sample(actor, request(NUMBER))[0]:
        assert re.fullmatch("[0-9]{1,3}", text_of(actor, g))


def test_a_vocabulary_without_all_bytes_never_runs_into_a_dead_end():
    actor = build_actor()  # no capital letters
    (group,) = sample(actor, request(json.dumps({"regex": "[a-z]?([A-Z]q|[a-c]{1,3}[!X])"})))
    for g in group:
        assert re.fullmatch("[a-z]?[a-c]{1,3}!", text_of(actor, g))
    with pytest.raises(ConfigError, match="can be written in the tokenizer's vocabulary"):
        actor.grammars.check(json.dumps({"regex": "a[A-Z]"}), 9)
    with pytest.raises(ConfigError, match="a token for every byte"):
        actor.grammars.check(OBJECT, 99)


def test_a_choice_longer_than_the_limit_is_refused():
    grammars = build_actor().grammars
    grammars.check(WORDS, 6)
    with pytest.raises(ConfigError, match="'maybe' takes 6 tokens with the end token, max_new_tokens is 5"):
        grammars.check(WORDS, 5)


def sentencepiece_tokenizer():
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<pad>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁yes", "1", "12", "no"]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def test_a_tokenizer_with_byte_fallback_is_read():
    grammars = Grammars(sentencepiece_tokenizer(), vocab_size=270, eos_token_id=2)
    mask = grammars.token_mask([NUMBER], [[262, 3 + ord("7"), 2]])  # "12", "7" as a byte, the end
    allowed = [
        {i for i in range(270) if mask.packed[row, i // 8] >> (i % 8) & 1} for row in mask.which.tolist()
    ]
    digits = {3 + ord(c) for c in "0123456789"}
    assert allowed == [digits | {261, 262}, digits | {261, 2}, {2}]
    assert mask.forced.tolist() == [False, False, True]


def test_a_tokenizer_that_writes_between_its_tokens_is_refused():
    from tokenizers import Tokenizer, decoders, models

    words = {"[UNK]": 0, "<eos>": 1, "yes": 2, "no": 3, "##w": 4}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="[UNK]")
    with pytest.raises(ConfigError, match="put side by side give the text"):
        Grammars(tokenizer, vocab_size=5, eos_token_id=1)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    actor = Actor(build_actor().model, build_tokenizer(), ModelConfig())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'multitask-rl\[grammar\]'"):
        sample(actor, request(NUMBER))


def test_an_engine_without_grammars_refuses_them():
    engine = HFEngine(build_actor().model, eos_token_ids=[1], pad_token_id=0)
    with pytest.raises(EngineError, match="without 'grammars'"):
        engine.generate([request(NUMBER)])


def mean_gradient(bench, over):
    """Return the gradient of the mean of -advantage * log-probability over the tokens ``over`` keeps."""
    model, runner = bench.actor.model, bench.main.runner
    samples = [c.sample for c in bench.credited]
    (batch,) = runner.cut(samples)
    logprobs = runner.forward(batch, samples).logprobs
    chosen = torch.cat([over(bench.credited[i]) for i in batch.indices])
    advantages = torch.cat([bench.credited[i].advantages for i in batch.indices])
    loss = -(advantages * logprobs)[chosen].mean()
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def test_forced_tokens_are_left_out_of_the_token_mean():
    scored = sample_scored(build_actor(), "b", grammars={"b": json.dumps({"regex": "abc[a-z]{2}xyz=;"})})
    before, bench = Bench(), Bench()
    bench.update(scored, {"b": 1.0})
    before.credited = bench.credited  # same weights, not yet updated
    found = {n: g for n, g in bench.gradient.items() if n in dict(bench.actor.model.named_parameters())}
    free = torch.tensor([False] * 3 + [True] * 2 + [False] * 6)
    expected = mean_gradient(before, lambda c: free[: len(c.sample.response_ids)])
    assert relative_difference(found, expected) < 1e-5


def test_whitening_is_over_the_tokens_that_had_a_choice():
    bench = Bench()
    bench.tasks["b"].algorithm = bench.algorithms["b"] = ReinforcePP(ReinforcePP.Config())
    scored = sample_scored(build_actor(), "b", grammars={"b": json.dumps({"regex": "abc[a-z]{2}(xyz)?=;"})})
    bench.update(scored, {"b": 1.0})
    advantages = torch.cat([c.advantages[c.choices] for c in bench.credited]).double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(advantages.std(correction=0)) == pytest.approx(1.0, abs=1e-6)


def test_with_a_critic_every_token_is_in_the_mean():
    grammars = {"a": json.dumps({"regex": "abc[a-z]{2}xyz=;"})}
    bench = Bench()
    bench.update(sample_scored(build_actor(), "a", grammars=grammars), {"a": 1.0})
    assert all(c.choices is None and c.has_gradient for c in bench.credited)
