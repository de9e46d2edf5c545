"""Episodes: the actor's answers and the world's replies, turn by turn, many episodes at once.

Each turn is one request to the engine, whose prompt is the conversation so far. While the world of one
episode computes its reply, the engine samples turns of other episodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multitask_rl.data.render import Conversation
from multitask_rl.environments.base import Earned, Opening, StepResult
from multitask_rl.environments.pool import Lost, LostAlone, WorldPool
from multitask_rl.environments.worker import Ended
from multitask_rl.errors import DataError
from multitask_rl.models.actor import Actor
from multitask_rl.records import FLAGGED, Failure, FailureKind, Prompt, Rollout, SamplingParams, Turn
from multitask_rl.rollout.base import Generation
from multitask_rl.seeding import derive_seed
from multitask_rl.step.task_state import TaskState

MOST_TRIES = 3
"""Most tries that fail by themselves; then the episode is a failure."""
MOST_CHARACTERS = 128
"""A text with more characters per token of the limit exceeds it with any tokenizer: it is not encoded."""
MOST_LOST = 10
"""Most tries whose world was lost because its process ended: another episode in it may be the cause."""


@dataclass(slots=True)
class Episode:
    """One try at an episode; ``rollout`` grows turn by turn."""

    slot: Rollout
    rollout: Rollout
    conversation: Conversation | None = None
    context_ids: list[int] = field(default_factory=list)
    """[C] everything before the next answer."""
    following: Turn = field(default_factory=lambda: Turn(num_tokens=0))
    """The next turn; it has what the world said, not yet the answer."""
    ticket: int = 0
    """Number of its world in the pool."""
    seed: int = 0
    """Seed of its world. A retry gets another one, unless the process of the world ended."""
    failures: dict[str, int] = field(default_factory=dict)
    """Kind of failure -> number of failed tries, this one included."""
    num_lost: int = 0
    """Failed tries whose world was lost because its process ended."""
    num_lost_alone: int = 0
    """Of these, tries with no other episode in the process."""
    world_s: float = 0.0
    """Seconds that the calls to the worlds of all tries took."""
    num_calls: int = 0
    """Tool calls so far."""
    max_tokens: int = 0
    """The world's limit on the tokens of the next answer; 0 = only the task's limit."""
    stop: tuple[str, ...] = ()
    """The world's stop strings for the next answer, added to the task's."""

    @property
    def number(self) -> int:
        """Number of turns so far."""
        return len(self.rollout.turns)

    @property
    def num_own(self) -> int:
        """Number of tries that failed in a process that goes on."""
        return sum(self.failures.values()) - self.num_lost


class Episodes:
    """The open episodes of one engine call. With a quorum, late episodes stay open for the next call.

    Args:
        pool: runs the environments ("worlds").
        tasks: all tasks of the run; those with an environment have episodes.
        actor: its tokenizer renders the messages of the worlds.
        evaluation: condition and shorten the prompts as for an evaluation.
    """

    def __init__(
        self, pool: WorldPool, tasks: Mapping[str, TaskState], actor: Actor, *, evaluation: bool
    ) -> None:
        self.in_lockstep = pool.in_lockstep
        self._pool = pool
        self._tasks = tasks
        self._actor = actor
        self._evaluation = evaluation
        self._by_ticket: dict[int, Episode] = {}
        """Ticket of the world -> open episode: it waits for the world, or the engine samples its turn."""
        self._waiting: set[int] = set()
        """Tickets of episodes that wait for their worlds."""
        self._prompts: dict[tuple[str, str], Prompt] = {}
        """Prompts by group and rendered text: siblings share one, so that the engine reads it once."""

    @property
    def num_waiting(self) -> int:
        """Number of episodes that wait for their worlds."""
        return len(self._waiting)

    @property
    def tickets(self) -> Collection[int]:
        """Tickets of the open episodes; the engine uses them as conversation numbers."""
        return self._by_ticket.keys()

    @property
    def must_wait(self) -> bool:
        """Whether a world has not answered yet (``rollout.lockstep``).

        Episodes that wait for a place in a worker do not count: a place becomes free only when others go on.
        """
        return self.num_waiting > self._pool.num_queued

    @property
    def has_attempts(self) -> bool:
        """Whether an episode takes the place of one that a constraint has rejected."""
        return any(episode.slot.attempt for episode in self._by_ticket.values())

    def pause(self) -> None:
        """End this call; a later one continues the open episodes (``go_on``)."""
        self._pool.pause(self.tickets)
        groups = {episode.slot.group_id for episode in self._by_ticket.values()}
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key[0] in groups}

    def go_on(self, positions: Mapping[str, int]) -> None:
        """Go on after ``pause``; ``positions``: of each group in the batch of the present call."""
        self._pool.pause(())
        for episode in self._by_ticket.values():
            for prompt in (episode.slot.prompt, episode.rollout.prompt):
                prompt.position = positions[prompt.group_id]

    def begin(self, slots: Sequence[Rollout], seeds: Sequence[int]) -> None:
        """Open a world for every empty rollout; ``seeds``: one per world."""
        for slot, seed in zip(slots, seeds, strict=True):
            self._begin(Episode(slot, slot, seed=seed))

    def _begin(self, episode: Episode) -> None:
        spec = self._tasks[episode.slot.task].spec
        sampling = episode.slot.sampling
        limit = spec.max_response_tokens or spec.max_turns * sampling.max_new_tokens
        episode.rollout = replace(
            episode.slot, turns=[], response_ids=[], rollout_logprobs=[], verdicts={}, token_limit=limit
        )
        # a process that ends gives no other seed: the clock decides which episodes share one
        seed = derive_seed(episode.seed, episode.num_own)
        episode.ticket = self._pool.open(episode.slot.task, episode.slot.row, seed)
        self._by_ticket[episode.ticket] = episode
        self._waiting.add(episode.ticket)

    def is_open(self, episode: Episode) -> bool:
        """Whether this try at the episode goes on.

        False if its world failed while the engine sampled the answer: another try has begun, as a new
        ``Episode``, and the answer is lost.
        """
        return episode.ticket in self._by_ticket

    def poll(self, timeout_s: float) -> tuple[list[Episode], list[Rollout]]:
        """Return the episodes whose next turn may be sampled, and the rollouts that are complete.

        Waits until the world of one episode answers, at most ``timeout_s``.
        """
        ready: list[Episode] = []
        done: list[Rollout] = []
        for ticket, answer in self._pool.poll(timeout_s, self.tickets):
            episode = self._by_ticket.get(ticket)
            if episode is None:  # cancelled
                continue
            self._waiting.discard(ticket)
            episode.world_s += self._pool.take_seconds(ticket)
            if isinstance(answer, Failure):
                del self._by_ticket[ticket]
                kind, failures = answer.kind, episode.failures
                failures[kind.value] = failures.get(kind.value, 0) + 1
                episode.num_lost += isinstance(answer, Lost)
                episode.num_lost_alone += isinstance(answer, LostAlone)
                num_blamed = episode.num_own + episode.num_lost_alone
                is_spent = num_blamed >= MOST_TRIES or episode.num_lost >= MOST_LOST
                if not is_spent and kind is not FailureKind.data:
                    # a new record: the engine may hold this one
                    again = Episode(episode.slot, episode.slot, seed=episode.seed, failures=failures)
                    again.num_lost, again.num_lost_alone = episode.num_lost, episode.num_lost_alone
                    again.world_s = episode.world_s
                    self._begin(again)
                else:
                    done.append(_ended(episode, failure=answer, finish_reason="error"))
            elif isinstance(answer, Ended):
                del self._by_ticket[ticket]
                earned = added([turn.reward for turn in episode.rollout.turns] + [answer.earned])
                done.append(_ended(episode, earned=earned))
            else:
                try:
                    goes_on = True
                    if isinstance(answer, Opening):
                        self._open_prompt(episode, answer)
                    else:
                        goes_on = self._hear(episode, answer)
                except DataError as error:  # what the world said makes no prompt
                    del self._by_ticket[ticket]
                    self._pool.cancel(ticket)
                    failure = Failure(kind=FailureKind.data, message=str(error), source="environment")
                    episode.failures[FailureKind.data.value] = 1
                    done.append(_ended(episode, failure=failure, finish_reason="error"))
                else:
                    ready += [episode] if goes_on else []
        return ready, done

    def sampling(self, episode: Episode) -> SamplingParams:
        """Return the sampling parameters of the next answer."""
        own = episode.rollout.sampling
        room = max(1, self._room(episode))
        most = min(room, episode.max_tokens) if episode.max_tokens > 0 else room
        return replace(own, max_new_tokens=most, stop=(*own.stop, *episode.stop))

    def _room(self, episode: Episode) -> int:
        """Return how many tokens the next answer may have, before the world's own limit."""
        rollout = episode.rollout
        rooms = [rollout.sampling.max_new_tokens, rollout.token_limit - len(rollout.response_ids)]
        if self._actor.max_length:
            rooms.append(self._actor.max_length - len(episode.context_ids))
        return min(rooms)

    def answer(self, episode: Episode, generation: Generation, text: str) -> None:
        """Record the actor's answer as a turn, and pass it to the world.

        If a streaming constraint ended the answer, the episode ends with it: the world is asked for what was
        earned. An answer to a world that has failed meanwhile is dropped (``is_open``).

        Args:
            episode: one that ``poll`` has returned.
            generation: token ids and log-probabilities of the answer.
            text: the answer as the world reads it, without stop strings.
        """
        if not self.is_open(episode):
            return
        rollout, ids = episode.rollout, generation.response_ids
        following = episode.following
        following.num_tokens, following.response = len(ids), text
        following.finish_reason = generation.finish_reason
        rollout.turns.append(following)
        rollout.response_ids += ids
        rollout.rollout_logprobs += generation.rollout_logprobs
        rollout.response, rollout.finish_reason = text, generation.finish_reason
        usage = {"prompt_tokens": len(episode.context_ids), "completion_tokens": len(ids)}
        episode.context_ids = [*episode.context_ids, *ids]
        if generation.finish_reason == FLAGGED:
            self._pool.finish(episode.ticket)
        else:
            facts = {"finish_reason": generation.finish_reason, "usage": usage}
            self._pool.step(episode.ticket, {"role": "assistant", "content": text, **facts})
        self._waiting.add(episode.ticket)

    def drop(self, groups: Collection[str]) -> None:
        """Cancel the episodes of ``groups``."""
        for ticket, episode in list(self._by_ticket.items()):
            if episode.slot.group_id in groups:
                self._pool.cancel(ticket)
                del self._by_ticket[ticket]
                self._waiting.discard(ticket)

    def close(self) -> None:
        """Cancel what is under way. Idempotent."""
        self.drop({episode.slot.group_id for episode in self._by_ticket.values()})

    def _conversation(self, episode: Episode, opening: Opening) -> Conversation:
        return Conversation(
            self._tasks[episode.slot.task].spec,
            episode.slot.row,
            self._actor.tokenizer,
            messages=opening.messages,
            suffix=opening.suffix,
            tools=opening.tools,
            is_whole=opening.is_whole,
        )

    def _conditioned(self, slot: Rollout, context_ids: list[int]) -> list[int]:
        """Return ``context_ids`` as the algorithm conditions them, if it did so when it drew the prompt.

        What it would do now depends on the clock: it may learn in another thread meanwhile.
        """
        if not slot.prompt.is_conditioned:
            return context_ids
        return self._tasks[slot.task].algorithm.condition(context_ids, evaluation=self._evaluation)

    def _open_prompt(self, episode: Episode, opening: Opening) -> None:
        """Render the prompt with what the world says; ``DataError`` if that is impossible.

        A prompt that is too long cannot be trained on; a held-out one loses its beginning.
        """
        slot = episode.slot
        task = self._tasks[slot.task]
        limit = task.max_prompt_tokens
        if limit and _num_characters(opening.messages) + len(opening.suffix) > limit * MOST_CHARACTERS:
            raise DataError(
                f"task {slot.task!r}: what the environment adds to the prompt has more than "
                f"{limit * MOST_CHARACTERS} characters, more than {limit} tokens; make it shorter"
            )
        conversation = self._conversation(episode, opening)
        if opening.tools and not task.told_of_tools:
            task.told_of_tools = True
            names = [str(tool.get("function", {}).get("name", "")) for tool in opening.tools]
            if hidden := [name for name in names if name not in conversation.text]:
                task.warnings.append(
                    f"the prompt does not name {', '.join(hidden)}: the model's chat template shows no "
                    "tools, or there is none. Say in `prompt` or `system` what the tools are and how a call "
                    "is written, or use a model whose template shows them"
                )
        key = slot.group_id, conversation.text
        if key not in self._prompts:
            ids = conversation.prompt_ids
            if self._evaluation and 0 < limit < len(ids):
                ids = ids[-limit:]
                task.warn_once(
                    f"its held-out prompts that have more than {limit} tokens with what its environment adds "
                    "lose their beginning. rollout.max_prompt_tokens and max_new_tokens are the limits"
                )
            elif limit and len(ids) > limit:
                raise DataError(
                    f"task {slot.task!r}: the prompt with what the environment adds has {len(ids)} tokens, "
                    f"more than {limit}; raise rollout.max_prompt_tokens"
                )
            ids = self._conditioned(slot, ids)
            self._prompts[key] = replace(slot.prompt, text=conversation.text, prompt_ids=ids)
        prompt = self._prompts[key]
        prompt.position = slot.prompt.position
        episode.conversation, episode.context_ids = conversation, prompt.prompt_ids
        episode.rollout = replace(episode.rollout, prompt=prompt)
        episode.following.messages = [dict(m) for m in opening.messages]
        self._limit(episode, opening)

    def _limit(self, episode: Episode, *said: Opening | StepResult) -> None:
        """Take the world's limits on the next answer; ``DataError`` for stop strings beside a grammar."""
        stop = tuple(text for own in said for text in own.stop)
        if stop and episode.slot.sampling.grammar:
            told = ", ".join(map(repr, stop))
            raise DataError(
                f"task {episode.slot.task!r}: the environment gives the stop strings {told}, and the task "
                "has a grammar, which decides where an answer ends; leave one of them out"
            )
        episode.max_tokens = min((own.max_tokens for own in said if own.max_tokens > 0), default=0)
        episode.stop = stop

    def _hear(self, episode: Episode, said: StepResult) -> bool:
        """Take the world's reply; return whether the actor answers again, else end the episode.

        Raises:
            DataError: the reply makes no prompt.
        """
        assert episode.conversation is not None
        rollout, spec = episode.rollout, self._tasks[episode.slot.task].spec
        turn = rollout.turns[-1]
        turn.info, turn.reward = dict(said.info), said.reward
        episode.num_calls += sum(said.info.get("tool_calls", {}).values())
        is_cut = False
        messages = (said.anew or said).messages
        most = self._actor.max_length * MOST_CHARACTERS
        if not said.done and 0 < most < _num_characters(messages):
            is_cut = True
        elif not said.done:
            if said.anew is None:
                answer = rollout.response_ids[len(rollout.response_ids) - turn.num_tokens :]
                given, context = episode.conversation.reply(turn.response, answer, said.messages)
            else:
                episode.conversation = self._conversation(episode, said.anew)
                given, context = [], episode.conversation.prompt_ids
            if context is not None:
                context = self._conditioned(episode.slot, context)
            episode.following = Turn(
                num_tokens=0,
                given_ids=given,
                context_ids=context,
                messages=[dict(m) for m in messages],
            )
            episode.context_ids = [*episode.context_ids, *given] if context is None else context
            self._limit(episode, said, *([said.anew] if said.anew else []))
            # a world with tools refuses calls beyond the limit; another may report more
            out_of_calls = 0 < spec.max_tool_calls < episode.num_calls
            is_cut = episode.number >= spec.max_turns or out_of_calls or self._room(episode) < 1
        if said.done or is_cut:
            if is_cut:
                rollout.finish_reason = "length"
            self._pool.finish(episode.ticket)
            self._waiting.add(episode.ticket)
            return False
        return True


def _ended(episode: Episode, **end: Any) -> Rollout:
    return replace(episode.rollout, world_s=episode.world_s, world_failures=episode.failures, **end)


def _num_characters(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(str(message.get("content", ""))) for message in messages)


def added(parts: Sequence[Earned]) -> Earned:
    """Return the sum of what the steps and the end of an episode gave; None = nothing was scored.

    >>> added([None, 1.0, 0.5]), added([{"win": 1.0}, None, {"win": 1.0, "style": 0.5}])
    (1.5, {'win': 2.0, 'style': 0.5})
    """
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if not any(isinstance(part, Mapping) for part in given):
        return math.fsum(part for part in given if not isinstance(part, Mapping))
    total: dict[str, float] = {}
    for part in given:
        for name, value in part.items() if isinstance(part, Mapping) else [("reward", part)]:
            total[name] = total.get(name, 0.0) + value
    return total
