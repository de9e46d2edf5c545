import math
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch

from learner_benches import Bench, moments, parameters_of, relative_difference
from model_builders import build_actor, sample_scored
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.config.run import CriticConfig, OptimizerConfig, RunConfig
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.errors import PluginError, TrainingError, with_notes
from multitask_rl.step.tokens import advantages_of, sampled_as
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.optimizer import ActorCriticOptimizer, schedule_factor
from multitask_rl.training.runner import ModelRunner

CUTS = [
    ("bucketed", 64),
    ("bucketed", 1),
    ("packed", 100_000),
    ("packed", 200),
    ("shared", 100_000),
    ("shared", 150),
    ("shared", 1),
    ("auto", 16_384),
]


@cache
def drawn(tasks, groups, top_p):
    return sample_scored(build_actor(), tasks, groups=groups, top_p=top_p)


def sampled(tasks, *, groups=4, top_p=1.0):
    """Return samples of its own for a test; they are drawn once."""
    return deepcopy(drawn(tasks, groups, top_p))


@pytest.mark.parametrize("second", ["grpo", "reward_conditioned"])
def test_the_gradient_is_the_same_however_the_samples_are_cut(second):
    scored = sampled("ab", groups=5, top_p=0.9)
    whole = Bench(second=second)
    report = whole.update(scored)
    for layout, tokens in CUTS:
        cut = Bench(second=second, layout=layout, tokens=tokens)
        cut_report = cut.update(scored)
        assert relative_difference(cut.gradient, whole.gradient) < 1e-5, (layout, tokens)
        for task in "ab":
            assert cut_report.task_metrics[task]["loss"] == pytest.approx(
                report.task_metrics[task]["loss"], rel=1e-5, abs=1e-6
            )


def test_engine_and_trainer_agree_on_the_sampled_tokens_and_the_first_update_clips_nothing():
    report = Bench().update(sampled("ab", groups=5, top_p=0.9))
    for task in "ab":
        assert report.task_metrics[task]["mismatch_max"] < 1e-4
    assert report.task_metrics["b"]["ratio"] == 1.0
    assert report.task_metrics["b"]["clip_fraction"] == 0.0


def test_the_last_digits_of_the_engine_do_not_reach_the_gradient():
    """They depend on which rows an engine computes together: on other replicas, or after one was lost."""

    def gradient(noise):
        scored = sampled("ab", top_p=0.9)
        for number, s in enumerate(scored):
            said = s.rollout.rollout_logprobs
            said[:] = [value + noise * (-1) ** (number + place) for place, value in enumerate(said)]
        bench = Bench()
        report = bench.update(scored)
        return bench.gradient, report.task_metrics["b"]["mismatch_max"]

    exact, mismatch = gradient(0.0)
    noisy, same = gradient(4e-6)
    assert mismatch == same == 0.0
    assert all(torch.equal(exact[name], noisy[name]) for name in exact)
    other, far = gradient(1e-3)
    assert far == pytest.approx(1e-3, rel=0.01)
    assert not all(torch.equal(exact[name], other[name]) for name in exact)


def test_groups_of_equal_rewards_are_not_computed_and_change_nothing_but_the_denominator():
    scored = sampled("b")
    for s in scored[:8]:
        s.reward = 1.0
    skipping, computing = Bench(), Bench()
    skipping.update(scored, {"b": 1.0})
    for task in computing.tasks.values():
        task.algorithm.config.entropy_coefficient = 1e-30
    computing.update(scored, {"b": 1.0})
    assert relative_difference(skipping.gradient, computing.gradient) < 1e-5


