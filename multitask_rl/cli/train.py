"""``train`` and ``eval``: the only place that knows Hydra.

The schema is ``RunConfig``; YAML files (``--config-dir configs +experiment=NAME``) and the command line
override it. Hydra's tree is turned into dataclasses once, here; nothing below sees it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multitask_rl.boundary.printable import EscapingFilter
from multitask_rl.boundary.redaction import redacted_keys
from multitask_rl.config.run import RECORD, RunConfig, recorded_config
from multitask_rl.config.schema.build import MOVED, build_dataclass, suggest
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.trust import TRUST, refuse_code_in
from multitask_rl.errors import ConfigError, path_errors
from multitask_rl.run.interrupts import stopping_on_signals

__all__ = ["compose_and_run", "config_keys", "evaluate", "train"]

logger = logging.getLogger(__name__)

_USAGE = """\
usage: multitask-rl {command} [--config-dir DIR] [--multirun] [--trust] [key=value ...]

  multitask-rl {command} tasks_file=tasks.yaml model.name_or_path=MODEL output_dir=runs/first
  multitask-rl {command} --config-dir configs +experiment=NAME tasks.math.weight=2
  multitask-rl {command} output_dir=runs/first       the recorded configuration of a run; keys override it
  multitask-rl train --multirun seed=0,1,2 ...      one run per value, below multirun/ or output_dir/
  multitask-rl {command} --cfg job ...               print the configuration and stop
  multitask-rl {command} --trust ...                 allow code named by a file outside the working directory

Every key with its meaning, range and default: docs/configuration.md. Hydra's own options: --hydra-help."""

_OPTIONS_WITH_VALUE = {
    *(
        "--cfg",
        "-c",
        "--package",
        "-p",
        "--config-path",
        "-cp",
        "--config-name",
        "-cn",
        "--config-dir",
        "-cd",
    ),
    *("--experimental-rerun", "--info", "-i"),
}
_OPTIONS = _OPTIONS_WITH_VALUE | {
    *(
        "--hydra-help",
        "--version",
        "--resolve",
        "--run",
        "-r",
        "--multirun",
        "-m",
        "--shell-completion",
        "-sc",
    )
}
_OTHER_SOURCES = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--multirun", "-m")
_SWEEP_DIR = "hydra.sweep.dir=multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"
_NO_COPY = "hydra.output_subdir=null"
"""Hydra's copy of the configuration would hold the secrets that ``config.yaml`` leaves out."""
_OF_A_RUN = ("hydra.run.dir=${output_dir}", _NO_COPY, _SWEEP_DIR)
_OF_A_LOOK = (
    *("hydra.run.dir=.", _NO_COPY, _SWEEP_DIR),
    *("hydra.job_logging.root.handlers=[console]", "~hydra.job_logging.handlers.file"),
)
"""Only training writes: neither the record nor the log of a run is touched by who looks at it."""


def train(arguments: list[str]) -> int:
    """Train a run; prints the last evaluation."""
    with stopping_on_signals():
        return compose_and_run(arguments, "train", _train)


def evaluate(arguments: list[str]) -> int:
    """Evaluate the newest checkpoint of a run (or the untrained actor) and print a table."""
    return compose_and_run(arguments, "eval", _evaluate)


