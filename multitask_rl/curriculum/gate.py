"""The gate: holds a task that gives no gradient at its floor, and reports it.

RL cannot start on a task that is never solved: all rollouts of a group fail alike, so every advantage is 0. A
policy that favours the worst task would give such a task the whole budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.curriculum.base import SchedulerPolicy
from multitask_rl.records import Event, TaskStats, rename_tasks

_MIN_INFORMATIVE = 0.02
_RELEASE_INFORMATIVE = 0.05
"""Above ``_MIN_INFORMATIVE``, so that a task does not flip between held and released."""
_STEPS = 200
_LEARNT = 0.9
"""Part of the target above which groups without variance mean "solved", not "hopeless"."""


class UnlearnableGate:
    """Hold a task at its floor after 200 steps in which under 2 % of its groups gave a gradient.

    It is released when more than 5 % of its groups give a gradient again.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._dead_steps = dict.fromkeys(tasks, 0)
        self.held: set[str] = set()
        """Tasks held at their floor."""
        self.probe_share = min(_MIN_INFORMATIVE, 0.4 / len(tasks))
        """Least share of a held task: enough to notice that it has become learnable."""

    def update(self, policy: SchedulerPolicy, stats: Mapping[str, TaskStats], step: int) -> list[Event]:
        """Count the step and return an alarm or a release for each task that changes state."""
        events = []
        for task in policy.tasks:
            if task not in stats or stats[task].num_prompts <= 0:
                continue
            informative, level = policy.traces[task].informative, policy.traces[task].level
            is_learnt = level >= _LEARNT * policy.targets[task]
            is_dead = informative < _MIN_INFORMATIVE and not is_learnt
            self._dead_steps[task] = self._dead_steps[task] + 1 if is_dead else 0
            if task not in self.held and self._dead_steps[task] >= _STEPS:
                self.held.add(task)
                effect = "held at its floor"
                if not policy.adaptive:
                    effect = "its weight is kept, the policy does not adapt"
                reason = (
                    f"{task} looks unlearnable: under {_MIN_INFORMATIVE:.0%} of its groups gave a gradient "
                    f"for {_STEPS} steps at level {level:.2f}; {effect}. Warm-start it by supervised "
                    "learning, make it easier, or check its reward."
                )
            elif task in self.held and (informative > _RELEASE_INFORMATIVE or is_learnt):
                self.held.remove(task)
                reason = f"{task} gives a gradient again in {informative:.0%} of its groups: released"
            else:
                continue
            kind, data = "alarm" if is_dead else "release", {"informative": informative, "level": level}
            events.append(
                Event(step=step, source="scheduler", kind=kind, reason=reason, task=task, data=data)
            )
        return events

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"dead_steps": dict(self._dead_steps), "held": sorted(self.held)}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restore ``state_dict``; unknown tasks are dropped."""
        self._dead_steps |= rename_tasks(state["dead_steps"], renamed, self._dead_steps)
        self.held = set(rename_tasks(dict.fromkeys(state["held"]), renamed, self._dead_steps))
