"""Counts that keep the house easy to live in. Each may go down, none up."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

CORE = Path(__file__).parents[1] / "multitask_rl"

FOREIGN = {
    "environments": (6, "methods of an author's environment, arguments of a tool by name"),
    "api": (1, "a tokenizer"),
    "attention": (4, "transformers configurations; a mark on a torch tensor"),
    "cli": (
        3,
        "a command of our table; an exception's exit code; settings from the command line",
    ),
    "config": (2, "fields of settings that are checked or built"),
    "curriculum": (2, "attributes that a user's policy lists in ``per_task``"),
    "data": (9, "tokenizers, data sets and puzzles of other libraries; a user's task"),
    "lazy": (1, "a public name in its module"),
    "models": (13, "transformers models, configurations and tokenizers; peft layers"),
    "plugins": (8, "a user's object"),
    "rollout": (17, "transformers models; objects inside vLLM"),
    "run": (6, "a reward given as an object"),
    "sandbox": (20, "builtins, the interpreter, objects of a candidate program, limits by name"),
    "scoring": (22, "a user's plugin or a value it returned; objects of other reward libraries"),
    "tracking": (2, "numbers of other libraries"),
    "training": (12, "transformers models and configurations, torch modules and names"),
}
"""Room -> ``getattr`` and ``hasattr`` in it at most, and whose objects they read."""


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(CORE.rglob("*.py"))}


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(CORE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_our_own_objects_are_not_probed() -> None:
    """What is ours declares what it has: the numbers count reads of what is foreign, or chosen by a name."""
    found: Counter[str] = Counter()
    for path, tree in trees().items():
        room = path.relative_to(CORE).parts[0].removesuffix(".py")
        calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
        found[room] += sum(call.func.id in ("getattr", "hasattr") for call in calls)  # type: ignore[attr-defined]
    allowed = {room: number for room, (number, _) in FOREIGN.items()}
    over = {room: number for room, number in found.items() if number > allowed.get(room, 0)}
    assert over == {}, "declare it in the class, or say in FOREIGN whose object it is"


def test_few_imports_of_our_own_stand_inside_functions() -> None:
    """The command line loads torch, or what needs it, only for commands that use it."""
    found = set()
    for path, tree in trees().items():
        for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("multitask_rl"):
                    found.add((str(path.relative_to(CORE)), node.lineno))
    assert len(found) <= 9, sorted(found)


def test_the_lines_of_parts_written_by_hand_are_as_contributing_says() -> None:
    """Up to a tenth, so that not every edit changes the page."""
    page = (CORE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Written by hand")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)(?:: ([\w., ]+))?` \((\d+)\) \|", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `")
    for place, names, said in rows:
        path = CORE / place
        lines = sum(
            len(file.read_text(encoding="utf-8").splitlines())
            for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
        )
        if names:
            found = {
                n.name: n for n in ast.walk(trees()[path]) if isinstance(n, ast.ClassDef | ast.FunctionDef)
            }
            parts = [found[name.rpartition(".")[2]] for name in names.split(", ")]
            lines = sum((part.end_lineno or 0) - part.lineno + 1 for part in parts)
        assert abs(int(said) - lines) <= max(2, lines / 10), f"{place} {names}: {lines} lines"


def test_the_glossary_names_modules_that_exist_and_no_term_twice() -> None:
    page = (CORE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    rows = [
        row
        for row in re.findall(r"^\| ([^|]+) \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
        if row[1] != "where"
    ]
    assert len(rows) > 100
    assert [term for term, number in Counter(term for term, _ in rows).items() if number > 1] == []
    places = {place for _, where in rows for place in re.findall(r"`([\w/]+)`", where)}
    assert [p for p in sorted(places) if not (CORE / p).is_dir() and not (CORE / f"{p}.py").is_file()] == []
