"""What a run reads back from its directory is what it wrote, or it is refused with words."""

import shutil

import pytest
import torch

from model_builders import build_actor
from multitask_rl.config.run import CheckpointConfig
from multitask_rl.errors import CheckpointError
from multitask_rl.run.checkpoint import CheckpointEntry
from multitask_rl.run.store import RunStore


def reference(directory, actor):
    store = RunStore(directory, CheckpointConfig())
    try:
        return store.reference(actor)
    finally:
        store.close()


@pytest.fixture
def run(tmp_path):
    """A directory with one checkpoint and the reference of ``build_actor(0)``."""
    reference(tmp_path, build_actor(0))
    store = RunStore(tmp_path, CheckpointConfig())
    store.checkpoints.save(CheckpointEntry(step=0), save_actor=lambda d: None, tensors={}, state={})
    store.close()
    return tmp_path


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_reference_is_what_the_run_began_with(run):
    assert equal(reference(run, build_actor(1)), build_actor(0).model)


def test_a_fork_has_the_reference_of_the_run_that_it_begins_from(run, tmp_path):
    trained = build_actor(1)
    trained.policy_version = 4
    resume = str(next((run / "checkpoints").glob("step_*")))
    for number in range(2):  # the second one finds the copy that the first has made
        store = RunStore(tmp_path / "fork", CheckpointConfig(resume=resume))
        assert equal(store.reference(trained), build_actor(0).model), number
        store.close()
    assert (tmp_path / "fork" / "reference" / "manifest.json").is_file()


def test_trained_weights_do_not_become_the_reference_of_a_run_that_has_none(run):
    shutil.rmtree(run / "reference")
    trained = build_actor(1)
    trained.policy_version = 4
    with pytest.raises(CheckpointError, match=r"has made 4 steps.* give a model that holds these"):
        reference(run, trained)


def test_a_copied_checkpoint_with_the_averaged_reference_needs_no_other(run, tmp_path):
    """Trained weights are not written as the reference: a later run without the average would read them."""
    trained = build_actor(1)
    trained.policy_version = 4
    store = RunStore(run, CheckpointConfig())
    averaged = {f"reference/{name}": value for name, value in build_actor(0).model.named_parameters()}
    made = store.checkpoints.save(
        CheckpointEntry(step=1), save_actor=lambda d: None, tensors=averaged, state={}
    )
    store.close()
    copied = shutil.copytree(made, tmp_path / "elsewhere" / "copied")
    store = RunStore(tmp_path / "fork", CheckpointConfig(resume=str(copied)))
    assert store.reference(trained, follows=True) is not None
    assert not store.reference_dir.exists()
    with pytest.raises(CheckpointError, match=r"has made 4 steps"):
        store.reference(trained)
    store.close()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "zero", "delete"])
def test_a_damaged_reference_is_refused_and_deleted_it_is_made_anew(run, name, damage):
    file = run / "reference" / name
    written = file.read_bytes()
    middle = len(written) - 20
    damaged = {
        "flip": written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :],
        "cut": written[:middle],
        "zero": written[:middle] + bytes(20),
    }
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"the reference policy, .*, is damaged: .*or delete it"):
        reference(run, build_actor(1))
    for file in (run / "reference").iterdir():
        file.unlink()
    (run / "reference").rmdir()
    assert equal(reference(run, build_actor(1)), build_actor(1).model)


def test_a_record_that_is_deleted_while_the_run_writes_it_is_missed(tmp_path):
    store = RunStore(tmp_path, CheckpointConfig())
    store.check()
    (tmp_path / "metrics.jsonl").touch()
    store.check()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl was deleted or replaced"):
        store.check()
    store.close()
