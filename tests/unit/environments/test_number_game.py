"""The number game: solvable in as many guesses as halving needs, and only with the world's answers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from multitask_rl.environments.base import StepResult
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin

PLACE = "multitask_rl_tasks.environments.number_game"


def build(**config):
    return build_plugin(load_plugin(TASKS, f"{PLACE}:NumberGame"), config, where="test")


def rows(split: str = "train", **config) -> list:
    return build_plugin(load_plugin(TASKS, f"{PLACE}:NumberGameTask"), config, where="test").rows(split)


def say(game, text: object) -> StepResult:
    return game.step({"role": "assistant", "content": str(text)})


def play(row, strategy) -> StepResult:
    """Play one episode; ``strategy`` takes the messages of the world so far."""
    game, heard = build(), []
    assert list(game.reset(row)) == []
    while True:
        result = say(game, strategy(heard))
        if result.done:
            return result
        heard.append(result.messages[0]["content"])


def halve(high: int):
    def strategy(heard):
        low, top = 1, high
        for word in heard:
            middle = (low + top) // 2
            low, top = (middle + 1, top) if word == "higher" else (low, middle - 1)
        return (low + top) // 2

    return strategy


@pytest.mark.parametrize("level", [1, 2, 3, 5])
def test_halving_always_wins_and_guessing_blindly_wins_as_often_as_it_guesses(level):
    found = rows(level=level, num_rows=300)
    assert {row["high"] for row in found} == {2**level - 1}
    assert all(play(row, halve(2**level - 1)).reward == 1.0 for row in found)
    blind = [play(row, lambda heard: len(heard) + 1).reward for row in found]
    assert sum(blind) / len(blind) == pytest.approx(float(Fraction(level, 2**level - 1)), abs=0.08)


def test_a_wrong_guess_earns_nothing_and_is_answered_and_the_last_one_ends_the_game():
    game = build(higher="+", lower="-")
    game.reset(rows(level=3)[0])
    first, second, third = (say(game, guess) for guess in (0, 9, "I do not know"))
    assert (first.messages, first.done, first.reward) == ([{"role": "user", "content": "+"}], False, 0.0)
    assert second.messages == [{"role": "user", "content": "-"}]
    assert (third.messages, third.done, third.reward) == ((), True, 0.0)
    assert third.info == {"solved": 0.0}


@pytest.mark.parametrize(
    "answer", ["", "seven", "<think>is it 4", "9" * 10_000, "no number here"], ids=lambda text: text[:9]
)
def test_an_answer_without_a_number_costs_a_guess_and_is_told(answer):
    game = build()
    game.reset(rows(level=3)[0])
    assert say(game, answer).messages[0]["content"] == "a number from 1 to 7"


def test_the_last_number_after_the_thinking_is_the_guess():
    for row in rows(level=2, num_rows=40):
        one, two = build(), build()
        one.reset(row)
        two.reset(row)
        assert say(one, "<think>1 or 3</think> not 7, so 2.") == say(two, "2")


def test_the_row_decides_the_number_and_the_row_does_not_say_it():
    row = rows(level=4)[0]
    assert set(row) == {"id", "prompt", "seed", "level", "high", "guesses", "split"}
    assert row["prompt"] == "1-15?"
    secrets = set()
    for _ in range(2):
        secrets.add(next(n for n in range(1, 16) if play(row, lambda heard, n=n: n).reward == 1.0))
    assert len(secrets) == 1


def test_splits_are_chosen_by_the_seed_and_share_none():
    splits = {
        split: [row["seed"] for row in rows(split, num_rows=500)] for split in ("train", "validation", "test")
    }
    assert sorted(seed for seeds in splits.values() for seed in seeds) == list(range(500))
    assert len(splits["train"]) > 350
    assert min(map(len, splits.values())) > 30
    assert splits["test"] == [row["seed"] for row in rows("test", num_rows=500, level=5)]
    assert rows("other") == []


def test_the_task_names_its_world_and_as_many_turns_as_guesses():
    task = build_plugin(load_plugin(TASKS, f"{PLACE}:NumberGameTask"), {"level": 3}, where="test")
    settings = task.settings()
    assert (settings["environment"], settings["max_turns"]) == ("number_game", 3)
    assert (
        settings["prompt"]
        .format(**task.rows("train")[0])
        .startswith("I think of a whole number from 1 to 7.")
    )


def test_bad_settings_and_rows_are_refused():
    with pytest.raises(ConfigError, match=r"level must be in \[1, 20\], got 0"):
        rows(level=0)
    with pytest.raises(DataError, match="`seed`"):
        build().reset({"prompt": "p"})
