"""The worlds and rows of the claim about tasks of many turns: what feedback is worth, when a world lies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def turns() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("claims.turns")
    sys.path.remove(str(BENCHMARKS))


def _say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_look_up_is_won_by_the_value_that_was_heard(turns: Any) -> None:
    values = set()
    for seed in range(13, 413, 10):  # the key is 3, the tables differ
        row = turns.game_row("look_up", seed)
        world = turns.LookUp(turns.LookUp.Config())
        assert world.reset(row) == []
        heard = world.step(_say(row["key"])).messages[0]["content"]
        values.add(heard)
        end = world.step(_say(heard))
        assert (end.done, end.reward) == (True, 1.0)
    assert values == set("0123456789"), "the prompt alone does not tell the value"


def test_a_wrong_question_and_a_mute_world_do_not_tell_the_value(turns: Any) -> None:
    row = turns.game_row("look_up", 3)
    world = turns.LookUp(turns.LookUp.Config())
    world.reset(row)
    other = world.step(_say("4")).messages[0]["content"]
    assert world.step(_say(other)).reward == 0.0
    mute = turns.LookUp(turns.LookUp.Config(mute=True))
    mute.reset(row)
    assert mute.step(_say("3")).messages[0]["content"] == "?"


def test_the_world_of_guess_lies_from_the_moment_of_the_plant(turns: Any, tmp_path: Path) -> None:
    flag = tmp_path / "lies"
    config = turns.LyingGame.Config(higher="+", lower="-", unclear=str(flag))
    row = next(
        row for seed in range(99) if (row := turns.game_row("guess", seed)) and _number(turns, row) > 1
    )
    said = []
    for _ in range(2):
        world = turns.LyingGame(config)
        world.reset(row)
        said.append(world.step(_say("1")).messages[0]["content"])
        flag.touch()
    assert said == ["+", "-"]


def _number(turns: Any, row: dict[str, Any]) -> int:
    for guess in range(1, 8):
        world = turns.NumberGame(turns.NumberGame.Config())
        world.reset(row)
        if world.step(_say(str(guess))).reward == 1.0:
            return guess
    raise AssertionError(row)


def test_the_format_rows_show_no_strategy(turns: Any) -> None:
    """A shown guess fits what was heard as often as a guess that ignores it would."""
    follows = [0.0, 0.0]
    for row in turns.format_rows("guess"):
        _, *heard = row["prompt"].replace("?", "\n").split("\n")[:-1]
        low, high = 1, 7
        for guess, sign in zip(heard[::2], heard[1::2], strict=True):
            low, high = (max(low, int(guess) + 1), high) if sign == "+" else (low, min(high, int(guess) - 1))
        if heard:
            follows[0] += low <= int(row["answer"]) <= high
            follows[1] += max(0, high - low + 1) / 7
    assert follows[0] == pytest.approx(follows[1], rel=0.1)
    right = [
        row["answer"] == row["prompt"][-2] for row in turns.format_rows("look_up") if "\n" in row["prompt"]
    ]
    assert sum(right) / len(right) == pytest.approx(0.1, abs=0.03)


def test_the_tables_hold_a_row_per_arm_and_the_paired_differences(turns: Any) -> None:
    arms = {
        "unguarded": {
            "level_before": [0.8, 0.8],
            "false_alarms": [0, 0],
            "detected": [0, 0],
            "honest": [0.1, 0.2],
        },
        "guarded": {
            "level_before": [0.8, 0.8],
            "false_alarms": [0, 0],
            "detected": [1, 1],
            "honest": [0.8, 0.8],
        },
    }
    for arm in arms.values():
        arm["delay"] = [1.0, 1.0]
    text = turns.render(arms)
    assert "| guarded | 0.800 | 0.000 | 1.000 | 1.000 | 0.800 |" in text
    assert "honest, guarded minus unguarded: +0.650" in text
    assert "per seed +0.700, +0.600" in text
