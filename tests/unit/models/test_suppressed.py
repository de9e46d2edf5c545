"""Tokens that are never sampled: one distribution in the sampler, the trainer, the reference and the KL."""

import json
from dataclasses import replace

import pytest
import torch

from learner_benches import Bench
from model_builders import build_actor, sample_scored
from multitask_rl.config.run import RolloutConfig
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches

CONTROL = (44, 45, 46)
WORDS = json.dumps({"regex": "[a-f]{2,6}"})
SETTINGS = [
    SamplingParams(max_new_tokens=20),
    SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9),
    SamplingParams(max_new_tokens=9, temperature=1.3, top_k=7),
    SamplingParams(max_new_tokens=9, temperature=0.0),
    SamplingParams(max_new_tokens=9, grammar=WORDS),
]


def raised_actor():
    """Return an actor that gives the control tokens most of the probability."""
    actor = build_actor(tied=False)
    head = actor.model.get_output_embeddings()
    head.register_forward_hook(
        lambda _module, _given, out: out.index_add(-1, torch.tensor(CONTROL), lift(out))
    )
    return actor


def lift(out):
    return torch.full((*out.shape[:-1], len(CONTROL)), 4.0)


def sample(actor, settings):
    requests = [GenerationRequest(prompt_ids=[5, 6, 7], sampling=s, seeds=[1, 2, 3, 4]) for s in settings]
    groups = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=None).generate(requests)
    return [(s, g) for s, group in zip(settings, groups, strict=True) for g in group]


@pytest.mark.parametrize("layout", ["bucketed", "packed", "shared"])
def test_suppressed_tokens_are_not_sampled_and_the_trainer_computes_the_same_distribution(layout):
    actor = raised_actor()
    pairs = sample(actor, [*(replace(s, suppressed_ids=CONTROL) for s in SETTINGS), SETTINGS[0]])
    assert any(set(g.response_ids) & set(CONTROL) for s, g in pairs if not s.suppressed_ids)
    assert not any(set(g.response_ids) & set(CONTROL) for s, g in pairs if s.suppressed_ids)
    pairs = [(s, g) for s, g in pairs if s.temperature > 0]
    (batch,) = build_microbatches(
        [[5, 6, 7]] * len(pairs),
        [g.response_ids for _, g in pairs],
        max_tokens=10_000,
        layout=layout,
        pad_token_id=0,
    )
    own = [pairs[i] for i in batch.indices]
    mask = actor.grammars.token_mask([s.grammar for s, _ in own], [g.response_ids for _, g in own])
    with torch.no_grad():
        out = forward_tokens(actor.model, batch, [s for s, _ in own], mask=mask, want_logits=True)
    expected = torch.tensor([p for _, g in own for p in g.rollout_logprobs])
    assert float((out.logprobs - expected).abs().max()) < 2e-6
    probabilities = out.logits.softmax(-1)
    suppressed = torch.tensor([bool(s.suppressed_ids) for s, _ in own])[batch.sequence]
    assert float(probabilities[suppressed][:, CONTROL].sum()) == 0.0
    assert float(probabilities[~suppressed][:, CONTROL].sum(-1).min()) > 0.1
    entropy = torch.special.entr(probabilities).sum(-1)
    # the logits are those before top-k and top-p
    whole = torch.tensor([s.top_k == 0 and s.top_p == 1.0 for s, _ in own])[batch.sequence]
    assert whole.any()
    assert torch.allclose(out.entropy[whole], entropy[whole], atol=1e-5)


def suppressed(scored, ids):
    for item in scored:
        item.rollout.sampling = replace(item.rollout.sampling, suppressed_ids=ids)
        item.rollout.response_ids[:] = [min(i, CONTROL[0] - 1) for i in item.rollout.response_ids]
    return scored


def test_reference_and_exact_kl_are_of_the_same_distribution():
    bench = Bench(second="reward_conditioned")
    samples = bench.algorithms["b"].select(suppressed(sample_scored(build_actor(), "b"), CONTROL))
    runner = bench.main.runner
    found = runner.reference_logprobs(samples, "")
    kept = [i for i in range(runner.actor.model.config.vocab_size) if i not in CONTROL]
    (batch,) = runner.cut(samples)
    out = runner.forward(batch, samples, want_logits=True)
    kl = runner.exact_kl([samples[i] for i in batch.indices], out.logits)
    (gradient,) = torch.autograd.grad(kl.sum(), [runner.actor.model.get_output_embeddings().weight])
    assert bool(gradient.isfinite().all())
    own, sequence = {}, batch.sequence.tolist()
    for token, place in enumerate(sequence):
        own.setdefault(batch.indices[place], []).append(float(kl.detach()[token]))
    for index, item in enumerate(samples):
        # samples without the engine's log-probabilities are trained on at temperature 1
        temperature = item.scored.rollout.sampling.temperature if len(item.rollout_logprobs) else 1.0
        logs = []
        for model, prompt in (
            (runner.actor.model, item.prompt_ids),
            (runner.reference, item.ref_prompt_ids or item.prompt_ids),
        ):
            ids = torch.tensor([[*prompt, *item.response_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, kept]
            logs.append((logits / temperature).log_softmax(-1))
        places = torch.tensor([kept.index(i) for i in item.response_ids])
        assert torch.allclose(found[index], logs[1].gather(-1, places[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(
            torch.tensor(own[index]), (logs[0].exp() * (logs[0] - logs[1])).sum(-1), atol=1e-5
        )


@pytest.mark.parametrize("second", ["grpo", "reward_conditioned"])
def test_an_update_has_no_gradient_in_the_output_rows_of_suppressed_tokens(second):
    actor = build_actor(tied=False)
    bench = Bench(second=second, actor=actor)
    bench.tasks["a"].algorithm.config.entropy_coefficient = 0.01
    report = bench.update(suppressed(sample_scored(build_actor(), top_p=0.9), CONTROL))
    head = bench.gradient["lm_head.weight"]
    assert float(head[list(CONTROL)].abs().max()) == 0.0
    assert float(head.abs().max()) > 0.0
    assert all(bool(g.isfinite().all()) for g in bench.gradient.values())
    assert report.task_metrics["a"]["entropy"] > 0.0
