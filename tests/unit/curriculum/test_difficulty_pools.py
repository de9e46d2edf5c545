"""Difficulty pools: shares, exact counts, moving prompts, resume; and that they learn from fewer prompts."""

import json
import math
import random
import runpy
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from multitask_rl.config.run import CheckpointConfig, EvalConfig, GuardConfig, OptimizerConfig
from multitask_rl.config.task import CurriculumSpec
from multitask_rl.curriculum.difficulty import PoolEstimate, RewardRange, pool_shares
from multitask_rl.data import PooledStream, PromptStream
from multitask_rl.errors import DataError
from run_builders import lines, run_config, train, write_run

ROWS = [{"id": i, "level": i % 4} for i in range(80)]
BY_LEVEL = CurriculumSpec(by="level", pools=4)
BY_RATE = CurriculumSpec(by="pass_rate", pools=4)


def stream(spec=BY_LEVEL, rows=ROWS, seed=0):
    return PooledStream(rows, task="math", seed=seed, spec=spec)


def rewards(row, level_rates=(1.0, 0.5, 0.25, 0.0)):
    solved = round(8 * level_rates[row["level"]])
    return [1.0] * solved + [0.0] * (8 - solved)


def play(pooled, steps, per_step=8, scale=1.0, shift=0.0):
    """Draw and observe; return the rows drawn and the events."""
    drawn, events = [], []
    for step in range(steps):
        part = pooled.next(per_step)
        drawn += [row for _, row in part]
        groups = {draw: [scale * r + shift for r in rewards(row)] for draw, row in part}
        events += pooled.observe(groups, step)
    return drawn, events


def test_pools_that_teach_equally_are_drawn_uniformly() -> None:
    shares = pool_shares({"a": 30, "b": 10}, {"a": 0.2, "b": 0.2}, 0.1)
    assert shares == pytest.approx({"a": 0.75, "b": 0.25})
    assert pool_shares({"a": 3, "b": 1}, {"a": 0.0, "b": 0.0}, 0.1) == {"a": 0.75, "b": 0.25}
    assert pool_shares({"a": 3, "b": 1, "c": 0}, {"a": 0.0, "b": 0.2, "c": 0.25}, 0.4) == pytest.approx(
        {"a": 0.3, "b": 0.7, "c": 0.0}
    )


def test_learnability_is_the_variance_within_groups_not_of_the_pool() -> None:
    mixed = PoolEstimate()
    for _ in range(200):  # half always solved, half never: pass rate 0.5 and nothing to learn
        mixed.observe([1.0] * 8)
        mixed.observe([0.0] * 8)
    unit = RewardRange()
    assert mixed.pass_rate(unit) == pytest.approx(0.5, abs=0.03)
    assert mixed.learnability(unit) < 0.01
    single = PoolEstimate()
    for i in range(400):
        single.observe([float(i % 2)])
    assert single.learnability(unit) == pytest.approx(0.25, abs=0.01)
    rng, frontier = random.Random(0), []
    for _ in range(200):
        estimate = PoolEstimate()
        for _ in range(40):
            estimate.observe([float(rng.random() < 0.3) for _ in range(4)])
        frontier.append(estimate.variance)
    assert mean(frontier) == pytest.approx(0.3 * 0.7, abs=0.01), "unbiased"


def test_counts_follow_the_shares_and_no_pool_starves() -> None:
    pooled = stream()
    drawn, events = play(pooled, 200)
    late = Counter(row["level"] for row in drawn[800:])
    learnable = {0: 0.0, 1: 2 / 7, 2: 1.5 / 7, 3: 0.0}  # 4 of 8 and 2 of 8 solved, unbiased variance
    for level, gain in learnable.items():
        share = 0.1 / 4 + 0.9 * gain / (3.5 / 7)
        assert late[level] / 800 == pytest.approx(share, abs=0.03), level
        assert late[level] >= 15
    assert {e.source for e in events} == {"curriculum"}
    assert {e.task for e in events} == {"math"}
    assert "share of pool 1 (level 1)" in events[-1].reason
    assert math.fsum(events[-1].data["to"].values()) == pytest.approx(1.0)


