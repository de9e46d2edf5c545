"""Every bundled task on the rows of its real data, and on rows in the hub's own columns."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.contracts import Task
from multitask_rl.data.render import render_template
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.plugins import CONSTRAINTS, REWARDS, TASKS, build_plugin, list_plugins, load_plugin
from multitask_rl.records import NOT_APPLICABLE, Prompt, Rollout, Score
from multitask_rl.testing import make_rollout
from multitask_rl_rewards.text_match import ExactMatch
from multitask_rl_tasks.sourced import SourcedTask
from multitask_rl_tasks.truthfulqa import TruthfulQA

DATA = Path(os.environ.get("MULTITASK_RL_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
NAMES = [p.name for p in list_plugins(TASKS) if p.value.split(":")[0].count(".") == 1]
BENCHMARKS = ["humaneval", "truthfulqa", "ifeval", "toxicity"]
SAMPLE = 40
PROGRAMS = ("mbpp", "humaneval", "code_stdio")
LARGE = 600
"""Rows from which on every third gold answer is scored, unless it is a program."""


def build(name: str, **config) -> SourcedTask:
    return build_plugin(load_plugin(TASKS, name), config, where="test")


def real_task(name: str, **config) -> SourcedTask:
    if not DATA.is_dir():
        pytest.skip(f"real data absent: no directory {DATA} (set MULTITASK_RL_DATA)")
    return build(name, source=str(DATA), **config)


@cache
def all_rows(name: str) -> list:
    task = real_task(name)
    splits = task.evaluation_splits if task.evaluation_only else ("train", "validation", "test", "prompt")
    return [row for split in splits for row in task.rows(split)]


def full_scores(task: SourcedTask, rows: list, response_of) -> list[float]:
    """The mean of each row's applicable rewards of weight > 0, as the task configures them."""
    rollouts = [_rollout(row, response_of(row)) for row in rows]
    totals: list[list[float]] = [[] for _ in rows]
    for item in task.settings()["rewards"]:
        if item["plugin"] == "rm_hf" or not item["weight"]:
            continue
        reward = build_plugin(load_plugin(REWARDS, item["plugin"]), item["config"], where="test")
        for values, result in zip(totals, reward.score(rollouts), strict=True):
            if result is not NOT_APPLICABLE:
                assert isinstance(result, Score), result
                values.append(result.value)
    return [sum(values) / len(values) for values in totals if values]


def _rollout(row, response: str) -> Rollout:
    prompt = Prompt(task="t", prompt_id=str(row["id"]), draw=0, row=row, text=row["prompt"], prompt_ids=[1])
    return Rollout(prompt=prompt, sample=0, response=response)


def by_heart(row) -> str:
    """A program that prints the outputs of the row's own tests."""
    answers = {test["stdin"].strip(): test["stdout"] for test in row["tests"]}
    return f"```python\nimport sys\nprint({answers!r}[sys.stdin.read().strip()], end='')\n```"


@pytest.mark.parametrize("name", NAMES)
def test_settings_make_a_valid_task_and_name_installed_plugins(name):
    task = build(name)
    assert isinstance(task, Task)
    assert task.licence
    spec = parse_tasks(
        {"tasks": [{"name": name, "dataset": f"plugin:{name}"}, {"name": "other", "dataset": "plugin:gsm8k"}]}
    )[name]
    assert spec.rewards
    installed = {p.name for group in (REWARDS, CONSTRAINTS) for p in list_plugins(group)}
    assert {plugin.plugin for plugin in [*spec.rewards, *spec.constraints]} <= installed
    assert spec.primary_metric.split("/")[0] in {"reward", *(r.name for r in spec.rewards)}
    assert spec.evaluation_only == (name in BENCHMARKS)


def test_there_is_a_plugin_for_each_task_of_the_catalogue():
    assert {
        "gsm8k",
        "math",
        "math_easy",
        "mbpp",
        "humaneval",
        "code_stdio",
        "hh_preference",
        "helpful_instructions",
        "safety",
        "truthfulqa",
        "fact_check",
        "ifeval",
        "toxicity",
        "nq_open",
        "long_context_kv",
    } <= set(NAMES)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("split", ["train", "validation", ""])
