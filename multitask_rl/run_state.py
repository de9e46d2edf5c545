"""The whole state of a run on disk: written, read, resumed."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import Tensor

from multitask_rl.config.run import CheckpointConfig, RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.directory_lock import DirectoryLock
from multitask_rl.errors import CheckpointError, ConfigError
from multitask_rl.records import Event
from multitask_rl.tracking.jsonl import cut_after_step
from multitask_rl.training.checkpoint import (
    Checkpoint,
    CheckpointEntry,
    CheckpointStore,
    disk_errors,
    sync_tree,
)
from multitask_rl.training.critic import rename_head
from multitask_rl.training.vocabulary import fit_rows, fit_weights, vocabulary_rows

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from multitask_rl.task_run import TaskRun
    from multitask_rl.trainer import Trainer
    from multitask_rl.training.actor import Actor

__all__ = ["RunStore"]

logger = logging.getLogger(__name__)

_MAY_DIFFER = ("max_steps", "output_dir", "num_threads", "profile")
"""Settings that say how far and where, not what is learnt."""


class RunStore:
    """Checkpoints of one run and the reference policy beside them.

    Args:
        output_dir: of the run.
        config: which checkpoint it starts from.
        track: the run goes on; no other process may have it then. False: it is only looked at.

    Raises:
        ConfigError: another process trains into the directory.
    """

    def __init__(self, output_dir: Path, config: CheckpointConfig, *, track: bool = True) -> None:
        self._output_dir = output_dir
        self._config = config
        self._track = track
        with disk_errors(str(output_dir)):
            self._lock = DirectoryLock(output_dir) if track else None
        directory = output_dir / "checkpoints"
        try:
            if track and config.resume == "never" and any(directory.glob("step_*")):
                _set_aside(directory)
            with disk_errors(str(directory)):
                directory.mkdir(parents=True, exist_ok=True)
            self.checkpoints = CheckpointStore(directory, config.keep, is_writer=track)
            self._found = self._find()
        except BaseException:
            self.close()
            raise
        self.restored: Path | None = None
        """The checkpoint whose weights the run began with."""
        self.events: list[Event] = []
        """What is to be told of the resume."""

    def close(self) -> None:
        """Let others have the directory. Idempotent."""
        if self._lock is not None:
            self._lock.release()

    @property
    def timeline(self) -> Path:
        """Where the run notes who was busy when."""
        return self._output_dir / "timeline.jsonl"

    def _find(self) -> Checkpoint | None:
        if self._config.resume == "never":
            return None
        if self._config.resume == "auto":
            return self.checkpoints.newest()
        return self.checkpoints.load(Path(self._config.resume))

    def settle_vocabulary(self, actor: Actor) -> None:
        """Give ``actor`` the tokens of the checkpoint found: before anything is built that has their number.

        Raises:
            CheckpointError: they are another model's.
        """
        if self._found is not None:
            actor.keep_control_tokens(self._found.actor_dir)

    def reference(self, actor: Actor, runs: Mapping[str, TaskRun]) -> PreTrainedModel | None:
        """Return the frozen policy that the KL is measured against: the actor as it was at the very start.

        It is kept beside the checkpoints, so that a resumed run does not measure against itself. None: no
        task has a KL term, or adapters make the base model the reference.
        """
        if all(run.spec.kl.coefficient == 0 for run in runs.values()):
            return None
        directory = self._output_dir / "reference"
        reference = actor.clone_for_reference()
        if reference is None:
            return None
        if self._found is not None and directory.is_dir():
            from multitask_rl.training.actor import copy_weights, read_weights

            copy_weights(reference, fit_weights(reference, read_weights(directory)))
        elif self._track:
            _write_reference(reference, directory)
        return reference

    def resume(self, trainer: Trainer) -> str | None:
        """Restore the checkpoint found, if any; return the trackers' identity, if it is of this run.

        If the run goes on, what it recorded after the checkpoint is cut off.

        Raises:
            ConfigError: the run was made with another model.
        """
        track = self._track
        records = [path for path in (self._output_dir / "evaluations.jsonl", self.timeline) if path.exists()]
        if self._found is None:
            if track:
                # those that cannot be read would be the newest of the new run's, and outlive its own
                self.checkpoints.set_aside_after(-1)
            for path in records if track else ():
                _set_aside(path)
            return None
        changed = self._changed(trainer.config) if track else {}
        restore(trainer, self._found)
        if changed:
            self.events.append(_changed_event(trainer.step, changed))
        trainer.scorer.load_state_dict(self._found.state.get("scorer", {}))
        if track:
            self.checkpoints.set_aside_after(trainer.step)
        if trainer.guard is not None and self._found.state["guard"]:
            names = _renames(trainer, self._found.state)
            trainer.guard.load_state_dict(self._found.state["guard"], names)
        logger.info("resumed from %s at step %d", self._found.path, trainer.step)
        # who goes on from another run's checkpoint does not go on in its records
        is_own = self._found.path.resolve().parent == self.checkpoints.directory.resolve()
        self.restored = self._found.path
        run_id = self._found.state["run_id"] if is_own else None
        self._found = None
        for path in records if track else ():
            cut_after_step(path, trainer.step)
        return None if run_id is None else str(run_id)

    def _changed(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the keys whose values the run had otherwise: key -> (before, now)."""
        try:
            before = yaml.safe_load((self._output_dir / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            return {}  # of another run's checkpoint, or lost
        old = dict(_flat(before if isinstance(before, dict) else {}))
        new = dict(_flat(json.loads(json.dumps(dataclasses.asdict(config)))))
        model = "model.name_or_path"
        if old.get(model) and Path(str(old[model])).name != Path(str(new[model])).name:
            raise ConfigError(
                f"the run in {str(self._output_dir)!r} was made with {model}={old[model]!r}, and now it is "
                f"{new[model]!r}: its checkpoints would go on with the former weights. Choose another "
                "output_dir, or set checkpoint.resume=never to begin anew; if it is the same model under "
                "another name, correct config.yaml there"
            )
        return {key: (old.get(key), value) for key, value in new.items() if old.get(key, value) != value}

    def save(self, trainer: Trainer, *, judged_good: bool | None, score: float | None) -> None:
        """Write a checkpoint of everything."""
        self.checkpoints.save(
            CheckpointEntry(step=trainer.step, judged_good=judged_good, score=score),
            save_actor=trainer.actor.save,
            tensors=_tensors(trainer),
            state=_state(trainer),
        )

    def write_config(self, config: RunConfig, specs: Mapping[str, TaskSpec]) -> dict[str, Any]:
        """Write ``config.yaml`` (the resolved configuration, tasks included) and return it."""
        resolved = dataclasses.asdict(config)
        resolved["tasks"] = {name: dataclasses.asdict(spec) for name, spec in specs.items()}
        plain = json.loads(json.dumps(resolved))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
        with disk_errors(f"config.yaml in {self._output_dir}"):
            (self._output_dir / "config.yaml").write_text(text, encoding="utf-8")
        result: dict[str, Any] = plain
        return result


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer, controllers and random state of ``checkpoint`` into ``trainer``; not the guard.

    Tasks that the checkpoint does not know start fresh; those it knows under ``renamed_from`` are found;
    those that are gone are dropped.
    """
    names = _renames(trainer, checkpoint.state)
    trainer.actor.load_weights(checkpoint.actor_dir)
    state, tensors = checkpoint.state, _with_rows_of(trainer, checkpoint.tensors)
    prefix = "critic/"
    critic = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    trainer.critic.load_tensors(critic, renamed=names)
    optimizer = {
        rename_head(k.removeprefix("optimizer/"), names): v
        for k, v in tensors.items()
        if k.startswith("optimizer/")
    }
    trainer.learner.optimizer.load_tensors(optimizer, _parameters(trainer))
    if trainer.learner.runner.average is not None:
        reference = {
            k.removeprefix("reference/"): v for k, v in tensors.items() if k.startswith("reference/")
        }
        trainer.learner.runner.average.load_tensors(reference)
    saved: dict[str, Any] = state["tasks"]
    for name, run in trainer.runs.items():
        known = saved.get(name) or saved.get(run.spec.renamed_from)
        if known is not None:
            run.load_state_dict(known)
        else:
            logger.info("task %r is new since %s: it starts fresh", name, checkpoint.path)
    trainer.scheduler.load_state_dict(state["scheduler"], names)
    _restore_counters(trainer, state["counters"])
    _restore_random(state["random"], tensors)


def _with_rows_of(trainer: Trainer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with as many rows of tokens as the models of ``trainer`` have now."""
    trunk = trainer.critic.trunk
    models = {
        "optimizer/actor.": trainer.actor.model,
        "optimizer/critic.trunk.": trunk,
        "critic/trunk.": trunk,
        "reference/": trainer.learner.runner.reference,
    }
    rows: dict[str, int] = {}
    for prefix, model in models.items():
        if model is not None:
            rows.update({f"{prefix}{name}": number for name, number in vocabulary_rows(model).items()})
    fitted = dict(tensors)
    for name, value in tensors.items():
        number = rows.get(name.partition("|")[0])
        if number is not None and value.dim():
            fitted[name] = fit_rows(value, number, blank=name.startswith("optimizer/"))
    return fitted


def _renames(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, str]:
    """Former name -> name of the tasks renamed since ``state`` was saved; it may know them by the new one."""
    renamed = {s.renamed_from: n for n, s in trainer.plan.specs.items() if s.renamed_from}
    return {old: new for old, new in renamed.items() if new not in state["tasks"]}


def _state(trainer: Trainer) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, _, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "counters": _counters(trainer),
        "tasks": {name: run.state_dict() for name, run in trainer.runs.items()},
        "scheduler": trainer.scheduler.state_dict(),
        "scorer": trainer.scorer.state_dict(),
        "guard": trainer.guard.state_dict() if trainer.guard is not None else None,
        "run_id": trainer.run_id,
        "random": {
            "python": [version, list(internal), gauss],
            "numpy": [str(kind), int(position), int(has_gauss), float(cached)],
        },
    }


def _counters(trainer: Trainer) -> dict[str, int]:
    return {
        "step": trainer.step,
        "policy_version": trainer.actor.policy_version,
        "evaluated_at": trainer.supervisor.evaluated_at,
        "num_confirmations": trainer.supervisor.num_confirmations,
        "bad_updates": trainer.learner.bad_updates,
    }


def _restore_counters(trainer: Trainer, counters: Mapping[str, int]) -> None:
    """Restore ``_counters``; the checkpoint they come from counts as saved."""
    trainer.pipeline.clear()
    trainer.step = trainer.supervisor.saved_at = counters["step"]
    trainer.actor.policy_version = counters["policy_version"]
    trainer.supervisor.evaluated_at = counters["evaluated_at"]
    trainer.supervisor.num_confirmations = counters.get("num_confirmations", 0)
    trainer.learner.bad_updates = counters.get("bad_updates", 0)


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    names = {id(p): n for n, p in _parameters(trainer).items()}
    tensors = {f"critic/{k}": v for k, v in trainer.critic.tensors().items()}
    tensors.update({f"optimizer/{k}": v for k, v in trainer.learner.optimizer_tensors(names).items()})
    if trainer.learner.runner.average is not None:
        average = trainer.learner.runner.average.tensors()
        tensors.update({f"reference/{k}": v for k, v in average.items()})
    tensors["random/torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        for device, value in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"random/cuda/{device}"] = value
    _, keys, *_ = np.random.get_state(legacy=True)
    tensors["random/numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return tensors


def _restore_random(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, position, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (kind, tensors["random/numpy"].numpy().astype(np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(tensors["random/torch"])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"random/cuda/{i}" in tensors:
                torch.cuda.set_rng_state(tensors[f"random/cuda/{i}"], i)


def _parameters(trainer: Trainer) -> dict[str, nn.Parameter]:
    found = {f"actor.{n}": p for n, p in trainer.actor.model.named_parameters()}
    found.update({f"critic.{n}": p for n, p in trainer.critic.named_parameters()})
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif prefix or key not in _MAY_DIFFER:
            yield f"{prefix}{key}", value


def _changed_event(step: int, changed: Mapping[str, tuple[Any, Any]]) -> Event:
    told = ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
    return Event(step=step, source="run", kind="changed", reason=f"resumed with other settings: {told}")


def _write_reference(reference: PreTrainedModel, directory: Path) -> None:
    """Write all of it or nothing: a resumed run takes what is there."""
    aside = directory.with_name(f".writing_{directory.name}")
    try:
        with disk_errors(f"the reference policy {directory}"):
            shutil.rmtree(aside, ignore_errors=True)
            reference.save_pretrained(aside, safe_serialization=True)
            sync_tree(aside)
            shutil.rmtree(directory, ignore_errors=True)
            os.replace(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise CheckpointError(
            f"cannot set aside what a former run left in {path}: {error}; choose another output_dir"
        ) from error
    logger.info("a new run begins: what a former one left is kept in %s", aside)
