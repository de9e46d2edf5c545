"""YAML with places: every key has its line, so an error can name it.

Two differences from PyYAML: a repeated key is an error (PyYAML keeps the last), and ``1e-6`` is a number
(YAML 1.1 reads it as text).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from multitask_rl.errors import ConfigError, path_errors

KeyPath = tuple[str | int, ...]
OVERRIDE = -1
"""Line of a value from the command line or from Python."""

MAX_BYTES = 1 << 23
"""Size of a configuration file at most."""
MAX_NODES = 200_000
"""Values in a document at most; a few aliases of aliases can otherwise exceed the memory."""

_MAX_DEPTH = 60
_NO_TEXT = re.compile("[\x00\ud800-\udfff]")
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class _Rules(yaml.constructor.SafeConstructor):
    """Bounds what ``<<`` merges."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"'<<' merges more than {MAX_NODES} keys", node.start_mark
            )


class _Loader(_Rules, yaml.SafeLoader):
    """SafeLoader that reads ``1e-6`` as a float."""


if yaml.__with_libyaml__:

    class _FastLoader(yaml.composer.Composer, _Rules, yaml.CSafeLoader):
        """Parses with libyaml, in a fraction of the time; its errors say less, so ``_Loader`` reports them.

        The nodes are made in Python: libyaml's own recursion would end the process in a deep nesting.
        """

        def __init__(self, text: str) -> None:
            yaml.composer.Composer.__init__(self)
            yaml.CSafeLoader.__init__(self, text)

else:
    _FastLoader = _Loader  # type: ignore[assignment, misc]

