"""Plugins for the product that answer as ``world.py`` says."""

from dataclasses import dataclass, field, replace

from multitask_rl.contracts import PluginTraits
from multitask_rl.environments.base import Opening, StepResult, World
from multitask_rl.errors import DataError
from multitask_rl.records import NOT_APPLICABLE, Failure, FailureKind, Score, Verdict
from reference.world import (
    FAILED,
    Reply,
    Sample,
    Script,
    answer,
    by_name,
    earned,
    look,
    part,
    read_answer,
    reply,
    spaced,
    with_usage,
)


@dataclass(kw_only=True, slots=True)
class Config:
    world: int = 0
    name: str = ""
    values: list[float] = field(default_factory=list)
    same: float = 0.0
    failing: float = 0.0
    silent: float = 0.0
    same_silent: float = 0.0
    answers: list[str] = field(default_factory=list)
    has_part: bool = False
    over: float = 0.0
    if_bad: float | None = None
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
            answers=tuple(config.answers),
            has_part=config.has_part,
            over=config.over,
            if_bad=config.if_bad,
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
            yield answer(self.seed, self.script, self.sample(rollout))

    @staticmethod
    def sample(rollout):
        own = rollout.task, rollout.prompt.draw, rollout.sample, rollout.attempt
        return Sample(*own, tuple(rollout.response_ids))


class Reward(_Scripted):
    def score(self, rollouts):
        found = [self.typed(value) for value in self.answers(rollouts)]
        return [
            Score(
                value=value,
                answer=read_answer(self.seed, self.script, self.sample(rollout)),
                components=self.parts(rollout),
            )
            if isinstance(value, float)
            else value
            for value, rollout in zip(found, rollouts, strict=True)
        ]

    def parts(self, rollout):
        found = part(self.seed, self.script, self.sample(rollout))
        return {} if found is None else {"part": found}

    @staticmethod
    def typed(value):
        if value is None:
            return NOT_APPLICABLE
        return failure(value) if isinstance(value, str) else value


class Constraint(_Scripted):
    def judge(self, rollouts):
        return [self.typed(value) for value in self.answers(rollouts)]

    @staticmethod
    def typed(value):
        if value is None:
            return None
        if isinstance(value, str):
            return failure(value)
        return Verdict(cost=value, violated=value > 0.4)


class Talk(World):
    """The world of an episode."""

    def __init__(
        self,
        world: int,
        task: str,
        seed: int = 0,
        ends: list[str] | None = None,
        has_names: bool = False,
        has_spaces: bool = False,
    ):
        self.name, self.episode, self.turn, self.ends = (world, task), seed, 0, ends
        self.has_names, self.has_spaces = has_names, has_spaces

    def reset(self, row):
        self.row = row["id"]
        said = self.hear("")
        return Opening(suffix=said.text, **limit(said.limits[0]))

    def step(self, message):
        self.turn += 1
        text = message["content"]
        if self.ends is not None:
            usage = message["usage"]
            numbers = usage["prompt_tokens"], usage["completion_tokens"]
            text = with_usage(text, message["finish_reason"], *numbers)
        said = self.hear(text)
        reward = said.reward
        if self.has_names:
            reward = by_name(reward, *self.name, self.row, self.episode, self.turn)
        own = {"done": said.is_done, "reward": reward} | limit(said.limits[0])
        if said.is_done:
            return StepResult(**own)
        words = [{"role": "user", "content": said.text}]
        if said.is_anew:
            return StepResult(anew=Opening(messages=words, is_whole=True, **limit(said.limits[1])), **own)
        return StepResult(messages=words, **own)

    def hear(self, text) -> Reply:
        said = reply(*self.name, self.row, self.episode, self.turn, text, self.ends)
        if said.fails:
            raise RuntimeError("scripted")
        return replace(said, text=spaced(said.text)) if self.has_spaces else said


class Tools:
    """A world of tools."""

    def __init__(self, world: int, task: str, seed: int = 0, has_names: bool = False):
        self.name, self.episode, self.made, self.has_names = (world, task), seed, [], has_names

    def reset(self, id, **row):
        self.place = (*self.name, id, self.episode)
        said = reply(*self.place, 0, "")
        if said.fails:
            raise RuntimeError("scripted")
        return said.text

    def look(self, place: int) -> str:
        """Look there."""
        return self._look(f"look {place}")

    def fail(self, text: str) -> str:
        """Fail."""
        return self._look("fail")

    def _look(self, what):
        self.made.append(what)
        if (found := look(*self.place, self.made)) is None:
            raise ValueError("scripted")
        return found

    def get_reward(self):
        found = earned(*self.place, self.made)
        if found == FAILED:
            raise RuntimeError("scripted")
        return by_name(found, *self.place, len(self.made)) if self.has_names else found


def failure(what):
    """``OVER`` becomes that of a response which exceeds a limit: what takes long is too slow for tests."""
    return Failure(kind=FailureKind.data, message=what, source="")


def limit(own):
    stop, most = own
    return {"stop": stop, "max_tokens": most}


__all__ = ["Constraint", "DataError", "Reward", "Talk", "Tools"]
