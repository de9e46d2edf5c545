"""The state of a run as data: ``{name: part}``, written to a checkpoint and restored from one."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.curriculum.signal import REWARD_SCORE
from multitask_rl.errors import CheckpointError, MultitaskRLError
from multitask_rl.executor.scorer import RunScorer
from multitask_rl.guard.base import Guard
from multitask_rl.models.actor import Actor, fit_rows, read_weights, vocabulary_rows
from multitask_rl.records import Event, TaskEvaluation, rename_tasks
from multitask_rl.run.checkpoint import Checkpoint
from multitask_rl.statistics.definitions import REWARD
from multitask_rl.step.task_state import TaskState
from multitask_rl.training.critic import Critic, rename_head
from multitask_rl.training.learner import Learner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    save: Callable[[], dict[str, Any]]
    """Return everything that changes: JSON data, or tensors by name."""
    load: Callable[[Any, Mapping[str, str]], None]
    """Restore what ``save`` returned; the second argument maps former task names to the present ones."""


@dataclass(kw_only=True, slots=True)
class RunProgress:
    """Counters, evaluations and events of a run; a checkpoint holds the counters only."""

    step: int = 0
    """Steps made."""
    evaluated_at: int = -1
    """Step of the last evaluation."""
    saved_at: int = -1
    """Step of the last checkpoint."""
    num_confirmations: int = 0
    """Confirmations since the start, rollbacks included; each has its own seeds."""
    history: list[tuple[int, dict[str, TaskEvaluation]]] = field(default_factory=list)
    """Step and evaluations since the process began; not in checkpoints."""
    events: list[Event] = field(default_factory=list)
    """Decisions since the process began; not in checkpoints."""


class RunState:
    """The parts of a run that change, by their names in a checkpoint; the actor's weights have own files."""

    def __init__(
        self,
        progress: RunProgress,
        actor: Actor,
        critic: Critic,
        learner: Learner,
        tasks: Mapping[str, TaskState],
        scheduler: DynamicTaskWeightScheduler,
        scorer: RunScorer,
        guard: Guard | None,
        reference_dir: Path,
    ) -> None:
        self.actor, self.guard, self._reference_dir = actor, guard, reference_dir
        self.progress, self._critic, self._learner, self._tasks = progress, critic, learner, tasks

        def load_scorer(state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
            scorer.load_state_dict({renamed.get(task, task): own for task, own in state.items()})

        def load_scheduler(state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
            former = {new: old for old, new in renamed.items()}
            metric = scheduler.policy_config.metric_key
            metric = REWARD if metric == REWARD_SCORE else metric
            redefined = {
                former.get(name, name): name for name, task in tasks.items() if task.is_redefined(metric)
            }
            # levels of other rewards say nothing: the task starts fresh, as one that the checkpoint lacks
            fresh = {old: "" for old, name in redefined.items() if renamed.get(old, name) == name}
            scheduler.load_state_dict(state, {**renamed, **fresh})
            if fresh:  # such a task keeps the guard's factor and the prompts that it is owed
                scheduler.carry = rename_tasks(state["carry"], renamed, scheduler.tasks)
                scheduler.set_factors(rename_tasks(state["factors"], renamed, tasks))

        def load_guard(state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
            assert guard is not None
            guard.load_state_dict(state, renamed)
            guard.forget_rewards([name for name, task in tasks.items() if task.is_redefined()])
            guard.forget_tasks(self._untrained)

        def load_critic(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> None:
            critic.load_tensors(_fit(tensors, {"trunk.": critic.trunk}), renamed)

        self.has_new_tasks = False
        """The checkpoint that was restored has other tasks, or other rewards in one of them."""
        self.former_names: Mapping[str, Sequence[str]] = {}
        """Former names of tasks that earlier resumes have renamed."""
        self.unmeasured: list[str] = []
        """Tasks that the restored checkpoint lacks, or whose primary metric it measures otherwise. One saved
        behind a rollback names them itself: their evaluation at its step comes later."""
        self._untrained: list[str] = []
        """Tasks of the restored checkpoint, by their present names, that are not trained now."""
        self._fresh = {name: task.state_dict() for name, task in tasks.items()}
        """State of each task before the run's first step."""
        self._parts: dict[str, _Part | None] = {
            "counters": _Part(self._counters, self._load_counters),
            "tasks": _Part(self._task_states, self._load_tasks),
            "scheduler": _Part(scheduler.state_dict, load_scheduler),
            "scorer": _Part(scorer.state_dict, load_scorer),
            "guard": None if guard is None else _Part(guard.state_dict, load_guard),
            "random": _Part(_random_data, _load_random_data),
        }
        self._tensors = {
            "critic": _Part(critic.tensors, load_critic),
            "optimizer": _Part(self._optimizer_tensors, self._load_optimizer),
            "reference": _Part(self._reference_tensors, self._load_reference),
            "random": _Part(_random_tensors, _load_random_tensors),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON data of every part."""
        return {name: part.save() if part is not None else None for name, part in self._parts.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of every part as ``<part>/<name>``, without the actor's weights."""
        return {
            f"{name}/{key}": value
            for name, part in self._tensors.items()
            for key, value in part.save().items()
        }

    def restore(self, checkpoint: Checkpoint, *, without: Collection[str] = ()) -> None:
        """Restore ``checkpoint``, the actor's weights first.

        A task that the checkpoint lacks starts fresh, or takes over the state under its ``renamed_from`` or
        an earlier name. The state of a removed task is dropped. The parts ``without`` stay as they are.

        Raises:
            CheckpointError: a part cannot be read.
        """
        try:
            renamed = self._renamed(checkpoint.state["tasks"])
            counters = checkpoint.state["counters"]
            for name, value in counters.items():
                if type(value) is not int or value < (0 if name == "step" else -1):
                    raise ValueError(f"counter {name!r} is {value!r}")
            self.actor.load_weights(checkpoint.actor_dir)
            for name, tensors in self._tensors.items():
                found = ((key.partition("/"), value) for key, value in checkpoint.tensors.items())
                tensors.load({key: value for (part, _, key), value in found if part == name}, renamed)
            for name, data in self._parts.items():
                if data is not None and name not in without and checkpoint.state[name] is not None:
                    data.load(checkpoint.state[name], renamed)
        except MultitaskRLError:
            raise
        # the hashes are right, so the state was edited or is another version's: any part may fail on it
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"{checkpoint.path} does not hold what this version and these plugins write "
                f"({type(error).__name__}: {error}). Go on from another checkpoint with checkpoint.resume="
                "DIR, or begin anew with checkpoint.resume=never"
            ) from error

    def _renamed(self, known: Collection[str]) -> dict[str, str]:
        """Return former name -> name of the tasks that ``known`` has under a former name only."""
        renamed = {}
        for name, task in self._tasks.items():
            names = [task.spec.renamed_from, *self.former_names.get(name, ())]
            if name not in known and (old := next((own for own in names if own in known), "")):
                renamed[old] = name
        return renamed

    def _counters(self) -> dict[str, Any]:
        return {
            "step": self.progress.step,
            "policy_version": self.actor.policy_version,
            "evaluated_at": self.progress.evaluated_at,
            "num_confirmations": self.progress.num_confirmations,
            "bad_updates": self._learner.bad_updates,
        }

    def _load_counters(self, state: Mapping[str, int], _renamed: Mapping[str, str]) -> None:
        self.progress.step = self.progress.saved_at = state["step"]
        self.progress.evaluated_at = state["evaluated_at"]
        self.progress.num_confirmations = state["num_confirmations"]
        self.actor.policy_version = state["policy_version"]
        self._learner.bad_updates = state["bad_updates"]

    def _task_states(self) -> dict[str, Any]:
        states = {name: task.state_dict() for name, task in self._tasks.items()}
        return {name: own | {"is_unmeasured": name in self.unmeasured} for name, own in states.items()}

    def _load_tasks(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        self.unmeasured = []
        former = {new: old for old, new in renamed.items()}
        gone = sorted(state.keys() - self._tasks.keys() - renamed.keys())
        told = f"; if it is {' or '.join(gone)} under a new name, stop the run and set renamed_from"
        hint = told if gone else ""
        for name, task in self._tasks.items():
            known = state.get(former.get(name, name))
            if known is None:
                logger.info("task %r is new since the checkpoint: it starts fresh%s", name, hint)
            # first to its beginning: what the checkpoint lacks may be of weights that a rollback discards
            task.load_state_dict(copy.deepcopy(self._fresh[name]))
            if known is not None:
                task.load_state_dict(known)
            if known is None or known.get("is_unmeasured") or task.has_other_values:
                self.unmeasured.append(name)
        trained = {name for name, task in self._tasks.items() if task.stream is not None}
        self._untrained = sorted({renamed.get(name, name) for name in state} - trained)
        is_same = len(state) == len(self._tasks) and not gone
        self.has_new_tasks = not is_same or any(task.is_redefined() for task in self._tasks.values())

    def _parameters(self) -> dict[str, nn.Parameter]:
        found = {f"actor.{n}": p for n, p in self.actor.model.named_parameters()}
        return found | {f"critic.{n}": p for n, p in self._critic.named_parameters()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state, by names of parameters (``actor.``..., ``critic.``...)."""
        names = {id(p): name for name, p in self._parameters().items()}
        return self._learner.backend.optimizer_tensors(names)

    def _load_optimizer(self, tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> None:
        models = {"actor.": self.actor.model, "critic.trunk.": self._critic.trunk}
        fitted = {rename_head(name, renamed): v for name, v in _fit(tensors, models, blank=True).items()}
        self._learner.backend.load_optimizer(fitted, self._parameters())

    def _reference_tensors(self) -> dict[str, Tensor]:
        """Return the averaged reference, if the run has one."""
        average = self._learner.backend.runner.average
        return average.tensors() if average is not None else {}

    def _load_reference(self, tensors: Mapping[str, Tensor], _renamed: Mapping[str, str]) -> None:
        runner = self._learner.backend.runner
        if runner.average is None:
            return
        if not tensors and self._reference_dir.is_dir():
            # the checkpoint's reference was fixed: what has moved since follows weights that are undone
            tensors = read_weights(self._reference_dir, runner.reference)
        runner.average.load_tensors(_fit(tensors, {"": runner.reference}))


def _random_data() -> dict[str, Any]:
    """Return the global random streams of Python and NumPy."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"python": [version, list(internal), gauss], "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _load_random_data(state: Mapping[str, Any], _renamed: Mapping[str, str]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))


def _random_tensors() -> dict[str, Tensor]:
    """Return the random streams of torch."""
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for device, value in enumerate(torch.cuda.get_rng_state_all()):
            found[f"cuda/{device}"] = value
    return found


def _load_random_tensors(tensors: Mapping[str, Tensor], _renamed: Mapping[str, str]) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            if f"cuda/{device}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda/{device}"], device)


def _fit(
    tensors: Mapping[str, Tensor], models: Mapping[str, nn.Module | None], *, blank: bool = False
) -> dict[str, Tensor]:
    """Return ``tensors`` with the present number of vocabulary rows.

    Names are ``<parameter name>`` or ``<parameter name>|<key>``; ``models`` maps their prefixes to models.
    With ``blank`` new rows are 0.
    """
    rows: dict[str, int] = {}
    for prefix, model in models.items():
        if model is not None:
            rows.update({f"{prefix}{name}": number for name, number in vocabulary_rows(model).items()})
    fitted = dict(tensors)
    for name, value in tensors.items():
        number = rows.get(name.partition("|")[0])
        if number is not None and value.dim():
            fitted[name] = fit_rows(value, number, blank=blank)
    return fitted
