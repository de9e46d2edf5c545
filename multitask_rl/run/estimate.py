"""What a run will need before it begins: memory by part, disk, and the time of a step.

Memory and disk are counted from the model's shape and the configuration; every response is taken to be as
long as it may be. Times are measured: a model with two of the same layers samples and learns once on the
device of the run.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from multitask_rl.boundary.allowance import limit_threads, usable_memory
from multitask_rl.boundary.printable import first_line, shown_path
from multitask_rl.config.devices import actor_devices
from multitask_rl.config.run import ModelConfig, RunConfig
from multitask_rl.curriculum.quotas import normalise, raise_to_floors
from multitask_rl.data.render import render_answer, render_prompt
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import DTYPES, default_device, weight_dtype
from multitask_rl.models.lora import models_below
from multitask_rl.plugins import build_config
from multitask_rl.rollout.decoder import cache_argument
from multitask_rl.rollout.snapshot import sampling_weights
from multitask_rl.run.checkpoint import model_directory
from multitask_rl.run.plan import RunPlan
from multitask_rl.step.task_state import run_sampling
from multitask_rl.training.eight_bit import BLOCK
from multitask_rl.training.forward import KEPT_BYTES, SLICE_CELLS

LOGIT_COPIES = 3
"""Tensors of the size of the logits at the peak of a backward pass (benchmarks/results/memory.json).

A CPU goes through them in blocks and has about two. An entropy bonus has two more; they are not counted."""
KEPT_BESIDE = 4
"""Checkpoints that may stay beside the newest: two judged good, the best, and that of the former tasks."""
BYTES_PER_TOKEN = 90
"""Bytes per token of a stored rollout: id, log-probability and text as JSON."""
PROBE_LAYERS, PROBE_TOKENS = 2, 1024
ROWS_READ = 32
"""Rows of each task whose prompts are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the memory of a causal language model depends on."""

    parameters: int
    trainable: int
    """Number of trained weights; with adapters, theirs."""
    layers: int
    hidden: int
    inner: int
    """Width of the feed-forward blocks; in a mixture of experts, of all experts that one token uses."""
    key_value: int
    """Numbers per token in a layer's key-value cache."""
    vocabulary: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Samples and tokens of one step; every response is as long as it may be."""

    prompts: float
    samples: float
    prompt_tokens: float
    """Mean tokens of a prompt."""
    new_tokens: float
    """Mean tokens of a response."""


def read_shape(config: ModelConfig) -> ModelShape:
    """Return the shape of the model that ``config`` names, without loading its weights.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    own, model = _empty_model(config)
    text = own.get_text_config()
    keys = text.to_dict()
    experts = keys.get("num_experts_per_tok")
    width = (keys.get("moe_intermediate_size") if experts else None) or keys.get("intermediate_size")
    heads = text.num_attention_heads
    head = keys.get("head_dim") or text.hidden_size // heads
    parameters = sum(p.numel() for p in model.parameters())
    trainable = parameters
    if rank := config.lora.rank:
        names = config.lora.target_modules
        targets = None if names == "all-linear" else {name.strip() for name in names.split(",")}
        skipped = model.get_output_embeddings()
        trainable = sum(
            rank * (m.in_features + m.out_features)
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear)
            and (name.rpartition(".")[2] in targets if targets else m is not skipped)
        )
    return ModelShape(
        parameters=parameters,
        trainable=trainable,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=(width or 4 * text.hidden_size) * (experts or 1),
        key_value=2 * head * (keys.get("num_key_value_heads") or heads),
        vocabulary=text.vocab_size,
    )


