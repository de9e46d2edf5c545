"""What the numbers of a task mean, the same in training and held out (docs/definitions.md)."""

import itertools
import json
import math
from dataclasses import asdict, replace

import pytest

from multitask_rl.algorithms.constrained_decoding import ConstrainedDecoding
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.contracts import PluginTraits
from multitask_rl.curriculum.signal import TaskTrace
from multitask_rl.records import (
    NOT_APPLICABLE,
    OVERRUN,
    Direction,
    Failure,
    FailureKind,
    SamplingParams,
    Score,
    Scored,
    TaskStats,
    Turn,
    Verdict,
)
from multitask_rl.statistics.definitions import TaskMetrics, metric_names, pass_at_k
from multitask_rl.statistics.intervals import summarise
from multitask_rl.testing import make_rollout

BAD, GOOD = Verdict(cost=1.0, violated=True), Verdict(cost=0.0, violated=False)
ELSEWHERE = Verdict(cost=0.0, violated=False, applicable=False)
UNIT = PluginTraits(low=0.0, high=1.0)
FAILED = Failure(kind=FailureKind.timeout, message="slow")


def task(**keys):
    return TaskSpec(
        name="task",
        rewards=[RewardSpec(plugin="r", name="r")],
        constraints=[ConstraintSpec(plugin="safe", name="safe")],
        **keys,
    )


def metrics(traits=UNIT, algorithm=None, **keys):
    own = TaskMetrics(task(**keys), algorithm or GRPO(GRPOConfig()))
    own.declare({"r": traits})
    return own


def answer(draw, reward, *, attempt=0, verdict=GOOD):
    rollout = replace(make_rollout(draw=draw), attempt=attempt, verdicts={"safe": verdict})
    breakdown = {"r": NOT_APPLICABLE if reward is None else Score(value=reward)}
    return Scored(rollout=rollout, reward=reward, breakdown=breakdown, concerned=verdict.applicable)


def refused(draw, *, attempt=0):
    rollout = replace(make_rollout(draw=draw), attempt=attempt, verdicts={"safe": BAD}, rejected=True)
    return Scored(rollout=rollout, reward=None, cost=1.0)


def failed(draw):
    return replace(answer(draw, None), failure=FAILED)


def test_a_task_refused_in_four_of_five_slots_has_the_same_low_level_in_training_and_held_out():
    records = [answer(i, 0.9) if i % 5 == 0 else refused(i) for i in range(100)]
    own = metrics()
    assert own.describe(records)["reward_mean"].mean == pytest.approx(0.18)
    held_out = own.describe(records, held_out=True)["reward_mean"]
    assert (held_out.mean, held_out.n) == (pytest.approx(0.18), 100)
    assert own.primary(records).mean == pytest.approx(0.18)
    assert own.primary(records).values[:2] == [0.9, 0.0]


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        (PluginTraits(low=-5.0, high=5.0), -5.0),
        (PluginTraits(low=0.0, high=3.0, higher_is_better=False), 3.0),
    ],
)
def test_a_refused_slot_has_the_worst_end_of_the_declared_range(traits, expected):
    found = metrics(traits, primary_metric="r").primary([answer(0, 2.0), refused(1)])
    assert list(found.values) == [2.0, expected]
    assert found.direction is (Direction.higher if traits.higher_is_better else Direction.lower)


def test_penalties_are_part_of_the_declared_range():
    spec = task()
    spec.rewards[0].weight = 2.0
    spec.constraints.append(ConstraintSpec(plugin="p", name="p", mode="penalty", weight=0.5))
    own = TaskMetrics(spec, GRPO(GRPOConfig()))
    assert own.reward_range is None
    own.declare({"r": UNIT})
    assert own.reward_range == (-0.5, 2.0)


