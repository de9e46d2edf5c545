"""The pool against plugins that misbehave: nothing is lost, nothing becomes a 0, nothing waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError, PluginError, RewardError
from multitask_rl.records import NOT_APPLICABLE, Failure, FailureKind, Rollout, Score, Verdict
from multitask_rl.scoring.pool import RewardPool, plan_plugin
from multitask_rl.testing.builders import make_rollout

PLUGINS = """
import os, signal, time
from collections import Counter
from dataclasses import dataclass
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import DataError
from multitask_rl.records import Failure, FailureKind, Score, Verdict
from multitask_rl.scoring.shapes import with_traits

def exact(response, reference):
    return float(response == reference)

def length(response):
    return len(response) / 10

def raises(response):
    if response == "bad":
        raise KeyError("inner")
    return 1.0

def nan(response):
    return float("nan")

def text(response):
    return "1.0"

def too_few(responses):
    return [1.0] * (len(responses) - 1)

def not_mine(response):
    return None if response == "skip" else 1.0

def exits(response):
    raise SystemExit(3)

def crashes(response):
    if response == "crash":
        os._exit(7)
    return 1.0

@with_traits(timeout_s=1.0)
def hangs(response):
    if response.startswith("hang"):
        time.sleep(60)
    return 1.0

@with_traits(timeout_s=1.0)
def hangs_always(response):
    time.sleep(60)

@with_traits(timeout_s=1.0)
def hangs_holding_the_lock(response):
    if response == "hang":
        sum(range(10**11))
    return 1.0

@with_traits(low=0, high=1)
def out_of_range(response):
    return 3.5

async def doubled(response, reference):
    return 2.0 * (response == reference)

def slowly(response):
    time.sleep(0.01)
    return float(response)

def unreachable(response):
    raise ConnectionError("refused")

@with_traits(deterministic=True)
def counted(response):
    with open(os.environ["COUNT_FILE"], "a") as file:
        file.write("x")
    return 1.0

@with_traits(higher_is_better=False)
def perplexity(response):
    return 2.0

def short(response):
    return Verdict(cost=1.0, violated=True, reason="too long") if len(response) > 3 else 0.0

def prints(response):
    print("from the plugin")
    return 1.0

def together(responses):
    event = next((r for r in responses if r.startswith("/")), "")
    if "z" in responses:
        raise ValueError("z")
    if "slow" in responses:
        time.sleep(0.8)
    if event and not os.path.exists(event):
        open(event, "w").close()
        if event.endswith("lost"):
            raise ConnectionError("lost")
        os._exit(7)
    return [float(len(responses))] * len(responses)

class Batch:
    traits = PluginTraits(timeout_s=1.0, batch_size=32, deterministic=False, independent=True)

    def score(self, rollouts):
        if any(r.response == "hang" for r in rollouts):
            time.sleep(60)
        if any(r.response == "bad" for r in rollouts):
            raise ValueError("bad sample")
        return [1.0] * len(rollouts)

class BatchHangsAlways:
    traits = Batch.traits

    def score(self, rollouts):
        time.sleep(60)

class Flaky:
    traits = PluginTraits(deterministic=False)

    def __init__(self):
        self.calls = Counter()

    def score(self, rollouts):
        results = []
        for r in rollouts:
            self.calls[r.response] += 1
            first = self.calls[r.response] == 1
            results.append(Failure(kind=FailureKind.infra, message="lost") if first else 1.0)
        return results

class Needs:
    traits = PluginTraits(needs=("tests",))

    def score(self, rollouts):
        return [float(len(r.row["tests"])) for r in rollouts]

class InProcess:
    traits = PluginTraits(isolate=False, deterministic=False)
    built = 0

    @dataclass
    class Config:
        model: str = "m"
        device: str = "cpu"

    def __init__(self, config):
        type(self).built += 1
        self.config = config

    def score(self, rollouts):
        released = __file__ + ".released"
        until = time.monotonic() + 60
        while rollouts[0].response == "hang" and not os.path.exists(released) and time.monotonic() < until:
            time.sleep(0.01)
        return [Score(value=float(os.getpid()), components={"built": type(self).built}) for _ in rollouts]

