"""Loading of ``transformers`` models for rewards: settings, devices, dtypes and tokenizers.

A model is loaded once per (name, device, dtype). All plugins that name it share it while one of them lives.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from multitask_rl.config.schema.ranges import Count, Natural, OneOf, Settings
from multitask_rl.errors import ConfigError, UnavailableError, require_extra
from multitask_rl.models.tokens import load_tokenizer

if TYPE_CHECKING:
    import torch

P = TypeVar("P")

_FULL_BATCH_TOKENS = 512
"""Tokens of an input up to which a forward takes ``batch_size`` of them; of longer ones it takes fewer."""
_PARTS_AT_ONCE = 256
_BITS = ("int8", "int4")
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(kw_only=True, slots=True)
class ModelSettings(Settings):
    """Keys that every plugin with a ``transformers`` model has in a tasks file."""

    model_name: str = ""
    """Directory or Hugging Face id. Required."""
    device: str = "auto"
    """``cpu``, ``cuda:1``...; ``auto`` = the first accelerator, else the CPU."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16", "int8", "int4")] = "auto"
    """``auto`` = the checkpoint's; float32 on the CPU. ``int8`` and ``int4`` (CUDA only) keep the weights of
    linear layers in as many bits (extra ``quantized``); the output layer stays whole."""
    batch_size: Count = 16
    """Inputs per forward."""
    max_length: Natural = 2048
    """Tokens of an input, at most the model's limit (0 = that)."""
    prompt_column: str = "prompt"
    """Column with the question; a row without it is judged on the prompt that the actor saw."""