def test_without_a_range_a_refused_slot_has_the_worst_value_first_served_for_good():
    """A reward model around -2: refusing everything must never look like an improvement."""
    own = metrics(PluginTraits())
    first = own.primary([answer(0, -1.0), answer(1, -3.0), refused(2)])
    assert list(first.values) == [-1.0, -3.0, -3.0]
    all_refused = own.primary([refused(i) for i in range(4)])
    assert all_refused.mean == -3.0 < first.mean
    own.primary([answer(0, -9.0), refused(1)])
    again = metrics(PluginTraits())
    again.load_state_dict(own.state_dict())
    assert list(again.primary([answer(0, -1.0), refused(1)]).values) == [-1.0, -3.0]
    unknown = metrics(PluginTraits()).primary([refused(0)])
    assert unknown.n == 0
    assert math.isnan(unknown.mean)


@pytest.mark.parametrize(
    ("reasons", "end", "is_accepted"),
    [
        (["stop", "stop"], "stop", 1.0),
        (["stop", "stop"], "length", 1.0),  # max_turns ended the episode, behind a whole sentence
        (["length", "stop"], "stop", 0.0),
    ],
)
def test_an_episode_follows_its_grammar_if_each_answer_is_a_sentence(reasons, end, is_accepted):
    turns = [Turn(num_tokens=1, finish_reason=reason) for reason in reasons]
    rollout = replace(
        make_rollout(), turns=turns, finish_reason=end, sampling=SamplingParams(grammar='{"regex": "a"}')
    )
    found = metrics().describe([replace(answer(0, 1.0), rollout=rollout)])
    assert found["grammar/accepted_rate"].mean == is_accepted


def test_a_resumed_run_with_another_primary_metric_does_not_take_the_former_ones_refused_value():
    own = metrics(PluginTraits(), primary_metric="r")
    own.primary([answer(0, -50.0), refused(1)])
    other = replace(answer(0, 2.0), breakdown={"s": Score(value=7.0)})
    changed = metrics(PluginTraits(), primary_metric="s")
    changed.load_state_dict(own.state_dict())
    assert list(changed.primary([other, refused(1)]).values) == [7.0, 7.0]
    turned = metrics(PluginTraits(), primary_metric="r", higher_is_better=False)
    turned.load_state_dict(own.state_dict())
    assert list(turned.primary([answer(0, 2.0), answer(1, 3.0), refused(2)]).values) == [2.0, 3.0, 3.0]


def test_a_response_that_passes_the_limits_of_its_check_has_the_worst_value_of_a_component_too():
    """Else a policy whose responses hang the check on hard prompts would look better by ``ifeval/all``."""

    def scored(draw, **components):
        return replace(answer(draw, 0.0), breakdown={"r": Score(value=0.0, components=components)})

    own = metrics(primary_metric="r/all")
    records = [scored(0, all=1.0), scored(1, all=0.0), scored(2, overrun=1.0), scored(3)]
    found = own.primary(records)
    assert list(found.values)[:3] == [1.0, 0.0, 0.0]
    assert math.isnan(found.values[3])
    assert found.n == 3


def test_an_algorithm_that_trains_on_refused_responses_says_what_they_earn():
    algorithm = ConstrainedDecoding(ConstrainedDecoding.Config(rejected_reward=-0.5))
    found = metrics(algorithm=algorithm).describe([answer(0, 1.0), refused(1)])
    assert found["reward_mean"].mean == pytest.approx(0.25)
    assert found["reward/r"].mean == pytest.approx(0.5)


def test_failed_and_not_applicable_records_are_in_no_population():
    records = [answer(0, 1.0), failed(1), answer(2, None), answer(3, 0.0, verdict=ELSEWHERE)]
    found = metrics().describe(records, held_out=True)
    assert (found["reward/r"].mean, found["reward/r"].n) == (0.5, 2)
    values = found["reward/r"].values
    assert [values[0], values[3]] == [1.0, 0.0]
    assert [math.isnan(value) for value in values] == [False, True, True, False]
    assert (found["violation_rate"].n, found["cost"].n, found["cost/safe"].n) == (2, 2, 2)
    assert (found["failure_rate"].mean, found["failure_rate"].n) == (0.25, 4)
    assert found["length"].n == found["truncated_rate"].n == 3


