"""The tester's connection to the program, and the proxies of its objects that the tests use."""

from __future__ import annotations

import builtins
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .channel import CellChannel, ChannelClosed, load_ending
from .codec import CodecError, Decoder, Encoder

T = TypeVar("T")

_MAX_ITEMS = 200_000
_MUTABLE = (list, dict, set, bytearray, deque)
_KIND_LENGTH = 100
MESSAGE_LIMIT = 500
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("bool", "len", "neg", "pos", "abs", "invert", "int", "float", "index", "complex", "round", "iter")
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
_ITEMS = ("getitem", "setitem", "delitem", "contains", "reversed", "enter", "exit")


class CandidateGone(Exception):
    """The program's process ended, or stopped speaking the protocol."""


class OpaqueError(TypeError):
    """The tests asked an object of the program to judge itself."""


def text_of(error: BaseException) -> str:
    """Return the first ``MESSAGE_LIMIT`` characters of an exception's text; "" if it has none."""
    try:
        return str(error)[:MESSAGE_LIMIT]
    except BaseException:  # noqa: BLE001 - a message must not end the tester
        return ""


class Peer:
    """The tester's end of the conversation with the program's process."""

    def __init__(self, channel: CellChannel, *, allow_dunder: bool) -> None:
        self._channel = channel
        self.allow_dunder = allow_dunder
        self._encoder = Encoder(self._to_handle)
        self._decoder = Decoder(self._from_handle)
        self._lent: list[Any] = []
        self._exceptions: dict[str, type[Exception]] = {}
        self._changes: list[tuple[Any, Any]] = []

    def await_load(self) -> tuple[str, str]:
        """Return ending and message of the program's loading."""
        loaded = load_ending(self._receive())
        if loaded is None:
            raise CandidateGone("the program's process does not speak the protocol")
        return loaded

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Return those of these names that the program defines."""
        found = self.ask("kinds", wanted)
        names: dict[str, Any] = {}
        for name in wanted if type(found) is dict else ():
            match found.get(name):
                case None:
                    continue
                case ["exception", str(base), _]:
                    kind = getattr(builtins, base, None)
                    if not (isinstance(kind, type) and issubclass(kind, Exception)):
                        kind = Exception
                    if issubclass(kind, _ENDS_OF_LOOPS):
                        kind = RuntimeError
                    names[name] = self._exceptions[name] = type(name, (kind,), {})
                case ["value", _, value]:
                    names[name] = value
                case _:
                    raise CandidateGone("the program's process does not speak the protocol")
        return names

    def apply_changes(self) -> None:
        """Repeat on the tests' objects what calls did to their copies in the program.

        The tests call this after every statement. Within one, ``f(a) == sorted(a)``, a program could change
        the value that its answer is compared with.
        """
        for mine, now in self._changes:  # both are of one type
            if isinstance(mine, (list, bytearray)):
                mine[:] = now
            else:
                mine.clear()
                (mine.extend if isinstance(mine, deque) else mine.update)(now)
        self._changes.clear()

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Return the answer to a request, or raise the program's exception as a builtin one."""
        given = arguments[1] if operation == "call" else []
        if any(mine is argument for mine, _ in self._changes for argument in given):
            self.apply_changes()
        self._send([operation, *map(self._encoder.encode, arguments)])
        while True:
            match self._receive():
                case ["ok", value, list(changed)]:
                    for entry in changed:
                        match entry:
                            case [int(position), now] if (
                                type(position) is int
                                and 0 <= position < len(given)
                                and type(now) in _MUTABLE
                                and type(now) is type(given[position])
                            ):
                                self._changes.append((given[position], now))
                            case _:
                                raise CandidateGone("the program's process does not speak the protocol")
                    if value is None:
                        self.apply_changes()
                    return value
                case ["error", str(base), str(name), str(message)]:
                    raise self._exception(base, name, message)
                case ["callback", int(number), list(positional), dict(keywords)]:
                    if not 0 <= number < len(self._lent):
                        raise CandidateGone("the program's process does not speak the protocol")
                    try:
                        answer = ["return", self._encoder.encode(self._lent[number](*positional, **keywords))]
                        self._encoder.dumps(answer)
                    except CandidateGone:
                        raise
                    except Exception as error:  # noqa: BLE001 - the tests' function, the program's values
                        kinds = type(error).__mro__
                        kind = next(k for k in kinds if getattr(builtins, k.__name__, None) is k)
                        answer = ["raise", kind.__name__, text_of(error)]
                    self._send(answer)
                case _:
                    raise CandidateGone("the program's process does not speak the protocol")

    def _send(self, message: list[Any]) -> None:
        try:
            self._channel.send(self._encoder.dumps(message).encode())
        except ChannelClosed as error:
            raise CandidateGone("the program's process ended") from error

    def _receive(self) -> Any:
        try:
            return self._decoder.loads(self._channel.receive())
        except ChannelClosed as error:
            raise CandidateGone("the program's process ended") from error
        except CodecError as error:
            raise CandidateGone(f"the program's process does not speak the protocol: {error}") from error

    def _exception(self, base: str, name: str, message: str) -> Exception:
        kind = self._exceptions.get(name) or getattr(builtins, base, None)
        # SystemExit and the like end nothing here; StopIteration must not end a loop of the tests, as in
        # generators
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_OF_LOOPS):
            with contextlib.suppress(Exception):  # UnicodeDecodeError wants five arguments
                error = kind(message)
                error.from_candidate = True  # type: ignore[attr-defined]
                return error
        return RuntimeError(f"{name}: {message}")

    def _to_handle(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, Remote):
            return "h", object.__getattribute__(value, "_number")
        if not callable(value) and hasattr(value, "__next__"):
            items = list(itertools.islice(value, _MAX_ITEMS + 1))
            if len(items) > _MAX_ITEMS:
                raise CodecError(f"the tests pass an iterator of more than {_MAX_ITEMS} items")
            return "e", self._encoder.items(items, 1)
        if not callable(value):
            raise CodecError(f"the tests pass a {type(value).__name__}, which no other process can use")
        self._lent.append(value)
        return "j", len(self._lent) - 1

    def _from_handle(self, tag: str, content: Any) -> Any:
        if tag == "j" and type(content) is int and 0 <= content < len(self._lent):
            return self._lent[content]
        if tag != "h" or type(content) is not list or tuple(map(type, content)) != (int, str, str):
            raise CodecError("the handle of an object is malformed")
        number, role, name = content
        if role == "coroutine":

            async def awaitable() -> Any:
                return self.ask("await", number)

            return awaitable()
        if role == "iterator":
            return RemoteIterator(self, number, name[:_KIND_LENGTH])
        return _REMOTE_CLASSES[role == "callable", self.allow_dunder](self, number, name[:_KIND_LENGTH])