class HangsInProcess(InProcess):
    traits = PluginTraits(isolate=False, timeout_s=0.3, deterministic=False)

class ChangesWhatItGets(InProcess):
    def score(self, rollouts):
        for rollout in rollouts:
            rollout.row["reference"] = "changed"
            rollout.response_ids.clear()
            rollout.rollout_logprobs[:] = [0.0]
            rollout.prompt.prompt_ids.clear()
        return [1.0] * len(rollouts)

class WrongSignature:
    def score(self):
        return []

@with_traits(timeout_s=1.0)
def takes_its_time(response):
    open(response, "w").close()
    time.sleep(0.4)
    return 1.0
"""

DRAWS = """
import os, random, signal
AT_START = random.random()

def draws(response):
    ending = os.environ["ENDINGS"] + response
    value = random.random() + AT_START
    if response != "fine" and not os.path.exists(ending):
        open(ending, "w").close()
        if response == "lost":
            raise ConnectionError("lost")
        os.kill(os.getpid(), signal.SIGKILL) if response == "killed" else os._exit(7)
    return value
"""


@pytest.fixture(scope="module")
def plugin_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugins") / "plugins.py"
    path.write_text(PLUGINS)
    return path


Open = Callable[..., RewardPool]


@pytest.fixture
def open_pool(plugin_file: Path) -> Any:
    pools: list[RewardPool] = []

    def make(*functions: str, constraints: Sequence[str] = (), **config: Any) -> RewardPool:
        """Return a pool with one task per function, named like it."""
        specs = {
            name: TaskSpec(
                name=name,
                rewards=[RewardSpec(plugin=f"{plugin_file}:{name}", name=name)],
                constraints=[ConstraintSpec(plugin=f"{plugin_file}:{c}", name=c) for c in constraints],
            )
            for name in functions
        }
        pools.append(RewardPool(specs, ScoringConfig(**config), seed=0, devices={}))
        pools[-1].start()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def of(task: str, *responses: str, **row: Any) -> list[Rollout]:
    return [make_rollout(text, task=task, row=row, draw=i) for i, text in enumerate(responses)]


def test_tasks_are_mixed_and_order_is_kept(open_pool: Open) -> None:
    pool = open_pool("exact", "length", "doubled")
    rollouts = [
        rollout
        for i in range(40)
        for rollout in (
            *of("exact", str(i), reference="7"),
            *of("length", "x" * i),
            *of("doubled", "a", reference="a"),
        )
    ]
    scored = pool.score(rollouts)
    assert [s.rollout for s in scored] == rollouts
    expected = [v for i in range(40) for v in (float(i == 7), i / 10, 2.0)]
    assert [s.reward for s in scored] == pytest.approx(expected)


def test_empty_response_is_scored_like_any_other(open_pool: Open) -> None:
    assert open_pool("length").score(of("length", ""))[0].reward == 0.0


def test_failed_rollouts_pass_through_unscored(open_pool: Open) -> None:
    pool = open_pool("exact")
    rollout = of("exact", "", reference="")[0]
    rollout.failure = Failure(kind=FailureKind.infra, message="engine down")
    record = pool.score([rollout])[0]
    assert (record.reward, record.failure, record.breakdown) == (None, rollout.failure, {})


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        ("nan", "grader", "returned nan, not a finite number"),
        ("text", "grader", "returned '1.0', not a number"),
        ("too_few", "grader", "returned 2 results for 3 responses"),
        ("out_of_range", "grader", "returned 3.5, outside its declared range [0, 1]"),
        ("exits", "grader", "raised SystemExit: 3 (plugins.py:34)"),
        ("Needs", "data", "the row has no column 'tests' (columns: other)"),
        ("exact", "data", "the row has no column 'reference' (columns: other)"),
    ],
)
def test_what_is_no_score_is_a_typed_failure(open_pool: Open, task: str, kind: str, message: str) -> None:
    for record in open_pool(task).score(of(task, "a", "b", "c", other=1)):
        assert record.reward is None
        assert record.failure is not None
        assert (record.failure.kind.value, record.failure.message) == (kind, message)
        assert record.failure.source == task
        assert record.breakdown == {task: record.failure}


def test_one_bad_sample_costs_only_itself(open_pool: Open) -> None:
    pool = open_pool("raises", "Batch")
    bad = "ValueError: bad sample (plugins.py:108)"
    for task, error in (("raises", "KeyError: 'inner' (plugins.py:18)"), ("Batch", bad)):
        scored = pool.score(of(task, "a", "bad", "c"))
        assert [s.reward for s in scored] == [1.0, None, 1.0]
        assert scored[1].failure == Failure(kind=FailureKind.grader, message=f"raised {error}", source=task)


def test_a_plain_batch_function_is_asked_about_its_whole_batch_or_not_at_all(
    open_pool: Open, tmp_path: Path
) -> None:
    pool = open_pool("together", max_failure_rate=1.0)
    for failed in pool.score(of("together", "a", "z", "c")):
        assert failed.failure is not None
        assert failed.failure.kind is FailureKind.grader
        assert failed.failure.message.startswith(
            "raised ValueError: z (plugins.py:91) (so its whole batch fails"
        )
    for event in ("slow", f"{tmp_path}/lost", f"{tmp_path}/crash"):
        scored = pool.score(of("together", "a", event, "c"))
        assert [s.reward for s in scored] == [3.0, 3.0, 3.0], event


def test_not_applicable_is_no_failure_but_gives_no_reward(open_pool: Open) -> None:
    scored = open_pool("not_mine").score(of("not_mine", "skip", "a"))
    assert scored[0].breakdown == {"not_mine": NOT_APPLICABLE}
    assert scored[0].reward is None
    assert scored[0].failure is not None
    assert scored[0].failure.kind is FailureKind.data
    assert scored[1].reward == 1.0


def test_weighted_sum_leaves_metrics_and_inapplicable_out(plugin_file: Path) -> None:
    rewards = [
        RewardSpec(plugin=f"{plugin_file}:exact", name="exact", weight=2.0),
        RewardSpec(plugin=f"{plugin_file}:not_mine", name="mine", weight=5.0),
        RewardSpec(plugin=f"{plugin_file}:raises", name="measured", weight=0.0),
        RewardSpec(plugin=f"{plugin_file}:perplexity", name="perplexity", weight=0.25),
    ]
    spec = TaskSpec(name="t", rewards=rewards)
    with RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}) as pool:
        scored = pool.score([*of("t", "skip", reference="skip"), *of("t", "bad", reference="x")])
    assert scored[0].reward == pytest.approx(2.0 - 0.5)
    assert scored[1].reward == pytest.approx(5.0 - 0.5), (
        "a failed metric of weight 0 does not fail the sample"
    )
    assert isinstance(scored[1].breakdown["measured"], Failure)


def test_negative_weight_on_a_cost_is_refused(plugin_file: Path) -> None:
    reward = RewardSpec(plugin=f"{plugin_file}:perplexity", name="ppl", weight=-1.0)
    pool = RewardPool({"t": TaskSpec(name="t", rewards=[reward])}, ScoringConfig(), seed=0, devices={})
    with pytest.raises(ConfigError, match="declares that lower values are better and is subtracted already"):
        pool.start()


def test_constraints_are_judged_by_name(open_pool: Open) -> None:
    pool = open_pool("length", constraints=("short", "nan"))
    long, fine = pool.judge(of("length", "too long", "ok"))
    assert long["short"] == Verdict(cost=1.0, violated=True, reason="too long")
    assert fine["short"] == Verdict(cost=0.0, violated=False)
    assert fine["nan"] == Failure(
        kind=FailureKind.grader, message="returned the cost nan, outside [0, 1]", source="nan"
    )


@pytest.mark.parametrize("task", ["hangs", "hangs_holding_the_lock", "Batch"])
def test_one_hanging_sample_times_out_alone(open_pool: Open, task: str) -> None:
    def is_alone() -> bool:
        pool = open_pool(task)
        pool.score(of(task, *"abcdefgh"))
        began = time.monotonic()
        scored = pool.score(of(task, *"abcdefghijklm", "hang", *"opqrstuvwxyz"))
        is_soon = time.monotonic() - began < (4.0 if task == "Batch" else 2.5)
        assert scored[13].breakdown == {task: Score(value=0.0, components={"overrun": 1.0})}
        return is_soon and [s.reward for s in scored] == [1.0] * 13 + [0.0] + [1.0] * 12

    # A batch plugin gets its limit once per rollout before it is killed; hedges answer the rest long before.
    # Other programs on the machine only add to a time: one try of several tells.
    assert any(is_alone() for _ in range(5))


@pytest.mark.parametrize("task", ["hangs_always", "BatchHangsAlways"])
def test_a_hung_plugin_delays_by_its_limit_only_and_nobody_else(open_pool: Open, task: str) -> None:
    def score_all() -> tuple[float, float]:
        pool = open_pool(task, "length", num_workers=2, max_failure_rate=1.0)
        hung = [make_rollout("a", task=task, row={"row": i}, draw=i) for i in range(60)]
        began = time.monotonic()
        scored = pool.score([*hung, *of("length", *["abc"] * 200)])
        elapsed = time.monotonic() - began
        assert all(s.failure is not None and s.failure.kind is FailureKind.timeout for s in scored[:60])
        assert [s.reward for s in scored[60:]] == [0.3] * 200
        began = time.monotonic()
        assert pool.score(of(task, "fine"))[0].failure is not None, "it is given a rest"
        rest = time.monotonic() - began
        assert "circuit_open" in [e.kind for e in pool.health_events(3)]
        assert pool.health_events(4) == []
        return elapsed, rest

    # 10 s until 20 calls of two workers have failed, and a second without a rest; other programs on the
    # machine only add to the time: of several tries the shortest tells
    assert any(elapsed < 5.0 and rest < 0.9 for elapsed, rest in (score_all() for _ in range(5)))


def test_an_answer_in_time_counts_however_late_the_trainer_looks_at_it(
    open_pool: Open, tmp_path: Path
) -> None:
    pool = open_pool("takes_its_time", max_failure_rate=1.0)

    def counts(mark: Path) -> bool:
        found: list[Score | Verdict | Failure] = []
        scoring = threading.Thread(
            target=lambda: found.extend(pool.score(of("takes_its_time", str(mark)))[0].breakdown.values())
        )
        scoring.start()
        while not mark.exists():
            time.sleep(0.01)
        ctypes.PyDLL(None).usleep(1_200_000)  # no thread of the trainer runs meanwhile
        scoring.join()
        return found == [Score(value=1.0)]

    # on a busy machine the answer itself may be late
    assert any(counts(tmp_path / str(i)) for i in range(4))


def test_twenty_random_kills_lose_nothing_and_change_nothing(open_pool: Open) -> None:
    pool = open_pool("slowly", num_workers=2)
    rollouts = of("slowly", *map(str, range(400)))
    stop = threading.Event()
    kills = 0

    def kill_at_random() -> None:
        nonlocal kills
        stream = random.Random(0)
        while not stop.wait(stream.uniform(0.02, 0.18)) and kills < 20:
            runner = stream.choice(next(iter(pool._lanes.values())).runners)
            worker = runner._worker  # type: ignore[attr-defined]
            if worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker._process.pid, signal.SIGKILL)
                    kills += 1

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    rounds = 0
    try:
        while kills < 20:
            assert [s.reward for s in pool.score(rollouts)] == [float(i) for i in range(400)]
            rounds += 1
    finally:
        stop.set()
        killer.join()
    assert rounds >= 1


def test_a_worker_starts_without_a_place_for_temporary_files(
    open_pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can a disk that is full end the trainer by SIGBUS, where it reads what the worker has noted."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert [s.reward for s in open_pool("slowly").score(of("slowly", "4"))] == [4.0]


def test_a_worker_that_the_kernel_kills_for_memory_is_told_so_and_not_tried_ten_times(
    plugin_file: Path, open_pool: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plugin_file.with_name("hungry.py")
    file.write_text(
        "import os\n\ndef hungry(response):\n    os.kill(os.getpid(), 9) if response == 'all' else None\n"
        "    return 1.0\n\ndef always(response):\n    os.kill(os.getpid(), 9)\n"
    )
    counts = itertools.count()
    monkeypatch.setattr("multitask_rl.scoring.process.oom_kills", lambda: next(counts))
    for name, responses, message in (
        ("hungry", ["a", "all", "c"], r"was killed by the kernel because memory ran out 3 times while"),
        ("always", [str(i) for i in range(8)], r"because memory ran out, on an empty response too"),
    ):
        rewards = [RewardSpec(plugin=f"{file}:{name}", name=name)]
        specs = {name: TaskSpec(name=name, rewards=rewards)}
        with contextlib.closing(RewardPool(specs, ScoringConfig(), seed=0, devices={})) as pool:
            pool.start()
            scored = pool.score(of(name, *responses))
        failed = [s.failure.message for s in scored if s.failure is not None]
        assert len(failed) == (1 if name == "hungry" else 8)
        assert re.search(message, failed[-1]), failed
        assert next(counts) < 60


def test_a_sample_that_crashes_the_interpreter_fails_alone(open_pool: Open) -> None:
    scored = open_pool("crashes").score(of("crashes", "a", "crash", "c"))
    assert [s.reward for s in scored] == [1.0, None, 1.0]
    assert scored[1].failure is not None
    assert scored[1].failure.kind is FailureKind.infra
    assert scored[1].failure.message == (
        "the worker process ended with code 7 3 times while scoring this sample"
    )


def test_infra_failures_are_retried_and_others_not(open_pool: Open) -> None:
    pool = open_pool("Flaky", "unreachable", retries=1)
    assert [s.reward for s in pool.score(of("Flaky", "a", "b"))] == [1.0, 1.0]
    failed = pool.score(of("unreachable", "a"))[0]
    assert failed.failure == Failure(
        kind=FailureKind.infra,
        message="raised ConnectionError: refused (plugins.py:69)",
        source="unreachable",
    )


def test_random_numbers_of_a_plugin_depend_on_the_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever worker scores the sample, whatever it scored before, also after a kill from outside."""
    file = tmp_path / "draws.py"
    file.write_text(DRAWS)
    monkeypatch.setenv("ENDINGS", str(tmp_path / "ended"))

    def score(rollouts: Sequence[Rollout], seed: int = 0, **config: Any) -> list[float | None]:
        spec = TaskSpec(name="a", rewards=[RewardSpec(plugin=f"{file}:draws", name="draws")])
        with RewardPool({"a": spec}, ScoringConfig(**config), seed=seed, devices={}) as pool:
            return [scored.reward for scored in pool.score(rollouts)]

    rollouts = of("a", *(["lost", "killed", "crash"] + ["fine"] * 9))
    undisturbed = [replace(rollout, response="fine") for rollout in rollouts]
    expected = score(undisturbed, num_workers=1)
    before = random.getstate()
    found = score(rollouts[::-1], num_workers=2)[::-1]
    assert random.getstate() == before
    assert len({*expected, *found}) == len(rollouts) + 2
    # a call that failed by itself is not repeated with the same numbers
    assert [a == b for a, b in zip(expected, found, strict=True)] == [False, True, False, *[True] * 9]
    assert not {*expected} & {*score(undisturbed[:3], seed=1, num_workers=1)}


