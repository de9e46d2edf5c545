"""Base of algorithms: three pure steps from scored rollouts to a loss per token.

1. ``select``: scored rollouts -> training samples with their context (controller, no tensors).
2. ``credit``: rewards -> advantages per token (tensors, no gradient), for all samples of one task at once.
3. ``loss``: per-token loss of one micro-batch of one task (gradient flows through ``logprobs``/``values``).

An algorithm sees the samples of one task only. The learner owns forwards, denominators and the optimizer.
Axes: ``B`` samples of the task, ``N`` their concatenated response tokens (ragged, no padding).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import NotNegative, OneOf, Positive, PositiveFraction, Range, Settings
from multitask_rl.errors import PluginError
from multitask_rl.records import Scored, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Annotated[str, OneOf("token", "sequence", "constant")]


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig(Settings):
    """Settings that every algorithm has; an algorithm's ``Config`` extends it."""

    clip_low: PositiveFraction = 0.2
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: Positive = 0.2
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: Annotated[float, Range("(1, inf)", off=0.0)] = 3.0
    """Bound of the ratio for negative advantages; 0 = off."""
    truncated_is: NotNegative = 2.0
    """Cap C of the weight min(pi_old / pi_rollout, C) that corrects engine mismatch; 0 = off."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy bonus, nats."""
    aggregation: Aggregation = "token"
    """Loss denominator of the task: ``token`` (mean over its tokens), ``sequence`` (mean over samples of
    their token means) or ``constant`` (sum over tokens / (samples * token limit of a response or episode)).
    Means leave out tokens that a grammar forced, unless the task has a critic."""
    mask_truncated: bool = False
    """Responses cut at a limit add nothing to the loss: at that of tokens, episodes also at that of turns or
    tool calls. ``token`` divides by the other tokens; ``sequence`` and ``constant`` still count these
    responses. Their rewards count in the advantages of others (DAPO's "overlong filtering")."""


@dataclass(kw_only=True, slots=True)
class CreditBatch:
    """All training samples of one task in one step."""

    rewards: Tensor
    """[B] float32, scalar outcome per sample."""
    groups: Tensor
    """[B] int64, equal for rollouts of one draw of one prompt."""
    lengths: Tensor
    """[B] int64, response tokens per sample; sum = N."""
    choices: Tensor | None = None
    """[N] bool: tokens in the loss; None = all. False for a token that a grammar forced."""
    old_logprobs: Tensor | None = None
    """[N] nats, of the trainer's policy at the start of the step; None when not needed."""
    ref_logprobs: Tensor | None = None
    """[N] nats of the reference policy; None without a KL term."""
    values: Tensor | None = None
    """[N] critic's values before each token; None without a critic."""
    kl_coefficient: float = 0.0
    """beta of the KL penalty inside the reward (k1); 0 when the KL is in the loss or off."""
    costs: Tensor | None = None
    """[B, C] cost in [0, 1] of each constraint of mode ``lagrangian``, NaN = not applicable; None without
    one."""
    multipliers: tuple[float, ...] = ()
    """[C] Lagrange multiplier of each, >= 0."""
    constraints: tuple[str, ...] = ()
    """[C] name of each."""
    component_rewards: Tensor | None = None
    """[B, R] the summands of the reward one by one (GDPO): rewards and penalties, NaN = not applicable."""
    component_weights: Tensor | None = None
    """[R] weights of the components; negative if lower values are better, as with penalties."""


@dataclass(kw_only=True, slots=True)
class Credit:
    """What ``credit`` returns: advantages per token, and what else the loss of the algorithm needs."""

    advantages: Tensor
    """[N] per response token."""
    returns: Tensor | None = None
    """[N] critic targets."""
    value_rescale: tuple[float, float] | None = None
    """``(a, b)``: the unit of values changes, ``new = a * old + b``. ``returns`` are in the new unit; the
    caller rescales the task's value head and its earlier values. None = no change."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class TokenBatch:
    """Response tokens of one task in one micro-batch."""

    logprobs: Tensor
    """[N] nats, policy now, with gradient."""
    old_logprobs: Tensor
    """[N] nats, at the start of the step (``logprobs.detach()`` when the step makes one update)."""
    advantages: Tensor
    """[N]"""
    sequence: Tensor
    """[N] int64, index of each token's sample in the micro-batch, 0 .. num_sequences - 1, ascending."""
    num_sequences: int
    """Samples in the micro-batch, including samples without tokens."""
    rollout_logprobs: Tensor | None = None
    """[N] nats of the engine; NaN where the sample is not on-policy data; None = no correction."""
    ref_logprobs: Tensor | None = None
    """[N] nats of the reference."""
    exact_kl: Tensor | None = None
    """[N] sum over the vocabulary of KL(policy || reference), with gradient; for ``wants_exact_kl``."""
    entropy: Tensor | None = None
    """[N] nats, with gradient, when ``entropy_coefficient`` > 0."""
    values: Tensor | None = None
    """[N] critic now, with gradient."""
    old_values: Tensor | None = None
    """[N] critic at the start of the step."""
    returns: Tensor | None = None
    """[N]"""
    kl_coefficient: float = 0.0
    """beta of the KL term inside the loss; 0 when it is in the reward or off. An algorithm with
    ``wants_exact_kl`` always gets its beta here."""
    kl_estimator: str = "k3"
    """``k1``, ``k2`` or ``k3`` (see ``kl.py``)."""


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """Per-token loss, not reduced: the learner divides by global counts."""

    loss: Tensor
    """[N]"""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """[N] each, detached; averaged over tokens for the log (``clip_fraction``, ``approx_kl``, ...)."""


