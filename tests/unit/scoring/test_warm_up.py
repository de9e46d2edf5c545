"""Before step 1: every plugin is built, warmed up and found healthy, or the run does not start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.errors import MultitaskRLError
from multitask_rl.scoring.items import Limiter
from multitask_rl.scoring.pool import RewardPool, plan_plugin, start_lane
from multitask_rl.testing import make_rollout

PLUGIN = """
from pathlib import Path

from multitask_rl.contracts import PluginTraits

MARK = Path(__file__).with_suffix(".warm")


class Warm:
    traits = PluginTraits(isolate=ISOLATE)

    def warm_up(self):
        MARK.touch()

    def score(self, rollouts):
        return [float(MARK.exists()) for _ in rollouts]


class Cold(Warm):
    def warm_up(self):
        raise ConnectionError("judge.example:443 does not answer")
"""


@pytest.fixture(params=["True", "False"])
def plugin(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "warm_plugin.py"
    file.write_text(PLUGIN.replace("ISOLATE", request.param))
    return file


def pool_of(reference: str) -> RewardPool:
    spec = TaskSpec(name="t", rewards=[RewardSpec(plugin=reference, name="warm")])
    return RewardPool({"t": spec}, ScoringConfig(num_workers=1), seed=0, devices={})


def test_a_plugin_is_warm_before_its_first_score(plugin: Path) -> None:
    pool = pool_of(f"{plugin}:Warm")
    try:
        for ask in (pool.score, pool.judge):
            with pytest.raises(RuntimeError, match="before it was started"):
                ask([make_rollout("x", task="t")])
        pool.start()
        assert plugin.with_suffix(".warm").exists(), "before anything is scored"
        assert pool.score([make_rollout("x", task="t")])[0].reward == 1.0
    finally:
        pool.close()


def test_a_plugin_that_cannot_warm_up_stops_the_start(plugin: Path) -> None:
    pool = pool_of(f"{plugin}:Cold")
    with pytest.raises(MultitaskRLError, match=r"warm.*judge\.example:443 does not answer"):
        pool.start()
    pool.close()


def test_a_plugin_that_failed_before_anything_waited_for_it_stops_the_start(tmp_path: Path) -> None:
    """A runner that failed leaves its lane; a later wait raises its error instead of never ending."""
    file = tmp_path / "warm_plugin.py"
    file.write_text(PLUGIN.replace("ISOLATE", "True"))
    spec = RewardSpec(plugin=f"{file}:Cold", name="warm")
    plan = plan_plugin(TaskSpec(name="t", rewards=[spec]), spec, 0, seed=0, devices={})
    lane = start_lane(plan, config=ScoringConfig(num_workers=1), limiter=Limiter(1))
    try:
        deadline = time.monotonic() + 30.0
        while lane.runners and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not lane.runners
        with pytest.raises(MultitaskRLError, match=r"warm.*judge\.example:443 does not answer"):
            lane.wait_ready()
    finally:
        lane.close()