def compose_and_run(arguments: list[str], command: str, action: Callable[[RunConfig], None]) -> int:
    """Compose the configuration from ``arguments`` with Hydra and call ``action`` with it, once per run.

    Raises:
        ConfigError: the configuration cannot be composed, or says what a run cannot be.
    """
    if {"-h", "--help"} & set(arguments):
        print(_USAGE.format(command=command))
        return 0
    trusts = TRUST in arguments
    arguments = [argument for argument in arguments if argument != TRUST]
    ConfigStore.instance().store(name="run", node=_base(arguments, trusts))

    failures: list[Exception] = []

    def job(tree: DictConfig) -> None:
        for handler in logging.getLogger().handlers:
            handler.addFilter(EscapingFilter())  # what Hydra set up shows what models and data say
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            # the copy that Hydra keeps of a sweep's configuration holds its secrets
            Path(HydraConfig.get().sweep.dir, "multirun.yaml").unlink(missing_ok=True)
        try:
            try:
                config = _to_config(tree)
            except OmegaConfBaseException as error:
                raise ConfigError(_explain(error)) from error
            if config.tasks_file and not trusts:
                refuse_code_in(config.tasks_file)
            _check_secrets(config, command)
            action(config)
        except Exception as error:  # noqa: BLE001 - raised below: one run of a sweep must not end the others
            failures.append(error)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                logger.error("this run of the sweep failed, the others go on: %s", error)

    # Hydra takes the module of the function for the name of the log file.
    job.__module__ = f"multitask_rl.cli.{command}"
    defaults = _OF_A_RUN if command == "train" else _OF_A_LOOK
    if {"-m", "--multirun"} & set(arguments):
        defaults = (*defaults, *_sweep_directory(arguments))
    with _hydra_environment(_hydra_arguments(arguments, defaults)):
        try:
            hydra.main(version_base="1.3", config_path=None, config_name="run")(job)()
        except OSError as error:
            with path_errors("output_dir", error.filename or "", "another with output_dir=PATH"):
                raise
        except Exception as error:
            # what the run raised is in ``failures``: this is the command line's, in any of Hydra's exceptions
            raise ConfigError(_explain(error)) from error
    if failures:
        raise failures[0]
    return 0


def _sweep_directory(arguments: list[str]) -> list[str]:
    """Return the override that puts the runs of a sweep below the ``output_dir`` that is given.

    Raises:
        ConfigError: ``output_dir`` is swept over itself.
    """
    given = [value for key, _, value in (a.partition("=") for a in arguments) if key == "output_dir"]
    if not given:
        return []
    if re.search(r"[,(]", given[-1]) and given[-1][:1] not in "\"'":
        raise ConfigError(
            f"output_dir={given[-1]}: with --multirun every run has a directory below output_dir, numbered "
            "from 0; name one"
        )
    return [f"hydra.sweep.dir={given[-1]}"]


