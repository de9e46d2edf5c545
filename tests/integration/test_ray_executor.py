"""Engines and rewards in Ray actors give what the local ones give; one cluster of two CPUs for the file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from learner_benches import Bench, RanksBench, moments, relative_difference
from model_builders import build_actor, sample_scored
from multitask_rl.config.run import ModelConfig, RayConfig, RolloutConfig, ScoringConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.errors import ConfigError, EngineError, MissingExtraError, RewardError, TrainingError
from multitask_rl.executor import group
from multitask_rl.executor.engine import RayEngine
from multitask_rl.executor.scorer import RayScorer
from multitask_rl.models.actor import Actor
from multitask_rl.records import (
    Event,
    Failure,
    FailureKind,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Scored,
    Verdict,
)
from multitask_rl.rollout.base import Ended, GenerationRequest, Watch, collect
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.stats import TaskCounts
from multitask_rl.testing.engine import assert_engine_contract
from multitask_rl.training.backends.build import RayRanks
from vllm_builders import small_model, small_tokenizer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, num_gpus=2, **quiet)  # Ray lends GPUs that are not there
    # the fake below travels by value: the actors need not import this file and what it imports
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actor() -> Actor:
    return Actor(small_model(tie=True), small_tokenizer(), ModelConfig())


REQUESTS = [
    GenerationRequest(
        prompt_ids=[3 + (i + j) % 20 for j in range(3 + 4 * i)],
        sampling=SamplingParams(max_new_tokens=12, temperature=1.0 if i % 2 else 0.7),
        seeds=[100 * i + s for s in range(4)],
    )
    for i in range(5)
]


def test_replicas_sample_what_the_local_engine_samples(cluster: None, actor: Actor, tmp_path: Path) -> None:
    config = RolloutConfig()
    local = HFEngine.build(actor, config, seed=0, output_dir=tmp_path)
    remote = RayEngine(_MayWait, actor, config, seed=0, output_dir=tmp_path, ray=RayConfig(num_engines=2))
    try:
        assert remote.can_watch
        assert remote.can_constrain
        assert_engine_contract(remote, actor.model, actor.tokenizer)
        first = local.generate(REQUESTS)
        assert _ids(remote.generate(REQUESTS)) == _ids(first)
        assert remote.generate([]) == []

        before = {name: value.clone() for name, value in actor.model.state_dict().items()}
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter.mul_(1.1)
        remote.update_weights(actor.state_dict(), 7)
        second = local.generate(REQUESTS)
        assert remote.policy_version == 7
        assert _ids(second) != _ids(first)
        results = remote.generate(REQUESTS)
        assert _ids(results) == _ids(second)
        for mine, theirs in zip(results, second, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-4)

        _check_stream(remote, second)
        actor.model.load_state_dict(before)

        with pytest.raises(EngineError, match="empty prompt"):
            remote.generate([GenerationRequest(prompt_ids=[], sampling=SamplingParams(), seeds=[0])])
        _check_end(remote, tmp_path)
    finally:
        remote.close()
        remote.close()
    with pytest.raises(EngineError, match="closed"):
        remote.generate(REQUESTS)


def _check_stream(remote: RayEngine, expected: Sequence[Sequence[Any]]) -> None:
    """Samples come as they end; when a replica dies, only what had not ended is sampled again."""
    assert remote._group is not None
    before = remote._group._actors[1]
    found: list[Ended] = []
    monitor = _Killing(remote, found)
    watch = Watch(monitor=monitor, every=5)
    watched = [replace(request, watch=watch) for request in REQUESTS]
    watched[0] = replace(watched[0], sampling=replace(watched[0].sampling, max_new_tokens=1))
    for part in remote.generate_stream(watched):
        found.extend(part)
    assert remote._group._actors[1] is not before, "it died, and was started again"
    assert monitor.num_found[-1] > 0, "samples were handed on before the last look at others"
    assert len(found) == 20, "each once"
    ids = _ids(collect(REQUESTS, [found]))
    assert ids[1:] == _ids(expected)[1:], "with the newest weights"
    assert ids[0] == [generation.response_ids[:1] for generation in expected[0]]


class _MayWait(HFEngine):
    """No sample ends while the file ``wait`` is in ``place``."""

    place: Path

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> _MayWait:
        engine = super().build(actor, config, seed=seed, output_dir=output_dir)
        assert isinstance(engine, cls)
        engine.place = output_dir
        return engine

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        self.hook = hook
        return super().call_between_steps(hook)

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        while (self.place / "wait").exists():
            time.sleep(0.05)
            self.hook()
        yield from super().generate_stream(requests)


def _check_end(remote: RayEngine, directory: Path) -> None:
    """A stream ends without waiting for a sample, as an overlapped run ends: it drops the batch under way."""
    for index in (0, 1):
        place = directory / "ray_start" / f"replica-{index}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "wait").touch()
    began = time.monotonic()

    def end() -> None:
        if time.monotonic() > began + 1.0:
            raise ZeroDivisionError

    remote.call_between_steps(end)
    with pytest.raises(ZeroDivisionError):
        remote.generate(REQUESTS)


class _Killing:
    """A monitor that cannot travel, kills a replica at its first look and objects to nothing."""

    def __init__(self, engine: RayEngine, found: list[Ended]) -> None:
        self._engine = engine
        self._found = found
        self._lock = threading.Lock()
        self.num_found: list[int] = []

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        with self._lock:
            if not self.num_found:
                _kill(self._engine, 1)
                assert self._engine._group is not None
                # Ray kills in the background: the other replica could sample all before the death is known
                while self._engine._group.call("retain", {1: ([],)})[0]:
                    time.sleep(0.01)
            self.num_found.append(len(self._found))
        return [False] * len(partial)


def _kill(owner: RayEngine | RayScorer, index: int) -> None:
    import ray

    assert owner._group is not None
    ray.kill(owner._group._actors[index])


def _ids(results: Sequence[Sequence[Any]]) -> list[list[list[int]]]:
    return [[generation.response_ids for generation in group] for group in results]


class LengthPool:
    """A pool that scores the response's length; its actor can be made to die once."""

    def __init__(self, grave: str, index: int) -> None:
        self._grave = Path(grave)
        self._index = index
        self._started = False

    def start(self) -> None:
        self._started = True

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        assert self._started
        if any(rollout.response == "raise" for rollout in rollouts):
            raise RewardError("budget spent")
        if any(rollout.response == "die" for rollout in rollouts) and not self._grave.exists():
            self._grave.touch()
            os._exit(1)
        if any(rollout.response == "die always" for rollout in rollouts):
            os._exit(3)
        time.sleep(random.random() / 50)
        return [
            Scored(
                rollout=rollout,
                reward=float(len(rollout.response)),
                breakdown={"length": Score(value=float(len(rollout.response)))},
            )
            for rollout in rollouts
        ]

    def judge(self, rollouts: Sequence[Rollout]) -> list[dict[str, Verdict | Failure]]:
        return [{"short": Verdict(cost=0.0, violated=len(r.response) > 3)} for r in rollouts]

    def take_counts(self) -> dict[str, TaskCounts]:
        number = 1 + 2 * self._index  # other numbers of responses: 1 and 3
        responses = {("t/1", draw, self._index, 0) for draw in range(number)}
        failures = Counter({FailureKind.data: number if self._index else 0})
        counts = TaskCounts(responses=responses, results=number, failures=failures)
        return {"t": counts}

    def health_events(self, step: int) -> list[Event]:
        return [Event(step=step, source="rewards", kind="warn", reason=str(self._index))]

    def close(self) -> None:
        if self._grave.name == "slow":
            self._grave.touch()
            time.sleep(30)


