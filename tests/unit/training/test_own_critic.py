"""A critic with a model of its own: another model, another dtype, its own activations."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from model_builders import (
    VOCABULARY,
    build_actor,
    build_byte_tokenizer,
    build_model,
    build_tokenizer,
    sample_scored,
)
from multitask_rl.config.run import BatchConfig, CriticConfig, LoraConfig, ModelConfig, RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import add_adapters
from multitask_rl.records import Scored, TrainSample
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.critic import Critic
from multitask_rl.training.microbatch import build_microbatches
from multitask_rl.training.runner import ModelRunner


@pytest.fixture
def wider(tmp_path: Path) -> Path:
    """A model of the actor's tokenizer and another width."""
    build_model(seed=3, hidden=48).save_pretrained(tmp_path / "wider")
    build_tokenizer().save_pretrained(tmp_path / "wider")
    return tmp_path / "wider"


def build(config: CriticConfig, *, control_tokens: int = 0) -> Critic:
    actor = build_actor()
    actor.add_control_tokens(control_tokens)
    critic = Critic(config)
    critic.build(actor, ["a"])
    return critic


def test_values_are_read_from_the_model_that_is_named(wider: Path) -> None:
    critic = build(
        CriticConfig(trunk="separate", name_or_path=str(wider), dtype="bfloat16"), control_tokens=3
    )
    (batch,) = build_microbatches([[5, 6]], [[7, 8, 1]], max_tokens=64, layout="bucketed", pad_token_id=0)
    hidden = critic.hidden(batch)
    model = build_model(seed=3, hidden=48).to(torch.bfloat16)
    expected = model(torch.tensor([[5, 6, 7, 8, 1]]), output_hidden_states=True).hidden_states[-1][0, 1:4]
    torch.testing.assert_close(hidden, expected)
    assert critic.values("a", hidden).dtype == torch.float32
    assert critic.trunk is not None
    assert critic.trunk.get_input_embeddings().weight.shape[0] >= len(build_tokenizer()) + 3
    assert all(p.requires_grad for p in critic.parameters())


def values(layout: str, model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the values that a critic with ``model`` gives to responses of two prompts, in this layout."""
    actor = build_actor()
    critic = Critic(CriticConfig(trunk="separate"))
    critic.trunk = model
    critic.build(actor, ["a"])
    with torch.no_grad():
        critic.heads["task_a"].weight.copy_(torch.linspace(-1, 1, 32))
    runner = ModelRunner(actor, critic, RunConfig(batch=BatchConfig(layout=layout)))
    samples = [
        TrainSample(
            scored=Scored(rollout=one.rollout, reward=0.0),
            prompt_ids=one.rollout.prompt.prompt_ids,
            response_ids=one.rollout.response_ids,
            rollout_logprobs=[],
        )
        for one in sample_scored(actor, "a", groups=2, size=3)
    ]
    backend = InProcess(runner, {}, RunConfig())
    found = backend.step_start_outputs("a", samples, want_values=True, want_ref=False).values
    assert found is not None
    return found


def test_a_layout_is_one_that_the_model_of_its_own_supports_too() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    windowed = MistralForCausalLM(
        MistralConfig(**sizes, **heads, intermediate_size=64, num_key_value_heads=2, sliding_window=4)
    ).eval()
    for one, other in zip(values("auto", windowed), values("bucketed", windowed), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ConfigError, match="layout=shared: MistralForCausalLM cannot share"):
        values("shared", windowed)
    with pytest.raises(ConfigError, match="layout=packed: OPTForCausalLM cannot tell packed samples apart"):
        values(
            "packed", OPTForCausalLM(OPTConfig(**sizes, **heads, ffn_dim=64, word_embed_proj_dim=32)).eval()
        )


def test_its_activations_alone_are_recomputed() -> None:
    gradients = []
    for checkpointing in (False, True):
        critic = build(CriticConfig(trunk="separate", gradient_checkpointing=checkpointing))
        (batch,) = build_microbatches([[5, 6]], [[7, 8, 1]], max_tokens=64, layout="bucketed", pad_token_id=0)
        assert critic.trunk is not None
        critic.hidden(batch)  # tries once what the model can
        runs: list[int] = []
        hook = critic.trunk.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, runs=runs: runs.append(1)
        )
        with critic.learning():
            critic.hidden(batch).sum().backward()
        hook.remove()
        assert len(runs) == 1 + checkpointing
        gradients.append(critic.trunk.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_copy_of_an_actor_with_adapters_has_their_dropout_however_it_keeps_activations(
    checkpointing,
) -> None:
    lora = LoraConfig(rank=2, dropout=0.5)
    actor = Actor(add_adapters(build_model(), lora), build_tokenizer(), ModelConfig(lora=lora))
    critic = Critic(CriticConfig(trunk="separate", gradient_checkpointing=checkpointing))
    critic.build(actor, ["a"])
    assert critic.trunk is not None
    dropouts = [m for n, m in critic.trunk.named_modules() if n.endswith("lora_dropout.default")]
    assert dropouts
    with critic.learning():
        assert all(module.training for module in dropouts)
    assert not any(module.training for module in dropouts)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_beside_an_actor_with_adapters_all_weights_of_its_copy_are_trained() -> None:
    lora = LoraConfig(rank=2)
    actor = Actor(add_adapters(build_model(), lora), build_tokenizer(), ModelConfig(lora=lora))
    critic = Critic(CriticConfig(trunk="separate"))
    critic.build(actor, ["a"])
    assert critic.trunk is not None
    trained = {name for name, p in critic.trunk.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in actor.model.named_parameters()}
    assert {name for name, p in actor.model.named_parameters() if p.requires_grad} < trained
    page = Path(__file__).parents[3] / "docs/configuration.md"
    (told,) = [line for line in page.read_text("utf-8").splitlines() if "`critic.trunk`" in line]
    assert "all of whose weights are trained, also beside an actor with adapters" in told


def test_another_vocabulary_and_keys_without_a_model_of_its_own_are_refused(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    build_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "bytes")
    tokenizer.save_pretrained(tmp_path / "bytes")
    with pytest.raises(ConfigError, match="another tokenizer than the actor"):
        build(CriticConfig(trunk="separate", name_or_path=str(tmp_path / "bytes")))
    with pytest.raises(ConfigError, match=r"critic.dtype='bfloat16' is for a critic with a model of its own"):
        CriticConfig(dtype="bfloat16")
