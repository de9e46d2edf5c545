"""New weights for a started vLLM, on every rank.

vLLM's own reload is slow. A plan of copies (``plan.py``) is fast; it is used alone after one update whose
log-probabilities equal those of a reload.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from multitask_rl.errors import EngineError
from multitask_rl.rollout.vllm.worker import SharedWeights

logger = logging.getLogger(__name__)


class WeightLoader:
    """Loads weights into a started ``LLM``: by reloads until a plan is proven, then by the plan.

    Args:
        llm: the ``LLM``; its workers are extended by ``WeightReceiver``.
        probe: log-probabilities of some fixed tokens under the engine's weights.
        num_elsewhere: workers in processes of their own; 0 = the only worker is in this process.
    """

    def __init__(self, llm: Any, probe: Callable[[], list[float]], *, num_elsewhere: int) -> None:
        self._llm = llm
        self.probe = probe
        self._shared = SharedWeights(num_elsewhere) if num_elsewhere else None
        self._planned: frozenset[str] | None = None
        self._may_record = self._may_doubt = True
        self.is_proven = False
        """Updates use copies alone."""

    def forget(self) -> None:
        """Set the engine's weights to NaN; those that the next ``load`` does not bring stay NaN."""
        self._llm.collective_rpc("forget_weights")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Use ``weights`` from now on; cached prefixes of the old weights are dropped."""
        if self._planned is not None and weights.keys() == self._planned:
            before = None if self.is_proven else self.probe()
            self._bring("copy", weights)
            if before is not None:
                planned = self.probe()
                self._bring("reload", weights)
                reloaded = self.probe()
                gap, change = _distance(planned, reloaded), _distance(before, reloaded)
                if not gap <= 1e-3:
                    self._planned = None
                    logger.warning("vLLM reloads its weights at every update: copies give other weights")
                # a small change proves nothing: without any copy the gap would be the change
                self.is_proven = self._planned is not None and change > 10 * gap
        elif self._may_record:
            self._may_record = False
            obstacles = [obstacle for obstacle in self._bring("record", weights) if obstacle]
            if obstacles:
                logger.info("vLLM reloads its weights at every update: %s", obstacles[0])
            else:
                self._planned = frozenset(weights)
        else:
            self._bring("reload", weights)

    def _bring(self, how: str, weights: Mapping[str, Tensor]) -> list[str]:
        """Let every worker load the weights; return the answer of each (see ``WeightReceiver``)."""
        given: Any = weights
        if self._shared is not None:
            given = self._shared.parcel(weights)
            if given[0] == "cuda" and self._may_doubt:
                self._may_doubt = False
                refusals = [said for said in self._llm.collective_rpc("try_parcel", args=(given,)) if said]
                if refusals:
                    logger.warning("weights go to vLLM through host memory: %s", refusals[0])
                    self._shared.by_handles = False
                    given = self._shared.parcel(weights)
        answers: list[str] = self._llm.collective_rpc("take_weights", args=(how, given))
        if not self._llm.reset_prefix_cache():
            raise EngineError("it keeps the prefixes of the old weights: samples are under way")
        return answers

    def close(self) -> None:
        """Free the memory shared with other processes. Idempotent."""
        if self._shared is not None:
            self._shared.close()


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.abs(np.subtract(one, other)).max())
