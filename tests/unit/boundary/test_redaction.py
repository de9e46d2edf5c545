"""Secrets of a configuration reach no record, log or tracker, and a resumed run asks for them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from multitask_rl.boundary.printable import REDACTED, EscapingFilter, duration, redact
from multitask_rl.cli import error_line
from multitask_rl.cli.train import compose_and_run
from multitask_rl.config.run import CheckpointConfig, RunConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.errors import ConfigError
from multitask_rl.run.store import RunStore

HOOK = "https://hooks.example/services/sesame"


@pytest.mark.parametrize(
    ("key", "value", "recorded"),
    [
        ("webhook", HOOK, f"https://hooks.example/{REDACTED}"),
        ("api_key", "sesame", REDACTED),
        ("judge_api_key", "sesame", REDACTED),
        ("hf_token", "sesame", REDACTED),
        ("token", "sesame", REDACTED),
        ("auth_token", ["sesame"], [REDACTED]),
        ("password", "sesame", REDACTED),
        ("DB_PASSWORD", 4711, REDACTED),
        ("headers", {"Authorization": "Bearer sesame"}, {"Authorization": REDACTED}),
        ("client_secret", {"a": "sesame"}, {"a": REDACTED}),
        ("uri", "postgresql://me:sesame@db/x", f"postgresql://{REDACTED}@db/x"),
        ("uri", "https://sesame@host", f"https://{REDACTED}@host"),
        ("url", "http://h/p?a=1&access_token=sesame&b=2", f"http://h/p?a=1&access_token={REDACTED}&b=2"),
        ("url", "http://h/p?api-key=sesame#x", f"http://h/p?api-key={REDACTED}#x"),
        # no secrets
        ("api_key_env", "OPENAI_API_KEY", "OPENAI_API_KEY"),
        ("api_key", "", ""),
        ("password", None, None),
        ("max_new_tokens", 256, 256),
        ("tokenizer", "path/to/one", "path/to/one"),
        ("eos_token", "</s>", "</s>"),
        ("tokens_per_microbatch", 5, 5),
        ("uri", "sqlite:////a/b@c/mlflow.db", "sqlite:////a/b@c/mlflow.db"),
        ("dataset", "hf://owner/name@main", "hf://owner/name@main"),
        ("url", "http://h/p?max_tokens=5&q=token", "http://h/p?max_tokens=5&q=token"),
        ("author", "me@example", "me@example"),
    ],
)
def test_secrets_are_redacted_and_nothing_else(key: str, value: object, recorded: object) -> None:
    assert redact({"a": [{key: value}]}) == {"a": [{key: recorded}]}
    assert redact(redact({key: value})) == {key: recorded}


def record(run: Path) -> tuple[RunConfig, RunStore]:
    config = RunConfig(output_dir=str(run))
    config.guard.guard_config = {"webhook": HOOK}
    config.tracking.uri = "https://me:sesame@mlflow.example"
    tasks = {"a": {"dataset": "x/y", "rewards": [{"plugin": "math_answer", "config": {}}]}}
    run.mkdir()
    store = RunStore(run, CheckpointConfig(), track=False)
    settings = store.settings(config, parse_tasks({"tasks": tasks}))
    assert "sesame" not in str(settings)
    store.write_config(settings)
    return config, store


def files_with(directory: Path, secret: str) -> list[Path]:
    return [p for p in directory.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]


def test_a_resumed_run_has_no_secret_but_those_given_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run")
    assert files_with(tmp_path, "sesame") == []
    seen: list[RunConfig] = []
    compose_and_run(["output_dir=run"], "eval", seen.append)  # posts nothing, tracks nothing
    hook = f"guard.guard_config.webhook={HOOK}"
    with pytest.raises(ConfigError, match=r"guard\.guard_config\.webhook"):
        compose_and_run(["output_dir=run"], "train", seen.append)
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        compose_and_run(["output_dir=run", hook], "train", seen.append)
    monkeypatch.setenv("MLFLOW", "https://me:other@mlflow.example")
    compose_and_run(["output_dir=run", hook, "tracking.uri=${oc.env:MLFLOW}"], "train", seen.append)
    assert seen[-1].guard.guard_config == {"webhook": HOOK}
    assert seen[-1].tracking.uri == "https://me:other@mlflow.example"


def test_a_secret_of_a_task_is_asked_for_by_whatever_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        f"tasks: {{a: {{rewards: [{{plugin: judge, config: {{url: 'https://{REDACTED}@host'}}}}]}}}}"
    )
    with pytest.raises(ConfigError, match=r"tasks\.a\.rewards\[0\]\.config\.url.*tasks_file"):
        compose_and_run(["output_dir=run"], "eval", lambda config: None)


@pytest.mark.parametrize("sweep", [[], ["--multirun", "seed=0,1"]])
def test_training_leaves_no_secret_in_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def action(config: RunConfig) -> None:
        logging.getLogger("x").warning("MLflow at %s is gone", config.tracking.uri)

    given = ["tracking.uri=https://me:sesame@h", f"guard.guard_config.webhook={HOOK}", "output_dir=run"]
    compose_and_run([*sweep, *given], "train", action)
    assert list((tmp_path / "run").rglob("train.log"))
    assert files_with(tmp_path, "sesame") == []


def test_what_is_shown_of_an_address_holds_no_secret() -> None:
    text = "no answer from https://me:sesame@h/x?token=sesame (twice)"
    assert "sesame" not in error_line(text)
    line = logging.LogRecord("x", logging.INFO, "", 0, "%s", (text,), None)
    assert EscapingFilter().filter(line)
    assert line.getMessage() == f"no answer from https://{REDACTED}@h/x?token={REDACTED} (twice)"


def test_a_duration_is_no_power_of_ten() -> None:
    assert [duration(s) for s in (0, 0.256, 40, 400, 12600)] == ["0 s", "0.26 s", "40 s", "7 min", "3.5 h"]
