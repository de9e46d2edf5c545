"""TRL's ``GRPOConfig``: from a script, or from the YAML or JSON of its command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert import messages as say
from multitask_rl.convert.conversion import Conversion, Reading, Row, Rows, Source, at_least_0, task_name
from multitask_rl.convert.script import A_TENTH, loaded_rows, read_script
from multitask_rl.errors import ConfigError

DEFAULTS = """
{per_device_train_batch_size: 8, gradient_accumulation_steps: 1, num_generations: 8, num_iterations: 1,
  max_steps: -1, num_train_epochs: 3.0, learning_rate: 1.0e-6, lr_scheduler_type: linear, warmup_steps: 0,
  optim: adamw_torch_fused, adam_beta1: 0.9, adam_beta2: 0.999, adam_epsilon: 1.0e-8, weight_decay: 0.0,
  max_grad_norm: 1.0, max_completion_length: 512, temperature: 1.0, top_p: 1.0, top_k: 0, beta: 0.0,
  use_bias_correction_kl: true, epsilon: 0.2, loss_type: dapo, scale_rewards: group,
  importance_sampling_level: token, multi_objective_aggregation: sum_then_normalize,
  mask_truncated_completions: false, entropy_coef: 0.0, use_vllm: false, vllm_mode: colocate,
  vllm_gpu_memory_utilization: 0.3, vllm_tensor_parallel_size: 1, vllm_importance_sampling_correction: true,
  vllm_importance_sampling_mode: sequence_mask, vllm_importance_sampling_clip_max: 3.0,
  ref_model_mixup_alpha: 0.6, ref_model_sync_steps: 512, gradient_checkpointing: true, dtype: float32,
  seed: 42, eval_strategy: "no", save_strategy: steps, save_steps: 500, report_to: [none], lora_r: 16,
  lora_alpha: 32, lora_dropout: 0.05, peft_config: {r: 8, lora_alpha: 8, lora_dropout: 0.0},
  steps_per_generation: <number>, generation_batch_size: <number>, delta: <number>, epsilon_high: <number>,
  eval_steps: <number>, reward_weights: <list>, chat_template_kwargs: <mapping>, model_init_kwargs: <mapping>}
"""
REASONS = r"""
min_p|repetition_penalty|generation_kwargs|cache_implementation: the actor is sampled by temperature, top_p
  and top_k only, so that log-probabilities of training are those of sampling
sapo_.*|vespo_.*: belongs to a loss that has no counterpart
off_policy_mask_threshold|top_entropy_quantile: no mask of samples or tokens by divergence or entropy
use_adaptive_entropy|entropy_coef_.*|entropy_target: the entropy coefficient is fixed
vllm_(server|group|mode|model_impl|enable_sleep|max_model).*: the engine runs inside the run; its keys are
  rollout.engine_config
vllm_importance_sampling_(clip_min|cap): the weight has an upper bound only (truncated_is)
use_liger.*|torch_.*|deepspeed|fsdp.*|ddp_.*|accelerator_config|parallelism_config|ds3_.*|tf32|
  use_transformers.*|transformers_.*|pad_to_multiple_of|cast_lm_head_to_fp32: how TRL computes; devices and
  layout here: device_map, batch
dataloader_.*|remove_unused_columns|shuffle_dataset|data_seed|ignore_data_skip|train_sampling.*: every task
  has a stream of shuffled rows with all their columns; the run's seed decides the order
logging_.*|log_.*|num_completions_to_print|project|trackio.*|hub_.*|push_to_hub|disable_tqdm|report_.*: every
  step is logged, and some of its responses (tracking.store_rollouts); keys: tracking.*
per_device_eval_batch_size|num_generations_eval|eval_.*|do_.*|metric_.*|load_best.*|greater_.*: held-out
  prompts, their number and seeds: eval.*, eval_samples of a task; the best checkpoint is always kept
