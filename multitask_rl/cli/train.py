"""``train`` and ``eval``, and the composition of a configuration by Hydra.

The schema is ``RunConfig``. YAML files (``--config-dir configs +experiment=NAME``) and the command line
override it. Hydra's tree becomes dataclasses here; no other module sees it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multitask_rl.boundary.printable import EscapingFilter, first_line, printable, redacted_keys, show_last
from multitask_rl.cli.tables import task_table
from multitask_rl.config.run import RECORD, RunConfig, dotted, recorded_config
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.trust import TRUST, refuse_code_in
from multitask_rl.errors import ConfigError, path_errors

if TYPE_CHECKING:
    from multitask_rl.trainer import Trainer

logger = logging.getLogger(__name__)

_USAGE = """\
usage: multitask-rl {command} [--config-dir DIR] [--multirun] [--quiet | --json] [--trust] [key=value ...]

  multitask-rl {command} tasks_file=tasks.yaml model.name_or_path=MODEL output_dir=runs/first
  multitask-rl {command} --config-dir configs +experiment=NAME tasks.math.weight=2
  multitask-rl {command} output_dir=runs/first       the recorded configuration of a run; keys override it
  multitask-rl train --multirun seed=0,1,2 ...      one run per value, below multirun/ or output_dir/
  multitask-rl {command} --cfg job ...               print the configuration and stop
  multitask-rl {command} --quiet | --json ...        warnings and the end alone; a JSON object per line
  multitask-rl {command} --trust ...                 allow code named by a file outside the working directory

Every key with its meaning, range and default: docs/configuration.md, and run.schema.json of a project that
`multitask-rl init` writes. Hydra's own options: --hydra-help."""

