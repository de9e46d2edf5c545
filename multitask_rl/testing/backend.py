"""The contract suite of training backends, which learn what ``InProcess`` learns; needs torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.ppo import PPO
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.models.actor import copy_weights
from multitask_rl.plugins import TRAINING_BACKENDS, load_plugin
from multitask_rl.records import Prompt, Rollout, Scored
from multitask_rl.testing.contract import Finding, run_check
from multitask_rl.testing.engine import tiny_actor
from multitask_rl.training.backend import LearnerTask, TrainingBackend
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner

_LARGEST_GAP = 1e-5
"""Largest difference of two gradients, relative to their norm."""


def check_backend(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the findings about a training backend (``training.backend``) on a tiny model.

    ``config`` has keys of the run, such as ``device_map`` and ``training.backend_config``.
    """
    backend_class: type[TrainingBackend] = load_plugin(TRAINING_BACKENDS, plugin, expects=TrainingBackend)
    given = dict(config or {})
    given["training"] = {"backend": plugin, **given.get("training", {})}
    given["batch"] = {"num_minibatches": 2, "tokens_per_microbatch": 300, **given.get("batch", {})}
    given["optimizer"] = {"learning_rate": 1e-3, **given.get("optimizer", {})}
    settings = build_dataclass(RunConfig, given, Where(path=("--config",)))
    backend_class.check(settings)
    findings: list[Finding] = []

    def check() -> None:
        alone, first = _Bench(InProcess, settings), _Bench(backend_class, settings)
        try:
            findings.extend(_compare(alone, first))
            other = _Bench(InProcess, settings)
            findings.append(run_check("one process goes on from its state", lambda: _goes_on(first, other)))
        finally:
            first.backend.close()
            first.backend.close()
        second = _Bench(backend_class, settings)
        try:
            findings.append(
                run_check("it goes on from the state of one process", lambda: _goes_on(alone, second))
            )
        finally:
            second.backend.close()
        weights = dict(first.actor.model.state_dict())
        gone = [name for name, value in weights.items() if not bool(value.isfinite().all())]
        assert not gone, f"after close {gone[0]!r} of the actor has no numbers"

    return [run_check("is built and closed, and leaves the actor its weights", check), *findings]


