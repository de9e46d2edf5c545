"""The product's real step on a case: trainer, pool, refill, learner, scheduler; sampling is scripted."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
    ScoringConfig,
    TrackingConfig,
)
from multitask_rl.data.loader import TaskDataLoader
from multitask_rl.data.stream import PromptStream
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.worker import Ended
from multitask_rl.errors import GuardStop
from multitask_rl.guard.decision import GuardDecision
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import add_adapters
from multitask_rl.records import Failure, FailureKind, Rollout, Scored, Statistic, TaskEvaluation, TaskStats
from multitask_rl.rollout.base import Generation, GenerationRequest
from multitask_rl.run import assembly
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.round import Pending
from multitask_rl.seeding import derive_seed, random_stream
from multitask_rl.step.flow import Stage
from multitask_rl.step.metrics import StepReport
from multitask_rl.step.stages import RolloutStage
from multitask_rl.testing import FakeEngine
from multitask_rl.trainer import Trainer
from multitask_rl.training.backend import CreditedSample
from multitask_rl.training.backends import in_process
from multitask_rl.training.sketch import sketch_gradient

from . import world
from .cases import Case
from .naive import chat
from .naive.controllers import Seen
from .naive.experience import Asked, Call, Said
from .naive.records import Answer, Attempt
from .naive.settings import FAILED, Anchor, Task
from .naive.step import Given

if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))


END = "<eos>"
"""Text of the end token, which a chat template puts behind answers."""


class ScriptedEngine(FakeEngine):
    """Responses that depend on prompt, seed and version as ``world.py`` says."""

    can_constrain = can_watch = True
    sentences: Mapping[str, list[list[int]]] = {}
    """By grammar."""
    collapsed: Sequence[int] = ()
    """Versions that are."""
    spelled: Sequence[Sequence[int]] = ()
    decode: Callable[[Sequence[int]], str] = staticmethod(str)
    """Special tokens are text."""
    fingerprint: Callable[[], float] = staticmethod(float)
    """Of the actor's weights; ``speakers``: which version had them last."""
    speakers: ClassVar[dict[float, int]] = {}

    @classmethod
    def build(cls, *_: Any, **__: Any) -> ScriptedEngine:
        return cls()

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Speak as the version that had these weights: in a confirmation not the newest."""
        found = self.fingerprint()
        if policy_version != self.policy_version or not self.speakers:
            self.speakers[found] = policy_version
        super().update_weights(weights, policy_version)
        self.speaks = self.speakers.get(found, policy_version)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        version = getattr(self, "speaks", self.policy_version)
        return [
            [self._watched(request, seed, self._scripted(request, seed, version)) for seed in request.seeds]
            for request in requests
        ]

    @staticmethod
    def _watched(request: GenerationRequest, seed: int, said: Generation) -> Generation:
        """The response up to where its monitor ends it; one that ends by itself is not shown to it."""
        for length in range(1, len(said.response_ids)):
            ids, watch = said.response_ids[:length], request.watch
            if watch is not None and length % watch.every == 0 and watch.monitor.check([(seed, ids)])[0]:
                logprobs = said.rollout_logprobs[:length]
                return Generation(response_ids=ids, rollout_logprobs=logprobs, finish_reason="flagged")
        return said

    def _scripted(self, request: GenerationRequest, seed: int, version: int) -> Generation:
        own = request.sampling
        sentences = self.sentences[own.grammar] if own.grammar else None
        is_collapsed = version in self.collapsed
        prompt, most = list(request.prompt_ids), own.max_new_tokens
        said = world.respond(prompt, seed, version, most, sentences, is_collapsed, self.spelled)
        ids, reason = said.ids, said.finish
        for length in range(1, len(ids) + 1 if own.stop else 0):
            if any(text in self.decode(ids[:length]) for text in own.stop):
                ids, reason = ids[:length], "stop"
                break
        return Generation(response_ids=ids, rollout_logprobs=said.logprobs[: len(ids)], finish_reason=reason)


class Held:
    """A round of rewards of which some groups are known to the trainer some steps later."""

    def __init__(self, inner: Pending[Scored], scorer: HoldingScorer) -> None:
        self._inner, self._scorer = inner, scorer
        self._rollouts: list[Rollout] = []
        self._began = scorer.step
        self._open: set[str] = set()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        self._rollouts += rollouts
        self._inner.add(rollouts)

    def seal(self, order: Sequence[int] | None = None) -> None:
        self._inner.seal(order)

    def is_done(self, index: int) -> bool:
        rollout = self._rollouts[index]
        due = self._began + self._scorer.delay(rollout.task, rollout.prompt.draw)
        is_held = self._scorer.step < due and rollout.group_id not in self._open
        return self._inner.is_done(index) and not is_held

    def known(self, index: int) -> Mapping[str, Any] | None:
        return self._inner.known(index)

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        waited = self._inner.wait()
        held = sorted(
            {(r.prompt.position, r.group_id) for i, r in enumerate(self._rollouts) if not self.is_done(i)}
        )
        if is_enough is None:  # an evaluation waits for everything
            self._open |= {name for _, name in held}
        while is_enough is not None and not is_enough():
            self._open.add(held.pop(0)[1])
        return waited

    def results(self, indices: Sequence[int]) -> list[Scored]:
        return self._inner.results(indices)

    def spans(self, indices: Sequence[int]) -> dict[str, tuple[float, float]]:
        return self._inner.spans(indices)

    def cancel(self, indices: Sequence[int]) -> None:
        self._inner.cancel(indices)


Told = tuple[str, int, tuple[str, ...]]
"""Task, seed of the episode's world, what the world has heard."""


