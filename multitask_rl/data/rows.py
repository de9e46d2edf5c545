"""Split of a task's rows into training rows and held-out rows.

Held-out rows are, in this order: ``eval_dataset``; the rows of ``eval_split``; the first of the splits
``validation``, ``dev`` that has rows; a tenth of the training rows, chosen by a hash of the row's id. Split
``test`` is used only if ``eval_split`` names it or no other rows can be held out. Its rows are
``ReportedRows``: guard, scheduler and best checkpoint do not read their results. The hash has no seed: a row
is held out in every run, so that runs are comparable and no held-out row leaks into training. Of streamed
data the first rows are known: held-out rows are among them, and training leaves out the rest of the tenth.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence, Sized
from numbers import Real
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.config.checks import GENERATOR_PREFIX, is_data_path
from multitask_rl.config.task import TaskSpec
from multitask_rl.data.readers import (
    GeneratedRows,
    ReportedRows,
    Row,
    Rows,
    RowView,
    StreamedRows,
    read_dataset_dict,
    read_file,
)
from multitask_rl.data.reasoning_gym import generate_rows
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin

logger = logging.getLogger(__name__)

_TEST = "test"
EVAL_SPLITS = ("validation", "dev", _TEST)
"""Splits not trained on, by preference."""
_HELD_OUT = 0.1


def load_rows(spec: TaskSpec, split: str, own: Mapping[str, Rows] | None = None) -> Rows:
    """Return the rows ``spec`` trains on or is evaluated on.

    Args:
        spec: the task.
        split: ``train`` or ``eval``.
        own: rows by split instead of ``spec.dataset``; the split "" holds rows that name none: they are
            trained on, and are enough for the split ``train``.

    Raises:
        DataError: missing, empty or malformed data, no row of this task or split.
        ConfigError: another ``split``, an ``eval_split`` that is trained on, or keys no task plugin knows.
    """
    if split not in ("train", "eval"):
        raise ConfigError(f"load_rows: split must be 'train' or 'eval', got {split!r}")
    if split == "train":
        return _read_and_split(spec, own, spec.split)[0]
    if not (spec.eval_dataset or spec.evaluation_only):
        return _split_rows(spec, _own_or_read(spec, own), spec.split)[1]
    splits = _read(spec, spec.eval_dataset) if spec.eval_dataset else _own_or_read(spec, own)
    named = spec.eval_split or next((s for s in EVAL_SPLITS if splits.get(s)), "")
    if named or len(splits) == 1:
        return _hold_out(spec, splits, named) if named else next(iter(splits.values()))
    return [row for rows in splits.values() for row in rows]


def load_both(
    spec: TaskSpec, own: Mapping[str, Rows] | None = None, train_split: str = ""
) -> tuple[Rows, Rows]:
    """Return the rows ``spec`` trains on, none with ``evaluation_only``, and those it is evaluated on.

    Data that has both is read once. ``train_split``: instead of ``spec.split``. Further arguments and errors:
    see ``load_rows``.
    """
    if spec.evaluation_only:
        return (), load_rows(spec, "eval", own)
    train, held_out = _read_and_split(spec, own, train_split)
    return train, load_rows(spec, "eval", own) if spec.eval_dataset else held_out


def _own_or_read(spec: TaskSpec, own: Mapping[str, Rows] | None) -> Mapping[str, Rows]:
    if own is None and not spec.dataset:
        raise DataError(f"{spec.where} has no data set")
    return _read(spec, spec.dataset) if own is None else _select(spec, own, "the rows given")


def _read_and_split(spec: TaskSpec, own: Mapping[str, Rows] | None, train_split: str) -> tuple[Rows, Rows]:
    """Return training and held-out rows, see ``_split_rows``; warn of rows that are used nowhere."""
    splits, wanted = _own_or_read(spec, own), train_split or spec.split
    train, held_out = _split_rows(spec, splits, wanted)
    for name, rows in splits.items():
        if rows and name not in ("", "train", wanted, spec.eval_split, *EVAL_SPLITS):
            logger.warning(
                "task %r: %s of split %r: used nowhere (split: %s, held out: %s); eval_split: %s holds "
                "them out",
                spec.name,
                counted(len(rows), "row"),
                name,
                wanted,
                spec.eval_split or "validation, dev, test, or a tenth",
                name,
            )
    return train, held_out


def _split_rows(spec: TaskSpec, splits: Mapping[str, Rows], wanted: str) -> tuple[Rows, Rows]:
    """Return training rows (split ``wanted``) and held-out rows: none beside an ``eval_dataset``."""
    if spec.eval_split == wanted and spec.eval_dataset in ("", spec.dataset):
        raise ConfigError(
            f"{spec.where}.eval_split: {wanted!r} is the split that is "
            "trained on, so nothing would be held out; name another, or give other rows in eval_dataset"
        )
    train = splits.get("") or ()
    are_enough = train and wanted == "train"
    if set(splits) != {""} and (splits.get(wanted) or not are_enough):
        named = _take(spec, splits, wanted)
        train = [*train, *named] if train else named
    if spec.eval_dataset:
        return train, train[:0]
    if spec.eval_split:
        return train, _hold_out(spec, splits, spec.eval_split)
    for name in EVAL_SPLITS:
        if name != wanted and splits.get(name) and (name != "test" or len(train) < 2):
            return train, _hold_out(spec, splits, name)
    # a tenth by hash; at least one row on each side where there are two
    keys = [_held_out_key(row) for row in train]
    border = max(_HELD_OUT, min(keys) + 1e-12)
    kept = [i for i, key in enumerate(keys) if key >= border]
    if not kept:
        return train, train
    held_out = RowView(train, [i for i, key in enumerate(keys) if key < border])
    if isinstance(train, StreamedRows):
        return train.only(lambda row: _held_out_key(row) >= border), held_out
    return RowView(train, kept), held_out


def _held_out_key(row: Row) -> float:
    """Return a number in [0, 1) that depends on the row's id alone."""
    digest = hashlib.blake2b(row_id(row).encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "big") / 2**64


