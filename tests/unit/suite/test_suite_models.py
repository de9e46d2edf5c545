import json
import math
import os
import shutil
from dataclasses import replace

import pytest
import torch
from suite_settings import classifier_settings, reward_model_settings, warm_start_settings

from multitask_rl.records import Prompt, Rollout
from multitask_rl_tasks.suite.judges import SAFETY_LABELS, save_reward_model, save_safety_classifier
from multitask_rl_tasks.suite.settings import FIGURES_FILE, WarmTask, cached_directory
from multitask_rl_tasks.suite.tokenizer import CHARACTERS, CONTROL_TOKENS, build_tokenizer
from multitask_rl_tasks.suite.warm_start import save_actor, warm_start


def rollout(prompt, response):
    return Rollout(
        prompt=Prompt(task="t", prompt_id="t/0", draw=0, row={"prompt": prompt}, text=prompt, prompt_ids=[1]),
        sample=0,
        response=response,
    )


def test_tokenizer_gives_one_token_per_character_and_returns_the_text():
    tokenizer = build_tokenizer()
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(CHARACTERS) == len(set(ids))
    assert tokenizer.decode(ids) == CHARACTERS
    assert tokenizer("a", "b")["input_ids"] == tokenizer("ab")["input_ids"]
    assert len(tokenizer(CONTROL_TOKENS[4] + "a")["input_ids"]) == 2


def test_saved_actor_loads_by_the_auto_classes_with_its_own_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures = save_actor(tmp_path / "actor", warm_start_settings(), cache_dir=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "actor")
    text = f"{CONTROL_TOKENS[2]}Cdbl; \n  (x % 3)  !"
    assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert sum(p.numel() for p in model.parameters()) == figures["parameters"]
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_default_actor_has_between_a_third_of_a_million_and_a_million_parameters():
    from transformers import LlamaForCausalLM

    from multitask_rl_tasks.suite.settings import ModelSize
    from multitask_rl_tasks.suite.warm_start import build_config

    model = LlamaForCausalLM(build_config(ModelSize(), build_tokenizer()))
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 1_000_000


def test_warm_start_is_a_function_of_its_settings_and_learns():
    settings = warm_start_settings(steps=150, learning_rate=1e-2)
    first, _, figures = warm_start(settings)
    torch.rand(3)  # what others draw does not matter
    second, _, _ = warm_start(settings)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    third, _, _ = warm_start(replace(settings, seed=1))
    assert not torch.equal(first.lm_head.weight, third.lm_head.weight)
    # an actor that knows nothing has log(vocabulary) nats per token
    assert figures["loss"] < 0.6 * math.log(len(build_tokenizer()))


def test_a_second_call_copies_from_the_cache_and_another_setting_does_not(tmp_path):
    settings = warm_start_settings()
    first = save_actor(tmp_path / "a", settings, cache_dir=tmp_path / "cache")
    again = save_actor(tmp_path / "b", settings, cache_dir=tmp_path / "cache")
    other = save_actor(tmp_path / "c", replace(settings, seed=1), cache_dir=tmp_path / "cache")
    assert [figures["from_cache"] for figures in (first, again, other)] == [False, True, False]
    assert again == first | {"from_cache": True}
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_of_two_builds_at_once_the_first_is_kept_and_a_copy_is_whole_or_absent(tmp_path):
    options = {"cache_dir": tmp_path / "cache", "kind": "x", "settings": WarmTask(share=1.0, corruption=0.0)}

    def quick(target):
        (target / "config.json").write_text("{}")
        os.mkfifo(target / "weights")  # cannot be copied
        return {"loss": 1.0}

    def slow(target):
        with pytest.raises(shutil.Error, match="named pipe"):
            cached_directory(tmp_path / "a", build=quick, **options)
        return {"loss": 2.0}

    with pytest.raises(shutil.Error, match="named pipe"):
        cached_directory(tmp_path / "a", build=slow, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"], "no half of a copy"
    (cached,) = (tmp_path / "cache").iterdir()
    (cached / "weights").unlink()
    for _ in range(2):  # the second time in place of the first copy
        assert cached_directory(tmp_path / "a", build=slow, **options) == {"loss": 1.0, "from_cache": True}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", FIGURES_FILE]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_build_that_fails_leaves_nothing_in_the_cache(tmp_path):
    def fail(target):
        (target / "half").write_text("")
        raise RuntimeError("stopped")

    def succeed(target):
        assert not list(target.iterdir())
        return {"loss": 1.0}

    settings = WarmTask(share=1.0, corruption=0.0)
    options = {"cache_dir": tmp_path / "cache", "kind": "x", "settings": settings}
    with pytest.raises(RuntimeError, match="stopped"):
        cached_directory(tmp_path / "a", build=fail, **options)
    assert not list((tmp_path / "cache").iterdir())
    assert cached_directory(tmp_path / "a", build=succeed, **options) == {"loss": 1.0, "from_cache": False}
    assert json.loads((tmp_path / "a" / FIGURES_FILE).read_text()) == {"loss": 1.0}


def test_reward_model_directory_works_in_the_plugin(tmp_path):
    from multitask_rl_rewards.rm_hf import RewardModel

    figures = save_reward_model(tmp_path / "rm", reward_model_settings(), cache_dir=tmp_path / "cache")
    assert 0.0 < figures["accuracy"] <= 1.0
    assert 0.6 < figures["annotator_accuracy"] < 0.9
    plugin = RewardModel(RewardModel.Config(model_name=str(tmp_path / "rm"), device="cpu"))
    rollouts = [rollout("Rabc>", "aeio"), rollout("Rabc>", ""), rollout("Rabc>", "aeio")]
    first, empty, second = plugin.score(rollouts)
    assert first.value == pytest.approx(second.value, abs=1e-6)
    assert first.value != empty.value


def test_reward_model_learns_the_gold_order(tmp_path):
    settings = replace(reward_model_settings(), num_examples=1500, noise=0.0, epochs=3, longest=9)
    figures = save_reward_model(tmp_path / "rm", settings, cache_dir=tmp_path / "cache")
    assert figures["accuracy"] > 0.65


def test_classifier_directory_works_in_the_plugin_and_separates_harm(tmp_path):
    from multitask_rl_rewards.safety_classifier import SafetyClassifier

    settings = classifier_settings(num_examples=1500, epochs=3, noise=0.02)
    figures = save_safety_classifier(tmp_path / "judge", settings, cache_dir=tmp_path / "cache")
    assert figures["false_positive_rate"] < 0.1
    assert figures["false_negative_rate"] < 0.1
    plugin = SafetyClassifier(
        SafetyClassifier.Config(model_name=str(tmp_path / "judge"), with_prompt=True, device="cpu")
    )
    harmful, refused, benign = plugin.judge(
        [rollout("Pabxcd>", "abxcd"), rollout("Pabxcd>", "!"), rollout("Pabcd>", "abcd")]
    )
    assert harmful.violated
    assert not refused.violated
    assert not benign.violated
    assert SAFETY_LABELS == ("safe", "unsafe")
