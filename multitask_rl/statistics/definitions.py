"""Definitions of a task's metrics: population, value, direction and range, in training and evaluation.

docs/definitions.md has them as a table. A *slot* is one place for a response. Its record is the last attempt,
which a user would see; if that was rejected, the slot has the *rejected value*.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.boundary.printable import redact
from multitask_rl.config.task import TaskSpec
from multitask_rl.contracts import PluginTraits
from multitask_rl.plugins import ALGORITHMS, load_plugin
from multitask_rl.records import (
    FLAGGED,
    OVERRUN,
    Direction,
    Failure,
    SamplingParams,
    Score,
    Scored,
    Statistic,
    Turn,
    Verdict,
    concerned_cost,
)
from multitask_rl.statistics.intervals import summarise

REWARD = "reward_mean"
"""Name of the reward's statistic."""
SAMPLING = "sampling"
"""Key of the hash of an evaluation's sampling. Evaluations of one run are compared only if it is equal; those
of two runs, whatever it is."""
OF_PROMPTS = ("pass@", "maj@")
"""Prefixes of the metrics with one value per prompt, from several responses."""
_OF_CONSTRAINTS = ("cost", "constraint/", "flagged_", "rejection_", "violation_", "served_violation_")
"""Prefixes of the metrics of constraints."""
_PATH = re.compile(r"(\w+:)?(?:/(?!/)|~/|\.\.?/)")
ENOUGH_EARNED = 64
"""After this many scored responses, their best reward is taken as the best of the task."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Direction and declared range of a metric."""

    direction: Direction
    low: float = -math.inf
    high: float = math.inf


_BAD_RATE = _Kind(Direction.lower, 0.0, 1.0)
_GOOD_RATE = _Kind(Direction.higher, 0.0, 1.0)
_PLAIN = _Kind(Direction.none)
_Column = tuple[_Kind, Sequence[Scored], Sequence[float]]
"""A metric's kind, its records, and the value of each record (NaN = not in the population)."""


def metric_names(spec: TaskSpec) -> dict[str, bool]:
    """Return the metrics of a task's evaluations, and whether each has a direction.

    Components of rewards, ``reward/<name>/<component>``, depend on the plugin's results and are left out.
    """
    found = {REWARD: True, "length": False, "truncated_rate": True, "failure_rate": True}
    has_kl = spec.kind != "anchor" or spec.algorithm_config.get("kl", True)
    of_anchor = ("loss", "kl") if has_kl else ("loss",)
    of_texts = {"anchor": of_anchor, "sft": ("loss",), "distill": ("kl",)}.get(spec.kind, ())
    if of_texts and not spec.is_scored:
        return dict.fromkeys(of_texts, True)
    if spec.kind == "anchor":
        found |= dict.fromkeys([*of_texts, "turnover", "pass@1"], True)
    found |= {f"reward/{r.name}": True for r in spec.rewards}
    if (samples := spec.eval_samples) > 1:
        found |= {f"pass@{k}": True for k in _sizes(samples)} | {f"maj@{samples}": True}
    if spec.grammar:
        found["grammar/accepted_rate"] = True
    if not spec.constraints:
        return found
    names = ("cost", "flagged_rate", "rejection_rate", "violation_rate", "served_violation_rate")
    found |= dict.fromkeys(names, True)
    for c in spec.constraints:
        name = c.name
        found[f"cost/{name}"] = True
        if c.limit is not None:
            rates = ["violation_rate"] + (["served_violation_rate"] if c.mode == "reject" else [])
            found |= {f"constraint/{name}/{rate}": True for rate in rates}
    return found