def check_result(found: object, kind: type[Credit | LossOutput], number: int, place: str) -> None:
    """Check an algorithm's result: a ``kind`` with tensors of shape [number]; a loss also has a gradient.

    Raises:
        PluginError: it did not; the message begins with ``place``.
    """
    from torch import Tensor

    if not isinstance(found, kind):
        raise PluginError(f"{place} returned {type(found).__name__}, expected {kind.__name__}")
    given: dict[str, object] = {"loss": found.loss} if isinstance(found, LossOutput) else {}
    if isinstance(found, Credit):
        given = {"advantages": found.advantages}
        given |= {} if found.returns is None else {"returns": found.returns}
    for name, tokens in given.items():
        what = f"{type(tokens).__name__} as {name}"
        if isinstance(tokens, Tensor):
            what = f"{name} of shape {tuple(tokens.shape)}"
        if not isinstance(tokens, Tensor) or tuple(tokens.shape) != (number,):
            raise PluginError(f"{place} returned {what}, expected a tensor [{number}]: one value per token")
    if isinstance(found, LossOutput) and not found.loss.requires_grad:
        raise PluginError(
            f"{place} returned a loss without a gradient, from which nothing is learnt; compute it from "
            "logprobs or values of the batch, without detach() and torch.no_grad()"
        )


class Algorithm:
    """Base of all algorithms: one instance per task, built as ``Cls(Cls.Config(**algorithm_config))``.

    A subclass defines ``credit`` and ``loss``, and overrides what else differs. The defaults of the other
    methods train on every scored rollout as sampled.
    """

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    needs_critic: ClassVar[bool] = False
    """Values are computed and a value head is trained for the task."""
    num_control_tokens: int = 0
    """Number of control tokens that the tokenizer must have; ``bind`` receives their ids."""
    wants_exact_kl: bool = False
    """The learner computes the KL over the whole vocabulary into ``TokenBatch.exact_kl``."""
    on_policy: ClassVar[bool] = True
    """Samples come from the current policy: the engine mismatch is measured and corrected."""
    trains_rejected: ClassVar[bool] = False
    """Whether responses rejected by a ``reject`` constraint are training samples; ``outcome`` is their
    reward. False: they are counted and left out."""

    trains: ClassVar[bool] = True
    """False: its tasks are evaluated only; ``credit`` and ``loss`` are never called."""
    needs_reward: ClassVar[bool] = True
    """False: samples are trained on whether a reward scored them or not."""
    has_teacher: ClassVar[bool] = False
    """``ref_logprobs`` and ``exact_kl`` are to the task's teacher."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def min_group_size(self) -> int:
        """Rollouts per prompt below which every advantage is 0."""
        return 1

    @property
    def adds_reward(self) -> bool:
        """Whether ``outcome`` may differ for responses with equal scores."""
        return type(self).outcome is not Algorithm.outcome

    def bind(self, control_token_ids: Sequence[int]) -> None:
        """Receive the ids of the ``num_control_tokens`` control tokens, once, before the first prompt."""

    def check_length(self, where: str, max_response_tokens: int) -> None:
        """Check, before a model loads, that the settings fit responses of so many tokens. Default: any do.

        Raises:
            ConfigError: they do not fit; its text begins with ``where``, the task's place.
        """

    def condition(self, prompt_ids: list[int], *, evaluation: bool) -> list[int]:
        """Return the context to sample from. Default: the prompt as it is.

        Called when a prompt is drawn; for the other contexts of an episode only if that changed the prompt.
        """
        return prompt_ids

    def is_informative(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards gives a gradient; differing ``lagrangian`` costs also do."""
        return True

    def outcome(self, scored: Scored) -> float:
        """Return the reward that the algorithm learns from; 0 for a record whose scoring failed."""
        return scored.reward if scored.reward is not None else 0.0

    def select(self, scored: Sequence[Scored]) -> list[TrainSample]:
        """Return the training samples of the step's scored rollouts of the task.

        No response in ``scored`` failed. Rejected ones are there only with ``trains_rejected``, and those
        without a reward only without ``needs_reward``.
        """
        return [
            TrainSample(
                scored=s,
                prompt_ids=s.rollout.prompt.prompt_ids,
                response_ids=s.rollout.response_ids,
                rollout_logprobs=s.rollout.rollout_logprobs,
                reward=self.outcome(s),
                turns=s.rollout.turns,
            )
            for s in scored
        ]

    def credit(self, batch: CreditBatch) -> Credit:
        """Return advantages (and returns) per token. Pure; no gradient."""
        raise NotImplementedError

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the loss of every token. Pure."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""

    def forget(self, redefined: Collection[str]) -> None:
        """Drop what is on the scale of earlier rewards and costs: a resume has changed them.

        ``redefined``: ``reward`` and ``cost/<constraint>``.
        """
