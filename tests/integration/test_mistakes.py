"""Mistakes of new users: each is answered with what is wrong, where, what is allowed and what to do.

None ends in a traceback, and none passes silently. The list below is the whole list: one case per mistake.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli import main
from run_builders import write_run

TASK = {"type": "grpo", "dataset": "copy.jsonl", "rewards": ["rewards.py:starts_right"]}
SMALL = [
    *("num_threads=1", "rollout.max_new_tokens=3", "batch.prompts_per_step=4", "batch.group_size=2"),
    *("eval.num_prompts=4", "scoring.num_workers=1", "scoring.retries=0", "tracking.trackers=[jsonl]"),
    *("guard.enabled=false", "max_steps=1"),
]
TRAIN = ["train", "tasks_file=tasks.yaml", "model.name_or_path=actor", "output_dir=out", *SMALL]
VALIDATE = ["tasks", "validate", "tasks.yaml"]
"""Reads tasks files as ``train`` does, without composing a configuration."""
CONFIGURED = {"reference_column": "answer"}
ROW = '{"prompt": "a", "reference": "b"}\n'


def task(**keys):
    """Return a tasks file with one task; a key that is None is left out."""
    own = {key: value for key, value in {**TASK, **keys}.items() if value is not None}
    return {"tasks.yaml": json.dumps({"tasks": {"copy": own}})}


def reward(source):
    return {**task(rewards=["own.py:score"]), "own.py": source}


def data(name, text):
    return {**task(dataset=name), name: text}


MISTAKES = {
    # the command
    "a misspelt command": (["trian"], {}, ["'trian'", "did you mean 'train'"]),
    "nothing given": (["train"], {}, ["no tasks", "tasks_file=path/to/tasks.yaml"]),
    "the file without its key": (["train", "tasks.yaml"], {}, ["tasks_file=tasks.yaml"]),
    "the file of a run": (
        ["train", "first.yaml"],
        {"first.yaml": "# @package _global_\nmax_steps: 3\n"},
        ["'first.yaml'", "--config-dir", "=first"],
    ),
    "a misspelt experiment": (
        ["train", "--config-dir", ".", "+configs=frist"],
        {"configs/first.yaml": "# @package _global_\nmax_steps: 3\n"},
        ["+configs=frist", "did you mean 'first'"],
    ),
    "an experiment without +": (
        ["train", "--config-dir", ".", "configs=first"],
        {"configs/first.yaml": "# @package _global_\nmax_steps: 3\n"},
        ["'configs'", "write +configs=NAME"],
    ),
    "a key without its section": (
        ["train", "learning_rate=1e-6"],
        {},
        ["'learning_rate'", "'optimizer.learning_rate'"],
    ),
    "a key that is called otherwise": (
        ["train", "model.lora.r=16"],
        {},
        ["'model.lora.r'", "allowed: alpha, dropout, rank"],
    ),
    "a file as project": (["init", "tasks.yaml", "--yes", "--model", "gone"], {}, ["'tasks.yaml' is a file"]),
    "a key with dashes": (["train", "--max-steps", "3"], {}, ["--max-steps", "write max_steps=3"]),
    "spaces around =": (
        ["train", "max_steps", "=", "3"],
        {},
        ["'max_steps'", "write KEY=VALUE without spaces"],
    ),
    "a value without quotes": (
        ["train", "tasks.copy.prompt=Q: {prompt}"],
        {},
        ["tasks.copy.prompt", "quote it twice: 'tasks.copy.prompt=\"Q: {prompt}\"'"],
    ),
    "arguments in another order": (
        ["eval", "tasks.yaml", "actor"],
        {},
        ["'actor' is a directory", "tasks.yaml"],
    ),
    # keys of the configuration
    "a misspelt section": (["train", "modle.name_or_path=x"], {}, ["'modle'", "did you mean 'model'"]),
    "a misspelt key": (["train", "batch.group_sze=4"], {}, ["batch.group_sze", "did you mean 'group_size'"]),
    "a text for a number": (["train", "max_steps=many"], {}, ["max_steps=many", "give a whole number"]),
    "one value for a list": (
        ["train", "tracking.trackers=jsonl"],
        {},
        ["tracking.trackers=jsonl", "give a list, KEY=[VALUE,VALUE]"],
    ),
    "a number out of range": (
        ["train", "optimizer.learning_rate=-1"],
        {},
        ["optimizer.learning_rate", "> 0"],
    ),
    "an unknown choice": (["train", "model.dtype=fp16"], {}, ["model.dtype", "float16, got 'fp16'"]),
    "a task that is not there": (
        [*TRAIN, "tasks.cpy.weight=2"],
        task(),
        ["tasks.cpy", "did you mean 'copy'"],
    ),
    "an unknown policy": (
        [*TRAIN, "scheduler.policy=patiense"],
        task(),
        ["scheduler.policy", "did you mean 'patience'", "uniform"],
    ),
    "an unknown tracker": ([*TRAIN, "tracking.trackers=[jsnl]"], task(), ["tracking.trackers", "'jsonl'"]),
    "an unknown engine": ([*TRAIN, "rollout.engine=vlm"], task(), ["rollout.engine", "did you mean 'vllm'"]),
    "a key of another engine": (
        [*TRAIN, "rollout.engine_config.max_num_seqs=4"],
        task(),
        ["rollout.engine_config", "unknown key 'max_num_seqs'", "allowed: weights"],
    ),
    "a device that is not there": (
        [*TRAIN, "device_map.actor=cuda:97"],
        task(),
        ["device_map.actor", "cuda:97 is not on this machine", "cpu; name what it has"],
    ),
    "a guard of no metric": (
        [*TRAIN, "guard.enabled=true", "guard.monitor_metrics=[cpy]"],
        task(),
        ["guard.monitor_metrics: 'cpy'", "did you mean 'copy'", "reward_mean"],
    ),
    # the tasks file
    "a missing tasks file": (
        ["train", "tasks_file=gone.yaml"],
        {},
        ["'gone.yaml' does not exist", "give the path"],
    ),
    "a tab in YAML": (
        TRAIN,
        {"tasks.yaml": "tasks:\n\tcopy: {}\n"},
        ["tasks.yaml:2:1", "indent with spaces"],
    ),
    "a colon in a text": (
        VALIDATE,
        {"tasks.yaml": "tasks:\n  copy:\n    prompt: Question: {prompt}\n"},
        ["tasks.yaml:3:", "put a text with ': ' in quotes"],
    ),
    "an empty file": (
        VALIDATE,
        {"tasks.yaml": ""},
        ["tasks.yaml: the file is empty", "expected a key 'tasks'"],
    ),
    "tasks without `tasks:`": (
        VALIDATE,
        {"tasks.yaml": "copy: {dataset: copy.jsonl}\n"},
        ["tasks.yaml:1", "unknown key 'copy' (allowed: tasks)"],
    ),
    "a misspelt key of a task": (VALIDATE, task(wieght=2), ["tasks.copy.wieght", "did you mean 'weight'"]),
    "a wrong type in a task": (VALIDATE, task(weight="many"), ["tasks.copy.weight", "a number, got 'many'"]),
    "a reward that is no list": (
        VALIDATE,
        task(rewards="exact_match"),
        ["tasks.copy.rewards", "expected a list"],
    ),
    "an unknown algorithm": (
        VALIDATE,
        task(type="gppo"),
        ["tasks.copy.type", "'gppo'", "installed: anchor, cispo"],
    ),
    "an unknown reward": (TRAIN, task(rewards=["exact_mach"]), ["tasks.copy.rewards[0]", "'exact_match'"]),
    "an unknown environment": (
        VALIDATE,
        task(environment="numbr_game"),
        ["tasks.copy.environment", "did you mean 'number_game'"],
    ),
    "a task without reward": (VALIDATE, task(rewards=None), ["tasks.copy", "add 'rewards: [<name>]'"]),
    "a task of the file taken out by a key": ([*TRAIN, "~tasks.copy"], task(), ["tasks.copy.weight=0"]),
    "groups of one": ([*TRAIN, "batch.group_size=1"], task(), ["tasks.copy.group_size", "set at least 2"]),
    # data
    "missing data": (
        VALIDATE,
        task(dataset="gone.jsonl"),
        ["tasks.copy.dataset", "'gone.jsonl' does not exist; give"],
    ),
    "a format that is not read": (
        VALIDATE,
        data("d.csv", "prompt\na\n"),
        ["d.csv' must end in one of .jsonl"],
    ),
    "no rows": (
        VALIDATE,
        data("d.jsonl", ""),
        ["tasks.yaml:1: tasks.copy.dataset: ", "d.jsonl' has no rows", "needs at least one"],
    ),
    "no held-out rows": (
        VALIDATE,
        {**task(eval_dataset="d.jsonl"), "d.jsonl": ""},
        ["tasks.copy.eval_dataset: ", "d.jsonl' has no rows"],
    ),
    "a row that is cut": (
        VALIDATE,
        data("d.jsonl", ROW + '{"prompt": "a", "reference": \n'),
        ["d.jsonl:2: not a line of JSON: Expecting value: column 29 (char 28)"],
    ),
    "two letters of an algorithm in the wrong order": (
        VALIDATE,
        task(type="gpro"),
        ["tasks.copy.type", "did you mean 'grpo'"],
    ),
    "an environment that begins with a number": (
        VALIDATE,
        {
            **task(environment="own.py:World", rewards=None),
            "own.py": "class World:\n    def reset(self, row):\n        return 3\n\n"
            "    def step(self, message):\n        pass\n",
        },
        ["tasks.copy.environment", "reset(row) returned 3; expected messages, a text or None"],
    ),
    "a step as in gymnasium": (
        VALIDATE,
        {
            **task(environment="own.py:World", rewards=None),
            "own.py": "class World:\n    def reset(self, row):\n        return 'Go.'\n\n"
            "    def step(self, message):\n        return 'next', 1.0, True, {}\n",
        },
        ["tasks.copy.environment", "expected a StepResult of multitask_rl.environments.base"],
    ),
    "a reward of TRL without its prefix": (  # the path is whole: one in a tasks file begins at the file
        VALIDATE,
        reward("def score(completions, **rows):\n    return [1.0] * len(completions)\n"),
        ["rewards[0]", "write the plugin as 'trl:/", "/own.py:score'"],
    ),
    "a row that is no JSON": (
        VALIDATE,
        data("d.jsonl", ROW + "{'prompt': 1}\n"),
        ["d.jsonl:2: not a line of JSON", 'such as {"prompt": "1+1="'],
    ),
    "a column that the prompt lacks": (
        VALIDATE,
        task(prompt="{question}"),
        ["tasks.copy.prompt: row", "lacks question"],
    ),
    "a misspelt column in the prompt": (VALIDATE, task(prompt="{promtp}"), ["did you mean 'prompt'"]),
    "a prompt that is null": (
        VALIDATE,
        data("d.jsonl", ROW + '{"prompt": null, "reference": "b"}\n'),
        ["lacks prompt", "null there: prompt"],
    ),
    "a configured column that a later row lacks": (
        VALIDATE,
        {
            **data("d.jsonl", '{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n'),
            **task(dataset="d.jsonl", rewards=[{"plugin": "exact_match", "config": CONFIGURED}]),
        },
        ["tasks.copy: row", "lacks answer"],
    ),
    "a misspelt task of a run": (
        ["train", "output_dir=done", "tasks.cop.weight=2"],
        {},
        ["unknown task 'cop'", "did you mean 'copy'"],
    ),
    "a column with the prompt of another name": (
        VALIDATE,
        data("d.jsonl", '{"question": "a", "reference": "b"}\n'),
        ["lacks prompt", "prompt: '{question}'"],
    ),
    "an id before a prompt of another name": (
        VALIDATE,
        data("d.jsonl", '{"id": "q1", "split": "train", "reference": "b", "question": "a"}\n'),
        ["lacks prompt", "prompt: '{question}'"],
    ),
    "a curriculum by no column": (
        VALIDATE,
        task(curriculum={"by": "levl"}),
        ["'levl'", "a column of every row"],
    ),
    "a data set of no kind": (VALIDATE, task(dataset="gone.csv"), ["tasks.copy.dataset", ".jsonl"]),
    "braces in a prompt": (
        VALIDATE,
        task(prompt='Answer {"a": 1} to {prompt}'),
        ['lacks "a"', "write {{ and }}"],
    ),
    "a list as data": (
        VALIDATE,
        data("d.jsonl", f"[{ROW.strip()}]\n"),
        ["d.jsonl:1", "one row a line"],
    ),
    "a column that the reward lacks": (
        TRAIN,
        data("d.jsonl", '{"prompt": "a"}\n' * 3),
        ["tasks.copy: row", "lacks reference", "columns: prompt"],
    ),
    "a column that a reward of TRL lacks": (
        TRAIN,
        {
            **task(rewards=["trl:own.py:score"]),
            "own.py": "def score(completions, referense):\n    return [1.0] * len(completions)\n",
        },
        ["tasks.copy: row", "lacks referense", "did you mean 'reference'"],
    ),
    "an empty prompt": (
        TRAIN,
        data("d.jsonl", '{"prompt": "", "reference": "a"}\n' * 3),
        ["tasks.copy.prompt: the prompt of row", "is empty", "give it a text"],
    ),
    # a reward of one's own
    "a reward file that is not there": (
        VALIDATE,
        task(rewards=["gone.py:f"]),
        ["rewards[0]", "'gone.py' does not exist"],
    ),
    "a function that is not there": (
        VALIDATE,
        task(rewards=["rewards.py:starts_rigt"]),
        ["rewards[0]", "did you mean 'starts_right'"],
    ),
    "a reward file without its function": (
        VALIDATE,
        task(rewards=["rewards.py"]),
        ["rewards[0]: unknown reward 'rewards.py'", "rewards.py:FUNCTION"],
    ),
    "a dot before a function": (
        VALIDATE,
        task(rewards=["rewards.starts_right"]),
        ["rewards[0]: unknown reward 'rewards.starts_right'", "write rewards:starts_right"],
    ),
    "a module that is not there": (
        VALIDATE,
        task(rewards=["gone:score"]),
        ["rewards[0]", "no module 'gone'", "install its package", "gone.py:score"],
    ),
    "a misspelt prefix of a file": (
        VALIDATE,
        task(rewards=["vrl:rewards.py:starts_right"]),
        ["rewards[0]", "unknown prefix 'vrl'", "did you mean 'verl'"],
    ),
    "a misspelt prefix of a name": (
        VALIDATE,
        task(rewards=["verifier:gsm8k"]),
        ["rewards[0]", "did you mean 'verifiers'"],
    ),
    "a prefix of environments at a reward": (
        VALIDATE,
        task(rewards=["agent:rewards.py:starts_right"]),
        ["rewards[0]", "unknown prefix 'agent'", "evaluate"],
    ),
    "a misspelt prefix of an environment": (
        VALIDATE,
        task(environment="agnt:rewards.py:run"),
        ["tasks.copy.environment", "unknown prefix 'agnt'", "did you mean 'agent'"],
    ),
    "a reward that is no Python": (
        TRAIN,
        reward("def score(response)\n    return 1\n"),
        ["rewards[0]", "own.py:1 is not Python", "correct that line"],
    ),
    "a reward of a missing package": (
        TRAIN,
        reward("import no_such_package\n\n\ndef score(response):\n    return 1.0\n"),
        ["tasks.copy.rewards", "'no_such_package'", "install that package"],
    ),
    "a reward that ends the program": (
        TRAIN,
        reward("import sys\n\nsys.exit(0)\n\n\ndef score(response):\n    return 1.0\n"),
        ["tasks.copy.rewards", "SystemExit", "__main__"],
    ),
    "a reward that raises": (
        TRAIN,
        reward("def score(response):\n    raise ValueError('no answer')\n"),
        ["task 'copy'", "ValueError: no answer", "mend the plugin"],
    ),
    "a reward that is NaN": (
        TRAIN,
        reward("def score(response):\n    return float('nan')\n"),
        ["task 'copy'", "returned nan, not a finite number", "mend the plugin"],
    ),
    "a reward that is text": (
        TRAIN,
        reward("def score(response):\n    return 'good'\n"),
        ["task 'copy'", "returned 'good', not a number", "mend the plugin"],
    ),
    "too few rewards": (
        TRAIN,
        reward("def score(responses: list[str]):\n    return [1.0]\n"),
        ["task 'copy'", "returned 1 result for", "mend the plugin"],
    ),
    "no return": (
        TRAIN,
        reward("def score(response):\n    response.strip()\n"),
        ["task 'copy'", "none of the task's rewards applies", "score returned None", "mend the plugin"],
    ),
    # the model
    "no model": (
        [a for a in TRAIN if not a.startswith("model.")],
        task(),
        ["model.name_or_path is empty", "give the directory or Hugging Face id"],
    ),
    "a model that is not there": (
        [*TRAIN, "model.name_or_path=no/such"],
        task(),
        ["'no/such'", "a path from the working directory '", "Check the path"],
    ),
    "a model without tokenizer": (
        [*TRAIN, "model.name_or_path=bare"],
        task(),
        ["'bare'", "tokenizer without a word", "tokenizer.json"],
    ),
    "a model without weights": (
        [*TRAIN, "model.name_or_path=empty"],
        task(),
        ["'empty' is a directory without", "It needs config.json"],
    ),
    "adapters of no layer": (
        [*TRAIN, "model.lora.rank=2", "model.lora.target_modules=foo"],
        task(),
        ["model.lora.target_modules='foo'", "give all-linear or some of down_proj"],
    ),
    "responses longer than the context": (
        [*TRAIN, "rollout.max_new_tokens=512"],
        task(),
        ["tasks.copy", "leaves no room for a prompt", "lower rollout.max_new_tokens"],
    ),
    "a task's responses longer than the context": (
        TRAIN,
        task(sampling={"max_new_tokens": 512}),
        ["tasks.copy", "leaves no room for a prompt", "lower sampling.max_new_tokens of the task"],
    ),
    # the output
    "a file as output": (
        [*TRAIN, "output_dir=copy.jsonl"],
        task(),
        ["'copy.jsonl' is a file", "output_dir=PATH"],
    ),
    "no right to write": ([*TRAIN, "output_dir=/proc/out"], task(), ["'/proc/out'", "output_dir=PATH"]),
    "a directory in use": ([*TRAIN, "output_dir=held"], task(), ["on", "choose another output_dir"]),
    "a checkpoint that is not there": (
        [*TRAIN, "checkpoint.resume=runs/first"],
        task(),
        ["checkpoint.resume='runs/first' is not there", "RUN/checkpoints/step_00000025"],
    ),
    "a run of another model": (
        [*TRAIN, "output_dir=done", "model.name_or_path=other", "max_steps=2"],
        task(),
        ["made with model.name_or_path='actor'", "Choose another output_dir"],
    ),
    "a finished run with other settings": (
        [*TRAIN, "output_dir=done", "optimizer.learning_rate=0.5"],
        task(),
        ["already made its 1 step;", "raise max_steps"],
    ),
    "a report of no run": (
        ["report", "nowhere"],
        {},
        ["nowhere does not exist", "output_dir"],
    ),
    "a report of a run that has not evaluated": (
        ["report", "killed"],
        {"killed/train.log": ""},
        ["killed holds no evaluations.jsonl: the run has not evaluated yet"],
    ),
    "a report of several": (["report", "."], {}, ["is not the output directory", "it holds the runs done"]),
    "a report of many": (
        ["report", "many"],
        {f"many/r{i}/evaluations.jsonl": "" for i in range(8)},
        ["it holds the runs r0, r1, r2, r3, r4 and 3 more"],
    ),
    "a report of a checkpoint": (
        ["report", "done/checkpoints"],
        {},
        ["it is in the run done", "give the run's output_dir"],
    ),
    "a report of a record": (["report", "done/metrics.jsonl"], {}, ["it is in the run done"]),
}


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """A model, data, rewards; a finished run ``done``, one in use ``held``; models that lack something."""
    directory = tmp_path_factory.mktemp("mistakes")
    write_run(directory, json.dumps({"tasks": {"copy": TASK}}))
    for name in ("other", "bare", "empty"):
        shutil.copytree(directory / "actor", directory / name)
    for path in [*(directory / "bare").glob("tokenizer*"), *(directory / "empty").glob("*.safetensors")]:
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main([*TRAIN, "output_dir=done"]) == 0
        yield directory


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered(space, capsys, mistake):
    arguments, files, parts = MISTAKES[mistake]
    for name, text in {"tasks.yaml": json.dumps({"tasks": {"copy": TASK}}), **files}.items():
        (space / name).parent.mkdir(parents=True, exist_ok=True)
        (space / name).write_text(text)
    with _held(space / "held") if "output_dir=held" in arguments else contextlib.nullcontext():
        code = main(arguments)
    told = capsys.readouterr().err
    assert code in (1, 2)
    assert "Traceback" not in told
    assert "not foreseen" not in told
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    assert [part for part in parts if part not in errors[0]] == [], errors[0]
    shutil.rmtree(space / "out", ignore_errors=True)


def test_an_error_of_ones_own_code_is_told_with_its_line(space, capsys):
    (space / "tasks.yaml").write_text(json.dumps({"tasks": {"copy": TASK}}))
    text = """from multitask_rl.guard.base import Guard


