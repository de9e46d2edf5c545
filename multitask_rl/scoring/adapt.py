"""From a reference of the tasks file to a reward or constraint of ``contracts.py``.

A reference is an entry-point name, ``module:object``, ``file.py:object``, or what follows a prefix of
``foreign.py``. The object is a class with ``Config``, a ready instance, or a function (``shapes.py``).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from multitask_rl.config.task import RewardSpec
from multitask_rl.contracts import PluginTraits, Reward
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.plugins import CONSTRAINTS, REWARDS, Located, build_config, build_plugin, locate
from multitask_rl.scoring.foreign import FOREIGN, ForeignReward, build_foreign
from multitask_rl.scoring.shapes import UNDECLARED, FunctionPlugin

_METHOD = {"reward": "score", "constraint": "judge"}
_GROUP = {"reward": REWARDS, "constraint": CONSTRAINTS}


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that is found and has the right shape, but is not built: no model is loaded."""

    kind: str
    """``reward`` or ``constraint``."""
    reference: str
    located: Located
    where: str

    @property
    def traits(self) -> PluginTraits:
        """The declared traits; a plugin without any is not cached."""
        traits = getattr(self.located.value, "traits", UNDECLARED)
        if not isinstance(traits, PluginTraits):
            what = f"{self.where}: {self.kind} {self.reference!r}"
            raise PluginError(f"{what}: its 'traits' is {traits!r}, expected a PluginTraits")
        return traits

    def isolates(self, config: Mapping[str, Any]) -> bool:
        """Whether it runs in worker processes: its ``isolates`` says so, or its traits."""
        decide = getattr(self.located.value, "isolates", None)
        return self.traits.isolate if decide is None else bool(decide(config))

    def takes(self, key: str) -> bool:
        """Whether its ``Config`` has a field ``key``."""
        config = getattr(self.located.value, "Config", None)
        return dataclasses.is_dataclass(config) and any(f.name == key for f in dataclasses.fields(config))

    def check(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Check ``config`` without loading a model; return the columns it needs. Raises as ``build``."""
        value = self.located.value
        if isinstance(value, type) and not (issubclass(value, ForeignReward) and value.is_function):
            built_config = build_config(value, config, where=f"{self.where}.config")
            columns_of = getattr(value, "columns_of", None)
            if columns_of is None:
                return ()
            columns = columns_of(built_config)
            found = (
                tuple(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else (None,)
            )
            if not all(isinstance(column, str) for column in found):
                what = f"{self.where}: {self.kind} {self.reference!r}"
                raise PluginError(f"{what}: its 'columns_of' gives {columns!r}, expected names of columns")
            return found
        built = self.build(config)
        return built.columns if isinstance(built, FunctionPlugin | ForeignReward) else ()

    def build(self, config: Mapping[str, Any]) -> Any:
        """Return the reward or constraint; raises as ``plugins.build_plugin``, and for a wrong shape."""
        value, where = self.located.value, f"{self.where}.config"
        if isinstance(value, type):
            built = build_plugin(value, config, where=where)
        elif hasattr(value, _METHOD[self.kind]):
            if config:
                raise ConfigError(
                    f"{where}: {self.reference!r} is a ready object and takes no configuration; leave config "
                    "out, or name its class"
                )
            built = value
        else:
            built = FunctionPlugin(value, self.located.label, config, self.where, self.reference)
        if not isinstance(getattr(built, "traits", UNDECLARED), PluginTraits):
            raise PluginError(f"{where}: {self.reference!r}: its 'traits' is not a PluginTraits")
        return built


def find_plugin(kind: str, reference: str, where: str) -> PluginSource:
    """Find the plugin ``reference`` of ``kind``, named ``where`` in the tasks file; check its shape.

    Raises:
        PluginError: unknown, broken, or neither a function nor a class with the method of its kind.
        MissingExtraError: it needs an optional dependency that is not installed.
    """
    prefix, separator, _ = reference.partition(":")
    if separator and prefix in FOREIGN:
        if kind == "constraint":
            what = f"the prefix {prefix!r} is for rewards; {reference!r} is a constraint here"
            raise PluginError(f"{where}: {what}")
        located = build_foreign(FOREIGN, reference, where)
    else:
        located = locate(reference, _GROUP[kind], where)
    value, method, other = located.value, _METHOD[kind], "judge" if kind == "reward" else "score"
    prefix = f"{where}: {kind} {reference!r}"
    function = getattr(value, method, None)
    if function is None and not callable(value):
        raise PluginError(f"{prefix} is {value!r}; expected a function or a class with {method}(rollouts)")
    if function is None and isinstance(value, type):
        is_other = hasattr(value, other)
        hint = f" It has {other}(): is it a {'constraint' if kind == 'reward' else 'reward'}?" * is_other
        raise PluginError(f"{prefix}: the class {value.__qualname__} has no method {method}(rollouts).{hint}")
    if function is not None:  # otherwise a function: FunctionPlugin reads its parameters
        try:
            inspect.signature(function).bind(*["instance"] * isinstance(value, type), "rollouts")
        except TypeError as error:
            owner = value.__qualname__ if isinstance(value, type) else type(value).__qualname__
            raise PluginError(
                f"{prefix}: {owner}.{method}{inspect.signature(function)} cannot be called with one "
                f"argument, the list of rollouts ({error}); expected {method}(self, rollouts)"
            ) from error
    return PluginSource(kind, reference, located, where)


def resolve_reward(spec: RewardSpec, where: str) -> Reward:
    """Return the reward of ``spec``; raises as ``find_plugin`` and ``PluginSource.build``."""
    reward: Reward = find_plugin("reward", spec.plugin, where).build(spec.config)
    return reward
