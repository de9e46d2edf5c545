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


def reads(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="response", ctx=ast.Load()) | ast.Call(func=ast.Name(id="answer_of")):
            return True
    return False


@cache
def readers() -> set[str]:
    """Return the modules that read an expression ``<name>.response``, or call ``answer_of``."""
    found = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            if module.startswith("multitask_rl.testing"):
                continue
            source = path.read_text(encoding="utf-8")
            is_candidate = ".response" in source or "answer_of(" in source
            if is_candidate and any(map(reads, ast.walk(ast.parse(source)))):
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