def step_workload(plan: RunPlan, tokenizer: Any) -> Workload:
    """Return the samples and tokens of one step of ``plan``, with the tasks' weights as shares."""
    weights = normalise({name: plan.specs[name].weight for name in plan.trained})
    shares = raise_to_floors(weights, {name: plan.specs[name].min_share or 0.0 for name in plan.trained})
    prompts = plan.config.batch.prompts_per_step
    samples = prompt_tokens = new_tokens = 0.0
    for name, share in shares.items():
        spec, rows = plan.specs[name], plan.rows[name][0]
        stride = max(1, len(rows) // ROWS_READ)
        lengths = [
            len(render_prompt(spec, rows[i], tokenizer)[1])
            for i in range(0, min(len(rows), stride * ROWS_READ), stride)
        ]
        most = plan.config.rollout.max_prompt_tokens
        kept = [n for n in lengths if not most or n <= most] or lengths
        own = share * prompts
        group = spec.group_size or plan.config.batch.group_size
        longest: float = spec.sampling_params(run_sampling(plan.config)).max_new_tokens
        if spec.kind == "sft":  # one given answer
            read = range(0, min(len(rows), stride * ROWS_READ), stride)
            answers = [len(render_answer(spec, rows[i], tokenizer)) for i in read]
            group, longest = 1, sum(answers) / len(answers)
        if spec.environment:
            longest = min(spec.max_response_tokens or math.inf, longest * spec.max_turns)
        samples += own * group
        prompt_tokens += own * sum(kept) / len(kept)
        new_tokens += own * group * longest
    return Workload(
        prompts=prompts,
        samples=samples,
        prompt_tokens=prompt_tokens / prompts,
        new_tokens=new_tokens / samples,
    )


def estimate_memory(
    plan: RunPlan, shape: ModelShape, work: Workload, device_bytes: float = 0.0
) -> dict[str, float]:
    """Return bytes by part on the actor's device (or of a learner rank).

    The key-value cache (``sampling``) and the activations (``learning``) do not exist at the same time. So
    ``peak`` is the sum of the other parts and the larger of these two. ``device_bytes``: memory of the whole
    device, of which vLLM reserves a share; 0 = a CPU.
    """
    config = plan.config
    width = _width(plan)
    holders = plan.num_parts
    learner = {
        "gradients": 4.0 * shape.trainable,
        "optimizer": _optimizer_bytes(plan, shape.trainable, width),
    }
    parts: dict[str, float] = {
        "weights": shape.parameters * width / holders,
        **plan.backend_class.learner_bytes(config, shape.trainable, learner),
        "reference": shape.parameters * width * has_reference(plan) / holders,
    }
    if actor_devices(config).is_offloaded:
        # embedding, head and one layer: their weights, the gathered weights of the next layer or gradients
        # of the same size, and gradients in float32
        outside = 2 * shape.vocabulary * shape.hidden
        layer = max(0.0, shape.parameters - outside) / shape.layers
        parts = {"weights": (outside + layer) * (2 * width + 4)}
    parts |= {
        "copy to sample from": shape.parameters * _copy_width(plan, width),
        "average of the reference": 4 * shape.parameters * (has_average(plan) and width < 4),
        "teachers": _teacher_bytes(plan, width),
    }
    if critic := _critic_shape(plan, shape.parameters):
        own, its_width = critic
        parts["critic"] = own * (its_width + 4) + _optimizer_bytes(plan, own, its_width)
    parts["samples of a step"] = work.samples * sample_bytes(work.new_tokens) * _is_on_host(plan)
    batch = config.batch
    rows = _rows_at_once(config, work)
    cached = rows * (work.new_tokens + work.prompt_tokens * work.prompts / work.samples)
    sampling = cached * shape.layers * shape.key_value * width + 4 * 4 * rows * shape.vocabulary
    step_tokens = work.prompts * work.prompt_tokens + work.samples * work.new_tokens
    tokens = min(batch.tokens_per_microbatch, step_tokens / batch.num_minibatches)
    answers = tokens * work.samples * work.new_tokens / step_tokens
    learning = activation_bytes(
        shape,
        tokens,
        2 if config.model.autocast else width,
        is_checkpointed=config.model.gradient_checkpointing,
        answers=answers,
    )
    if reserved := _vllm_bytes(plan, shape.parameters * width, device_bytes):
        parts["copy to sample from"] = 0.0
        sleeps = bool(config.rollout.engine_config.get("sleep_level"))
        parts["vLLM"], sampling = (0.0, reserved) if sleeps else (reserved, 0.0)
    parts = {name: float(size) for name, size in parts.items() if size}
    peak = sum(parts.values()) + max(sampling, learning)
    return {**parts, "sampling": sampling, "learning": learning, "peak": peak}


def estimate_host_memory(plan: RunPlan, shape: ModelShape, work: Workload) -> dict[str, float]:
    """Return bytes by part in the host memory of a run on GPUs, of all its ranks; empty for one on a CPU."""
    if _is_on_host(plan):
        return {}
    config = plan.config
    actor, width = actor_devices(config), _width(plan)
    weights = shape.parameters * width * (1 + has_reference(plan))
    parts = {"samples of a step": work.samples * sample_bytes(work.new_tokens)}
    if actor.is_offloaded:
        copies = len(actor.names) / plan.num_parts
        parts["weights"] = copies * weights
        parts["gradients"] = copies * 4 * shape.trainable
        parts["optimizer"] = copies * _optimizer_bytes(plan, shape.trainable, width)
    else:
        parts["weights until they are divided"] = weights * (actor.begins_on_host and plan.num_parts > 1)
        parts["optimizer"] = 12 * shape.trainable * (config.optimizer.moments == "host")
    return {name: float(size) for name, size in parts.items() if size}


def _vllm_bytes(plan: RunPlan, weights: float, device_bytes: float) -> float:
    """Return the bytes that vLLM reserves on the actor's device, its weights included; 0 without vLLM."""
    rollout = plan.config.rollout
    if rollout.engine != "vllm" or plan.config.executor != "local" or not device_bytes:
        return 0.0
    own = build_config(plan.engine_class, rollout.engine_config, where="rollout.engine_config")
    cache = own.kv_cache_memory_bytes
    if cache:
        return float(weights / own.tensor_parallel_size + cache)
    return float(own.gpu_memory_utilization * device_bytes)


def sample_bytes(tokens: float) -> float:
    """Return the bytes of a sample of ``tokens`` sampled tokens in host memory.

    Beside its objects, a token has its id, log-probability, text and four numbers more.
    """
    return 1500 + tokens * (36 + 32 + 4 + 4 * 4)


def activation_bytes(
    shape: ModelShape,
    tokens: float,
    width: int,
    *,
    is_checkpointed: bool = False,
    answers: float | None = None,
) -> float:
    """Return the bytes that learning from ``tokens`` at once needs beside weights, gradients and optimizer.

    ``width``: bytes of a number. ``answers``: number of tokens with logits (default: all).
    """
    per_layer = 6 * shape.hidden + shape.key_value + 4 * shape.inner
    if shape.trainable < shape.parameters:  # adapters: the output of every product once more
        per_layer += 3 * shape.hidden + shape.key_value + 2 * shape.inner
    per_token = shape.layers * (shape.hidden if is_checkpointed else per_layer) + per_layer * is_checkpointed
    logits = (tokens if answers is None else answers) * shape.vocabulary
    head = 4 * LOGIT_COPIES * min(SLICE_CELLS, logits) + min(KEPT_BYTES, width * logits)
    return float(tokens * per_token * width + head)


def moment_bytes(trainable: int, width: int, *, packed: bool = False) -> float:
    """Return the bytes of AdamW's two moments, and of the float32 masters of 16-bit weights.

    ``packed``: as ``optimizer.moments=int8`` keeps them in memory. Checkpoints have them in float32.
    """
    masters = 0 if width == 4 else 4
    return trainable * (masters + (2 + 8 / BLOCK if packed else 8))


def _optimizer_bytes(plan: RunPlan, trainable: int, width: int) -> float:
    """Return the bytes of moments and masters in the memory of the actor's device."""
    moments = plan.config.optimizer.moments
    if moments != "host":
        return moment_bytes(trainable, width, packed=moments == "int8")
    return float(12 * trainable * _is_on_host(plan))  # two moments and a master each


def _is_on_host(plan: RunPlan) -> bool:
    return not default_device(plan.devices.get("actor", "")).startswith("cuda")


def learner_bytes(parameters: int, trainable: int, width: int) -> float:
    """Return the bytes of weights, gradients and optimizer."""
    return parameters * width + 4 * trainable + moment_bytes(trainable, width)


def estimate_disk(plan: RunPlan, parameters: int, trainable: int, tokens: float) -> dict[str, float]:
    """Return bytes by kind of file that a run writes; ``total`` is the most on disk at a time.

    Args:
        plan: the run.
        parameters: number of the actor's weights.
        trainable: number of trained weights; with adapters, theirs.
        tokens: mean length of a stored response, with its prompt if that is known.
    """
    config = plan.config
    width = _width(plan)
    saved = parameters if trainable == parameters else trainable
    one = saved * width + moment_bytes(trainable, width) + 4 * parameters * has_average(plan)
    if critic := _critic_shape(plan, parameters):
        one += critic[0] * critic[1] + moment_bytes(*critic)
    number = num_checkpoints(config)
    per_step = config.batch.prompts_per_step * config.batch.group_size
    if config.tracking.store_rollouts >= 0:
        per_step = min(per_step, len(plan.trained) * config.tracking.store_rollouts)
    has_own_weights = config.executor == "ray" or not plan.engine_class.shares_weights
    parts = {
        "checkpoints": float(one * (number + (number > 1))),  # a new one is whole before an old one goes
        "reference": float(parameters * width * has_reference(plan)),
        "start of the engine": float(parameters * width * has_own_weights),
        "rollouts": BYTES_PER_TOKEN * tokens * per_step * config.max_steps,
    }
    parts = {name: size for name, size in parts.items() if size}
    return {"a checkpoint": float(one), **parts, "total": sum(parts.values())}


def disk_text(config: RunConfig, disk: Mapping[str, float]) -> str:
    """Return what ``estimate_disk`` says, and whether the disk has room for it."""
    number = num_checkpoints(config)
    parts = {k: v for k, v in disk.items() if k not in ("a checkpoint", "total")}
    free = free_bytes(Path(config.output_dir))
    text = (
        f"{in_units(disk['total'])} at most in {shown_path(config.output_dir)} ({sizes(parts)}; a checkpoint "
        f"{in_units(disk['a checkpoint'])}, {number} are kept), {in_units(free)} are free"
    )
    if disk["total"] <= free:
        return text
    return (
        f"{text}: TOO LITTLE; set checkpoint.keep=1, a higher checkpoint.every, model.lora.rank=16, or an "
        "output_dir on a larger disk"
    )


def num_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints the run keeps at most: every evaluation may judge its weights good."""
    every, evaluated = config.checkpoint.every, config.eval.every if config.guard.enabled else 0
    reach = max(1, config.guard.rollback_steps // 2)
    written, good_at = 2, -math.inf  # the first and the last always
    for step in sorted({s for n in (every, evaluated) if n for s in range(n, config.max_steps, n)}):
        is_judged = evaluated > 0 and step % evaluated == 0
        if (every and step % every == 0) or step - good_at >= min(every or reach, reach):
            written, good_at = written + 1, step if is_judged else good_at
    return min(written, config.checkpoint.keep + KEPT_BESIDE)


def has_reference(plan: RunPlan) -> bool:
    """Whether the run keeps a copy of the first weights."""
    specs = plan.specs
    return plan.needs_reference({n for n in plan.trained if specs[n].weight > 0 or specs[n].min_share})


def has_average(plan: RunPlan) -> bool:
    """Whether the reference follows the actor, so that its average is kept in float32."""
    return has_reference(plan) and plan.config.model.reference_decay < 1.0


def _critic_shape(plan: RunPlan, parameters: int) -> tuple[int, int] | None:
    """Return (weights, bytes per weight) of a critic with its own model; None = no such critic.

    ``parameters``: number of the actor's weights.
    """
    critic, model = plan.config.critic, plan.config.model
    if critic.trunk != "separate":
        return None
    width = _width(plan) if critic.dtype == "auto" else DTYPES[critic.dtype].itemsize
    return _parameters(model, critic.name_or_path) if critic.name_or_path else parameters, width


def _teacher_bytes(plan: RunPlan, width: int) -> int:
    """Return the bytes of the teachers' weights; a model that teaches several tasks is loaded once."""
    names = {spec.teacher for spec in plan.specs.values() if spec.teacher}
    return sum(_parameters(plan.config.model, str(model_directory(name))) for name in names) * width


def _parameters(model: ModelConfig, name: str) -> int:
    own = _empty_model(replace(model, name_or_path=name))[1]
    return sum(p.numel() for p in own.parameters())


def free_memory(device: str) -> float:
    """Return the free bytes of ``device``; for a CPU, ``usable_memory``."""
    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[0])
    return usable_memory()