def _rollouts(responses: Sequence[str]) -> list[Rollout]:
    return [
        Rollout(
            prompt=Prompt(task="t", prompt_id=f"t/{i}", draw=i, row={}, text="", prompt_ids=[1]),
            sample=0,
            response=response,
        )
        for i, response in enumerate(responses)
    ]


def test_learner_ranks_in_actors_learn_what_one_process_learns_and_nobody_waits_for_one_that_failed(
    cluster: None,
) -> None:
    scored = sample_scored(build_actor())
    alone = Bench()
    ranks = RayRanks(1)
    group = RanksBench(num_ranks=2, launch=ranks, host=ranks.host, sharded=True)
    try:
        alone.update(scored)
        group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        broken = [c.sample for c in group.credited[:2]]
        broken[1].prompt_ids = []  # the cheaper one goes to the actor; the other's passes wait for it
        with pytest.raises(TrainingError, match="has an empty prompt"):
            group.backend.step_start_outputs("b", broken, want_values=False, want_ref=False)
    finally:
        group.backend.close()


def test_pools_score_in_order_and_survive_a_death(cluster: None, tmp_path: Path) -> None:
    pool = RayScorer(partial(LengthPool, str(tmp_path / "grave")), num_pools=2)
    try:
        pool.start()
        rollouts = _rollouts(["a" * (7 * i % 11) for i in range(9)] + ["die"])
        scored = pool.score(rollouts)
        assert (tmp_path / "grave").exists(), "the test must have killed an actor"
        assert [record.reward for record in scored] == [float(len(r.response)) for r in rollouts]
        assert all(record.rollout is rollout for record, rollout in zip(scored, rollouts, strict=True))
        verdicts = pool.judge(rollouts)
        assert [isinstance(v["short"], Verdict) and v["short"].violated for v in verdicts] == [
            len(r.response) > 3 for r in rollouts
        ]
        assert pool.score([]) == []
        assert pool.metrics()["t"]["reward_failure_rate"] == 0.75, "of all responses, no mean of two rates"
        assert [event.reason for event in pool.health_events(3)] == ["0", "1"]
        with pytest.raises(RewardError, match="budget spent"):
            pool.score(_rollouts(["raise"]))
        why = r"pool 0 died, was started again and died again \(score\): The actor died .* Worker exit detail"
        with pytest.raises(EngineError, match=why):
            pool.score(_rollouts(["die always"]))
    finally:
        pool.close()
        pool.close()


