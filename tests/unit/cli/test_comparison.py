"""Verdicts of compare and report follow from the values; the numbers are checked by hand."""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from multitask_rl.cli.comparison import main_compare
from multitask_rl.cli.report import main_report
from multitask_rl.cli.tables import measured
from multitask_rl.errors import ConfigError
from multitask_rl.statistics.intervals import compare_means, holm, student_tails

Values = list[float | None]


def _write_run(
    directory: Path,
    evaluations: list[tuple[int, str, Values]],
    config: dict[str, Any] | None = None,
    *,
    prompts: str = "",
    direction: str = "higher",
) -> Path:
    directory.mkdir()
    with (directory / "evaluations.jsonl").open("w", encoding="utf-8") as stream:
        for step, task, values in evaluations:
            line = {
                "step": step,
                "task": task,
                "metric": "accuracy",
                "values": values,
                "direction": direction,
            }
            stream.write(json.dumps({**line, **({"prompts": prompts} if prompts else {})}) + "\n")
    (directory / "config.yaml").write_text(yaml.safe_dump(config or {"seed": 0}))
    return directory


def _compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main_compare([*map(str, arguments), "--json"]) == 0
    result: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["result"]["comparisons"]
    return result


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (9, 2.2622), (29, 2.0452), (255, 1.9693)],
)
def test_student_quantiles(degrees: int, expected: float) -> None:
    assert student_tails(expected, degrees) == pytest.approx(0.05, rel=1e-3)
    assert student_tails(-expected, degrees) == student_tails(expected, degrees)


def test_tails_of_student_far_out_and_with_many_degrees() -> None:
    # of 2 degrees P(|T| >= t) = 1 - t / sqrt(2 + t^2); of many, the normal's
    assert student_tails(0.0, 7.3) == pytest.approx(1.0)
    assert student_tails(30.0, 2) == pytest.approx(1 - 30 / math.sqrt(902), rel=1e-4)
    assert student_tails(1.95996, 1e6) == pytest.approx(0.05, rel=1e-4)
    assert student_tails(2.5, 1001) == pytest.approx(student_tails(2.5, 1000), rel=0.02)


def test_paired_difference_by_hand() -> None:
    # differences 1, 0, 1, 2, 1: mean 1, standard deviation sqrt(0.5), standard error sqrt(0.1), t(4) = 2.776
    difference = compare_means([0, 1, 2, 3, 4], [1, 1, 3, 5, 5], paired=True)
    assert difference.delta == pytest.approx(1.0)
    assert difference.low == pytest.approx(1 - 2.776 * math.sqrt(0.1), abs=2e-3)
    assert difference.high == pytest.approx(1 + 2.776 * math.sqrt(0.1), abs=2e-3)
    assert difference.verdict(higher_is_better=True) == "better"
    assert difference.verdict(higher_is_better=False) == "worse"


def test_welch_difference_by_hand() -> None:
    # variances 1 and 4 over n = 3: error sqrt(5/3), degrees (5/3)^2 / ((1/3)^2/2 + (4/3)^2/2) = 2.941
    difference = compare_means([1, 2, 3], [2, 4, 6], paired=False)
    assert difference.delta == pytest.approx(2.0)
    half = (difference.high - difference.low) / 2
    assert half == pytest.approx(3.22 * math.sqrt(5 / 3), rel=0.02)


def test_pairing_finds_what_welch_cannot() -> None:
    stream = random.Random(0)
    base = [stream.gauss(0, 10) for _ in range(50)]
    other = [value + 0.5 + stream.gauss(0, 0.1) for value in base]
    assert compare_means(base, other, paired=True).verdict(True) == "better"
    assert compare_means(base, other, paired=False).verdict(True) == "not told apart"


@pytest.mark.parametrize(
    ("base", "other", "paired", "verdict"),
    [
        ([0.0] * 2, [1.0] * 2, True, "unknown"),  # both prompts by chance: p = 1/4
        ([0.0] * 4, [1.0] * 4, True, "unknown"),
        ([0.0] * 5, [1.0] * 5, True, "better"),  # mid-p 1/32
        ([0.0] * 3, [1.0] * 3, False, "unknown"),  # 2 of 20 ways to deal six values out
        ([1.0] * 4, [0.0] * 4, False, "worse"),  # 2 of 70
        ([0.5] * 4, [0.6] * 4, True, "unknown"),
        ([0.5] * 5, [0.6] * 5, True, "better"),
        ([0.0, 0.1, 0.2], [2.0, 2.1, 2.2], True, "unknown"),  # but for rounding
        ([0.5] * 5, [0.5] * 5, True, "not told apart"),
        ([0.5] * 5, [0.5] * 5, False, "not told apart"),
    ],
)
def test_values_without_variance_prove_as_much_as_their_number(
    base: list[float], other: list[float], paired: bool, verdict: str
) -> None:
    difference = compare_means(base, other, paired=paired)
    assert difference.verdict(True) == verdict
    assert math.isnan(difference.low) or difference.low < difference.high


def test_pairs_of_0_and_1_by_hand() -> None:
    # 6 better, 1 worse, 5 same: mid-p 2 x 4.5/128; Bonett and Price: 7/14 and 2/14 of 14
    difference = compare_means([0] * 6 + [1] + [1] * 5, [1] * 6 + [0] + [1] * 5, paired=True)
    assert difference.p_value == pytest.approx(9 / 128)
    half = 1.96 * math.sqrt((9 / 14 - (5 / 14) ** 2) / 14)
    assert (difference.low, difference.high) == pytest.approx((5 / 14 - half, 5 / 14 + half), abs=1e-4)


