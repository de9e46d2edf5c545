"""Reward functions of other libraries, used as they are.

``trl:pkg.mod:fn``               ``fn(prompts, completions, **columns) -> list[float | None]``, async or not
``verl:file.py:compute_score``   ``fn(data_source, solution_str, ground_truth, extra_info) -> float | dict``
``reasoning_gym:<data set>``     its verifier; the row holds ``answer`` and ``metadata``
``verifiers:<environment>``      the rubric of an installed single-turn environment
``evaluate:<metric or path>``    a metric of Hugging Face ``evaluate``, response by response

Each becomes a class with ``Config`` whose instances are rewards: the rest of the pool sees no difference.
"""

from __future__ import annotations

from multitask_rl.errors import PluginError
from multitask_rl.plugins import Located
from multitask_rl.scoring.foreign.base import ForeignReward
from multitask_rl.scoring.foreign.evaluate import EvaluateReward
from multitask_rl.scoring.foreign.reasoning_gym import ReasoningGymReward
from multitask_rl.scoring.foreign.trl import TrlReward
from multitask_rl.scoring.foreign.verifiers import VerifiersReward
from multitask_rl.scoring.foreign.verl import VerlReward

__all__ = ["FOREIGN", "build_foreign"]

FOREIGN: dict[str, type[ForeignReward]] = {
    "trl": TrlReward,
    "verl": VerlReward,
    "verifiers": VerifiersReward,
    "reasoning_gym": ReasoningGymReward,
    "evaluate": EvaluateReward,
}
_EXPECTED = {
    "trl": "'trl:package.module:function' or 'trl:file.py:function'",
    "verl": "'verl:file.py:compute_score' or 'verl:package.module:function'",
    "verifiers": "'verifiers:<environment id>'",
    "reasoning_gym": "'reasoning_gym:<data set>'",
    "evaluate": "'evaluate:<metric or path>'",
}


def build_foreign(prefix: str, target: str, where: str) -> Located:
    """Return a reward class for ``<prefix>:<target>``.

    Raises:
        PluginError: nothing follows the prefix.
    """
    if not target:
        raise PluginError(f"{where}: nothing follows {prefix!r}; expected {_EXPECTED[prefix]}")
    base = FOREIGN[prefix]
    value = type(base.__name__, (base,), {"target": target, "where": where, "__module__": __name__})
    return Located(value, f"{prefix}:{target.rpartition(':')[2] or target}", "")
