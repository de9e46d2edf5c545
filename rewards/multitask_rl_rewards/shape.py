"""Rewards on the shape of a response: ``length``, ``repetition``, ``regex``, ``format`` and ``json_schema``.

They ignore the meaning: use them with a small weight beside a reward of content, or as a metric (weight 0).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import Count, Natural, OneOf, Range, Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError, import_extra
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import answer_of, data_failure

_FENCE = re.compile(r"\A\s*```(?:json)?(.*?)```\s*\Z", re.DOTALL | re.IGNORECASE)

_LONGEST_WORD = 50
_TYPES = ["array", "boolean", "null", "number", "object", "string"]


class Length:
    """1 inside [minimum, maximum], falling linearly to 0 over ``slack`` outside; an empty response is 0.

    The length of an episode is that of its last answer.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``length`` in a tasks file."""

        unit: Annotated[str, OneOf("words", "chars", "tokens")] = "words"
        """``words`` (between spaces), ``chars`` or ``tokens`` (of the actor, its end token included)."""
        minimum: Natural = 1
        """Shortest length with full reward."""
        maximum: Natural = 200
        """Longest length with full reward."""
        slack: Natural = 50
        """Units over which the reward falls to 0; 0 = at once."""

    def __init__(self, config: Config) -> None:
        """Check the configuration.

        Raises:
            ConfigError: ``minimum`` above ``maximum``.
        """
        if config.minimum > config.maximum:
            raise ConfigError(f"length: needs `minimum` <= `maximum`; got {config}.")
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value per rollout, the length as a component."""
        return [self._score_one(rollout) for rollout in rollouts]

    def _score_one(self, rollout: Rollout) -> Score:
        config, text = self.config, rollout.response
        # of an episode, ``response_ids`` are those of all answers
        num_tokens = rollout.turns[-1].num_tokens if rollout.turns else len(rollout.response_ids)
        by_unit = {"words": len(text.split()), "chars": len(text), "tokens": num_tokens}
        length = by_unit[config.unit]
        outside = max(config.minimum - length, length - config.maximum, 0)
        value = 1.0 if outside == 0 else max(0.0, 1.0 - outside / (config.slack or 1))
        if not text.strip() or (outside and not config.slack):
            value = 0.0
        return Score(value=value, components={"length": float(length)})


