"""Training from Python objects: ``RLTrainer``, and ``PPOTrainer`` with the settings of PPO trainers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.config.devices import actor_devices
from multitask_rl.config.ppo import PPOConfig, new_run_directory
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.data import TaskDataLoader, get_dataloader, rows_of
from multitask_rl.data.readers import StreamedRows
from multitask_rl.data.rows import group_rows, load_both
from multitask_rl.errors import ConfigError, path_errors
from multitask_rl.models.actor import Actor, load_actor, make_actor
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.run.objects import name_objects
from multitask_rl.run.plan import load_specs
from multitask_rl.statistics.evaluations import Evaluations
from multitask_rl.trainer import Trainer
from multitask_rl.training.backends.build import serve_torchrun_rank
from multitask_rl.training.critic import Critic

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TASKS_FILE = Path("tasks.yaml")
DATA_FILE = Path("data/multi_task.jsonl")
TASK = "prompts"
"""Name of the task made of ``train(prompts)``."""
FEW = 32
"""Prompts below which all of them are trained on and evaluated, instead of a tenth being held out."""


class RLTrainer:
    """Trains a model on prompts and a reward function, or on the tasks of a tasks file.

    ``train(prompts)`` trains on one task: the prompts, ``algorithm`` and ``reward_fn``. ``train()`` trains on
    ``tasks``. Several calls go on with the same model; each is a run with a directory of its own
    (``trainer.run``: metrics, checkpoints, rollouts).

    Args:
        model: a causal language model of ``transformers``, its directory or Hugging Face id, an ``Actor``, or
            None.
        tokenizer: default: the one that comes with the model.
        algorithm: ``type`` of the task made of prompts (``ppo``, ``grpo``: see ``multitask-rl plugins list``)
        config: ``PPOConfig``, a mapping of its keys, or a whole ``RunConfig``.
        reward_fn: a function of responses, a class or object with ``score``, or the name of a reward; a list
            of them is added up. See ``docs/bring-your-reward.md``.
        model_name: directory or Hugging Face id, where ``model`` is None; default: ``config.model_name``.
        tasks: tasks file, or tasks as a mapping; default: ``tasks.yaml`` in the working directory.
        data: rows of the tasks that name no data set: a path, a list, a ``datasets.Dataset``; default:
            ``data/multi_task.jsonl`` in the working directory.
        critic: value function; default: heads on the actor where an algorithm needs them.
        engine: rollout engine that is already running (``vLLMAdapter``); default: that of ``config``.

    Raises:
        ConfigError: an unknown or wrong setting, both ``model`` and ``model_name``, or both ``tasks`` and
            ``reward_fn``.
    """

    def __init__(
        self,
        model: PreTrainedModel | Actor | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        algorithm: str = "ppo",
        config: PPOConfig | RunConfig | Mapping[str, Any] | None = None,
        reward_fn: Any = None,
        model_name: str = "",
        tasks: str | Path | Mapping[str, Any] | None = None,
        data: Any = None,
        critic: Critic | None = None,
        engine: RolloutEngine | None = None,
    ) -> None:
        model = str(model) if isinstance(model, Path) else model
        if model is not None and model_name:
            raise ConfigError("give either model or model_name, not both")
        if tasks is not None and reward_fn is not None:
            raise ConfigError("tasks have rewards of their own: leave reward_fn out, or tasks")
        self.config = config if isinstance(config, RunConfig) else PPOConfig.of(config)
        self.algorithm = algorithm
        self.reward_fn = reward_fn
        self.tasks = tasks
        self.data = data
        self.run: Trainer | None = None
        """The run of the last ``train``."""
        self._model = None if isinstance(model, str) else model
        self._model_name = model if isinstance(model, str) else model_name
        self._tokenizer = tokenizer
        self._critic = critic
        self._engine = engine
        self._actor: Actor | None = model if isinstance(model, Actor) else None

    @property
    def actor(self) -> Actor:
        """The model that is trained, with its tokenizer; loaded on first use.

        Raises:
            ConfigError: there is no model of that name, or it cannot be trained.
        """
        if self._actor is None:
            run = self.config if isinstance(self.config, RunConfig) else self.config.run_config(num_prompts=1)
            model = run.model
            if self._model is not None:
                self._actor = make_actor(self._model, self._tokenizer, model, run.seed)
            else:
                model = replace(model, name_or_path=self._model_name or model.name_or_path)
                device = actor_devices(run).names[0] if "actor" in run.device_map else ""
                self._actor = load_actor(model, device, run.seed, self._tokenizer)
        return self._actor

    def open(self, prompts: Any = None, num_epochs: int = 1) -> Trainer:
        """Return the run that ``train`` would make, not begun: for stages, guards, schedulers, steps by hand.

        Arguments and errors are those of ``train``.
        """
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise ConfigError(f"num_epochs must be a whole number >= 1, got {num_epochs!r}")
        serve_torchrun_rank()
        if prompts is not None and self.tasks is not None:
            raise ConfigError(
                "tasks have rows of their own: call train() without prompts, or leave tasks out"
            )
        if prompts is not None:
            tasks: Any = self._task_of_prompts()
            data: Any = _loader_of(prompts)
        else:
            tasks = self.tasks if self.tasks is not None else TASKS_FILE
            if self.tasks is None and not TASKS_FILE.is_file():
                raise ConfigError(
                    f"no tasks: give train(prompts) with reward_fn, tasks=..., or a file {TASKS_FILE} in the "
                    f"working directory {Path.cwd()}"
                )
            data = _task_rows(tasks, self.data)
        if isinstance(self.config, RunConfig):
            run = self.config
        else:
            config = replace(self.config, output_dir=self.config.output_dir or new_run_directory())
            given, data = name_objects(RunConfig(output_dir=config.output_dir), tasks, data)
            tasks = None if given.tasks else tasks
            load = load_both if data is None else data.load_both
            rows = [load(spec)[0] for spec in load_specs(given).values()]
            if not config.max_steps and any(isinstance(own, StreamedRows) for own in rows):
                raise ConfigError(
                    "the rows are streamed: their number, and so the length of an epoch, is not known; give "
                    "max_steps in the configuration"
                )
            num_prompts = sum(map(len, rows))
            max_length = self.actor.max_length
            run = config.run_config(num_prompts=num_prompts, num_epochs=num_epochs, max_length=max_length)
            model = replace(run.model, name_or_path=self.actor.config.name_or_path)
            run = replace(run, tasks=given.tasks, model=model)
        if data is not None:
            data.batch_size = run.batch.prompts_per_step
        self.run = Trainer(self.actor, self._critic, data, tasks, config=run, engine=self._engine)
        return self.run

    def train(self, prompts: Any = None, num_epochs: int = 1) -> Evaluations:
        """Train, and return the last evaluation by task, which prints as a table.

        Args:
            prompts: what the task ``prompts`` is trained on: a list of texts or rows, a ``datasets.Dataset``,
                or a path; None = the tasks of ``tasks``.
            num_epochs: passes over the prompts, where the configuration gives no ``max_steps``.

        Raises:
            ConfigError: no tasks, no reward, or settings that do not fit.
            GuardStop, TrainingError, RewardError, CheckpointError: see ``Trainer.train``.
        """
        with self.open(prompts, num_epochs) as run:
            return run.train()

    def save(self, directory: str | Path) -> None:
        """Write the trained model and its tokenizer as a Hugging Face directory.

        Raises:
            ConfigError: ``directory`` cannot be made.
        """
        with path_errors("save:", directory, "a directory that can be written"):
            Path(directory).mkdir(parents=True, exist_ok=True)
        self.actor.save(Path(directory))

    def _task_of_prompts(self) -> dict[str, Any]:
        if self.reward_fn is None:
            raise ConfigError(
                "train(prompts) needs reward_fn: a function that gives every response a number, or the name "
                "of a reward (`multitask-rl plugins list`)"
            )
        rewards = self.reward_fn if isinstance(self.reward_fn, (list, tuple)) else [self.reward_fn]
        task: dict[str, Any] = {"type": self.algorithm, "rewards": list(rewards)}
        if isinstance(self.config, PPOConfig) and self.config.kl_coef:
            task["kl"] = {"coefficient": self.config.kl_coef}
        return {TASK: task}


class PPOTrainer(RLTrainer):
    """``RLTrainer`` with PPO, from settings alone.

    Args:
        config: ``get_ppo_default_config()`` after changes, any part of it, or a ``PPOConfig``.
        further: as of ``RLTrainer``.

    Raises:
        ConfigError: an unknown or wrong setting.
    """

    def __init__(self, config: PPOConfig | Mapping[str, Any] | None = None, **further: Any) -> None:
        super().__init__(config=config, algorithm="ppo", **further)


def _loader_of(prompts: Any) -> TaskDataLoader:
    """Return the prompts as rows of the task, whatever their split is; few rows are held out as well."""
    tagged = group_rows(rows_of(prompts, "prompts"))
    if len(tagged) > 1:
        raise ConfigError(
            f"prompts: the rows name {len(tagged)} tasks ({', '.join(map(repr, tagged))}); give RLTrainer "
            "tasks=... and the rows as data=..."
        )
    splits = dict(next(iter(tagged.values())))
    if len(splits) == 1 and not isinstance(next(iter(splits.values())), StreamedRows):
        splits = {"": next(iter(splits.values()))}
    if set(splits) == {""} and len(splits[""]) < FEW:
        splits["validation"] = splits[""]
    return TaskDataLoader(splits={TASK: splits})


def _task_rows(tasks: Any, data: Any) -> TaskDataLoader | None:
    """Return the rows of tasks that name no data set of their own; None if all do."""
    raw = load_yaml(tasks)[0] if isinstance(tasks, (str, Path)) else tasks
    raw = raw.get("tasks", raw) if isinstance(raw, Mapping) else {}
    listed = raw.items() if isinstance(raw, Mapping) else [(t.get("name"), t) for t in raw]
    names = [name for name, task in listed if isinstance(task, Mapping) and not task.get("dataset")]
    if data is None and names and DATA_FILE.is_file():
        data = DATA_FILE
    if data is None or not names:
        return None
    loader = get_dataloader(data)
    return replace(loader, splits={name: own for name, own in loader.splits.items() if name in names})
