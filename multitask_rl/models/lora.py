"""Low-rank adapters through ``peft`` (extra ``peft``)."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from multitask_rl.boundary.printable import first_line
from multitask_rl.config.run import LoraConfig
from multitask_rl.errors import CheckpointError, ConfigError, import_extra
from multitask_rl.models.weights import WeightStream, like_of
from multitask_rl.seeding import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_adapters(model: Any, config: LoraConfig, seed: int = 0) -> Any:
    """Wrap ``model`` so that only adapters of rank ``config.rank`` train; ``seed`` is the run's."""
    peft = import_extra("peft", "peft", "model.lora.rank > 0 needs peft")
    targets: Any = config.target_modules
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    # adapters start at random; they depend on the seed only
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        if model.name_or_path and Path(model.name_or_path).is_dir():
            # written beside the adapters, which may be read from another working directory
            model.name_or_path = str(Path(model.name_or_path).resolve())
        # peft changes the model before it finds some mistakes
        linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        layers = ", ".join(sorted(linear))
        try:
            adapted = peft.get_peft_model(model, settings)
        except ValueError as error:
            if config.dropout and "lora_dropout" in str(error):
                raise ConfigError(
                    f"model.lora.dropout={config.dropout:g}: peft has no dropout before adapters of experts; "
                    f"set it to 0, or model.lora.target_modules to some of {layers}"
                ) from error
            raise ConfigError(
                f"model.lora.target_modules={config.target_modules!r}: {error}; give all-linear or some of "
                f"{layers}"
            ) from error
    _check_tied(adapted, f"model.lora.target_modules={config.target_modules!r}")
    return adapted


def _check_tied(model: Any, where: str) -> None:
    """Raise a ConfigError if a weight that embeddings and output head share has adapters.

    Merged into one of them, they would change the other.
    """
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = None not in layers and layers[0].weight is layers[1].weight
    if is_tied and any("lora_" in name for layer in layers for name, _ in layer.named_parameters()):
        raise ConfigError(
            f"{where}: the model's embeddings and output head are one weight, and adapters of one of them "
            "cannot be merged; leave both out"
        )


def models_below(name: str) -> list[str]:
    """Return ``name`` and, while the last one is a directory of adapters, the model that these name.

    The last one holds whole weights: adapters may have been trained over a model with adapters merged in.

    Raises:
        ConfigError: adapters name no model.
    """
    found = [name]
    while (below := _named_model(found[-1])) not in ("", *found):
        found.append(below)
    return found


def _named_model(name: str) -> str:
    file = Path(name) / "adapter_config.json"
    if not file.is_file():
        return ""
    found = json.loads(file.read_text(encoding="utf-8"))
    base = str(found.get("base_model_name_or_path") or "") if isinstance(found, dict) else ""
    if not base:
        raise ConfigError(
            f"{name} holds adapters that name no model; add base_model_name_or_path to adapter_config.json"
        )
    noted = Path(name) / _BASE
    if Path(base).is_absolute() and not Path(base).is_dir() and noted.is_file():
        moved = (Path(name) / json.loads(noted.read_text(encoding="utf-8")).get("path", base)).resolve()
        return str(moved) if moved.is_dir() else base
    return base