class LoadedModel:
    """A model in evaluation mode with its tokenizer. Weak-referenceable, so that it can be shared."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device
        self.lock = threading.Lock()
        """Held during a forward: two tasks may share the model from two threads."""

    def max_length(self, wanted: int) -> int:
        """Return the longest input in tokens: ``wanted``, or the model's limit if less or ``wanted`` is 0."""
        limits = [
            wanted or None,
            getattr(self.tokenizer, "model_max_length", None),
            getattr(self.model.config, "max_position_embeddings", None),
        ]
        return min(int(limit) for limit in limits if limit)

    def clean(self, text: str) -> str:
        """Return ``text`` without lone surrogates and strings that the tokenizer reads as control tokens."""
        specials = [token for token in self.tokenizer.all_special_tokens if len(token) > 1]
        return remove_special_tokens(_SURROGATES.sub("\ufffd", text), specials)

    def beginning(self, text: str, room: int) -> str:
        """Return the first ``room`` tokens of ``text``."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = encoded["offset_mapping"][:room]
        return text[: places[-1][1]] if places else ""

    def split(self, text: str, room: int, most: int) -> list[str] | None:
        """Return overlapping parts of ``text`` of at most ``room`` tokens: half of a part is in the next one.

        None: there are more than ``most`` parts. They are not read, so that no text costs more than that.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = encoded["offset_mapping"]
        starts = range(0, max(1, len(places) - room // 2), max(1, room // 2))
        if len(starts) > most:
            return None
        return [text[places[s][0] : places[min(s + room, len(places)) - 1][1]] for s in starts]


def batches(
    lengths: Sequence[int], batch_size: int, full_tokens: int = _FULL_BATCH_TOKENS
) -> Iterator[list[int]]:
    """Yield index lists of inputs of like length, longest first (memory fails early, if at all).

    A forward takes ``batch_size`` inputs, fewer of long ones: its memory is that of ``batch_size`` inputs of
    ``full_tokens`` tokens, or of one longer input.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        size = max(1, min(batch_size, batch_size * full_tokens // max(1, lengths[order[0]])))
        yield order[:size]
        order = order[size:]


def worst_of_parts(
    parts: Iterable[list[P]], costs_of: Callable[[list[P]], Sequence[float]]
) -> list[tuple[float, P] | None]:
    """Return for each list of parts the largest cost and its part; NaN wins; None where there is no part.

    A few hundred parts are held at once, so that long responses cost time and no memory.
    """
    worst: list[tuple[float, P] | None] = []
    waiting: list[tuple[int, P]] = []

    def judge() -> None:
        for (index, part), cost in zip(waiting, costs_of([part for _, part in waiting]), strict=True):
            known = worst[index]
            if known is None or math.isnan(cost) or cost > known[0]:
                worst[index] = (cost, part)
        waiting.clear()

    for index, own in enumerate(parts):
        worst.append(None)
        waiting += [(index, part) for part in own]
        if len(waiting) >= _PARTS_AT_ONCE:
            judge()
    if waiting:
        judge()
    return worst


_loaded: WeakValueDictionary[tuple[str, ...], LoadedModel] = WeakValueDictionary()
_loading = threading.Lock()


def resolve_device(device: str, plugin: str) -> torch.device:
    """Return the torch device named ``device``; ``auto`` is the first accelerator, else the CPU.

    Raises:
        ConfigError: not the name of a device.
        UnavailableError: no such device on this machine.
    """
    import torch

    if device in ("", "auto"):
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{plugin}: device {device!r} is not a torch device ({error}).") from error
    if resolved.type == "cpu":
        return resolved
    backend = getattr(torch, resolved.type, None)
    count = backend.device_count() if backend is not None and hasattr(backend, "device_count") else 0
    if (resolved.index or 0) >= count:
        there = ", ".join(f"{resolved.type}:{i}" for i in range(count)) or f"no {resolved.type} device"
        raise UnavailableError(
            f"{plugin}: device {device!r} does not exist on this machine, which has {there} and the cpu. "
            f"Set `device` in the plugin's configuration to one of them, or to 'auto'."
        )
    return resolved


def check_device(config: ModelSettings, plugin: str) -> torch.device:
    """Return the torch device of ``config``, which can keep weights in its dtype.

    Raises:
        ConfigError, UnavailableError: see ``resolve_device``; or 4 bits elsewhere than on CUDA.
        MissingExtraError: ``int8`` or ``int4`` without torchao.
    """
    device = resolve_device(config.device, plugin)
    if config.dtype == "int4" and device.type != "cuda":
        raise ConfigError(
            f"{plugin}: dtype int4 runs on CUDA only, as torchao has no kernel of 4 bits for {device.type}; "
            "set dtype: int8, or device: cuda"
        )
    if config.dtype in _BITS:
        needs = f"{plugin}: dtype {config.dtype} needs torchao"
        require_extra("torchao", "quantized", needs, ", or set dtype: auto")
    return device


def read_model_config(model_name: str, plugin: str) -> Any:
    """Return the ``transformers`` configuration of ``model_name`` without loading weights.

    Raises:
        ConfigError: ``model_name`` is empty.
        UnavailableError: no such model directory, nor in the local cache, nor (online) on the hub.
    """
    from transformers import AutoConfig

    if not model_name:
        raise ConfigError(f"{plugin}: `model_name` is required: a model directory or a Hugging Face id.")
    try:
        return AutoConfig.from_pretrained(model_name)
    except (OSError, ValueError, KeyError) as error:
        told = f"{plugin}: the model {model_name!r} cannot be read."
        if model_name.startswith(("/", ".", "~")) and not Path(model_name).exists():
            raise UnavailableError(f"{told} There is no such directory; correct the path.") from error
        raise UnavailableError(
            f"{told} It is neither a directory with a config.json that this version of transformers knows, "
            f"nor a model in the local Hugging Face cache, nor one that could be downloaded. Give a path, or "
            f"download it first (`hf download {model_name}`). Cause: {str(error).splitlines()[0]}"
        ) from error


def load_model(auto_class: str, config: ModelSettings, plugin: str) -> LoadedModel:
    """Return the model of ``config`` with its tokenizer, loaded at most once.

    Args:
        auto_class: ``AutoModelForSequenceClassification`` or ``AutoModelForCausalLM``.
        config: names model, device and dtype.
        plugin: name for errors.

    Raises:
        ConfigError: the model is not of ``auto_class``, lacks weights, or cannot have the dtype; see
            ``check_device``.
        UnavailableError: the model cannot be read.
    """
    target, dtype = check_device(config, plugin), config.dtype
    if dtype == "auto" and target.type == "cpu":
        dtype = "float32"
    key = (auto_class, config.model_name, str(target), dtype)
    with _loading:
        loaded = _loaded.get(key)
        if loaded is None:
            loaded = _load(auto_class, config.model_name, target, dtype, plugin)
            _loaded[key] = loaded
    return loaded


def _load(auto_class: str, model_name: str, device: torch.device, dtype: str, plugin: str) -> LoadedModel:
    import torch
    import transformers

    from multitask_rl.attention.products import multiply_with_onednn

    # its progress bars would break the run's own progress lines
    transformers.utils.logging.disable_progress_bar()
    config = read_model_config(model_name, plugin)
    multiply_with_onednn(getattr(config.get_text_config(), "hidden_size", 0))
    loader: Callable[..., Any] = getattr(transformers, auto_class).from_pretrained
    full = dtype
    if dtype in _BITS:
        full = "float32" if device.type == "cpu" else "bfloat16"
    torch_dtype = "auto" if full == "auto" else getattr(torch, full)
    try:
        tokenizer = load_tokenizer(model_name)
        model, report = loader(model_name, config=config, dtype=torch_dtype, output_loading_info=True)
    except (OSError, ValueError) as error:
        # files of weights that are absent, or files of another kind of model
        kind = UnavailableError if isinstance(error, OSError) else ConfigError
        raise kind(
            f"{plugin}: {model_name!r} cannot be loaded as {auto_class}: {str(error).splitlines()[0]}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        is_classifier = auto_class.endswith("Classification")
        raise ConfigError(
            f"{plugin}: {model_name!r} lacks the weights {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}, which would be random: it would judge at random; give a "
            f"model trained as {'a classifier' if is_classifier else 'a language model'}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if model.config.pad_token_id is None:
        # A decoder classifier finds its last token by this id; without it a padded batch is refused.
        model.config.pad_token_id = tokenizer.pad_token_id
    model = model.to(device).eval()
    if dtype in _BITS:
        _quantize(model, dtype, plugin)
    return LoadedModel(model, tokenizer, device)


def _quantize(model: Any, dtype: str, plugin: str) -> None:
    """Round the weights of the linear layers below the output layer, in place."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    try:
        bits = (
            Int8WeightOnlyConfig()
            if dtype == "int8"
            else Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")
        )
        quantize_(model.base_model, bits)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{plugin}: torchao cannot keep {type(model).__name__} in {dtype}: {error}; set dtype: auto"
        ) from error


def remove_special_tokens(text: str, specials: Sequence[str]) -> str:
    """Return ``text`` without strings a tokenizer would read as control tokens. Linear in ``text``.

    A response that spells ``<|eot_id|>`` could otherwise close its own turn and speak as the judge. Removing
    one may form another, so it is repeated; where tokens are nested deeper, a mark takes their place.
    """
    if not any(token in text for token in specials):
        return text
    pattern = re.compile("|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True)))
    for _ in range(4):
        text = pattern.sub("", text)
    return pattern.sub("\ufffd", text)
