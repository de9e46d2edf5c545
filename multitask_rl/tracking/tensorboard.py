"""Tracker that writes event files for TensorBoard (extra ``tensorboard``): ``tensorboard --logdir runs``.

The files lie in ``<output_dir>/tensorboard``. Event files are only appended to: a resumed run says from which
step on they are replaced, and TensorBoard hides what the killed run wrote after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import require_extra
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.base import SAMPLES_EVERY_S, Tracker, best_and_worst

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(Tracker):
    """TensorBoard: scalars of steps and evaluations; configuration, events and some samples as texts.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        require_extra("tensorboard", "tensorboard", "tracking.trackers names tensorboard")
        self._directory = Path(output_dir) / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._sampled_s = -math.inf

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Open a new event file; hide what others there say of steps that will be made again."""
        self._open(resume_step)
        self._text("config", yaml.safe_dump(dict(parameters), sort_keys=False), resume_step or 0)

    def _open(self, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(self._directory), purge_step=purge, flush_secs=10)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each number as a scalar of its name."""
        if self._writer is not None:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._writer.add_scalar(name, value, step)

    def log_event(self, event: Event) -> None:
        """Write the event's reason as a text of its source; a rollback hides the steps that it undid."""
        if event.kind == "rolled_back" and self._writer is not None:
            self._writer.close()
            self._open(event.step)
        task = f" ({event.task})" if event.task else ""
        self._text(f"events/{event.source}", f"{event.kind}{task}: {event.reason}", event.step)

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Write the best and the worst response of each task as texts, once a minute."""
        if time.monotonic() - self._sampled_s < SAMPLES_EVERY_S:
            return
        self._sampled_s = time.monotonic()
        texts: dict[str, list[str]] = {}
        for item in best_and_worst(scored):
            own = texts.setdefault(item.rollout.prompt.task, [])
            own.append(
                f"reward {item.reward}\n\n{item.rollout.prompt.text}\n\n-----\n\n{item.rollout.response}"
            )
        for task, parts in texts.items():
            self._text(f"samples/{task}", "\n\n=====\n\n".join(parts), step)

    def finish(self, status: str) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """Write a text that TensorBoard shows letter by letter: an indented block of its Markdown."""
        if self._writer is not None:
            self._writer.add_text(name, "\n".join(f"    {line}" for line in text.splitlines()), step)
