from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import pytest

from multitask_rl.config.task import MultiplierSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier

MODES = ("pid", "log")


def _build(mode: str = "pid", *, limit: float = 0.1, **config: float) -> LagrangeMultiplier:
    return LagrangeMultiplier(limit, MultiplierSpec(mode=mode, **config))  # type: ignore[arg-type]


def _drive(multiplier: LagrangeMultiplier, costs: Sequence[float]) -> list[float]:
    """Return lambda after each cost."""
    values = []
    for step, cost in enumerate(costs):
        multiplier.update(cost, step)
        values.append(multiplier.value)
    return values


def test_pid_step_response_equals_hand_computed_values() -> None:
    multiplier = _build(
        limit=0.2, setpoint=0.5, smoothing=0.5, proportional=2.0, integral=0.1, derivative=3.0
    )
    # averages .4, .7, .35; aim .1; excess .3, .6, .25; integral .03, .09, .115; rise 0, .3, 0
    got = _drive(multiplier, (0.4, 1.0, 0.0))
    assert got == pytest.approx([0.6 + 0.03, 1.2 + 0.09 + 0.9, 0.5 + 0.115])


def test_log_ascent_equals_hand_computed_values() -> None:
    multiplier = _build("log", setpoint=1.0, smoothing=1.0, log_rate=2.0, initial_value=0.5, max_value=2.0)
    got = _drive(multiplier, (0.6, 0.35, 1.0, 0.0))
    # log lambda - log .5: 1, 1.5 -> capped at log 4, capped, - .2
    assert got == pytest.approx([0.5 * math.e, 2.0, 2.0, 2.0 * math.exp(-0.2)])


@pytest.mark.parametrize("mode", MODES)
def test_everything_violating_raises_it_monotonically_to_the_bound(mode: str) -> None:
    values = _drive(_build(mode, limit=0.05), [1.0] * 500)
    assert all(a <= b for a, b in itertools.pairwise(values))
    assert values[-1] == 10.0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_violating_is_exactly_the_unconstrained_run(mode: str) -> None:
    assert set(_drive(_build(mode), [0.0] * 50)) == {0.0}


@pytest.mark.parametrize("mode", MODES)
def test_it_falls_back_to_zero_once_the_cost_is_gone(mode: str) -> None:
    multiplier = _build(mode)
    values = _drive(multiplier, [0.5] * 20 + [0.0] * 2000)
    assert values[19] > 0.0
    assert values[-1] == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_it_settles_the_cost_of_a_responsive_policy_below_the_limit(mode: str) -> None:
    """A stub policy whose violation rate falls with lambda, with a lag: rate -> .9 * exp(-2 lambda)."""
    multiplier, rate, trace = _build(mode, limit=0.2), 0.9, []
    for step in range(600):
        rate += 0.1 * (0.9 * math.exp(-2.0 * multiplier.value) - rate)
        multiplier.update(rate, step)
        trace.append(rate)
    assert trace[-1] == pytest.approx(0.6 * 0.2, abs=0.01)
    assert max(trace[300:]) <= 0.2
    assert max(trace[500:]) - min(trace[500:]) < 0.02  # settled, not oscillating


def test_a_step_without_verdicts_changes_nothing() -> None:
    multiplier = _build()
    multiplier.update(0.5, 0)
    before = multiplier.state_dict()
    assert multiplier.update(math.nan, 1) == []
    assert multiplier.state_dict() == before


@pytest.mark.parametrize("mode", MODES)
def test_state_round_trip_continues_identically(mode: str) -> None:
    whole, resumed = _build(mode), _build(mode)
    costs = [0.1 * (i * 7 % 10) for i in range(40)]
    _drive(whole, costs[:20])
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert _drive(whole, costs[20:]) == _drive(resumed, costs[20:])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mode", "adam"),
        ("setpoint", 0.0),
        ("max_value", 0.0),
        ("integral", -1.0),
        ("log_rate", 0),
        ("initial_value", 11.0),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        MultiplierSpec(**{key: value})  # type: ignore[arg-type]


def test_changes_are_reported_with_reason_from_and_to_and_the_bound_is_an_alarm() -> None:
    multiplier = _build(limit=0.05)
    events = [e for step in range(300) for e in multiplier.update(1.0, step)]
    assert len(events) < 15
    assert events[0].data["from"] == 0.0
    assert "mean cost 1.000, limit 0.05" in events[0].reason
    assert [e.kind for e in events if e.kind == "alarm"] == ["alarm"]
    assert events[-1].data["to"] == 10.0


@pytest.mark.parametrize("mode", MODES)
def test_it_starts_where_it_is_told_and_forgets_it(mode: str) -> None:
    multiplier = _build(mode, initial_value=2.0)
    assert multiplier.value == 2.0
    values = _drive(multiplier, [0.0] * 5000)
    assert values[0] == pytest.approx(2.0, abs=0.2)
    assert values == sorted(values, reverse=True)
    assert values[-1] == 0.0


def test_a_limit_that_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        LagrangeMultiplier(limit=5.0)


@pytest.mark.parametrize(("before", "after"), [("pid", "log"), ("log", "pid")])
def test_lambda_goes_on_from_where_it_was_under_another_mode(before: str, after: str) -> None:
    first = _build(before, limit=0.1)
    _drive(first, [0.9] * 60)
    state = json.loads(json.dumps(first.state_dict()))
    second = _build(after, limit=0.1)
    second.load_state_dict(state)
    assert second.value == first.value > 1.0
    aim = second.config.setpoint * second.limit
    _drive(second, [aim])
    assert second.value == pytest.approx(first.value, rel=0.5)
    bounded = _build(before, limit=0.1, max_value=0.5)
    bounded.load_state_dict(state)
    assert bounded.value == 0.5