class _Bench:
    """A learner over a task with a critic and one without; two of a kind begin alike."""

    def __init__(self, backend_class: type[TrainingBackend], config: RunConfig) -> None:
        self.actor = tiny_actor()
        self.critic = Critic(config.critic)
        self.critic.build(self.actor, ["a"])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.critic.heads.parameters():
                parameter.normal_(0.0, 0.1, generator=generator)
        specs = {"a": TaskSpec(name="a", kl=KLSpec(coefficient=0.1)), "b": TaskSpec(name="b")}
        self.tasks = {
            "a": LearnerTask(spec=specs["a"], algorithm=PPO(PPO.Config()), kl_coefficient=0.1),
            "b": LearnerTask(spec=specs["b"], algorithm=GRPO(GRPO.Config())),
        }
        reference = tiny_actor(seed=1).model.requires_grad_(False)
        runner = ModelRunner(self.actor, self.critic, config, reference)
        self.backend = backend_class.build(runner, self.tasks, config)
        self.credit = CreditAssigner(self.backend, self.tasks, many_updates=True)
        self.learner = Learner(self.backend, self.tasks, config)
        self.samples = [s for t in self.tasks.values() for s in t.algorithm.select(_scored(t.spec.name))]

    def update(self, tasks: str = "ab") -> None:
        """Make the updates of a step over the samples of ``tasks``."""
        credited, _ = self.credit.credit([s for s in self.samples if s.task in tasks])
        self.learner.update(credited, shares=dict.fromkeys(tasks, 1.0 / len(tasks)), step=0)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state, of the moments' names in a checkpoint."""
        named = [*self.actor.model.named_parameters(), *self.critic.named_parameters()]
        return self.backend.optimizer_tensors({id(parameter): name for name, parameter in named})

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all weights of actor and critic."""
        found = {**self.actor.state_dict(), **self.critic.tensors()}
        return {name: value.detach().clone() for name, value in found.items()}

    @torch.no_grad()
    def restore(self, other: _Bench) -> None:
        """Take over weights and optimizer state as from a checkpoint of ``other``."""
        copy_weights(self.actor.model, dict(other.actor.state_dict()), self.actor.parts)
        self.critic.load_tensors(other.critic.tensors())
        named = dict([*self.actor.model.named_parameters(), *self.critic.named_parameters()])
        self.backend.load_optimizer({name: t.clone() for name, t in other.state().items()}, named)


def _scored(task: str) -> list[Scored]:
    stream = random.Random(task)
    scored = []
    for draw in range(4):
        ids = [stream.randrange(2, 40) for _ in range(stream.randint(2, 30))]
        prompt = Prompt(task=task, prompt_id=f"{task}/{draw}", draw=draw, row={}, text="", prompt_ids=ids)
        for number in range(3):
            response = [stream.randrange(2, 40) for _ in range(stream.randint(1, 20))]
            logprobs = [-3.0 - stream.random() for _ in response]
            rollout = Rollout(prompt=prompt, sample=number, response_ids=response, rollout_logprobs=logprobs)
            scored.append(Scored(rollout=rollout, reward=float(stream.random() < 0.4)))
    return scored


def _compare(alone: _Bench, other: _Bench) -> list[Finding]:
    """Return the findings about ``other`` beside ``alone``, which computes in one process."""

    def outputs() -> None:
        samples = [s for s in alone.samples if s.task == "a"]
        found, expected = (
            b.backend.step_start_outputs("a", samples, want_values=True, want_ref=True)
            for b in (other, alone)
        )
        pairs = {
            "old_logprobs": (found.old_logprobs, expected.old_logprobs),
            "ref_logprobs": (found.ref_logprobs, expected.ref_logprobs),
            "values": (found.values, expected.values),
        }
        for name, (own, wanted) in pairs.items():
            for one, other_one in zip(own or [], wanted or [], strict=True):
                _assert_close(one, other_one, f"step_start_outputs: {name}")

    def gradient() -> None:
        for bench in (alone, other):
            bench.update()
        _assert_same_gradients(other, alone)

    def without() -> None:
        before = [bench.weights()["heads.task_a.weight"] for bench in (alone, other)]
        for bench in (alone, other):
            bench.update("b")
        after = [bench.weights()["heads.task_a.weight"] for bench in (alone, other)]
        assert torch.equal(before[1], after[1]), "the value head of a task without samples has moved"
        _assert_same_gradients(other, alone)
        _assert_same_weights(other, alone)

    def infinite() -> None:
        before = other.weights()
        credited, _ = other.credit.credit(other.samples)
        active = [(sample, 1.0) for sample in credited]
        active[-1] = (credited[-1], float("nan"))
        assert other.backend.step(active, 1.0).norms is None, "norms of NaN are not None"
        other.backend.gather_weights()
        moved = [name for name, value in other.weights().items() if not torch.equal(value, before[name])]
        assert not moved, f"a gradient that is not finite has moved {moved[0]!r}"

    return [
        run_check("outputs before a step are those of one process", outputs),
        run_check("gradient and step of two algorithms are those of one process", gradient),
        run_check("what has no gradient in a step stays as it is", without),
        run_check("a gradient that is not finite moves nothing", infinite),
    ]


def _goes_on(source: _Bench, target: _Bench) -> None:
    """Restore ``target`` from ``source``, make a step with both, and compare."""
    target.restore(source)
    _assert_same_weights(target, source)
    for bench in (source, target):
        bench.update()
    _assert_same_gradients(target, source)
    _assert_same_weights(target, source)


def _assert_same_gradients(one: _Bench, other: _Bench) -> None:
    found, wanted = one.state(), other.state()
    assert found.keys() == wanted.keys(), (
        f"its optimizer state is of {sorted(found)[:3]} ..., that of one process of {sorted(wanted)[:3]} ..."
    )
    steps = [name for name in wanted if name.endswith("|step") and float(found[name]) != float(wanted[name])]
    assert not steps, f"{steps[0]}: it has counted {found[steps[0]]} steps, one process {wanted[steps[0]]}"
    pairs = [(found[name], wanted[name]) for name in wanted if name.endswith("|exp_avg")]
    gap = sum(float((a - b).double().norm()) ** 2 for a, b in pairs) ** 0.5
    norm = sum(float(b.double().norm()) ** 2 for _, b in pairs) ** 0.5
    assert gap <= _LARGEST_GAP * norm, f"first moments differ by {gap / norm:.2g} of their norm"


def _assert_same_weights(one: _Bench, other: _Bench) -> None:
    found, wanted = one.weights(), other.weights()
    assert found.keys() == wanted.keys(), f"its weights are {sorted(found)}"
    for name, value in wanted.items():
        _assert_close(found[name], value, name)


def _assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    gap = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert gap <= 1e-4, f"{what} differs by {gap:.2g} from that of one process"
