"""Parts of a run that begin at random or are found again under another name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MixtralConfig, Qwen3MoeConfig

from model_builders import build_actor, build_tokenizer
from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.run import CriticConfig, LoraConfig, ModelConfig, OptimizerConfig
from multitask_rl.config.task import KLSpec, TaskSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.errors import CheckpointError
from multitask_rl.models.actor import Actor, load_actor
from multitask_rl.models.lora import add_adapters, is_other_base, models_below, save_base
from multitask_rl.records import SamplingParams
from multitask_rl.step.task_state import TaskState, build_algorithms
from multitask_rl.training.backend import LearnerTask
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


def adapted(
    rank: int, targets: str = "all-linear", alpha: float = 32.0, base: int = 0, *, seed: int = 0
) -> Actor:
    actor, lora = build_actor(base, tied=False), LoraConfig(rank=rank, target_modules=targets, alpha=alpha)
    adapted = Actor(add_adapters(actor.model, lora, seed), actor.tokenizer, ModelConfig(lora=lora))
    for name, parameter in adapted.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return adapted


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        ((0, ""), (4, "q_proj"), r"no adapters: go on with model\.lora\.rank=0"),
        ((4, "q_proj"), (0, ""), r"adapters and no whole model: set model\.lora"),
        (
            (4, "q_proj"),
            (4, "k_proj"),
            r"4 tensors with model\.lora\.rank=4 model\.lora\.target_modules=q_proj, the model has .*=k_proj",
        ),
        ((4, "q_proj,k_proj"), (4, "q_proj"), r"4 are on one side only.*'base_model.*k_proj"),
        ((4, "q_proj"), (4, "q_proj,k_proj"), r"4 are on one side only.*'base_model.*k_proj"),
        ((4, "q_proj"), (8, "q_proj"), r"rank=4 .* the model has .*rank=8"),
        ((4, "q_proj", 8), (4, "q_proj"), r"trained with model\.lora\.alpha=8, .* this run has 32"),
        ((4, "q_proj"), (4, "q_proj", 32, 7), r"other weights than those of the present base model"),
    ],
    ids=["full-to-lora", "lora-to-full", "other-modules", "fewer", "more", "rank", "alpha", "base"],
)
def test_adapters_are_loaded_whole_or_refused_by_what_to_set(tmp_path, saved, resumed, message) -> None:
    (adapted(*saved) if saved[0] else build_actor()).save(tmp_path)
    actor = adapted(*resumed) if resumed[0] else build_actor(1)
    before = {name: value.clone() for name, value in actor.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        actor.load_weights(tmp_path)
    assert all(torch.equal(before[name], value) for name, value in actor.model.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,embed_tokens"])
def test_adapters_that_fit_are_loaded_bitwise(tmp_path, targets) -> None:
    first, second = adapted(4, targets), adapted(4, targets, seed=1)
    first.save(tmp_path)
    second.load_weights(tmp_path)
    expected = first.model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in second.model.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_over_a_model_with_adapters_merged_in_load_as_they_were_trained(tmp_path) -> None:
    def logits(actor: Actor) -> torch.Tensor:
        with torch.no_grad():
            return actor.model(input_ids=torch.tensor([[2, 5, 7, 3]])).logits

    def trained(base: str, name: str) -> Actor:
        actor = load_actor(ModelConfig(name_or_path=str(tmp_path / base), lora=LoraConfig(rank=2)), "cpu")
        for parameter_name, parameter in actor.model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.5)
        actor.save(tmp_path / name)
        return actor

    build_actor().save(tmp_path / "whole")
    first, second = trained("whole", "first"), trained("first", "second")
    again = load_actor(ModelConfig(name_or_path=str(tmp_path / "second")), "cpu")
    torch.testing.assert_close(logits(again), logits(second))
    assert (logits(second) - logits(first)).abs().max() > 1e-2
    trained("second", "third")
    assert models_below(str(tmp_path / "third")) == [
        str(tmp_path / n) for n in ("third", "second", "first", "whole")
    ]


def test_a_last_bit_of_bfloat16_in_few_tensors_is_no_other_base(tmp_path) -> None:
    """Where adapters are merged, sums of another order round some weights of bfloat16 the other way."""
    known = {"dtype": "torch.bfloat16", "means": [0.003 + index / 1e5 for index in range(200)]}
    save_base(known, "", tmp_path)
    bit = 0.03 * 2**-7 / 64  # of one weight, in the mean of 64
    for number, size, is_other in ((2, bit, False), (200, bit, True), (1, 0.01, True)):
        means = [mean + size * (index < number) for index, mean in enumerate(known["means"])]
        assert is_other_base(tmp_path, {**known, "means": means}) == is_other
    save_base({**known, "dtype": "torch.float32"}, "", tmp_path)
    first, *rest = known["means"]
    assert is_other_base(tmp_path, {"dtype": "torch.float32", "means": [first + bit, *rest]})


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_base_model_that_differs_by_rounding_is_the_same_one(tmp_path) -> None:
    saved, resumed = adapted(4, "q_proj"), adapted(4, "q_proj", seed=1)
    saved.save(tmp_path)
    known = json.loads((tmp_path / "base.json").read_text())
    known["means"] = [value * (1 + 1e-6) for value in known["means"]]  # as another processor merges adapters
    (tmp_path / "base.json").write_text(json.dumps(known))
    resumed.load_weights(tmp_path)
    expected = saved.model.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(tie_word_embeddings=False),
        MixtralConfig(num_local_experts=4, num_key_value_heads=2),
        Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, head_dim=8, num_key_value_heads=2),
    ],
    ids=lambda config: config.model_type,
)
def test_weights_that_are_saved_under_other_names_come_back(config, tmp_path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.update({"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, **sizes})
    saved, resumed = (
        Actor(AutoModelForCausalLM.from_config(config), build_tokenizer(), ModelConfig()) for _ in range(2)
    )
    saved.save(tmp_path)
    drawn = torch.get_rng_state()
    resumed.load_weights(tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn)
    own = resumed.model.state_dict()
    assert not [name for name, value in saved.model.state_dict().items() if not torch.equal(own[name], value)]


def test_a_checkpoint_with_weights_that_the_model_lacks_is_refused(tmp_path) -> None:
    build_actor().save(tmp_path)
    shallow = build_actor()
    del shallow.model.model.layers[1]
    with pytest.raises(CheckpointError, match=r"another model: 12 weights .* first is 'model\.layers\.1\."):
        shallow.load_weights(tmp_path)


def test_rows_of_another_vocabulary_are_not_taken_for_control_tokens(tmp_path) -> None:
    build_actor().save(tmp_path / "plain")
    conditioned = build_actor()
    conditioned.add_control_tokens(3)
    conditioned.save(tmp_path / "conditioned")
    other = build_actor(vocab_size=60)
    other.add_control_tokens(14)
    assert other.model.config.vocab_size == 61
    with pytest.raises(CheckpointError, match="belongs to another model: 1 weight"):
        other.load_weights(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="belongs to another model: 1 weight"):
        build_actor().load_weights(tmp_path / "conditioned")
    shifted = build_actor()
    shifted.tokenizer.add_tokens(["another"])
    said = r"conditioned belongs to another model: its control tokens are \[47\b.*\], .* another output_dir"
    with pytest.raises(CheckpointError, match=said):
        shifted.keep_control_tokens(tmp_path / "conditioned")
    same = build_actor()
    same.keep_control_tokens(tmp_path / "conditioned")
    same.load_weights(tmp_path / "conditioned")


@pytest.mark.parametrize("tied", [True, False])
def test_new_control_tokens_begin_as_the_mean_of_what_was_learnt(tmp_path, tied) -> None:
    learnt, actor = build_actor(7, tied=tied), build_actor(tied=tied)
    learnt.save(tmp_path)
    ids = actor.add_control_tokens(3)
    actor.load_weights(tmp_path)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(a.model, name)().weight for a in (learnt, actor))
        assert torch.equal(new[: len(old)], old)
        torch.testing.assert_close(new[ids], old.mean(dim=0).expand(3, -1))


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


def test_a_trunk_of_another_model_in_a_checkpoint_is_refused_and_a_head_of_a_removed_task_is_not() -> None:
    def build(*tasks: str) -> Critic:
        critic = Critic(CriticConfig(trunk="separate"))
        critic.build(build_actor(), tasks)
        return critic

    tensors = build("kept", "removed").tensors()
    build("kept").load_tensors(tensors)
    build().load_tensors(tensors)  # no task needs a critic
    other = {name.replace("trunk.model.", "trunk.transformer."): value for name, value in tensors.items()}
    with pytest.raises(CheckpointError, match=r"belongs to another model: 'trunk\.transformer\."):
        build("kept").load_tensors(other)


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
    assert actor.control_token_ids == tuple(ids)
    assert actor.model.generation_config.suppress_tokens == ids, "nor does a saved model write them"


def build_run(kind: str, kl: float) -> TaskState:
    spec = TaskSpec(name="math", type=kind, kl=KLSpec(coefficient=kl))
    algorithm = build_algorithms({"math": spec})["math"]
    return TaskState(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=4,
        kl=KLController(spec.kl),
        learner=LearnerTask(spec=spec, algorithm=algorithm),
    )


def test_the_scale_of_a_constraint_that_was_removed_is_forgotten() -> None:
    def run(*constraints: str) -> TaskState:
        run = build_run("grpo", 0.01)
        run.multipliers = {name: LagrangeMultiplier(limit=0.1) for name in constraints}
        return run

    def num_costs(run: TaskState) -> int:
        return run.algorithm.state_dict().get("cost/rule_scale", {}).get("num_steps", 0)

    first, kept, removed, back = run("rule"), run("rule"), run(), run("rule")
    scale = {"num_steps": 9, "mean_square": 4.0, "long_run": 4.0}
    first.algorithm.load_state_dict({"cost/rule_scale": scale})
    kept.load_state_dict(first.state_dict())
    removed.load_state_dict(first.state_dict())
    back.load_state_dict(removed.state_dict())
    assert [num_costs(state) for state in (first, kept, removed, back)] == [9, 9, 0, 0]


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