@pytest.mark.parametrize(("number", "rate"), [(4, 0.5), (8, 0.5), (8, 0.1), (16, 0.1), (64, 0.5)])
def test_equal_actors_rarely_differ(number: int, rate: float) -> None:
    stream, found, rounds = random.Random(0), 0, 1000
    for _ in range(rounds):
        base, other = ([float(stream.random() < rate) for _ in range(number)] for _ in "ab")
        found += compare_means(base, other, paired=True).verdict(True) in ("better", "worse")
    assert found / rounds <= 0.065


def test_holm_by_hand() -> None:
    found = holm([0.03, math.nan, 0.01, 0.02, 0.9])
    assert [found[i] for i in (0, 2, 3, 4)] == pytest.approx([0.06, 0.04, 0.06, 0.9])
    assert math.isnan(found[1])


def test_interval_covers_the_true_difference_95_times_in_100() -> None:
    stream = random.Random(1)
    hits = 0
    for _ in range(2000):
        base = [stream.gauss(0, 1) for _ in range(8)]
        difference = compare_means(base, [b + stream.gauss(0.3, 1) for b in base], paired=True)
        hits += difference.low <= 0.3 <= difference.high
    assert 0.935 <= hits / 2000 <= 0.965


def test_failed_prompts_leave_the_pairs_and_too_few_give_no_verdict() -> None:
    nan = math.nan
    difference = compare_means([1, nan, 1, 0], [0, 1, nan, 0], paired=True)
    assert (difference.n, difference.delta) == (2, -0.5)
    assert compare_means([1, nan], [nan, 1], paired=True).verdict(True) == "unknown"
    assert compare_means([1.0], [2.0], paired=True).verdict(True) == "unknown"


def test_compare_takes_the_last_evaluations_and_names_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zeros: Values = [0.0] * 20
    mixed: Values = [0.0, 1.0] * 10
    base = _write_run(
        tmp_path / "a",
        [(0, "math", zeros), (9, "math", zeros), (9, "code", mixed), (9, "old", mixed)],
        {"seed": 0, "output_dir": "a", "optimizer": {"learning_rate": 0.1}},
    )
    other = _write_run(
        tmp_path / "b",
        [(0, "math", zeros), (7, "math", [1.0] * 19 + [None]), (7, "code", mixed)],
        {"seed": 0, "output_dir": "b", "optimizer": {"learning_rate": 0.2}},
    )
    (result,) = _compare(capsys, base, other)
    assert result["config"] == {"optimizer.learning_rate": [0.1, 0.2]}
    assert result["only_in_one"] == ["old"]
    math_row, code_row = result["tasks"]["math"], result["tasks"]["code"]
    assert (math_row["delta"], math_row["n"], math_row["paired"]) == (1.0, 19, True)
    assert math_row["verdict"] == "better"
    assert math_row["steps"] == [9, 7]
    assert code_row["verdict"] == "not told apart"


def test_many_tasks_make_no_verdict_by_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, stream = [f"task{i}" for i in range(20)], random.Random(2)
    base = {name: [stream.gauss(0, 1) for _ in range(30)] for name in names}
    other = {name: [stream.gauss(2.0 * (name == "task7"), 1) for _ in range(30)] for name in names}
    runs = [
        _write_run(tmp_path / run, [(1, name, [*values[name]]) for name in names])
        for run, values in (("a", base), ("b", other))
    ]
    alone = [compare_means(base[name], other[name], paired=True) for name in names]
    assert sum(difference.p_value < 0.05 for difference in alone) > 1, "one is real"
    (result,) = _compare(capsys, *runs)
    changed = {
        task: row["verdict"] for task, row in result["tasks"].items() if row["verdict"] != "not told apart"
    }
    assert changed == {"task7": "better"}
    assert main_compare(list(map(str, runs))) == 0
    assert "over all 20 tasks together (Holm)" in capsys.readouterr().out


def test_tables_show_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = _write_run(tmp_path / "a", [(3, "math", [0.0, 0.1, 0.0, 0.1])], {"seed": 0, "x": [1]})
    other = _write_run(tmp_path / "b", [(3, "math", [0.5, 0.6, 0.5, 0.7])], {"seed": 0})
    assert main_compare([str(base), str(other)]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("math"))
    assert row.split()[:5] == ["math", "accuracy", "0.050", "0.575", "+0.525"]
    assert row.endswith("yes   better")
    assert "other against base: 1 better" in text
    assert "[1]   null" in text
    alone = "every arm has one run: intervals and verdicts are for other prompts and the same seed"
    assert f"note: {alone}" in text
    third = _write_run(tmp_path / "c", [(3, "math", [0.2, 0.6, 0.5, 0.7])], {"seed": 0, "x": 3})
    assert main_compare([str(base), str(other), str(third)]) == 0
    told = "at 5 % over all 2 verdicts of all tables together (Holm); intervals: each 95 % by itself"
    assert capsys.readouterr().out.count(told) == 2
    runs = [*_seeds(tmp_path, "s", [0, 1], 0.0), *_seeds(tmp_path, "t", [0, 1], 0.5)]
    assert main_compare(list(map(str, runs))) == 0
    assert "one run" not in capsys.readouterr().out, "arms with seeds"


