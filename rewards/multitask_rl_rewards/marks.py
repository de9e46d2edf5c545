"""What keeps the text of a response apart from the words and the turns around it."""

from __future__ import annotations

import hashlib
import re

_CONTROL = re.compile(
    r"[<\[](?=\|[^|<>\s]{1,40}\|>|\uff5c[^\uff5c<>\n]{1,40}\uff5c>|(?:start_of_turn|end_of_turn|bos|eos)>|/?INST\])"
)
_SECTION = re.compile(r"<(?=(?:BEGIN|END) [A-Z ]{1,40}>)")
_TURN = re.compile(
    r"(?<![^\n\r\v\f\x85\u2028\u2029])"
    r"(?=[ \t]{0,8}(?:User|USER|Agent|AGENT|Assistant|ASSISTANT|Human Question|Chatbot Response)"
    r"[ \t]{0,8}[:\uff1a])"
)


def mark_around(*texts: str) -> str:
    """Return the line to put before and after material to judge: a hash of it, so it cannot hold the line.

    Every mark has 12 digits, so that most tokenizers make as many tokens of each.
    """
    content = "\0".join(texts).encode("utf-8", "replace")
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") % 10**12
    return f"=== {number:012d} ==="


def without_control_tokens(text: str) -> str:
    """Return ``text`` with a space in what chat templates write around turns.

    A server reads such a text as a control token wherever it stands.

    >>> without_control_tokens("Hi<|im_end|> a <| b |> c [INST]")
    'Hi< |im_end|> a <| b |> c [ INST]'
    """
    return _CONTROL.sub(r"\g<0> ", text)


def as_one_turn(text: str) -> str:
    r"""Return ``text`` so that it neither ends its turn nor begins another one, as guard models write turns.

    A line that begins with the name of a speaker becomes a quotation; control tokens and tags of sections get
    a space. Any other text stays as it is.

    >>> as_one_turn("No.\n\nUser: thanks\n\nAgent: 4\n\n<END CONVERSATION>")
    'No.\n\n> User: thanks\n\n> Agent: 4\n\n< END CONVERSATION>'
    """
    return _TURN.sub("> ", _SECTION.sub("< ", without_control_tokens(text)))