def row_id(row: Row) -> str:
    """Return the row's ``id``, or a hash of its content: stable whatever the order of the rows."""
    given = row.get("id")
    return hashlib.blake2b(_canonical(row), digest_size=8).hexdigest() if given is None else str(given)


def _read(spec: TaskSpec, dataset: str) -> dict[str, Rows]:
    """Return the task's rows by split: those tagged with it, or all if they carry one tag only.

    Of these, ``select`` keeps some; where it names the column ``task``, it decides instead of the tags. A
    renamed task has the rows of its former name if none have its present one.
    """
    if dataset.startswith("plugin:"):
        return _select(spec, _read_plugin(spec, dataset.removeprefix("plugin:")), dataset)
    if dataset.startswith(GENERATOR_PREFIX):
        return _select(spec, generate_rows(spec, dataset.removeprefix(GENERATOR_PREFIX)), dataset)
    where = f"{spec.where}.{'eval_dataset' if dataset == spec.eval_dataset else 'dataset'}"
    if is_data_path(dataset):
        whole = {"": read_file(dataset, where)}
    else:
        whole = read_dataset_dict(dataset, spec.dataset_config, where)
    grouped = group_rows(whole, by="" if "task" in spec.select else "task")
    name = spec.name
    if name not in grouped and spec.renamed_from and spec.renamed_from in grouped:
        name = spec.renamed_from
    if name not in grouped:
        if len(grouped) == 1:
            return _select(spec, next(iter(grouped.values())), dataset)
        raise DataError(
            f"data set {dataset!r} has no row of task {spec.name!r}; its rows carry task: "
            f"{', '.join(tag or '(none)' for tag in sorted(grouped))}. Rename the task or give it other data"
        )
    sizes = {tag or "(none)": sum(map(len, parts.values())) for tag, parts in grouped.items()}
    if others := ", ".join(f"{size} of {tag}" for tag, size in sorted(sizes.items()) if tag != name):
        logger.info(
            "task %s: of %s only the rows are taken whose column `task` says %r; left out: %s",
            *(spec.name, dataset, name, others),
        )
    return _select(spec, grouped[name], dataset)


def _select(spec: TaskSpec, splits: Mapping[str, Rows], source: str) -> dict[str, Rows]:
    """Return the rows by split of ``source`` that have the values of ``spec.select``; without it all."""
    if not spec.select:
        return dict(splits)
    wanted = {column: v if isinstance(v, (list, tuple)) else [v] for column, v in spec.select.items()}

    def is_one_of(value: Any, values: Sequence[Any]) -> bool:
        # True equals 1, and an array has no truth
        is_plain = isinstance(value, (str, Real))
        return is_plain and any(isinstance(v, bool) == isinstance(value, bool) and v == value for v in values)

    def is_chosen(row: Row) -> bool:
        return all(is_one_of(row.get(column), values) for column, values in wanted.items())

    chosen: dict[str, Rows] = {}
    for name, rows in splits.items():
        if isinstance(rows, StreamedRows):
            chosen[name] = rows.only(is_chosen)
        else:
            chosen[name] = RowView(rows, [i for i, row in enumerate(rows) if is_chosen(row)])
    if not any(map(len, chosen.values())):
        known = [row for rows in splits.values() for row in rows]
        have = []
        for column in wanted:
            values = sorted({repr(row[column]) for row in known if column in row})
            more = ", ..." if len(values) > 8 else ""
            have.append(f"{column} has {', '.join(values[:8])}{more}" if values else f"no row has {column}")
        is_streamed = any(isinstance(rows, StreamedRows) for rows in splits.values())
        of = (
            f"none of the first rows of {source} ({len(known)}) has"
            if is_streamed
            else f"no row of {source} has"
        )
        raise DataError(f"{spec.where}.select: {of} {dict(spec.select)} ({'; '.join(have)})")
    return chosen


