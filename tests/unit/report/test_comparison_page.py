"""The page of compared runs: what it holds, and that no text of a run gets out of its place."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.cli import main
from record_builders import sample, write_records

EVIL = "</script><script>alert(1)</script><!-- \u202e @DATA@ @SCRIPT@"
SCORE = {"metric": "m", "direction": "higher", "prompts": "p"}


def arm(directory: Path, setting: float, seeds: int, **files: Any) -> list[str]:
    """Write a run per seed; return their directories."""
    runs = []
    for seed in range(seeds):
        run = directory / str(seed)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "x": setting}))
        scores = [
            {
                **SCORE,
                "task": task,
                "step": step,
                "values": [setting * step + 0.1 * seed + i / 10 for i in range(6)],
            }
            for step in (0, 2, 4)
            for task in ("sums", "words")
        ]
        rates = {"time/step_s": 2.0, "time/samples_per_s": 4.0, "time/tokens_per_s": 8.0}
        metrics = [{"step": s, "task/sums/reward_mean": s * setting + seed, **rates} for s in range(1, 5)]
        write_records(run, evaluations=scores, metrics=metrics, **files)
        runs.append(str(run))
    return runs


def page_of(*arguments: object, page: Path) -> tuple[str, dict[str, Any]]:
    assert main(["compare", *map(str, arguments), "--html", str(page)]) == 0
    text = page.read_text()
    return text, json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_curves_have_costs_and_training_rewards_the_range_of_their_runs(tmp_path: Path) -> None:
    runs = arm(tmp_path / "a", 0.1, 2) + arm(tmp_path / "b", 0.2, 1)
    _, data = page_of(*runs, page=tmp_path / "page.html")
    assert [one["name"] for one in data["arms"]] == ["x=0.1", "x=0.2"]
    assert [one["task"] for one in data["curves"]] == ["sums", "words"]
    first, second = data["curves"][0]["arms"]
    assert first["steps"] == [0, 2, 4]
    assert first["y"] == [0.3, 0.5, 0.7]
    assert all(
        low < mean < high for low, mean, high in zip(first["low"], first["y"], first["high"], strict=True)
    )
    assert first["spent"] == {"samples": [0, 16, 32], "tokens": [0, 32, 64], "seconds": [0, 4, 8]}
    assert second["y"][-1] == 1.05
    (chart,) = data["rewards"]
    assert chart["x"] == [1, 2, 3, 4]
    assert chart["lines"][0]["y"] == [0.6, 0.7, 0.8, 0.9]
    assert chart["lines"][0]["low"] == [0.1, 0.2, 0.3, 0.4]
    assert "low" not in chart["lines"][1]


def test_a_curve_has_values_of_one_definition(tmp_path: Path) -> None:
    for run in (runs := arm(tmp_path / "a", 0.1, 1) + arm(tmp_path / "b", 0.2, 1)):
        file = Path(run) / "evaluations.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, "definitions": {"": "new" if row["step"] else "old"}} for row in rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data = page_of(*runs, page=tmp_path / "page.html")
    assert [one["steps"] for one in data["curves"][0]["arms"]] == [[2, 4], [2, 4]]


def test_the_same_prompt_has_the_newest_answers_of_each_arm(tmp_path: Path) -> None:
    own = [sample(step, prompt_id="sums/1", response=f"a{step}", reward=0.0) for step in range(1, 6)]
    other = [sample(3, prompt_id="sums/1", response=EVIL, reward=1.0, finish_reason="length")]
    alone = [sample(4, prompt_id="sums/2", response="alone")]
    runs = arm(tmp_path / "a", 0.1, 1, rollouts=own + alone) + arm(tmp_path / "b", 0.2, 1, rollouts=other)
    with (tmp_path / "a" / "0" / "rollouts.jsonl").open("a") as lines:
        lines.write('{"step": 7, "task": "sums", "prompt_id": "sums/3", "reward": }\n')  # damaged
        lines.write('{"step": 9, "task": "sums", "prompt_id": "sums/1", "resp')  # a kill
    with (tmp_path / "b" / "0" / "rollouts.jsonl").open("a") as lines:
        lines.write('{"step": 7, "task": "sums", "prompt_id": "sums/3", "row": 3}\n')
    text, data = page_of(*runs, page=tmp_path / "page.html")
    damaged, one = json.loads(zlib.decompress(base64.b64decode(data["stored"]["texts"])))
    assert [answer["response"] for answer in one["answers"][0]] == ["a5", "a4", "a3"]
    assert one["answers"][1][0] == {"step": 3, "seed": 0, "reward": 1.0, "marks": ["cut"], "response": EVIL}
    assert (one["apart"], one["prompt"]) == (0.5, "1+1")
    assert (damaged["id"], damaged["answers"][0][0]["response"]) == ("sums/3", "")
    assert text.count("</script>") == 2
    assert "alert(1)<" not in text


def test_runs_without_common_samples_say_so(tmp_path: Path) -> None:
    runs = arm(tmp_path / "a", 0.1, 1, rollouts=[sample(1)]) + arm(tmp_path / "b", 0.2, 1)
    _, data = page_of(*runs, page=tmp_path / "page.html")
    assert data["stored"]["why"] == "No prompt was answered by two arms in the stored samples."
    _, data = page_of(*arm(tmp_path / "c", 0.1, 2), page=tmp_path / "page.html")
    assert (data["name"], data["result"]["comparisons"]) == (str(tmp_path / "c"), [])