def test_masked_responses_give_their_group_a_baseline_and_are_not_trained_on(caplog):
    scored = sampled("b")
    for number, s in enumerate(scored):
        s.rollout.finish_reason = "length" if number % 3 == 0 else "stop"
    plain, masked = Bench(), Bench()
    masked.tasks["b"].algorithm.config.mask_truncated = True
    plain.update(scored, {"b": 1.0})
    masked.update(scored, {"b": 1.0})
    for own, other in zip(plain.credited, masked.credited, strict=True):
        assert torch.equal(own.advantages, other.advantages)
        assert other.num_choices == (0 if own.sample.scored.rollout.is_truncated else own.num_choices)
    shown = advantages_of(masked.credited)
    assert shown.keys() == {sampled_as(s.rollout) for s in scored if not s.rollout.is_truncated}
    assert relative_difference(masked.gradient, plain.gradient) > 0.1
    assert "mask_truncated" not in caplog.text
    for s in scored:
        s.rollout.finish_reason = "length"
    for _ in range(2):
        assert masked.update(scored, {"b": 1.0}).metrics["updates"] == 0.0
    assert caplog.text.count("mask_truncated leaves them") == 1, "once"


def test_a_minibatch_without_a_gradient_is_no_update():
    scored = sampled("b", groups=2)
    half = len(scored) // 2
    for s in scored[:half]:
        s.reward = 1.0
    assert Bench(num_minibatches=len(scored)).update(scored, {"b": 1.0}).metrics["updates"] == half
    assert Bench().update(scored[:half], {"b": 1.0}).metrics["updates"] == 0


def test_an_update_whose_gradient_is_zero_moves_nothing_though_others_gave_momentum():
    bench = Bench()
    bench.update(sampled("ab"))
    before = {name: p.detach().clone() for name, p in parameters_of(bench).items()}
    state = {name: value.clone() for name, value in moments(bench).items()}
    result = bench.backend.step([(c, 0.0) for c in bench.credited], 1.0)
    assert result.norms == {"grad_norm": 0.0, "critic_grad_norm": 0.0}
    assert all(torch.equal(p, before[name]) for name, p in parameters_of(bench).items())
    assert all(torch.equal(value, state[name]) for name, value in moments(bench).items())


def test_a_minibatch_whose_advantages_are_rounding_is_no_update():
    scored = sampled("b", groups=2)[:3]
    assert len({s.rollout.group_id for s in scored}) == 1
    for s, reward in zip(scored, (0.1, 0.2, 0.3), strict=True):
        s.reward = reward
    assert Bench(num_minibatches=3).update(scored, {"b": 1.0}).metrics["updates"] == 2


def test_shares_and_loss_weight_scale_a_tasks_gradient_and_no_other():
    scored = sampled("b")
    half, full = Bench(), Bench()
    half.update(scored, {"b": 0.5})
    full.tasks["b"].spec.loss_weight = 2.0
    full.update(scored, {"b": 0.25})
    assert relative_difference(half.gradient, full.gradient) < 1e-6


def test_a_value_head_is_left_alone_by_steps_without_its_task():
    bench = Bench()
    before = [p.clone() for p in bench.critic.heads.parameters()]
    bench.update(sampled("b"), {"b": 1.0})
    assert all(torch.equal(x, y) for x, y in zip(before, bench.critic.heads.parameters(), strict=True))


def test_a_separate_trunk_keeps_the_value_loss_out_of_the_actor():
    scored = sampled("a")
    for s in scored:
        s.reward = 1.0
    bench = Bench(trunk="separate")
    bench.tasks["a"].spec.kl = KLSpec()
    bench.tasks["a"].kl_coefficient = 0.0
    report = bench.update(scored, {"a": 1.0})
    assert report.metrics["critic_grad_norm"] > 0
    assert any(n.startswith("trunk.") for n in bench.gradient)


