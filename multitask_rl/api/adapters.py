"""The actor and critic of a name; models and engines of one's own as actor and rollout engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.config.devices import parse_devices, resolve_devices
from multitask_rl.config.run import CriticConfig, ModelConfig, RolloutConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, load_actor, make_actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Generation, GenerationRequest, push_weights
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.seeding import derive_seed
from multitask_rl.training.backends.build import serve_torchrun_rank
from multitask_rl.training.critic import Critic

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def get_actor_critic(
    model_name: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    use_vllm: bool = False,
    device_map: Mapping[str, str] | None = None,
    critic_trunk: str = "actor",
    seed: int = 0,
    **model_config: Any,
) -> tuple[Actor, Critic]:
    """Return the shared actor and the critic; the trainer adds a head per task that needs one.

    Args:
        model_name: directory or Hugging Face id of a causal language model, or a model that is loaded.
        tokenizer: default: the model's own.
        use_vllm: sample with the vLLM engine instead of the Hugging Face one.
        device_map: ``{"actor": "cuda:0", "critic": "cuda:1"}``; default: cuda if there is one, else cpu.
        critic_trunk: ``actor`` (heads on the actor's hidden state) or ``separate`` (on a copy's).
        seed: of the run; adapters start at random.
        model_config: further keys of ``ModelConfig`` (``dtype``, ``gradient_checkpointing``, ...).

    Raises:
        ConfigError: the model or a device does not exist, roles overlap, or a key is unknown.
    """
    serve_torchrun_rank()  # before a model loads: a process of torchrun that is no trainer needs none
    devices = resolve_devices(dict(device_map or {}))
    model_name = str(model_name) if isinstance(model_name, Path) else model_name
    name = model_name if isinstance(model_name, str) else ""
    try:
        config = ModelConfig(name_or_path=name, **model_config)
    except TypeError as error:
        raise ConfigError(f"get_actor_critic: {error}; allowed keys are those of ModelConfig") from error
    if isinstance(model_name, str):
        on_host = "actor" in devices and parse_devices((device_map or {})["actor"]).begins_on_host
        actor = load_actor(config, devices.get("actor", ""), seed, tokenizer, on_host=on_host)
    else:
        actor = make_actor(model_name, tokenizer, config, seed)
        actor.model.to(devices.get("actor", actor.device))
    actor.engine = "vllm" if use_vllm else ""
    actor.device_map = dict(device_map or {})
    trunk = "separate" if "critic" in devices and devices["critic"] != devices.get("actor") else critic_trunk
    return actor, Critic(CriticConfig(trunk=trunk), devices.get("critic", str(actor.device)))


class HfModelAdapter(Actor):
    """A model that is already loaded as the shared actor: ``Trainer(actor=HfModelAdapter(model))``.

    Args:
        model: a causal language model of ``transformers``; wrapped by FSDP, DDP or ``torch.compile`` too. It
            is trained in place, unless it was sharded: then a whole copy is.
        tokenizer: default: the one that comes with the model.
        model_config: further keys of ``ModelConfig`` (``gradient_checkpointing``, ``autocast``, ...).

    Raises:
        ConfigError: no causal language model, no tokenizer, or an unknown key.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_config: Any,
    ) -> None:
        config = build_dataclass(ModelConfig, model_config, Where(path=("HfModelAdapter",)))
        made = make_actor(model, tokenizer, config)
        super().__init__(made.model, made.tokenizer, made.config)


