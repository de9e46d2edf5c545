import json

import pytest
import torch

from multitask_rl.errors import CheckpointError
from multitask_rl.training.checkpoint import CheckpointEntry, CheckpointStore


def save(store, step, *, good=None, score=None):
    return store.save(
        CheckpointEntry(step=step, judged_good=good, score=score),
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


def test_the_index_survives_a_restart(tmp_path):
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
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "step_00000001"]
    assert list(reopened.entries) == [1]


def test_nothing_is_pickled(tmp_path):
    path = save(CheckpointStore(tmp_path, keep=1), 1)
    suffixes = {p.suffix for p in path.rglob("*") if p.is_file() and p.parent.name != "actor"}
    assert suffixes == {".json", ".safetensors"}
    assert json.loads((path / "manifest.json").read_text())["format"] == 1


def test_a_rollback_forgets_newer_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(store, step)
    store.forget_after(1)
    assert list(store.entries) == [1]
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000001"]
