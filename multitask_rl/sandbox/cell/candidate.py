"""The program's side of a function task: load it, then answer calls with plain values.

No code here is trusted: the program shares the interpreter and may change it. It gains nothing by that,
because it can only send answers, as an honest function can. It gets arguments, never expected values.
"""

from __future__ import annotations

import asyncio
import builtins
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from .channel import CellChannel, ChannelClosed
from .codec import Decoder, Encoder

_MESSAGE_LIMIT = 500
_MUTABLE = (list, dict, set, bytearray, deque)


def serve(descriptor: int, source: bytes) -> None:
    """Load ``source`` as a module, report how that went, then answer requests until the other side closes."""
    channel = CellChannel(descriptor)
    server = _Server(channel)
    phase = "load"
    try:
        module = types.ModuleType("solution")
        module.__dict__.update(__file__="solution.py", __builtins__=builtins)
        sys.modules["solution"] = module
        server.names = module.__dict__
        phase = "compile"
        code = compile(source, "solution.py", "exec", dont_inherit=True)
        phase = "load"
        exec(code, module.__dict__)  # the program itself; the cell is the fence
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        server.reply([phase, *_describe(error)])
        return
    server.reply(["ready"])
    while True:
        try:
            request = channel.receive()
        except ChannelClosed:
            return
        server.answer(*server.decoder.loads(request))


class _Server:
    def __init__(self, channel: CellChannel) -> None:
        self._channel = channel
        self.names: dict[str, Any] = {}
        self._objects: list[Any] = []
        self._encoder = Encoder(self._to_handle)
        self.decoder = Decoder(self._from_handle)
        self._operations: dict[str, Callable[..., Any]] = {
            "kinds": self._kinds,
            "call": self._call,
            "attr": lambda target, name: getattr(self._resolve(target), name),
            "set": lambda target, name, value: setattr(self._resolve(target), name, value),
            "next": lambda target, count: list(itertools.islice(self._resolve(target), count)),
            "isinstance": lambda target, kind: self._resolve(kind) in type(self._resolve(target)).__mro__,
            "await": lambda target: asyncio.run(self._resolve(target)),
            "operator": lambda target, name, rest: getattr(type(t := self._resolve(target)), name)(t, *rest),
        }

    def reply(self, message: list[Any]) -> None:
        self._channel.send(self._encoder.dumps(message).encode())

    def answer(self, operation: str, *arguments: Any) -> None:
        try:
            value, changed = self._operations[operation](*arguments), []
            if operation == "call":
                value, changed = value
            text = self._encoder.dumps(["ok", self._encoder.encode(value), changed])
        except ChannelClosed:
            raise
        except BaseException as error:  # noqa: BLE001 - the program may raise anything, SystemExit too
            text = self._encoder.dumps(["error", *_describe(error)])
        self._channel.send(text.encode())

    def _kinds(self, names: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            if name in self.names:
                value = self.names[name]
                is_exception = isinstance(value, type) and issubclass(value, BaseException)
                base = _builtin_base(value).__name__ if is_exception else ""
                found[name] = ["exception" if is_exception else "value", base, value]
        return found

    def _call(self, target: Any, arguments: list[Any], keywords: dict[str, Any]) -> tuple[Any, list[Any]]:
        function = self.names[target] if type(target) is str else self._resolve(target)
        before = [self._snapshot(argument) for argument in arguments]
        result = function(*arguments, **keywords)
        changed = []
        for position, (argument, old) in enumerate(zip(arguments, before, strict=True)):
            if old is not None and self._snapshot(argument) != old:
                changed.append([position, self._encoder.encode(argument)])
        return result, changed

    def _snapshot(self, argument: Any) -> str | None:
        if type(argument) not in _MUTABLE:
            return None
        return self._encoder.dumps(self._encoder.encode(argument))

    def _resolve(self, target: Any) -> Any:
        return self._objects[target] if type(target) is int else target

    def _to_handle(self, value: Any) -> tuple[str, Any]:
        if type(value) is _Remote:
            return "j", value.number
        self._objects.append(value)
        kind = type(value)
        if inspect.iscoroutine(value):
            role = "coroutine"
        elif hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
            role = "iterator"
        else:
            role = "callable" if callable(value) else "object"
        return "h", [len(self._objects) - 1, role, kind.__name__]

    def _from_handle(self, tag: str, content: Any) -> Any:
        if tag == "h":
            return self._objects[content]
        return _Remote(self, content)

    def call_back(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a function of the tests, which stays in the tester."""
        encode = self._encoder.encode
        self.reply(["callback", number, encode(list(arguments)), encode(keywords)])
        while True:
            operation, *rest = self.decoder.loads(self._channel.receive())
            if operation == "return":
                return rest[0]
            if operation == "raise":
                raise _exception(rest[0], rest[1])
            self.answer(operation, *rest)


class _Remote:
    """A function of the tests as the program sees it."""

    __slots__ = ("_server", "number")

    def __init__(self, server: _Server, number: int) -> None:
        self._server = server
        self.number = number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._server.call_back(self.number, arguments, keywords)


def _exception(name: str, message: str) -> BaseException:
    kind = getattr(builtins, name, RuntimeError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(message)


def _builtin_base(kind: type) -> type:
    found: list[type] = [base for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base]
    return found[0]


def _describe(error: BaseException) -> list[str]:
    try:
        message = str(error)[:_MESSAGE_LIMIT]
    except BaseException:  # noqa: BLE001 - __str__ is the program's too
        message = "its text cannot be read"
    return [_builtin_base(type(error)).__name__, type(error).__name__, message]
