"""Words of a shell script, read without running it: variables with constant values are filled in."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.schema.located_yaml import parse_yaml
from multitask_rl.convert.conversion import Reading
from multitask_rl.errors import ConfigError, path_errors

_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*))?\}|\$(\w+)")
"""``$A``, ``${A}`` and ``${A:-default}``, whose default may hold others."""
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def read_words(file: Path, program: str) -> tuple[list[str], dict[str, str]]:
    """Return the words of a script in order, with variables filled in that it sets to constants.

    A word that still holds ``$`` depends on the environment or on a program; only ``$HOME`` is filled in.
    Brackets of arrays are left out: their words are listed where the array is written. A text that calls
    ``program``, and a variable that holds options, are words too.

    Second, what is told of variables with several values: which of them holds may depend on a branch.

    Raises:
        ConfigError: the file cannot be read, or a quotation mark is not closed.
    """
    with path_errors("the script", file, "the path of a shell script in UTF-8"):
        text = file.read_text(encoding="utf-8")
    words: list[str] = []
    known = {"HOME": str(Path.home())}
    values: dict[str, list[str]] = defaultdict(list)
    # a comment inside a continued command ends it for the shell; here it is left out
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#") and not _prints(line)]
    try:
        whole = "\n".join(lines).replace("\\\n", " ").replace("$'", "'")
        for word in shlex.split(_SUM.sub(lambda found: found[0].replace(" ", ""), whole), comments=True):
            filled = _fill(word, known)
            name, equals, value = filled.partition("=")
            value = known.get(name[:-1], "") + value if name.endswith("+") and value[:1] != "(" else value
            name = name.removesuffix("+")
            if equals and name.isidentifier():
                if "$(" not in value:
                    known[name] = value
                values[name] += [value] if value and not value.startswith(("(", "$")) else []
                words += [_unbracketed(value[1:])] if value.startswith("(") else []
            elif re.search(rf"{program}\s", filled) or (
                _VARIABLE.fullmatch(word) and re.match(r"--\w|\+*\w[\w.]*\.\w+=", filled)
            ):
                words += shlex.split(filled)
            else:
                words.append(_unbracketed(filled))
    except ValueError as error:
        raise ConfigError(f"{file}: it is no shell script that can be read: {error}") from error
    has_branches = re.search(r"^\s*(?:fi|esac)\b", text, re.MULTILINE) is not None
    found = values if has_branches else {}
    return [word for word in words if word], _told({f"variable {k}": own for k, own in found.items()})


def read_options(found: Iterable[tuple[str, str, Mapping[str, Any] | None]], told: dict[str, str]) -> Reading:
    """Return options from names, texts and values; those without values are computed by the script."""
    reading, texts = Reading(), defaultdict[str, list[str]](list)
    for name, text, values in found:
        texts[name].append(text)
        reading.options.update(values or {})
        reading.computed |= {name: text} if values is None else {}
    reading.told = told | _told(texts)
    return reading


def _told(texts: Mapping[str, list[str]]) -> dict[str, str]:
    """Return what is told of names that a script sets several times."""
    last = "in turn; each use takes the last one before it, whatever its branch"
    return {name: f"set to {', '.join(own)} {last}" for name, own in texts.items() if len({*own}) > 1}


def read_value(text: str, where: str) -> Any:
    """Return the value of an option as YAML reads it; a text that is no YAML is itself."""
    try:
        return parse_yaml(text, where)[0]
    except ConfigError:
        return text


def _unbracketed(word: str) -> str:
    return word.removesuffix(")") if word.count("(") < word.count(")") else word


def _prints(line: str) -> bool:
    """Whether the line is a whole command that prints: it sets nothing."""
    is_whole = line.count('"') % 2 == line.count("'") % 2 == 0 and not line.endswith("\\")
    return is_whole and line.lstrip().startswith(("echo ", "printf "))


def _fill(word: str, known: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return known.get(name, found[0] if found[2] is None else _fill(found[2], known))

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