class Worlds:
    """The pool of worlds, all of them in this process."""

    in_lockstep, num_queued = True, 0

    def __init__(self, specs: Mapping[str, WorldSpec], told: dict[Told, list[str]]) -> None:
        self._specs, self._told = specs, told
        self._heard: list[Told] = []
        self._open: list[Any] = []
        self._answers: list[tuple[int, Any]] = []

    def open(self, task: str, row: Mapping[str, Any], seed: int = 0) -> int:
        spec = self._specs[task]
        self._open.append(spec.build(lambda function, *args, **named: function(*args, **named), seed))
        self._heard.append((task, seed % 2**32, ()))
        self._ask(len(self._open), lambda own: own.reset(row))
        return len(self._open)

    def step(self, ticket: int, message: Mapping[str, Any]) -> None:
        task, seed, heard = self._heard[ticket - 1]
        self._heard[ticket - 1] = key = task, seed, (*heard, str(message["content"]))

        def step(own: Any) -> Any:
            answer = own.step(message)
            # errors are long texts, and the model is small
            short = [{**m, "content": str(m["content"])[:6]} for m in answer.messages]
            self._told[key] = [m["content"] for m in short]
            return replace(answer, messages=short)

        self._ask(ticket, step)

    def finish(self, ticket: int) -> None:
        self._ask(ticket, lambda own: Ended(own.earned()))

    def _ask(self, ticket: int, what: Callable[[Any], Any]) -> None:
        try:
            answer = what(self._open[ticket - 1])
        except RuntimeError as error:
            answer = Failure(kind=FailureKind.infra, message=str(error), source="environment")
        self._answers.append((ticket, answer))

    def poll(self, timeout_s: float, tickets: Collection[int]) -> list[tuple[int, Any]]:
        found = [own for own in self._answers if own[0] in tickets]
        self._answers = [own for own in self._answers if own[0] not in tickets]
        return found

    def take_seconds(self, ticket: int) -> float:
        return 0.0

    def cancel(self, ticket: int) -> None:
        self._answers = [own for own in self._answers if own[0] != ticket]

    def pause(self, tickets: Collection[int]) -> None:
        pass

    def close(self) -> None:
        pass


