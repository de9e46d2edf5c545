"""Replicas that hang, are slow, leave and join: every sample comes once, and is what it would have been."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from model_builders import build_actor
from multitask_rl.config.run import LoraConfig, ModelConfig, RayConfig, RolloutConfig
from multitask_rl.errors import EngineError
from multitask_rl.executor.engine import RayEngine
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import add_adapters
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, collect
from multitask_rl.rollout.hf import HFEngine

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]

STEP_S = 0.05
REQUESTS = [
    GenerationRequest(
        prompt_ids=[5 + i, 6, 7],
        sampling=SamplingParams(max_new_tokens=2 + 20 * (i % 2), temperature=1.0),
        seeds=[100 * i + s for s in range(4)],
    )
    for i in range(4)
]
"""Of each two, one ends after two tokens."""


class Slow(HFEngine):
    """Takes its time; writes its process and what it begins into ``<output_dir>``.

    Files there tell it to ``hang``, to ``lag``, or to ``hold`` after each part of its samples.
    """

    place: Path

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> Slow:
        engine = super().build(actor, config, seed=seed, output_dir=output_dir)
        assert isinstance(engine, cls)
        if (output_dir / "broken").exists():
            raise EngineError("this node has no such disk")
        output_dir.mkdir(parents=True, exist_ok=True)
        engine.place = output_dir
        (output_dir / "pid").write_text(str(os.getpid()))
        return engine

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        with (self.place / "begun").open("a") as file:
            file.writelines(f"{seed}\n" for request in requests for seed in request.seeds)
        for part in super().generate_stream(requests):
            yield part
            self.wait_while("hold")

    def wait_while(self, name: str) -> None:
        """Wait until the file ``name`` is gone, half a minute at most."""
        for _ in range(600):
            if not (self.place / name).exists():
                break
            time.sleep(STEP_S)

    def call_between_steps(self, hook: Any) -> bool:
        def step() -> None:
            time.sleep(STEP_S)
            while (self.place / "hang").exists():  # a new process of this place goes on
                (self.place / "hang").unlink()
                time.sleep(3600)
            self.wait_while("lag")
            hook()

        return super().call_between_steps(step)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


def _ids(parts: Sequence[Sequence[Ended]]) -> list[list[list[int]]]:
    groups: list[list[Generation]] = collect(REQUESTS, parts)
    return [[generation.response_ids for generation in group] for group in groups]


def _begun(directory: Path) -> Counter[int]:
    return Counter(int(line) for path in directory.rglob("begun") for line in path.read_text().split())


def _pid(directory: Path, index: int) -> int:
    return int((directory / "ray_start" / f"replica-{index}" / "pid").read_text())


def _ended(groups: Sequence[Sequence[Generation]]) -> list[Ended]:
    return [(i, j, generation) for i, group in enumerate(groups) for j, generation in enumerate(group)]


@pytest.fixture(scope="module")
def pair(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RayEngine, Actor, Path]]:
    """Two replicas, their actor, and the directory they were given; a replica may be late for 15 s."""
    directory = tmp_path_factory.mktemp("pair")
    actor, ray = build_actor(), RayConfig(num_engines=2, engine_timeout_s=15.0)
    engine = RayEngine(Slow, actor, RolloutConfig(), seed=0, output_dir=directory, ray=ray)
    yield engine, actor, directory
    engine.close()


@pytest.fixture(scope="module")
def single(
    cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RayEngine, Actor, Path, list[int]]]:
    """One replica of an actor with adapters, as ``pair``; and the bytes of each object that it was sent."""
    import ray

    put, sizes = ray.put, list[int]()

    def counted(value: Any) -> Any:
        sizes.append(len(ray.cloudpickle.dumps(value)))
        return put(value)

    directory = tmp_path_factory.mktemp("single")
    plain = build_actor()
    with_adapters: Any = add_adapters(plain.model, LoraConfig(rank=2))
    actor = Actor(with_adapters, plain.tokenizer, ModelConfig(lora=LoraConfig(rank=2)))
    config = RayConfig(num_engines=1, engine_timeout_s=8.0)  # a busy machine may hold it up for 3 s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "put", counted)
        engine = RayEngine(Slow, actor, RolloutConfig(), seed=0, output_dir=directory, ray=config)
        yield engine, actor, directory, sizes
        engine.close()


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_after_the_first_time_adapters_travel_alone_and_are_merged_to_the_same_bits(
    single: tuple[RayEngine, Actor, Path, list[int]],
) -> None:
    import ray

    engine, actor, _, sizes = single
    first = sum(sizes)
    assert first > sum(value.nbytes for value in build_actor().model.state_dict().values())
    for version in (1, 2):
        sizes.clear()
        with torch.no_grad():
            for parameter in actor.trainable_parameters():
                parameter.normal_(std=0.1)
        expected = {name: value.clone() for name, value in actor.state_dict().items()}
        engine.update_weights(actor.state_dict(), version)
        assert engine._group is not None
        found = ray.get(engine._group.submit(0, "_model.state_dict"))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert sum(sizes) < first / 3


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_an_only_replica_that_is_stopped_is_killed_and_its_successor_goes_on(
    single: tuple[RayEngine, Actor, Path, list[int]],
) -> None:
    engine, actor, directory, _ = single
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(_pid(directory, 0))  # now: a busy machine may have ended an earlier one
        os.kill(stopped[0], signal.SIGSTOP)

    again = _samples_repeated_after(stop, engine, actor, directory)
    assert 0 < len(again) < 16, "without what had ended"
    told = engine.health_events(1)[0].reason
    # a look that a busy machine delays makes it 9
    assert re.search(r"did not answer for \d+ s \(advance\) and was killed", told), told
    assert not Path(f"/proc/{stopped[0]}").exists()


def test_a_replica_that_hangs_is_replaced_and_repeats_what_had_not_ended(
    pair: tuple[RayEngine, Actor, Path],
) -> None:
    engine, actor, directory = pair
    hang = directory / "ray_start" / "replica-1" / "hang"
    own = _samples_repeated_after(hang.touch, engine, actor, directory)
    assert 0 < len(own) <= 8, "of one replica"
    kinds = _kinds_until_joined(engine, actor)
    assert kinds in (["lost", "joined"], ["replaced"]), kinds


def _kinds_until_joined(engine: RayEngine, actor: Actor) -> list[str]:
    """Let the engine work until a replica has joined; return the kinds of its events."""
    kinds: list[str] = []
    for _ in range(60):
        kinds += [event.kind for event in engine.health_events(0) if event.kind != "late"]
        if "joined" in kinds:
            break
        engine.update_weights(actor.state_dict(), 4)
        list(engine.generate_stream(REQUESTS))
    return kinds


def _undisturbed(
    engine: RayEngine, directory: Path, expected: list[list[list[int]]] | None = None
) -> tuple[Counter[int], list[list[list[int]]]]:
    """Generate while no replica is late, as one on a busy machine may be; return what began and the texts."""
    for _ in range(5):
        start = _begun(directory)
        found = _ids(list(engine.generate_stream(REQUESTS)))
        assert expected in (None, found)
        if not (events := engine.health_events(0)):
            break
        assert {event.kind for event in events} == {"late"}
    else:
        pytest.fail("in five tries a replica was late")
    assert set((_begun(directory) - start).values()) == {1}
    return _begun(directory), found


def _samples_repeated_after(
    harm: Callable[[], None], engine: RayEngine, actor: Actor, directory: Path
) -> set[int]:
    """Do ``harm`` after the first samples, while no replica ends others; return the seeds begun again."""
    expected = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=directory / "own").generate(REQUESTS)
    before, _ = _undisturbed(engine, directory, _ids([_ended(expected)]))
    parts: list[list[Ended]] = []
    known: set[int] = set()
    holds = [path.with_name("hold") for path in (directory / "ray_start").glob("replica-*/pid")]
    for hold in holds:
        hold.touch()
    for part in engine.generate_stream(REQUESTS):
        parts.append(part)
        if not known:
            known = {REQUESTS[i].seeds[j] for i, j, _ in part}
            earlier = _begun(directory)  # twice already, if a busy machine was late with the first samples
            harm()
            for hold in holds:
                hold.unlink()
    assert _ids(parts) == _ids([_ended(expected)])
    found = Counter((i, j) for part in parts for i, j, _ in part)
    assert set(found.values()) == {1}, "each sample comes once"
    again = {seed for seed in _begun(directory) - earlier if earlier[seed] > before[seed]}
    assert again.isdisjoint(known)
    engine.update_weights(actor.state_dict(), 3)
    assert _ids(list(engine.generate_stream(REQUESTS))) == _ids([_ended(expected)])
    return again


def test_what_a_slow_replica_has_not_ended_is_sampled_by_idle_ones_too(
    pair: tuple[RayEngine, Actor, Path],
) -> None:
    engine, actor, directory = pair
    lag = directory / "ray_start" / "replica-1" / "lag"
    try:
        before, expected = _undisturbed(engine, directory)
        start = _begun(lag.parent)
        lag.touch()
        parts = list(engine.generate_stream(REQUESTS))
        lag.unlink()
        own = _begun(lag.parent) - start
        event, *others = engine.health_events(0)
        assert (event.kind, event.source) == ("late", "engine")
        told = f"rollout replica 1 is late: others sample what it has not ended ({len(own)} of {len(own)} "
        assert event.reason == f"{told}samples)"
        engine.update_weights(actor.state_dict(), 4)
        assert _ids(parts) == expected
        assert sum(len(part) for part in parts) == 16, "the first answer counts, once"
        begun = _begun(directory) - before
        again = {seed for seed, count in begun.items() if count > 1}
        assert again == set(own) or (others and again > set(own)), "all of the slow one's"
    finally:
        lag.unlink(missing_ok=True)


def test_a_replica_that_cannot_start_is_left_out_while_another_samples(
    pair: tuple[RayEngine, Actor, Path],
) -> None:
    engine, actor, directory = pair
    broken = directory / "ray_start" / "replica-1" / "broken"
    expected = _ids(list(engine.generate_stream(REQUESTS)))
    broken.touch()
    os.kill(_pid(directory, 1), signal.SIGKILL)
    told: list[str] = []
    for _ in range(60):
        engine.update_weights(actor.state_dict(), 5)
        assert _ids(list(engine.generate_stream(REQUESTS))) == expected
        told += [event.reason for event in engine.health_events(0) if event.kind != "late"]
        if any("EngineError: this node has no such disk" in reason for reason in told):
            break
    assert len(told) == 2, "the death, and why it did not start; not each attempt"
    broken.unlink()
    assert _kinds_until_joined(engine, actor) == ["joined"]
    assert _ids(list(engine.generate_stream(REQUESTS))) == expected