def test_benchmarks_have_no_rows_to_train_on(name, split, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(DataError, match="is a benchmark and has no rows to train on"):
        build(name, source=str(tmp_path / "x.jsonl")).rows(split)


@pytest.mark.realdata
@pytest.mark.parametrize("name", NAMES)
def test_silence_scores_zero_on_real_rows(name):
    task, rows = real_task(name), all_rows(name)
    rows = rows[:: max(1, len(rows) // SAMPLE)][:SAMPLE]
    assert len(rows) == SAMPLE
    if any(item["weight"] and item["plugin"] != "rm_hf" for item in task.settings()["rewards"]):
        assert set(full_scores(task, rows, lambda row: "")) == {0.0}


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gold_answers_of_real_rows_score_full(name):
    """All programs; of large data sets of other kinds every third answer."""
    task, rows = real_task(name), all_rows(name)
    assert len({row["id"] for row in rows}) == len(rows)
    template = task.settings()["prompt"]
    assert all(render_template(template, row, task=task.name).strip() for row in rows)
    _check_gold(task, rows if name in PROGRAMS or len(rows) < LARGE else rows[::3])


def _check_gold(task: SourcedTask, rows: list) -> None:
    response_of = by_heart if task.name == "code_stdio" else task.gold
    if task.name == "ifeval":  # no gold: every instruction must be checkable
        assert all(0.0 <= value <= 1.0 for value in full_scores(task, rows, lambda row: "Some words."))
        return
    scores = full_scores(task, rows, response_of)
    wrong = [(row["id"], score) for row, score in zip(rows, scores, strict=False) if score < 1.0]
    assert not wrong, wrong[:5]


@pytest.mark.realdata
def test_every_file_of_the_shared_data_belongs_to_a_task():
    if not DATA.is_dir():
        pytest.skip(f"real data absent: {DATA}")
    named = {file for name in NAMES for file in build(name).files}
    files = {path.name for path in DATA.iterdir() if ".jsonl" in path.name}
    assert files - named == {"safe_sft.jsonl"}  # read by helpful_instructions when named as its source
    rows = build("helpful_instructions", source=str(DATA / "safe_sft.jsonl"), limit=20).rows("train")
    assert len(rows) == 20


HUB_ROWS = {
    "gsm8k": (
        {"question": "How many?", "answer": "48/2 = 24\n#### 1,024"},
        {"prompt": "How many?", "reference": "1024", "solution": "48/2 = 24"},
    ),
    "math": (
        {"problem": "1+1?", "solution": r"It is $\boxed{\frac{4}{2}}$.", "level": "Level 1"},
        {"prompt": "1+1?", "reference": r"\frac{4}{2}"},
    ),
    "math_easy": (
        {"Body": "I have 2.", "Question": "How many?", "Answer": 2.0},
        {"prompt": "I have 2. How many?", "reference": "2"},
    ),
    "mbpp": (
        {
            "task_id": 7,
            "text": "Double it.",
            "code": "def helper(): pass\ndef dbl(x):\n    return 2 * x",
            "test_list": ["assert dbl(1) == 2"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        {"id": "mbpp-7", "prompt": "Double it.", "entry_point": "dbl", "tests": ["assert dbl(1) == 2"]},
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1",
            "entry_point": "f",
        },
        {"id": "HumanEval-0", "reference": "    return 1\n"},
    ),
    "code_stdio": (
        {
            "name": "a",
            "description": "Add.",
            "public_tests": {"input": ["1"], "output": ["2"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["2"], "output": ["3"]},
        },
        {"prompt": "Add.", "tests": [{"stdin": "2", "stdout": "3"}, {"stdin": "1", "stdout": "2"}]},
    ),
    "hh_preference": (
        {"chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi?\n\nAssistant: Go."},
        {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go."},
    ),
    "helpful_instructions": (
        {"instruction": "Sum up.", "context": "A text.", "response": "Short."},
        {"prompt": "Sum up.\n\nA text.", "reference": "Short."},
    ),
    "safety": ({"prompt": "Kill a process?", "label": "safe", "type": "homonyms"}, {"reference": "comply"}),
    "truthfulqa": (
        {"question": "Is it?", "mc1_targets": {"choices": ["Yes", "No"], "labels": [1, 0]}},
        {"prompt": "Is it?"},
    ),
    "fact_check": (
        {"claim": "A is B.", "label": "REFUTES", "evidence": [["A", "0", "A is C."], ["A", "1", "Really."]]},
        {
            "prompt": "Claim: A is B.\nEvidence: A is C. Really.",
            "evidence": "A is C. Really.",
            "reference": "REFUTES",
        },
    ),
    "ifeval": (
        {
            "key": 1,
            "prompt": "Write.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"num_words": None}],
        },
        {"id": "ifeval-1", "tests": [{"instruction_id": "punctuation:no_comma", "kwargs": {}}]},
    ),
    "toxicity": (
        {"functionality": "f", "test_case": "I like you.", "label_gold": "non-hateful"},
        {"prompt": "I like you.", "reference": "non-hateful"},
    ),
    "nq_open": ({"question": "who", "answer": ["me", "I"]}, {"prompt": "who", "answers": ["me", "I"]}),
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_rows_in_the_hubs_columns_are_translated(name, tmp_path):
    raw, expected = HUB_ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(raw) + "\n")
    task = build(name, source=str(path))
    (row,) = task.rows("test" if task.evaluation_only else "train")
    assert {key: row[key] for key in expected} == expected
    assert render_template(task.settings()["prompt"], row, task=task.name)
    if task.gold(row) is not None and any(
        r["weight"] and r["plugin"] != "rm_hf" for r in task.settings()["rewards"]
    ):
        assert full_scores(task, [row], task.gold) == [1.0]


def pair(stdin: str, stdout: str) -> dict:
    return {"stdin": stdin, "stdout": stdout}


SAMPLE_TEST, OTHER, MORE = pair("2\n", "YES\n"), pair("3\n", "NO\n"), pair("8\n", "YES")
PARITY = "Is n even?\n\nInput\n\n2\n\nOutput\n\nYES"


@pytest.mark.parametrize(
    ("tests", "kept"),
    [
        ([SAMPLE_TEST], None),
        ([SAMPLE_TEST, MORE], None),
        ([OTHER], None),
        ([SAMPLE_TEST, OTHER], [SAMPLE_TEST, OTHER]),
        ([SAMPLE_TEST, OTHER, pair("5", "NO")], [SAMPLE_TEST, OTHER, pair("5", "NO")]),
        ([SAMPLE_TEST, OTHER, MORE], [OTHER, MORE]),
        (["assert f(1) == 2"], ["assert f(1) == 2"]),
        ([{"stdin": "2"}], [{"stdin": "2"}]),
    ],
    ids=range(8),
)
def test_no_output_passes_all_tests_of_a_stdio_row(tests, kept, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": PARITY, "tests": tests}) + "\n")
    rows = build("code_stdio", source=str(path)).rows("train")
    assert [row["tests"] for row in rows] == ([kept] if kept else [])
    if kept == [OTHER, MORE]:
        assert rows[0]["public_tests"] == [SAMPLE_TEST]


def test_the_cut_of_a_stdio_row_leaves_two_outputs(tmp_path):
    path, inputs = tmp_path / "rows.jsonl", [str(n) for n in range(0, 40, 2)]
    cases = {"input": [*inputs, "7"], "output": [*["YES"] * 20, "NO"]}
    path.write_text(json.dumps({"name": "a", "description": PARITY, "private_tests": cases}) + "\n")
    (row,) = build("code_stdio", source=str(path), max_tests=3).rows("train")
    assert row["tests"] == [pair("0", "YES"), pair("7", "NO"), pair("4", "YES")]


@pytest.mark.parametrize("name", ["mbpp", "code_stdio"])
def test_a_constant_earns_nothing_with_the_tasks_own_rewards(name):
    tests = {
        "mbpp": ["assert f(2) == 4", "assert f(1 + 1) == 4", "assert f(3) == 9"],
        "code_stdio": [SAMPLE_TEST, OTHER, MORE],
    }
    row = {"id": "a", "prompt": PARITY, "tests": tests[name]}
    code = {"mbpp": "def f(x):\n    return 4", "code_stdio": "print('YES')"}
    assert full_scores(build(name), [row], lambda row: f"```python\n{code[name]}\n```") == [0.0]


@pytest.mark.realdata
def test_every_real_stdio_row_expects_two_outputs():
    rows = all_rows("code_stdio")
    assert len(rows) == 1245, "of 1584"
    assert all(len({test["stdout"] for test in row["tests"]}) > 1 for row in rows)


@pytest.mark.parametrize(
    ("response", "value"),
    [
        *((text, 1.0) for text in ("Answer: B", "**Answer:** B", "Answer: **B**", "answer: (B).")),
        *((text, 1.0) for text in ("The answer is B.", "Answer: \\boxed{B}", "Answer:\n_B_", "B.", "(B)")),
        *((text, 0.0) for text in ("Answer: Because", "Answer: A", "no answer B", "Answer: B'", "It is B")),
    ],
)
def test_truthfulqa_reads_the_letter_in_the_usual_spellings(response, value):
    (entry,) = TruthfulQA(TruthfulQA.Config()).settings()["rewards"]
    reward = ExactMatch(ExactMatch.Config(**entry["config"]))
    (result,) = reward.score([make_rollout(response, row={"reference": "B"})])
    assert result == Score(value=value)


def test_options_of_truthfulqa_are_shuffled_the_same_way_every_time():
    rows = real_task("truthfulqa").rows("test") if DATA.is_dir() else pytest.skip(f"real data absent: {DATA}")
    again = real_task("truthfulqa").rows("test")
    assert rows == again
    letters = [row["reference"] for row in rows]
    assert 0.1 < letters.count("A") / len(letters) < 0.4


def test_long_context_rows_are_made_from_a_seed_and_differ_by_split():
    task = build("long_context_kv", num_keys=5, num_rows=3)
    train, test = task.rows("train"), task.rows("test")
    assert train == build("long_context_kv", num_keys=5, num_rows=3).rows("train")
    assert not {row["reference"] for row in train} & {row["reference"] for row in test}
    assert full_scores(task, list(train), task.gold) == [1.0] * 3
    assert full_scores(task, list(train), lambda row: row["prompt"]) == [0.0] * 3
    assert task.rows("validation")[0] not in [*train, *test]
    with pytest.raises(ConfigError, match="num_keys must be >= 1"):
        build("long_context_kv", num_keys=0)


def test_limit_and_missing_sources_are_honoured(tmp_path):
    path = tmp_path / "g.jsonl"
    path.write_text(
        '{"prompt": "a", "reference": "1"}\n{"prompt": "b", "reference": "2", "split": "test"}\n' * 5
    )
    assert [len(build("gsm8k", source=str(path), limit=3).rows(s)) for s in ("train", "test", "dev")] == [
        3,
        3,
        0,
    ]
    with pytest.raises(DataError, match=r"holds none of gsm8k_train\.jsonl"):
        build("gsm8k", source=str(tmp_path)).rows("train")
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        build("gsm8k", source="nowhere.jsonl").rows("train")
    with pytest.raises(ConfigError, match="limit must be >= 0, got -1"):
        build("gsm8k", limit=-1)
    path.write_text('{"prompt": "", "reference": "1"}\n')
    with pytest.raises(DataError, match="lacks prompt"):
        build("gsm8k", source=str(path)).rows("train")