class Judged:
    """A round of constraints whose verdicts are all waited for, so that the case alone says what is late."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        return str(self._inner.wait())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordingGuard(SafetyGuard):
    """The guard; keeps the statistics of the last step, and what it said of the last evaluation."""

    stats: Mapping[str, TaskStats] = {}
    decision = GuardDecision()
    factors: Sequence[Mapping[str, float]] = ()
    rate = 1.0
    number = 0
    """Of evaluations so far."""

    def weight_factors(self) -> dict[str, float]:
        return dict(self.factors[min(self.number, len(self.factors)) - 1]) if self.factors else {}

    def lr_factor(self, step: int) -> float:
        return self.rate if self.number else 1.0

    def observe(self, step: int, evaluations: Any, confirm: Any = None) -> GuardDecision:
        self.number += 1
        self.decision = super().observe(step, evaluations)
        return GuardDecision(judged_good=self.decision.judged_good)

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        self.stats = stats
        super().record_step(step, stats)


class WatchedGuard(SafetyGuard):
    """The guard, which acts; keeps the same."""

    stats: Mapping[str, TaskStats] = {}
    decision = GuardDecision()
    number = 0

    def observe(self, step: int, evaluations: Any, confirm: Any = None) -> GuardDecision:
        self.number += 1
        self.decision = super().observe(step, evaluations, confirm)
        return self.decision

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        self.stats = stats
        super().record_step(step, stats)


class HoldingScorer:
    """The reward pool, with groups that come late as the case says."""

    def __init__(self, pool: Any, delay: Callable[[str, int], int]) -> None:
        self._pool, self.delay, self.step = pool, delay, 0

    def begin_scoring(self) -> Held:
        return Held(self._pool.begin_scoring(), self)

    def begin_judging(self) -> Judged:
        return Judged(self._pool.begin_judging())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@dataclass(kw_only=True)
class ProductStep:
    """What came out of a step."""

    report: StepReport
    credited: list[CreditedSample]
    updates: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
    """Gradients as applied, and the weights after, by name; one per optimizer step."""
    statistics: dict[str, Mapping[str, Statistic]]
    numbers: dict[str, float]
    """The line of metrics.jsonl."""
    shares: dict[str, float]
    levels: dict[str, float]
    held: set[str]
    """By the gate."""
    multipliers: dict[str, dict[str, float]]
    betas: dict[str, float]


@dataclass
class Product:
    """A trainer built from a case, stepped one by one."""

    case: Case
    directory: Path
    trainer: Trainer = field(init=False)
    speakers: dict[float, int] = field(default_factory=dict)
    told: dict[Told, list[str]] = field(default_factory=dict)
    """What worlds have said."""
    is_resumed: bool = False

    def __post_init__(self) -> None:
        self.credited: list[CreditedSample] = []
        self.evaluations: Mapping[str, TaskEvaluation] = {}
        """The last ones of all tasks, but for confirmations; ``looks``: of new tasks alone."""
        self.looks: Mapping[str, TaskEvaluation] = {}
        self.numbers: dict[str, float] = {}
        self.past = [] if self.is_resumed else _past(self.case)
        case, settings = self.case, self.case.settings
        self.teacher: dict[str, Tensor] = {}
        if any(t.type == "distill" for t in settings.tasks):
            self._save_teacher()
        model = ModelConfig(
            reference_decay=settings.reference_decay,
            lora=LoraConfig(rank=settings.lora_rank, dropout=settings.lora_dropout),
        )
        config = RunConfig(
            tasks={t.name: _spec(case, t, self._teacher_directory) for t in settings.tasks}
            | {a.name: _anchor_spec(case, a) for a in settings.anchors},
            output_dir=str(self.directory),
            max_steps=settings.max_steps,
            seed=case.seed,
            model=model,
            critic=CriticConfig(trunk=settings.critic_trunk, learning_rate=settings.critic_learning_rate),
            rollout=RolloutConfig(
                max_new_tokens=5,
                max_staleness=settings.max_staleness,
                stop=settings.stop,
                max_prompt_tokens=settings.max_prompt_tokens,
            ),
            batch=BatchConfig(
                num_minibatches=settings.num_minibatches,
                num_epochs=settings.num_epochs,
                tokens_per_microbatch=case.tokens_per_microbatch,
                layout=case.layout,
                refill_rounds=settings.refill_rounds,
                quorum=settings.quorum,
            ),
            optimizer=OptimizerConfig(
                learning_rate=settings.learning_rate,
                betas=list(settings.betas),
                adam_eps=settings.adam_eps,
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.max_grad_norm,
                warmup_steps=settings.warmup_steps,
                schedule=settings.schedule,
            ),
            scheduler=SchedulerConfig(
                policy=settings.policy,
                min_weight=settings.min_weight,
                policy_config=dict(settings.policy_config),
            ),
            scoring=ScoringConfig(max_failure_rate=1.0),
            eval=EvalConfig(every=settings.eval_every, num_prompts=world.NUM_HELD_OUT),
            checkpoint=CheckpointConfig(every=settings.checkpoint_every, keep=settings.checkpoint_keep),
            tracking=TrackingConfig(trackers=["jsonl"], store_rollouts=0),
        )
        network: Any = _model(case, case.seed)
        if settings.lora_rank:
            network = add_adapters(network, model.lora, case.seed)
        actor = Actor(network, _tokenizer(case), model)
        loader = TaskDataLoader(
            splits={
                t.name: {
                    "train": rows(
                        case, t.name, range(case.num_rows.get(case.origin(t.name), world.NUM_ROWS))
                    ),
                    "validation": rows(case, t.name, range(100, 100 + world.NUM_HELD_OUT)),
                    "test": rows(case, t.name, range(200, 200 + world.NUM_HELD_OUT)),
                }
                for t in [*settings.tasks, *settings.anchors]
            },
            batch_size=settings.prompts_per_step,
        )
        self.trainer = Trainer(actor, None, loader, config=config)
        self.trainer.plan.engine_class = type(
            "Engine",
            (ScriptedEngine,),
            {
                "sentences": {json.dumps(t.grammar): t.sentences for t in settings.tasks if t.grammar},
                "collapsed": case.collapsed,
                "spelled": case.spelled,
                "decode": staticmethod(actor.tokenizer.decode),
                "fingerprint": staticmethod(self.fingerprint),
                "speakers": self.speakers,
            },
        )
        read = [t.name for t in settings.tasks if not t.is_reported]
        watched = read + [a.name for a in settings.anchors] + settings.watched
        self.guard: RecordingGuard | WatchedGuard
        if rules := settings.acting:
            keys = asdict(rules) | {"ladder": list(rules.ladder), "threshold_delta": -rules.drop}
            del keys["drop"]
            self.guard = WatchedGuard(watched, act_on_hacking=False, **keys)
        else:
            self.guard = RecordingGuard(monitor_metrics=watched, confirm=False, act_on_hacking=False)
            self.guard.factors, self.guard.rate = settings.guard_factors, settings.guard_rate
        self.trainer.add_guard(self.guard)
        self.scorer = HoldingScorer(self.trainer.scorer, delay_of(case))
        self.trainer.scorer = self.scorer  # type: ignore[assignment]
        if not self.is_resumed:  # else the run builds it, for the vocabulary of its checkpoint
            self.trainer.critic.build(actor, [t.name for t in settings.trained if t.type == "ppo"])
        self.trainer.insert_stage(
            Stage("watch", self._watch, consumes=CreditedSample, produces=CreditedSample),
            after="advantages",
        )

        if case.engine_failing:
            self.trainer.insert_stage(
                Stage("lose", self._lose, consumes=Rollout, produces=Rollout), after="rollout"
            )
        scheduler = self.trainer.scheduler
        bind = scheduler.bind

        def bind_with_past(*given: Any, **more: Any) -> None:
            bind(*given, **more)
            for number, groups in enumerate(self.past):
                seen = {
                    name: stats_of(name, own, _past_cosines(case, name, number))
                    for name, own in groups.items()
                }
                scheduler.update(seen, number - case.past_steps)

        scheduler.bind = bind_with_past  # type: ignore[method-assign]

    @property
    def _teacher_directory(self) -> str:
        return str(self.directory / "teacher")

    def _save_teacher(self) -> None:
        model = _model(self.case, self.case.seed + 1).float()  # of numbers that float32 has
        with arithmetic("float32"):
            model.save_pretrained(self._teacher_directory)
        _tokenizer(self.case).save_pretrained(self._teacher_directory)
        self.teacher = {name: p.detach().double() for name, p in model.named_parameters()}

    def teachers(self) -> dict[str, dict[str, Tensor]]:
        """Task -> weights of its teacher. No step reads their rows of control tokens."""
        width = self.trainer.actor.model.get_input_embeddings().weight.shape[0]
        own = dict(self.teacher)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in own:
                own[name] = torch.nn.functional.pad(own[name], (0, 0, 0, width - len(own[name])))
        return {t.name: own for t in self.case.settings.tasks if t.type == "distill"}

    def _lose(self, rollout: Rollout) -> Rollout:
        is_lost = _loses(self.case)(rollout.task, rollout.prompt.draw, rollout.sample)
        if not is_lost or rollout.finish_reason == "flagged":  # what a judge has read is there
            return rollout
        return replace(rollout, failure=Failure(kind=FailureKind.infra, message="lost", source="engine"))

    def _watch(self, credited: CreditedSample) -> CreditedSample:
        self.credited.append(credited)
        return credited

    def named(self) -> dict[str, torch.nn.Parameter]:
        critic = self.trainer.critic
        heads = {f"heads.task_{t.name}.": f"{t.name}." for t in self.case.settings.tasks}
        found = {_plain(name): p for name, p in self.trainer.actor.model.named_parameters()}
        for name, parameter in critic.named_parameters():
            for old, new in heads.items():
                name = name.replace(old, new)
            found[f"critic.{_plain(name)}"] = parameter
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().double().clone() for name, p in self.named().items()}

    def open(self) -> None:
        """Build the run's parts, once."""

        def build(plan: Any) -> Worlds | None:
            specs = {n: WorldSpec.of_task(s) for n, s in plan.specs.items() if s.environment}
            return Worlds(specs, self.told) if specs else None

        with patch.object(assembly, "build_worlds", build):
            evaluator = self.trainer._open().evaluator
        evaluate = type(evaluator).evaluate

        def watch(step: int, **how: Any) -> dict[str, TaskEvaluation]:
            found = evaluate(evaluator, step, **how)
            if not how:
                self.evaluations = found
            elif set(how) == {"tasks"}:
                self.looks = found
            return found

        evaluator.evaluate = watch  # type: ignore[method-assign]

    def fingerprint(self) -> float:
        """Of the actor's weights."""
        return math.fsum(float(w.sum()) for n, w in self.weights().items() if not n.startswith("critic."))

    def evaluate(self) -> str:
        """Return ``rollback`` or ``stop`` if the guard decided so, and it could be carried out."""
        self.open()
        try:
            return "" if self.trainer.parts.supervisor.inspect() else "rollback"
        except GuardStop:
            return "stop"

    def step(self) -> ProductStep:
        self.open()
        self.credited.clear()
        self.scorer.step = self.trainer.step
        with _watched_updates(self) as updates:
            report = self.trainer.train_step()
        lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        self.numbers = json.loads(lines[-1])
        scheduler = self.trainer.scheduler
        metrics = scheduler.metrics()
        return ProductStep(
            report=report,
            credited=list(self.credited),
            updates=updates,
            statistics={name: own.statistics for name, own in self.guard.stats.items()},
            numbers=self.numbers,
            shares=scheduler.weights(),
            levels={
                t.name: metrics[f"task/{t.name}/level"]
                for t in self.case.settings.tasks
                if f"task/{t.name}/level" in metrics
            },
            held={t.name for t in self.case.settings.tasks if metrics.get(f"task/{t.name}/held")},
            multipliers={
                n: {c: m.value for c, m in r.multipliers.items()} for n, r in self.trainer.tasks.items()
            },
            betas={n: r.kl.coefficient for n, r in self.trainer.tasks.items()},
        )

    def end(self) -> None:
        """Save the run, and end it."""
        self.trainer.parts.experience.rewind()  # as a run does that a signal ends
        self.trainer.parts.supervisor.save()
        self.close()

    def begin_anew(self) -> None:
        """Begin the run anew from its checkpoint."""
        number, self.is_resumed = self.guard.number, True
        self.__post_init__()
        self.guard.number = number

    def close(self) -> None:
        self.trainer.close()