@pytest.mark.parametrize(
    ("aggregation", "bonus"), [("token", 0.0), ("sequence", 0.0), ("constant", 0.0), ("token", 0.1)]
)
def test_the_loss_is_the_slow_sum_over_samples(aggregation, bonus):
    scored = sampled("b")
    bench = Bench(tokens=50)
    bench.tasks["b"].algorithm.config.aggregation = aggregation
    bench.tasks["b"].algorithm.config.entropy_coefficient = bonus
    bench.update(scored, {"b": 1.0})

    actor = build_actor()
    algorithm = GRPO(GRPO.Config())
    runner = ModelRunner(actor, Critic(), RunConfig())
    tasks = {"b": LearnerTask(spec=TaskSpec(name="b"), algorithm=algorithm)}
    credited, _ = CreditAssigner(InProcess(runner, tasks, RunConfig()), tasks, many_updates=False).credit(
        algorithm.select(scored)
    )
    total = torch.zeros(())
    num_tokens = sum(len(c.sample.response_ids) for c in credited)
    for c in credited:
        ids = torch.tensor([[*c.sample.prompt_ids, *c.sample.response_ids]])
        sampling = c.sample.scored.rollout.sampling
        logits = actor.model(ids).logits[0, len(c.sample.prompt_ids) - 1 : -1] / sampling.temperature
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(c.sample.response_ids)[:, None])[:, 0]
        denominator = {
            "token": num_tokens,
            "sequence": len(credited) * len(c.sample.response_ids),
            "constant": len(credited) * sampling.max_new_tokens,
        }[aggregation]
        total = total - (torch.exp(logprobs - logprobs.detach()) * c.advantages).sum() / denominator
        total = total - bonus * torch.distributions.Categorical(logits=logits).entropy().sum() / denominator
    total.backward()
    slow = {n: p.grad for n, p in actor.model.named_parameters() if p.grad is not None}
    assert relative_difference(bench.gradient, slow) < 1e-5


def test_minibatches_and_epochs_see_every_sample_and_move_the_ratio():
    bench = Bench(num_minibatches=2, num_epochs=2)
    report = bench.update(sampled("b"), {"b": 1.0})
    assert report.task_metrics["b"]["ratio"] != 1.0


@pytest.mark.parametrize("few", [1, 3])
def test_a_task_with_few_samples_keeps_its_share_over_the_minibatches(few):
    scored = sampled("ab")
    own = {task: [s for s in scored if s.rollout.task == task] for task in "ab"}
    bench = Bench(num_minibatches=4, num_epochs=2)
    step_of, steps = bench.main.step, []

    def record(active, factor, compared=()):
        steps.append([(c.sample.task, weight * len(c.sample.response_ids)) for c, weight in active])
        return step_of(active, factor)

    bench.tasks["b"].algorithm.config.entropy_coefficient = 1e-30  # no sample is left out for its credit
    bench.main.step = record
    bench.update([*own["a"][:few], *own["b"]], {"a": 0.25, "b": 0.75})
    assert len(steps) == 8
    for task, share in (("a", 0.25), ("b", 0.75)):
        assert sum(w for step in steps for name, w in step if name == task) / 8 == pytest.approx(share)
    assert {len(step) for step in steps} <= {4, 5}, "minibatches are of about one size"


def test_gradients_that_are_not_finite_are_not_applied_and_stop_the_run_in_the_end():
    scored = sampled("b")
    bench = Bench()
    weights = [p.clone() for p in bench.actor.model.parameters()]
    report = bench.update(scored, {"b": float("nan")})
    assert report.metrics["skipped_updates"] == 1
    assert all(torch.equal(x, y) for x, y in zip(weights, bench.actor.model.parameters(), strict=True))
    bench.update(scored, {"b": float("nan")})
    with pytest.raises(TrainingError, match="not finite 3 updates in a row"):
        bench.update(scored, {"b": float("nan")})


class Misshapen(GRPO):
    """GRPO of which the method called ``wrong`` returns what ``change`` makes of its result."""

    wrong, change = "", staticmethod(lambda result: result)

    def credit(self, batch):
        result = super().credit(batch)
        return self.change(result) if self.wrong == "credit" else result

    def loss(self, batch):
        result = super().loss(batch)
        return self.change(result) if self.wrong == "loss" else result


@pytest.mark.parametrize(
    ("wrong", "change", "told"),
    [
        ("credit", lambda c: None, "returned NoneType, expected Credit"),
        (
            "credit",
            lambda c: replace(c, advantages=c.advantages[:-1]),
            r"returned advantages of shape \(\d+,\)",
        ),
        ("credit", lambda c: replace(c, advantages=c.advantages.tolist()), "returned list as advantages"),
        (
            "credit",
            lambda c: replace(c, returns=c.advantages[:, None]),
            r"returned returns of shape \(\d+, 1\)",
        ),
        ("loss", lambda o: o.loss, "returned Tensor, expected LossOutput"),
        ("loss", lambda o: replace(o, loss=o.loss.mean()), r"returned loss of shape \(\)"),
        ("loss", lambda o: replace(o, loss=o.loss.detach()), r"returned a loss without a gradient"),
    ],
)
def test_what_an_algorithm_returns_that_is_no_loss_or_credit_is_an_error_that_names_it(wrong, change, told):
    """A scalar loss would be counted once for each token, one without a gradient not at all, in silence."""
    bench = Bench()
    algorithm = Misshapen(GRPO.Config())
    algorithm.wrong, algorithm.change = wrong, change
    bench.tasks["b"].algorithm = algorithm
    with pytest.raises(PluginError, match=rf"task 'b': {wrong}\(\) of grpo {told}"):
        bench.update(sampled("b"), {"b": 1.0})


