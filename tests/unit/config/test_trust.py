"""A tasks file or a run directory of somebody else runs no code before ``--trust`` is given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.train import compose_and_run
from multitask_rl.config.run import RunConfig
from multitask_rl.config.trust import refuse_code_in
from multitask_rl.errors import ConfigError
from multitask_rl.records import Score, Scored
from multitask_rl.statistics.evaluations import Evaluations
from multitask_rl.testing import make_rollout
from multitask_rl.tracking.jsonl import dump_line, scored_to_dict

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def score(response, reference):
    return float(response == reference)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; beside it lie ``theirs`` with code and with a run that names it."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    (theirs / "run").mkdir(parents=True)
    mine.mkdir()
    for place in (theirs, mine):
        (place / "code.py").write_text(CODE)
        row = {"id": "0", "prompt": "1+1=", "reference": "2"}
        (place / "rows.jsonl").write_text(
            "".join(json.dumps({**row, "id": f"{i}"}) + "\n" for i in range(40))
        )
    write(theirs, "code.py:score")
    monkeypatch.chdir(mine)
    return mine


def write(directory: Path, reward: str) -> None:
    (directory / "tasks.yaml").write_text(f"tasks: {{math: {{dataset: rows.jsonl, rewards: ['{reward}']}}}}")
    if (directory / "run").is_dir():
        place, _, name = reward.rpartition(":")
        absolute = f"{directory / place}:{name}" if place == "code.py" else reward
        record(directory / "run", absolute)


def record(run: Path, reward: str, **more: object) -> None:
    rewards = [{"plugin": reward, "name": "score"}]
    spec = {"name": "math", "dataset": str(run.parent / "rows.jsonl"), "rewards": rewards}
    (run / "config.yaml").write_text(json.dumps({"tasks": {"math": spec}, **more}))


COMMANDS = (
    ["tasks", "validate", "../theirs/tasks.yaml"],
    ["train", "tasks_file=../theirs/tasks.yaml", "model.name_or_path=absent"],
    ["train", "tasks_file=${oc.env:PWD}/../theirs/tasks.yaml", "model.name_or_path=absent"],
    ["train", "output_dir=../theirs/run"],
    ["eval", "output_dir=../theirs/run"],
    ["bench", "output_dir=../theirs/run"],
    ["rescore", "../theirs/run"],
    ["rescore", "../theirs/run", "--reward", "score"],
    ["rescore", "../theirs/run", "--tasks", "../theirs/tasks.yaml"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_code_that_a_foreign_file_names_is_refused(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    theirs = mine.parent / "theirs"
    monkeypatch.setenv("PWD", str(mine))
    rollout = make_rollout("2", task="math", row={"prompt": "1+1=", "reference": "2"})
    scored = Scored(rollout=rollout, reward=0.0, breakdown={"score": Score(value=0.0)})
    (theirs / "run" / "rollouts.jsonl").write_text(dump_line(scored_to_dict(scored, 0)))
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "--trust" in told
    assert "code.py:score" in told
    assert not (theirs / "ran").exists()


def test_trust_lets_it_run_and_own_files_need_none(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = mine.parent / "theirs"
    assert main(["tasks", "validate", "../theirs/tasks.yaml", "--trust"]) == 0
    assert (theirs / "ran").exists()
    write(mine, "code.py:score")
    assert main(["tasks", "validate", str(mine / "tasks.yaml")]) == 0
    assert (mine / "ran").exists()
    write(theirs, "math_answer")
    assert main(["tasks", "validate", "--quick", "../theirs/tasks.yaml"]) == 0


@pytest.mark.parametrize(
    ("reward", "is_refused"),
    [
        ("math_answer", False),
        ("trl:math_answer", False),
        ("reasoning_gym:leg_counting", False),
        ("MINE/code.py:score", False),
        ("verl:MINE/code.py:score", False),
        ("MINE/.venv/lib/site-packages/code.py:score", True),
        ("MINE/../theirs/code.py:score", True),
        ("os:system", True),
        ("trl:os:system", True),
        ("verifiers:gsm8k", True),
        ("evaluate:metric", True),
    ],
)
def test_what_a_foreign_record_may_name(mine: Path, reward: str, is_refused: bool) -> None:
    run = mine.parent / "theirs" / "run"
    record(run, reward.replace("MINE", str(mine)))
    seen: list[RunConfig] = []
    if is_refused:
        with pytest.raises(ConfigError, match="--trust"):
            compose_and_run([f"output_dir={run}"], "eval", seen.append)
    else:
        compose_and_run([f"output_dir={run}"], "eval", seen.append)
    compose_and_run([f"output_dir={run}", "--trust"], "eval", seen.append)
    assert seen[-1].tasks["math"]["rewards"][0]["plugin"] == reward.replace("MINE", str(mine))


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        ("number_game", False),
        ("reasoning_gym:chain_sum", False),
        ("MINE/code.py:World", False),
        ("agent:MINE/code.py:run", False),
        ("MINE/../theirs/code.py:World", True),
        ("trl:MINE/../theirs/code.py:World", True),
        ("agent:MINE/../theirs/code.py:run", True),
        ("openenv:MINE/../theirs", True),
        ("verifiers:gsm8k", True),
    ],
)
def test_the_environment_of_a_foreign_tasks_file_is_code(
    mine: Path, environment: str, is_refused: bool
) -> None:
    named = environment.replace("MINE", str(mine))
    file = mine.parent / "theirs" / "tasks.yaml"
    file.write_text(f"tasks: {{math: {{dataset: rows.jsonl, environment: '{named}'}}}}")
    if is_refused:
        with pytest.raises(ConfigError, match=r"environment names code to run.*--trust"):
            refuse_code_in(file)
    else:
        refuse_code_in(file)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"type": "THEIRS/code.py:Own"}, "type"),
        ({"dataset": "plugin:THEIRS/code.py:Rows"}, "dataset"),
        ({"dataset": "plugin:code.py:Rows"}, "dataset"),
        ({"eval_dataset": "plugin:THEIRS/code.py:Rows"}, "eval_dataset"),
    ],
)
def test_a_foreign_tasks_file_runs_no_algorithm_and_no_task_plugin_of_a_file(
    mine: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, str], named: str
) -> None:
    theirs = mine.parent / "theirs"
    spec = {"dataset": "rows.jsonl", "rewards": ["math_answer"]}
    spec |= {key: value.replace("THEIRS", str(theirs)) for key, value in keys.items()}
    (theirs / "tasks.yaml").write_text(json.dumps({"tasks": {"math": spec}}))
    assert main(["tasks", "validate", "../theirs/tasks.yaml"]) == 2
    assert f"tasks.math.{named} names code to run" in capsys.readouterr().err
    assert not (theirs / "ran").exists()


@pytest.mark.parametrize("command", [["tasks", "show"], ["rescore", "../theirs/run", "--tasks"]])
def test_commands_that_only_read_a_foreign_tasks_file_run_no_task_plugin_of_a_file(
    mine: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    theirs = mine.parent / "theirs"
    (theirs / "run" / "rollouts.jsonl").touch()
    spec = {"dataset": f"plugin:{theirs}/code.py:Rows", "rewards": ["math_answer"]}
    (theirs / "tasks.yaml").write_text(json.dumps({"tasks": {"math": spec}}))
    assert main([*command, "../theirs/tasks.yaml"]) == 2
    assert "tasks.math.dataset names code to run" in capsys.readouterr().err
    assert not (theirs / "ran").exists()


def test_a_foreign_tasks_file_is_shown_although_it_names_a_reward_of_a_file(mine: Path) -> None:
    assert main(["tasks", "show", "../theirs/tasks.yaml"]) == 0
    assert not (mine.parent / "theirs" / "ran").exists()


@pytest.mark.parametrize(
    "section",
    [
        {"rollout": {"engine": "CODE:Engine"}},
        {"scheduler": {"policy": "CODE:Policy"}},
        {"guard": {"plugin": "CODE:Own"}},
        {"training": {"backend": "CODE:Own"}},
        {"tracking": {"trackers": ["jsonl", "CODE:Own"]}},
    ],
)
def test_a_foreign_record_runs_no_plugin_of_a_file(mine: Path, section: dict[str, Any]) -> None:
    run = mine.parent / "theirs" / "run"
    place = str(mine.parent / "theirs" / "code.py")
    record(run, "math_answer", **json.loads(json.dumps(section).replace("CODE", place)))
    with pytest.raises(ConfigError, match=f"{next(iter(section))}.*names code to run.*--trust"):
        compose_and_run([f"output_dir={run}"], "eval", lambda config: None)


def test_a_foreign_record_does_not_run_the_code_of_its_model(mine: Path) -> None:
    run = mine.parent / "theirs" / "run"
    record(run, "math_answer", model={"trust_remote_code": True})
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code"):
        compose_and_run([f"output_dir={run}"], "eval", lambda config: None)


@pytest.mark.parametrize(
    "text", ["${oc.env:SECRET}", "a\\${oc.env:SECRET}", "\\\\${oc.env:SECRET}", "${", "\\"]
)
def test_interpolation_in_a_record_is_text(mine: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SECRET", "sesame")
    (mine / "run").mkdir()
    more = {
        "tracking": {"experiment": text, "trackers": [text]},
        "rollout": {"engine_config": {"a": {"b": [text]}}},
        "profile": "",
    }
    record(mine / "run", "math_answer", **more)
    seen: list[RunConfig] = []
    compose_and_run(["output_dir=run"], "eval", seen.append)
    assert seen[0].tracking.experiment == text
    assert seen[0].tracking.trackers == [text]
    assert seen[0].rollout.engine_config == {"a": {"b": [text]}}
    assert "sesame" not in str(seen[0])


def test_what_files_and_packages_say_is_printable(
    mine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "tasks.yaml").write_text(
        'tasks: {math: {dataset: rows.jsonl, rewards: [{plugin: math_answer, name: "a\\e[2J"}], '
        'primary_metric: "a\\e[2J"}}'
    )
    assert main(["tasks", "show", "tasks.yaml"]) == 0
    assert main(["tasks", "show", "--json", "tasks.yaml"]) == 0
    assert main(["tasks", "validate", "--quick", "tasks.yaml"]) == 0
    primary = SimpleNamespace(mean=0.0, n=0, error=0.0, values=())
    evaluation: Any = SimpleNamespace(
        primary=primary, metric="d\x1b[2J", num_failed=0, num_samples=1, metrics={}
    )
    print(Evaluations({"math": evaluation}))
    described = "b\x1b[2J [reads c\x1b[2J]"
    monkeypatch.setattr("multitask_rl.cli.plugins.describe", lambda info: described)
    assert main(["plugins", "list", "rewards"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    for letter in "abcd":
        assert f"{letter}\\x1b[2J" in told