@contextmanager
def arithmetic(kind: str) -> Iterator[None]:
    """Let the product compute in ``kind``: with ``float64`` what it calls float32 is float64."""
    before, float32 = torch.get_default_dtype(), torch.float32
    with ExitStack() as stack:
        if kind == "float64":
            for owner, name, wide in (
                (torch, "float32", torch.float64),
                (torch, "float", torch.float64),
                (Tensor, "float", Tensor.double),
            ):
                stack.enter_context(patch.object(owner, name, wide))
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(torch.float64)

            def sketched(parameters: Sequence[torch.nn.Parameter]) -> Tensor:
                with patch.object(torch, "float32", float32):  # its bits are those of float32
                    return sketch_gradient(parameters)

            stack.enter_context(patch.object(in_process, "sketch_gradient", sketched))
        yield


@contextmanager
def _watched_updates(product: Product) -> Iterator[list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """Collect gradients and new weights of every optimizer step."""
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def before(*_: Any) -> None:
        gradients = {n: p.grad.double().clone() for n, p in product.named().items() if p.grad is not None}
        found.append((gradients, {}))

    def after(*_: Any) -> None:
        found[-1][1].update(product.weights())

    hooks = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_a_clock() -> Iterator[None]:
    """Let the case alone say what takes long, and what dropout leaves.

    A response of which a plugin says ``OVER`` exceeds its limits; the plugin answers the probe. With a quorum
    worlds are waited for, however slow this machine is: they answer at once.
    """
    real, wait_for_worlds = Lane._set_result, RolloutStage._wait_for_worlds

    def wait(stage: RolloutStage, call: Any, worlds: Any, _: float, is_enough: Any) -> Any:
        return wait_for_worlds(stage, call, worlds, 60.0, is_enough)

    def set_result(lane: Lane, item: Any, result: Any) -> None:
        if item.trouble is None and isinstance(result, Failure) and result.message == world.OVER:
            lane._stuck(item, result, passed_limit=True)
        else:
            real(lane, item, result)

    def drop(module: torch.nn.Dropout, x: Tensor) -> Tensor:
        own = torch.tensor(world.kept(x.shape[-1]), dtype=x.dtype)
        return x * own / (1.0 - module.p) if module.training and module.p else x

    with (
        patch.object(Lane, "_set_result", set_result),
        patch.object(RolloutStage, "_wait_for_worlds", wait),
        patch.object(torch.nn.Dropout, "forward", drop),
    ):
        yield


def _tokenizer(case: Case) -> PreTrainedTokenizerFast:
    names = {c: i for i, c in enumerate(world.vocabulary(case.form, case.template))}
    backend = Tokenizer(models.WordLevel(names, unk_token=world.VOCABULARY[world.UNKNOWN]))
    character = "[\\s\\S]" if case.template else "."
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(character), behavior="isolated")
    backend.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    if case.template:
        found.chat_template = _jinja(case.template)
    return found