def smaller(config: RunConfig, memory: Mapping[str, float]) -> str:
    """Return the setting that saves most of ``memory``, as text."""
    fixed = memory["gradients"] + memory["optimizer"]
    if memory["learning"] >= max(fixed, memory["sampling"]):
        if not config.model.gradient_checkpointing:
            return "set model.gradient_checkpointing=true, or a lower batch.tokens_per_microbatch"
        return "lower batch.tokens_per_microbatch"
    if memory["sampling"] >= fixed:
        return "lower rollout.max_batch_tokens"
    if not config.model.lora.rank:
        can_pack = config.optimizer.moments == "float32" and config.training.backend == "torch"
        packed = ", or optimizer.moments=int8" if can_pack else ""
        return f"set model.lora.rank=16: gradients and optimizer shrink to those of the adapters{packed}"
    return "take a smaller model"


def free_bytes(directory: Path) -> float:
    """Return the free space where ``directory`` is or will be; infinity where it cannot be told."""
    for place in (directory, *directory.absolute().parents):
        if place.is_dir():
            try:
                return float(shutil.disk_usage(place).free)
            except OSError:
                break
    return math.inf


def measure_step(
    plan: RunPlan, shape: ModelShape, work: Workload, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return seconds of a step by stage, from a model with two of the layers on the device of the run.

    Rewards, constraints, worlds and evaluations are not included. The engine is assumed to be ``hf``.
    ``clock`` returns seconds.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    config, device = plan.config, default_device(plan.devices.get("actor", ""))
    dtype = weight_dtype(config.model, device)
    limit_threads(config.num_threads)
    model = _empty_model(config.model, layers=PROBE_LAYERS, device=device)[1].to(dtype)
    model.eval()
    head = model.get_output_embeddings()
    context = max(1, round(work.prompt_tokens + work.new_tokens / 2))
    rows = max(1, round(_rows_at_once(config, work)))

    def ids(number: int, length: int) -> torch.Tensor:
        return torch.randint(shape.vocabulary, (number, length), device=device)

    def seconds(call: Callable[[], Any], least: float = 0.3) -> float:
        """Return the seconds of one call, after one that is not counted."""
        times = list[float]()
        while sum(times[1:]) < least and len(times) < 12:
            began = clock()
            call()
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)
            times.append(clock() - began)
        return min(times[1:])

    hidden = torch.zeros(rows, shape.hidden, device=device, dtype=dtype)
    with torch.no_grad():
        past, part = DynamicCache(config=model.config), max(1, config.rollout.prefill_tokens // rows)
        for begin in range(0, context, part):  # without logits: those of all prompts exceed the memory
            read = ids(rows, min(part, context - begin))
            model.get_decoder()(read, **cache_argument(model, past), use_cache=True)

        def decode(past: Any = past) -> None:
            model(ids(rows, 1), **cache_argument(model, past), use_cache=True)
            past.crop(-1)

        of_head = seconds(lambda: head(hidden), 0.1)
        layer = max(0.0, seconds(decode) - of_head) / PROBE_LAYERS
        of_decode = of_head + layer * shape.layers
        del past
    length = max(2, min(round(work.prompt_tokens + work.new_tokens), PROBE_TOKENS))
    batch = ids(max(1, PROBE_TOKENS // length), length)
    states = torch.zeros(*batch.shape, shape.hidden, device=device, dtype=dtype, requires_grad=True)

    def learn() -> None:
        model.get_decoder()(batch, use_cache=False).last_hidden_state.float().sum().backward()

    def score() -> None:
        head(states).float().log_softmax(-1)[..., 0].sum().backward()

    per_token = seconds(learn) / PROBE_LAYERS * shape.layers / batch.numel()
    again = 4 / 3 if config.model.gradient_checkpointing else 1  # the forward pass once more
    per_answer = seconds(score) / batch.numel()
    answers = work.samples * work.new_tokens
    tokens = work.prompts * work.prompt_tokens + answers
    batches = max(1.0, work.samples / rows)
    learning = (tokens * per_token * again + answers * per_answer) * config.batch.num_epochs
    forward_only = (tokens * per_token + answers * per_answer) / 3  # a forward is a third of both passes
    updates = config.batch.num_epochs * config.batch.num_minibatches
    return {
        "sampling": batches * work.new_tokens * of_decode + work.prompts * work.prompt_tokens * per_token / 3,
        "learning": learning + forward_only * (has_reference(plan) + (updates > 1)),
    }


def _rows_at_once(config: RunConfig, work: Workload) -> float:
    """Return how many responses the engine samples together."""
    length = work.new_tokens + work.prompt_tokens * work.prompts / work.samples
    return max(1.0, min(work.samples, config.rollout.max_batch_tokens / length))


def _empty_model(config: ModelConfig, layers: int = 0, device: str = "meta") -> tuple[Any, Any]:
    """Return configuration and model with random weights (``meta``: without memory); ``layers`` of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = config.trust_remote_code
    try:
        own = AutoConfig.from_pretrained(models_below(config.name_or_path)[-1], trust_remote_code=trust)
        if layers:
            text = own.get_text_config()
            text.num_hidden_layers = layers
            if types := text.to_dict().get("layer_types"):
                text.layer_types = types[:layers]
        with torch.device(device):
            return own, AutoModelForCausalLM.from_config(own, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        first = first_line(error)
        raise ConfigError(
            f"model.name_or_path {config.name_or_path!r}: its configuration cannot be read ({first}); give "
            "the directory or Hugging Face id of a causal language model"
        ) from error


def _width(plan: RunPlan) -> int:
    """Return the bytes of a weight."""
    return weight_dtype(plan.config.model, plan.devices.get("actor", "")).itemsize


def sizes(parts: Mapping[str, float]) -> str:
    """Return parts as text: ``weights 0.5 GB, ...``."""
    return ", ".join(f"{name} {in_units(size)}" for name, size in parts.items())


def in_units(size: float) -> str:
    """Return bytes as text, in GB (10^9) or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def _copy_width(plan: RunPlan, width: int) -> int:
    """Return the bytes per parameter of the engine's own weights; 0 if it samples from the actor's."""
    if sampling_weights(plan.engine_class, plan.config.rollout) == "bfloat16":
        return 2
    return width * (not plan.engine_class.shares_weights or plan.samples_from_copy)
