"""The default policy: prompts go to tasks far below their target whose groups give a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

from multitask_rl.config.schema.ranges import Count, Positive, PositiveFraction
from multitask_rl.curriculum.base import SchedulerPolicy, SchedulerPolicyConfig

_NEAR = 1.0 - 1e-9
"""A number of at least this share of a bound counts as at the bound: rounding is not to decide."""


class DeficitLearnability(SchedulerPolicy):
    """Weigh each task by its distance to the target times its learnability.

    ``s_k = d_k * l_k``, cleared of noise (``SchedulerPolicy.clear``), ``r = prior * s^a / sum(prior * s^a)``,
    with ``d_k = (target_k - J_k)^+``, ``J_k`` the smoothed level in [0, 1] and ``a`` the sharpness. If all
    tasks are at their targets, the weights are the prior.

    ``l_k = sqrt(min(1, nz_k / enough_informative)) * min(1, h_k / (nz_k * d_k * enough_headroom))`` is the
    learnability, and not below its value at ``nz_k = min_informative``. ``nz_k`` is the smoothed share of
    groups with a gradient, ``h_k`` the smoothed distance from the best response of a group to the mean of the
    others; ``h_k / nz_k`` is this distance in groups with a gradient. If it is small beside ``d_k``, the
    responses differ in something that does not lead to the target, e.g. in a format worth a tenth of the
    reward. With 0/1 rewards it is never small.

    Learnability holds back tasks that do not learn yet. It must not rank tasks that do learn: a task has few
    informative groups while it is hard, and again when most of its prompts are solved. With sharpness 1, a
    third of the prompts above the floors goes to nearly learnt tasks. A larger sharpness gives them to the
    tasks with the highest scores. With a very large one a task with a middling score gets too few prompts to
    keep what it has learnt (docs/claims.md, ``smollm2_mixture``).

    Source: own. The deficit is the minimax signal of MT-GRPO (arXiv:2602.05547) without its collapse onto one
    task; the square root of the informative share is the learnability of SEC (arXiv:2505.14970), as the
    standard error of a group's gradient shrinks with the square root of the groups that have one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SchedulerPolicyConfig):
        """Settings of ``deficit_learnability``."""

        prompts_averaged: Count = 100
        """Fewest prompts that a task's averages span. At 100 the standard error of a level is about 0.03, so
        a task with few prompts does not look worst by chance."""
        sharpness: Positive = 4.0
        """Exponent of the score: 1 = shares in proportion to the score; larger favours the highest score."""
        min_informative: PositiveFraction = 0.02
        """Lower bound of the share of informative groups, so that a hard task keeps a weight."""
        enough_informative: PositiveFraction = 0.25
        """Share of informative groups at which a task counts as fully learnable."""
        enough_headroom: PositiveFraction = 0.25
        """Part of the way to the target by which the best response of an informative group has to exceed the
        others for the task to count as fully learnable."""

    config: Config

    def _start(self) -> None:
        self._known: dict[str, tuple[tuple[int, int, int], tuple[float, float]]] = {}
        """By task the trace that a score was made of, its steps and evaluations then, and the score."""

    def _score(self, task: str) -> tuple[float, float]:
        """Return the task's score and its standard error."""
        config, trace, deficit = self.config, self.traces[task], self.deficit(task)
        informative = max(trace.informative, config.min_informative)
        factor, factor_error = 1.0, 0.0
        # below the bound the score's error has a part that it does not have at the bound
        if informative < _NEAR * config.enough_informative:
            factor = math.sqrt(informative / config.enough_informative)
            factor_error = min(0.5, 0.5 * factor * trace.with_gradient.error(1.0) / informative)
        headroom, error = trace.headroom
        enough = config.enough_headroom * deficit * informative
        if headroom < _NEAR * enough:
            factor, factor_error = factor * headroom / enough, min(0.5, factor * error / enough)
        factor = max(factor, math.sqrt(config.min_informative / config.enough_informative))
        return deficit * factor, math.hypot(factor * trace.level_error, deficit * factor_error)

    def _preferences(self) -> dict[str, float]:
        config, scores, errors = self.config, dict[str, float](), dict[str, float]()
        for task, trace in self.traces.items():
            if trace.steps:
                steps = trace.with_gradient.steps  # also counts steps without a reward
                seen, known = (id(trace), steps, trace.evaluations), self._known.get(task)
                if known is None or known[0] != seen:
                    known = self._known[task] = (seen, self._score(task))
                scores[task], errors[task] = known[1]
        top = max(scores.values(), default=0.0)
        if not top > 0.0:
            return dict.fromkeys(self.tasks, 0.0)
        cleared = self.clear(scores, errors)
        return {t: self.prior[t] * (cleared.get(t, 0.0) / top) ** config.sharpness for t in self.tasks}
