from __future__ import annotations

import math
import pickle

import pytest
from transformers import Qwen2ForCausalLM

from multitask_rl.errors import ConfigError
from multitask_rl.records import Score
from multitask_rl_rewards.rm_hf import RewardModel
from reward_builders import qwen_config, rollout, save_tokenizer, train_classifier


@pytest.fixture(scope="module")
def reward_model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rm")
    examples = [("hello good", 1.0), ("hello bad", -1.0), ("what good good", 1.0), ("what bad it", -1.0)]
    train_classifier(directory, examples, num_labels=1)
    return directory


def build(directory, **changes) -> RewardModel:
    return RewardModel(RewardModel.Config(model_name=str(directory), device="cpu", **changes))


def values(results) -> list[float]:
    assert all(isinstance(result, Score) for result in results)
    return [result.value for result in results]


def test_trained_preference_ranks_responses(reward_model_dir):
    good, bad = values(
        build(reward_model_dir).score([rollout("good", prompt="hello"), rollout("bad", prompt="hello")])
    )
    assert good > 0.5
    assert bad < -0.5


def test_loading_a_judge_shows_no_progress_bar(reward_model_dir, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    build(reward_model_dir).warm_up()
    assert "Loading" not in capfd.readouterr().err, "it would break the run's own lines"


def test_batching_and_order_do_not_change_values(reward_model_dir):
    texts = ["good", "bad it is what it is", "", "hello", "good bad", "it is it is it is good"]
    rollouts = [rollout(text, prompt="hello") for text in texts]
    one_by_one = values(build(reward_model_dir, batch_size=1).score(rollouts))
    together = values(build(reward_model_dir, batch_size=4).score(rollouts))
    assert together == pytest.approx(one_by_one, abs=1e-5)
    backwards = values(build(reward_model_dir, batch_size=3).score(rollouts[::-1]))
    assert backwards[::-1] == pytest.approx(one_by_one, abs=1e-5)


@pytest.mark.parametrize("template", ["", "{prompt} it {response} is", "chat"])
def test_a_response_that_is_too_long_loses_its_end_and_the_prompt_stays_whole(
    reward_model_dir, template, monkeypatch
):
    model = build(reward_model_dir, max_length=8, template=template.replace("chat", ""))
    if template == "chat":
        chat = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}is"
        monkeypatch.setattr(model._classifier._loaded.tokenizer, "chat_template", chat)
    room = {"": 6, "chat": 3}.get(template, 4)
    texts = ["good " * 50 + "bad bad", "good " * room, "bad " * 50]
    long, fitting, bad = values(model.score([rollout(text, prompt="hello what") for text in texts]))
    assert long == fitting != bad
    (other,) = values(model.score([rollout(texts[0], prompt="bad bad")]))
    assert other != long, "the prompt is read"


def test_a_prompt_that_leaves_no_room_loses_its_beginning(reward_model_dir):
    model = build(reward_model_dir, max_length=8)
    long, short = (rollout("good bad " * 20, prompt=prompt) for prompt in ("it " * 50, "it " * 6))
    assert values(model.score([long])) == values(model.score([short]))


def test_chat_template_of_the_reward_model_is_used(tmp_path):
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    train_classifier(
        tmp_path, [("user hello assistant good", 1.0), ("user hello assistant bad", -1.0)], num_labels=1
    )
    plain = build(tmp_path)
    plain.warm_up()
    tokens = plain._classifier._encode("hello", "good", "")["input_ids"]
    save_tokenizer(tmp_path, chat_template=template)
    del plain
    chat = build(tmp_path)
    assert len(chat._classifier._encode("hello", "good", "")["input_ids"]) == len(tokens) + 2
    good, bad = values(chat.score([rollout("good", prompt="hello"), rollout("bad", prompt="hello")]))
    assert good > bad


def test_response_cannot_forge_special_tokens(reward_model_dir):
    model = build(reward_model_dir)
    forged = rollout("bad <eos> <<eos>eos>", prompt="hello")
    assert values(model.score([forged])) == values(model.score([rollout("bad", prompt="hello")]))


def test_own_tokenizer_survives_a_qwen2_config(reward_model_dir):
    encoded = build(reward_model_dir)._classifier._encode("hello", "good bad", "")
    assert encoded["input_ids"] == [6, 3, 4]


def test_one_model_is_shared_by_two_plugins(reward_model_dir):
    first, second = build(reward_model_dir), build(reward_model_dir, batch_size=2)
    assert first._classifier._loaded is second._classifier._loaded


def test_label_gives_a_probability(tmp_path):
    train_classifier(
        tmp_path,
        [("good", 1), ("bad", 0)],
        num_labels=2,
        id2label={0: "worse", 1: "better"},
        label2id={"worse": 0, "better": 1},
    )
    good, bad = values(
        build(tmp_path, label="better").score([rollout("good", text=""), rollout("bad", text="")])
    )
    assert 0.5 < good <= 1.0
    assert 0.0 <= bad < 0.5
    with pytest.raises(ConfigError, match=r"2 outputs; set `label` to one of \['worse', 'better'\]"):
        build(tmp_path)
    with pytest.raises(ConfigError, match="no label 'best'"):
        build(tmp_path, label="best")


def test_a_language_model_is_refused_instead_of_judging_by_random_weights(tmp_path):
    Qwen2ForCausalLM(qwen_config(save_tokenizer(tmp_path))).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks the weights score\.weight.* model trained as a classifier"):
        build(tmp_path, label="LABEL_1").warm_up()
    with pytest.raises(ConfigError, match="is a Qwen2ForCausalLM, no reward model: give a model trained"):
        build(tmp_path)  # and no advice to set a label


def test_non_finite_logit_is_a_grader_failure(tmp_path):
    import torch
    from transformers import Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification(qwen_config(save_tokenizer(tmp_path), num_labels=1))
    torch.nn.init.constant_(model.score.weight, math.nan)
    model.save_pretrained(tmp_path)
    (result,) = build(tmp_path).score([rollout("good")])
    assert result.kind == "grader"


def test_missing_model_and_device_are_config_errors(reward_model_dir):
    with pytest.raises(ConfigError, match="'/nowhere/model' cannot be read") as absent:
        build("/nowhere/model")
    assert "hf download" not in str(absent.value)  # a path is no name of the hub
    with pytest.raises(ConfigError, match="`hf download someone/model`"):
        build("someone/model")
    with pytest.raises(ConfigError, match="`model_name` is required"):
        build("")
    with pytest.raises(ConfigError, match="'cuda:4' does not exist on this machine"):
        RewardModel(RewardModel.Config(model_name=str(reward_model_dir), device="cuda:4"))
    with pytest.raises(ConfigError, match="not a torch device"):
        RewardModel(RewardModel.Config(model_name=str(reward_model_dir), device="gpu0"))
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32"):
        build(reward_model_dir, dtype="int2").warm_up()


def test_config_pickles():
    config = RewardModel.Config(model_name="x")
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_cut_exchange_is_told(reward_model_dir):
    reward = build(reward_model_dir, max_length=8)
    whole, cut = reward.score([rollout("good", text="hello"), rollout("good " * 20, text="hello")])
    assert (whole.components, cut.components) == ({"truncated": 0.0}, {"truncated": 1.0})
