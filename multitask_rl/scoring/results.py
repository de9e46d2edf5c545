"""Typed results from the return values and exceptions of plugins.

No fault of a plugin becomes a reward of 0: a value that is not a finite number in the declared range is a
``grader`` failure that names the plugin and the value.
"""

from __future__ import annotations

import math
import numbers
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from multitask_rl.boundary.printable import cut_off
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import DataError, SandboxError, described
from multitask_rl.records import (
    NOT_APPLICABLE,
    Failure,
    FailureKind,
    NotApplicable,
    RewardResult,
    Score,
    Verdict,
)

Result = RewardResult | Verdict

T = TypeVar("T")

_VALUE_KEYS = ("score", "value", "reward")
_MAX_MESSAGE = 500
_MEMORY = "raised MemoryError"
_NOT_OF_PLUGINS = (
    "<",
    os.path.join(Path(__file__).parents[1], ""),
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")),
)
"""Beginnings of names of files: of this package, the standard library and installed ones."""


def to_result(raw: Any, traits: PluginTraits, source: str) -> RewardResult:
    """Return the result of a reward for ``raw``, the value that the plugin ``source`` returned.

    ``raw`` is a number, None (not applicable), a ``Score``, a ``Failure``, or a mapping. A mapping has the
    value as ``score`` (else ``value``, else ``reward``), perhaps ``answer`` or verl's ``pred`` (text), and
    further numbers, which become components.
    """
    if type(raw) is float:  # almost every score: skips the checks of types
        return _checked(raw, {}, traits, source)
    if raw is None or isinstance(raw, NotApplicable):
        return NOT_APPLICABLE
    if isinstance(raw, Failure):
        return raw if raw.source else replace(raw, source=source)
    if isinstance(raw, Score):
        return _checked(raw.value, raw.components, traits, source, raw.answer)
    if isinstance(raw, Mapping):
        key = next((k for k in _VALUE_KEYS if k in raw), None)
        if key is None:
            return failed(f"returned a mapping without 'score': keys {sorted(map(str, raw))}", source)
        # A foreign dict may hold text beside its numbers (verl's "pred"); only numbers are components.
        components = {str(k): _number(v) for k, v in raw.items() if k != key}
        finite = {k: v for k, v in components.items() if v is not None and math.isfinite(v)}
        answer = raw.get("answer", raw.get("pred"))
        return _checked(raw[key], finite, traits, source, answer if isinstance(answer, str) else "")
    return _checked(raw, {}, traits, source)


def to_verdict(raw: Any, source: str) -> Verdict | Failure:
    """Return the verdict for ``raw``, the value that the constraint ``source`` returned.

    A bare number is a cost in [0, 1], violated from 0.5 on. None means that the constraint does not apply to
    the sample: it is satisfied.
    """
    if raw is None or isinstance(raw, NotApplicable):
        return Verdict(cost=0.0, violated=False, applicable=False)
    if isinstance(raw, Failure):
        return raw if raw.source else replace(raw, source=source)
    is_verdict = isinstance(raw, Verdict)
    cost = _number(raw.cost if is_verdict else raw)
    if cost is None:
        return failed(f"returned {cut_off(repr(raw), 80)}, not a cost in [0, 1]", source)
    if not 0.0 <= cost <= 1.0:  # also refuses NaN
        return failed(f"returned the cost {cost!r}, outside [0, 1]", source)
    if is_verdict:
        violated, applicable, turn = bool(raw.violated), bool(raw.applicable), int(raw.turn)
        return Verdict(cost=cost, violated=violated, reason=str(raw.reason), applicable=applicable, turn=turn)
    return Verdict(cost=cost, violated=cost >= 0.5)


def each(function: Callable[[T], Any], inputs: Sequence[T], source: str) -> list[Any]:
    """Return ``function`` of each input.

    With several inputs an exception becomes the failure of its input; with one it is raised, because the
    grader names it as the tasks file does.
    """
    values: list[Any] = []
    for one in inputs:
        try:
            values.append(function(one))
        except Exception as error:
            if len(inputs) == 1:
                raise  # the grader types it under the name that the tasks file gives
            values.append(failure_of(error, source))
    return values


def no_column(names: str, row: Mapping[str, Any]) -> str:
    """Return the message for a row without the columns ``names``."""
    return f"the row has no column {names} (columns: {', '.join(map(str, row)) or 'none'})"


def failure_of(error: BaseException, source: str) -> Failure:
    """Return the typed failure for an exception that left a plugin."""
    match error:
        case TimeoutError():
            kind = FailureKind.timeout
        case ConnectionError() | SandboxError():
            kind = FailureKind.infra
        case _:
            kind = FailureKind.data if isinstance(error, DataError) else FailureKind.grader
    return failed(f"raised {described(error)}"[:_MAX_MESSAGE] + place_of(error), source, kind)


def place_of(error: BaseException) -> str:
    """Return `` (file:line)``, the innermost line of the plugin's own code; empty if it is not known."""
    own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_OF_PLUGINS):
            own = f" ({Path(file).name}:{line})"
    return own


def is_out_of_memory(result: Result) -> bool:
    """Return whether ``result`` is the failure of a plugin that was refused memory."""
    return isinstance(result, Failure) and result.message.startswith(_MEMORY)


def _checked(
    value: Any, components: Mapping[str, Any], traits: PluginTraits, source: str, answer: str = ""
) -> RewardResult:
    number = _number(value)
    if number is None:
        hint = "; a batch function names its parameter 'responses'" * isinstance(value, (list, tuple))
        return failed(f"returned {cut_off(repr(value), 80)}, not a number{hint}", source)
    if not math.isfinite(number):
        return failed(f"returned {number!r}, not a finite number", source)
    if not traits.low <= number <= traits.high:
        declared = f"[{traits.low:g}, {traits.high:g}]"
        return failed(f"returned {number!r}, outside its declared range {declared}", source)
    parts: dict[str, float] = {}
    for name, part in components.items():
        converted = _number(part)
        if converted is None or not math.isfinite(converted):
            shown = f"{name!r} = {cut_off(repr(part), 80)}"
            return failed(f"returned the component {shown}, not a finite number", source)
        parts[str(name)] = converted
    return Score(value=number, components=parts, answer=str(answer))


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, or None if it is no number; text is none. A larger number is infinite."""
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:  # an integer of 400 digits
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if isinstance(value, (str, bytes, complex)) or not hasattr(value, "item"):
        return None
    try:  # 0-dimensional array or tensor
        return float(value.item())
    except (TypeError, ValueError, RuntimeError):
        return None


def failed(message: str, source: str, kind: FailureKind = FailureKind.grader) -> Failure:
    """Return a failure of ``kind`` with ``message`` and the plugin ``source``."""
    return Failure(kind=kind, message=message, source=source)
