"""Data: rows of data sets, endless streams of rows, prompts rendered from rows."""

from multitask_rl.data.loader import TaskDataLoader, get_dataloader, rows_of
from multitask_rl.data.pooled_stream import PooledStream, pools_by_column
from multitask_rl.data.readers import Row, Rows
from multitask_rl.data.render import render_prompt
from multitask_rl.data.rows import load_rows, row_id
from multitask_rl.data.stream import PromptStream
from multitask_rl.data.streamed_prompts import StreamedPrompts
from multitask_rl.lazy import lazy_names

__all__ = [
    "PackedDataset",
    "PooledStream",
    "PromptStream",
    "Row",
    "Rows",
    "StreamedPrompts",
    "TaskDataLoader",
    "get_dataloader",
    "load_rows",
    "pools_by_column",
    "render_prompt",
    "row_id",
    "rows_of",
]

__getattr__, __dir__ = lazy_names(globals(), {"PackedDataset": "multitask_rl.api.packed_dataset"})
