"""The judge of unfinished responses."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from multitask_rl.config.task import ConstraintSpec, TaskSpec
from multitask_rl.constraints.streaming import StreamJudge
from multitask_rl.records import Rollout, Verdict
from multitask_rl.rollout.base import look
from multitask_rl.testing import make_rollout


def test_an_episode_that_began_again_may_be_looked_at_beside_its_lost_answer() -> None:
    """Both have the same seed; only an engine that admits requests still samples the lost one."""

    def judge(rollouts: Sequence[Rollout], only: Sequence[Collection[str]]) -> list[dict[str, Verdict]]:
        assert len(rollouts) == len(only)
        return [{"c": Verdict(cost=1.0, violated=len(r.response_ids) > 2)} for r in rollouts]

    watcher = StreamJudge(judge, lambda slot, ids: str(ids))
    spec = TaskSpec(name="t", constraints=[ConstraintSpec(plugin="c", stream_every=2)])
    looked = []
    for ids in ([1, 2, 3, 4], [1, 2]):
        watch = watcher.watch(7, make_rollout("a", task="t"), spec)
        assert watch is not None
        looked.append((watch.monitor, 7, ids))
    assert list(look(looked)) == [0, 1], "the seed tells which response ends: both are of one slot"
    assert watcher.verdicts[7]["c"].violated
