"""The state of each task in a run: specification, algorithm, controllers and data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.data import PooledStream, PromptStream, StreamedPrompts, render_prompt
from multitask_rl.data.readers import ReportedRows, Row, StreamedRows
from multitask_rl.data.render import check_template, end_token, render_answer, render_content
from multitask_rl.data.rows import fingerprint, row_id
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.models.actor import Actor
from multitask_rl.plugins import ALGORITHMS, build_plugin, check_config_extends, load_plugin
from multitask_rl.records import Event, Prompt, SamplingParams, TaskStats
from multitask_rl.seeding import random_stream
from multitask_rl.statistics.definitions import (
    REWARD,
    TaskMetrics,
    are_different,
    definition_of,
    definitions,
    sampling_hash,
)
from multitask_rl.training.backend import LearnerTask

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class AnchorState:
    """What later evaluations of an anchor are compared with; set at its first evaluation."""

    responses: dict[str, list[int]] = field(default_factory=dict)
    """``Prompt.row_id``, with a hash of the row if several have it -> response of the actor at that time."""
    measured: list[str] = field(default_factory=list)
    """What ``solved`` is of (``definitions.measured``); empty before the first evaluation."""
    solved: list[float] = field(default_factory=list)
    """Share of each prompt's responses that solved it."""


