"""Responses that are watched while they are generated."""

from dataclasses import replace

import pytest
import torch

from model_builders import build_model
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest, Watch
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.testing.engine import sampled_logprobs

LIMIT = 24
REQUESTS = [
    GenerationRequest(
        prompt_ids=list(range(3, 3 + length)),
        sampling=SamplingParams(max_new_tokens=LIMIT),
        seeds=[1000 * length + i for i in range(6)],
    )
    for length in (3, 12, 7)
]


class Forbid:
    """Ends a response that holds a forbidden token; remembers what it was shown."""

    def __init__(self, *tokens):
        self.tokens = set(tokens)
        self.calls = []

    def check(self, partial):
        self.calls.append([(seed, list(ids)) for seed, ids in partial])
        return [bool(self.tokens & set(ids)) for _, ids in partial]


@pytest.fixture(scope="module")
def engine():
    return HFEngine(build_model(), eos_token_ids=[1], pad_token_id=0)


@pytest.fixture(scope="module")
def free(engine):
    return engine.generate(REQUESTS)


def watched(monitor, every, requests=REQUESTS):
    return [replace(r, watch=Watch(monitor=monitor, every=every)) for r in requests]


def first_look(ids, tokens, every):
    """Return where the look that finds a token ends the response; its own end if none does."""
    looks = range(every, len(ids), every)  # none at its end: a whole response is not shown
    return next((n for n in looks if tokens & set(ids[:n])), len(ids))


def test_a_monitor_that_objects_to_nothing_changes_no_bit(engine, free):
    monitor = Forbid()
    assert engine.generate(watched(monitor, 3)) == free
    assert monitor.calls


@pytest.mark.parametrize("every", [1, 4, 7])
def test_the_first_look_that_objects_ends_the_response_there(engine, free, every):
    tokens = {free[0][0].response_ids[2], free[2][3].response_ids[5]}
    ended = engine.generate(watched(Forbid(*tokens), every))
    saved = 0
    for request, group, before in zip(REQUESTS, ended, free, strict=True):
        for got, whole in zip(group, before, strict=True):
            length = first_look(whole.response_ids, tokens, every)
            assert got.response_ids == whole.response_ids[:length]
            stopped = length < len(whole.response_ids)
            assert got.finish_reason == ("flagged" if stopped else whole.finish_reason)
            saved += len(whole.response_ids) - length
            expected = sampled_logprobs(engine.model, request.prompt_ids, got.response_ids, request.sampling)
            assert torch.allclose(expected, torch.tensor(got.rollout_logprobs), atol=1e-5)
    reasons = {g.finish_reason for group in ended for g in group}
    assert saved > 20
    assert "flagged" in reasons
    assert reasons - {"flagged"}, "the others go on to their own end"


def test_all_that_are_due_at_a_step_are_asked_about_at_once(engine, free):
    monitor = Forbid()
    engine.generate(watched(monitor, 4))
    lengths = [{len(ids) for _, ids in call} for call in monitor.calls]
    assert lengths == [{n} for n in range(4, LIMIT, 4)]
    for call in monitor.calls:
        length = len(call[0][1])
        alive = {
            seed
            for request, group in zip(REQUESTS, free, strict=True)
            for seed, g in zip(request.seeds, group, strict=True)
            if len(g.response_ids) > length
        }
        assert {seed for seed, _ in call} == alive


def test_only_the_watched_rows_are_shown_and_each_at_its_own_rhythm(engine, free):
    often, seldom = Forbid(), Forbid()
    requests = [
        *watched(often, 2, REQUESTS[:1]),
        REQUESTS[1],
        *watched(seldom, 10, REQUESTS[2:]),
    ]
    assert engine.generate(requests) == free
    for monitor, request, every in ((often, REQUESTS[0], 2), (seldom, REQUESTS[2], 10)):
        shown = [(seed, len(ids)) for call in monitor.calls for seed, ids in call]
        assert {seed for seed, _ in shown} <= set(request.seeds)
        assert {length % every for _, length in shown} == {0}


def test_ending_every_response_at_once_leaves_the_engine_usable(engine, free):
    ended = engine.generate(watched(Forbid(*range(60)), 2))
    assert {len(g.response_ids) for group in ended for g in group if g.finish_reason == "flagged"} == {2}
    assert engine.generate(REQUESTS) == free
