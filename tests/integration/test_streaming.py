"""Streaming constraints and retries, from a tasks file to the trained weights."""

import json

import pytest

from multitask_rl.config.run import BatchConfig, EvalConfig, RolloutConfig
from multitask_rl.errors import ConfigError
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.step.flow import DataFlow
from multitask_rl.step.stages import sampling_stages
from multitask_rl.step.task_state import render_rows
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, weights_hash, write_run

JUDGES = """

def digits(response):
    \"\"\"The more digits, the dearer; the first one violates.\"\"\"
    from multitask_rl.records import Verdict

    number = sum(c.isdigit() for c in response)
    return Verdict(cost=min(1.0, number / 10), violated=number > 0, reason=f"{number} digits")


def letters(response):
    return float(any(c.isalpha() for c in response))


def anything(response):
    return 1.0


def breaks_below_eight(response):
    if len(response) < 8:
        raise ValueError("too short to judge")
    return float(any(c.isdigit() for c in response))
"""
HERE = """

from multitask_rl.scoring.shapes import with_traits

for _plugin in (starts_right, is_short):
    with_traits(isolate=False)(_plugin)
"""
TASKS = """
tasks:
  free:
    type: grpo
    dataset: copy.jsonl
    rewards: [rewards.py:starts_right]
  held:
    type: grpo
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints:
      - {plugin: rewards.py:digits, mode: %s, limit: 0.1, stream_every: %d}
"""


def write(directory, mode="lagrangian", every=2, tasks=TASKS):
    write_run(directory, tasks % (mode, every) if "%" in tasks else tasks)
    with (directory / "rewards.py").open("a") as file:
        file.write(JUDGES + HERE)


def config(directory, output, steps, **changes):
    settings = {
        "rollout": RolloutConfig(max_new_tokens=16),
        "eval": EvalConfig(every=2, num_prompts=12),
        # what is drawn again depends on the rewards, and these differ between the runs compared
        "batch": BatchConfig(prompts_per_step=12, group_size=4, refill_rounds=0),
    }
    return run_config(directory, output, steps, **(settings | changes))


def rollouts(directory, task="held"):
    rows = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
    return [row for row in rows if row["task"] == task]