def _jinja(kind: str) -> str:
    """The chat template of that kind (``naive/chat.py``)."""
    earlier = "and loop.index0 < last.i else m.content"
    text = {
        "strip": "m.content | trim",
        "thoughts": f"m.content.split('t')[-1] if m.role == 'assistant' {earlier}",
        "short": f"m.content[:2] if m.role != 'assistant' {earlier}",
    }.get(kind, "m.content")
    shown = f"{{{{- marks[m.role] }}}}{{{{- {text} }}}}"
    shown += "{%- if m.role == 'assistant' %}{{- '<eos>' }}{%- endif %}"
    if kind == "window":
        shown = f"{{%- if loop.revindex <= 3 %}}{shown}{{%- endif %}}"
    return (
        f"{{%- set marks = {json.dumps(chat.MARKS)} %}}"
        "{%- set last = namespace(i=0) %}"
        "{%- for m in messages %}{%- if m.role != 'assistant' %}{%- set last.i = loop.index0 %}{%- endif %}"
        "{%- endfor %}"
        + ("{{- messages | length }}" if kind == "counted" else "")
        + f"{{%- for m in messages %}}{shown}{{%- endfor %}}"
        + "{%- if add_generation_prompt %}{{- marks['assistant'] }}{%- endif %}"
    )


def _plain(name: str) -> str:
    """The name of a weight without that of the wrapper that holds adapters."""
    return name.replace("base_model.model.", "").replace(".base_layer.", ".")


def _model(case: Case, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(world.vocabulary(case.form, case.template)),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=case.settings.num_heads,
        num_key_value_heads=case.settings.num_key_value_heads,
        max_position_embeddings=4096 if case.template else 256 if case.form else 64,
        pad_token_id=world.PAD,
        eos_token_id=world.EOS,
        bos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=case.tied,
    )
    # float64 weights in both arithmetics: the reference starts from the same ones
    return LlamaForCausalLM(config).double()


def rows(case: Case, task: str, numbers: Iterable[int]) -> list[dict[str, Any]]:
    task = case.origin(task)
    return [
        {
            "id": i,
            "prompt": world.text_of(world.prompt_ids(case.seed, task, i)),
            "answer": world.text_of(world.answer_ids(case.seed, task, i)),
            "grade": world.grade(case.seed, task, i),
            "number": world.difficulty(case.seed, task, i),
            "length": world.length(case.seed, task, i),
        }
        for i in numbers
    ]


def _plugin(case: Case, task: Task, name: str, **more: Any) -> dict[str, Any]:
    script = case.script(task.name, name)
    return {
        "world": case.seed,
        "name": script.name,
        "values": list(script.values),
        "same": script.same,
        "failing": script.failing,
        "silent": script.silent,
        "same_silent": script.same_silent,
        "answers": list(script.answers),
        "has_part": script.has_part,
        "over": script.over,
        "if_bad": script.if_bad,
    } | more


