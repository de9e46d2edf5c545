"""A guard of one's own in one file: it takes a tiny run back, ends it, and survives a resume."""

import shutil

import pytest

from multitask_rl.config.run import GuardConfig, SchedulerConfig
from multitask_rl.errors import ConfigError, GuardStop, PluginError, TrainingError
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.trainer import Trainer
from run_builders import run_config, write_run

ONE_TASK = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""
GUARD = '''
from dataclasses import dataclass

from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardAction, GuardDecision


class Counts(Guard):
    """Rolls back at one evaluation, stops at another."""

    @dataclass(kw_only=True)
    class Config:
        back_at: int = 3
        stop_at: int = 99

    def __init__(self, config):
        self.config, self.seen, self.back = config, 0, []

    def observe(self, step, evaluations, confirm=None):
        self.seen += 1
        if self.seen == self.config.back_at:
            return GuardDecision(action=GuardAction.rollback, task="copy", reason="counted")
        if self.seen == self.config.stop_at:
            return GuardDecision(action=GuardAction.stop, task="copy", reason="counted to the end")
        return GuardDecision(judged_good=self.seen == 1)

    def rolled_back(self, target, *, step):
        self.back.append([target.step, step])
        return super().rolled_back(target, step=step)

    def lr_factor(self, step):
        return 0.5 if self.back else 1.0

    def metrics(self):
        return {"guard/seen": float(self.seen)}

    def state_dict(self):
        return {"seen": self.seen, "back": self.back}

    def load_state_dict(self, state, renamed=None):
        self.seen, self.back = state["seen"], state["back"]
'''


CALM = """
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardDecision


class Calm(Guard):
    def observe(self, step, evaluations, confirm=None):
        return GuardDecision()
"""


NOW_SAFETY = "this run's is multitask_rl.guard.safety_guard:SafetyGuard: it starts without history"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Four steps with an evaluation each; the third takes the run back to step 0."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, ONE_TASK)
    (directory / "counts.py").write_text(GUARD)
    with Trainer.from_config(config(directory, "run", 4)) as trainer:
        trainer.train()
    return directory, trainer


def config(directory, output, max_steps, **guard_config):
    guard = GuardConfig(plugin=f"{directory / 'counts.py'}:Counts", guard_config=guard_config)
    return run_config(directory, output, max_steps, guard=guard)


def test_it_takes_the_run_back(begun):
    _, trainer = begun
    assert [e.data for e in trainer.events if e.kind == "rolled_back"] == [{"to": 0}]
    told = [(e.kind, e.task, e.reason) for e in trainer.events if e.kind == "rollback"]
    assert told == [("rollback", "copy", "counted")]
    assert trainer.guard.back == [[0, 0]]
    assert trainer.step == 4
    assert trainer.guard.seen == 5, "steps 0, 2, 4 (taken back), 2, 4"


def test_it_goes_on_with_what_it_has_counted_and_ends_the_run(begun):
    directory, _ = begun
    shutil.copytree(directory / "run", directory / "resumed")
    with Trainer.from_config(config(directory, "resumed", 8, stop_at=6)) as resumed:
        with pytest.raises(GuardStop, match=r"at step 6: counted to the end; the last good weights are in"):
            resumed.train()
        assert [e.reason for e in resumed.events if e.kind == "stop"] == ["counted to the end"]
        assert resumed.guard.back == [[0, 0]]
        assert resumed.guard.lr_factor(6) == 0.5


def test_another_guard_starts_without_history(begun):
    directory, _ = begun
    shutil.copytree(directory / "run", directory / "other")
    with Trainer.from_config(run_config(directory, "other", 5)) as trainer:
        trainer.train()
        assert isinstance(trainer.guard, SafetyGuard)
        told = [e.reason for e in trainer.events if e.source == "guard"]
    assert f"the checkpoint's guard was counts.py:Counts, {NOW_SAFETY}" in told


