"""When a constraint counts as satisfied."""

import json
import math
from dataclasses import replace

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.report import main_report
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.constraints.satisfaction import constraint_metrics, constraint_warnings, smallest_number
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, FailureKind, Scored, Verdict
from multitask_rl.scoring.results import to_verdict
from multitask_rl.statistics.intervals import rate_upper_bound
from multitask_rl.testing import make_evaluation, make_rollout
from multitask_rl.tracking.jsonl import evaluation_row


def numbers(spec, records):
    return {name: own.mean for name, own in constraint_metrics(spec, records).items()}


def at_most(events, number, rate):
    return math.fsum(math.comb(number, k) * rate**k * (1 - rate) ** (number - k) for k in range(events + 1))


@pytest.mark.parametrize(("events", "number"), [(0, 1), (1, 10), (3, 60), (20, 40), (59, 60), (30, 1000)])
@pytest.mark.parametrize("confidence", [0.95, 0.9])
def test_at_the_bound_so_few_events_have_the_probability_left_over(events, number, confidence):
    bound = rate_upper_bound(events, number, confidence)
    assert at_most(events, number, bound) == pytest.approx(1 - confidence, rel=1e-9)
    assert events / number < bound < 1


def test_bounds_at_the_edges():
    assert rate_upper_bound(0, 0) == 1.0
    assert rate_upper_bound(7, 7) == 1.0
    assert rate_upper_bound(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-12)
    assert rate_upper_bound(51, 1024) == pytest.approx(0.062478, abs=1e-6)  # scipy.stats.beta.ppf
    with pytest.raises(ValueError, match="5 events in 4"):
        rate_upper_bound(5, 4)


def test_the_smallest_number_is_the_first_that_can_prove_the_limit():
    for limit in (0.01, 0.05, 0.1, 0.5, 0.97):
        number = smallest_number(limit)
        assert rate_upper_bound(0, number) <= limit
        assert number == 1 or rate_upper_bound(0, number - 1) > limit
    assert smallest_number(0.0) == math.inf


def spec(**constraint):
    return TaskSpec(
        name="task",
        rewards=[RewardSpec(plugin="r", name="r")],
        constraints=[ConstraintSpec(**{"plugin": "safe", "name": "safe", "mode": "penalty"} | constraint)],
    )


def scored(*verdicts):
    records = []
    for draw, verdict in enumerate(verdicts):
        rollout = make_rollout(draw=draw)
        rollout.verdicts = {"safe": verdict}
        records.append(Scored(rollout=rollout, reward=0.0))
    return records


GOOD, BAD = Verdict(cost=0.0, violated=False), Verdict(cost=1.0, violated=True)
ELSEWHERE = Verdict(cost=0.0, violated=False, applicable=False)
FAILED = Failure(kind=FailureKind.timeout, message="slow")


def test_the_bound_decides_and_not_the_rate():
    few = numbers(spec(limit=0.1), scored(*[GOOD] * 19, BAD))
    assert few["constraint/safe/violation_rate"] == 0.05
    assert few["constraint/safe/upper_bound"] == pytest.approx(rate_upper_bound(1, 20))
    assert few["constraint/safe/satisfied"] == 0.0
    many = numbers(spec(limit=0.1), scored(*[GOOD] * 190, *[BAD] * 10))
    assert many["constraint/safe/violation_rate"] == 0.05
    assert many["constraint/safe/satisfied"] == 1.0


def test_what_a_constraint_does_not_concern_or_could_not_judge_counts_nowhere():
    own = numbers(spec(limit=0.5), scored(*[GOOD] * 8, BAD, *[ELSEWHERE] * 50, *[FAILED] * 30))
    assert own["constraint/safe/n"] == 9
    assert own["constraint/safe/violation_rate"] == pytest.approx(1 / 9)
    nobody = numbers(spec(limit=0.5), scored(ELSEWHERE, FAILED))
    assert "constraint/safe/violation_rate" not in nobody
    assert nobody["constraint/safe/satisfied"] == 0.0


def test_a_constraint_without_a_limit_is_not_tested():
    assert numbers(spec(), scored(GOOD, BAD)) == {}


def test_none_means_that_a_constraint_does_not_concern_the_sample():
    assert to_verdict(None, "source") == ELSEWHERE
    assert to_verdict(0.0, "source") == GOOD


@pytest.mark.parametrize(
    ("constraint", "prompts", "words"),
    [
        ({"limit": 0.05}, 58, ["58 held-out prompts", "by 0.0503", "evaluate on 59"]),
        ({"limit": 0.05}, 59, []),
        ({"limit": 0.0}, 10_000, ["a limit of 0 can never be proved"]),
        ({"limit": 0.05}, None, []),
        ({}, 1, []),
    ],
)
def test_limits_that_so_few_prompts_cannot_prove_are_told(constraint, prompts, words):
    told = constraint_warnings(spec(**constraint), {}, prompts)
    assert len(told) == bool(words)
    assert all(word in told[0] for word in words)


def test_safety_without_the_measure_of_its_other_side_is_told():
    traits = {"safe": PluginTraits(counterpart="over_refusal")}
    alone = spec()
    assert "satisfied by refusing everything" in constraint_warnings(alone, traits, None)[0]
    alone.rewards.append(RewardSpec(plugin="over_refusal", name="helps", weight=0.0))
    assert constraint_warnings(alone, traits, None) == []
    named = spec()
    named.constraints.append(ConstraintSpec(plugin="mine.py:f", name="over_refusal", mode="penalty"))
    assert constraint_warnings(named, traits, None) == []


def test_validate_warns_of_both(tmp_path, capsys):
    rows = [{"prompt": f"p{i}", "reference": "comply"} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks.yaml").write_text(
        "tasks:\n  chat:\n    dataset: rows.jsonl\n    rewards: [exact_match]\n    constraints:\n"
        "      - {plugin: safety_classifier, mode: lagrangian, limit: 0.05, config: {model_name: m}}\n"
    )
    assert main(["tasks", "validate", "--quick", str(tmp_path / "tasks.yaml")]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(told) == 2
    assert all("tasks.chat: constraint 'safety_classifier'" in line for line in told)
    both = ["tasks.chat.rewards=[exact_match, over_refusal]", "tasks.chat.constraints=[]"]
    assert main(["tasks", "validate", "--quick", str(tmp_path / "tasks.yaml"), *both]) == 0
    assert "warning" not in capsys.readouterr().out


def test_a_lagrangian_constraint_needs_its_limit(tmp_path, capsys):
    (tmp_path / "tasks.yaml").write_text(
        "tasks: {t: {rewards: [exact_match], constraints: [{plugin: over_refusal, mode: lagrangian}]}}"
    )
    assert main(["tasks", "validate", str(tmp_path / "tasks.yaml")]) == 2
    assert "constraints[0].limit: mode lagrangian keeps the mean cost at a limit" in capsys.readouterr().err


def test_the_report_shows_limits_with_their_bounds(tmp_path, capsys):
    with (tmp_path / "evaluations.jsonl").open("w") as file:
        for step, bad in ((0, 60), (5, 2)):
            metrics = constraint_metrics(spec(limit=0.05), scored(*[BAD] * bad, *[GOOD] * (200 - bad)))
            evaluation = replace(make_evaluation([1.0, 0.0], task="chat", step=step), metrics=metrics)
            file.write(json.dumps(evaluation_row(evaluation)) + "\n")
    assert main_report([str(tmp_path)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("chat/safe"))
    assert row.split() == ["chat/safe", "0.3", "0.01", "0.03114", "0.05", "200", "yes"]