def test_rates_of_constraints_have_their_own_populations():
    records = [refused(0), refused(0, attempt=1), answer(0, 1.0, attempt=2), answer(1, 1.0), refused(2)]
    found = metrics().describe(records)
    assert (found["violation_rate"].mean, found["violation_rate"].n) == (pytest.approx(2 / 3), 3)
    assert (found["served_violation_rate"].mean, found["served_violation_rate"].n) == (
        pytest.approx(1 / 3),
        3,
    )
    assert (found["rejection_rate"].mean, found["rejection_rate"].n) == (pytest.approx(3 / 5), 5)
    assert (found["cost"].mean, found["cost"].n) == (pytest.approx(3 / 5), 5)
    lower = ["violation_rate", "served_violation_rate", "rejection_rate", "cost", "cost/safe", "flagged_rate"]
    lower += ["truncated_rate", "failure_rate"]
    assert {found[name].direction for name in lower} == {Direction.lower}
    assert found["length"].direction is Direction.none
    assert found["reward_mean"].direction is Direction.higher


def test_the_error_of_a_rate_is_never_zero_and_that_of_clusters_counts_prompts():
    unseen = summarise([0.0] * 60, low=0.0, high=1.0)
    assert unseen.error == pytest.approx(math.sqrt((2 / 64) * (62 / 64) / 64))
    one_prompt_each = summarise([0.1, 0.4, 0.7, 0.9] * 25)
    assert one_prompt_each.error == pytest.approx(math.sqrt(0.091875 * 100 / 99 / 100), rel=1e-9)
    copies = summarise([0.1, 0.4, 0.7, 0.9] * 25, [i % 4 for i in range(100)])
    assert copies.error > 4 * one_prompt_each.error
    assert math.isnan(summarise([0.3]).error)


def overrun(draw, reward):
    record = answer(draw, reward)
    return replace(record, breakdown={"r": Score(value=reward, components={OVERRUN: 1.0})})


def test_a_loss_of_zero_everywhere_is_no_rate() -> None:
    assert summarise([0.0] * 8, low=0.0).error == 0.0
    assert summarise([0.0] * 8).error > 0.1


def test_what_is_worth_more_than_every_scored_response_is_told_once_with_its_setting():
    own = metrics(PluginTraits())
    scored = [answer(i, -1.0 - i / 100) for i in range(64)]
    assert own.unearned(scored[:8]) == []
    (told,) = own.unearned([*scored, overrun(70, 0.0)])
    assert "tasks.task.rewards.r.overrun: " in told
    assert "gets 0" in told
    assert "best of 72 scored responses has -1" in told
    assert own.unearned([overrun(71, 0.0)]) == []
    resumed = metrics(PluginTraits())
    resumed.load_earned_dict(json.loads(json.dumps(own.earned_dict())))
    assert resumed.unearned([overrun(71, 0.0)]) == [], "told before the checkpoint"

    decoding = ConstrainedDecoding(ConstrainedDecoding.Config(rejected_reward=-0.5))
    own = metrics(PluginTraits(), decoding)
    assert own.unearned([*scored[:10], refused(80)]) == []  # a few say nothing of the best
    half = metrics(PluginTraits(), decoding)
    assert half.unearned(scored[:40]) == []
    resumed = metrics(PluginTraits(), decoding)
    resumed.load_earned_dict(json.loads(json.dumps(half.earned_dict())))
    rest = [*scored[40:], refused(80)]
    assert resumed.unearned(rest) == half.unearned(rest) != [], "responses before the checkpoint count"
    (told,) = own.unearned([*scored, refused(80)])
    assert "tasks.task.algorithm_config.rejected_reward: " in told
    assert own.unearned([*scored, refused(80)]) == []


def test_what_is_worth_no_more_than_a_scored_response_is_not_told():
    scored = [answer(i, i / 100) for i in range(100)]
    assert metrics().unearned([*scored, overrun(101, 0.0), refused(102)]) == []


def test_an_overrun_of_what_is_only_measured_is_no_worth_of_the_response():
    rewards = [RewardSpec(plugin="r"), RewardSpec(plugin="m", weight=0.0, overrun=0.0)]
    own = TaskMetrics(TaskSpec(name="task", rewards=rewards), GRPO(GRPO.Config()))
    slow = {"m": Score(value=0.0, components={OVERRUN: 1.0})}
    best = answer(71, 2.0)
    measured = replace(best, breakdown={**best.breakdown, **slow})
    assert own.unearned([*(answer(i, i / 100) for i in range(64)), measured]) == []
    (told,) = own.unearned([overrun(72, 3.0)])
    assert "best of 65 scored responses has 2" in told


