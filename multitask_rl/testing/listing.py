"""What an installed plugin says of itself, read from its source without importing anything."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.plugins import PluginInfo

__all__ = ["Description", "describe"]


@dataclass(frozen=True, slots=True)
class Description:
    """The outside of a plugin."""

    summary: str = ""
    """First line of its docstring, or of its module's."""
    needs: tuple[str, ...] = ()
    """Columns of the row it declares to read."""


def describe(info: PluginInfo) -> Description:
    """Return what the source behind ``info`` says; empty where no source can be found or read."""
    module, _, name = info.value.partition(":")
    path = _source(module)
    if path is None:
        return Description()
    try:
        tree = parse_python(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return Description(summary="(its source cannot be read)")
    node = next((n for n in tree.body if getattr(n, "name", None) == name.split(".")[0]), None)
    text = ast.get_docstring(tree) or ""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node) or text
    return Description(text.strip().partition("\n")[0], _needs(node) if node is not None else ())


def _source(module: str) -> Path | None:
    """Find the file of ``module``. Only the top-level package is looked up, which imports nothing."""
    top, *rest = module.split(".")
    spec = None
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            break
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _needs(node: ast.AST) -> tuple[str, ...]:
    """Return the literal ``needs=(...)`` of the ``PluginTraits`` in ``node``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                if keyword.arg == "needs" and isinstance(keyword.value, (ast.Tuple, ast.List)):
                    values = [e.value for e in keyword.value.elts if isinstance(e, ast.Constant)]
                    return tuple(str(value) for value in values)
    return ()
