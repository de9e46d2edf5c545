"""The contract suites of guards, schedulers, algorithms and tasks: what is bundled keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from multitask_rl.errors import PluginError
from multitask_rl.plugins import ALGORITHMS, GUARDS, SCHEDULERS, TRACKERS, list_plugins
from multitask_rl.testing import (
    assert_algorithm_contract,
    assert_contract,
    assert_guard_contract,
    assert_scheduler_contract,
    assert_task_contract,
)
from multitask_rl.testing.backend import check_backend
from multitask_rl.testing.check import check_plugin
from multitask_rl.testing.contract import Finding
from multitask_rl.testing.engine import check_engine
from multitask_rl.testing.environment import check_environment
from multitask_rl.testing.kinds import (
    check_algorithm,
    check_guard,
    check_scheduler,
    check_task,
    check_tracker,
)


def names(group: str) -> list[str]:
    return [info.name for info in list_plugins(group) if info.distribution == "multitask-rl"]


@pytest.mark.parametrize("name", names(GUARDS))
def test_bundled_guards(name: str) -> None:
    assert_guard_contract(name, {"warmup": 2, "cooldown_steps": 2})


@pytest.mark.parametrize("name", names(SCHEDULERS))
def test_bundled_schedulers(name: str) -> None:
    assert_scheduler_contract(name)


@pytest.mark.parametrize("name", names(ALGORITHMS))
def test_bundled_algorithms(name: str) -> None:
    assert_algorithm_contract(name)


def test_a_bundled_task() -> None:
    assert_task_contract("long_context_kv")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", names(TRACKERS))
def test_bundled_trackers(name: str) -> None:
    if name in ("trackio", "wandb"):
        pytest.importorskip(name)
    assert_contract("tracker", name)


def test_a_bundled_engine() -> None:
    assert_contract("engine", "hf")


def test_the_bundled_backend_in_one_process() -> None:
    assert_contract("backend", "torch")


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        (
            "def step(self, active, factor, compared=()): return super().step(active[1:], factor, compared)",
            "gradient and step of two algorithms are those of one process",
        ),
        ("def load_optimizer(self, tensors, parameters): pass", "it goes on from the state of one process"),
        (
            "def step(self, active, factor, compared=()):\n"
            "        return super().step([(c, w if w == w else 0.0) for c, w in active], factor, compared)",
            "a gradient that is not finite moves nothing",
        ),
    ],
)
def test_what_a_backend_does_wrong_is_found(tmp_path: Path, body: str, finding: str) -> None:
    text = "from multitask_rl.training.backends.in_process import InProcess\n"
    (tmp_path / "b.py").write_text(f"{text}class B(InProcess):\n    {body}\n")
    assert finding in [f.name for f in check_backend(f"{tmp_path / 'b.py'}:B") if not f.passed]


GUARD = """
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardDecision
class G(Guard):
    def __init__(self): self.seen = 0
    def observe(self, step, evaluations, confirm=None):
        self.seen += 1
        return GuardDecision(judged_good=self.seen < 9 and bool(evaluations) and BODY)
    def state_dict(self): return STATE
    def load_state_dict(self, state, renamed=None): self.seen = state["seen"]
    def weight_factors(self): return FACTORS
"""


@pytest.mark.parametrize(
    ("body", "state", "factors", "finding"),
    [
        ("step > 2", "{'seen': self.seen}", "{'third': 1.0}", "weight_factors holds {'third': 1.0}"),
        ("step > 2", "{'seen': self.seen}", "{}", None),
        ("True", "{'seen': self.seen}", "{}", "weights without a result are judged good"),
        ("step > 2", "{'seen': 0}", "{}", "after a resume it decides"),
        ("step > 2", "{'seen': {1}}", "{}", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_what_a_guard_does_wrong_is_found(
    tmp_path: Path, body: str, state: str, factors: str, finding: str | None
) -> None:
    text = GUARD.replace("BODY", body).replace("STATE", state).replace("FACTORS", factors)
    (tmp_path / "g.py").write_text(text)
    failed = [f.detail for f in check_guard(f"{tmp_path / 'g.py'}:G") if not f.passed]
    assert bool(failed) == (finding is not None), failed
    assert all(finding in detail for detail in failed if finding is not None)


@pytest.mark.parametrize(
    ("check", "body", "finding"),
    [
        (
            check_scheduler,
            "from multitask_rl.curriculum.uniform import Uniform\nclass X(Uniform):\n"
            "    def weights(self): return {t: float(i == 0) for i, t in enumerate(self.tasks)}",
            "the order of the tasks changes nothing",
        ),
        (
            check_algorithm,
            "from multitask_rl.algorithms.grpo import GRPO\nclass X(GRPO):\n    def credit(self, batch):\n"
            "        credit = super().credit(batch)\n        credit.advantages *= float('nan')\n"
            "        return credit",
            "equal rewards give no NaN",
        ),
        (
            check_task,
            "class X:\n    def settings(self): return {'rewards': ['exact_match'], 'prompt': '{question}'}\n"
            "    def rows(self, split): return [{'prompt': 'a', 'reference': 'b'}] * 3",
            "its settings are those of a task, and its rows fit them",
        ),
    ],
)
def test_what_others_do_wrong_is_found(
    tmp_path: Path, check: Callable[[str], list[Finding]], body: str, finding: str
) -> None:
    (tmp_path / "x.py").write_text(body)
    assert finding in [f.name for f in check(f"{tmp_path / 'x.py'}:X") if not f.passed]


TRACKER = """
from multitask_rl.tracking.base import Tracker
class T(Tracker):
    def __init__(self, output_dir, config, run_id): self.run_id = RUN_ID
    def log_metrics(self, metrics, step): BODY