def test_what_failed_is_counted_apart_from_what_the_metric_does_not_concern():
    failure = Failure(kind=FailureKind.grader, message="m", source="r")
    scored = [
        answer(0, 1.0),
        replace(answer(1, 1.0), breakdown={"r": NOT_APPLICABLE}),
        replace(answer(2, 1.0), breakdown={"r": failure}),
        replace(answer(3, 1.0), reward=None, failure=failure),
        refused(4),
    ]
    own = metrics(primary_metric="r")
    assert own.num_failed(scored) == 2
    primary = own.primary(scored)
    assert len(primary.values) - primary.n - own.num_failed(scored) == 1


def sampled(draw, sample, value, answer=""):
    rollout = replace(make_rollout(draw=draw), sample=sample)
    return Scored(rollout=rollout, reward=value, breakdown={"r": Score(value=value, answer=answer)})


def of_prompts(*prompts, traits=UNIT, **keys):
    """Return the held-out metrics of prompts, each a list of (value, answer) of its responses."""
    records = [
        sampled(draw, i, *response) for draw, own in enumerate(prompts) for i, response in enumerate(own)
    ]
    return metrics(traits, **keys).describe(records, held_out=True)


def test_pass_at_k_is_the_mean_over_all_subsets_of_the_responses():
    for n, solved, k in [(5, 2, 3), (4, 0, 2), (4, 4, 4), (8, 1, 4)]:
        responses = [True] * solved + [False] * (n - solved)
        subsets = [any(own) for own in itertools.combinations(responses, k)]
        assert pass_at_k(n, solved, k) == pytest.approx(sum(subsets) / len(subsets))
    assert math.isnan(pass_at_k(2, 1, 3))


def test_prompts_with_several_responses_have_pass_at_k_and_a_majority_with_errors():
    right, wrong = (1.0, "4"), (0.0, "5")
    found = of_prompts([right, wrong, wrong, (0.0, "6")], [right, right, wrong, (0.0, "")])
    assert found["reward_mean"].values == [0.25, 0.5]
    assert found["pass@1"].mean == found["reward_mean"].mean
    assert found["pass@2"].values == [0.5, pytest.approx(1 - 1 / 6)]
    assert (found["pass@4"].mean, found["pass@4"].n) == (1.0, 2)
    assert found["pass@2"].error > 0
    assert found["maj@4"].values == [0.0, 1.0]
    known = metric_names(task(eval_samples=4))
    assert {name for name in found if name.startswith(("pass", "maj"))} <= known.keys()
    assert all(known[name] for name in ("pass@4", "maj@4"))


def test_a_tie_of_the_majority_is_its_mean_and_without_answers_there_is_none():
    assert of_prompts([(1.0, "4"), (0.0, "5")])["maj@2"].values == [0.5]
    assert of_prompts([(0.0, ""), (0.0, "")], [(1.0, "4"), (0.0, "")])["maj@2"].values == [0.0, 1.0]
    assert "maj@2" not in of_prompts([(1.0, ""), (0.0, "")])


def test_a_response_solves_at_the_good_end_of_the_range_or_at_solved_at():
    graded = [(0.5, ""), (0.9, "")]
    assert of_prompts(graded)["pass@2"].mean == 0.0
    assert of_prompts(graded, solved_at=0.5)["pass@1"].mean == 1.0
    assert "pass@2" not in of_prompts(graded, traits=PluginTraits())
    lower = PluginTraits(low=0.0, high=9.0, higher_is_better=False)
    assert of_prompts([(0.0, ""), (3.0, "")], traits=lower, primary_metric="r")["pass@1"].mean == 0.5


def test_a_failed_response_leaves_the_sizes_that_it_is_missing_for():
    records = [sampled(0, 0, 1.0), replace(sampled(0, 1, 0.0), failure=FAILED)]
    found = metrics().describe(records, held_out=True)
    assert found["pass@1"].mean == 1.0
    assert "pass@2" not in found