def test_breaker_stops_asking_when_the_machinery_is_down(open_pool: Open) -> None:
    pool = open_pool("unreachable", retries=0, max_failure_rate=1.0)
    scored = pool.score(of("unreachable", *map(str, range(50))))
    assert all(s.failure is not None and s.failure.kind is FailureKind.infra for s in scored)
    event = next(e for e in pool.health_events(1) if e.kind == "circuit_open")
    assert event.reason == (
        "unreachable is given a rest: 20 infrastructure failures in a row "
        "(raised ConnectionError: refused (plugins.py:69))"
    )


def test_deterministic_results_are_cached_by_content(
    open_pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    monkeypatch.setenv("COUNT_FILE", str(count))
    pool = open_pool("counted")
    same = [make_rollout("a", task="counted", row={"k": 1}, sample=i) for i in range(8)]
    other_row = make_rollout("a", task="counted", row={"k": 2})
    assert [s.reward for s in pool.score([*same, other_row])] == [1.0] * 9
    assert count.read_text() == "xx"
    pool.score(same)
    assert count.read_text() == "xx"
    assert pool.metrics()["counted"]["reward_cache_hits"] == pytest.approx(15 / 17)


def test_error_budget_warns_of_the_first_failures_and_at_half_and_stops_above(open_pool: Open) -> None:
    pool = open_pool("raises", max_failure_rate=0.4)
    pool.score(of("raises", *["a"] * 25, "bad"))
    (event,) = pool.health_events(4)
    assert event.reason.startswith("4% of the last 26 samples could not be scored; the run stops above 40%.")
    assert "KeyError: 'inner' (plugins.py:18)" in event.reason
    pool.score(of("raises", *["a"] * 5))
    assert pool.health_events(4) == []
    pool.score(of("raises", *["bad"] * 9))
    (event,) = pool.health_events(5)
    assert (event.step, event.source, event.kind, event.task) == (5, "rewards", "warn", "raises")
    assert event.reason == (
        "25% of the last 40 samples could not be scored; the run stops above 40%. "
        "Failures: 10 x raises grader (last: raised KeyError: 'inner' (plugins.py:18)). "
        "The last: prompt 'raises/8', response 'bad'."
    )
    assert pool.health_events(6) == []
    with pytest.raises(RewardError, match=r"task 'raises': 50% of its last 60 samples could not be scored"):
        pool.score(of("raises", *["bad"] * 20))


def test_failures_of_constraints_are_counted_among_what_constraints_judged(open_pool: Open) -> None:
    pool = open_pool("length", constraints=("raises",), max_failure_rate=0.4)
    pool.judge(of("length", *["bad"] * 20, *["a"] * 180))  # at once, before any is scored
    pool.score(of("length", *["a"] * 10))  # the others were rejected
    (event,) = pool.health_events(0)
    assert event.reason.startswith("10% of the last 200 samples could not be judged")
    with pytest.raises(RewardError, match=r"task 'length': 50% of its last 200 samples could not be judged"):
        pool.judge(of("length", *["bad"] * 100))


def test_metrics_count_failures_by_kind_once(open_pool: Open) -> None:
    pool = open_pool("raises", "length")
    pool.score([*of("raises", "a", "bad", "a", "a"), *of("length", "abc")])
    metrics = pool.metrics()
    assert metrics["raises"]["reward_failures/grader"] == 0.25
    assert metrics["raises"]["reward_failure_rate"] == 0.25
    assert metrics["length"]["reward_failure_rate"] == 0.0
    assert metrics["length"]["reward_s/length"] > 0.0
    assert pool.metrics() == {}


def test_a_response_that_is_judged_and_scored_is_one_sample_of_the_failure_rate(open_pool: Open) -> None:
    pool = open_pool("raises", constraints=("short",))
    responses = of("raises", "a", "bad", "a", "a")
    pool.judge(responses, only=[{"short"}] * 4)  # partial responses: each is judged whole later
    pool.judge(responses)
    pool.score(responses)
    metrics = pool.metrics()["raises"]
    assert metrics["reward_failures/grader"] == 0.25
    assert metrics["reward_failure_rate"] == 0.25


def test_a_response_that_is_judged_and_not_scored_is_a_sample_of_the_failure_rate(open_pool: Open) -> None:
    pool = open_pool("length", constraints=("raises",))
    pool.judge(of("length", "bad", "bad", "a", "a"))
    pool.score(of("length", "bad", "bad", "a", "a")[2:])
    assert pool.metrics()["length"]["reward_failure_rate"] == 0.5
    pool.judge(of("length", "bad", "bad"))
    assert pool.metrics()["length"]["reward_failure_rate"] == 1.0
    held_out = [replace(r, prompt=replace(r.prompt, prompt_id="length/held")) for r in of("length", "a", "a")]
    pool.judge(of("length", "bad", "bad"))
    pool.judge(held_out)
    assert pool.metrics()["length"]["reward_failure_rate"] == 0.5, "an evaluation counts its draws anew"


def test_model_plugins_live_in_this_process_and_are_shared(plugin_file: Path) -> None:
    reward = RewardSpec(plugin=f"{plugin_file}:InProcess", name="rm", config={"model": "shared"})
    specs = {name: TaskSpec(name=name, rewards=[reward]) for name in ("one", "two")}
    with RewardPool(
        specs, ScoringConfig(), seed=0, devices={"reward.one": "cpu:0", "reward.two": "cpu:0"}
    ) as pool:
        for record in pool.score([*of("one", "a"), *of("two", "b")]):
            assert record.breakdown["rm"] == Score(value=float(os.getpid()), components={"built": 1.0})


def test_a_plugin_of_this_process_that_changes_what_it_gets_changes_nothing_of_the_run(
    plugin_file: Path,
) -> None:
    spec = TaskSpec(name="t", rewards=[RewardSpec(plugin=f"{plugin_file}:ChangesWhatItGets", name="rm")])
    rollouts = of("t", "a", "b", reference="7")
    with RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}) as pool:
        scored = pool.score(rollouts)
    assert [s.reward for s in scored] == [1.0, 1.0]
    assert [s.rollout for s in scored] == rollouts == of("t", "a", "b", reference="7")