class VLLMActorModel(Actor):
    """An actor that vLLM samples: ``Trainer(actor=VLLMActorModel(name, tensor_parallel_size=2))``.

    The model is loaded for training; the engine starts with the run, or with the first ``generate``.

    Args:
        model_name: directory or Hugging Face id.
        tensor_parallel_size: devices that one copy of the engine is split over.
        max_num_seqs: sequences decoded at once.
        engine_config: further keys of ``rollout.engine_config``.
        device: of the weights that are trained; default: cuda if there is one, else cpu.
        model_config: further keys of ``ModelConfig``.

    Raises:
        ConfigError: the model is not there, or an unknown key.
    """

    def __init__(
        self,
        model_name: str,
        *,
        tensor_parallel_size: int = 1,
        max_num_seqs: int = 256,
        engine_config: Mapping[str, Any] | None = None,
        device: str = "",
        **model_config: Any,
    ) -> None:
        serve_torchrun_rank()
        given = {"name_or_path": model_name, **model_config}
        made = load_actor(build_dataclass(ModelConfig, given, Where(path=("VLLMActorModel",))), device)
        super().__init__(made.model, made.tokenizer, made.config)
        own = {"tensor_parallel_size": tensor_parallel_size, "max_num_seqs": max_num_seqs}
        self.engine = "vllm"
        self.engine_config = {**own, **(engine_config or {})}
        build_dataclass(VLLMEngine.Config, self.engine_config, Where(path=("VLLMActorModel",)))
        self._own_engine: VLLMEngine | None = None
        self._closing = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """The engine does not travel."""
        return {**super().__getstate__(), "_own_engine": None, "_closing": contextlib.ExitStack()}

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        num_samples: int = 1,
        sampling: SamplingParams | None = None,
        seed: int = 0,
    ) -> list[list[Generation]]:
        """Return ``num_samples`` generations per prompt, sampled by vLLM with the weights as they are.

        Not while a run is open: vLLM runs one engine in a process. A run that begins stops this one.

        Raises:
            MissingExtraError, ConfigError, EngineError: vLLM is not installed, cannot start, or cannot go on.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts: expected a list of texts, got one text; give [text]")
        if self._own_engine is None:
            directory = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="multitask-rl-"))
            config = RolloutConfig(engine="vllm", engine_config=dict(self.engine_config))
            self._own_engine = VLLMEngine.build(self, config, seed=seed, output_dir=Path(directory))
            self._closing.callback(self._own_engine.close)
        elif self._own_engine.policy_version != self.policy_version:
            push_weights(self._own_engine, self)
        requests = [
            GenerationRequest(
                prompt_ids=self.tokenizer(p)["input_ids"] if isinstance(p, str) else list(p),
                sampling=sampling or SamplingParams(),
                seeds=[derive_seed(seed, index, sample) for sample in range(num_samples)],
            )
            for index, p in enumerate(prompts)
        ]
        return self._own_engine.generate(requests)

    def release_engine(self) -> None:
        """Stop the engine that ``generate`` started; the next call starts another. Idempotent."""
        self._own_engine = None
        self._closing.close()


class vLLMAdapter(VLLMEngine):
    """A vLLM engine that is already running as the rollout engine: ``Trainer(..., engine=vLLMAdapter(llm))``.

    It takes the actor's weights before it samples, and stays open when the run ends.

    Args:
        llm: a ``vllm.LLM`` of the actor's architecture, made as ``LLM(..., **vLLMAdapter.ARGUMENTS)``.
        eos_token_ids: end tokens besides those of the engine's own model configuration.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: ``llm`` was made without ``ARGUMENTS``.
    """

    ARGUMENTS: Mapping[str, Any] = {
        "worker_extension_cls": "multitask_rl.rollout.vllm.worker.WeightReceiver",
        "logprobs_mode": "processed_logprobs",
    }
    """What a rollout engine needs of an ``LLM``: a way in for new weights, and the log-probabilities of the
    distribution that was sampled."""

    def __init__(self, llm: Any, *, eos_token_ids: Sequence[int] = ()) -> None:
        engine = llm.llm_engine
        has = {
            "worker_extension_cls": engine.vllm_config.parallel_config.worker_extension_cls,
            "logprobs_mode": engine.model_config.logprobs_mode,
        }
        for name, wanted in self.ARGUMENTS.items():
            if has[name] != wanted:
                raise ConfigError(
                    f"vLLMAdapter: the engine was made with {name}={has[name]!r}, and sampling for training "
                    f"needs {wanted!r}; make it as LLM(model, ..., **vLLMAdapter.ARGUMENTS)"
                )
        own = {"tensor_parallel_size": engine.vllm_config.parallel_config.tensor_parallel_size}
        super().__init__("", config=own, seed=0, eos_token_ids=eos_token_ids, llm=llm)

    def close(self) -> None:
        """Release the engine without closing it: the caller made it."""
        self._loader.close()
