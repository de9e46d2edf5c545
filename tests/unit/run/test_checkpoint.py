import contextlib
import json
import os
import resource
import shutil
import signal
import sys

import pytest
import torch

from model_builders import build_actor
from multitask_rl.errors import CheckpointError
from multitask_rl.run.checkpoint import CheckpointEntry, CheckpointStore
from multitask_rl.run.manifest import write_manifest


def save(store, step, *, good=None, score=None, score_of=()):
    return store.save(
        CheckpointEntry(step=step, judged_good=good, score=score, score_of=list(score_of)),
        save_actor=lambda d: (d / "weights.bin").write_bytes(bytes(range(256)) * 8),
        tensors={"a/b": torch.arange(5.0)},
        state={"step": step, "nested": {"x": [1, 2.5, None]}},
    )


def test_what_was_saved_is_read_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    checkpoint = store.load(save(store, 3))
    assert checkpoint.state == {"step": 3, "nested": {"x": [1, 2.5, None]}}
    assert torch.equal(checkpoint.tensors["a/b"], torch.arange(5.0))


def test_the_newest_good_ones_and_the_best_survive_the_retention(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step, good, score in ((1, True, 0.9), (2, True, 0.1), (3, True, 0.2), (4, None, 0.3), (5, None, 0.4)):
        save(store, step, good=good, score=score)
    save(store, 6)
    assert sorted(store.entries) == [1, 2, 3, 5, 6]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [f"step_0000000{i}" for i in (1, 2, 3, 5, 6)]


def test_the_best_of_the_tasks_before_a_change_survives_the_retention(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for step, score, tasks in ((1, 0.2, "a"), (2, 0.9, "a"), (3, 0.3, "a"), (4, 0.1, "b"), (5, 0.1, "b")):
        save(store, step, score=score, score_of=tasks)
    save(store, 6)
    assert sorted(store.entries) == [2, 5, 6]
    assert store.best() == 5
    save(store, 7, score=0.5, score_of=["c"])
    assert sorted(store.entries) == [5, 7], "two sets of tasks"


def test_verdict_and_score_survive_a_restart(tmp_path):
    save(CheckpointStore(tmp_path, keep=2), 1, good=True, score=0.5)
    entry = CheckpointStore(tmp_path, keep=2).entries[1]
    assert (entry.judged_good, entry.score) == (True, 0.5)


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors", "actor/weights.bin", "manifest.json"])
def test_a_file_cut_off_in_the_middle_is_named_and_the_one_before_is_used(tmp_path, file, caplog):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)
    broken = save(store, 2) / file
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=broken.name):
        store.load(broken.parents[1] if "/" in file else broken.parent)
    newest = store.newest()
    assert newest is not None
    assert newest.state["step"] == 1
    assert "trying the checkpoint before it" in caplog.text