def test_a_plugin_of_this_process_that_uses_torch_leaves_no_thread_of_openmp(tmp_path: Path) -> None:
    """With more of them than cores, all operations of the trainer take several times as long."""
    (tmp_path / "multiplies.py").write_text(
        "import torch\nfrom multitask_rl.scoring.shapes import with_traits\n@with_traits(isolate=False)\n"
        "def f(response): return float((torch.ones(300, 300) @ torch.ones(300, 300)).neg().exp().min())\n"
    )
    spec = TaskSpec(name="t", rewards=[RewardSpec(plugin=f"{tmp_path}/multiplies.py:f", name="f")])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}) as pool:
            before = psutil.Process().num_threads()
            assert pool.score(of("t", "a"))[0].failure is None
            until = time.monotonic() + 5
            while psutil.Process().num_threads() > before and time.monotonic() < until:
                time.sleep(0.01)
            assert psutil.Process().num_threads() <= before
    finally:
        torch.set_num_threads(threads)


def test_constraints_and_rewards_have_devices_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "placed.py").write_text(
        "from dataclasses import dataclass\n"
        "class Placed:\n"
        "    @dataclass\n"
        "    class Config:\n"
        "        device: str = 'auto'\n"
        "    def __init__(self, config): ...\n"
        "    def score(self, rollouts): ...\n"
        "    def judge(self, rollouts): ...\n"
    )
    reward = RewardSpec(plugin=f"{tmp_path}/placed.py:Placed")
    constraint = ConstraintSpec(plugin=f"{tmp_path}/placed.py:Placed")
    task = TaskSpec(name="t", rewards=[reward], constraints=[constraint])

    def device(spec: RewardSpec | ConstraintSpec, **devices: str) -> str:
        named = {f"{role}.t": place for role, place in devices.items()}
        return str(plan_plugin(task, spec, 0, seed=0, devices=named).config["device"])

    both = {"reward": "cuda:1", "constraint": "cuda:2"}
    assert (device(reward, **both), device(constraint, **both)) == ("cuda:1", "cuda:2")
    assert device(constraint, reward="cuda:1") == "cuda:1"


