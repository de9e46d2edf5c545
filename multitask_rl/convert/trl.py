"""TRL's ``GRPOConfig``: from a script, or from the YAML or JSON of its command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert.conversion import Conversion, ratio_or_steps, task_name
from multitask_rl.convert.script import Rows, Script, read_script
from multitask_rl.errors import ConfigError

SOURCE = "TRL 1.16 (GRPOConfig)"
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "entropy_coef": 0.0,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "gradient_checkpointing": True,
    "dtype": "float32",
    "seed": 42,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "report_to": "none",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
}
REASONS: Mapping[str, str] = {
    "min_p|repetition_penalty|generation_kwargs|cache_implementation": (
        "the actor is sampled by temperature, top_p and top_k only, so that log-probabilities of "
        "training are those of sampling"
    ),
    "sapo_.*|vespo_.*": "belongs to a loss that has no counterpart",
    "off_policy_mask_threshold|top_entropy_quantile": (
        "no mask of samples or tokens by divergence or entropy"
    ),
    "use_adaptive_entropy|entropy_coef_.*|entropy_target": "the entropy coefficient is fixed",
    "vllm_(server|group|mode|model_impl|enable_sleep|max_model).*": (
        "the engine runs inside the run; its keys are rollout.engine_config"
    ),
    "vllm_importance_sampling_(clip_min|cap)": "the weight has an upper bound only (truncated_is)",
    "use_liger.*|torch_.*|deepspeed|fsdp.*|ddp_.*|accelerator_config|parallelism_config|ds3_.*|"
    "tf32|use_transformers.*|transformers_.*|pad_to_multiple_of|cast_lm_head_to_fp32": (
        "how TRL computes; devices and layout here: device_map, batch"
    ),
    "dataloader_.*|remove_unused_columns|shuffle_dataset|data_seed|ignore_data_skip|train_sampling.*": (
        "every task has a stream of shuffled rows with all their columns; the run's seed decides the order"
    ),
    "logging_.*|log_.*|num_completions_to_print|project|trackio.*|hub_.*|push_to_hub|"
    "disable_tqdm|report_.*": (
        "every step is logged, and some of its responses (tracking.store_rollouts); keys: tracking.*"
    ),
    "per_device_eval_batch_size|num_generations_eval|eval_.*|do_.*|metric_.*|load_best.*|greater_.*": (
        "held-out prompts, their number and seeds: eval.*, eval_samples of a task; the best "
        "checkpoint is always kept"
    ),
    "save_.*": "a checkpoint holds everything a resume needs (docs/checkpoints.md)",
    "max_prompt_length": (
        "TRL has no such option any more; rollout.max_prompt_tokens leaves longer prompts out"
    ),
    "max_tool_calling_iterations": "max_tool_calls and max_turns of a task with an environment",
    "router_aux_loss_coef|model_init_kwargs|disable_dropout|model_revision|load_in_.*|bnb_.*|use_.*": (
        "no counterpart for the model"
    ),
    "peft_config.*|lora_.*": "no counterpart among the keys of model.lora",
    "dataset_.*|datasets|streaming": "dataset_config of a task has keywords of load_dataset",
    "GRPOTrainer.args": (
        "options of a command line are not read: write them into GRPOConfig(...), or into the YAML of "
        "`trl grpo --config`, and convert that"
    ),
    "GRPOTrainer.eval_dataset": "no file or id was found in it: set eval_dataset of the task",
    "GRPOTrainer.callbacks": (
        "a tracker of your own gets every number and event of the run (docs/write-a-plugin.md)"
    ),
    "GRPOTrainer.(tools|environment_factory|rollout_func)": (
        "an environment of the task (docs/bring-your-environment.md)"
    ),
    "GRPOTrainer.*": "no counterpart among the trainer's arguments",
    "(train.)?resume_from_checkpoint": (
        "the same command resumes a run of its own (checkpoint.resume); weights of a checkpoint of TRL: "
        "model.name_or_path"
    ),
    "neftune.*|label_.*|optim_.*|lr_scheduler_kwargs|average_tokens.*|auto_find_batch_size|"
    "full_determinism|gradient_checkpointing_kwargs|overwrite_output_dir|local_rank|debug|"
    "use_cpu": ("not an option of the algorithm here"),
}
_AGGREGATION = {"dapo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token"}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def convert_trl(
    file: Path, *, dataset: str = "", reward: str = "", num_rows: int | None = None, processes: int = 1
) -> Conversion:
    """Convert a script, or a YAML or JSON file of options.

    Args:
        file: the script (``.py``) or the file of options.
        dataset: instead of the data set that is found.
        reward: instead of the rewards that are found: a reference of a plugin.
        num_rows: rows of the data set, where they cannot be counted.
        processes: devices that the run was launched on; TRL counts batches per device.

    Raises:
        ConfigError: the file cannot be read, or names no data set or reward.
    """
    script = read_script(file) if file.suffix == ".py" else _script_of_options(file)
    if dataset:
        script.rows = Rows(dataset=dataset)
        script.computed.pop("GRPOTrainer.train_dataset", None)
    if reward:
        script.rewards, script.rewards_file = [reward], ""
    c = Conversion(SOURCE, script.options, DEFAULTS, REASONS, computed=script.computed, num_rows=num_rows)
    c.need(script.rows.dataset, "data set", "--dataset", str(file), "GRPOTrainer.train_dataset", "datasets")
    c.need(script.rewards, "reward", "--reward", str(file))
    _put_task(c, script)
    _put_algorithm(c)
    _put_batch(c, script, processes)
    _put_run(c, script)
    c.finish()
    return c


def _script_of_options(file: Path) -> Script:
    """Read the options of ``trl grpo --config``, those of the model and the data among them."""
    values, _ = load_yaml(file)
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{file}: expected options as a mapping (those of a command line are not read: write them into a "
            "YAML file, as for `trl grpo --config`), or a Python script (.py)"
        )
    options = {str(key): value for key, value in values.items()}
    names = options.pop("reward_funcs", None) or []
    rewards = [
        f"trl:{name.rpartition('.')[0] or 'trl.rewards'}:{name.rpartition('.')[2]}"
        for name in ([names] if isinstance(names, str) else names)
    ]
    if model := options.pop("reward_model_name_or_path", None):
        rewards.insert(0, f"model:{model}")
    return Script(
        options=options,
        model=options.pop("model_name_or_path", "") or "",
        rows=Rows(
            dataset=options.pop("dataset_name", "") or "",
            split=options.pop("dataset_train_split", "") or "",
            config={"name": name} if (name := options.pop("dataset_config", None)) else {},
        ),
        rewards=rewards,
    )


def _put_task(c: Conversion, script: Script) -> None:
    rows, held_out = script.rows, script.eval_rows
    name = task_name(rows.dataset)
    own: dict[str, Any] = {"dataset": rows.dataset}
    if rows.config:
        own["dataset_config"] = rows.config
    split, _, part = rows.split.partition("[")
    if split and split != "train":
        own["split"] = split
    if held_out.dataset and held_out.dataset != rows.dataset:
        own["eval_dataset"] = held_out.dataset
    elif held_out.split.partition("[")[0] not in ("", split or "train"):
        own["eval_split"] = held_out.split.partition("[")[0]
    changes = [*([f"split {rows.split}"] if part else []), *rows.calls]
    if changes != ["shuffle"] * len(changes):  # rows are shuffled here anyway
        c.left["train_dataset"] = (
            f"the script changes the rows ({', '.join(changes)}); save the changed ones with "
            "dataset.to_json('rows.jsonl') and give --dataset rows.jsonl"
        )
    tags = sorted(c.count_values(rows.dataset, "task"))
    if len(tags) > 1:
        own["select"] = {"task": tags}
        told = "rows of all values are one task, as in TRL; a task for each value may have its own rewards"
        c.note("task.select", "column task", differs=told)
    weights = c.get("reward_weights") or [1.0] * len(script.rewards)
    if len(weights) != len(script.rewards):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(script.rewards)} rewards")
    rewards = []
    for reference, weight in zip(script.rewards, weights, strict=True):
        entry: dict[str, Any] = {"plugin": reference}
        if reference.startswith("model:"):
            entry = {"plugin": "rm_hf", "config": {"model_name": reference.removeprefix("model:")}}
        rewards.append(entry if weight == 1 else {**entry, "weight": float(weight)})
    own["rewards"] = rewards
    c.note("task.rewards", "reward_weights")
    if script.rewards_file:
        c.files["rewards.py"] = script.rewards_file
    if c.get("use_vllm") and (regex := c.get("vllm_structured_outputs_regex")):
        own["constraints"] = [{"name": "regex", "mode": "grammar", "config": {"regex": regex}}]
        c.note("task.constraints", "vllm_structured_outputs_regex")
    if c.get("chat_template_kwargs"):
        c.carry("task.chat_template_kwargs", "chat_template_kwargs", dict)
    c.tasks[name] = own


def _put_algorithm(c: Conversion) -> None:
    loss, level, scale = c.get("loss_type"), c.get("importance_sampling_level"), c.get("scale_rewards")
    low, high = c.get("epsilon"), c.get("epsilon_high")
    kind = "grpo"
    if loss == "cispo":
        kind = "cispo"
    elif level == "sequence":
        kind = "gspo"
    elif c.get("multi_objective_aggregation") == "normalize_then_sum":
        kind = "gdpo"
    c.put("task.type", kind, "loss_type", "importance_sampling_level", "multi_objective_aggregation")
    if kind in ("cispo", "gspo") and c.get("multi_objective_aggregation") == "normalize_then_sum":
        c.leave("multi_objective_aggregation", f"type {kind} normalises the sum of the rewards")
    per_device, steps = c.get("per_device_train_batch_size"), c.get("gradient_accumulation_steps")
    if loss in _AGGREGATION:
        c.put("task.algorithm_config.aggregation", _AGGREGATION[loss], "loss_type")
    elif loss == "bnpo":
        alone = per_device == 1
        told = "" if alone else "TRL averages over the tokens of each device's micro-batch"
        told = told if steps > 1 or alone else "the same on one device; on more, TRL averages per device"
        c.put(
            "task.algorithm_config.aggregation", "sequence" if alone else "token", "loss_type", differs=told
        )
    else:
        aggregation = "sequence" if loss == "sapo" else "token"
        c.put("task.algorithm_config.aggregation", aggregation)
        c.leave("loss_type", f"{loss!r} has no counterpart; the clipped loss of grpo stands in its place")
    if kind == "cispo":
        bound = low if high is None else high
        if bound <= 1:
            raise ConfigError(
                f"epsilon_high: with loss_type 'cispo' TRL bounds the weight itself by {bound:g}, also where "
                "nothing has changed; clip_high is 1 less and must be above 0. TRL recommends 5.0"
            )
        c.put("task.algorithm_config.clip_low", 1.0, "epsilon")
        c.put(
            "task.algorithm_config.clip_high", bound - 1.0, "epsilon_high" if high is not None else "epsilon"
        )
    else:
        c.put("task.algorithm_config.clip_low", low, "epsilon")
        c.put("task.algorithm_config.clip_high", low if high is None else high, "epsilon", "epsilon_high")
    delta = c.get("delta")
    told = (
        "" if delta is None or delta > 1 + (high or low) else "below 1 + epsilon_high it bounds more in TRL"
    )
    c.put("task.algorithm_config.dual_clip", delta or 0.0, "delta", differs=told)
    normalisation = {"group": "group", "True": "group", "none": "none", "False": "none"}.get(
        str(scale), "task"
    )
    told = "TRL divides by the deviation of the whole batch, here it is a running mean within groups"
    told = told if normalisation == "task" else ""
    c.put("task.algorithm_config.normalisation", normalisation, "scale_rewards", differs=told)
    c.carry("task.algorithm_config.mask_truncated", "mask_truncated_completions")
    entropy = c.get("entropy_coef")
    same = _AGGREGATION.get(loss) == "token" or entropy == 0
    told = "" if same else "TRL's bonus is a mean over tokens, here it is summed up as the loss is"
    c.put("task.algorithm_config.entropy_coefficient", entropy, "entropy_coef", differs=told)
    _put_engine_correction(c)
    beta = c.get("beta")
    if beta:
        corrected = c.get("use_bias_correction_kl")
        options = ("beta", "use_bias_correction_kl")
        c.put("task.kl.coefficient", beta, *options)
        c.put("task.kl.placement", "loss", *options)
        # ratio * k3 has the gradient of k2 where the ratio is 1
        told = "the same gradient in the first update after sampling; TRL weighs it by the ratio later"
        c.put("task.kl.estimator", "k2" if corrected else "k3", *options, differs=told if corrected else "")


def _put_engine_correction(c: Conversion) -> None:
    if not c.get("use_vllm") or not c.get("vllm_importance_sampling_correction"):
        c.put("task.algorithm_config.truncated_is", 0.0, "vllm_importance_sampling_correction")
        return
    mode, cap = c.get("vllm_importance_sampling_mode"), c.get("vllm_importance_sampling_clip_max")
    told = (
        "" if mode == "token_truncate" and cap else f"TRL's mode is {mode}; here each token's weight is cut"
    )
    options = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")
    c.put("task.algorithm_config.truncated_is", float(cap or 0), *options, differs=told)


def _put_batch(c: Conversion, script: Script, processes: int) -> None:
    """Write prompts, groups, updates and steps.

    TRL counts responses per device and optimizer steps; here a step samples prompts and makes
    ``num_minibatches * num_epochs`` updates.
    """
    per_device, accumulation = c.get("per_device_train_batch_size"), c.get("gradient_accumulation_steps")
    size, group, iterations = c.get("num_generations"), c.get("num_generations"), c.get("num_iterations")
    whole, chunks = c.get("generation_batch_size"), c.get("steps_per_generation")
    micro = per_device * processes
    chunks = whole // micro if whole is not None else chunks if chunks is not None else accumulation
    counted = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
    counted += [o for o in ("generation_batch_size", "steps_per_generation") if o in c.given]
    if chunks < accumulation and (iterations > 1 or accumulation % chunks):
        raise ConfigError(
            f"steps_per_generation ({chunks}) is below gradient_accumulation_steps ({accumulation}): an "
            "update holds several generations, which fits only whole ones and num_iterations 1"
        )
    responses = micro * max(chunks, accumulation)
    if responses % size or responses < size:
        raise ConfigError(
            f"a generation has {responses} responses (per_device_train_batch_size {per_device} x {processes} "
            f"processes x {max(chunks, accumulation)} steps), which num_generations ({size}) does not "
            "divide; give the number of devices of the launch: --processes N"
        )
    told = (
        "counted for one process; give --processes N for a launch on several devices"
        if processes == 1
        else ""
    )
    c.put("batch.prompts_per_step", responses // size, *counted, differs=told)
    c.put("batch.group_size", group, "num_generations")
    minibatches = max(1, math.ceil(chunks / accumulation))
    told = (
        ""
        if max(chunks, accumulation) % accumulation == 0
        else "TRL's last update reaches into the next batch"
    )
    c.put("batch.num_minibatches", minibatches, "steps_per_generation", "generation_batch_size", differs=told)
    c.put("batch.num_epochs", iterations, "num_iterations")
    c.put("batch.refill_rounds", 0)
    updates = minibatches * iterations
    most, passes = c.get("max_steps"), c.get("num_train_epochs")
    rows = c.rows_of([script.rows.dataset])
    per_pass = None if rows is None else max(1, rows // (responses // size))
    if most > 0:
        steps: int | None = math.ceil(most / updates)
        c.put_steps(steps, "max_steps")
        c.leave("num_train_epochs", "max_steps is given, which TRL prefers")
    else:
        steps = None if per_pass is None else math.ceil(per_pass * passes)
        c.put_steps(steps, "num_train_epochs")
        c.note("max_steps", "max_steps")
    total = None if steps is None else steps * updates

    def in_steps(option: str, key: str, value: float) -> None:
        number = ratio_or_steps(value, total)
        if number is None:
            c.leave(option, f"a share of all steps, whose number is not known; set {key}")
        else:
            written = math.ceil(number / updates)
            told = f"{number} updates there, {written * updates} here" if number % updates else ""
            c.put(key, written, option, differs=told)

    kind = str(c.get("lr_scheduler_type"))
    warmup = "warmup_ratio" if c.given.get("warmup_ratio") else "warmup_steps"
    c.put("optimizer.schedule", _SCHEDULES.get(kind, "cosine" if "cosine" in kind else "constant"))
    if kind in _SCHEDULES:
        c.note("optimizer.schedule", "lr_scheduler_type")
    else:
        c.leave("lr_scheduler_type", f"{kind!r} has no counterpart; {c.run['optimizer.schedule']} is written")
    if kind == "constant":
        c.leave(warmup, "TRL's schedule 'constant' has no warm-up")
    elif amount := c.get(warmup):
        in_steps(warmup, "optimizer.warmup_steps", amount)
        if "optimizer.warmup_steps" in c.run:
            told = "TRL's first update has rate 0, here it has the first step of the rise"
            c.note("optimizer.warmup_steps", warmup, differs=told)
    for option, key, strategy in (
        ("eval_steps", "eval.every", "eval_strategy"),
        ("save_steps", "checkpoint.every", "save_strategy"),
    ):
        match str(c.get(strategy)):
            case "no" | "False":  # YAML reads no as False
                c.put(key, 0, strategy)
            case "epoch" if per_pass is not None:
                c.put(key, per_pass, strategy)
            case "steps" if c.get(option) is not None:
                in_steps(option, key, c.get(option))
                c.note(key, strategy)
            case other:
                c.leave(strategy, f"{other!r} has no number of steps here; set {key}")


def _put_run(c: Conversion, script: Script) -> None:
    if script.model:
        c.run["model.name_or_path"] = script.model
    init = c.get("model_init_kwargs") or {}
    dtype = str(init.get("dtype", init.get("torch_dtype", c.get("dtype")))).removeprefix("torch.")
    half = bool(c.get("fp16"))
    mixed = c.get("bf16") if c.get("bf16") is not None else not half
    c.put(
        "model.dtype",
        "float16" if half and dtype == "float32" else dtype,
        "dtype",
        "fp16",
        "model_init_kwargs",
    )
    known = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code")
    if unknown := [name for name in init if name not in known]:
        c.leave("model_init_kwargs", f"no counterpart for {', '.join(unknown)}")
    c.put("model.autocast", bool(mixed) and dtype == "float32", "bf16")
    if attention := init.get("attn_implementation", c.get("attn_implementation")):
        c.put("model.attn_implementation", attention, "attn_implementation")
    c.carry("model.gradient_checkpointing", "gradient_checkpointing")
    if c.get("trust_remote_code") or init.get("trust_remote_code"):
        c.put("model.trust_remote_code", True, "trust_remote_code")
    peft = {key.partition(".")[2]: value for key, value in c.given.items() if key.startswith("peft_config.")}
    if c.get("use_peft") or peft:
        prefix, rank = ("peft_config.", peft.get("r", 8)) if peft else ("lora_", c.get("lora_r"))
        alpha = peft.get("lora_alpha", 8) if peft else c.get("lora_alpha")
        dropout = peft.get("lora_dropout", 0.0) if peft else c.get("lora_dropout")
        of_peft = "peft_config.lora_" if peft else prefix
        c.put("model.lora.rank", rank, f"{prefix}r", "use_peft")
        c.put("model.lora.alpha", float(alpha), f"{of_peft}alpha")
        c.put("model.lora.dropout", float(dropout), f"{of_peft}dropout")
        modules = f"{'peft_config.' if peft else 'lora_'}target_modules"
        if names := c.get(modules):
            c.put("model.lora.target_modules", names if isinstance(names, str) else ",".join(names), modules)
    c.carry("rollout.max_new_tokens", "max_completion_length")
    c.put("rollout.max_prompt_tokens", 0)
    c.carry("rollout.temperature", "temperature", float)
    c.carry("eval.temperature", "temperature", float)
    c.carry("rollout.top_p", "top_p", float)
    c.put("rollout.top_k", max(0, c.get("top_k") or 0), "top_k")
    if c.get("use_vllm"):
        c.put_engine("vllm", "use_vllm", "vllm_")
    c.carry("optimizer.learning_rate", "learning_rate", float)
    c.put("optimizer.betas", [c.get("adam_beta1"), c.get("adam_beta2")], "adam_beta1", "adam_beta2")
    c.carry("optimizer.adam_eps", "adam_epsilon", float)
    c.carry("optimizer.weight_decay", "weight_decay", float)
    c.carry("optimizer.max_grad_norm", "max_grad_norm", float)
    if re.fullmatch("(paged_)?adamw.*8bit", str(c.get("optim"))):
        c.put("optimizer.moments", "int8", "optim")
    elif not str(c.get("optim")).startswith("adamw"):
        c.leave("optim", f"{c.get('optim')!r}: the optimizer is AdamW")
    if c.get("sync_ref_model"):
        updates = c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]
        alpha, every = c.get("ref_model_mixup_alpha"), c.get("ref_model_sync_steps")
        options = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
        if every == updates:
            c.put("model.reference_decay", 1.0 - alpha, *options)
        else:
            for option in options:
                c.leave(option, f"the reference moves after every step here, not after {every} updates")
    c.carry("seed", "seed")
    c.carry_if_set("output_dir", "output_dir")
    c.carry_if_set("checkpoint.keep", "save_total_limit")
    c.carry_if_set("tracking.run_name", "run_name")
    c.put_trackers("report_to")
    c.put("guard.enabled", False)
