"""Every error that a user can meet.

A failed rollout, reward or program is data (``records.Failure``), not an exception. Constructors take one
message, so that every error survives ``pickle`` (Ray, process pools).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOCATORS: dict[str, Callable[[str], str]] = {}
"""Place of a task in messages (``tasks.yaml:3: tasks.math``) -> a function that returns ``file:line`` of the
key that the rest of the message begins with (``.rewards[0].config: ...``).

If a file is read again, entries with the same place are replaced; the others stay.
"""


def locate(message: str) -> str:
    """Return ``message`` with the line of the key that it names instead of the line of the key's task."""
    for place, source_of in LOCATORS.items():
        before, found, rest = message.partition(place)
        if found and not re.search(r"[\w./\\-]$", before) and not re.match(r"[\w-]", rest):
            return f"{before}{source_of(rest)}: {place.rpartition(': ')[2]}{rest}"
    return message


class MultitaskRLError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is the exit status of the command."""

    exit_code: int = 1
    others: tuple[MultitaskRLError, ...] = ()
    """Errors found together with this one, such as those of other tasks of the file."""

    def __init__(self, *message: Any) -> None:
        super().__init__(*(locate(part) if isinstance(part, str) else part for part in message))


def raise_all(errors: Sequence[MultitaskRLError]) -> None:
    """Raise the first of ``errors``, if there is one, with the rest as its ``others``."""
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]


class ConfigError(MultitaskRLError, ValueError):
    """The configuration, a tasks file or a command line is invalid."""

    exit_code = 2


class UnavailableError(ConfigError):
    """This machine lacks a model or a device; the configuration may be valid on another machine."""


class PluginError(MultitaskRLError, LookupError):
    """A plugin is unknown, broken, duplicated or has the wrong shape."""

    exit_code = 2


class DataError(MultitaskRLError, ValueError):
    """A data set is missing, empty or holds a row the task cannot use."""

    exit_code = 2


class MissingExtraError(MultitaskRLError, ImportError):
    """An optional dependency is not installed; the message names the extra."""

    exit_code = 2


class SandboxError(MultitaskRLError, RuntimeError):
    """The sandbox itself is unusable; a program that fails inside it is an outcome."""


class RewardError(MultitaskRLError, RuntimeError):
    """A task's rewards fail more often than its error budget allows."""


class EngineError(MultitaskRLError, RuntimeError):
    """The rollout engine cannot generate, or one of its processes is lost."""


class CheckpointError(MultitaskRLError, RuntimeError):
    """A checkpoint is incomplete, altered or cannot be written."""


class TrainingError(MultitaskRLError, RuntimeError):
    """No step can be made: gradients are not finite, a learner rank ended, or the run is over or not open."""


class GuardStop(MultitaskRLError):
    """The guard stopped the run; the message says why."""

    exit_code = 3


def described(error: BaseException) -> str:
    """Return type and message of a plugin's error, whose ``__str__`` may itself raise one."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as own:  # noqa: BLE001 - code of a plugin
        return f"{type(error).__name__}: (its __str__ raises {type(own).__name__})"


def with_notes(error: BaseException) -> str:
    """Return the error in one line: type, message, notes."""
    notes = "".join(f", {note}" for note in vars(error).get("__notes__", ()))
    return described(error) + notes


def is_installed(package: str) -> bool:
    """Whether ``package`` can be imported; it is not imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # sys.modules holds None: the import is blocked
        return False


def require_extra(package: str, extra: str, needs: str, otherwise: str = "") -> None:
    """Raise a ``MissingExtraError`` unless ``package``, of the optional dependencies ``extra``, is installed.

    ``needs`` ends in the name of what is missing; ``otherwise`` says what else the user can do.
    """
    if not is_installed(package):
        raise MissingExtraError(
            f"{needs}, which is not installed: pip install 'multitask-rl[{extra}]'{otherwise}"
        )


def import_extra(module: str, extra: str, needs: str) -> Any:
    """Return ``module``, of the optional dependencies ``extra``; ``needs`` ends in the name of its package.

    Raises:
        MissingExtraError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{needs}, which cannot be imported ({error}): pip install 'multitask-rl[{extra}]'"
        ) from error


@contextmanager
def path_errors(
    what: str, path: str | Path, allowed: str, kind: type[MultitaskRLError] = ConfigError
) -> Iterator[None]:
    """Turn errors on opening a user's path into one paragraph, raised as ``kind``; other errors pass.

    ``what`` is place and role of the path (``tasks.yaml:3: tasks.math.dataset: the data set``), ``allowed``
    describes a valid one.
    """
    try:
        yield
    except (OSError, UnicodeError) as error:
        match error:
            case UnicodeDecodeError():
                problem = f"is not UTF-8 text (byte {error.start} cannot be read)"
            case FileNotFoundError() if not Path(path).parent.is_dir():
                problem = "lies in a directory that does not exist"
            case FileNotFoundError():
                problem = "does not exist"
            case IsADirectoryError():
                problem = "is a directory"
            case NotADirectoryError() if not Path(path).is_file():
                problem = "goes through a file, which holds no other"
            case FileExistsError() if Path(path).is_symlink():
                problem = "is a link to a path that does not exist"
            case FileExistsError() | NotADirectoryError():
                problem = "is a file"
            case PermissionError():
                problem = "may not be used by this user (permission denied)"
            case _:
                reason = error.strerror if isinstance(error, OSError) else None
                problem = f"cannot be used: {reason or error}"
        raise kind(f"{what} {str(path)!r} {problem}; give {allowed}") from error


def check_output_file(option: str, path: Path | None) -> None:
    """Raise a ``ConfigError`` if the file of ``option`` cannot be written; create it if it is missing."""
    if path is not None:
        with path_errors(f"{option}: the file", path, "one that can be written, in a directory that exists"):
            path.open("a").close()


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn disk errors while ``what`` is written into a ``CheckpointError``; other errors pass.

    Rust extensions (safetensors, tokenizers) raise their own exceptions instead of ``OSError``.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(
            f"cannot write {what}: {reason}. Earlier checkpoints are intact. Free space and start "
            "again: the run goes on from its newest checkpoint, if there is one. Another output_dir begins a "
            "new run."
        ) from error
