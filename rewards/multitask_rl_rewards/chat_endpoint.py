"""A model behind an OpenAI-compatible address (a vLLM server, a hosted model): replies, and scores in them.

Plain HTTP from the standard library.
"""

from __future__ import annotations

import hashlib
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
from multitask_rl_rewards.text import strip_thinking

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_MAX_REPLY_BYTES = 1 << 20


class EndpointError(Exception):
    """There is no reply, or no score in it; carries the kind of failure."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.infra) -> None:
        super().__init__(message)
        self.kind = kind


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
    """Longest reply, tokens."""
    timeout: Positive = 60.0
    """Seconds one request may take."""
    retries: Natural = 2
    """Further tries after a refused connection, a time-out or a busy server."""
    pattern: str = r"Score:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match's first group is the score in a judge's reply."""
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
            self._pattern = re.compile(config.pattern, re.IGNORECASE)
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
        """
        reply = strip_thinking(self.ask([{"role": "user", "content": prompt}], seed))
        found = self._pattern.findall(reply)
        if not found:
            raise EndpointError(f"the judge gave no score: {reply[-200:]!r}", FailureKind.grader)
        number = float(found[-1])
        low, high = self._config.lowest, self._config.highest
        if not min(low, high) <= number <= max(low, high):
            raise EndpointError(
                f"the judge's score {number:g} is outside {low:g} to {high:g}", FailureKind.grader
            )
        return (number - low) / (high - low)

    def ask(self, messages: Sequence[Mapping[str, str]], seed: int = 0) -> str:
        """Return the model's reply; busy servers and broken connections are asked again.

        Raises:
            EndpointError: kind ``infra``: no answer; ``grader``: it refuses, or it is no chat completion.
        """
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": messages,
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
            "seed": seed,
        }
        for attempt in range(self._config.retries + 1):
            try:
                return self._post(body)
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
            kind = FailureKind.infra if error.code in _RETRIED else FailureKind.grader
            raise EndpointError(f"the endpoint answered {error.code}: {detail}", kind) from error
        except OSError as error:  # refused, reset, timed out
            raise EndpointError(f"no answer from {self._config.base_url}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                f"the endpoint's answer is no chat completion: {error!r}", FailureKind.grader
            ) from error
        if not isinstance(text, str):
            raise EndpointError("the endpoint's answer holds no text", FailureKind.grader)
        return text


def mark_around(*texts: str) -> str:
    """Return the line to put before and after material to judge: a hash of it, so it cannot hold the line."""
    content = "\0".join(texts).encode("utf-8", "replace")
    return f"=== {hashlib.blake2b(content, digest_size=6).hexdigest()} ==="
