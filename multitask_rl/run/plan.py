"""The plan of a run: everything that is read and checked before a model loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from multitask_rl.algorithms.anchor import measures_kl
from multitask_rl.algorithms.base import Algorithm
from multitask_rl.algorithms.grpo import GRPOConfig
from multitask_rl.boundary.printable import counted, shown_path
from multitask_rl.config.checks import FOREIGN_PREFIXES, FUNCTION_PREFIXES, check_entry_point
from multitask_rl.config.devices import resolve_devices, spans_machines
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import load_tasks, need_datasets, parse_tasks
from multitask_rl.constraints.satisfaction import constraint_warnings
from multitask_rl.data.loader import TaskDataLoader
from multitask_rl.data.pooled_stream import check_curriculum
from multitask_rl.data.readers import ReportedRows, Row, StreamedRows
from multitask_rl.data.render import check_rows, check_split
from multitask_rl.data.rows import fingerprint, load_both
from multitask_rl.errors import ConfigError, DataError, MissingExtraError, path_errors, require_extra
from multitask_rl.guard.base import Guard
from multitask_rl.models.actor import check_attention
from multitask_rl.plugins import (
    GUARDS,
    ROLLOUT_ENGINES,
    SCHEDULERS,
    TRACKERS,
    TRAINING_BACKENDS,
    absolute_reference,
    load_plugin,
)
from multitask_rl.records import DatasetRecord
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.rollout.snapshot import sampling_weights
from multitask_rl.run.learnable import check_learnable, learnable_warnings
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.step.task_state import build_algorithms, run_sampling
from multitask_rl.training.backend import TrainingBackend

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RunPlan:
    """A checked run."""

    config: RunConfig
    specs: dict[str, TaskSpec]
    algorithms: dict[str, Algorithm]
    rows: dict[str, tuple[Sequence[Row], Sequence[Row]]]
    """Task -> (training rows, held-out rows)."""
    devices: dict[str, str]
    backend_class: type[TrainingBackend]
    engine_class: type[RolloutEngine]
    engine: RolloutEngine | None = None
    """Given from Python; None = to be built."""

    @property
    def output_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.config.output_dir)

    @property
    def trained(self) -> list[str]:
        """Names of the tasks that are trained, in order."""
        return [name for name, spec in self.specs.items() if not spec.evaluation_only]

    @property
    def reported(self) -> set[str]:
        """Names of the tasks whose held-out rows are of the split ``test``: no controller reads them."""
        return {name for name, (_, held_out) in self.rows.items() if isinstance(held_out, ReportedRows)}

    def dataset_records(self) -> list[DatasetRecord]:
        """Return what each task trains on, if anything, and what it is evaluated on."""
        return [
            DatasetRecord(
                task=name,
                is_held_out=bool(is_held_out),
                source=(is_held_out and self.specs[name].eval_dataset) or self.specs[name].dataset,
                num_rows=None if isinstance(rows, StreamedRows) else len(rows),
                digest=partial(fingerprint, rows),
            )
            for name, parts in self.rows.items()
            for is_held_out, rows in enumerate(parts)
            if len(rows)
        ]

    def needs_reference(self, active: Collection[str]) -> bool:
        """Whether the run keeps its first weights, given the tasks that get prompts.

        It does if one of these has a KL term, or if any task measures the KL; with adapters the base model is
        the reference.
        """
        return not self.config.model.lora.rank and any(
            measures_kl(self.algorithms[name]) or (name in active and spec.kl.coefficient > 0)
            for name, spec in self.specs.items()
        )

    @property
    def num_parts(self) -> int:
        """Number of processes that divide the actor's weights among them."""
        return self.backend_class.num_parts(self.config)

    @property
    def has_parts(self) -> bool:
        """The actor's weights are not in this process's model."""
        return self.backend_class.has_parts(self.config)

    @property
    def samples_from_copy(self) -> bool:
        """The engine needs a whole copy of the actor in this process.

        It samples from the actor's weights, which updates change meanwhile, or which no process has whole.
        """
        is_needed = self.config.rollout_lag > 0 or self.has_parts
        return is_needed and self.engine_class.shares_weights and self.config.executor == "local"

    def describe(self) -> str:
        """Return the tasks, prompts and updates of a step, as text."""
        batch = self.config.batch
        lines = [
            f"{counted(len(self.trained), 'task')} trained, {len(self.specs) - len(self.trained)} evaluated "
            f"only; {counted(batch.prompts_per_step, 'prompt')} and "
            f"{counted(batch.num_epochs * batch.num_minibatches, 'optimizer update')} a step"
        ]
        for name, spec in self.specs.items():
            train, held_out = self.rows[name]
            size = spec.group_size or batch.group_size
            rows = "streamed rows" if isinstance(train, StreamedRows) else counted(len(train), "row")
            drawn = "a given answer each" if spec.kind == "sft" else f"{counted(size, 'rollout')} a prompt"
            use = "evaluated only" if spec.evaluation_only else f"{rows}, {drawn}"
            lines.append(f"  {name}: {spec.type}, {use}, {counted(len(held_out), 'held-out row')}")
        return "\n".join(lines)


