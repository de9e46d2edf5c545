"""The tables of ``docs/speed.md``, from the files in ``benchmarks/results``.

python benchmarks/tables.py            # print them
python benchmarks/tables.py --write    # put them into docs/speed.md, between its marks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from claims.base import table

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/speed.md")
    if not parser.parse_args().write:
        sys.stdout.write(render() + "\n")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def render(results: Path = RESULTS) -> str:
    """Return the tables of all speed results there are, in Markdown."""
    steps = [_read(file) for file in sorted(results.glob("speed_*.json"))]
    parts = [_steps(steps)]
    for name, show in (
        ("generation_mixed", _generation),
        ("pipeline_tasks", _tasks),
        ("pipeline_rewards", _rewards),
        ("pipeline_growth", _growth),
    ):
        file = results / f"{name}.json"
        if file.is_file():
            parts.append(show(_read(file)))
    engines = [_read(file) for file in sorted(results.glob("vllm_engine_*.json"))]
    if engines:
        parts.append(_engines(engines))
    return "\n\n".join(parts)


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def _steps(results: Iterable[dict[str, Any]]) -> str:
    rows = []
    for r in sorted(results, key=lambda r: (r["workload"], r["actor"], r["dtype"] != "float32")):
        ours, stages = r["sides"]["ours"], r["stage_ratios"]
        rows.append(
            [
                r["workload"],
                r["actor"] + (", compiled" if r.get("compile") else ""),
                r["dtype"],
                _times(r["ratios"].get("trl"), stages.get("cpu_trl")),
                _times(r["ratios"]["limit"], stages["cpu_limit"]),
                f"{stages['gen_limit']:.2f}",
                f"{stages['train_limit']:.2f}",
                f"{100 * ours['padding_share']:.1f} %",
                f"{100 * ours['overhead_share']:.1f} %",
            ]
        )
    header = ["workload", "actor", "precision", "TRL", "bare loop", "its sampling", "its learning"]
    return (
        "A whole step, how many times faster than TRL and than the bare loop: wall clock (processor time). "
        "Its sampling and learning against those of the bare loop.\n\n"
        + table([*header, "padding", "overhead"], rows)
    )


def _times(wall: float | None, cpu: float | None) -> str:
    return "-" if wall is None else f"{wall:.2f} ({cpu:.2f})"


def _generation(result: dict[str, Any]) -> str:
    ratio = result["stage_ratios"]["gen_generate"]
    return f"Sampling alone, mixed workload: **{ratio:.2f}** times the tokens/s of `model.generate`, padded."


def _tasks(result: dict[str, Any]) -> str:
    rows = [
        [delay, *(f"{own['ratios'][key]:.2f}" for key in own["ratios"])]
        for delay, own in result["figures"].items()
    ]
    header = ["rewards take", "against one after another", "against one after another, each overlapped"]
    return "Four tasks in one overlapped run, samples/s:\n\n" + table(header, rows)


def _rewards(result: dict[str, Any]) -> str:
    rows: list[Sequence[str]] = []
    for delay, own in result["figures"].items():
        plain, overlapped = (own[f"max_staleness {s}"] for s in (0, 1))
        rows.append(
            [
                delay,
                f"{plain['samples_per_s']:.0f}",
                f"{overlapped['samples_per_s']:.0f}",
                *(f"{100 * overlapped['busy'][stage]:.0f} %" for stage in ("rollout", "rewards", "update")),
            ]
        )
    header = ["rewards take", "samples/s", "overlapped", "sampling busy", "rewards busy", "learning busy"]
    return "Overlap (`rollout.max_staleness: 1`) by the time that rewards take:\n\n" + table(header, rows)


def _growth(result: dict[str, Any]) -> str:
    figures = result["figures"]
    ratios = {"1": 1.0, **figures["tasks_ratios"]}
    tasks = table(
        ["tasks", *ratios], [["step, times that of one task", *(f"{r:.3f}" for r in ratios.values())]]
    )
    per_rollout = figures["microseconds_per_rollout"]
    rollouts = table(
        ["rollouts a step", *per_rollout],
        [["microseconds a rollout", *(f"{v:.0f}" for v in per_rollout.values())]],
    )
    return f"Growth, rewards that cost nothing:\n\n{tasks}\n\n{rollouts}"


def _engines(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            r["actor"],
            r["dtype"],
            f"{r['ratios']['tokens_per_s']:.2f}",
            f"{r['weight_update']['update_ms']:.1f} ms",
            f"{r['weight_update']['pack_ms']:.1f} ms",
            f"{r['weight_update']['bound_ms']:.1f} ms",
        ]
        for r in results
    ]
    header = ["actor", "precision", "tokens/s, times vLLM alone", "weight update", "of it packing"]
    return "vLLM (CPU build):\n\n" + table([*header, "1.5 copies + 10 ms"], rows)


if __name__ == "__main__":
    main()
