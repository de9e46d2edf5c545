from __future__ import annotations

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Score, Turn
from multitask_rl_rewards.shape import Format, JsonSchema, Length, Regex, Repetition
from reward_builders import rollout

EMPTY = ["", "  ", "\n"]


def value(reward, response: str, **row: object) -> float:
    (result,) = reward.score([rollout(response, **row)])
    assert isinstance(result, Score), result
    return result.value


def test_length_is_one_inside_and_falls_over_the_slack():
    reward = Length(Length.Config(minimum=2, maximum=4, slack=2))
    assert [value(reward, "w " * n) for n in range(8)] == [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert value(Length(Length.Config(minimum=2, maximum=2, slack=0)), "a b c") == 0.0
    assert value(Length(Length.Config(unit="chars", maximum=3)), "abc") == 1.0


def test_length_in_tokens_counts_the_sampled_ids():
    sample = rollout("two words")
    sample.response_ids = [1, 2, 3]
    (result,) = Length(Length.Config(unit="tokens", minimum=3, maximum=3, slack=0)).score([sample])
    assert result == Score(value=1.0, components={"length": 3.0})


def test_the_length_of_an_episode_is_that_of_its_last_answer_in_any_unit():
    episode = rollout("done")
    episode.response_ids = [1, 2, 3, 4, 5, 6]
    episode.turns = [Turn(num_tokens=4, response="a b c d"), Turn(num_tokens=2, response="done")]
    lengths = {}
    for unit in ("words", "chars", "tokens"):
        (result,) = Length(Length.Config(unit=unit)).score([episode])
        lengths[unit] = result.components["length"]
    assert lengths == {"words": 1.0, "chars": 4.0, "tokens": 2.0}


def test_repetition_is_the_share_of_new_n_grams():
    reward = Repetition(Repetition.Config(n=2))
    assert value(reward, "a b c d") == 1.0
    assert value(reward, "a b a b a") == 0.5  # ab ba ab ba
    assert value(reward, "A a a a a") == 0.25
    assert value(reward, "a") == 1.0


def test_repetition_of_short_responses_and_within_a_long_word():
    reward = Repetition(Repetition.Config())
    assert value(reward, "yes. yes. yes.") == pytest.approx(1 / 3)
    assert value(reward, "no no no no") == pytest.approx(1 / 3)
    assert value(reward, "ha" * 200) == pytest.approx(2 / 397)
    assert [value(reward, text) for text in ("Yes.", "New York", "the more the merrier")] == [1.0] * 3


def test_regex_searches_matches_wholly_or_asks_for_absence():
    assert value(Regex(Regex.Config(pattern=r"\d+")), "it is 42") == 1.0
    assert value(Regex(Regex.Config(pattern=r"\d+", full=True)), "it is 42") == 0.0
    assert value(Regex(Regex.Config(pattern=r"\d+", full=True)), " 42 \n") == 1.0
    assert value(Regex(Regex.Config(pattern=r"\d+", absent=True)), "no digits") == 1.0
    assert value(Regex(Regex.Config(pattern=r"\d+", absent=True)), "1") == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>so</think><answer>4</answer>", 1.0),
        (" <think>a\nb</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think>so</think>4", 0.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>4</answer> and more", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0),
        ("<think>so</think><answer>4", 0.0),
        ("x<think>so</think><answer>4</answer>", 0.0),
    ],
)
def test_format_wants_each_tag_once_in_order_and_nothing_else(response, expected):
    assert value(Format(Format.Config()), response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("3?</think><answer>4</answer>", 1.0),
        ("</think><answer>4</answer>", 0.0),
        ("<think>3?</think><answer>4</answer>", 1.0),
        ("4", 0.0),
    ],
)
def test_a_tag_that_the_prompt_has_opened_is_open(response: str, expected: float) -> None:
    (found,) = Format(Format.Config()).score([rollout(response, "q<think>\n")])
    assert found == Score(value=expected)


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"age": 3}', 1.0),
        ('```json\n{"age": 3}\n```', 1.0),
        ('<think>hm</think>{"age": 3}', 1.0),
        ('{"age": "3"}', 0.5),
        ('```{"age": 3}```', 1.0),
        ('```json {"age": 3}```', 1.0),
        ("{}", 0.5),
        ("[]", 0.0),
        ("0", 0.0),
        ("null", 0.0),
        ('{"age": NaN}', 0.0),
        ('{"age": 3, "price": Infinity}', 0.0),
        ('Sure: {"age": 3}', 0.0),
        ("{age: 3}", 0.0),
        ('{"age": 3} {"age": 3}', 0.0),
        ("[" * 20_000, 0.0),
    ],
    ids=range(16),
)
def test_json_schema_grades_validity(response, expected):
    assert value(JsonSchema(JsonSchema.Config(schema=SCHEMA)), response) == expected
    assert value(JsonSchema(JsonSchema.Config()), response, schema=SCHEMA) == expected
    (score,) = JsonSchema(JsonSchema.Config(schema=SCHEMA)).score([rollout(response)])
    assert score.components == {"valid": float(expected == 1.0)}, "a response without JSON counts in the mean"


