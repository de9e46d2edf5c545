"""``multitask-rl eval``: a model, or two side by side, on the held-out prompts of a tasks file; or a run.

A model is a directory of transformers, a run (its newest checkpoint), a checkpoint, adapters (merged into the
model that they name) or a hub id. Both models answer the same prompts with the same seeds, so the difference
is paired. A run or its checkpoint is sampled as the run is, unless keys say otherwise; a second model as the
first, or as its own run if the first has none.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.cli.comparison import compare, group_runs, render_comparison
from multitask_rl.cli.train import OTHER_SOURCES, compose_and_run, evaluate
from multitask_rl.config.run import RECORD, RunConfig, recorded_config
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.config.trust import TRUST, refuse_code_in
from multitask_rl.errors import ConfigError
from multitask_rl.records import SamplingSettings
from multitask_rl.run.checkpoint import model_directory, telling_of_removal
from multitask_rl.statistics.evaluations import Evaluations
from multitask_rl.tracking.jsonl import append_evaluations, dump_line, evaluation_row
from multitask_rl.tracking.reading import read_run

if TYPE_CHECKING:
    from multitask_rl.step.task_state import AnchorState

_TOLD = ("max_new_tokens", "top_p", "top_k")
_OPTIONS = ("--other", "--split", "--samples", "--json")


def main(arguments: list[str]) -> int:
    """Evaluate; without MODEL in front, the keys name a run (``cli/train.py``).

    Raises:
        ConfigError: a model or a setting cannot be used.
    """
    is_model = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("-")
    if not is_model and not {"-h", "--help"} & set(arguments):
        for option in (argument.partition("=")[0] for argument in arguments):
            if option in _OPTIONS:
                right = f"multitask-rl eval RUN TASKS {option}"
                raise ConfigError(f"{option} needs a model and a tasks file: {right}")
        return evaluate(arguments)
    parser = argparse.ArgumentParser(
        prog="multitask-rl eval",
        usage="multitask-rl eval MODEL TASKS [options] [key=value ...]\n"
        "       multitask-rl eval output_dir=RUN [key=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Keys as for train, for example eval.temperature=0 (greedy), "
        "eval.num_prompts=1000, rollout.engine=vllm.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="directory of a model, adapters, run or checkpoint, or a hub id")
    parser.add_argument("tasks", help="tasks file")
    parser.add_argument("--other", default="", help="a second model: its difference to the first, per task")
    parser.add_argument("--split", default="", help="eval_split of every task but anchors, such as test")
    parser.add_argument("--samples", type=int, help="eval_samples of every task: pass@k, maj@k, avg@k")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options, overrides = parser.parse_known_args(arguments)
    for argument in overrides:
        if argument.startswith("--") and (near := suggest(argument.partition("=")[0], _OPTIONS)):
            raise ConfigError(f"unknown option {argument!r}{near} (options: {', '.join(_OPTIONS)})")
    from multitask_rl.models.actor import read_settings  # heavy: torch

    if TRUST not in overrides:
        refuse_code_in(options.tasks)
    if options.other == options.model:
        raise ConfigError(f"--other: {options.other} is the first model too; give another one")
    names = [options.model, *([options.other] if options.other else [])]
    directories = [model_directory(name) for name in names]
    has_own = any(key.startswith("+") or key in OTHER_SOURCES for key in overrides)  # a configuration
    run = None if has_own else next(filter(None, map(_run_of, names)), None)
    given = {override.partition("=")[0].lstrip("+") for override in overrides}

    def evaluate_models(config: RunConfig) -> None:
        config = config if run is None else _sampled_as(run, config, given)
        with contextlib.ExitStack() as stack:
            for above in (Path(directory).parent for directory in directories):
                if (above / "manifest.json").is_file():
                    stack.enter_context(telling_of_removal(above))
            for directory in directories[1:]:  # the first model may take hours
                read_settings(replace(config.model, name_or_path=directory))
            _evaluate(config, options, dict(zip(names, directories, strict=True)))

    compose_and_run(overrides, "eval", evaluate_models)
    return 0


def _run_of(model: str) -> Path | None:
    """Return the directory of the run that ``model`` is, or whose checkpoint or actor it is."""
    if not Path(model).is_dir():
        return None
    path = Path(model).resolve()
    places = (path, *path.parents[:3])
    return next((p for p in places if (p / RECORD).is_file() and (p / "checkpoints").is_dir()), None)


def _sampled_as(run: Path, config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return ``config`` with the sampling of ``run``, but for the keys in ``given``; say so."""
    recorded = recorded_config(run)
    names = [field.name for field in fields(SamplingSettings) if f"rollout.{field.name}" not in given]
    values = {name: value for name, value in asdict(recorded.rollout).items() if name in names}
    config = replace(config, rollout=replace(config.rollout, **values))
    if "eval.temperature" not in given:
        config = replace(config, eval=replace(config.eval, temperature=recorded.eval.temperature))
    keys = {f"rollout.{name}": value for name, value in asdict(config.rollout).items() if name in _TOLD}
    shown = {**keys, "eval.temperature": config.eval.temperature}
    told = ", ".join(f"{key}={value}" for key, value in shown.items())
    print(f"sampled as in {run}: {told}; keys override it", file=sys.stderr)
    return config


