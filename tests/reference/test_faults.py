"""A check that cannot fail is worthless: each fault planted in the product, or in its input, is seen."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from multitask_rl.algorithms import group as group_statistics
from multitask_rl.algorithms import grpo, policy_loss, ppo, reinforce_pp
from multitask_rl.algorithms.constrained_decoding import ConstrainedDecoding
from multitask_rl.constraints.multiplier import LagrangeMultiplier
from multitask_rl.constraints.streaming import StreamJudge
from multitask_rl.curriculum.mt_grpo import MTGRPO
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler, UnlearnableGate
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.curriculum.straggler import Straggler
from multitask_rl.data import PooledStream
from multitask_rl.data.render import Conversation
from multitask_rl.environments.calls import CallCounts
from multitask_rl.guard.watched_metric import RegressionDetector
from multitask_rl.models import lora
from multitask_rl.models.grammar import Grammars
from multitask_rl.records import Direction, TrainSample
from multitask_rl.run.state import RunState
from multitask_rl.run.supervisor import Supervisor
from multitask_rl.scoring.items import Item
from multitask_rl.statistics import definitions
from multitask_rl.statistics.definitions import REWARD
from multitask_rl.step import episodes, refill, task_state
from multitask_rl.step import metrics as step_metrics
from multitask_rl.step.metrics import StepReport
from multitask_rl.step.stages import RolloutStage
from multitask_rl.training import runner
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import AveragedReference
from reference import product, scripted

from .cases import draw_case
from .compare import compare
from .test_step import COMBINATIONS

MOST = 60
"""Cases looked at for one in which a fault can show; ``test_step.py`` says that both sides agree on them."""
assert MOST <= COMBINATIONS


def has(kind=None, *, mode=None, **config):
    """Return whether a case has a task of that type, with a constraint of that mode and those settings."""

    def is_wanted(case):
        return any(
            (kind is None or t.type in kind)
            and (mode is None or any(c.mode == mode for c in t.constraints))
            and all(t.config.get(name) == value for name, value in config.items())
            for t in case.settings.tasks
        )

    return is_wanted


def std_of_the_batch(patch):
    real = group_statistics.divide_by_group_std
    patch.setattr(
        group_statistics,
        "divide_by_group_std",
        lambda d, groups, **how: real(d, torch.zeros_like(groups), **how),
    )


def costs_are_not_seen(patch):
    patch.setattr(step_metrics, "costs_differ", lambda run, group: False)


def failed_counts_zero(patch):
    patch.setattr(scripted.Reward, "typed", staticmethod(lambda v: 0.0 if v in (None, "failed") else v))


def refused_are_left_out(patch):
    patch.setattr(ConstrainedDecoding, "trains_rejected", False)


def lower_is_better_is_added(patch):
    real = scripted.Reward.__init__

    def init(self, config):
        real(self, replace(config, higher_is_better=True))

    patch.setattr(scripted.Reward, "__init__", init)


def lambda_twice(patch):
    real = grpo.subtract_costs
    for module in (grpo, ppo, reinforce_pp):
        patch.setattr(
            module,
            "subtract_costs",
            lambda a, batch, of, **how: real(real(a, batch, of, **how), batch, of, **how),
        )


def denominator_of_the_minibatch(patch):
    real = Learner._token_weights
    patch.setattr(
        Learner, "_token_weights", lambda self, part, shares: [0.5 * w for w in real(self, part, shares)]
    )


def gradients_are_off_by_some_roundings(patch):
    real = Learner._token_weights
    patch.setattr(
        Learner,
        "_token_weights",
        lambda self, part, shares: [w * (1.0 + 3e-5) for w in real(self, part, shares)],
    )


def kl_twice(patch):
    for module in (grpo, ppo, reinforce_pp):
        real = module.sampled_kl
        patch.setattr(module, "sampled_kl", lambda batch, real=real: 2.0 * real(batch))


def kl_of_the_loss_is_another(patch):
    real = policy_loss.estimate_kl
    patch.setattr(policy_loss, "estimate_kl", lambda now, ref, which: real(now, ref, "k1"))


def no_cap_on_importance(patch):
    real = policy_loss.truncated_is_weight
    patch.setattr(policy_loss, "truncated_is_weight", lambda old, rollout, cap: real(old, rollout, math.inf))


def clip_bounds_swapped(patch):
    real = policy_loss.clipped_surrogate

    def swapped(ratio, advantages, *, clip_low, clip_high, dual_clip):
        return real(ratio, advantages, clip_low=clip_high, clip_high=clip_low, dual_clip=dual_clip)

    patch.setattr(policy_loss, "clipped_surrogate", swapped)


def value_head_keeps_its_unit(patch):
    patch.setattr(Critic, "rescale", lambda self, task, scale, shift: None)


def bootstrap_after_the_end(patch):
    patch.setattr(
        ppo,
        "compute_gae",
        lambda rewards, values, lengths, *, gamma, gae_lambda, real=ppo.compute_gae: real(
            rewards + 0.1 * gamma, values, lengths, gamma=gamma, gae_lambda=gae_lambda
        ),
    )


def reference_stands_still(patch):
    patch.setattr(AveragedReference, "ema_update", lambda self, actor: None)


def rounding_is_forgotten(patch):
    real = DynamicTaskWeightScheduler.quotas

    def quotas(self, num_prompts):
        self.load_state_dict({**self.state_dict(), "carry": {}})
        return real(self, num_prompts)

    patch.setattr(DynamicTaskWeightScheduler, "quotas", quotas)


def shares_by_samples(patch):
    patch.setattr(StepReport, "shares", lambda self, tasks: dict.fromkeys(tasks, 1.0 / len(tasks)))


def multiplier_misses_a_step(patch):
    real = LagrangeMultiplier.update
    patch.setattr(LagrangeMultiplier, "update", lambda self, cost, step: real(self, 0.5 * cost, step))


def refill_draws_one_too_many(patch):
    real = refill.Refill.collect

    def collect(self, quotas, experience, *given):
        def draw(counts):
            more = 0 if counts is quotas else 1
            return experience({name: count + more for name, count in counts.items()})

        return real(self, quotas, draw, *given)

    patch.setattr(refill.Refill, "collect", collect)


def whole_groups_are_dropped(patch):
    real = refill.Refill.keep
    patch.setattr(
        refill.Refill,
        "keep",
        lambda self, drawn, quotas: real(self, drawn, {n: max(0, q - 1) for n, q in quotas.items()}),
    )


def everybody_is_counted(patch):
    real = definitions.summarise

    def summarise(values, *given, keep=(), **more):
        found = real(values, *given, keep=keep, **more)
        return replace(found, n=len(values)) if found.n and keep else found

    patch.setattr(definitions, "summarise", summarise)


def refused_are_left_out_of_the_held_out_mean(patch):
    real = definitions.TaskMetrics.primary
    patch.setattr(
        definitions.TaskMetrics,
        "primary",
        lambda self, scored: real(self, [s for s in scored if not s.rollout.rejected]),
    )


def more_cost_is_better(patch):
    real = definitions.TaskMetrics.describe

    def describe(self, scored, **held_out):
        found = real(self, scored, **held_out)
        turned = {n: replace(s, direction=Direction.higher) for n, s in found.items() if n == "cost"}
        return found | turned

    patch.setattr(definitions.TaskMetrics, "describe", describe)


def slack_of_the_guard_is_halved(patch):
    real = RegressionDetector.observe

    def observe(self, value, error, step, settings, **scale):
        before = self.cusum
        real(self, value, error, step, settings, **scale)
        if self.demonstrated is not None:
            fall = (self.demonstrated - self.value) / self.error
            self.cusum = max(0.0, before + fall - 0.5 * self.slack)

    patch.setattr(RegressionDetector, "observe", observe)


def the_gate_never_holds(patch):
    patch.setattr(UnlearnableGate, "update", lambda self, policy, stats, step: [])


def the_gate_never_releases(patch):
    real = UnlearnableGate.update

    def update(self, policy, stats, step):
        before = set(self.held)
        events = real(self, policy, stats, step)
        self.held |= before
        return events

    patch.setattr(UnlearnableGate, "update", update)


def the_way_has_no_start(patch):
    patch.setattr(Straggler, "_remaining", Straggler.deficit)


def differences_of_form_count_in_full(patch):
    patch.setattr(TaskTrace, "headroom", property(lambda self: (1.0, 0.0)))


def improvement_is_ignored(patch):
    real = MTGRPO._learn

    def learn(self, progress):
        real(self, dict.fromkeys(progress, 0.0))

    patch.setattr(MTGRPO, "_learn", learn)


def lost_responses_are_served(patch):
    real = definitions._has_failed
    patch.setattr(definitions, "_has_failed", lambda scored: real(scored) and not scored.rollout.failure)


def forced_tokens_are_trained(patch):
    real = Grammars.choices
    patch.setattr(Grammars, "choices", lambda self, *given: [c | True for c in real(self, *given)])


def parts_of_an_episode_weigh_as_a_whole_one(patch):
    real = CreditAssigner.credit

    def credit(self, samples):
        credited, metrics = real(self, samples)
        return [replace(c, fraction=1.0) for c in credited], metrics

    patch.setattr(CreditAssigner, "credit", credit)


def a_conversation_never_begins_anew(patch):
    patch.setattr(TrainSample, "split", lambda self: [self])


def a_failed_world_is_asked_once(patch):
    patch.setattr(episodes, "MOST_TRIES", 1)


def a_teacher_has_another_temperature(patch):
    real = runner.exact_kl
    patch.setattr(runner, "exact_kl", lambda actor, teacher: real(actor, 0.9 * teacher))


def given_answers_have_no_end(patch):
    real = task_state.render_answer_ids
    patch.setattr(task_state, "render_answer_ids", lambda *given: real(*given)[:-1])


def adapters_count_once_more(patch):
    real = lora.add_adapters
    patch.setattr(
        product, "add_adapters", lambda model, config, seed: real(model, replace(config, alpha=64.0), seed)
    )


def frozen_tasks_keep_a_share(patch):
    real = DynamicTaskWeightScheduler.set_factors
    patch.setattr(
        DynamicTaskWeightScheduler,
        "set_factors",
        lambda self, factors: real(self, {name: max(0.1, f) for name, f in factors.items()}),
    )


def a_resumed_run_owes_nothing(patch):
    real = DynamicTaskWeightScheduler.load_state_dict

    def load_state_dict(self, *given, **named):
        real(self, *given, **named)
        self.carry = {}

    patch.setattr(DynamicTaskWeightScheduler, "load_state_dict", load_state_dict)


def hard_prompts_lower_the_level(patch):
    patch.setattr(PooledStream, "shift", lambda self: 0.0)


def rows_are_drawn_in_the_order_of_their_groups(patch):
    def add(self, index, pool):
        pool[index] = None

    patch.setattr(PooledStream, "_add", add)


def what_no_one_could_judge_is_drawn_on(patch):
    real = PooledStream._num_without
    patch.setattr(PooledStream, "_num_without", lambda self, rows: real(self, ()))


def the_first_answer_wins(patch):
    patch.setattr(definitions, "_majority", lambda votes: votes[0][1] if votes else math.nan)


def the_kl_of_an_anchor_is_turned_around(patch):
    real = runner.exact_kl
    patch.setattr(runner, "exact_kl", lambda p, q: real(q, p))


def texts_keep_what_stopped_them(patch):
    patch.setattr(RolloutStage, "_text", lambda self, slot, ids, also=(): self._shown(ids))


def texts_of_a_world_replace_those_of_the_task(patch):
    real = episodes.Episodes.sampling

    def sampling(self, episode):
        found = real(self, episode)
        return replace(found, stop=episode.stop or found.stop)

    patch.setattr(episodes.Episodes, "sampling", sampling)


def prompts_may_be_one_token_longer(patch):
    real = product.RolloutConfig
    patch.setattr(
        product,
        "RolloutConfig",
        lambda *, max_prompt_tokens, **own: real(max_prompt_tokens=max_prompt_tokens + 1, **own),
    )


def a_renamed_task_begins_anew(patch):
    patch.setattr(RunState, "_renamed", lambda self, known: {})


def what_exceeds_a_limit_has_failed(patch):
    patch.setattr(Item, "conclusion", lambda self: self.trouble)


def parts_of_what_exceeds_a_limit_are_left_out(patch):
    patch.setattr(definitions, "OVERRUN", "none")


def refused_calls_use_up_the_limit(patch):
    real = CallCounts.refuse

    def refuse(self, call):
        left = self.left
        real(self, call)
        self.left = left

    patch.setattr(CallCounts, "refuse", refuse)


def results_of_a_test_are_read(patch):
    patch.setattr(Supervisor, "_deciding", lambda self, evaluations: dict(evaluations))


def no_one_looks_at_what_is_being_written(patch):
    patch.setattr(StreamJudge, "check", lambda self, partial: [False] * len(partial))


def only_the_sum_of_named_rewards_counts(patch):
    real = product._spec

    def spec(*given):
        found = real(*given)
        for rule in found["rewards"]:
            if rule["plugin"] == "environment":
                rule.pop("config", None)
        return found

    patch.setattr(product, "_spec", spec)


def new_tasks_are_not_measured_at_a_resume(patch):
    real = RunState._load_tasks

    def load(self, *given):
        real(self, *given)
        self.unmeasured = []

    patch.setattr(RunState, "_load_tasks", load)


def weights_of_a_resume_are_ignored(patch):
    real, first = DynamicTaskWeightScheduler.bind, {}

    def bind(self, *given, **named):
        self.initial_weights = {n: first.setdefault(n, w) for n, w in self.initial_weights.items()}
        return real(self, *given, **named)

    patch.setattr(DynamicTaskWeightScheduler, "bind", bind)


def evaluates(mode=None, steps=2):
    """Return whether a case has an evaluation, of a task with a constraint of that mode."""
    return lambda case: (
        0 < case.settings.eval_every * (steps - 1) < case.num_steps
        and (mode is None or any(c.mode in mode for t in case.settings.tasks for c in t.constraints))
    )


def adapts(policy):
    """Return whether a case has tasks with a history between which that policy chooses."""
    return lambda case: (
        case.settings.policy == policy and case.past_steps > 0 and len(case.settings.tasks) > 1
    )


def draws_by(*columns):
    return lambda case: any(t.curriculum and t.curriculum.by in columns for t in case.settings.tasks)


def talks(case):
    return any(t.max_turns > 1 for t in case.settings.tasks)


def exceeds():
    return lambda case: any(script.over for script in case.scripts.values())


def was_dead(case, steps):
    return any(p.dead_steps == steps and p.level < 0.5 for p in case.past.values())


GROUPED = ("grpo", "dapo", "gspo", "cispo", "constrained_decoding")


def earlier_messages_stay_as_they_were(patch):
    real = Conversation.reply
    patch.setattr(Conversation, "reply", lambda self, *given: (real(self, *given)[0], None))


def adapters_read_all_of_their_input(patch):
    real = product.add_adapters
    whole = lambda network, config, seed: real(network, replace(config, dropout=0.0), seed)  # noqa: E731
    patch.setattr(product, "add_adapters", whole)


def other_rewards_are_the_same(patch):
    patch.setattr(task_state.TaskState, "is_redefined", lambda self, metric=REWARD: False)


FAULTS = {
    std_of_the_batch: has(GROUPED, normalisation="group"),
    costs_are_not_seen: has(GROUPED, mode="lagrangian", entropy_coefficient=0.0),
    failed_counts_zero: has(),
    refused_are_left_out: has(("constrained_decoding",), mode="reject"),
    lower_is_better_is_added: has(GROUPED),
    lambda_twice: has(mode="lagrangian"),
    denominator_of_the_minibatch: lambda case: case.settings.num_minibatches > 1,
    gradients_are_off_by_some_roundings: lambda case: (
        case.arithmetic == "float32" and case.settings.max_grad_norm == 0.0
    ),
    kl_twice: lambda case: any(
        t.kl_coefficient > 0.0 and t.kl_placement == "reward" and t.type in GROUPED
        for t in case.settings.tasks
    ),
    kl_of_the_loss_is_another: lambda case: any(
        t.kl_coefficient > 0.0 and t.kl_placement == "loss" and t.type in GROUPED for t in case.settings.tasks
    ),
    no_cap_on_importance: has(GROUPED, truncated_is=1.1),
    clip_bounds_swapped: lambda case: has(GROUPED, clip_low=0.01)(case) and case.settings.num_epochs > 1,
    value_head_keeps_its_unit: has(("ppo",), popart=True, popart_rate=0.3),
    bootstrap_after_the_end: has(("ppo",)),
    reference_stands_still: lambda case: (
        case.settings.reference_decay < 1.0
        and case.num_steps > 1
        and any(t.kl_coefficient > 0.0 for t in case.settings.tasks)
    ),
    rounding_is_forgotten: lambda case: len(case.settings.tasks) > 1 and case.num_steps > 2,
    shares_by_samples: lambda case: len(case.settings.tasks) > 1 and case.settings.max_grad_norm == 0.0,
    multiplier_misses_a_step: has(mode="lagrangian"),
    refill_draws_one_too_many: lambda case: (
        case.settings.refill_rounds > 0 and case.settings.max_staleness == 0
    ),
    whole_groups_are_dropped: has(GROUPED),
    everybody_is_counted: evaluates(("penalty", "lagrangian")),
    refused_are_left_out_of_the_held_out_mean: evaluates(("reject",)),
    more_cost_is_better: evaluates(("reject", "penalty", "lagrangian")),
    slack_of_the_guard_is_halved: lambda case: evaluates(steps=3)(case) and case.num_steps > 9,
    the_gate_never_holds: lambda case: case.past_steps > 250 and was_dead(case, 1000),
    the_gate_never_releases: lambda case: case.past_steps > 250 and was_dead(case, 250),
    the_way_has_no_start: adapts("straggler"),
    differences_of_form_count_in_full: lambda case: (
        adapts("deficit_learnability")(case) and any(p.after == "form" for p in case.past.values())
    ),
    improvement_is_ignored: adapts("mt_grpo"),
    forced_tokens_are_trained: lambda case: any(
        t.grammar and t.type not in ("ppo", "sft") for t in case.settings.tasks
    ),
    parts_of_an_episode_weigh_as_a_whole_one: talks,
    a_conversation_never_begins_anew: talks,
    a_failed_world_is_asked_once: talks,
    a_teacher_has_another_temperature: has(("distill",), exact=True),
    given_answers_have_no_end: has(("sft",)),
    adapters_count_once_more: lambda case: case.settings.lora_rank > 0,
    adapters_read_all_of_their_input: lambda case: case.settings.lora_dropout > 0.0,
    earlier_messages_stay_as_they_were: lambda case: (
        case.template not in ("", "plain", "strip") and any(t.max_turns > 1 for t in case.settings.tasks)
    ),
    other_rewards_are_the_same: lambda case: any(
        "rewards" in own for chosen in case.changes.values() for own in chosen.values()
    ),
    frozen_tasks_keep_a_share: lambda case: (
        evaluates()(case) and any(0.0 in own.values() for own in case.settings.guard_factors)
    ),
    a_resumed_run_owes_nothing: lambda case: case.resumed_at > 0 and len(case.settings.tasks) > 1,
    the_kl_of_an_anchor_is_turned_around: lambda case: (
        evaluates()(case) and any(a.has_kl for a in case.settings.anchors)
    ),
    hard_prompts_lower_the_level: draws_by("pass_rate", "number", "grade"),
    rows_are_drawn_in_the_order_of_their_groups: lambda case: (
        draws_by("pass_rate")(case) and case.num_steps > 4
    ),
    what_no_one_could_judge_is_drawn_on: lambda case: (
        draws_by("pass_rate", "number", "grade")(case) and case.num_steps > 6
    ),
    the_first_answer_wins: lambda case: (
        evaluates()(case) and any(script.answers for script in case.scripts.values())
    ),
    texts_keep_what_stopped_them: lambda case: any(t.stop for t in case.settings.tasks),
    texts_of_a_world_replace_those_of_the_task: lambda case: any(
        case.limiting.get(t.name) and t.stop and t.max_turns > 1 for t in case.settings.tasks
    ),
    a_renamed_task_begins_anew: lambda case: bool(case.renamed),
    what_exceeds_a_limit_has_failed: exceeds(),
    parts_of_what_exceeds_a_limit_are_left_out: lambda case: (
        evaluates()(case)
        and any("/part" in t.primary_metric for t in case.settings.tasks)
        and exceeds()(case)
    ),
    refused_calls_use_up_the_limit: lambda case: any(t.max_tool_calls for t in case.settings.tasks),
    results_of_a_test_are_read: lambda case: (
        evaluates()(case)
        and any(t.is_reported and t.weight and t.type != "sft" for t in case.settings.trained)
    ),
    no_one_looks_at_what_is_being_written: lambda case: any(
        c.stream_every for t in case.settings.tasks for c in t.constraints
    ),
    only_the_sum_of_named_rewards_counts: lambda case: bool(case.named),
    new_tasks_are_not_measured_at_a_resume: lambda case: bool(case.changes),
    weights_of_a_resume_are_ignored: lambda case: bool(case.changes) and case.num_steps > 6,
    prompts_may_be_one_token_longer: lambda case: case.settings.max_prompt_tokens < 6,
    lost_responses_are_served: lambda case: case.engine_failing > 0.0,
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(plant, monkeypatch):
    cases = {seed: draw_case(seed) for seed in range(1, MOST)}
    seeds = [seed for seed, case in cases.items() if FAULTS[plant](case)]
    seeds = sorted(seeds, key=lambda seed: cases[seed].num_steps * (1 + len(cases[seed].settings.tasks)))[:12]

    def problems(seed):
        with monkeypatch.context() as patch:
            plant(patch)
            return compare(draw_case(seed)).problems

    assert any(map(problems, seeds)), f"{len(seeds)} cases were compared and none showed it"