def test_a_step_repeats_no_prompt_and_every_prompt_of_a_pool_gets_its_turn() -> None:
    pooled = stream()
    for step in range(100):
        part = pooled.next(24)
        assert len({row["id"] for _, row in part}) == 24
        pooled.observe({draw: rewards(row) for draw, row in part}, step)
    counts = Counter(row["id"] for row in play(pooled, 60)[0])
    for level in range(4):
        own = [counts[row["id"]] for row in ROWS if row["level"] == level]
        assert max(own) - min(own) <= 1
    assert [d for d, _ in pooled.next(100)] == list(range(2880, 2980)), (
        "more than there are rows: they repeat"
    )


def test_prompts_move_between_pools_with_what_they_earn() -> None:
    pooled = stream(BY_RATE)
    first = pooled.next(80)
    assert sorted(row["id"] for _, row in first) == list(range(80)), "the never asked come first"
    assert [row for _, row in first] == [r for _, r in PromptStream(ROWS, task="math", seed=0).next(80)]
    pooled.observe({draw: rewards(row) for draw, row in first}, 0)
    pools = pooled.state_dict()["curriculum"]["pools"]
    levels = {name: {ROWS[i]["level"] for i in members} for name, members in pools.items()}
    assert levels == {"0": {3}, "1": {2}, "2": {1}, "3": {0}, "unseen": set()}
    numbers = pooled.metrics()
    assert numbers["pool/unseen/share"] == 1.0
    assert numbers["pool/unseen/pass_rate"] == pytest.approx(mean([1.0, 0.5, 0.25, 0.0]), abs=0.15)
    assert "pool/3/pass_rate" not in numbers
    for step in range(60):  # what was hard is solved now: found through the floor
        part = pooled.next(8)
        pooled.observe({draw: [1.0] * 7 + [0.0] for draw, _ in part}, step)
    assert len(pooled.state_dict()["curriculum"]["pools"]["0"]) == 0


@pytest.mark.parametrize("spec", [BY_LEVEL, BY_RATE], ids=["column", "rate"])
def test_draws_continue_exactly_where_they_were(spec) -> None:
    whole = stream(spec)
    expected, events = play(whole, 60)
    half = stream(spec)
    play(half, 30)
    resumed = stream(spec)
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict())))
    drawn, later = play(resumed, 30)
    assert drawn == expected[30 * 8 :]
    assert [e.reason for e in later] == [e.reason for e in events][-len(later) :] if later else True
    assert resumed.state_dict() == whole.state_dict()
    assert play(stream(spec, seed=1), 60)[0] != expected


@pytest.mark.parametrize("spec", [BY_LEVEL, BY_RATE], ids=["column", "rate"])
def test_data_skipped_after_a_rollback_leave_no_pass_rates_of_the_weights_that_are_gone(spec) -> None:
    gone = stream(spec)
    play(gone, 4)
    good = json.loads(json.dumps(gone.state_dict()))
    window = []
    for step in range(4, 8):  # weights that fail everything
        part = gone.next(8)
        window += [row["id"] for _, row in part]
        gone.observe({draw: [0.0] * 8 for draw, _ in part}, step)
    restored = stream(spec)
    restored.load_state_dict(good)
    restored.skip_to(json.loads(json.dumps(gone.state_dict())))
    state = restored.state_dict()["curriculum"]
    for name in ("estimates", "rates", "scale"):
        assert state[name] == good["curriculum"][name]
    assert restored.draw == gone.draw
    for rows in state["pools"].values():  # next are those not given in the window
        assert [row in window for row in rows] == sorted(row in window for row in rows)


@pytest.mark.parametrize("spec", [BY_LEVEL, BY_RATE])
def test_undone_draws_leave_what_was_heard_of_others(spec) -> None:
    """An interrupt while rows are drawn ahead: those drawn before them were trained on meanwhile."""
    ahead, alone = stream(spec), stream(spec)
    for pooled in (ahead, alone):
        play(pooled, 6)
        kept = pooled.next(8)
        heard = {draw: rewards(row) for draw, row in kept}
        before = json.loads(json.dumps(pooled.state_dict()))
        if pooled is ahead:
            pooled.next(8)
            pooled.next(5)
        pooled.observe(heard, 6)
        if pooled is ahead:
            pooled.undo(before)
    found, wanted = ahead.state_dict(), alone.state_dict()
    assert found == wanted


