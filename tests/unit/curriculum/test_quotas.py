from __future__ import annotations

import math
import random

import pytest

from cpu_time import is_linear
from multitask_rl.curriculum.quotas import apportion, normalise, raise_to_floors


def _ranks(shares: dict[str, float]) -> dict[str, int]:
    return {task: i for i, task in enumerate(sorted(shares))}


def test_counts_are_exact_and_hand_computed_over_three_steps() -> None:
    shares, carry, got = {"a": 0.5, "b": 0.3, "c": 0.2}, {}, []
    for _ in range(5):
        counts, carry = apportion(shares, 4, carry, _ranks(shares))
        got.append(tuple(counts.values()))
    # owed: 2/1.2/.8 -> 2,1,1; 2/1.4/.6 -> 2,1,1; 2/1.6/.4 -> 2,2,0; 2/.8/1.2 -> 2,1,1; 2/1/1 -> 2,1,1
    assert got == [(2, 1, 1), (2, 1, 1), (2, 2, 0), (2, 1, 1), (2, 1, 1)]
    assert all(abs(owed) < 1e-9 for owed in carry.values())  # 5 steps of 4: everybody has exactly its share


@pytest.mark.parametrize("seed", range(30))
def test_realised_share_follows_the_target_within_two_prompts(seed: int) -> None:
    stream = random.Random(seed)
    shares = normalise({f"t{i}": stream.random() ** 2 + 0.001 for i in range(stream.randint(1, 12))})
    per_step = stream.randint(1, 40)
    carry: dict[str, float] = {}
    total = dict.fromkeys(shares, 0)
    for step in range(1, 300):
        counts, carry = apportion(shares, per_step, carry, _ranks(shares))
        assert sum(counts.values()) == per_step
        for task, count in counts.items():
            assert count >= 0
            total[task] += count
            assert abs(total[task] - shares[task] * per_step * step) < 2.0
            assert abs(count - shares[task] * per_step) < 3.0


def test_changing_weights_keep_counts_exact_and_what_is_owed_bounded() -> None:
    stream = random.Random(1)
    carry: dict[str, float] = {}
    for _ in range(2000):
        shares = normalise({t: stream.random() for t in "abcdef"})
        counts, carry = apportion(shares, 7, carry, _ranks(shares))
        assert sum(counts.values()) == 7
        assert max(map(abs, carry.values())) < 2.0


def test_result_does_not_depend_on_the_order_of_tasks() -> None:
    shares = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}
    ranks = _ranks(shares)
    carry: dict[str, float] = {}
    other: dict[str, float] = {}
    for _ in range(10):
        first, carry = apportion(shares, 6, carry, ranks)
        second, other = apportion(dict(reversed(shares.items())), 6, other, ranks)
        assert first == {task: second[task] for task in shares}


def test_zero_share_gets_nothing_and_is_owed_nothing() -> None:
    counts, carry = apportion({"a": 1.0, "b": 0.0}, 5, {"b": 0.7, "a": -0.7}, {})
    assert counts == {"a": 5, "b": 0}
    assert "b" not in carry


def test_no_share_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no task has a share above 0"):
        apportion({"a": 0.0}, 1, {}, {})
    with pytest.raises(ValueError, match=">= 0"):
        apportion({"a": 1.0}, -1, {}, {})


def test_floors_are_met_and_shares_sum_to_one_up_to_the_edge() -> None:
    probs = normalise({"a": 0.98, "b": 0.02, "c": 0.0})
    for floor in (0.0, 0.05, 0.2, 1 / 3):
        floors = dict.fromkeys(probs, floor)
        shares = raise_to_floors(probs, floors)
        assert math.isclose(math.fsum(shares.values()), 1.0)
        assert min(shares.values()) >= floor - 1e-12
    assert all(math.isclose(s, 1 / 3) for s in raise_to_floors(probs, dict.fromkeys(probs, 1 / 3)).values())


def test_raise_to_floors_leaves_given_weights_alone_where_it_can() -> None:
    assert raise_to_floors({"a": 0.6, "b": 0.4}, {"a": 0.1, "b": 0.1}) == {"a": 0.6, "b": 0.4}


def test_raise_to_floors_cascades() -> None:
    shares = raise_to_floors({"a": 0.70, "b": 0.21, "c": 0.09}, {"b": 0.2, "c": 0.2})
    assert shares == pytest.approx({"a": 0.6, "b": 0.2, "c": 0.2})


def test_normalise_without_mass_is_uniform() -> None:
    assert normalise({"a": 0.0, "b": 0.0}) == {"a": 0.5, "b": 0.5}


def test_the_work_of_a_step_grows_with_the_tasks_and_not_with_their_square() -> None:
    def split(number: int) -> None:
        shares = dict.fromkeys((f"task_{i}" for i in range(number)), 1 / number)
        counts, _ = apportion(shares, number // 2, {}, dict.fromkeys(shares, 0))
        assert sum(counts.values()) == number // 2
        assert max(counts.values()) == 1

    assert is_linear(split, 1000)  # 8 s for 4,000 tasks when each prompt looks for its task among all
