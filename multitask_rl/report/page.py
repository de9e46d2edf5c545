"""The page of one run: ``multitask-rl report RUN --html FILE`` and ``multitask-rl watch RUN``."""

from __future__ import annotations

import base64
import logging
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from multitask_rl.boundary.printable import duration
from multitask_rl.errors import ConfigError
from multitask_rl.report.samples import CHUNK, Samples, deflated
from multitask_rl.report.shell import render_shell, rounded
from multitask_rl.report.summary import summarise_run
from multitask_rl.tracking.base import ALARM_KINDS, Trackers
from multitask_rl.tracking.jsonl import RECORDS
from multitask_rl.tracking.machine import read_machine
from multitask_rl.tracking.reading import RunRecord, former_names, join_lines, read_lines, read_run

_LOG = logging.getLogger(__name__)
MOST_RECORD_BYTES = 64_000_000
"""Of the records of a run whose page its trackers get at its end: ten seconds of one core."""
_SECTIONS = {"learning": "Learning", "shares": "Shares", "constraints": "Constraints", "speed": "Speed"}
_TASK_CHARTS = {
    "reward_mean": ("learning", "Reward", "mean of the step's slots, penalties subtracted"),
    "informative_rate": ("learning", "Informative groups", "share of groups whose rewards differ"),
    "length": ("learning", "Length", "mean tokens of a response"),
    "truncated_rate": ("learning", "Cut at the limit", "share cut at max_new_tokens"),
    "entropy": ("learning", "Entropy", "of the next token, nats"),
    "kl": ("learning", "KL to the reference", "per response, nats"),
    "clip_fraction": ("learning", "Clipped", "share of tokens that the clip changed"),
    "failure_rate": ("learning", "Failed", "share that could not be sampled or scored"),
    "turns": ("learning", "Turns", "answers of an episode"),
    "weight": ("shares", "Weight", "the scheduler's share of the prompts"),
    "share_trained": ("shares", "Share trained", "share of the groups that gave a gradient"),
    "level": ("shares", "Level", "the scheduler's estimate, smoothed, in [0, 1]"),
    "rejection_rate": ("constraints", "Rejected", "share of all attempts"),
    "violation_rate": ("constraints", "Violations", "share of first attempts"),
    "cost": ("constraints", "Cost", "mean, in [0, 1]"),
}
"""Metric of a task -> section, title and note of its chart."""
_RUN_CHARTS = {
    "train/grad_norm": ("learning", "Norm of the gradient", "before it is clipped"),
    "train/loss": ("learning", "Loss", "of the step's updates"),
    "train/learning_rate": ("learning", "Learning rate", ""),
    "time/tokens_per_s": ("speed", "Tokens per second", "sampled, per second of the step"),
    "time/samples_per_s": ("speed", "Responses per second", "per second of the step"),
    "memory/device_share": ("speed", "Memory of the device", "largest share in the step"),
    "memory/peak_mb": ("speed", "Peak memory", "MiB, all devices"),
    "system/cpu_utilization_percentage": ("speed", "Processors", "% of the machine, other programs included"),
    "system/run_memory_usage_megabytes": ("speed", "Memory of the run", "MB resident, all its processes"),
}
_GPU = re.compile(r"system/gpu_(\d+)_utilization_percentage")
_STAGE_TIMES = ("rollout", "constraints", "rewards", "advantages", "update", "step")
_MOST_POINTS = 800
"""Most points of a curve; in longer ones each point is the mean of as many steps as needed."""
_PAGE_BYTES = 7_700_000
"""Most bytes of the whole page, so that it stays under 8 MB."""
_TOKEN_BYTES = 1_000_000
"""Of these bytes, those for the tokens of samples; texts get the rest."""
_SPANS_OF_STEPS = 12
"""Newest steps in the timeline."""
_MOST_SPANS = 4_000
_FEWEST_STEPS, _HARDLY = 10, 0.02
"""A task gives no signal if, in the later half of its steps (10 at least), fewer of its groups do."""


def render_page(run: RunRecord, result: Mapping[str, Any]) -> str:
    """Return the page of a run; ``result`` is what the command prints as text.

    Raises:
        ConfigError: a record cannot be read.
    """
    samples = Samples(former_names(run.config))
    for _ in read_lines(run.directory / "rollouts.jsonl", samples.add):
        pass
    metrics = read_lines(run.directory / "metrics.jsonl", charted)
    spans = read_lines(run.directory / "timeline.jsonl", span)
    data = payload(run, result, metrics, spans)
    # script and style, and the columns of samples
    around = len(render_shell(run.name, "run.js", data)) + 12 * len(samples)
    stored = embedded(samples, max(_TOKEN_BYTES, _PAGE_BYTES - around))
    return render_shell(run.name, "run.js", {**data, "samples": stored})


