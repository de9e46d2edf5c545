"""Trackers of TensorBoard (its own reader), Weights & Biases and trackio (stand-ins for both clients)."""

import importlib.util
import sys

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import MissingExtraError
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.tensorboard import TensorBoardTracker
from multitask_rl.tracking.trackio import TrackioTracker
from multitask_rl.tracking.wandb import WandbTracker
from reward_builders import rollout

CLIENT = """
class Run:
    id, name = "abc", "run"
    summary, step = {}, 0

    def __init__(self):
        self.lines, self.alerts, self.ends, self.axes = [], [], [], []

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, numbers, step):
        self.lines.append((step, numbers))

    def alert(self, title, text):
        self.alerts.append((title, text))

    def finish(self, exit_code=0):
        self.ends.append(exit_code)


class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data


def init(**given):
    global run, asked
    run, asked = Run(), given
    return run
"""
STOP = Event(step=3, source="guard", kind="stop", reason="copy fell", task="copy")
NOTE = Event(step=3, source="scheduler", kind="reweight", reason="more of copy", task="copy")


def scored(response, reward):
    return Scored(rollout=rollout(response), reward=reward)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a module of that name on the path and return it imported."""
    made = []

    def make(name, **files):
        package = tmp_path / "clients" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(CLIENT)
        for file, text in files.items():
            (package / f"{file}.py").write_text(text)
        monkeypatch.syspath_prepend(str(package.parent))
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] in made]:
        del sys.modules[name]


def test_tensorboard_hides_what_a_rollback_undid(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, TrackingConfig(), None)
    tracker.start({})
    for step in (1, 2, 3, 4):
        tracker.log_metrics({"train/loss": float(step)}, step)
    tracker.log_event(Event(step=2, source="guard", kind="rolled_back", reason="from 4 to 2"))
    tracker.log_metrics({"train/loss": 30.0}, 3)
    tracker.finish("finished")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path, TrackingConfig(), None)
    first.start({"model": {"name_or_path": "m"}})
    for step in (0, 1, 2, 3):
        first.log_metrics({"train/loss": float(step), "macro/kl": float("nan")}, step)
    first.finish("failed")
    second = TensorBoardTracker(tmp_path, TrackingConfig(), None)
    second.start({"model": {"name_or_path": "m"}}, resume_step=2)
    second.log_metrics({"train/loss": 30.0}, 3)
    second.log_event(STOP)
    second.log_rollouts([scored("worse", 0.0), scored("<b>best</b>", 1.0), scored("between", 0.5)], 3)
    second.log_rollouts([scored("too early", 1.0)], 3)
    second.finish("finished")
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert "macro/kl" not in read.Tags()["scalars"]
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    assert texts["events/guard/text_summary"] == ["    stop (copy): copy fell"]
    (sample,) = texts["samples/t/text_summary"]
    assert "reward 0.0" in sample
    assert "<b>best</b>" in sample
    assert "between" not in sample
    assert all(line.startswith("    ") for line in sample.splitlines()), "Markdown shows it letter by letter"


def test_wandb_goes_on_under_the_same_id(tmp_path, client):
    module = client("wandb")
    tracker = WandbTracker(tmp_path / "first", TrackingConfig(experiment="mine"), None)
    tracker.start({"seed": 1})
    expected = {"project": "mine", "name": "first", "id": None, "resume": None, "config": {"seed": 1}}
    assert expected.items() <= module.asked.items()
    tracker.log_metrics({"train/loss": 1.0, "macro/kl": float("inf")}, 1)
    tracker.log_event(STOP)
    tracker.log_event(NOTE)
    tracker.log_rollouts([scored("worse", 0.0), scored("between", 0.5), scored("best", 1.0)], 1)
    tracker.log_rollouts([scored("too early", 1.0)], 1)
    tracker.finish("failed")
    (step, numbers), (_, table) = module.run.lines
    assert (step, numbers) == (1, {"train/loss": 1.0, "training_step": 1})
    assert module.run.axes[-1] == ("*", "training_step")
    assert [row[3:] for row in table["samples"].data] == [["worse", 0.0], ["best", 1.0]]
    assert module.run.alerts == [("guard stop copy", "copy fell")]
    assert module.run.ends == [1]
    again = WandbTracker(tmp_path / "first", TrackingConfig(experiment="mine"), tracker.run_id)
    again.start({"seed": 1}, resume_step=1)
    assert (module.asked["id"], module.asked["resume"]) == ("abc", "allow")


def test_wandb_takes_the_steps_that_follow_a_rollback(tmp_path, client, monkeypatch):
    module = client("wandb")

    def steps(tracker, numbers):
        for step in numbers:
            tracker.log_metrics({"loss": float(step)}, step)
        return [(own, numbers["training_step"]) for own, numbers in module.run.lines]

    first = WandbTracker(tmp_path / "first", TrackingConfig(), None)
    first.start({})
    steps(first, (1, 2, 3, 4))
    first.log_event(Event(step=2, source="guard", kind="rolled_back", reason="from 4 to 2"))
    assert steps(first, (3, 4))[-2:] == [(5, 3), (6, 4)], "the client takes steps in their order only"
    # killed; the server has step 6 of its own, which is 4 of the run
    monkeypatch.setattr(module.Run, "step", 7)
    monkeypatch.setattr(module.Run, "summary", {"training_step": 4})
    again = WandbTracker(tmp_path / "first", TrackingConfig(), first.run_id)
    again.start({}, resume_step=3)
    assert steps(again, (4, 5)) == [(6, 4), (7, 5)], "of these the server takes the second"


def test_trackio_writes_no_step_twice_after_a_resume(tmp_path, client):
    storage = "class SQLiteStorage:\n    get_max_step_for_run = staticmethod(lambda project, run: 2)\n"
    module = client("trackio", sqlite_storage=storage)
    tracker = TrackioTracker(tmp_path / "first", TrackingConfig(), None)
    tracker.start({"seed": 1})
    assert module.asked["resume"] == "never"
    tracker.log_metrics({"train/loss": 1.0}, 0)
    assert module.run.lines == [(0, {"train/loss": 1.0})]
    again = TrackioTracker(tmp_path / "first", TrackingConfig(), tracker.run_id)
    again.start({"seed": 1}, resume_step=1)
    assert (module.asked["name"], module.asked["resume"]) == (tracker.run_id, "allow")
    for step in (2, 3):
        again.log_metrics({"train/loss": 1.0}, step)
        again.log_rollouts([scored("a", 0.0), scored("b", 1.0)], step)
    again.log_event(STOP)
    again.finish("finished")
    assert [step for step, _ in module.run.lines] == [3, 3]
    assert module.run.alerts == [("guard stop copy", "copy fell")]
    other = TrackioTracker(tmp_path / "first", TrackingConfig(), None)
    other.start({})
    assert other.run_id != tracker.run_id, "a name is all that the client knows a run by"


@pytest.mark.parametrize(("tracker", "package"), [(WandbTracker, "wandb"), (TrackioTracker, "trackio")])
def test_a_client_that_is_missing_is_named_with_its_command(tmp_path, tracker, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingExtraError, match=rf"pip install 'multitask-rl\[{package}\]'"):
        tracker(tmp_path, TrackingConfig(), None)