def test_the_row_drawn_longest_ago_is_next_though_its_group_came_late() -> None:
    pooled = PooledStream(ROWS[:4], task="math", seed=0, spec=BY_RATE, late_steps=2)
    first, *others = pooled.next(4)
    pooled.observe({draw: [1.0, 1.0] for draw, _ in others}, 0)
    pooled.observe({first[0]: [1.0, 1.0]}, 1)
    assert [row for _, row in pooled.next(4)] == [row for _, row in (first, *others)]


def test_the_row_drawn_longest_ago_is_next_though_others_were_drawn_ahead() -> None:
    pooled = stream(BY_RATE, ROWS[:8])
    drawn = pooled.next(8)
    pooled.observe({draw: [1.0, 1.0] for draw, _ in drawn[:4]}, 0)
    ahead = pooled.next(2)
    pooled.observe({draw: [1.0, 1.0] for draw, _ in drawn[4:]}, 1)
    pooled.observe({draw: [1.0, 1.0] for draw, _ in ahead}, 2)
    waiting = [row for _, row in drawn if row not in [row for _, row in ahead]]
    assert [row for _, row in pooled.next(6)] == waiting


def test_state_between_drawing_and_hearing_survives() -> None:
    whole, before = stream(BY_RATE), stream(BY_RATE)
    part = whole.next(8)
    assert before.next(8) == part
    resumed = stream(BY_RATE)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for one in (whole, resumed):
        one.observe({draw: rewards(row) for draw, row in part}, 0)
    assert resumed.state_dict() == whole.state_dict()
    assert whole.state_dict()["curriculum"]["pending"] == {}


@pytest.mark.parametrize("late_steps", [1, 2])
def test_a_late_group_teaches_as_long_as_it_may_still_come(late_steps) -> None:
    def begin():
        return PooledStream(ROWS, task="math", seed=0, spec=BY_RATE, late_steps=late_steps)

    def num_taught(pooled):
        return sum(e["groups"] for e in pooled.state_dict()["curriculum"]["estimates"].values())

    pooled, late = begin(), []
    for step in range(5):
        *part, slow = pooled.next(8)
        late.append(slow)
        joining = [late[step - late_steps]] if step >= late_steps else []
        pooled.observe({draw: rewards(row) for draw, row in part + joining}, step)
        assert num_taught(pooled) == 7 * (step + 1) + max(0, step + 1 - late_steps)
    for step in range(5, 6 + late_steps):
        pooled.observe({draw: rewards(row) for draw, row in pooled.next(8)}, step)
    assert pooled.state_dict()["curriculum"]["pending"] == {}, "nothing is kept for ever"


def test_a_group_that_a_resume_cut_off_says_nothing_of_its_prompt() -> None:
    running, resumed = (PooledStream(ROWS, task="math", seed=0, spec=BY_RATE, late_steps=2) for _ in range(2))
    early, last = running.next(8), running.next(8)
    running.observe({draw: rewards(row) for draw, row in early[1:]}, 0)
    running.observe({draw: rewards(row) for draw, row in last[:-1]}, 1)
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    for step in range(2, 6):
        for pooled in (running, resumed):
            pooled.observe({draw: rewards(row) for draw, row in pooled.next(8)}, step)
    assert len(running.state_dict()["curriculum"]["unjudged"]) == 2, "their groups were too slow"
    assert resumed.state_dict()["curriculum"]["unjudged"] == []


def test_what_could_not_be_judged_teaches_nothing() -> None:
    pooled = stream(BY_RATE)
    part = pooled.next(8)
    pooled.observe({draw: [] for draw, _ in part[4:]}, 0)  # the first four never came back
    state = pooled.state_dict()["curriculum"]
    assert state["pending"] == {}
    assert len(state["pools"]["unseen"]) == 80
    assert not state["rates"]
    pooled.observe({999: [1.0]}, 1)  # not of this stream's draws: ignored
    assert not pooled.state_dict()["curriculum"]["rates"]


