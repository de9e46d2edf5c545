"""What an engine starts from is the actor as it is: adapters merged, control tokens in, tied weights tied."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from model_builders import build_model, build_tokenizer
from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, load_actor, make_actor
from multitask_rl.models.lora import MergedWeights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def _actor(rank: int, tie: bool) -> Actor:
    with torch.random.fork_rng(devices=[]):
        model: Any = build_model(tied=tie)
        lora = LoraConfig(rank=rank)
        if rank:
            from multitask_rl.models.lora import add_adapters

            model = add_adapters(model, lora).eval()
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.5)
    return Actor(model, build_tokenizer(), ModelConfig(lora=lora))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "rank", [0, pytest.param(2, marks=pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"))]
)
def test_a_plain_model_loads_with_the_actors_logits(tmp_path: Path, rank: int, tie: bool) -> None:
    from transformers import AutoModelForCausalLM

    actor = _actor(rank, tie)
    control = actor.add_control_tokens(2)
    actor.save_for_engine(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    ids = torch.tensor([[2, 5, control[1], 3]])
    with torch.no_grad():
        expected, found = actor.model(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_that_travel_alone_are_merged_to_the_same_bits(dtype: torch.dtype) -> None:
    actor = _actor(2, True)
    actor.model.to(dtype)
    merged = actor.state_dict()
    assert isinstance(merged, MergedWeights)
    light = merged.over({})
    sent = pickle.dumps(light.adapters)
    base = {name: merged.base[name].clone() for name in merged}
    there = MergedWeights(base, pickle.loads(sent), torch.device("cpu"))
    there.to_device()
    changed = [name for name in merged if not torch.equal(merged[name], base[name])]
    assert len(changed) == 14, "each linear layer of both blocks"
    for name, value in merged.items():
        assert torch.equal(there[name], value), name
    numbers = sum(p.numel() for layer in pickle.loads(sent).values() for p in layer.parameters())
    assert numbers == sum(p.numel() for p in actor.trainable_parameters()), "adapters alone"


_MIXTRAL: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_experts_are_merged_too(tmp_path: Path, dtype: torch.dtype) -> None:
    """peft adapts the weights of all experts as one parameter, by layers that lie in one another."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    from multitask_rl.models.lora import add_adapters

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**_MIXTRAL)).to(dtype)
    lora = LoraConfig(rank=2)
    actor = Actor(add_adapters(model, lora), _actor(0, True).tokenizer, ModelConfig(lora=lora))
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    merged = actor.state_dict()
    assert isinstance(merged, MergedWeights)
    changed = {name.rpartition("layers.0.")[2] for name in merged if name in merged.adapters}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight"} < changed
    there = MergedWeights(merged.base, pickle.loads(pickle.dumps(merged.over({}).adapters)), merged.device)
    there.to_device()
    assert not [name for name, value in merged.items() if not torch.equal(there[name], value)]
    actor.save_for_engine(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    ids = torch.tensor([[2, 5, 4, 3, 8, 9]])
    if dtype is torch.float32:  # rounding to bfloat16 may choose other experts
        with torch.no_grad():
            expected, found = actor.model(input_ids=ids).logits, loaded(input_ids=ids).logits
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_dropout_before_adapters_of_experts_is_refused_by_what_to_set() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    from multitask_rl.models.lora import add_adapters

    model = MixtralForCausalLM(MixtralConfig(**_MIXTRAL))
    problem = r"model\.lora\.dropout=0\.1: .*; set it to 0, or .* some of k_proj, lm_head, o_proj, "
    with pytest.raises(ConfigError, match=problem + "q_proj, v_proj$"):
        add_adapters(model, LoraConfig(rank=2, dropout=0.1))


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_weight_that_embeddings_and_head_share_has_no_adapters(tmp_path: Path, target: str) -> None:
    """Merged into one of the two, they would change the other."""
    import peft

    _actor(0, True).save(tmp_path / "base")
    base = str(tmp_path / "base")
    lora = LoraConfig(rank=2, target_modules=f"q_proj,{target}")
    with pytest.raises(ConfigError, match=f"target_modules='q_proj,{target}': .* are one weight"):
        load_actor(ModelConfig(name_or_path=base, lora=lora), "cpu")
    settings = peft.LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM")
    other = peft.get_peft_model(load_actor(ModelConfig(name_or_path=base), "cpu").model, settings)
    other.save_pretrained(tmp_path / "others", save_embedding_layers=False)
    with pytest.raises(ConfigError, match=r"the adapters of .*others: .* are one weight"):
        load_actor(ModelConfig(name_or_path=str(tmp_path / "others")), "cpu")
    _actor(0, False).save(tmp_path / "untied")
    load_actor(ModelConfig(name_or_path=str(tmp_path / "untied"), lora=lora), "cpu")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_adapters_are_merged_into_the_model_that_they_name(tmp_path: Path, own_tokenizer: bool) -> None:
    _actor(0, True).save(tmp_path / "base")
    config = ModelConfig(name_or_path=str(tmp_path / "base"), lora=LoraConfig(rank=2))
    actor = load_actor(config, "cpu")
    last = actor.add_control_tokens(2)[1] if own_tokenizer else 4
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    actor.save(tmp_path / "adapters")
    if not own_tokenizer:
        for file in (tmp_path / "adapters").glob("*token*"):
            file.unlink()
    ids = torch.tensor([[2, 5, last, 3]])
    with torch.no_grad():
        expected = actor.model(input_ids=ids).logits
        first = load_actor(ModelConfig(name_or_path=str(tmp_path / "adapters")), "cpu")
        assert torch.allclose(first.model(input_ids=ids).logits, expected, atol=1e-5)
        assert not any("lora" in name for name, _ in first.model.named_parameters())
        assert all(p.requires_grad for p in first.model.parameters())
        # a whole model again, which further adapters can stand on
        first.save(tmp_path / "merged")
        again = ModelConfig(name_or_path=str(tmp_path / "merged"), lora=LoraConfig(rank=2))
        second = load_actor(again, "cpu")
        assert torch.allclose(second.model(input_ids=ids).logits, expected, atol=1e-5)
        assert sum(p.numel() for p in second.trainable_parameters()) > 0


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_adapters_find_their_base_from_anywhere_and_refuse_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for place in (here, elsewhere):
        place.mkdir()
    _actor(0, True).save(here / "base")
    monkeypatch.chdir(here)
    actor = load_actor(ModelConfig(name_or_path="base", lora=LoraConfig(rank=2)), "cpu")
    actor.save(elsewhere / "adapters")
    expected = {name: value.clone() for name, value in actor.state_dict().items()}
    monkeypatch.chdir(elsewhere)
    found = load_actor(ModelConfig(name_or_path="adapters"), "cpu")
    assert all(torch.equal(expected[name], value) for name, value in found.state_dict().items())
    tmp_path.joinpath("moved").mkdir()
    monkeypatch.chdir(tmp_path / "moved")
    for place in (here, elsewhere):
        place.rename(Path(place.name))
    found = load_actor(ModelConfig(name_or_path="elsewhere/adapters"), "cpu")
    assert all(torch.equal(expected[name], value) for name, value in found.state_dict().items())
    other = _actor(0, True)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.01
    other.save(Path("here/base"))
    with pytest.raises(ConfigError, match=r"adapters were trained over other weights than those of .*base"):
        load_actor(ModelConfig(name_or_path="elsewhere/adapters"), "cpu")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("tie", [True, False])
def test_adapters_over_a_vocabulary_that_grew_in_python_are_merged(tmp_path: Path, tie: bool) -> None:
    _actor(0, tie).save(tmp_path / "base")
    grown = load_actor(ModelConfig(name_or_path=str(tmp_path / "base")), "cpu")
    grown.model.resize_token_embeddings(11, mean_resizing=False)
    actor = make_actor(grown.model, grown.tokenizer, ModelConfig(lora=LoraConfig(rank=2)))
    actor.save(tmp_path / "adapters")
    found = load_actor(ModelConfig(name_or_path=str(tmp_path / "adapters")), "cpu").state_dict()
    expected = actor.state_dict()
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if tie else set())
    assert all(torch.equal(expected[name], value) for name, value in found.items())
