"""The seam between the training step and the processes that compute it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.config.devices import actor_devices
from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import build_config
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.tracking.timeline import Span
from multitask_rl.training.optimizer import ActorCriticOptimizer
from multitask_rl.training.runner import ModelRunner


@dataclass(kw_only=True, slots=True)
class LearnerTask:
    """What learning needs of a task: its algorithm, KL coefficient and multipliers."""

    spec: TaskSpec
    algorithm: Algorithm
    kl_coefficient: float = 0.0
    """Present beta of the KL controller."""
    multipliers: dict[str, float] = field(default_factory=dict)
    """Constraint -> present Lagrange multiplier."""

    @property
    def kl_in_reward(self) -> bool:
        """A KL term is part of the reward; else of the loss, as one over the vocabulary always is."""
        return self.spec.kl.placement == "reward" and not self.algorithm.wants_exact_kl

    @property
    def is_regularised(self) -> bool:
        """A KL or entropy term gives every response a gradient, whatever its reward."""
        return self.kl_coefficient > 0 or self.algorithm.config.entropy_coefficient > 0

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        """A sample whose advantages are all zero does not move the weights."""
        kl_in_loss = self.kl_coefficient > 0 and not self.kl_in_reward
        plain = self.algorithm.config.entropy_coefficient == 0 and not kl_in_loss
        return plain and self.algorithm.on_policy and not self.algorithm.needs_critic


@dataclass(kw_only=True, slots=True)
class CreditedSample:
    """A training sample with the credit of each of its response tokens.

    No tensor is a view: pickle would send the whole memory behind it.
    """

    sample: TrainSample
    advantages: Tensor
    """[T]"""
    old_logprobs: Tensor | None = None
    """[T]; None when the step makes one update (the ratio is then exactly 1)."""
    ref_logprobs: Tensor | None = None
    """[T]"""
    old_values: Tensor | None = None
    """[T]"""
    returns: Tensor | None = None
    """[T]"""
    choices: Tensor | None = None
    """[T] bool: the tokens in the loss and in its denominator; None = all. Tokens that a grammar forced are
    left out, because their probability is 1 under any weights, and with ``mask_truncated`` those of responses
    at the limit."""
    has_gradient: bool = True
    """False: the loss does not depend on the sample; the sample only counts in the denominator."""
    fraction: float = 1.0
    """Its share of the tokens of its rollout that count in the loss: below 1 where an episode is several
    samples, which together count as one."""

    @property
    def num_choices(self) -> int:
        """Number of tokens that count in the loss."""
        return len(self.sample.response_ids) if self.choices is None else int(self.choices.sum())


Weighted = tuple[CreditedSample, float]
"""A sample and the factor of its token losses."""


@dataclass(slots=True)
class StepStartOutputs:
    """Outputs of the models before a step's first update: one tensor [T] per sample, none of them a view."""

    old_logprobs: list[Tensor]
    ref_logprobs: list[Tensor] | None
    """None: not requested."""
    values: list[Tensor] | None
    """None: not requested."""

    @classmethod
    def merge(cls, shares: Sequence[Sequence[int]], parts: Sequence[StepStartOutputs]) -> StepStartOutputs:
        """Return the outputs of all samples, in their order; ``shares``: indices of each part's samples."""
        order = [index for share in shares for index in share]

        def whole(lists: Sequence[list[Tensor] | None]) -> list[Tensor] | None:
            tensors = [tensor for own in lists if own is not None for tensor in own]
            found = dict(zip(order, tensors, strict=bool(tensors)))
            return [found[i] for i in range(len(found))] or None

        return cls(
            whole([part.old_logprobs for part in parts]) or [],
            whole([part.ref_logprobs for part in parts]),
            whole([part.values for part in parts]),
        )


