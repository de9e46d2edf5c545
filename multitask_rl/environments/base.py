"""Interfaces for authors of environments, and the one shape that a run drives.

An author writes a class in one of two shapes, ``ToolEnvironment`` or ``MessageEnvironment``; methods may be
``async``. ``environments.adapt`` turns an instance into a ``World``, which lives in a worker process for one
episode. A message is a mapping as chat templates take it: ``{"role": "user", "content": "..."}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""``role`` (one of ``records.ROLES``) and ``content``, a text; further keys are for the
chat template (``name``, ``tool_call_id``)."""

Earned = float | Mapping[str, float] | None
"""What an episode earned: a reward, rewards by name, or None = nothing was given. An episode that ends so of
itself is unscored (never 0); one that a limit or a constraint ended, or whose last answer a limit cut, has
``unfinished`` of ``environment``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The answer of an environment to one message of the actor."""

    messages: Sequence[Message] = ()
    """What the environment says; empty only with ``done`` or ``anew``."""
    done: bool = False
    """The episode ends."""
    reward: Earned = None
    """Reward of this step. The rewards of an episode's steps are summed, by name; None adds nothing."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able facts for the record of the turn; numbers are averaged per task."""
    anew: Opening | None = None
    """The conversation begins anew with these messages, which are all of it; the turns up to here are a
    training sample of their own. ``messages`` is empty then."""
    max_tokens: int = 0
    """Most tokens of the next answer, if that is less than the task allows; 0 = as the task says."""
    stop: Sequence[str] = ()
    """Texts that end the next answer, beside those of the task; they are no part of it."""


class ToolEnvironment(Protocol):
    """An environment of tools, built as ``Class(**environment_config)`` (or ``Class(Config(...))``).

    Every public method but ``reset``, ``get_reward`` and ``close`` is a tool: its name, docstring and typed
    arguments become the schema that the chat template shows to the actor, its result becomes a message of
    role ``tool``. A tool that raises gives the actor its error text; calls beyond ``max_tool_calls`` are
    refused. The episode ends with the first answer that calls no tool. The shape is that of TRL's
    ``environment_factory``.
    """

    def reset(self, **row: Any) -> str | None:
        """Begin an episode on a row of the data; the text is appended to the last user message."""
        ...


class MessageEnvironment(Protocol):
    """An environment that answers messages: a game, a simulated user. Built as a ``ToolEnvironment`` is."""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Begin an episode on a row of the data.

        Returns:
            Messages that the actor reads after the task's prompt, before its first answer; empty if the
            prompt alone is enough.
        """
        ...

    def step(self, message: Message) -> StepResult:
        """Answer the actor's message (role ``assistant``)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What an episode begins with."""

    messages: Sequence[Message] = ()
    """Messages behind those of the prompt."""
    suffix: str = ""
    """Text at the end of the last user message."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools (``{"type": "function", "function": {...}}``), for the chat template."""
    is_whole: bool = False
    """``messages`` are the whole conversation: the row's prompt is not shown."""
    max_tokens: int = 0
    """As in ``StepResult``, for the first answer."""
    stop: Sequence[str] = ()
    """As in ``StepResult``, for the first answer."""


class World:
    """One episode of one environment, in the shape that a run drives; it lives in a worker process.

    ``reset`` is called once, then ``step`` per answer until a result is ``done``, then ``earned``; ``close``
    is called exactly once, whatever happened before. An exception of ``reset``, ``step`` or ``earned`` is an
    ``infra`` failure of the episode: errors that the actor caused are messages to it.
    """

    calls_left: int | None = None
    """Calls of tools that may still be made in the episode; a world with tools refuses further ones. None =
    any number. Set before ``reset``."""

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin the episode."""
        raise NotImplementedError

    def step(self, message: Message) -> StepResult:
        """Answer ``message``, the actor's whole answer as text in ``content``.

        It also has ``finish_reason``, as ``Rollout.finish_reason``, and ``usage``: numbers of tokens.
        """
        raise NotImplementedError

    def earned(self) -> Earned:
        """Return the reward of the whole episode beside those of its steps; None = nothing to add."""
        return None

    def close(self) -> None:
        """Free what the episode holds."""
