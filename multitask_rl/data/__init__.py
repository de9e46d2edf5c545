"""Data: rows of data sets, endless streams of rows, prompts rendered from rows."""

from multitask_rl.data.loader import TaskDataLoader, get_dataloader
from multitask_rl.data.pooled_stream import PooledStream, pools_by_column
from multitask_rl.data.render import render_prompt
from multitask_rl.data.rows import Row, Rows, load_rows, row_id
from multitask_rl.data.stream import PromptStream

__all__ = [
    "PooledStream",
    "PromptStream",
    "Row",
    "Rows",
    "TaskDataLoader",
    "get_dataloader",
    "load_rows",
    "pools_by_column",
    "render_prompt",
    "row_id",
]