@dataclass(kw_only=True, slots=True)
class TaskState:
    """A task in a run: its specification, and everything of it that changes."""

    spec: TaskSpec
    algorithm: Algorithm
    sampling: SamplingParams
    group_size: int
    kl: KLController
    learner: LearnerTask
    metrics: TaskMetrics = field(init=False)
    """Definitions of its numbers."""
    multipliers: dict[str, LagrangeMultiplier] = field(default_factory=dict)
    """Constraint of mode ``lagrangian`` -> multiplier."""
    stream: PromptStream | None = None
    """None: the task is evaluated only."""
    paused: Mapping[str, Any] | None = None
    """State of the stream that a task had before it was evaluated only."""
    held_out: Sequence[Row] = ()
    """Held-out rows of the task."""
    held_out_by: tuple[int, str, int] = (0, "", 0)
    """What chooses the rows to evaluate: seed and name of the task when the run began, and their number."""
    eval_rows: Sequence[Row] = field(init=False)
    """The rows to evaluate: always the same ones in the same order."""
    eval_temperature: float = 1.0
    """``eval.temperature``."""
    only_reported: bool = False
    """The held-out rows are of the split ``test``: no controller reads their results."""
    max_prompt_tokens: int = 0
    """0 = no limit."""
    anchor: AnchorState = field(default_factory=AnchorState)
    former_definitions: Mapping[str, str] = field(default_factory=dict)
    """``definitions`` of the checkpoint that was restored."""
    former_measuring: str = ""
    """``measuring`` of the checkpoint that was restored."""
    warnings: list[str] = field(default_factory=list)
    """Texts since the last ``take_warnings``, which makes events of them."""
    warned_of: list[str] = field(default_factory=list)
    """Those that the settings gave when the task was built."""
    taken: set[str] = field(default_factory=set)
    """Those that ``take_warnings`` has returned in this process: a rollback to before them repeats none."""
    told_of_tools: bool = False
    """Whether it is known if the prompts of its episodes show the tools; a warning comes once."""
    num_overlong: int = 0
    """Training prompts left out since the start because they did not fit."""
    told_of_overlong: bool = False
    """The warning of the first of them was given. It comes once, also if they are drawn again."""

    def __post_init__(self) -> None:
        """Define the task's numbers; choose the rows to evaluate."""
        self.metrics = TaskMetrics(self.spec, self.algorithm)
        self.choose_held_out(self.held_out_by)

    def choose_held_out(self, by: Sequence[Any]) -> None:
        """Choose the rows to evaluate by seed and name of ``by``: a renamed task keeps its rows.

        Their number is that of this run's configuration.
        """
        (seed, name), number = by[:2], self.held_out_by[2]
        self.held_out_by = (seed, name, number)
        if len(self.held_out) > number:
            chosen = random_stream(seed, "eval-rows", name).sample(range(len(self.held_out)), number)
            self.eval_rows = [self.held_out[i] for i in chosen]
        else:
            self.eval_rows = list(self.held_out)

    def is_redefined(self, metric: str = REWARD) -> bool:
        """Whether the restored checkpoint defines ``metric`` in another way; False if a hash is not known."""
        now = definition_of(definitions(self.spec), metric)
        return are_different(now, definition_of(self.former_definitions, metric))

    @property
    def eval_sampling(self) -> SamplingParams:
        """Sampling of evaluations: at the task's own temperature or ``eval.temperature``.

        A task that nothing scores has the sampling of training.
        """
        scored = self.spec.is_scored
        return self.spec.evaluated_at(self.sampling, self.eval_temperature) if scored else self.sampling

    @property
    def measuring(self) -> str:
        """Hash of what evaluations depend on: rows, form and length of prompts, sampling, control tokens."""
        spec, condition = self.spec, self.algorithm.condition([], evaluation=True)
        sampling = sampling_hash(self.eval_sampling, condition)
        form = [
            spec.prompt,
            spec.system,
            spec.chat,
            spec.chat_template_kwargs,
            spec.tools_column,
            spec.answer,
            self.max_prompt_tokens,
        ]
        return fingerprint([{"rows": fingerprint(self.eval_rows), "form": form, "sampling": sampling}])

    @property
    def has_other_values(self) -> bool:
        """Whether the restored checkpoint has another ``measuring``, or defines the primary metric otherwise.

        False if it does not say.
        """
        return self.is_redefined("") or are_different(self.measuring, self.former_measuring)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes, as JSON data."""
        return {
            "type": self.spec.type,
            "definitions": definitions(self.spec),
            "algorithm": self.algorithm.state_dict(),
            "kl": self.kl.state_dict(),
            "multipliers": {name: m.state_dict() for name, m in self.multipliers.items()},
            "stream": self.stream.state_dict() if self.stream else self.paused,
            "num_overlong": self.num_overlong,
            "told_of_overlong": self.told_of_overlong,
            "told_of_tools": self.told_of_tools,
            "warnings": list(self.warnings),
            "warned_of": list(self.warned_of),
            "held_out": fingerprint(self.eval_rows),
            "measuring": self.measuring,
            "held_out_by": list(self.held_out_by),
            "refused_values": self.metrics.state_dict(),
            "earned": self.metrics.earned_dict(),
            **({"anchor": asdict(self.anchor)} if self.spec.kind == "anchor" else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; what a changed setting makes useless starts fresh, with a warning."""
        name, kind = self.spec.name, state["type"]
        self.former_definitions = state["definitions"]
        new_rules = {name for name in self.multipliers if self.is_redefined(f"rule/{name}")}
        if kind == self.spec.type:
            self.algorithm.load_state_dict(state["algorithm"])
        else:
            logger.warning("task %r was of type %s: its %s starts fresh", name, kind, self.spec.type)
        stream = state["stream"]
        if self.is_redefined():
            logger.warning(
                "task %r: its reward is defined otherwise than before: level, scale, rejected values, "
                "difficulty pools and stored samples start fresh",
                name,
            )
            if stream and stream.get("curriculum"):
                stream = {**stream, "curriculum": {"last_draw": stream["curriculum"]["last_draw"]}}
        self.kl.load_state_dict(state["kl"])
        beta, saved = self.kl.coefficient, state["kl"]["coefficient"]
        if beta != saved:
            logger.warning("task %r: kl.coefficient goes on with %g, it was %g", name, beta, saved)
        changed = new_rules | (
            self.multipliers.keys() ^ state["multipliers"].keys()
        )  # also new and removed ones
        redefined = {f"cost/{name}" for name in changed} | ({"reward"} if self.is_redefined() else set())
        self.algorithm.forget(redefined)
        for constraint, multiplier in self.multipliers.items():
            if constraint in new_rules:
                logger.warning(
                    "task %r: the constraint %r is of another rule than before: its multiplier starts fresh",
                    name,
                    constraint,
                )
            elif constraint in state["multipliers"]:
                multiplier.load_state_dict(state["multipliers"][constraint])
        if self.stream is None:
            self.paused = stream
        elif stream:
            self.stream.load_state_dict(stream)
        self.num_overlong = state["num_overlong"]
        self.told_of_overlong |= state.get("told_of_overlong", self.num_overlong > 0)
        # a change of world or prompt is looked at anew
        self.told_of_tools |= state.get("told_of_tools", False) and not self.is_redefined()
        known = state.get("warned_of", ())
        warnings = [*state.get("warnings", ()), *(w for w in self.warned_of if w not in known)]
        self.warnings[:] = [warning for warning in warnings if warning not in self.taken]
        self.choose_held_out(state["held_out_by"])
        self.former_measuring = state.get("measuring", "")
        if fingerprint(self.eval_rows) != state["held_out"]:
            is_answered = self.spec.kind == "anchor" and not self.spec.answer
            logger.warning(
                "the held-out rows of task %r changed since the checkpoint: values before and after are of "
                "other prompts%s",
                name,
                ", and the actor of today, not that of the beginning, answers new ones"
                if is_answered
                else "",
            )
        of_rewards = [
            key for key in self.former_definitions if not key.startswith(("rule/", "constraint", "solved"))
        ]
        has_new_values = any(map(self.is_redefined, of_rewards))
        self.metrics.load_state_dict({} if has_new_values else state["refused_values"])
        self.metrics.load_earned_dict({} if has_new_values else state.get("earned", {}))
        self.anchor = AnchorState(**state.get("anchor", {}))
        self.sync_learner()

    def warn_once(self, reason: str) -> None:
        """Add to ``warnings`` what this process has not told yet."""
        if reason not in self.taken and reason not in self.warnings:
            self.warnings.append(reason)

    def take_warnings(self, step: int) -> list[Event]:
        """Return ``warnings`` as events of ``step``, once."""
        told = []
        while self.warnings:  # a thread that samples the next batch may add one meanwhile
            reason = self.warnings.pop(0)
            self.taken.add(reason)
            told.append(Event(step=step, source="rewards", kind="warn", reason=reason, task=self.spec.name))
        return told

    def control(self, stats: TaskStats, step: int) -> list[Event]:
        """Update KL controller and multipliers from the KL and costs in ``stats``; return their events."""
        name, events = self.spec.name, list[Event]()
        if "kl" in stats.metrics:
            events += [replace(event, task=name) for event in self.kl.update(stats.metrics["kl"], step)]
        for constraint, multiplier in self.multipliers.items():
            if (cost := stats.metrics.get(f"cost/{constraint}")) is not None:
                for event in multiplier.update(cost, step):
                    events.append(replace(event, task=name, data={**event.data, "constraint": constraint}))
        self.sync_learner()
        return events

    def sync_learner(self) -> None:
        """Hand the controllers' values to the learner."""
        self.learner.kl_coefficient = self.kl.coefficient
        self.learner.multipliers = {name: m.value for name, m in self.multipliers.items()}