_INFO = ("--info", "-i")
_VALUES = {
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(_INFO, ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    **dict.fromkeys(("--package", "-p", "--experimental-rerun"), ()),
    **dict.fromkeys(("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"), ()),
}
"""Hydra's options with a value -> the values allowed; empty = any."""
_SWITCHES = {"--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"}
_SWITCHES |= {"--shell-completion", "-sc"}
OTHER_SOURCES = ("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--multirun", "-m")
"""Options that bring a configuration, or several."""
_SWEEP_DIR = "hydra.sweep.dir=multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"
_NO_COPY = "hydra.output_subdir=null"
"""Hydra's copy of the configuration would hold the secrets that ``config.yaml`` leaves out."""
_LOG = "hydra.job_logging.handlers.console.stream=ext://sys.stderr"
_OF_A_RUN = ("hydra.run.dir=${output_dir}", _NO_COPY, _SWEEP_DIR, _LOG)
_OF_A_LOOK = (
    *("hydra.run.dir=.", _NO_COPY, _SWEEP_DIR, _LOG),
    *("hydra.job_logging.root.handlers=[console]", "~hydra.job_logging.handlers.file"),
)
"""Only ``train`` writes to a run's directory; other commands leave its record and its log as they are."""


class TerminalFormatter(logging.Formatter):
    """Shows a record without its time and module, which the run's log file has; a warning with its level."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def train(arguments: list[str]) -> int:
    """Train a run; prints its last evaluation against the first, as ``report`` does."""
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
    with path_errors("the working directory", ".", "the command in one that exists"):
        Path.cwd()  # Hydra asks, too
    trusts = TRUST in arguments
    consoles = {"--quiet": "tracking.console=quiet", "--json": "tracking.console=json"}
    arguments = [consoles.get(argument, argument) for argument in arguments if argument != TRUST]
    ConfigStore.instance().store(name="run", node=_base(arguments, trusts))

    failures: list[Exception] = []

    def job(tree: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        is_sweep = hydra_config.mode == RunMode.MULTIRUN
        for handler in logging.getLogger().handlers:
            handler.addFilter(EscapingFilter())  # Hydra's handlers show text of models and data
            if type(handler) is logging.StreamHandler and handler.stream.isatty():
                handler.setFormatter(TerminalFormatter())
        if is_sweep:  # Hydra's copy of a sweep's configuration holds its secrets
            Path(hydra_config.sweep.dir, "multirun.yaml").unlink(missing_ok=True)
        try:
            known = {f.name for f in dataclasses.fields(RunConfig)}
            if unknown := [str(key) for key in tree if key not in known]:
                raise ConfigError(
                    f"configuration: no key or group {unknown[0]!r}{suggest(unknown[0], known)} (a group "
                    f"such as +experiment=NAME is a file NAME.yaml in the folder {unknown[0]!r} of "
                    "--config-dir)"
                )
            given: Any = OmegaConf.to_container(hydra_config.overrides.task)  # ${...} stays as it is
            _empty_mappings(tree, given)
            try:
                values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
            except OmegaConfBaseException as error:
                raise ConfigError(_explain(error)) from error
            config = build_dataclass(RunConfig, values, Where())
            if is_sweep:  # each run has a directory of its own
                config = replace(config, output_dir=hydra_config.runtime.output_dir)
            if config.tasks_file and not trusts:
                refuse_code_in(config.tasks_file)
            for key in redacted_keys(dataclasses.asdict(config)):
                if command == "train" or key.startswith("tasks."):  # other commands neither track nor post
                    again = (
                        "tasks_file=PATH" if "[" in key else f"{key}=VALUE, or {key}='${{oc.env:VARIABLE}}'"
                    )
                    raise ConfigError(
                        f"{key}: the run recorded it without its secret; give it again: {again}"
                    )
            if config.tracking.console == "quiet":
                for handler in logging.getLogger().handlers:
                    if type(handler) is logging.StreamHandler:  # the run's file keeps everything
                        handler.setLevel(logging.WARNING)
            action(config)
        except Exception as error:  # noqa: BLE001 - raised below: one run of a sweep must not end the others
            failures.append(error)
            if is_sweep:
                told = "run %s of the sweep (%s) failed, the others go on: %s"
                logger.error(told, hydra_config.job.num, ", ".join(hydra_config.overrides.task), error)

    # Hydra names the log file after the function's module
    job.__module__ = f"multitask_rl.cli.{command}"
    defaults = [*(_OF_A_RUN if command == "train" else _OF_A_LOOK)]
    outputs = [value for key, _, value in (a.partition("=") for a in arguments) if key == "output_dir"]
    if outputs and {"-m", "--multirun"} & set(arguments):
        if re.search(r"[,(]", outputs[-1]) and outputs[-1][:1] not in "\"'":
            raise ConfigError(
                f"output_dir={outputs[-1]}: with --multirun every run has a directory below output_dir, "
                "numbered from 0; name one"
            )
        defaults.append(f"hydra.sweep.dir={outputs[-1]}")
    with _hydra_environment(_hydra_arguments(arguments, defaults)):
        try:
            hydra.main(version_base="1.3", config_path=None, config_name="run")(job)()
        except MissingConfigException as error:  # an OSError, too
            raise ConfigError(_explain(error)) from error
        except OSError as error:
            with path_errors("output_dir", error.filename or "", "another with output_dir=PATH"):
                raise
        except Exception as error:
            # the job's errors are in ``failures``; this one, of any of Hydra's types, is of the command line
            raise ConfigError(_explain(error)) from error
    if failures:
        raise failures[0]
    return 0


def config_keys() -> dict[str, Any]:
    """Return every key of the configuration with its default, ``model.lora.rank`` for nested ones."""
    return dict(dotted(dataclasses.asdict(RunConfig())))


def _base(arguments: list[str], trusts: bool) -> RunConfig | type[RunConfig]:
    """Return the configuration that ``arguments`` override: recorded in ``output_dir``, or the defaults.

    The defaults count if the command names a configuration, or both ``tasks_file`` and
    ``model.name_or_path``. ``tasks_file`` alone replaces the recorded tasks. ``trusts`` allows code that the
    record names.
    """
    given = dict(a.partition("=")[::2] for a in arguments)
    run = Path(given.get("output_dir", "").strip("'\""))
    is_whole = {"tasks_file", "model.name_or_path"} <= given.keys()
    has_other = is_whole or any(key.startswith("+") or key in OTHER_SOURCES for key in given)
    if has_other or "output_dir" not in given or not (run / RECORD).is_file():
        return RunConfig
    if not trusts:
        refuse_code_in(run / RECORD)
    config: RunConfig = _literal(recorded_config(run))
    return replace(config, tasks={}) if "tasks_file" in given else config


def _literal(value: Any) -> Any:
    """Escape ``${`` in recorded text, which OmegaConf would read as a reference."""
    if isinstance(value, dict):
        return {key: _literal(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_literal(below) for below in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _literal(getattr(value, f.name)) for f in dataclasses.fields(value)})
    # a backslash escapes ``${``, and a backslash before that needs one too
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _train(config: RunConfig) -> None:
    try:
        evaluations = _trainer(config).train()
    except KeyboardInterrupt:
        record = Path(config.output_dir, RECORD)
        if record.is_file() and "console" not in config.tracking.trackers:  # the console says it
            show_last(f"go on with: multitask-rl train output_dir={config.output_dir}", sys.stderr)
        raise
    if config.tracking.console == "json":  # it has printed them, as ``held_out``
        return
    rows = evaluations.changes
    has_first = any(row["steps"][0] is not None for row in rows.values())
    if not has_first or any(evaluation.num_samples > 1 for evaluation in evaluations.values()):  # pass@k
        show_last(f"{evaluations}\n" if has_first else str(evaluations), sys.stdout)
    if has_first:
        show_last(printable(task_table(rows, ("before", "after"))), sys.stdout)


def _trainer(config: RunConfig) -> Trainer:
    """Return the trainer; its libraries take seconds to import, in which a terminal would show nothing."""
    if sys.stderr.isatty() and config.tracking.console != "quiet":
        print("importing torch and transformers", file=sys.stderr)
    from multitask_rl.trainer import Trainer

    return Trainer.from_config(config)


def _evaluate(config: RunConfig) -> None:
    resume, run = config.checkpoint.resume, config.output_dir
    if resume == "auto":
        allowed = (
            "the directory of a run, a checkpoint with checkpoint.resume=DIR, or checkpoint.resume=never for "
            "the untrained model"
        )
        with path_errors("output_dir", run, allowed):
            os.scandir(run).close()
    trainer = _trainer(config)
    evaluations = trainer.evaluate()
    restored = trainer.parts.store.restored
    why = "checkpoint.resume=never" if resume == "never" else f"{run} has no checkpoint"
    untrained = f"the untrained model {config.model.name_or_path} ({why})"
    print(f"weights: {untrained if restored is None else f'{restored} (step {trainer.step})'}")
    print(evaluations)


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Pass ``arguments`` to Hydra, let its errors come as exceptions, and close its log afterwards."""
    before = list(logging.getLogger().handlers)
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [argv[0] if argv else "multitask-rl", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    tells, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk: no traceback a record
    try:
        yield
    finally:
        logging.raiseExceptions = tells
        for handler in [h for h in logging.getLogger().handlers if h not in before]:
            if isinstance(handler, logging.FileHandler):
                logging.getLogger().removeHandler(handler)
                with suppress(OSError):  # it would replace the error that ends the run
                    handler.close()
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _hydra_arguments(arguments: list[str], defaults: list[str]) -> list[str]:
    """Put options first, as Hydra's parser needs them, then ``defaults``, then the user's overrides.

    Raises:
        ConfigError: an option is unknown, is a key of the configuration, or has a wrong value.
    """
    options, overrides, rest = list[str](), list(defaults), iter(arguments)
    for argument in rest:
        option, equals, value = argument.partition("=")
        key = option.lstrip("-").replace("-", "_")
        if option in _VALUES:
            choices = _VALUES[option]
            value = value if equals else next(rest, "all" if option in _INFO else "")
            if (choices and value not in choices) or not value or (value.startswith("-") and not equals):
                expected = f"one of {', '.join(choices)}" if choices else "a value"
                raise ConfigError(f"{option}: expected {expected}, got {value!r}")
            options.append(f"{option}={value}")
        elif option in _SWITCHES:
            if equals:
                raise ConfigError(f"{option}: takes no value, got {value!r}")
            options.append(option)
        elif not option.startswith("-"):
            overrides.append(f"++{argument}" if equals and _is_in_mapping(option) else argument)
        elif key in config_keys() or _is_in_mapping(key):
            value = value if equals else next(rest, "VALUE")
            raise ConfigError(f"{argument}: a key is given without dashes; write {key}={value}")
        else:
            known = sorted({*_VALUES, *_SWITCHES})
            raise ConfigError(
                f"unknown option {argument!r}{suggest(option, known)} (options: {', '.join(known)}); "
                "give keys as key=value"
            )
    return options + overrides


def _is_in_mapping(key: str) -> bool:
    """Whether ``key`` is a mapping or below one: the schema knows no keys there, and Hydra needs ``++``."""
    return any(f"{key}.".startswith(f"{name}.") for name, default in config_keys().items() if default == {})


def _empty_mappings(tree: DictConfig, overrides: Iterable[str]) -> None:
    """Empty each mapping that an override gives as ``{}``: Hydra merges it without effect.

    Values of later overrides stay.
    """
    emptied: list[str] = []
    given = OverridesParser.create().parse_overrides([text for text in overrides if text[:1] != "~"])
    for override in given:
        key, value = override.key_or_group, override.value()
        is_empty = value == {} and _is_in_mapping(key)
        if is_empty or any(f"{key}.".startswith(f"{name}.") for name in emptied):
            OmegaConf.update(tree, key, value, merge=not is_empty, force_add=True)
            emptied.append(key)


_FORMS = {
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a valid bool": "true or false",
    "is not a ListConfig": "a list, KEY=[VALUE,VALUE]",
}
"""Message of OmegaConf about a wrong type -> what is allowed."""


def is_run_configuration(file: str) -> bool:
    """Whether a file is a part of a run's configuration, as it lies in a folder of ``--config-dir``."""
    path = Path(file)
    return path.is_file() and "@package" in path.read_text(encoding="utf-8", errors="replace")[:200]


def _explain_form(argument: str) -> str:
    """Return what is wrong with an argument that is no override."""
    key, equals, value = argument.lstrip("+").partition("=")
    if not equals and Path(argument).suffix in (".yaml", ".yml"):
        path = Path(argument)
        if is_run_configuration(argument):
            group = path.parent.name or "GROUP"
            return (
                f"{argument!r} is the configuration of a run, which is a file in a folder of --config-dir: "
                f"--config-dir {path.parent.parent} +{group}={path.stem}"
            )
        return f"{argument!r}: a file is given by its key: tasks_file={argument}"
    if not equals or not key:
        return (
            f"{argument!r} is no key=value; write KEY=VALUE without spaces around the =, such as "
            "max_steps=100 (keys: `multitask-rl train --cfg job`)"
        )
    return (
        f"{argument!r}: the value has characters with a meaning of their own (spaces, braces, ~ : , =); "
        f"quote it twice: '{key}=\"{value}\"', once for the shell and once for the value"
    )


def _explain(error: Exception) -> str:
    """Return one paragraph: Hydra's message, a close key, where the keys are listed."""
    if isinstance(error, OverrideParseException):
        return _explain_form(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = list(error.options or ())
        there = f" (there are: {', '.join(options)})" if options else ""
        return f"+{group}={name}: --config-dir has no such file{suggest(name, options)}{there}"
    if isinstance(failed := error.__cause__, OSError) and str(failed.filename).endswith(".log"):
        reason = f"{str(failed.filename)!r} cannot be written: {failed.strerror}"
        return f"output_dir: the run's log {reason}; give another with output_dir=PATH"
    causes: list[BaseException] = [error, *([error.__cause__] if error.__cause__ else [])]
    said = list(map(first_line, causes))
    unknown = re.search(r"[Kk]ey '([^']+)'", " ".join(said))
    full_key = re.search(r"full_key: (\S+)", " ".join(map(str, causes)))
    hint = next((f"; give {form}" for end, form in _FORMS.items() if end in " ".join(said)), "")
    if added := re.match(r"Could not override '([^']+)'\. No match in the defaults list", said[0]):
        hint = f"; it is a folder of --config-dir, whose files are added: write +{added[1]}=NAME"
    if named := re.match(
        r"Error merging override (\w+)=(.*?)(?: Invalid type assigned)?: .* is not a subclass of",
        " ".join(said),
    ):
        first = next(key for key in config_keys() if key.startswith(f"{named[1]}."))
        return (
            f"configuration: {named[1]!r} is a section; write {named[1]}.KEY=VALUE, such as "
            f"{first}={named[2]} (keys: `multitask-rl train --cfg job`)"
        )
    if unknown:
        section = (full_key[1] if full_key else unknown[1]).rpartition(".")[0]
        below = [k.removeprefix(f"{section}.") for k in config_keys() if k.startswith(section)]
        allowed = sorted({k.split(".")[0] for k in below})
        hint = suggest(unknown[1], allowed)
        elsewhere = [key for key in config_keys() if key.rpartition(".")[2] == unknown[1]]
        if not hint and elsewhere:
            hint = f"; did you mean {' or '.join(map(repr, elsewhere))}?"
        elif not hint and section:
            hint = f"; allowed: {', '.join(allowed)}"
    if gone := re.match(r"Could not delete from config\. 'tasks\.([^']+)'", said[0]):
        hint = (
            "; the tasks are those of the tasks file, which keys only change: "
            f"tasks.{gone[1]}.weight=0 gives the task no prompts"
        )
    whole = re.match(r"Error merging override ~([\w.]+).* does not support deletion", " ".join(said))
    if whole and _is_in_mapping(whole[1]):
        hint = f"; empty it: {whole[1]}={{}}"
    if "Additional config directory" in said[0]:
        hint = f"; relative to {str(Path.cwd())!r}; give a directory that exists"
    return (
        f"configuration: {': '.join(dict.fromkeys(s.rstrip('.') for s in said))}{hint} "
        "(keys: `multitask-rl train --cfg job`)"
    )
