"""New weights for a started vLLM, on every rank: without a restart, without a file, checked before trusted.

vLLM's own reload is slow and always right; a plan of copies (``vllm_plan.py``) is fast, and used only after
it has once brought new weights in exactly as a reload does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from multitask_rl.errors import EngineError
from multitask_rl.rollout.vllm.worker import Parcel, SharedWeights

__all__ = ["WeightLoader"]

logger = logging.getLogger(__name__)


class WeightLoader:
    """Brings weights into a started ``LLM``: by reloading until a plan is proven, then by the plan.

    Args:
        llm: the ``LLM``, its workers extended by ``WeightReceiver``.
        probe: log-probabilities of some fixed tokens under the engine's weights.
        num_elsewhere: workers in processes of their own; 0 = the only one lives in this process.
    """

    def __init__(self, llm: Any, probe: Callable[[], list[float]], *, num_elsewhere: int) -> None:
        self._llm = llm
        self._probe = probe
        self._shared = SharedWeights(num_elsewhere) if num_elsewhere else None
        self._planned: frozenset[str] | None = None
        self._may_record = self._may_doubt = True
        self.is_proven = False
        """Updates are made by copies alone."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Use ``weights`` from now on; cached prefixes of the old ones are dropped."""
        if self._planned is not None and weights.keys() == self._planned:
            if self.is_proven:
                self._bring("copy", weights)
            else:
                self._prove(weights)
        elif self._may_record:
            self._may_record = False
            obstacles = [obstacle for obstacle in self._bring("record", weights) if obstacle]
            if obstacles:
                logger.info("vLLM reloads its weights at every update: %s", obstacles[0])
            else:
                self._planned = frozenset(weights)
        else:
            self._bring("reload", weights)
        self._forget_prefixes()

    def _bring(self, how: str, weights: Mapping[str, Tensor]) -> list[str]:
        """Have every worker load the weights; return what each of them says."""
        given = weights if self._shared is None else self._parcel(self._shared, weights)
        said: list[str] = self._llm.collective_rpc("take_weights", args=(how, given))
        return said

    def _parcel(self, shared: SharedWeights, weights: Mapping[str, Tensor]) -> Parcel:
        parcel = shared.parcel(weights)
        if parcel[0] == "cuda" and self._may_doubt:
            self._may_doubt = False
            refusals = [
                refusal for refusal in self._llm.collective_rpc("try_parcel", args=(parcel,)) if refusal
            ]
            if refusals:
                logger.warning("weights go to vLLM through host memory: %s", refusals[0])
                shared.by_handles = False
                return shared.parcel(weights)
        return parcel

    def _prove(self, weights: Mapping[str, Tensor]) -> None:
        """Load by the plan, then by a reload, and compare what the engine says."""
        before = self._probe()
        self._bring("copy", weights)
        self._forget_prefixes()
        planned = self._probe()
        self._bring("reload", weights)
        self._forget_prefixes()
        reloaded = self._probe()
        if not all(abs(a - b) <= 1e-3 for a, b in zip(planned, reloaded, strict=True)):
            self._planned = None
            logger.warning("vLLM reloads its weights at every update: copies alone give other weights")
        # weights that change nothing prove nothing
        self.is_proven = self._planned is not None and reloaded != before

    def _forget_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise EngineError("it keeps the prefixes of the old weights: samples are under way")

    def close(self) -> None:
        """Give up what is shared with other processes. Idempotent."""
        if self._shared is not None:
            self._shared.close()
