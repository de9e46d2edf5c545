"""Parts of a run that begin at random or are found again under another name."""

import pytest
import torch
from model_builders import build_actor, build_tokenizer

from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.run import CriticConfig, LoraConfig, ModelConfig, OptimizerConfig
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.records import SamplingParams
from multitask_rl.task_run import TaskRun, build_algorithms
from multitask_rl.training.actor import load_actor
from multitask_rl.training.credit import LearnerTask
from multitask_rl.training.critic import Critic, rename_head
from multitask_rl.training.optimizer import ActorCriticOptimizer


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_start_by_the_seed_of_the_run(tmp_path) -> None:
    build_actor().save(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path), lora=LoraConfig(rank=4))

    def adapters(seed: int) -> torch.Tensor:
        parameters = load_actor(config, "cpu", seed).model.named_parameters()
        return torch.cat([p.detach().flatten() for name, p in parameters if "lora_A" in name])

    first = adapters(0)
    torch.manual_seed(99)
    assert torch.equal(adapters(0), first)
    assert not torch.equal(adapters(1), first)


def test_a_renamed_task_keeps_its_head_and_the_optimizer_state_of_it() -> None:
    def build(task: str) -> tuple[Critic, ActorCriticOptimizer, dict[str, torch.nn.Parameter]]:
        critic = Critic()
        critic.build(build_actor(), [task, "other"])
        optimizer = ActorCriticOptimizer([], list(critic.parameters()), OptimizerConfig(), CriticConfig())
        return critic, optimizer, {f"critic.{n}": p for n, p in critic.named_parameters()}

    critic, optimizer, parameters = build("old.name")
    for value in (1.0, -3.0):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step(1.0)
    tensors = optimizer.tensors({id(p): n for n, p in parameters.items()})
    renamed, again, found = build("new")
    names = {"old.name": "new"}
    renamed.load_tensors(critic.tensors(), renamed=names)
    again.load_tensors({rename_head(k, names): v for k, v in tensors.items()}, found)
    for parameter in found.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5)
    again.step(1.0)
    optimizer.step(1.0)
    hidden = torch.randn(3, build_actor().hidden_size)
    assert torch.equal(renamed.values("new", hidden), critic.values("old.name", hidden))
    assert torch.equal(renamed.values("other", hidden), critic.values("other", hidden))


@pytest.mark.parametrize("spare", [-1, 0, 2, 9])
@pytest.mark.parametrize("tied", [True, False])
def test_control_tokens_start_as_the_mean_of_the_known_ones_whatever_rows_the_model_has(spare, tied) -> None:
    number = len(build_tokenizer())
    actor = build_actor(vocab_size=number + spare, tied=tied)
    layers = (actor.model.get_input_embeddings(), actor.model.get_output_embeddings())
    known = [layer.weight[:number].detach().clone() for layer in layers]
    ids = actor.add_control_tokens(5)
    layers = (actor.model.get_input_embeddings(), actor.model.get_output_embeddings())
    for layer, before in zip(layers, known, strict=True):
        assert torch.equal(layer.weight[: len(before)], before)
        new = layer.weight[sorted({*ids, *range(len(before), number)})]
        assert torch.allclose(new, before.mean(dim=0).expand_as(new))
    trained = layers[0].weight.detach().normal_().clone()
    assert actor.add_control_tokens(5) == ids
    assert torch.equal(layers[0].weight, trained), "known tokens are left as they are"


def build_run(kind: str, kl: float) -> TaskRun:
    spec = TaskSpec(name="math", type=kind, kl=KLSpec(coefficient=kl))
    algorithm = build_algorithms({"math": spec})["math"]
    return TaskRun(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=4,
        kl=KLController(spec.kl),
        learner=LearnerTask(spec=spec, algorithm=algorithm),
    )


@pytest.mark.parametrize(("before", "after"), [("grpo", "ppo"), ("ppo", "grpo")])
def test_a_task_of_another_type_or_leash_starts_that_part_fresh_and_says_so(before, after, caplog) -> None:
    former, run, untouched = build_run(before, 0.01), build_run(after, 0.5), build_run(after, 0.5)
    former.num_overlong = 3
    run.load_state_dict(former.state_dict())
    assert run.algorithm.state_dict() == untouched.algorithm.state_dict()
    assert run.learner.kl_coefficient == 0.5
    assert run.num_overlong == 3
    assert f"task 'math' was of type {before}: its {after} starts fresh" in caplog.text
    assert "kl.coefficient goes on with 0.5, it was 0.01" in caplog.text
