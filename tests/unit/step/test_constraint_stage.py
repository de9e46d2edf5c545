"""Refused slots are sampled again: beside the batch where the engine takes more, after it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, TaskSpec
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.records import Prompt, Rollout, SamplingParams, Turn, Verdict
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.step.stages import ConstraintStage, RolloutStage, sampling_stages
from multitask_rl.testing import make_rollout


class Steps(RolloutEngine):
    """An engine whose responses last a number of steps that their seed decides."""

    def __init__(self) -> None:
        self.num_calls = self.num_steps = 0

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        self.num_calls += 1
        self._left: dict[tuple[int, int], tuple[int, int]] = {}
        self._num_requests = 0
        self._add(requests)
        while self._left:
            self.num_steps += 1
            self._left = {place: (left - 1, seed) for place, (left, seed) in self._left.items()}
            ended = [(*place, _response(seed)) for place, (left, seed) in self._left.items() if left == 0]
            self._left = {place: state for place, state in self._left.items() if state[0] > 0}
            if ended:
                yield ended

    def _add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            for sample, seed in enumerate(request.seeds):
                self._left[self._num_requests, sample] = (len(_response(seed).response_ids), seed)
            self._num_requests += 1


class Admitting(Steps):
    """The same, and more may be added to what it is at."""

    can_admit = True

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        self._add(requests)


def _response(seed: int) -> Generation:
    ids = [seed % 7] * (1 + seed % 23)
    return Generation(response_ids=ids, rollout_logprobs=[0.0] * len(ids), finish_reason="stop")


class Judge:
    """A round that refuses responses of small numbers: at once, or when it is sealed."""

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._rollouts: list[Rollout] = []
        self.order: Sequence[int] = ()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        assert rollouts
        self._rollouts.extend(rollouts)

    def seal(self, order: Sequence[int] | None = None) -> None:
        self.order = order or ()

    def known(self, index: int) -> Mapping[str, Any] | None:
        return self._verdicts(index) if self._at_once or self.order else None

    def is_done(self, index: int) -> bool:
        return True

    def wait(self, is_enough: Callable[[], bool] | None = None) -> str:
        return ""

    def results(self, indices: Sequence[int]) -> list[dict[str, Verdict]]:
        assert list(indices) == list(self.order), "collected once, in the order of the batch"
        return [self._verdicts(index) for index in indices]

    def batch(self) -> list[tuple[int, int, int]]:
        """Return what a judge that takes batches would get."""
        return [self._rollouts[index].order for index in self.order]

    def _verdicts(self, index: int) -> dict[str, Verdict]:
        return {"judge": Verdict(cost=1.0, violated=self._rollouts[index].response_ids[0] < 5)}


class Scorer:
    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self.rounds: list[Judge] = []

    def begin_judging(self) -> Judge:
        self.rounds.append(Judge(self._at_once))
        return self.rounds[-1]


SPEC = parse_tasks(
    {
        "tasks": {
            "t": {
                "type": "grpo",
                "constraints": [
                    {"plugin": "over_refusal", "name": "judge", "mode": "reject", "max_attempts": 4}
                ],
            }
        }
    },
    "this test",
)["t"]


def _run(engine: Steps, at_once: bool) -> tuple[list[Rollout], Scorer]:
    run: Any = SimpleNamespace(spec=SPEC, sampling=SamplingParams(), group_size=4)
    scorer: Any = Scorer(at_once)
    rollout = RolloutStage(engine, {"t": run}, lambda ids, **_: str(ids), seed=0)
    stage = ConstraintStage(scorer, rollout, {"t": run})
    prompts = [
        Prompt(task="t", prompt_id=f"t/{i}", draw=i, row={}, text="", prompt_ids=[1, i]) for i in range(8)
    ]
    parts = list(stage.stream(rollout.stream([prompts])))
    assert len(rollout.spans) == engine.num_calls
    return sorted((r for part in parts for r in part), key=lambda r: r.order), scorer


@pytest.mark.parametrize("at_once", [True, False])
def test_joining_the_batch_changes_when_but_not_what(at_once: bool) -> None:
    after, beside = Steps(), Admitting()
    expected, batches = _run(after, at_once)
    found, judged = _run(beside, at_once)
    assert found == expected
    assert [judge.batch() for judge in judged.rounds] == [judge.batch() for judge in batches.rounds]
    attempts = [r.attempt for r in found]
    assert max(attempts) == 3, "the last attempt is reached"
    assert (
        sum(not r.rejected for r in found)
        + sum(a == 3 and r.rejected for a, r in zip(attempts, found, strict=True))
        == 32
    )
    assert after.num_calls == 4, "one call per attempt"
    if at_once:
        assert beside.num_calls < after.num_calls
        assert beside.num_steps < after.num_steps
    else:
        assert (beside.num_calls, beside.num_steps) == (after.num_calls, after.num_steps)


JUDGES = """
import os, time
from multitask_rl.scoring.shapes import with_traits


def quick(responses):
    return [0.0] * len(responses)


