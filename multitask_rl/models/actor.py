"""The shared actor: a Hugging Face causal language model with its tokenizer; how to load and save them."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multitask_rl.attention.float32 import use_float32_attention
from multitask_rl.attention.products import multiply_with_onednn
from multitask_rl.boundary.printable import counted, first_line
from multitask_rl.config.run import ModelConfig, RunConfig
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.errors import CheckpointError, ConfigError
from multitask_rl.models.grammar import Grammars
from multitask_rl.models.lora import (
    add_adapters,
    base_of,
    load_adapters,
    merge_adapters,
    merged_weights,
    models_below,
    save_base,
)
from multitask_rl.models.rope import check_positions, context_length, scale_rope
from multitask_rl.models.tokens import load_tokenizer
from multitask_rl.models.weights import WeightParts, WeightStream, cut_buckets

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_FLASH = {
    "flash_attention_2": "pip install flash-attn",
    "flash_attention_3": "install flash_attn_3 (Dao-AILab/flash-attention, folder hopper)",
}
"""Name of an attention -> how to install it."""


FILE_BYTES = 4 * 2**30
"""Most bytes of a weight file; it is larger if it would otherwise end inside a block of modules."""
_LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of weights, by their names in a configuration."""


class Actor:
    """The policy that every task trains; its model is in evaluation mode outside of ``learning``.

    Raises:
        ConfigError: neither tokenizer nor model names a token that ends a response.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig
    ) -> None:
        self.model = model.eval()  # PEFT returns modules in training mode
        multiply_with_onednn(self.hidden_size)
        self.tokenizer = tokenizer
        self.config = config
        self.engine = ""
        """Rollout engine set in Python (``use_vllm``); empty = the run configuration's."""
        self.engine_config: dict[str, Any] = {}
        """Settings of ``engine``; ignored if the run configuration has ``rollout.engine_config``."""
        self.device_map: dict[str, str] = {}
        """Devices set in Python; ignored if the run configuration has a ``device_map``."""
        self._base = base_of(model) if config.lora.rank > 0 else {}
        self.policy_version = 0
        self.engine_start: Path | None = None
        """Directory that ``save_for_engine`` wrote, if this actor was loaded from it."""
        self.parts: WeightParts | None = None
        """Reads the weights while several processes each hold a part of them. The weights of ``model`` then
        have the right shapes, types and devices, but are NaN; adapters stay whole."""
        self.eos_token_ids: tuple[int, ...] = ()
        generation = getattr(model, "generation_config", None)
        for given in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
            ids = given if isinstance(given, (list, tuple)) else [given]
            new = dict.fromkeys(int(i) for i in ids if i is not None)
            self.eos_token_ids += tuple(i for i in new if i not in self.eos_token_ids)
        if not self.eos_token_ids:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-sequence token, so a response "
                "could never end; set eos_token in its tokenizer_config.json"
            )
        pad = tokenizer.pad_token_id
        self.pad_token_id = int(pad) if pad is not None else self.eos_token_ids[0]
        self._grammars: Grammars | None = None
        self._target: torch.device | None = None
        self._own_rows = int(model.get_input_embeddings().weight.shape[0])
        """Rows of the vocabulary without control tokens."""
        if config.autocast:
            use_float32_attention(model)

    def release_engine(self) -> None:
        """Stop the engine that the actor itself started, before a run starts one. Default: nothing."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out compiled grammars: they cannot be pickled and are made again."""
        return {**self.__dict__, "_grammars": None}

    def settle(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with the model's name, and the engine and the devices set in Python."""
        if self.config.name_or_path:
            config = replace(config, model=replace(config.model, name_or_path=self.config.name_or_path))
        if self.engine:
            keys = config.rollout.engine_config or self.engine_config
            config = replace(config, rollout=replace(config.rollout, engine=self.engine, engine_config=keys))
        return replace(config, device_map=config.device_map or self.device_map)

    def place(self, device: str, *, on_host: bool = False) -> None:
        """Move the model to ``device`` or, with ``on_host``, to host memory: its parts will be on devices.

        ``device`` is then where this process will compute.
        """
        self._target = torch.device(device) if on_host else None
        self.model.to("cpu" if on_host else device)

    def compute_on(self, device: torch.device) -> None:
        """Compute on ``device`` from now on; weights in host memory come there with each pass."""
        self._target = device

    @property
    def device(self) -> torch.device:
        """Device that the actor computes on; its weights are there, or wait in host memory (``place``)."""
        device: torch.device = next(self.model.parameters()).device
        return self._target if self._target is not None and device.type == "cpu" else device

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence, by the model's (scaled) positions; 0 = no known limit."""
        return context_length(self.model.config)

    @property
    def hidden_size(self) -> int:
        """Width of the last hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def grammars(self) -> Grammars:
        """Compiled grammars, for sampling and training; made again when the vocabulary has grown."""
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        known = self._grammars
        if known is None or (known.tokenizer_size, known.logits_size) != (len(self.tokenizer), vocab_size):
            eos = self.tokenizer.eos_token_id
            known = self._grammars = Grammars(
                self.tokenizer,
                vocab_size=vocab_size,
                eos_token_id=int(eos) if eos is not None else self.eos_token_ids[0],
            )
        return known

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Parameters with a gradient, in a fixed order."""
        return [p for p in self.model.parameters() if p.requires_grad and p.numel()]

    def add_control_tokens(self, number: int) -> list[int]:
        """Return the ids of ``<|reward_0|>`` .. ``<|reward_{number-1}|>``; add those that are missing.

        Their embedding rows start as the mean of the known rows, which keeps the scale of the logits.
        """
        names = _control_names(number)
        known = self.tokenizer.get_vocab()
        missing = [name for name in names if name not in known]
        if missing:
            num_rows = self.model.get_input_embeddings().weight.shape[0]
            num_known = min(len(self.tokenizer), num_rows)
            self.tokenizer.add_tokens(missing, special_tokens=True)
            if len(self.tokenizer) > num_rows:
                self.model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
            # if the tokenizer had more tokens than the model had rows, their new rows are random, too
            new = {*self.tokenizer.convert_tokens_to_ids(missing), *range(num_rows, len(self.tokenizer))}
            with torch.no_grad():
                for layer in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
                    if layer is not None:
                        layer.weight[sorted(new)] = layer.weight[:num_known].mean(dim=0)
        if self.model.generation_config is not None:  # ``save`` writes it
            self.model.generation_config.suppress_tokens = list(self.control_token_ids)
        return [int(i) for i in self.tokenizer.convert_tokens_to_ids(names)]

    @property
    def control_token_ids(self) -> tuple[int, ...]:
        """Ids of all control tokens of the vocabulary, ascending."""
        return tuple(sorted(control_ids(self.tokenizer).values()))

    def keep_control_tokens(self, directory: Path) -> None:
        """Add the control tokens of a saved actor: a run's vocabulary never shrinks.

        Raises:
            CheckpointError: a token has another id than here.
        """
        if self.config.lora.rank > 0:  # without control tokens
            return
        saved = control_ids(load_tokenizer(directory, trust_remote_code=self.config.trust_remote_code))
        own = dict(zip(_control_names(len(saved)), self.add_control_tokens(len(saved)), strict=True))
        if own != saved:
            raise CheckpointError(
                f"the checkpoint {directory} belongs to another model: its control tokens are "
                f"{sorted(saved.values())}, here they would be {sorted(own.values())}; set "
                "model.name_or_path as it was, or choose another output_dir for a new run"
            )

    def learning(self) -> contextlib.AbstractContextManager[None]:
        """Put the model into the mode of an update (see ``learning``)."""
        return learning(self.model)

    @contextlib.contextmanager
    def reference_policy(self, reference: PreTrainedModel | None) -> Iterator[PreTrainedModel]:
        """Yield the model of the reference policy: ``reference``, or this model without its adapters."""
        with contextlib.nullcontext() if reference is not None else self.model.disable_adapter():
            yield self.model if reference is None else reference

    def clone_for_reference(self) -> PreTrainedModel | None:
        """Return a frozen copy of the present weights; None with adapters, which need no copy."""
        if self.config.lora.rank > 0:
            return None
        return copy.deepcopy(self.model).requires_grad_(False).eval()

    def changing_weights(self) -> Mapping[str, Tensor]:
        """Weights by name in ``model`` that an update or a checkpoint may change: all, or the adapters."""
        if self.config.lora.rank > 0:
            return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return self.model.state_dict() if self.parts is None else self.parts.stream()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Weights by name as an engine loads them: tied weights once, adapters merged."""
        if self.config.lora.rank > 0:
            return merged_weights(self.model, None if self.parts is None else self.parts.stream())
        is_tied = getattr(self.model.config, "tie_word_embeddings", False)
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ()) if is_tied else set[str]()
        if self.parts is not None:
            return self.parts.stream(without=tied)
        return {name: value for name, value in self.model.state_dict().items() if name not in tied}

    def save(self, directory: Path) -> None:
        """Write model and tokenizer as an ordinary Hugging Face directory (safetensors)."""
        weights = self.state_dict()
        if self.config.lora.rank == 0 and isinstance(weights, WeightStream):
            save_in_files(self.model, weights, directory)
        else:
            self.model.save_pretrained(directory, safe_serialization=True)
        if self.config.lora.rank > 0:
            save_base(self._base, self.model.get_base_model().name_or_path, directory)
        self.tokenizer.save_pretrained(directory)

    def keep_weights(self) -> Callable[[], Any]:
        """Return a function that restores the present weights."""
        if self.parts is not None and self.config.lora.rank == 0:
            return self.parts.keep()
        kept = {name: value.detach().clone() for name, value in self.changing_weights().items()}
        return partial(self.model.load_state_dict, kept, strict=False)

    def save_for_engine(self, directory: Path) -> Path:
        """Return a directory that an engine can load: ``engine_start``, or else ``directory``, written here.

        Its files are those of ``save``, with adapters merged.
        """
        if self.engine_start is not None:
            return self.engine_start
        model = self.model.get_base_model() if self.config.lora.rank > 0 else self.model
        model.save_pretrained(directory, state_dict=dict(self.state_dict()), safe_serialization=True)
        self.tokenizer.save_pretrained(directory)
        return directory

    def load_weights(self, directory: Path) -> None:
        """Restore the weights that ``save`` wrote, in place: the optimizer keeps its references."""
        if self.config.lora.rank > 0:
            load_adapters(self.model, directory, read_weights(directory), self._base)
        else:
            weights = fit_weights(self.model, read_weights(directory, self.model), at_least=self._own_rows)
            copy_weights(self.model, weights, self.parts)


def _control_names(number: int) -> list[str]:
    return [f"<|reward_{i}|>" for i in range(number)]


def control_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return name -> id of the control tokens that ``tokenizer`` has."""
    known = tokenizer.get_vocab().items()
    return {name: int(i) for name, i in known if re.fullmatch(r"<\|reward_\d+\|>", name)}


def vocabulary_rows(model: PreTrainedModel) -> dict[str, int]:
    """Return name -> number of rows of the weights with one row per token."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.shape[0] for name, p in named if id(p) in own}


def fit_rows(saved: Tensor, number: int, *, blank: bool = False) -> Tensor:
    """Return ``saved`` [V, ...] with ``number`` rows; new rows are the mean of the old, or 0 if ``blank``."""
    missing = number - saved.shape[0]
    if missing <= 0:
        return saved[:number]
    row = torch.zeros_like(saved[0]) if blank else saved.mean(dim=0)
    return torch.cat([saved, row.expand(missing, *saved.shape[1:])])


def fit_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], *, at_least: int | None = None
) -> dict[str, Tensor]:
    """Return ``weights``; those with a row per token get the model's number of rows (``fit_rows``).

    With ``at_least``, a weight with fewer rows, or more than the model's, stays as it is: it belongs to
    another vocabulary.
    """
    fitted = dict(weights)
    for name, number in vocabulary_rows(model).items():
        if name in weights and (at_least is None or at_least <= weights[name].shape[0] <= number):
            fitted[name] = fit_rows(weights[name], number)
    return fitted


@contextlib.contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Put the model into the mode of an update: as for sampling, but with gradient checkpointing.

    Dropout stays off, because the update needs the sampled distribution and many architectures (GPT-2)
    have dropout by default. Only the adapters' own dropout is on, if configured.
    """
    model.eval()
    layers = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    dropouts = [m for n, m in model.named_modules() if n.rpartition(".")[0].endswith("lora_dropout")]
    for module in (*layers, *dropouts):
        # not ``train()``, which would also switch on the dropout inside the module
        module.training = True
    # some layers (OPT) have a dropout rate of their own instead of a dropout module
    own = [(m, n, s) for m in layers for n, s in vars(m).items() if "drop" in n and isinstance(s, float)]
    for module, name, _ in own:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, share in own:
            setattr(module, name, share)
        model.eval()


def copy_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], parts: WeightParts | None = None
) -> None:
    """Copy ``weights`` into ``model`` in place, or into its ``parts``.

    Raises:
        CheckpointError: they do not fit.
    """
    if any("lora_" in name for name in weights):
        raise CheckpointError(
            "the checkpoint holds adapters and no whole model: set model.lora.* as it was, or begin a new "
            "run in another output_dir"
        )
    own = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    wrong = [
        name
        for name, value in own.items()
        if (weights[name].shape != value.shape if name in weights else name not in tied)
    ]
    wrong += [name for name in weights if name not in own and name not in tied]
    if wrong:
        raise CheckpointError(
            f"the checkpoint belongs to another model: {counted(len(wrong), 'weight')} of another shape or "
            f"in one of the two only, the first is {wrong[0]!r}"
        )
    if parts is not None:
        parts.load(weights)
        return
    with torch.no_grad():
        for name, value in weights.items():
            if name in own:  # a tied weight may have one name only
                own[name].copy_(value)


