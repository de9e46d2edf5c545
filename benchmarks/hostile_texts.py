"""Responses that attack what reads them: long, deep, repetitive, binary, and near misses of right answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from math import gcd

_WORDS = r"""** << >> [a a. .) ." *** ****** ``` \boxed{ \frac{ \left( $$ ^{ sqrt( #### <think> </think>
<answer> [1, {"a": f(x)= <|im_end|> <|endoftext|> [INST] </s>"""
_UNITS = (
    *"([{<*_`#.,!?-+\"'\\|/$^&~=:;%@ \n\t0a",
    *_WORDS.split(),
    *("\n\n", "\n ", " \n", "* ", "- ", ". ", "x, ", "```\n", "~~~ \n", "``` x\n", "\\fbox {", "def f():\n"),
    *("Word. ", "e.g. ", "answer is ", "the the ", "I can't "),
    *("\u0301", "\u202e", "\U0001f469\u200d", "\x00", "\x1b[2J", "\ud800", "\ufeff"),
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
    """Yield name and text: units repeated to ``size`` characters, mixtures, random and whole texts.

    Args:
        size: characters of a repeated or random text.
        seed: of the mixtures and the random texts.
    """
    stream = random.Random(seed)
    for unit in _UNITS:
        text = (unit * (size // len(unit) + 1))[:size]
        yield f"{unit!r} repeated", text
        yield f"{unit!r} repeated, then x", f"x{text}x"
    for number in range(8):
        few = stream.sample(_UNITS, 3)
        text = "".join(stream.choice(few) for _ in range(size // max(map(len, few))))
        yield f"mixture {number}: {few}", text
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
    """Yield pairs of a right answer and a wrong one that looks like it; ``kind``: ``number`` or ``name``."""
    for right, wrong in _NEAR_MISSES[kind].items():
        yield from ((right, text) for text in wrong)


def same_answers(kind: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of a right answer and another spelling of it; ``kind``: ``number`` or ``name``."""
    for right, spellings in _SAME[kind].items():
        yield from ((right, text) for text in spellings)


Case = tuple[str, list[str], list[str]]
"""Right answer, wrong answers that look like it, other spellings of it."""


def _number(stream: random.Random) -> Case:
    stream = random.Random(stream.randrange(1 << 30))
    digits = stream.randint(1, 6)
    whole = str(stream.randint(10 ** (digits - 1), 10**digits - 1))
    part = stream.choice(["", "", f".{stream.randint(1, 9)}", f".{stream.randint(10, 98)}1"])
    sign = stream.choice(["", "", "-"])
    right = f"{sign}{whole}{part}"
    other = "" if sign else "-"
    wrong = [f"{other}{whole}{part}", f"{right}1" if part else f"{right}0", f"{sign}1{whole}{part}"]
    wrong += [f"{right}%", f"{sign}{whole[:-1] or 0}{(int(whole[-1]) + 1) % 10}{part}", f"{right} or 77"]
    wrong += [f"{sign}{whole}{part[1:]}"] if part else [f"{right}/7", f"{right}.5"]
    # computations that are not worked out
    wrong += [f"{right} - 7 + 7", f"{right} * 1"]
    same = [right, f" {right}. ", f"**{right}**", f"{right}0" if part else f"{right}.0"]
    same += [f"{sign}{int(whole):,}{part}", f"\u2212{whole}{part}" if sign else f"+{right}"]
    return right, wrong, same


def _fraction(stream: random.Random) -> Case:
    low = stream.randint(2, 30)
    high = stream.choice([n for n in range(low + 1, low + 30) if gcd(n, low) == 1])
    top, bottom = (low, high) if stream.random() < 0.7 else (high, low)
    right = f"{top}/{bottom}"
    wrong = [f"{bottom}/{top}", f"-{right}", f"{top + 1}/{bottom}", f"{top}/{bottom}0", f"{top}{bottom}"]
    wrong += [f"{top}.{bottom}1", f"{top}", f"1 {right}", rf"\frac{{{bottom}}}{{{top}}}"]
    wrong += [f"{top - 1}/{bottom} + 1/{bottom}", f"{top} * 1/{bottom}"]  # not worked out
    same = [right, f"**{right}**", f"{right}.", f"{2 * top}/{2 * bottom}", f"{top} / {bottom}"]
    same += [rf"$\frac{{{top}}}{{{bottom}}}$", rf"$\dfrac{{{top}}}{{{bottom}}}$"]
    return right, wrong, same


def _interval(stream: random.Random) -> Case:
    low, high = sorted(stream.sample(range(-20, 40), 2))
    left, end = stream.choice([("[", ")"), ("(", "]")])
    right = f"{left}{low}, {high}{end}"
    wrong = [f"({low}, {high})", f"[{low}, {high}]", f"{left}{low}, {high + 1}{end}"]
    wrong += [f"{left}{low - 1}, {high}{end}", f"{left}{high}, {low}{end}", f"{low}", f"{{{low}, {high}}}"]
    same = [right, f"${right}$", f"{left}{low},{high}{end}", rf"$\left{left}{low}, {high}\right{end}$"]
    return right, wrong, same


def _set(stream: random.Random) -> Case:
    items = stream.sample(range(1, 60), 3)

    def spell(values: list[int]) -> str:
        return rf"\{{{', '.join(map(str, values))}\}}"

    wrong = [spell(items[:2]), spell([*items, 77]), spell([*items[:2], items[2] + 60]), f"{items[0]}"]
    wrong += [spell([-items[0], *items[1:]])]
    same = [f"${spell(items)}$", f"${spell(items[::-1])}$", f"${spell(sorted(items))}$"]
    return spell(items), wrong, same


def _name(stream: random.Random) -> Case:
    right = stream.choice(list(_SAME["name"]))
    return right, list(_NEAR_MISSES["name"][right]), list(_SAME["name"][right])


def _date(stream: random.Random) -> Case:
    year, month, day = stream.randint(1800, 2030), stream.randint(1, 11), stream.randint(13, 27)
    right = f"{year}-{month:02}-{day}"
    wrong = [f"{year + 1}-{month:02}-{day}", f"{year}-{month + 1:02}-{day}", f"{year}-{month:02}-{day + 1}"]
    wrong += [f"{year}", f"{year}-{month:02}", f"-{right}", f"{right} or {year}-{month:02}-{day + 1}"]
    return right, wrong, [right, f"**{right}**", f"{right}.", f" {right}\n", f"`{right}`"]


def _choice(stream: random.Random) -> Case:
    right = stream.choice("ABCD")
    others = "ABCD".replace(right, "")
    wrong = [*others, f"{right} or {others[0]}", f"{right}{others[0]}", "", "ABCD"]
    return right, wrong, [right, f"({right})", f"{right}.", f"**{right}**", f" {right} "]


def _output(stream: random.Random) -> Case:
    a, b, c = stream.sample(range(2, 90), 3)
    cases = (
        (f"[{a}, {b}, {c}]", [f"[{a}, {c}, {b}]", f"[{a}, {b}]", f"({a}, {b}, {c})", f"[[{a}, {b}, {c}]]"]),
        (f"'{a}{b}'", [f"{a}{b}", f"'{a} {b}'", f"'{b}{a}'", f"['{a}{b}']"]),
        ("True", ["False", "Truee", "not True", "1"]),
        (f"{{'x': {a}}}", [f"{{'x': {b}}}", f"{{'X': {a}}}", "{'x'}", f"{{{a}: 'x'}}"]),
        (f"-{a}.5", [f"{a}.5", f"-{a}5", f"-{a}.50001", f"-{a}"]),
    )
    right, wrong = stream.choice(cases)
    return right, wrong, [right, f" {right}\n", f"`{right}`"]


ANSWER_KINDS: Mapping[str, Callable[[random.Random], Case]] = {
    "number": _number,
    "fraction": _fraction,
    "interval": _interval,
    "set": _set,
    "name": _name,
    "date": _date,
    "choice": _choice,
    "code output": _output,
}
"""Makers of right answers with near misses, by kind."""


def answers(kind: str, count: int, seed: int = 0) -> Iterator[Case]:
    """Yield ``count`` right answers of a kind of ``ANSWER_KINDS``, with wrong ones and other spellings."""
    stream = random.Random(seed)
    for _ in range(count):
        yield ANSWER_KINDS[kind](stream)
