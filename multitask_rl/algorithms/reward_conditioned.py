"""Reward-conditioned training (Quark): fit responses to their reward quantile, then sample from the top."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from multitask_rl.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Credit,
    CreditBatch,
    LossOutput,
    TokenBatch,
)
from multitask_rl.algorithms.policy_loss import with_corrections
from multitask_rl.config.schema.ranges import Range
from multitask_rl.errors import ConfigError
from multitask_rl.records import Prompt, Rollout, SamplingParams, Scored, TrainSample, Turn
from multitask_rl.seeding import random_stream

_ROUNDING = 1e-12
"""Share of the largest reward below which two rewards are equal."""


def quantile_of_each(rewards: Sequence[float], num_quantiles: int) -> list[int]:
    """Return the quantile 0 .. K - 1 of every reward by rank, equal rewards sharing theirs.

    ``q = floor(K (below + at_most) / (2 n))``: the middle rank of the tied rewards. With it two levels of
    reward stay K / 2 quantiles apart however rare one of them is. Rewards nearer than 1e-12 of the largest
    are equal: sums of the same parts may differ in their last bit. The quantile of the best reward becomes
    the top one, for which sampling asks. Some quantiles may be empty.

    >>> quantile_of_each([0.0, 0.0, 0.0, 1.0], 4)
    [1, 1, 1, 3]
    """
    if not rewards:
        return []
    ordered = sorted(rewards)
    near = _ROUNDING * max(abs(ordered[0]), abs(ordered[-1]))
    of_reward, below = dict[float, int](), 0
    for at_most, reward in enumerate(ordered, start=1):
        if at_most == len(ordered) or ordered[at_most] - reward > near:
            # Integers: in floating point a value that sits exactly on a border would move.
            quantile = num_quantiles * (below + at_most) // (2 * len(ordered))
            of_reward |= dict.fromkeys(ordered[below:at_most], quantile)
            below = at_most
    best = of_reward[max(rewards)]
    return [num_quantiles - 1 if of_reward[r] == best else of_reward[r] for r in rewards]


class RewardConditioned(Algorithm):
    """Quark: sample, sort all experience into K quantiles of reward, fit each under its control token.

    ``L = -log pi(y_t | k, x, y_<t) + beta KL(pi(. | k, x, y_<t) || ref(. | x, y_<t))`` with the KL summed
    over the vocabulary. The samples of a step are drawn from a replay buffer (the paper's pool). Sampling
    conditions on the top quantile's token.

    Source: Quark (arXiv:2205.13636) sec. 2. Deviations: the buffer is bounded and drops the oldest; equal
    rewards share a quantile; the KL is taken from the policy to the reference, not the reverse.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AlgorithmConfig):
        """Settings of ``RewardConditioned``; clip and importance settings have no effect."""

        quantiles: Annotated[int, Range("[2, inf)")] = 5
        """K control tokens, one per quantile of reward."""
        buffer_size: int = 2048
        """Most past rollouts in the replay buffer; the oldest are dropped first."""
        seed: int = 0
        """Seed of the draws from the buffer."""

        def __post_init__(self) -> None:
            """Check ranges, and that every quantile can hold a rollout of the buffer."""
            AlgorithmConfig.__post_init__(self)
            if self.buffer_size < self.quantiles:
                raise ConfigError(
                    f"buffer_size must be >= quantiles, {self.quantiles}, got {self.buffer_size!r}"
                )

    wants_exact_kl: bool = True
    on_policy: ClassVar[bool] = False
    config: Config

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.num_control_tokens = self.config.quantiles
        self._control_ids: tuple[int, ...] = ()
        self._buffer: deque[TrainSample] = deque(maxlen=self.config.buffer_size)
        self._num_draws = 0

    def bind(self, control_token_ids: Sequence[int]) -> None:
        """Receive the K control tokens, from the lowest quantile to the top."""
        if not len(set(control_token_ids)) == len(control_token_ids) == self.config.quantiles:
            raise ConfigError(
                f"reward_conditioned needs {self.config.quantiles} different control tokens (its quantiles), "
                f"got {list(control_token_ids)!r}"
            )
        self._control_ids = tuple(control_token_ids)

    def condition(self, prompt_ids: list[int], *, evaluation: bool) -> list[int]:
        """Prepend the top token: always in evaluation; in training once the buffer has rollouts."""
        if evaluation or self._buffer:
            return [self._control_id(self.config.quantiles - 1), *prompt_ids]
        return prompt_ids

    def select(self, scored: Sequence[Scored]) -> list[TrainSample]:
        """Add the step's rollouts to the buffer and draw as many samples from it.

        Each quantile gets its share of the buffer; equal shares would replay failures far above theirs when
        most responses succeed. The top one gets at least 1/K, so that rare successes are drawn.
        """
        if not scored:
            return []
        for item in scored:
            old = item.rollout
            prompt_ids = self._without_control(old.prompt.prompt_ids)
            turns = [
                replace(
                    turn,
                    messages=[],
                    response="",
                    info={},
                    context_ids=None if turn.context_ids is None else self._without_control(turn.context_ids),
                )
                for turn in old.turns
            ]
            rollout = Rollout(
                prompt=replace(
                    old.prompt, row={}, text="", position=0, prompt_ids=prompt_ids, is_conditioned=False
                ),
                sample=old.sample,
                response_ids=list(old.response_ids),
                finish_reason=old.finish_reason,
                policy_version=old.policy_version,
                sampling=old.sampling,
                turns=turns,
                token_limit=old.token_limit,
            )
            self._buffer.append(_as_sample(rollout, self.outcome(item)))
        quantiles = quantile_of_each([past.reward for past in self._buffer], self.config.quantiles)
        by_quantile: dict[int, list[TrainSample]] = {}
        for past, quantile in zip(self._buffer, quantiles, strict=True):
            by_quantile.setdefault(quantile, []).append(past)
        name = scored[0].rollout.task
        for past in self._buffer:  # a checkpoint's may have the task's former name
            past.scored.rollout.prompt.task = name
        rng = random_stream(self.config.seed, "reward_conditioned", name, self._num_draws)
        self._num_draws += 1
        samples: list[TrainSample] = []
        # ceilings in integers, the best quantile first; a remainder goes to the best ones
        left, rest = len(scored), len(self._buffer)
        for quantile in sorted(by_quantile, reverse=True):
            own = by_quantile[quantile]
            wanted = -(-left * len(own) // rest)
            if not samples:
                wanted = max(wanted, -(-left // len(by_quantile)))
            left, rest = left - wanted, rest - len(own)
            # whole rounds over a quantile that is too small, then a draw without replacement
            rounds, remainder = divmod(wanted, len(own))
            chosen = own * rounds + rng.sample(own, remainder)
            control = [self._control_id(quantile)]
            for past in chosen:
                turns = [
                    turn
                    if turn.context_ids is None
                    else replace(turn, context_ids=[*control, *turn.context_ids])
                    for turn in past.turns
                ]
                samples.append(replace(past, prompt_ids=[*control, *past.prompt_ids], turns=turns))
        rng.shuffle(samples)
        return samples

    def _without_control(self, context_ids: Sequence[int]) -> list[int]:
        return list(context_ids[bool(context_ids) and context_ids[0] in self._control_ids :])

    def _control_id(self, quantile: int) -> int:
        if not self._control_ids:
            raise RuntimeError("reward_conditioned has no control tokens yet: bind() must come first")
        return self._control_ids[quantile]

    def credit(self, batch: CreditBatch) -> Credit:
        """Return ones: every token of a drawn sample counts alike."""
        metrics = {"buffer_size": float(len(self._buffer))}
        if self._buffer:
            metrics["buffer_reward_max"] = max(entry.reward for entry in self._buffer)
            metrics["buffer_reward_mean"] = sum(entry.reward for entry in self._buffer) / len(self._buffer)
        ones = torch.ones(int(batch.lengths.sum()), dtype=batch.rewards.dtype, device=batch.rewards.device)
        return Credit(advantages=ones, metrics=metrics)

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return negative log-likelihood plus the exact KL per token."""
        if batch.kl_coefficient > 0 and batch.exact_kl is None:
            raise ValueError("reward_conditioned with a KL coefficient needs exact_kl [N]")
        likelihood = LossOutput(loss=-batch.logprobs, metrics={"nll": -batch.logprobs.detach()})
        return with_corrections(likelihood, batch, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        buffer = [{"rollout": asdict(past.scored.rollout), "reward": past.reward} for past in self._buffer]
        return {"num_draws": self._num_draws, "buffer": buffer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._num_draws = int(state["num_draws"])
        self._buffer.clear()
        for saved in state["buffer"]:
            prompt = Prompt(**saved["rollout"]["prompt"])
            sampling = SamplingParams.from_json(saved["rollout"]["sampling"])
            turns = [Turn(**turn) for turn in saved["rollout"].get("turns", ())]
            known = {"prompt": prompt, "sampling": sampling, "turns": turns}
            rollout = Rollout(**{**saved["rollout"], **known})
            self._buffer.append(_as_sample(rollout, saved["reward"]))

    def forget(self, redefined: Collection[str]) -> None:
        """Empty the buffer if its samples were sorted by other rewards."""
        if "reward" in redefined:
            self._buffer.clear()


def _as_sample(rollout: Rollout, reward: float) -> TrainSample:
    """Return the sample as the buffer keeps it: without control token, texts, row and log-probabilities."""
    return TrainSample(
        scored=Scored(rollout=rollout, reward=reward),
        prompt_ids=rollout.prompt.prompt_ids,
        response_ids=rollout.response_ids,
        rollout_logprobs=[],
        reward=reward,
        ref_prompt_ids=rollout.prompt.prompt_ids,
        turns=rollout.turns,
    )
