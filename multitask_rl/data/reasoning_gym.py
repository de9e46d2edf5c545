"""Rows of reasoning-gym generators: ``dataset: reasoning_gym:<name>``, prompts and verifier in one line.

Training rows and evaluation rows are made from seeds derived apart, so that neither is a shift of the other;
neither depends on the run's seed, so that numbers of different runs compare. A small generator can draw the
same question for training and evaluation (there are few ways to flip two coins); such rows are not removed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.checks import GENERATOR_PREFIX
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.task import TaskSpec
from multitask_rl.data.readers import GeneratedRows, Row, Rows
from multitask_rl.errors import ConfigError, PluginError, import_extra
from multitask_rl.seeding import derive_seed

_SIZE = 1000
_LITERAL = "metadata_literal"


def _rows(label: str, generator: Any, count: int) -> GeneratedRows:
    def row(index: int) -> Row:
        entry = generator[index]
        question, metadata = str(entry["question"]), _plain(entry["metadata"])
        return {
            "id": f"{label}-{index}",
            "prompt": question,
            "question": question,
            # Some puzzles have no answer of their own: whatever solves them is right.
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "metadata": json.loads(json.dumps(metadata, default=str)),
            # JSON turns tuples into lists and numbers as keys into text; some verifiers compare with ==.
            _LITERAL: repr(metadata),
        }

    return GeneratedRows(count, row)


def generate_rows(spec: TaskSpec, name: str) -> dict[str, Rows]:
    """Return the rows of generator ``name`` by split: ``train`` and ``validation``.

    ``spec.dataset_config`` holds the generator's own keys, ``size`` (training rows, default 1000; a tenth as
    many are held out; all are evaluated on if the task is evaluation_only) and ``seed``. Rows are made when
    asked for, with the columns ``id``, ``prompt``, ``question``, ``answer``, ``metadata`` and
    ``metadata_literal`` (see ``entry_of``); all of them JSON. Raises as ``create_generator``.
    """
    where = f"{spec.where}.dataset_config"
    given = dict(spec.dataset_config)
    size, seed = given.pop("size", _SIZE), given.pop("seed", 0)
    for key, value, low in (("size", size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(f"{where}.{key}: expected a whole number >= {low}, got {value!r}")
    sizes = {"train": size, "validation": size if spec.evaluation_only else max(1, size // 10)}
    splits: dict[str, Rows] = {}
    for split, count in sizes.items():
        # numpy's generators take 32 bits, and generators add the row's number to their seed.
        start = derive_seed(seed, "reasoning_gym", name, split) % 2**31
        generator = create_generator(name, {**given, "size": count, "seed": start}, where)
        splits[split] = _rows(f"{name}-{split}", generator, count)
    return splits


def create_generator(name: str, config: Mapping[str, Any], where: str) -> Any:
    """Return the reasoning-gym data set ``name``; raise if it, the library or one of the keys is unknown."""
    needs = f"{where}: '{GENERATOR_PREFIX}{name}' needs reasoning-gym"
    library = import_extra("reasoning_gym", "reasoning-gym", needs)
    known = library.factory.DATASETS
    if name not in known:
        raise PluginError(
            f"{where}: unknown reasoning-gym data set {name!r}{suggest(name, known)} "
            f"({len(known)} are installed)"
        )
    kind, config_class = known[name]
    built = build_dataclass(config_class, config, Where(path=(where,)))
    try:
        if hasattr(built, "validate"):
            built.validate()
        return kind(config=built)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: {GENERATOR_PREFIX}{name}: {error}") from error


def entry_of(row: Row) -> dict[str, Any]:
    """Return the generator's own entry of a row: ``metadata`` with its tuples and numbers as keys again."""
    entry = dict(row)
    literal = entry.pop(_LITERAL, None)
    if isinstance(literal, str):
        entry["metadata"] = ast.literal_eval(parse_python(literal, mode="eval"))
    return entry


def answer_in(text: str, tag: str) -> str:
    """Return the content of the last ``<tag>...</tag>``; ``text`` if it has none, or ``tag`` is empty."""
    if tag:  # no regular expression: the text may be hostile
        start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
        end = text.find(f"</{tag}>", start)
        if 0 <= start < end:
            return text[start + len(tag) + 2 : end]
    return text


def score_of(generator: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the verifier's score of ``answer``; 0 if the verifier raises, as some do for unreadable answers.

    An exception would leave the answer unscored, and the actor could avoid low scores by such answers. If
    the verifier raises for the entry's own answer too, entry or settings are the cause: it is raised.
    """
    try:
        return float(generator.score_answer(answer=answer.strip() or None, entry=entry))
    except Exception:  # noqa: BLE001 - a verifier raises what it likes
        generator.score_answer(answer=entry["answer"] or None, entry=entry)
        return 0.0


def _plain(value: Any) -> Any:
    """Return ``value`` without numpy scalars and subclasses of text, whose ``repr`` is no literal."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value
