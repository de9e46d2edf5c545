"""The example on a real chat model: its generated rows, its tasks file, and its model where it can be had."""

import importlib.util
import json
import operator
import re
import sys
from pathlib import Path
from string import Template

import pytest
import yaml

from multitask_rl.config.run import RunConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.data.rows import load_both
from multitask_rl.errors import UnavailableError
from multitask_rl.records import Score
from multitask_rl_rewards.ifeval import IFEval
from multitask_rl_rewards.refusal import OverRefusal, Refusal
from multitask_rl_rewards.shape import JsonSchema
from reward_builders import data_directory, real_rows, rollout

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "smollm2"
SPLITS = {"train": 600, "validation": 100, "test": 100}


@pytest.fixture
def generators(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import generators

    return generators


@pytest.mark.parametrize("kind", ["instruction_rows", "extraction_rows"])
def test_generated_rows_repeat_by_seed_and_share_no_prompt_between_splits(generators, kind):
    make = getattr(generators, kind)
    rows = {split: make(3, split, number) for split, number in SPLITS.items()}
    prompts = [row["prompt"] for own in rows.values() for row in own]
    assert {split: len(own) for split, own in rows.items()} == SPLITS
    assert len(set(prompts)) == len(prompts)
    assert all(row["split"] == split for split, own in rows.items() for row in own)
    assert make(3, "test", 100) == rows["test"]
    assert make(4, "test", 100) != rows["test"]


def test_ifeval_reads_every_generated_instruction(generators):
    rows = generators.instruction_rows(0, "train", 600)
    results = IFEval().score([rollout("Some words.", **row) for row in rows])
    assert all(hasattr(result, "value") for result in results)
    names = {test["instruction_id"] for row in rows for test in row["tests"]}
    assert len(names) >= 20


def test_no_instruction_is_a_prompt_of_ifeval(generators):
    theirs = {row["prompt"].strip().lower() for row in real_rows("ifeval")}
    ours = {row["prompt"].lower() for s, n in SPLITS.items() for row in generators.instruction_rows(0, s, n)}
    assert len(theirs) == 541
    assert not ours & theirs


def test_only_the_right_values_of_an_extraction_score_one(generators):
    rows = generators.extraction_rows(0, "train", 50)
    exact, shape = (
        JsonSchema(JsonSchema.Config(schema_column="exact_schema", invalid=0)),
        JsonSchema(JsonSchema.Config()),
    )
    wrong = [json.dumps(dict.fromkeys(json.loads(row["reference"]), "?")) for row in rows]
    right = [rollout(row["reference"], **row) for row in rows]
    for reward in (exact, shape):
        assert {result.value for result in reward.score(right)} == {1.0}
    others = exact.score([rollout(text, **row) for text, row in zip(wrong, rows, strict=True)])
    assert {result.value for result in others} == {0.0}


@pytest.mark.parametrize(
    ("problem", "result", "expected"),
    [
        ("She has 7 and buys 8 more. How many?", "15", "7 + 8 = 15"),
        ("A DVD book holds 126 DVDs. There are 81 in it. How many more?", "45", "126 - 81 = 45"),
        ("20 miles at 4 miles per hour. How long?", "5", "20 / 4 = 5"),
        ("4 of 15 lawns at 8 dollars each are left. How much?", "88", "15 - 4 = 11, 11 * 8 = 88"),
        ("9 red, 5 blue, 2 green. How many?", "16", "9 + 5 = 14, 14 + 2 = 16"),
        (
            "87 pounds, 9 pounds and 8 pounds. How much heavier is the first than the second?",
            "78",
            "87 - 9 = 78",
        ),
        ("4 squirrels and 2 nuts. How many more?", "2", ""),  # 4 - 2 or 4 / 2
        ("9 apples, 12 erasers, 3 friends.", "3", ""),  # 9 / 3 or 12 - 9
        ("5 miles at 4 miles per hour.", "1.25", ""),
        ("$5.00 less $4.", "1", ""),
        ("1,200 and 3", "1203", ""),
        ("7", "7", ""),
        ("1 and 2 and 3 and 4", "10", ""),
        ("2 and 0", "7", ""),
    ],
)
def test_a_worked_sum_is_the_one_calculation_that_leads_to_the_result(generators, problem, result, expected):
    assert generators.worked_sum(problem, result) == expected


def test_worked_rows_are_true(generators):
    rows = generators.worked_rows(real_rows("math_easy"))
    assert len(rows) == 1310
    for row in rows:
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", row["answer"])
        signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
        assert all(signs[sign](int(a), int(b)) == int(value) for a, sign, b, value in steps)
        assert len(steps) == row["answer"].count("=") == 1 or steps[0][3] in steps[1]
        assert steps[-1][3] == row["reference"]


@pytest.fixture
def prepare(monkeypatch):
    """Return the module ``prepare.py`` of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("prepare_smollm2", EXAMPLE / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_another_model_of_the_same_architecture_has_judges_of_its_own(prepare, tmp_path):
    rows, keys = tmp_path / "rows.jsonl", []
    rows.write_text("{}")
    for weights in ("a", "a", "b"):
        actor = tmp_path / f"{len(keys)}"
        actor.mkdir()
        (actor / "config.json").write_text("{}")
        (actor / "model.safetensors").write_text(weights)
        keys.append(prepare.judge_key(actor, rows, "{prompt}"))
    assert keys[0] == keys[1] != keys[2]


def test_the_rows_stay_there_while_a_second_preparation_makes_them_anew(prepare, tmp_path, monkeypatch):

    def make():
        places = {"model": tmp_path, "data": tmp_path / "none", "leave_out": ["preference", "safety"]}
        return prepare.prepare(tmp_path / "made", 0, tmp_path / "cache", **places)

    file = make().directory / "data" / "instructions.jsonl"
    rows, make_rows, seen = file.read_text(), prepare.instruction_rows, []

    def watched(*arguments):
        seen.append(file.is_file() and file.read_text() == rows)
        return make_rows(*arguments)

    monkeypatch.setattr(prepare, "instruction_rows", watched)
    make()
    assert seen == [True] * 3
    assert file.read_text() == rows
    assert all(path.suffix == ".jsonl" for path in file.parent.iterdir())


def test_the_warm_start_reads_the_prompts_of_two_tasks_and_no_row_that_they_hold_out(prepare, tmp_path):
    real_rows("safety_prompts", 1)
    real_rows("sft_dolly", 1)
    places = {"model": tmp_path, "data": data_directory(), "leave_out": ["preference", "safety"]}
    made = prepare.prepare(tmp_path / "made", 0, tmp_path / "cache", **places)
    text = Template((EXAMPLE / "tasks.yaml").read_text(encoding="utf-8"))
    whole = yaml.safe_load(text.substitute(directory=made.directory.as_posix()))
    tasks = parse_tasks(whole, "tasks.yaml")
    shown = parse_tasks(yaml.safe_load(made.warm_start.read_text(encoding="utf-8")), "warm_start.yaml")
    assert {name: spec.type for name, spec in shown.items()} == {"worked": "sft", "replies": "sft"}
    for name, of in (("worked", "math"), ("replies", "safety")):
        assert shown[name].prompt == tasks[of].prompt
        (read, held), (train, held_out) = load_both(shown[name]), load_both(tasks[of])
        trained, asked = ({row["id"] for row in rows} for rows in (train, held_out))
        assert {row["id"] for row in read} < trained
        assert {row["id"] for row in held} < asked
    replies = [row for part in load_both(shown["replies"]) for row in part]
    refused = [row["answer"] == prepare.REFUSAL for row in replies]
    assert sum(refused) == len(replies) / 2 == 702
    assert refused == [row["reference"] == "refuse" for row in replies]
    scored = [rollout(row["answer"], **row) for row in replies]
    for reward in (Refusal(), OverRefusal(OverRefusal.Config(min_words=3))):
        values = [result.value for result in reward.score(scored) if isinstance(result, Score)]
        assert len(values) == 702
        assert sum(values) >= 695


def test_data_that_is_not_there_makes_no_warm_start(prepare, tmp_path):
    places = {"model": tmp_path, "leave_out": ["preference", "safety"]}
    made = prepare.prepare(tmp_path / "made", 0, tmp_path / "cache", data=tmp_path / "none", **places)
    assert not made.warm_start.exists()
    assert {"worked", "replies", "math"} <= {*made.left_out}


def test_no_task_selects_by_the_split_test(tmp_path):
    text = (EXAMPLE / "tasks.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(Template(text).substitute(directory=tmp_path.as_posix()))
    (tmp_path / "data").mkdir()
    for name in document["tasks"]:
        (tmp_path / "data" / f"{name}.jsonl").touch()
    specs = parse_tasks(document, "tasks.yaml")
    assert set(specs) == {"math", "instructions", "safety", "extraction", "preference"}
    assert all(spec.split == "train" and spec.eval_split == "" for spec in specs.values())


def test_a_missing_model_is_one_error_that_names_the_packages(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import model

    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    monkeypatch.setattr(model, "HUB_NAME", "nobody/no-such-model")
    with pytest.raises(UnavailableError, match=r"no_such_package.*requirements/smollm2\.txt"):
        model.find_model(tmp_path)


def test_the_last_lines_of_an_example_name_the_store_of_its_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    import results

    run = results.Trained(RunConfig(output_dir=str(tmp_path / "run")), ["math"], 1, [], [])
    results.print_next_steps(tmp_path, run, tmp_path / "summary.json")
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db\n" in capsys.readouterr().out