@pytest.mark.parametrize(
    ("advantages", "told"),
    [
        (lambda batch: None, "returned None"),
        (lambda batch: batch.rewards.tolist(), r"returned \[.*\]"),
        (lambda batch: batch.rewards[:1], r"returned a tensor of shape \(1,\)"),
    ],
)
def test_advantages_of_a_subclass_of_grpo_that_are_none_are_an_error_that_names_the_task(advantages, told):
    bench = Bench()
    algorithm = GRPO(GRPO.Config())
    algorithm.reward_advantages = advantages
    bench.tasks["b"].algorithm = algorithm
    message = rf"task 'b': credit\(\) of grpo: reward_advantages\(\) {told}, expected a tensor \[\d+\]: one"
    with pytest.raises(PluginError, match=message):
        bench.update(sampled("b"), {"b": 1.0})


def test_an_error_of_an_algorithm_names_its_task():
    bench = Bench()
    algorithm = GRPO(GRPO.Config())
    algorithm.reward_advantages = lambda batch: batch.rewards / batch.rewrads
    bench.tasks["b"].algorithm = algorithm
    with pytest.raises(AttributeError) as caught:
        bench.update(sampled("b"), {"b": 1.0})
    assert with_notes(caught.value).endswith("'rewrads', in task 'b': credit() of grpo")


def test_the_task_whose_loss_is_not_finite_is_named():
    bench = Bench()
    algorithm = Misshapen(GRPO.Config())
    algorithm.wrong, algorithm.change = "credit", lambda c: replace(c, advantages=c.advantages * math.nan)
    bench.tasks["b"].algorithm = algorithm
    scored = sampled("ab")
    for _ in range(2):
        bench.update(scored)
    with pytest.raises(TrainingError, match="the loss is NaN or infinite of 'b'; lower"):
        bench.update(scored)


def test_a_zero_length_response_is_left_out_of_the_loss_only():
    scored = sampled("b", groups=2)
    scored[0].rollout.response_ids, scored[0].rollout.rollout_logprobs = [], []
    bench = Bench()
    report = bench.update(scored, {"b": 1.0})
    assert report.metrics["skipped_updates"] == 0
    assert report.metrics["grad_norm"] > 0


def test_the_schedule_counts_training_steps_however_many_updates_they_make():
    config = OptimizerConfig(warmup_steps=4, schedule="linear")
    factors = [schedule_factor(config, step, 12) for step in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1.0, *(1.0 - k / 8 for k in range(8))])
    bench, rates = Bench(num_epochs=2, num_minibatches=2), []
    bench.update(sampled("b", groups=2), {"b": 1.0})
    step = bench.main.optimizer.step
    bench.main.optimizer.step = lambda factor: rates.append(factor) or step(factor)
    bench.learner.update(bench.credited, shares={"b": 1.0}, step=1, learning_rate_factor=0.25)
    assert rates == [0.25] * 4


@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_the_first_step_of_adam_divides_by_the_gradient_and_epsilon(eps):
    weights = torch.nn.Parameter(torch.zeros(3))
    weights.grad = torch.tensor([0.5, -1.5, 0.0])
    config = OptimizerConfig(learning_rate=0.1, adam_eps=eps, weight_decay=0.0, max_grad_norm=100.0)
    ActorCriticOptimizer([weights], [], config, CriticConfig()).step(1.0)
    expected = [-0.1 * g / (abs(g) + eps) for g in (0.5, -1.5, 0.0)]
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
