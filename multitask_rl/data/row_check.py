"""Check that every row has the columns that are read from it, before a model loads."""

from __future__ import annotations

from collections.abc import Collection

from multitask_rl.config.checks import parse_template
from multitask_rl.config.task import TaskSpec
from multitask_rl.data.readers import GeneratedRows, Row, Rows
from multitask_rl.data.render import render_content
from multitask_rl.data.rows import TEST_SPLIT, fingerprint
from multitask_rl.errors import DataError

_GENERATED = 4
"""Rows looked at of a generator, whose rows all have the same columns."""
_SHOWN = 120
"""Characters shown of a row without an id."""


def check_rows(
    spec: TaskSpec, rows: Rows, *, needs: Collection[str] = (), parameters: Collection[str] = ()
) -> None:
    """Check that every row has the columns of the task's prompt template, and further ones.

    Args:
        spec: the task.
        rows: its rows.
        needs: columns that must hold something, as those of the prompt.
        parameters: columns that may be null.

    Raises:
        DataError: names the first row that lacks one, or whose columns make no prompt.
    """
    filled = {column for _, column, _, _ in parse_template(spec.prompt) if column}.union(needs)
    present = set(parameters)
    for row in rows[:_GENERATED] if isinstance(rows, GeneratedRows) else rows:
        missing = {c for c in filled if row.get(c) is None} | (present - row.keys())
        if missing:
            raise DataError(
                f"{spec.source or 'tasks'}: tasks.{spec.name}: row {_named(row)} of "
                f"{spec.dataset or 'the dataloader'!r} lacks {', '.join(sorted(missing))}, which the prompt "
                f"or a plugin reads (columns: {', '.join(map(str, row)) or 'none'})"
            )
        render_content(spec, row)


def held_out_warning(spec: TaskSpec, train: Rows, held_out: Rows) -> str:
    """Return a warning if held-out rows say little about other prompts; else ""."""
    if spec.eval_split == TEST_SPLIT and not spec.eval_dataset and len(train) > 1:
        return (
            f"eval_split: {TEST_SPLIT}: scheduler, guard and best checkpoint choose by these rows, so that "
            "they test nothing any more; leave eval_split out, and other rows are held out, or name a split "
            "that is not kept for the final test"
        )
    if not len(train) or len(train) != len(held_out) or fingerprint(train) != fingerprint(held_out):
        return ""
    return (
        f"the held-out rows are those that are trained on ({len(train)}): the evaluation says nothing of "
        "other prompts; give more rows, or an eval_dataset"
    )


def _named(row: Row) -> str:
    """Return a label of the row for messages: its id, else its beginning."""
    if row.get("id") is not None:
        return repr(str(row["id"]))
    text = repr(dict(row))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
