"""Weights that are brought bucket by bucket."""

import json
import weakref

import torch
from transformers import AutoModelForCausalLM

from model_builders import build_actor
from multitask_rl.models import actor as actors
from multitask_rl.models.actor import copy_weights, read_weights, save_in_files
from multitask_rl.models.weights import WeightStream, buckets_of, cut_buckets, like_of


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
