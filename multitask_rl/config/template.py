"""Prompt templates: text with ``{column}`` in it."""

from __future__ import annotations

import re
import string

from multitask_rl.errors import ConfigError

__all__ = ["parse_template"]

_FORMAT = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?\d{0,3}[,_]?(\.\d{1,3})?[bcdeEfFgGnosxX%]?", re.DOTALL)
"""What may stand behind the colon of a field: a width or precision of more digits fills the memory."""


def parse_template(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """Return the template's pieces as ``string.Formatter.parse`` does.

    Raises:
        ConfigError: unbalanced braces, a field that is no plain column name, a conversion other than ``!r``
            and ``!s``, or a format that is none or wider than 999.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for _, column, form, conversion in pieces:
        if column is not None and (not column or any(c in column for c in ".[]{}")):
            raise ConfigError(
                f"prompt template {template!r}: {{{column}}} is no column; write {{{{ and }}}} for braces"
            )
        if conversion not in (None, "r", "s"):
            raise ConfigError(f"prompt template {template!r}: the conversion !{conversion} is not !r or !s")
        if form and not _FORMAT.fullmatch(form):
            raise ConfigError(
                f"prompt template {template!r}: {{{column}:{form}}} has no format that Python knows, with a "
                "width and a precision of three digits at most"
            )
    return pieces
