"""The page of a run: what it holds, how large it is, and that no text of a run gets out of its place."""

import base64
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.config.run import TrackingConfig
from multitask_rl.report import page as report_page
from multitask_rl.report.page import attach_page, embedded
from multitask_rl.report.samples import CHUNK, Samples
from multitask_rl.tracking.base import Tracker, Trackers
from record_builders import sample, write_records

EVIL = "</script><script>alert(1)</script><!-- \u202e\u0000 @DATA@ @SCRIPT@"


def page_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return the page of the run in ``directory`` and the data in it."""
    page = directory / "page.html"
    assert main(["report", str(directory), "--html", str(page)]) == 0
    text = page.read_text()
    return text, json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_no_text_of_a_run_leaves_its_place(tmp_path: Path) -> None:
    evil = sample(1, prompt=EVIL, response=EVIL * 3, task=EVIL, row={"answer": EVIL}, finish_reason=EVIL)
    event = {"step": 1, "source": "guard", "kind": "warn", "task": EVIL, "reason": EVIL}
    directory = tmp_path / "<script> &amp;"
    directory.mkdir()
    (directory / "config.yaml").write_text(json.dumps({"model": {"name_or_path": EVIL.replace("\0", "")}}))
    text, data = page_of(write_records(directory, rollouts=[evil], events=[event]))
    assert text.count("</script>") == 2
    assert text.count("<script") == 2
    assert "alert(1)<" not in text
    assert "<title>" in text.partition("&lt;script&gt; &amp;amp;</title>")[0]
    assert data["alarms"][0]["reason"] == EVIL
    chunk = json.loads(zlib.decompress(base64.b64decode(data["samples"]["texts"][0])))
    assert chunk[0]["response"] == EVIL * 3
    assert data["samples"]["names"]["task"] == [EVIL]


def test_a_task_that_gave_no_signal_went_wrong_unless_it_got_better(tmp_path: Path) -> None:
    rates = {"dead": 0.0, "solved": 0.0, "alive": 0.5, "new": 0.0}
    steps = {"new": range(32, 41)}
    metrics: list[dict[str, Any]] = [{"step": step, "time/step_s": 2.0} for step in range(1, 41)]
    for task, rate in rates.items():
        for step in steps.get(task, range(1, 41)):
            metrics[step - 1] |= {f"task/{task}/informative_rate": rate, f"task/{task}/reward_mean": 0.125}
    scores = [
        {
            "step": step,
            "task": task,
            "metric": "m",
            "direction": "higher",
            "values": [value, value - 0.01] * 20,
        }
        for task in rates
        for step, value in ((0, 0.0), (40, float(task == "solved")))
    ]
    _, data = page_of(write_records(tmp_path, metrics=metrics, evaluations=scores))
    assert [(alarm["task"], alarm["step"]) for alarm in data["alarms"]] == [("dead", 40)]
    assert (
        "in its last 20 steps 0.0% of its groups had rewards that differ (mean reward 0.125)"
        in (data["alarms"][0]["reason"])
    )
    assert data["tiles"][3] == ["warnings and alarms", 1, "no signal"]
    assert data["tiles"][4] == ["seconds a step", 2.0, "median; 80 s in the steps shown"]


def test_the_policy_of_the_page_names_its_own_script_alone(tmp_path: Path) -> None:
    text, _ = page_of(write_records(tmp_path))
    code = re.search(r"<script>(.*)</script>", text, re.DOTALL)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert code is not None
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(code[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy[1]
    assert "connect-src" not in policy[1]
    assert "http" not in policy[1]
    assert "Permission is hereby granted" in code[1], "the licence of uPlot goes with it"


def test_curves_of_many_steps_become_means_and_keep_the_last_step(tmp_path: Path) -> None:
    metrics: list[dict[str, Any]] = []
    metrics += [{"step": step, "task/sums/reward_mean": step / 2000} for step in range(1, 2001)]
    metrics += [{"step": 2000, "task/sums/multiplier/short": 0.25, "time/rollout_s": 2.0, "macro/kl": 1.0}]
    busy = {f"system/gpu_{device}_utilization_percentage": 10.0 * device for device in (0, 1)}
    metrics += [{"step": 2000, "system/run_memory_usage_megabytes": 812.3, **busy}]
    _, data = page_of(write_records(tmp_path, metrics=metrics))
    charts = {chart["id"]: chart for chart in data["charts"]}
    memory = "system-run_memory_usage_megabytes"
    assert set(charts) == {"held-out", "reward_mean", "multiplier", "stages", "gpus", memory}
    assert charts["gpus"]["lines"] == [{"name": "GPU 0", "y": [0.0]}, {"name": "GPU 1", "y": [10.0]}]
    assert charts[memory]["lines"] == [{"name": "Memory of the run", "y": [812.3]}]
    reward = charts["reward_mean"]
    assert (len(reward["x"]), reward["x"][-1]) == (667, 2000)
    assert reward["lines"][0]["y"][0] == 0.001
    assert "3 steps" in reward["note"]
    assert charts["multiplier"]["lines"] == [{"name": "sums · short", "y": [0.25]}]
    assert charts["stages"]["lines"] == [{"name": "rollout", "y": [2.0]}]


def test_steps_that_a_rollback_undid_are_on_no_curve(tmp_path: Path) -> None:
    """Evaluation and guard of step 4 take the run back to step 2; from then on task ``b`` gets no prompts."""

    def line(step: int, **rewards: float | None) -> dict[str, Any]:
        own = {f"task/{task}/reward_mean": reward for task, reward in rewards.items()}
        return {"step": step, "time/step_s": 1.0, **own, "task/a/weight": 0.5}

    undone = [line(3, a=0.9, b=0.9), line(4, a=0.9, b=0.9), {"step": 4, "guard/rollbacks": 1.0}]
    metrics = [line(1, a=0.1, b=0.2), line(2, a=0.1, b=0.2), *undone, line(3, a=0.3, b=None)]
    text, data = page_of(write_records(tmp_path, metrics=metrics))
    charts = {chart["id"]: chart for chart in data["charts"]}
    assert charts["reward_mean"]["x"] == [1, 2, 3]
    lines = {line["name"]: line["y"] for line in charts["reward_mean"]["lines"]}
    assert lines == {"a": [0.1, 0.1, 0.3], "b": [0.2, 0.2, None]}
    assert data["tiles"][0][1] == 3
    # evaluations of each step: the one that counts is of the same step
    metrics[4:] = [{"step": 4, "guard/rollbacks": 1.0}, line(4, a=0.3)]
    _, data = page_of(write_records(tmp_path, metrics=metrics))
    assert data["charts"][1]["lines"][1]["y"] == [0.2, 0.2, 0.9, None]
    assert text


def test_a_renamed_task_is_one_task_on_the_page(tmp_path: Path) -> None:
    config = {"tasks": {"new": {"former_names": ["old"]}, "other": {}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    names = ("old", "old", "new")
    metrics = [
        {"step": step, f"task/{name}/reward_mean": 0.1 * step, f"task/other/cosine/{name}": 0.5}
        for step, name in enumerate(names, start=1)
    ]
    rollouts = [sample(step, task=name) for step, name in enumerate(names, start=1)]
    spans = [
        {"step": step, "stage": "rewards", "task": name, "start": step, "end": step + 1}
        for step, name in enumerate(names, start=1)
    ]
    records = {"metrics": metrics, "rollouts": rollouts, "timeline": spans}
    _, data = page_of(write_records(tmp_path, **records))
    reward = next(chart for chart in data["charts"] if chart["id"] == "reward_mean")
    assert reward["lines"] == [{"name": "new", "y": [0.1, 0.2, 0.3]}]
    assert data["gradients"]["cosines"] == {"other": {"new": [0.5, 0.0]}}
    assert data["samples"]["names"]["task"] == ["new"]
    assert {span[1] for span in data["spans"]} == {"new"}


def test_gradients_are_a_matrix_of_mean_cosines_with_errors(tmp_path: Path) -> None:
    def line(step: int, cosine: float) -> dict[str, Any]:
        pair = {"task/a/cosine/b": cosine, "task/b/cosine/a": cosine}
        return {
            "step": step,
            "task/a/grad_norm": 2.0,
            "task/b/grad_norm": 4.0,
            "macro/grad_norm": 3.0,
            **pair,
        }

    metrics = [line(1, 0.2), {"step": 2, "task/a/reward_mean": 0.5}, line(3, 0.4)]
    _, data = page_of(write_records(tmp_path, metrics=metrics))
    assert data["gradients"] == {
        "steps": 2,
        "norms": {"a": 2.0, "b": 4.0},
        "cosines": {"a": {"b": [0.3, 0.1]}, "b": {"a": [0.3, 0.1]}},
    }


def test_a_task_without_rewards_is_not_told_that_its_rewards_are_alike(tmp_path: Path) -> None:
    metrics = [{"step": step, "task/sums/informative_rate": 0.0} for step in range(1, 41)]
    _, data = page_of(write_records(tmp_path, metrics=metrics))
    assert data["alarms"] == []


def test_held_out_curves_have_intervals_and_limits_their_bound(tmp_path: Path) -> None:
    numbers = {"limit": 0.2, "violation_rate": 0.1, "upper_bound": 0.4}
    metrics = {f"constraint/short/{name}": {"mean": value} for name, value in numbers.items()}
    score = {"step": 3, "task": "sums", "metric": "m", "direction": "higher", "error": 0.5}
    score["values"] = [0.0, 1.0, None]
    _, data = page_of(write_records(tmp_path, evaluations=[{**score, "metrics": metrics}]))
    held_out, limit = data["charts"]
    assert held_out["lines"] == [{"name": "sums", "y": [0.5], "low": [-0.48], "high": [1.48]}]
    assert limit["title"] == "sums: short"
    assert [(line["name"], line["y"], line["dashed"]) for line in limit["lines"]] == [
        ("rate", [0.1], False),
        ("upper bound", [0.4], False),
        ("limit", [0.2], True),
    ]


def test_the_page_tells_which_evaluations_the_table_leaves_out(tmp_path: Path) -> None:
    line = {"task": "sums", "direction": "higher", "values": [0.0, 0.5, 1.0]}
    scores = [{"step": step, "metric": name, **line} for step, name in ((0, "old"), (2, "new"), (4, "new"))]
    _, data = page_of(write_records(tmp_path, evaluations=scores))
    row = data["result"]["tasks"]["sums"]
    assert row["steps"] == [2, 4]
    assert row["reason"].startswith("not compared with the evaluations at steps 0, which were not judged by")


def test_the_timeline_has_the_newest_steps_whole(tmp_path: Path) -> None:
    spans = [
        {"stage": stage, "task": "", "start": step + 0.0, "end": step + 0.5, "step": step}
        for step in range(1, 31)
        for stage in ("rollout", "step")
    ]
    _, data = page_of(write_records(tmp_path, timeline=spans))
    assert [one[2] for one in data["spans"]] == [step for step in range(19, 31) for _ in range(2)]


def test_samples_have_columns_to_filter_by(tmp_path: Path) -> None:
    verdict = {"cost": 1.0, "violated": True, "reason": "too long"}
    failure = {"kind": "timeout", "message": "30 s", "source": "slow"}
    rows = [
        sample(1, rejected=True, verdicts={"short": verdict, "safe": {**verdict, "violated": False}}),
        sample(2, reward=None, failure=failure, finish_reason="length", response_ids=[4, 5]),
        sample(2, task="other", verdicts={"safe": {**verdict, "applicable": False, "violated": False}}),
    ]
    _, data = page_of(write_records(tmp_path, rollouts=rows))
    stored = data["samples"]
    assert stored["names"] == {
        "task": ["sums", "other"],
        "prompt": ["sums/1"],
        "failure": ["timeout"],
        "constraint": ["short"],
    }
    assert json.loads(zlib.decompress(base64.b64decode(stored["columns"]))) == {
        "step": [1, 2, 2],
        "draw": [0, 0, 0],
        "reward": [0.5, None, 0.5],
        "length": [0, 2, 0],
        "flags": [1 + 2 + 4, 8 + 16, 0],
        "task": [0, 0, 1],
        "prompt": [0, 0, 0],
        "failure": [-1, 0, -1],
        "violated": [1, 0, 0],
    }


def test_of_too_many_samples_the_page_has_the_newest_and_tokens_of_fewer() -> None:
    samples = Samples()
    for step in range(3 * CHUNK + 1):
        samples.add(sample(step, tokens={"texts": ["2"], "logprobs": [-0.5], "advantages": 0.5}))
    whole = embedded(samples, 1_000_000)
    assert (whole["left_out"], len(whole["texts"]), len(whole["tokens"])) == (0, 4, 4)
    assert None not in whole["tokens"]
    texts, tokens = ([len(chunk) for chunk in whole[kind]] for kind in ("texts", "tokens"))
    part = embedded(samples, sum(texts[2:]) + sum(tokens))
    assert part["left_out"] == 2 * CHUNK
    columns = json.loads(zlib.decompress(base64.b64decode(part["columns"])))
    assert columns["step"] == list(range(2 * CHUNK, 3 * CHUNK + 1))
    assert None not in part["tokens"]
    least = embedded(samples, 1)
    assert (least["left_out"], len(least["texts"]), len(least["tokens"])) == (3 * CHUNK, 1, 1)


def test_older_samples_have_texts_without_tokens() -> None:
    samples = Samples()
    for step in range(4 * CHUNK):
        samples.add(sample(step, tokens={"texts": ["2"], "logprobs": [-0.5], "advantages": step}))
    texts, tokens = (
        [len(base64.b64encode(chunk)) for chunk in kind.packed()] for kind in (samples.texts, samples.tokens)
    )
    most = sum(texts) + sum(tokens[2:])
    page = embedded(samples, most, token_bytes=0)
    assert page["left_out"] == 0
    assert [chunk is None for chunk in page["tokens"]] == [True, True, False, False]


def test_a_text_without_end_is_cut_and_says_so() -> None:
    samples = Samples()
    row = {"long": "b" * 9_000, "prompt": "left out", "none": None}
    samples.add(sample(1, response="a" * 200_000, row=row))
    (one,) = json.loads(zlib.decompress(samples.texts.packed()[0]))
    assert one["response"].endswith("aaa ... (100,000 characters more are in rollouts.jsonl)")
    assert list(one["row"]) == ["long"]
    assert len(one["row"]["long"]) < 2_100


class Keeper(Tracker):
    def __init__(self) -> None:
        self.pages: list[str] = []

    def log_page(self, page: str) -> None:
        self.pages.append(page)


def test_trackers_get_the_page_of_a_run_unless_its_records_are_large_which_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attached(*names: str) -> list[str]:
        keeper = Keeper()
        attach_page(Trackers(tmp_path, TrackingConfig(trackers=list(names)), None, {"keeper": keeper}))
        return keeper.pages

    caplog.set_level("INFO")
    assert attached() == []
    assert caplog.text == "", "a run that has evaluated nothing has no page to miss"
    write_records(tmp_path, rollouts=[sample(1)])
    assert [page.partition("<html")[0].strip() for page in attached("jsonl")] == ["<!doctype html>"]
    caplog.clear()
    monkeypatch.setattr(report_page, "MOST_RECORD_BYTES", 100)
    assert attached() == []
    assert f"multitask-rl report {tmp_path} --html" in caplog.text


def test_no_page_is_made_for_trackers_that_take_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    attach_page(Trackers(tmp_path, TrackingConfig(trackers=["jsonl"]), None))
    assert caplog.text == ""
