"""Adapters from the references of a tasks file to rewards and constraints of ``contracts.py``.

Entry-point name, ``module:object``, ``file.py:object``, or a function of another library behind a prefix
(``trl:``, ``verl:``, ``verifiers:``, ``reasoning_gym:``, ``evaluate:``; see ``foreign``). The object may be a
class with ``Config``, a ready instance, or a function (see ``shapes``).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multitask_rl.config.task import ConstraintSpec, RewardSpec
from multitask_rl.contracts import Constraint, PluginTraits, Reward
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.plugins import CONSTRAINTS, REWARDS, Located, build_config, build_plugin, locate
from multitask_rl.scoring.foreign import FOREIGN, build_foreign
from multitask_rl.scoring.shapes import UNDECLARED, FunctionPlugin

__all__ = ["PluginSource", "find_plugin", "resolve_constraint", "resolve_reward"]

_METHOD = {"reward": "score", "constraint": "judge"}
_GROUP = {"reward": REWARDS, "constraint": CONSTRAINTS}


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that is found and whose class is checked, but that is not built: no model is loaded."""

    kind: str
    """``reward`` or ``constraint``."""
    reference: str
    located: Located
    where: str

    @property
    def traits(self) -> PluginTraits:
        """What it declares; functions and classes that declare nothing are not cached."""
        traits = getattr(self.located.value, "traits", UNDECLARED)
        if not isinstance(traits, PluginTraits):
            raise PluginError(
                f"{self.where}: {self.kind} {self.reference!r}: its 'traits' is {traits!r}, expected a "
                "PluginTraits"
            )
        return traits

    def isolates(self, config: Mapping[str, Any]) -> bool:
        """Whether it runs in worker processes, as its traits or its ``isolates`` declare."""
        decide = getattr(self.located.value, "isolates", None)
        return self.traits.isolate if decide is None else bool(decide(config))

    def takes(self, key: str) -> bool:
        """Whether its ``Config`` has a field ``key``."""
        config = getattr(self.located.value, "Config", None)
        return dataclasses.is_dataclass(config) and any(f.name == key for f in dataclasses.fields(config))

    def check(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Check ``config`` without building a class (no model is loaded for a typing mistake).

        Returns:
            The columns that every row must have, as far as a function's parameters say.

        Raises:
            ConfigError, PluginError: as ``build``.
        """
        value = self.located.value
        if isinstance(value, type) and not getattr(value, "is_function", False):
            build_config(value, config, where=f"{self.where}.config")
            return ()
        return tuple(getattr(self.build(config), "columns", ()))

    def build(self, config: Mapping[str, Any]) -> Any:
        """Return the reward or constraint.

        Raises:
            ConfigError: ``config`` does not fit.
            PluginError: it cannot be built, or has the wrong shape.
            MissingExtraError: it needs an optional dependency that is not installed.
        """
        value, where = self.located.value, f"{self.where}.config"
        if isinstance(value, type):
            built = build_plugin(value, config, where=where)
        elif hasattr(value, _METHOD[self.kind]):
            if config:
                raise ConfigError(f"{where}: {self.reference!r} is a ready object and takes no configuration")
            built = value
        else:
            built = FunctionPlugin(value, self.located.label, config, self.where, self.reference)
        if not isinstance(getattr(built, "traits", UNDECLARED), PluginTraits):
            raise PluginError(f"{where}: {self.reference!r}: its 'traits' is not a PluginTraits")
        return built


def find_plugin(kind: str, reference: str, where: str) -> PluginSource:
    """Find what ``reference`` names and check its shape, without building it.

    Args:
        kind: ``reward`` or ``constraint``.
        reference: as in the tasks file.
        where: place for messages, e.g. ``tasks.math.rewards[0]``.

    Raises:
        PluginError: unknown, broken, or neither a function nor a class with the method of its kind.
        MissingExtraError: it needs an optional dependency that is not installed.
    """
    prefix, separator, rest = reference.partition(":")
    if separator and prefix in FOREIGN:
        if kind == "constraint":
            raise PluginError(
                f"{where}: the prefix {prefix!r} is for rewards; {reference!r} is a constraint here"
            )
        located = build_foreign(prefix, rest, where)
    else:
        located = locate(reference, _GROUP[kind], where)
    _check_shape(kind, reference, located.value, where)
    return PluginSource(kind, reference, located, where)


def resolve_reward(spec: RewardSpec, where: str) -> Reward:
    """Return the reward that ``spec`` names, built from its configuration.

    Raises:
        PluginError: unknown, broken, duplicated or wrongly shaped plugin.
        ConfigError: a key of its configuration is unknown or wrong.
        MissingExtraError: it needs an optional dependency that is not installed.
    """
    reward: Reward = find_plugin("reward", spec.plugin, where).build(spec.config)
    return reward


def resolve_constraint(spec: ConstraintSpec, where: str) -> Constraint:
    """Return the constraint that ``spec`` names; raises as ``resolve_reward``."""
    constraint: Constraint = find_plugin("constraint", spec.plugin, where).build(spec.config)
    return constraint


def _check_shape(kind: str, reference: str, value: Any, where: str) -> None:
    method, other = _METHOD[kind], _METHOD["constraint" if kind == "reward" else "reward"]
    prefix = f"{where}: {kind} {reference!r}"
    if not callable(value) and not hasattr(value, method):
        raise PluginError(f"{prefix} is {value!r}; expected a function or a class with {method}(rollouts)")
    if not isinstance(value, type) and not hasattr(value, method):
        return  # a function; FunctionPlugin reads its signature
    function = getattr(value, method, None)
    if function is None:
        hint = f" It has {other}(): is it a {'constraint' if kind == 'reward' else 'reward'}?"
        raise PluginError(
            f"{prefix}: the class {value.__qualname__} has no method {method}(rollouts)."
            + (hint if hasattr(value, other) else "")
        )
    try:
        arguments = ["instance"] * isinstance(value, type) + ["rollouts"]
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        owner = value.__qualname__ if isinstance(value, type) else type(value).__qualname__
        raise PluginError(
            f"{prefix}: {owner}.{method}{inspect.signature(function)} cannot be called with one argument, "
            f"the list of rollouts ({error}); expected {method}(self, rollouts)"
        ) from error