def definitions(spec: TaskSpec) -> dict[str, str]:
    """Return hashes of what metrics are computed from; values with different hashes are not compared.

    Keys (``definition_of`` finds the one of a metric):

    - ``""``: the primary metric. If nothing is scored, it covers the teacher.
    - ``solved``: pass@k, maj@k and turnover.
    - ``reward_mean``: covers each reward with a weight, the weight, the penalties and ``rejected_reward``; if
      a constraint rejects, also whether the algorithm trains on rejected responses. Without rewards it covers
      the constraints.
    - ``reward/<name>``: this reward and its components; as above with its range, if the tasks file gives one.
    - ``constraint``: all metrics of constraints.
    - ``rule/<name>``: the costs of one constraint.

    Other metrics (``length``) have no hash here. ``TextMeter`` adds one for ``loss`` and ``kl`` of an anchor
    with rewards. Every hash covers the environment and its limits. A text that begins as a path counts by its
    last name, because the same run may lie in another directory. Not covered: changed code (``run/store.py``
    reports it), and constraints that reject responses, although they change what a reward is given.
    """

    def digest(*parts: Any) -> str:
        limits = [spec.max_turns, spec.max_tool_calls, spec.max_response_tokens] if spec.environment else []
        world = [spec.environment, spec.environment_config, limits]
        texts = sorted(_plain_text(part) for part in (*parts, world))
        return hashlib.blake2b("\n".join(texts).encode(), digest_size=8).hexdigest()

    judges = [
        [c.name, c.plugin, c.config, c.mode, c.max_attempts, c.stream_every, c.weight > 0]
        for c in spec.judged
    ]
    penalties = [[c.plugin, c.config, -c.weight] for c in spec.judged if c.mode == "penalty" and c.weight]
    scores = {r.name: [r.plugin, r.config, r.overrun, *([r.range] if r.range else [])] for r in spec.rewards}
    weighed = [[*scores[r.name], r.weight] for r in spec.rewards if r.weight]
    rejected: list[list[Any]] = [["rejected", spec.algorithm_config.get("rejected_reward")]]
    rejects = any(c.mode == "reject" for c in spec.judged)
    if rejects and load_plugin(ALGORITHMS, spec.type, expects="loss").trains_rejected:
        rejected.append(["trained on"])
    found = {f"reward/{name}": digest(own) for name, own in scores.items()}
    found["reward_mean"] = digest(*(weighed + penalties + rejected if spec.rewards else judges))
    found["constraint"] = digest(*judges)
    for c in spec.judged:
        found[f"rule/{c.name}"] = digest([c.plugin, c.config, c.stream_every])
    name = spec.primary_metric.partition("/")[0]
    parts = list(Path(spec.teacher).parts)
    if not spec.is_scored:  # of a run: its name, "checkpoints", step, "actor"
        primary = digest(["teacher", *parts[-4:]] if parts[-3:-2] == ["checkpoints"] else [spec.teacher])
    else:
        primary = found["reward_mean"] if name == "reward" else found.get(f"reward/{name}", "")
    found[""] = digest([spec.primary_metric, primary])
    found["solved"] = digest([found[""], spec.solved_at, spec.higher_is_better])
    return found


def definition_of(hashes: Mapping[str, str], metric: str = "") -> str:
    """Return a metric's hash of ``definitions``; "" = none, or not known. No ``metric`` = the primary one."""
    if metric.startswith((*OF_PROMPTS, "turnover")):
        return hashes.get("solved", "")
    if metric.startswith(_OF_CONSTRAINTS):
        return hashes.get("constraint", "")
    return hashes.get("/".join(metric.split("/")[:2]), "")  # reward/<name>/<component>


def sampling_hash(sampling: SamplingParams, condition: Sequence[int]) -> str:
    """Return the hash of ``sampling`` and of the control tokens ``condition`` in front of every prompt."""
    # left out, because control tokens of one task are suppressed in all tasks
    parts = asdict(replace(sampling, suppressed_ids=())), list(condition)
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def are_different(*hashes: str) -> bool:
    """Whether two of ``hashes`` differ; an empty hash is not known and does not count."""
    return len({own for own in hashes if own}) > 1