class Repetition:
    """1 minus the share of n-grams that repeat an earlier one; an empty response is 0.

    Of a response shorter than 2 n words the n-grams are half as long as it is. A word of more than 50 letters
    counts as that many words of one letter.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``repetition`` in a tasks file."""

        n: Count = 4
        """Words per n-gram."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value per rollout."""
        return [Score(value=self._value(rollout.response)) for rollout in rollouts]

    def _value(self, text: str) -> float:
        words = [
            part for word in text.lower().split() for part in (word if len(word) > _LONGEST_WORD else [word])
        ]
        if not words:
            return 0.0
        n = min(self.config.n, max(1, len(words) // 2))
        grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        return len(grams) / grams.total()


class Regex:
    """1 if the pattern is found in the response (``full``: if it matches the whole), else 0.

    A pattern that backtracks for ever is stopped by the pool's time limit.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, timeout_s=5.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Keys of ``regex`` in a tasks file."""

        pattern: str = ""
        """Python regular expression; ``.`` matches line ends, ``^`` and ``$`` match at lines. Required."""
        full: bool = False
        """The whole response, without surrounding space, must match."""
        absent: bool = False
        """Reward the absence of the pattern; an empty response is 0 all the same."""

    def __init__(self, config: Config) -> None:
        """Compile the pattern.

        Raises:
            ConfigError: empty, or no regular expression.
        """
        try:
            self._pattern = re.compile(config.pattern, re.DOTALL | re.MULTILINE)
        except re.error as error:
            raise ConfigError(
                f"regex: `pattern` {config.pattern!r} is not a regular expression: {error}"
            ) from error
        if not config.pattern:
            raise ConfigError("regex: `pattern` is required; an empty one matches everything.")
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return 1 or 0 per rollout."""
        return [Score(value=float(self._holds(rollout.response.strip()))) for rollout in rollouts]

    def _holds(self, text: str) -> bool:
        found = self._pattern.fullmatch(text) if self.config.full else self._pattern.search(text)
        return bool(text) and (found is None) == self.config.absent


class Format:
    """1 if the response is the given tags in order, each once and not empty, and nothing else; else 0.

    If the prompt ends with the first tag, the response may begin behind it.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Keys of ``format`` in a tasks file."""

        tags: list[str] = field(default_factory=lambda: ["think", "answer"])
        """Names, in order: ``<think>...</think><answer>...</answer>``; at least one."""

    def __init__(self, config: Config) -> None:
        """Check the tags.

        Raises:
            ConfigError: none, or one that is no name.
        """
        if not config.tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in config.tags):
            raise ConfigError(
                f"format: `tags` must be a list of names like think or answer; got {config.tags}."
            )
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return 1 or 0 per rollout."""
        return [Score(value=float(self._holds(rollout))) for rollout in rollouts]

    def _holds(self, rollout: Rollout) -> bool:
        text, first = rollout.response.strip(), f"<{self.config.tags[0]}>"
        if rollout.prompt.text.rstrip().endswith(first) and not text.startswith(first):
            text = first + text
        for tag in self.config.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
                return False
            body, _, text = text[len(opening) :].partition(closing)
            if not body.strip():
                return False
            text = text.lstrip()
        return not text


class JsonSchema:
    """1 if the response is JSON that fits the schema, ``invalid`` if it does not, 0 if it is no JSON.

    Component ``valid``: 1 if it fits, else 0.

    JSON of another ``type`` than the schema has at its top scores 0, as NaN and Infinity do: if that is
    ``object``, ``0`` and ``[]`` earn nothing. A markdown fence around the whole response is allowed;
    text beside it is not. The schema is the configuration's, else the row's column ``schema``.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, timeout_s=5.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``json_schema`` in a tasks file."""

        schema: dict[str, Any] = field(default_factory=dict)
        """JSON schema; empty = the row's."""
        schema_column: str = "schema"
        """Column with the schema: a mapping, or its JSON text."""
        invalid: Annotated[float, Range("[0, 1]")] = 0.5
        """Value of JSON that does not fit. ``{}`` earns it, too: 0 where another reward pays for the form."""

    def __init__(self, config: Config) -> None:
        """Check the schema.

        Raises:
            ConfigError: it is not a JSON schema.
            MissingExtraError: ``jsonschema`` is not installed.
        """
        self.config = config
        if config.schema and (problem := _schema_problem(config.schema)):
            raise ConfigError(f"json_schema: `schema` is not a JSON schema: {problem}")

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value per rollout; a row without a usable schema is a ``data`` failure."""
        return [self._score_one(rollout) for rollout in rollouts]

    def _score_one(self, rollout: Rollout) -> RewardResult:
        schema = self.config.schema or _row_schema(rollout.row.get(self.config.schema_column))
        if isinstance(schema, Failure):
            return schema
        text = answer_of(rollout).strip()
        fence = _FENCE.match(text)
        try:
            value = json.loads(fence[1] if fence else text, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return Score(value=0.0, components={"valid": 0.0})
        validator = _validator(schema)
        from referencing.exceptions import Unresolvable

        try:
            fits = validator.is_valid(value)
            earns = fits or validator.evolve(schema={"type": schema.get("type", _TYPES)}).is_valid(value)
        except Unresolvable as error:
            return data_failure(f"the schema refers to {error.ref!r}, which it does not hold", "json_schema")
        except (ArithmeticError, ValueError):  # `multipleOf` of 1e999, which is infinite
            fits, earns = False, True
        value = 1.0 if fits else self.config.invalid * earns
        return Score(value=value, components={"valid": float(fits)})


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _row_schema(value: Any) -> Mapping[str, Any] | Failure:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        return data_failure(f"the row's schema is not JSON: {error}", "json_schema")
    if not isinstance(schema, Mapping) or not schema:
        return data_failure("neither the configuration nor the row holds a schema", "json_schema")
    problem = _schema_problem(schema)
    return (
        data_failure(f"the row's schema is not a JSON schema: {problem}", "json_schema")
        if problem
        else schema
    )


def _validator(schema: Mapping[str, Any]) -> Any:
    needs = "json_schema validates through jsonschema"
    validators = import_extra("jsonschema.validators", "eval", needs)
    specifications = import_extra("jsonschema_specifications", "eval", needs)
    # with its own registry nothing is fetched: by default a remote $ref is, by http or from a local file
    return validators.validator_for(schema)(schema, registry=specifications.REGISTRY)


def _schema_problem(schema: Mapping[str, Any]) -> str:
    """Return what is wrong with a schema, empty if nothing is."""
    validator = _validator(schema)
    from jsonschema.exceptions import SchemaError

    try:
        type(validator).check_schema(schema)
        outside = _outside(schema)
    except SchemaError as error:
        return str(error.message)
    except RecursionError:
        return "it is nested too deep"
    if outside:
        return f"it refers to {outside!r}, which is not fetched: put that schema under $defs"
    return ""


def _outside(schema: Any) -> str:
    """Return the first ``$ref`` that is neither in ``schema`` nor one of JSON Schema's own; "" if none is."""
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    found, waiting = list[str](), [schema]
    known = {""}
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            own = {key: value for key, value in item.items() if isinstance(value, str)}
            known.update(own[key].partition("#")[0] for key in ("$id", "id") if key in own)
            found += [own[key] for key in ("$ref", "$dynamicRef") if key in own]
        if isinstance(item, (Mapping, list)):
            waiting += item.values() if isinstance(item, Mapping) else item
    return next((r for r in found if (uri := r.partition("#")[0]) not in known and uri not in REGISTRY), "")