class Remote:
    """Proxy of an object of the program: its attributes can be read, its operators raise ``OpaqueError``."""

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "attr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and _ask(instance, "isinstance", _number(self)) is True

    def __repr__(self) -> str:
        return _exact(_ask(self, "operator", "__repr__", []), str)

    def __str__(self) -> str:
        return _exact(_ask(self, "operator", "__str__", []), str)

    def __hash__(self) -> int:
        return _number(self)


class RemoteCallable(Remote):
    """Proxy of an object of the program that can be called."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the object where it is."""
        return _ask(self, "call", list(arguments), keywords)


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(operation, _number(remote), *arguments)


def _number(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


def _exact(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise OpaqueError(f"the program's object gave {type(value).__name__} where {kind.__name__} belongs")
    return value


class RemoteIterator(Remote):
    """Proxy of an iterator of the program; it reads growing batches, at most ``_MAX_ITEMS`` items in all."""

    def __init__(self, peer: Peer, number: int, kind: str) -> None:
        super().__init__(peer, number, kind)
        object.__setattr__(self, "_items", self._read())

    def _read(self) -> Iterator[Any]:
        batch, total = 8, 0
        while True:
            items = _exact(_ask(self, "next", batch), list)
            yield from items
            total += len(items)
            if len(items) < batch:
                return
            if total >= _MAX_ITEMS:
                raise OpaqueError(f"the program's iterator has more than {_MAX_ITEMS} items")
            batch = min(batch * 2, 4096)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(object.__getattribute__(self, "_items"))


class RemoteOperators(Remote):
    """Proxy that forwards operators to the program's object, for tests of operators (``allow_dunder``)."""


class RemoteCallableOperators(RemoteOperators, RemoteCallable):
    """``RemoteOperators`` for an object that can be called."""


_REMOTE_CLASSES: dict[tuple[bool, bool], type[Remote]] = {
    (False, False): Remote,
    (True, False): RemoteCallable,
    (False, True): RemoteOperators,
    (True, True): RemoteCallableOperators,
}
"""(it can be called, its operators count) -> class."""


def _forbid(name: str) -> Callable[..., Any]:
    def refuse(self: Remote, *_: Any) -> Any:
        kind = object.__getattribute__(self, "_kind")
        raise OpaqueError(f"{name} of the program's {kind!r} object: an object may not judge itself")

    return refuse


def _forward(name: str) -> Callable[..., Any]:
    def ask(self: Remote, *arguments: Any) -> Any:
        try:
            value = _ask(self, "operator", name, list(arguments))
        except AttributeError:
            return NotImplemented  # the class lacks it: Python tries the other side, then raises TypeError
        return _exact(value, bool) if name == "__contains__" else value

    return ask


def _has_bool(self: Remote) -> bool:
    for name, kind in (("__bool__", bool), ("__len__", int)):
        try:
            return bool(_exact(_ask(self, "operator", name, []), kind))
        except AttributeError:
            continue
    return True


_PLAIN = [f"__{name}__" for name in (*_COMPARISONS, *_UNARY, *_ITEMS, *_BINARY)]
for _name in _PLAIN + [f"__r{name}__" for name in _BINARY]:
    setattr(Remote, _name, _forbid(_name))
    setattr(RemoteOperators, _name, _forward(_name))
RemoteOperators.__bool__ = _has_bool  # type: ignore[attr-defined]
