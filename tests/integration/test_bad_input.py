"""Bad input through the command line: one clear paragraph, the right exit code, nothing learnt is lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace

import pytest

from multitask_rl.cli import main
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    RolloutConfig,
    recorded_config,
)
from multitask_rl.errors import ConfigError
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.run.directory_lock import DirectoryLock
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, write_run

TASK = "tasks:\n  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}\n"
PLUGINS = {
    "raises_on_import": "raise RuntimeError('no such card')\n\n\ndef score(response):\n    return 0.0\n",
    "raises": "def score(response):\n    raise ValueError('no answer found')\n",
    "hangs": (
        "import time\n\nfrom multitask_rl.scoring.shapes import with_traits\n\n\n"
        "@with_traits(timeout_s=0.3)\ndef score(response):\n    time.sleep(600)\n"
    ),
    "killed": (
        "import os, pathlib\n\n\ndef score(response):\n"
        "    mark = pathlib.Path(__file__).with_suffix('.killed')\n"
        "    if not mark.exists():\n        mark.touch()\n        os.kill(os.getpid(), 9)\n"
        "    return 1.0\n"
    ),
}
SMALL = [
    "num_threads=1",
    "rollout.max_new_tokens=3",
    "batch.prompts_per_step=4",
    "batch.group_size=2",
    "eval.num_prompts=4",
    "eval.every=2",
    "checkpoint.every=2",
    "scoring.num_workers=1",
    "tracking.trackers=[jsonl]",
    "guard.enabled=false",
]


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """Actor, data, rewards and a finished run of two steps under ``done``."""
    directory = tmp_path_factory.mktemp("bad")
    write_run(directory, TASK)
    for name, text in PLUGINS.items():
        (directory / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert run(directory, "done") == 0
        yield directory


def run(directory, output, *changes, tasks="tasks.yaml", steps=2):
    return main(
        [
            "train",
            f"tasks_file={directory / tasks}",
            f"model.name_or_path={directory / 'actor'}",
            f"output_dir={directory / output}",
            f"max_steps={steps}",
            *SMALL,
            *changes,
        ]
    )


def paragraph(capsys):
    """Return what standard error says as the error: one line, no traceback."""
    told = capsys.readouterr().err
    assert "Traceback" not in told
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    assert told.rstrip().endswith(errors[0]), told
    return errors[0]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tasks:\n  copy: {type: grpo\n", ["tasks.yaml:3:1", "not valid YAML"]),
        (TASK + "  copy: {type: ppo, dataset: copy.jsonl}\n", ["copy", "3"]),
        (
            TASK.replace("copy.jsonl", "torn.jsonl"),
            ["row {'reference': 'x'} of", "torn.jsonl"],
        ),
    ],
    ids=["broken", "duplicate", "row"],
)
def test_a_bad_file_is_refused_before_a_model_loads(space, capsys, text, parts):
    (space / "bad").mkdir(exist_ok=True)
    for name in ("copy.jsonl", "rewards.py"):
        shutil.copy(space / name, space / "bad" / name)
    rows = [{"prompt": f"{i}>", "reference": "x"} for i in range(30)] + [{"reference": "x"}]
    (space / "bad/torn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (space / "bad/tasks.yaml").write_text(text)
    assert run(space, "out-bad", tasks="bad/tasks.yaml") == 2
    told = paragraph(capsys)
    assert [p for p in parts if p not in told] == [], told
    assert not (space / "out-bad/checkpoints").exists()


@pytest.mark.parametrize(
    ("plugin", "parts"),
    [
        ("raises_on_import", ["raises_on_import.py", "no such card"]),
        ("raises", ["copy", "no answer found"]),
        ("hangs", ["copy"]),
    ],
)
def test_a_bad_reward_ends_the_run_in_one_paragraph_and_keeps_what_was_learnt(space, capsys, plugin, parts):
    """A finished run goes on with a reward that broke: the steps already made stay as they were."""
    shutil.rmtree(space / "out", ignore_errors=True)
    shutil.copytree(space / "done", space / "out")
    (space / "tasks2.yaml").write_text(TASK.replace("rewards.py:starts_right", f"{plugin}.py:score"))
    code = run(space, "out", "scoring.retries=0", tasks="tasks2.yaml", steps=200)
    assert code != 0
    told = paragraph(capsys)
    assert [p for p in parts if p not in told] == [], told
    assert (space / "out/checkpoints/step_00000002/manifest.json").exists()
    # the window of the error budget still holds the good samples before: some steps pass until it is spent
    made = steps_of(space / "out")
    assert run(space, "out", steps=made + 1) == 0, "mended, the run goes on"
    assert steps_of(space / "out") == made + 1


def test_a_worker_killed_from_outside_costs_nothing(space):
    (space / "killed.yaml").write_text(TASK.replace("rewards.py:starts_right", "killed.py:score"))
    assert run(space, "out-killed", tasks="killed.yaml") == 0
    assert (space / "killed.killed").exists()
    rows = (space / "out-killed/rollouts.jsonl").read_text().splitlines()
    assert {json.loads(row)["reward"] for row in rows} == {1.0}


def test_a_prompt_longer_than_the_context_is_told(space, capsys):
    rows = [{"id": i, "prompt": "a" * 400, "reference": "a"} for i in range(40)]
    (space / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (space / "long.yaml").write_text(TASK.replace("copy.jsonl", "long.jsonl"))
    assert run(space, "out-long", tasks="long.yaml") != 0
    assert "longer than" in paragraph(capsys)


def test_responses_of_no_length_are_scored_and_trained_past(space):
    from multitask_rl.rollout.hf import HFEngine

    generate = HFEngine.generate

    def end_at_once(self, requests):
        nothing = {"response_ids": [], "rollout_logprobs": []}
        return [[replace(g[0], **nothing), *g[1:]] for g in generate(self, requests)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "generate", end_at_once)
        assert run(space, "out-zero") == 0


def test_a_quiet_run_tells_the_end_alone_and_how_it_is_shown_is_no_other_setting(space, capsys, monkeypatch):
    """A finished run refuses other settings; other words for the same steps are none."""
    assert run(space, "shown", "tracking.trackers=[console,jsonl]") == 0
    capsys.readouterr()
    arguments = ["train", f"output_dir={space / 'shown'}"]
    assert main([*arguments, "--quiet"]) == 0
    told = capsys.readouterr()
    assert [line for line in told.err.splitlines() if "[WARNING]" not in line] == []
    assert "run finished" in told.out
    assert main([*arguments, "--quiet", "tracking.uri=sqlite:///elsewhere.db"]) == 0  # MLflow was away
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*arguments, "--json", "max_steps=3"]) == 0
    told = capsys.readouterr()
    events = [line["event"] for line in map(json.loads, told.out.splitlines()) if "event" in line]
    assert [event["reason"] for event in events if "tracking.console" in event["reason"]] == []
    assert told.err.startswith("importing torch and transformers\n"), "what takes the first seconds"


def test_an_evaluation_needs_the_run_alone_and_says_whose_weights_it_saw(space, capsys):
    done, tasks = space / "done", [f"tasks_file={space / 'tasks.yaml'}", *SMALL]
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}

    def evaluate(*arguments):
        code = main(["eval", *arguments])
        return code, capsys.readouterr()

    code, told = evaluate(f"output_dir={done}", "eval.num_prompts=3")
    assert code == 0
    first, _, row = told.out.splitlines()[-3:]
    assert first == f"weights: {done / 'checkpoints/step_00000002'} (step 2)"
    assert row.split()[4:] == ["3", "0", "0"]
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before

    code, told = evaluate(f"output_dir={space / 'dnoe'}", f"model.name_or_path={space / 'actor'}", *tasks)
    assert code == 2
    assert "dnoe' does not exist; give the directory of a run" in told.err
    assert not (space / "dnoe").exists()

    code, told = evaluate(f"output_dir={done}", "checkpoint.resume=never")
    assert f"weights: the untrained model {space / 'actor'} (checkpoint.resume=never)\n" in told.out
    assert (done / "checkpoints/step_00000002").exists()


def test_a_benchmark_makes_real_steps_and_leaves_nothing_but_its_numbers(space, capsys, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(space / "bench"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (space / "bench").mkdir()
    before = {path for path in space.rglob("*") if "sandbox" not in path.name}
    file, arguments = space / "bench.json", [f"output_dir={space / 'done'}", "rollout.max_new_tokens=2"]
    assert main(["bench", "--steps", "2", "--json", str(file), *arguments]) == 0
    assert {path for path in space.rglob("*") if "sandbox" not in path.name} - before == {file}
    numbers = json.loads(file.read_text())
    # 4 prompts, 2 responses each, both tokens drawn or the end
    drawn, tokens = (numbers[name] * numbers["step_s"] for name in ("samples_per_s", "tokens_per_s"))
    assert drawn > 7.9
    assert 0.99 * drawn < tokens < 2.01 * drawn
    stages = numbers["stages"]
    assert {"rollout", "rewards", "advantages", "update"} <= stages.keys()
    assert 0 < stages["update"]["seconds"] < numbers["step_s"]
    # The same clock at the same moments: not only roughly the share
    assert stages["update"]["utilisation"] == pytest.approx(
        stages["update"]["seconds"] / numbers["step_s"], rel=1e-6
    )
    assert numbers["sampling_tokens_per_s"] > numbers["tokens_per_s"]
    assert numbers["memory"]["rss_peak_mb"] > 50 * numbers["memory"]["weights_mb"] > 0
    assert "training" in capsys.readouterr().out
    assert main(["bench", "--steps", "0", *arguments]) == 2
    assert main(["bench", "--multirun", *arguments]) == 2


def test_a_missing_engine_is_told_before_the_actor_loads(space, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert run(space, "engineless", "rollout.engine=vllm", f"model.name_or_path={space / 'none'}") == 2
    assert "pip install 'multitask-rl[vllm]'" in paragraph(capsys)


def test_a_model_that_is_not_there_is_told(space, capsys):
    assert run(space, "out-model", "model.name_or_path=no/such/model") == 2
    assert "no/such/model" in paragraph(capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere; /proc below stands for it")
def test_a_read_only_directory_is_told(space, capsys):
    (space / "locked").mkdir()
    (space / "locked").chmod(0o500)
    assert run(space, "locked/out") == 2
    assert "may not be used" in paragraph(capsys)


def test_a_directory_nobody_can_write_is_told(space, capsys):
    assert run(space, "out", "output_dir=/proc/out") == 2
    assert "output_dir=PATH" in paragraph(capsys)


def test_a_run_that_may_only_be_read_is_evaluated_and_not_trained_on(space, capsys):
    shutil.copytree(space / "done", space / "read_only")
    (space / "read_only" / ".write_probe").mkdir()  # root may write: this stands for another user
    assert main(["eval", "--trust", f"output_dir={space / 'read_only'}"]) == 0
    capsys.readouterr()
    assert run(space, "read_only", steps=9) == 2
    assert "output_dir" in paragraph(capsys)
    (space / "read_only" / "train.log").unlink(missing_ok=True)
    (space / "read_only" / "train.log").mkdir()
    assert run(space, "read_only", steps=9) == 2
    assert re.search(r"output_dir: .*train\.log.*output_dir=PATH", paragraph(capsys))


def test_a_checkpoint_cut_off_in_the_middle_costs_no_more_than_itself(space, capsys):
    shutil.copytree(space / "done", space / "cut")
    assert run(space, "cut", steps=3) == 0
    tensors = space / "cut/checkpoints/step_00000003/tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:100])
    named = f"checkpoint.resume={space / 'cut/checkpoints/step_00000003'}"
    assert run(space, "cut", named, steps=4) == 1
    assert "cut off or altered" in paragraph(capsys)
    assert run(space, "cut", steps=4) == 0, "by itself it goes on from the one before"


def test_prompts_that_are_all_too_long_end_the_run_after_each_was_tried(space, capsys):
    assert run(space, "too_long", "rollout.max_prompt_tokens=1") == 2
    message = capsys.readouterr().err
    assert "task 'copy': the last " in message
    assert "all longer than 1 tokens, or had given answers of more than" in message
    assert "or raise rollout.max_prompt_tokens" in message
    tried = int(message.partition("the last ")[2].split()[0])
    assert tried < 1000, "as many as there are rows, a few times over"


def steps_of(directory):
    # the run may be writing another line
    whole, _, _ = (directory / "metrics.jsonl").read_text().rpartition("\n")
    return max((json.loads(line)["step"] for line in whole.splitlines()), default=0)


def test_a_machine_that_is_taken_back_loses_no_step(space, capsys):
    seen = []

    def end():
        while not (space / "taken/metrics.jsonl").exists() or steps_of(space / "taken") < 2:
            time.sleep(0.05)
        seen.append(steps_of(space / "taken"))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    code = run(space, "taken", "checkpoint.every=500", "eval.every=500", steps=500)
    thread.join()
    assert code == 128 + signal.SIGTERM
    told = capsys.readouterr().err
    assert f"go on with: multitask-rl train output_dir={space / 'taken'}\ninterrupted by SIGTERM" in told
    made = steps_of(space / "taken")
    assert seen[0] <= made < 500
    assert max((space / "taken/checkpoints").glob("step_*")).name == f"step_{made:08d}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("between", ["steps", "step and evaluation", "evaluation and step"])
def test_a_signal_between_two_stages_loses_no_step(space, between):
    """Also where the script does not handle signals itself."""
    directory = space / between.replace(" ", "_")
    every = 100 if between == "steps" else 2
    later = {"eval": EvalConfig(every=every, num_prompts=2), "checkpoint": CheckpointConfig(every=100)}

    class Interrupted(Trainer):
        def train_step(self):
            """Make a step, with a signal before or after it."""
            if self.step == 2 and between != "step and evaluation":
                os.kill(os.getpid(), signal.SIGTERM)
            report = super().train_step()
            if self.step == 2 and between == "step and evaluation":
                os.kill(os.getpid(), signal.SIGTERM)
            return report

    trainer = Interrupted.from_config(run_config(space, directory.name, 4, **later))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert max((directory / "checkpoints").glob("step_*")).name == "step_00000002"
    assert steps_of(directory) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_signal_after_sampling_skips_no_prompt(space, staleness):
    later = {"checkpoint": CheckpointConfig(every=100), "eval": EvalConfig(every=100, num_prompts=2)}
    later["rollout"] = RolloutConfig(max_new_tokens=4, max_staleness=staleness)

    class Interrupted(Trainer):
        def train_step(self):
            """Let a signal come when the batch of a step is there."""
            source = self.parts.experience

            def begin(step):
                experience = type(source).next(source, step)
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return experience

            source.next = begin
            return super().train_step()

    with pytest.raises(KeyboardInterrupt):
        Interrupted.from_config(run_config(space, f"sampled_{staleness}", 4, **later)).train()
    assert steps_of(space / f"sampled_{staleness}") == 2
    for name in (f"sampled_{staleness}", f"unsampled_{staleness}"):
        train(run_config(space, name, 4, **later))
    found, whole = (f"{name}_{staleness}" for name in ("sampled", "unsampled"))
    drawn, expected = (prompts_of(space / name) for name in (found, whole))
    assert len(drawn) > 8
    assert all(one == other for one, other in zip(drawn, expected, strict=False))
    if not staleness:  # with it the resumed run has newer weights to sample from
        assert lines(space / found, "metrics.jsonl") == lines(space / whole, "metrics.jsonl")


def prompts_of(directory):
    rows = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    return list(dict.fromkeys((row["prompt_id"], row["prompt"]) for row in rows))


def test_a_directory_is_one_runs_until_its_process_ends(space, capsys):
    hold = (
        "import sys, time; from pathlib import Path; "
        "from multitask_rl.run.directory_lock import DirectoryLock; "
        "lock = DirectoryLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", hold, str(space / "held")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert run(space, "held") == 2
        told = paragraph(capsys)
        assert [p for p in (f"process {other.pid} on", "choose another output_dir") if p not in told] == []
        other.kill()
    first = DirectoryLock(space / "held")
    DirectoryLock(space / "held").release()  # what this process left open is its own
    first.release()


def test_a_refused_run_changes_nothing_of_the_one_before(space, capsys):
    before = (space / "done/config.yaml").read_text()
    assert run(space, "done", "optimizer.learning_rate=0.9") == 1
    assert "already made its 2 steps" in paragraph(capsys)
    shutil.copytree(space / "actor", space / "other")
    assert run(space, "done", f"model.name_or_path={space / 'other'}", steps=3) == 2
    assert "its checkpoints would go on with the former weights" in paragraph(capsys)
    assert (space / "done/config.yaml").read_text() == before
    # looking on costs a running trainer nothing: neither what it writes nor where it would go on
    (space / "done/checkpoints/.writing_step_00000003").mkdir()
    arguments = [f"tasks_file={space / 'tasks.yaml'}", f"model.name_or_path={space / 'actor'}", *SMALL]
    assert main(["eval", *arguments, f"output_dir={space / 'done'}", "checkpoint.resume=never"]) == 0
    assert (space / "done/checkpoints/.writing_step_00000003").is_dir()
    assert (space / "done/checkpoints/step_00000002").is_dir()


def test_another_runs_checkpoint_is_gone_on_from_but_not_its_records(space):
    small = {"batch": BatchConfig(prompts_per_step=4, group_size=2), "eval": EvalConfig(num_prompts=4)}
    config = run_config(space, "original", 2, **small)
    trainer = Trainer.from_config(config)
    trainer.train_step()
    trainer.parts.trackers._identities["elsewhere"] = "run 7"
    trainer.train()
    rate = replace(config.optimizer, learning_rate=2e-3)
    with Trainer.from_config(replace(config, max_steps=3, optimizer=rate)) as own:
        own.train_step()
        assert "run 7" in own.run_id
        (changed,) = [event for event in own.events if event.kind == "changed"]
        assert changed.reason.endswith("optimizer.learning_rate: 0.001 -> 0.002")
    with Trainer.from_config(replace(recorded_config(space / "original"), max_steps=4)) as plain:
        plain.train_step()
        assert [event.reason for event in plain.events if event.kind == "changed"] == []
    path = str(space / "original/checkpoints/step_00000002")
    forked = replace(config, output_dir=str(space / "fork"), checkpoint=CheckpointConfig(resume=path))
    with Trainer.from_config(replace(forked, max_steps=3)) as fork:
        fork.train_step()
        assert fork.step == 3
        assert fork.run_id is None


@pytest.mark.parametrize(
    ("watched", "words"),
    [
        ("copy/length", "directions.length=higher (or lower)"),
        ("copy/lenth", "copy has: failure_rate, length"),
    ],
)
def test_a_guard_that_watches_nothing_is_refused_before_a_model_loads(space, watched, words):
    config = run_config(space, "unwatched", 2, guard=GuardConfig(monitor_metrics=[watched]))
    with pytest.raises(ConfigError, match=re.escape(words)):
        Trainer.from_config(replace(config, model=ModelConfig(name_or_path="no/such/model")))


def test_a_guard_is_checked_when_it_is_added_and_its_reach_when_the_run_begins(space, caplog):
    config = run_config(
        space, "added", 2, guard=GuardConfig(enabled=False), eval=EvalConfig(every=2, num_prompts=4)
    )
    with Trainer.from_config(config) as trainer:
        with pytest.raises(ConfigError, match=r"'dialogue_fluency' is not a task.*starts_right"):
            trainer.add_guard(SafetyGuard(monitor_metrics=["dialogue_fluency"]))
        trainer.add_guard(SafetyGuard(monitor_metrics=["starts_right"], rollback_steps=1))
        trainer.train()
    assert "eval.every=2 and guard.rollback_steps=1" in caplog.text