def save_in_files(model: PreTrainedModel, weights: WeightStream, directory: Path) -> None:
    """Write what ``model.save_pretrained`` writes; one file at a time is in host memory."""
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    # transformers joins some neighbours when it saves (query, key and value of HRM)
    files = cut_buckets(weights.like, FILE_BYTES, keep_blocks=True)
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        part = directory / f"part-{number}"
        model.save_pretrained(part, state_dict={name: weights[name].cpu() for name in names})
        name = SAFE_WEIGHTS_NAME
        if len(files) > 1:
            name = name.replace(".", f"-{number:05d}-of-{len(files):05d}.")
            with safe_open(part / SAFE_WEIGHTS_NAME, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), name)
            (part / SAFE_WEIGHTS_NAME).rename(part / name)
        for written in part.iterdir():
            written.replace(directory / written.name)
        part.rmdir()
    if len(files) > 1:
        size = sum(tensor.nbytes for tensor in weights.like.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def read_weights(directory: Path, model: PreTrainedModel | None = None) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files of a model directory.

    Names are those of the files or, if ``model`` can load all tensors, those in its class: ``transformers``
    saves some weights under other names (the head of GPT-NeoX) or in parts (experts).
    """
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    weights = {name: value for file in files for name, value in load_file(file).items()}
    is_model = model is not None and (directory / "config.json").is_file()  # else adapters
    if model is None or not is_model or weights.keys() <= model.state_dict().keys():
        return weights
    loaded, problems = type(model).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    return weights if any(problems.values()) else dict(loaded.state_dict())


def default_device(device: str = "") -> str:
    """Return ``device``; if it is empty, ``cuda`` where there is one, else ``cpu``."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def weight_dtype(config: ModelConfig, device: str) -> torch.dtype:
    """Return the type of the weights; ``auto`` is bfloat16 on CUDA, else float32."""
    usual = torch.bfloat16 if default_device(device).startswith("cuda") else torch.float32
    return DTYPES.get(config.dtype, usual)


def check_attention(config: ModelConfig, device: str) -> None:
    """Raise ``ConfigError`` for an attention that is unknown, missing, or cannot train on ``device``."""
    from transformers import utils

    name, device = config.attn_implementation, default_device(device)
    where = f"model.attn_implementation={name}"
    is_kernel = re.fullmatch(r"[^/:]+/[^/:]+", name) is not None
    if name in ("auto", "sdpa", "eager"):
        return
    if not is_kernel and name not in (*_FLASH, "flex_attention"):
        known = ("auto", "sdpa", "eager", *_FLASH, "flex_attention")
        raise ConfigError(
            f"model.attn_implementation must be {', '.join(known)} or a kernel of the Hugging Face hub "
            f"(owner/name), got {name!r}{suggest(name, known)}"
        )
    if is_kernel and not utils.is_kernels_available():
        raise ConfigError(
            f"{where} is a kernel of the Hugging Face hub and needs another package: pip install kernels, or "
            "set model.attn_implementation=auto"
        )
    if name == "flex_attention" and device.startswith("cpu"):
        raise ConfigError(
            f"{where} has no backward pass on a CPU; set model.attn_implementation=sdpa, or train on CUDA"
        )
    if name not in _FLASH:
        return
    if not device.startswith("cuda"):
        raise ConfigError(
            f"{where} needs a CUDA device, and the actor is on {device}; set model.attn_implementation=sdpa"
        )
    checks = (utils.is_flash_attn_2_available, utils.is_flash_attn_3_available, utils.is_kernels_available)
    if not (checks[list(_FLASH).index(name)]() or checks[-1]()):
        raise ConfigError(
            f"{where} is not installed; {_FLASH[name]}, or pip install kernels (transformers then takes a "
            "kernel of the hub), or set model.attn_implementation=sdpa"
        )
    if config.dtype == "float32" and not config.autocast:
        raise ConfigError(
            f"{where} computes in 16 bits, and model.dtype=float32; set model.dtype=bfloat16 or float16, "
            "model.autocast=true, or model.attn_implementation=sdpa"
        )


def multiplies_bfloat16(device: str) -> bool:
    """Whether ``device`` has instructions for products in bfloat16; True for all but CPUs."""
    known = torch.cpu.get_capabilities() if device.startswith("cpu") else {"bf16": True}
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def warn_of_slow_bfloat16(setting: str, better: str, device: str) -> None:
    """Log a warning if ``device`` is a CPU that ``setting`` makes slow."""
    if not multiplies_bfloat16(device):
        _LOG.warning(
            "%s computes in bfloat16, for which this CPU has no instructions: products take up to 60 times "
            "as long as in float32; set %s",
            setting,
            better,
        )


def read_settings(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Return the model's tokenizer (``tokenizer`` replaces it) and transformers' configuration of it.

    Raises:
        ConfigError: there is no such model or tokenizer.
    """
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    # its progress bars would break the run's own progress lines
    transformers_logging.disable_progress_bar()
    name = config.name_or_path
    if not name:
        raise ConfigError(
            "model.name_or_path is empty; give the directory or Hugging Face id of a causal language model, "
            "e.g. model.name_or_path=Qwen/Qwen2.5-0.5B"
        )
    if not Path(name).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(
            f"model.name_or_path {name!r} is no directory on this machine and cannot be a Hugging Face id "
            "(owner/name); check the path"
        )
    _check_tokenizer(tokenizer)
    trust = {"trust_remote_code": config.trust_remote_code}
    with _load_errors(name):
        *adapters, base = models_below(name)
        with_words = (own for own in adapters if (Path(own) / "tokenizer_config.json").is_file())
        tokenizer = tokenizer or load_tokenizer(next(with_words, base), **trust)
        return tokenizer, AutoConfig.from_pretrained(base, **trust)


@contextlib.contextmanager
def _load_errors(name: str) -> Iterator[None]:
    """Turn an error of loading the model ``name`` into a ``ConfigError`` that says what is wrong."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        first, base = first_line(error), name
        with contextlib.suppress(OSError, ValueError, KeyError):  # its own file may be the broken one
            base = models_below(name)[-1]
        if base != name:
            raise ConfigError(
                f"model.name_or_path {name!r} holds adapters, and the model that they name, "
                f"{base!r} (base_model_name_or_path of adapter_config.json), cannot be loaded: "
                f"{first}"
            ) from error
        if Path(name).is_dir():
            own = [Path(name, "actor"), *sorted(Path(name).glob("checkpoints/*/actor"))]
            if saved := [str(directory) for directory in own if directory.is_dir()]:
                raise ConfigError(
                    f"model.name_or_path {name!r} is a run or a checkpoint; give the model in it: "
                    f"model.name_or_path={saved[-1]}"
                ) from error
            have = ", ".join(sorted(p.name for p in Path(name).iterdir())[:8]) or "nothing"
            raise ConfigError(
                f"model.name_or_path {name!r} is a directory without a loadable causal language model (it "
                f"holds {have}): {first}. It needs config.json, tokenizer files and weights in safetensors."
            ) from error
        here = "" if Path(name).is_absolute() else f" (a path from the working directory {str(Path.cwd())!r})"
        raise ConfigError(
            f"model.name_or_path {name!r} is neither a directory on this machine{here} nor a model that can "
            f"be had from the Hugging Face hub: {first.rstrip('.')}. Check the path, or download the model "
            "first."
        ) from error


_LOADING = threading.Lock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one thread load: transformers changes global state meanwhile, and another would get no weights."""
    with _LOADING:
        yield


@_one_at_a_time()
def load_actor(
    config: ModelConfig,
    device: str = "",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    on_host: bool = False,
) -> Actor:
    """Load a causal language model of ``transformers``; of saved adapters, their base model with them merged.

    Args:
        config: the model.
        device: where the weights are; empty = cuda if there is one, else cpu.
        seed: initialises new adapters.
        tokenizer: replaces the model's own.
        on_host: the weights stay in host memory, see ``Actor.place``.

    Raises:
        ConfigError: it is no causal language model with a tokenizer, or does not support the attention.
    """
    from transformers import AutoModelForCausalLM

    name = config.name_or_path
    device = default_device(device)
    check_attention(config, device)
    dtype = weight_dtype(config, device)
    if config.autocast:
        warn_of_slow_bfloat16("model.autocast=true", "model.autocast=false", device)
    elif dtype is torch.bfloat16:
        warn_of_slow_bfloat16("model.dtype=bfloat16", "model.dtype=float32", device)
    tokenizer, architecture = read_settings(config, tokenizer)
    trust = {"trust_remote_code": config.trust_remote_code}
    with _load_errors(name):
        *adapters, base = models_below(name)
        if config.rope_scaling:
            scale_rope(architecture, config.rope_scaling)
        given = {"config": architecture, "dtype": dtype, **trust}
        attention = config.attn_implementation
        own = "sdpa" if attention == "auto" else attention
        try:
            model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=own, **given)
        except (ValueError, ImportError) as error:
            words = "scaled_dot_product_attention" if attention == "auto" else "(?i)attention|attn|kernel"
            if not re.search(words, str(error)):
                raise
            if attention != "auto":
                raise ConfigError(
                    f"model.attn_implementation={attention}: {first_line(error)} Set "
                    "model.attn_implementation=auto."
                ) from error
            # the model has attention of its own, or none (GPT-OSS, Mamba)
            model = AutoModelForCausalLM.from_pretrained(base, **given)
        for own in reversed(adapters):
            model = merge_adapters(model, own, read_weights(Path(own)))
            model.name_or_path = own  # what further adapters belong to
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # transformers makes one without files
            raise ConfigError(
                f"model.name_or_path {name!r} has a tokenizer without a word: its files (tokenizer.json, or "
                "vocab.json and merges.txt) are missing; copy them there from the model's source"
            )
    actor = _prepare(model if on_host else model.to(device), tokenizer, config, seed)
    if on_host:
        actor.place(device, on_host=True)
    return actor


def make_actor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ModelConfig | None = None,
    seed: int = 0,
) -> Actor:
    """Return the actor of a model that is already loaded, on its device and in its dtype.

    Args:
        model: a causal language model of ``transformers``, which FSDP, DDP or ``torch.compile`` may wrap. It
            is trained in place. If it is sharded, call this in every process: each gets a whole copy.
        tokenizer: None = the one of ``model.name_or_path``.
        config: adapters, gradient checkpointing, ... (not name, dtype and rope_scaling, which the model has).
        seed: initialises new adapters.

    Raises:
        ConfigError: no causal language model, no tokenizer, or a configuration that the model was not built
            from.
    """
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # as in ``load_actor``
    _check_tokenizer(tokenizer)
    if isinstance(model, (str, Path)):
        raise ConfigError(
            f"the actor must be a loaded model, got the name {str(model)!r}; give a name as "
            "model.name_or_path of the configuration, or get_actor_critic(name)[0]"
        )
    if isinstance(model, torch.nn.Module):
        model = unwrap_model(model)
        if compiled := [m for m in model.modules() if m._compiled_call_impl is not None]:
            # it would compile again for each shape of a run, which takes minutes
            _LOG.warning("the model's compile() is dropped; model.compile=true compiles it for a run")
            for module in compiled:
                module._compiled_call_impl = None
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        got = type(model).__name__
        raise ConfigError(
            f"the actor must be a causal language model of transformers (AutoModelForCausalLM), got {got}; "
            "for adapters give the base model, without PEFT, and set model.lora.rank"
        )
    if any(".base_layer." in name for name, _ in model.named_parameters()):
        raise ConfigError(
            "the model has adapters of PEFT in it, and a checkpoint would not be a whole model; merge them "
            "(merge_and_unload() of PEFT), or give the base model and set model.lora.rank"
        )
    _check_savable(model)
    if model.generation_config is None:
        model.generation_config = GenerationConfig.from_model_config(model.config)
    check_positions(model)
    config = replace(config or ModelConfig(), name_or_path=model.name_or_path)
    if tokenizer is None:
        try:
            tokenizer = load_tokenizer(config.name_or_path, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            problem = f"no tokenizer comes with the model ({config.name_or_path!r}); give tokenizer=..."
            raise ConfigError(problem) from error
    if config.attn_implementation != "auto":
        check_attention(config, str(model.device))
        model.set_attn_implementation(config.attn_implementation)
    return _prepare(model, tokenizer, config, seed)


def _check_savable(model: PreTrainedModel) -> None:
    """Raise a ``ConfigError`` for a model that its class could not load again from a checkpoint.

    Such are quantised models, models with a replaced layer that lacks a tensor of their class, and models
    whose layers share a tensor that their class does not tie. A model under Accelerate's autocast is refused
    as well.
    """
    if "_original_forward" in vars(model):
        raise ConfigError(
            "Accelerate prepared the model with mixed_precision, so it would be sampled and trained under "
            "autocast; give the model itself (accelerator.unwrap_model(model, keep_fp32_wrapper=False)). "
            "model.autocast=true computes in bfloat16"
        )
    named = list(model.named_parameters(remove_duplicate=False))
    if rounded := [name for name, p in named if not p.is_floating_point()]:
        raise ConfigError(f"the model is quantised ({rounded[0]!r} holds integers); {_WHOLE_MODEL}")
    tied = vars(model).get("all_tied_weights_keys") or {}
    seen: dict[int, str] = {}
    for name, parameter in named:
        first = seen.setdefault(id(parameter), name)
        if first != name and not tied.keys() & {first, name}:
            raise ConfigError(
                f"{first!r} and {name!r} are one tensor, which no checkpoint of transformers keeps; give a "
                "model whose layers have weights of their own"
            )
    known = ("torch.nn.", "transformers", type(model).__module__)
    foreign = [type(m).__name__ for m in model.modules() if not type(m).__module__.startswith(known)]
    if foreign:
        with torch.device("meta"):
            wanted = type(model)(model.config).state_dict().keys()
        if lacking := sorted(wanted - model.state_dict().keys()):
            raise ConfigError(
                f"the model has no {lacking[0]!r}, as its {foreign[0]} replaced a layer: no checkpoint of it "
                f"could be loaded. If it is quantised: {_WHOLE_MODEL}"
            )


_WHOLE_MODEL = "quantised weights are not trained; give the model as it was before, in float32 or bfloat16"


def _check_tokenizer(tokenizer: object) -> None:
    if tokenizer is not None and not hasattr(tokenizer, "eos_token_id"):
        name = f"{str(tokenizer)!r}" if isinstance(tokenizer, (str, Path)) else "NAME"
        raise ConfigError(
            f"tokenizer: expected a tokenizer of transformers, got {tokenizer!r}; give "
            f"AutoTokenizer.from_pretrained({name})"
        )


def unwrap_model(model: Any) -> Any:
    """Return the plain module inside a model that FSDP, DDP or ``torch.compile`` wraps.

    The weights of a sharded model are gathered from its ranks; each rank gets a whole copy.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    model = getattr(model, "_orig_mod", model)  # torch.compile
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.module
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return copy.deepcopy(model.module)
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    plain = type(model)(model.config).to(model.dtype)
    plain.load_state_dict(whole)
    plain.name_or_path = model.name_or_path
    return plain.to(next(iter(whole.values())).device)


def _prepare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelConfig, seed: int
) -> Actor:
    _let_save(model)
    if len(tokenizer) > (rows := model.get_input_embeddings().weight.shape[0]):
        _LOG.warning(
            "the tokenizer has %d tokens and the model embeds %d: a text with another token ends the run; "
            "take the model's own tokenizer, or call model.resize_token_embeddings(%d)",
            *(len(tokenizer), rows, len(tokenizer)),
        )
    if config.lora.rank > 0:
        model = add_adapters(model, config.lora, seed)
    if config.gradient_checkpointing:
        checkpoint_layers(model)
    if config.compile:
        compile_blocks(model)
    return Actor(model, tokenizer, config)


def checkpoint_layers(model: PreTrainedModel, *, on: bool = True) -> None:
    """Turn gradient checkpointing on or off: the backward pass then computes activations of layers again."""
    what, arguments = ("enable", [{"use_reentrant": False}]) if on else ("disable", [])
    try:
        methodcaller(f"activation_checkpointing_{what}", *arguments)(model)
    except AttributeError:  # before transformers 5.23, which warns of this name
        methodcaller(f"gradient_checkpointing_{what}", *arguments)(model)


def _let_save(model: PreTrainedModel) -> None:
    """Set ``do_sample`` if ``generation_config`` has sampling settings, which cannot be saved without it.

    Raises:
        ConfigError: transformers refuses to save the ``generation_config`` with ``do_sample``, too.
    """
    generation, problem = model.generation_config, ""
    for do_sample in () if generation is None else (generation.do_sample, True):
        generation.do_sample = do_sample
        try:
            generation.validate(strict=True)
            return
        except ValueError as error:
            problem = " ".join(str(error).split())
    if problem:
        raise ConfigError(
            f"transformers cannot save the model's generation_config: {problem.rstrip('.')}; correct "
            "model.generation_config, or generation_config.json of the model"
        )


def compile_blocks(model: nn.Module) -> int:
    """Let ``torch.compile`` compile ``model``'s norms and feed-forward blocks at first use; return how many.

    Whole layers would be compiled again for each layer and for every kind of cache and mask. These blocks
    take one tensor, so one compilation holds for sampling and training.
    """
    blocks = [
        module
        for module in model.modules()
        if re.search(r"(Norm|MLP|FeedForward)$", type(module).__name__)
        and not type(module).__module__.startswith("torch.nn")  # one kernel already, such as nn.LayerNorm
    ]
    if not blocks:
        raise ConfigError(
            f"model.compile: {type(model).__name__} has no module whose class is named ...Norm, ...MLP or "
            "...FeedForward; set model.compile=false"
        )
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if on_cpu and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        raise ConfigError(
            "model.compile: on a CPU torch.compile needs a C++ compiler and found neither g++ nor clang++; "
            "install one, name it in CXX, or set model.compile=false"
        )
    for block in blocks:
        block.compile(dynamic=True)
    return len(blocks)
