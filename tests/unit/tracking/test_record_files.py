"""Records are cut to what a checkpoint knows of, or set aside; never mixed, never repeated."""

import enum
import itertools
import json
import math
import os
import random
from types import MappingProxyType

import numpy as np
import pytest

from multitask_rl.tracking.jsonl import (
    RECORDS,
    RecordFile,
    cut_records,
    dump_line,
    load_line,
    record_lengths,
    repeat_evaluations,
    set_records_aside,
)
from multitask_rl.tracking.reading import read_run
from multitask_rl.tracking.spending import read_spending


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


def test_a_line_that_was_cut_off_does_not_swallow_the_next_one(tmp_path):
    write(tmp_path, "metrics.jsonl", 1, 2)
    lengths = record_lengths(tmp_path)
    os.truncate(tmp_path / "metrics.jsonl", lengths["metrics.jsonl"] - 4)
    for _ in range(2):
        cut_records(tmp_path, lengths)
    write(tmp_path, "metrics.jsonl", 3)
    assert steps(tmp_path, "metrics.jsonl") == [1, 3]


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


def test_a_rollback_repeats_the_evaluations_that_still_count(tmp_path):
    """Task b was not evaluated at the step of the rollback; a's first evaluation at 15 was undone before."""
    told = [("a", 5, 0.1), ("b", 5, 0.2), ("a", 15, 0.3), ("a", 5, 0.1), ("a", 15, 0.4), ("a", 20, 0.5)]
    told += [("b", 20, 0.6), ("new", 20, 0.7)]
    line = {"metric": "reward", "direction": "higher", "prompts": "p"}
    for task, step, value in told:
        append_line(tmp_path / "evaluations.jsonl", {"task": task, "step": step, "values": [value], **line})
    repeat_evaluations(tmp_path / "evaluations.jsonl", 15, {})
    seen = {task: [(e.step, e.values) for e in own] for task, own in read_run(tmp_path).evaluations.items()}
    assert seen == {"a": [(5, [0.1]), (15, [0.4])], "b": [(5, [0.2])], "new": [(20, [0.7])]}


def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path, caplog):
    line = {"task": "a", "metric": "reward", "direction": "higher"}
    for number, step in enumerate((0, 2, 4, 6)):
        append_line(tmp_path / "evaluations.jsonl", {"step": step, "values": [0.1], **line})
        append_line(tmp_path / "metrics.jsonl", {"step": step, "time/step_s": 1.0, "task/a/weight": number})
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        (tmp_path / name).write_bytes(b"".join([lines[0], lines[1][:9], *lines[2:]]))
    repeat_evaluations(tmp_path / "evaluations.jsonl", 4, {})
    for _ in range(2):
        run = read_run(tmp_path)
    assert [evaluation.step for evaluation in run.evaluations["a"]] == [0], "6 was undone, 4 is lost"
    assert run.weights["a"] == {0: 0, 6: 3}
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(": not a line of JSON")[0] for text in told] == [
        f"{tmp_path / name}:2" for name in ("evaluations.jsonl", "metrics.jsonl")
    ]


def append_line(path, row):
    with path.open("a", encoding="utf-8") as stream:
        stream.write(dump_line(row))


class Colour(enum.StrEnum):
    red = "red"


class Shade(str, enum.Enum):  # noqa: UP042 - its str() is not its value
    dark = "dark"


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (math.nan, None),
        ([1e22, -0.0, 5e-324, 0.1, math.inf], [1e22, -0.0, 5e-324, 0.1, None]),
        (2**80, 2**80),
        (np.float32(0.5), 0.5),
        (np.float64(math.nan), None),
        ([np.int64(3), np.bool_(True), True], [3, True, True]),
        (MappingProxyType({"a": (1, Colour.red)}), {"a": [1, "red"]}),
        ({None: 1, ("a", 2): {3: math.nan}}, {"None": 1, "('a', 2)": {"3": None}}),
        ("\u2028 \x00 é \U0001f600", "\u2028 \x00 é \U0001f600"),
        ({"half of a pair": "\ud83d", "n": math.nan}, {"half of a pair": "\ud83d", "n": None}),
        (["\ud83d", Colour.red, Shade.dark], ["\ud83d", "red", "dark"]),
        (object, str(object)),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_a_record_of_any_value_is_one_line_of_strict_json(tmp_path, value, kept):
    file = RecordFile(tmp_path / "lines")
    file.append([dump_line({"value": value})])
    file.close()
    (line,) = (tmp_path / "lines").read_bytes().splitlines()

    def no_constant(text):
        raise AssertionError(text)

    for read in (load_line, lambda line: json.loads(line, parse_constant=no_constant)):
        assert repr(read(line)["value"]) == repr(kept)