class Forgetful(Guard):
    def observe(self, step, evaluations, confirm=None):
        return evaluations["nope"]
"""
    (space / "forgetful.py").write_text(text)
    plugin = ["guard.enabled=true", "guard.plugin=forgetful.py:Forgetful"]
    assert main([*TRAIN, *plugin, "output_dir=of_a_guard"]) == 1
    told = capsys.readouterr().err
    assert "error: KeyError: 'nope' (" in told
    assert "forgetful.py:6 in observe; not foreseen" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_on_a_full_disk_costs_neither_the_run_nor_the_error_that_ends_it(space, capsys):
    (space / "tasks.yaml").write_text(json.dumps({"tasks": {"copy": TASK}}))
    (space / "full").mkdir()
    (space / "full/train.log").symlink_to("/dev/full")
    for key, code, errors in (("seed=0", 0, []), ("model.name_or_path=nowhere", 2, ["'nowhere'"])):
        assert main([*TRAIN, "output_dir=full", key]) == code
        told = capsys.readouterr().err
        assert "Traceback" not in told
        told = [line for line in told.splitlines() if line.startswith("error: ")]
        assert [part in line for part, line in zip(errors, told, strict=True)] == [True] * len(errors)


@contextlib.contextmanager
def _held(directory: Path):
    """Let another process hold the directory."""
    code = (
        "import sys; from pathlib import Path; from multitask_rl.run.directory_lock import DirectoryLock; "
        "lock = DirectoryLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        yield


def test_there_are_40_mistakes_at_least():
    assert len(MISTAKES) >= 40
