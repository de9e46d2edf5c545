"""Tables of ``docs/speed.md`` and ``examples/smollm2``, plots, the README's sentence, from the result files.

python benchmarks/tables.py            # print the tables
python benchmarks/tables.py --write    # write them between the pages' marks, the plots into docs/figures
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from claims.base import table
from result_files import by_delay, compiled, read, sort_steps
from scipy.stats import t

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2" / "README.md"
PAGE, README, FIGURES = ROOT / "docs" / "speed.md", ROOT / "README.md", ROOT / "docs" / "figures"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/speed.md")
    if not parser.parse_args().write:
        sys.stdout.write(f"{render()}\n\n{chat_example()}\n")
        return
    for page, text in ((PAGE, render()), (README, headline()), (EXAMPLE, chat_example())):
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    import plots

    plots.write(RESULTS, FIGURES)


def headline(results: Path = RESULTS) -> str:
    """Return the README's sentence: the least and the most of the whole steps' ratios."""
    ranges = {}
    for workload in ("mixed", "uniform"):
        files = sorted(results.glob(f"speed_{workload}_*.json"))
        found = [r["ratios"] for r in map(read, files) if not r.get("compile")]
        for side in ("trl", "limit"):
            own = [ratios[side] for ratios in found if side in ratios]
            ranges[workload, side] = f"{min(own):.1f} to {max(own):.1f}"
    mixed, fixed = ((ranges[w, "trl"], ranges[w, "limit"]) for w in ("mixed", "uniform"))
    return (
        f"Where prompts and answers have many lengths, a step here is **{mixed[0]}** times as fast as\n"
        f"one of TRL and {mixed[1]} times as fast as one of a bare torch loop. Where all have one length,\n"
        f"it is {fixed[0]} and {fixed[1]} times as fast (two CPU cores, small actors)."
    )


def chat_example(results: Path = RESULTS) -> str:
    """Return the table of ``make real``: means over the seeds, intervals of prompts and of seeds (95 %)."""
    file = read(results / "smollm2_real.json")
    runs = [run["tests"] for run in file["runs"][: file["in the table"]]]
    rows: list[Sequence[str]] = []
    for test in runs[0]:
        own = [run[test] for run in runs]
        before, after = (fmean(run[key][0] for run in own) for key in ("before", "after"))
        gains = [run["difference"][0] for run in own]
        # of the runs' intervals, which are of prompts alone
        error = math.hypot(*((high - low) / 2 for _, low, high in (run["difference"] for run in own))) / len(
            own
        )
        student = t.ppf(0.975, len(own) - 1) * stdev(gains) / math.sqrt(len(own))
        mean = fmean(gains)
        ends = (f"[{mean - half:+.3f}, {mean + half:+.3f}]" for half in (error, student))
        verdicts = ", ".join(run["verdict"] for run in own)
        rows.append(
            [f"`{test}`", own[0]["metric"], f"{before:.3f}", f"{after:.3f}", f"{mean:+.3f}", *ends, verdicts]
        )
        for name in ("reward/refusal", "reward/over_refusal", "violation_rate"):
            if name in own[0]["others"]:
                pairs = zip(*(run["others"][name] for run in own), strict=True)
                rows.append(["", name, *(f"{fmean(values):.3f}" for values in pairs), "", "", "", ""])
    header = ["test", "metric", "before", "after", "difference", "prompts", "seeds", "verdicts"]
    return table(header, rows)


def render(results: Path = RESULTS) -> str:
    """Return the tables of all speed results there are, in Markdown."""
    parts = []
    for pattern, show in (
        ("speed_*", _steps),
        ("generation_mixed", _generation),
        ("pipeline_tasks", _tasks),
        ("pipeline_rewards*", _rewards),
        ("pipeline_growth", _growth),
        ("ranks", _ranks),
        ("vllm_engine_*", _engines),
        ("speed_*", _resident),
        ("memory", _memory),
        ("gpu*", _gpu),
    ):
        found = [read(file) for file in sorted(results.glob(f"{pattern}.json"))]
        if found:
            parts.append(show(found))
    return "\n\n".join(parts)


def _steps(results: Iterable[dict[str, Any]]) -> str:
    rows = []
    for r in sort_steps(results):
        ours, stages = r["sides"]["ours"], r["stage_ratios"]
        rows.append(
            [
                r["workload"],
                ", ".join([r["actor"], *compiled(r)]),
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


def _generation(results: Sequence[dict[str, Any]]) -> str:
    (result,) = results
    ratio = result["stage_ratios"]["gen_generate"]
    return f"Sampling alone, mixed workload: **{ratio:.2f}** times the tokens/s of `model.generate`, padded."


def _tasks(results: Sequence[dict[str, Any]]) -> str:
    (result,) = results
    rows = [
        [delay, *(f"{own['ratios'][key]:.2f}" for key in own["ratios"])]
        for delay, own in result["figures"].items()
    ]
    header = ["rewards take", "against one after another", "against one after another, each overlapped"]
    return "Four tasks in one overlapped run, samples/s:\n\n" + table(header, rows)


def _rewards(results: Sequence[dict[str, Any]]) -> str:
    rows: list[Sequence[str]] = []
    for delay, own in by_delay(results).items():
        for name, ratio in own["ratios"].items():
            busy = (f"{100 * own[name]['busy'][stage]:.0f} %" for stage in ("rollout", "rewards", "update"))
            rate = [f"{own[n]['samples_per_s']:.0f}" for n in ("max_staleness 0", name)]
            rows.append([f"{delay:g} s", name.split()[-1], *rate, f"{ratio:.2f}", *busy])
    header = ["rewards take", "`max_staleness`", "samples/s at 0", "overlapped", "ratio"]
    busy_header = ["sampling busy", "rewards busy", "learning busy"]
    return "Overlap (`rollout.max_staleness`) by the time that rewards take:\n\n" + table(
        [*header, *busy_header], rows
    )


def _growth(results: Sequence[dict[str, Any]]) -> str:
    (result,) = results
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


def _ranks(results: Sequence[dict[str, Any]]) -> str:
    (result,) = results
    settings = result["settings"]
    number = settings["ranks"]
    rows = [
        [
            name,
            *(f"{own['ratios'][f'ranks/{side}']:.2f}" for side in ("one thread", "threads")),
            *(f"{own['peak_mib'][side]:.0f}" for side in ("one thread", "ranks")),
            f"{own['communication_s'] / own['seconds']['ranks']:.1%}",
        ]
        for name, own in (
            ("32 groups of 8, shared out", result["samples"]),
            (f"one sample of {settings['tokens']} tokens, in parts", result["parts"]),
        )
    ]
    header = ["update", "against one thread", f"against {number} threads", "MiB, one process", "MiB, a rank"]
    text = f"{number} learner ranks of one thread each, {settings['actor']}:\n\n" + table(
        [*header, "in collectives"], rows
    )
    weights = result["weights"]
    of_weights = [
        [name, f"{own['seconds']:.2f}", *(f"{own[key]:.0f}" for key in ("at_rest_mib", "highest_mib"))]
        for name, own in (
            ("a copy", weights["copies"]),
            ("a part (sharded)", weights["parts"]),
            (f"a part of every layer (tensor={number})", weights["layers"]),
        )
    ]
    return (
        f"{text}\n\nEach of {number} ranks has of a {weights['actor']} actor, "
        f"{weights['samples']} samples an update:\n\n"
        + table(["weights", "seconds", "MiB after an update", "MiB at the highest"], of_weights)
    )


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


def _resident(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            r["workload"],
            ", ".join([r["actor"], *compiled(r)]),
            r["dtype"],
            *(
                f"{r['sides'][side]['peak_rss_mib']:.0f}" if side in r["sides"] else "-"
                for side in ("ours", "limit", "trl")
            ),
        ]
        for r in sort_steps(results)
    ]
    header = ["workload", "actor", "precision", "ours", "bare loop", "TRL"]
    return "Peak resident memory of the process in these steps, MiB, libraries included:\n\n" + table(
        header, rows
    )


def _memory(results: Sequence[dict[str, Any]]) -> str:
    (result,) = results
    settings, peaks = result["settings"], result["peaks_mib"]
    tokens = list(next(iter(peaks.values())))
    rows = [[mode, *(f"{own[n]:.0f}" for n in tokens)] for mode, own in peaks.items()]
    return (
        f"Memory of one forward and backward over one sample (vocabulary {settings['vocabulary']}, width "
        f"{settings['width']}, {settings['layers']} layers), MiB by tokens:\n\n" + table(["", *tokens], rows)
    )


def _gpu(results: Sequence[dict[str, Any]]) -> str:
    parts = []
    for r in results:
        rows = [
            [
                f"{name}, `{own['engine']}`" if name == "ours" else name,
                f"{side['step_s']:.2f} s",
                f"{side['gen_tokens_per_s']:.0f}" if "gen_tokens_per_s" in side else "-",
                *(_share(own.get("utilisation", {}).get(name, {}).get(k)) for k in ("step", "learning")),
                f"{1e3 * side['weights_s']:.1f} ms" if "weights_s" in side else "-",
                f"{side['peak_cuda_mib']:.0f}" if "peak_cuda_mib" in side else "-",
            ]
            for own in r["steps"]
            for name, side in own["sides"].items()
        ]
        first = r["steps"][0]
        work = f"{first['actor']}, {first['workload']}, {first['dtype']}"
        header = ["side", "step", "tokens/s sampled", "of the peak", "learning", "weight update", "MiB"]
        parts.append(f"On {r['machine'].get('gpu') or 'a CPU'} ({work}):\n\n" + table(header, rows))
        for engine, figures in r["overlap"].items():
            parts.append(f"`{engine}`. " + _rewards([{"figures": figures}]))
    return "\n\n".join(parts)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
