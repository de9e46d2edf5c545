"""Gradients of ``distill`` and ``sft``, against a loop over samples and beside a task with rewards."""

from dataclasses import replace

import pytest
import torch

from learner_benches import Bench, RanksBench, assert_same_numbers, relative_difference
from model_builders import build_actor, build_model, sample_scored
from multitask_rl.algorithms.base import CreditBatch, TokenBatch
from multitask_rl.algorithms.distill import Distill
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.kl import exact_kl
from multitask_rl.config.task import KLSpec


def all_logprobs(model, scored, temperature):
    """Return the log-probabilities of the vocabulary at every response token of a sample: [T, V]."""
    rollout = scored.rollout
    ids = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]])
    start = len(rollout.prompt.prompt_ids) - 1
    return (model(ids).logits[0, start:-1].float() / temperature).log_softmax(-1)


def logprobs(model, scored, temperature):
    """Return the log-probability of every response token of a sample: [T]."""
    ids = torch.tensor(scored.rollout.response_ids).unsqueeze(-1)
    return all_logprobs(model, scored, temperature).gather(-1, ids).squeeze(-1)


def naive_gradient(kind, scored):
    """Return the gradient of the mean loss over all tokens, sample by sample."""
    actor, teacher = build_actor().model, build_model(seed=5)
    total = sum(len(s.rollout.response_ids) for s in scored)
    for s in scored:
        own = logprobs(actor, s, 1.0 if kind == "sft" else 0.7)
        loss = -own
        if kind == "sampled":
            loss = loss * (logprobs(teacher, s, 0.7) - own).detach()
        if kind == "distill":
            p, q = all_logprobs(actor, s, 0.7), all_logprobs(teacher, s, 0.7).detach()
            loss = (p.exp() * (p - q)).sum(-1)
        (loss.sum() / total).backward()
    return {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


def of_actor(bench):
    return {n: g for n, g in bench.gradient.items() if not n.startswith(("heads", "trunk"))}


@pytest.mark.parametrize("kind", ["distill", "sampled", "sft"])
@pytest.mark.parametrize("layout", ["shared", "bucketed", "packed"])
def test_the_gradient_is_that_of_a_naive_loop(kind, layout):
    scored = sample_scored(build_actor(), "b")
    bench = Bench(layout=layout, second=kind, tokens=200)
    bench.update(scored, shares={"b": 1.0})
    assert relative_difference(of_actor(bench), naive_gradient(kind, scored)) < 1e-5


def test_the_exact_divergence_is_that_of_whole_distributions_where_sampling_cuts_them():
    scored = sample_scored(build_actor(), "b", top_p=0.6)
    bench = Bench(layout="packed", second="distill")
    bench.update(scored, shares={"b": 1.0})
    assert relative_difference(of_actor(bench), naive_gradient("distill", scored)) < 1e-5


def test_an_algorithm_with_an_exact_kl_has_it_in_the_loss_wherever_the_task_places_it():
    class ExactGRPO(GRPO):
        wants_exact_kl = True

    scored = [
        replace(s, reward=0.0) for s in sample_scored(build_actor(), "b")
    ]  # the KL alone has a gradient
    bench = Bench(kl=KLSpec(coefficient=0.1))
    bench.algorithms["b"] = bench.tasks["b"].algorithm = ExactGRPO(ExactGRPO.Config())
    bench.update(scored, shares={"b": 1.0})
    actor, reference = build_actor().model, build_model(seed=3)
    for s in scored:
        p, q = (all_logprobs(model, s, 0.7) for model in (actor, reference))
        (
            0.1 * (p.exp() * (p - q.detach())).sum() / sum(len(s.rollout.response_ids) for s in scored)
        ).backward()
    expected = {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}
    assert relative_difference(of_actor(bench), expected) < 1e-5


def test_tokens_that_a_grammar_forced_are_no_part_of_the_distance_from_a_teacher():
    batch = CreditBatch(
        rewards=torch.zeros(1),
        groups=torch.zeros(1, dtype=torch.long),
        lengths=torch.tensor([3]),
        choices=torch.tensor([True, False, False]),
        old_logprobs=torch.tensor([-1.0, 0.0, 0.0]),
        ref_logprobs=torch.tensor([-3.0, 0.0, 0.0]),
    )
    assert Distill(Distill.Config(exact=False)).credit(batch).metrics["teacher_kl"] == 2.0


@pytest.mark.parametrize("kind", ["distill", "sampled", "sft"])
def test_one_step_mixes_them_with_a_task_that_has_rewards(kind):
    scored = sample_scored(build_actor())
    mixed = Bench(layout="shared", second=kind)
    mixed.update(scored, shares={"a": 0.25, "b": 0.75})
    alone = Bench(layout="shared", second=kind)
    alone.update([s for s in scored if s.rollout.task == "a"], shares={"a": 1.0})
    naive = naive_gradient(kind, [s for s in scored if s.rollout.task == "b"])
    expected = {n: 0.25 * g + 0.75 * naive.get(n, 0.0) for n, g in of_actor(alone).items()}
    assert relative_difference(of_actor(mixed), expected) < 1e-5


def test_two_ranks_learn_what_one_does():
    scored = sample_scored(build_actor())
    one, two = Bench(second="sampled"), RanksBench(second="sampled", num_ranks=2)
    try:
        expected, found = one.update(scored, compare=True), two.update(scored, compare=True)
        assert_same_numbers(found, expected)
        for task, other in ("ab", "ba"):
            own, wanted = found.task_metrics[task], expected.task_metrics[task]
            assert own["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
            assert own[f"cosine/{other}"] == pytest.approx(wanted[f"cosine/{other}"], abs=1e-4)
        for name, parameter in one.actor.model.named_parameters():
            torch.testing.assert_close(
                dict(two.actor.model.named_parameters())[name], parameter, rtol=1e-3, atol=1e-5
            )
    finally:
        two.backend.close()


def test_the_expected_gradient_is_that_of_the_exact_divergence():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, requires_grad=True)
    teacher = torch.randn(9, generator=generator)
    own, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    algorithm = Distill(Distill.Config(exact=False))
    batch = CreditBatch(
        rewards=torch.zeros(9),
        groups=torch.arange(9),
        lengths=torch.ones(9, dtype=torch.int64),
        old_logprobs=own.detach(),
        ref_logprobs=other,
    )
    advantages = algorithm.credit(batch).advantages
    tokens = TokenBatch(
        logprobs=own,
        old_logprobs=own.detach(),
        advantages=advantages,
        sequence=torch.arange(9),
        num_sequences=9,
    )
    sampled = (own.exp().detach() * algorithm.loss(tokens).loss).sum()
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact_kl(own[None], other[None]).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="needs old_logprobs"):
        algorithm.credit(CreditBatch(rewards=batch.rewards, groups=batch.groups, lengths=batch.lengths))
    with pytest.raises(ValueError, match="needs exact_kl"):
        Distill(Distill.Config()).loss(tokens)
