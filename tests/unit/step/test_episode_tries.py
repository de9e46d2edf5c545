"""Episodes whose worlds fail while the engine samples them or others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cpu_time import least_seconds
from model_builders import build_actor
from multitask_rl.config.task import TaskSpec
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.pool import WorldPool
from multitask_rl.records import FailureKind, Prompt, Rollout, SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine
from multitask_rl.step.episodes import Episodes
from multitask_rl.step.stages import RolloutStage

WORLDS = """
import os, time
from multitask_rl.environments.base import Opening, StepResult


class World:
    def __init__(self, log, seed=-1):
        self.log, self.seed = log, seed
        self.note("built")

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what}\\n")

    def reset(self, row):
        self.name, self.turn = row["name"], 0
        # the first answers share a batch
        alone = self.name in ("calls on", "endless", "anew", "greets")
        while not alone and open(self.log).read().count("built") < 3:
            time.sleep(0.001)
        if self.name == "dies":
            os._exit(3)
        if self.name == "fails once" and not os.path.exists(self.log + ".failed"):
            open(self.log + ".failed", "w").close()
            raise ValueError(self.seed)
        return "abcabc" if self.name == "greets" else []

    def step(self, message):
        self.turn += 1
        reply = [{"role": "user", "content": "ab c" * 750_000 if self.name == "endless" else "on"}]
        done = self.turn == 2 and self.name != "calls on"
        info = {"tool_calls": {"look": 1}, "seed": self.seed}
        if self.name == "anew":
            opening = Opening(messages=reply, is_whole=True, max_tokens=3, stop=["x"])
            return StepResult(anew=opening, max_tokens=2, stop=["y"], done=done)
        return StepResult(messages=reply, done=done, reward=1.0, info=info)

    def close(self):
        self.note("closed")