def test_prompts_that_are_never_judged_do_not_hold_the_level_at_its_first_value() -> None:
    pooled = stream(BY_RATE, rows=ROWS[:8])
    for step in range(60):  # half of the prompts are never judged; the others earn 0 at first, then 1
        part = pooled.next(4)
        earned = 0.0 if step < 2 else 1.0
        pooled.observe({draw: [] if row["id"] < 4 else [earned] * 8 for draw, row in part}, step)
    assert earned + pooled.shift() == pytest.approx(1.0, abs=0.05)


def test_rejected_responses_are_in_the_level_of_even_draws_as_they_are_in_that_of_the_step(tmp_path) -> None:
    write_run(
        tmp_path,
        """
tasks:
  pooled:
    type: grpo
    dataset: rows.jsonl
    rewards: [plugins.py:reward]
    constraints: [{plugin: plugins.py:refuse, mode: reject, max_attempts: 1, weight: 1}]
    curriculum: {by: level, floor: 0.1}
""",
    )
    (tmp_path / "plugins.py").write_text(
        """
import itertools
from multitask_rl.scoring.shapes import with_traits

earned, asked = itertools.cycle((0.0, 1.0)), itertools.count()

@with_traits(isolate=False, low=0.0, high=1.0, deterministic=False)
def reward(response, level):
    return 1.0 if level == "easy" else next(earned)

@with_traits(isolate=False, deterministic=False)
def refuse(response, level):
    return float(level == "hard" and next(asked) % 4 > 0)
"""
    )
    rows = [{"id": i, "prompt": "ab>", "level": ("easy", "hard")[i % 2]} for i in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "eval": EvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=0, resume="never"),
        "guard": GuardConfig(enabled=False),
        "optimizer": OptimizerConfig(learning_rate=1e-9),
    }
    train(run_config(tmp_path, "out", 20, **changes))
    rows = [json.loads(line) for line in lines(tmp_path / "out", "metrics.jsonl")]
    last = [row for row in rows if "task/pooled/level" in row]
    assert last[-1]["task/pooled/pool/1/share"] > 0.6
    # easy prompts earn 1; a quarter of the responses to hard ones is served, of which half earn 1
    assert last[-1]["task/pooled/level"] == pytest.approx(0.5 * 1 + 0.5 * 0.25 * 0.5, abs=0.05)


@pytest.mark.parametrize("spec", [BY_RATE, BY_LEVEL])
def test_prompts_that_are_never_judged_get_the_floor_alone_while_the_others_are_learnt(spec) -> None:
    pooled, chance, drawn = stream(spec), random.Random(0), []
    for step in range(150):
        part = pooled.next(8)
        rate = min(0.95, 0.3 + 0.65 * step / 60)
        drawn += [row["level"] == 0 for _, row in part]  # a quarter of the prompts
        groups = {d: [] if r["level"] == 0 else [float(chance.random() < rate)] * 2 for d, r in part}
        pooled.observe(groups, step)
    assert mean(drawn[-400:]) < 0.06
    assert stream(spec).state_dict()["curriculum"]["unjudged"] == []
    again = stream(spec)
    again.load_state_dict(json.loads(json.dumps(pooled.state_dict())))
    assert again.next(8) == pooled.next(8)


def test_scale_and_shift_of_the_reward_change_nothing() -> None:
    plain, scaled = stream(BY_RATE), stream(BY_RATE)
    assert play(plain, 60)[0] == play(scaled, 60, scale=100.0, shift=7.0)[0]
    assert plain.metrics() == pytest.approx(scaled.metrics())


@pytest.mark.parametrize("outlier", [1e6, -1e6])
def test_an_outlier_or_two_do_not_set_the_scale(outlier) -> None:
    pooled = stream(BY_LEVEL)
    for step in range(40):
        part = pooled.next(8)
        groups = {draw: [100.0 * r for r in rewards(row)] for draw, row in part}
        if step in (20, 30):
            groups[part[0][0]][-1] = outlier
        pooled.observe(groups, step)
        if step == 19:
            before = pooled.metrics()
    after = pooled.metrics()
    for level, rate in enumerate((1.0, 0.5, 0.25, 0.0)):
        assert after[f"pool/{level}/pass_rate"] == pytest.approx(rate, abs=0.05)
        assert after[f"pool/{level}/share"] == pytest.approx(before[f"pool/{level}/share"], abs=0.13)


