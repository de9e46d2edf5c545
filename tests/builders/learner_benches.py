"""Learners over two tasks whose updates are compared: alone, of ranks, of parts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forked import ForkedRank
from model_builders import build_actor, build_model
from multitask_rl.algorithms.distill import Distill
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.ppo import PPO
from multitask_rl.algorithms.reward_conditioned import RewardConditioned
from multitask_rl.algorithms.sft import SFT
from multitask_rl.config.run import (
    BatchConfig,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.errors import TrainingError
from multitask_rl.models.actor import checkpoint_layers
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest, Watch
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner

CPU = torch.device("cpu")


class Bench:
    """A learner over two tasks, with the gradient of its next update kept."""

    def __init__(
        self,
        *,
        layout="bucketed",
        tokens=100_000,
        second="grpo",
        kl=None,
        trunk="actor",
        actor=None,
        rate=1e-3,
        weights="actor",
        training=None,
        moments="float32",
        engine="hf",
        autocast=False,
        actor_devices="cpu",
        **batch,
    ):
        self.actor = actor or build_actor()
        self.config = RunConfig(
            device_map={"actor": actor_devices},
            rollout=RolloutConfig(engine=engine, engine_config={"weights": weights}),
            model=ModelConfig(autocast=autocast),
            batch=BatchConfig(layout=layout, tokens_per_microbatch=tokens, **batch),
            optimizer=OptimizerConfig(learning_rate=rate, max_grad_norm=0.0, moments=moments),
            training=training or TrainingConfig(),
        )
        specs = {"a": TaskSpec(name="a", kl=KLSpec(coefficient=0.1)), "b": TaskSpec(name="b")}
        self.algorithms = {"a": PPO(PPO.Config()), "b": GRPO(GRPO.Config())}
        if second == "reward_conditioned":
            self.algorithms["b"] = RewardConditioned(RewardConditioned.Config())
            self.algorithms["b"].bind([40, 41, 42, 43, 44])
            specs["b"].kl = KLSpec(coefficient=0.1)
        teachers = {}
        if second in ("distill", "sampled"):
            self.algorithms["b"] = Distill(Distill.Config(exact=second == "distill"))
            teachers = {"b": build_model(seed=5)}
        if second == "sft":
            self.algorithms["b"] = SFT(SFT.Config())
        if kl is not None:
            specs["b"].kl = kl
        critic = Critic(CriticConfig(trunk=trunk))
        critic.build(self.actor, ["a"])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in critic.heads.parameters():
                parameter.normal_(0, 0.1, generator=generator)
        self.critic = critic
        self.tasks = {
            n: LearnerTask(spec=s, algorithm=self.algorithms[n], kl_coefficient=s.kl.coefficient)
            for n, s in specs.items()
        }
        reference = None if self.actor.config.lora.rank else build_model(seed=3)
        runner = ModelRunner(self.actor, critic, self.config, reference, teachers=teachers)
        self.main = InProcess(runner, self.tasks, self.config)
        self.use(self.main)
        self.gradient: dict[str, torch.Tensor] = {}
        self.credited = []
        step = self.main.optimizer.step

        def keep(factor):
            named = [*self.actor.model.named_parameters(), *critic.named_parameters()]
            self.gradient = {n: p.grad.clone() for n, p in named if p.grad is not None}
            return step(factor)

        self.main.optimizer.step = keep

    def use(self, backend):
        many = self.config.batch.num_minibatches * self.config.batch.num_epochs > 1
        self.backend = backend
        self.credit = CreditAssigner(backend, self.tasks, many_updates=many)
        self.learner = Learner(backend, self.tasks, self.config)

    def update(self, scored, shares=None, **options):
        samples = [
            s
            for n, a in self.algorithms.items()
            for s in a.select([x for x in scored if x.rollout.task == n])
        ]
        self.credited, _ = self.credit.credit(samples)
        shares = shares or {"a": 0.5, "b": 0.5}
        return self.learner.update(self.credited, shares=shares, step=0, **options)


def relative_difference(one, other):
    assert one.keys() == other.keys()
    norm = sum(g.norm() ** 2 for g in other.values()) ** 0.5
    return float(sum((one[k] - other[k]).norm() ** 2 for k in one) ** 0.5 / norm)


class RanksBench(Bench):
    """The same with other ranks; ``helpers`` are their processes."""

    def __init__(
        self,
        *,
        num_ranks,
        context=1,
        sharded=False,
        tensor=1,
        parts=0,
        checkpointing=False,
        launch=ForkedRank,
        host="127.0.0.1",
        group=RankGroup,
        **kwargs,
    ):
        cut = f" sharded={parts or num_ranks // tensor} tensor={tensor}" if sharded else ""
        super().__init__(actor_devices=f"cpu:0-{num_ranks - 1}{cut}", context_ranks=context, **kwargs)
        if checkpointing:
            checkpoint_layers(self.actor.model)
        self.helpers = []

        def start(where):
            self.helpers.append(launch(where))
            return self.helpers[-1]

        ranks = group(
            self.main,
            self.config,
            start,
            devices=[("cpu", "cpu")] * num_ranks,
            host=host,
            num_threads=1,
            shards=Shards if sharded else None,
        )
        self.use(ranks)


def parameters_of(bench):
    return dict([*bench.actor.model.named_parameters(), *bench.critic.named_parameters()])


def weights_of(bench):
    """Return whole weights by the names of ``parameters_of``, wherever they are."""
    return parameters_of(bench) | (dict(bench.actor.parts.stream()) if bench.actor.parts else {})


def moments(bench):
    """Return what the optimizer remembers of all gradients, whichever rank does."""
    state = bench.backend.optimizer_tensors({id(p): n for n, p in parameters_of(bench).items()})
    assert {name.partition("|")[2] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    return {name: value for name, value in state.items() if name.endswith("exp_avg")}


def assert_same_numbers(found, expected):
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4, abs=1e-6)
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    for task in "ab":
        assert found.task_metrics[task].keys() == expected.task_metrics[task].keys()
        for key in ("loss", "entropy", "mismatch"):
            if key in expected.task_metrics[task]:
                assert found.task_metrics[task][key] == pytest.approx(
                    expected.task_metrics[task][key], rel=1e-3, abs=1e-6
                )


class EndsAtFirstLook:
    def check(self, partial):
        return [True] * len(partial)


def assert_ranks_sample_as_one_does(bench):
    """With the weights as they are now; a request that is watched is not sent away."""
    sampling = SamplingParams(max_new_tokens=12)
    requests = [
        GenerationRequest(prompt_ids=[2 + i] * (3 + i), sampling=sampling, seeds=[10 * i, 10 * i + 1])
        for i in range(7)
    ]
    requests[6] = replace(requests[6], watch=Watch(monitor=EndsAtFirstLook(), every=2))
    here = []

    class Counting(HFEngine):
        def generate_stream(self, own):
            here.extend(own)
            return super().generate_stream(own)

    alone, own = (
        build_engine(cls, bench.actor, bench.config.rollout, seed=0, output_dir=Path("unused"))
        for cls in (HFEngine, Counting)
    )
    expected, found = alone.generate(requests), bench.backend.spread(own).generate(requests)
    assert requests[6] in here
    assert 1 < len(here) < 5
    for group, expected_group in zip(found, expected, strict=True):
        for one, other in zip(group, expected_group, strict=True):
            assert one.response_ids == other.response_ids
            assert one.finish_reason == other.finish_reason
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)


def assert_a_gradient_that_is_not_finite_moves_nothing(bench):
    """Whichever rank has it, and whichever owns the parameters."""
    before = {name: p.detach().clone() for name, p in weights_of(bench).items()}
    for spoilt in (0, len(bench.credited) - 1):
        active = [(c, 1.0) for c in bench.credited]
        active[spoilt] = (active[spoilt][0], float("nan"))
        assert bench.backend.step(active, 1.0).norms is None
        bench.backend.gather_weights()
        found = weights_of(bench)
        for name, parameter in parameters_of(bench).items():
            assert torch.equal(found[name], before[name])
            assert parameter.grad is None


def assert_a_call_beside_unfetched_samples_is_refused(bench):
    sampling = SamplingParams(max_new_tokens=12)
    requests = [GenerationRequest(prompt_ids=[2 + i], sampling=sampling, seeds=[i]) for i in range(8)]
    own = HFEngine.build(bench.actor, bench.config.rollout, seed=0, output_dir=Path("unused"))
    samples = bench.backend.spread(own).generate_stream(requests)
    next(samples)
    with pytest.raises(TrainingError, match="fetch all of them first"):
        bench.backend.step([], 1.0)
    samples.close()
    assert bench.backend.step_start_outputs(
        "b", [bench.credited[0].sample], want_values=False, want_ref=False
    )


def assert_an_interrupt_while_sampling_leaves_the_ranks_usable(bench):
    sampling = SamplingParams(max_new_tokens=40)
    requests = [GenerationRequest(prompt_ids=[2 + i], sampling=sampling, seeds=[i]) for i in range(8)]
    alone, own = (
        HFEngine.build(bench.actor, bench.config.rollout, seed=0, output_dir=Path("unused")) for _ in "ab"
    )
    engine = bench.backend.spread(own)
    passed = []

    def interrupt():
        passed.append(1)
        if len(passed) == 3:
            raise KeyboardInterrupt

    own.call_between_steps(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests)
    assert moments(bench), "a checkpoint can be written"
    expected, found = alone.generate(requests), engine.generate(requests)
    assert [g.response_ids for group in found for g in group] == [
        g.response_ids for group in expected for g in group
    ]


def assert_same_weights(found, expected):
    wanted, weights = parameters_of(expected), weights_of(found)
    for name in parameters_of(found):
        torch.testing.assert_close(weights[name], wanted[name].data, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def begin_alike(bench, other):
    """Change weights and state of ``bench``, and give ``other`` the same: rounding has moved them apart.

    What ``other`` then gives for a checkpoint is what it took from one, bit for bit.
    """
    wanted, parameters = parameters_of(bench), parameters_of(other)
    names = [{id(p): n for n, p in own.items()} for own in (wanted, parameters)]
    state = {n: 0.5 * t for n, t in bench.backend.optimizer_tensors(names[0]).items()}
    for name, parameter in wanted.items():
        parameter.mul_(0.9)
        if other.actor.parts is None or name not in other.actor.parts.stream():
            parameters[name].copy_(parameter)
    if other.actor.parts is not None:
        other.actor.parts.load(wanted)
    for one, own in ((bench, wanted), (other, parameters)):
        one.backend.load_optimizer(state, own)
    assert_same_bits(other.backend.optimizer_tensors(names[1]), state)
    assert_same_bits({name: weights_of(other)[name] for name in wanted}, wanted)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
