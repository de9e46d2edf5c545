"""Text of models, data and files made safe to show: control characters become visible escapes.

A terminal executes control sequences: they move the cursor, change the title, send replies. Text of a model,
a row or a file therefore passes this module before a terminal or a log.
"""

from __future__ import annotations

import logging
import re

from multitask_rl.boundary.redaction import redact_text

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed; bidirectional controls; lone surrogates."""
_LONGEST = 2000


def printable(text: str) -> str:
    r"""Return ``text`` with control characters as escapes (``\x1b``); tabs and line feeds stay.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str, longest: int = _LONGEST) -> str:
    """Return ``text`` printable, in one line, cut in its middle to ``longest`` characters."""
    line = printable(" ".join(part.strip() for part in text.splitlines() if part.strip()))
    if len(line) <= longest:
        return line
    half = longest // 2
    return f"{line[:half]} [{len(line) - 2 * half} characters] {line[-half:]}"


class EscapingFilter(logging.Filter):
    """Makes the message of every record printable and its addresses free of secrets; for handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message; every record passes."""
        record.msg, record.args = printable(redact_text(record.getMessage())), ()
        return True
