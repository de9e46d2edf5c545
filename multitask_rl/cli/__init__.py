"""The command line: ``multitask-rl <command>``.

A command's module is imported when the command runs, so ``--help`` is fast. Exit codes: 0 done,
1 failed, 2 bad configuration or usage, 3 stopped by a guard. An error is one paragraph; ``--debug`` adds the
traceback.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Sequence

import multitask_rl
from multitask_rl.boundary.interrupts import stopping_on_signals
from multitask_rl.boundary.printable import one_line, redact_text, show_last
from multitask_rl.config.schema.ranges import unknown_name
from multitask_rl.errors import ConfigError, MultitaskRLError, with_notes
from multitask_rl.lazy import without_collector

COMMANDS = {
    "train": ("cli.train:train", "train: key=value overrides, --multirun for sweeps"),
    "eval": (
        "cli.evaluation:main",
        "MODEL tasks.yaml [--other MODEL2], or a run: held-out prompts, with intervals",
    ),
    "tasks": (
        "cli.tasks:main",
        "validate FILE | show FILE | schema: check or print a tasks file, or its schema",
    ),
    "plugins": ("cli.plugins:main", "list | check NAME | new KIND NAME: show, test or write plugins"),
    "compare": ("cli.comparison:main_compare", "RUN RUN...: differences per task with intervals"),
    "report": ("cli.report:main_report", "RUN [--html FILE]: summary of one run"),
    "watch": ("cli.watch:main", "RUN [--open]: the same page in the browser, live while the run goes on"),
    "convert": (
        "cli.convert:main",
        "--from trl|verl|roll|openrlhf FILE: tasks and settings from theirs",
    ),
    "rescore": ("cli.rescore:main", "RUN [--reward NAME]: score the stored rollouts again, without a model"),
    "submit": ("cli.submit:main", "RECIPE key=value...: train on a cluster (Slurm, KubeRay, ray up)"),
    "bench": ("cli.bench:main", "measure steps: tokens/s, seconds per stage, memory"),
    "completion": (
        "cli.completion:main",
        "bash | zsh | fish: a script that completes commands, options, keys",
    ),
    "sandbox corpus": ("sandbox.corpus:main", "MANIFEST: run hostile programs in the sandbox"),
    "init": (
        "cli.init:main",
        "[DIR] [--model M] [--tasks A,B]: write a project that runs, fitted to this machine",
    ),
    "doctor": (
        "cli.doctor:main",
        "what is installed and works; doctor FILE: memory, disk and time of a run before it begins",
    ),
}
"""Name -> function in ``multitask_rl``, help."""

_OPTIONS = """\
options:
  -h, --help     this help; `multitask-rl <command> --help` for a command
  --version      the version
  --debug        the full traceback of an error
exit codes: 0 done, 1 failed, 2 bad configuration or usage, 3 stopped by a guard"""


class _OnceOffline(logging.Filter):
    """Shows one line in place of two for each of the five times that the hub's client tries to connect."""

    is_told = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is of something else; print the line for the first that is not."""
        if not re.search("thrown while requesting|^Retrying in", record.getMessage()):
            return True
        if not self.is_told:
            print(
                "the Hugging Face hub does not answer: trying again for half a minute (HF_HUB_OFFLINE=1: do "
                "not ask it)",
                file=sys.stderr,
            )
            self.is_told = True
        return False


_ONCE_OFFLINE = _OnceOffline()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    # a closed stream (``2>&-``) leaves its number to the next file that is opened, which would get its text
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the end
    logging.getLogger("huggingface_hub.utils._http").addFilter(_ONCE_OFFLINE)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as standard error: letters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print("usage: multitask-rl <command> [arguments]\n\ncommands:")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()))
        print(f"\n{_OPTIONS}")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"multitask-rl {multitask_rl.__version__}")
        return 0
    try:
        with stopping_on_signals():  # so that a command deletes its temporary directories
            return run_command(arguments)
    except KeyboardInterrupt as error:
        show_last(f"interrupted by {error}" if str(error) else "interrupted", sys.stderr)
        return getattr(error, "exit_code", 130)
    except BrokenPipeError:  # the reader of a pipe has had enough: ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at the end
        return 141
    except Exception as error:  # noqa: BLE001 - the last boundary: a bug ends as one paragraph and exit code 1
        if debug:
            traceback.print_exception(error)
        if isinstance(error, MultitaskRLError):
            for own in (error, *error.others):
                show_last(error_line(str(own)), sys.stderr)
            return error.exit_code
        if problem := _problem_of_torch():
            print(error_line(f"{problem} (--debug shows the traceback)"), file=sys.stderr)
            return 2
        told = f"{with_notes(error)} ({_place(error)}; not foreseen, --debug shows the traceback)"
        show_last(error_line(told), sys.stderr)
        return 1


def _place(error: BaseException) -> str:
    """Return where ``error`` was raised: in the last line, if any, of neither this package nor a library."""
    frames = traceback.extract_tb(error.__traceback__)
    files = (str(multitask_rl.__file__), os.__file__)
    places = ("<", *(os.path.join(os.path.dirname(file), "") for file in files))
    libraries = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    own = [f for f in frames if not f.filename.startswith(places)]
    own = [f for f in own if not any(library in f.filename for library in libraries)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _problem_of_torch() -> str:
    """Return why torch cannot be imported; empty if it can."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - torch raises what the loader of its libraries raises
        return (
            f"torch cannot be imported: {type(error).__name__}: {error}. Where it misses libraries of "
            "CUDA, it is a build for GPUs without them: install a CPU build of torch, or let pip install "
            "torch with its dependencies"
        )
    return ""


def run_command(arguments: list[str]) -> int:
    """Run the command that ``arguments`` begin with; return its exit code. Errors are raised."""
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name = " ".join(arguments[:words])
    group = [own for own in COMMANDS if own.startswith(f"{name} ")]
    if group and arguments[1:] in (["-h"], ["--help"]):
        print("\n".join(f"multitask-rl {own}  {COMMANDS[own][1]}" for own in group))
        return 0
    if name not in COMMANDS:
        raise ConfigError(unknown_name("command", name, COMMANDS))
    with without_collector():
        command = pkgutil.resolve_name(f"multitask_rl.{COMMANDS[name][0]}")
    return command(arguments[words:]) or 0


def error_line(text: str) -> str:
    """Return an error as one line that is safe for a terminal, without the secrets of addresses."""
    return f"error: {one_line(redact_text(text))}"
