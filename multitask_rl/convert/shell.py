"""Words of a shell script, read without running it: variables with constant values are filled in."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.errors import ConfigError, path_errors

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def read_words(file: Path) -> list[str]:
    """Return the words of a script in order, with variables filled in that it sets to constants.

    A word that still holds ``$`` depends on the environment or on a program; only ``$HOME`` is filled in.
    Brackets of arrays are left out: their words are listed where the array is written.

    Raises:
        ConfigError: the file cannot be read, or a quotation mark is not closed.
    """
    with path_errors("the script", file, "the path of a shell script in UTF-8"):
        text = file.read_text(encoding="utf-8")
    words: list[str] = []
    known = {"HOME": str(Path.home())}
    # a comment inside a continued command ends it for the shell; here it is left out
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        whole = "\n".join(lines).replace("\\\n", " ").replace("$'", "'")
        for word in shlex.split(_SUM.sub(lambda found: found[0].replace(" ", ""), whole), comments=True):
            filled = _fill(word, known)
            name, equals, value = filled.partition("=")
            if equals and name.isidentifier():
                if "$" not in value:
                    known[name] = value
                value = value.removeprefix("(")
                words += [value] if value != filled.partition("=")[2] and value else []
            else:
                words.append(filled.removesuffix(")") if filled.count("(") < filled.count(")") else filled)
    except ValueError as error:
        raise ConfigError(f"{file}: it is no shell script that can be read: {error}") from error
    return [word for word in words if word]


def _fill(word: str, known: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return known.get(name, found[0] if found[2] is None else found[2])

    word = _VARIABLE.sub(value, word)
    return _SUM.sub(lambda found: _number(found[1], known) or found[0], word)


def _number(text: str, known: dict[str, str]) -> str:
    """Return the value of an arithmetic expression of whole numbers; "" if it is another."""

    def of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name():
                return int(known[node.id])
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError(text)

    try:
        return str(of(parse_python(text.strip(), "eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return ""