def test_a_long_value_of_the_configuration_widens_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(_write_run(tmp_path / name, [(3, "math", [0.0, 1.0])], {"rewards": [name * 200], "max_steps": n}))
        for n, name in enumerate("ab")
    ]
    assert main_compare(runs) == 0
    text = capsys.readouterr().out
    long = f'rewards\n  base:  ["{"a" * 200}"]\n  other: ["{"b" * 200}"]'
    assert long in text
    table = text.replace(long, "").replace(str(tmp_path), "")
    assert "max_steps" in table
    assert max(map(len, table.splitlines())) < 200


@pytest.mark.parametrize(
    ("first", "second", "paired"),
    [
        ({"prompts": "p"}, {"prompts": "p", "config": {"seed": 1, "x": 1}}, True),
        ({"prompts": "p"}, {"prompts": "q"}, False),
        ({"prompts": "p"}, {}, False),
        ({}, {"config": {"seed": 1, "x": 1}}, False),
        ({}, {"config": {"seed": 0, "eval": {"temperature": 0.0}}}, False),
        ({}, {"config": {"seed": 0, "batch": {"group_size": 2}}}, True),
    ],
)
def test_values_are_paired_only_when_the_prompts_are_the_same(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: dict[str, Any],
    second: dict[str, Any],
    paired: bool,
) -> None:
    base = _write_run(tmp_path / "a", [(1, "math", [0.0, 1.0, 0.0])], **first)
    other = _write_run(tmp_path / "b", [(1, "math", [0.0, 1.0, 1.0])], **second)
    (result,) = _compare(capsys, base, other)
    assert result["tasks"]["math"]["paired"] is paired


def test_lower_is_better_turns_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        _write_run(tmp_path / str(i), [(1, "kl", [i + 0.0, i + 0.1, 1.1 * i + 0.2])], direction="lower")
        for i in range(3)
    ]
    results = _compare(capsys, *runs)
    assert [result["tasks"]["kl"]["verdict"] for result in results] == ["worse", "worse"]


