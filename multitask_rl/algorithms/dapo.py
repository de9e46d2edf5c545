"""DAPO: clip-higher, dynamic sampling, token mean, soft punishment of overlong answers."""

from __future__ import annotations

from dataclasses import dataclass

from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.config.schema.ranges import Natural, NotNegative
from multitask_rl.errors import ConfigError
from multitask_rl.records import Scored


class DAPO(GRPO):
    """GRPO with DAPO's four changes; without KL, as in the paper, unless the task configures it.

    Clip-higher and the token mean are defaults here. Dynamic sampling is ``is_informative``: groups without
    variance are refilled *from the same task* (a refill across tasks would favour tasks that are easy to
    fill). The overlong penalty is added to the reward before normalisation; it needs ``overlong_buffer``.

    Source: DAPO (arXiv:2503.14476).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``DAPO``."""

        normalisation: str = "group"
        overlong_buffer: Natural = 0
        """Last tokens before ``max_new_tokens`` over which the penalty grows from 0 to ``overlong_weight``;
        0 = off."""
        overlong_weight: NotNegative = 1.0
        """Penalty of a response at the token limit, in units of the reward."""

    config: Config

    @property
    def adds_reward(self) -> bool:
        """Whether long responses are penalised."""
        return self.config.overlong_buffer > 0 and self.config.overlong_weight > 0

    def check_length(self, where: str, max_response_tokens: int) -> None:
        """Refuse a buffer that is larger than the task's token limit."""
        buffer = self.config.overlong_buffer
        if buffer > max_response_tokens:
            raise ConfigError(
                f"{where}.algorithm_config.overlong_buffer is {buffer} tokens, more than the "
                f"{max_response_tokens} tokens a response may have (max_new_tokens); choose for example "
                f"{max(1, max_response_tokens // 5)}"
            )

    def outcome(self, scored: Scored) -> float:
        """Return the scored reward minus the length penalty (Eq. 13)."""
        rollout, buffer = scored.rollout, self.config.overlong_buffer
        max_length = rollout.max_response_tokens
        excess = max(0, len(rollout.response_ids) - (max_length - buffer))
        penalty = min(excess / buffer, 1.0) if buffer else 0.0
        return super().outcome(scored) - self.config.overlong_weight * penalty
