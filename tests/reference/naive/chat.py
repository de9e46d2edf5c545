"""A chat template: what the actor reads of a conversation, of which later turns may change earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARKS = {"user": "q", "assistant": "r", "tool": "s"}
"""A message begins with that of its role."""
KINDS = ("plain", "strip", "thoughts", "short", "counted", "window")
"""``strip``: without white space at the ends of messages. ``thoughts``: of earlier answers what follows the
last ``t``. ``short``: two characters of earlier words of the world. ``counted``: the number of messages comes
first. ``window``: the last three messages."""


@dataclass(frozen=True)
class Message:
    role: str
    text: str


def pieces(kind: str, messages: Sequence[Message]) -> list[str]:
    """The text of every message, without the end of answers."""
    found = []
    heard = [i for i, m in enumerate(messages) if m.role != "assistant"]
    for i, message in enumerate(messages):
        text = message.text
        if kind == "strip":
            text = text.strip()
        if kind == "thoughts" and message.role == "assistant" and i < heard[-1]:
            text = text.rpartition("t")[2]
        if kind == "short" and message.role != "assistant" and i < heard[-1]:
            text = text[:2]
        found.append("" if kind == "window" and i < len(messages) - 3 else MARKS[message.role] + text)
    return found


class Conversation:
    """What the actor reads: a text in which ``end`` ends each answer.

    While the template leaves earlier messages as they were, but for white space, the conversation goes on.
    Otherwise it begins anew, with the messages as the template shows them now.
    """

    def __init__(self, kind: str, messages: Sequence[Message], end: str) -> None:
        self.kind, self.messages, self.end = kind, list(messages), end
        self.text = self.shown()

    def shown(self) -> str:
        """The conversation as the template shows it, up to the beginning of the next answer."""
        own = pieces(self.kind, self.messages)
        ended = [
            piece + self.end * (m.role == "assistant" and bool(piece))
            for piece, m in zip(own, self.messages, strict=True)
        ]
        return self.beginning() + "".join(ended) + MARKS["assistant"]

    def beginning(self) -> str:
        return str(len(self.messages)) if self.kind == "counted" else ""

    def add(self, answer: str, reply: Sequence[Message]) -> tuple[str, bool]:
        """Add an answer and what the world says to it.

        Return the text between this answer and the next, or, if messages before it are changed, the whole
        text before the next answer; and whether they are.
        """
        before = self.text + answer
        number = len(self.messages)
        self.messages += [Message("assistant", answer), *reply]
        whole = self.shown()
        tail = self.end + "".join(pieces(self.kind, self.messages)[number + 1 :]) + MARKS["assistant"]
        is_kept = "".join(whole.split()) == "".join((before + tail).split())
        self.text = before + tail if is_kept else whole
        return (tail, False) if is_kept else (whole, True)
