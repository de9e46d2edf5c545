"""Tracker that writes to Weights & Biases through its own client (extra ``wandb``).

``WANDB_MODE=offline`` keeps the run in ``<output_dir>/wandb`` until ``wandb sync``; other settings are the
client's own environment variables (``WANDB_ENTITY``, ``WANDB_API_KEY``...). A resumed run goes on under the
same id. The client takes steps in their order only: numbers of a step that the killed run had sent are left
out, and so are those of steps that a run makes again after a rollback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import MissingExtraError
from multitask_rl.records import Event, Scored
from multitask_rl.tracking.base import SAMPLE_COLUMNS, SAMPLES_EVERY_S, TO_ACT_ON, Tracker, sample_rows


class WandbTracker(Tracker):
    """Numbers with their steps; some samples as tables; alarms and stops as alerts.

    Raises:
        MissingExtraError: the client is not installed.
    """

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        if find_spec("wandb") is None:
            raise MissingExtraError(
                "Weights & Biases is not installed: pip install 'multitask-rl[wandb]', or take it out of "
                "tracking.trackers."
            )
        self.run_id = run_id
        self._directory, self._config = Path(output_dir), config
        self._run: Any = None
        self._sampled_s = -math.inf

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Begin the run, or go on with that of ``run_id``."""
        import wandb

        self._run = wandb.init(
            project=self._config.experiment,
            name=self._config.run_name or self._directory.name,
            dir=str(self._directory),
            id=self.run_id,
            resume="allow" if self.run_id else None,
            config=dict(parameters),
        )
        self.run_id = self._run.id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the numbers; those of one step may come in several calls."""
        if self._run is not None:
            self._run.log({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)

    def log_event(self, event: Event) -> None:
        """Send what a person should act on as an alert."""
        if self._run is not None and event.kind in TO_ACT_ON:
            self._run.alert(title=f"{event.source} {event.kind} {event.task}".strip(), text=event.reason)

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Send the best and the worst response of each task as a table, once a minute."""
        if self._run is None or time.monotonic() - self._sampled_s < SAMPLES_EVERY_S:
            return
        import wandb

        self._sampled_s = time.monotonic()
        table = wandb.Table(columns=SAMPLE_COLUMNS, data=sample_rows(scored, step))
        self._run.log({"samples": table}, step=step)

    def finish(self, status: str) -> None:
        """End the run; the client marks one that did not finish as failed."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "finished" else 1)
