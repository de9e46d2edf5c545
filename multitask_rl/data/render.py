"""A row into the prompt the model sees, special tokens exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from multitask_rl.config.task import TaskSpec
from multitask_rl.config.template import parse_template
from multitask_rl.data.rows import Row, row_id
from multitask_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["render_content", "render_prompt", "render_template"]


def render_prompt(spec: TaskSpec, row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Return the prompt's text and token ids.

    With a chat template (``spec.chat`` None = if the tokenizer has one) the rendered prompt becomes the
    user's message and the chat template's text carries all special tokens; without one the tokenizer adds
    what it adds in front. Where the prompt template is one column alone and the column holds a list of chat
    messages, these are used as they are, but for ``spec.system``, which replaces a system message of theirs.

    Returns:
        ``(text, prompt_ids)``; prompt_ids [P], P >= 1.

    Raises:
        DataError: a column is missing, null or no text, or the prompt is empty; names the row.
        ConfigError: ``chat: true`` with a tokenizer that has no chat template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if spec.chat and not has_template:
        raise ConfigError(
            f"{spec.source or 'tasks'}: tasks.{spec.name}.chat is true, but the tokenizer has no chat "
            f"template; set chat: false or use a model with one"
        )
    content = render_content(spec, row)
    if has_template and spec.chat is not False:
        text, ids = _render_chat(spec, content, tokenizer)
    else:
        text = content if isinstance(content, str) else "\n\n".join(str(m["content"]) for m in content)
        ids = _encode_plain(text, tokenizer)
    if not ids:
        raise DataError(f"task {spec.name!r}: row {row_id(row)!r} renders to an empty prompt")
    return text, ids


def render_content(spec: TaskSpec, row: Row) -> str | list[dict[str, Any]]:
    """Return the filled template, or the chat messages that take its place; raises as ``render_template``."""
    return _messages(spec, row) or render_template(spec.prompt, row, task=spec.name)


def render_template(template: str, row: Row, *, task: str = "") -> str:
    """Fill ``{column}`` with the row's values; ``{{`` and ``}}`` are braces. Values are never expanded again.

    Raises:
        DataError: a column is missing, null, or a list or mapping; names the row and its columns.
        ConfigError: the template itself is malformed.
    """
    parts: list[str] = []
    for literal, column, spec, conversion in parse_template(template):
        parts.append(literal)
        if column is None:
            continue
        value = row.get(column)
        if value is None:
            state = "is null in" if column in row else "is not in"
            raise DataError(
                f"task {task!r}: column {column!r} of the prompt template {state} row {row_id(row)!r} "
                f"(columns: {', '.join(map(str, row))})"
            )
        if isinstance(value, (list, tuple, Mapping)) and conversion is None:
            raise DataError(
                f"task {task!r}: column {column!r} of the prompt template {template!r} holds a "
                f"{type(value).__name__} in row {row_id(row)!r}, which has no text of its own; chat messages "
                f"need the prompt '{{{column}}}' alone, anything else a column of text (or "
                f"'{{{column}!r}}' for how Python writes it)"
            )
        parts.append(_formatted(value, column, spec or "", conversion, row, task))
    return "".join(parts)


def _formatted(value: Any, column: str, form: str, conversion: str | None, row: Row, task: str) -> str:
    """Return ``value`` as the template wants it."""
    try:
        if conversion is not None:
            value = repr(value) if conversion == "r" else str(value)
        return format(value, form)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"task {task!r}: column {column!r} of row {row_id(row)!r} cannot be written as "
            f"{{{column}:{form}}}: {error}; leave the format out or give the column another type"
        ) from error


def _messages(spec: TaskSpec, row: Row) -> list[dict[str, Any]]:
    """Return the chat messages of the only column of the template, if it holds any."""
    pieces = parse_template(spec.prompt)
    if len(pieces) != 1 or pieces[0][0] or pieces[0][1] is None:
        return []
    value = row.get(pieces[0][1])
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        return value
    return []


def _render_chat(
    spec: TaskSpec, content: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[int]]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    if spec.system:
        if messages[0].get("role") == "system":  # models are trained with one
            del messages[0]
        messages.insert(0, {"role": "system", "content": spec.system})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    # The template's text already holds the begin-of-sequence token; the tokenizer must not add a second one.
    return text, list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _encode_plain(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    bos, eos = tokenizer.bos_token, tokenizer.eos_token_id
    begun = bool(bos) and text.startswith(str(bos))
    ids = list(tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"])
    # Some tokenizers append their end token to every text; a prompt that has ended cannot be continued.
    if eos is not None and ids and ids[-1] == eos and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    return ids
