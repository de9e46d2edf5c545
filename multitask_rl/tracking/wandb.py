"""Tracker that writes to Weights & Biases through its own client (extra ``wandb``).

``WANDB_MODE=offline`` keeps the run in ``<output_dir>/wandb`` until ``wandb sync``; other settings are the
client's own environment variables (``WANDB_ENTITY``, ``WANDB_API_KEY``...). A resumed run goes on under the
same id. The client takes its own steps in their order only: numbers of a step that the killed run had sent
are left out. Steps that a run makes again after a rollback get later steps of the client; the x axis of all
curves is the field ``training_step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multitask_rl.records import Event
from multitask_rl.tracking.base import DashboardTracker

_STEP = "training_step"


class WandbTracker(DashboardTracker):
    """Weights & Biases: numbers with their steps; some samples as tables; alarms and stops as alerts."""

    client = "wandb"
    _last = 0
    """Newest step sent."""
    _undone = 0
    """How far the client's steps are ahead of the run's, by rollbacks."""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Begin the run, or go on with that of ``run_id``."""
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=self._config.experiment,
            name=self._config.run_name or self._directory.name,
            dir=str(self._directory),
            id=self.run_id,
            resume="allow" if self.run_id else None,
            config=dict(parameters),
        )
        self.run_id = self._run.id
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        sent = self._run.summary.get(_STEP)
        if resume_step is not None and sent is not None:  # the client's next step is known online alone
            self._undone = max(0, self._run.step - 1 - int(sent))

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self._last = step
        self._run.log({**values, _STEP: step}, step=step + self._undone)

    def log_event(self, event: Event) -> None:
        """Send what a person should act on as an alert; take note of a rollback."""
        if event.kind == "rolled_back":
            self._undone += max(0, self._last - event.step)
        super().log_event(event)

    def finish(self, status: str) -> None:
        """End the run; the client marks one that did not finish as failed."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "finished" else 1)
