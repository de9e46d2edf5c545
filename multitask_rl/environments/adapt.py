"""Makes a ``World`` from a reference in the tasks file."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multitask_rl.config.task import TaskSpec
from multitask_rl.environments.base import Message, Opening, StepResult, World
from multitask_rl.environments.endpoint import AgentWorld
from multitask_rl.environments.foreign import FOREIGN, TrlWorld
from multitask_rl.environments.tools import AuthorWorld, ToolWorld
from multitask_rl.errors import DataError, MultitaskRLError, PluginError
from multitask_rl.plugins import ENVIRONMENTS, REWARDS, Located, build_config, build_plugin, locate
from multitask_rl.scoring.foreign import build_foreign

_LOADING = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """The environment of a task, as the tasks file names it."""

    reference: str
    config: Mapping[str, Any] = field(default_factory=dict)
    where: str = "environment"
    """Place of the reference in the tasks file, for messages."""
    timeout_s: float = 30.0
    """Longest call, in seconds."""
    max_tool_calls: int = 0
    """Most calls of tools in an episode; 0 = any number."""

    @classmethod
    def of_task(cls, spec: TaskSpec) -> WorldSpec:
        """Return the environment that ``spec`` names."""
        return cls(
            reference=spec.environment,
            config=spec.environment_config,
            where=f"{spec.where}.environment",
            timeout_s=spec.turn_timeout_s,
            max_tool_calls=spec.max_tool_calls,
        )

    def check_config(self) -> None:
        """Import the author's class and check ``config`` without building it.

        Raises:
            PluginError, ConfigError: the class is not found, or does not take ``config``.
        """
        found, config, _ = self._locate()
        _maker(found, config, self.where, self._own_seed(0))

    def _locate(self) -> tuple[Located, dict[str, Any], Callable[..., Any] | None]:
        """Return class, its configuration and, of TRL, the reward function that the configuration names."""
        prefix, separator, rest = self.reference.partition(":")
        config, function = dict(self.config), None
        with _LOADING:  # two threads must not load one file
            if prefix == "trl" and not rest:
                raise PluginError(f"{self.where}: nothing follows 'trl:'; expected 'trl:file.py:Class'")
            if separator and prefix in FOREIGN:
                found = build_foreign(FOREIGN, self.reference, self.where)
            else:
                found = locate(rest if prefix == "trl" else self.reference, ENVIRONMENTS, self.where)
            named = {self.where: (self.reference, found.value)}
            if prefix == "trl" and (name := config.pop("reward_function", None)):
                key = f"{self.where}_config.reward_function"
                function = locate(str(name), REWARDS, key).value
                named[key] = name, function
        for where, (reference, value) in named.items():
            if not callable(value):
                raise PluginError(f"{where}: {reference!r} is {value!r}; expected a class or a function")
        return found, config, function

    def _own_seed(self, seed: int) -> int | None:
        """Return ``seed`` in the range of NumPy's generators; None for a class of another library."""
        is_adapted = self.reference.partition(":")[0] in (*FOREIGN, "trl")
        return None if is_adapted else seed % 2**32

    def build(self, run: Callable[..., Any], seed: int = 0) -> World:
        """Return a new world; ``run`` calls a function, also an async one, and returns its result.

        ``seed``: of the episode, for a class of the author that takes one.

        Raises:
            PluginError: unknown, of no known shape, or it cannot be built.
            ConfigError: ``config`` does not fit.
            MissingExtraError: it needs an optional dependency that is not installed.
        """
        found, config, function = self._locate()
        built = _instance(found, config, self.where, self._own_seed(seed))
        is_trl = self.reference.startswith("trl:")
        world = TrlWorld(built, self.where, run, function) if is_trl else as_world(built, self.where, run)
        world.calls_left = self.max_tool_calls or None
        if isinstance(world, AgentWorld):  # ``earned`` waits so long, and has ``timeout_s``
            world.grace_s = min(world.grace_s, self.timeout_s / 2)
        return world


def _maker(located: Located, config: Mapping[str, Any], where: str, seed: int | None) -> Callable[[], Any]:
    """Check ``config`` and return what makes the author's object, with ``seed`` if the class takes one."""
    found, label = located.value, located.label
    config_class: Any = getattr(found, "Config", None)
    has_config = dataclasses.is_dataclass(config_class)
    signature = inspect.signature(config_class if has_config else found)
    if seed is not None and "seed" in signature.parameters:
        config = {"seed": seed, **config}
    if has_config:
        build_config(found, config, where=f"{where}_config")
        return partial(build_plugin, found, config, where=f"{where}_config")
    try:
        signature.bind(**config)
    except TypeError as error:
        unknown = [f".{key}" for key in config if key not in signature.parameters]
        key = unknown[0] if unknown and "unexpected" in str(error) else ""
        raise PluginError(f"{where}_config{key}: {label}{signature}: {error}") from error
    return partial(found, **config)


def _instance(located: Located, config: Mapping[str, Any], where: str, seed: int | None) -> Any:
    """Return the author's object; it gets ``seed`` if it takes one and ``config`` gives none."""
    make = _maker(located, config, where, seed)
    try:
        return make()
    except MultitaskRLError:
        raise
    except Exception as error:
        problem = f"{located.label} could not be built: {type(error).__name__}: {error}"
        raise PluginError(f"{where}: {problem}") from error


def as_world(environment: Any, where: str, run: Callable[..., Any]) -> World:
    """Return an instance of an author's class as a ``World``.

    Raises:
        PluginError: it has no ``reset``, or neither ``step`` nor a tool.
    """
    if isinstance(environment, World):
        return environment
    if not callable(getattr(environment, "reset", None)):
        raise PluginError(
            f"{where}: {type(environment).__name__} has no method reset; an environment has reset(row) and "
            "step(message), or reset(**row) and methods that are tools"
        )
    if callable(getattr(environment, "step", None)):
        return _MessageWorld(environment, run)
    return ToolWorld(environment, where, run)


class _MessageWorld(AuthorWorld):
    """An environment that answers messages as a ``World``."""

    def reset(self, row: Mapping[str, Any]) -> Opening:
        try:
            said = self._run(self._environment.reset, row)
        except KeyError as error:
            if error.args and isinstance(name := error.args[0], str) and name not in row:
                has = ", ".join(row) or "no column"
                raise DataError(f"reset(row) needs a row with {name!r}, it has: {has}") from error
            raise
        if not isinstance(said, str | Sequence | None):
            raise TypeError(f"reset(row) returned {said!r}; expected messages, a text or None")
        return Opening(messages=[{"role": "user", "content": said}] if isinstance(said, str) else said or ())

    def step(self, message: Message) -> StepResult:
        result: StepResult = self._run(self._environment.step, message)
        return result
