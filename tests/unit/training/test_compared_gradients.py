"""Norms and cosines of the tasks' gradients, against a loop over samples in float64."""

import copy
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn

from learner_benches import Bench, assert_same_weights
from model_builders import build_actor, sample_scored
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.models.actor import make_actor
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.sketch import SIZE, compare_gradients, sketch_gradient


def naive_gradients(model, credited, shares):
    """Return the gradient of each task's part of the loss, all weights in one row, sample by sample."""
    found = {}
    for task, share in shares.items():
        own = [c for c in credited if c.sample.task == task]
        total = torch.zeros((), dtype=torch.float64)
        for c in own:
            sample = c.sample
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            temperature = 1.0 if task == "b" else sample.scored.rollout.sampling.temperature
            logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature
            chosen = torch.tensor(sample.response_ids).unsqueeze(-1)
            logprobs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
            total = total - (c.advantages.double() * logprobs).sum()
        loss = share * total / sum(len(c.sample.response_ids) for c in own)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        parts = [
            torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), grads, strict=True)
        ]
        found[task] = torch.cat([part.reshape(-1) for part in parts])
    return found


@pytest.mark.parametrize("layout", ["shared", "bucketed", "packed"])
def test_they_are_those_of_a_naive_loop(layout):
    shares = {"a": 0.25, "b": 0.75}
    scored = sample_scored(build_actor())
    bench = Bench(layout=layout, tokens=200, second="sft")
    bench.algorithms["a"] = GRPO(GRPO.Config())
    bench.tasks["a"] = LearnerTask(spec=TaskSpec(name="a"), algorithm=bench.algorithms["a"])
    before = copy.deepcopy(bench.actor.model).double()
    found = bench.update(scored, shares, compare=True).task_metrics
    naive = naive_gradients(before, bench.credited, shares)
    assert len(naive["a"]) <= SIZE
    cosine = float(torch.nn.functional.cosine_similarity(naive["a"], naive["b"], dim=0))
    assert abs(cosine) > 0.01
    for task, other in ("ab", "ba"):
        assert found[task]["grad_norm"] == pytest.approx(float(naive[task].norm()), rel=1e-5)
        assert found[task][f"cosine/{other}"] == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_update_is_the_same_and_the_parts_are_those_of_each_task_alone(rank):
    def bench(**batch):
        if rank:
            pytest.importorskip("peft")
        actor = build_actor()
        if rank:
            config = ModelConfig(lora=LoraConfig(rank=rank))
            actor = make_actor(actor.model, actor.tokenizer, config)
        return Bench(layout="shared", actor=actor, **batch)

    scored = sample_scored(build_actor())
    compared, plain, shares = bench(num_minibatches=2), bench(num_minibatches=2), {"a": 0.3, "b": 0.7}
    compared.update(scored, shares, compare=True)
    plain.update(scored, shares)
    assert_same_weights(compared, plain)
    whole, alone = bench(), {}
    found = whole.update(scored, shares, compare=True).task_metrics
    for task in "ab":
        one = bench()
        one.update([s for s in scored if s.rollout.task == task], {task: shares[task]})
        named = [n for n, p in one.actor.model.named_parameters() if p.requires_grad]
        zeros = {n: torch.zeros_like(p) for n, p in one.actor.model.named_parameters()}
        alone[task] = torch.cat([one.gradient.get(n, zeros[n]).reshape(-1) for n in named]).double()
        assert found[task]["grad_norm"] == pytest.approx(float(alone[task].norm()), rel=1e-4)
    cosine = float(nn.functional.cosine_similarity(alone["a"], alone["b"], dim=0))
    assert found["a"]["cosine/b"] == pytest.approx(cosine, abs=1e-4)


def test_minibatches_before_the_first_update_do_not_end_the_comparison():
    """Here nearly all minibatches hold groups of equal rewards alone: they make no update."""
    bench = Bench(layout="shared", num_minibatches=12)
    bench.algorithms["a"] = GRPO(GRPO.Config())
    bench.tasks["a"] = LearnerTask(spec=TaskSpec(name="a"), algorithm=bench.algorithms["a"])
    scored = [
        replace(s, reward=float(s.rollout.prompt.draw == s.rollout.sample == 0))
        for s in sample_scored(bench.actor, "a")
    ]
    report = bench.update(scored, {"a": 1.0}, compare=True)
    assert 0 < report.metrics["updates"] < 12
    assert report.task_metrics["a"]["grad_norm"] > 0.0


def test_a_task_without_a_gradient_has_no_cosine():
    found = compare_gradients({"a": torch.ones(3), "b": torch.zeros(3), "c": -2 * torch.ones(3)})
    assert found["b"] == {"grad_norm": 0.0}
    assert found["a"].keys() == {"grad_norm", "cosine/c"}
    assert found["a"]["cosine/c"] == pytest.approx(-1.0)


def test_large_gradients_are_compared_within_their_stated_error():
    torch.manual_seed(0)
    shapes, shared = [(700, 576), (576,), (90, 576)], {}
    sketches, whole = {}, {}
    for task in "abc":
        weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for number, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
            # columns of very different size, and a part that all tasks share
            same = shared.setdefault(number, torch.randn(shape) * torch.rand(shape[-1]) ** 8)
            weight.grad = 0.5 * same + torch.randn(shape) * torch.rand(shape[-1]) ** 8
        sketches[task] = sketch_gradient(weights)
        whole[task] = torch.cat([weight.grad.reshape(-1) for weight in weights])
    found = compare_gradients(sketches)
    for one, other in combinations("abc", 2):
        exact = float(nn.functional.cosine_similarity(whole[one], whole[other], dim=0))
        assert found[one][f"cosine/{other}"] == pytest.approx(exact, abs=0.025)
        assert found[one]["grad_norm"] == pytest.approx(float(whole[one].norm()), rel=0.02)
