"""The command line as a user meets it: exit codes, messages, speed, composition of the configuration."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.train import compose_and_run, config_keys
from multitask_rl.config.run import RunConfig
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.errors import ConfigError, GuardStop, TrainingError
from multitask_rl.records import Prompt, Rollout, SamplingParams, Score, Scored
from multitask_rl.run.plan import load_specs
from multitask_rl.run.store import RunStore
from multitask_rl.testing.scaffold import KINDS
from multitask_rl.tracking.jsonl import dump_line, scored_to_dict

ROOT = Path(__file__).parents[3]
REFERENCE = str(ROOT / "configs" / "reference_tasks.yaml")

COMMANDS = [
    "train",
    "eval",
    "tasks",
    "plugins",
    "compare",
    "report",
    "watch",
    "convert",
    "rescore",
    "bench",
    "sandbox corpus",
    "init",
    "completion",
    "doctor",
]

TASKS = """
tasks:
  math:
    dataset: math.jsonl
    prompt: "Q: {prompt}"
    rewards: [{plugin: math_answer}]
  words:
    dataset: math.jsonl
    weight: 3
    rewards: [exact_match]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(i), "prompt": f"{i}+1=", "reference": str(i + 1)} for i in range(50)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "grade.py").write_text(
        "def trl(completions, reference, **row): ...\ndef absent(response, absent): ...\n"
        "def absent_too(completions, absent): ...\n"
    )
    return tmp_path


def compose(arguments: list[str]) -> RunConfig:
    seen: list[RunConfig] = []
    assert compose_and_run(arguments, "train", seen.append) == 0
    return seen[-1]


def test_empty_mapping_takes_out_the_keys_that_a_file_gives(here: Path) -> None:
    (here / "experiment").mkdir()
    (here / "experiment/first.yaml").write_text(
        "# @package _global_\nrollout: {engine: vllm, engine_config: {max_num_seqs: 4, seed: 1}}\n"
    )
    first = ["--config-dir", ".", "+experiment=first", "rollout.engine=hf"]
    with pytest.raises(ConfigError, match=r"empty it: rollout\.engine_config=\{\}"):
        compose([*first, "~rollout.engine_config"])
    key = "rollout.engine_config"
    assert compose([*first, f"{key}={{}}"]).rollout.engine_config == {}
    emptied = compose([*first, f"{key}.a=1", f"{key}={{}}", f"~{key}.seed", f"{key}.b.c=2"])
    assert emptied.rollout.engine_config == {"b": {"c": 2}}
    assert compose([*first, f"~{key}.seed"]).rollout.engine_config == {"max_num_seqs": 4}


def test_empty_mapping_takes_out_the_keys_of_a_task(here: Path) -> None:
    (here / "tasks.yaml").write_text(TASKS + "    sampling: {temperature: 0.5}\n")
    given = compose(["tasks_file=tasks.yaml", "tasks.words.sampling={}", "tasks.math={}"])
    specs = load_tasks(given.tasks_file, given.tasks)
    assert specs["words"].sampling == SamplingParams()
    assert specs["math"].prompt == "Q: {prompt}"


def test_help_lists_every_command_and_costs_nothing() -> None:
    def modules(*arguments: str) -> int:
        code = (
            "import sys; begin = len(sys.modules); from multitask_rl.cli import main;"
            "main(sys.argv[1:]); print(len(sys.modules) - begin, file=sys.stderr);"
            "heavy = {'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'hydra', 'datasets'};"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
        )
        for command in COMMANDS:
            assert f"  {command}" in done.stdout
        return int(done.stderr.splitlines()[-1])

    assert modules("--help") < 120


def test_closed_standard_streams_change_neither_the_end_of_a_command_nor_another_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from multitask_rl.cli import main; found = main(sys.argv[1:]); "
        "file = os.open('next', os.O_CREAT | os.O_WRONLY); os.write(2, b'told'); os._exit(found)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for closed in ("2>&-", "<&- >&- 2>&-"):
        for words, status in (("plugins list", 0), ("trian", 2)):
            shell = f'exec "$0" -c "$1" {words} {closed}'
            done = subprocess.run(
                ["bash", "-c", shell, sys.executable, code],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
            )
            assert done.returncode == status, (closed, words, done.stdout, done.stderr)
            assert (tmp_path / "next").read_bytes() == b""


def test_no_command_and_unknown_command_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert main(["sandbox"]) == 2
    told, shown = capsys.readouterr().err, main(["sandbox", "--help"])
    assert shown == 0
    assert capsys.readouterr().out.startswith("multitask-rl sandbox corpus")
    assert "did you mean 'train'" in told
    assert "did you mean 'sandbox corpus'" in told


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("multitask-rl 0.")


