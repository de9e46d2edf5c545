"""A model behind an OpenAI-compatible address (a vLLM server, a hosted model): replies, and scores in them.

Plain HTTP from the standard library.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multitask_rl.boundary.posting import open_request
from multitask_rl.config.schema.ranges import Count, Natural, NotNegative, Positive, Settings
from multitask_rl.errors import ConfigError
from multitask_rl.records import FailureKind
from multitask_rl_rewards.marks import without_control_tokens
from multitask_rl_rewards.text import strip_thinking

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_REFUSED = (400, 413, 422, 451)
"""What a server says to a text that is too long, or that its filter does not let pass."""
_MAX_REPLY_BYTES = 1 << 20
_SCORE = (
    r"(?:(?<![a-z])score[*_`#\s\"']{0,8}(?:\([^()\n]{0,40}\))?[*_`\s]{0,8}(?:[:=]|[-\u2013\u2014](?=\s))"
    r"|(?m:^)[ \t#*_`>]{0,8}(?:(?:final|overall)[ \t])?score[ \t#*_`]{0,8}\n)"
    r"[*_`#\s$\[\"'(<}]{0,8}(?:[-\u2013\u2014]\s{1,4})?[*_`$]{0,4}(?:\\boxed\{\s?)?(-?\d+(?:\.\d+)?)"
)
"""``Score: 8`` as judges write it: ``**Score**: 8/10``, ``Score (0-10) = 8``, ``Score - 8``, a heading with
the number below. A dash before a space is no minus sign."""
_served: set[tuple[str, ...]] = set()
"""What has worked in this process: (address, model) replied, (address, model, pattern) gave a score."""


class EndpointError(Exception):
    """There is no reply, or no score in it; carries the kind of failure."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.infra) -> None:
        super().__init__(message)
        self.kind = kind


class UnansweredError(EndpointError):
    """The model gives no reply, or no score, to this material.

    If the model has served before (``has_replied``, ``has_scored``), the material is the cause. The actor may
    have provoked the error, because an unscored response is better for it than a low score. Otherwise the
    configuration may be the cause.
    """


@dataclass(kw_only=True, slots=True)
class EndpointConfig(Settings):
    """Keys of every plugin that asks such a model."""

    base_url: str = ""
    """Address of the endpoint up to ``/v1``. Required."""
    model: str = ""
    """Model name the endpoint knows. Required."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; unset = none is sent."""
    temperature: NotNegative = 0.0
    """Of the model."""
    max_tokens: Count = 512
    """Longest reply, tokens; a judge whose reply ends before its score gives none."""
    timeout: Positive = 60.0
    """Seconds one request may take."""
    retries: Natural = 2
    """Further tries after a refused connection, a time-out or a busy server."""
    pattern: str = ""
    """Regular expression whose last match's first group is the score in a judge's reply; empty = a number
    behind ``Score:``, in the spellings of chat models (``**Score** = 8/10``)."""
    lowest: float = 0.0
    """The rubric's worst score; becomes 0."""
    highest: float = 10.0
    """The rubric's best score; becomes 1."""


class ChatEndpoint:
    """Asks the model of ``config`` for ``who``, the plugin that messages name."""

    def __init__(self, config: EndpointConfig, who: str) -> None:
        """Check the configuration; nothing is sent.

        Raises:
            ConfigError: missing address or model, a bad pattern, an empty range.
        """
        if not config.base_url.startswith(("http://", "https://")) or not config.model:
            raise ConfigError(
                f"{who}: `base_url` (http://host:port/v1) and `model` are required; got {config.base_url!r} "
                f"and {config.model!r}."
            )
        try:
            self._pattern = re.compile(config.pattern or _SCORE, re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"{who}: `pattern` is not a regular expression: {error}") from error
        if self._pattern.groups != 1:
            raise ConfigError(
                f"{who}: `pattern` must have exactly one group, the score; it has {self._pattern.groups}."
            )
        if config.lowest == config.highest:
            raise ConfigError(f"{who}: `lowest` and `highest` must differ; both are {config.lowest}.")
        self._config = config

    def judge(self, prompt: str, seed: int = 0) -> float:
        """Return the score in the model's reply to ``prompt``, scaled to [0, 1].

        Raises:
            EndpointError: no reply (see ``ask``); kind ``grader``: no score in it, or one out of range.
            UnansweredError: the latter two.
        """
        reply = strip_thinking(self.ask([{"role": "user", "content": prompt}], seed))
        found = self._pattern.findall(reply)
        if not found:
            raise UnansweredError(f"the judge gave no score: {reply[-200:]!r}", FailureKind.grader)
        number = float(found[-1])
        low, high = self._config.lowest, self._config.highest
        if not min(low, high) <= number <= max(low, high):
            message = f"the judge's score {number:g} is outside {low:g} to {high:g}"
            raise UnansweredError(message, FailureKind.grader)
        _served.add(self._key(self._pattern.pattern))
        return (number - low) / (high - low)

    def ask(self, messages: Sequence[Mapping[str, str]], seed: int = 0) -> str:
        """Return the model's reply; busy servers and broken connections are asked again.

        Control tokens in the messages are broken up: see ``without_control_tokens``.

        Raises:
            EndpointError: kind ``infra``: no answer; ``grader``: it refuses, or it is no chat completion.
            UnansweredError: the latter, and a text that the server does not take.
        """
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [{**m, "content": without_control_tokens(m["content"])} for m in messages],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
            "seed": seed,
        }
        for attempt in range(self._config.retries + 1):
            try:
                reply = self._post(body)
                _served.add(self._key())
                return reply
            except EndpointError as error:
                if error.kind is not FailureKind.infra or attempt == self._config.retries:
                    raise
                time.sleep(min(0.1 * 4**attempt, 5.0))
        raise AssertionError("the loop returns or raises")

    def _post(self, body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self._config.api_key_env, ""):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self._config.base_url.rstrip('/')}/chat/completions",
            data=json.dumps(body).encode(),
            headers=headers,
        )
        try:
            with open_request(request, timeout=self._config.timeout) as answer:
                reply = json.loads(answer.read(_MAX_REPLY_BYTES))
            text = reply["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(300).decode("utf-8", "replace")
            message = f"the endpoint answered {error.code}: {detail}"
            if error.code in _REFUSED:
                raise UnansweredError(message, FailureKind.grader) from error
            kind = FailureKind.infra if error.code in _RETRIED else FailureKind.grader
            raise EndpointError(message, kind) from error
        except OSError as error:  # refused, reset, timed out
            raise EndpointError(f"no answer from {self._config.base_url}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            message = f"the endpoint's answer is no chat completion: {error!r}"
            raise UnansweredError(message, FailureKind.grader) from error
        if not isinstance(text, str):
            raise UnansweredError("the endpoint's answer holds no text", FailureKind.grader)
        return text

    @property
    def has_replied(self) -> bool:
        """Whether the model has replied, in this process."""
        return self._key() in _served

    @property
    def has_scored(self) -> bool:
        """Whether the judge has given a score that ``pattern`` finds, in this process."""
        return self._key(self._pattern.pattern) in _served

    def _key(self, *pattern: str) -> tuple[str, ...]:
        return (self._config.base_url, self._config.model, *pattern)