def config_keys(cls: type = RunConfig, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return every key of the configuration with its field, ``model.lora.rank`` for nested ones."""
    keys: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(cls):
        nested: Any = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            keys |= config_keys(nested, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = field
    return keys


def _base(arguments: list[str], trusts: bool) -> RunConfig | type[RunConfig]:
    """Return what ``arguments`` override: what the run of ``output_dir`` recorded if no tasks file is given.

    Args:
        arguments: of the command line.
        trusts: code that a record from elsewhere names may run.

    Raises:
        ConfigError: see ``recorded_config`` and ``refuse_code_in``.
    """
    given = dict(a.partition("=")[::2] for a in arguments)
    run = Path(given.get("output_dir", "").strip("'\""))
    has_other = "tasks_file" in given or any(key.startswith("+") or key in _OTHER_SOURCES for key in given)
    if has_other or "output_dir" not in given or not (run / RECORD).is_file():
        return RunConfig
    if not trusts:
        refuse_code_in(run / RECORD)
    config: RunConfig = _literal(recorded_config(run))
    return config


def _literal(value: Any) -> Any:
    """Keep OmegaConf from taking ``${`` in what was recorded for a reference to a key or a variable."""
    if isinstance(value, dict):
        return {key: _literal(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_literal(below) for below in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _literal(getattr(value, f.name)) for f in dataclasses.fields(value)})
    # a backslash before ``${`` escapes it, and is escaped itself by another
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _check_secrets(config: RunConfig, command: str) -> None:
    """Refuse what a record holds without its secret, where ``command`` needs it.

    Raises:
        ConfigError: it has to be given again.
    """
    for key in redacted_keys(dataclasses.asdict(config)):
        if command == "train" or key.startswith("tasks."):  # only training tracks and posts
            again = "tasks_file=PATH" if "[" in key else f"{key}=VALUE, or {key}='${{oc.env:VARIABLE}}'"
            raise ConfigError(f"{key}: the run recorded it without its secret; give it again: {again}")


def _train(config: RunConfig) -> None:
    from multitask_rl.cli.results import print_evaluations
    from multitask_rl.trainer import Trainer  # heavy: torch, transformers

    print_evaluations(Trainer.from_config(config).train())


def _evaluate(config: RunConfig) -> None:
    from multitask_rl.cli.results import print_evaluations
    from multitask_rl.trainer import Trainer  # heavy: torch, transformers

    resume, run = config.checkpoint.resume, config.output_dir
    if resume == "auto":
        allowed = (
            "the directory of a run, a checkpoint with checkpoint.resume=DIR, or checkpoint.resume=never for "
            "the untrained model"
        )
        with path_errors("output_dir", run, allowed):
            os.scandir(run).close()
    trainer = Trainer.from_config(config)
    evaluations = trainer.evaluate()
    restored = trainer.parts.store.restored
    why = "checkpoint.resume=never" if resume == "never" else f"{run} has no checkpoint"
    untrained = f"the untrained model {config.model.name_or_path} ({why})"
    print(f"weights: {untrained if restored is None else f'{restored} (step {trainer.step})'}")
    print_evaluations(evaluations)


def _to_config(tree: DictConfig) -> RunConfig:
    """Turn Hydra's tree into dataclasses; every run of a sweep gets its own output directory.

    Raises:
        ConfigError: a key that the schema does not have was added with ``+``, or a value is refused.
    """
    known = {f.name for f in dataclasses.fields(RunConfig)}
    if unknown := [str(key) for key in tree if key not in known]:
        raise ConfigError(
            f"configuration: no key or group {unknown[0]!r}{suggest(unknown[0], known)} (a group such as "
            f"+experiment=NAME is a file NAME.yaml in the folder {unknown[0]!r} of --config-dir)"
        )
    values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    config = build_dataclass(RunConfig, values, Where())
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        config = replace(config, output_dir=HydraConfig.get().runtime.output_dir)
    return config


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Give Hydra its arguments, keep it from printing errors (they come as exceptions), close its log."""
    before = list(logging.getLogger().handlers)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0] if argv else "multitask-rl", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        for handler in [h for h in logging.getLogger().handlers if h not in before]:
            if isinstance(handler, logging.FileHandler):
                logging.getLogger().removeHandler(handler)
                handler.close()
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _hydra_arguments(arguments: list[str], defaults: Iterable[str]) -> list[str]:
    """Put options before overrides, which Hydra's parser needs, and our overrides before the user's.

    Raises:
        ConfigError: an option is a key of the configuration, or unknown.
    """
    options, overrides, rest = [], list(defaults), iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        key = option.lstrip("-").replace("-", "_")
        if option in _OPTIONS:
            options.append(argument)
            options += [next(rest, "")] if argument in _OPTIONS_WITH_VALUE else []
        elif not option.startswith("-"):
            overrides.append(f"++{argument}" if equals and _is_below_mapping(option) else argument)
        elif key in config_keys() or _is_below_mapping(key):
            value = value if equals else next(rest, "VALUE")
            raise ConfigError(f"{argument}: a key is given without dashes; write {key}={value}")
        else:
            raise ConfigError(
                f"unknown option {argument!r}{suggest(option, _OPTIONS)} (options: "
                f"{', '.join(sorted(_OPTIONS))}); give keys as key=value"
            )
    return options + overrides


def _is_below_mapping(key: str) -> bool:
    """Whether ``key`` lies below a mapping: the schema does not know it, so Hydra wants ``++`` before it."""
    return any(key.startswith(f"{name}.") for name, f in config_keys().items() if f.default_factory is dict)


def _explain(error: Exception) -> str:
    """Return one paragraph: what Hydra said, a close key, where the keys are listed."""
    causes: list[BaseException] = [error, *([error.__cause__] if error.__cause__ else [])]
    said = [next(iter(str(cause).strip().splitlines()), type(cause).__name__) for cause in causes]
    unknown = re.search(r"[Kk]ey '([^']+)'", " ".join(said))
    full_key = re.search(r"full_key: (\S+)", " ".join(map(str, causes)))
    hint = ""
    if unknown:
        section = (full_key[1] if full_key else unknown[1]).rpartition(".")[0]
        below = [k.removeprefix(f"{section}.") for k in config_keys() if k.startswith(section)]
        moved = MOVED.get(f"{section}.{unknown[1]}")
        hint = f"; it is {moved} now" if moved else suggest(unknown[1], {k.split(".")[0] for k in below})
    if "Additional config directory" in said[0]:
        hint = f"; relative to {str(Path.cwd())!r}; give a directory that exists"
    return (
        f"configuration: {': '.join(dict.fromkeys(s.rstrip('.') for s in said))}{hint} "
        f"(keys: docs/configuration.md or `multitask-rl train --cfg job`)"
    )