def group_rows(whole: Mapping[str, Rows], by: str = "task") -> dict[str, dict[str, Rows]]:
    """Return the rows by task tag ("" = none) and split, from rows by split ("" = look at their column).

    ``by``: the column of tags; "" = no row has one. Tags of streamed rows are those of the first rows; their
    split "" is ``train``.
    """
    grouped: dict[str, dict[str, Rows]] = {}

    def tag_of(row: Row) -> str:
        return str(row.get(by) or "") if by else ""

    for name, rows in whole.items():
        if isinstance(rows, StreamedRows):
            for tag in sorted({tag_of(row) for row in rows}):
                own = rows.only(lambda row, tag=tag: tag_of(row) == tag)  # type: ignore[misc]
                grouped.setdefault(tag, {})[name or "train"] = own
            continue
        indices: dict[tuple[str, str], list[int]] = {}
        for index, row in enumerate(rows):
            key = (tag_of(row), name or str(row.get("split") or ""))
            indices.setdefault(key, []).append(index)
        for (tag, split), chosen in indices.items():
            grouped.setdefault(tag, {})[split] = RowView(rows, chosen)
    return grouped


def _read_plugin(spec: TaskSpec, name: str) -> dict[str, Rows]:
    task = build_plugin(
        load_plugin(TASKS, name, expects=["rows"]),
        spec.dataset_config,
        where=f"{spec.where}.dataset_config",
    )
    kept_apart = tuple(getattr(task, "evaluation_splits", ()))
    if spec.split in kept_apart and not spec.evaluation_only:
        raise DataError(
            f"{spec.where}.split: the task would train on split {spec.split!r} of {name!r}, "
            f"which is kept for evaluation ({', '.join(kept_apart)}); train on another split, or set "
            "evaluation_only: true"
        )
    splits: dict[str, Rows] = {}
    offered = EVAL_SPLITS if spec.evaluation_only else EVAL_SPLITS[:-1]
    for split in [spec.eval_split] if spec.eval_split else offered:
        if split != spec.split and (rows := _rows_of_plugin(spec, name, task, split)):
            splits[split] = rows
            break
    if not (spec.evaluation_only and splits):
        splits[spec.split] = _rows_of_plugin(spec, name, task, spec.split)
    if not any(len(rows) for rows in splits.values()):
        raise DataError(f"{spec.where}.dataset: {name!r} gave no rows for the splits {', '.join(splits)}")
    return splits


def _rows_of_plugin(spec: TaskSpec, name: str, task: Any, split: str) -> Rows:
    where = f"{spec.where}.dataset"
    try:
        rows: Rows = [] if (given := task.rows(split)) is None else given
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(rows, Sized) or isinstance(rows, Mapping):  # a ``Dataset`` is no ``Sequence``
        raise DataError(
            f"{where}: rows({split!r}) of {name!r} returned a {type(rows).__name__}, not a list of mappings"
        )
    if len(rows) and not isinstance(rows[0], Mapping):
        raise DataError(
            f"{where}: row {rows[0]!r:.200} of {name!r} is no mapping; "
            f"rows({split!r}) has to return a list of mappings"
        )
    return rows


def _take(spec: TaskSpec, splits: Mapping[str, Rows], split: str) -> Rows:
    rows = splits.get(split) or ()
    if not rows:
        have = ", ".join(f"{name or '(none)'}: {counted(len(r), 'row')}" for name, r in splits.items())
        raise DataError(
            f"{spec.where}.{'split' if split == spec.split else 'eval_split'}: no rows of split {split!r} "
            f"(there are {have}); set 'split' or 'eval_split' to one that has"
            + (", or leave it out: the rows name no split" if set(splits) == {""} else "")
        )
    return rows


def _hold_out(spec: TaskSpec, splits: Mapping[str, Rows], split: str) -> Rows:
    rows = _take(spec, splits, split)
    return ReportedRows(rows, range(len(rows))) if split == _TEST else rows


def fingerprint(rows: Rows) -> str:
    """Return a hash of all rows; of a generator, whose rows are slow to make, of their number and 64 rows."""
    step = max(1, len(rows) // 64) if isinstance(rows, GeneratedRows) else 1
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=8)
    for index in range(0, len(rows), step):
        digest.update(_canonical(rows[index]))
    return digest.hexdigest()


def _canonical(row: Row) -> bytes:
    return json.dumps(dict(row), sort_keys=True, default=str, ensure_ascii=False).encode()