def build_algorithms(specs: Mapping[str, TaskSpec]) -> dict[str, Algorithm]:
    """Load and configure each task's algorithm."""
    algorithms: dict[str, Algorithm] = {}
    for name, spec in specs.items():
        place = f"{spec.where}.type"
        expects = ("credit", "loss", "select")
        algorithm_class = load_plugin(ALGORITHMS, spec.type, expects=expects, where=place)
        check_config_extends(algorithm_class, place)
        where = f"{spec.where}.algorithm_config"
        algorithms[name] = build_plugin(algorithm_class, spec.algorithm_config, where=where)
    return algorithms


def build_task_states(
    specs: Mapping[str, TaskSpec],
    algorithms: Mapping[str, Algorithm],
    rows: Mapping[str, tuple[Sequence[Row], Sequence[Row]]],
    config: RunConfig,
    actor: Actor,
) -> dict[str, TaskState]:
    """Build each task; ``rows`` are ``(training rows, held-out rows)`` by task.

    Raises:
        ConfigError: the model's context cannot hold the response, or its vocabulary cannot spell the task's
            grammar.
    """
    if number := max((a.num_control_tokens for a in algorithms.values()), default=0):
        ids = actor.add_control_tokens(number)
        for algorithm in algorithms.values():
            if algorithm.num_control_tokens:
                algorithm.bind(ids[: algorithm.num_control_tokens])
    tasks: dict[str, TaskState] = {}
    for name, spec in specs.items():
        algorithm, (train_rows, eval_rows) = algorithms[name], rows[name]
        sampling = spec.sampling_params(run_sampling(config))
        if sampling.grammar:
            try:
                actor.grammars.check(sampling.grammar, sampling.max_new_tokens)
            except ConfigError as error:
                where = f"{spec.where}.constraints"
                raise ConfigError(f"{where}: {error}") from error
        limit = config.rollout.max_prompt_tokens
        if actor.max_length:
            room = actor.max_length - sampling.max_new_tokens - 1  # one position for a control token
            if room < 1:
                own = "max_new_tokens" in spec.sampling_keys
                key = "sampling.max_new_tokens of the task" if own else "rollout.max_new_tokens"
                raise ConfigError(
                    f"{spec.where}: max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in "
                    f"the model's {actor.max_length} positions; lower {key}"
                )
            limit = min(limit, room) if limit else room
        stream: PromptStream | None = None
        if spec.curriculum.by and not spec.evaluation_only:
            late_steps = config.rollout.max_staleness if config.batch.quorum < 1.0 else 0
            stream = PooledStream(
                train_rows, task=name, seed=config.seed, spec=spec.curriculum, late_steps=late_steps
            )
        elif isinstance(train_rows, StreamedRows):
            stream = StreamedPrompts(train_rows, task=name, seed=config.seed)
        elif not spec.evaluation_only:
            stream = PromptStream(train_rows, task=name, seed=config.seed)
        task = TaskState(
            spec=spec,
            algorithm=algorithm,
            sampling=sampling,
            group_size=1 if spec.kind == "sft" else spec.group_size or config.batch.group_size,
            kl=KLController(spec.kl),
            learner=LearnerTask(spec=spec, algorithm=algorithm),
            multipliers={
                c.name: LagrangeMultiplier(limit=c.limit or 0.0, config=c.multiplier)
                for c in spec.constraints
                if c.mode == "lagrangian"
            },
            stream=stream,
            held_out=eval_rows,
            held_out_by=(config.seed, spec.renamed_from or name, config.eval.num_prompts),
            eval_temperature=config.eval.temperature,
            only_reported=isinstance(eval_rows, ReportedRows),
            max_prompt_tokens=limit,
        )
        check_template(spec, actor.tokenizer)
        first = next(iter(train_rows or eval_rows), None)
        is_chat = first is not None and isinstance(render_content(spec, first), list)
        if is_chat and spec.chat is None and not actor.tokenizer.chat_template:
            task.warnings.append(
                "its prompts are chat messages, but the tokenizer has no chat template: their texts are "
                "joined by empty lines, without roles. Put a template as chat_template.jinja into the "
                "model's directory, or accept it with chat: false"
            )
        if spec.system and not (actor.tokenizer.chat_template and spec.chat is not False):
            reason = "chat is false" if spec.chat is False else "the tokenizer has no chat template"
            task.warnings.append(
                f"its system message is not used, because {reason}; write its text into the task's prompt"
            )
        task.warned_of = list(task.warnings)
        task.sync_learner()
        tasks[name] = task
    return tasks


