"""Parsing in several threads: the tree or the source's own error, never a mix-up of threads."""

import ast
import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from multitask_rl.boundary.python_source import parse_python

SOURCE = "\n".join(f"x{i} = [{i}, ({i}, 'a'), {{'k': {i}}}]" for i in range(200))


@pytest.fixture
def collector_lets_threads_in() -> Iterator[None]:
    """Collect garbage often, and let another thread run each time: what brings CPython#106905 about."""

    def let_in(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            time.sleep(0.0002)

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    gc.callbacks.append(let_in)
    yield
    gc.callbacks.remove(let_in)
    gc.set_threshold(*thresholds)


def at_depth(depth: int, act: Callable[[], object]) -> object:
    return act() if depth == 0 else at_depth(depth - 1, act)


def errors_of(*parsers: Callable[[str], object]) -> list[list[BaseException]]:
    """Run each parser in a thread of its own, some calls deeper than the one before; the errors of each."""
    errors: list[list[BaseException]] = [[] for _ in parsers]

    def work(index: int) -> None:
        for _ in range(12):
            try:
                at_depth(30 * index, lambda: parsers[index](SOURCE))
            except SystemError as error:
                errors[index].append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(parsers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.usefixtures("collector_lets_threads_in")
def test_threads_that_parse_at_once_all_get_their_trees() -> None:
    assert errors_of(parse_python, parse_python, parse_python) == [[], [], []]


@pytest.mark.usefixtures("collector_lets_threads_in")
def test_a_library_that_parses_meanwhile_does_no_harm() -> None:
    assert errors_of(parse_python, ast.parse)[0] == []


def test_a_finalizer_that_parses_while_a_tree_is_built_does_no_harm_either() -> None:
    found = []

    def parse(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and not found:
            found.append(None)
            found[0] = parse_python("x = 1")

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    gc.callbacks.append(parse)
    try:
        tree = parse_python(SOURCE)
    finally:
        gc.callbacks.remove(parse)
        gc.set_threshold(*thresholds)
    assert len(tree.body) == 200
    assert ast.dump(found[0]) == ast.dump(ast.parse("x = 1"))


def test_errors_of_the_source_are_its_own() -> None:
    with pytest.raises(SyntaxError):
        parse_python("def (:")
    with pytest.raises((SyntaxError, ValueError), match="null bytes"):
        parse_python("\0")
    assert ast.literal_eval(parse_python("{'a': (1, 2)}", mode="eval")) == {"a": (1, 2)}
