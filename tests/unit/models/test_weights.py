"""Weights that are brought bucket by bucket."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from model_builders import build_actor
from multitask_rl.models import actor as actors
from multitask_rl.models.actor import copy_weights, read_weights, save_in_files
from multitask_rl.models.weights import WeightStream, as_saved, buckets_of, cut_buckets, like_of


def test_one_bucket_at_a_time_is_held():
    like = {name: torch.empty(size, device="meta") for name, size in (("a", 2), ("b", 3), ("c", 9), ("d", 1))}
    assert cut_buckets(like, 20) == [["a", "b"], ["c"], ["d"]]
    brought = []

    def bring(names):
        assert sum(reference() is not None for reference in brought) <= 1, "what the reader has, no more"
        found = {name: torch.full(like[name].shape, float(len(brought))) for name in names}
        brought.extend(weakref.ref(value) for value in found.values())
        return found

    stream = WeightStream(like, bring, 20)
    assert list(stream) == list("abcd")
    assert not brought, "names bring nothing"
    assert [value.numel() for value in stream.values()] == [2, 3, 9, 1]
    assert len(brought) == 4
    assert like_of(stream) is like
    assert buckets_of(stream) == [["a", "b"], ["c"], ["d"]]
    assert buckets_of(like) == [list("abcd")]


def test_many_files_hold_what_one_holds(tmp_path, monkeypatch):
    actor = build_actor()
    weights = actor.state_dict()
    stream = WeightStream(weights, lambda names: {name: weights[name] for name in names})
    save_in_files(actor.model, stream, tmp_path / "one")
    actor.save(tmp_path / "whole")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()

    monkeypatch.setattr(actors, "FILE_BYTES", 20_000)
    save_in_files(actor.model, stream, tmp_path / "many")
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert not [entry for entry in (tmp_path / "many").iterdir() if entry.is_dir()]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    for name, value in found.state_dict().items():
        assert torch.equal(value, actor.model.state_dict()[name])
    other = build_actor(seed=3)
    copy_weights(other.model, read_weights(tmp_path / "many"))
    assert torch.equal(next(other.model.parameters()), next(actor.model.parameters()))


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING_NAMES, reason="an older transformers")
def test_weights_that_are_saved_as_one_lie_in_one_file(tmp_path, monkeypatch):
    """Query, key, value and gate of HRM are one weight of its files."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = AutoConfig.for_model("hrm_text", num_key_value_heads=2, head_dim=8, **sizes, **tokens)
    model = AutoModelForCausalLM.from_config(config)
    weights = model.state_dict()
    monkeypatch.setattr(actors, "FILE_BYTES", 6000)
    stream = WeightStream(weights, lambda names: {name: weights[name] for name in names})
    save_in_files(model, stream, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert found.keys() == weights.keys()
    assert not [name for name, value in weights.items() if not torch.equal(found[name], value)]


def test_weights_as_saved_are_those_of_the_files(tmp_path):
    """A layer's experts are one tensor in the model, and one tensor each in the files."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=48, num_local_experts=4, **sizes))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    weights = model.state_dict()
    brought = []

    def bring(names):
        brought.append(list(names))
        return {name: weights[name] for name in names}

    saved = as_saved(model, WeightStream(weights, bring, 1))
    assert not brought, "names bring nothing"
    assert any(".experts.3.w1.weight" in name for name in saved)
    assert saved.keys() == written.keys()
    assert {name: value.shape for name, value in like_of(saved).items()} == {
        name: value.shape for name, value in written.items()
    }
    assert not [name for name, value in saved.items() if not torch.equal(value, written[name])]
    assert sorted(name for names in brought for name in names) == sorted(weights), "each weight once"

    plain = build_actor()
    own = plain.state_dict()
    assert as_saved(plain.model, own) is own
