"""The text of a response, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .records import Answer

Spell = Callable[[int], "tuple[str, bool]"]
"""Token -> its text, and whether it is a special one."""


def ended(answer: Answer, stops: Sequence[str], spell: Spell) -> Answer:
    """Return the answer up to the first token at which it holds one of ``stops``, with its text.

    Special tokens are text there. The token stays; the text ends before the stop string, and has no special
    tokens.
    """
    texts = [spell(token) for token in answer.ids]
    for length in range(1, len(texts) + 1):
        whole = "".join(text for text, _ in texts[:length])
        places = [whole.index(stop) for stop in stops if stop in whole]
        if places:
            ids, logprobs = answer.ids[:length], answer.logprobs[:length]
            said = _shown(texts[:length], min(places))
            return replace(answer, ids=ids, logprobs=logprobs, finish="stop", text=said)
    return replace(answer, text="".join(text for text, is_special in texts if not is_special))


def _shown(texts: Sequence[tuple[str, bool]], end: int) -> str:
    """The text of plain tokens that stands before the character ``end`` of all."""
    found, place = "", 0
    for text, is_special in texts:
        if not is_special:
            found += text[: max(0, end - place)]
        place += len(text)
    return found
