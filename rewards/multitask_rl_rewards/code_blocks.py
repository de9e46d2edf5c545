"""Extraction of the program from a response; completion of a prompt that is the beginning of a program."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.sandbox.base import unbound_names

_OPENING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
MAX_PARSED_CHARS = 20_000
"""A longer text is not looked at as Python: the parser takes seconds for some, and memory."""
_FUTURE = re.compile(r"^from __future__ import ", re.MULTILINE)
_ALIASES = {
    "python": ("python", "py", "python3", "py3"),
    "javascript": ("javascript", "js"),
    "cpp": ("cpp", "c++"),
    "c_sharp": ("c_sharp", "csharp", "c#", "cs"),
    "go": ("go", "golang"),
    "rust": ("rust", "rs"),
    "ruby": ("ruby", "rb"),
}


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A program as the response gives it."""

    code: str
    is_fenced: bool
    """It stood in a markdown fence; otherwise it is the whole response."""


def extract_code(response: str, language: str = "python", entry_point: str = "") -> CodeBlock:
    r"""Return the program of a response; an empty ``code`` says that there is none.

    Blocks labelled with another language do not count. Of several the last that defines ``entry_point``
    is taken (people put usage examples after a solution), else the last with a label (sample output often has
    none), else the last. Earlier blocks of Python go before it if they define names that it uses and does not
    define. A fence that the token limit cut open runs to the end. Without any fence the whole response is the
    candidate: base models write bare code.

    >>> extract_code("Sure:\n```python\nx = 1\n```\nDone.").code
    'x = 1\n'
    """
    names = ("", *_ALIASES.get(language, (language,)))
    blocks = _fenced(response)
    if not blocks:
        return CodeBlock(response if response.strip() else "", is_fenced=False)
    blocks = [
        (label, textwrap.dedent(code)) for label, code in blocks if label.lower() in names and code.strip()
    ]
    if not blocks:
        return CodeBlock("", is_fenced=True)
    codes = [code for _, code in blocks]
    defining = [i for i, code in enumerate(codes) if entry_point and defines(code, entry_point)]
    labelled = [i for i, (label, _) in enumerate(blocks) if label]
    chosen = (defining or labelled or [len(codes) - 1])[-1]
    earlier = codes[:chosen] if language == "python" else []
    return CodeBlock(_with_definitions(codes[chosen], earlier), is_fenced=True)


def _with_definitions(code: str, earlier: Sequence[str]) -> str:
    """Return Python code behind those of the earlier blocks that define names it uses and does not define."""
    tree = parsed(code) if earlier and sum(map(len, [code, *earlier])) <= MAX_PARSED_CHARS else None
    missing = set(unbound_names([tree])) - set(dir(builtins)) if tree else set[str]()
    for block in reversed(earlier):
        if missing and (tree := parsed(block)):
            defined = {name for statement in tree.body for name in bound_by(statement)}
            if missing & defined:
                code = f"{block}\n\n{code}"
                missing = (missing | set(unbound_names([tree]))) - defined - set(dir(builtins))
    return code


def _fenced(text: str) -> list[tuple[str, str]]:
    """Return label and content of every fenced block, in one pass over the lines."""
    blocks: list[tuple[str, str]] = []
    fence, label, lines = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        if not fence:
            if opening := _OPENING.match(line):
                fence, label, lines = opening[1], opening[2], []
        elif (stripped := line.strip(" \t")).startswith(fence) and not stripped.strip(fence[0]):
            blocks.append((label, "".join(f"{inner}\n" for inner in lines)))
            fence = ""
        else:
            lines.append(line)
    if fence and lines:
        blocks.append((label, "\n".join(lines)))
    return blocks


def defines(code: str, name: str) -> bool:
    """Whether ``code`` binds ``name`` at its outermost level (judged by its text: it may not parse)."""
    escaped = re.escape(name)
    pattern = rf"^(?:(?:async\s+)?def\s+{escaped}\s*\(|class\s+{escaped}\b|{escaped}\s*(?::[^=\n]+)?=[^=])"
    return bool(name) and re.search(pattern, code, re.MULTILINE) is not None


def parsed(code: str) -> ast.Module | None:
    """Return the tree of Python ``code`` of at most ``MAX_PARSED_CHARS``, else None. Nothing is compiled.

    The compiler's memory grows exponentially with some nestings (``try``/``finally``); the parser's does not.
    """
    if len(code) > MAX_PARSED_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a string
            return parse_python(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parses(code: str) -> bool:
    """Whether ``code`` has the grammar of Python, as ``parsed`` reads it."""
    return parsed(code) is not None


def bound_by(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).split(".")[0] for alias in names}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def is_beginning(prompt: str, entry_point: str) -> bool:
    """Whether ``prompt`` is the beginning of a program that defines ``entry_point``."""
    return defines(prompt, entry_point) and parses(prompt)


def complete_program(code: str, prompt: str, entry_point: str) -> str:
    """Return the whole program, where ``prompt`` is its beginning (HumanEval: imports, signature, docstring).

    A response that defines ``entry_point`` again keeps the prompt's imports and helpers before it, unless it
    begins with imports of ``__future__``; one that goes on with the body follows directly, indented if its
    first statement is not. Any other prompt is not code: ``code`` is returned as it is.
    """
    if not is_beginning(prompt, entry_point):
        return code
    if defines(code, entry_point):
        return code if _FUTURE.search(code) else f"{prompt.rstrip()}\n\n\n{code}"
    first = next((line for line in code.split("\n") if line.strip() and not line.startswith("#")), "")
    body = code if first[:1].isspace() else textwrap.indent(code, "    ")
    return f"{prompt.rstrip()}\n{body}"