"""


CONTROL = 3


class Engine(RolloutEngine):
    """Yields one answer after the other; ``between`` is called behind the first of a call, one of many."""

    def __init__(self, between: Callable[[], None], *, of_many: bool = True) -> None:
        self.num_answers: list[int] = []
        self.sampling: list[SamplingParams] = []
        self._between, self._of_many = between, of_many

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        places = [(i, sample) for i, request in enumerate(requests) for sample in range(len(request.seeds))]
        self.num_answers.append(len(places))
        self.sampling += [request.sampling for request in requests]
        for place in places:
            yield [
                (*place, Generation(response_ids=[5, 6], rollout_logprobs=[0.0] * 2, finish_reason="stop"))
            ]
            if place == places[0] and (len(places) > 1 or not self._of_many):
                self._between()


@pytest.fixture
def run(
    tmp_path: Path, new_children: Callable[[], list[psutil.Process]]
) -> Iterator[Callable[..., list[Rollout]]]:
    (tmp_path / "worlds.py").write_text(WORLDS)
    world = WorldSpec(
        reference=f"{tmp_path / 'worlds.py'}:World", config={"log": str(tmp_path / "log")}, timeout_s=20.0
    )
    pool = WorldPool({"t": world}, num_workers=1)
    actor = build_actor()

    def sample(
        engine: RolloutEngine,
        names: Sequence[str],
        *,
        is_conditioned: bool = False,
        evaluation: bool = False,
        max_prompt_tokens: int = 0,
        **limits: int,
    ) -> list[Rollout]:
        task: Any = SimpleNamespace(
            spec=TaskSpec(name="t", environment="here", **{"max_turns": 3, **limits}),
            sampling=SamplingParams(max_new_tokens=4),
            group_size=1,
            algorithm=SimpleNamespace(condition=lambda ids, *, evaluation: [CONTROL, *ids]),
            max_prompt_tokens=max_prompt_tokens,
            warn_once=lambda reason: None,
        )
        stage = RolloutStage(
            engine,
            {"t": task},
            actor.tokenizer.decode,
            seed=0,
            episodes=lambda: Episodes(pool, {"t": task}, actor, evaluation=evaluation),
        )
        prompts = [
            Prompt(
                task="t",
                prompt_id=f"t/{i}",
                draw=i,
                row={"prompt": "a", "name": name},
                text="",
                prompt_ids=[5],
                is_conditioned=is_conditioned,
            )
            for i, name in enumerate(names)
        ]
        return sorted((r for part in stage.stream([prompts]) for r in part), key=lambda r: r.order)

    yield sample
    pool.close()
    assert new_children() == []


def test_a_world_that_dies_while_the_engine_samples_its_turn_begins_again_once(run, tmp_path, new_children):
    killed = []

    def kill() -> None:
        if not killed:
            killed.extend(new_children())
            os.kill(killed[0].pid, signal.SIGKILL)
            time.sleep(0.3)  # the pool's thread hears of it

    engine = Engine(kill)
    rollouts = run(engine, ["a", "b", "c"])
    assert [r.prompt.draw for r in rollouts] == [0, 1, 2]
    assert all(r.failure is None and r.earned == 2.0 and len(r.turns) == 2 for r in rollouts)
    assert sum(engine.num_answers) > 6, "answers of the first tries are lost"
    until = time.monotonic() + 10.0  # a world closes after its episode has been returned
    while (lines := (tmp_path / "log").read_text().split()).count("closed") < 3 and time.monotonic() < until:
        time.sleep(0.02)
    assert (lines.count("built"), lines.count("closed")) == (6, 3)


def test_the_seed_of_a_world_is_another_only_after_a_failure_of_its_own(run, new_children):
    killed = []

    def kill() -> None:
        if not killed:
            killed.extend(new_children())
            os.kill(killed[0].pid, signal.SIGKILL)
            time.sleep(0.3)

    names = ["a", "b", "fails once"]
    disturbed, undisturbed = (
        [r.turns[0].info["seed"] for r in run(Engine(between), names)] for between in (kill, lambda: None)
    )
    assert len({*disturbed, *undisturbed}) == 4
    assert disturbed[:2] == undisturbed[:2]
    assert all(0 <= seed < 2**32 for seed in undisturbed)
    killed.clear()
    (alone,) = run(Engine(kill, of_many=False), ["calls on"])
    assert (alone.world_failures, alone.turns[0].info["seed"]) == ({"infra": 1}, undisturbed[0])


def test_a_world_that_ends_its_process_takes_no_other_episode_with_it(run):
    names = ["a", "dies", "b", "c", "d"]
    rollouts = run(Engine(lambda: None), names)
    assert [r.row["name"] for r in rollouts if r.failure is not None] == ["dies"]
    failure = rollouts[1].failure
    assert failure is not None
    assert failure.kind is FailureKind.infra
    assert "ended with code 3" in failure.message
    assert rollouts[1].earned is None
    assert [r.earned for r in rollouts if r.failure is None] == [2.0] * 4


def test_an_episode_is_conditioned_as_its_prompt_was_when_it_was_drawn(run):
    """Another thread learns meanwhile: what the algorithm would say now depends on the clock."""
    engine = Engine(lambda: None)
    for is_conditioned in (False, True):
        (rollout,) = run(engine, ["calls on"], is_conditioned=is_conditioned)
        assert (rollout.prompt.prompt_ids[0] == CONTROL) == is_conditioned


def test_a_prompt_that_its_world_makes_too_long_fails_in_training_and_loses_its_beginning_held_out(run):
    """As a prompt without a world, which training leaves out."""
    prompts = []
    for evaluation, limit in ((False, 0), (True, 0), (True, 3), (False, 3)):
        engine = Engine(lambda: None, of_many=False)
        (rollout,) = run(engine, ["greets"], evaluation=evaluation, max_prompt_tokens=limit)
        prompts.append(rollout.prompt.prompt_ids)
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.data
    whole, held_out, cut, _ = prompts
    assert whole == held_out
    assert len(whole) > 3
    assert cut == whole[-3:]


def test_a_world_that_reports_more_calls_than_allowed_ends_its_episode(run):
    (rollout,) = run(Engine(lambda: None), ["calls on"], max_turns=9, max_tool_calls=2)
    assert (len(rollout.turns), rollout.finish_reason, rollout.earned) == (3, "length", 3.0)


def test_limits_on_the_next_answer_hold_where_the_conversation_begins_anew(run):
    """Those of the reply, and those of what begins anew."""
    engine = Engine(lambda: None)
    run(engine, ["anew"])
    assert [(own.max_new_tokens, set(own.stop)) for own in engine.sampling] == [(4, set()), (2, {"x", "y"})]


def test_a_reply_of_megabytes_ends_the_episode_and_is_not_encoded(run):
    def sample() -> None:
        (rollout,) = run(Engine(lambda: None), ["endless"])
        assert (len(rollout.turns), rollout.finish_reason, rollout.earned) == (1, "length", 1.0)

    assert least_seconds(sample, tries=1) < 5.0  # encoding it takes three times as long