class TokenMeans:
    """Collects per-token numbers of micro-batches; returns their means (and the maximum of ``mismatch``)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[float, int, float]] = {}
        """(task, metric) -> sum, number, maximum (of ``mismatch`` only)."""
        self._padding = self._cells = 0

    def add(self, task: str, metrics: Mapping[str, Tensor]) -> None:
        """Add the [N] tensors of one micro-batch."""
        for name, value in metrics.items():
            if value.numel():
                most = float(value.max()) if name == "mismatch" else 0.0
                self._add((task, name), float(value.sum()), value.numel(), most)

    def _add(self, key: tuple[str, str], total: float, number: int, most: float) -> None:
        known = self._found.get(key, (0.0, 0, most))
        self._found[key] = (known[0] + total, known[1] + number, max(known[2], most))

    def add_padding(self, tokens: int, cells: int) -> None:
        """Add micro-batches of ``tokens``, computed as ``cells`` with padding."""
        self._padding += cells - tokens
        self._cells += cells

    def merge(self, other: TokenMeans) -> None:
        """Add what ``other`` has collected."""
        for key, found in other._found.items():
            self._add(key, *found)
        self._padding += other._padding
        self._cells += other._cells

    @property
    def padding(self) -> float:
        """Share of the computed tokens that were padding, in [0, 1]."""
        return self._padding / self._cells if self._cells else 0.0

    def by_task(self) -> dict[str, dict[str, float]]:
        """Return the means over all tokens added, by task and metric name."""
        result: dict[str, dict[str, float]] = defaultdict(dict)
        for (task, name), (total, number, most) in self._found.items():
            result[task][name] = total / number
            if name == "mismatch":
                result[task]["mismatch_max"] = most
        return dict(result)


@dataclass(kw_only=True, slots=True)
class UpdateResult:
    """Result of one optimizer step, over one minibatch."""

    loss: float
    """Sum of the losses of the samples of this optimizer step."""
    norms: dict[str, float] | None
    """``grad_norm`` and ``critic_grad_norm`` of the whole gradient before clipping; None: the gradient was
    not finite and was not applied."""
    means: TokenMeans
    sketches: dict[str, Tensor] = field(default_factory=dict)
    """Task -> sketch of its part of the gradient (``sketch.py``), if asked for."""


class TrainingBackend:
    """Computes outputs and optimizer steps of the models, in this process or in several.

    ``InProcess`` computes everything in this process. ``RankGroup`` divides samples, sequences, weights or
    layers over learner ranks. A plugin of the group ``multitask_rl.training_backends`` is another subclass,
    chosen by ``training.backend``. All give the same results up to rounding. Methods with a body here are
    right for one process. Every method raises ``TrainingError`` if another process failed or ended.
    """

    runner: ModelRunner
    """The models in this process. If the actor has ``parts``, its weights here are NaN, except adapters."""
    optimizer: ActorCriticOptimizer
    """Optimizer of the parameters in ``runner``."""

    @classmethod
    def settings(cls, config: RunConfig) -> Any:
        """Return ``training.backend_config`` as a ``cls.Config``; None for a class without one.

        Raises:
            ConfigError: a key is unknown, or of the wrong type.
        """
        return build_config(cls, config.training.backend_config, where="training.backend_config")

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse, before a model loads, what this backend cannot do. Default: more than one process.

        Raises:
            ConfigError: says which keys, and what is allowed.
        """
        cls.settings(config)
        actor = actor_devices(config)
        if len(actor.names) > 1 or config.batch.context_ranks > 1:
            raise ConfigError(
                f"training.backend={config.training.backend} learns in one process: name one device in "
                f"device_map.actor, not {str(actor)!r}, and set batch.context_ranks=1"
            )

    @classmethod
    def num_parts(cls, config: RunConfig) -> int:
        """Return how many processes divide the actor's weights. Default: 1, each process has all of them."""
        return 1

    @classmethod
    def learner_bytes(cls, config: RunConfig, trainable: int, whole: Mapping[str, float]) -> dict[str, float]:
        """Return the bytes of gradients and optimizer in a process, by name; ``doctor`` shows them.

        Args:
            config: of the run.
            trainable: number of the actor's weights that are trained.
            whole: ``gradients`` and ``optimizer`` of a process that divides nothing.

        Default: each of ``num_parts`` processes has an equal part of them.
        """
        return {name: size / cls.num_parts(config) for name, size in whole.items()}

    @classmethod
    def has_parts(cls, config: RunConfig) -> bool:
        """Whether whole weights are read from ``runner.actor.parts``, not from the model in ``runner``."""
        return cls.num_parts(config) > 1

    @classmethod
    def build(
        cls, runner: ModelRunner, tasks: Mapping[str, LearnerTask], config: RunConfig
    ) -> TrainingBackend:
        """Return the backend of a run that ``check`` has let pass.

        Raises:
            ConfigError, MissingExtraError, TrainingError: it cannot be built, or a process did not start.
        """
        raise NotImplementedError

    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> StepStartOutputs:
        """Return log-probabilities of all responses under the present weights; on request more.

        All ``samples`` are of ``task``, which selects the value head. Each prompt has at least one token.
        """
        raise NotImplementedError

    def step(self, active: Sequence[Weighted], factor: float, compared: Sequence[str] = ()) -> UpdateResult:
        """Make one optimizer step with ``factor`` times the learning rates; none where the gradient is zero.

        ``active`` are the samples of the minibatch with a gradient; factors include shares and denominators.
        With ``compared``, the names of their tasks, the passes are made task by task, and the result has the
        sketch of each task's gradient.
        """
        raise NotImplementedError

    def score_texts(
        self, samples: Sequence[TrainSample], *, with_kl: bool, task: str = ""
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """See ``ModelRunner.score_texts``."""
        return self.runner.score_texts(samples, with_kl=with_kl, task=task)

    def gather_weights(self) -> None:
        """Copy adapters that other processes changed in the last step into ``runner``."""

    def ema_update(self) -> None:
        """Move the reference one update towards the actor; a fixed reference stays."""
        if self.runner.average is not None:
            self.runner.average.ema_update(self.runner.actor.model)

    def spread(self, engine: RolloutEngine) -> RolloutEngine:
        """Return an engine that samples as ``engine`` does, on all learner ranks. Default: ``engine``."""
        return engine

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments and float32 masters in this process."""
        return self.optimizer.state_bytes

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the optimizer's state of all processes, see ``ActorCriticOptimizer.tensors``."""
        return self.optimizer.tensors(names)

    def load_optimizer(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Restore the optimizer's state of all processes, see ``ActorCriticOptimizer.load_tensors``."""
        self.optimizer.load_tensors(tensors, parameters)

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """Return metrics (``ranks/...``) and spans (when a rank computed or waited) since the last call."""
        return {}, []

    def close(self) -> None:
        """End the other processes. Idempotent."""
