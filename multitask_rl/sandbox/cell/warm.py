"""Warm-up: the zygote runs the code that its children will run, with harmless arguments.

The interpreter specialises code while it runs and fills caches. In a child this copies pages every time; in
the zygote, before the heap is frozen, it happens once for all children.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import struct
import sys
from typing import Any

from . import candidate, tester
from .programs import WARM_UP, enter

_ROUNDS = 20
_GETPID = (ctypes.c_long(39),)
_SOURCE = b"""import sys, math
def f(x, *y, k=1):
    return [i * k for i in range(x)]
class C:
    def __init__(self): self.a = {1: 'b'}
for line in ("1 2", "3"):
    values = list(map(int, line.split()))
try:
    raise ValueError("x")
except ValueError as e:
    pass
print(f"{sum(values)}", C().a, sorted(f(3)), 1.5, end=" ")
assert 1 + 1 == 2
"""
_MODULE = b"""def f(a, b=1):
    return a
def g(items):
    return sorted(items)
"""
_NO_KEYWORDS: dict[str, Any] = {"d": [[], []]}
_REQUESTS: list[list[Any]] = [
    ["kinds", ["f", "missing"]],
    ["call", "f", [1, 2], _NO_KEYWORDS],
    ["call", "f", ["a", {"t": [1, 2.5]}], _NO_KEYWORDS],
    ["call", "missing", [], _NO_KEYWORDS],
    ["call", 0, [[3, 1]], {"d": [["b"], [2]]}],
    ["call", "g", [{"d": [["k"], [None]]}], _NO_KEYWORDS],
]
_ANSWERS: list[list[Any]] = [
    ["ready"],
    ["ok", {"d": [["f"], [["value", "", {"h": [0, "callable", "function"]}]]]}, []],
    ["ok", 3, []],
    ["ok", [1, 2], []],
    ["ok", {"t": ["a", True]}, []],
    ["error", "ValueError", "ValueError", "no"],
]
_STATEMENTS = [
    "assert f(1, 2) == 3",
    "assert sorted(f([2, 1])) == [1, 2]",
    "assert f('a') == ('b', True), 'why'",
    "assert f(0)",
]
_UNITTEST = """import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(1), 3)
    def test_b(self): self.assertTrue(f(2))
    def test_c(self): self.assertEqual(f(3), ("a", True))
    def test_d(self):
        with self.assertRaises(ValueError): f(4)
"""


def warm_source() -> int:
    """Return a descriptor of what ``warm_up`` runs; made before the filter, which refuses anonymous files."""
    memory = os.memfd_create("warm", os.MFD_CLOEXEC)
    os.write(memory, _SOURCE)
    return memory


def warm_up(memory: int) -> None:
    """Run everything a child runs, until the interpreter has specialised it."""
    atexit._clear()  # what the preloaded modules registered is not the programs' business
    main = sys.modules["__main__"]
    size = len(_SOURCE)
    for _ in range(_ROUNDS):
        enter([memory, 0, 1, 2], WARM_UP, True, True, size, (_GETPID,) * 8, -1, lambda status: None)
        _talk(_REQUESTS, lambda descriptor: candidate.serve(descriptor, _MODULE))
        _talk(_ANSWERS, lambda descriptor: tester.run_tests(descriptor, 1, _task("asserts", _STATEMENTS)))
        _talk(_ANSWERS, lambda descriptor: tester.run_tests(descriptor, 1, _task("unittest", [_UNITTEST])))
    sys.modules["__main__"] = main
    for name in ("solution", "tests"):
        sys.modules.pop(name, None)


def _talk(messages: list[list[Any]], run: Any) -> None:
    """Let one side of a function task run against what the other side would have said."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in messages:
            text = json.dumps(message).encode()
            ours.sendall(struct.pack("<I", len(text)) + text)
        ours.shutdown(socket.SHUT_WR)
        run(theirs.fileno())


def _task(kind: str, tests: list[str]) -> bytes:
    task = {"kind": kind, "entry_point": "f", "exports": ["f"], "modules": ["math"], "setup": ""}
    return json.dumps({**task, "tests": tests, "allow_dunder": False}).encode()
