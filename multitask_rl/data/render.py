"""Renders rows as the prompts that the model sees, with special tokens added once; checks rows and splits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from multitask_rl.boundary.printable import cut_off
from multitask_rl.config.checks import parse_template
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.task import TaskSpec
from multitask_rl.data.readers import GeneratedRows, ReportedRows, Row, Rows
from multitask_rl.data.rows import fingerprint, row_id
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.records import ROLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NONE: Mapping[str, str] = MappingProxyType({})
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def render_prompt(spec: TaskSpec, row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Return the prompt's text and token ids.

    - With a chat template (``spec.chat``; None = if the tokenizer has one), the filled prompt template is the
      user's message, and all special tokens come from the chat template.
    - Without one, the tokenizer adds its special tokens in front.
    - If the prompt template is one column that holds a list of chat messages, these are used as they are;
      ``spec.system`` replaces their system message. If the last one is of the role ``assistant``, the actor
      continues it.

    The row holds text: a special token written out in it (``<|im_end|>``) is encoded as ordinary characters,
    so that a row cannot open a turn of the chat. A true column ``special_tokens`` lets it be a special token.

    Returns:
        ``(text, prompt_ids)``; prompt_ids [P], P >= 1.

    Raises:
        DataError: a column is missing, null or no text, the prompt is empty, or the chat template refuses
            the messages; names the row.
        ConfigError: ``chat: true`` with a tokenizer that has no chat template.
    """
    conversation = Conversation(spec, row, tokenizer)
    return conversation.text, conversation.prompt_ids