def test_a_hang_in_this_process_times_out_and_no_call_follows(plugin_file: Path) -> None:
    spec = TaskSpec(name="t", rewards=[RewardSpec(plugin=f"{plugin_file}:HangsInProcess", name="rm")])
    with RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}) as pool:
        hung = pool.score(of("t", "hang"))[0]
        assert hung.failure is not None
        assert hung.failure.kind is FailureKind.timeout
        later = pool.score(of("t", "fine"))[0].failure
        plugin_file.with_name(f"{plugin_file.name}.released").touch()
        assert later is not None
        assert later.message.startswith("not called: a call lasts more than 0.3 s")


def test_waiting_is_said_aloud(
    open_pool: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("multitask_rl.scoring.round.HEARTBEAT_S", 0.3)
    open_pool("hangs").score(of("hangs", "hang"))
    assert "waiting for hangs/hangs, sample hangs/0[0], " in caplog.text


def test_prints_of_a_plugin_stay_out_of_stdout(open_pool: Open, capfd: pytest.CaptureFixture[str]) -> None:
    pool = open_pool("prints")
    pool.score(of("prints", "a"))
    pool.close()
    assert capfd.readouterr().out == ""


def test_a_plugin_that_cannot_be_used_stops_the_start_and_leaves_nothing(plugin_file: Path) -> None:
    def start(reference: str, **more: Any) -> None:
        spec = TaskSpec(
            name="t",
            rewards=[
                RewardSpec(plugin=f"{plugin_file}:exact", name="good"),
                RewardSpec(plugin=reference, **more),
            ],
        )
        RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}).start()

    before = children()
    with pytest.raises(PluginError) as caught:
        start(f"{plugin_file}:WrongSignature")
    assert str(caught.value) == (
        f"tasks.t.rewards[1]: reward '{plugin_file}:WrongSignature': WrongSignature.score(self) cannot be "
        "called with one argument, the list of rollouts (too many positional arguments); expected "
        "score(self, rollouts)"
    )
    with pytest.raises(
        ConfigError, match=r"tasks\.t\.rewards\[1\]\.config.*unknown key 'modle'; did you mean 'model'"
    ):
        start(f"{plugin_file}:InProcess", config={"modle": "x"})
    assert children() == before