def _evaluate(config: RunConfig, options: argparse.Namespace, models: Mapping[str, str]) -> None:
    config = replace(
        config,
        tasks_file=options.tasks,
        guard=replace(config.guard, enabled=False),
        checkpoint=replace(config.checkpoint, resume="never"),
        tracking=replace(config.tracking, trackers=[]),
    )
    config = replace(config, tasks={**(config.tasks or {}), **_task_keys(config, options)})
    anchors: dict[tuple[str, int], AnchorState] = {}
    refused: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="multitask_rl_eval_") as folder:
        results: dict[str, Evaluations] = {}
        try:
            for number, (name, directory) in enumerate(models.items()):
                model = replace(config.model, name_or_path=directory)
                own = Path(folder) / str(number)
                results[name] = _of_model(replace(config, model=model, output_dir=str(own)), anchors, refused)
                append_evaluations(own / "evaluations.jsonl", results[name])
        except BaseException:
            if results:  # the first model's, which may have taken hours
                _show(results, None, options)
            raise
        compared = None
        if len(models) > 1:
            runs = [read_run(Path(folder) / str(i), name) for i, name in enumerate(models)]
            (compared,) = compare(group_runs(runs))["comparisons"]
    _show(results, compared, options)


def _show(
    results: Mapping[str, Evaluations], compared: Mapping[str, Any] | None, options: argparse.Namespace
) -> None:
    """Print the evaluations by model, and their comparison if there is one."""
    if options.json:
        rows = {m: {n: evaluation_row(e) for n, e in own.items()} for m, own in results.items()}
        sys.stdout.write(dump_line({"models": rows, "difference": compared}))
        return
    for name, own_results in results.items():
        print(f"{name}:")
        print(own_results)
        print()
    if compared is not None:
        sys.stdout.write(render_comparison({**compared, "config": None}) + "\n")
        if apart := [name for name, row in compared["tasks"].items() if not row["paired"]]:
            print(f"\nnote: the models had other prompts or texts, so not paired: {', '.join(apart)}")


def _task_keys(config: RunConfig, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return by task its keys in ``config``, and what this command sets."""
    found: dict[str, dict[str, Any]] = {}
    for name, spec in load_tasks(options.tasks, config.tasks or None).items():
        own = dict((config.tasks or {}).get(name, {}))
        if options.samples is not None:
            own["eval_samples"] = options.samples
        if spec.kind == "anchor":  # a model is its own beginning here: its KL would be 0
            own["algorithm_config"] = {**own.get("algorithm_config", {}), "kl": False}
        elif options.split:
            own |= {"eval_split": options.split, "evaluation_only": True}
        found[name] = own
    return found


def _of_model(
    config: RunConfig, anchors: dict[tuple[str, int], AnchorState], refused: dict[str, dict[str, float]]
) -> Evaluations:
    """Evaluate a model, the second one on what the first one has left in ``anchors`` and ``refused``.

    ``anchors``: by task and hash of the vocabulary the texts of an anchor; a model with another vocabulary
    samples its own. ``refused``: by task the values of rejected responses. ``turnover`` is left out where it
    would compare a model with itself: of the first model, and of one whose chat template makes other prompts.
    """
    from multitask_rl.trainer import Trainer  # heavy: torch, transformers

    with contextlib.closing(Trainer.from_config(config)) as trainer:
        vocabulary = hash(frozenset(trainer.actor.tokenizer.get_vocab().items()))
        tasks = {name: task for name, task in trainer.tasks.items() if task.spec.kind == "anchor"}
        known = {name: anchors.get((name, vocabulary)) for name in tasks}
        prompts = {name: state.measured[-1:] for name, state in known.items() if state is not None}
        for name, state in known.items():
            if state is not None:
                tasks[name].anchor = state
        for name, task in trainer.tasks.items():
            task.metrics.load_state_dict(refused.get(name, {}))
        found = trainer.evaluate()
        for name, task in trainer.tasks.items():
            refused.setdefault(name, task.metrics.state_dict())
        for name, task in tasks.items():
            if known[name] is None:
                anchors[name, vocabulary] = task.anchor
            if prompts.get(name) != task.anchor.measured[-1:]:
                rest = {key: own for key, own in found[name].metrics.items() if key != "turnover"}
                found[name] = replace(found[name], metrics=rest)
        return found