def plan_run(
    config: RunConfig, dataloader: TaskDataLoader | None = None, engine: RolloutEngine | None = None
) -> RunPlan:
    """Read and check everything that needs no model; make the output directory.

    ``dataloader`` and ``engine`` are given in Python. Tasks that ``dataloader`` lacks need a ``dataset``.

    Raises:
        ConfigError: tasks file, keys, devices, or an output directory that cannot be written.
        PluginError: an unknown or broken plugin.
        DataError: missing or empty data, or a row without a column of its prompt.
        MissingExtraError: adapters without ``peft``, or an engine without its library.
    """
    if not config.output_dir.strip():
        raise ConfigError(
            "output_dir is empty; name a directory for the run's files, e.g. output_dir=runs/first"
        )
    # code of a user may change the working directory
    config = replace(config, output_dir=os.path.abspath(config.output_dir))
    resume = Path(config.checkpoint.resume)
    if str(resume) not in ("auto", "never") and not (resume / "manifest.json").is_file():
        run = resume / "checkpoints"
        problem = f"no checkpoint; those of the run are in {str(run)!r}" if run.is_dir() else "no checkpoint"
        raise ConfigError(
            f"checkpoint.resume={config.checkpoint.resume!r} is "
            f"{problem if resume.exists() else 'not there'}; give the directory of one "
            "(RUN/checkpoints/step_00000025), auto or never"
        )
    named = [("scheduler.policy", SCHEDULERS, config.scheduler.policy)]
    named += [("rollout.engine", ROLLOUT_ENGINES, config.rollout.engine)]
    named += [("training.backend", TRAINING_BACKENDS, config.training.backend)]
    named += [("tracking.trackers", TRACKERS, name) for name in config.tracking.trackers]
    if config.guard.enabled:
        named.append(("guard.plugin", GUARDS, config.guard.plugin))
    for key, group, name in named:
        check_entry_point(Where(path=(key,)), group, name)
        if group == TRACKERS and ":" in name:  # the others are loaded below, before a model, too
            load_plugin(group, name, expects="log_metrics", where=key)
    specs = load_specs(config)
    if dataloader is None:
        need_datasets(specs)
    others = spans_machines(config)
    devices = resolve_devices(config.device_map, tasks=list(specs), other_machines=others)
    check_attention(config.model, devices.get("actor", ""))
    if config.model.lora.rank:
        require_extra("peft", "peft", "model.lora.rank > 0 needs peft")
    backend_class: type[TrainingBackend] = load_plugin(
        TRAINING_BACKENDS, config.training.backend, expects=TrainingBackend, where="training.backend"
    )
    backend_class.check(config)
    if dataloader is not None:
        dataloader.check_tasks(list(specs))
    rows = load_task_rows(specs, dataloader)
    plan = RunPlan(
        config=config,
        specs=specs,
        algorithms=build_algorithms(specs),
        rows=rows,
        devices=devices,
        backend_class=backend_class,
        engine_class=type(engine)
        if engine is not None
        else load_plugin(
            ROLLOUT_ENGINES, config.rollout.engine, expects=RolloutEngine, where="rollout.engine"
        ),
        engine=engine,
    )
    if engine is None and config.executor != "ray":
        try:
            plan.engine_class.check()
        except MissingExtraError:
            raise
        except ImportError as error:
            raise MissingExtraError(
                f"rollout.engine={config.rollout.engine!r} cannot run here: {type(error).__name__}: {error}. "
                "Install what it needs, or choose another engine"
            ) from error
    rounds = engine is None and sampling_weights(plan.engine_class, config.rollout) == "bfloat16"
    if rounds and config.model.dtype == "float16":
        raise ConfigError(
            "rollout.engine_config.weights=bfloat16 samples under bfloat16 autocast, which cannot be "
            "combined with model.dtype=float16; set rollout.engine_config.weights=actor, or "
            "model.dtype=float32 or bfloat16"
        )
    for name, spec in specs.items():
        _check_task(spec, plan)
        check_curriculum(spec, rows[name][0])
        num_prompts = min(len(rows[name][1]), config.eval.num_prompts)
        warnings = constraint_warnings(spec, {}, num_prompts)
        for warning in [*warnings, *learnable_warnings(spec, plan.algorithms[name])]:
            logger.warning("task %s: %s", name, warning)
    _check_devices(plan)
    if config.executor == "ray" and config.batch.quorum < 1.0 and any(s.rewards for s in specs.values()):
        logger.warning(
            "batch.quorum=%g: with executor=ray a step goes on without slow worlds, and waits for all "
            "rewards, as the pools answer together",
            config.batch.quorum,
        )
    check_overlap(plan)
    if not any((plan.output_dir / "checkpoints").glob("step_*")):  # of a run, which `eval` only reads
        check_output_dir(plan.output_dir)
    return plan