def test_ordinary_pools_in_actors_give_the_ordinary_results(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text(
        "from pathlib import Path\n\n"
        "from multitask_rl.contracts import PluginTraits\n\n\n"
        "def length(response, **row):\n"
        "    Path(__file__).with_name('seen').touch()\n"
        "    if response == 'odd':\n"
        "        raise ValueError('not for me')\n"
        "    return len(response) / 10\n\n\n"
        "class Judge:\n"
        "    traits = PluginTraits(isolate=False)\n\n"
        "    def judge(self, rollouts):\n"
        "        return [0.0] * len(rollouts)\n\n"
        "    def explain(self, rollouts, verdicts):\n"
        "        return [f'{len(r.response)} characters' for r in rollouts]\n"
    )
    reward = {"plugin": f"{tmp_path / 'length.py'}:length", "name": "length", "weight": 2.0}
    judge = {"plugin": f"{tmp_path / 'length.py'}:Judge", "name": "judge", "mode": "penalty"}
    task = {"type": "grpo", "rewards": [reward], "constraints": [judge]}
    specs = parse_tasks({"tasks": {"t": task}}, "this test")
    config = ScoringConfig(num_workers=1)
    rollouts = _rollouts([*("a" * (3 * i % 7) for i in range(10)), "odd"])
    local = RewardPool(specs, config, seed=0, devices={})
    remote = RayScorer(lambda _: RewardPool(dict(specs), config, seed=0, devices={}), num_pools=2)
    try:
        local.start()
        remote.start()
        expected, scored = local.score(rollouts), remote.score(rollouts)
        assert [record.reward for record in expected[:3]] == pytest.approx([0.0, 0.6, 1.2])
        assert [(r.reward, r.breakdown, r.failure) for r in scored] == [
            (r.reward, r.breakdown, r.failure) for r in expected
        ]
        of_samples = ("reward_failure", "reward_overrun")
        one, two = (
            {name: value for name, value in pool.metrics()["t"].items() if name.startswith(of_samples)}
            for pool in (local, remote)
        )
        assert one == two, "rates are of the responses of all pools"
        assert one["reward_failure_rate"] == pytest.approx(1 / 11)
        violations = [replace(r, verdicts={"judge": Verdict(cost=1.0, violated=True)}) for r in rollouts]
        assert remote.explain(violations) == [{"judge": f"{len(r.response)} characters"} for r in rollouts]
        (tmp_path / "seen").unlink()
        for i, rollout in enumerate(rollouts):
            rollout.prompt.position = i
            rollout.response += "."
        pending = remote.begin_scoring()
        pending.add(rollouts[4:])
        deadline = time.monotonic() + 30
        while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "seen").exists(), "rewards begin before the round is sealed"
        _kill(remote, 1)
        pending.add(rollouts[:4])
        order = [7, 8, 9, 10, *range(7)]
        pending.seal(order)
        pending.wait()
        again = pending.results(order)
        assert all(record.rollout is rollout for record, rollout in zip(again, rollouts, strict=True))
        assert [(r.reward, r.breakdown, r.failure) for r in again] == [
            (r.reward, r.breakdown, r.failure) for r in local.score(rollouts)
        ]
        assert [r.reward for r in again[:3]] == pytest.approx([0.2, 0.8, 1.4])
        assert scored[-1].failure is not None
        assert scored[-1].failure.kind is FailureKind.grader
        assert set(remote.metrics()) == set(local.metrics())
        _check_revival(remote, rollouts, [(r.reward, r.breakdown, r.failure) for r in again])
    finally:
        local.close()
        remote.close()


