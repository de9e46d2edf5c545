"""``init`` writes a project that runs: it is validated, its rewards' test passes, and it trains."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from multitask_rl.cli import main
from multitask_rl.config.tasks_file import load_tasks
from run_builders import write_run

SMALL = [
    *("max_steps=2", "num_threads=1", "rollout.max_new_tokens=3", "batch.prompts_per_step=4"),
    *("batch.group_size=2", "eval.num_prompts=4", "scoring.num_workers=1", "tracking.trackers=[jsonl]"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


def test_the_project_is_valid_and_trains(here, capsys, monkeypatch):
    assert main(["init", "first", "--model", "actor", "--device", "cpu", "--yes"]) == 0
    told = capsys.readouterr().out
    assert "next: cd first" in told
    monkeypatch.chdir(here / "first")
    assert main(["tasks", "validate", "tasks.yaml"]) == 0
    command = ["--config-dir", "configs", "+experiment=first", *SMALL]
    assert main(["doctor", *command]) == 0
    assert main(["train", *command]) == 0
    assert (here / "first/runs/first/checkpoints/step_00000002").is_dir()
    for name in ("tasks.schema.json", "run.schema.json"):
        assert json.loads(Path(name).read_text())["$schema"]
    for line in Path("README.md").read_text().splitlines():  # the commands are those of the command line
        if line.startswith("    multitask-rl"):
            assert line.split()[1] in ("doctor", "train", "report", "compare")
    heads = [line.split()[:5] for line in capsys.readouterr().out.splitlines()]
    assert heads.count(["task", "metric", "before", "after", "difference"]) == 1
    texts = [path.read_text() for path in Path().rglob("*") if path.suffix in (".md", ".py", ".yaml")]
    assert not [text for text in texts if "docs/" in text], "a user of the wheel has no docs/"
    capsys.readouterr()


def test_the_test_of_its_rewards_passes(here, monkeypatch):
    main(["init", "first", "--model", "actor", "--yes"])
    monkeypatch.syspath_prepend(str(here / "first"))
    spec = importlib.util.spec_from_file_location("project_test", here / "first/test_rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for test in (module.test_right_number, module.test_letters_in_place):
        (mark,) = test.pytestmark
        assert len(mark.args[1]) > 1
        for response, value in mark.args[1]:
            test(response, value)


def test_nothing_is_overwritten_without_being_told(here, capsys):
    (here / "first").mkdir()
    (here / "first/tasks.yaml").write_text("mine")
    assert main(["init", "first", "--model", "actor", "--yes"]) == 2
    assert "holds tasks.yaml already, and nothing was written" in capsys.readouterr().err
    assert [p.name for p in (here / "first").iterdir()] == ["tasks.yaml"]
    assert main(["init", "first", "--model", "actor", "--yes", "--overwrite"]) == 0
    assert (here / "first/tasks.yaml").read_text() != "mine"


def test_bundled_tasks_are_named_with_what_they_are(here):
    assert main(["init", "game", "--model", "actor", "--tasks", "number_game,gsm8k", "--yes"]) == 0
    text = (here / "game/tasks.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=tasks.schema.json\n")
    tasks = load_tasks(str(here / "game/tasks.yaml"))
    assert tasks["number_game"].environment == "number_game"
    assert tasks["gsm8k"].rewards[0].plugin == "math_answer"
    assert not (here / "game/rewards.py").exists()


def test_what_is_fetched_from_the_hub_is_told_with_what_to_do_without_a_network(here, capsys):
    assert main(["init", "a", "--model", "actor", "--tasks", "own,number_game", "--yes"]) == 0
    assert "hub" not in capsys.readouterr().out
    assert main(["init", "b", "--model", "some/model", "--tasks", "math,gsm8k", "--yes"]) == 0
    told = capsys.readouterr().out
    math = "HuggingFaceH4/MATH-500 and EleutherAI/hendrycks_math (task math)"
    assert f"fetches the model some/model, {math}, openai/gsm8k (task gsm8k) from" in told
    assert "HF_HUB_OFFLINE=1" in told
    text = (here / "b/tasks.yaml").read_text()
    assert "# dataset_config: {source: PATH}   # a file with a column split" in text
    assert load_tasks(str(here / "b/tasks.yaml")).keys() == {"math", "gsm8k"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tasks", "gsm8"], "--tasks: unknown task 'gsm8'; did you mean 'gsm8k'?"),
        (["--tasks", ","], "--tasks: give at least one of own"),
        (["--device", "cuda:97"], "--device: cuda:97 is not on this machine"),
        (["--device", "gpu"], "--device"),
    ],
)
def test_flags_that_cannot_be_are_refused(here, capsys, flags, told):
    assert main(["init", "x", "--model", "actor", "--yes", *flags]) == 2
    assert told in capsys.readouterr().err
    assert not (here / "x").exists()


def test_it_asks_in_a_terminal_and_asks_again(here, monkeypatch, capsys):
    answers = iter(["mine", "cpu", "actor", "onw", "own"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    assert main(["init"]) == 0
    assert "did you mean 'own'" in capsys.readouterr().out
    assert (here / "mine/rewards.py").is_file()


def test_the_run_is_fitted_to_the_memory(here, monkeypatch):
    from multitask_rl.run import estimate

    def settings(free):
        monkeypatch.setattr(estimate, "free_memory", lambda _: free)
        assert main(["init", "fit", "--model", "actor", "--device", "cpu", "--yes", "--overwrite"]) == 0
        return yaml.safe_load((here / "fit/configs/experiment/first.yaml").read_text())

    wide, narrow = settings(1e10), settings(2e6)
    assert "lora" not in wide["model"]
    assert wide["batch"]["tokens_per_microbatch"] == 4096
    assert wide["optimizer"]["learning_rate"] == 2e-5, "of a small model"
    assert narrow["model"]["lora"]["rank"] == 16
    assert narrow["optimizer"]["learning_rate"] == pytest.approx(2e-4), "adapters take larger steps"
    assert narrow["batch"]["tokens_per_microbatch"] < 4096


def test_a_model_that_cannot_be_read_here_is_noted(here, capsys):
    assert main(["init", "later", "--model", "no/such-model", "--yes"]) == 0
    assert "note: the settings are for a small model" in capsys.readouterr().out