class Conversation:
    """Text and tokens of an episode: the prompt, then answers of the actor and messages of the world.

    Tokens are never decoded and encoded again: ``reply`` encodes what stands between two answers. World
    messages are text, as a row is: a special token written out in them opens no turn.

    Args:
        spec: the task.
        row: the row of the data.
        tokenizer: the actor's.
        messages: the world's first messages, after those of the prompt.
        suffix: the world's text at the end of the last user message.
        tools: JSON schemas for the chat template.
        is_whole: ``messages`` are the whole conversation; the row's prompt is not shown.

    Raises: see ``render_prompt``.
    """

    def __init__(
        self,
        spec: TaskSpec,
        row: Row,
        tokenizer: PreTrainedTokenizerBase,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        suffix: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        is_whole: bool = False,
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if spec.chat and not has_template:
            raise ConfigError(
                f"{spec.where}.chat is true, but the tokenizer has no chat "
                f"template; set chat: false, or put one as chat_template.jinja into the model's directory"
            )
        self._task = spec.name
        self._tokenizer = tokenizer
        self._is_chat = has_template and spec.chat is not False
        # JSON text may spell a special token with escapes: it is read first
        shown = {"row": row, "tools": [*(tools or ([] if is_whole else _tools(spec, row)))]}
        self._hidden = _Hidden(shown, tokenizer, means_tokens=row.get("special_tokens") is True)
        tools = self._hidden.row["tools"]
        self._options = {**spec.chat_template_kwargs, **({"tools": tools} if tools else {})}
        content = [] if is_whole else render_content(spec, self._hidden.row["row"])
        self._own = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        """Messages of the row."""
        system = []
        if spec.system and self._is_chat and not is_whole:
            system = [{"role": "system", "content": spec.system}]
            if self._own[0].get("role") == "system":  # models are trained with one
                del self._own[0]
        if self._is_chat and _end_with_answer(self._own[1:]) and not (self._own[-1]["content"] or "").strip():
            del self._own[-1]  # an empty answer begins as any answer does
        self._system = system
        self._said: list[Mapping[str, Any]] = [dict(m) for m in messages]
        """Messages of the world and answers behind the prompt."""
        if suffix and self._said:
            self._said[-1] = {**self._said[-1], "content": f"{self._said[-1]['content']}{suffix}"}
        elif suffix:
            self._hidden = _Hidden([suffix], tokenizer, taken=self._hidden)
            place = -2 if _end_with_answer(self._own[1:]) else -1
            own = self._own[place]
            self._own[place] = {**own, "content": f"{own['content']}{self._hidden.row[0]}"}
        self.text, self.prompt_ids = self._render()
        """``text`` is the whole conversation so far, ``prompt_ids`` [P] the prompt alone."""
        if not self.prompt_ids:
            raise DataError(
                f"task {spec.name!r}: row {row_id(row)!r} renders to an empty prompt; give it a text, or "
                f"leave it out (the task's prompt is {spec.prompt!r})"
            )

    def reply(
        self, response: str, response_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[int] | None]:
        """Add an answer of the actor and the world's reply.

        Returns:
            The tokens between this answer and the next. Then, if the chat template has rewritten earlier
            messages, the whole context [C] of the next answer, else None.

        Raises:
            DataError: the chat template refuses the conversation.
        """
        hidden = _Hidden({"messages": messages}, self._tokenizer)
        # the answer continues the row's last message
        begun = "" if self._said or not _end_with_answer(self._own) else self._own.pop()["content"]
        before = [*self._said, {"role": "assistant", "content": f"{begun}{response}"}]
        if not self._is_chat:
            between = "\n" + "".join(f"{m['content']}\n" for m in hidden.row["messages"])
            self._said = [*before, *messages]
            self.text += response + hidden.shown(between)
            return hidden.encode(between, self._tokenizer, begun=True), None
        mark = "\U000ffffe"
        marked = [*self._said, {"role": "assistant", "content": mark}, *hidden.row["messages"]]
        between = self._template(marked).partition(mark)[2]
        given = hidden.encode(between, self._tokenizer, begun=True)
        if given[:1] == list(response_ids[-1:]):
            del given[0]  # the actor sampled the end of its turn itself
        expected = self.text + response + hidden.shown(between)
        self._said = [*before, *messages]
        self.text, context = self._render()
        # templates also strip spaces: that is no rewriting
        is_kept = "".join(self.text.split()) == "".join(expected.split())
        if is_kept:
            self.text = expected
        return (given, None) if is_kept else ([], context)

    def _render(self) -> tuple[str, list[int]]:
        said = _Hidden(self._said, self._tokenizer, taken=self._hidden)
        if self._is_chat:
            # the template's text holds the begin-of-sequence token; the tokenizer must not add a second one
            text, begun = self._template(said.row), True
        else:
            text = "\n\n".join(str(m["content"] or "") for m in (*self._own, *said.row))
            bos = self._tokenizer.bos_token
            begun = bool(bos) and text.startswith(str(bos))
        return said.shown(text), said.encode(text, self._tokenizer, begun=begun)

    def _template(self, said: Sequence[Mapping[str, Any]]) -> str:
        messages = [*self._system, *self._own, *said]
        is_begun = not said and _end_with_answer(self._own)
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not is_begun,
                continue_final_message=is_begun,
                **self._options,
            )
        except Exception as error:  # templates refuse by any exception: roles that do not alternate, ...
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"task {self._task!r}: the chat template of the model refuses the conversation "
                f"(roles: {roles}): {type(error).__name__}: {error}. Change the roles in the rows, leave "
                "``system`` out, or set chat: false"
            ) from error
        return str(text)


class _Hidden:
    """A row in which stand-ins replace special tokens, so that templates and tokenizer read these as text.

    A stand-in is a private-use character that the row does not hold. ``taken`` is another ``_Hidden`` whose
    stand-ins this one turns back, too.
    """

    def __init__(
        self,
        row: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        means_tokens: bool = False,
        taken: _Hidden | None = None,
    ) -> None:
        self._texts: dict[str, str] = dict(taken._texts) if taken else {}
        self.row = row
        pattern = _special_tokens(tokenizer, len(tokenizer))
        whole = str(row) if pattern is not None and not means_tokens else ""
        if pattern is None or not pattern.search(whole):
            return
        whole += "".join(self._texts)
        free = (c for c in map(chr, range(0xF0000, 0xFFFFD)) if c not in whole)
        stand_ins: dict[str, str] = {}

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda found: stand_in(found[0]), value)
            if isinstance(value, Mapping):
                return {key: hide(item) for key, item in value.items()}
            return [hide(item) for item in value] if isinstance(value, (list, tuple)) else value

        def stand_in(token: str) -> str:
            if token not in stand_ins:
                stand_ins[token] = next(free)
                self._texts[stand_ins[token]] = token
            return stand_ins[token]

        self.row = hide(row)

    def shown(self, text: str) -> str:
        """Return ``text`` with the tokens' own text in the place of the stand-ins."""
        return re.sub("[\U000f0000-\U000ffffd]", lambda found: self._texts.get(found[0], found[0]), text)

    def encode(self, text: str, tokenizer: PreTrainedTokenizerBase, *, begun: bool) -> list[int]:
        """Return the ids of ``text``; special tokens behind stand-ins are encoded as ordinary text.

        ``begun``: ``text`` already has its first special tokens; the tokenizer adds none.
        """
        pieces = re.split(f"([{''.join(self._texts)}])", text) if self._texts else [text]
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if piece in self._texts:
                ids += _encode_as_text(self._texts[piece], tokenizer)
            elif piece or not index:
                adds = not begun and not index
                ids += tokenizer(piece, add_special_tokens=adds, verbose=False)["input_ids"]
                ended = adds and ids and ids[-1] == tokenizer.eos_token_id
                if ended and not piece.endswith(str(tokenizer.eos_token)):
                    ids.pop()  # some tokenizers append their end token to every text
        return ids


