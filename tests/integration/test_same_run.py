"""A run of 30 steps, recorded: moving code must not change a bit of what a run does.

Four tasks of four algorithms, refill, constraints of three kinds, the guard, sampling beside learning. Record
anew (and say in the commit why the numbers may change): ``python tests/integration/test_same_run.py``.
"""

import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "builders"))

from multitask_rl.attention import products
from run_builders import lines, run_config, train, weights_hash, write_run

RECORD = Path(__file__).parents[1] / "fixtures" / "same_run.json"
TASKS = """
tasks:
  copy:
    type: grpo
    dataset: copy.jsonl
    weight: 2
    rewards: [rewards.py:starts_right, {plugin: rewards.py:is_short, weight: 0.3}]
    constraints: [{plugin: rewards.py:has_no_digit, mode: lagrangian, limit: 0.2}]
  digit:
    type: ppo
    dataset: digit.jsonl
    rewards: [rewards.py:starts_right]
    kl: {coefficient: 0.01, target: 0.5}
  quark:
    type: reward_conditioned
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: rewards.py:has_no_digit, mode: penalty, weight: 0.5}]
    algorithm_config: {quantiles: 3}
  clean:
    type: constrained_decoding
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: rewards.py:has_no_digit, mode: reject, max_attempts: 3}]
"""


def machine() -> str:
    """Return what the bits of a sum depend on; Zen 4 and Zen 5 were seen to have the same."""
    vendor = str(torch.cpu.get_capabilities().get("cpu_name", "")).split()[:1]
    return " ".join([platform.machine(), torch.__version__, torch.backends.cpu.get_cpu_capability(), *vendor])


@contextmanager
def products_of_wide_models() -> Iterator[None]:
    """Multiply as the record was made: then oneDNN multiplied for narrow models too."""
    before = products.with_onednn, torch.get_float32_matmul_precision()
    products.multiply_with_onednn(products.MIN_WIDTH)
    try:
        yield
    finally:
        products.with_onednn = before[0]
        torch.set_float32_matmul_precision(before[1])


def run(directory: Path) -> tuple[list[dict[str, float]], str]:
    """Train and return the metrics of each line that do not depend on the clock, and the weights' hash."""
    write_run(directory, TASKS)
    config = run_config(directory, "out", 30)
    config = replace(
        config,
        rollout=replace(config.rollout, max_staleness=1),
        eval=replace(config.eval, every=5, num_prompts=8),
        checkpoint=replace(config.checkpoint, every=10),
    )
    with products_of_wide_models():
        trainer = train(config)
    return [json.loads(line) for line in lines(directory / "out", "metrics.jsonl")], weights_hash(trainer)


def test_the_run_is_the_recorded_one(tmp_path) -> None:
    recorded = json.loads(RECORD.read_text())
    if recorded["machine"] != machine():
        pytest.skip(f"recorded on {recorded['machine']}: sums differ in their last bits here")
    rows, weights = run(tmp_path)
    assert len(rows) == len(recorded["rows"])
    for now, before in zip(rows, recorded["rows"], strict=True):
        assert {name: now.get(name) for name in before} == before
    assert weights == recorded["weights"]


def test_the_rows_that_an_engine_computes_together_change_no_weight(tmp_path) -> None:
    """As replicas of Ray share samples out, and repeat those of one that was lost; without staleness."""
    write_run(tmp_path, TASKS)
    found = {}
    for tokens in (4096, 48):  # all rows at once, or one to three
        config = run_config(tmp_path, str(tokens), 6)
        trainer = train(replace(config, rollout=replace(config.rollout, max_batch_tokens=tokens)))
        found[tokens] = lines(tmp_path / str(tokens), "metrics.jsonl"), weights_hash(trainer)
    assert found[4096] == found[48]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        rows, weights = run(Path(directory))
    RECORD.write_text(json.dumps({"machine": machine(), "weights": weights, "rows": rows}))
