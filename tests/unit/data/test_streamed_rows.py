"""Streamed data sets: every row once an epoch, exact resume, splits and held-out rows as of other data."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from multitask_rl.config.task import TaskSpec
from multitask_rl.data import StreamedPrompts, get_dataloader, load_rows, rows_of
from multitask_rl.data.readers import BLOCK, StreamedRows
from multitask_rl.errors import DataError

SIZE = 2 * BLOCK + 100


def files(folder: Path, *, sizes: tuple[int, ...] = (1000, 1000, 148), changed: int = -1) -> dict[str, Any]:
    """Write rows in several files; return the settings that stream them, and a held-out split."""
    numbers = itertools.count()
    names = []
    for part, size in enumerate(sizes):
        rows = [{"prompt": f"{i}{'!' * (i == changed)}>"} for i in itertools.islice(numbers, size)]
        names.append(str(folder / f"part_{part}.jsonl"))
        Path(names[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(f'{{"prompt": "v{i}"}}\n' for i in range(20)))
    data_files = {"train": names, "validation": str(folder / "held_out.jsonl")}
    return {"data_files": data_files, "streaming": True}


def stream(settings: dict[str, Any], seed: int = 0) -> StreamedPrompts:
    rows = load_rows(TaskSpec(name="t", dataset="json", dataset_config=settings), "train")
    assert isinstance(rows, StreamedRows)
    return StreamedPrompts(rows, task="t", seed=seed)


def drawn(prompts: StreamedPrompts, n: int) -> list[tuple[int, str]]:
    return [(draw, row["prompt"]) for draw, row in prompts.next(n)]


def test_an_epoch_gives_every_row_once_and_the_next_one_another_order(tmp_path: Path) -> None:
    settings = files(tmp_path)
    prompts = stream(settings)
    first, second = drawn(prompts, SIZE), drawn(prompts, SIZE)
    texts = [text for _, text in first]
    assert [draw for draw, _ in first + second] == list(range(2 * SIZE))
    assert sorted(texts) == sorted(f"{i}>" for i in range(SIZE)) == sorted(text for _, text in second)
    assert set(texts[:BLOCK]) == {f"{i}>" for i in range(BLOCK)}, "a block is shuffled, and held"
    assert texts[:50] != [f"{i}>" for i in range(50)]
    assert texts != [text for _, text in second]
    assert drawn(stream(settings), 100) == first[:100]
    assert drawn(stream(settings, seed=1), 100) != first[:100]
    held_out = load_rows(TaskSpec(name="t", dataset="json", dataset_config=settings), "eval")
    assert [row["prompt"] for row in held_out] == [f"v{i}" for i in range(20)]


@pytest.mark.parametrize("at", [0, 5, BLOCK, BLOCK + 900, SIZE, SIZE + 7])
def test_a_stream_goes_on_at_the_same_row(tmp_path: Path, at: int) -> None:
    prompts = stream(files(tmp_path))
    prompts.next(at)
    state = json.loads(json.dumps(prompts.state_dict()))
    expected = drawn(prompts, 1500)
    other = stream(files(tmp_path), seed=7)  # the order is the one of the run that began
    other.load_state_dict(state)
    assert drawn(other, 1500) == expected
    prompts.load_state_dict(state)  # back, as after a rollback or batches that were not used
    assert drawn(prompts, 1500) == expected
    assert prompts.epoch == other.epoch


def test_data_that_cannot_go_on_from_its_state_is_read_from_its_beginning(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"prompt": f"{i}>"} for i in range(SIZE)]).to_iterable_dataset()
    own = rows.shuffle(seed=3, buffer_size=300)  # its buffer is not in its state
    prompts, other = (
        StreamedPrompts(StreamedRows(own, "rows"), task="t", seed=0),
        StreamedPrompts(StreamedRows(own, "rows"), task="t", seed=0),
    )
    prompts.next(BLOCK + 10)
    other.load_state_dict(prompts.state_dict())
    assert drawn(other, 1500) == drawn(prompts, 1500)


def test_other_rows_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = stream(files(tmp_path))
    prompts.next(BLOCK + 10)
    state = prompts.state_dict()
    other = stream(files(tmp_path, changed=BLOCK + 500))
    other.load_state_dict(state)
    assert len(drawn(other, 10)) == 10
    (warning,) = caplog.messages
    assert f"row {BLOCK} of epoch 0 and those after it are others" in warning
    caplog.clear()
    first = stream(files(tmp_path, changed=3))
    first.load_state_dict(state)
    assert first.epoch == 1
    assert first.next(1)[0][0] == BLOCK + 10
    assert "a new epoch starts" in caplog.messages[0]


def test_held_out_rows_of_one_split_are_never_trained_on() -> None:
    data = datasets.IterableDataset.from_generator(lambda: ({"prompt": f"{i}>"} for i in range(SIZE)))
    loader = get_dataloader(data.map(lambda row: {"task": "t"}))
    spec = TaskSpec(name="t")
    train, held_out = loader.load_both(spec)
    assert isinstance(train, StreamedRows)
    apart = {row["prompt"] for row in held_out}
    assert 50 < len(apart) < 150, "a tenth of the first rows"
    prompts = StreamedPrompts(train, task="t", seed=0)
    texts = [row["prompt"] for _, row in prompts.next(SIZE - 300)]
    assert not apart & set(texts)
    assert 1700 < len(set(texts)) == len(texts) < SIZE - 150


def test_tasks_of_one_stream_get_their_own_rows() -> None:
    data = datasets.IterableDataset.from_generator(
        lambda: ({"prompt": f"{i}>", "task": "ab"[i % 2]} for i in range(40))
    )
    loader = get_dataloader(datasets.IterableDatasetDict(train=data, validation=data))
    assert loader.tasks == ["a", "b"]
    streams = []
    for name in loader.tasks:
        rows, _ = loader.load_both(TaskSpec(name=name))
        assert isinstance(rows, StreamedRows)
        streams.append(StreamedPrompts(rows, task=name, seed=0))
    for _ in range(30):  # one after the other, each from its own place
        assert {row["task"] for prompts in streams for _, row in prompts.next(1)} == {"a", "b"}
    assert [prompts.epoch for prompts in streams] == [1, 1]


def test_what_cannot_be_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match=r"can be read once only.*IterableDataset\.from_generator"):
        rows_of(({"prompt": "x"} for _ in range(3)), "prompts")

    def broken() -> Any:
        yield from ({"prompt": str(i)} for i in range(BLOCK + 1))
        raise OSError("the disk is gone")

    data = datasets.IterableDataset.from_generator(broken)
    prompts = StreamedPrompts(StreamedRows(data, "data set 'far'"), task="t", seed=0)
    prompts.next(BLOCK)
    with pytest.raises(DataError, match=r"'far': the streamed rows cannot be read on \(OSError: the disk"):
        prompts.next(1)
    caplog.set_level(logging.WARNING)
    rows = StreamedRows(data, "data set 'far'").only(lambda row: int(row["prompt"]) < 3)
    empty = datasets.IterableDataset.from_generator(
        lambda: iter(()), features=datasets.Features({"prompt": datasets.Value("string")})
    )
    with pytest.raises(DataError, match="no rows"):
        rows_of(empty, "prompts")
    assert len(rows) == 3