def test_reference_file_validates_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "validate", REFERENCE]) == 0
    told = capsys.readouterr().out
    assert "3 tasks are valid" in told
    assert "warning: " in told  # its models are not on this machine
    assert "device 'cuda:4' does not exist" in told
    assert "Llama-Guard-3-8B' cannot be read" in told
    assert "fact_checking: constrained_decoding; no data set here" in told


def test_each_task_with_a_mistake_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    file = tmp_path / "tasks.yaml"
    file.write_text(
        "tasks:\n"
        "  a: {dataset: rows.jsonl, rewards: [length], typ: grpo}\n"
        "  fine: {dataset: rows.jsonl, rewards: [length]}\n"
        "  b: {dataset: rows.jsonl, rewards: [length], weight: heavy}\n"
        "  c: {dataset: rows.jsonl, rewards: [length], type: grpoo}\n"
    )
    assert main(["tasks", "validate", str(file), "--quick"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(".yaml:")[2].split(":")[0] for line in lines] == ["2", "4", "5"]
    assert all(line.startswith("error: ") for line in lines)


def test_validate_counts_rows_and_reads_overrides(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "validate", "tasks.yaml", "tasks.words.weight=5"]) == 0
    told = capsys.readouterr().out
    assert "2 tasks are valid" in told
    assert "training rows" in told
    assert main(["tasks", "validate", "tasks.yaml", "weight=5"]) == 2
    assert "expected tasks.NAME.KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("tasks.math.prompt='{question}'", ["lacks question, read by the prompt (", "prompt, reference"]),
        ("tasks.math.algorithm_config={clip_hihg: 1}", ["algorithm_config", "clip_hihg", "clip_high"]),
        ("tasks.math.rewards=[{plugin: math_answer, config: {nope: 1}}]", ["rewards[0].config", "nope"]),
        ("tasks.math.weight=-1", ["override: tasks.math.weight", ">= 0"]),
        ("tasks.math.dataset=gone.jsonl", ["gone.jsonl", "does not exist"]),
        ("tasks.math.rewards=['trl:grade.py:nofn']", ["rewards[0]", "grade.py' has no 'nofn'"]),
        ("tasks.math.rewards=['trl:gone.py:f']", ["rewards[0]", "'gone.py' does not exist"]),
        ("tasks.math.rewards=['verl:grade.py:trl']", ["rewards[0]", "is not a verl reward function"]),
        ("tasks.math.rewards=['grade.py:trl']", ["rewards[0]", "as 'trl:/", "/grade.py:trl' and"]),
        (
            "tasks.math.rewards=['grade.py:absent']",
            ["lacks absent, read by the reward 'grade.py:absent' (", "rows lack absent: fill", "a default"],
        ),
        ("tasks.math.rewards=['trl:grade.py:absent_too']", ["tasks.math: row '", "lacks absent,"]),
    ],
)
def test_validate_finds_what_a_run_would_trip_over(
    here: Path, capsys: pytest.CaptureFixture[str], override: str, parts: list[str]
) -> None:
    assert main(["tasks", "validate", "tasks.yaml", override]) == 2
    told = capsys.readouterr().err
    assert [part for part in parts if part not in told] == [], told
    assert told.count("\n") == 1


def test_quick_sees_a_misspelt_argument_of_an_environment_that_has_no_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "world.py").write_text(
        "class World:\n    def __init__(self, seed, cost=1.0): raise RuntimeError('it is built')\n"
        "    def reset(self, row): ...\n    def step(self, message): ...\n"
    )
    keys = ["tasks.math.environment=world.py:World", "tasks.math.environment_config={cst: 2}"]
    assert main(["tasks", "validate", "--quick", "tasks.yaml", *keys]) == 2
    assert "environment_config.cst: World(seed, cost=1.0): got an unexpected" in capsys.readouterr().err
    keys[1] = "tasks.math.environment_config={cost: 2}"
    assert main(["tasks", "validate", "--quick", "tasks.yaml", *keys]) == 0


@pytest.mark.parametrize(
    ("environment", "config", "told"),
    [
        ("world.py:LIMIT", "{}", "world.py:LIMIT' is 3; expected a class or a function"),
        ("trl:world.py:LIMIT", "{}", "world.py:LIMIT' is 3; expected a class or a function"),
        ("trl:world.py:World", "{cst: 2}", "environment_config.cst: World"),
        ("trl:world.py:World", "{reward_function: world.py:LIMIT}", "reward_function: "),
        ("trl:world.py:World", "{reward_function: world.py:none}", "reward_function: "),
        ("openenv:http://localhost:1", "{cst: 2}", "environment_config.cst: "),
        ("agent:world.py:World", "{}", "is no function run(base_url, api_key, row)"),
        ("trl:world.py:World", "{cost: 2, reward_function: world.py:World}", ""),
    ],
)
def test_quick_checks_adapted_environments_and_their_rewards(
    here: Path, capsys: pytest.CaptureFixture[str], environment: str, config: str, told: str
) -> None:
    (here / "world.py").write_text(
        "LIMIT = 3\n\n\nclass World:\n"
        "    def __init__(self, cost=1.0): raise RuntimeError('it is built')\n"
        "    def reset(self, **row): ...\n    def look(self): ...\n"
    )
    keys = [f"tasks.math.environment={environment}", f"tasks.math.environment_config={config}"]
    assert main(["tasks", "validate", "--quick", "tasks.yaml", *keys]) == (2 if told else 0)
    assert told in capsys.readouterr().err