def test_an_altered_file_is_found_by_its_hash(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    file = save(store, 1) / "state.json"
    file.write_text(file.read_text().replace("2.5", "3.5"))
    with pytest.raises(CheckpointError, match="altered"):
        store.load(file.parent)


def test_a_crash_while_writing_leaves_the_former_ones_and_no_litter(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 1)

    def crash(directory):
        (directory / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left on device\. Earlier checkpoints are intact"):
        store.save(CheckpointEntry(step=2), save_actor=crash, tensors={"a": torch.zeros(1)}, state={})
    reopened = CheckpointStore(tmp_path, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001"]
    assert list(reopened.entries) == [1]


def test_nothing_is_pickled(tmp_path):
    path = save(CheckpointStore(tmp_path, keep=1), 1)
    suffixes = {p.suffix for p in path.rglob("*") if p.is_file() and p.parent.name != "actor"}
    assert suffixes == {".json", ".safetensors"}
    assert json.loads((path / "manifest.json").read_text())["format"] == 3


def test_a_rollback_forgets_newer_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(store, step)
    store.forget_after(1)
    assert list(store.entries) == [1]
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000001"]


def killed_at(number, work):
    """Do ``work`` in a process that is killed before its ``number``-th change on disk; True: it ended."""
    if (child := os.fork()) == 0:
        left = [number]

        def count(event, arguments):
            writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFEXITED(os.waitpid(child, 0)[1])


def write_anew(store):
    store.save(
        CheckpointEntry(step=2), save_actor=lambda d: None, tensors={"a": torch.zeros(1)}, state={"step": 22}
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("work", "allowed"),
    [
        (lambda store: save(store, 3), {2, 3}),
        (write_anew, {2, 22}),
        (lambda store: store.forget_after(1), {1, 2}),
        (lambda store: store.set_aside_after(1), {1, 2}),
    ],
    ids=["next", "same-step", "forget", "set-aside"],
)
def test_a_kill_at_any_line_leaves_a_complete_checkpoint_to_go_on_from(tmp_path, work, allowed):
    store = CheckpointStore(tmp_path / "before", keep=1)
    save(store, 1, good=True)
    save(store, 2)
    found, number, ended = set(), 0, False
    while not ended:
        number += 1
        directory = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "before", directory)
        ended = killed_at(number, lambda: work(CheckpointStore(directory, keep=1)))  # noqa: B023
        again = CheckpointStore(directory, keep=1)
        for step in again.entries:
            again.load(again.path(step))
        found.add(again.newest().state["step"])
        assert again.entries[1].judged_good
    assert number > 1
    assert found == allowed


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", [4, 11])
def test_what_a_kill_left_is_removed_by_the_next_save(tmp_path, number):
    for step in (1, 2):
        save(CheckpointStore(tmp_path, keep=1), step)
    assert not killed_at(number, lambda: save(CheckpointStore(tmp_path, keep=1), 3))
    assert any(p.name.startswith(".") for p in tmp_path.iterdir())
    save(CheckpointStore(tmp_path, keep=1), 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def test_no_edit_of_a_byte_of_a_manifest_is_taken_for_what_was_written(tmp_path):
    """Verdict, score, step and hashes: whatever changes, the checkpoint before is the newest."""
    save(CheckpointStore(tmp_path, keep=3), 1, good=True, score=0.25)
    manifest = save(CheckpointStore(tmp_path, keep=3), 2, good=False, score=0.5) / "manifest.json"
    written, found = manifest.read_bytes(), CheckpointEntry(step=2, judged_good=False, score=0.5)
    value = json.loads(written)
    for place in range(len(written)):
        for byte in (written[place] ^ 1, ord("0"), ord("}"), 0):
            edited = written[:place] + bytes([byte]) + written[place + 1 :]
            if edited == written:
                continue
            manifest.write_bytes(edited)
            with contextlib.suppress(ValueError):
                if json.loads(edited) == value:  # a space for another one
                    continue
            store = CheckpointStore(tmp_path, keep=3)
            assert list(store.entries) == [1], edited
    assert store.newest().state["step"] == 1
    manifest.write_bytes(written)
    assert CheckpointStore(tmp_path, keep=3).entries[2] == found


def test_a_checkpoint_under_the_name_of_another_step_is_left_alone(tmp_path, caplog):
    save(CheckpointStore(tmp_path, keep=3), 1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")
    assert CheckpointStore(tmp_path, keep=3).entries == {}
    assert "holds step 1" in caplog.text


def test_a_directory_without_manifest_is_no_checkpoint_but_goes_with_its_branch(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    (save(store, 2) / "manifest.json").unlink()
    store = CheckpointStore(tmp_path, keep=2)
    assert list(store.entries) == [1]
    assert "manifest.json is missing; it is left alone" in caplog.text
    store.set_aside_after(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["abandoned_1_step_00000002", "step_00000001"]


@pytest.mark.parametrize("facts", [{}, {"entry": {"0": 1}}, {"entry": 1}])
def test_a_manifest_that_no_save_wrote_is_told_in_a_sentence(tmp_path, facts):
    write_manifest(tmp_path, facts)
    with pytest.raises(CheckpointError, match="json does not hold what a save writes"):
        CheckpointStore.read_entry(tmp_path)


@pytest.mark.parametrize("what", ["actor", "tokenizer", "tensors", "state"])
def test_a_full_disk_is_one_error_whoever_writes_and_leaves_no_litter(tmp_path, what):
    """A limit on the size of files stands for the disk; Python, safetensors and tokenizers write."""
    actor = build_actor()
    store = CheckpointStore(tmp_path / "c", keep=2)
    save(store, 1)
    writers = {"actor": actor.save, "tokenizer": actor.tokenizer.save_pretrained}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*Earlier checkpoints are intact"):
            store.save(
                CheckpointEntry(step=2),
                save_actor=writers.get(what, lambda d: None),
                tensors={"a": torch.zeros(1000 if what == "tensors" else 1)},
                state={"long": "x" * (2000 if what == "state" else 1)},
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step_00000001"]
    assert CheckpointStore(tmp_path / "c", keep=2).newest().state["step"] == 1


def test_looking_at_a_run_does_not_touch_what_another_process_writes(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)

    def look(directory):
        CheckpointStore(tmp_path, keep=2).newest()
        (directory / "weights.bin").write_bytes(b"x")

    store.save(CheckpointEntry(step=1), save_actor=look, tensors={"a": torch.zeros(1)}, state={"step": 1})
    assert store.newest().state["step"] == 1


def test_a_bug_in_what_is_saved_is_not_taken_for_a_full_disk(tmp_path):
    def bug(directory):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        CheckpointStore(tmp_path, keep=1).save(CheckpointEntry(step=1), save_actor=bug, tensors={}, state={})
    assert not any(tmp_path.iterdir())
