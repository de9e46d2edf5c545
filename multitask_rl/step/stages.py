"""The stages of a step: rollout, constraints, rewards, advantages, update."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from multitask_rl.constraints.streaming import StreamJudge
from multitask_rl.environments.pool import WorldPool
from multitask_rl.errors import PluginError
from multitask_rl.executor.scorer import RunScorer
from multitask_rl.models.actor import Actor
from multitask_rl.records import FLAGGED, Failure, Prompt, Rollout, Scored, TrainSample, Verdict
from multitask_rl.rollout.base import Ended, GenerationRequest, RolloutEngine
from multitask_rl.scoring.round import Pending
from multitask_rl.seeding import derive_seed
from multitask_rl.step.episodes import Episode, Episodes
from multitask_rl.step.flow import Stage, StreamingStage
from multitask_rl.step.task_state import TaskState
from multitask_rl.step.tokens import Sampled, advantages_of
from multitask_rl.tracking.timeline import Span
from multitask_rl.training.backend import CreditedSample
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.learner import Learner, UpdateReport


@dataclass(slots=True)
class _Call:
    """What one call of ``sample`` asked the engine for. A *position* is an index into ``slots``."""

    judge: StreamJudge | None
    episodes: Episodes | None
    slots: list[Rollout | Episode] = field(default_factory=list)
    """What each response goes to: it fills a rollout, or is the next answer of an episode."""
    seeds: list[int] = field(default_factory=list)
    owners: list[list[int]] = field(default_factory=list)
    """[requests][samples] the position of each sample; emptied when the engine's stream ends."""
    ready: list[Episode] = field(default_factory=list)
    """Episodes whose next turn can be sampled and is not yet in the engine's stream."""


@dataclass(slots=True)
class _Group:
    """A group that is being sampled; recorded only if the quorum is below 1."""

    task: str
    policy_version: int
    """Version of the weights when the group began."""
    num_open: int
    """Number of rollouts that have not ended."""
    ended: list[Rollout] = field(default_factory=list)
    """Ended episodes, held back until the group is complete."""


Progress = Callable[[str, int, int], None]
"""Called with the arguments of ``Tracker.log_progress``: ``what``, ``done``, ``total``."""


