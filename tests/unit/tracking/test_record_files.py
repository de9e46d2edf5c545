"""Records are cut to what a checkpoint knows of, or set aside; never mixed, never repeated."""

import json

from multitask_rl.tracking.jsonl import (
    RECORDS,
    RecordFile,
    cut_records,
    record_lengths,
    set_records_aside,
)


def write(directory, name, *steps):
    file = RecordFile(directory / name)
    file.append(json.dumps({"step": step}) + "\n" for step in steps)
    file.close()


def steps(directory, name):
    return [json.loads(line)["step"] for line in (directory / name).read_text().splitlines()]


def test_records_are_cut_by_length_whatever_step_they_say(tmp_path):
    """A rollback repeats steps, a controller notes its decision under the step it began at."""
    write(tmp_path, "metrics.jsonl", 1, 2, 3, 2, 3)
    write(tmp_path, "events.jsonl", 2)
    lengths = record_lengths(tmp_path)
    write(tmp_path, "metrics.jsonl", 3, 4)
    write(tmp_path, "events.jsonl", 2)
    write(tmp_path, "rollouts.jsonl", 4)
    for _ in range(2):  # killed while cutting: once more
        cut_records(tmp_path, lengths)
        assert steps(tmp_path, "metrics.jsonl") == [1, 2, 3, 2, 3]
        assert steps(tmp_path, "events.jsonl") == [2]
        assert not (tmp_path / "rollouts.jsonl").exists()


def test_records_shorter_than_at_the_checkpoint_are_named(tmp_path, caplog):
    write(tmp_path, "metrics.jsonl", 1)
    cut_records(tmp_path, {"metrics.jsonl": 112})
    assert "metrics.jsonl lacks 100 of the 112 bytes" in caplog.text
    assert steps(tmp_path, "metrics.jsonl") == [1]


def test_a_new_run_sets_records_of_steps_aside_and_drops_those_of_none(tmp_path):
    for _ in range(2):
        for name in RECORDS:
            write(tmp_path, name, 0, 1)
        set_records_aside(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["previous-1", "previous-2"]
    assert sorted(p.name for p in (tmp_path / "previous-2").iterdir()) == sorted(RECORDS)
    write(tmp_path, "metrics.jsonl", 0)
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 1')
    set_records_aside(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["previous-1", "previous-2"]
