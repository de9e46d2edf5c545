"""The whole state of a run as data: collected for a checkpoint, put back from one."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.errors import CheckpointError, MultitaskRLError
from multitask_rl.models.vocabulary import fit_rows, vocabulary_rows
from multitask_rl.training.checkpoint import Checkpoint
from multitask_rl.training.critic import rename_head

if TYPE_CHECKING:
    from torch import nn

    from multitask_rl.trainer import Trainer

__all__ = ["collect_state", "collect_tensors", "reading_state", "renamed_tasks", "restore"]

logger = logging.getLogger(__name__)


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer, controllers and random state of ``checkpoint`` into ``trainer``; not the guard.

    Tasks that the checkpoint does not know start fresh; those it knows under ``renamed_from`` are found;
    those that are gone are dropped.
    """
    with reading_state(checkpoint):
        _restore(trainer, checkpoint)


@contextlib.contextmanager
def reading_state(checkpoint: Checkpoint) -> Iterator[None]:
    """Say of state that is not what this version writes where it is; its hashes are right, so it was edited.

    Every controller and plugin reads its own part, so anything may be raised that wrong types and missing
    keys lead to.
    """
    try:
        yield
    except MultitaskRLError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not hold what this version and these plugins write "
            f"({type(error).__name__}: {error}). Go on from another checkpoint with checkpoint.resume=DIR, "
            "or begin anew with checkpoint.resume=never"
        ) from error


def _restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    names = renamed_tasks(trainer, checkpoint.state)
    _check_counters(checkpoint.state["counters"])
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
    trainer.learner.backend.load_optimizer(optimizer, _parameters(trainer))
    if trainer.learner.backend.runner.average is not None:
        reference = {
            k.removeprefix("reference/"): v for k, v in tensors.items() if k.startswith("reference/")
        }
        trainer.learner.backend.runner.average.load_tensors(reference)
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
        "reference/": trainer.learner.backend.runner.reference,
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


def renamed_tasks(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, str]:
    """Former name -> name of the tasks renamed since ``state`` was saved; it may know them by the new one."""
    renamed = {s.renamed_from: n for n, s in trainer.plan.specs.items() if s.renamed_from}
    return {old: new for old, new in renamed.items() if new not in state["tasks"]}


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state of every controller, cursor and counter as JSON data."""
    version, internal, gauss = random.getstate()
    kind, _, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "counters": _counters(trainer),
        "tasks": {name: run.state_dict() for name, run in trainer.runs.items()},
        "scheduler": trainer.scheduler.state_dict(),
        "scorer": trainer.scorer.state_dict(),
        "guard": trainer.guard.state_dict() if trainer.guard is not None else None,
        "guard_class": type(trainer.guard).__name__,
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
    trainer.supervisor.num_confirmations = counters["num_confirmations"]
    trainer.learner.bad_updates = counters["bad_updates"]


def _check_counters(counters: Mapping[str, Any]) -> None:
    for name, value in counters.items():
        if type(value) is not int or value < -1:
            raise ValueError(f"counter {name!r} is {value!r}")
    if counters["step"] < 0:
        raise ValueError(f"step is {counters['step']!r}")


def collect_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return optimizer, critic, averaged reference and random state by name; not the actor's weights."""
    names = {id(p): n for n, p in _parameters(trainer).items()}
    tensors = {f"critic/{k}": v for k, v in trainer.critic.tensors().items()}
    tensors.update({f"optimizer/{k}": v for k, v in trainer.learner.backend.optimizer_tensors(names).items()})
    if trainer.learner.backend.runner.average is not None:
        average = trainer.learner.backend.runner.average.tensors()
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
