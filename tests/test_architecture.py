"""The walls of the house, held by reading every import: layers, adapters of heavy libraries, no cycles."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import multitask_rl

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "multitask_rl": ROOT / "multitask_rl",
    "multitask_rl_tasks": ROOT / "tasks" / "multitask_rl_tasks",
    "multitask_rl_rewards": ROOT / "rewards" / "multitask_rl_rewards",
}

TIERS = [
    {"errors", "lazy"},
    {"seeding", "boundary", "attention", "sandbox.cell"},
    {"config.schema"},
    {"records"},
    {"contracts"},
    {"plugins"},
    {"curriculum", "sandbox"},
    {"config"},
    {"data", "tracking", "models", "algorithms"},
    {"statistics", "scoring", "convert"},
    {"rollout", "environments", "report"},
    {"training", "constraints", "guard"},
    {"executor"},
    {"training.backends"},
    {"step", "testing"},
    {"run"},
    {"trainer"},
    {"api"},
    {"utils"},
    {"cli"},
    {"__main__"},
]
"""Rooms, lowest first; a room covers what is below it unless a longer name does.

An import stays in its room or goes to a lower tier, so rooms have no circle.
"""

ADAPTERS = {
    "vllm": {"rollout/vllm"},
    "ray": {"executor", "training/backends/build"},
    "mlflow": {"tracking/mlflow", "tracking/reading", "cli/comparison"},
    "hydra": {"cli/train"},
    "omegaconf": {"cli/train"},
    "peft": {"models/lora"},
    "evaluate": {"scoring/foreign"},
    "codebleu": set(),
    "llguidance": {"config/grammar", "models/grammar"},
    "deepspeed": {"training"},
}
"""Library -> where in core it may be imported (bundled plugins may import what they adapt)."""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    root = PACKAGES[package]
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path, *, in_functions: bool = True, for_types: bool = True) -> Iterator[str]:
    """Yield the absolute module names that a file imports, less those in functions or for types only."""
    for name, inside, typing in _imports(path):
        if (in_functions or not inside) and (for_types or not typing):
            yield name


@cache
def _imports(path: Path) -> list[tuple[str, bool, bool]]:
    return list(_read_imports(path))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _read_imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    waiting: list[tuple[ast.AST, bool, bool]] = [(_tree(path), False, False)]
    while waiting:
        node, inside, typing = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, inside, typing
        elif isinstance(node, ast.ImportFrom):
            yield _absolute(node, path), inside, typing
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for child in ast.iter_child_nodes(node):  # an expression holds no import
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                waiting.append((child, inside, typing))


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    root = next(root for root in PACKAGES.values() if path.is_relative_to(root))
    package = path.relative_to(root.parent).parent.parts[
        : len(path.relative_to(root.parent).parts) - node.level
    ]
    return ".".join((*package, *filter(None, [node.module])))


def room(module: str) -> str:
    names = module.split(".")
    known = (".".join(names[:end]) for end in range(len(names), 0, -1))
    found = next((name for name in known if any(name in members for members in TIERS)), None)
    assert found is not None, f"{module} stands in no tier: name its room in TIERS"
    return found


def tier(room: str) -> int:
    return next(index for index, members in enumerate(TIERS) if room in members)


def test_imports_go_down_the_tiers_only() -> None:
    """Imports for type checkers and inside functions count like any other."""
    wrong = []
    for module, path in modules("multitask_rl"):
        for target in imports(path) if module else ():
            below = target.removeprefix("multitask_rl.")
            if below == target or room(below) == room(module):
                continue
            if tier(room(below)) >= tier(room(module)):
                wrong.append(
                    f"{module} (tier {tier(room(module))}) imports {below} (tier {tier(room(below))})"
                )
    assert wrong == []


def test_rooms_are_whole() -> None:
    """A room is a folder or a file of the root, and stands in one tier: no room is split to hide a circle."""
    named = [name for members in TIERS for name in members]
    assert len(named) == len(set(named))
    for name in named:
        place = ROOT / "multitask_rl" / name.replace(".", "/")
        assert place.is_dir() or ("." not in name and place.with_suffix(".py").is_file()), name


def test_the_root_holds_eight_files_at_most() -> None:
    assert len(list((ROOT / "multitask_rl").glob("*.py"))) <= 8


def test_there_are_no_cycles() -> None:
    """Imports for type checkers count."""
    graph: dict[str, set[str]] = {}
    for package in PACKAGES:
        names = {f"{package}.{m}" if m else package: p for m, p in modules(package)}
        for name, path in names.items():
            found = {
                target for target in imports(path, in_functions=False) if target.split(".")[0] in PACKAGES
            }
            graph[name] = found - {name}
    assert_no_circle(graph)


def test_scripts_of_benchmarks_have_no_cycles() -> None:
    """Imports inside functions count."""
    scripts = sorted((ROOT / "benchmarks").rglob("*.py"))
    names = {".".join(p.relative_to(ROOT / "benchmarks").with_suffix("").parts): p for p in scripts}
    assert_no_circle({name: set(imports(path)) & set(names) - {name} for name, path in names.items()})


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    """Fail with the first circle of ``graph``: module -> modules that it imports."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph.get(name, set()):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_trainer_is_known_to_the_front_doors_alone() -> None:
    known = {m for m, path in modules("multitask_rl") if "multitask_rl.trainer" in imports(path)}
    assert {m for m in known if m and not m.startswith(("cli.", "api.", "__main__"))} == set()


