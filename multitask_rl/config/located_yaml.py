"""YAML with places: every key knows its line, so that an error can point at it.

Two deviations from PyYAML's defaults, both because the default loses what the user wrote: a repeated key is
an error (PyYAML keeps the last), and ``1e-6`` is a number (YAML 1.1 reads it as text).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.errors import ConfigError

__all__ = ["OVERRIDE", "KeyPath", "Where", "load_yaml"]

KeyPath = tuple[str | int, ...]
OVERRIDE = -1
"""In place of a line: the value came from the command line or from Python."""


_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-6`` as a float."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# ours, whatever others do to SafeLoader: lm-format-enforcer, which vLLM imports, makes its dates text
_Loader.yaml_constructors = {
    **yaml.SafeLoader.yaml_constructors,
    "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp,
}


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the configuration; ``str(where)`` is ``file:line: key.path``."""

    file: str = ""
    path: KeyPath = ()
    lines: Mapping[KeyPath, int] = field(default_factory=dict, repr=False)

    def at(self, *keys: str | int) -> Where:
        """Return the place below this one."""
        return Where(self.file, (*self.path, *keys), self.lines)

    @property
    def line(self) -> int:
        """Line of the key, or of the nearest key around it that has one; 0 = none has."""
        for end in range(len(self.path), -1, -1):
            if line := self.lines.get(self.path[:end]):
                return line
        return 0

    @property
    def source(self) -> str:
        """``file:line``, or ``override`` for what did not come from the file."""
        if self.line == OVERRIDE:
            return "override"
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def keys(self) -> str:
        """The key path as text: ``tasks.math.rewards[0].weight``."""
        return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in self.path).lstrip(".")

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.keys) if part)


def load_yaml(path: str | Path) -> tuple[Any, Where]:
    """Return the document in ``path`` and the place of its root.

    Raises:
        ConfigError: unreadable, broken, holding several documents, a repeated key or an unknown tag.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        value = None if node is None else _construct(loader, node, Where(file, (), lines), lines, set())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{place}: not valid YAML: {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
    return value, Where(file, (), lines)


def _construct(
    loader: yaml.SafeLoader, node: yaml.Node, where: Where, lines: dict[KeyPath, int], open_nodes: set[int]
) -> Any:
    """Turn a node into plain values and note the line of every key in ``lines``."""
    lines.setdefault(where.path, node.start_mark.line + 1)
    if id(node) in open_nodes:
        raise ConfigError(f"{where}: an alias refers to the node that holds it")
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        raise ConfigError(f"{where}: not valid YAML here: the tag {node.tag!r} is not allowed")
    if isinstance(node, yaml.SequenceNode):
        inside = open_nodes | {id(node)}
        return [_construct(loader, n, where.at(i), lines, inside) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    _refuse_repeated_keys(node, where)
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ConfigError(
                f"{where.file}:{key_node.start_mark.line + 1}: keys must be text, got {key!r}; "
                f"write it in quotes if it is meant as a name"
            )
        here = where.at(key)
        lines[here.path] = key_node.start_mark.line + 1
        result[key] = _construct(loader, value_node, here, lines, open_nodes | {id(node)})
    return result


def _refuse_repeated_keys(node: yaml.MappingNode, where: Where) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
            continue
        line = key_node.start_mark.line + 1
        if key_node.value in seen:
            raise ConfigError(
                f"{where.file}:{line}: {where.at(key_node.value).keys}: key {key_node.value!r} is given "
                f"twice (first on line {seen[key_node.value]}); keep one of them"
            )
        seen[key_node.value] = line
