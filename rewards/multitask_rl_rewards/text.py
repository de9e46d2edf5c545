"""Plain-text helpers that several rewards share: templates, reasoning blocks, the question of a row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from multitask_rl.records import Failure, FailureKind, Rollout, Verdict


def render(template: str, **values: str) -> str:
    """Replace ``{name}`` by its value, for the given names only.

    Unlike ``str.format`` other braces stay as they are and a value is never read as a template, so a
    response that spells ``{prompt}`` injects nothing.

    >>> render("Q: {q} {x}", q="{q}")
    'Q: {q} {x}'
    """
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], template)


def strip_thinking(text: str, prompt: str | None = None) -> str:
    """Return ``text`` without its thoughts, which stand from each ``<think>`` to the next ``</think>``.

    Thoughts at the beginning that do not end are the whole text: nothing is left. Elsewhere a ``<think>``
    without an end begins none. If the last ``<think>`` of ``prompt`` has no end, the text begins with
    thoughts. Without a prompt it does if a ``</think>`` comes before any ``<think>``.

    >>> strip_thinking("<think>is it 3?</think> 4")
    ' 4'
    >>> strip_thinking("So 3, </think> 4", prompt="What is 2 + 2?")
    'So 3, </think> 4'
    """
    if prompt is None:
        is_open = "</think>" in text.partition("<think>")[0]
    else:
        is_open = "<think>" in prompt and "</think>" not in prompt.rpartition("<think>")[2]
    text, kept = f"<think>{text}" if is_open else text, ""
    while "<think>" in text:
        before, _, rest = text.partition("<think>")
        _, end, after = rest.partition("</think>")
        if not end:
            return "" if not (kept + before).strip() else kept + text
        text, kept = after, kept + before
    return kept + text


def answer_of(rollout: Rollout) -> str:
    """Return the response without thoughts; "" if a limit cut the thoughts.

    A response that ends by itself without ``</think>`` is the answer, also if the prompt opened thoughts:
    some tokenizers count the tag among the special tokens, which a response lacks.
    """
    is_cut = rollout.finish_reason != "stop"
    may_be_open = is_cut or "</think>" in rollout.response
    return strip_thinking(rollout.response, rollout.prompt.text if may_be_open else "")


def question_of(rollout: Rollout, column: str = "prompt") -> str:
    """Return the question as the data set words it, else the prompt as the actor saw it.

    A judge has its own chat template: the actor's (in ``prompt.text``) would be noise to it.
    """
    value = rollout.row.get(column)
    return value if isinstance(value, str) and value else rollout.prompt.text


def without_question(response: str, rollout: Rollout) -> str:
    """Return ``response`` without literal repetitions of the question, which answer nothing."""
    for question in (rollout.row.get("prompt"), rollout.prompt.text):
        if isinstance(question, str) and question.strip():
            response = response.replace(question.strip(), " ")
    return response


def value_of(row: Mapping[str, Any], column: str, source: str) -> Any | Failure:
    """Return ``row[column]``, or a typed failure that says whether it is null or which columns there are."""
    value = row.get(column)
    if value is None and column in row:
        return data_failure(f"the row's {column!r} is empty (null)", source)
    if value is None:
        present = ", ".join(sorted(map(str, row))) or "none"
        return data_failure(f"row has no {column!r}; its columns: {present}", source)
    return value


def data_failure(message: str, source: str) -> Failure:
    """Return the failure of a row that lacks what ``source`` needs."""
    return Failure(kind=FailureKind.data, message=message, source=source)


def unread(max_parts: int) -> Verdict:
    """Return the verdict on a response that is too long to be judged: an unread part may be unsafe."""
    reason = f"longer than `max_parts` = {max_parts} parts of what the model reads at once"
    return Verdict(cost=1.0, violated=True, reason=reason)


def verdict_of(cost: float, threshold: float, word: str, source: str) -> Verdict | Failure:
    """Return the verdict on a response of ``cost``: violated from ``threshold`` on; NaN is a failure.

    ``word`` begins the reason of a violation: ``unsafe with 0.93``.
    """
    if math.isnan(cost):
        return Failure(kind=FailureKind.grader, message="the model returned NaN", source=source)
    cost = min(max(cost, 0.0), 1.0)
    violated = cost >= threshold
    return Verdict(cost=cost, violated=violated, reason=f"{word} with {cost:.2f}" if violated else "")
