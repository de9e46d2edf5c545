"""The trainer: one loop from task weights to a better actor.

    quotas -> prompts -> rollout -> constraints -> rewards -> advantages -> update -> scheduler, guard

Everything the loop decides comes from objects whose state is data, so a checkpoint holds all of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import GuardStop, TrainingError
from multitask_rl.evaluation import Evaluator, append_evaluations, mean_interval
from multitask_rl.flow import DataFlow, Stage
from multitask_rl.guard.decision import GuardAction
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.plan import RunPlan, initial_weights, plan_run
from multitask_rl.records import Event, Scored, TaskEvaluation, TaskStats
from multitask_rl.recovery import Recovery
from multitask_rl.refill import Refill
from multitask_rl.run_state import RunStore
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.stages import AdvantageStage, ConstraintStage, RewardStage, RolloutStage
from multitask_rl.step_metrics import aggregate, by_group, task_stats
from multitask_rl.task_run import TaskRun, build_task_runs, draw_prompts
from multitask_rl.tracking.fanout import Trackers
from multitask_rl.training.actor import Actor, load_actor
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner, UpdateReport
from multitask_rl.training.optimizer import schedule_factor
from multitask_rl.training.runner import ModelRunner

if TYPE_CHECKING:
    from multitask_rl.data import TaskDataLoader

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one shared actor on the tasks of a tasks file.

    Args:
        actor: the shared actor (``get_actor_critic``).
        critic: its critic; None makes heads on the actor's trunk where a task needs them.
        dataloader: rows by task (``get_dataloader``); None reads the data sets named in the tasks file.
        config_path: the tasks file.
        config: the run's configuration; default: ``RunConfig()``.

    Raises:
        ConfigError, PluginError, DataError: whatever can be refused before training starts is refused here.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic | None = None,
        dataloader: TaskDataLoader | None = None,
        config_path: str | Path | None = None,
        *,
        config: RunConfig | None = None,
    ) -> None:
        config = config or RunConfig()
        if config_path is not None:
            config = replace(config, tasks_file=str(config_path))
        if dataloader is not None:
            config = replace(config, batch=replace(config.batch, prompts_per_step=dataloader.batch_size))
        if actor.engine:
            config = replace(config, rollout=replace(config.rollout, engine=actor.engine))
        plan = plan_run(config, dataloader)
        scorer = RewardPool(plan.specs, config.scoring, seed=config.seed, devices=plan.devices)
        scorer.start()
        self._assemble(
            plan, scorer, actor, critic or Critic(trunk=config.critic.trunk, device=str(actor.device))
        )
        if dataloader is not None and dataloader.given_weights:
            self.scheduler = self._configured_scheduler(dataloader.weights)

    @classmethod
    def from_config(cls, config: RunConfig) -> Trainer:
        """Build everything from the configuration; checks first, reward models next, the actor last."""
        plan = plan_run(config)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        scorer = RewardPool(plan.specs, config.scoring, seed=config.seed, devices=plan.devices)
        scorer.start()
        actor = load_actor(config.model, plan.devices.get("actor", ""))
        critic = Critic(trunk=config.critic.trunk, device=plan.devices.get("critic", str(actor.device)))
        trainer = cls.__new__(cls)
        trainer._assemble(plan, scorer, actor, critic)
        return trainer

    def _assemble(self, plan: RunPlan, scorer: RewardPool, actor: Actor, critic: Critic) -> None:
        config = plan.config
        self.config, self.plan, self.actor, self.critic, self.scorer = config, plan, actor, critic, scorer
        self.runs: dict[str, TaskRun] = build_task_runs(plan.specs, plan.algorithms, plan.rows, config, actor)
        critic.build(actor, [n for n in plan.trained if self.runs[n].algorithm.needs_critic])
        self.scheduler = self._configured_scheduler(initial_weights(plan.specs, plan.trained))
        self.guard = self._configured_guard()
        self.step = 0
        self.history: list[tuple[int, dict[str, TaskEvaluation]]] = []
        self.events: list[Event] = []
        self._inserted: list[tuple[Stage, str]] = []
        self._is_open = False

    def _configured_scheduler(self, weights: Mapping[str, float] | None) -> DynamicTaskWeightScheduler:
        scheduler = self.config.scheduler
        return DynamicTaskWeightScheduler(
            initial_weights=weights,
            metric_key=scheduler.metric_key,
            patience=scheduler.patience,
            min_weight=scheduler.min_weight,
            policy=scheduler.policy,
            **scheduler.policy_config,
        )

    def _configured_guard(self) -> SafetyGuard | None:
        guard = self.config.guard
        if not guard.enabled:
            return None
        return SafetyGuard(
            monitor_metrics=guard.monitor_metrics or None,
            threshold_delta=guard.threshold_delta,
            rollback_steps=guard.rollback_steps,
            absolute=guard.absolute,
            max_rollbacks=guard.max_rollbacks,
            **guard.guard_config,
        )

    # -- settings of the Python front door ------------------------------------------------------------------

    def set_task_scheduler(self, scheduler: DynamicTaskWeightScheduler) -> None:
        """Use ``scheduler`` instead of the configured one. Before ``train``."""
        self.scheduler = scheduler

    def add_guard(self, guard: SafetyGuard) -> None:
        """Use ``guard`` instead of the configured one. Before ``train``."""
        self.guard = guard

    def insert_stage(self, stage: Stage, *, after: str) -> None:
        """Put a node of your own into the flow of every step, after the stage ``after``. Before ``train``."""
        self._inserted.append((stage, after))

    def enable_3d_hybrid_engine(self) -> str:
        """Use one set of weights for training and generation where engine and devices allow; say what holds.

        The Hugging Face engine always samples from the training weights themselves; an engine with its own
        copy (vLLM) receives them after each update. Returns the choice and its reason.
        """
        shares = bool(getattr(self.plan.engine_class, "shares_weights", False))
        engine = self.config.rollout.engine
        choice = (
            f"hybrid engine: rollout engine {engine!r} "
            + (
                "samples from the training weights in place, no second copy"
                if shares
                else "keeps its own copy of the weights and receives them in memory after each update"
            )
            + f"; actor on {self.actor.device}, one data-parallel rank, no tensor or pipeline parallelism"
        )
        logger.info("%s", choice)
        return choice

    # -- the run --------------------------------------------------------------------------------------------

    def train(self) -> dict[str, TaskEvaluation]:
        """Run to ``max_steps`` and return the last evaluation.

        Raises:
            GuardStop: the guard ended the run.
            TrainingError: the run is already complete, or gradients stayed non-finite.
            RewardError: a task's rewards fail beyond its error budget.
        """
        self._open()
        first = self.step
        if first >= self.config.max_steps:
            raise TrainingError(
                f"the run in {self.config.output_dir} already made its {first} steps; raise max_steps to go on, "
                "or choose another output_dir for a new run"
            )
        status = "failed"
        try:
            while self.step < self.config.max_steps:
                if self._begin_step():
                    self.train_step()
            # judged like any other: a regression in the last steps is rolled back too
            while not self._begin_step(last=True):
                self.train_step()
            status = "finished"
        except GuardStop:
            status = "stopped"
            raise
        finally:
            self._close(status)
        return self.history[-1][1]

    def evaluate(self) -> dict[str, TaskEvaluation]:
        """Evaluate every task with the weights as they are, without training."""
        self._open(track=False)
        try:
            return self._evaluator.evaluate(self.step)
        finally:
            self._close("finished")

    def train_step(self) -> UpdateReport:
        """Make one step: sample, score, learn, decide."""
        self._open()
        began = time.perf_counter()
        self.flow.seconds.clear()
        quotas = self.scheduler.quotas(self.config.batch.prompts_per_step, self.step)
        drawn, kept = self._refill.collect(quotas, self._experience)
        credited = self.flow(kept, start="advantages")
        update_began = time.perf_counter()
        report = self._learn(credited, quotas)
        update_s = time.perf_counter() - update_began
        stats = self._stats(drawn, kept, quotas, report)
        self._control(stats)
        self.step += 1
        self._log_step(stats, report, drawn, time.perf_counter() - began, update_s)
        return report

    def _experience(self, counts: Mapping[str, int]) -> list[Scored]:
        """Draw prompts and pass them through the flow up to their scores."""
        return self.flow(draw_prompts(self.runs, counts, self.actor), before="advantages")

    def _learn(self, credited: list[Any], quotas: Mapping[str, int]) -> UpdateReport:
        present = {c.sample.task for c in credited}
        total = sum(quotas[name] for name in present)
        shares = {name: quotas[name] / total for name in present} if total else {}
        factor = schedule_factor(self.config.optimizer, self.step, self.config.max_steps)
        if self.guard is not None:
            factor *= self.guard.lr_factor(self.step)
        report = self.learner.update(
            credited,
            shares=shares,
            step=self.step,
            learning_rate_factor=factor,
        )
        report.metrics["learning_rate"] = self.config.optimizer.learning_rate * factor
        self.actor.policy_version += 1
        self.push_weights()
        return report

    def push_weights(self) -> None:
        """Let the engine sample from the actor's weights as they are."""
        weights = {} if getattr(self._engine, "shares_weights", False) else self.actor.state_dict()
        self._engine.update_weights(weights, self.actor.policy_version)

    def _stats(
        self, drawn: Sequence[Scored], kept: Sequence[Scored], quotas: Mapping[str, int], report: UpdateReport
    ) -> dict[str, TaskStats]:
        groups, kept_groups = by_group(drawn), by_group(kept)
        num_drawn = sum(len(g) for g in groups.values())
        informative = self._refill.num_informative(kept_groups)
        weights, pool = self.scheduler.weights(), self.scorer.metrics()
        stats = {}
        for name in self.plan.trained:
            own = groups.get(name, {})
            metrics = {
                **report.task_metrics.get(name, {}),
                **self._advantages.metrics.get(name, {}),
                **pool.get(name, {}),
                "weight": weights[name],
                "share_requested": quotas.get(name, 0) / max(1, sum(quotas.values())),
                "share_sampled": len(own) / max(1, num_drawn),
                "share_trained": informative.get(name, 0) / max(1, sum(informative.values())),
                "overlong_prompts": float(self.runs[name].num_overlong),
                "kl_coefficient": self.runs[name].kl.coefficient,
            }
            stats[name] = task_stats(self.runs[name], own, metrics)
        return stats

    def _control(self, stats: Mapping[str, TaskStats]) -> None:
        """Let every controller see the step; note what it decided."""
        self.note(self.scheduler.update(stats, self.step))
        if self.guard is not None:
            self.guard.record_step(self.step, stats)
        self.note(self.scorer.health_events(self.step))
        for name, own in stats.items():
            self.note(self.runs[name].control(own, self.step))

    def _log_step(
        self,
        stats: Mapping[str, TaskStats],
        report: UpdateReport,
        drawn: Sequence[Scored],
        seconds: float,
        update_s: float,
    ) -> None:
        tokens = sum(len(s.rollout.response_ids) for s in drawn)
        per_task = {
            name: {
                **s.metrics,
                "reward_mean": s.reward_mean,
                "reward_std": s.reward_std,
                "informative_rate": s.num_informative / max(1, s.num_prompts),
                "samples_per_s": sum(1 for x in drawn if x.rollout.task == name) / seconds,
            }
            for name, s in stats.items()
        }
        better = {name: run.spec.higher_is_better for name, run in self.runs.items()}
        metrics = aggregate(per_task, "reward_mean", better)
        metrics.update({f"train/{k}": v for k, v in report.metrics.items()})
        metrics.update({f"time/{k}_s": v for k, v in self.flow.seconds.items()})
        metrics.update(
            {
                "time/update_s": update_s,
                "time/step_s": seconds,
                "time/samples_per_s": len(drawn) / seconds,
                "time/tokens_per_s": tokens / seconds,
                "time/rewards_per_s": len(drawn) / max(self.flow.seconds.get("rewards", 0.0), 1e-9),
                "train/policy_version": float(self.actor.policy_version),
            }
        )
        self._trackers.log_metrics(metrics, self.step)
        self._trackers.log_rollouts(_some_of_each(drawn, self.config.tracking.store_rollouts), self.step)

    # -- evaluation, guard, checkpoints ---------------------------------------------------------------------

    def _begin_step(self, *, last: bool = False) -> bool:
        """Evaluate, judge and save what is due at this step; False if the guard took the run back."""
        evaluate, save = self.config.eval.every, self.config.checkpoint.every
        due = last or self.step == 0 or (evaluate > 0 and self.step % evaluate == 0)
        entry_due = last or self.step == 0 or (save > 0 and self.step % save == 0)
        good: bool | None = None
        if due and self._evaluated_at != self.step:
            evaluations = self._evaluate_now()
            good, rolled_back = self._judge(evaluations)
            if rolled_back:
                return False
        if entry_due and self._saved_at != self.step:
            self._save(good)
        return True

    def _evaluate_now(self) -> dict[str, TaskEvaluation]:
        began = time.perf_counter()
        evaluations = self._evaluator.evaluate(self.step)
        self.history.append((self.step, evaluations))
        self._evaluated_at = self.step
        append_evaluations(self.plan.output_dir / "evaluations.jsonl", evaluations)
        per_task = {
            name: {"eval": mean_interval(e.values)[0], **{f"eval_{k}": v for k, v in e.metrics.items()}}
            for name, e in evaluations.items()
        }
        better = {name: run.spec.higher_is_better for name, run in self.runs.items()}
        metrics = aggregate(per_task, "eval", better)
        metrics["time/evaluation_s"] = time.perf_counter() - began
        self._trackers.log_metrics(metrics, self.step)
        return evaluations

    def _judge(self, evaluations: Mapping[str, TaskEvaluation]) -> tuple[bool | None, bool]:
        """Ask the guard; return (are these weights good, was the run rolled back)."""
        if self.guard is None:
            return None, False
        recovery = Recovery(self, self.guard, self._evaluator)
        decision = self.guard.observe(self.step, evaluations, recovery.confirm)
        self.note(decision.events)
        self._trackers.log_metrics(self.guard.metrics(), self.step)
        if decision.action is GuardAction.stop:
            recovery.stop(decision)
        rolled_back = decision.action is GuardAction.rollback and recovery.roll_back(decision)
        factors = self.guard.weight_factors()
        self.scheduler.set_factors({n: f for n, f in factors.items() if n in self.plan.trained})
        return None if rolled_back else decision.judged_good, rolled_back

    def _save(self, good: bool | None) -> None:
        self._saved_at = self.step
        scores = [mean_interval(e.values)[0] for e in self.history[-1][1].values()] if self.history else []
        finite = [s for s in scores if math.isfinite(s)]
        score = sum(finite) / len(finite) if finite and self._evaluated_at == self.step else None
        self.store.save(self, judged_good=good, score=score)

    def note(self, events: Sequence[Event]) -> None:
        """Record decisions: in ``events`` and with every tracker."""
        for event in events:
            self.events.append(event)
            self._trackers.log_event(event)

    def counters(self) -> dict[str, int]:
        """Return the run's own counters, for the checkpoint."""
        return {
            "step": self.step,
            "policy_version": self.actor.policy_version,
            "evaluated_at": self._evaluated_at,
        }

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Restore ``counters``; the checkpoint they come from counts as saved."""
        self.step = self._saved_at = counters["step"]
        self.actor.policy_version = counters["policy_version"]
        self._evaluated_at = counters["evaluated_at"]

    @property
    def run_id(self) -> str | None:
        """Identity of the run with its trackers."""
        return self._trackers.run_id

    # -- opening and closing --------------------------------------------------------------------------------

    def _open(self, *, track: bool = True) -> None:
        """Build what depends on the scheduler and guard in use, and resume. Once."""
        if self._is_open:
            return
        self._is_open = True
        config, plan = self.config, self.plan
        torch.manual_seed(config.seed)
        targets = {n: plan.specs[n].target for n in plan.trained}
        floors = {n: plan.specs[n].min_share for n in plan.trained}
        self.scheduler.bind(plan.trained, targets=targets, min_shares=floors, seed=config.seed)
        if self.guard is not None:
            self.guard.bind({n: s.higher_is_better for n, s in plan.specs.items()})
        self._evaluated_at = self._saved_at = -1
        self.store = RunStore(plan.output_dir, config.checkpoint)
        self._engine = plan.engine_class.build(
            self.actor, config.rollout, seed=config.seed, output_dir=plan.output_dir
        )
        reference = self.store.reference(self.actor, self.runs)
        runner = ModelRunner(self.actor, self.critic, config, reference)
        learner_tasks = {n: self.runs[n].learner for n in plan.trained}
        self.learner = Learner(runner, learner_tasks, config)
        many_updates = config.batch.num_minibatches * config.batch.num_epochs > 1
        self._advantages = AdvantageStage(
            CreditAssigner(runner, learner_tasks, many_updates=many_updates), self.runs
        )
        self.flow = self._build_flow()
        self._refill = Refill(self.runs, config.batch.refill_rounds)
        self._evaluator = Evaluator(
            self.actor,
            self._engine,
            self.scorer,
            self.runs,
            seed=config.seed,
            temperature=config.eval.temperature,
        )
        run_id = self.store.resume(self)
        self.push_weights()
        self._open_trackers(run_id, track=track)

    def _build_flow(self) -> DataFlow:
        rollout = RolloutStage(
            self._engine,
            self.runs,
            lambda ids: str(self.actor.tokenizer.decode(ids, skip_special_tokens=True)),
            seed=self.config.seed,
        )
        constraints = ConstraintStage(self.scorer, rollout, self.runs)
        flow = DataFlow([rollout, constraints, RewardStage(self.scorer, self.runs), self._advantages])
        for stage, after in self._inserted:
            flow.insert(stage, after=after)
        return flow

    def _open_trackers(self, run_id: str | None, *, track: bool) -> None:
        tracking = self.config.tracking if track else replace(self.config.tracking, trackers=[])
        self._trackers = Trackers(self.plan.output_dir, tracking, run_id)
        if track:
            parameters = self.store.write_config(self.config, self.plan.specs)
            self._trackers.start(parameters, self.step or None)
            logger.info("%s", self.plan.describe())

    def _close(self, status: str) -> None:
        self._trackers.finish(status)
        self.flow.close()
        self._engine.close()
        self.scorer.close()


def _some_of_each(scored: Sequence[Scored], number: int) -> list[Scored]:
    if number < 0:
        return list(scored)
    taken: dict[str, int] = {}
    result = []
    for s in scored:
        taken[s.rollout.task] = taken.get(s.rollout.task, 0) + 1
        if taken[s.rollout.task] <= number:
            result.append(s)
    return result