def _assigned(node: ast.AST) -> Iterator[str]:
    """Yield the attributes of ``self`` that are assigned in ``node``."""
    for inner in ast.walk(node):
        is_assigned = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_assigned and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            yield inner.attr


def _own_calls(node: ast.AST) -> set[str]:
    """Return the methods of ``self`` that are called in ``node``."""
    return {
        inner.func.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and ast.unparse(inner.func.value) in ("self", "super()")
    }


def test_every_attribute_is_born_in_init_or_the_class_body() -> None:
    """``__init__`` may leave some to methods that it calls."""
    classes: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    for module, path in modules("multitask_rl"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append((module, node))

    def line(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        yield node
        for base in node.bases:
            for _, above in classes.get(ast.unparse(base).split("[")[0].rpartition(".")[2], []):
                if above is not node:
                    yield from line(above)

    def known(node: ast.ClassDef) -> set[str]:
        names, born = set(), {"__init__"}
        body = [inner for own in line(node) for inner in own.body]
        methods = [inner for inner in body if isinstance(inner, ast.FunctionDef)]
        for _ in range(3):  # calls of calls
            born |= {name for m in methods if m.name in born for name in _own_calls(m)}
        for inner in body:
            if isinstance(inner, ast.FunctionDef):
                names |= {inner.name, *(_assigned(inner) if inner.name in born else ())}
            elif isinstance(inner, ast.AnnAssign | ast.Assign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        return names

    wrong = [
        f"{module}.{node.name}.{method.name}: self.{name}"
        for found in classes.values()
        for module, node in found
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        for name in set(_assigned(method)) - known(node)
    ]
    assert sorted(wrong) == []


def test_no_object_is_made_around_its_init() -> None:
    wrong = [m for m, p in modules("multitask_rl") if re.search(r"(?<!super\(\))\.__new__\(", p.read_text())]
    assert wrong == []


def test_core_does_not_know_the_bundled_plugins() -> None:
    for module, path in modules("multitask_rl"):
        for target in imports(path):
            assert target.split(".")[0] not in ("multitask_rl_tasks", "multitask_rl_rewards"), module


def test_rewards_know_neither_tasks_nor_the_trainer() -> None:
    for module, path in modules("multitask_rl_rewards"):
        for target in imports(path):
            assert not target.startswith(
                ("multitask_rl_tasks", "multitask_rl.trainer", "multitask_rl.training")
            ), module


@pytest.mark.parametrize("library", sorted(ADAPTERS))
def test_heavy_library_is_imported_in_its_adapter_only(library: str) -> None:
    for module, path in modules("multitask_rl"):
        place = module.replace(".", "/")
        if any(target.split(".")[0] == library for target in imports(path)):
            assert any(place.startswith(home) for home in ADAPTERS[library]), f"{module} imports {library}"


def test_python_is_parsed_in_one_place() -> None:
    """``ast.parse`` of CPython 3.11.7 and before mixes up threads; the judge has a process of its own."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for module, path in modules(package)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "= ast.parse(" in line or "return ast.parse(" in line or "(ast.parse(" in line
        if module not in ("boundary.python_source", "sandbox.cell.tester")
    ]
    assert wrong == []


def test_importing_the_package_loads_nothing_heavy_and_few_modules() -> None:
    code = (
        "import sys; {}; heavy = {{'torch', 'ray', 'vllm', 'mlflow', 'transformers', 'datasets', 'numpy'}};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )

    code += "; print(len(sys.modules))"

    def modules(statement: str) -> int:
        run = [sys.executable, "-c", code.format(statement)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout)

    # an environment with an editable install has imported these at the start
    known = modules("import contextlib, importlib, typing, warnings")
    assert modules("import multitask_rl") - known < 8


def test_public_names_are_listed_and_load() -> None:
    for name in multitask_rl.__all__:
        assert getattr(multitask_rl, name) is not None
    assert set(multitask_rl.__all__) <= set(dir(multitask_rl))
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = multitask_rl.Trainr  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_name_in_all_exists(package: str) -> None:
    for module, path in modules(package):
        if "__all__" not in path.read_text(encoding="utf-8") or module.startswith("rollout.vllm"):
            continue
        loaded = importlib.import_module(f"{package}.{module}" if module else package)
        for name in loaded.__all__:
            assert hasattr(loaded, name), f"{module}.{name}"
