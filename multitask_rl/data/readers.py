"""Readers of files and hub data sets: sequences that parse a row when it is asked for.

JSON lines are scanned once, so that a bad line is found before the run; memory holds one offset per row.
Parquet and Hugging Face data stay in Arrow. Streamed data is read while it is used.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import re
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from multitask_rl.config.checks import DATA_SUFFIXES
from multitask_rl.errors import DataError, path_errors

Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]

BLOCK = 1024
"""Rows that are held, and shuffled, at a time."""
_GAP = 64
"""Rows that may be passed over where rows are read in their order: those that are held out."""
_BLOCK_BYTES = 1 << 22
"""Most bytes of text in a block of rows."""
_FREE_BYTES = 1 << 28
_RATIO = 100
"""A compressed file may expand to ``_FREE_BYTES`` or ``_RATIO`` times its size, whichever is more: text
shrinks to a tenth, a file made to fill the memory to a thousandth."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class LazyRows(Sequence[Row]):
    """Rows made by ``get`` when asked for."""

    def __init__(self, length: int, get: Callable[[int], Row]) -> None:
        self._length = length
        self._get = get

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._get(i) for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._get(index % self._length)


class RowView(LazyRows):
    """Some rows of ``rows``, in the order of ``indices``."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        chosen = array("Q", indices)
        super().__init__(len(chosen), lambda i: rows[chosen[i]])


class ReportedRows(RowView):
    """Held-out rows of the split ``test``: they are evaluated and reported, and decide nothing."""


class GeneratedRows(LazyRows):
    """Rows that a program makes: all have the same columns, and making one may be slow."""


def rows_in_blocks(length: int, read: Callable[[int, int], Sequence[Row]]) -> LazyRows:
    """Return rows that ``read(start, end)`` gives: those from ``start`` on, at least one.

    A table gives many rows at once in a tenth of the time of single reads. Rows that are asked for in their
    order are therefore read in blocks, which grow to ``BLOCK`` rows. Any other row is read alone.
    """
    held: tuple[int, Sequence[Row]] = (0, ())  # the last block, after the index of its first row

    def get(index: int) -> Row:
        nonlocal held
        start, rows = held  # another thread may replace it
        if not start <= index < start + len(rows):
            is_next = 0 <= index - start - len(rows) < _GAP
            size = min(2 * len(rows) or 1, BLOCK) if is_next else 1
            start, rows = held = index, read(index, min(index + size, length))
        return copy.deepcopy(rows[index - start])

    return LazyRows(length, get)


class StreamedRows(LazyRows):
    """The first rows of streamed data, as a sequence: they are checked, and held-out rows are among them.

    ``StreamedPrompts`` (``data/streamed_prompts.py``) gives all rows.

    Args:
        data: a ``datasets.IterableDataset``.
        where: the data set's name, for errors.
        first: its first rows; default: they are read.
        keeps: only rows for which all of these are true are used.

    Raises:
        DataError: it cannot be read.
    """

    def __init__(
        self,
        data: Any,
        where: str,
        first: Sequence[Row] | None = None,
        keeps: tuple[Callable[[Row], bool], ...] = (),
    ) -> None:
        self._data, self._where, self._keeps = data, where, keeps
        first = list(islice(self.open(0)[1], BLOCK)) if first is None else first
        super().__init__(len(first), first.__getitem__)

    def only(self, keep: Callable[[Row], bool]) -> StreamedRows:
        """Return the rows for which ``keep`` is true."""
        return StreamedRows(self._data, self._where, [row for row in self if keep(row)], (*self._keeps, keep))

    def keeps(self, row: Row) -> bool:
        """Whether ``row`` of the data is one of these rows."""
        return all(keep(row) for keep in self._keeps)

    def open(self, epoch: int, state: Mapping[str, Any] | None = None) -> tuple[Any, Iterator[Row]]:
        """Return a copy of the data set and its rows from ``state`` (its ``state_dict``) or its beginning."""
        data = copy.deepcopy(self._data)  # another task may read the same data set
        data.set_epoch(epoch)  # the order of its files, and of a shuffle of its own
        if state is not None:
            data.load_state_dict(dict(state))
        return data, self._rows_of(data)

    def _rows_of(self, data: Any) -> Iterator[Row]:
        try:
            yield from data
        # whatever reads the files may raise: the network, a decoder, a function of the user's
        except Exception as error:
            cause = " ".join(str(error).split())[:300]
            raise DataError(
                f"{self._where}: the streamed rows cannot be read on ({type(error).__name__}: {cause}). A "
                "run that is started again goes on at the row it had reached"
            ) from error


def read_file(path: str | Path, where: str = "") -> Rows:
    """Return the rows of a .jsonl, .jsonl.gz, .json or .parquet file.

    ``where``: the key that names the file, for the error of an empty one.

    Raises:
        DataError: it is missing, unreadable or empty, or a line is no JSON object (names the line).
    """
    place = Path(path).expanduser()
    name = place.name
    allowed = f"a file that can be read and ends in {', '.join(DATA_SUFFIXES)}"
    with path_errors("the data set", place, allowed, DataError):
        if name.endswith(".jsonl.gz"):
            limit = max(_FREE_BYTES, _RATIO * place.stat().st_size)
            try:
                with gzip.open(place) as file:
                    text = file.read(limit + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise DataError(f"{place}: not a whole gzip file: {error}") from error
            if len(text) > limit:
                raise _bomb(place, limit)
            rows = _read_lines(io.BytesIO(text), lambda start, end: text[start:end], place)
        elif name.endswith(".jsonl"):
            data = _OpenFile(place)
            rows = _read_lines(data.lines(), data.read, place)
        elif name.endswith(".json"):
            try:
                rows = _parse_json(place.read_bytes())
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}") from error
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise DataError(f"{place}: expected a JSON list of objects (rows)")
        elif name.endswith(".parquet"):
            rows = _read_parquet(place)
        else:
            raise DataError(f"{place}: unknown kind of data set; allowed: {', '.join(DATA_SUFFIXES)}")
    if not rows:
        named = f"{where}: " if where else ""
        raise DataError(f"{named}data set {str(place)!r} has no rows; a run needs at least one")
    return rows


def read_dataset_dict(name: str, keywords: Mapping[str, Any], where: str = "") -> dict[str, Rows]:
    """Return the rows of every split of a Hugging Face data set; a ``DataError`` if it cannot be loaded.

    ``where``: the key that names the data set, for errors.
    """
    import datasets  # heavy: 0.6 s, only for data sets of the hub

    try:
        loaded = datasets.load_dataset(name, **keywords)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise DataError(
            f"{where and f'{where}: '}data set {name!r} cannot be loaded through the Hugging Face library "
            f"({type(error).__name__}: {cause}). Without a network, download it beforehand into the hub's "
            f"cache, or give the path of a .jsonl or .parquet file; a data set with several configurations "
            f"needs dataset_config: {{name: ...}}"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    return {str(split): rows_of_table(data, f"data set {name!r}") for split, data in splits.items()}


def rows_of_table(data: Any, where: str) -> LazyRows:
    """Return the rows of a ``datasets.Dataset`` or, streamed, of a ``datasets.IterableDataset``."""
    is_streamed = not isinstance(data, Sized)
    if is_streamed:
        return StreamedRows(data, where)
    size = data.data.nbytes // max(1, len(data.data)) + 1
    if data.format["type"] is not None or size * BLOCK > _BLOCK_BYTES:  # arrays, or images to be decoded
        return LazyRows(len(data), data.__getitem__)

    def read(start: int, end: int) -> Sequence[Row]:
        columns = data[start:end]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    return rows_in_blocks(len(data), read)


class _OpenFile:
    """A file that stays open for the run: after a replacement under its name the old content is read.

    It is never mapped: a mapped file that is cut ends the process without a message (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._opened = os.fstat(self._descriptor)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines with their ends."""
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            yield from file

    def read(self, start: int, end: int) -> bytes:
        """Return a part of the file; a ``DataError`` if it was changed since it was opened."""
        data, now = os.pread(self._descriptor, end - start, start), os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise DataError(
                f"data set {str(self._path)!r} was changed while the run reads it: its rows are not those "
                "that were checked. Write a new file and rename it over the old one, which runs go on "
                "reading, or start the run again"
            )
        return data


def _bomb(path: Path, allowed: int) -> DataError:
    return DataError(
        f"{path}: it expands to more than {allowed} bytes, {_RATIO} times its size, which text does not; if "
        "it is meant, give the file uncompressed, as .jsonl"
    )


def _read_lines(lines: Iterable[bytes], read: Callable[[int, int], bytes], path: Path) -> Rows:
    """Return the rows of JSON ``lines``; ``read`` returns the bytes between two offsets."""
    starts, ends = array("Q"), array("Q")
    start = 0
    for number, line in enumerate(lines, 1):
        end = start + len(line)
        if line.strip():
            try:
                value = _parse_json(line.rstrip())
            except ValueError as error:
                problem = str(error).replace("line 1 ", "")  # the message names the line of the file
                raise DataError(
                    f"{path}:{number}: not a line of JSON: {problem}; each line is one object, such as "
                    '{"prompt": "1+1=", "reference": "2"}'
                ) from error
            if not isinstance(value, dict):
                raise DataError(
                    f"{path}:{number}: expected a JSON object (a row), got {type(value).__name__}; give one "
                    "row a line, or one list in a file whose name ends in .json"
                )
            starts.append(start)
            ends.append(end)
        start = end
    return LazyRows(len(starts), lambda i: _parse_json(read(starts[i], ends[i])))


def _parse_json(data: bytes) -> Any:
    """Return the value of JSON in UTF-8; refuse a lone surrogate, which no tokenizer and no file takes."""
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deep") from error
    if b"\\u" in data and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("text holds a lone surrogate (\\ud800 to \\udfff), which is half a character")
    return value


def _read_parquet(path: Path) -> Rows:
    import pyarrow as pa  # comes with datasets; 0.1 s
    import pyarrow.parquet as pq

    try:
        # not mapped, as in _OpenFile
        with pq.ParquetFile(path) as file:
            about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(about.num_columns)]
        allowed = max(_FREE_BYTES, _RATIO * path.stat().st_size)
        # eight bytes a value: a run of equal ones takes next to nothing in the file
        if sum(max(c.total_uncompressed_size, 8 * c.num_values) for c in columns) > allowed:
            raise _bomb(path, allowed)
        declared = [about.schema.column(index) for index in range(about.num_columns)]
        declared = [c for c in declared if c.physical_type == "BYTE_ARRAY"]
        texts = [c.path for c in declared if c.logical_type.type != "DECIMAL"]
        # dictionaries stay dictionaries: a value that is repeated a million times is held once
        table = pq.read_table(path, read_dictionary=texts)
        table.validate(full=True)
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: a Parquet file with columns that cannot be read: {error}") from error

    nested = [name for name in table.column_names if pa.types.is_nested(table.schema.field(name).type)]

    def read(start: int, end: int) -> Sequence[Row]:
        cut = table.slice(start, end - start)
        is_alone = end - start == 1
        try:
            # a dictionary's texts, too, become as many texts as there are rows
            named = nested if is_alone else cut.column_names
            size = sum(_text_bytes(chunk) for name in named for chunk in cut.column(name).chunks)
            if size <= (_FREE_BYTES if is_alone else _BLOCK_BYTES):
                return cut.to_pylist()  # type: ignore[no-any-return]
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if is_alone:
                raise DataError(f"{path}: row {start} cannot be read: {error}") from error
            return read(start, start + 1)  # the others may be good
        if is_alone:
            raise DataError(
                f"{path}: row {start} repeats texts until they take {size >> 20} MiB; a row may hold "
                f"{_FREE_BYTES >> 20} MiB"
            )
        return read(start, (start + end) // 2)

    return rows_in_blocks(table.num_rows, read)


def _text_bytes(array: Any) -> int:
    """Return the bytes of the texts of a nested ``array`` when each is written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return int(pc.sum(lengths.cast(pa.int64())).as_py() or 0)
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
    if pa.types.is_struct(array.type):
        return sum(map(_text_bytes, array.flatten()))
    return _text_bytes(array.flatten()) if pa.types.is_nested(array.type) else 0