def _check_revival(remote: RayScorer, rollouts: list[Rollout], expected: list[Any]) -> None:
    """A dead pool is started again by whoever asks; nobody gets an answer from one that is not up yet."""
    assert remote._group is not None
    state, traits = remote.state_dict(), remote.reward_traits()
    assert state["t"]
    assert traits["t"]
    _kill(remote, 0)
    _kill(remote, 1)
    while remote._group.call("pool.state_dict", {0: (), 1: ()})[0]:
        time.sleep(0.01)  # Ray kills in the background
    assert remote.state_dict() == state, "a run that ends because its pools died is saved"
    dead = list(remote._group._actors)
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(remote.reward_traits)
        deadline = time.monotonic() + 30
        while remote._group._actors[0] is dead[0] and time.monotonic() < deadline:
            time.sleep(0.001)
        pending = remote.begin_scoring()
        pending.add(rollouts)
        assert asking.result() == traits, "the answer of the new pools"
    pending.seal()
    pending.wait()
    found = pending.results(range(len(rollouts)))
    assert [(r.reward, r.breakdown, r.failure) for r in found] == expected


def test_a_round_whose_pool_has_died_ends_when_the_pools_are_closed(cluster: None, tmp_path: Path) -> None:
    """No pool is started again for it: the run, and the end of the process, wait for its answers."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom pathlib import Path\n\n\n"
        "def slow(response):\n"
        "    Path(__file__).with_name('seen').touch()\n"
        "    time.sleep(60)\n"
        "    return 1.0\n"
    )
    task = {"type": "grpo", "rewards": [f"{tmp_path / 'slow.py'}:slow"]}
    specs = parse_tasks({"tasks": {"t": task}}, "this test")
    config = ScoringConfig(num_workers=1)
    pools = RayScorer(lambda _: RewardPool(dict(specs), config, seed=0, devices={}), num_pools=1)
    pools.start()
    pending = pools.begin_scoring()
    pending.add(_rollouts(["a", "b"]))
    pending.seal()
    deadline = time.monotonic() + 30
    while not (tmp_path / "seen").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (tmp_path / "seen").exists()
    _kill(pools, 0)
    pools.close()
    deadline = time.monotonic() + 20
    pending.wait(lambda: time.monotonic() > deadline)
    assert pending.is_done(0)
    with pytest.raises(EngineError, match="the Ray reward pools are closed"):
        pending.results([0, 1])


def test_pools_end_when_their_close_is_interrupted(cluster: None, tmp_path: Path) -> None:
    pools = RayScorer(partial(LengthPool, str(tmp_path / "slow")), num_pools=1)
    pools.start()
    actors = pools._group
    assert actors is not None

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (tmp_path / "slow").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            pools.close()
    finally:
        signal.signal(signal.SIGINT, before)
    dead: Sequence[int] = []
    until = time.monotonic() + 30
    while not dead and time.monotonic() < until:  # on a busy machine an actor outlives Ray's kill by a moment
        _, dead = actors.call("pool.take_counts", {0: ()})
    assert list(dead) == [0]


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"multitask-rl\[ray\]"):
        RayScorer(partial(LengthPool, ""), num_pools=1)


def _wait_until_free(kind: str) -> None:
    """Wait until all of the cluster is free; an actor that was killed gives its share back a moment later."""
    import ray

    until = time.monotonic() + 60
    while ray.available_resources().get(kind, 0) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert ray.available_resources()[kind] == 2


def test_more_actors_than_the_cluster_holds_are_refused_not_awaited(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wait_until_free("CPU")
    monkeypatch.setattr(group, "_ROOM_WITHIN_S", 1.0)
    with pytest.raises(ConfigError, match=r"no room for 3 x reward pool: 3 CPU asked for, 2 free of 2"):
        RayScorer(partial(LengthPool, ""), num_pools=3)


def test_a_gpu_on_which_the_trainer_computes_is_not_lent(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(group, "_GPUS_WITHIN_S", 120.0)  # a busy machine starts an actor in its own time
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        release = group.hold_gpus(["cuda:0", "cpu"])
    other = group.ActorGroup("other", lambda _: LentGpu(), 1, num_cpus=0, num_gpus=1)
    assert other.call("names", {0: ()})[0] == {0: ["0"]}
    monkeypatch.setattr(group, "_GPUS_WITHIN_S", 1.0)
    monkeypatch.setattr(group, "_ROOM_WITHIN_S", 1.0)
    with pytest.raises(
        ConfigError, match=r"not given cuda:0 of this machine within 1 s: .* other work .* busy"
    ):
        group.hold_gpus(["cuda:0"])
    with pytest.raises(ConfigError, match=r"no room for 1 x another: 1 GPU asked for, 0 free of 2"):
        group.ActorGroup("another", lambda _: LentGpu(), 1, num_cpus=0, num_gpus=1)
    other.close()
    release()
    _wait_until_free("GPU")


class LentGpu:
    def names(self) -> list[str]:
        import ray

        return [str(name) for name in ray.get_gpu_ids()]


def test_a_dead_raylet_ends_the_run_with_words(tmp_path: Path) -> None:
    code = """
