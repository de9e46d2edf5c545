"""Plugins for the product that answer as ``world.py`` says."""

from dataclasses import dataclass, field

from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import DataError
from multitask_rl.records import NOT_APPLICABLE, Failure, FailureKind, Verdict
from reference.world import FAILED, Sample, Script, answer


@dataclass(kw_only=True, slots=True)
class Config:
    world: int = 0
    name: str = ""
    values: list[float] = field(default_factory=list)
    same: float = 0.0
    failing: float = 0.0
    silent: float = 0.0
    same_silent: float = 0.0
    low: float = float("-inf")
    high: float = float("inf")
    higher_is_better: bool = True


class _Scripted:
    Config = Config
    traits = PluginTraits(isolate=False, deterministic=False, independent=True)

    def __init__(self, config):
        self.seed = config.world
        self.script = Script(
            name=config.name,
            values=tuple(config.values),
            same=config.same,
            failing=config.failing,
            silent=config.silent,
            same_silent=config.same_silent,
        )
        self.traits = PluginTraits(
            isolate=False,
            deterministic=False,
            independent=True,
            low=config.low,
            high=config.high,
            higher_is_better=config.higher_is_better,
        )

    def answers(self, rollouts):
        for rollout in rollouts:
            sample = Sample(
                rollout.task,
                rollout.prompt.draw,
                rollout.sample,
                rollout.attempt,
                tuple(rollout.response_ids),
            )
            yield answer(self.seed, self.script, sample)


class Reward(_Scripted):
    def score(self, rollouts):
        return [self.typed(value) for value in self.answers(rollouts)]

    @staticmethod
    def typed(value):
        if value is None:
            return NOT_APPLICABLE
        if value == FAILED:
            return Failure(kind=FailureKind.data, message="scripted", source="")
        return value


class Constraint(_Scripted):
    def judge(self, rollouts):
        return [self.typed(value) for value in self.answers(rollouts)]

    @staticmethod
    def typed(value):
        if value is None:
            return None
        if value == FAILED:
            return Failure(kind=FailureKind.data, message="scripted", source="")
        return Verdict(cost=value, violated=value > 0.4)


__all__ = ["Constraint", "DataError", "Reward"]
