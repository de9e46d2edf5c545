import json
from dataclasses import replace

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import FLAGGED, Turn
from multitask_rl.testing.builders import make_rollout
from multitask_rl_rewards.tool_use import ToolUse


def verdict(config, *answers):
    rollout = make_rollout(answers[-1])
    rollout.turns = [Turn(num_tokens=1, response=answer) for answer in answers]
    return ToolUse(ToolUse.Config(**config)).judge([rollout])[0]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"allowed": ["search"]}, "turn 2: delete is not allowed"),
        ({"forbidden": ["delete"]}, "turn 2: delete is not allowed"),
        ({"most": {"search": 1}}, "turn 3: search: call 2 of 1"),
        ({"most": {"*": 2}}, "turn 3: search: call 3 of 2"),
        ({"arguments": {"search": {"query": "[a-z]+"}}}, "turn 3: search: query does not match '[a-z]+'"),
        ({"most": {"search": 2}, "arguments": {"search": {"query": ".*"}}}, ""),
    ],
)
def test_the_first_call_that_breaks_a_limit_is_the_reason(config, reason):
    found = verdict(
        config, call("search", query="rain"), call("delete", path="/"), call("search", query="4"), "4"
    )
    assert found.reason == reason
    assert (found.cost, found.violated) == (float(bool(reason)), bool(reason))


@pytest.mark.parametrize(
    ("pattern", "is_violated"), [("[a-z]+", True), (".*", False), ("([a-z]+)?", False)], ids=range(3)
)
def test_a_missing_argument_is_an_empty_one(pattern, is_violated):
    for arguments in ({}, {"q": "UPPER"}):
        found = verdict({"arguments": {"search": {"query": pattern}}}, call("search", **arguments))
        assert found.violated == is_violated


def test_an_unreadable_call_counts_as_a_call_of_no_allowed_tool():
    assert verdict({"allowed": ["search"]}, "<tool_call>{</tool_call>").violated
    assert not verdict({"allowed": ["search"]}, "no call at all").violated


@pytest.mark.parametrize(
    ("config", "says"),
    [({}, "nothing is limited"), ({"arguments": {"a": {"b": "("}}}, "malformed expression")],
)
def test_a_configuration_that_limits_nothing_or_is_malformed_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        ToolUse(ToolUse.Config(**config))


def test_expressions_of_the_user_run_in_a_worker_process_that_can_be_killed():
    endless = {"arguments": {"search": {"query": "(a+)+"}}}
    for config in (endless, {"most": {"search": 2}}):
        assert ToolUse.isolates(config) == (config is endless)
        assert ToolUse(ToolUse.Config(**config)).traits.isolate == (config is endless)


@pytest.mark.parametrize(
    ("text", "is_violated"),
    [
        ('<tool_call>{"name": "search", "argu', False),
        ('<tool_call>{"name": "search", "arguments": {"query": "rain"}}', False),
        ('<tool_call>{"name": "delete", "arguments": {}}', True),
        ("<tool_call><function=sea", False),
        ("<tool_call><function=search><parameter=query>", False),
        ("<tool_call><function=delete></function>", True),
        ('<tool_call>{"name": "delete", "arguments": {}}</tool_call> <tool_call>{"na', True),
        ("no call", False),
    ],
)
def test_a_call_that_is_being_written_is_not_judged(text, is_violated):
    rollout = replace(make_rollout(text), finish_reason=FLAGGED)
    config = ToolUse.Config(allowed=["search"], arguments={"search": {"query": "[a-z]+"}})
    assert ToolUse(config).judge([rollout])[0].violated == is_violated