def _spec(case: Case, task: Task, teacher: str) -> dict[str, Any]:
    """The task as a tasks file says it."""
    rewards = []
    for r in task.rewards:
        ends = {"low": r.low, "high": r.high} if math.isfinite(r.low) else {}
        if r.is_of_world:
            own = {"range": [r.low, r.high]} if ends else {}
            own |= {"config": {"key": r.key}} if r.key else {}
            rewards.append({"plugin": "environment", "name": r.name, "weight": r.weight} | own)
            continue
        config = _plugin(case, task, r.name, higher_is_better=r.higher_is_better, **ends)
        own = {"plugin": "reference.scripted:Reward", "name": r.name, "weight": r.weight, "config": config}
        rewards.append(own | ({} if r.overrun is None else {"overrun": r.overrun}))
    constraints = []
    for c in task.constraints:
        spec: dict[str, Any] = {
            "plugin": "reference.scripted:Constraint",
            "name": c.name,
            "mode": c.mode,
            "config": _plugin(case, task, c.name),
            "stream_every": c.stream_every,
        }
        if c.mode == "penalty":
            spec["weight"] = c.weight
        if c.mode == "reject":
            spec["max_attempts"] = c.max_attempts
        if c.mode == "lagrangian":
            spec |= {"limit": c.limit, "multiplier": c.multiplier}
        constraints.append(spec)
    kl: dict[str, Any] = {"coefficient": task.kl_coefficient, "horizon": task.kl_horizon}
    kl |= {"placement": task.kl_placement, "estimator": task.kl_estimator}
    if task.kl_target is not None:
        kl["target"] = task.kl_target
    given = {
        "type": task.type,
        "rewards": rewards,
        "constraints": constraints,
        "algorithm_config": task.given,
        "kl": kl,
        "loss_weight": task.loss_weight,
        "group_size": task.group_size,
        "target": task.target,
        "eval_samples": task.eval_samples,
        "solved_at": task.solved_at,
        "primary_metric": task.primary_metric,
        "higher_is_better": task.higher_is_better,
        "sampling": {
            "max_new_tokens": task.max_new_tokens,
            "temperature": task.temperature,
            "top_k": task.top_k,
            "top_p": task.top_p,
        }
        | ({"stop": list(task.stop)} if task.stop != case.settings.stop else {}),
    }
    if task.curriculum:
        given["curriculum"] = asdict(task.curriculum)
    if task.grammar:
        constraints.append({"mode": "grammar", "config": task.grammar})
    if task.max_turns:
        given["environment"] = f"reference.scripted:{'Tools' if task.has_tools else 'Talk'}"
        origin = case.origin(task.name)
        given["environment_config"] = {"world": case.seed, "task": origin}
        if origin in case.named:
            given["environment_config"]["has_names"] = True
        if case.template and not task.has_tools:
            given["environment_config"]["has_spaces"] = True
        if origin in case.limiting:
            given["environment_config"]["ends"] = case.limiting[origin]
        given |= {"max_turns": task.max_turns, "max_response_tokens": task.max_episode_tokens}
        given["max_tool_calls"] = task.max_tool_calls
    if task.type == "distill":
        given["teacher"] = teacher
    if task.weight != 1.0:  # as a missing one
        given["weight"] = task.weight
    if task.min_share is not None:
        given["min_share"] = task.min_share
    if task.name in case.former:
        given["renamed_from"] = case.former[task.name]
    if task.evaluation_only:
        given["evaluation_only"] = True
    if task.is_reported:
        given["eval_split"] = "test"
    return given


def _anchor_spec(case: Case, anchor: Anchor) -> dict[str, Any]:
    given: dict[str, Any] = {
        "type": "anchor",
        "algorithm_config": {"kl": anchor.has_kl, "max_tokens": anchor.max_tokens},
        "sampling": {"max_new_tokens": anchor.max_new_tokens},
    }
    if anchor.name in case.former:
        given["renamed_from"] = case.former[anchor.name]
    if anchor.has_answers:
        given["answer"] = "{answer}"
    return given | ({"prompt": ""} if anchor.is_plain else {})


def _loses(case: Case) -> Callable[[str, int, int], bool]:
    """Whether the engine loses the first attempt of (task, draw, sample)."""

    def loses(task: str, draw: int, index: int) -> bool:
        return world.stream(case.seed, "engine", task, draw, index).random() < case.engine_failing

    return loses


def _past(case: Case) -> list[dict[str, list[list[float]]]]:
    """Rewards of every group that the scheduler has seen before the first step: by step and task."""
    return [
        {
            t.name: world.past_rewards(
                case.seed, t.name, case.past[t.name], step, t.range_of("reward") or (-1.0, 3.0)
            )
            if t.has_rewards and t.type != "sft" and not t.evaluation_only and (t.weight or t.min_share)
            else []
            for t in case.settings.tasks
        }
        for step in range(case.past_steps)
    ]


def stats_of(
    task: str, groups: Sequence[Sequence[float]], cosines: Mapping[str, float] | None = None
) -> TaskStats:
    """A step's statistics of a task, for the product."""
    rewards = [r for own in groups for r in own]
    compared = [own for own in groups if len(own) > 1]
    above = [max(own) - _rest(own) for own in compared]
    return TaskStats(
        task=task,
        num_prompts=len(groups),
        num_informative=sum(max(own) > min(own) for own in groups),
        reward_mean=math.fsum(rewards) / len(rewards) if rewards else math.nan,
        reward_std=math.fsum(map(_std, compared)) / len(compared) if compared else math.nan,
        headroom=math.fsum(above) / len(above) if above else math.nan,
        lowest=sorted(min(own) for own in groups)[:3],
        highest=sorted((max(own) for own in groups), reverse=True)[:3],
        metrics={f"cosine/{other}": value for other, value in (cosines or {}).items()},
    )


def _past_cosines(case: Case, task: str, step: int) -> dict[str, float]:
    others = [t.name for t in case.settings.tasks if t.name != task]
    return {other: world.past_cosine(case.seed, task, other, step) for other in others}


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


def _rest(values: Sequence[float]) -> float:
    return (math.fsum(values) - max(values)) / (len(values) - 1)


def seen_of(groups: Sequence[Sequence[float]], cosines: Mapping[str, float] | None = None) -> Seen:
    """The same for the reference."""
    own = stats_of("", groups)
    numbers = (own.num_prompts, own.num_informative, own.reward_mean)
    return Seen(*numbers, groups, own.headroom, own.reward_std, cosines=cosines or {})


def delay_of(case: Case) -> Callable[[str, int], int]:
    """For how many steps a group's rewards come late: 0 to 3."""

    def delay(task: str, draw: int) -> int:
        rng = world.stream(case.seed, "late", task, draw)
        return rng.choice([1, 2, 3]) if rng.random() < case.late else 0

    return delay


