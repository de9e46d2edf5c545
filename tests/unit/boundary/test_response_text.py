"""Every reader of response text stands in the table of owners once, and the page shows the table."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from response_owners import OWNERS, table

ROOT = Path(__file__).parents[3]
PACKAGES = (
    ROOT / "multitask_rl",
    ROOT / "tasks" / "multitask_rl_tasks",
    ROOT / "rewards" / "multitask_rl_rewards",
)


@cache
def readers() -> set[str]:
    """Return the modules with an expression ``<name>.response`` that is read."""
    found = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            if module.startswith("multitask_rl.testing"):
                continue
            source = path.read_text(encoding="utf-8")
            if ".response" not in source:
                continue
            tree = ast.parse(source)
            if any(
                isinstance(node, ast.Attribute) and node.attr == "response" and isinstance(node.ctx, ast.Load)
                for node in ast.walk(tree)
            ):
                found.add(module)
    return found


def test_every_module_that_reads_responses_has_one_owner() -> None:
    owned = [name for owner in OWNERS for name in owner.modules]
    for module in readers():
        owners = [name for name in owned if module == name or module.startswith(f"{name}.")]
        assert len(owners) == 1, f"{module} reads responses; owners: {owners}"


def test_no_owner_is_left_over() -> None:
    modules = readers()
    for owner in OWNERS:
        for name in owner.modules:
            assert any(module == name or module.startswith(f"{name}.") for module in modules), name


def test_the_page_on_security_shows_the_table() -> None:
    assert table() in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