def attach_page(trackers: Trackers) -> None:
    """Give the trackers that take it the page of the run, if it has evaluated; log why there is none."""
    directory = trackers.directory
    if not trackers.take_pages or not (directory / "evaluations.jsonl").is_file():
        return
    num_bytes = sum(path.stat().st_size for path in (directory / name for name in RECORDS) if path.exists())
    if num_bytes > MOST_RECORD_BYTES:
        _LOG.warning(
            "the records of the run have %.0f MB, more than %.0f MB: the page of the run is not attached to "
            "its trackers' record; make it with: multitask-rl report %s --html report.html",
            *(num_bytes / 1e6, MOST_RECORD_BYTES / 1e6, directory),
        )
        return
    try:
        run = read_run(directory)
        page = render_page(run, summarise_run(run))
    except ConfigError as error:
        _LOG.info("the trackers get no page of the run: %s", error)
    except Exception as error:  # noqa: BLE001 - a page is worth less than the end of a run
        _LOG.warning("the trackers get no page of the run: %r", error)
    else:
        trackers.log_page(page)


def embedded(samples: Samples, most_bytes: int, token_bytes: int = _TOKEN_BYTES) -> dict[str, Any]:
    """Return the newest samples, their texts and tokens (base64) at most ``most_bytes`` together.

    ``token_bytes`` of these are for tokens, the rest is for texts; tokens also get what texts do not use.
    ``left_out`` is the number of older samples that are not in the page.
    """
    kinds = (samples.texts, samples.tokens)
    texts, tokens = ([base64.b64encode(chunk).decode() for chunk in own.packed()] for own in kinds)
    first = _newest_within(texts, most_bytes - min(token_bytes, sum(map(len, tokens))))
    left = most_bytes - sum(map(len, texts[first:]))
    first_tokens = max(first, _newest_within(tokens, left))
    columns = {name: values[first * CHUNK :] for name, values in samples.columns.items()}
    return {
        "version": "",
        "columns": base64.b64encode(deflated(columns)).decode(),
        "names": samples.names,
        "chunk_size": CHUNK,
        "texts": texts[first:],
        "tokens": [None] * (first_tokens - first) + tokens[first_tokens:],
        "left_out": first * CHUNK,
    }


def _newest_within(chunks: Sequence[str], most_bytes: int) -> int:
    """Return the first of the newest chunks that have at most ``most_bytes`` together; one at least."""
    total, first = 0, len(chunks)
    while first and (first == len(chunks) or total + len(chunks[first - 1]) <= most_bytes):
        first -= 1
        total += len(chunks[first])
    return first


def payload(
    run: RunRecord,
    result: Mapping[str, Any],
    metrics: Iterable[Mapping[str, float]],
    spans: Iterable[Sequence[Any]],
) -> dict[str, Any]:
    """Return what the page shows besides samples.

    ``metrics``: lines as ``charted`` returns them; ``spans``: as ``span`` does.
    """
    former = former_names(run.config)
    rows = join_lines(metrics, former)
    steps = sorted(rows)
    alarms = [*_without_signal(rows, result), *(e for e in run.events if e["kind"] in ALARM_KINDS)]
    shown = ("tasks", "turnover", "influence", "constraints", "stages", "events")
    return {
        "name": run.name,
        "subtitle": _subtitle(run, steps),
        "tasks": list(run.evaluations),
        "alarm_kinds": list(ALARM_KINDS),
        "alarms": alarms,
        "result": {name: result[name] for name in shown},
        "tiles": _tiles(run, result, rows, alarms),
        "sections": list(_SECTIONS.items()),
        "charts": [*_held_out(run), *_charts(rows), *_limits(run)],
        "gradients": _gradients(rows),
        "spans": _newest([stage, former.get(task, task), *rest] for stage, task, *rest in spans),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100),
        "machine": read_machine(run.directory),
    }