@dataclass
class Words:
    """What the reference is told of prompts, responses and worlds."""

    case: Case
    purpose: str
    row: Callable[[str, int], int]
    said: Mapping[Told, list[str]]
    """By worlds of tools."""

    def prompt(self, task: str, draw: int) -> list[int]:
        found = world.prompt_ids(self.case.seed, self.case.origin(task), self.row(task, draw))
        if self.case.template:
            opening = [chat.Message("user", world.text_of(found))]
            return self.encoded(chat.Conversation(self.case.template, opening, END).text)
        return found

    def encoded(self, text: str) -> list[int]:
        return world.encoded(text, self.case.form, self.case.template)

    def given(self, task: str, draw: int) -> list[int]:
        return world.answer_ids(self.case.seed, self.case.origin(task), self.row(task, draw))

    def seed(self, task: str, purpose: str, *place: int | str) -> int:
        """Held out, a renamed task has the same random numbers."""
        own = task if purpose == "rollout" else self.case.origin(task)
        return derive_seed(self.case.seed, purpose, own, *place)

    def spell(self, token: int) -> tuple[str, bool]:
        text = world.vocabulary(self.case.form, self.case.template)[token]
        return text, token in (world.PAD, world.EOS)

    def write(
        self,
        task: str,
        place: tuple[int, int, int],
        turn: int,
        version: int,
        context: list[int],
        most: int,
        purpose: str = "",
    ) -> Answer:
        turns = [turn] if turn else []
        seed = self.seed(task, purpose or self.purpose, *place, *turns)
        sentences = {t.name: t.sentences for t in self.case.settings.tasks}.get(task)
        is_collapsed = version in self.case.collapsed
        said = world.respond(context, seed, version, most, sentences, is_collapsed, self.case.spelled)
        return Answer(context=context, ids=said.ids, logprobs=said.logprobs, finish=said.finish)

    def hear(self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]) -> Said:
        seed, origin = self.episode(task, place, tried), self.case.origin(task)
        own = self.reply(task, place, tried, said)
        ids, is_anew = [world.VOCABULARY.index(c) for c in own.text], own.is_anew
        if self.case.template:
            ids, is_anew = self.shown(task, place, tried, said)
        elif said and not own.is_anew:  # the ends of lines, for which there is no token
            ids = [world.UNKNOWN, *ids, world.UNKNOWN]
        reward = own.reward
        if origin in self.case.named:
            reward = world.by_name(reward, self.case.seed, origin, self.row(task, place[0]), seed, len(said))
        return Said(
            ids=ids,
            is_anew=is_anew,
            is_done=own.is_done,
            reward=reward,
            fails=own.fails,
            limits=own.limits,
        )

    def reply(
        self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]
    ) -> world.Reply:
        """Of a world without tools."""
        seed, origin = self.episode(task, place, tried), self.case.origin(task)
        ends, text = self.case.limiting.get(origin), said[-1].text if said else ""
        if said and ends is not None:
            text = world.with_usage(text, said[-1].finish, len(said[-1].context), len(said[-1].ids))
        return world.reply(self.case.seed, origin, self.row(task, place[0]), seed, len(said), text, ends)

    def shown(
        self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]
    ) -> tuple[list[int], bool]:
        """Return what a chat template shows before the next answer, and whether that is the whole of it."""
        has_tools = self.case.settings[task].has_tools
        row = world.prompt_ids(self.case.seed, self.case.origin(task), self.row(task, place[0]))
        opening = self.reply(task, place, tried, []).text
        opening = opening if has_tools else world.spaced(opening)
        first = chat.Message("user", world.text_of(row) + opening)
        found, text, is_whole = chat.Conversation(self.case.template, [first], END), "", True
        for number in range(1, len(said) + 1):
            answer = said[number - 1]
            if has_tools:
                words = self.said.get(
                    (task, self.episode(task, place, tried), tuple(a.text for a in said[:number])), []
                )
                text, is_whole = found.add(answer.text, [chat.Message("tool", word) for word in words])
                continue
            own = self.reply(task, place, tried, said[:number])
            words = [chat.Message("user", world.spaced(own.text))]
            if own.is_anew:
                found, is_whole = chat.Conversation(self.case.template, words, END), True
            else:
                text, is_whole = found.add(answer.text, words)
        ids = self.encoded(found.text if is_whole else text)
        has_ended = bool(said) and said[-1].ids[-1] == world.EOS
        return ids[1:] if has_ended and not is_whole else ids, is_whole

    def episode(self, task: str, place: tuple[int, int, int], tried: int) -> int:
        """Seed of the world."""
        return derive_seed(self.seed(task, self.purpose, *place, "world"), tried) % 2**32

    def calls(self, ids: Sequence[int]) -> list[world.Call]:
        first = len(world.VOCABULARY)
        return [world.CALLS[i - first] for i in ids if first <= i < first + len(world.CALLS)]

    def call(self, task: str, place: tuple[int, int, int], tried: int, made: list[str], call: Call) -> bool:
        assert isinstance(call, world.Call)
        made.append(f"look {call.arguments['place']}" if call.tool == "look" else call.tool)
        return world.look(*self.world_of(task, place, tried), made) is None

    def told(self, task: str, place: tuple[int, int, int], tried: int, said: Sequence[Answer]) -> Said:
        """Take the words of errors from the product; a world that has not heard these answers has none."""
        if self.case.template:
            ids, is_anew = self.shown(task, place, tried, said)
            return Said(ids=ids, is_anew=is_anew)
        words = self.said.get((task, self.episode(task, place, tried), tuple(a.text for a in said)), [])
        text = "\n" + "".join(f"{word}\n" for word in words)
        known = {c: i for i, c in enumerate(world.VOCABULARY) if len(c) == 1}
        return Said(ids=[known.get(c, world.UNKNOWN) for c in text])

    def earned(
        self, task: str, place: tuple[int, int, int], tried: int, made: Sequence[str]
    ) -> float | Mapping[str, float] | str | None:
        own = self.world_of(task, place, tried)
        found = world.earned(*own, made)
        if self.case.origin(task) in self.case.named and not isinstance(found, str):
            return world.by_name(found, *own, len(made))
        return found

    def world_of(self, task: str, place: tuple[int, int, int], tried: int) -> tuple[int, str, int, int]:
        episode = self.episode(task, place, tried)
        return self.case.seed, self.case.origin(task), self.row(task, place[0]), episode


