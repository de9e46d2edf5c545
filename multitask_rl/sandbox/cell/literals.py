"""Asserts of the simplest shape, ``assert f(literals) == literal``, judged without a second process.

The keeper asks the program for the values and compares plain data. It decodes small answers without arrays;
for any other answer the whole task goes to the tester. The endings equal the tester's.
"""

from __future__ import annotations

from typing import Any

from .channel import CellChannel, ChannelClosed, load_ending
from .codec import CodecError, Decoder, NeedsArraysError

_MAX_ANSWER = 1 << 14
_SENT_AHEAD = 1 << 14
"""Bytes of requests that a socket takes even if the program does not read."""
_MESSAGE_LIMIT = 500


class NeedsTesterError(Exception):
    """An answer is too large to be decoded here, or an array."""


class _Opaque:
    """An object of the program; a comparison with it raises."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the program may not judge itself")

    __hash__ = object.__hash__


def compare_literals(channel: CellChannel, tests: list[list[Any]]) -> list[list[Any]]:
    """Return the lines that the tester would write: one on loading, then one per test.

    A test is ``[request, operator, expected]``; request and expected value are encoded already.
    ``NeedsTesterError`` if an answer is too large, or holds an array.
    """
    decoder = Decoder(lambda tag, content: _Opaque(), has_arrays=False)
    lines: list[list[Any]] = []
    requests = [test[0].encode() for test in tests]
    # one conversation turn instead of one per test, when that cannot block us
    is_sent = sum(map(len, requests)) <= _SENT_AHEAD
    try:
        if is_sent:
            channel.send(*requests)
        loaded = load_ending(_receive(channel, decoder))
        if loaded is None:
            raise CodecError("the program's process does not speak the protocol")
        lines.append(["load", loaded[0], loaded[1][:_MESSAGE_LIMIT]])
        if loaded[0] != "passed":
            return lines
        for index, (_, operator, expected) in enumerate(tests):
            if not is_sent:
                channel.send(requests[index])
            answer = _receive(channel, decoder)
            ending, message = "", ""
            match answer:
                case ["ok", value, list()]:
                    wanted = decoder.loads(expected)
                    try:
                        is_right = value is wanted if operator == "is" else bool(value == wanted)
                        ending, message = ("passed", "") if is_right else ("failed", "AssertionError: ")
                    except Exception as error:  # noqa: BLE001 - the program's value; the tester stops here, too
                        ending, message = "runtime_error", f"{type(error).__name__}: {error}"
                case ["error", str(), str(name), str(text)]:
                    ending, message = "runtime_error", f"{name}: {text}"
                case _:
                    raise CodecError("the program's process does not speak the protocol")
            lines.append([index, ending, message[:_MESSAGE_LIMIT]])
    except NeedsArraysError as error:
        raise NeedsTesterError from error
    except (ChannelClosed, CodecError) as error:
        lines.append(["load", "gone", str(error)])
    return lines


def _receive(channel: CellChannel, decoder: Decoder) -> Any:
    data = channel.receive()
    if len(data) > _MAX_ANSWER:
        raise NeedsTesterError
    return decoder.loads(data)