for _kind in (_Loader, _FastLoader):
    _kind.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
    # other packages change SafeLoader: lm-format-enforcer, which vLLM imports, reads dates as text
    _kind.yaml_constructors = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp,
    }


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the configuration; ``str(where)`` is ``file:line: key.path``."""

    file: str = ""
    path: KeyPath = ()
    lines: dict[KeyPath, int] = field(default_factory=dict, repr=False)

    def at(self, *keys: str | int) -> Where:
        """Return the place below this one."""
        return Where(self.file, (*self.path, *keys), self.lines)

    @property
    def line(self) -> int:
        """Line of the key, or of the nearest key above it that has one; 0 = none has."""
        ends = range(len(self.path), -1, -1)
        return next((line for end in ends if (line := self.lines.get(self.path[:end]))), 0)

    @property
    def source(self) -> str:
        """``file:line``, or ``override`` for a value that is not from the file."""
        if self.line == OVERRIDE:
            return "override"
        return f"{self.file}:{self.line}" if self.line else self.file

    def source_of(self, text: str) -> str:
        """Return the ``source`` of the key that ``text`` (``.a[0].b: ...``) begins with, below this place.

        If the file has no such key, it is that of the nearest key above it.
        """
        found = self
        for path in self.lines:
            if len(path) > len(found.path) and path[: len(self.path)] == self.path:
                here = Where(self.file, path, self.lines)
                rest = text.removeprefix(here.keys[len(self.keys) :])
                if rest != text and not re.match(r"[\w-]", rest):
                    found = here
        return found.source

    @property
    def keys(self) -> str:
        """The key path as text: ``tasks.math.rewards[0].weight``."""
        return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in self.path).lstrip(".")

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.keys) if part)


def load_yaml(path: str | Path) -> tuple[Any, Where]:
    """Return the document in ``path``, and the place of its root.

    Raises:
        ConfigError: the file cannot be read, has more than ``MAX_BYTES``, or as ``parse_yaml``.
    """
    file = str(path)
    with path_errors("the file", path, "the path of a YAML file in UTF-8, such as tasks.yaml"):
        try:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except ValueError as error:  # the path holds a NUL or a lone surrogate
            raise OSError(f"no file has such a name: {error}") from error
        if len(data) > MAX_BYTES:
            raise ConfigError(
                f"{file}: larger than {MAX_BYTES} bytes: no configuration is; is it a data file?"
            )
        text = data.decode("utf-8")
    return parse_yaml(text, file)


def parse_yaml(text: str, file: str) -> tuple[Any, Where]:
    """Return the YAML document in ``text`` and the place of its root; messages name it ``file``.

    Raises:
        ConfigError: broken YAML, several documents, a repeated key, an unknown tag, a value that
            ``check_scalar`` refuses, more than ``MAX_NODES`` values (aliases count each time), or too deep.
    """
    lines: dict[KeyPath, int] = {}
    try:
        node, loader = _compose(text)
        value = None if node is None else _Reader(loader, lines).read(node, Where(file, (), lines))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = " ".join(filter(None, (error.context, error.problem)))
        hint = "; indent with spaces" if "'\\t'" in problem else ""
        if "mapping values are not allowed" in problem:
            hint = "; put a text with ': ' in quotes, or indent the line like those beside it"
        raise ConfigError(f"{place}: not valid YAML: {problem}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: lists and mappings are nested too deep") from error
    return value, Where(file, (), lines)


def _compose(text: str) -> tuple[yaml.Node | None, yaml.SafeLoader]:
    """Return the root node of the only document in ``text``, and the loader that constructs its values."""
    loader: Any
    try:
        loader = _FastLoader(text)
        return loader.get_single_node(), loader
    except (yaml.YAMLError, UnicodeError):
        loader = _Loader(text)
        return loader.get_single_node(), loader


def check_scalar(value: Any, where: Where) -> None:
    """Raise ``ConfigError`` for text with a NUL or a lone surrogate, and for numbers beyond 64 bits."""
    if isinstance(value, str) and (found := _NO_TEXT.search(value)):
        raise ConfigError(f"{where}: text must not hold the character {found[0]!a}, got {value!r:.80}")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(
            f"{where}: a whole number must fit into 64 bits, got one of {value.bit_length()} bits"
        )


def check_plain(value: Any, where: Where, depth: int = 0) -> None:
    """Check plain values that are not from a file against the limits of a file; ``ConfigError`` beyond."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{where}: lists and mappings are nested too deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_scalar(key, where)
            check_plain(item, where.at(str(key)), depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(item, where.at(index), depth + 1)
    else:
        check_scalar(value, where)


class _Reader:
    """Turns nodes into plain values and writes the line of every key into ``lines``."""

    def __init__(self, loader: yaml.SafeLoader, lines: dict[KeyPath, int]) -> None:
        self._loader = loader
        self._lines = lines
        self._open: set[int] = set()
        self._count = 0

    def read(self, node: yaml.Node, where: Where) -> Any:
        """Return the value of ``node``, which stands at ``where``."""
        self._lines.setdefault(where.path, node.start_mark.line + 1)
        self._count += 1
        if self._count > MAX_NODES:
            raise ConfigError(f"{where}: more than {MAX_NODES} values; every use of an alias counts")
        if id(node) in self._open:
            raise ConfigError(f"{where}: an alias refers to the node that holds it")
        if not isinstance(node, yaml.CollectionNode):
            return self._scalar(node, where)
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(f"{where}: not valid YAML here: the tag {node.tag!r} is not allowed")
        if len(where.path) > _MAX_DEPTH:
            raise ConfigError(f"{where.file}:{node.start_mark.line + 1}: nested too deep")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(n, where.at(i)) for i, n in enumerate(node.value)]
            return self._mapping(cast("yaml.MappingNode", node), where)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
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
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = Where(f"{where.file}:{key_node.start_mark.line + 1}")
            key = self._scalar(key_node, place) if isinstance(key_node, yaml.ScalarNode) else key_node.value
            if not isinstance(key, str):
                told = f"{key!r}" if isinstance(key_node, yaml.ScalarNode) else f"a {key_node.id}"
                raise ConfigError(
                    f"{place}: keys must be text, got {told}; write it in quotes if it is meant as a name"
                )
            here = where.at(key)
            self._lines[here.path] = key_node.start_mark.line + 1
            result[key] = self.read(value_node, here)
        return result

    def _scalar(self, node: yaml.Node, where: Where) -> Any:
        try:
            value = self._loader.construct_object(node, deep=True)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            # PyYAML raises these for impossible dates, huge numbers and ``!!bool x``
            raise ConfigError(f"{where}: {node.value!r:.80} is no value of its type") from error
        check_scalar(value, where)
        return value