def test_validate_warns_of_rewards_that_return_nothing_for_the_first_row(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "grade.py").write_text("def forgets(response):\n    len(response)\n")
    for rewards, number in (("[grade.py:forgets]", 1), ("[grade.py:forgets, math_answer]", 0)):
        assert main(["tasks", "validate", "tasks.yaml", f"tasks.math.rewards={rewards}"]) == 0
        told = capsys.readouterr().out
        assert told.count("none of its rewards applies to the first row: forgets returned None") == number


def test_validate_finds_a_batch_function_that_gives_one_result_for_any_batch(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "one.py").write_text("def mean(responses): return [sum(map(len, responses)) / len(responses)]\n")
    assert main(["tasks", "validate", "tasks.yaml", "tasks.math.rewards=[one.py:mean]"]) == 2
    assert "'mean' fails on the first row (grader: returned 1 result for 2" in capsys.readouterr().err


def test_validate_tells_the_mistakes_of_all_tasks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["tasks.math.rewards=['grade.py:absent']", "tasks.words.rewards=['trl:grade.py:absent_too']"]
    assert main(["tasks", "validate", "tasks.yaml", *wrong]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "tasks.math: row '" in told[0]
    assert "tasks.words: row '" in told[1]


def test_a_row_that_is_trained_on_and_held_out_is_warned_of(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "validate", "tasks.yaml"]) == 0
    assert "warning" not in capsys.readouterr().out
    (here / "math.jsonl").write_text('{"prompt": "1+1=", "reference": "2"}\n')
    assert main(["tasks", "validate", "tasks.yaml"]) == 0
    told = capsys.readouterr().out
    assert told.count("the held-out rows are those that are trained on (1)") == 2
    assert "warning: tasks.yaml:3: tasks.math: " in told
    rows = [{"prompt": f"{i}+1=", "reference": "2", "id": "x"} for i in range(6)]
    (here / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["tasks", "validate", "tasks.yaml"]) == 0
    assert "all 6 rows have the same id, or are equal ('x')" in capsys.readouterr().out
    (here / "math.jsonl").write_text('{"prompt": "", "reference": "2"}\n')
    assert main(["tasks", "validate", "tasks.yaml"]) == 2
    assert "is empty (columns: {'prompt': '', 'reference': '2'})" in capsys.readouterr().err


