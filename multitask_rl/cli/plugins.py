"""``multitask-rl plugins list | check | new``."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from multitask_rl.boundary.printable import aligned, printable
from multitask_rl.boundary.python_source import parse_python
from multitask_rl.errors import PluginError
from multitask_rl.plugins import GROUPS, PluginInfo, list_plugins
from multitask_rl.testing import check, scaffold

_USAGE = f"""usage: multitask-rl plugins list [KIND] | check NAME ... | new KIND NAME ...

  list   show installed plugins: kind, name, distribution, description (imports none)
  check  test a plugin against the contract of its kind
  new    write an installable plugin with tests
kinds of check and new: {", ".join(scaffold.KINDS)}
"""


def main(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with and return the exit code (2 = usage)."""
    command, *rest = argv or [""]
    if command == "list":
        groups = {group.rpartition(".")[2]: group for group in GROUPS}
        kinds: dict[str, str] = {}
        for kind in groups:
            word = kind.rpartition("_")[2]  # ``check`` and ``new`` name it so, in the singular
            kinds |= {word: kind, word.removesuffix("es" if word == "sandboxes" else "s"): kind}
        parser = argparse.ArgumentParser(prog="multitask-rl plugins list")
        parser.add_argument(
            "kind",
            nargs="?",
            metavar="KIND",
            type=lambda given: kinds.get(given, given),
            choices=sorted(groups),
            help="%(choices)s; default: all",
        )
        kind = parser.parse_args(rest).kind
        infos = list_plugins(groups[kind] if kind else None)
        if not infos:
            raise PluginError("no plugins are installed; reinstall multitask-rl (pip install -e .)")
        rows = []
        for info in infos:
            source = f"{info.distribution} {info.version}"
            rows.append((info.group.rpartition(".")[2], info.name, source, describe(info)))
        for line in aligned(rows, num_text=4):
            print(printable(line))
        return 0
    if command == "check":
        return check.main(rest)
    if command == "new":
        return scaffold.main(rest)
    asked = command in ("-h", "--help")
    (sys.stdout if asked else sys.stderr).write(_USAGE)
    return 0 if asked else 2


def describe(info: PluginInfo) -> str:
    """Return the first line of a plugin's docstring, or of its module's, and the columns that it reads.

    They are read from its source, and nothing is imported. Empty if no source is found.
    """
    module, _, name = info.value.partition(":")
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)  # imports nothing, which holds for a top-level name alone
    files = [Path(spec.origin)] if spec and spec.origin and not rest else []
    for folder in spec.submodule_search_locations or () if spec and rest else ():
        base = Path(folder).joinpath(*rest)
        files += [base.with_name(f"{base.name}.py"), base / "__init__.py"]
    path = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    if path is None:
        return ""
    try:
        tree = parse_python(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return "(its source cannot be read)"
    text = ast.get_docstring(tree) or ""
    needs = ""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
    for node in tree.body:
        if (
            isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == name.split(".")[0]
        ):
            text = ast.get_docstring(node) or text
            given = [k for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "needs"]
            for keyword in given[:1]:  # needs=(...) of its PluginTraits
                if isinstance(keyword.value, (ast.Tuple, ast.List)):
                    named = [constants.get(ast.unparse(e), e) for e in keyword.value.elts]
                    columns = [str(e.value) for e in named if isinstance(e, ast.Constant)]
                    needs = f" [reads {', '.join(columns)}]" if columns else ""
    return text.strip().partition("\n")[0] + needs