@lru_cache(maxsize=8)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens' texts; ``size`` is the tokenizer's: it may be given more."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(texts - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None


def _encode_as_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of a special token's text, none of which is special."""
    special = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    special.update(tokenizer.all_special_ids)
    whole = {"add_special_tokens": False, "verbose": False}
    ids = list(tokenizer(text, split_special_tokens=True, **whole)["input_ids"])
    if special.intersection(ids):  # a tokenizer that does not know the option: no character is the token
        ids = [i for character in text for i in tokenizer(character, **whole)["input_ids"]]
        ids = [i for i in ids if i not in special or i == tokenizer.unk_token_id]
    return ids


def render_answer(spec: TaskSpec, row: Row, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of the row's given response, without an end token; what it holds is text.

    Raises:
        DataError: a column is missing, null or no text; names the row.
    """
    hidden = _Hidden(row, tokenizer, means_tokens=row.get("special_tokens") is True)
    text = _last_message(spec, hidden.row)
    text = render_template(spec.answer, hidden.row, task=spec.name) if text is None else text
    return hidden.encode(text, tokenizer, begun=True)


def end_token(spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...]) -> int:
    """Return which of the tokens ``end_ids`` ends an answer: that of the chat template, else the first."""
    template = str(tokenizer.chat_template or "") if spec.chat is not False else ""
    return _end_of_turn(tokenizer, template, end_ids) if template else end_ids[0]


@lru_cache(maxsize=8)
def _end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str, end_ids: tuple[int, ...]) -> int:
    mark = "\U000ffffe"
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": mark}]
    try:
        text = str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False))
    except Exception:  # noqa: BLE001 - templates refuse by any exception; then the rows' own chats tell why
        return end_ids[0]
    behind = tokenizer(text.partition(mark)[2], add_special_tokens=False, verbose=False)["input_ids"]
    return next((int(i) for i in behind if i in end_ids), end_ids[0])


def render_content(spec: TaskSpec, row: Row) -> str | list[dict[str, Any]]:
    """Return the filled template, or the chat messages that take its place; raises as ``render_template``."""
    messages = _messages(spec, row)
    if _last_message(spec, row) is not None:
        return messages[:-1]
    return messages or render_template(spec.prompt, row, task=spec.name)


def is_null(value: Any) -> bool:
    """Whether a cell of a row is empty; NaN is what tables (pandas) have in an empty cell."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def render_template(template: str, row: Row, *, task: str) -> str:
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
        if is_null(value):
            state = "is null in" if column in row else "is not in"
            raise DataError(
                f"task {task!r}: column {column!r} of the prompt template {state} row {row_id(row)!r} "
                f"(columns: {', '.join(map(str, row))})"
            )
        if isinstance(value, (list, tuple, Mapping)) and conversion is None:
            items = value if isinstance(value, list) else []
            if template == f"{{{column}}}" and items and isinstance(items[0], Mapping):
                raise DataError(
                    f"task {task!r}: a message in column {column!r} of row {row_id(row)!r} has the keys "
                    f"{', '.join(map(repr, items[0]))}; every message needs 'role' and 'content': rename them"
                )
            raise DataError(
                f"task {task!r}: column {column!r} of the prompt template {template!r} holds a "
                f"{type(value).__name__} in row {row_id(row)!r}, which has no text of its own; chat messages "
                f"need the prompt '{{{column}}}' alone, anything else a column of text (or "
                f"'{{{column}!r}}' for how Python writes it)"
            )
        try:
            if conversion is not None:
                value = repr(value) if conversion == "r" else str(value)
            parts.append(format(value, spec or ""))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"task {task!r}: column {column!r} of row {row_id(row)!r} cannot be written as "
                f"{{{column}:{spec or ''}}}: {error}; leave the format out or give the column another type"
            ) from error
    return "".join(parts)