import os, signal, subprocess, time
from multitask_rl.errors import EngineError
from multitask_rl.executor import group

class Sleeper:
    def nap(self, seconds):
        time.sleep(seconds)
        return os.getpid()

if __name__ == "__main__":
    group._REPORT_EVERY_S = 1.0
    sleepers = group.ActorGroup("sleeper", lambda index: Sleeper(), 1, num_cpus=0.1, num_gpus=0.0)
    sleepers.call("nap", {0: (0,)})
    below = subprocess.run(
        ["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    raylet = next(int(line.split()[0]) for line in below.splitlines() if "raylet" in line)
    os.kill(raylet, signal.SIGKILL)
    try:
        for _ in range(20):
            _, dead = sleepers.call("nap", {0: (1,)})
            if dead:
                sleepers.replace(0)
    except EngineError as error:
        print("ended:", error)
    os._exit(0)
"""
    script = tmp_path / "driver.py"
    script.write_text(code)
    quick = {"RAY_health_check_period_ms": "300", "RAY_health_check_failure_threshold": "3"}
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # short: sockets lie in it
        # where Ray would find the cluster of somebody else, which this process must not join
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        more = {"RAY_health_check_initial_delay_ms": "0", "RAY_TMPDIR": folder}
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**environment, **quick, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "ended: the Ray node of this machine is dead" in done.stdout, done.stderr[-2000:]
