"""Prompt templates: text with ``{column}`` in it."""

from __future__ import annotations

import string

from multitask_rl.errors import ConfigError

__all__ = ["parse_template"]


def parse_template(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """Return the template's pieces as ``string.Formatter.parse`` does.

    Raises:
        ConfigError: unbalanced braces, or a field that is no plain column name.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for _, column, _, _ in pieces:
        if column is not None and (not column or any(c in column for c in ".[]{}")):
            raise ConfigError(
                f"prompt template {template!r}: {{{column}}} is no column; write {{{{ and }}}} for braces"
            )
    return pieces