"""


@pytest.mark.parametrize(
    ("body", "run_id", "told"),
    [
        ("pass", "run_id or 'a'", []),
        ("metrics.clear()", "None", ["it changed what it was given"] * 2),
        ("sum(map(int, metrics.values()))", "None", ["ValueError: cannot convert float NaN to integer"] * 2),
        ("pass", "__import__('uuid').uuid4().hex", ["run_id '"] * 2),
        ("pass", "7", ["run_id is 7, no text"] * 2),
    ],
)
def test_what_breaks_the_contract_of_trackers_is_named(
    tmp_path: Path, body: str, run_id: str, told: list[str]
) -> None:
    file = tmp_path / "own_tracker.py"
    file.write_text(TRACKER.replace("BODY", body).replace("RUN_ID", run_id))
    failed = [finding.detail for finding in check_tracker(f"{file}:T") if not finding.passed]
    assert len(failed) == len(told), failed
    assert all(detail.startswith(start) for detail, start in zip(failed, told, strict=True)), failed


ENGINE = """
from multitask_rl.rollout.hf import HFEngine
class E(HFEngine):
    def generate(self, requests):
        results = super().generate(requests)
        for group in results:
            for sample in group:
                sample.BODY
        return results
"""


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        ("rollout_logprobs[0] -= 0.01", 3),
        ("response_ids.append(5)", 8),
    ],
)
def test_what_breaks_the_contract_of_engines_is_named(tmp_path: Path, body: str, failed: int) -> None:
    file = tmp_path / "own_engine.py"
    file.write_text(ENGINE.replace("BODY", body))
    findings = check_engine(f"{file}:E")
    broken = [f"{finding.name}: {finding.detail}" for finding in findings if not finding.passed]
    assert len(broken) == failed, broken


ENVIRONMENTS = """
import os, time
from multitask_rl.environments.base import StepResult


class Talks:
    def reset(self, row):
        self.heard, self.word = [], row["word"]
        return f"Say {self.word}."

    def step(self, message):
        self.heard.append(message["content"])
        said = {"role": "user", "content": f"{len(self.heard)} words"}
        return StepResult(messages=[said], reward=1.0, done=len(self.heard) == 3)


class Shares(Talks):
    words = []

    def reset(self, row):
        self.heard = self.words


class Breaks(Talks):
    def step(self, message):
        return super().step({"content": message["content"].encode("latin-1")})


class Forgets(Talks):
    def step(self, message):
        super().step(message)


class Leaves(Talks):
    def step(self, message):
        os._exit(3)


class Hangs(Talks):
    def close(self):
        if hasattr(self, "heard"):
            time.sleep(1000)


class NeedsMore(Talks):
    def reset(self, row):
        raise OSError(f"no server for {row}")
"""


@pytest.mark.parametrize(
    ("name", "finding", "says"),
    [
        ("Talks", "", ""),
        ("Shares", "episodes at once do not disturb each other", "state belongs in self"),
        ("Breaks", "answers hostile texts and calls", "for: broken text"),
        ("Forgets", "answers hostile texts and calls", "returned None; expected a StepResult of "),
        ("Leaves", "answers hostile texts and calls", "ended with code 3"),
        ("Hangs", "its worlds close in time", "hangs"),
        ("NeedsMore", "begins an episode on a row", "infra failure"),
        ("Missing", "is built and closed in a worker process", "has no 'Missing'"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_told(
    tmp_path: Path, name: str, finding: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "Hangs":
        monkeypatch.setattr("multitask_rl.environments.pool.CLOSING_S", 0.5)
        monkeypatch.setattr("multitask_rl.testing.environment.LATE_S", 0.4)
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    findings = check_environment(f"{tmp_path / 'worlds.py'}:{name}", row={"word": "yes"})
    failed = {f.name: f.detail for f in findings if not f.passed}
    assert says in failed.get(finding, "")
    assert bool(failed) == bool(finding)


def test_a_wrong_argument_of_an_environment_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    (finding,) = check_environment(f"{tmp_path / 'worlds.py'}:Talks", {"cst": 1}, row={"word": "yes"})
    assert finding.detail.startswith("environment_config.cst: Talks(")


def test_what_an_environment_needs_beyond_a_row_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    report = check_plugin(f"{tmp_path / 'worlds.py'}:Talks")
    assert report.kind == "environment"
    assert report.passed
    assert "not tried, give --row (data failure" in report.text()
    broken = check_plugin(f"{tmp_path / 'worlds.py'}:NeedsMore")
    assert not broken.passed, "an episode that never began has shown nothing"


def test_an_object_of_an_unknown_kind_names_the_option_that_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "guards.py"
    file.write_text("from multitask_rl import SafetyGuard\n\n\nclass Mine(SafetyGuard):\n    pass\n")
    with pytest.raises(PluginError, match=r"has no method score.* name its kind: --kind .*guard"):
        check_plugin(f"{file}:Mine")
    assert check_plugin(f"{file}:Mine", kind="guard").passed