def test_other_rows_or_pools_start_anew_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    pooled = stream(BY_RATE)
    play(pooled, 10)
    other = stream(CurriculumSpec(by="pass_rate", pools=3))
    other.load_state_dict(pooled.state_dict())
    assert "start anew" in caplog.text
    assert other.next(1)[0][0] == 80
    plain = PromptStream(ROWS, task="math", seed=0)
    plain.load_state_dict(pooled.state_dict())
    assert plain.draw == 80
    fresh = stream(BY_RATE)
    fresh.load_state_dict(plain.state_dict())
    assert len(fresh.state_dict()["curriculum"]["pools"]["unseen"]) == 80


def test_columns_of_numbers_and_of_texts() -> None:
    rows = [{"id": i, "length": 10 * i, "kind": "ab"[i % 2]} for i in range(100)]
    sizes = stream(CurriculumSpec(by="length", pools=4), rows).state_dict()["curriculum"]["pools"]
    assert [len(members) for members in sizes.values()] == [25, 25, 25, 25]
    assert max(sizes["0"]) < min(sizes["1"])
    assert len(stream(CurriculumSpec(by="kind", pools=4), rows).state_dict()["curriculum"]["pools"]) == 2
    skewed = [{"id": i, "length": max(0, i - 90)} for i in range(100)]
    sizes = stream(CurriculumSpec(by="length", pools=4), skewed).state_dict()["curriculum"]["pools"]
    assert sum(map(len, sizes.values())) == 100
    assert min(map(len, sizes.values())) > 0
    with pytest.raises(DataError, match="row 0 has no such column"):
        stream(CurriculumSpec(by="levle"))
    with pytest.raises(DataError, match="100 different texts"):
        stream(CurriculumSpec(by="name"), [{"id": i, "name": str(i)} for i in range(100)])


@pytest.mark.parametrize(
    ("rows_of_each", "sizes"),
    [
        ([1, 1, 1, 1, 36], [4, 36]),
        ([3, 3, 3, 3, 3, 85], [15, 85]),
        ([1, 1, 40, 1, 1, 1], [2, 40, 1, 2]),
        ([40, 1, 1, 1, 1], [40, 1, 1, 2]),
    ],
)
def test_a_number_of_most_rows_does_not_swallow_the_pools_of_the_others(rows_of_each, sizes):
    rows = [{"id": f"{n}/{i}", "length": n} for n, own in enumerate(rows_of_each) for i in range(own)]
    pools = stream(CurriculumSpec(by="length", pools=4), rows).state_dict()["curriculum"]["pools"]
    assert [len(pool) for pool in pools.values()] == sizes


def test_mastery_takes_fewer_prompts_than_drawing_uniformly() -> None:
    path = Path(__file__).parents[3] / "docs" / "simulate_curriculum.py"
    prompts_to_mastery = runpy.run_path(str(path))["prompts_to_mastery"]
    uniform = [prompts_to_mastery(None, seed) for seed in range(6)]
    for by, most in (("level", 0.7), ("pass_rate", 0.85)):
        ours = [prompts_to_mastery(CurriculumSpec(by=by), seed) for seed in range(6)]
        ratios = [a / b for a, b in zip(ours, uniform, strict=True)]
        assert max(ratios) < 0.9, "on every seed"
        assert mean(ratios) < most


@pytest.mark.parametrize("spec", [BY_LEVEL, BY_RATE])
def test_after_a_change_of_rewards_no_row_comes_again_before_the_others(spec: CurriculumSpec) -> None:
    first = stream(spec)
    drawn, _ = play(first, 4)
    state = json.loads(json.dumps(first.state_dict()))
    state["curriculum"] = {"last_draw": state["curriculum"]["last_draw"]}
    second = stream(spec)
    second.load_state_dict(state)
    more = [row for _, row in second.next(16)]
    assert not {row["id"] for row in drawn} & {row["id"] for row in more}
    assert not [name for name in second.metrics() if "pass_rate" in name], "the new rewards are not known"
    renamed = PooledStream(ROWS, task="maths", seed=1, spec=spec)
    renamed.load_state_dict(state)
    assert [row for _, row in renamed.next(16)] == more, (
        "the order of the rows is that of the run's beginning"
    )
