"""Every bundled check of text through the pool, honest and hostile responses mixed.

Held: typed results, unharmed neighbours, bounded time and memory of this process. ``benchmarks/hostile.py``
does the same with more of both, with algebra and patterns that never end, and with programs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.plugins import CONSTRAINTS, REWARDS, list_plugins

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "hostile.py"
sys.path.insert(0, str(SCRIPT.parent))  # it imports modules beside it
SLOW = {"math_answer", "code_evaluator", "regex", "tool_use"}
"""A response of their own takes a time limit of seconds: without those here."""


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("hostile_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


HOSTILE = benchmark()
CHECKS = HOSTILE.checks()
MODELS = ("rm_hf", "pairwise_rm", "rm_generative", "safety_classifier", "fact_checker", "llama_guard")


@pytest.fixture(scope="module")
def with_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The checks that ask a model, by plugin, with tiny random models."""
    folder = tmp_path_factory.mktemp("models")
    HOSTILE.save_models(folder)
    with HOSTILE.model_checks(folder) as found:
        yield {check.plugin: check for check in found}


def test_every_bundled_check_is_walked(with_models: dict[str, Any]) -> None:
    own = {"multitask-rl"}
    bundled = {
        info.name
        for group in (REWARDS, CONSTRAINTS)
        for info in list_plugins(group)
        if info.distribution in own
    }
    assert {check.plugin for check in CHECKS} | set(with_models) == bundled
    assert set(with_models) == set(MODELS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.plugin + "-constraint" * c.is_constraint)
def test_hostile_responses_harm_no_neighbour(check: Any) -> None:
    if check.plugin in SLOW:
        check = dataclasses.replace(check, own=())
    assert_no_neighbour_is_harmed(check)


@pytest.mark.parametrize("plugin", MODELS)
def test_hostile_responses_harm_no_neighbour_before_a_model(plugin: str, with_models: dict[str, Any]) -> None:
    assert_no_neighbour_is_harmed(with_models[plugin])


def assert_no_neighbour_is_harmed(check: Any) -> None:
    seen = HOSTILE.run(check, 6, random.Random(check.plugin), step=6)
    assert (seen["honest_changed"], seen["failures"], seen["untyped"]) == (0, 0, 0), seen
    assert seen["one_hostile_delays_s"] < seen["limit_s"], seen
    assert seen["grown_mib"] < HOSTILE.LIMIT_MIB, seen