def test_rows_that_lack_what_a_reward_reads_are_warned_of(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(reference: str | None) -> str:
        rows = [{"id": i, "prompt": f"{i}+1=", "reference": str(i + 1), "note": "?"} for i in range(10)]
        for row in rows[3:]:
            row |= {"note": None} if row["id"] == 3 else {"reference": reference}
        (here / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["tasks", "validate", "tasks.yaml"]) == 0
        return capsys.readouterr().out

    assert "warning" not in told("5"), "no reward reads the column note"
    for nothing in (None, ""):
        (warning,) = [line for line in told(nothing).splitlines() if "tasks.math: 'math_answer'" in line]
        assert "fails on row '4', which has nothing in 'reference' (data: " in warning
        assert "; rows with nothing there: 6; fill or remove them" in warning


def test_a_prompt_that_is_trained_on_and_held_out_is_warned_of(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rows: list[dict[str, object]], *overrides: str) -> str:
        (here / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["tasks", "validate", "tasks.yaml", *overrides]) == 0
        return capsys.readouterr().out

    rows = [{"id": i, "prompt": f"{i}+1=", "reference": str(i + 1)} for i in range(8)]
    held_out = [{**row, "id": f"v{row['id']}", "split": "validation"} for row in rows[:2]]
    assert "warning" not in told(rows)
    again = told([*rows, *held_out, {"id": "new", "prompt": "?", "reference": "2", "split": "validation"}])
    assert (
        "tasks.math: 2 of 3 held-out rows have a prompt that is trained on, too (such as row 'v0')" in again
    )
    same = told([*rows, *held_out], "tasks.math.prompt=Add the numbers.")
    assert (
        "tasks.math: all 8 training rows make the same prompt, 'Add the numbers.'; write the columns" in same
    )


def test_a_test_split_that_only_reports_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{i}+1=", "reference": "2", "split": "test" if i > 3 else "train"} for i in range(6)]
    (here / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["tasks", "validate", "tasks.yaml", "tasks.math.eval_split=test"]) == 0
    told = capsys.readouterr().out
    assert told.count("tasks.math: the held-out rows are of the split test: they are only reported") == 1
    only = ["tasks.math.eval_split=test", "tasks.math.evaluation_only=true"]
    assert main(["tasks", "validate", "tasks.yaml", *only]) == 0
    assert "only reported" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("worlds.py:Box", None),
        ("worlds.py:Locked", "worlds.py:Locked' fails on the first row (infra: "),
        ("worlds.py:Jammed", "worlds.py:Jammed' fails on the answer '1' to the first row (infra: "),
        ("worlds.py:Wordy", "worlds.py:Wordy' fails at the end (infra: "),
        ("gone.py:Box", "gone.py"),
    ],
)
def test_validate_plays_a_turn_of_a_world_on_the_first_row(
    here: Path, capsys: pytest.CaptureFixture[str], environment: str, told: str | None
) -> None:
    (here / "worlds.py").write_text(
        "from multitask_rl.environments.base import StepResult\n"
        "class Box:\n"
        "    def reset(self, row):\n        return []\n"
        "    def step(self, message):\n        return StepResult(done=True, reward=1.0)\n"
        "class Locked(Box):\n"
        "    def reset(self, row):\n        raise OSError('locked')\n"
        "class Jammed(Box):\n"
        "    def step(self, message):\n        raise OSError('jammed by ' + message['content'])\n"
        "class Wordy(Box):\n"
        "    def get_reward(self):\n        return 'good'\n"
    )
    (here / "game.yaml").write_text(
        f"tasks: {{game: {{type: grpo, dataset: math.jsonl, environment: '{environment}', max_turns: 2}}}}"
    )
    assert main(["tasks", "validate", "game.yaml"]) == (2 if told else 0)
    if told:
        said = capsys.readouterr().err
        assert told in said
        assert "tasks.game.environment" in said


def test_validate_warns_of_a_teacher_that_this_machine_lacks(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taught.yaml").write_text(
        "tasks: {math: {type: distill, dataset: math.jsonl, teacher: runs/gone}}"
    )
    assert main(["tasks", "validate", "taught.yaml"]) == 0
    said = "tasks.math.teacher: 'runs/gone' is neither a directory on this machine nor in the cache"
    assert said in capsys.readouterr().out
    (here / "runs" / "gone").mkdir(parents=True)
    assert main(["tasks", "validate", "taught.yaml"]) == 0
    assert "teacher" not in capsys.readouterr().out


def test_the_pages_and_the_help_name_the_kind_of_a_new_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages) + capsys.readouterr().out
    kinds = {"KIND", *KINDS}
    named = set(re.findall(r"plugins new (\w+)", text))
    assert {"KIND", "reward", "constraint", "guard"} <= named <= kinds
    assert "new KIND NAME" in text


def test_validate_knows_what_a_function_is_given_and_what_it_reads(here: Path) -> None:
    (here / "good.py").write_text(
        "def one(answer, reference, other=None, *, scale): ...\n"
        "def many(responses, prompts, rollouts, reference): ...\n"
        "def trl(prompts, completions, completion_ids, trainer_state, log_metric, reference, k): ...\n"
    )
    rewards = (
        "[{plugin: 'good.py:one', config: {scale: 2}}, 'good.py:many', "
        "{plugin: 'trl:good.py:trl', config: {arguments: {k: 1}}}]"
    )
    assert main(["tasks", "validate", "--quick", "tasks.yaml", f"tasks.math.rewards={rewards}"]) == 0


def test_debug_adds_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "validate", "absent.yaml", "--debug"]) == 2
    told = capsys.readouterr().err
    assert "Traceback (most recent call last)" in told
    assert "error: the file 'absent.yaml' does not exist" in told


def test_a_reward_without_a_range_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "grade.py").write_text("def short(response): return 0.1\n")
    rewards = {
        "a": "grade.py:short",
        "b": "exact_match",
        "c": "{plugin: grade.py:short, weight: 0}, exact_match",
    }
    tasks = "\n".join(f"  {n}: {{dataset: math.jsonl, rewards: [{own}]}}" for n, own in rewards.items())
    (here / "tasks.yaml").write_text(f"tasks:\n{tasks}\n")
    assert main(["tasks", "validate", "tasks.yaml"]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if "declares no range" in line]
    assert len(found) == 1
    assert "tasks.a.rewards[0]" in found[0]
    assert "low and high" in found[0]


