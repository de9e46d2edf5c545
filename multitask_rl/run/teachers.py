"""The teachers of tasks of type ``distill``: frozen models beside the actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, control_ids, load_actor
from multitask_rl.run.checkpoint import model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_teachers(
    specs: Mapping[str, TaskSpec],
    actor: Actor,
    config: ModelConfig,
    seed: int,
    recorded: Mapping[str, Any],
) -> dict[str, PreTrainedModel]:
    """Return the teacher of every task of ``specs`` that names one, on the actor's device.

    Tasks with the same teacher share one model. If ``teacher`` of a task is a run, its newest checkpoint is
    loaded and ``teacher`` is set to that checkpoint, so that ``config.yaml`` records it. ``recorded``: the
    tasks of ``config.yaml``. A resumed run takes the checkpoint recorded there while it exists, even if the
    teacher's run has newer ones.

    Raises:
        ConfigError: a teacher cannot be loaded, or has another vocabulary than the actor.
    """
    plain = replace(config, lora=LoraConfig(), gradient_checkpointing=False, compile=False, autocast=False)
    loaded: dict[str, PreTrainedModel] = {}
    for name, spec in specs.items():
        if not spec.teacher:
            continue
        where = f"{spec.where}.teacher"
        former = str((recorded.get(name) or recorded.get(spec.renamed_from) or {}).get("teacher", ""))
        try:
            is_same = Path(spec.teacher) in Path(former).parents and Path(former).is_dir()
            directory = spec.teacher = former if is_same else model_directory(spec.teacher)
            if directory in loaded:
                continue
            teacher = load_actor(replace(plain, name_or_path=directory), str(actor.device), seed)
        except ConfigError as error:
            is_gone = Path(spec.teacher).parts[-3:-2] == ("checkpoints",) and not Path(spec.teacher).exists()
            run = Path(spec.teacher).parents[2] if is_gone else ""
            hint = (
                f"; the run no longer keeps this checkpoint: tasks.{name}.teacher={run} takes its newest one"
            )
            raise ConfigError(f"{where}: {error}{hint if is_gone else ''}") from error
        own, others = (
            {token: i for token, i in t.get_vocab().items() if token not in control_ids(t)}
            for t in (actor.tokenizer, teacher.tokenizer)
        )
        if own != others:
            different = sum(own.get(token) != i for token, i in others.items())
            raise ConfigError(
                f"{where}: {spec.teacher} has another vocabulary than the actor ({len(others)} and "
                f"{len(own)} tokens, {different} not the same), so their distributions cannot be compared; "
                "take a teacher of the actor's family, or train on its responses with type sft"
            )
        model = teacher.model
        rows = int(actor.model.config.get_text_config().vocab_size)
        known = int(model.config.get_text_config().vocab_size)
        if known != rows:  # padding, or control tokens
            model.resize_token_embeddings(rows, mean_resizing=False)
            with torch.no_grad():  # new rows as the actor's, not random: a resumed run has the same teacher
                for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                    if layer is not None:
                        layer.weight[known:] = layer.weight[:known].mean(dim=0)
        loaded[directory] = model.requires_grad_(False).eval()
    return {name: loaded[spec.teacher] for name, spec in specs.items() if spec.teacher}