def given_of(case: Case, product: Product) -> Given:
    """What the reference is given: the same world, and the product's chance."""
    streams = {
        origin: PromptStream(product.trainer.plan.rows[t.name][0], task=origin, seed=case.seed)
        for t in case.settings.trained
        for origin in [case.origin(t.name)]
    }
    drawn: dict[str, list[int]] = {case.origin(t.name): [] for t in case.settings.tasks}
    chosen: dict[str, dict[int, int]] = {t.name: {} for t in case.settings.tasks if t.curriculum}

    def row(task: str, draw: int) -> int:
        if task in chosen:
            return chosen[task][draw]
        origin = case.origin(task)
        while len(drawn[origin]) <= draw:
            drawn[origin] += [int(r["id"]) for _, r in streams[origin].next(1)]
        return drawn[origin][draw]

    def order(task: str) -> list[int]:
        found = list(range(case.num_rows[case.origin(task)]))
        random_stream(case.seed, "data", case.origin(task), 0).shuffle(found)
        return found

    def column(task: str) -> dict[int, float | str] | None:
        by = case.settings[task].curriculum.by  # type: ignore[union-attr]
        numbers = range(case.num_rows[case.origin(task)])
        return None if by == "pass_rate" else {r["id"]: r[by] for r in rows(case, task, numbers)}

    def compared() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {t.name: {} for t in case.settings.tasks}
        for key, value in product.numbers.items():
            kind, _, rest = key.partition("/")
            task, _, name = rest.partition("/")
            if kind == "task" and name.startswith(("cosine/", "grad_norm")):
                found[task][name] = value
        return found

    read = {case.origin(n): [int(r["id"]) for r in own.eval_rows] for n, own in product.trainer.tasks.items()}

    def held_out(task: str, draw: int) -> int:
        return read[case.origin(task)][draw]

    def asked(
        task: str, plugin: str, draw: int, index: int, attempt: int, ids: Sequence[int]
    ) -> float | str | None:
        said = world.answer(
            case.seed, case.script(task, plugin), world.Sample(task, draw, index, attempt, tuple(ids))
        )
        assert FAILED == world.FAILED
        return said

    def read_answer(attempt: Attempt, reward: str) -> str:
        script = case.script(attempt.task, reward)
        return world.read_answer(case.seed, script, world.Sample(*attempt.name, tuple(attempt.ids)))

    def part(attempt: Attempt, reward: str) -> float | None:
        script = case.script(attempt.task, reward)
        return world.part(case.seed, script, world.Sample(*attempt.name, tuple(attempt.ids)))

    def shuffle(task: str, step: int, epoch: int, number: int) -> list[int]:
        order = list(range(number))
        random_stream(case.seed, "minibatch", task, step, epoch).shuffle(order)
        return order

    first = case.settings.first_control_token

    def replay(task: str) -> list[tuple[tuple[int, int], int]]:
        own = [c.sample for c in product.credited if c.sample.task == task]
        chosen = [(s.scored.rollout.prompt.draw, s.scored.rollout.sample) for s in own]
        # of an episode the first conversation stands for all
        return [
            (name, s.prompt_ids[0] - first)
            for name, s in zip(chosen, own, strict=True)
            if not s.turns or s.turns[0].context_ids is None
        ]

    return Given(
        replay=replay,
        read=read_answer,
        order=order,
        column=column,
        chosen=chosen,
        kept=world.kept,
        compared=compared,
        world=Words(case, "rollout", row, product.told),
        held_out_world=Words(case, "evaluation", held_out, product.told),
        confirming_world=lambda purpose: Words(case, purpose, held_out, product.told),
        teachers=product.teachers(),
        held_out={n: len(own.eval_rows) for n, own in product.trainer.tasks.items()},
        asked=Asked(value=asked, part=part),
        shuffle=shuffle,
        ranks=_ranks(case),
        is_late=delay_of(case),
        engine_fails=_loses(case),
        past=[
            {name: seen_of(groups, _past_cosines(case, name, number)) for name, groups in step.items()}
            for number, step in enumerate(product.past)
        ],
    )


def _ranks(case: Case) -> dict[str, int]:
    return {t.name: derive_seed(case.seed, "quota", t.name) for t in case.settings.tasks}


def rename_given(given: Given, case: Case, names: Mapping[str, str]) -> None:
    """Tell the reference of the tasks' new names: former name -> name."""
    for known in (given.held_out, given.teachers, given.chosen):
        for old, new in names.items():
            if old in known:
                known[new] = known.pop(old)
    given.ranks = _ranks(case)


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="reference-")