@pytest.mark.parametrize(
    ("schema", "response", "expected"),
    [
        ({"type": "number", "multipleOf": 0.01}, "1e999", 0.25),
        ({"type": "integer", "multipleOf": 3}, "1e999", 0.0),
        ({"type": "number", "multipleOf": 0.5}, "2.5", 1.0),
        ({"type": ["object", "null"], "required": ["a"]}, "{}", 0.25),
        ({"type": ["object", "null"], "required": ["a"]}, "0", 0.0),
        ({"type": ["object", "null"], "required": ["a"]}, "null", 1.0),
        ({"enum": [1, 2]}, "3", 0.25),
        ({"enum": [1, 2]}, '"x"', 0.25),
    ],
)
def test_json_of_the_right_type_that_does_not_fit_earns_invalid(schema, response, expected):
    assert value(JsonSchema(JsonSchema.Config(schema=schema, invalid=0.25)), response) == expected
    least = value(JsonSchema(JsonSchema.Config(schema=schema, invalid=0)), response)
    assert least == (1.0 if expected == 1.0 else 0.0)


@pytest.mark.parametrize(
    "row", [{}, {"schema": {}}, {"schema": "{"}, {"schema": {"type": "thing"}}, {"schema": 3}]
)
def test_row_without_a_usable_schema_is_a_data_failure(row):
    (result,) = JsonSchema(JsonSchema.Config()).score([rollout("{}", **row)])
    assert isinstance(result, Failure)
    assert result.kind == "data"


@pytest.mark.parametrize("response", EMPTY)
def test_empty_responses_score_zero_everywhere(response):
    rewards = [
        Length(Length.Config(minimum=0)),
        Repetition(Repetition.Config()),
        Regex(Regex.Config(pattern=".*")),
        Regex(Regex.Config(pattern="x", absent=True)),
        Format(Format.Config()),
        JsonSchema(JsonSchema.Config(schema=SCHEMA)),
    ]
    assert [value(reward, response) for reward in rewards] == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        (Length, {"unit": "lines"}, r"Length.Config.unit must be one of words, chars, tokens, got 'lines'"),
        (Length, {"minimum": 5, "maximum": 2}, "`minimum` <= `maximum`"),
        (Repetition, {"n": 0}, r"Repetition.Config.n must be >= 1"),
        (Regex, {"pattern": "("}, "not a regular expression"),
        (Regex, {}, "`pattern` is required"),
        (Format, {"tags": []}, "`tags` must be a list"),
        (Format, {"tags": ["a b"]}, "`tags` must be a list"),
        (JsonSchema, {"schema": {"type": "thing"}}, "not a JSON schema"),
    ],
)
def test_bad_configuration_is_refused(cls, config, message):
    with pytest.raises(ConfigError, match=message):
        cls(cls.Config(**config))
