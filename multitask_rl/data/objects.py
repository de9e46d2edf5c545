"""Rows given from Python: as a path, a list, or a data set of the ``datasets`` library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import is_data_path
from multitask_rl.data.readers import STREAMED, Rows, read_dataset_dict, read_file
from multitask_rl.errors import DataError


def rows_of(data: Any, where: str) -> dict[str, Rows]:
    """Return the rows of ``data`` by split; the split "" holds rows that name none.

    Args:
        data: a path or Hugging Face id, a list of mappings (rows) or of texts (prompts), a
            ``datasets.Dataset``, a ``datasets.DatasetDict`` or a mapping split -> one of them. Rows are not
            copied.
        where: place for messages.

    Raises:
        DataError: another type, no rows, or a row that is neither a mapping nor a text.
    """
    if isinstance(data, (str, Path)):
        splits = {"": read_file(data)} if is_data_path(str(data)) else read_dataset_dict(str(data), {})
    elif isinstance(data, Mapping):
        splits = {str(name): rows for name, part in data.items() for rows in rows_of(part, where).values()}
    else:
        if isinstance(data, Iterable) and not isinstance(data, Sized):  # a datasets.IterableDataset
            raise DataError(f"{where}: {STREAMED}")
        if isinstance(data, bytes) or not isinstance(data, Iterable):
            raise DataError(
                f"{where}: expected a path, a list of rows, a datasets.Dataset or a DatasetDict, got "
                f"{type(data).__name__}"
            )
        if not isinstance(data, Sequence):  # a datasets.Dataset slices by column
            splits = {str(getattr(data, "split", None) or ""): _Rows(data)}
        else:
            splits = {"": [{"prompt": row} if isinstance(row, str) else row for row in data]}
            wrong = [i for i, row in enumerate(splits[""]) if not isinstance(row, Mapping)]
            if wrong:
                raise DataError(f"{where}[{wrong[0]}]: expected a row (a mapping) or a prompt (a text)")
    if not any(len(rows) for rows in splits.values()):
        raise DataError(f"{where}: no rows; a run needs at least one")
    return splits


class _Rows(Sequence[Mapping[str, Any]]):
    """A map-style data set of another library as rows."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._data[index % len(self)]
