"""``multitask-rl rescore`` on a real run: another reward on its stored answers, nothing heavy imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.rescore import agreement, pearson
from multitask_rl.config.run import EvalConfig
from run_builders import run_config, train, write_run

LIGHT = """
import sys
from multitask_rl.cli import main
code = main(sys.argv[1:])
heavy = {'torch', 'transformers', 'datasets', 'ray', 'vllm', 'mlflow'} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""

TASKS = """
tasks:
  copy:
    dataset: copy.jsonl
    rewards:
      - rewards.py:starts_right
      - {plugin: rewards.py:is_short, weight: 0}
    constraints:
      - {plugin: rewards.py:has_no_digit, mode: penalty}
"""

NEW = """
def starts_wrong(response, reference):
    return 1.0 - float(response[:1] == reference[:1]) if response else 1.0


def needs_more(response, gold_program):
    return 1.0
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("rescored")
    write_run(directory, TASKS)
    train(run_config(directory, "run", 2, eval=EvalConfig(every=0, num_prompts=4)))
    (directory / "new.py").write_text(NEW)
    return directory


def stored(directory: Path) -> int:
    return len((directory / "run" / "rollouts.jsonl").read_text().splitlines())


def rescore(directory: Path, *arguments: str) -> list[list[str]]:
    command = [sys.executable, "-c", LIGHT, "rescore", "run", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_the_runs_own_rewards_agree_with_themselves_and_no_model_is_loaded(run: Path) -> None:
    header, right, short, _, _, *agreed = rescore(run)
    assert header[:6] == ["reward", "n", "before", "now", "changed", "failed"]
    assert (right[0], right[4:], short[0], short[4:]) == (
        "copy/starts_right",
        ["0", "0"],
        "copy/is_short",
        ["0", "0"],
    )
    assert int(right[1]) == stored(run) >= 96
    assert right[2] == right[3]
    assert [line[0] for line in agreed] == ["copy/starts_right", "copy/is_short"]
    assert agreed[1][2:4] == ["1.000", "1.000"]
    assert agreed[1][5:7] == ["0", "0"], "nothing is high on one side only"


def test_an_opposite_reward_shows_in_correlation_and_confusion(run: Path) -> None:
    _, means, _, _, agreed, *_ = rescore(
        run, "--reward", "new.py:starts_wrong", "--against", "starts_right", "--output", "again.jsonl"
    )
    assert means[:3] == ["copy/starts_wrong", ":", "starts_right"]
    before, now = float(means[4]), float(means[5])
    assert 0.0 < before < 1.0
    assert now == pytest.approx(1.0 - before, abs=1e-4)
    assert agreed[4:7] == ["-1.000", "-1.000", "0"]
    assert int(agreed[7]) + int(agreed[8]) == stored(run)
    assert agreed[9:] == ["0", "0.5"]
    assert len((run / "again.jsonl").read_text().splitlines()) == stored(run)


def test_a_reward_that_fails_on_all_is_reported_not_counted_as_zero(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert main(["rescore", "run", "--reward", "new.py:needs_more"]) == 0
    _, means, _, _, agreed, failure = (line.split() for line in capsys.readouterr().out.splitlines())
    assert means[:3] == ["copy/needs_more", ":", "reward"], "without a namesake: the task's whole reward"
    assert means[5:] == ["nan", "0", str(stored(run))]
    assert agreed[3] == "0"
    assert " ".join(failure).startswith("first failure of needs_more: data: ")
    assert "gold_program" in failure[-1] or "'gold_program'" in " ".join(failure)


def test_mistakes_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    folder = str(run / "run")
    for arguments, message in (
        (["--reward", "exact_mach"], "Did you mean 'exact_match'"),
        (["--task", "cpy"], "--task: unknown task 'cpy'; did you mean 'copy'? (allowed: copy)"),
        (
            ["--against", "short"],
            "stored no reward 'short'; did you mean 'is_short'? (stored: is_short, reward, starts_right)",
        ),
        (["--reward", "exact_match", "--config", '{"colum": "x"}'], "unknown key 'colum'"),
    ):
        assert main(["rescore", folder, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_agreement_equals_hand_computed_values() -> None:
    assert pearson([0, 1, 2, 3], [0, 1, 4, 9]) == pytest.approx(0.9583, abs=1e-4)
    assert agreement([1, 2, 2, 4], [1, 3, 2, 4]).spearman == pytest.approx(0.9487, abs=1e-4)
    found = agreement([0.2, 0.8, 0.9, 0.1], [0.6, 0.9, 0.2, 0.0])
    assert (found.both_high, found.only_before, found.only_now, found.both_low) == (1, 1, 1, 1)
    assert found.borders == (0.5, 0.5)
    assert agreement([-4.0, 2.0], [10.0, 30.0]).borders == (-1.0, 20.0)
    constant = agreement([1.0, 1.0], [0.0, 1.0])
    assert str(constant.pearson) == "nan"
