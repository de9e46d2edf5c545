"""The records of a run: files of JSON lines in its output directory, and the tracker that appends to them.

A checkpoint holds the length of every file. A run that resumes from it cuts the files to these lengths and
repeats the later steps: a kill at any moment neither loses nor repeats a line. A record that cannot be
written ends the run.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import disk_errors
from multitask_rl.records import (
    Event,
    Failure,
    NotApplicable,
    Prompt,
    RewardResult,
    Rollout,
    SamplingParams,
    Score,
    Scored,
    Statistic,
    TaskEvaluation,
    TokenRecord,
    Turn,
    Verdict,
)
from multitask_rl.tracking.base import Tracker
from multitask_rl.tracking.machine import write_machine

logger = logging.getLogger(__name__)

RECORDS = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl", "evaluations.jsonl", "timeline.jsonl")


def _plain(value: Any) -> Any:
    """Return ``value`` with only JSON types in it; unknown objects become their ``str``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int):  # of a subclass, such as an enum: the plain value
        return str.__str__(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _plain(value.item())
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def dump_line(record: Mapping[str, Any]) -> str:
    """Return ``record`` as one line of strict JSON with its newline; a number that is not finite is null."""
    try:
        return _ENCODER.encode(record).decode() + "\n"
    except (TypeError, ValueError, RecursionError):  # a key that is no text, half of a surrogate pair
        return json.dumps(_plain(record), allow_nan=False) + "\n"


def load_line(line: bytes) -> Any:
    """Return the value of a line of JSON; bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: the line is no JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(line)
    except ValueError:  # it is stricter: half of a surrogate pair, NaN, 1e400
        return json.loads(line.decode("utf-8", "replace"))


def whole_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records in ``lines``; a line that is no JSON object, as a crash leaves one, is left out."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(record := load_line(line), dict):
                yield record


def _result_to_dict(result: RewardResult | Verdict) -> dict[str, Any]:
    if isinstance(result, Score):
        return {"value": result.value, "components": dict(result.components)}
    if isinstance(result, NotApplicable):
        return {"not_applicable": True}
    if isinstance(result, Failure):
        return {"failure": asdict(result)}
    return {key: value for key, value in asdict(result).items() if key != "turn" or value}


def _tokens(tokens: TokenRecord) -> dict[str, Any]:
    # ``asdict`` copies every number
    return {"texts": tokens.texts, "logprobs": tokens.logprobs, "advantages": tokens.advantages}


@lru_cache(256)
def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    # one value for all responses of a task; ``asdict`` takes longer than the rest of a line
    return asdict(sampling)


def scored_to_dict(scored: Scored, step: int) -> dict[str, Any]:
    """Return everything that scoring again or reading needs."""
    rollout = scored.rollout
    prompt = rollout.prompt
    return {
        "step": step,
        "task": prompt.task,
        "prompt_id": prompt.prompt_id,
        "draw": prompt.draw,
        "sample": rollout.sample,
        "attempt": rollout.attempt,
        "prompt": prompt.text,
        "response": rollout.response,
        "reward": scored.reward,
        "breakdown": {name: _result_to_dict(result) for name, result in scored.breakdown.items()},
        "cost": scored.cost,
        "failure": asdict(scored.failure) if scored.failure else None,
        "finish_reason": rollout.finish_reason,
        "rejected": rollout.rejected,
        "verdicts": {name: _result_to_dict(verdict) for name, verdict in rollout.verdicts.items()},
        "policy_version": rollout.policy_version,
        "sampling": dict(_sampling(rollout.sampling)),
        "row": dict(prompt.row),
        "prompt_ids": list(prompt.prompt_ids),
        "response_ids": list(rollout.response_ids),
        **({"tokens": _tokens(scored.tokens)} if scored.tokens else {}),
        # an episode, turn by turn
        **({"turns": [asdict(t) for t in rollout.turns], "earned": rollout.earned} if rollout.turns else {}),
        **({"token_limit": rollout.token_limit} if rollout.token_limit else {}),
        **({"world_s": rollout.world_s} if rollout.world_s else {}),
        **({"world_failures": dict(rollout.world_failures)} if rollout.world_failures else {}),
    }


def rollout_from_dict(line: Mapping[str, Any]) -> Rollout:
    """Rebuild the rollout of a line of ``rollouts.jsonl``: unscored, unjudged, without log-probabilities.

    Raises:
        KeyError: the line is not one that ``scored_to_dict`` wrote.
    """
    prompt = Prompt(
        task=line["task"],
        prompt_id=line["prompt_id"],
        draw=line["draw"],
        row=line["row"],
        text=line["prompt"],
        prompt_ids=list(line["prompt_ids"]),
    )
    return Rollout(
        prompt=prompt,
        sample=line["sample"],
        attempt=line["attempt"],
        response_ids=list(line["response_ids"]),
        response=line["response"],
        finish_reason=line["finish_reason"],
        policy_version=line["policy_version"],
        sampling=SamplingParams.from_json(line["sampling"]),
        turns=[Turn(**turn) for turn in line.get("turns", ())],
        earned=line.get("earned"),
        token_limit=line.get("token_limit", 0),
        world_s=line.get("world_s", 0.0),
        world_failures=line.get("world_failures", {}),
    )


class RecordFile:
    """Appends lines to the file ``path``; the first line opens it, and makes its directory if missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Write ``lines``, each with its newline, before this returns; CheckpointError if that fails."""
        data = "".join(lines).encode()
        with disk_errors(str(self._path)):
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            while data:
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def append_evaluations(file: Path, evaluations: Mapping[str, TaskEvaluation]) -> None:
    """Append one line per task to ``evaluations.jsonl``.

    Raises:
        CheckpointError: it cannot be written.
    """
    with closing(RecordFile(file)) as record:
        record.append(dump_line(evaluation_row(evaluation)) for evaluation in evaluations.values())


def repeat_evaluations(file: Path, step: int, former: Mapping[str, str]) -> None:
    """After a rollback to ``step``, append each task's last evaluation up to ``step`` once more.

    A line replaces the earlier lines of its task at the same or a later step. So readers drop the evaluations
    that the rollback undid. ``former``: former name -> name of the renamed tasks, as readers know them.

    Raises:
        CheckpointError: it cannot be written.
    """
    with disk_errors(str(file)):
        lines = file.read_bytes().splitlines() if file.exists() else []
    kept: dict[str, list[dict[str, Any]]] = {}
    for row in whole_records(lines):
        own = kept.setdefault(former.get(row["task"], row["task"]), [])
        while own and own[-1]["step"] >= row["step"]:
            own.pop()
        own.append(row)
    newest = [[row for row in own if row["step"] <= step][-1:] for own in kept.values()]
    with closing(RecordFile(file)) as record:
        record.append(map(dump_line, itertools.chain(*newest)))


def evaluation_row(evaluation: TaskEvaluation) -> dict[str, Any]:
    """Return the evaluation as the data of a line of ``evaluations.jsonl``."""
    low, high = evaluation.primary.interval
    return {
        "step": evaluation.step,
        "task": evaluation.task,
        "metric": evaluation.metric,
        "policy_version": evaluation.policy_version,
        "prompts": evaluation.prompts,
        "definitions": evaluation.definitions,
        "samples": evaluation.num_samples,
        **_numbers(evaluation.primary),
        "low": low,
        "high": high,
        "metrics": {k: _numbers(s) for k, s in evaluation.metrics.items()},
        "values": evaluation.primary.values,
    }


def _numbers(statistic: Statistic) -> dict[str, Any]:
    return {
        "mean": statistic.mean,
        "n": statistic.n,
        "error": statistic.error,
        "direction": statistic.direction.value,
    }


class JsonlTracker(Tracker):
    """Appends to ``metrics.jsonl``, ``events.jsonl`` and ``rollouts.jsonl`` in ``output_dir``."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        self._directory = output_dir
        self._open: dict[str, RecordFile] = {}

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        if name not in self._open:
            self._open[name] = RecordFile(self._directory / name)
        self._open[name].append(dump_line(record) for record in records)

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Write ``machine.json``."""
        write_machine(self._directory)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line."""
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_event(self, event: Event) -> None:
        """Append one line."""
        self._append("events.jsonl", [asdict(event)])

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Append one line per rollout."""
        if scored:
            self._append("rollouts.jsonl", (scored_to_dict(item, step) for item in scored))

    def finish(self, status: str) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


def record_lengths(directory: Path) -> dict[str, int]:
    """Return the bytes of every record file, after writing it to the disk; CheckpointError if that fails."""
    lengths = {}
    for path in (directory / name for name in RECORDS):
        with disk_errors(str(path)), suppress(FileNotFoundError), path.open("rb") as stream:
            os.fsync(stream.fileno())
            lengths[path.name] = path.stat().st_size
    return lengths


def cut_records(
    directory: Path, lengths: Mapping[str, int], keep: Callable[[bytes], bool] | None = None
) -> None:
    """Cut every record file to its length, remove a file without one; CheckpointError if that fails.

    ``keep`` says which of the lines that would be cut from ``events.jsonl`` stay.
    """
    for path in (directory / name for name in RECORDS):
        length, size = lengths.get(path.name, 0), path.stat().st_size if path.exists() else 0
        if size < length:
            logger.warning(
                "%s lacks %d of the %d bytes it had when the run was saved", path, length - size, length
            )
        with disk_errors(str(path)):
            if 0 < size < length:  # the next line would continue one that lost its end
                size = length = path.read_bytes().rfind(b"\n") + 1
                os.truncate(path, size)
            kept = b""
            if keep is not None and path.name == "events.jsonl" and size > length:
                tail = path.read_bytes()[length:].splitlines(keepends=True)
                kept = b"".join(line for line in tail if line.endswith(b"\n") and keep(line))
            if length == 0 and not kept:
                path.unlink(missing_ok=True)
            elif size > length + len(kept):
                if kept:  # a kill in between must not lose them
                    aside = path.with_name(f"{path.name}.new")
                    aside.write_bytes(path.read_bytes()[:length] + kept)
                    os.replace(aside, path)
                else:
                    os.truncate(path, length)


def set_records_aside(directory: Path) -> None:
    """Move the record files of a former run to ``previous-<n>/``; remove them if it made no step.

    Raises:
        CheckpointError: a file cannot be moved.
    """
    paths = [path for name in RECORDS if (path := directory / name).exists()]
    if not any(map(_has_steps, paths)):
        cut_records(directory, {})
        return
    index = 1
    while (target := directory / f"previous-{index}").exists():
        index += 1
    with disk_errors(str(target)):
        target.mkdir()
        for path in paths:
            shutil.move(path, target / path.name)
    logger.info("a new run begins: the records of a former one are kept in %s", target)


def _has_steps(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(isinstance(row.get("step"), int) and row["step"] > 0 for row in whole_records(lines))
