"""What the console and the JSON lines show of a run."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import resource
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import CheckpointError, PluginError
from multitask_rl.records import (
    NOT_APPLICABLE,
    Event,
    Failure,
    FailureKind,
    Prompt,
    RewardResult,
    Rollout,
    SamplingParams,
    Score,
    Scored,
    TokenRecord,
    Turn,
    Verdict,
)
from multitask_rl.testing import make_evaluation
from multitask_rl.tracking.base import Tracker, Trackers
from multitask_rl.tracking.console import ConsoleTracker, ProgressTracker
from multitask_rl.tracking.jsonl import JsonlTracker, rollout_from_dict
from multitask_rl.tracking.machine import read_machine

METRICS = {
    "task/math/reward_mean": 0.5,
    "task/math/weight": 0.25,
    "task/math/share_requested": 0.25,
    "task/math/share_sampled": 0.3,
    "task/math/share_trained": 0.2,
    "task/math/rejection_rate": 0.0,
    "task/math/samples_per_s": 128.0,
    "task/math/tokens_per_s": 2048.0,
    "task/a-long-name/reward_mean": math.nan,
    "macro/reward_mean": 0.5,
    "time/samples_per_s": 250.0,
    "time/updates_per_s": 3.2,
    "time/step_s": 1.25,
    "time/update_s": 0.75,
    "utilisation/update": 0.6,
    "waits_for/rollout": 0.2,
    "utilisation/rewards": 0.9,
    "train/loss": -0.25,
    "time/rollout_s": 0.25,
}


def _scored(task: str, sample: int) -> Scored:
    prompt = Prompt(
        task=task, prompt_id=f"{task}/7", draw=3, row={"reference": "4"}, text="2+2=", prompt_ids=[5, 6]
    )
    rollout = Rollout(
        prompt=prompt,
        sample=sample,
        response_ids=[7, 2],
        rollout_logprobs=[-0.5, -0.1],
        response="4",
        policy_version=9,
        sampling=SamplingParams(stop=("\n",), temperature=0.7),
        verdicts={"safety": Verdict(cost=0.1, violated=False)},
    )
    failure = Failure(kind=FailureKind.timeout, message="30 s", source="slow")
    breakdown: dict[str, RewardResult] = {
        "exact": Score(value=1.0, components={"len": math.inf}),
        "other": NOT_APPLICABLE,
        "slow": failure,
    }
    return Scored(rollout=rollout, reward=None, breakdown=breakdown, failure=failure)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _jsonl(directory: Path, resume_step: int | None = None, **config: object) -> JsonlTracker:
    tracker = JsonlTracker(directory, TrackingConfig(**config), None)  # type: ignore[arg-type]
    tracker.start({}, resume_step)
    return tracker


def test_a_task_without_samples_shows_no_rate_of_an_earlier_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=stream)
    tracker.start({"max_steps": 10})
    tracker.log_metrics(METRICS | {"task/math/rewards_per_s": 98765.0}, 9)
    tracker.log_metrics({n: v for n, v in METRICS.items() if not n.startswith("task/math/tokens")}, 10)
    tracker.finish("finished")
    tables = stream.getvalue().split("task  ")[1:]
    assert ["98,765" in table for table in tables] == [True, False]
    assert ["2,048" in table for table in tables] == [True, False]


def test_plain_console_has_one_line_per_task_and_one_for_the_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=stream)
    tracker.start({"max_steps": 10})
    tracker.log_evaluation({"math": make_evaluation([1, 0, 0, 1], task="math", step=2)}, 2)
    tracker.log_progress("sampling", 0, 64)
    tracker.log_progress("sampling", 32, 64)
    tracker.log_metrics(METRICS, 3)
    tracker.log_metrics(METRICS | {"macro/kl": 0.125}, 4)
    late = {"failure_rate": 0.75, "rejection_rate": 0.008, "rewards_per_s": 28.0}
    late = {f"task/math/{name}": value for name, value in late.items()}
    tracker.log_metrics(METRICS | late | {"task/a-long-name/reward_mean": 7.0}, 10)
    tracker.log_event(Event(step=10, source="guard", kind="alarm", reason="fell", task="math"))
    assert not tracker.log_stopping("standard error says it")
    tracker.finish("finished")
    rates = r"250 samples/s  3.200 updates/s  \d+:\d\d left"
    assert re.sub(rates, "RATES", stream.getvalue()).splitlines()[1:] == [
        "step 2/10  held out: math 0.500 ±0.566",
        "step 3/10  reward 0.500  loss -0.250  1.250 s (learning 60%, sampling 20%)  RATES",
        "  task             held-out  reward  share  samples/s  tokens/s",
        "  math         0.500 ±0.566   0.500    25%        128     2,048",
        "  a-long-name             -       -      -          -         -",
        "step 4/10  reward 0.500  loss -0.250  kl 0.125  1.250 s (learning 60%, sampling 20%)  RATES",
        "step 10/10  warning: responses without a reward: math 75%",
        "step 10/10  reward 0.500  loss -0.250  1.250 s (learning 60%, sampling 20%)  RATES",
        "  task             held-out  reward  share  rejected  failing  samples/s  tokens/s  rewards/s",
        "  math         0.500 ±0.566   0.500    25%        1%      75%        128     2,048       28.0",
        "  a-long-name             -   7.000      -         -        -          -         -          -",
        "step 10  guard alarm [math]: fell",
        f"run finished; next: multitask-rl report {tmp_path} --html {tmp_path}/report.html --open",
    ]


def test_a_line_names_few_of_many_tasks(tmp_path: Path) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=stream)
    levels = {f"t{i}": make_evaluation([float(k < i) for k in range(10)], task=f"t{i}") for i in range(11)}
    tracker.log_evaluation(levels, 2)
    text = stream.getvalue()
    assert "mean of 11 tasks 0.500; lowest t0 0.000" in text
    assert "t10 1.000" in text
    assert "t5" not in text


@pytest.mark.parametrize(("console", "told"), [("quiet", ["fell", "run stopped"]), ("json", [])])
def test_quiet_tells_alarms_and_json_is_one_object_a_line(
    tmp_path: Path, console: str, told: list[str]
) -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(console=console), None, stream=stream)
    tracker.start({"max_steps": 10})
    tracker.log_evaluation({"math": make_evaluation([1, 0], task="math")}, 2)
    tracker.log_metrics(METRICS, 3)
    tracker.log_event(Event(step=3, source="scheduler", kind="weights", reason="moved"))
    tracker.log_event(Event(step=3, source="guard", kind="alarm", reason="fell", task="math"))
    tracker.finish("stopped")
    lines = stream.getvalue().splitlines()
    if console == "quiet":
        assert len(lines) == len(told)
        assert all(part in line for part, line in zip(told, lines, strict=True))
        assert "the same command begins anew" in lines[1]
        return
    records = [json.loads(line) for line in lines]
    assert [next(key for key in record if key != "step") for record in records] == [
        *("held_out", "metrics", "event", "event", "status")
    ]
    assert records[1]["metrics"]["task/a-long-name/reward_mean"] is None


def test_terminal_console_draws_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "config.yaml").write_text("max_steps: 10")
    stream = Terminal()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=stream)
    tracker.start({"max_steps": 10})
    tracker.log_metrics(METRICS, 3)
    tracker.log_event(Event(step=3, source="guard", kind="alarm", reason="it [fell]"))
    tracker.log_event(Event(step=3, source="scheduler", kind="weights", reason="moved"))
    for level in (2, 5):
        tracker.log_evaluation({"math": make_evaluation([k < level for k in range(8)], task="math")}, 4)
    tracker.log_progress("evaluating", 12, 1024)
    assert tracker.log_stopping("stopping: what was learned is saved first")
    assert "stopping: what was learned" in str(tracker._view().renderables[1])
    tracker.finish("stopped")
    text = stream.getvalue()
    last = text[text.rindex("step 3/10") :]
    assert "0.625 ±" in last
    assert "▁█" in last
    assert "25%" in last, "an evaluation must not wipe the step's numbers off the table"
    assert "learning 60%, sampling 20%" in last
    assert "scheduler: weights: moved (step 3)" in last
    assert "guard alarm: it [fell]" in text
    assert "run stopped; next: multitask-rl train output_dir=" in text.splitlines()[-1]
    assert text.splitlines()[-1].endswith("begins anew: no checkpoint was saved")
    (tmp_path / "checkpoints/step_00000003").mkdir(parents=True)
    plain = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=(lines := io.StringIO()))
    plain.finish("stopped")
    assert lines.getvalue().endswith("goes on from the newest checkpoint\n")
    plain.log_event(Event(step=3, source="guard", kind="stop", reason="it fell again"))
    plain.finish("stopped")
    assert f"run stopped; next: multitask-rl report {tmp_path}" in lines.getvalue().splitlines()[-1]


def test_the_command_after_a_run_that_recorded_no_configuration_is_the_same_one(tmp_path: Path) -> None:
    """``train output_dir=...`` alone would find no tasks."""
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=(lines := io.StringIO()))
    tracker.finish("stopped")
    assert lines.getvalue() == "run stopped; next: the same command begins anew: no checkpoint was saved\n"


def test_json_lines_are_strict_and_hold_every_record(tmp_path: Path) -> None:
    tracker = _jsonl(tmp_path)
    tracker.log_metrics(METRICS, 3)
    tracker.log_event(Event(step=3, source="guard", kind="alarm", reason="fell", data={"drop": math.nan}))
    tracker.log_rollouts([_scored("math", 0)], 3)
    tracker.finish("finished")
    (metrics,) = _lines(tmp_path / "metrics.jsonl")
    assert metrics == {"step": 3, **METRICS, "task/a-long-name/reward_mean": None}
    (event,) = _lines(tmp_path / "events.jsonl")
    assert (event["reason"], event["data"]) == ("fell", {"drop": None})
    (line,) = _lines(tmp_path / "rollouts.jsonl")
    assert line["breakdown"] == {
        "exact": {"value": 1.0, "components": {"len": None}},
        "other": {"not_applicable": True},
        "slow": {"failure": {"kind": "timeout", "message": "30 s", "source": "slow"}},
    }


def test_stored_rollout_can_be_rebuilt_for_scoring_again(tmp_path: Path) -> None:
    scored = _scored("math", 1)
    scored.tokens = TokenRecord(texts=["4", "<eos>"], logprobs=[-0.5, -0.1], advantages=0.25)
    tracker = _jsonl(tmp_path)
    tracker.log_rollouts([scored], 3)
    tracker.finish("finished")
    (line,) = _lines(tmp_path / "rollouts.jsonl")
    expected = scored.rollout
    expected.rollout_logprobs, expected.verdicts = [], {}
    assert rollout_from_dict(line) == expected
    tokens = line.pop("tokens")
    assert tokens == {"texts": ["4", "<eos>"], "logprobs": [-0.5, -0.1], "advantages": 0.25}
    assert rollout_from_dict(line) == expected, "a file of an earlier version"


def test_a_stored_episode_keeps_the_limit_that_a_reward_may_compare_its_length_with(tmp_path: Path) -> None:
    scored = _scored("math", 1)
    scored.rollout.turns, scored.rollout.token_limit = [Turn(num_tokens=2, response="4")], 48
    tracker = _jsonl(tmp_path)
    tracker.log_rollouts([scored], 3)
    tracker.finish("finished")
    (line,) = _lines(tmp_path / "rollouts.jsonl")
    assert rollout_from_dict(line).max_response_tokens == scored.rollout.max_response_tokens == 48


class _Failing(JsonlTracker):
    error: BaseException

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ConnectionError("no route"), SystemExit(0)])
def test_failing_tracker_is_reported_once_and_left_out(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    failing = {"server": _Failing(tmp_path, TrackingConfig(), None)}
    failing["server"].error = error
    trackers = Trackers(tmp_path, TrackingConfig(trackers=["console"]), None, failing)
    trackers.start({}, resume_step=0)
    trackers.log_metrics({"macro/reward_mean": 1.0}, 1)
    trackers.log_metrics({"macro/reward_mean": 2.0}, 2)
    trackers.finish("finished")
    assert list(trackers.failures) == ["server"]
    assert len(caplog.records) == 1
    assert "step 2  reward 2.000" in capsys.readouterr().out


class _Clearing(Tracker):
    def log_metrics(self, metrics, step):
        metrics.clear()

    def log_evaluation(self, evaluations, step):
        evaluations.clear()

    def log_rollouts(self, scored, step):
        scored.clear()


def test_a_tracker_that_changes_what_it_gets_changes_no_record(tmp_path: Path) -> None:
    class Kept(Tracker):
        def log_metrics(self, metrics, step):
            seen.append(dict(metrics))

        def log_evaluation(self, evaluations, step):
            seen.append(dict(evaluations))

        def log_rollouts(self, scored, step):
            seen.append(list(scored))

    seen: list[Any] = []
    further = {"clearing": _Clearing(), "kept": Kept()}
    trackers = Trackers(tmp_path, TrackingConfig(trackers=[]), None, further)
    metrics, scored = {"loss": 1.0}, [object()]
    trackers.log_metrics(metrics, 1)
    trackers.log_evaluation(metrics, 1)  # type: ignore[arg-type]
    trackers.log_rollouts(scored, 1)  # type: ignore[arg-type]
    assert seen == [{"loss": 1.0}, {"loss": 1.0}, scored]
    assert not trackers.failures


class _Named(Tracker):
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


class _Lacking:
    """A tracker that is no subclass of ``Tracker`` and has only the methods that it uses."""

    run_id = None

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


class _NoIdentity(Tracker):
    @property
    def run_id(self) -> str:  # type: ignore[override]
        raise ConnectionError("no route")


class _BadIdentity(Tracker):
    run_id = object()  # type: ignore[assignment]


class _Stopping(Tracker):
    def log_stopping(self, text: str) -> bool:
        raise ConnectionError("no route")


@pytest.mark.parametrize("kind", [_NoIdentity, _BadIdentity, _Stopping, _Lacking])
def test_whatever_fails_in_a_tracker_it_is_left_out_and_the_run_goes_on(
    tmp_path: Path, kind: type[Any]
) -> None:
    known = _Named("7")
    trackers = Trackers(tmp_path, TrackingConfig(trackers=[]), None, {"own": kind(), "named": known})
    trackers.start({})
    assert trackers.run_id == '{"named": "7"}'
    assert not trackers.log_stopping("stops")
    assert trackers.record_rollouts in (True, False)
    trackers.log_rollouts([], 1)
    assert trackers.take_pages in (True, False)
    trackers.log_page("<html>")
    assert list(trackers.failures) == ["own"]
    assert trackers.run_id == '{"named": "7"}'


@pytest.mark.parametrize("what", ["a directory", "full"])
def test_records_that_cannot_be_written_end_the_run(tmp_path: Path, what: str) -> None:
    trackers = Trackers(tmp_path, TrackingConfig(trackers=["jsonl"]), None)
    trackers.start({})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if what == "a directory":
        (tmp_path / "metrics.jsonl").mkdir()
    else:
        trackers.log_metrics({"macro/reward_mean": 1.0}, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl.*: .*[Ss]tart again"):
            trackers.log_metrics({"macro/reward_mean": 2.0}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trackers.finish("failed")


def test_unknown_tracker_is_an_error_that_lists_the_installed(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"'aim'.*console, jsonl, mlflow"):
        Trackers(tmp_path, TrackingConfig(trackers=["aim"]), None)


@pytest.mark.parametrize(
    ("init", "told"),
    [
        (
            "def __init__(self): pass",
            "TypeError: .*unexpected keyword .*; it is called as",
        ),
        ("def __init__(self, **_): raise OSError('no server')", "OSError: no server"),
        ("def __init__(self, **_): raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_tracker_that_cannot_be_built_is_told_by_its_name(tmp_path: Path, init: str, told: str) -> None:
    (tmp_path / "own.py").write_text(f"class T:\n    {init}\n    def log_metrics(self, *_): pass\n")
    name = f"{tmp_path / 'own.py'}:T"
    with pytest.raises(PluginError, match=rf"^tracking\.trackers: .*own\.py:T' cannot be built: {told}"):
        Trackers(tmp_path, TrackingConfig(trackers=[name]), None)


def test_a_log_handler_whose_stream_is_closed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    closed = io.StringIO()
    handler = logging.StreamHandler(closed)
    closed.close()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=Terminal())
    tracker.start({"max_steps": 10})
    tracker.finish("finished")
    assert handler.stream is closed


def test_a_notebook_has_one_output_that_updates_without_widgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []

    class Handle:
        def update(self, page: str) -> None:
            pages[-1] = page

    def display(page: str, display_id: bool) -> Handle:
        assert display_id
        pages.append(page)
        return Handle()

    class ZMQInteractiveShell:
        """The name by which notebooks are known."""

    monkeypatch.setattr("builtins.get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    stream = io.StringIO()
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=stream)
    tracker.start({"max_steps": 2})
    tracker.log_evaluation({"<math>": make_evaluation([1.0, 0.0], task="<math>")}, 0)
    tracker.log_metrics({"time/step_s": 1.0, "task/<math>/reward_mean": 0.25}, 1)
    tracker.log_event(Event(step=1, source="scheduler", kind="reweight", reason="it lags", task="<math>"))
    tracker.log_event(Event(step=1, source="guard", kind="alarm", reason="it falls", task="<math>"))
    tracker.finish("finished")
    assert len(pages) == 1
    for shown in ("step 1/2", "&lt;math&gt;", "0.500 ±0.980", "0.250", "it lags", "it falls", "finished"):
        assert shown in pages[0]
    assert "<math>" not in pages[0]
    assert "font-family: " in pages[0], "columns stand below each other in a page with fonts of its own"
    assert "monospace" in pages[0]
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"output in {tmp_path}",
        "step 1  guard alarm [<math>]",
        "run finished; next",
    ]


def test_a_run_says_what_it_ran_on_and_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    _jsonl(tmp_path / "run")
    found = read_machine(tmp_path / "run")
    assert found["cores"] >= 1
    assert found["Python"].count(".") == 2
    assert found["torch"]
    for damage in ("{", "[]", "\x00"):
        (tmp_path / "run" / "machine.json").write_text(damage)
        assert read_machine(tmp_path / "run") == {}
    assert read_machine(tmp_path) == {}


def test_an_evaluation_that_records_nothing_tells_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("multitask_rl.tracking.console.time.monotonic", lambda: now[0])
    lines, screen = io.StringIO(), io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    for stream in (lines, screen):
        progress = ProgressTracker(stream)
        for done in range(0, 101, 20):
            progress.log_progress("evaluating", done, 100)
            now[0] += 20.0
    assert lines.getvalue() == "  evaluating: 40 of 100 responses\n  evaluating: 80 of 100 responses\n"
    assert screen.getvalue().startswith("\r  evaluating: 20 of 100 responses\x1b[K\r  evaluating: 40")
    assert screen.getvalue().endswith("\r\x1b[K"), "nothing stays"


def test_the_command_that_goes_on_is_quoted_for_the_shell_and_for_hydra(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/config.yaml").touch()
    tracker = ConsoleTracker(tmp_path / "a b", TrackingConfig(), None, stream=(lines := io.StringIO()))
    tracker.start({})
    tracker.finish("stopped")
    argument = shlex.split(lines.getvalue().splitlines()[-1])[5]
    assert argument == f'output_dir="{tmp_path}/a b"'


def test_a_run_of_rows_that_its_script_gives_is_not_sent_to_the_command_line(tmp_path: Path) -> None:
    tracker = ConsoleTracker(tmp_path, TrackingConfig(), None, stream=(lines := io.StringIO()))
    tracker.start({"tasks": {"of_a_file": {"dataset": "a.jsonl"}, "of_objects": {"dataset": ""}}})
    tracker.finish("stopped")
    told = lines.getvalue().splitlines()[-1]
    assert told.startswith(f"run stopped; next: the same script with output_dir={tmp_path} begins anew")