def merge_adapters(model: PreTrainedModel, directory: str, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return ``model`` with the adapters of ``directory``, which holds ``weights``, merged in; changes it.

    Raises:
        ConfigError: the adapters do not fit the model, were trained over other weights, or cannot be merged.
        MissingExtraError: ``peft`` is not installed.
    """
    peft = import_extra("peft", "peft", f"{directory} holds adapters and needs peft")
    # embeddings of a vocabulary that grew lie beside the adapters and replace the base's
    if is_other_base(Path(directory), base_of(model, {n.removeprefix("base_model.model.") for n in weights})):
        raise ConfigError(
            f"the adapters of {directory} were trained over other weights than those of "
            f"{model.name_or_path}; name their base model in base_model_name_or_path of adapter_config.json"
        )
    embedding = next(name for name, own in model.named_modules() if own is model.get_input_embeddings())
    if (grown := weights.get(f"base_model.model.{embedding}.weight")) is not None:
        model.resize_token_embeddings(grown.shape[0], mean_resizing=False)
    try:
        adapted = peft.PeftModel.from_pretrained(model, directory)
        _check_tied(adapted, f"the adapters of {directory}")
        merged: PreTrainedModel = adapted.merge_and_unload()
    except (RuntimeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the adapters of {directory} cannot be merged into {model.name_or_path}: {first_line(error)} "
            "Name the base model that they were trained on."
        ) from error
    return merged.requires_grad_()  # peft freezes what is below its adapters


class MergedWeights(WeightStream):
    """The weights of a base model, each with its adapters merged in when it is read.

    ``merge_adapter`` and ``unmerge_adapter`` would replace the base weights, which are the reference policy
    and in no checkpoint, by ``(w + d) - d``: rounding that grows with every step.

    Args:
        base: weights of the base model; an update does not change them.
        adapters: name of a weight -> the layer of peft with its adapters.
        device: where they are merged.
    """

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, Any], device: torch.device) -> None:
        self.base, self.adapters, self.device = base, adapters, device
        super().__init__(like_of(base), self._merge)

    @torch.no_grad()
    def _merge(self, bucket: Sequence[str]) -> dict[str, Tensor]:
        merged = {}
        for name in bucket:
            own = merged[name] = self.base[name].detach().to(self.device, copy=True)
            if (layer := self.adapters.get(name)) is not None:
                for adapter in layer.active_adapters:
                    own += layer.get_delta_weight(adapter).to(own)
        return merged

    def over(self, base: Mapping[str, Tensor]) -> MergedWeights:
        """Return a copy for another node: these adapters, without the layers below them, over ``base``.

        Call ``to_device`` there.
        """
        return MergedWeights(base, {n: _above(layer) for n, layer in self.adapters.items()}, self.device)

    def to_device(self) -> None:
        """Move the adapters where they are merged."""
        for layer in self.adapters.values():
            layer.to(self.device)


def _above(layer: Any) -> Any:
    """Return a copy of a layer of peft on the CPU, without the layer that it adapts."""
    light = copy.copy(layer)
    light._modules = {name: part for name, part in layer._modules.items() if name != "base_layer"}
    if (name := _parameter_of(layer)) is not None:  # peft reads its type
        light._modules["base_layer"] = nn.Module()
        light.base_layer.register_buffer(name, torch.empty(0, dtype=layer.get_param().dtype))
    return copy.deepcopy(light).cpu()


def _parameter_of(layer: Any) -> str | None:
    """Return the parameter's name if a layer of peft adapts a parameter (all experts' weights), else None."""
    name: str | None = getattr(layer, "parameter_name", None)
    return name


def _adapted_weight(name: str, layer: Any) -> str:
    """Return the name of the weight that ``layer`` of peft, itself named ``name``, adapts."""
    below = layer
    while hasattr(below, "base_layer"):  # of two parameters of a module, one layer adapts the other
        below, name = below.base_layer, f"{name}.base_layer"
    return f"{name}.{_parameter_of(layer) or 'weight'}"


def merged_weights(model: Any, weights: Mapping[str, Tensor] | None) -> MergedWeights:
    """Return the weights of the base model with the adapters merged in; the model is unchanged.

    ``weights``: those of the base model, by name in ``model``; None = they are in ``model``.
    """
    from peft.tuners.lora import LoraLayer

    base: Mapping[str, Tensor] = model.state_dict() if weights is None else weights
    like = like_of(base)
    names = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): name
        for name in like
        if "lora_" not in name
    }
    adapted = {
        _adapted_weight(name, module): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    return MergedWeights(
        WeightStream(
            {short: like[name] for short, name in names.items()},
            lambda bucket: {short: base[names[short]] for short in bucket},
        ),
        {short: adapted[name] for short, name in names.items() if name in adapted},
        next(model.parameters()).device,
    )


_BASE = "base.json"
"""File beside adapters that says over which weights they were trained."""
_SAMPLED = 64
"""Weights of each tensor that ``base_of`` looks at."""


def base_of(model: nn.Module, replaced: Collection[str] = ()) -> dict[str, Any]:
    """Return ``dtype`` and ``means`` of the weights below the adapters of ``model``.

    There is a mean for each tensor, of ``_SAMPLED`` or more of its values, or of all; None for those named in
    ``replaced``.
    """
    below = {name: value.detach() for name, value in model.named_parameters() if "lora_" not in name}
    chosen = {n: value.reshape(-1)[:: max(1, value.numel() // _SAMPLED)] for n, value in below.items()}
    means = [None if n in replaced else float(values.double().mean()) for n, values in chosen.items()]
    return {"dtype": " ".join(sorted({str(value.dtype) for value in below.values()})), "means": means}


def save_base(base: Mapping[str, Any], name: str, directory: Path) -> None:
    """Write what ``base_of`` returned of the model ``name`` beside the adapters in ``directory``.

    If the model is a directory, its path relative to ``directory`` is noted for the case that both are moved.
    """
    path = {"path": os.path.relpath(name, directory.resolve())} if Path(name).is_absolute() else {}
    (directory / _BASE).write_text(json.dumps({**base, **path}), encoding="utf-8")


def is_other_base(directory: Path, base: Mapping[str, Any]) -> bool:
    """Return whether the adapters in ``directory`` were trained over other weights than those of ``base``.

    ``base`` is what ``base_of`` returns. False where it cannot be known: the weights have another type, or
    another program wrote the adapters.
    """
    file = directory / _BASE
    if not file.is_file():
        return False
    known = json.loads(file.read_text(encoding="utf-8"))
    if known["dtype"] != base["dtype"]:
        return False  # rounded weights cannot be compared
    if len(known["means"]) != len(base["means"]):
        return True
    pairs = [(a, b) for a, b in zip(known["means"], base["means"], strict=True) if b is not None]
    num_unlike = sum(not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-7) for a, b in pairs)
    if known["dtype"] == str(torch.float32):
        return num_unlike > 0
    # merged adapters round differently per processor: a few low-precision weights differ by their last bit
    is_near = all(math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-5) for a, b in pairs)
    return num_unlike > len(pairs) / 20 or not is_near


def load_adapters(
    model: Any, directory: Path, weights: Mapping[str, Tensor], base: Mapping[str, Any]
) -> None:
    """Restore the adapters that ``Actor.save`` wrote to ``directory``, in place.

    ``weights`` are those of the directory, ``base`` is what ``base_of`` returns of the model.

    Raises:
        CheckpointError: they do not fit: in names, shapes, scale, or the weights below them.
    """
    import peft

    own = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = {name: value for name, value in weights.items() if "lora_" in name}
    if not saved:
        raise CheckpointError(
            "the checkpoint holds a whole model and no adapters: go on with model.lora.rank=0, or begin a "
            "new run in another output_dir with model.name_or_path set to the checkpoint's actor directory"
        )
    wrong = [
        name
        for name in sorted(own.keys() | saved.keys())
        if name not in own or name not in saved or own[name].shape != saved[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's adapters are not the model's: {len(wrong)} are on one side only or differ in "
            f"shape, the first is {wrong[0]!r}. The checkpoint has {_settings_of(saved)}, the model has "
            f"{_settings_of(own)}; set model.lora.* and model.name_or_path as they were"
        )
    alpha = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"]
    if alpha != (own_alpha := model.peft_config[model.active_adapter].lora_alpha):
        raise CheckpointError(
            f"the checkpoint's adapters were trained with model.lora.alpha={alpha:g}, which scales them, and "
            f"this run has {own_alpha:g}; set it as it was"
        )
    if is_other_base(directory, base):
        raise CheckpointError(
            "the checkpoint's adapters were trained over other weights than those of the present base model; "
            "set model.name_or_path as it was"
        )
    peft.set_peft_model_state_dict(model, dict(weights))


def _settings_of(adapters: Mapping[str, Tensor]) -> str:
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters})
    ranks = sorted({v.shape[1 if "embedding" in n else 0] for n, v in adapters.items() if ".lora_A" in n})
    return (
        f"{len(adapters)} tensors with model.lora.rank={'/'.join(map(str, ranks))} "
        f"model.lora.target_modules={','.join(modules)}"
    )