def key(row):
    return row["step"], row["draw"], row["sample"], row["attempt"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run whose constraint streams, a step of one that judges whole responses."""
    directory = tmp_path_factory.mktemp("streaming")
    write(directory, every=2)
    streaming = train(config(directory, "streaming", 3))
    write(directory, every=0)
    train(config(directory, "whole", 1))
    write(directory, every=2)
    return directory, streaming


def test_a_flagged_response_is_the_beginning_of_the_whole_one_and_costs_what_its_judge_says(finished):
    directory, _ = finished
    whole = {key(row): row for row in rollouts(directory / "whole") if row["step"] == 1}
    streamed = {key(row): row for row in rollouts(directory / "streaming") if row["step"] == 1}
    assert whole.keys() == streamed.keys()
    flagged = [k for k, row in streamed.items() if row["finish_reason"] == "flagged"]
    assert len(flagged) > 5
    for k, row in streamed.items():
        ids = row["response_ids"]
        if k not in flagged:
            own, other = (r["tokens"].pop("logprobs") for r in (row, whole[k]))
            assert own == pytest.approx(other, abs=0.0015)  # rounded, and computed in other batches
            del row["tokens"]["advantages"], whole[k]["tokens"]["advantages"]  # of its whole group
            assert row == whole[k], "nothing of an unflagged response changes"
            continue
        assert len(ids) % 2 == 0
        assert ids == whole[k]["response_ids"][: len(ids)]
        digits = [i for i, c in enumerate(row["response"]) if c.isdigit()]
        assert digits, "there is something to flag"
        verdict = row["verdicts"]["digits"]
        assert verdict["violated"]
        assert row["cost"] == verdict["cost"] == min(1.0, len(digits) / 10)
    saved = sum(len(whole[k]["response_ids"]) - len(streamed[k]["response_ids"]) for k in flagged)
    assert saved > 2 * len(flagged), "tokens that never came to be"


def test_a_flagged_response_is_trained_on_and_not_sampled_again(finished):
    directory, trainer = finished
    rows = rollouts(directory / "streaming")
    assert {row["attempt"] for row in rows} == {0}
    assert not any(row["rejected"] for row in rows)
    assert all(m.value > 0 for m in trainer.tasks["held"].multipliers.values())
    metrics = [json.loads(x) for x in (directory / "streaming" / "metrics.jsonl").read_text().splitlines()]
    numbers = {k: v for row in metrics for k, v in row.items()}
    assert 0 < numbers["task/held/flagged_rate"] <= 1
    assert numbers["task/held/mismatch_max"] < 1e-4, "the kept log-probabilities are the policy's"
    assert "task/free/flagged_rate" not in numbers


def test_a_task_beside_it_samples_the_very_same_first_step(finished):
    directory, _ = finished
    first = [
        [r for r in rollouts(directory / run, "free") if r["step"] == 1] for run in ("whole", "streaming")
    ]
    assert first[0] == first[1]
    assert first[0]


def test_a_streaming_run_resumed_equals_the_uninterrupted_one(finished):
    directory, whole = finished
    train(config(directory, "parts", 2))
    resumed = train(config(directory, "parts", 3))
    assert weights_hash(resumed) == weights_hash(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert lines(directory / "parts", name) == lines(directory / "streaming", name)


JUDGED = """
    type: grpo
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints:
"""
SEVERAL = f"""
tasks:
  reject: {JUDGED}      - {{plugin: rewards.py:digits, mode: reject, limit: 0.1, stream_every: 2}}
  both: {JUDGED}      - {{plugin: rewards.py:digits, mode: penalty, limit: 0.1, stream_every: 2}}
      - {{plugin: rewards.py:letters, mode: penalty, stream_every: 5}}
  breaking: {JUDGED}      - plugin: rewards.py:breaks_below_eight
        mode: penalty
        limit: 0.1
        stream_every: 2
"""


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A step with a task that samples again, one of two constraints and one whose constraint fails."""
    directory = tmp_path_factory.mktemp("several")
    write(directory, tasks=SEVERAL)
    batch = BatchConfig(prompts_per_step=18, group_size=4, refill_rounds=0)
    train(config(directory, "out", 1, eval=EvalConfig(every=0, num_prompts=4), batch=batch))
    return directory / "out"


def test_reject_samples_a_flagged_response_again(one_step):
    slots = {}
    for row in rollouts(one_step, "reject"):
        slots.setdefault((row["step"], row["draw"], row["sample"]), []).append(row)
    again = [rows for rows in slots.values() if len(rows) > 1]
    assert any(rows[0]["response_ids"] != rows[1]["response_ids"] for rows in again)
    for rows in again:
        assert all(row["rejected"] for row in rows[:-1])
        assert any(row["finish_reason"] == "flagged" for row in rows[:-1])


def test_constraints_of_different_rhythm_are_asked_when_each_is_due(one_step):
    flagged = [r for r in rollouts(one_step, "both") if r["finish_reason"] == "flagged"]
    assert {len(r["response_ids"]) % 10 for r in flagged} <= {0, 2, 4, 5, 6, 8}
    by_letter = [r for r in flagged if len(r["response_ids"]) % 2]
    assert by_letter, "a look of the second constraint alone"
    for row in flagged:
        last = len(row["response_ids"])
        assert (last % 2 == 0 and row["verdicts"]["digits"]["violated"]) or (
            last % 5 == 0 and row["verdicts"]["letters"]["violated"]
        )


def test_a_look_that_fails_ends_nothing_and_spends_no_budget(one_step):
    flagged = [r for r in rollouts(one_step, "breaking") if r["finish_reason"] == "flagged"]
    assert flagged
    assert all(len(row["response"]) >= 8 for row in flagged)


def greedy_attempts(directory, *settings):
    """Evaluate the task held, whose responses are all refused; return each prompt's attempts in order."""
    kept = "\n    ".join(["rewards: [rewards.py:is_short]", *settings])
    tasks = TASKS.replace("digits", "anything").replace("rewards: [rewards.py:is_short]", kept)
    write(directory, tasks=tasks % ("reject", 0))
    trainer = Trainer.from_config(
        config(directory, "out", 1, eval=EvalConfig(num_prompts=12, temperature=0.0))
    )
    parts = trainer._open(track=False)
    try:
        shape = {"purpose": "evaluation", "group_sizes": {"held": 1}, "temperature": 0.0}
        stages = sampling_stages(
            trainer.actor, parts.engine, trainer.scorer, trainer.tasks, seed=trainer.config.seed, **shape
        )
        task = trainer.tasks["held"]
        scored = DataFlow(stages)(render_rows(task, task.eval_rows, trainer.actor))
    finally:
        trainer._close("finished")
    assert all(s.rollout.rejected for s in scored)
    attempts = {}
    for s in scored:
        attempts.setdefault(s.rollout.prompt.draw, []).append(s.rollout)
    return attempts


def test_greedy_evaluation_samples_its_retries(tmp_path):
    """The first attempt is greedy; a second greedy one would be the same response over again."""
    attempts = greedy_attempts(tmp_path)
    for first, *others in attempts.values():
        assert first.sampling.temperature == 0.0
        assert [o.sampling.temperature for o in others] == [1.0, 1.0, 1.0]
        assert len({tuple(o.response_ids) for o in others} - {tuple(first.response_ids)}) > 1


def test_retries_that_could_only_repeat_are_not_made(tmp_path):
    attempts = greedy_attempts(tmp_path, "evaluation_only: true", "sampling: {temperature: 0}")
    assert {len(made) for made in attempts.values()} == {1}


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_an_engine_that_cannot_be_watched_is_refused_before_a_model_loads(tmp_path, executor, monkeypatch):
    write(tmp_path)
    (tmp_path / "actor" / "config.json").unlink()
    monkeypatch.setattr(HFEngine, "can_watch", False)
    with pytest.raises(ConfigError, match=r"tasks\.held\.constraints: stream_every needs .*engine=hf"):
        Trainer.from_config(config(tmp_path, "out", 1, executor=executor))
