"""``number_game``: guess a number from the answers "higher" and "lower"; the level sets the range."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import Count, Range, Settings
from multitask_rl.environments.base import Message, StepResult
from multitask_rl.errors import DataError
from multitask_rl.seeding import derive_seed, random_stream
from multitask_rl_rewards.text import strip_thinking
from multitask_rl_tasks.sourced import plugin_entry

_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


class NumberGame:
    """The actor guesses a number from 1 to 2^level - 1, ``level`` times at most: halving always wins.

    A player that ignores the answers wins ``level`` games of 2^level - 1 (2 of 3, 3 of 7, 4 of 15). A turn is
    one guess, the last number of the answer. The reward is 1 for the right number and 0 for any other end.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``environment_config``."""

        higher: str = "higher"
        """Answer to a guess below the number."""
        lower: str = "lower"
        """Answer to a guess above it."""
        unclear: str = "a number from 1 to {high}"
        """Answer to a message without a number, which costs a guess; ``{high}`` is the largest number."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._number = self._high = self._guesses_left = 0

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Choose the number from the row's ``seed`` and ``level``; return no message beside the prompt.

        Raises:
            DataError: the row lacks one.
        """
        seed, level = row.get("seed"), row.get("level")
        if not isinstance(seed, int) or not isinstance(level, int) or not 1 <= level <= 20:
            raise DataError(
                f"number_game needs rows with `seed`, a whole number, and `level` from 1 to 20; got {seed!r} "
                f"and {level!r}. `dataset: plugin:number_game` makes such rows."
            )
        self._high, self._guesses_left = 2**level - 1, level
        self._number = random_stream(seed, "number_game", level).randint(1, self._high)
        return []

    def step(self, message: Message) -> StepResult:
        """Compare the guess; ``info`` says at the end whether the game was solved."""
        self._guesses_left -= 1
        numbers = _NUMBER.findall(strip_thinking(message["content"]))
        guess = int(numbers[-1]) if numbers else None
        if guess == self._number or not self._guesses_left:
            reward = float(guess == self._number)
            return StepResult(done=True, reward=reward, info={"solved": reward})
        if guess is None:
            text = self.config.unclear.replace("{high}", str(self._high))
        else:
            text = self.config.higher if guess < self._number else self.config.lower
        return StepResult(messages=[{"role": "user", "content": text}], reward=0.0)


class NumberGameTask:
    """Games of the environment ``number_game``: guess a number from the answers "higher" and "lower".

    A hash of a row's seed chooses its split, the same at every level.
    """

    licence: ClassVar[str] = "Apache-2.0"

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``dataset_config``."""

        level: Annotated[int, Range("[1, 20]")] = 3
        """Numbers 1 to 2^level - 1, in ``level`` guesses."""
        num_rows: Count = 1000
        """Rows of all splits together: a tenth ``test``, a tenth ``validation``."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def settings(self) -> dict[str, Any]:
        """Return the task's defaults."""
        return {
            "prompt": "I think of a whole number from 1 to {high}. Guess it: answer with one number. I say "
            "whether mine is higher or lower. You have {guesses} guesses.",
            "environment": "number_game",
            "max_turns": self.config.level,
            "rewards": [plugin_entry("environment") | {"range": [0, 1]}],
            "primary_metric": "environment",
        }

    def rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of ``train``, ``validation`` or ``test``; the column ``prompt`` is a short form."""
        level = self.config.level
        return [
            {
                "id": f"number_game-{level}-{seed}",
                "prompt": f"1-{2**level - 1}?",
                "seed": seed,
                "level": level,
                "high": 2**level - 1,
                "guesses": level,
                "split": split,
            }
            for seed in range(self.config.num_rows)
            if split == {0: "test", 1: "validation"}.get(derive_seed(seed, "number_game") % 10, "train")
        ]
