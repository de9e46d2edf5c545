"""Files and hubs into sequences of rows, without holding parsed rows in memory.

JSON lines are scanned once (so that a bad line is found before the run) and parsed again when a row is asked
for: the cost in memory is one offset per row. Parquet and Hugging Face data stay in Arrow.
"""

from __future__ import annotations

import gzip
import json
import mmap
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from multitask_rl.errors import DataError

__all__ = ["GeneratedRows", "Row", "RowView", "Rows", "read_dataset_dict", "read_file"]

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]


class _Lazy(Sequence[Row]):
    """Rows made when asked for."""

    def __init__(self, length: int, get: Callable[[int], Row]) -> None:
        self._length = length
        self._get = get

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._get(index % self._length)


class RowView(_Lazy):
    """Some rows of ``rows``, in the order of ``indices``."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        chosen = array("Q", indices)
        super().__init__(len(chosen), lambda i: rows[chosen[i]])


class GeneratedRows(_Lazy):
    """Rows that a program makes: all have the same columns, and making one may be slow."""


def read_file(path: str | Path) -> Rows:
    """Return the rows of a .jsonl, .jsonl.gz, .json or .parquet file.

    Raises:
        DataError: missing, unreadable, without rows, or with a line that is no JSON object (names the line).
    """
    place = Path(path).expanduser()
    name = place.name
    try:
        if name.endswith(".jsonl.gz"):
            with gzip.open(place) as file:
                rows = _read_lines(file.read(), place)
        elif name.endswith(".jsonl"):
            rows = _read_lines(_map_file(place), place)
        elif name.endswith(".json"):
            rows = _read_json(place)
        elif name.endswith(".parquet"):
            rows = _read_parquet(place)
        else:
            raise DataError(f"{place}: unknown kind of data set; allowed: .jsonl, .jsonl.gz, .json, .parquet")
    except (OSError, EOFError) as error:
        raise DataError(f"data set {str(place)!r} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"data set {str(place)!r} has no rows; a run needs at least one")
    return rows


def read_dataset_dict(name: str, keywords: Mapping[str, Any]) -> dict[str, Rows]:
    """Return the rows of every split of a Hugging Face data set.

    Raises:
        DataError: not in the cache and not to be had from the hub, or not understood by ``datasets``.
    """
    import datasets  # heavy: 0.6 s, only for data sets of the hub

    try:
        loaded = datasets.load_dataset(name, **keywords)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise DataError(
            f"data set {name!r} cannot be loaded through the Hugging Face library "
            f"({type(error).__name__}: {cause}). Without a network, download it beforehand into the hub's "
            f"cache, or give the path of a .jsonl or .parquet file; a data set with several configurations "
            f"needs dataset_config: {{name: ...}}"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    return {
        str(split): _Lazy(len(data), data.__getitem__)
        for split, data in splits.items()
        if hasattr(data, "__len__")
    }


def _map_file(path: Path) -> bytes | mmap.mmap:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_lines(data: bytes | mmap.mmap, path: Path) -> Rows:
    starts, ends = array("Q"), array("Q")
    start, number, size = 0, 0, len(data)
    while start < size:
        number += 1
        end = data.find(b"\n", start)
        end = size if end < 0 else end
        line = data[start:end]
        if line.strip():
            _parse_line(line, path, number)
            starts.append(start)
            ends.append(end)
        start = end + 1
    return _Lazy(len(starts), lambda i: _as_row(json.loads(data[starts[i] : ends[i]])))


def _parse_line(line: bytes, path: Path, number: int) -> None:
    try:
        value = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(f"{path}:{number}: not a line of JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}:{number}: expected a JSON object (a row), got {type(value).__name__}")


def _as_row(value: Any) -> Row:
    return value  # type: ignore[no-any-return]  # checked to be a dict by the scan


def _read_json(path: Path) -> Rows:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError(f"{path}: expected a JSON list of objects (rows)")
    return value


def _read_parquet(path: Path) -> Rows:
    import pyarrow as pa  # comes with datasets; 0.1 s
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    return _Lazy(table.num_rows, lambda i: _as_row(table.slice(i, 1).to_pylist()[0]))