def test_report_shows_before_and_after_weights_and_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _write_run(tmp_path / "a", [(0, "math", [0.0, 0.0, 0.1]), (8, "math", [1.0, 1.0, 0.9])])
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        for step in range(1, 41):
            stream.write(json.dumps({"step": step, "task/math/weight": step / 40, "time/step_s": 1.0}) + "\n")
        stream.write('{"step": 41, "task/ma')
    event = {"step": 5, "source": "guard", "kind": "rollback", "reason": "fell", "task": "math", "data": {}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert main_report([str(run)]) == 0
    text = capsys.readouterr().out
    assert "step 5  guard rollback [math]: fell" in text
    weights = text[text.index("weights at step") :].split("\n\n")[0].splitlines()
    assert 5 <= len(weights) <= 16
    assert weights[-1].split() == ["40", "1"]
    assert main_report([str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["tasks"]["math"]["verdict"] == "better"
    assert result["weights"]["math"]["10"] == 0.25


def test_report_says_how_many_held_out_prompts_have_no_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first: Values = [0.0, 0.5, None, 0.0, 1.0]
    run = _write_run(tmp_path / "a", [(0, "math", first), (8, "math", [1.0, None, 0.5, 0.5, 0.5])])
    assert main_report([str(run)]) == 0
    assert "math: 2 of 5 held-out prompts were not scored on both sides" in capsys.readouterr().out


def test_report_compares_only_what_is_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(step: int, task: str, values: Values, metric: str = "reward", prompts: str = "p") -> str:
        entry = {"step": step, "task": task, "metric": metric, "prompts": prompts, "values": values}
        entry["direction"] = "higher"
        return json.dumps(entry) + "\n"

    low: Values = [0.1, 0.2, 0.1, 0.2, 0.15]
    high: Values = [0.3, 0.41, 0.32, 0.4, 0.36]
    run = _write_run(tmp_path / "a", [], {"tasks": {"new": {"renamed_from": "old"}}})
    (run / "evaluations.jsonl").write_text(
        line(0, "metric", [0.1, 0.2])
        + line(2, "metric", [7.0, 8.0, 7.0, 8.0], "length")
        + line(4, "metric", [7.5, 8.5, 7.6, 8.4], "length")
        + line(0, "rows", [0.1, 0.2])
        + line(4, "rows", [0.3, 0.4], prompts="q")  # a resume took other rows
        + line(2, "old", low)
        + line(4, "new", high)
        + line(4, "single", [0.3, 0.4])
    )
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "task/old/weight": 0.5}\n{"step": 3, "task/new/weight": 0.6}\n'
    )
    assert main_report([str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    rows = {
        task: (row["steps"], row["before"], row["paired"], row["verdict"])
        for task, row in result["tasks"].items()
    }
    assert rows == {
        "metric": ([2, 4], 7.5, True, "better"),
        "rows": ([None, 4], None, False, "unknown"),
        "new": ([2, 4], pytest.approx(0.15), True, "better"),
        "single": ([None, 4], None, False, "unknown"),
    }
    assert result["weights"] == {"new": {"1": 0.5, "3": 0.6}}
    assert main_report([str(run)]) == 0
    assert "metric: not compared with the evaluations at steps 0, which were not judged by 'length'" in (
        capsys.readouterr().out
    )


def test_steps_a_rollback_or_resume_undid_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [(0, 0.0), (5, 0.2), (10, 0.9), (5, 0.3), (8, 0.4)]
    run = _write_run(tmp_path / "a", [(step, "math", [v, v + 0.01]) for step, v in values])
    assert main_report([str(run), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["result"]["tasks"]["math"]
    assert row["steps"] == [0, 8]
    made = [(step, 0.1 * step) for step in (6, 7, 8, 9, 10)] + [(6, 0.5), (7, 0.5), (8, 0.5)]
    lines = [{"step": step, "task/math/weight": weight, "time/step_s": 1.0} for step, weight in made]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main_report([str(run), "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["result"]["weights"]
    assert weights == {"math": {"6": 0.5, "7": 0.5, "8": 0.5}}
    with pytest.raises(ConfigError, match="it has: 0, 5, 8"):
        main_compare([str(run), str(_write_run(tmp_path / "b", [(8, "math", [0.5, 0.6])])), "--step", "10"])


def test_bad_runs_are_configuration_errors(tmp_path: Path) -> None:
    good = _write_run(tmp_path / "a", [(1, "math", [0.0, 1.0])])
    other = _write_run(tmp_path / "b", [(1, "code", [0.0, 1.0])])
    with pytest.raises(ConfigError, match="share no task"):
        main_compare([str(good), str(other)])
    with pytest.raises(ConfigError, match=r"holds no evaluations\.jsonl"):
        main_report([str(tmp_path)])
    (other / "evaluations.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"evaluations\.jsonl:1"):
        main_report([str(other)])
    with pytest.raises(ConfigError, match="two runs, and there is one"):
        main_compare([str(good)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_run_is_read_from_mlflow_as_from_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    from multitask_rl.config.run import TrackingConfig
    from multitask_rl.records import Event
    from multitask_rl.tracking.mlflow import MLflowTracker

    run = _write_run(tmp_path / "a", [(0, "math", [0.0, 0.1]), (2, "math", [1.0, 0.9])], {"seed": 4})
    tracker = MLflowTracker(run, TrackingConfig(), None)
    tracker.start({"seed": 4})
    for step, weight in ((1, 0.5), (2, 0.6), (3, 0.6), (2, 0.7)):  # a rollback to step 1
        tracker.log_metrics({"task/math/weight": weight}, step)
        time.sleep(0.005)  # points of one millisecond have no order
    tracker.log_event(Event(step=1, source="guard", kind="alarm", reason="fell"))
    tracker.finish("finished")
    name = f"mlflow:{tracker.run_id}"
    assert main_report([name, "--tracking-uri", tracker.uri, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["weights"] == {"math": {"1": 0.5, "2": 0.7}}
    assert result["tasks"]["math"]["after"] == pytest.approx(0.95)
    assert [event["reason"] for event in result["events"]] == ["fell"]
    with pytest.raises(ConfigError, match="the same run as"):
        main_compare([str(run), name, "--tracking-uri", tracker.uri])
    with pytest.raises(ConfigError, match="no run"):
        main_report(["mlflow:" + "0" * 32, "--tracking-uri", tracker.uri])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
        with pytest.raises(
            ConfigError, match=r"no run.*; name its store with --tracking-uri sqlite:///runs/"
        ):
            main_report(["mlflow:" + "0" * 32])
        patch.delenv("MLFLOW_TRACKING_URI")
        (tmp_path / "elsewhere").mkdir()
        patch.chdir(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=r"no database .*mlflow\.db; name its store with --tracking"):
            main_report([name])
        with pytest.raises(ConfigError, match=r"there is no database other\.db"):
            main_report([name, "--tracking-uri", "sqlite:///other.db"])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_row_without_interval_or_verdict_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"equal": [0.5] * 9, "few": [0.5] * 2, "varied": [0.1, 0.2, 0.4] * 5, "steady": [0.5] * 9}
    base = _write_run(tmp_path / "a", [(0, task, own) for task, own in values.items()])
    changed = {"few": [0.75] * 2, "varied": [0.2, 0.2, 0.1] * 5, "steady": [0.75] * 9}
    other = _write_run(tmp_path / "b", [(0, task, own) for task, own in (values | changed).items()])
    assert main_compare([str(base), str(other)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "equal: no difference: all 9 pairs are equal" in told
    assert "few: no verdict: 2 values, too few for p < 5 % whatever they are" in told
    assert "steady: no interval: the differences do not vary" in told
    assert not any(line.startswith("varied: ") for line in told)


def _seeds(
    tmp_path: Path, arm: str, seeds: list[int], shift: float, *, prompts: str = "p", last: int = 8
) -> list[Path]:
    """Write a run per seed: 40 prompts of 0 to 1, the seed moves all of them by 0.01."""
    settings = {"optimizer": {"learning_rate": shift}, "max_steps": 8}
    return [
        _write_run(
            tmp_path / f"{arm}{seed}",
            [
                (
                    last,
                    "math",
                    [(i * 7 % 40) / 40 + 0.01 * seed + shift + 0.02 * ((i + seed) % 3) for i in range(40)],
                )
            ],
            {"seed": seed, "output_dir": f"{arm}{seed}", **settings},
            prompts=prompts,
        )
        for seed in seeds
    ]


def test_runs_that_differ_in_the_seed_alone_are_one_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*_seeds(tmp_path, "a", [1, 0, 2], 0.0), *_seeds(tmp_path, "b", [2, 0, 1], 0.5)]
    (result,) = _compare(capsys, *runs)
    row = result["tasks"]["math"]
    assert (row["seeds"], row["paired"], row["paired_seeds"], row["n"]) == ([3, 3], True, True, 40)
    assert row["delta"] == pytest.approx(0.5)
    assert row["verdict"] == "better"
    assert result["config"] == {"optimizer.learning_rate": [0.0, 0.5]}
    assert (result["base"], result["other"]) == ("learning_rate=0.0", "learning_rate=0.5")
    assert main_compare(list(map(str, runs))) == 0
    assert "seeds, prompts" not in capsys.readouterr().err
    fewer = _compare(capsys, *runs[:5])[0]["tasks"]["math"]
    assert (fewer["seeds"], fewer["paired_seeds"]) == ([3, 2], False)
    apart = _compare(capsys, *runs, "--each-run")
    assert [len(comparison["tasks"]) for comparison in apart] == [1] * 5
    together = runs[0], runs[3], "--ignore", "optimizer.learning_rate"
    assert _compare(capsys, *together) == [], "one arm of two seeds"


def test_a_key_that_an_older_version_did_not_have_makes_no_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of an older version is of the same arm as one that records today's default, not another value."""
    values: Values = [0.1, 0.5, 0.3, 0.9]
    task = {"name": "a", "dataset": "rows.jsonl"}
    reward, rule = {"plugin": "exact_match", "name": "exact_match"}, {"plugin": "refusal", "name": "refusal"}
    old = {
        "optimizer": {"learning_rate": 0.5},
        "tasks": {"a": {**task, "rewards": [reward], "constraints": [rule]}},
    }
    new = {
        "optimizer": {"learning_rate": 0.5, "moments": "float32", "betas": [0.9, 0.99]},
        "tasks": {
            "a": {
                **task,
                "min_share": None,
                "rewards": [{**reward, "range": None}],
                "constraints": [{**rule, "device": ""}],
            }
        },
    }
    other = {**new, "optimizer": {**new["optimizer"], "moments": "int8"}}
    runs = [
        _write_run(tmp_path / name, [(1, "a", values)], {"seed": seed, **config}, prompts="p")
        for seed, (name, config) in enumerate([("old", old), ("new", new), ("other", other)])
    ]
    assert main_compare([*map(str, runs), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [len(arm["runs"]) for arm in result["arms"]] == [2, 1]
    assert result["keys"] == {"optimizer.moments": ["float32", "int8"]}


def test_the_former_names_of_a_task_make_no_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = {"name": "a", "dataset": "rows.jsonl"}
    runs = [
        _write_run(tmp_path / str(seed), [(1, "a", [0.1, 0.5])], {"seed": seed, "tasks": {"a": own}})
        for seed, own in enumerate((task, {**task, "former_names": ["b"]}, {**task, "renamed_from": "b"}))
    ]
    assert _compare(capsys, *runs) == [], "one arm of two seeds"


def test_a_directory_of_a_sweep_stands_for_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for number in range(11):
        values: Values = [number / 10 + 0.01 * (i % 3) for i in range(20)]
        config = {"seed": number % 2, "group_size": number // 2, "output_dir": str(number)}
        _write_run(sweep / str(number), [(1, "math", values)], config, prompts="p")
    (sweep / "11").mkdir()
    (sweep / "11" / "config.yaml").write_text("seed: 1\ngroup_size: 5\n")
    assert main_compare([str(sweep), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [arm["name"] for arm in result["arms"]] == [f"group_size={i}" for i in range(6)]
    assert [len(arm["runs"]) for arm in result["arms"]] == [2] * 5 + [1]
    assert result["keys"] == {"group_size": list(range(6))}
    assert list(result["left_out"]) == [str(sweep / "11")], "it crashed before its first evaluation"
    assert "where an arm has one run" in " ".join(result["notes"])
    assert main_compare([str(sweep)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["arm", "group_size", "runs", "math"]
    assert text.splitlines()[-1].startswith(f"left out: {sweep / '11'}: ")


def test_runs_that_are_there_twice_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: Values = [i / 20 for i in range(20)]
    config = {"seed": 0, "x": 1}
    first = _write_run(tmp_path / "a", [(1, "math", values), (2, "math", values)], config)
    crashed = _write_run(tmp_path / "copy", [(1, "math", values)], config)
    other = _write_run(tmp_path / "b", [(1, "math", values[::-1])], {"seed": 0, "x": 2})
    rerun = _write_run(tmp_path / "rerun", [(1, "math", values[::-1])], config)
    runs = [crashed, first, other, tmp_path / "." / "b", rerun]
    assert main_compare([*map(str, runs), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [arm["runs"] for arm in result["arms"]] == [[str(first)], [str(other)], [str(rerun)]]
    assert result["left_out"] == {
        str(other): "given twice",
        str(crashed): f"the same run as {first}: configuration, seed and evaluations are equal",
    }
    assert "--step 1 is the last evaluation that all have" in result["notes"][0]
    with pytest.raises(ConfigError, match="given twice"):
        main_compare([str(first), str(first)])


def test_seeds_of_one_configuration_alone_are_shown_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_compare(list(map(str, _seeds(tmp_path, "a", [0, 1], 0.0)))) == 0
    text = capsys.readouterr().out
    assert "one arm: these runs differ in the seed alone (0, 1)" in text
    assert "--each-run" in text


def test_seeds_that_choose_other_prompts_are_paired_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        _write_run(
            tmp_path / f"{name}{seed}",
            [(1, "math", [seed / 10 + rise + i / 20 for i in range(10)])],
            {"seed": seed, "x": name},
            prompts=f"p{seed}",
        )
        for name, rise in (("a", 0.0), ("b", 0.1))
        for seed in (0, 1, 2)
    ]
    assert main_compare([*map(str, runs), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["comparisons"][0]["tasks"]["math"]["paired_seeds"]
    (note,) = result["notes"]
    assert "differ in held-out prompts, so runs are paired by seed, not prompts: math" in note


def test_an_arm_without_a_task_of_the_base_does_not_hinder_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: Values = [i / 20 for i in range(20)]
    runs = [
        _write_run(tmp_path / name, [(1, task, values)], {"seed": 0, "x": name}, prompts=prompts)
        for name, task, prompts in (("a", "math", "p"), ("b", "code", "p"), ("c", "math", "q"))
    ]
    assert main_compare([*map(str, runs), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [list(comparison["tasks"]) for comparison in result["comparisons"]] == [[], ["math"]]
    assert result["comparisons"][0]["only_in_one"] == ["code", "math"]
    assert "different held-out prompts" in result["notes"][0]


def test_costs_count_what_a_rollback_undid_and_tell_when_a_level_was_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low: Values = [0.0, 0.1, 0.2]
    high: Values = [0.8, 0.9, 1.0]
    steps = [1, 2, 3, 2, 3, 4]  # the guard went back once
    for name, scores, rates in (
        ("a", [(0, low), (2, low), (4, high)], {"time/samples_per_s": 4.0, "time/tokens_per_s": 20.0}),
        ("b", [(0, low), (2, high), (4, high)], {"time/samples_per_s": 4.0}),
        ("c", [(0, low), (4, low)], {}),
    ):
        run = _write_run(
            tmp_path / name, [(s, "math", v) for s, v in scores], {"seed": 0, "x": name, "max_steps": 5}
        )
        with (run / "metrics.jsonl").open("w") as lines:
            for step in steps:
                lines.write(
                    json.dumps({"step": step, "task/math/reward_mean": 0.5, "time/step_s": 2.0, **rates})
                    + "\n"
                )
                lines.write(json.dumps({"step": step, "time/evaluation_s": 9.0}) + "\n")
    runs = [str(tmp_path / name) for name in "abc"]
    assert main_compare([*runs, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["levels"] == {"math": pytest.approx(0.9)}
    first, second, third = (own["math"] for own in result["reached"])
    assert first == {"reached": 1, "runs": 1, "steps": 6, "samples": 48, "tokens": 240, "seconds": 12}
    assert second == {"reached": 1, "runs": 1, "steps": 4, "samples": 32, "tokens": None, "seconds": 8}
    assert third["reached"] == 0
    assert result["costs"][0] == {"steps": 6, "samples": 48, "tokens": 240, "seconds": 12}
    assert result["unfinished"][0] == f"{runs[0]} has made 4 of 5 steps"
    assert main_compare([*runs, "--level", "0.1"]) == 0
    assert ["math", "0.1"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_an_arm_dominates_another_that_is_worse_in_no_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name, (one, two, kl) in {"a": (0.5, 0.5, 0.5), "b": (0.6, 0.5, 0.4), "c": (0.7, 0.4, 0.4)}.items():
        runs.append(
            _write_run(tmp_path / name, [(1, "one", [one, one]), (1, "two", [two, two])], {"x": name})
        )
        line = {"step": 1, "task": "kl", "metric": "kl", "direction": "lower", "values": [kl, kl]}
        with (runs[-1] / "evaluations.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    assert main_compare([*map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["result"]["dominates"]
    assert found == {str(runs[0]): [], str(runs[1]): [str(runs[0])], str(runs[2]): []}


def test_a_task_that_a_resume_added_or_removed_does_not_hinder_a_comparison_at_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: Values = [0.0, 0.5, 1.0]
    told = {"math": (0, 2, 4), "code": (0, 2, 4)}, {"math": (0, 2, 4, 6), "code": (0, 2), "added": (6,)}
    runs = [
        _write_run(tmp_path / name, [(s, t, values) for t, steps in own.items() for s in steps], {"x": name})
        for name, own in zip("ab", told, strict=True)
    ]
    assert main_compare([*map(str, runs), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["result"]["notes"]
    assert notes[0].endswith("; --step 4 is the last evaluation that all have")
    assert main_compare([*map(str, runs), "--step", "4", "--json", "--html", str(tmp_path / "page")]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert list(result["comparisons"][0]["tasks"]) == ["math"]
    assert result["notes"] == [f"{runs[1]} has no evaluation at step 4 of code, added"]
    with pytest.raises(ConfigError, match="no evaluation of 'math' at step 6; it has: 0, 2, 4"):
        main_compare([*map(str, runs), "--step", "6"])


def test_what_a_resume_began_to_measure_is_compared_from_then_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 has the first evaluation with a limit, and with a KL of the anchor."""
    run = _write_run(tmp_path / "a", [], {"tasks": {"math": {}}})
    with (run / "evaluations.jsonl").open("w") as lines:
        for step, level in ((0, 0.9), (2, 0.5), (4, 0.25)):
            limits = {"limit": 0.3, "violation_rate": level, "upper_bound": 0.6, "n": 20, "satisfied": 0}
            metrics = {"kl": level} | {f"constraint/short/{key}": value for key, value in limits.items()}
            line = {"step": step, "task": "math", "metric": "accuracy", "direction": "higher"}
            line["metrics"] = {key: {"mean": value} for key, value in metrics.items() if step}
            lines.write(json.dumps({**line, "values": [0.5, 0.25]}) + "\n")
    assert main_report([str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert [(row["before"], row["violation_rate"]) for row in result["constraints"]] == [(0.5, 0.25)]
    found = {row["metric"]: (row["before"], row["after"]) for row in result["changes"]}
    assert found["kl"] == (0.5, 0.25)


def test_runs_that_train_on_one_task_each_give_a_matrix_of_effects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before: Values = [0.1 * at for at in range(8)]

    def run(name: str, trained: str, seed: int, gains: dict[str, float]) -> Path:
        specs = {
            task: {"type": "anchor" if task == "prose" else "grpo", "evaluation_only": task != trained}
            for task in gains
        }
        noise = random.Random(seed)
        after = {
            t: [v + gain + noise.gauss(0, 0.01) for v in before if v is not None] for t, gain in gains.items()
        }
        evaluations = [(step, t, own) for t in gains for step, own in ((0, before), (9, [*after[t]]))]
        return _write_run(
            tmp_path / f"{name}{seed}", evaluations, {"seed": seed, "tasks": specs}, prompts="p"
        )

    runs = [run("math", "math", seed, {"math": 0.3, "code": -0.1, "prose": 0.0}) for seed in (0, 1)]
    runs.append(run("code", "code", 2, {"math": 0.1, "code": 0.2, "prose": 0.0}))
    assert main_compare([*map(str, runs), "--json"]) == 0
    effects = json.loads(capsys.readouterr().out)["result"]["effects"]
    assert list(effects) == ["math", "code"]
    assert effects["math"]["code"]["delta"] == pytest.approx(-0.1, abs=0.02)
    assert effects["math"]["code"]["seeds"] == [2, 2]
    assert [effects["math"][t]["verdict"] for t in ("math", "code", "prose")] == [
        "better",
        "worse",
        "not told apart",
    ]
    assert effects["code"]["math"]["low"] < 0.1 < effects["code"]["math"]["high"]
    assert main_compare([*map(str, runs)]) == 0
    assert "training on one task (row) changed a held-out result" in capsys.readouterr().out
    assert main_compare([*map(str, runs), "--html", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    assert '"effects":{"math":{"math":{' in (tmp_path / "page.html").read_text().replace(" ", "")
    both = run("both", "math", 3, {"math": 0.3, "code": 0.1})
    # trained on two tasks, the second time in spite of a weight of 0
    for code in ({}, {"weight": 0.0, "min_share": 0.2}):
        (both / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "tasks": {"math": {}, "code": code}}))
        assert main_compare([str(runs[2]), str(both), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["result"]["effects"] == {}


def test_the_matrix_begins_where_report_does_at_the_first_evaluation_like_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume at step 4 samples in another way and has other rows of ``prose``."""
    for trained in ("math", "code"):
        specs = {t: {"evaluation_only": t != trained} for t in ("math", "code", "prose")}
        run = _write_run(tmp_path / trained, [], {"tasks": specs})
        with (run / "evaluations.jsonl").open("w") as lines:
            for step, level in ((0, 0.1), (4, 0.5), (8, 0.6)):
                for task in specs:
                    line = {"step": step, "task": task, "metric": "accuracy", "direction": "higher"}
                    line["definitions"] = {"sampling": "hot" if step == 0 and task == "math" else "cold"}
                    line["prompts"] = "p" if step == 0 or task != "prose" else "q"
                    line["values"] = [level + 0.01 * at * step for at in range(8)]
                    lines.write(json.dumps(line) + "\n")
    runs = [str(tmp_path / name) for name in ("math", "code")]
    assert main_compare([*runs, "--json"]) == 0
    effects = json.loads(capsys.readouterr().out)["result"]["effects"]
    assert main_report([runs[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["result"]["tasks"]
    steps = {"math": [4, 8], "code": [0, 8], "prose": [4, 8]}
    assert {task: row["steps"] for task, row in rows.items()} == steps
    assert {task: row["steps"] for task, row in effects["math"].items()} == steps
    assert main_compare([*runs, "--step", "4", "--json"]) == 0
    effects = json.loads(capsys.readouterr().out)["result"]["effects"]
    assert list(effects["math"]) == ["code"], "of the others, step 4 is the first"


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ((0.4853, 0.4796, -0.0057, -0.0321, 0.0207), ["0.485", "0.480", "-0.006", "[-0.032, +0.021]"]),
        ((123.4, 130.9, 7.5, -4.0, 19.0), ["123", "131", "+8", "[-4, +19]"]),
        ((0.5, 0.499, -0.001, -0.3, 0.3), ["0.50", "0.50", "+0.00", "[-0.30, +0.30]"]),
        ((0.31, 0.17, -0.14, -0.2684, -0.0043), ["0.31", "0.17", "-0.14", "[-0.27, -0.00]"]),  # without 0
        ((3e-7, 5e-7, 2e-7, 1e-7, 3e-7), ["3e-07", "5e-07", "2e-07", "[1e-07, 3e-07]"]),
        ((0.5, 0.5, 0.0, math.nan, math.nan), ["0.5", "0.5", "0", "[-, -]"]),
        ((0.5, None, None, None, None), ["0.5", "-", "-", "[-, -]"]),
    ],
)
def test_a_row_has_the_decimals_that_its_interval_carries(row, shown) -> None:
    keys = ("before", "after", "delta", "low", "high")
    numbers, interval = measured(dict(zip(keys, row, strict=True)))
    assert [*numbers, interval] == shown


def _steps(directory: Path, first: int, last: int) -> Path:
    lines = [
        json.dumps({"step": step, "time/step_s": 2.0, "time/samples_per_s": 4.0, "time/tokens_per_s": 10.0})
        for step in range(first, last + 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return directory


def _costs(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main_compare([*map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
    return result


def test_values_of_another_metric_reach_no_level_and_dominate_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run judged by a loss, and one that changed its metric at a resume."""
    accuracy: Values = [0.2, 0.4, 0.3, 0.3]
    one = _write_run(tmp_path / "one", [(8, "a", accuracy), (8, "b", accuracy)])
    two = _write_run(tmp_path / "two", [(8, "b", [0.5, 0.6, 0.7, 0.8])], {"seed": 1})
    line = {"task": "a", "metric": "loss", "values": [1.0, 1.1], "direction": "lower"}
    with (two / "evaluations.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 0, **line}) + "\n" + json.dumps({"step": 8, **line}) + "\n")
    other = _write_run(tmp_path / "other", [(8, "a", accuracy)], {"max_steps": 7})
    text = (other / "evaluations.jsonl").read_text()
    (other / "evaluations.jsonl").write_text(json.dumps({"step": 0, **line}) + "\n" + text)
    for run in (one, two, other):
        _steps(run, 1, 8)
    result = _costs(capsys, one, two, "--each-run")
    assert result["dominates"][str(two)] == [str(one)], "by b alone"
    assert result["reached"][1]["a"]["runs"] == 0
    assert main_compare([str(one), str(two), "--each-run"]) == 0
    assert re.search(r"(?m)^ *a +\S+ +64 +-$", capsys.readouterr().out), "not reached says another thing"
    result = _costs(capsys, one, other)
    assert result["reached"][1]["a"]["samples"] == 64, "not the 0 of its step 0, which had another metric"


def test_runs_of_equal_values_reach_the_level_of_their_own_mean_and_dominate_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mean of three times 0.1 is above 0.1 in floating point."""
    runs = []
    for name, seed, number in (("a", 0, 4), ("a", 1, 3), ("a", 2, 4), ("b", 0, 4)):
        directory = tmp_path / f"{name}{seed}"
        runs.append(_write_run(directory, [(4, "math", [0.1] * number)], {"seed": seed, "x": name}))
        _steps(runs[-1], 1, 4)
    result = _costs(capsys, *runs)
    assert [(own["math"]["reached"], own["math"]["runs"]) for own in result["reached"]] == [(3, 3), (1, 1)]
    assert not any(result["dominates"].values())


def test_costs_of_a_fork_and_of_a_run_without_records_are_not_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: Values = [0.2, 0.4, 0.3, 0.3]
    whole = _steps(_write_run(tmp_path / "whole", [(8, "a", values)]), 1, 8)
    fork = _steps(_write_run(tmp_path / "fork", [(8, "a", values)], {"max_steps": 8}), 5, 8)
    bare = _write_run(tmp_path / "bare", [(8, "a", values)], {"max_steps": 9})
    (bare / "metrics.jsonl").write_text('{"step": 0, "task/a/weight": 0.5}\n')
    result = _costs(capsys, whole, fork, bare)
    assert [own["samples"] for own in result["costs"]] == [64, None, None]
    assert [own["a"]["samples"] for own in result["reached"]] == [64, None, None]
    assert [own["a"]["steps"] for own in result["reached"]] == [8, 8, 8]


def test_a_run_that_has_evaluated_nothing_is_no_sweep_of_its_former_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _write_run(run, [])
    (run / "evaluations.jsonl").unlink()
    _write_run(run / "previous-1", [(8, "a", [0.2, 0.4])])
    with pytest.raises(ConfigError, match="holds no evaluations"):
        main_compare([str(run), str(run)])


def test_what_ended_early_is_said_and_a_step_that_all_have_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values: Values = [0.2, 0.4, 0.3, 0.3]
    one = _write_run(tmp_path / "one", [(4, "a", values), (4, "b", values), (8, "a", values)])
    two = _write_run(tmp_path / "two", [(4, "a", values), (4, "b", values)], {"seed": 0, "max_steps": 4})
    notes = " ".join(_costs(capsys, one, two)["notes"])
    assert "--step 4 is the last evaluation that all have" in notes
    assert f"{one} ended at step 8, and evaluated only before: b (step 4)" in notes


def test_prompts_that_one_seed_lacks_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: Values = [0.1 * i for i in range(8)]
    runs = [
        _write_run(
            tmp_path / f"{arm}{seed}",
            [(8, "a", [None] * 3 + values[3:] if (arm, seed) == ("b", 1) else values)],
            {"seed": seed, "max_steps": 8 + (arm == "b")},
            prompts="p",
        )
        for arm in "ab"
        for seed in range(3)
    ]
    (result,) = _compare(capsys, *runs)
    assert result["tasks"]["a"]["reason"].endswith(
        "3 of 8 held-out prompts were not scored in each of the 6 runs"
    )