def check_template(spec: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ``ConfigError`` if the chat template does not read a variable that the task gives it."""
    is_chat = tokenizer.chat_template and spec.chat is not False
    template = str(tokenizer.chat_template) if is_chat else ""
    words = set(re.findall(r"\w+", template))
    given = [(f"chat_template_kwargs.{name}", name) for name in spec.chat_template_kwargs]
    if spec.tools_column:
        given.append(("tools_column", "tools"))
    for key, name in given:
        if not is_chat:
            reason = "the tokenizer has no chat template (a file chat_template.jinja would be one);"
            reason = "chat is false;" if spec.chat is False else reason
            raise ConfigError(f"{spec.where}.{key}: has no effect, because {reason} leave it out")
        if name not in words:
            raise ConfigError(
                f"{spec.where}.{key}: has no effect, because the model's chat template does not read "
                f"{name!r}{suggest(name, words)}. Leave it out, or say in the prompt what it would say"
            )


def _tools(spec: TaskSpec, row: Row) -> list[Any]:
    """Return the tools of ``row`` for the chat template."""
    value = row.get(spec.tools_column) if spec.tools_column else None
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{spec.where}.tools_column: column {spec.tools_column!r} of row {row_id(row)!r} is no JSON: "
                f"{error}"
            ) from error
    if value and not (isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)):
        raise DataError(
            f"{spec.where}.tools_column: column {spec.tools_column!r} of row {row_id(row)!r} holds "
            f"{cut_off(repr(value))}; expected a list of tools, each a JSON schema (a mapping)"
        )
    return value or []


def _messages(spec: TaskSpec, row: Row) -> list[dict[str, Any]]:
    """Return the chat messages of the only column of the template, if it holds any."""
    pieces = parse_template(spec.prompt)
    if len(pieces) != 1 or pieces[0][0] or pieces[0][1] is None:
        return []
    value = row.get(pieces[0][1])
    if not isinstance(value, list) or not all(isinstance(m, dict) and "content" in m for m in value):
        return []
    if any(isinstance(message["content"], list) for message in value):
        return [{**message, "content": joined(message["content"])} for message in value]
    return value


def joined(content: Any) -> Any:
    """Return content in parts of text, as OpenAI writes it, as one text; any other content as it is."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else content


def _end_with_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    return bool(messages) and messages[-1].get("role") == "assistant"


def _last_message(spec: TaskSpec, row: Row) -> str | None:
    """Return the last message of the row's chat if it is the row's given response; else None.

    It is if ``answer`` names the column of the chat, or the column ``answer``, which the row does not have.
    """
    is_meant = spec.answer == spec.prompt or (spec.answer == "{answer}" and "answer" not in row)
    messages = _messages(spec, row) if spec.answer and is_meant else []
    return str(messages[-1]["content"]) if _end_with_answer(messages) else None


def _check_messages(spec: TaskSpec, row: Row, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ``DataError`` for content that is no text, no role, or a known role written otherwise."""
    for index, message in enumerate(messages):
        role, content = message.get("role"), message["content"]
        if not isinstance(content, str | None):
            raise DataError(
                f"{spec.where}: the content of message {index + 1} of row {row_id(row)!r} is "
                f"{cut_off(repr(content))}; expected a text: the actor reads nothing else"
            )
        if role in ROLES:
            continue
        word = str(role).lower()
        hint = suggest(_OTHER_ROLES.get(word, word), ROLES)
        if hint or not isinstance(role, str) or not role:  # else a role of the template's own
            raise DataError(
                f"{spec.where}: message {index + 1} of row {row_id(row)!r} has the role {role!r}{hint} "
                f"(known: {', '.join(ROLES)})"
            )


def _given_answers(spec: TaskSpec, rows: Rows) -> str:
    """Return a warning if the chats of ``rows`` end with answers that differ; else ""."""

    def end(row: Row) -> str | None:
        chat = render_content(spec, row)
        return str(chat[-1]["content"]) if isinstance(chat, list) and _end_with_answer(chat) else None

    if spec.environment or isinstance(rows, GeneratedRows) or end(rows[0]) is None:
        return ""
    ends = [content for row in rows if (content := end(row)) is not None]
    if len(set(ends)) == 1:
        return ""
    return (
        f"the messages of {len(ends)} of {len(rows)} rows end with an answer of the assistant, which the "
        f"actor continues (row {row_id(rows[0])!r}: {cut_off(repr(ends[0]))}). If these are the right "
        "answers, the prompt shows them: take them out of the messages"
    )


def check_split(
    spec: TaskSpec,
    train: Rows,
    held_out: Rows,
    *,
    needs: Mapping[str, str] = _NONE,
    parameters: Mapping[str, str] = _NONE,
) -> str:
    """Check training rows and held-out rows with ``check_rows``, and compare them.

    Returns:
        A warning if the prompts may hold the answers, or the held-out rows say little about new prompts; else
        "". The texts of the prompts are compared, not the ids of the rows. With an environment, which may
        write the prompt, or a generator, which is slow, prompts are not compared.
    """
    trained_on = check_rows(spec, train, needs=needs, parameters=parameters)
    asked = check_rows(spec, held_out, needs=needs, parameters=parameters)
    if isinstance(held_out, ReportedRows) and spec.kind == "anchor":
        return (
            "the rows are of the split test: they are only reported, so that the guard cannot watch this "
            "anchor; name another split in eval_split, e.g. train: an anchor is never trained on"
        )
    if isinstance(held_out, ReportedRows) and len(train) > 1:
        return (
            "the held-out rows are of the split test: they are only reported, so that scheduler, guard and "
            "best checkpoint know no held-out value of this task; leave eval_split out, and other rows are "
            "held out, and evaluate the test split with `multitask-rl eval RUN tasks.yaml --split test`"
        )
    if not len(train):
        return ""
    if told := _given_answers(spec, train):
        return told
    if len(train) != len(held_out) or fingerprint(train) != fingerprint(held_out):
        if spec.environment or isinstance(train, GeneratedRows) or isinstance(held_out, GeneratedRows):
            return ""
        return _shared_prompts(spec, train, held_out, set(trained_on), asked)
    if len(train) > 1 and len({row_id(row) for row in train}) == 1:
        return (
            f"all {len(train)} rows have the same id, or are equal ({row_id(train[0])!r}), so that none can "
            "be held out: the evaluation says nothing of other prompts; give each row its own id, or none"
        )
    return (
        f"the held-out rows are those that are trained on ({len(train)}): the evaluation says nothing of "
        "other prompts; give more rows, or an eval_dataset"
    )


def _shared_prompts(
    spec: TaskSpec, train: Rows, held_out: Rows, trained_on: set[int], asked: Sequence[int]
) -> str:
    """Return a warning if all training prompts are equal, or some prompts are held out, too; else "".

    ``trained_on`` and ``asked`` (of the held-out rows) are hashes of prompts.
    """
    empty = hash("")
    if len(train) > 1 and trained_on != {empty} and len(trained_on) == 1:
        return (
            f"all {len(train)} training rows make the same prompt, "
            f"{cut_off(repr(str(render_content(spec, train[0]))))}; write the columns that tell them apart "
            f"into the task's prompt, in braces ({cut_off(repr(spec.prompt))})"
        )
    shared = [i for i, prompt in enumerate(asked) if prompt in trained_on and prompt != empty]
    if not shared:
        return ""
    return (
        f"{len(shared)} of {len(held_out)} held-out rows have a prompt that is trained on, too (such as row "
        f"{row_id(held_out[shared[0]])!r}): the evaluation says less of new prompts; remove these rows from "
        "the training rows or from the held-out ones"
    )


def check_rows(
    spec: TaskSpec, rows: Rows, *, needs: Mapping[str, str] = _NONE, parameters: Mapping[str, str] = _NONE
) -> list[int]:
    """Check that every row has the columns that are read from it, before a model loads.

    Args:
        spec: the task; the columns of its prompt and its answer must hold something, ``tools_column`` may be
            null.
        rows: its rows; of a generator only four are checked: all have the same columns.
        needs: further columns that must hold something -> what reads the column ("reward 'f1'").
        parameters: columns that may be null -> what reads the column.

    Returns:
        The hash of each checked row's prompt.

    Raises:
        DataError: a row lacks a column, its prompt is empty, or its chat is malformed. The message names the
            first such row.
    """
    answered = {column for _, column, _, _ in parse_template(spec.answer) if column}.difference(needs)
    prompted = {column for _, column, _, _ in parse_template(spec.prompt) if column}
    filled, answered = prompted | answered | set(needs), answered - prompted
    present = set(parameters)
    if spec.tools_column:
        present.add(spec.tools_column)
    prompts = []
    for row in rows[:4] if isinstance(rows, GeneratedRows) else rows:
        own = filled - answered if _last_message(spec, row) is not None else filled
        missing = {c for c in own if is_null(row.get(c))} | (present - row.keys())
        if missing:
            label = cut_off(repr(dict(row))) if row.get("id") is None else repr(str(row["id"]))
            place = repr(spec.dataset) if spec.dataset else "the rows given"
            nulls = sorted(column for column in missing if column in row)
            hint = f"; null there: {', '.join(nulls)}" if nulls else suggest(min(missing), map(str, row))
            free = [str(column) for column in row if column not in filled]
            if braces := [c for c in missing - {*needs, *parameters} if not c.isidentifier()]:
                hint = f"; write {{{{ and }}}} around {min(braces)} if it is text of the prompt"
            elif any("." in column for column in missing):
                hint = "; name a column of the row: the keys inside one are not looked up"
            elif "reference" in missing.difference(row, present) and free:
                hint = f"; a bundled reward reads another column with config: {{reference_column: {free[0]}}}"
            elif "prompt" in missing.difference(row) and row and spec.prompt == "{prompt}":
                known = {"id", "split", "task", "reference", *needs, *parameters}
                column = next((c for c in row if c not in known and isinstance(row[c], str)), next(iter(row)))
                hint = f"; name the column of the prompts in the task, such as prompt: '{{{column}}}'"
            readers = {"the prompt": prompted, "the answer": answered, "tools_column": {spec.tools_column}}
            for column, reader in [*needs.items(), *parameters.items()]:
                readers.setdefault(f"the {reader}", set()).add(column)
            reading = [name for name, own in readers.items() if missing & own]
            keys = {"the prompt": ".prompt", "the answer": ".answer", "tools_column": ".tools_column"}
            key = keys.get(reading[0], "") if len(reading) == 1 else ""
            if (asked := missing & {*parameters}) and not isinstance(rows, GeneratedRows):
                number = sum(not asked <= own.keys() for own in rows)
                hint += f"; {number} of {len(rows)} rows lack {', '.join(sorted(asked))}: fill or remove "
                hint += "them, or give the function's parameter a default"
            raise DataError(
                f"{spec.where}{key}: row {label} of {place} lacks "
                f"{', '.join(sorted(missing))}, read by {' and '.join(reading)} "
                f"(columns: {', '.join(map(str, row)) or 'none'}){hint}"
            )
        prompt = render_content(spec, row)
        if isinstance(prompt, list):
            _check_messages(spec, row, prompt)
            if spec.answer == spec.prompt and _last_message(spec, row) is None:
                raise DataError(
                    f"{spec.where}.answer: the chat of row {row_id(row)!r} ends with no message of the "
                    "assistant; leave the row out, or name another column"
                )
        _tools(spec, row)
        if not prompt and spec.prompt and not spec.environment:
            raise DataError(
                f"{spec.where}.prompt: the prompt of row {row_id(row)!r} is empty (columns: "
                f"{cut_off(repr(dict(row)))}); give it a text, or leave the row out (the task's prompt is "
                f"{spec.prompt!r})"
            )
        prompts.append(hash(str(prompt)))
    return prompts
