"""``multitask-rl plugins list | check | new``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from multitask_rl.boundary.printable import aligned, printable
from multitask_rl.errors import PluginError
from multitask_rl.plugins import GROUPS, list_plugins
from multitask_rl.testing import check, scaffold
from multitask_rl.testing.listing import describe

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
        kinds = {group.rpartition(".")[2]: group for group in GROUPS}
        parser = argparse.ArgumentParser(prog="multitask-rl plugins list")
        # ``check`` and ``new`` name a kind in the singular
        kinds |= {
            kind.removesuffix("es" if kind == "sandboxes" else "s"): kinds[kind] for kind in list(kinds)
        }
        parser.add_argument("kind", nargs="?", choices=sorted(kinds), help="default: all")
        kind = parser.parse_args(rest).kind
        infos = list_plugins(kinds[kind] if kind else None)
        if not infos:
            raise PluginError("no plugins are installed; reinstall multitask-rl (pip install -e .)")
        rows = []
        for info in infos:
            found = describe(info)
            needs = f" [reads {', '.join(found.needs)}]" if found.needs else ""
            source = f"{info.distribution} {info.version}"
            rows.append((info.group.rpartition(".")[2], info.name, source, f"{found.summary}{needs}"))
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
