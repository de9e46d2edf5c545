"""``tool_use``: which tools an episode may call, with which arguments, and how often."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from multitask_rl.config.schema.ranges import Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.environments.calls import ToolCall, read_calls
from multitask_rl.errors import ConfigError
from multitask_rl.records import FLAGGED, Rollout, Verdict


class ToolUse:
    """Limits the tool calls of an episode: the cost is 1 if a call breaks a limit, else 0.

    Calls that name no tool of the environment, or have wrong arguments, count as well.
    With ``stream_every`` it judges the calls that the answer has completed, without those of earlier turns.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(isolate=False, whole_episodes=True, timeout_s=10.0)

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``tool_use`` in a tasks file."""

        allowed: list[str] = field(default_factory=list)
        """The only tools that may be called; empty = all."""
        forbidden: list[str] = field(default_factory=list)
        """Tools that may not be called."""
        most: Mapping[str, int] = field(default_factory=dict)
        """Most calls of an episode by tool; the name ``*`` stands for all tools together."""
        arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
        """Tool -> argument -> regular expression that the whole argument, as text, has to match. An
        argument that a call leaves out is an empty text."""

    def __init__(self, config: Config) -> None:
        """Compile the expressions.

        Raises:
            ConfigError: an expression is malformed, or the configuration limits nothing.
        """
        if not (config.allowed or config.forbidden or config.most or config.arguments):
            raise ConfigError(
                "tool_use: give `allowed`, `forbidden`, `most` or `arguments`; nothing is limited"
            )
        self.config = config
        self.traits = replace(type(self).traits, isolate=bool(config.arguments))  # type: ignore[misc]
        try:
            self._patterns = {
                (tool, name): re.compile(pattern)
                for tool, patterns in config.arguments.items()
                for name, pattern in patterns.items()
            }
        except re.error as error:
            raise ConfigError(f"tool_use: `arguments` holds a malformed expression: {error}") from error

    @classmethod
    def isolates(cls, config: Mapping[str, Any]) -> bool:
        """Whether there is an expression: one that backtracks without an end ends only with its process."""
        return bool(config.get("arguments"))

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        """Return one verdict per episode; its reason names the first call that breaks a limit."""
        verdicts = []
        for rollout in rollouts:
            answers = [read_calls(turn.response)[1] for turn in rollout.turns]
            answers = answers or [read_calls(rollout.response)[1]]
            if rollout.finish_reason == FLAGGED and _is_cut(rollout.response, answers[-1]):
                del answers[-1][-1]  # the rest of the call may be right
            reason = self._problem(answers)
            verdicts.append(Verdict(cost=float(bool(reason)), violated=bool(reason), reason=reason))
        return verdicts

    def _problem(self, answers: Sequence[Sequence[ToolCall]]) -> str:
        config, counts = self.config, Counter[str]()
        for number, calls in enumerate(answers, 1):
            for call in calls:
                counts.update([call.name, "*"])
                where = f"turn {number}: {call.name or 'an unreadable call'}"
                if call.name in config.forbidden or (config.allowed and call.name not in config.allowed):
                    return f"{where} is not allowed"
                for name in (call.name, "*"):
                    if counts[name] > config.most.get(name, counts[name]):
                        return f"{where}: call {counts[name]} of {config.most[name]}"
                for (tool, key), pattern in self._patterns.items():
                    if tool == call.name and not pattern.fullmatch(str(call.arguments.get(key, ""))):
                        return f"{where}: {key} does not match {pattern.pattern!r}"
        return ""


def _is_cut(text: str, calls: Sequence[ToolCall]) -> bool:
    """Whether ``text`` ends within the last of its calls."""
    if not calls:
        return False
    _, mark, tail = text.rpartition("<function=")
    return bool(calls[-1].problem) or (
        bool(mark) and "</function>" not in tail and "</tool_call>" not in tail
    )