def test_show_prints_shares_and_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "show", "tasks.yaml"]) == 0
    told = capsys.readouterr().out
    assert "0.250" in told  # one that is not given is 1
    assert "0.750" in told
    assert "exact_match x 1" in told
    assert main(["tasks", "show", "tasks.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["words"]["weight"] == 3.0
    assert shown["math"]["kl"]["estimator"] == "k3"


def test_overrides_and_experiments_become_dataclasses(here: Path) -> None:
    experiment = here / "configs" / "experiment"
    experiment.mkdir(parents=True)
    (experiment / "small.yaml").write_text("# @package _global_\nmax_steps: 7\nbatch: {group_size: 4}\n")
    config = compose(
        [
            "+experiment=small",
            "--config-dir",
            "configs",
            "batch.group_size=2",
            "tasks.math.weight=2",
            "model.lora.rank=4",
        ]
    )
    assert type(config) is RunConfig
    assert (config.max_steps, config.batch.group_size, config.model.lora.rank) == (7, 2, 4)
    assert config.tasks == {"math": {"weight": 2}}
    assert compose(["model.rope_scaling={type: yarn, factor: 4.0}"]).model.rope_scaling == {
        "type": "yarn",
        "factor": 4.0,
    }
    assert (here / "runs" / "default" / "train.log").is_file()


RECORDED = """
tasks:
  plain: {dataset: math.jsonl, rewards: ['grade.py:absent'], prompt: '${HOME} {prompt}', weight: 2}
  every_key:
    type: dapo
    dataset: math.jsonl
    sampling: {temperature: 0.7, stop: ['${x}']}
    kl: {coefficient: 1e-6}
    rewards: [{plugin: math_answer, weight: 0.5}]
    constraints:
      - {mode: grammar, config: {choices: ['${b}', c]}}
      - {plugin: safety_classifier, mode: lagrangian, limit: 0.1, config: {model_name: m}}
  words: {type: ppo, dataset: math.jsonl, rewards: [exact_match], curriculum: {by: pass_rate}}
"""


def test_a_run_goes_on_from_what_it_recorded_and_overrides_come_on_top(here: Path) -> None:
    (here / "tasks.yaml").write_text(RECORDED)
    before = load_tasks("tasks.yaml")
    config = RunConfig(tasks_file="tasks.yaml", output_dir="elsewhere", max_steps=7)
    config.checkpoint.resume, config.rollout.max_new_tokens = "never", 5
    (here / "run").mkdir()
    store = RunStore(here / "run", config.checkpoint, track=False)
    store.write_config(store.settings(config, before))
    (here / "tasks.yaml").write_text("tasks: {}")

    again = compose(["output_dir=run", "max_steps=9", "tasks.plain.weight=3"])
    assert (again.rollout.max_new_tokens, again.max_steps, again.output_dir) == (5, 9, "run")
    assert again.checkpoint.resume == "auto"
    after = load_specs(again)
    before["plain"].weight = 3.0
    for spec in (*before.values(), *after.values()):
        spec.source = ""
    assert after == before
    other = compose(["output_dir=run", "tasks_file=tasks.yaml"])
    assert (other.rollout.max_new_tokens, other.tasks) == (5, {}), "its settings, the tasks of the file"
    whole = ["output_dir=run", "tasks_file=tasks.yaml", "model.name_or_path=m"]
    assert compose(whole).rollout.max_new_tokens != 5
    assert compose(["output_dir=gone"]).rollout.max_new_tokens != 5


def test_a_working_directory_that_is_gone_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "gone").mkdir()
    monkeypatch.chdir("gone")
    (here / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"the working directory '\.' does not exist"):
        compose_and_run([f"output_dir={here}/run"], "train", lambda config: None)


def test_a_sweep_writes_below_the_output_directory_that_is_given(here: Path) -> None:
    configs: list[RunConfig] = []
    compose_and_run(["--multirun", "seed=0,1", f"output_dir={here}/mine"], "train", configs.append)
    assert [Path(c.output_dir) for c in configs] == [here / "mine/0", here / "mine/1"]
    with pytest.raises(ConfigError, match="has a directory below output_dir"):
        compose_and_run(["--multirun", "seed=0,1", "output_dir=a,b"], "train", configs.append)


def test_sweep_runs_every_value_in_its_own_directory_even_if_one_fails(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[RunConfig] = []

    def action(config: RunConfig) -> None:
        seen.append(config)
        if config.seed == 0:
            raise TrainingError("seed 0 diverged")

    with pytest.raises(TrainingError, match="seed 0 diverged"):
        compose_and_run(["--multirun", "seed=0,1", "max_steps=3"], "train", action)
    told = "run 0 of the sweep (seed=0, max_steps=3) failed, the others go on: seed 0 diverged"
    assert told in capsys.readouterr().err
    assert [config.seed for config in seen] == [0, 1]
    assert len({config.output_dir for config in seen}) == 2


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model.nam=x"], ["'nam'", "did you mean 'name_or_path'"]),
        (["scheduler.patience=5"], ["'patience'", "policy_config"]),
        (["executor=cloud"], ["executor", "local, ray"]),
        (
            ["model=SmolLM2"],
            ["'model' is a section; write model.KEY=VALUE, such as model.name_or_path=SmolLM2 (keys: "],
        ),
        (
            ["guard=false"],
            ["'guard' is a section; write guard.KEY=VALUE, such as guard.enabled=false (keys: "],
        ),
        (["+experiment=none"], ["no key or group 'experiment'", "--config-dir"]),
        (["--config-dir", "nowhere"], ["nowhere", "not found"]),
        (["tasks.math"], ["tasks.math"]),
        (["output_dir=/proc/run"], ["output_dir '/proc/run'", "give another with output_dir=PATH"]),
        (["output_dir=o"], ["tasks_file=path"]),
        (["checkpoint.resume=nowhere"], ["checkpoint.resume='nowhere' is not there", "step_00000025"]),
        (["checkpoint.resume=."], ["checkpoint.resume='.' is no checkpoint; give"]),
        (["--max_steps=3"], ["--max_steps=3: ", "write max_steps=3"]),
        (["--tasks.math.weight=2"], ["write tasks.math.weight=2"]),
        (["--cfg=x"], ["--cfg: expected one of job, hydra, all, got 'x'"]),
        (["--cfg"], ["--cfg: expected one of job, hydra, all, got ''"]),
        (["-c", "max_steps=3"], ["-c: expected one of job, hydra, all, got 'max_steps=3'"]),
        (["--info=none"], ["--info: expected one of all, config,", "got 'none'"]),
        (["--config-dir"], ["--config-dir: expected a value"]),
        (["--config-dir", "--multirun"], ["--config-dir: expected a value", "--multirun"]),
        (["--multirun=3"], ["--multirun: takes no value, got '3'"]),
        (["--resolv"], ["unknown option '--resolv'", "did you mean '--resolve'", "key=value"]),
    ],
)
def test_bad_configuration_is_one_paragraph_and_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    assert main(["train", *arguments]) == 2
    told = capsys.readouterr().err
    assert [part for part in parts if part not in told] == [], told
    assert told.count("\n") == 1, told


