"""PopArt: the value head's unit follows the targets, what it says in the reward's unit does not move."""

import json
import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from learner_benches import Bench as RankBench
from learner_benches import RanksBench, parameters_of
from model_builders import build_actor, sample_scored
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.ppo import PPO
from multitask_rl.algorithms.running import RunningMoments
from multitask_rl.config.run import BatchConfig, OptimizerConfig, RunConfig
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner


@cache
def drawn():
    return sample_scored(build_actor(), "ab", size=4)


class Bench:
    """Two PPO tasks (``a`` with PopArt, ``b`` without) and a GRPO task on one actor."""

    def __init__(self, *, popart=True, rate=0.3, num_minibatches=1, kl=0.0, value_clip=0.2):
        self.actor = build_actor()
        config = RunConfig(
            batch=BatchConfig(num_minibatches=num_minibatches),
            optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.0),
        )
        self.algorithms = {
            "a": PPO(PPO.Config(popart=popart, popart_rate=rate, value_clip=value_clip)),
            "b": PPO(PPO.Config()),
            "c": GRPO(GRPO.Config()),
        }
        tasks = {
            n: LearnerTask(spec=TaskSpec(name=n, kl=KLSpec(coefficient=kl)), algorithm=a, kl_coefficient=kl)
            for n, a in self.algorithms.items()
        }
        self.critic = Critic()
        self.critic.build(self.actor, ["a", "b"])
        reference = build_actor(3).model if kl else None
        runner = ModelRunner(self.actor, self.critic, config, reference)
        backend = InProcess(runner, tasks, config)
        self.credit = CreditAssigner(backend, tasks, many_updates=num_minibatches > 1)
        self.learner = Learner(backend, tasks, config)

    def samples(self, scale=1.0, shift=0.0, drift=0.0):
        scored = [
            replace(s, reward=scale * (s.reward + drift) + shift) if s.rollout.task == "a" else s
            for s in drawn()
        ]
        return [
            sample
            for name, algorithm in self.algorithms.items()
            for sample in algorithm.select([s for s in scored if s.rollout.task == name])
        ]

    def step(self, **rewards):
        credited, metrics = self.credit.credit(self.samples(**rewards))
        report = self.learner.update(credited, shares={"a": 0.5, "b": 0.5}, step=0)
        return credited, {**metrics["a"], **report.task_metrics["a"]}

    def unit(self):
        moments = RunningMoments()
        moments.load_state_dict(self.algorithms["a"].state_dict()["value_moments"])
        return moments.mean, moments.std

    def values(self, task="a"):
        """What the head says of fixed states, in its own unit, float64."""
        hidden = torch.randn(64, self.actor.hidden_size, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            return self.critic.values(task, hidden).double()


def test_what_the_head_says_in_the_rewards_unit_is_preserved_over_updates() -> None:
    bench = Bench()
    bench.step()
    for update in range(20):
        mean, std = bench.unit()
        before, other = bench.values() * std + mean, bench.values("b")
        credited, metrics = bench.credit.credit(bench.samples(drift=0.3 * update))
        new_mean, new_std = bench.unit()
        assert abs(new_mean - mean) > 1e-3, "the targets drift: there is something to compensate"
        torch.testing.assert_close(bench.values() * new_std + new_mean, before, rtol=1e-6, atol=1e-6)
        assert (bench.values("b") == other).all(), "another task's head is not touched"
        assert metrics["a"]["value_scale"] == pytest.approx(new_std)
        bench.learner.update(credited, shares={"a": 0.5, "b": 0.5}, step=update)


def test_old_values_and_targets_are_in_the_unit_of_the_rescaled_head() -> None:
    bench = Bench(num_minibatches=2)
    for update in range(3):
        credited, _ = bench.step(drift=float(update))
    mean, std = bench.unit()
    own = [c for c in bench.credit.credit(bench.samples(drift=3.0))[0] if c.sample.task == "a"]
    batch_values = []
    with torch.no_grad():
        for batch in bench.learner.backend.runner.cut([c.sample for c in own]):
            out = bench.learner.backend.runner.forward(batch, [c.sample for c in own], want_hidden=True)
            batch_values.append((batch, bench.learner.backend.runner.values("a", batch, out)))
    for batch, values in batch_values:
        for position, index in enumerate(batch.indices):
            said = values[batch.sequence == position]
            torch.testing.assert_close(said, own[index].old_values, rtol=1e-4, atol=1e-5)
    assert bench.unit() != (mean, std)
    assert credited


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_reward_times_100_plus_7_leaves_every_policy_update_as_it_was(kl) -> None:
    plain, scaled = Bench(kl=kl), Bench(kl=kl)
    for update in range(6):
        drift = 0.2 * update
        _, first = plain.step(drift=drift)
        _, second = scaled.step(scale=100.0, shift=7.0, drift=drift)
        assert second["value_loss"] == pytest.approx(first["value_loss"], rel=1e-3), "in units of the targets"
        assert second["value_scale"] == pytest.approx(100.0 * first["value_scale"], rel=1e-3)
    for one, other in zip(plain.actor.model.parameters(), scaled.actor.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_state_round_trip_continues_identically() -> None:
    first = Bench(rate=0.1)
    for update in range(3):
        first.step(drift=float(update))
    second = PPO(PPO.Config(popart=True, popart_rate=0.1))
    second.load_state_dict(json.loads(json.dumps(first.algorithms["a"].state_dict())))
    assert second.state_dict() == first.algorithms["a"].state_dict()


def test_turned_off_by_a_resume_the_head_goes_back_to_the_unit_of_the_reward() -> None:
    bench = Bench()
    for update in range(4):
        bench.step(scale=5.0, drift=float(update))
    mean, std = bench.unit()
    before = bench.values() * std + mean
    resumed = PPO(PPO.Config(popart=False))
    resumed.load_state_dict(json.loads(json.dumps(bench.algorithms["a"].state_dict())))
    bench.algorithms["a"] = resumed
    task = LearnerTask(spec=TaskSpec(name="a"), algorithm=resumed, kl_coefficient=0.0)
    credit = CreditAssigner(bench.learner.backend, {"a": task}, many_updates=False)
    samples = [s for s in bench.samples(scale=5.0, drift=4.0) if s.task == "a"]
    _, metrics = credit.credit(samples)
    unit_mean, unit_std = metrics["a"]["reward_running_mean"], metrics["a"]["reward_scale"]
    assert abs(unit_std - std) > 0.1, "the units differ: there is something to compensate"
    head = bench.values()
    torch.testing.assert_close(head * unit_std + unit_mean, before, rtol=1e-6, atol=1e-6)
    credit.credit(samples)
    assert (bench.values() == head).all(), "once is enough"


def test_off_it_rescales_nothing() -> None:
    bench = Bench(popart=False)
    heads = {k: v.clone() for k, v in bench.critic.state_dict().items()}
    bench.credit.credit(bench.samples(drift=3.0))
    assert all((heads[k] == v).all() for k, v in bench.critic.state_dict().items())


def test_equal_rewards_and_an_empty_batch_are_no_trouble() -> None:
    bench = Bench()
    same = [replace(s, reward=0.5) for s in drawn() if s.rollout.task == "a"]
    credited, _ = bench.credit.credit(bench.algorithms["a"].select(same))
    assert all((c.advantages == 0).all() for c in credited)
    assert all(torch.isfinite(c.returns).all() for c in credited)
    with pytest.raises(ConfigError, match=r"popart_rate must be in \(0, 1\], got 0"):
        PPO.Config(popart_rate=0.0)


@pytest.mark.parametrize("popart", [True, False])
def test_the_value_clip_acts_alike_whatever_the_rewards_scale(popart) -> None:
    plain, scaled = (Bench(popart=popart, num_minibatches=2, value_clip=1e-3) for _ in range(2))
    for update in range(2):
        _, first = plain.step(drift=0.2 * update)
        _, second = scaled.step(scale=100.0, shift=7.0, drift=0.2 * update)
    assert first["value_clip_fraction"] > 0.1
    assert second["value_clip_fraction"] == first["value_clip_fraction"]
    assert second["value_loss"] == pytest.approx(first["value_loss"], rel=1e-3)


def test_a_head_that_is_rescaled_many_times_does_not_drift() -> None:
    bench = Bench()
    with torch.no_grad():
        for parameter in bench.critic.heads.parameters():
            parameter.fill_(0.3)
    start, moments, stream = bench.values(), RunningMoments(0.01), random.Random(0)
    moments.update(0.0, 1.0)
    for step in range(5_000):
        mean, std = moments.mean, moments.std
        moments.update(math.sin(step / 200) + stream.gauss(), math.exp(stream.gauss()))
        bench.critic.rescale("a", std / moments.std, (mean - moments.mean) / moments.std)
    said = bench.values() * moments.std + moments.mean
    torch.testing.assert_close(said, start, rtol=1e-4, atol=1e-4)


def test_a_rank_that_owns_the_head_follows_its_rescaling():
    scored = sample_scored(build_actor())
    settings = {
        "rate": 1e-3,
        "moments": "host",
    }  # float32 masters, which see by a version that a weight changed
    alone, group = RankBench(**settings), RanksBench(num_ranks=2, **settings)
    try:
        for bench in (alone, group):
            config = bench.algorithms["a"].config
            config.popart, config.popart_rate = True, 0.3
        for step in range(2):
            own = [replace(s, reward=(s.reward or 0.0) * 10**step + step) for s in scored]
            alone.update(own)
            group.update(own)
        expected, found = parameters_of(alone), parameters_of(group)
        heads = [name for name in expected if "heads" in name]
        assert heads
        for name in heads:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    finally:
        group.backend.close()


@pytest.mark.parametrize(("popart", "scale"), [(True, 0.0), (False, 1.0)])
def test_other_rewards_at_a_resume_do_not_rescale_the_head(popart: bool, scale: float) -> None:
    """Not even if the first rewards are all equal, or ``popart`` is turned off at once."""
    bench = Bench()
    for update in range(4):
        bench.step(scale=500.0, drift=float(update))
    before = bench.values()
    resumed = PPO(PPO.Config(popart=popart))
    resumed.load_state_dict(json.loads(json.dumps(bench.algorithms["a"].state_dict())))
    resumed.forget({"reward"})
    bench.algorithms["a"] = resumed
    task = LearnerTask(spec=TaskSpec(name="a"), algorithm=resumed, kl_coefficient=0.0)
    credit = CreditAssigner(bench.learner.backend, {"a": task}, many_updates=False)
    samples = [s for s in bench.samples(scale=1.0, drift=4.0) if s.task == "a"]
    if not scale:
        samples = [replace(s, reward=0.0) for s in samples]
    credit.credit(samples)
    torch.testing.assert_close(bench.values(), before, rtol=1e-6, atol=1e-6)
