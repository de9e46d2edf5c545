"""The pictures of docs/reading-a-run.md: short runs that learn or fail, and the curves of their pages.

    python benchmarks/failing_runs.py --write docs/figures

Five runs of a tiny actor on the CPU, about a minute each: one learns, the others fail in the ways that the
page names. The pictures are taken of the pages that ``multitask-rl report --html`` writes, in Chromium
(needs selenium and chromedriver).
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from multitask_rl.cli import main as run_command
from multitask_rl.config.run import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    OptimizerConfig,
    RolloutConfig,
    ScoringConfig,
    TrackingConfig,
)
from run_builders import run_config, train, write_run

REWARDS = """
def says_it(response, reference):
    return float(reference in response[:3])

def seems_eager(response):
    return response.count("!") / 8

def never(response):
    return float(response.startswith("the right answer"))

def breaks(response, reference):
    if reference == "a":
        raise RuntimeError("the grader knows no vowels")
    return float(reference in response[:3])
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run and the charts to show of it."""

    rewards: str
    charts: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    task: str = ""


RUNS = {
    "learns": Run("[rewards.py:says_it]", ("held-out", "reward_mean", "informative_rate")),
    "gamed": Run(
        "[{plugin: rewards.py:seems_eager, weight: 1}, {plugin: rewards.py:says_it, weight: 0.2}]",
        ("held-out", "reward_mean", "entropy"),
        task="primary_metric: says_it",
    ),
    "too_hard": Run("[rewards.py:never]", ("held-out", "reward_mean", "informative_rate")),
    "collapses": Run(
        "[rewards.py:says_it]",
        ("held-out", "entropy", "train-grad_norm"),
        {"optimizer": OptimizerConfig(learning_rate=0.1)},
    ),
    "broken_reward": Run("[rewards.py:breaks]", ("held-out", "failure_rate", "reward_mean")),
}


def main() -> int:
    """Train, take the pictures and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--write", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--only", choices=list(RUNS))
    options = parser.parse_args()
    for name, run in RUNS.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                page = train_one(Path(folder), run, options.steps)
                take_picture(page, run.charts, options.write / f"run_{name}.png")
    return 0


def train_one(directory: Path, run: Run, steps: int) -> Path:
    """Train the run and return its page."""
    own = f"    {run.task}\n" if run.task else ""
    write_run(
        directory,
        "tasks:\n  letters:\n    type: grpo\n    dataset: copy.jsonl\n"
        + own
        + f"    rewards: {run.rewards}\n",
    )
    (directory / "rewards.py").write_text(REWARDS)
    settings: dict[str, Any] = {
        "rollout": RolloutConfig(max_new_tokens=8),
        "eval": EvalConfig(every=10, num_prompts=24),
        "checkpoint": CheckpointConfig(every=0),
        "guard": GuardConfig(enabled=False),
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        "scoring": ScoringConfig(num_workers=1, max_failure_rate=1.0),
        "tracking": TrackingConfig(trackers=["jsonl"]),
    }
    train(run_config(directory, "out", steps, **settings | run.settings))
    page = directory / "page.html"
    with redirect_stdout(io.StringIO()):
        run_command(["report", str(directory / "out"), "--html", str(page)])
    return page


def take_picture(page: Path, charts: tuple[str, ...], file: Path) -> None:
    """Write a PNG of the charts, side by side, as the page shows them."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{word}")
    profile = f"user-data-dir={page.parent / 'profile'}"
    for word in (
        "disable-background-networking",
        "disable-component-update",
        "window-size=1200,700",
        profile,
    ):
        options.add_argument(f"--{word}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(page.as_uri())
        script = """const [charts] = arguments, parent = document.querySelector("#learning-body > .charts");
            for (const id of charts) parent.append(document.getElementById("chart-" + id));
            for (const node of parent.children) node.hidden = !charts.includes(node.id.slice(6));
            parent.style.gridTemplateColumns = "repeat(3, 1fr)"; parent.style.width = "1080px";
            parent.scrollIntoView({block: "center", behavior: "instant"})"""
        browser.execute_script(script, list(charts))
        drawn = "return document.querySelectorAll('#learning-body figure:not([hidden]) canvas').length"
        WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(drawn) == len(charts))
        browser.execute_async_script("setTimeout(arguments[0], 300)")
        browser.find_element("css selector", "#learning-body > .charts").screenshot(str(file))
    finally:
        browser.quit()


if __name__ == "__main__":
    sys.exit(main())
