"""The plots of ``docs/speed.md``: SVG files from the results, the same bytes for the same results.

Written by ``python benchmarks/tables.py --write``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from result_files import by_delay, read, sort_steps

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "multitask-rl",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
}
"""No random ids, text as text; what is left out is matplotlib's own style."""


def write(results: Path, folder: Path) -> None:
    """Draw every plot whose results are there into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({**mpl.rcParamsDefault, "backend": "svg", **STYLE}):
        for name, (pattern, draw) in PLOTS.items():
            found = [read(file) for file in sorted(results.glob(f"{pattern}.json"))]
            if found:
                figure = draw(found)
                metadata = {"Date": None, "Creator": None}
                figure.savefig(folder / f"{name}.svg", metadata=metadata, bbox_inches="tight")


def _sides(results: list[dict[str, Any]]) -> Figure:
    """Bars: how many times as long as ours a step of TRL and of the bare loop takes."""
    figure = Figure(figsize=(6.4, 3.2))
    axes = figure.add_subplot()
    shown = sort_steps(r for r in results if "trl" in r["ratios"])
    for offset, (side, label) in enumerate((("trl", "TRL"), ("limit", "bare loop"))):
        at = [i + 0.4 * offset for i in range(len(shown))]
        axes.bar(at, [r["ratios"][side] for r in shown], width=0.38, label=label)
    axes.axhline(1.0, color="black", linewidth=1, label="ours")
    ticks = [f"{r['workload']}\n{r['actor']}\n{r['dtype']}" for r in shown]
    axes.set_xticks([i + 0.2 for i in range(len(shown))], ticks, fontsize=7)
    axes.set_ylabel("time of a step, times ours")
    axes.legend()
    return figure


def _growth(results: list[dict[str, Any]]) -> Figure:
    """Lines: seconds of a step by tasks and by rollouts, with growth in proportion."""
    figures = results[0]["figures"]
    figure = Figure(figsize=(6.4, 2.8))
    left, right = figure.subplots(1, 2)
    for axes, key in ((left, "tasks"), (right, "rollouts")):
        counts = [int(n) for n in figures[key]]
        seconds = list(figures[key].values())
        axes.plot(counts, seconds, marker="o", label="measured")
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlabel(f"{key} a step" if key == "rollouts" else key)
        axes.set_ylabel("s a step")
        if key == "tasks":
            axes.set_ylim(0, 1.5 * max(seconds))
        else:
            proportional = [seconds[-1] * n / counts[-1] for n in counts]
            axes.plot(counts, proportional, linestyle=":", label="in proportion")
            axes.set_yscale("log")
            axes.legend()
    figure.tight_layout()
    return figure


def _overlap(results: list[dict[str, Any]]) -> Figure:
    """Lines: samples/s and the stages' busy shares by the time that rewards take."""
    delays = by_delay(results)
    figure = Figure(figsize=(6.4, 2.8))
    left, right = figure.subplots(1, 2)
    names = dict.fromkeys(n for own in delays.values() for n in own if n != "ratios")
    for name in names:
        shown = {d: own[name] for d, own in delays.items() if name in own}
        rates = [own["samples_per_s"] for own in shown.values()]
        left.plot(list(shown), rates, marker="o", label=name.replace("_", " "))
    for stage, label in (("rollout", "sampling"), ("rewards", "rewards"), ("update", "learning")):
        busy = [100 * own["max_staleness 1"]["busy"][stage] for own in delays.values()]
        right.plot(list(delays), busy, marker="o", label=label)
    left.set_yscale("log")
    left.set_ylabel("samples/s")
    right.set_ylabel("% busy at max staleness 1")
    for axes in (left, right):
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xticks(list(delays), [f"{d:g}" for d in delays])
        axes.set_xlabel("rewards take, s")
        axes.legend(fontsize=7)
    figure.tight_layout()
    return figure


def _memory(results: list[dict[str, Any]]) -> Figure:
    """Lines: memory of learning by tokens."""
    figure = Figure(figsize=(4.8, 2.8))
    axes = figure.add_subplot()
    for mode, own in results[0]["peaks_mib"].items():
        axes.plot([int(n) for n in own], list(own.values()), marker="o", label=mode)
    axes.set_xlabel("tokens of the sample")
    axes.set_ylabel("MiB")
    axes.legend(fontsize=7)
    return figure


PLOTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Figure]]] = {
    "speed_sides": ("speed_*", _sides),
    "speed_growth": ("pipeline_growth", _growth),
    "speed_overlap": ("pipeline_rewards*", _overlap),
    "speed_memory": ("memory", _memory),
}
"""File name -> results it shows, how."""