def check_output_dir(directory: Path) -> None:
    """Make the output directory; raise a ``ConfigError`` if it cannot be written."""
    with path_errors("output_dir", directory, "another with output_dir=PATH"):
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".write_probe"
        probe.write_text("")
        probe.unlink()


def load_task_rows(
    specs: Mapping[str, TaskSpec], dataloader: TaskDataLoader | None
) -> dict[str, tuple[Sequence[Row], Sequence[Row]]]:
    """Return training rows and held-out rows by task, checked; log the warnings of ``check_split``.

    Of streamed rows the first are checked; later ones that lack a column are left out.
    """
    load = load_both if dataloader is None else dataloader.load_both
    rows: dict[str, tuple[Sequence[Row], Sequence[Row]]] = {}
    for name, spec in specs.items():
        rows[name] = load(spec)
        needs, parameters = _columns_read(spec)
        if warning := check_split(spec, *rows[name], needs=needs, parameters=parameters):
            logger.warning("task %s: %s", name, warning)
        train, held_out = rows[name]
        if isinstance(train, StreamedRows):
            rows[name] = (train.only(_HasColumns(spec)), held_out)
    return rows


def _columns_read(spec: TaskSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return what reads each column, of the columns that must hold something and of those that may be null.

    Rewards of ``reasoning_gym``, ``verifiers`` and ``evaluate``, which may be slow to build, are left out.
    They name a missing column when they score.
    """
    needs, parameters = dict[str, str](), dict[str, str]()
    named = [("reward", r.plugin, r.config) for r in spec.rewards]
    named += [("constraint", c.plugin, c.config) for c in spec.judged]
    for kind, reference, config in named:
        prefix = reference.partition(":")[0]
        if prefix not in FOREIGN_PREFIXES or prefix in FUNCTION_PREFIXES:
            source = find_plugin(kind, reference, f"{spec.where}.{kind}s")
            reader = f"{kind} {shown_path(reference)!r}"
            needs |= dict.fromkeys(source.traits.needs, reader)
            parameters |= dict.fromkeys(source.check(config), reader)
    return needs, parameters


class _HasColumns:
    """A filter: whether a streamed row has the columns that its task reads. The first without is logged."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec, self._is_told = spec, False

    def __call__(self, row: Row) -> bool:
        try:
            check_rows(self._spec, [row])
        except DataError as error:
            if not self._is_told:
                logger.warning("a streamed row is left out, as will be others of its kind: %s", error)
            self._is_told = True
            return False
        return True


def _check_devices(plan: RunPlan) -> None:
    """Refuse devices for parts that do not use the device map."""
    config, on_ray = plan.config, plan.config.executor == "ray"
    for role, device in plan.devices.items():
        kind, _, task = role.partition(".")
        if role == "rollout" and (on_ray or not plan.engine_class.shares_weights):
            keys = "ray.num_engines and ray.gpus_per_engine" if on_ray else "rollout.engine_config"
            raise ConfigError(
                f"device_map.rollout: the engine {config.rollout.engine!r} with executor={config.executor} "
                f"chooses its devices itself, by {keys}; leave rollout out"
            )
        if not task or device == "cpu":
            continue
        spec = plan.specs[task]
        plugins = [("constraint", c.plugin) for c in spec.judged]
        plugins += [("reward", r.plugin) for r in spec.rewards] if kind == "reward" else []
        found = (find_plugin(k, absolute_reference(name), f"tasks.{task}") for k, name in plugins)
        if not any(plugin.takes("device") for plugin in found):
            raise ConfigError(
                f"device_map.{role}: no {kind} of task {task!r} runs a model of its own on a device; leave "
                f"{role} out"
            )


def load_specs(config: RunConfig) -> dict[str, TaskSpec]:
    """Return the tasks of the file, overridden by those of the configuration.

    Raises:
        ConfigError: neither gives a task, or one is malformed.
    """
    if config.tasks_file:
        return load_tasks(config.tasks_file, config.tasks or None)
    if config.tasks:
        return parse_tasks({"tasks": config.tasks}, "the run configuration")
    raise ConfigError(
        "no tasks: output_dir holds no run to take them from; set tasks_file=path/to/tasks.yaml (or give "
        "tasks.<name>.* in the configuration), or the output_dir of a run"
    )


def _check_task(spec: TaskSpec, plan: RunPlan) -> None:
    """Refuse settings of a task that would have no effect, or that the run cannot provide."""
    config, algorithm, kl = plan.config, plan.algorithms[spec.name], spec.kl
    where = spec.where
    if any(c.mode == "lagrangian" for c in spec.constraints) and not algorithm.on_policy:
        raise ConfigError(
            f"{where}.constraints: mode lagrangian acts on advantages, which {spec.type} does not form; use "
            "mode penalty or reject, or another type"
        )
    if kl.target is not None and algorithm.wants_exact_kl:
        raise ConfigError(
            f"{where}.kl.target: {spec.type} measures no KL per response to steer by; leave the target out "
            "(the coefficient is then fixed)"
        )
    is_in_loss = kl.coefficient > 0 and kl.placement == "loss" and not algorithm.wants_exact_kl
    if is_in_loss and kl.estimator == "k1":
        raise ConfigError(
            f"{where}.kl.estimator: k1 in the loss has an expected gradient of 0 and holds nothing; take "
            "placement: reward (k1 inside the reward), or estimator: k2 (the same gradient) or k3 in the loss"
        )
    check_learnable(spec, algorithm, spec.group_size or config.batch.group_size)
    longest = spec.sampling_params(run_sampling(config)).max_new_tokens
    if spec.environment:
        longest = spec.max_response_tokens or longest * spec.max_turns
    algorithm.check_length(where, longest)
    if algorithm.num_control_tokens and config.model.lora.rank > 0:
        raise ConfigError(
            f"{where}.type: {spec.type} has control tokens and cannot train with model.lora.rank > 0: the "
            "tokens' embeddings would stay as they are; set model.lora.rank=0 or another type"
        )
    if spec.teacher and (plan.has_parts or config.batch.context_ranks > 1):
        raise ConfigError(
            f"{where}.teacher: a teacher is computed whole, and device_map.actor="
            f"{config.device_map.get('actor', 'cpu')!r}, training.backend={config.training.backend}, "
            f"batch.context_ranks={config.batch.context_ranks} cut models or sequences; leave sharded out, "
            "and set training.backend=torch and batch.context_ranks=1"
        )
    if measures_kl(algorithm) and config.model.reference_decay < 1.0:
        raise ConfigError(
            f"{where}: type anchor measures the KL to the initial weights, and model.reference_decay="
            f"{config.model.reference_decay:g} moves the reference; set model.reference_decay=1, or "
            "algorithm_config: {kl: false}"
        )
    own = spec.sampling.temperature if spec.has_own_temperature and spec.sampling else None
    if spec.eval_samples > 1 and (config.eval.temperature if own is None else own) == 0:
        key = "eval.temperature" if own is None else "sampling.temperature"
        raise ConfigError(
            f"{where}.eval_samples={spec.eval_samples} with {key}=0: greedy responses of a prompt "
            "are all the same; set eval_samples: 1, or a temperature above 0"
        )
    stop = spec.sampling_params(run_sampling(config)).stop
    if spec.grammar and stop:
        raise ConfigError(
            f"{where}.constraints: a grammar decides where a response ends, a stop string could cut it "
            f"before ({', '.join(map(repr, stop))}); set tasks.{spec.name}.sampling.stop=[]"
        )
    if spec.grammar and not plan.engine_class.can_constrain:
        raise ConfigError(
            f"{where}.constraints: mode grammar needs an engine that samples by it: rollout.engine=hf or "
            f"vllm, not {config.rollout.engine!r}; leave that constraint out, or set can_constrain in the "
            "engine's class if it follows SamplingParams.grammar"
        )
    if any(c.stream_every for c in spec.constraints) and not plan.engine_class.can_watch:
        raise ConfigError(
            f"{where}.constraints: stream_every needs an engine that can be watched while it generates: "
            f"rollout.engine=hf or vllm, not {config.rollout.engine!r}; leave stream_every out to judge "
            "whole responses"
        )


def training_warnings(plan: RunPlan, active: Sequence[str], guard: Guard | None) -> list[str]:
    """Return what a run should be told before it trains the tasks ``active``."""
    config = plan.config.eval
    unseen = ""
    if not config.num_prompts:
        unseen = (
            "eval.num_prompts=0: no task is evaluated. The guard judges nothing, no checkpoint is the best "
            "one, and the report has no held-out curve"
        )
    reach = reach_warning(config.every, guard.rollback_steps) if guard is not None else ""
    return [w for w in (unseen, reach, scale_warning({n: plan.algorithms[n] for n in active})) if w]


def scale_warning(algorithms: Mapping[str, Algorithm]) -> str:
    """Return a warning if only some tasks have unscaled gradients; "" if all or none have.

    Advantages without a divisor, and losses divided by the longest response, are several times smaller:
    beside other tasks they weigh less.
    """
    unscaled = {
        name
        for name, algorithm in algorithms.items()
        if algorithm.config.aggregation == "constant"
        or (isinstance(algorithm.config, GRPOConfig) and algorithm.config.normalisation == "none")
    }
    if not unscaled or len(unscaled) == len(algorithms):
        return ""
    return (
        f"advantages or losses of {', '.join(sorted(unscaled))} are unscaled (normalisation none, "
        "aggregation constant) and weigh less in the shared gradient than those of "
        f"{', '.join(sorted(set(algorithms) - unscaled))}; give the unscaled tasks algorithm_config "
        "{normalisation: task, aggregation: token}, a loss_weight, or all the same type"
    )


def reach_warning(every: int, reach: int) -> str:
    """Return a warning if the guard can never roll back; "" if it can.

    ``every`` is ``eval.every``, ``reach`` is ``guard.rollback_steps``.
    """
    if 0 < every <= reach:
        return ""
    return (
        f"guard: eval.every={every} and guard.rollback_steps={reach}: no weights judged good are within "
        f"reach of a rollback; set eval.every to 1 to {reach}, raise guard.rollback_steps, or turn it off"
    )


def check_overlap(plan: RunPlan) -> None:
    """Refuse to learn from stale or rounded samples without a correction, and a quorum of lockstep episodes.

    Raises:
        ConfigError: a task turned truncated importance sampling off, a quorum would leave slow worlds that
            lockstep waits for, or an engine given from Python would sample from weights while they move, or
            has settings in ``rollout.engine_config`` too.
    """
    config, engine = plan.config, plan.engine
    if engine is not None and (
        config.executor == "ray" or (engine.shares_weights and (config.rollout_lag > 0 or plan.has_parts))
    ):
        raise ConfigError(
            "an engine given from Python samples in this process from its own weights: use executor=local, "
            "and with an engine that shares the actor's weights rollout.max_staleness=0 and no sharded actor "
            "(enable_3d_hybrid_engine sets rollout.max_staleness=1)"
        )
    if engine is not None and (keys := sorted(config.rollout.engine_config)):
        raise ConfigError(
            f"rollout.engine_config ({', '.join(keys)}) is for an engine that the run builds, and one is "
            "given from Python; leave it out, and give the settings to that engine"
        )
    bound, quorum = config.rollout.max_staleness, config.batch.quorum
    is_rounded = (
        not config.model.autocast and sampling_weights(plan.engine_class, config.rollout) == "bfloat16"
    )
    for name, spec in plan.specs.items():
        if spec.environment and quorum < 1.0 and plan.config.rollout.lockstep:
            raise ConfigError(
                f"{spec.where}.environment: batch.quorum={quorum:g} lets a step go "
                "on without the episodes of slow worlds, so the clock decides what it learns from; "
                "rollout.lockstep=true makes every turn wait for the slowest world, so that a run can be "
                "repeated: set one of them to its default (batch.quorum=1, rollout.lockstep=false)"
            )
        algorithm = plan.algorithms[name]
        if not algorithm.on_policy or algorithm.config.truncated_is > 0:
            continue
        if bound > 0:
            cause, remedy = f"max_staleness={bound}", "rollout.max_staleness=0"
            difference = "samples are older than the weights they train"
        elif is_rounded:
            cause, remedy = "engine_config.weights=bfloat16", "model.autocast=true"
            difference = "sampling is less precise than training"
        else:
            continue
        raise ConfigError(
            f"{spec.where}.algorithm_config.truncated_is is 0, and with rollout.{cause} {difference}: "
            f"nothing would correct for it; give it a cap (default 2), or set {remedy}"
        )