def test_a_guard_does_not_restore_weights_that_another_one_has_judged(begun, tmp_path):
    directory, _ = begun
    shutil.copytree(directory / "run", tmp_path / "run")
    (tmp_path / "calm.py").write_text(CALM)
    calm = GuardConfig(plugin=f"{tmp_path / 'calm.py'}:Calm")
    with Trainer.from_config(run_config(directory, str(tmp_path / "run"), 6, guard=calm)) as trainer:
        trainer.train()
    # another guard again: it knows neither the first one's verdicts nor the second one's
    back = GUARD.replace("class Counts", "class Back")
    (tmp_path / "back.py").write_text(back)
    guard = GuardConfig(plugin=f"{tmp_path / 'back.py'}:Back", guard_config={"back_at": 1})
    with Trainer.from_config(run_config(directory, str(tmp_path / "run"), 8, guard=guard)) as trainer:
        trainer.train()
        told = [e.reason for e in trainer.events if e.source == "guard"]
    assert any("no checkpoint judged good" in reason for reason in told), told
    shutil.copytree(directory / "run", tmp_path / "same")
    with Trainer.from_config(config(directory, str(tmp_path / "same"), 8, back_at=6)) as trainer:
        trainer.train()
        assert [e.data for e in trainer.events if e.kind == "rolled_back"] == [{"to": 0}], "its own verdict"


def test_a_class_of_the_same_name_in_another_file_is_another_guard(begun):
    directory, _ = begun
    shutil.copytree(directory / "run", directory / "namesake")
    (directory / "other.py").write_text(GUARD)
    other = GuardConfig(plugin=f"{directory / 'other.py'}:Counts")
    with Trainer.from_config(run_config(directory, "namesake", 5, guard=other)) as trainer:
        trainer.train()
        assert trainer.guard.seen == 1
        told = [e.reason for e in trainer.events if e.source == "guard"]
    changed = "the checkpoint's guard was counts.py:Counts, this run's is other.py:Counts"
    assert f"{changed}: it starts without history" in told


def test_an_edited_file_holds_the_same_guard(begun, tmp_path):
    directory, _ = begun
    shutil.copytree(directory / "run", directory / "edited")
    (tmp_path / "counts.py").write_text(f"# edited\n{GUARD}")
    same = GuardConfig(plugin=f"{tmp_path / 'counts.py'}:Counts")
    with Trainer.from_config(run_config(directory, "edited", 5, guard=same)) as trainer:
        trainer.train()
        assert trainer.guard.seen == 6


def test_another_guard_follows_one_that_keeps_no_state(begun, tmp_path):
    directory, _ = begun
    shutil.copytree(directory / "actor", tmp_path / "actor")
    write_run(tmp_path, ONE_TASK)
    (tmp_path / "calm.py").write_text(CALM)
    calm = GuardConfig(plugin=f"{tmp_path / 'calm.py'}:Calm")
    with Trainer.from_config(run_config(tmp_path, "run", 2, guard=calm)) as trainer:
        trainer.train()
    with Trainer.from_config(run_config(tmp_path, "run", 3)) as trainer:
        trainer.train()
        told = [e.reason for e in trainer.events if e.source == "guard"]
    assert f"the checkpoint's guard was calm.py:Calm, {NOW_SAFETY}" in told


