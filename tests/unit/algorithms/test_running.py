"""The running scale of a task: it follows the rewards, forgets an outlier, and never vanishes at once."""

import json
import random
import statistics

import pytest

from multitask_rl.algorithms.running import RunningMoments, RunningScale


def scale_after(batches):
    """Return the scale of within-group deviations after batches of rewards of one group each."""
    scale = RunningScale()
    for rewards in batches:
        scale.update(statistics.variance(rewards))
    return scale.value


def std_after(batches):
    moments = RunningMoments()
    for rewards in batches:
        moments.update(statistics.fmean(rewards), statistics.pvariance(rewards))
    return moments.std


def normal_batches(number, outlier=None):
    stream = random.Random(0)
    batches = [[stream.gauss() for _ in range(16)] for _ in range(number)]
    if outlier is not None:
        batches[outlier][3] = 1000.0
    return batches


@pytest.mark.parametrize("after", [scale_after, std_after])
@pytest.mark.parametrize("outlier", [0, 300])
def test_one_outlier_is_forgotten(after, outlier):
    assert after(normal_batches(1000, outlier)) == pytest.approx(after(normal_batches(1000)), rel=0.02)


@pytest.mark.parametrize("after", [scale_after, std_after])
def test_a_scale_that_vanishes_is_followed_slowly(after):
    def vanishing(number):
        return normal_batches(500) + [[1e-6 * r for r in batch] for batch in normal_batches(10)] * (
            number // 10
        )

    before = after(normal_batches(500))
    assert after(vanishing(10)) > 0.5 * before
    assert 0.05 * before < after(vanishing(400)) < 0.15 * before, "what is left of a signal is not blown up"
    assert after(vanishing(6_000)) < 0.01 * before, "but a scale that stays small is the scale"


def test_moments_are_those_of_all_values_while_every_batch_counts_alike():
    values = [3.0, 5.0, 10.0, 2.0, 7.0, 9.0]
    moments = RunningMoments(rate=1e-9)
    for batch in (values[:2], values[2:4], values[4:]):
        moments.update(statistics.fmean(batch), statistics.pvariance(batch))
    assert moments.mean == pytest.approx(statistics.fmean(values))
    assert moments.std == pytest.approx(statistics.pstdev(values))


def test_state_survives_json():
    first, second = RunningMoments(), RunningMoments()
    batches = normal_batches(40, outlier=10)
    for number, rewards in enumerate(batches):
        if number == 20:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for moments in (first, second):
            moments.update(statistics.fmean(rewards), statistics.pvariance(rewards))
    assert (second.mean, second.std, second.num_steps) == (first.mean, first.std, first.num_steps)