def run_sampling(config: RunConfig) -> SamplingParams:
    """Return the run's sampling parameters."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def draw_prompts(tasks: Mapping[str, TaskState], quotas: Mapping[str, int], actor: Actor) -> list[Prompt]:
    """Draw the next prompts of each task; count and replace those that do not fit.

    Raises:
        DataError: no prompt of a task fits.
    """
    prompts: list[Prompt] = []
    for name, count in quotas.items():
        task = tasks[name]
        misses = 0
        found: list[Prompt] = []
        while len(found) < count and task.stream is not None:
            for draw, row in task.stream.next(count - len(found)):
                prompt = render(task, row, draw, actor)
                is_long = task.max_prompt_tokens and len(prompt.prompt_ids) > task.max_prompt_tokens
                if is_long or len(prompt.given_ids or ()) > task.sampling.max_new_tokens:
                    task.num_overlong += 1
                    misses += 1
                else:
                    _condition(task, prompt, evaluation=False)
                    found.append(prompt)
                    misses = 0
            # every row was tried, also by streams that prefer some rows
            if misses > min(max(50, 4 * task.stream.num_rows), 10_000):
                raise DataError(
                    f"task {name!r}: the last {misses} prompts were all longer than {task.max_prompt_tokens} "
                    f"tokens, or had given answers of more than {task.sampling.max_new_tokens} "
                    "(max_new_tokens); shorten the prompt template, or raise rollout.max_prompt_tokens; if "
                    "the model's positions are the limit, set model.rope_scaling or lower "
                    "rollout.max_new_tokens"
                )
        if task.num_overlong and not task.told_of_overlong:
            task.told_of_overlong = True
            task.warnings.append(
                f"{task.num_overlong} of {len(found) + task.num_overlong} prompts drawn are longer than "
                f"{task.max_prompt_tokens} tokens, or have given answers of more than "
                f"{task.sampling.max_new_tokens}; such prompts are left out and counted "
                f"(task/{name}/overlong_prompts). rollout.max_prompt_tokens and max_new_tokens are the limits"
            )
        prompts.extend(found)
    return prompts


def render(task: TaskState, row: Row, draw: int, actor: Actor, *, evaluation: bool = False) -> Prompt:
    """Return the prompt of ``row``, not conditioned; with ``evaluation`` it has no given answer."""
    text, ids = render_prompt(task.spec, row, actor.tokenizer)
    given = render_answer_ids(task, row, actor) if task.spec.kind == "sft" and not evaluation else None
    return Prompt(
        task=task.spec.name,
        prompt_id=f"{task.spec.name}/{row_id(row)}",
        draw=draw,
        row=row,
        text=text,
        prompt_ids=ids,
        given_ids=given,
    )


def _condition(task: TaskState, prompt: Prompt, *, evaluation: bool) -> None:
    """Let the algorithm condition a prompt that fits: its control token has a position of its own."""
    ids = prompt.prompt_ids
    prompt.prompt_ids = task.algorithm.condition(ids, evaluation=evaluation)
    prompt.is_conditioned = prompt.prompt_ids != ids


def render_answer_ids(task: TaskState, row: Row, actor: Actor) -> list[int]:
    """Return the row's given response, with an end token behind an answer to a prompt."""
    ids = render_answer(task.spec, row, actor.tokenizer)
    end = end_token(task.spec, actor.tokenizer, actor.eos_token_ids)
    return [*ids, end] if task.spec.prompt else ids


def render_rows(task: TaskState, rows: Sequence[Row], actor: Actor) -> list[Prompt]:
    """Return evaluation prompts, conditioned by the algorithm; one that is too long loses its beginning."""
    prompts, num_long, limit = [], 0, task.max_prompt_tokens
    for index, row in enumerate(rows):
        prompt = render(task, row, index, actor, evaluation=True)
        if limit and len(prompt.prompt_ids) > limit:
            num_long += 1
            prompt.is_cut, prompt.prompt_ids = True, prompt.prompt_ids[-limit:]
        _condition(task, prompt, evaluation=True)
        prompts.append(prompt)
    if num_long:
        task.warn_once(
            f"its held-out prompts of more than {limit} tokens lose their beginning: {num_long} of "
            f"{len(rows)}. rollout.max_prompt_tokens and max_new_tokens are the limits"
        )
    return prompts


def suppress_control_tokens(tasks: Mapping[str, TaskState], actor: Actor) -> None:
    """Give the control tokens of the vocabulary probability 0 in the responses of every task."""
    if ids := actor.control_token_ids:
        for task in tasks.values():
            task.sampling = replace(task.sampling, suppressed_ids=ids)
