"""The claim on forgetting, with a tiny actor: what a point is, and what the fits and the matching find."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from claims import razor
from claims.base import Arm, Options

from run_builders import write_run


def test_sft_trains_on_the_rows_of_the_new_task_and_all_numbers_are_measured(tmp_path: Path) -> None:
    write_run(tmp_path)
    rows = {"dataset": str(tmp_path / "copy.jsonl")}
    rewards = {"rewards": [f"{tmp_path}/rewards.py:starts_right"], "primary_metric": "reward"}
    old = {"dataset": str(tmp_path / "digit.jsonl"), **rewards, "evaluation_only": True}
    prose = {
        "type": "anchor",
        **rows,
        "prompt": "",
        "answer": "{prompt}",
        "algorithm_config": {"kl": False},
    }
    others = {"instructions": old, "moved": {"type": "anchor", **rows}, "prose": prose}
    found = {"actor": str(tmp_path / "actor"), "extraction": {**rows, **rewards}, "others": others}
    prepared = tmp_path / "razor" / "prepared"
    prepared.mkdir(parents=True)
    (prepared / "claim.json").write_text(json.dumps(found))
    small = {
        "model": {"autocast": False},
        "rollout": {"max_new_tokens": 4},
        "eval": {"every": 1, "num_prompts": 4},
    }
    sft = {"type": "sft", "answer": "{reference}"}
    arm = Arm(name="sft_1e-02", settings={"task": sft, "learning_rate": 1e-2})
    metrics = razor.run_arm(arm, 0, Options(seeds=[0], steps=2, directory=tmp_path, extra=small))
    assert metrics["kl/0"] == 0.0
    assert metrics["kl/2"] > metrics["kl/1"] > 0.0
    assert metrics["loss_error/0"] == 0.0 < metrics["loss_error/2"], "errors are of changes"
    arms = {arm.name: {key: [value] for key, value in metrics.items()}}
    first, second = razor.all_points(arms)
    assert (first.step, second.step, second.is_rl) == (1, 2, False)
    assert second.loss == pytest.approx(metrics["loss/2"] - metrics["loss/0"])
    assert second.old == pytest.approx(metrics["old/0"] - metrics["old/2"]), "a fall is forgetting"
    assert "| sft_1e-02 | 2 | 1 |" in razor.render(arms)


def _point(arm: str, run: int, score: float, kl: float, loss: float) -> razor.Point:
    return razor.Point(arm=arm, run=run, step=1, score=score, gain=score, kl=kl, loss=loss, old=0.0)


def test_a_line_on_the_kl_and_the_offset_of_rl_are_found() -> None:
    kls = [0.0, 0.1, 0.2, 0.4]
    sft = [_point("sft_a", i, 0.5, kl, 2 * kl) for i, kl in enumerate(kls)]
    rl = [_point("grpo_a", i, 0.5, kl, 2 * kl - 0.1) for i, kl in enumerate(kls)]
    assert razor.correlation(sft, "kl", "loss") == pytest.approx(1.0)
    assert math.isnan(razor.correlation(sft, "score", "loss")), "all scores are equal"
    assert razor.offset([*sft, *rl], "loss") == pytest.approx(-0.1)
    assert math.isnan(razor.offset(sft, "loss"))


def test_rl_is_matched_with_the_sft_points_that_are_as_good_and_forget_or_move_least() -> None:
    found = [
        _point("grpo_a", 0, 0.3, 0.1, 0.01),
        _point("grpo_b", 0, 0.4, 0.1, 0.02),
        _point("sft_a", 0, 0.39, 0.1, 0.0),
        _point("sft_a", 0, 0.6, 0.05, 0.2),
        _point("sft_b", 0, 0.9, 0.1, 0.05),
        _point("sft_b", 1, 0.9, 0.1, 0.0),
        _point("grpo_b", 2, 0.9, 0.1, 0.0),
    ]
    assert list(razor.matched(found, "loss")) == [(found[1], found[4])]
    assert list(razor.matched(found, "kl")) == [(found[1], found[3])]