def charted(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl`` that a chart shows, and its step."""
    found: dict[str, float] = {"step": int(line["step"])}
    for key, value in line.items():
        if value is not None and key != "step" and _is_charted(key):
            found[key] = float(f"{float(value):.5g}")
    return found


def _is_charted(key: str) -> bool:
    area, _, rest = key.partition("/")
    if area == "task":
        name = rest.partition("/")[2]
        return name in _TASK_CHARTS or name == "grad_norm" or name.startswith(("multiplier/", "cosine/"))
    if key in _RUN_CHARTS or _GPU.fullmatch(key):
        return True
    return area == "time" and rest.removesuffix("_s") in _STAGE_TIMES


def span(line: Mapping[str, Any]) -> list[Any]:
    """Return a line of ``timeline.jsonl`` as stage, task, step, start and end."""
    numbers = (round(float(line["start"]), 4), round(float(line["end"]), 4))
    return [str(line["stage"]), str(line["task"]), int(line["step"]), *numbers]


def _newest(spans: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the spans of the newest steps: whole steps, unless one alone has too many."""
    by_step: dict[int, list[Sequence[Any]]] = {}
    for one in spans:
        by_step.setdefault(one[2], []).append(one)
    found: list[Sequence[Any]] = []
    for step in sorted(by_step, reverse=True)[:_SPANS_OF_STEPS]:
        if found and len(found) + len(by_step[step]) > _MOST_SPANS:
            break
        found = by_step[step][:_MOST_SPANS] + found
    return found


def _subtitle(run: RunRecord, steps: Sequence[int]) -> str:
    planned = run.config.get("max_steps")
    model = run.config.get("model")
    name = model.get("name_or_path") if isinstance(model, Mapping) else ""
    done = f"step {steps[-1] if steps else 0}" + (f" of {planned}" if planned else "")
    return " · ".join(part for part in (done, str(name or "")) if part)


def _without_signal(
    rows: Mapping[int, Mapping[str, float]], result: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the tasks that are no better and whose groups gave hardly a gradient in the later half."""
    found = []
    for task, row in result["tasks"].items():
        key = f"task/{task}/informative_rate"
        steps = [step for step in sorted(rows) if key in rows[step]]
        late = [rows[step] for step in steps[len(steps) // 2 :]]
        if len(late) < _FEWEST_STEPS or row["verdict"] == "better":
            continue
        rate = statistics.fmean(own[key] for own in late)
        if rate >= _HARDLY:
            continue
        rewards = [own[name] for own in late if (name := f"task/{task}/reward_mean") in own]
        if not rewards:  # it learns from answers or a teacher
            continue
        reason = (
            f"in its last {len(late)} steps {rate:.1%} of its groups had rewards that differ "
            f"(mean reward {statistics.fmean(rewards):.3g}), so it "
            "gave hardly a gradient: it is too hard, or solved, or its reward does not tell responses apart"
        )
        found.append(
            {"step": steps[-1], "source": "no signal", "kind": "no signal", "task": task, "reason": reason}
        )
    return found


def _tiles(
    run: RunRecord,
    result: Mapping[str, Any],
    rows: Mapping[int, Mapping[str, float]],
    alarms: Sequence[Mapping[str, Any]],
) -> list[list[Any]]:
    """Return the tiles at the top of the page: name, number and remark of each."""
    verdicts = [row["verdict"] for row in result["tasks"].values()]
    seconds = [row["time/step_s"] for row in rows.values() if "time/step_s" in row]
    last = max(rows, default=0)
    left = f"of {run.config['max_steps']}" if run.config.get("max_steps") else ""
    sources = ", ".join(dict.fromkeys(str(event["source"]) for event in alarms))
    found: list[list[Any]] = [
        ["steps", last, left],
        ["tasks better", verdicts.count("better"), f"of {len(verdicts)}, held out"],
        ["tasks worse", verdicts.count("worse"), f"{verdicts.count('unknown')} without a verdict"],
        ["warnings and alarms", len(alarms), sources],
    ]
    if seconds:
        typical = float(f"{statistics.median(seconds):.3g}")
        found.append(["seconds a step", typical, f"median; {duration(sum(seconds))} in the steps shown"])
    return found


def _held_out(run: RunRecord) -> list[dict[str, Any]]:
    """Return the chart of held-out means with 95 % intervals (normal)."""
    steps = sorted({evaluation.step for history in run.evaluations.values() for evaluation in history})
    lines = []
    for task, history in run.evaluations.items():
        own = {evaluation.step: (evaluation.mean, 1.96 * evaluation.error) for evaluation in history}
        sides = {"y": 0, "low": -1, "high": 1}
        ends = {
            side: [
                rounded(own[step][0] + (sign * own[step][1] if sign else 0)) if step in own else None
                for step in steps
            ]
            for side, sign in sides.items()
        }
        lines.append({"name": task, **ends})
    note = "mean of the primary metric, 95 % interval"
    return [_chart("held-out", "learning", "Held out", note, steps, lines)]


def _charts(rows: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    names: dict[str, None] = {name: None for row in rows.values() for name in row if name != "step"}
    found = []
    for metric, (section, title, note) in _TASK_CHARTS.items():
        parts = (name.split("/") for name in names)
        own = {part[1]: "/".join(part) for part in parts if part[0] == "task" and part[2:] == [metric]}
        found.append(_curves(rows, own, metric, section, title, note))
    multipliers = {" · ".join(n.split("/")[1::2]): n for n in names if "/multiplier/" in n}
    note = "Lagrange multiplier after the step before"
    found.append(_curves(rows, multipliers, "multiplier", "constraints", "Multipliers", note, chips=True))
    for metric, (section, title, note) in _RUN_CHARTS.items():
        found.append(_curves(rows, {title: metric} if metric in names else {}, metric, section, title, note))
    gpus = {f"GPU {match[1]}": name for name in sorted(names) if (match := _GPU.fullmatch(name))}
    found.append(_curves(rows, gpus, "gpus", "speed", "GPUs", "% of a second in use", chips=True))
    stages = {stage: f"time/{stage}_s" for stage in _STAGE_TIMES if f"time/{stage}_s" in names}
    note = "stages that overlap add to more than the step"
    found.append(_curves(rows, stages, "stages", "speed", "Seconds per stage", note, chips=True))
    return [chart for chart in found if chart["lines"]]


def _curves(
    rows: Mapping[int, Mapping[str, float]],
    names: Mapping[str, str],
    metric: str,
    section: str,
    title: str,
    note: str,
    *,
    chips: bool = False,
) -> dict[str, Any]:
    """Return a chart of a line per title in ``names`` (title -> metric)."""
    steps = [step for step in sorted(rows) if any(name in rows[step] for name in names.values())]
    stride = max(1, math.ceil(len(steps) / _MOST_POINTS))
    blocks = [steps[at : at + stride] for at in range(0, len(steps), stride)]
    lines = []
    for name, key in names.items():
        found = [[rows[step][key] for step in block if key in rows[step]] for block in blocks]
        lines.append({"name": name, "y": [rounded(statistics.fmean(own)) if own else None for own in found]})
    if stride > 1:
        note += f"{'; ' if note else ''}each point is the mean of {stride} steps"
    chart = _chart(metric.replace("/", "-"), section, title, note, [block[-1] for block in blocks], lines)
    return {**chart, "chips": chips}


def _gradients(rows: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return mean norms of the tasks' gradients, and the mean of each cosine with its standard error."""
    compared = [row for _, row in sorted(rows.items()) if any("/cosine/" in name for name in row)]
    found: dict[str, list[float]] = {}
    for row in compared:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    norms = {
        name.split("/")[1]: rounded(statistics.fmean(values))
        for name, values in found.items()
        if name.startswith("task/") and name.endswith("/grad_norm")
    }
    cosines: dict[str, dict[str, list[float | None]]] = {task: {} for task in norms}
    for name, values in found.items():
        if name.startswith("task/") and "/cosine/" in name:
            _, task, _, other = name.split("/", 3)
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
            cosines.setdefault(task, {})[other] = [rounded(statistics.fmean(values)), rounded(error)]
    return {"steps": len(compared), "norms": norms, "cosines": cosines}


def _limits(run: RunRecord) -> list[dict[str, Any]]:
    """Return a chart per constraint with a limit: rate and upper bound of each evaluation, and the limit."""
    found: list[dict[str, Any]] = []
    for task, history in run.evaluations.items():
        limits = {key for evaluation in history for key in evaluation.metrics if key.endswith("/limit")}
        for key in sorted(limits):
            prefix = key.removesuffix("limit")
            name = prefix.removeprefix("constraint/").removesuffix("/")
            kept = {"rate": "violation_rate", "upper bound": "upper_bound", "limit": "limit"}
            own = [evaluation for evaluation in history if key in evaluation.metrics]
            lines = [
                {
                    "name": title,
                    "y": [rounded(evaluation.metrics.get(prefix + metric)) for evaluation in own],
                    "dashed": title == "limit",
                }
                for title, metric in kept.items()
            ]
            title, note = f"{task}: {name}", "held-out rate of violations, one-sided 95 % upper bound"
            steps = [evaluation.step for evaluation in own]
            chart = _chart(f"limit-{len(found)}", "constraints", title, note, steps, lines)
            found.append({**chart, "chips": True})
    return found


def _chart(
    name: str, section: str, title: str, note: str, steps: Sequence[int], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {"id": name, "section": section, "title": title, "note": note, "x": steps, "lines": lines}
