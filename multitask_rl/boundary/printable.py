"""Text made safe to show: control characters become visible escapes, secrets are redacted.

A terminal executes control sequences: they move the cursor, change the title, send replies. Text of a model,
a row or a file therefore passes ``printable`` before a terminal or a log.

Redacted are texts and numbers under keys that name a secret (``api_key``, ``password``..., but not
``api_key_env``, which names a variable), user, password and such query values of an address, and everything
after the host of a webhook.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

REDACTED = "[redacted]"
"""Replacement for a secret."""

_SECRET = re.compile(
    r"api[_-]?key$|passw(or)?d$|passphrase$|secret|authorization$|credentials?$|private_key$"
    r"|^token$|(access|api|auth|bearer|hf|id|refresh|session|user|webhook)[_-]?token$",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^\s/?#@]+(?=@)")
_QUERY = re.compile(r"([?&;])([\w.-]+)=([^\s&#;\"']+)")
_AFTER_HOST = re.compile(r"(https?://[^\s/?#]+/).+", re.IGNORECASE | re.DOTALL)
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed; bidirectional controls; lone surrogates."""
_LONGEST = 2000


def printable(text: str) -> str:
    r"""Return ``text`` with control characters as escapes (``\x1b``); tabs and line feeds stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return ``text`` printable, in one line, cut in its middle to ``longest`` characters."""
    line = printable(" ".join(part.strip() for part in text.splitlines() if part.strip()))
    if len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} [{len(line) - 2 * half} characters] {line[-half:]}"


def cut_off(text: str, longest: int = 120) -> str:
    """Return ``text`` in at most ``longest`` characters; a longer one ends in "..."."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class EscapingFilter(logging.Filter):
    """Makes the message of every record printable and its addresses free of secrets; for handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message; every record passes."""
        record.msg, record.args = printable(redact_text(record.getMessage())), ()
        return True


def redact(value: Any, key: str = "") -> Any:
    """Return ``value``, plain data under ``key`` of the configuration, without its secrets.

    >>> redact({"api_key": "sesame", "url": "https://me:sesame@host"})
    {'api_key': '[redacted]', 'url': 'https://[redacted]@host'}
    """
    is_secret = bool(_SECRET.search(key))
    if isinstance(value, Mapping):
        return {name: redact(below, key if is_secret else str(name)) for name, below in value.items()}
    if isinstance(value, list):
        return [redact(below, key) for below in value]
    if is_secret and value not in ("", None) and not isinstance(value, bool):
        return REDACTED
    if not isinstance(value, str):
        return value
    text = redact_text(value)
    return _AFTER_HOST.sub(rf"\g<1>{REDACTED}", text) if key.lower().endswith("webhook") else text


def redact_text(text: str) -> str:
    """Return ``text`` without user, password and secret query values in its addresses."""

    def without_secret(found: re.Match[str]) -> str:
        mark, name, _ = found.groups()
        return f"{mark}{name}={REDACTED}" if _SECRET.search(name) else found[0]

    return _QUERY.sub(without_secret, _USER.sub(REDACTED, text)) if "://" in text else text


def redacted_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the key path of every redacted text below ``value``."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from redacted_keys(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from redacted_keys(below, f"{key}[{index}]")
    elif isinstance(value, str) and REDACTED in value:
        yield key


def duration(seconds: float) -> str:
    """Return seconds as text.

    >>> [duration(seconds) for seconds in (0.25, 40, 400, 12600)]
    ['0.25 s', '40 s', '7 min', '3.5 h']
    """
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return ``path`` relative to the working directory if it lies below it, else as it is."""
    with suppress(OSError, ValueError):  # no working directory, another drive
        near = os.path.relpath(path)
        return str(path) if near.startswith(os.pardir) else near
    return str(path)


def show_last(text: str, stream: TextIO) -> None:
    """Flush standard output, then print ``text``, a command's last words; a closed pipe is no error."""
    for own, words in ((sys.stdout, ""), (stream, f"{text}\n")):
        try:
            own.write(words)
            own.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), own.fileno())  # Python flushes it at the end


def counted(number: int, noun: str) -> str:
    """Return number and noun, the noun in the plural unless the number is 1.

    >>> counted(1, "task"), counted(2, "row")
    ('1 task', '2 rows')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def aligned(rows: Sequence[Sequence[str]], *, num_text: int = 1) -> list[str]:
    """Return one line per row, columns aligned: the first ``num_text`` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < num_text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