def broken(responses):
    raise ValueError("broken")


@with_traits(timeout_s=20)
def slow(responses):
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.01)
    return [0.0] * len(responses)
"""


def test_a_slow_constraint_of_one_task_does_not_hold_up_the_rollouts_of_others(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    specs = {
        name: TaskSpec(name=name, constraints=[ConstraintSpec(plugin=f"{tmp_path}/judges.py:{name}")])
        for name in ("slow", "quick")
    }
    tasks: Any = {n: SimpleNamespace(spec=s, sampling=SamplingParams()) for n, s in specs.items()}
    rollout: Any = SimpleNamespace(take_joined=list, can_join=False)
    own = [make_rollout("x", task=task, draw=i) for i, task in enumerate(("slow", "quick", "slow", "quick"))]
    with RewardPool(specs, ScoringConfig(num_workers=1), seed=0, devices={}) as pool:
        parts = ConstraintStage(pool, rollout, tasks).stream([own])
        assert [r.task for r in next(parts)] == ["quick", "quick"], "the slow one has not answered"
        (tmp_path / "judges.py.go").touch()
        assert [r.task for part in parts for r in part] == ["slow", "slow"]


def test_with_a_quorum_a_slow_constraint_makes_the_groups_of_its_task_late_and_no_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "judges.py").write_text(JUDGES)
    specs = {
        name: TaskSpec(
            name=name,
            constraints=[ConstraintSpec(plugin=f"{tmp_path}/judges.py:{name}", name="own", mode="penalty")],
        )
        for name in ("slow", "quick", "broken")
    }
    tasks: Any = {
        n: SimpleNamespace(spec=s, sampling=SamplingParams(), group_size=1) for n, s in specs.items()
    }
    own = [make_rollout("x", task=task, draw=i) for i, task in enumerate(["slow", "quick", "broken"] * 2)]
    actor: Any = SimpleNamespace(tokenizer=None)
    scoring = ScoringConfig(num_workers=1, max_failure_rate=0.9)
    with RewardPool(specs, scoring, seed=0, devices={}) as pool:
        stages = sampling_stages(actor, Steps(), pool, tasks, seed=0, quorum=4 / 6)
        parts = stages[2].stream(stages[1].stream([own]))
        scored = next(parts)
        assert [s.rollout.task for s in scored] == ["quick", "broken"] * 2, "the slow one has not answered"
        assert [s.reward for s in scored] == [1.0, None] * 2
        assert all("ValueError" in s.failure.message for s in scored[1::2] if s.failure)
        counted = {what: len(own["recent"]) for what, own in pool.state_dict()["broken"].items()}
        assert counted == {"scored": 0, "judged": 2}, "a failed verdict counts once, alone"
        assert pool.metrics()["broken"]["reward_failure_rate"] == 1.0
        (tmp_path / "judges.py.go").touch()
        late = [s for part in parts for s in part]
        assert [(s.rollout.task, s.reward, s.rollout.verdicts["own"].cost) for s in late] == [
            ("slow", 1.0, 0.0)
        ] * 2


@pytest.mark.parametrize(
    ("first", "expected"), [("worse", (1.0, 1)), ("mild", (0.75, 2)), ("costly", (0.75, 2))]
)
def test_of_an_episode_that_was_ended_the_worst_answer_counts(
    tmp_path: Path, first: str, expected: tuple[float, int]
) -> None:
    """The judge flagged the second answer while it was generated, with a cost of 0.75.

    Of the whole answers it finds only the first bad; ``costly`` is no violation, so it is not the worst.
    """
    (tmp_path / "judges.py").write_text(
        "from multitask_rl.records import Verdict\n"
        "from multitask_rl.scoring.shapes import with_traits\n\n\n@with_traits(isolate=False)\n"
        "def own(response):\n"
        "    costly = Verdict(cost=0.9, violated=False)\n"
        "    return {'worse': 1.0, 'mild': 0.5, 'costly': costly}.get(response, 0.0)\n"
    )
    constraint = ConstraintSpec(plugin=f"{tmp_path}/judges.py:own", name="own", mode="penalty")
    spec = TaskSpec(name="t", constraints=[constraint])
    tasks: Any = {"t": SimpleNamespace(spec=spec, sampling=SamplingParams(), group_size=1)}
    episode = make_rollout("ended", task="t")
    episode.turns = [Turn(num_tokens=0, response=first), Turn(num_tokens=0, response="ended")]
    episode.verdicts = {"own": Verdict(cost=0.75, violated=True, turn=2)}
    actor: Any = SimpleNamespace(tokenizer=None)
    with RewardPool({"t": spec}, ScoringConfig(num_workers=1), seed=0, devices={}) as pool:
        stages = sampling_stages(actor, Steps(), pool, tasks, seed=0)
        (found,) = [rollout for part in stages[1].stream([[episode]]) for rollout in part]
    verdict = found.verdicts["own"]
    assert isinstance(verdict, Verdict)
    assert (verdict.cost, verdict.turn) == expected
    assert verdict.violated