@pytest.mark.parametrize(
    "line", [b'{"a": NaN}', b'{"a": 1e400}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b" [1]\n"]
)
def test_lines_of_other_programs_are_read_as_python_reads_them(line):
    assert repr(load_line(line)) == repr(json.loads(line.decode(errors="replace")))
    with pytest.raises(ValueError, match="line 1 column"):
        load_line(line.strip()[:-1])


def test_a_rollback_of_a_task_that_has_its_first_name_again_repeats_its_newest_evaluation(tmp_path):
    names = {0: "copy", 2: "other", 4: "copy", 6: "copy"}
    keys = {"metric": "m", "direction": "higher", "values": [0.0, 1.0]}
    lines = [dump_line({"step": step, "task": name, **keys}) for step, name in names.items()]
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    (tmp_path / "config.yaml").write_text("tasks: {copy: {former_names: [copy, other]}}")
    repeat_evaluations(tmp_path / "evaluations.jsonl", 4, {"other": "copy"})
    assert [e.step for e in read_run(tmp_path).evaluations["copy"]] == [0, 2, 4]


@pytest.mark.parametrize(
    ("names", "target", "kept"),
    [
        (["a", "a", "b", "b", "b", "b"], 8, [0, 2, 4, 6, 8]),
        (["a", "a", "b", "c", "c", "c"], 8, [0, 2, 4, 6, 8]),
        (["a", "a", "b", "b", "b", "b"], 2, [0, 2]),
        (["b", "a", "b", "b", "b", "b"], 8, [0, 2, 4, 6, 8]),
    ],
    ids=["renamed", "renamed twice", "to before the new name", "the first name again"],
)
def test_a_rollback_drops_no_evaluation_of_a_renamed_task_before_its_target(tmp_path, names, target, kept):
    keys = {"metric": "m", "direction": "higher", "values": [0.0, 1.0]}
    lines = [dump_line({"step": 2 * at, "task": name, **keys}) for at, name in enumerate(names)]
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    former = sorted(set(names) - {names[-1]})
    (tmp_path / "config.yaml").write_text(json.dumps({"tasks": {names[-1]: {"former_names": former}}}))
    repeat_evaluations(tmp_path / "evaluations.jsonl", target, dict.fromkeys(former, names[-1]))
    assert [e.step for e in read_run(tmp_path).evaluations[names[-1]]] == kept


@pytest.mark.parametrize("width", [1, 3_000, 700_000, 2_500_000], ids="{} bytes a line".format)
def test_spending_is_what_the_lines_say_however_long_they_are(tmp_path, width):
    """The reader searches pieces of the file; a whole parse of each line says the same."""
    chance = random.Random(width)
    lines = []
    for step in [1, 2, 3, 4, 5, 6, 3, 4, 5]:
        numbers = {"time/step_s": chance.random(), "time/samples_per_s": 40.0, "time/tokens_per_s": None}
        numbers |= {f"task/{task}/reward_mean": chance.random() for task in "abc"}
        padding = {"padding": "x" * chance.randrange(width, 2 * width)}
        more = chance.choice([{**padding, **numbers}, {**numbers, **padding}])
        lines.append({"step": step, **more})
    lines.insert(2, {"step": 2, "guard/alarms": 1.0, "padding": "x" * width})  # no step was made
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    found = read_spending(tmp_path / "metrics.jsonl", ["c", "a", "none"])
    made = [line for line in lines if "time/step_s" in line]
    assert found.steps == [1, 2, 3, 4, 5]
    assert found.lines == [0, 1, 6, 7, 8]
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 6, "time/step_s": 1')  # a run writes on
    assert (
        read_spending(tmp_path / "metrics.jsonl", ["c", "a", "none"]).spent["seconds"]
        == found.spent["seconds"]
    )
    assert found.spent["seconds"] == list(itertools.accumulate(line["time/step_s"] for line in made))
    assert found.spent["samples"] == list(itertools.accumulate(40 * line["time/step_s"] for line in made))
    assert all(map(math.isnan, found.spent["tokens"]))
    assert found.rewards == {
        task: {line["step"]: line[f"task/{task}/reward_mean"] for line in made if line not in made[2:6]}
        for task in "ac"
    }
    renamed = read_spending(tmp_path / "metrics.jsonl", ["d"], {"c": "d"})
    assert renamed.rewards == {"d": found.rewards["c"]}