save_.*: a checkpoint holds everything a resume needs (docs/checkpoints.md)
max_prompt_length: TRL has no such option any more; rollout.max_prompt_tokens leaves longer prompts out
max_tool_calling_iterations: max_tool_calls and max_turns of a task with an environment
router_aux_loss_coef|model_init_kwargs|disable_dropout|model_revision|load_in_.*|bnb_.*|use_.*: no counterpart
  for the model
peft_config.*|lora_.*: no counterpart among the keys of model.lora
dataset_.*|datasets|streaming: dataset_config of a task has keywords of load_dataset
GRPOTrainer.args: options of a command line are not read: write them into GRPOConfig(...), or into the YAML of
  `trl grpo --config`, and convert that
GRPOTrainer.eval_dataset: no file or id was found in it: set eval_dataset of the task
GRPOTrainer.callbacks: a tracker of your own gets every number and event of the run (docs/write-a-plugin.md)
GRPOTrainer.(tools|environment_factory|rollout_func): an environment of the task
  (docs/bring-your-environment.md)
GRPOTrainer.*: no counterpart among the trainer's arguments
(train.)?resume_from_checkpoint: the same command resumes a run of its own (checkpoint.resume); weights of a
  checkpoint of TRL: model.name_or_path
neftune.*|label_.*|optim_.*|lr_scheduler_kwargs|average_tokens.*|auto_find_batch_size|full_determinism|
  gradient_checkpointing_kwargs|overwrite_output_dir|local_rank|debug|use_cpu: not an option of the algorithm
  here
