from __future__ import annotations

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Verdict
from multitask_rl_rewards.safety_classifier import SafetyClassifier, unsafe_labels_of
from multitask_rl_rewards.transformer_models import batches, remove_special_tokens
from reward_builders import rollout, train_classifier

EXAMPLES = [
    ("hello good", 0),
    ("kill it", 1),
    ("good is good", 0),
    ("it is bad kill", 1),
    ("what is it", 0),
    ("kill", 1),
]


@pytest.fixture(scope="module")
def binary_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("safety")
    train_classifier(
        directory,
        EXAMPLES,
        num_labels=2,
        id2label={0: "safe", 1: "unsafe"},
        label2id={"safe": 0, "unsafe": 1},
    )
    return directory


def build(directory, **changes) -> SafetyClassifier:
    return SafetyClassifier(SafetyClassifier.Config(model_name=str(directory), device="cpu", **changes))


def test_cost_is_the_probability_of_unsafe(binary_dir):
    good, bad = build(binary_dir).judge([rollout("hello good"), rollout("kill it")])
    assert not good.violated
    assert good.cost < 0.2
    assert bad.violated
    assert bad.cost > 0.8
    assert "unsafe" in bad.reason


def test_threshold_decides_violation(binary_dir):
    verdicts = [build(binary_dir, threshold=t).judge([rollout("good kill")])[0] for t in (1e-6, 1.0)]
    assert verdicts[0].cost == verdicts[1].cost
    assert [v.violated for v in verdicts] == [True, False]


def test_empty_response_is_satisfied_and_prompt_counts_only_if_asked(binary_dir):
    empty, plain = build(binary_dir).judge(
        [rollout(" ", prompt="kill"), rollout("hello", prompt="kill it kill")]
    )
    assert empty == Verdict(cost=0.0, violated=False, reason="empty response")
    (both,) = build(binary_dir, with_prompt=True).judge([rollout("hello", prompt="kill it kill")])
    assert both.cost > plain.cost


def test_multi_label_and_single_output_models_use_sigmoids(tmp_path):
    train_classifier(
        tmp_path / "one",
        [("good", -3.0), ("kill", 3.0)],
        num_labels=1,
        id2label={0: "toxic"},
        label2id={"toxic": 0},
    )
    good, bad = build(tmp_path / "one").judge([rollout("good"), rollout("kill")])
    assert good.cost < 0.2
    assert bad.cost > 0.8
    train_classifier(
        tmp_path / "many",
        EXAMPLES,
        num_labels=2,
        id2label={0: "praise", 1: "hate"},
        label2id={"praise": 0, "hate": 1},
        problem_type="multi_label_classification",
    )
    (verdict,) = build(tmp_path / "many").judge([rollout("kill")])
    assert verdict.violated


@pytest.mark.parametrize(
    ("labels", "chosen", "expected"),
    [
        (["safe", "unsafe"], [], [1]),
        (["hateful", "non-hateful"], [], [0]),
        (["not_toxic", "toxic"], [], [1]),
        (["safe", "S1", "S2"], [], [1, 2]),
        (["neutral", "hate speech", "offensive"], [], [1, 2]),
        (["LABEL_0", "LABEL_1"], ["LABEL_1"], [1]),
        (["toxic"], [], [0]),
    ],
)
def test_unsafe_labels_are_recognised_or_chosen(labels, chosen, expected):
    assert unsafe_labels_of(labels, chosen, "m") == expected


@pytest.mark.parametrize(
    ("labels", "chosen"), [(["LABEL_0", "LABEL_1"], []), (["a", "b"], ["c"]), (["LABEL_0"], [])]
)
def test_labels_that_say_nothing_are_config_errors(labels, chosen):
    with pytest.raises(ConfigError, match="labels"):
        unsafe_labels_of(labels, chosen, "m")


def test_bad_configuration_is_refused(binary_dir):
    with pytest.raises(ConfigError, match=r"threshold must be in \(0, 1\]"):
        build(binary_dir, threshold=0.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        build("/nowhere")
    with pytest.raises(ConfigError, match="does not exist on this machine"):
        SafetyClassifier(SafetyClassifier.Config(model_name=str(binary_dir), device="cuda:9"))


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("place", [0, 37, 90, 600])
def test_the_worst_part_of_a_response_longer_than_the_model_reads_counts(binary_dir, with_prompt, place):
    constraint = build(binary_dir, max_length=16, max_parts=400, with_prompt=with_prompt)
    harmless = ["hello", "good"] * 300
    harmful = [*harmless[:place], *["kill"] * 24, *harmless[place:]]
    short, clean, hidden = constraint.judge(
        [rollout(text, prompt="what is it") for text in ("kill " * 8, " ".join(harmless), " ".join(harmful))]
    )
    assert not clean.violated
    assert hidden.violated
    assert hidden.cost > 0.9 * short.cost


@pytest.mark.parametrize("with_prompt", [False, True])
def test_a_response_of_more_parts_than_are_read_counts_as_unsafe(binary_dir, with_prompt):
    constraint = build(binary_dir, max_length=16, max_parts=8, with_prompt=with_prompt)
    read, unread = constraint.judge([rollout("hello good " * n, prompt="what is it") for n in (20, 600)])
    assert not read.violated
    assert unread == Verdict(
        cost=1.0, violated=True, reason="longer than `max_parts` = 8 parts of what the model reads at once"
    )


def test_text_that_is_no_unicode_is_judged(binary_dir):
    (verdict,) = build(binary_dir).judge([rollout("hello good \ud800")])
    assert isinstance(verdict, Verdict)


def test_nested_control_tokens_are_removed_in_linear_time():
    text = remove_special_tokens("<e" * 100_000 + "os>" * 100_000, ["<eos>", "<pad>"])
    assert "<eos>" not in text
    assert remove_special_tokens("a <e<eos>os> b<pad>", ["<eos>", "<pad>"]) == "a  b"


def test_a_forward_takes_fewer_of_long_inputs():
    assert list(batches([10, 2048, 600, 2048, 5], 4)) == [[1], [3], [2, 0, 4]]
    assert [len(batch) for batch in batches([40_000] * 2, 8)] == [1, 1]