def test_of_rewards_that_exclude_each_other_the_one_that_applies_is_what_can_be_reached():
    names = ("refusal", "over_refusal")
    spec = TaskSpec(name="safety", rewards=[RewardSpec(plugin=n, name=n) for n in names], eval_samples=2)
    own = TaskMetrics(spec, GRPO(GRPOConfig()))
    own.declare(dict.fromkeys(names, UNIT))
    records = []
    for draw in range(10):  # every row's one applicable reward is 1
        results = [Score(value=1.0), NOT_APPLICABLE][:: 1 if draw % 2 else -1]
        terms = [(1.0, r.value if isinstance(r, Score) else math.nan) for r in results]
        for sample in range(2):
            record = replace(answer(draw, 1.0), breakdown=dict(zip(names, results, strict=True)), terms=terms)
            records.append(replace(record, rollout=replace(record.rollout, sample=sample)))
    failed = replace(records[-1], reward=None, breakdown={}, terms=[], failure=FAILED)
    unbounded = TaskMetrics(spec, GRPO(GRPOConfig()))
    unbounded.declare({"refusal": UNIT, "over_refusal": PluginTraits()})
    of_refusal = [r for r in records if isinstance(r.breakdown["refusal"], Score)]
    rejected = replace(failed, failure=None, rollout=replace(failed.rollout, rejected=True))
    for further, rate in (([], 1.0), ([failed], 1.0), ([rejected], 0.9)):  # in place of one of ten
        assert unbounded.describe([*of_refusal, *further], held_out=True)["pass@1"].mean == rate
    assert own.reward_range == (0.0, 2.0)
    assert own.range_of(records) == (0.0, 1.0)
    held_out = own.describe(records, held_out=True)
    assert held_out["pass@1"].mean == held_out["pass@2"].mean == 1.0
    both = replace(records[0], terms=[(1.0, 1.0), (1.0, 0.0)])
    assert own.range_of([*records, both]) == (0.0, 2.0)
    stats = TaskStats(task="safety", num_prompts=8, num_informative=1, reward_mean=1.0)
    levels = []
    for known in ((0.0, 1.0), None):  # a checkpoint keeps it
        trace = TaskTrace(known_range=(0.0, 2.0))
        trace.observe(replace(stats, reward_range=known), "reward_score", 0.1)
        levels.append(TaskTrace.from_state(json.loads(json.dumps(asdict(trace))), (0.0, 2.0)).level)
    assert levels == [1.0, 0.5]


def test_equal_values_have_exactly_their_mean_and_no_error():
    found = summarise([0.1, 0.1, 0.1])
    assert (found.mean, found.error) == (0.1, 0.0)
    assert summarise([0.1, 0.1, 0.1], ["a"] * 3, keep=["a"]).values == [0.1]


def episode(draw, reward, earned):
    record = answer(draw, reward)
    return replace(record, rollout=replace(record.rollout, turns=[Turn(num_tokens=1)], earned=earned))


def test_an_environment_that_gives_nothing_is_told_and_so_is_a_better_end_than_its_rewards():
    world = task(environment="worlds.py:W")
    world.rewards = [RewardSpec(plugin="environment", name="environment")]
    cut = [episode(i, 0.0, None) for i in range(64)]
    own = TaskMetrics(world, GRPO(GRPOConfig()))
    assert own.unearned(cut[:40]) == []
    resumed = TaskMetrics(world, GRPO(GRPOConfig()))
    resumed.load_earned_dict(json.loads(json.dumps(own.earned_dict())))
    (told,) = resumed.unearned(cut[40:])
    assert "rewards.environment.config.unfinished: " in told
    assert "none of 64 responses has one" in told
    assert resumed.unearned(cut) == []
    lost = [episode(i, -1.0, -1.0) for i in range(64)]
    (told,) = TaskMetrics(world, GRPO(GRPOConfig())).unearned([*lost, cut[0]])
    assert "gets 0, the best of 64 scored responses has -1" in told
    won = [episode(i, 0.0, 0.0) for i in range(64)]
    assert TaskMetrics(world, GRPO(GRPOConfig())).unearned([*won, cut[0]]) == []
