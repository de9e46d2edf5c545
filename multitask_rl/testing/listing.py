"""Summary and columns of an installed plugin, read from its source without importing the plugin."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.plugins import PluginInfo


@dataclass(frozen=True, slots=True)
class Description:
    """What ``plugins list`` shows of a plugin."""

    summary: str = ""
    """First line of its docstring, or of its module's."""
    needs: tuple[str, ...] = ()
    """Columns of a row that it declares to read."""


def describe(info: PluginInfo) -> Description:
    """Return the description in the source behind ``info``; empty if no source is found."""
    module, _, name = info.value.partition(":")
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)  # imports nothing, which holds for a top-level name alone
    files = [Path(spec.origin)] if spec and spec.origin and not rest else []
    for folder in spec.submodule_search_locations or () if spec and rest else ():
        base = Path(folder).joinpath(*rest)
        files += [base.with_name(f"{base.name}.py"), base / "__init__.py"]
    path = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    if path is None:
        return Description()
    try:
        tree = parse_python(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return Description(summary="(its source cannot be read)")
    text = ast.get_docstring(tree) or ""
    needs: tuple[str, ...] = ()
    for node in tree.body:
        if (
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == name.split(".")[0]
        ):
            text = ast.get_docstring(node) or text
            given = [k for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "needs"]
            for keyword in given[:1]:  # needs=(...) of its PluginTraits
                if isinstance(keyword.value, (ast.Tuple, ast.List)):
                    columns = [e.value for e in keyword.value.elts if isinstance(e, ast.Constant)]
                    needs = tuple(map(str, columns))
    return Description(text.strip().partition("\n")[0], needs)