@pytest.mark.parametrize(
    ("error", "code"),
    [(TrainingError("loss is nan"), 1), (GuardStop("stopped"), 3), (ZeroDivisionError("x"), 1)],
)
def test_exit_code_says_how_it_ended(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    def fails(config: Any) -> None:
        raise error

    monkeypatch.setattr("multitask_rl.cli.train._train", fails)
    assert main(["train"]) == code
    assert capsys.readouterr().err.startswith("error: ")


def test_there_are_95_keys_at_most() -> None:
    """80; six of the reference: a critic of its own (3), attention, the epsilon of Adam, prefill; two of
    environments, one of the console; the training backend and its keys.
    """
    assert len(config_keys()) <= 95


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    told = capsys.readouterr().out
    assert "ok       torch" in told
    assert "devices" in told
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"^(?:ok|missing) +extra ([\w-]+)", told, re.MULTILINE)
    combined = {"dev", "demo", "vllm", "vllm-cpu"}
    assert set(extras) == project["optional-dependencies"].keys() - combined
    assert len(extras) == len(set(extras))


def test_doctor_names_a_version_that_an_extra_does_not_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name == "mlflow" else installed(name)
    )
    main(["doctor"])
    told = capsys.readouterr().out
    assert re.search(r"^missing +extra mlflow +mlflow is 1\.0, needs .*>=3\.10", told, re.MULTILINE)
    assert "pip install 'multitask-rl[mlflow]'" in told


def test_doctor_misses_the_package_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run from a checkout that is not installed: without entry points there is no plugin."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "multitask-rl":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^broken +multitask-rl +not installed\n +-> pip install -e \.", told, re.MULTILINE)


def test_console_script_is_installed() -> None:
    script = Path(sys.executable).with_name("multitask-rl")
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.startswith("multitask-rl ")


