from __future__ import annotations

import pytest

from multitask_rl.guard.decision import choose_step


def _seen(*values: float, error: float = 0.03) -> list[tuple[int, float, float]]:
    return [(10 * (i + 1), value, error) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.6, 0.6, 0.6, 0.3), 20),  # 30 borders on the fall: its neighbourhood is lower
        ((0.6, 0.6, 0.6, 0.56, 0.3), 30),
        ((0.4, 0.5, 0.6, 0.7, 0.3), 30),  # on the way up the height is the newest level
        ((0.6, 0.5, 0.6, 0.6, 0.6, 0.2), 40),  # one low evaluation is noise, not the fall
    ],
)
def test_the_newest_at_the_height_is_chosen(values: tuple[float, ...], expected: int) -> None:
    steps = [10 * i for i in range(1, len(values))]
    assert choose_step(steps, _seen(*values), fell_after=1000) == expected


def test_candidates_from_before_the_fall_come_first_whatever_their_level() -> None:
    assert choose_step([10, 30], _seen(0.5, 0.6, 0.7, 0.3), fell_after=20) == 10
    assert choose_step([30], _seen(0.5, 0.6, 0.7, 0.3), fell_after=20) == 30


def test_a_run_never_returns_to_less_than_it_has() -> None:
    seen = _seen(0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.5)
    assert choose_step([10], seen, fell_after=60) is None
    assert choose_step([10, 60], seen, fell_after=10) == 60
    assert choose_step([10, 60], _seen(0.5, 0.5, 0.52), fell_after=30) is None


def test_without_values_the_newest_is_chosen_and_without_candidates_none() -> None:
    assert choose_step([10, 20], [], fell_after=15) == 10
    assert choose_step([10, 20], [(15, 0.5, 0.1)], fell_after=25) == 20  # never evaluated alone
    assert choose_step([], _seen(0.5), fell_after=10) is None
