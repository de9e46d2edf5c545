"""Redaction: removes secrets from everything of a run that is recorded, logged or shown.

Redacted are:

- texts and numbers under keys that name a secret (``api_key``, ``auth_token``, ``password``...), but not
  ``api_key_env``, which names a variable;
- user and password of an address, and its query values with such names;
- everything after the host of a webhook.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
