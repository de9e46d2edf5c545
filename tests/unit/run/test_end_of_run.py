"""What a run says at its end of tasks that are worse than at their first evaluation."""

from pathlib import Path
from types import SimpleNamespace

from multitask_rl.config.run import OptimizerConfig, RunConfig
from multitask_rl.report.summary import rows_at_end
from multitask_rl.run.state import RunProgress
from multitask_rl.run.supervisor import Supervisor
from record_builders import write_records


def evaluation(step, task, value, *, direction="higher", metric="reward"):
    values = [value + 0.01 * (i % 3 + step) for i in range(20)]
    what = {"task": task, "metric": metric, "direction": direction, "prompts": task}
    return {"step": step, "values": values, **what}


def events_at_the_end(directory: Path, step: int, best: int | None):
    config = RunConfig(output_dir=str(directory), optimizer=OptimizerConfig(learning_rate=0.5))
    checkpoints = SimpleNamespace(best=lambda: best, path=lambda step: Path(f"step_{step}"))
    others = ("state", "engine", "tasks", "scheduler", "evaluator", "experience")
    supervisor = Supervisor(
        config=config,
        progress=RunProgress(step=step),
        store=SimpleNamespace(checkpoints=checkpoints),
        trackers=SimpleNamespace(log_event=lambda event: None),
        **dict.fromkeys(others),
    )
    supervisor.tell_worse()
    return supervisor.progress.events


def test_the_end_of_a_run_names_the_tasks_that_are_worse_and_no_others(tmp_path):
    lines = [
        evaluation(0, "fell", 0.9),
        evaluation(8, "fell", 0.2),
        evaluation(0, "loss_rose", 1.0, direction="lower"),
        evaluation(8, "loss_rose", 3.0, direction="lower"),
        evaluation(0, "loss_fell", 3.0, direction="lower"),
        evaluation(8, "loss_fell", 1.0, direction="lower"),
        evaluation(0, "rose", 0.2),
        evaluation(8, "rose", 0.9),
        evaluation(0, "removed", 0.9),
        evaluation(4, "removed", 0.2),
        evaluation(8, "added", 0.1),
        evaluation(0, "redefined", 0.9),
        evaluation(8, "redefined", 0.1, metric="other"),
    ]
    write_records(tmp_path, evaluations=lines)
    [event] = events_at_the_end(tmp_path, 8, best=4)
    assert (event.source, event.kind, list(event.data)) == ("run", "alarm", ["fell", "loss_rose"])
    assert "fell (reward 0.9095 at step 0, now 0.2895)" in event.reason
    assert "optimizer.learning_rate (it is 0.5)" in event.reason
    assert event.reason.endswith("checkpoint.resume=step_4 goes on from the best checkpoint")
    assert "resume" not in events_at_the_end(tmp_path, 8, best=8)[0].reason


def test_a_run_without_an_evaluation_at_its_end_says_nothing(tmp_path, caplog):
    assert rows_at_end(tmp_path, 8) == {}
    write_records(tmp_path, evaluations=[evaluation(0, "fell", 0.9), evaluation(4, "fell", 0.2)])
    assert events_at_the_end(tmp_path, 8, best=None) == []
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    assert not caplog.text
    assert events_at_the_end(tmp_path, 8, best=None) == []
    assert "is not compared with the last" in caplog.text
