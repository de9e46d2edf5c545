"""The benchmark of learner ranks builds each kind of them."""

import pytest
import ranks

from forked import ForkedRank


@pytest.mark.parametrize("options", [{}, {"context": 2}, {"sharded": True}, {"sharded": True, "tensor": 2}])
def test_two_ranks_of_each_kind_learn(tmp_path, monkeypatch, options):
    monkeypatch.setattr(ranks, "LocalRank", ForkedRank)
    ranks.make_actor(tmp_path, "tiny", 0)
    learner, processes = ranks.build(str(tmp_path), 2, **{"context": 1, **options})
    try:
        report = learner.update(ranks.ragged_groups()[:2], shares={"t": 1.0}, step=0)
        assert report.metrics["updates"] == 1.0
        assert report.metrics["ranks/1/busy_s"] > 0.0
        assert len(processes) == 2
    finally:
        learner.backend.close()
