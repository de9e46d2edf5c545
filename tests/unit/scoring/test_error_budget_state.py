"""The error budget goes on where it was; a spent one starts anew."""

import json

import pytest

from multitask_rl.errors import RewardError
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.stats import ErrorBudget
from reward_builders import rollout

FAILED = Failure(kind=FailureKind.timeout, message="30 s", source="slow")
SAMPLE = rollout("no\x1b\n end " + 300 * "x")


def filled(failures: int, successes: int) -> ErrorBudget:
    budget = ErrorBudget("math", 0.5)
    for failure in [FAILED] * failures + [None] * successes:
        budget.add(SAMPLE, failure)
    return budget


def resumed(budget: ErrorBudget) -> ErrorBudget:
    other = ErrorBudget("math", 0.5)
    other.load_state_dict(json.loads(json.dumps(budget.state_dict())))
    return other


def test_failures_before_a_checkpoint_count_after_it() -> None:
    before = filled(15, 15)
    before.check()
    after = resumed(before)
    assert after.rate == before.rate == 0.5
    after.check()
    assert not after.events(0), "warned before the checkpoint already"
    after.add(SAMPLE, FAILED)
    assert "response" not in str(before.state_dict()), "a checkpoint has none"
    with pytest.raises(
        RewardError, match=r"52% of its last 31 .* slow timeout \(last: 30 s\)\. The last: "
    ) as raised:
        after.check()
    assert r"response 'no\x1b\n end xxx" in str(raised.value), "visible, in one line"
    assert len(str(raised.value)) < 600


def test_a_warning_and_its_data_have_one_rate() -> None:
    budget = filled(15, 15)
    budget.check()
    for _ in range(10):  # before the step's events are asked for
        budget.add(SAMPLE, None)
    (event,) = budget.events(0)
    assert event.reason.startswith("50% of the last 30 samples")
    assert event.data["failure_rate"] == 0.5


def test_a_spent_budget_starts_anew_for_who_resumes_has_mended_it() -> None:
    spent = filled(30, 5)
    with pytest.raises(RewardError):
        spent.check()
    after = resumed(spent)
    assert after.rate == 0.0
    after.add(SAMPLE, FAILED)
    after.check()


def test_a_window_too_small_for_a_rate_is_not_spent_and_goes_on() -> None:
    before = filled(12, 3)
    before.check()
    after = resumed(before)
    assert after.rate == before.rate == 0.8
    for budget in (before, after):
        for _ in range(5):
            budget.add(SAMPLE, FAILED)
        with pytest.raises(RewardError, match="85% of its last 20"):
            budget.check()
