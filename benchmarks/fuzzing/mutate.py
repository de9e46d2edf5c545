"""Mutations of values and of bytes. All randomness comes from the ``random.Random`` given."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from typing import Any

ODD: tuple[Callable[[], Any], ...] = (
    *(lambda value=value: value for value in (None, True, False, 0, 1, -1, 3, 9, 0.5, -0.0, 1e308, 1e-320)),
    *(lambda value=value: value for value in (float("inf"), float("nan"), 2**63, 10**400, -(10**400))),
    *(lambda text=text: text for text in ("", " ", "x", "all", "0", "null", "1e3", "${x}", "${oc.env:HOME}")),
    *(
        lambda text=text: text
        for text in ("\x00", "a\x00b.jsonl", "\x1b[31mred", "\ud800", "\u202e", "é" * 3)
    ),
    *(
        lambda text=text: text
        for text in ("/dev/zero", "/", ".", "~nobody/x.jsonl", "../../etc/passwd", "a" * 300)
    ),
    *(
        lambda text=text: text
        for text in ("plugin:", "plugin:x", "plugin:math_easy", "trl:", "verl::", "a:b", ":")
    ),
    *(
        lambda text=text: text
        for text in ("reasoning_gym:x", "evaluate:", "verifiers:x", "rewards.py:", "x.py:y")
    ),
    *(lambda text=text: text for text in ("{prompt}", "{", "}", "{}", "{0}", "{prompt!x}", "{prompt.upper}")),
    *(
        lambda text=text: text
        for text in ("{prompt:{reference}}", "{prompt:>999999999}", "{prompt:d}", "{a[0]}")
    ),
    *(lambda text=text: text for text in ("<|im_end|>", "(a+)+$", "[", "a{99999}", "a" * 20_000)),
    lambda: [],
    lambda: {},
    lambda: [[]],
    lambda: {"": {}},
    lambda: {"a": 1, "type": "x"},
    lambda: ["a", "a"],
    lambda: [None],
    lambda: datetime.date(2026, 1, 1),
    lambda: _nested(50),
)
"""Makers of values that are no good in most places."""

ODD_BYTES: tuple[bytes, ...] = (
    *(b"\x00", b"\x07", b"\x1b[2J", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b'"\\ud800"', b"\xef\xbb\xbf"),
    *(
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\t",
        b"\r",
        b"\n",
        b"\n\n",
        b": ",
        b"- ",
        b"? ",
        b"[",
        b"]",
        b"{",
        b"}",
    ),
    *(
        b"&a ",
        b"*a",
        b"!!python/object:os.system x",
        b"!x ",
        b"<<: *a",
        b"---\n",
        b"...\n",
        b"%YAML 9\n",
        b"#",
    ),
    *(b"'", b'"', b"\\", b"|", b">", b"1" * 5000, b"1" + b"0" * 400, b"1e999", b"-", b"NaN", b"Infinity"),
    *(b"[" * 100_000, b"{a: " * 3000, b'{"a":' * 100_000, b"9" * 20, b"2026-13-45", b"1:60", b"0x", b"null"),
    b"x: &a [1,1,1,1,1,1,1,1,1]\n"
    + b"".join(
        b"x%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1) if i else b"*a"] * 9)) for i in range(9)
    ),
)
"""Pieces that parsers trip over."""


def mutate_tree(rng: random.Random, tree: Any, strings: Sequence[str] = ()) -> Any:
    """Return a copy of ``tree`` (mappings, lists, scalars) with one to four places changed."""
    result = _copy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        result = _change(rng, result, strings)
    return result


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` with one to four pieces changed, put in, taken out, doubled or cut off."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
        kind = rng.randrange(7)
        if kind == 0:
            data = data[:start] + bytes([rng.randrange(256)]) + data[end:]
        elif kind == 1:
            data = data[:start] + data[end:]
        elif kind == 2:
            data = data[:end] + data[start:end] * rng.choice((1, 3)) + data[end:]
        elif kind == 3:
            data = data[:start] if rng.random() < 0.3 else data[:start] + data[start:][::-1][:5] + data[end:]
        elif kind == 4 and start < len(data):
            data = data[:start] + bytes([data[start] ^ (1 << rng.randrange(8))]) + data[start + 1 :]
        else:
            data = data[:start] + rng.choice(ODD_BYTES) + data[start if rng.random() < 0.5 else end :]
    return data


def _change(rng: random.Random, tree: Any, strings: Sequence[str]) -> Any:
    """Change one place of ``tree`` in it, and return it; a scalar is replaced."""
    containers = [c for c in _containers(tree) if c]
    if not containers or rng.random() < 0.02:
        return _odd(rng, strings)
    place: Any = rng.choice(containers)
    key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    kind = rng.random()
    if kind < 0.6:
        place[key] = _odd(rng, strings)
    elif kind < 0.7:
        del place[key]
    elif kind < 0.8:
        other: Any = rng.choice(containers)
        moved = _copy(rng.choice(list(other.values()) if isinstance(other, dict) else other))
        place[key] = moved
    elif isinstance(place, dict):
        place[_key(rng, strings)] = place[key] if rng.random() < 0.5 else _odd(rng, strings)
    else:
        place.insert(key, _copy(place[key]) if rng.random() < 0.5 else _odd(rng, strings))
    return tree


def _odd(rng: random.Random, strings: Sequence[str]) -> Any:
    return rng.choice(strings) if strings and rng.random() < 0.3 else rng.choice(ODD)()


def _key(rng: random.Random, strings: Sequence[str]) -> str:
    value = _odd(rng, strings)
    return value if isinstance(value, str) else str(rng.randrange(5))


def _containers(tree: Any) -> list[Any]:
    found, waiting = [], [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (dict, list)):
            found.append(item)
            waiting += item.values() if isinstance(item, dict) else item
        if len(found) > 5000:
            break
    return found


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value
