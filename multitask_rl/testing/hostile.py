"""Responses that attack what reads them: long, deep, repetitive, binary, and near misses of right answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

__all__ = ["hostile_texts", "near_misses", "numbers", "same_answers"]

_UNITS = (
    *"([{<*_`#.,!?-+\"'\\|/$^&~=:;%@ \n\t0a",
    "\n\n",
    "\n ",
    " \n",
    "* ",
    "- ",
    "**",
    "<<",
    ">>",
    "[a",
    "a.",
    ". ",
    ".)",
    '."',
    "Word. ",
    "e.g. ",
    "***",
    "******",
    "```",
    "```\n",
    "~~~ \n",
    "``` x\n",
    "\\boxed{",
    "\\fbox {",
    "\\frac{",
    "\\left(",
    "$",
    "$$",
    "^{",
    "sqrt(",
    "####",
    "answer is ",
    "<think>",
    "</think>",
    "<answer>",
    "[1,",
    '{"a":',
    "f(x)=",
    "def f():\n",
    "x, ",
    "the the ",
    "I can't ",
    "\u0301",
    "\u202e",
    "\U0001f469\u200d",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "\ufeff",
    "<|im_end|>",
    "<|endoftext|>",
    "[INST]",
    "</s>",
)
_WHOLE = {
    "huge power": "The answer is $10^{10^{10^{10}}}$.",
    "huge power, plain": "10**10**10",
    "power tower": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "factorial": "\\boxed{(10^{9})!}",
    "huge integer": "\\boxed{" + "9" * 3900 + "}",
    "long integer": "9" * 20000,
    "huge exponent": "1e999999999",
    "nested try": "".join(f"{' ' * d}try: x\n{' ' * d}finally:\n" for d in range(18)) + " " * 18 + "x\n",
    "format string": "%s%n{0.__class__}${jndi:ldap://x}",
    "markup": "<script>alert(1)</script>\x1b]0;title\x07",
    "many different words": " ".join(map(str, range(6000))),
    "yaml aliases": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]",
}


def hostile_texts(size: int = 30_000, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield name and text: units repeated to ``size`` characters, also between others, mixtures, whole texts.

    Args:
        size: characters of those that are repeated.
        seed: of the mixtures and of random bytes.
    """
    stream = random.Random(seed)
    for unit in _UNITS:
        text = (unit * (size // len(unit) + 1))[:size]
        yield f"{unit!r} repeated", text
        yield f"{unit!r} repeated, then x", f"x{text}x"
    for number in range(8):
        few = stream.sample(_UNITS, 3)
        yield (
            f"mixture {number}: {few}",
            "".join(stream.choice(few) for _ in range(size // max(map(len, few)))),
        )
    yield "random bytes", stream.randbytes(size).decode("latin-1")
    yield "random code points", "".join(chr(stream.randrange(0xD7FF)) for _ in range(size))
    yield from _WHOLE.items()


_NEAR_MISSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "number": {
        "5": ("-5", "50", "0.5", "15", "5/1000", "5%", "$5^2$", "+-5", "five hundred"),
        "-5": ("5", "-50", "--5", "- 50", "5-", "0-50"),
        "3.14": ("314", "31.4", "3,14,1", "-3.14", "3.15", "3 14"),
        "1000": ("100", "10000", "1.000", "1,00", "-1,000"),
        "1/2": ("12", "2/1", "1/20", "-1/2", "0.05"),
        "10:30": ("1030", "10:31", "10-30"),
    },
    "name": {
        "C++": ("C", "C#", "C+", "C--"),
        "C#": ("C", "C++"),
        "Paris": ("Paris Hilton", "not Paris", "Pari", "Paris or London", "Par is", ""),
        "50%": ("50", "5%", "-50%"),
        "a/b": ("ab", "b/a"),
        "New York": ("York", "NewYork", "New Jersey", "New York City"),
    },
}
_SAME: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "number": {
        "5": ("5", " 5 ", "5.", "5.0", "+5"),
        "-5": ("-5", "\u22125", "-5.0", "**-5**"),
        "3.14": ("3.14", "3.140", "3.14."),
        "1000": ("1000", "1,000", "1000.00"),
        "1/2": ("1/2", "1/2."),
        "10:30": ("10:30", "10:30."),
    },
    "name": {
        "C++": ("C++", "c++", "C++.", "**C++**", "`C++`"),
        "C#": ("C#", "c#."),
        "Paris": ("Paris", "paris", "Paris.", "**Paris**", '"Paris"', "(Paris)", "Paris!"),
        "50%": ("50%", "50%."),
        "a/b": ("a/b", "A/B"),
        "New York": ("New York", "new  york", "The New York."),
    },
}


def near_misses(kind: str) -> Iterator[tuple[str, str]]:
    """Yield right answer and a wrong one that looks like it; ``kind``: ``number`` or ``name``."""
    for right, wrong in _NEAR_MISSES[kind].items():
        yield from ((right, text) for text in wrong)


def same_answers(kind: str) -> Iterator[tuple[str, str]]:
    """Yield right answer and another spelling of it; ``kind``: ``number`` or ``name``."""
    for right, spellings in _SAME[kind].items():
        yield from ((right, text) for text in spellings)


def numbers(count: int, seed: int = 0) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield ``count`` numbers with wrong answers that look like them and with other spellings of them."""
    stream = random.Random(seed)
    for _ in range(count):
        digits = stream.randint(1, 6)
        whole = str(stream.randint(10 ** (digits - 1), 10**digits - 1))
        part = stream.choice(["", "", f".{stream.randint(1, 9)}", f".{stream.randint(10, 98)}1"])
        sign = stream.choice(["", "", "-"])
        right = f"{sign}{whole}{part}"
        other = "" if sign else "-"
        wrong = [f"{other}{whole}{part}", f"{right}1" if part else f"{right}0", f"{sign}1{whole}{part}"]
        wrong += [f"{right}%", f"{sign}{whole[:-1] or 0}{(int(whole[-1]) + 1) % 10}{part}", f"{right} or 77"]
        wrong += [f"{sign}{whole}{part[1:]}"] if part else [f"{right}/7", f"{right}.5"]
        same = [right, f" {right}. ", f"**{right}**", f"{right}0" if part else f"{right}.0"]
        same += [f"{sign}{int(whole):,}{part}", f"\u2212{whole}{part}" if sign else f"+{right}"]
        yield right, wrong, same