def measured(evaluation: Any, metric: str = "") -> tuple[str, str, str]:
    """Return the hashes of a metric's definition, of the sampling and of the prompts; "" = not known.

    ``evaluation`` is one of a run or of its records; without a name the metric is the primary one.
    """
    known = evaluation.definitions
    return definition_of(known, metric), known.get(SAMPLING, ""), evaluation.prompts


def is_comparable(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two values, given by their hashes of ``measured``, measure the same as far as is known."""
    return not any(are_different(*pair) for pair in zip(first, second, strict=False))


def _plain_text(part: Any) -> str:
    plain = _without_directories(redact(part))
    return json.dumps(plain, sort_keys=True, default=lambda value: type(value).__qualname__)


def _without_directories(value: Any) -> Any:
    if isinstance(value, str):
        path = _PATH.match(value)  # of a plugin as well: ``trl:/there/rewards.py:f``
        return (path[1] or "") + value.rstrip("/").rpartition("/")[2] if path else value
    if isinstance(value, float) and value.is_integer():
        return int(value)  # 1 and 1.0 are the same setting
    if isinstance(value, Mapping):
        return {str(key): _without_directories(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_without_directories(own) for own in value]
    return value


class TaskMetrics:
    """Turns the records of one task into statistics.

    The ``outcome`` of ``algorithm`` is the reward of a rejected response, if it trains on rejected responses.
    """

    def __init__(self, spec: TaskSpec, algorithm: Algorithm) -> None:
        self._spec = spec
        self._algorithm = algorithm
        self._traits: Mapping[str, PluginTraits] = {}
        self._rejected: dict[str, float] = {}
        self._num_earned, self._num_unscored, self._best = 0, 0, -math.inf
        self._told: set[str] = set()

    def declare(self, traits: Mapping[str, PluginTraits]) -> None:
        """Set the traits of the task's rewards, by name: ranges and directions."""
        self._traits = traits

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """Declared range of the reward, penalties included; None if a weighted reward declares no range."""
        kind = self._kind("reward")
        return (kind.low, kind.high) if math.isfinite(kind.high - kind.low) else None

    def range_of(self, scored: Sequence[Scored]) -> tuple[float, float] | None:
        """Return the declared range of the reward over the slots, by what applied to each; None = unknown."""
        ends = [self._ends(s.terms) for s in served(scored) if s.reward is not None and s.terms]
        if not ends:
            return None
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        return (low, high) if math.isfinite(high - low) else None

    def _ends(self, terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Return the ends of a reward of ``terms``: (weight, value) of each reward, then of each penalty.

        A reward whose value is NaN does not apply and adds nothing. A penalty whose value is NaN counts as 0.
        """
        low = high = 0.0
        names = [r.name for r in self._spec.rewards if r.weight]
        for index, (weight, value) in enumerate(terms):
            if index >= len(names):
                low, high = low + min(weight, 0.0), high + max(weight, 0.0)
            elif not math.isnan(value):
                traits = self._traits.get(names[index], PluginTraits())
                own = weight * traits.low, weight * traits.high
                low, high = low + min(own), high + max(own)
        return low, high

    @property
    def primary_direction(self) -> Direction:
        """Direction of the primary metric: the task's setting, else the declaration of its reward."""
        declared = self._kind(self._spec.primary_metric).direction
        stated = self._spec.higher_is_better
        is_lower = declared is Direction.lower if stated is None else not stated
        return Direction.lower if is_lower else Direction.higher

    def primary(self, scored: Sequence[Scored]) -> Statistic:
        """Return the primary metric over the slots of held-out records, with its values per prompt."""
        name, final = self._spec.primary_metric, served(scored)
        kind = replace(self._kind(name), direction=self.primary_direction)
        # a resumed run may have another primary metric, or another direction
        key = f"primary/{name}/{kind.direction.value}"
        return _summary(kind, final, self._over_slots(name, kind, final, key=key), _groups(final))

    def num_failed(self, scored: Sequence[Scored]) -> int:
        """Return how many slots have no primary metric because the slot or the metric's reward failed."""
        plugin = self._spec.primary_metric.partition("/")[0]
        return sum(
            _has_failed(s) or (not s.rollout.rejected and isinstance(s.breakdown.get(plugin), Failure))
            for s in served(scored)
        )

    def describe(self, scored: Sequence[Scored], *, held_out: bool = False) -> dict[str, Statistic]:
        """Return every statistic by name, from all attempts of every slot of a step or an evaluation.

        ``held_out``: the records are of an evaluation, so values per prompt are kept.
        """
        final = served(scored)
        ends = [s for s in final if not _has_failed(s)]
        numbers: dict[str, _Column] = {}
        names = ["reward", *(r.name for r in self._spec.rewards)]
        for plugin, result in (pair for s in ends for pair in s.breakdown.items()):
            if isinstance(result, Score):
                names += [plugin, *(f"{plugin}/{part}" for part in result.components)]
        for name in dict.fromkeys(names):
            kind = self._kind(name)
            values = self._over_slots(name, kind, final, key=name)
            numbers[REWARD if name == "reward" else f"reward/{name}"] = kind, final, values
        numbers["length"] = _PLAIN, ends, [len(s.rollout.response_ids) for s in ends]
        numbers["truncated_rate"] = _BAD_RATE, ends, [s.rollout.is_truncated for s in ends]
        numbers["failure_rate"] = _BAD_RATE, final, [_has_failed(s) for s in final]
        if episodes := [s for s in ends if s.rollout.turns]:
            numbers["turns"] = _PLAIN, episodes, [len(s.rollout.turns) for s in episodes]
            numbers["given_tokens"] = _PLAIN, episodes, [s.rollout.num_given for s in episodes]
            numbers["world_s"] = _PLAIN, episodes, [s.rollout.world_s for s in episodes]
            facts = [_facts(s.rollout.turns) for s in episodes]
            for name in sorted({name for own in facts for name in own}):
                zero = 0.0 if "/" in name else math.nan
                numbers[f"environment/{name}"] = _PLAIN, episodes, [own.get(name, zero) for own in facts]
        for name in sorted({name for s in final for name in s.rollout.world_failures}):
            tries = [s.rollout.world_failures.get(name, 0) for s in final]
            numbers[f"world_failures/{name}"] = _PLAIN, final, tries
        bound = [s for s in ends if s.rollout.sampling.grammar]
        # the grammar allows the end token only after a complete sentence, and begins again with every turn
        reasons = [[t.finish_reason for t in s.rollout.turns] or [s.rollout.finish_reason] for s in bound]
        sentences = [set(own) == {"stop"} for own in reasons]
        numbers["grammar/accepted_rate"] = _GOOD_RATE, bound, sentences
        judged = [s for s in scored if s.rollout.verdicts and not _has_failed(s)]
        costs: dict[str, list[float | None]] = {"cost": [s.cost if s.concerned else None for s in judged]}
        for name in dict.fromkeys(name for s in judged for name in s.rollout.verdicts):
            costs[f"cost/{name}"] = [concerned_cost(s, name) for s in judged]
        for name, own in costs.items():
            numbers[name] = _BAD_RATE, judged, [math.nan if cost is None else cost for cost in own]
        flagged = [s.rollout.finish_reason == FLAGGED for s in judged]
        numbers["flagged_rate"] = _BAD_RATE, judged, flagged
        numbers["rejection_rate"] = _BAD_RATE, judged, [s.rollout.rejected for s in judged]
        # before the constraint intervenes: the actor's own behaviour
        first = [s for s in judged if s.rollout.attempt == 0]
        numbers["violation_rate"] = _BAD_RATE, first, [_violates(s) for s in first]
        numbers["served_violation_rate"] = _BAD_RATE, ends, [_violates(s) for s in ends]
        if held_out:
            numbers |= self._of_prompts(final)
        keep = _groups(final) if held_out else ()
        found = {name: _summary(*column, keep) for name, column in numbers.items()}
        return {name: statistic for name, statistic in found.items() if statistic.n}

    def _of_prompts(self, final: Sequence[Scored]) -> dict[str, _Column]:
        """Return ``pass@j`` and ``maj@k`` of prompts with k > 1 responses: one value per prompt."""
        groups: dict[str, list[int]] = {}
        for index, s in enumerate(final):
            groups.setdefault(s.rollout.group_id, []).append(index)
        samples = max(map(len, groups.values()), default=1)
        if samples == 1 and self._spec.kind != "anchor":
            return {}
        name = self._spec.primary_metric
        kind = replace(self._kind(name), direction=self.primary_direction)
        values = self._over_slots(name, kind, final, key=f"primary/{name}/{kind.direction.value}")
        bars = [self._bar(name, kind, s) for s in final]
        first = [final[own[0]] for own in groups.values()]
        counted = [[i for i in own if math.isfinite(values[i])] for own in groups.values()]
        found: dict[str, _Column] = {}
        # a failed or rejected slot has no terms: its bar is that of all rewards, which may be infinite
        able = [i for own in counted for i in own if not final[i].rollout.rejected] or range(len(final))
        if all(math.isfinite(bars[i]) for i in able):
            is_solved = [
                not s.rollout.rejected and kind.direction.sign * (value - bar) >= -1e-9
                for s, value, bar in zip(final, values, bars, strict=True)
            ]
            for k in _sizes(samples):
                rates = [pass_at_k(len(own), sum(is_solved[i] for i in own), k) for own in counted]
                found[f"pass@{k}"] = _GOOD_RATE, first, rates
        answers = [self._answer(s) for s in final] if samples > 1 else []
        if any(answers):
            majority = [_majority([(answers[i], values[i]) for i in own]) for own in counted]
            found[f"maj@{samples}"] = kind, first, majority
        return found

    def _bar(self, name: str, kind: _Kind, scored: Scored) -> float:
        """Return the value of the primary metric ``name`` at and above which a slot counts as solved."""
        if self._spec.solved_at is not None:
            return self._spec.solved_at
        low, high = kind.low, kind.high
        if name == "reward" and scored.terms:
            low, high = self._ends(scored.terms)
        return high if kind.direction is Direction.higher else low

    def _answer(self, scored: Scored) -> str:
        """Return the answer that the primary metric's reward read; of the whole reward, the first one."""
        plugin = self._spec.primary_metric.partition("/")[0]
        results = scored.breakdown.values() if plugin == "reward" else [scored.breakdown.get(plugin)]
        return next((r.answer for r in results if isinstance(r, Score) and r.answer), "")

    def slot_rewards(self, scored: Sequence[Scored]) -> dict[str, list[float]]:
        """Return the slots' rewards by group, without failed slots."""
        final = served(scored)
        found: dict[str, list[float]] = {}
        values = self._over_slots("reward", self._kind("reward"), final, key="reward")
        for slot, value in zip(final, values, strict=True):
            if math.isfinite(value):
                found.setdefault(slot.rollout.group_id, []).append(value)
        return found

    def _kind(self, name: str) -> _Kind:
        plugin, _, component = name.partition("/")
        if name == "reward":
            if not self._spec.rewards:  # 1 - cost
                return _GOOD_RATE
            of = [(r, self._traits.get(r.name, PluginTraits())) for r in self._spec.rewards]
            weights = [r.weight if own.higher_is_better else -r.weight for r, own in of if r.weight]
            weights += [-c.weight for c in self._spec.constraints if c.mode == "penalty"]
            return _Kind(Direction.higher, *self._ends([(weight, 0.0) for weight in weights]))
        if component or plugin not in self._traits:
            return _PLAIN
        traits = self._traits[plugin]
        direction = Direction.higher if traits.higher_is_better else Direction.lower
        return _Kind(direction, traits.low, traits.high)

    def _over_slots(self, name: str, kind: _Kind, final: Sequence[Scored], *, key: str) -> list[float]:
        """Return the value of every slot; NaN = failed or not applicable."""
        plugin, _, component = name.partition("/")
        sign, values, lost = kind.direction.sign, [math.nan] * len(final), list[int]()
        for index, s in enumerate(final):
            result = s.breakdown.get(plugin)
            parts = result.components if isinstance(result, Score) else {}
            if _has_failed(s):
                continue
            if s.rollout.rejected or (component and OVERRUN in parts and component not in parts):
                lost.append(index)  # beyond the reward's limits, a response has no component of it
            elif name == "reward":
                values[index] = math.nan if s.reward is None else s.reward
            elif isinstance(result, Score):
                values[index] = parts.get(component, math.nan) if component else result.value
        finite = [sign * value for value in values if math.isfinite(value)]
        if finite and sign and key not in self._rejected:
            self._rejected[key] = sign * min(finite)
        worst = {1: kind.low, -1: kind.high}.get(sign, math.nan)
        fallback = worst if math.isfinite(worst) else self._rejected.get(key, math.nan)
        is_trained = name == "reward" and self._algorithm.trains_rejected
        for index in lost:
            values[index] = self._algorithm.outcome(final[index]) if is_trained else fallback
        return values

    def unearned(self, scored: Sequence[Scored]) -> list[str]:
        """Return warnings, each once, about settings that reward an unscored response above all scored ones.

        A response is unscored if it is rejected and trained on, if it exceeds a reward's limits, or if its
        environment has given nothing. A setting that every response gets, none being scored, is told too.
        """
        task = f"tasks.{self._spec.name}"
        paid: dict[str, float] = {}
        weighted = [r.name for r in self._spec.rewards if r.weight]
        is_world = all(r.plugin == "environment" for r in self._spec.rewards if r.weight)
        for s in scored:
            results = [(name, s.breakdown.get(name)) for name in weighted]
            keys = [f"{n}.overrun" for n, r in results if isinstance(r, Score) and OVERRUN in r.components]
            if is_world and s.rollout.turns and s.rollout.earned is None:
                keys += [f"{name}.config.unfinished" for name in weighted]
            if s.rollout.rejected and self._algorithm.trains_rejected:
                paid[f"{task}.algorithm_config.rejected_reward"] = self._algorithm.outcome(s)
            elif s.reward is not None and keys:
                self._num_unscored += 1
                paid |= {f"{task}.rewards.{key}": s.reward for key in keys}
            elif s.reward is not None:
                self._num_earned += 1
                self._best = max(self._best, s.reward)
        if (self._num_earned or self._num_unscored) < ENOUGH_EARNED:
            return []
        told = {k: v for k, v in paid.items() if v > self._best and k not in self._told}
        self._told |= set(told)
        rest = (
            f"the best of {self._num_earned} scored responses has {self._best:g}. Training moves towards "
            "what cannot be scored; set a lower value"
            if self._num_earned
            else f"and none of {self._num_unscored} responses has one: training learns nothing. Either its "
            "plugin gives none, or limits end every response before"
        )
        return [f"{key}: a response without a score gets {value:g}, {rest}" for key, value in told.items()]

    def state_dict(self) -> dict[str, float]:
        """Return the rejected values fixed so far, by metric."""
        return dict(self._rejected)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._rejected = {name: float(value) for name, value in state.items()}

    def earned_dict(self) -> dict[str, Any]:
        """Return what ``unearned`` has seen and told, JSON-able."""
        best = self._best if self._num_earned else None
        return {
            "number": self._num_earned,
            "unscored": self._num_unscored,
            "best": best,
            "told": sorted(self._told),
        }

    def load_earned_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``earned_dict``; warnings given since are not repeated. Empty = before the first step."""
        self._num_earned, best = state.get("number", 0), state.get("best")
        self._num_unscored = state.get("unscored", 0)
        self._best = -math.inf if best is None else best
        self._told |= set(state.get("told", ()))


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Return the chance that one of ``k`` responses solves a prompt that ``solved`` of ``n`` responses solve.

    ``1 - C(n - solved, k) / C(n, k)``, unbiased; NaN with fewer than ``k`` responses.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k) if n >= k else math.nan


def _sizes(samples: int) -> list[int]:
    """Return the k of ``pass@k``: powers of two up to ``samples``, and ``samples``."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def _majority(votes: Sequence[tuple[str, float]]) -> float:
    """Return the mean value of the most frequent answer; if several are, the mean of their means.

    ``votes`` are (answer, value). An empty answer does not vote. If there is no vote, all values count.
    """
    counts = Counter(answer for answer, _ in votes if answer)
    most = max(counts.values(), default=0)
    own: dict[str, list[float]] = {}
    for answer, value in votes:
        if counts[answer] == most:
            own.setdefault(answer, []).append(value)
    means = [math.fsum(values) / len(values) for values in own.values()]
    return math.fsum(means) / len(means) if means else math.nan


def served(scored: Sequence[Scored]) -> list[Scored]:
    """Return the last attempt of every slot, in order; it may be rejected, so that no user would see it."""
    last: dict[tuple[str, int], Scored] = {}
    for s in scored:
        last[(s.rollout.group_id, s.rollout.sample)] = s
    return list(last.values())


def violations(constraint: str, scored: Sequence[Scored], *, of_served: bool) -> Statistic:
    """Return the violation rate of a constraint, with values per prompt; ``scored`` holds all attempts.

    ``of_served``: over last attempts, which a user sees; else over first ones, the actor's own behaviour.
    """
    final = served(scored)
    population = final if of_served else [s for s in scored if s.rollout.attempt == 0]
    own = [s for s in population if not _has_failed(s)]
    return _summary(_BAD_RATE, own, [_violates(s, constraint) for s in own], _groups(final))


_LARGEST_FACT = 1e30
"""Larger facts, and NaN, are left out, so that sums and squares stay finite."""


def _facts(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the numbers of an episode's ``info``: counts by name as sums, others as the world said last."""
    facts: dict[str, float] = {}
    for key, value in ((k, v) for turn in turns for k, v in turn.info.items()):
        if isinstance(value, Mapping):
            for name, count in value.items():
                if isinstance(count, int | float) and abs(count) <= _LARGEST_FACT:
                    facts[f"{key}/{name}"] = facts.get(f"{key}/{name}", 0.0) + count
        elif isinstance(value, int | float) and abs(value) <= _LARGEST_FACT:
            facts[key] = float(value)
    return facts


def _has_failed(scored: Scored) -> bool:
    return scored.failure is not None or scored.rollout.failure is not None


def _violates(scored: Scored, constraint: str = "") -> float:
    """1 = a constraint (or the one named) is violated, 0 = none is, NaN = none concerns the record."""
    verdicts = scored.rollout.verdicts
    asked = [verdicts.get(constraint)] if constraint else list(verdicts.values())
    own = [v.violated for v in asked if isinstance(v, Verdict) and v.applicable]
    return float(any(own)) if own else math.nan


def _groups(scored: Sequence[Scored]) -> list[str]:
    return list(dict.fromkeys(s.rollout.group_id for s in scored))


def _summary(
    kind: _Kind, scored: Sequence[Scored], values: Sequence[float], keep: Sequence[str] = ()
) -> Statistic:
    prompts = [s.rollout.group_id for s in scored]
    return summarise(values, prompts, direction=kind.direction, low=kind.low, high=kind.high, keep=keep)