def test_rescore_finds_what_a_changed_reward_says_of_stored_answers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = here / "run"
    run.mkdir()
    (here / "grade.py").write_text("def length(response, **row):\n    return float(len(response))\n")
    (here / "tasks.yaml").write_text("tasks: {words: {rewards: ['grade.py:length']}}")
    resolved = {name: dataclasses.asdict(spec) for name, spec in load_tasks("tasks.yaml").items()}
    (run / "config.yaml").write_text(json.dumps({"seed": 3, "tasks": resolved}))
    stored = []
    for sample, response in enumerate(["a", "bb", "ccc"]):
        prompt = Prompt(task="words", prompt_id="words/0", draw=0, row={"id": "0"}, text="?", prompt_ids=[1])
        rollout = Rollout(prompt=prompt, sample=sample, response=response, response_ids=[5])
        stored.append(Scored(rollout=rollout, reward=1.0, breakdown={"length": Score(value=1.0)}))
    (run / "rollouts.jsonl").write_text("".join(dump_line(scored_to_dict(s, 0)) for s in stored))
    assert main(["rescore", "run", "--output", "again.jsonl"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("words/length"))
    assert row.split() == ["words/length", "3", "1.0000", "2.0000", "2", "0"]
    again = [json.loads(line) for line in (here / "again.jsonl").read_text().splitlines()]
    assert [line["breakdown"]["length"]["value"] for line in again] == [1.0, 2.0, 3.0]


def test_rescore_of_a_directory_without_rollouts_is_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["--tasks", "tasks.yaml"]):
        assert main(["rescore", "nowhere", *arguments]) == 2
        assert "nowhere/rollouts.jsonl does not exist: the run stored no rollouts" in capsys.readouterr().err
    (here / "rollouts.jsonl").write_text("")
    assert main(["rescore", "."]) == 2
    assert "config.yaml with the run's tasks is missing; give a tasks file with --tasks" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("rewards", "part"),
    [
        ("rewards: [rm_hf]", "model_name"),
        ("rewards: [{plugin: rm_hf, config: {model_name: nowhere/x}}, broken.py:Broken]", "no such card"),
        ("rewards: [broken.py:Broken]", "no such card"),
        ("rewards: [broken.py:raises]", "cannot read"),
    ],
)
def test_validate_refuses_what_train_refuses(tmp_path, monkeypatch, capsys, rewards, part):
    """It builds the plugins as a run does and scores a row; ``--quick`` does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def __init__(self):\n        raise RuntimeError('no such card')\n"
        "    def score(self, rollouts):\n        return []\n\n\n"
        "def raises(response):\n    raise ValueError('cannot read')\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "reference": "b"}\n{"prompt": "c", "reference": "d"}\n'
    )
    (tmp_path / "tasks.yaml").write_text(f"tasks:\n  a: {{dataset: rows.jsonl, {rewards}}}\n")
    assert main(["tasks", "validate", str(tmp_path / "tasks.yaml")]) == 2
    told = capsys.readouterr().err
    assert part in told
    assert "not foreseen" not in told
    if "broken" in rewards:
        assert main(["tasks", "validate", "--quick", str(tmp_path / "tasks.yaml")]) == 0


def test_a_model_that_this_machine_lacks_is_a_warning(here, capsys):
    """The file may be meant for another machine; training here refuses it."""
    rewards = "[{plugin: rm_hf, config: {model_name: nowhere/no-such-model}}, math_answer]"
    assert main(["tasks", "validate", "tasks.yaml", f"tasks.math.rewards={rewards}"]) == 0
    told = capsys.readouterr().out
    assert "2 tasks are valid" in told
    place = "override: tasks.math.rewards[0].config"
    assert f"{place}: rm_hf: the model 'nowhere/no-such-model' cannot be read" in told
    assert "tasks.math: tasks.yaml" not in told
    assert "train refuses it on this machine" in told


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tasks", "validate", "none.yaml"], ["none.yaml:1: tasks", "holds no task", "name: {dataset"]),
        (["tasks", "validate", "limits.yaml"], ["limits.yaml", "tasks.a.rewards[0].overrun", "[0, 1]"]),
        (["tasks", "validate", "model.yaml"], ["model.yaml", "tasks.a.rewards[0].config", "`model_name`"]),
        (["plugins", "check", "rewards.py"], ["name an object in it", "rewards.py:NAME"]),
        (["plugins", "check", "exact_mach"], ["exact_match"]),
        (["plugins", "new", "reward", "exact_match"], ["exact_match", "installed", "choose another"]),
        (["eval", "output_dir=."], ["no tasks", "no run", "tasks_file="]),
        (["bench", "output_dir=gone"], ["no tasks", "no run", "tasks_file="]),
    ],
    ids=lambda v: " ".join(v[:3]) if len(v) > 1 else "",
)
def test_a_mistake_is_one_paragraph_that_says_where(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    rows = '{"prompt": "a", "reference": "b"}\n{"prompt": "c", "reference": "d"}\n'
    (here / "two.jsonl").write_text(rows, encoding="utf-8")
    (here / "none.yaml").write_text("tasks: {}\n", encoding="utf-8")
    (here / "rewards.py").touch()
    for name, reward in (("limits", "{plugin: exact_match, overrun: 5}"), ("model", "rm_hf")):
        text = f"tasks: {{a: {{dataset: two.jsonl, rewards: [{reward}]}}}}\n"
        (here / f"{name}.yaml").write_text(text, encoding="utf-8")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert [part for part in parts if part not in error] == []
    assert not (here / "exact_match").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["tasks", "validate", "gone.yaml"], ["'gone.yaml' does not exist", "YAML"]),
        (["tasks", "show", "folder"], ["'folder' is a directory", "YAML"]),
        (["tasks", "show", "bytes.yaml"], ["'bytes.yaml' is not UTF-8 text", "YAML"]),
        (["tasks", "show", "x/gone.yaml"], ["'x/gone.yaml' lies in a directory that does not exist"]),
        (["tasks", "show", "tasks.yaml/x"], ["'tasks.yaml/x' goes through a file"]),
        (
            ["tasks", "show", "tasks.yaml", "tasks.math.dataset=gone.jsonl"],
            ["tasks.math.dataset: the data set 'gone.jsonl' does not exist", ".parquet"],
        ),
        (["tasks", "show", "tasks.yaml", "tasks.math.dataset=folder.json"], ["'folder.json' is a directory"]),
        (
            ["tasks", "show", "tasks.yaml", "tasks.math.rewards=[gone.py:f]"],
            ["tasks.math.rewards[0]: the plugin file 'gone.py' does not exist", "package.module:object"],
        ),
        (["tasks", "show", "tasks.yaml", "tasks.math.rewards=[folder.py:f]"], ["'folder.py' is a directory"]),
        (["plugins", "check", "gone.py:f"], ["gone.py' does not exist", "package.module:object"]),
        (["plugins", "check", "gone.py"], ["'gone.py' does not exist", "package.module:object"]),
        (["plugins", "check", "gone.py", "--kind", "guard"], ["'gone.py' does not exist"]),
        (
            ["plugins", "check", "exact_match", "--row", "gone.jsonl"],
            ["--row", "'gone.jsonl' does not exist"],
        ),
        (["plugins", "check", "exact_match", "--row", "bytes.yaml"], ["'bytes.yaml' is not UTF-8 text"]),
        (["sandbox", "corpus", "gone.json"], ["the manifest 'gone.json' does not exist", "JSON"]),
        (["sandbox", "corpus", "lacks.json"], ["lacks.json: program 'p': the file", "does not exist"]),
        (
            ["sandbox", "corpus", "lacks.json", "--json", "x/y.json"],
            ["--json", "lies in a directory that does"],
        ),
        (["rescore", "folder", "--output", "folder"], ["--output", "'folder' is a directory"]),
        (
            ["bench", "--json", "x/y.json", "tasks_file=tasks.yaml"],
            ["--json", "lies in a directory that does"],
        ),
        (["train", "tasks_file=gone.yaml"], ["'gone.yaml' does not exist", "YAML"]),
        (["train", "output_dir=tasks.yaml"], ["output_dir 'tasks.yaml' is a file", "output_dir=PATH"]),
        (["train", "output_dir=tasks.yaml/x"], ["output_dir", "goes through a file", "output_dir=PATH"]),
        (["eval", "output_dir=gone", "tasks_file=tasks.yaml"], ["output_dir 'gone' does not exist"]),
        (["eval", "output_dir=bytes.yaml", "tasks_file=tasks.yaml"], ["output_dir 'bytes.yaml' is a file"]),
    ],
    ids=lambda v: " ".join(v) if len(v) > 1 else "",
)
def test_a_path_that_cannot_be_used_is_one_paragraph_that_says_what_to_give(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    for name in ("folder", "folder.json", "folder.py"):
        (here / name).mkdir()
    (here / "bytes.yaml").write_bytes(b"\xff\xfe\x00tasks")
    program = {"name": "p", "file": "gone.py", "task": {"kind": "script"}}
    (here / "lacks.json").write_text(json.dumps({"default_limits": {}, "programs": [program]}))
    try:
        assert main(arguments) == 2
    except SystemExit as error:
        pytest.fail(f"usage, exit code {error.code}")
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1, told
    assert [part for part in parts if part not in told] == [], told
    assert "; give " in told
    assert "Errno" not in told
    assert "--kind" not in told, "a plugin that is not there has no kind"


def test_a_missing_tasks_file_is_all_that_its_command_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("validate", "show"):
        with pytest.raises(SystemExit, match="2"):
            main(["tasks", command])
        assert capsys.readouterr().err.endswith("the following arguments are required: file\n")


def test_a_torch_that_cannot_be_imported_is_said_with_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ValueError('libcublasLt.so not found')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "multitask_rl", "doctor"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "torch cannot be imported: ValueError: libcublasLt.so not found" in ended.stderr
    assert "install a CPU build" in ended.stderr
    assert "Traceback" not in ended.stderr