@pytest.mark.parametrize(
    ("guard", "error", "message"),
    [
        (
            {"guard_config": {"back_to": 1}},
            ConfigError,
            "guard.guard_config.back_to: unknown key 'back_to'; did",
        ),
        ({"max_rollbacks": 1}, ConfigError, "guard.max_rollbacks is a setting of safety_guard"),
        (
            {"plugin": "safety_gard"},
            ConfigError,
            "guard.plugin: unknown guard 'safety_gard'; did you mean 'safety_guard'",
        ),
        (
            {"plugin": "uuid:UUID"},
            PluginError,
            "it has to be a subclass of multitask_rl.guard.base.Guard",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_a_model_loads(begun, guard, error, message):
    directory, _ = begun
    settings = {"plugin": f"{directory / 'counts.py'}:Counts"} | guard
    with pytest.raises(error) as caught:
        Trainer.from_config(run_config(directory, "refused", 1, guard=GuardConfig(**settings)))
    assert message in str(caught.value)


ANSWERS = """
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardDecision


class Answers(Guard):
    def observe(self, step, evaluations, confirm=None):
        return {decision}

    def metrics(self):
        return {metrics}

    def weight_factors(self):
        return {factors}

    def lr_factor(self, step):
        return {lr}

    def state_dict(self):
        return {state}
"""


def answering(directory, **answers):
    """Return a run of a guard that gives ``answers``."""
    usual = {"decision": "GuardDecision()", "metrics": {}, "factors": {}, "lr": 1.0, "state": {}}
    source = f"from numpy import bool_, float32, nan\n{ANSWERS.format(**usual | answers)}"
    (directory / "answers.py").write_text(source)
    guard = GuardConfig(plugin=f"{directory / 'answers.py'}:Answers")
    return Trainer.from_config(run_config(directory, str(directory / "run"), 2, guard=guard))


@pytest.fixture
def space(begun, tmp_path):
    shutil.copytree(begun[0] / "actor", tmp_path / "actor")
    write_run(tmp_path, ONE_TASK)
    return tmp_path


def test_an_action_may_be_given_by_its_name(space):
    stops = "GuardDecision(action='stop', reason='seen enough')"
    with answering(space, decision=stops) as trainer, pytest.raises(GuardStop, match="step 0: seen enough"):
        trainer.train()


def test_numbers_of_numpy_are_answers(space):
    good = "GuardDecision(judged_good=bool_(True), statistics={'value': float32(0.5)})"
    with answering(space, decision=good, factors="{'copy': float32(0.5)}", lr="float32(0.5)") as trainer:
        trainer.train()
        entries = trainer.parts.supervisor.store.checkpoints.entries
        assert [entry.judged_good for entry in entries.values()] == [True] * len(entries)
        assert entries


def test_a_factor_of_a_task_that_does_not_exist_is_told_once(space):
    with answering(space, factors={"cpoy": 0.5, "copy": 0.5}) as trainer:
        trainer.train()
        told = [(e.kind, e.reason) for e in trainer.events if e.source == "guard"]
    ((kind, reason),) = told
    assert kind == "warn"
    assert "Answers.weight_factors: unknown task 'cpoy'; did you mean 'copy'?" in reason


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"decision": None}, "Answers.observe returned None, expected a GuardDecision"),
        ({"decision": "GuardDecision(action='halt')"}, "'halt' (allowed: keep, warn, reweight, freeze, "),
        ({"metrics": None}, "Answers.metrics returned None, expected a mapping of names to numbers"),
        ({"metrics": {"guard/x": "high"}}, "Answers.metrics returned {'guard/x': 'high'}, expected"),
        ({"factors": {"copy": None}}, "Answers.weight_factors returned {'copy': None}, expected"),
        ({"factors": {"copy": float("nan")}}, "Answers.weight_factors returned {'copy': nan}, expected"),
        ({"factors": {"copy": -1}}, "Answers.weight_factors returned {'copy': -1}, expected"),
        ({"lr": None}, "Answers.lr_factor returned None, expected a number"),
        ({"lr": -1.0}, "Answers.lr_factor returned -1.0, expected a number in (0, 1]"),
        ({"lr": 1e9}, "Answers.lr_factor returned 1000000000.0, expected a number in (0, 1]"),
        ({"state": {"seen": {1}}}, "guard: its state cannot be saved: Object of type set is not JSON"),
    ],
)
def test_an_answer_that_is_none_is_told_and_costs_no_record(space, answer, told):
    with answering(space, **answer) as trainer, pytest.raises(PluginError) as caught:
        trainer.train()
    assert told in str(caught.value)
    assert (space / "run" / "events.jsonl").is_file()
    assert '"failed"' in (space / "run" / "events.jsonl").read_text()


EXITS = """
import sys

from multitask_rl.curriculum.base import SchedulerPolicy
from multitask_rl.guard.base import Guard


class Leaves(Guard):
    def observe(self, step, evaluations, confirm=None):
        sys.exit(0)


class IsNotBuilt(Guard):
    def __init__(self):
        sys.exit(0)


class Policy(SchedulerPolicy):
    def _start(self):
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ({"guard": "Leaves"}, TrainingError),
        ({"guard": "IsNotBuilt"}, PluginError),
        ({"scheduler": "Policy"}, TrainingError),
    ],
)
def test_a_plugin_that_exits_does_not_end_the_run_as_done(begun, tmp_path, section, error):
    directory, _ = begun
    file = tmp_path / "exits.py"
    file.write_text(EXITS)
    (name, plugin), *_ = section.items()
    plugin = f"{file}:{plugin}"
    made = GuardConfig(plugin=plugin) if name == "guard" else SchedulerConfig(policy=plugin)
    config = run_config(directory, f"exits_{section[name]}", 1, **{name: made})
    with pytest.raises(error, match=r"exit"):
        Trainer.from_config(config).train()
    if section[name] == "Leaves":
        events = (directory / "exits_Leaves" / "events.jsonl").read_text()
        assert '"failed"' in events
        assert "sys.exit(0) (exits.py:10)" in events
