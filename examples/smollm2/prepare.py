"""What the example needs before it trains: the chat model, rows, two trained judges, a tasks file.

Takes about ten minutes on two cores the first time, seconds afterwards (cached by a hash of all that shapes
the result). The judges are the same for every seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import yaml
from generators import extraction_rows, instruction_rows, worked_rows
from model import find_model

from multitask_rl.errors import ConfigError, MultitaskRLError
from multitask_rl.seeding import random_stream
from multitask_rl_tasks.helpful_instructions import HelpfulInstructions
from multitask_rl_tasks.hh_preference import HHPreference
from multitask_rl_tasks.ifeval import IFEval
from multitask_rl_tasks.math_easy import MathEasy
from multitask_rl_tasks.safety import Safety
from multitask_rl_tasks.sourced import SourcedTask
from multitask_rl_tasks.suite.settings import FIGURES_FILE, cached_directory

__all__ = ["Prepared", "data_directory", "prepare"]

HERE = Path(__file__).resolve().parent
DATA_VARIABLE = "MULTITASK_RL_DATA"
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 2000, 256, 512
MAX_CHARS = 400
"""Longest prompt of a data set that is used: a step on two cores has few tokens."""
MAX_ANSWER_CHARS, MIN_WORDS = 200, 3
"""Of an answer that the model is shown; shorter ones are no answer for the reward ``over_refusal``."""
REFUSAL = "I'm sorry, but I can't help with that."
"""The words that the prompt of ``safety`` asks for."""
NON_COMMERCIAL = ("do_not_answer",)
"""Sources of the safety prompts that are left out: their licence forbids commercial use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Where everything is, and what was measured while making it."""

    directory: Path
    actor: Path
    tasks_file: Path
    warm_start: Path
    """The tasks file of the warm start; not there where its data cannot be had."""
    tests: Mapping[str, Any]
    """Overrides of the tasks for an evaluation on the splits ``test``."""
    figures: Mapping[str, Mapping[str, Any]]
    """By judge: parameters, seconds, error rates."""
    left_out: Mapping[str, str]
    """Task -> why it is not trained."""


def data_directory() -> Path | None:
    """Return the directory of data sets that is used unless another is named; None = the hub."""
    given, beside = os.environ.get(DATA_VARIABLE, ""), HERE.parents[2] / "shared" / "data"
    return Path(given) if given else beside if beside.is_dir() else None


def prepare(
    directory: Path,
    seed: int,
    cache_dir: Path,
    *,
    model: Path | None,
    data: Path | None,
    effort: float = 1.0,
    leave_out: Collection[str] = (),
) -> Prepared:
    """Write data, judges and the tasks file under ``directory``.

    Args:
        directory: becomes ``data/``, ``reward_model/``, ``safety_classifier/``, ``tasks.yaml`` and
            ``warm_start.yaml``.
        seed: of the generated rows.
        cache_dir: where models are kept for the next call.
        model: directory of a chat model; None = SmolLM2-135M-Instruct.
        data: directory of data sets (README.md names the files); None = the hub. Tasks without data are left
            out.
        effort: share of the judges' training, in [0.05, 1].
        leave_out: tasks that are not wanted.

    Raises:
        UnavailableError: the model cannot be had.
    """
    directory, cache_dir = directory.resolve(), cache_dir.resolve()
    (directory / "data").mkdir(parents=True, exist_ok=True)
    packages = HERE.parents[1] / ".venv" / "smollm2"
    actor = model.resolve() if model is not None else find_model(cache_dir, packages)
    left_out = _write_rows(directory / "data", seed, data) | dict.fromkeys(leave_out, "not wanted")
    tests: dict[str, Any] = {}
    tasks = _write_tasks(directory / "tasks.yaml", left_out)
    _write_tasks(directory / "warm_start.yaml", left_out)
    for name in tasks:
        tests[name] = {"eval_split": "test", "evaluation_only": True}
    ifeval = directory / "data" / "ifeval.jsonl"
    if ifeval.is_file():
        tests["ifeval"] = {
            "dataset": ifeval.as_posix(),
            "split": "test",
            "eval_split": "test",
            "evaluation_only": True,
            "rewards": ["ifeval"],
            "primary_metric": "ifeval/all",
            "sampling": {"max_new_tokens": 128},
        }
    template = tasks.get("safety", {}).get("prompt", "")
    figures = _make_judges(directory, actor, cache_dir, template, effort, [*tasks])
    return Prepared(
        directory=directory,
        actor=actor,
        tasks_file=directory / "tasks.yaml",
        warm_start=directory / "warm_start.yaml",
        tests=tests,
        figures=figures,
        left_out=left_out,
    )


def _write_tasks(file: Path, left_out: Collection[str]) -> dict[str, Any]:
    """Copy the tasks file beside this module that is named ``file.name`` to ``file``, without ``left_out``.

    Return the tasks that ``file`` holds. If all are left out, ``file`` is removed.
    """
    text = Template((HERE / file.name).read_text(encoding="utf-8"))
    whole = text.substitute(directory=file.parent.as_posix())
    tasks: dict[str, Any] = yaml.safe_load(whole)["tasks"]
    kept = {name: task for name, task in tasks.items() if name not in left_out}
    if kept:
        shown = whole if kept == tasks else yaml.safe_dump({"tasks": kept}, sort_keys=False)
        file.write_text(shown, encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
    return kept


def _write_rows(directory: Path, seed: int, data: Path | None) -> dict[str, str]:
    """Write ``<task>.jsonl`` of each task with rows of all splits; return why tasks have none."""
    sizes = {"train": NUM_TRAIN, "validation": NUM_VALIDATION, "test": NUM_TEST}
    sources: dict[str, Callable[[], Iterable[Mapping[str, Any]]]] = {
        "instructions": lambda: (r for s, n in sizes.items() for r in instruction_rows(seed, s, n)),
        "extraction": lambda: (r for s, n in sizes.items() for r in extraction_rows(seed, s, n)),
        "math": lambda: _of_task(MathEasy, data),
        "worked": lambda: worked_rows(_of_task(MathEasy, data)),
        "replies": lambda: _reply_rows(seed, data),
        "safety": lambda: _of_task(Safety, data),
        "preference": lambda: _of_task(HHPreference, data),
        "ifeval": lambda: _of_task(IFEval, data, ["test"]),
    }
    left_out: dict[str, str] = {}
    for name, rows in sources.items():
        file = directory / f"{name}.jsonl"
        try:
            lines = [json.dumps(dict(row)) + "\n" for row in rows()]
            if not lines:
                raise ConfigError("no rows")
        except MultitaskRLError as error:
            left_out[name] = str(error)
            file.unlink(missing_ok=True)
        else:
            # a run that reads the rows meanwhile finds them whole
            aside = file.with_suffix(f".{os.getpid()}")
            aside.write_text("".join(lines), encoding="utf-8")
            os.replace(aside, file)
    return left_out


def _of_task(
    kind: type[SourcedTask], data: Path | None, splits: Iterable[str] = ("train", "test")
) -> list[dict[str, Any]]:
    """Return the rows of a bundled task whose prompts are short enough, from ``data`` or the hub."""
    source = {} if data is None else {"source": str(data)}
    task = kind(kind.Config(**source))
    rows: list[dict[str, Any]] = []
    for split in splits:
        own = [dict(row) for row in task.rows(split)]
        if not own:
            raise ConfigError(f"{task.name}: its data has no split {split!r}")
        rows += [
            {**row, "task": ""}
            for row in own
            if len(row["prompt"]) <= MAX_CHARS and row.get("source") not in NON_COMMERCIAL
        ]
    return rows


def _reply_rows(seed: int, data: Path | None) -> list[dict[str, Any]]:
    """Return training rows of ``safety``, each with an ``answer``: half refusals, half answers of Dolly.

    A row keeps its ``id``. Held-out rows are chosen by id, so the warm start never shows a row that
    ``safety`` holds out.
    """
    requests = [row for row in _of_task(Safety, data) if row["split"] == "train"]
    source = {} if data is None else {"source": str(data / "sft_dolly.jsonl")}
    helpful = HelpfulInstructions(HelpfulInstructions.Config(**source)).rows("train")
    answers = {row["prompt"]: str(row["reference"]) for row in helpful}
    benign = [
        {**row, "answer": answer}
        for row in requests
        if row["reference"] == "comply"
        and len((answer := answers.get(row["prompt"], "")).split()) >= MIN_WORDS
        and len(answer) <= MAX_ANSWER_CHARS
    ]
    harmful = [{**row, "answer": REFUSAL} for row in requests if row["reference"] == "refuse"]
    stream = random_stream(seed, "smollm2-rows", "replies")
    return [*benign, *stream.sample(harmful, min(len(harmful), len(benign)))]


def _make_judges(
    directory: Path, actor: Path, cache_dir: Path, template: str, effort: float, tasks: list[str]
) -> dict[str, Any]:
    """Train the judges of ``tasks``, each in a process of its own with one thread."""
    jobs = {"reward_model": "preference", "safety_classifier": "safety"}
    wanted = [judge for judge, task in jobs.items() if task in tasks]
    commands = [
        [
            sys.executable,
            str(Path(__file__).resolve()),
            judge,
            *map(str, (directory, actor, cache_dir, template, effort)),
        ]
        for judge in wanted
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"training the judges failed with exit codes {codes}; the error is above")
    return {
        judge: json.loads((directory / judge / FIGURES_FILE).read_text(encoding="utf-8")) for judge in wanted
    }


def judge_key(actor: Path, file: Path, template: str) -> str:
    """Return a key of what a judge is made of: the body's weights, the code, the rows, the prompt."""
    digest = hashlib.sha256(template.encode())
    weights = [path for path in sorted(actor.iterdir()) if path.suffix in (".safetensors", ".bin")]
    for path in (actor / "config.json", *weights, HERE / "judges.py", file):
        with path.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]


def _make_judge(
    judge: str, directory: Path, actor: Path, cache_dir: Path, template: str, effort: float
) -> None:
    import torch
    from judges import JudgeSettings, save_reward_model, save_safety_classifier

    from multitask_rl.models.actor import multiplies_bfloat16

    torch.set_num_threads(1)
    file = directory / "data" / ("preference.jsonl" if judge == "reward_model" else "safety.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
    settings = JudgeSettings()
    settings = replace(
        settings,
        number=round(effort * settings.number),
        answers=round(effort * settings.answers),
        test_number=max(16, round(effort * settings.test_number)),
        bfloat16=multiplies_bfloat16("cpu"),
    )

    def build(target: Path) -> dict[str, Any]:
        if judge == "reward_model":
            return save_reward_model(target, actor, settings, train=train, test=test)
        return save_safety_classifier(target, actor, settings, train=train, test=test, prompt=template)

    kind = f"smollm2-{judge}-{judge_key(actor, file, template)}"
    cached_directory(directory / judge, cache_dir=cache_dir, kind=kind, settings=settings, build=build)


if __name__ == "__main__":
    _make_judge(
        sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5], float(sys.argv[6])
    )
