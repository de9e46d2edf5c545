"""Data: rows of data sets, endless streams of rows, prompts rendered from rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitask_rl.lazy import lazy_names

if TYPE_CHECKING:
    from multitask_rl.data.loader import TaskDataLoader, get_dataloader, rows_of
    from multitask_rl.data.pooled_stream import PooledStream, pools_by_column
    from multitask_rl.data.readers import Row, Rows
    from multitask_rl.data.render import render_prompt
    from multitask_rl.data.rows import load_rows, row_id
    from multitask_rl.data.stream import PromptStream
    from multitask_rl.data.streamed_prompts import StreamedPrompts

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

# a reward worker needs a module of this package, and not the others
__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "PackedDataset": "multitask_rl.api.packed_dataset",
        "PooledStream": "multitask_rl.data.pooled_stream",
        "PromptStream": "multitask_rl.data.stream",
        "Row": "multitask_rl.data.readers",
        "Rows": "multitask_rl.data.readers",
        "StreamedPrompts": "multitask_rl.data.streamed_prompts",
        "TaskDataLoader": "multitask_rl.data.loader",
        "get_dataloader": "multitask_rl.data.loader",
        "load_rows": "multitask_rl.data.rows",
        "pools_by_column": "multitask_rl.data.pooled_stream",
        "render_prompt": "multitask_rl.data.render",
        "row_id": "multitask_rl.data.rows",
        "rows_of": "multitask_rl.data.loader",
    },
)