"""
_AGGREGATION = {"dapo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token"}
_NORMALISATION = {"group": "group", "True": "group", "none": "none", "False": "none"}
_SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine"},
    **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
}
_NAMED = ("GRPOTrainer.train_dataset", "datasets")
_COUNTED = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")


def read(file: Path) -> Reading:
    """Read a script, or the options of ``trl grpo --config``, those of the model and the data among them."""
    if file.suffix == ".py":
        return read_script(file)
    values, _ = load_yaml(file)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{file}: expected options as a mapping (those of a command line are not read: write them into a "
            "YAML file, as for `trl grpo --config`), or a Python script (.py)"
        )
    options = {str(key): value for key, value in values.items()}
    names = options.pop("reward_funcs", None) or []
    split = [str(name).rpartition(".") for name in (names if isinstance(names, list) else [names])]
    rewards = [f"trl:{module or 'trl.rewards'}:{name}" for module, _, name in split]
    if model := options.pop("reward_model_name_or_path", None):
        rewards.insert(0, f"model:{model}")
    found = Reading(model=options.pop("model_name_or_path", "") or "", rewards=rewards)
    found.rows.dataset = str(options.pop("dataset_name", "") or "")
    found.rows.split = str(options.pop("dataset_train_split", "") or "")
    found.rows.config = {"name": name} if (name := options.pop("dataset_config", None)) else {}
    for one in mixture if isinstance(mixture := options.get("datasets"), list) else []:
        if isinstance(one, Mapping) and isinstance(one.get("path"), str):
            given = {key: value for key, value in one.items() if value is not None}
            found.rows.parts.append(loaded_rows(given, lambda value: value))
    if found.rows.parts:  # TRL prefers them to dataset_name
        found.rows = Rows(parts=found.rows.parts)
    found.options = options
    return found


def tasks(c: Conversion) -> None:
    """Write a task, or one for each data set of a mixture; all have the same rewards."""
    found = c.found
    if c.dataset:
        found.rows = Rows(dataset=c.dataset)
        found.computed.pop("GRPOTrainer.train_dataset", None)
    if c.reward:
        found.rewards, found.rewards_file = [c.reward], ""
    parts = found.rows.parts or [found.rows]
    names = [part.dataset for part in parts]
    c.need(names if all(names) else [], "data set", *_NAMED, instead="--dataset")
    c.need(found.rewards, "reward")
    common = rewards(c)
    weights = found.rows.weights or c.weights_by_rows(names)
    for index, part in enumerate(parts):
        own = data_set(c, part)
        if len(parts) > 1:
            own["weight"] = weights[index] if weights else 1.0
        c.tasks[task_name(part.dataset, c.tasks)] = {**own, **common}
    if found.rows.parts and not c.dataset:
        c.note("task.dataset", "datasets", differs=say.SETS_ALIKE, exact=bool(weights))
    calls = [*found.rows.calls, *(call for part in found.rows.parts for call in part.calls)]
    if A_TENTH in calls:
        c.note("task.eval_dataset", "train_test_split", differs=say.TENTH)
    if c.get("test_split_size") == 0.1:
        c.note("task.eval_dataset", "test_split_size", differs=say.TENTH)
    elif "test_split_size" in c.given:
        c.leave("test_split_size", say.OTHER_SHARE)


def data_set(c: Conversion, part: Rows) -> dict[str, Any]:
    """Return what a task says of its data set; tell calls that change its rows."""
    held_out = c.found.eval_rows
    own: dict[str, Any] = {"dataset": part.dataset}
    if part.config:
        own["dataset_config"] = part.config
    split, _, share = part.split.partition("[")
    if split and split != "train":
        own["split"] = split
    held_split = held_out.split.partition("[")[0]
    if held_out.dataset and held_out.dataset != part.dataset:
        own["eval_dataset"] = held_out.dataset
    elif held_split not in ("", split or "train"):
        own["eval_split"] = held_split
    changes = [*([f"split {part.split}"] if share else []), *part.calls]
    changes += c.found.rows.calls if c.found.rows.parts else []
    if not {*changes} <= {"shuffle", A_TENTH}:  # rows are shuffled and a tenth is held out here anyway
        c.left["train_dataset"] = say.CHANGED_ROWS.format(changes=", ".join(changes))
    tags = sorted(c.count_values(part.dataset, "task"))
    if len(tags) > 1:
        own["select"] = {"task": tags}
        c.note("task.select", "column task", differs=say.ONE_TASK)
    return own


def rewards(c: Conversion) -> dict[str, Any]:
    """Return what every task says of its rewards and constraints."""
    found, own = c.found, dict[str, Any]()
    weights = c.get("reward_weights") or [1.0] * len(found.rewards)
    if len(weights) != len(found.rewards):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(found.rewards)} rewards")
    own["rewards"] = []
    for reference, weight in zip(found.rewards, weights, strict=True):
        entry: dict[str, Any] = {"plugin": reference}
        if reference.startswith("model:"):
            entry = {"plugin": "rm_hf", "config": {"model_name": reference.removeprefix("model:")}}
        own["rewards"].append(entry if weight == 1 else {**entry, "weight": float(weight)})
    c.note("task.rewards", "reward_weights")
    if found.rewards_file:
        c.files["rewards.py"] = found.rewards_file
    if c.get("use_vllm") and (regex := c.get("vllm_structured_outputs_regex")):
        own["constraints"] = [{"name": "regex", "mode": "grammar", "config": {"regex": regex}}]
        c.note("task.constraints", "vllm_structured_outputs_regex")
    return own


def algorithm(c: Conversion) -> None:
    """Write the type and how the loss is summed up."""
    loss, both = c.get("loss_type"), "multi_objective_aggregation"
    kind = "grpo"
    if loss == "cispo":
        kind = "cispo"
    elif c.get("importance_sampling_level") == "sequence":
        kind = "gspo"
    elif c.get(both) == "normalize_then_sum":
        kind = "gdpo"
    c.put("task.type", kind, "loss_type", "importance_sampling_level", both)
    if kind in ("cispo", "gspo") and c.get(both) == "normalize_then_sum":
        c.leave(both, say.SUM_OF_REWARDS, kind=kind)
    if loss in _AGGREGATION:
        c.put("algorithm.aggregation", _AGGREGATION[loss], "loss_type")
    elif loss == "bnpo":
        alone = c.get("per_device_train_batch_size") == 1
        told = say.PER_MICROBATCH if c.get("gradient_accumulation_steps") > 1 else say.PER_DEVICE
        by = "sequence" if alone else "token"
        c.put("algorithm.aggregation", by, "loss_type", differs="" if alone else told)
    else:
        c.put("algorithm.aggregation", "sequence" if loss == "sapo" else "token")
        c.leave("loss_type", say.NO_LOSS, value=loss)


def loss(c: Conversion) -> None:
    """Write bounds, scales and weights of the loss.

    TRL's cispo bounds the weight itself, ours its distance to 1.
    """
    low, high, delta = map(c.get, ("epsilon", "epsilon_high", "delta"))
    if c.task["type"] == "cispo":
        bound = low if high is None else high
        if bound <= 1:
            raise ConfigError(say.CISPO_BOUND.format(bound=bound))
        c.put("algorithm.clip_low", 1.0, "epsilon")
        c.put("algorithm.clip_high", bound - 1.0, "epsilon" if high is None else "epsilon_high")
    else:
        c.put("algorithm.clip_low", low, "epsilon")
        c.put("algorithm.clip_high", low if high is None else high, "epsilon", "epsilon_high")
    exact = delta is None or delta > 1 + (high or low)
    c.put("algorithm.dual_clip", delta or 0.0, "delta", differs=say.DELTA, exact=exact)
    by = _NORMALISATION.get(str(c.get("scale_rewards")), "task")
    c.put("algorithm.normalisation", by, "scale_rewards", differs=say.BATCH_DEVIATION, exact=by != "task")
    c.carry("algorithm.mask_truncated", "mask_truncated_completions")
    entropy = c.get("entropy_coef")
    exact = _AGGREGATION.get(c.get("loss_type")) == "token" or entropy == 0
    told = "" if exact else say.BONUS_OVER_TOKENS
    c.put("algorithm.entropy_coefficient", entropy, "entropy_coef", differs=told)
    correction, *options = (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max"))
    if c.get("use_vllm") and c.get(correction):
        mode, cap = map(c.get, options)
        told = "" if mode == "token_truncate" and cap else say.WEIGHT_CUT
        c.put("algorithm.truncated_is", float(cap or 0), *options, differs=told, mode=mode)
    else:
        c.put("algorithm.truncated_is", 0.0, correction)


def kl(c: Conversion) -> None:
    """Write the KL in the loss; ratio * k3 has the gradient of k2 where the ratio is 1."""
    options = ("beta", "use_bias_correction_kl")
    if beta := c.get("beta"):
        corrected = c.get(options[1])
        c.put("task.kl.coefficient", beta, *options)
        c.put("task.kl.placement", "loss", *options)
        estimate = "k2" if corrected else "k3"
        c.put("task.kl.estimator", estimate, *options, differs=say.RATIO_LATER, exact=not corrected)


def batch(c: Conversion) -> None:
    """Write prompts, groups and updates.

    TRL counts responses per device and optimizer steps; here a step samples prompts and makes
    ``num_minibatches * num_epochs`` updates.
    """
    per_device, accumulation, size = map(c.get, _COUNTED)
    iterations, whole = c.get("num_iterations"), c.get("generation_batch_size")
    chunks = c.get("steps_per_generation")
    micro = per_device * c.processes
    chunks = whole // micro if whole is not None else chunks if chunks is not None else accumulation
    if chunks < accumulation and (iterations > 1 or not chunks or accumulation % chunks):
        raise ConfigError(say.GENERATIONS.format(chunks=chunks, accumulation=accumulation))
    steps = max(chunks, accumulation)
    responses = micro * steps
    if responses % size or responses < size:
        values = {"responses": responses, "per_device": per_device, "processes": c.processes}
        raise ConfigError(say.INDIVISIBLE.format(steps=steps, size=size, **values))
    counted = [o for o in ("generation_batch_size", "steps_per_generation") if o in c.given]
    told = say.ONE_PROCESS if c.processes == 1 else ""
    c.put("batch.prompts_per_step", responses // size, *_COUNTED, *counted, differs=told)
    c.put("batch.group_size", size, "num_generations")
    minibatches = max(1, math.ceil(chunks / accumulation))
    told, options = say.LAST_OVERLAPS, ("steps_per_generation", "generation_batch_size")
    exact = steps % accumulation == 0
    c.put("batch.num_minibatches", minibatches, *options, differs=told, exact=exact)
    c.put("batch.num_epochs", iterations, "num_iterations")
    c.put("batch.refill_rounds", 0)


def steps(c: Conversion) -> None:
    """Write what TRL counts in updates: steps, warm-up, evaluations and checkpoints."""
    updates = c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]
    most, passes = c.get("max_steps"), c.get("num_train_epochs")
    parts = c.found.rows.parts or [c.found.rows]
    # a pass over interleaved rows ends with the first or the last of its data sets
    rows = c.num_rows if c.found.rows.weights else c.rows_of(part.dataset for part in parts)
    per_pass = None if rows is None else max(1, rows // c.run["batch.prompts_per_step"])
    if most > 0:
        number: int | None = math.ceil(most / updates)
        c.put_steps(number, "max_steps")
        c.leave("num_train_epochs", say.STEPS_GIVEN, option="max_steps")
    else:
        number = None if per_pass is None else math.ceil(per_pass * passes)
        c.put_steps(number, "num_train_epochs")
        c.note("max_steps", "max_steps")
    total = None if number is None else number * updates

    def in_steps(option: str, key: str) -> None:
        value = c.get(option)
        if value < 1 and value != 0:  # a share
            value = None if total is None else math.ceil(value * total)
        if value is None:
            c.leave(option, say.SHARE_TO_SET, key=key)
        else:
            value, written = int(value), math.ceil(int(value) / updates)
            told = say.ROUNDED if value % updates else ""
            c.put(key, written, option, differs=told, number=value, here=written * updates)

    kind = str(c.get("lr_scheduler_type"))
    warmup = "warmup_ratio" if c.given.get("warmup_ratio") else "warmup_steps"
    schedule = _SCHEDULES.get(kind, "cosine" if "cosine" in kind else "constant")
    c.put("optimizer.schedule", schedule)
    if kind in _SCHEDULES:
        c.note("optimizer.schedule", "lr_scheduler_type")
    else:
        c.leave("lr_scheduler_type", say.NO_SCHEDULE, value=kind, schedule=schedule)
    if kind == "constant":
        c.leave(warmup, say.NO_WARMUP_CONSTANT)
    elif c.get(warmup):
        in_steps(warmup, "optimizer.warmup_steps")
        if "optimizer.warmup_steps" in c.run:
            c.note("optimizer.warmup_steps", warmup, differs=say.FIRST_UPDATE)
    for name, key in (("eval", "eval.every"), ("save", "checkpoint.every")):
        option, strategy = f"{name}_steps", f"{name}_strategy"
        value = str(c.get(strategy))
        if value in ("no", "False"):  # YAML reads no as False
            c.put(key, 0, strategy)
        elif value == "epoch" and per_pass is not None:
            c.put(key, per_pass, strategy)
        elif value == "steps" and c.get(option) is not None:
            in_steps(option, key)
            c.note(key, strategy)
        else:
            c.leave(strategy, say.NO_STEPS, value=value, key=key)


def model(c: Conversion) -> None:
    """Write what is loaded as the actor, and its adapters."""
    if c.found.model:
        c.run["model.name_or_path"] = c.found.model
    init = c.get("model_init_kwargs") or {}
    dtype = str(init.get("dtype", init.get("torch_dtype", c.get("dtype")))).removeprefix("torch.")
    half = bool(c.get("fp16"))
    mixed = not half if c.get("bf16") is None else c.get("bf16")
    value = "float16" if half and dtype == "float32" else dtype
    c.put("model.dtype", value, "dtype", "fp16", "model_init_kwargs")
    known = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code")
    if unknown := [name for name in init if name not in known]:
        c.leave("model_init_kwargs", say.NO_MODEL_KEYS, names=", ".join(unknown))
    c.put("model.autocast", bool(mixed) and dtype == "float32", "bf16")
    if attention := init.get("attn_implementation", c.get("attn_implementation")):
        c.put("model.attn_implementation", attention, "attn_implementation")
    c.carry("model.gradient_checkpointing", "gradient_checkpointing")
    if c.get("trust_remote_code") or init.get("trust_remote_code"):
        c.put("model.trust_remote_code", True, "trust_remote_code")
    of_peft = any(option.startswith("peft_config.") for option in c.given)
    if c.get("use_peft") or of_peft:
        # options of TRL are lora_r, lora_alpha, ..., those of a LoraConfig r, lora_alpha, ...
        rank, alpha, dropout = (
            ("peft_config.r", "peft_config.lora_alpha", "peft_config.lora_dropout")
            if of_peft
            else ("lora_r", "lora_alpha", "lora_dropout")
        )
        c.put("model.lora.rank", c.get(rank), rank, "use_peft")
        c.carry("model.lora.alpha", alpha, float)
        c.carry("model.lora.dropout", dropout, float)
        modules = f"{'peft_config.' if of_peft else 'lora_'}target_modules"
        if names := c.get(modules):
            c.put("model.lora.target_modules", names if isinstance(names, str) else ",".join(names), modules)


def sampling(c: Conversion) -> None:
    """Write what is sampled, and by what."""
    c.carry("rollout.max_new_tokens", "max_completion_length")
    c.put("rollout.max_prompt_tokens", 0)
    c.carry("rollout.temperature", "temperature", float)
    c.carry("eval.temperature", "temperature", float)
    c.carry("rollout.top_p", "top_p", float)
    c.carry("rollout.top_k", "top_k", at_least_0)
    if c.get("use_vllm"):
        c.put_engine("vllm", "use_vllm", "vllm_")


def optimizer(c: Conversion) -> None:
    """Write AdamW's settings."""
    c.carry("optimizer.learning_rate", "learning_rate", float)
    c.put("optimizer.betas", [c.get("adam_beta1"), c.get("adam_beta2")], "adam_beta1", "adam_beta2")
    c.carry("optimizer.adam_eps", "adam_epsilon", float)
    c.carry("optimizer.weight_decay", "weight_decay", float)
    c.carry("optimizer.max_grad_norm", "max_grad_norm", float)
    name = c.get("optim")
    if re.fullmatch("(paged_)?adamw.*8bit", str(name)):
        c.put("optimizer.moments", "int8", "optim")
    elif not str(name).startswith("adamw"):
        c.leave("optim", say.ADAMW, value=name)


def reference(c: Conversion) -> None:
    """Write the average that the reference is, where TRL moves it once a step."""
    options = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    if c.get(options[0]):
        alpha, every = c.get(options[1]), c.get(options[2])
        if every == c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]:
            c.put("model.reference_decay", 1.0 - alpha, *options)
        else:
            for option in options:
                c.leave(option, say.REFERENCE_STEPS, every=every)


TRL = Source(
    name="TRL 1.16 (GRPOConfig)",
    read=read,
    defaults=DEFAULTS,
    reasons=REASONS,
    counts=(*_COUNTED, "num_iterations", "steps_per_generation", "generation_batch_size"),
    table=(
        tasks,
        Row("task.chat_template_kwargs", "chat_template_kwargs", dict, if_set=True),
        algorithm,
        loss,
        kl,
        batch,
        steps,
        model,
        sampling,
        optimizer,
        reference,
        Row("seed", "seed"),
        Row("output_dir", "output_dir", if_set=True),
        Row("checkpoint.keep", "save_total_limit", if_set=True),
        Row("tracking.run_name", "run_name", if_set=True),
        lambda c: c.put_trackers("report_to"),
    ),
)
