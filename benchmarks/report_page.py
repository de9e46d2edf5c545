"""The page of a large run: its size, seconds to write it, and seconds until a reader can use it in Chromium.

    python benchmarks/report_page.py --steps 2000 --samples 20000 [--json FILE]

The run is made up: five tasks, the metrics, evaluations, decisions and spans that a run of such steps writes,
and samples of about 60 words from a vocabulary of 4,000 words with Zipf's frequencies, with the text,
log-probability and advantage of each token. Seconds are those of the page itself, from the request to the
first curves and to the list of samples, the middle of ``--repeats`` openings. The browser needs the package
selenium, Chromium and chromedriver; without them the size alone is measured. Exit code 1 if the page exceeds
8 MB or 1 s, or lacks a sample.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import io
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from multitask_rl.cli import main as run_command

MOST_BYTES, MOST_S = 8_000_000, 1.0
TASKS = ("math", "code", "manners", "search", "summary")
COMMAND = "python benchmarks/report_page.py --steps {0.steps} --samples {0.samples}"
STAGES = ("rollout", "constraints", "rewards", "advantages", "update", "step")


def main() -> int:
    """Print the figures; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_run(directory, options.steps, options.samples)
        page = directory / "page.html"
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            code = run_command(["report", name, "--html", str(page)])
        number, with_tokens = samples_in(page)
        figures: dict[str, float] = {
            "write_s": round(time.perf_counter() - began, 2),
            "samples_in_page": number,
            "with_tokens": with_tokens,
            "page_mb": round(page.stat().st_size / 1e6, 2),
            "rollouts_mb": round((directory / "rollouts.jsonl").stat().st_size / 1e6, 1),
        }
        if code == 0 and importlib.util.find_spec("selenium") and shutil.which("chromedriver"):
            figures |= open_page(page, directory / "profile", options.repeats)
    document = {"command": COMMAND.format(options), "figures": figures}
    print("\n" + json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    slowest = max(figures.get("curves_s", 0.0), figures.get("samples_s", 0.0))
    return int(
        code != 0 or figures["page_mb"] * 1e6 > MOST_BYTES or slowest > MOST_S or number < options.samples
    )


def samples_in(page: Path) -> list[int]:
    """Return how many samples a page holds: their texts, and their tokens."""
    text = page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    stored = json.loads(text)["samples"]
    last = zlib.decompress(base64.b64decode(stored["texts"][-1]))
    missing = stored["chunk_size"] - len(json.loads(last))
    return [
        sum(chunk is not None for chunk in stored[kind]) * stored["chunk_size"] - missing
        for kind in ("texts", "tokens")
    ]


def write_run(directory: Path, num_steps: int, num_samples: int) -> None:
    """Write the records of the made-up run."""
    chance = random.Random(1)
    words = ["".join(chance.choices("aeioutnshrdl", k=chance.randint(2, 9))) for _ in range(4000)]
    frequencies = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(words))))

    def text(number: int) -> list[str]:
        return [" " + word for word in chance.choices(words, cum_weights=frequencies, k=number)]

    def metrics(step: int) -> dict[str, Any]:
        names = ["reward_mean", "informative_rate", "length", "truncated_rate", "entropy", "kl", "weight"]
        names += ["share_trained", "level", "rejection_rate", "violation_rate", "failure_rate"]
        own = {f"task/{task}/{name}": chance.random() for task in TASKS for name in names}
        return {"step": step, **own, **{f"time/{stage}_s": chance.random() for stage in STAGES}}

    def spans(step: int) -> list[dict[str, Any]]:
        own = {"task": "", "start": float(step), "end": step + chance.random(), "step": step}
        return [{**own, "stage": stage} for stage in STAGES]

    def sample(index: int) -> dict[str, Any]:
        group, number = divmod(index, 8)
        task = TASKS[group % len(TASKS)]
        own = random.Random(group)
        prompt = "".join(" " + word for word in own.choices(words, cum_weights=frequencies, k=60))
        tokens = text(chance.randint(30, 90))
        logprobs = [round(-chance.expovariate(1.5), 3) for _ in tokens]
        return {
            "step": 1 + index * num_steps // num_samples,
            "task": task,
            "prompt_id": f"{task}/{group}",
            "draw": group,
            "sample": number,
            "attempt": 0,
            "prompt": prompt,
            "response": "".join(tokens),
            "reward": chance.random(),
            "breakdown": {"exact": {"value": chance.random(), "components": {"close": chance.random()}}},
            "failure": None,
            "finish_reason": chance.choice(("stop", "length")),
            "rejected": chance.random() < 0.05,
            "verdicts": {"safe": {**verdict, "violated": chance.random() < 0.1}},
            "row": {"prompt": prompt, "reference": "".join(text(5))},
            "response_ids": [1] * len(tokens),
            "tokens": {"texts": tokens, "logprobs": logprobs, "advantages": round(chance.gauss(0, 1), 3)},
        }

    def evaluation(step: int, task: str) -> dict[str, Any]:
        values = [float(chance.random() < 0.3 + 0.4 * step / num_steps) for _ in range(128)]
        return {"step": step, "task": task, "metric": "reward", "direction": "higher", "values": values}

    verdict = {"cost": 1.0, "reason": "it names a person"}
    event = {"source": "scheduler", "kind": "reweight", "task": "math", "reason": "level 0.31 of target 1.00"}
    steps = range(1, num_steps + 1)
    files = {
        "metrics": (metrics(step) for step in steps),
        "timeline": (span for step in steps for span in spans(step)),
        "events": ({**event, "step": step} for step in steps[::20]),
        "evaluations": (evaluation(step, task) for step in range(0, num_steps + 1, 25) for task in TASKS),
        "rollouts": map(sample, range(num_samples)),
    }
    for name, lines in files.items():
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def open_page(page: Path, profile: Path, repeats: int) -> dict[str, float]:
    """Return seconds from the request to curves and samples, and of a search through all samples."""
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{word}")
    for word in ("disable-background-networking", "disable-component-update", f"user-data-dir={profile}"):
        options.add_argument(f"--{word}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    found: dict[str, list[float]] = {"curves_s": [], "samples_s": [], "search_s": []}
    mark = "return performance.getEntriesByName(arguments[0]).at(-1)?.startTime"
    search = """const field = document.getElementById("find"); performance.clearMarks();
        field.value = "no such words"; field.dispatchEvent(new Event("input")); return performance.now()"""
    try:
        for _ in range(repeats):
            browser.get(page.as_uri())
            for name in ("curves", "samples"):
                wait = WebDriverWait(browser, 60, poll_frequency=0.02)
                at = wait.until(lambda driver, name=name: driver.execute_script(mark, name))
                found[f"{name}_s"].append(at / 1000)
            began = browser.execute_script(search)
            wait = WebDriverWait(browser, 60, poll_frequency=0.02)
            at = wait.until(lambda driver: driver.execute_script(mark, "samples"))
            found["search_s"].append((at - began) / 1000)
    finally:
        browser.quit()
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