class RolloutStage(StreamingStage):
    """Samples a group of responses per prompt; streaming constraints may end one (``StreamJudge``).

    With a quorum below 1, a call ends when that share of its groups is complete and all open episodes wait
    for their worlds. Groups with an open episode are then *late*: a later call continues them. The episodes
    of a group are yielded together, when the group is complete.
    """

    name = "rollout"
    consumes = Prompt
    produces = Rollout

    def __init__(
        self,
        engine: RolloutEngine,
        tasks: Mapping[str, TaskState],
        decode: Callable[..., Any],
        *,
        seed: int,
        scorer: RunScorer | None = None,
        purpose: str = "rollout",
        group_sizes: Mapping[str, int] | None = None,
        temperature: float | None = None,
        quorum: float = 1.0,
        episodes: Callable[[], Episodes] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Set up the stage.

        Args:
            engine: samples the responses.
            tasks: by name.
            decode: ``decode`` of the tokenizer, or a function with its ``skip_special_tokens``.
            seed: of the run.
            scorer: judges partial responses for streaming constraints; None = they are not judged.
            purpose: name of the random streams: ``rollout``, or an evaluation's.
            group_sizes: responses per prompt, by task; a missing task has its own setting.
            temperature: of an evaluation (``TaskSpec.evaluated_at``); None = each task's own.
            quorum: share of the groups of a call that must be complete for the call to end.
            episodes: makes the driver of the tasks with an environment.
            on_progress: called when sampling begins and when responses have ended.
        """
        self._quorum = quorum
        self._groups: dict[str, _Group] = {}
        """Group id -> group: groups of the present call, and late ones."""
        self._late: Episodes | None = None
        """The episodes of late groups."""
        self._episodes = episodes
        self._on_progress = on_progress
        self.engine = engine
        self._tasks = tasks
        self._decode = decode
        self._seed = seed
        self._scorer = scorer
        self._purpose = purpose
        self._group_sizes = group_sizes or {}
        self._temperature = temperature
        self._call: _Call | None = None
        self._is_sampling = False
        """The engine's stream is open. Between two streams the stage waits for worlds."""
        self._joined: list[Rollout] = []
        self.between_parts: Callable[[], None] = lambda: None
        """Called when responses have ended, and about once a second while the stage waits for worlds. An
        exception that it raises ends the call."""
        self.spans: list[Span] = []
        """Spans in which the engine worked, since the caller last cleared the list."""

    def order(self, record: Rollout) -> Any:
        """Return the sort key of a rollout: its place in the batch."""
        return record.order

    def stream(self, parts: Iterable[list[Prompt]]) -> Iterator[list[Rollout]]:
        """Sample each prompt's group; yield rollouts as they end, except joined ones (``take_joined``)."""
        slots: list[Rollout] = []
        given: list[Rollout] = []
        prompts = [prompt for part in parts for prompt in part]
        if self._late is not None:
            positions = {name: position for position, name in enumerate(self._groups, len(prompts))}
            self._late.go_on(positions)
            for name, group in self._groups.items():
                for rollout in group.ended:
                    rollout.prompt.position = positions[name]
        for position, prompt in enumerate(prompts):
            prompt.position = position
            task = self._tasks[prompt.task]
            sampling = task.sampling
            if self._temperature is not None:
                sampling = task.spec.evaluated_at(sampling, self._temperature)
            if prompt.given_ids is not None:
                response = self._shown(prompt.given_ids)
                rollout = Rollout(prompt=prompt, sample=0, sampling=sampling, response=response)
                version = self.engine.policy_version
                given.append(replace(rollout, response_ids=prompt.given_ids, policy_version=version))
                continue
            size = self._group_sizes.get(prompt.task, task.group_size)
            slots += [Rollout(prompt=prompt, sample=sample, sampling=sampling) for sample in range(size)]
            if self._quorum < 1.0:
                self._groups[prompt.group_id] = _Group(prompt.task, self.engine.policy_version, size)
        if given:
            yield given
        own = {prompt.group_id for prompt in prompts if prompt.given_ids is None}
        most_open = len(own) - math.ceil(self._quorum * len(own) - 1e-9)

        def is_enough() -> bool:
            return sum(name in own for name in self._groups) <= most_open

        num_done = 0
        what = {"rollout": "sampling", "evaluation": "evaluating"}.get(self._purpose, "confirming")
        if self._on_progress is not None:
            self._on_progress(what, 0, len(slots))
        for ended in self.sample(slots, is_enough if self._quorum < 1.0 else None):
            self._joined += [rollout for rollout in ended if rollout.attempt]
            first = [rollout for rollout in ended if not rollout.attempt]
            num_done += sum(rollout.group_id in own for rollout in first)
            if self._on_progress is not None and first:
                self._on_progress(what, num_done, len(slots))
            yield first if self._quorum >= 1.0 else self._whole(first)

    @property
    def late(self) -> dict[str, str]:
        """Group id -> task of the late groups."""
        return {name: group.task for name, group in self._groups.items()}

    def drop(self, before: float) -> Counter[str]:
        """Drop the late groups that began under weights older than version ``before``.

        Returns:
            Task -> number of dropped groups.
        """
        gone = {name: own for name, own in self._groups.items() if own.policy_version < before}
        if self._late is not None:
            self._late.drop(gone)
        self._groups = {name: own for name, own in self._groups.items() if name not in gone}
        return Counter(own.task for own in gone.values())

    def _whole(self, ended: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts to yield: episodes when their group is complete, others at once."""
        passed: list[Rollout] = []
        for rollout in ended:
            group = self._groups[rollout.group_id]
            group.num_open -= 1
            (group.ended if self._has_world(rollout) else passed).append(rollout)
            if not group.num_open:
                passed += self._groups.pop(rollout.group_id).ended
        return passed

    @property
    def can_join(self) -> bool:
        """Whether the engine works and admits more requests."""
        return self._is_sampling and self.engine.can_admit

    def join(self, slots: Sequence[Rollout]) -> None:
        """Add empty rollouts to the present call of ``sample``. Allowed only while ``can_join``."""
        call = self._call
        assert call is not None, "the engine is not at work"
        self._begin_episodes(call, slots)
        if plain := [slot for slot in slots if not self._has_world(slot)]:
            self.engine.admit(self._requests(call, plain))

    def take_joined(self) -> list[Rollout]:
        """Return the joined rollouts that ended since the last call."""
        joined, self._joined = self._joined, []
        return joined

    def sample(
        self, slots: Sequence[Rollout], is_enough: Callable[[], bool] | None = None
    ) -> Iterator[list[Rollout]]:
        """Sample a response for each of ``slots`` and of those that ``join`` adds; yield rollouts that end.

        Turns of episodes and other responses share the engine's stream. If the engine admits no request
        during a stream, a turn waits for the next stream. The engine is idle only if all turns wait for
        worlds. With ``is_enough``, late episodes are sampled too. Once ``is_enough()`` is true, the episodes
        that wait for their worlds are left to a later call.
        """
        judge = StreamJudge(self._scorer.judge, self._text) if self._scorer is not None else None
        episodes = self._late if is_enough is not None else None
        if episodes is None and self._episodes is not None:
            episodes = self._episodes()
        self._call = call = _Call(judge, episodes)
        stay_open = False
        try:
            self._begin_episodes(call, slots)
            requests = self._requests(call, [slot for slot in slots if not self._has_world(slot)])
            seconds = 0.0
            while True:
                if requests:
                    seconds = yield from self._sample_stream(call, requests)
                if episodes is None:
                    break
                yield from self._wait_for_worlds(call, episodes, max(0.02, seconds / 2), is_enough)
                if not call.ready:
                    break
                call.ready.sort(key=lambda episode: episode.slot.order)
                requests, call.ready = self._requests(call, call.ready), []
            stay_open = is_enough is not None
        finally:
            self._call, self._is_sampling = None, False
            if episodes is not None:
                if stay_open:
                    episodes.pause()
                else:
                    episodes.close()
                self.engine.retain(episodes.tickets)
            if is_enough is not None:
                self._late = episodes if stay_open and self._groups else None
                if not stay_open:
                    self._groups.clear()

    def _sample_stream(
        self, call: _Call, requests: Sequence[GenerationRequest]
    ) -> Generator[list[Rollout], None, float]:
        """Sample ``requests``, and turns that get ready meanwhile if the engine admits them.

        Yields:
            Rollouts that end.

        Returns:
            The seconds that it took.
        """
        episodes = call.episodes
        if episodes is not None:
            self.engine.retain(episodes.tickets)
        began = time.monotonic()
        self._is_sampling = True
        for ended in self.engine.generate_stream(requests):
            self.between_parts()
            done = self._take(call, ended)
            if episodes is not None and not episodes.in_lockstep:
                ready, also_done = episodes.poll(0.0)
                call.ready += ready
                done += also_done
                if call.ready and self.engine.can_admit:
                    self.engine.admit(self._requests(call, call.ready))
                    call.ready = []
            yield done
        self._is_sampling = False
        call.owners.clear()
        span = began, time.monotonic()
        self.spans.append(span)
        return span[1] - began

    def _wait_for_worlds(
        self,
        call: _Call,
        episodes: Episodes,
        least_s: float,
        is_enough: Callable[[], bool] | None,
    ) -> Iterator[list[Rollout]]:
        """Wait until a turn is ready or no episode waits for its world; yield rollouts that end.

        - Turns that get ready within ``least_s`` seconds share a stream: waiting costs less than another one.
        - In lockstep all turns share a stream.
        - Once ``is_enough()`` is true, no turn is waited for.
        """
        until = time.monotonic() + least_s
        while episodes.num_waiting:
            self.between_parts()
            # a further attempt cannot be left to a later call: its group has been passed on
            may_leave = is_enough is not None and is_enough() and not episodes.has_attempts
            left = 1.0
            if call.ready and episodes.in_lockstep:
                if not episodes.must_wait:
                    return
            elif call.ready or may_leave:
                left = until - time.monotonic()
                if left < 0.0:
                    return
            ready, done = episodes.poll(left)
            call.ready += ready
            if done:
                yield done

    def _has_world(self, slot: Rollout) -> bool:
        return self._episodes is not None and bool(self._tasks[slot.task].spec.environment)

    def _begin_episodes(self, call: _Call, slots: Sequence[Rollout]) -> None:
        if call.episodes is not None:
            for slot in (own := [slot for slot in slots if self._has_world(slot)]):
                slot.policy_version = self.engine.policy_version
            call.episodes.begin(own, [self._seed_of(slot, "world") for slot in own])

    def _take(self, call: _Call, ended: Sequence[Ended]) -> list[Rollout]:
        """Return the rollouts whose response ended, filled; give ended turns to their episodes."""
        filled = []
        for request, sample, generation in ended:
            position = call.owners[request][sample]
            slot, ids = call.slots[position], generation.response_ids
            is_flagged = generation.finish_reason == FLAGGED
            verdicts = call.judge.verdicts[call.seeds[position]] if call.judge and is_flagged else {}
            if isinstance(slot, Episode):
                assert call.episodes is not None
                for name, verdict in verdicts.items():
                    assert isinstance(verdict, Verdict)
                    slot.rollout.verdicts[name] = verdict.of_turn(slot.number + 1)
                if not slot.number:
                    slot.rollout.policy_version = self.engine.policy_version
                call.episodes.answer(slot, generation, self._text(slot.rollout, ids, slot.stop))
                continue
            filled.append(
                replace(
                    slot,
                    response_ids=ids,
                    rollout_logprobs=generation.rollout_logprobs,
                    finish_reason=generation.finish_reason,
                    response=self._text(slot, ids),
                    policy_version=self.engine.policy_version,
                    verdicts=dict(verdicts),
                )
            )
        return filled

    def _requests(self, call: _Call, slots: Sequence[Rollout | Episode]) -> list[GenerationRequest]:
        """Add the slots to ``call``, without episodes whose worlds failed; return one request per group."""
        requests: list[GenerationRequest] = []
        for slot in slots:
            if isinstance(slot, Episode) and call.episodes is not None and not call.episodes.is_open(slot):
                continue
            rollout = slot.rollout if isinstance(slot, Episode) else slot
            turn = (slot.number,) if isinstance(slot, Episode) and slot.number else ()
            seed = self._seed_of(rollout, *turn)
            watch = None
            if call.judge is not None:
                # a partial answer is judged alone, without the turns before it
                watch = call.judge.watch(seed, replace(rollout, turns=[]), self._tasks[rollout.task].spec)
            prompt_ids, sampling = rollout.prompt.prompt_ids, rollout.sampling
            conversations: list[int] = []
            if isinstance(slot, Episode) and call.episodes is not None:
                prompt_ids, conversations = slot.context_ids, [slot.ticket]
                sampling = call.episodes.sampling(slot)
            previous = requests[-1] if requests else None
            is_shared = previous is not None and previous.prompt_ids is prompt_ids
            if previous is not None and is_shared and previous.sampling == sampling:
                requests[-1] = replace(
                    previous,
                    seeds=[*previous.seeds, seed],
                    conversations=[*previous.conversations, *conversations],
                )
                call.owners[-1].append(len(call.slots))
            else:
                requests.append(
                    GenerationRequest(
                        prompt_ids=prompt_ids,
                        sampling=sampling,
                        seeds=[seed],
                        watch=watch,
                        conversations=conversations,
                    )
                )
                call.owners.append([len(call.slots)])
            call.slots.append(slot)
            call.seeds.append(seed)
        return requests

    def _seed_of(self, rollout: Rollout, *name: str | int) -> int:
        run_seed, task = self._seed, rollout.task
        if self._purpose != "rollout":  # evaluations of a task stay paired when a resume renames it
            run_seed, task = self._tasks[task].held_out_by[:2]
        place = rollout.prompt.draw, rollout.sample, rollout.attempt
        return derive_seed(run_seed, self._purpose, task, *place, *name)

    def _text(self, slot: Rollout, response_ids: Sequence[int], also: Sequence[str] = ()) -> str:
        """Return the text without special tokens up to the first stop string, which may hold some."""
        text, stops = self._shown(response_ids), (*slot.sampling.stop, *also)
        if not stops:
            return text
        whole = self._decoded(response_ids)
        before = min((whole.partition(stop)[0] for stop in stops), key=len)
        if text == whole:
            return before
        if before == whole:
            return text
        number = len(response_ids)
        while number and self._decoded(response_ids[: number - 1]).startswith(before):
            number -= 1
        kept = response_ids[:number]
        # the last token may hold the beginning of the stop string
        text, surplus = self._shown(kept), len(self._decoded(kept)) - len(before)
        return text[: len(text) - min(surplus, len(text) - len(self._shown(kept[:-1])))]

    def _shown(self, ids: Sequence[int]) -> str:
        return str(self._decode(ids, skip_special_tokens=True))

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._decode(ids, skip_special_tokens=False))


@dataclass(slots=True)
class _Round:
    """All rollouts of a batch with the same attempt number."""

    judging: Pending[dict[str, Verdict | Failure]]
    rollouts: list[Rollout] = field(default_factory=list)
    undecided: dict[int, None] = field(default_factory=dict)
    """Indices of rollouts without a known result, in order."""
    followed: set[int] = field(default_factory=set)
    """Indices of rollouts whose next attempt is under way."""
    num_asked: int = 0


class ConstraintStage(StreamingStage):
    """Asks each task's constraints. If one of mode ``reject`` refuses a response, its slot is sampled again.

    Rejected responses stay in the stream, marked ``rejected``: algorithms may learn from them, and leaving
    them out would bias the estimate (see ``algorithms/constrained_decoding.py``).
    """

    name = "constraints"
    consumes = Rollout
    produces = Rollout

    def __init__(
        self,
        scorer: RunScorer,
        rollout: RolloutStage,
        tasks: Mapping[str, TaskState],
        later: Collection[str] = (),
    ) -> None:
        """``later``: tasks whose constraints the reward stage asks, because they refuse nothing."""
        self._scorer = scorer
        self._rollout = rollout
        self._tasks = tasks
        self._here = {name for name, task in tasks.items() if task.spec.judged and name not in later}
        self.spans: list[Span] = []
        """Spans in which the stage waited for verdicts, since the caller last cleared the list."""

    def order(self, record: Rollout) -> Any:
        """Return the sort key of a rollout: its place in the batch, attempts of one slot side by side."""
        return record.order

    def stream(self, parts: Iterable[list[Rollout]]) -> Iterator[list[Rollout]]:
        """Yield rollouts without constraints as they come, others when all rollouts of their task are judged.

        A rejected slot is sampled again at once if the engine admits requests while it works
        (``RolloutStage.join``), else after the batch. Both ways use the same seeds, so they give the same
        rollouts and the same batches.
        """
        rounds: list[_Round] = []
        for part in parts:
            free = [r for r in part if r.task not in self._here]
            if free:
                yield free
            own = [r for r in part if r.task in self._here]
            self._take(rounds, own + self._rollout.take_joined())
        number = 0
        while number < len(rounds):
            judged: list[tuple[int, Rollout]] = []
            for own_task in self._judge(rounds[number]):
                judged += own_task
                yield [rollout for _, rollout in own_task]
            judged.sort(key=lambda pair: pair[1].order)
            rounds[number].undecided.clear()  # else the engine would be given their next attempts once more
            following = [self._next_attempt(r) for i, r in judged if i not in rounds[number].followed]
            again = [slot for slot in following if slot is not None]
            for part in self._rollout.sample(again) if again else []:
                self._take(rounds, part)
            number += 1

    def _take(self, rounds: list[_Round], rollouts: Sequence[Rollout]) -> None:
        """Ask the constraints about ``rollouts``; if the engine admits more, sample rejected slots again."""
        for rollout in rollouts:
            if rollout.attempt == len(rounds):
                rounds.append(_Round(self._scorer.begin_judging()))
            current = rounds[rollout.attempt]
            current.undecided[len(current.rollouts)] = None
            current.rollouts.append(rollout)
        for current in rounds:
            if new := current.rollouts[current.num_asked :]:
                current.judging.add(new)
                current.num_asked = len(current.rollouts)
        if not self._rollout.can_join:
            return
        again = []
        for current in rounds:
            for index in list(current.undecided):
                known = current.judging.known(index)
                if known is not None:
                    del current.undecided[index]
                    slot = self._next_attempt(self._judged(current.rollouts[index], known))
                    if slot is not None:
                        current.followed.add(index)
                        again.append(slot)
        if again:
            self._rollout.join(again)

    def _judge(self, current: _Round) -> Iterator[list[tuple[int, Rollout]]]:
        """Close a round; yield (index, rollout with verdicts) in order, each task as soon as it is judged."""
        judging = current.judging
        order = sorted(range(len(current.rollouts)), key=lambda index: current.rollouts[index].order)
        judging.seal(order)
        waiting: dict[str, list[int]] = {}
        for index in order:
            waiting.setdefault(current.rollouts[index].task, []).append(index)

        def done() -> list[str]:
            return [task for task, own in waiting.items() if all(map(judging.is_done, own))]

        while waiting:
            began = time.monotonic()
            judging.wait(lambda: bool(done()))
            self.spans.append((began, time.monotonic()))
            for task in done():
                own = waiting.pop(task)
                yield [
                    (index, self._judged(current.rollouts[index], verdicts))
                    for index, verdicts in zip(own, judging.results(own), strict=True)
                ]

    def _judged(self, rollout: Rollout, verdicts: Mapping[str, Verdict | Failure]) -> Rollout:
        rollout = _with_verdicts(rollout, verdicts)
        rejecting = {c.name for c in self._tasks[rollout.task].spec.judged if c.mode == "reject"}
        rejected = any(
            isinstance(v, Verdict) and v.violated for name, v in rollout.verdicts.items() if name in rejecting
        )
        return replace(rollout, rejected=rejected)

    def _next_attempt(self, rollout: Rollout) -> Rollout | None:
        """Return the empty slot for the attempt after a rejected one; None if no attempt is left.

        After a greedy response further attempts use the task's own sampling. If that is greedy too, there is
        no further attempt: its response would be the same.
        """
        if not rollout.rejected:
            return None
        task = self._tasks[rollout.task]
        most = max(c.max_attempts for c in task.spec.constraints if c.mode == "reject")
        sampling = rollout.sampling if rollout.sampling.temperature > 0 else task.sampling
        if rollout.attempt + 1 >= most or sampling.temperature == 0:
            return None
        return Rollout(
            prompt=rollout.prompt, sample=rollout.sample, attempt=rollout.attempt + 1, sampling=sampling
        )


def _with_verdicts(rollout: Rollout, judged_whole: Mapping[str, Verdict | Failure]) -> Rollout:
    verdicts = {**judged_whole, **rollout.verdicts}
    for name, ended in rollout.verdicts.items():
        # an episode has the verdict of its worst answer. An answer that a streaming constraint ended keeps
        # that verdict, even if a random judge now gives another
        worst = judged_whole.get(name)
        if isinstance(worst, Verdict) and isinstance(ended, Verdict) and worst.turn != ended.turn:
            verdicts[name] = max(ended, worst, key=lambda verdict: verdict.badness)
    failed = next((v for v in verdicts.values() if isinstance(v, Failure)), None)
    return replace(rollout, verdicts=verdicts, failure=rollout.failure or failed)


class RewardBatch:
    """Rollouts of one batch while they are scored. ``take`` returns a group once, when it is all scored.

    Args:
        pending: the open round of the reward pool.
        finish: adds the costs of constraints to a scored record.
        quorum: share of the groups that ``wait`` waits for.
        judging: an open round of constraints for the tasks ``later``. A group of these tasks is done when it
            is scored and judged.
        later: tasks whose constraints are judged in this batch, beside their rewards.
    """

    def __init__(
        self,
        pending: Pending[Scored],
        finish: Callable[[Scored], Scored],
        quorum: float = 1.0,
        *,
        judging: Pending[dict[str, Verdict | Failure]] | None = None,
        later: Collection[str] = (),
    ) -> None:
        self._pending, self._finish, self._quorum = pending, finish, quorum
        self._judging, self._later = judging, later
        self._rollouts: list[Rollout] = []
        self._asked: dict[int, int] = {}
        """Index of a rollout -> its index in ``pending``; missing = not scored (see ``add``)."""
        self._judged: dict[int, int] = {}
        """Index of a rollout -> its index in ``judging``; missing = not judged there."""
        self._num_parts = 0
        self._groups: dict[str, list[int]] = {}
        """Group id -> indices of its rollouts, for groups not yet taken, in the order of the batch."""
        self.counted: Collection[str] | None = None
        """Ids of the groups that ``quorum`` is a share of, also of those still sampled; None = all added."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Begin to score ``rollouts``.

        Answers of the data set are not scored, nor are rejected responses: the algorithm sets their reward.
        """
        self._num_parts += 1
        for index, rollout in enumerate(rollouts, start=len(self._rollouts)):
            if _is_asked(rollout):
                self._asked[index] = len(self._asked)
            if rollout.task in self._later:
                self._judged[index] = len(self._judged)
        self._rollouts += rollouts
        self._pending.add([r for r in rollouts if _is_asked(r)])
        if self._judging is not None:
            self._judging.add([r for r in rollouts if r.task in self._later])

    def seal(self) -> None:
        """Declare that no more rollouts are added."""
        order = list(range(len(self._rollouts)))
        if self._num_parts > 1:  # one part keeps the order of the stage before
            order.sort(key=lambda index: self._rollouts[index].order)
        if self._judging is not None:
            self._judging.seal(_places(self._judged, order))
        self._pending.seal(_places(self._asked, order))
        for index in order:
            self._groups.setdefault(self._rollouts[index].group_id, []).append(index)

    @property
    def open_groups(self) -> dict[str, str]:
        """Group id -> task of the groups not yet taken."""
        return {name: self._rollouts[indices[0]].task for name, indices in self._groups.items()}

    def wait(self) -> str:
        """Wait until ``quorum`` of the groups are scored; return the task waited for last, "" = no wait."""
        if self._quorum >= 1.0:
            return self._pending.wait()
        counted = self._groups.keys() if self.counted is None else self.counted
        own = [indices for name, indices in self._groups.items() if name in counted]
        needed = min(len(own), math.ceil(self._quorum * len(counted) - 1e-9))

        def is_enough() -> bool:
            return sum(map(self._is_done, own)) >= needed

        task = self._judging.wait(is_enough) if self._judging is not None else ""
        return self._pending.wait(is_enough) or task

    def take(self) -> list[Scored]:
        """Return the records of the groups that are scored by now, in the order of the batch.

        Raises:
            RewardError: a task's error budget is spent.
        """
        done = [name for name, indices in self._groups.items() if self._is_done(indices)]
        indices = [i for name in done for i in self._groups.pop(name)]
        rollouts = {i: self._rollouts[i] for i in indices}
        if self._judging is not None:
            own = [i for i in indices if i in self._judged]
            verdicts = self._judging.results(_places(self._judged, own))
            rollouts |= {i: _with_verdicts(rollouts[i], v) for i, v in zip(own, verdicts, strict=True)}
        # a failed verdict is the record's failure, and counts alone in the error budget
        failed = {i for i in indices if rollouts[i].failure is not None and self._rollouts[i].failure is None}
        wanted = [i for i in indices if i in self._asked and i not in failed]
        answers = self._pending.results(_places(self._asked, wanted))
        scored = dict(zip(wanted, answers, strict=True))
        records = []
        for i in indices:
            record = scored.get(i) or Scored(
                rollout=rollouts[i], reward=None, failure=rollouts[i].failure if i in failed else None
            )
            record.rollout = rollouts[i]
            records.append(self._finish(record))
        return records

    def deliveries(self) -> Iterator[list[Scored]]:
        """Wait for the quorum and yield the groups scored by then. Then yield the groups scored since.

        Later parts do not wait, so they may be empty. The iterator ends when no group is open.

        Raises:
            RewardError: a task's error budget is spent.
        """
        self.wait()
        yield self.take()
        while self._groups:
            yield self.take()

    def drop(self, before: float) -> Counter[str]:
        """Cancel the open groups with a response of weights older than version ``before``.

        Returns:
            Task -> number of cancelled groups.
        """
        dropped = Counter[str]()
        for name, indices in list(self._groups.items()):
            rollouts = [self._rollouts[i] for i in indices]
            if min(rollout.policy_version for rollout in rollouts) < before:
                gone = self._groups.pop(name)
                self._pending.cancel(_places(self._asked, gone))
                if self._judging is not None:
                    self._judging.cancel(_places(self._judged, gone))
                dropped[rollouts[0].task] += 1
        return dropped

    def spans(self) -> dict[str, Span]:
        """Return by task the span from the first to the last answer, or to now while one is missing."""
        return self._pending.spans([*self._asked.values()])

    def judging_spans(self) -> dict[str, Span]:
        """Return, by task judged here, the span from the first to the last verdict; see ``spans``."""
        return self._judging.spans([*self._judged.values()]) if self._judging is not None else {}

    def _is_done(self, indices: Sequence[int]) -> bool:
        is_scored = all(map(self._pending.is_done, _places(self._asked, indices)))
        return is_scored and (
            self._judging is None or all(map(self._judging.is_done, _places(self._judged, indices)))
        )


def _places(known: Mapping[int, int], rollouts: Iterable[int]) -> list[int]:
    return [known[i] for i in rollouts if i in known]


class RewardStage(StreamingStage):
    """Scores rollouts, and adds the costs of constraints of mode ``penalty`` and ``lagrangian``.

    The reward of a task with constraints alone is ``1 - cost``.
    """

    name = "rewards"
    consumes = Rollout
    produces = Scored
    yields_batches = True

    def __init__(
        self,
        scorer: RunScorer,
        tasks: Mapping[str, TaskState],
        quorum: float,
        later: Collection[str],
    ) -> None:
        """``quorum``: see ``RewardBatch``; ``later``: tasks that are judged here, beside their rewards."""
        self._scorer = scorer
        self._tasks = tasks
        self._quorum = quorum
        self._later = later
        self.begun: list[RewardBatch] = []
        """The batch of each call of ``stream``, until the caller removes it."""

    def stream(self, parts: Iterable[list[Rollout]]) -> Iterator[list[Scored]]:
        """Begin to score every rollout, then return an iterator: ``RewardBatch.deliveries``."""
        judging = self._scorer.begin_judging() if self._later else None
        batch = RewardBatch(
            self._scorer.begin_scoring(), self._with_costs, self._quorum, judging=judging, later=self._later
        )
        self.begun.append(batch)
        for part in parts:
            batch.add(part)
        batch.seal()
        return batch.deliveries()

    def _with_costs(self, scored: Scored) -> Scored:
        spec = self._tasks[scored.rollout.task].spec
        if not spec.is_scored:
            return replace(scored, reward=None)
        if not spec.judged:
            return scored
        costs: dict[str, list[float]] = {}
        penalties: list[tuple[float, float]] = []
        for constraint in spec.judged:
            if constraint.mode == "penalty" and not constraint.weight:  # only measured
                continue
            own = costs.setdefault(constraint.mode, [])
            verdict = scored.rollout.verdicts.get(constraint.name)
            cost = verdict.cost if isinstance(verdict, Verdict) and verdict.applicable else math.nan
            if not math.isnan(cost):
                own.append(cost)
            if constraint.mode == "penalty":
                penalties.append((-constraint.weight, cost))
        chosen = next((costs[mode] for mode in ("lagrangian", "penalty", "reject") if mode in costs), [])
        cost = max(chosen, default=0.0)
        scored = replace(scored, cost=cost, concerned=bool(chosen))
        if scored.reward is None:
            return scored
        if not spec.rewards:
            return replace(scored, reward=1.0 - cost)
        penalty = math.fsum(weight * value for weight, value in penalties if not math.isnan(value))
        return replace(scored, reward=scored.reward + penalty, terms=[*scored.terms, *penalties])


class AdvantageStage(Stage):
    """Turns scored rollouts into training samples with a credit per token."""

    name = "advantages"
    consumes = Scored
    produces = CreditedSample

    def __init__(self, credit: CreditAssigner, tasks: Mapping[str, TaskState]) -> None:
        self._credit = credit
        self._tasks = tasks
        self.metrics: dict[str, dict[str, float]] = {}
        """Metrics by task, of the last call."""
        self.of_tokens: dict[Sampled, Tensor] = {}
        """The advantages [T] of each rollout of the last call."""

    def process(self, items: list[Scored]) -> list[CreditedSample]:
        """Let each task's algorithm select and credit its records; drop those not ``is_trainable``."""
        by_task: dict[str, list[Scored]] = {name: [] for name in self._tasks}
        for scored in items:
            if is_trainable(self._tasks[scored.rollout.task], scored):
                by_task[scored.rollout.task].append(scored)
        samples: list[TrainSample] = []
        for name, own in by_task.items():
            samples.extend(self._select(name, own))
        credited, self.metrics = self._credit.credit(samples)
        self.of_tokens = advantages_of(credited)
        return credited

    def _select(self, name: str, scored: list[Scored]) -> list[TrainSample]:
        task = self._tasks[name]
        place = f"task {name!r}: select() of {task.spec.type}"
        try:
            found: Any = task.algorithm.select(scored)
        except Exception as error:
            error.add_note(f"in {place}")
            raise
        samples = list(found) if isinstance(found, Sequence) else [found]
        for sample in samples:
            if not isinstance(sample, TrainSample):
                raise PluginError(f"{place} returned {type(sample).__name__}, expected a list of TrainSample")
        return samples


class UpdateStage(Stage):
    """Makes the optimizer updates of a step."""

    name = "update"
    consumes = CreditedSample
    produces = UpdateReport

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._step, self._factor, self._compare = 0, 1.0, False
        self._shares: Callable[[Collection[str]], Mapping[str, float]] = lambda _: {}
        self.report = UpdateReport(metrics={}, task_metrics={}, spans=[])
        """Report of the last call."""

    def prepare(
        self,
        step: int,
        shares: Callable[[Collection[str]], Mapping[str, float]],
        factor: float,
        *,
        compare: bool,
    ) -> None:
        """Set up the update of ``step``.

        ``shares`` maps the tasks that have samples to the shares of their losses. ``factor`` multiplies the
        learning rate. With ``compare`` the tasks' gradients are compared (``Learner.update``).
        """
        self._step, self._shares, self._factor, self._compare = step, shares, factor, compare

    def process(self, items: list[CreditedSample]) -> list[UpdateReport]:
        """Learn from the samples of all tasks."""
        self.report = self._learner.update(
            items,
            shares=self._shares({c.sample.task for c in items}),
            step=self._step,
            learning_rate_factor=self._factor,
            compare=self._compare,
        )
        return [self.report]


SamplingStages = tuple[RolloutStage, ConstraintStage, RewardStage]
"""The built-in stages up to the rewards."""


def sampling_stages(
    actor: Actor,
    engine: RolloutEngine,
    scorer: RunScorer,
    tasks: Mapping[str, TaskState],
    *,
    seed: int,
    purpose: str = "rollout",
    group_sizes: Mapping[str, int] | None = None,
    temperature: float | None = None,
    quorum: float = 1.0,
    worlds: WorldPool | None = None,
    on_progress: Progress | None = None,
) -> SamplingStages:
    """Return ``rollout -> constraints -> rewards`` for a step or, with another ``purpose``, an evaluation.

    ``RolloutStage`` and ``RewardBatch`` define the settings. With a ``quorum`` below 1, constraints of tasks
    that reject nothing are asked beside the rewards. So a slow judge makes only its task's groups late.
    """
    rollout = RolloutStage(
        engine,
        tasks,
        lambda ids, **how: actor.tokenizer.decode(ids, **how),
        seed=seed,
        scorer=scorer,
        purpose=purpose,
        group_sizes=group_sizes,
        temperature=temperature,
        quorum=quorum,
        episodes=None
        if worlds is None
        else lambda: Episodes(worlds, tasks, actor, evaluation=purpose != "rollout"),
        on_progress=on_progress,
    )
    later = {
        name
        for name, task in tasks.items()
        if quorum < 1.0 and task.spec.judged and all(c.mode != "reject" for c in task.spec.judged)
    }
    return rollout, ConstraintStage(scorer, rollout, tasks, later), RewardStage(scorer, tasks, quorum, later)


def is_trainable(task: TaskState, scored: Scored) -> bool:
    """Whether the task's algorithm may learn from the record.

    - A response that failed: no.
    - A rejected response: if the algorithm ``trains_rejected``.
    - Any other: if it has a reward, or the algorithm needs none.
    """
    if scored.rollout.failure is not None:
        return False
    if scored.rollout.rejected:
        return scored.failure is None and task.algorithm.trains_rejected
    return not task.algorithm.needs_reward or (scored.failure is None and scored.reward is not None)


def _is_asked(rollout: Rollout) -> bool:
    return not rollout.rejected and rollout.prompt.given_ids is None