def test_close_and_death_of_the_trainer_leave_no_process(plugin_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        f"""
import os, sys, time
from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing.builders import make_rollout
spec = TaskSpec(name="t", rewards=[RewardSpec(plugin="{plugin_file}:hangs_holding_the_lock", name="r")])
pool = RewardPool({{"t": spec}}, ScoringConfig(), seed=0, devices={{}})
pool.start()
print(list(pool._lanes.values())[0].runners[0]._worker._process.pid, flush=True)
pool.score([make_rollout("hang", task="t")] * 3)
"""
    )
    for ending in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            worker = int(process.stdout.readline())
        time.sleep(0.3)
        process.send_signal(ending)
        process.wait(10)
        assert gone(worker), f"worker {worker} outlived a trainer ended by {ending.name}"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_tasks_file_gives_the_range_of_a_plugin_that_declares_none(plugin_file: Path) -> None:
    plugin = f"{plugin_file}:length"
    rewards = [
        RewardSpec(plugin=plugin, name="wide"),
        RewardSpec(plugin=plugin, name="narrow", range=[0.0, 1.0]),
    ]
    spec = TaskSpec(name="t", rewards=rewards)
    with RewardPool({"t": spec}, ScoringConfig(max_failure_rate=1.0), seed=0, devices={}) as pool:
        short, long = pool.score([make_rollout(text, task="t") for text in ("x" * 5, "x" * 11)])
        assert short.reward == 1.0
        assert long.breakdown["wide"] == Score(value=1.1)
        failure = long.breakdown["narrow"]
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.grader
        assert "[0, 1]" in failure.message
        traits = pool.reward_traits()["t"]
        assert (traits["narrow"].low, traits["narrow"].high) == (0.0, 1.0)
        assert traits["wide"].high == math.inf


def test_a_range_beyond_what_the_plugin_declares_is_refused() -> None:
    spec = RewardSpec(plugin="exact_match", range=[0.0, 2.0])
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.range: \[0, 2\] is not within .* \[0, 1\]"):
        plan_plugin(TaskSpec(name="t", rewards=[spec]), spec, 0, seed=0, devices={})
