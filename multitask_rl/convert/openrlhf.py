"""OpenRLHF's command line ``train_ppo_ray --a.b value``, read from a shell script."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import is_file
from multitask_rl.convert.conversion import Conversion, task_name
from multitask_rl.convert.shell import read_value, read_words, told_of
from multitask_rl.errors import ConfigError

SOURCE = "OpenRLHF 0.11 (train_ppo_ray)"
DEFAULTS: Mapping[str, Any] = {
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.num_episodes": 1,
    "train.seed": 42,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "data.max_len": 2048,
    "data.max_samples": 10**8,
    "data.input_key": "input",
    "data.prompt_split": "train",
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.eps": 1e-8,
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.max_norm": 1.0,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "actor.optim": "adam",
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_type": "tis",
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.is_correction_mode": "mask",
    "algo.advantage.is_correction_gating": "ratio",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.horizon": 10000,
    "algo.dynamic_filtering_range": [0, 1],
    "reward.overlong_penalty_factor": 1.0,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "eval.steps": -1,
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "ckpt.output_dir": "./ckpt",
    "ds.param_dtype": "bf16",
    "ds.attn_implementation": "flash_attention_2",
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0.0,
    "vllm.tensor_parallel_size": 1,
    "vllm.gpu_memory_utilization": 0.95,
}
BEFORE: Mapping[str, str] = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "save_path": "ckpt.output_dir",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "ckpt_path": "ckpt.path",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "max_samples": "data.max_samples",
    "max_len": "data.max_len",
    "agent_func_path": "train.agent_func_path",
    "async_train": "train.async_enable",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "full_determinism": "train.full_determinism_enable",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "aux_loss_coef": "actor.aux_loss_coef",
    "freezing_actor_steps": "critic.freezing_steps",
    "save_value_network": "critic.save_value_network",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "max_new_tokens": "rollout.max_new_tokens",
    "generate_max_len": "rollout.max_new_tokens",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "num_episodes": "train.num_episodes",
    "max_epochs": "train.max_epochs",
    "seed": "train.seed",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "max_norm": "actor.max_norm",
    "value_clip": "critic.value_clip",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "param_dtype": "ds.param_dtype",
    "attn_implementation": "ds.attn_implementation",
    "adam_offload": "ds.adam_offload",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
}
"""Options before 0.11 -> present ones."""
REASONS: Mapping[str, str] = {
    r".*micro_batch_size|.*max_tokens_per_gpu|train\.dynamic_batch.*|rollout\.vllm_generate.*": (
        "memory is bounded by batch.tokens_per_microbatch and rollout.max_batch_tokens"
    ),
    r".*num_nodes|.*num_gpus_per_node|train\.colocate.*|.*offload.*|ds\..*|vllm\..*|local_rank|"
    r".*colocate.*": ("devices and layout: device_map, batch, rollout.engine_config, ray"),
    r"train\.(async|partial).*": "rollouts beside the update: rollout.max_staleness (docs/overlap.md)",
    r"train\.(enable_ema|ema_beta)": "no average of the weights is kept",
    r"train\.agent_func_path": "an agent is an environment of a task (docs/bring-your-environment.md)",
    r"train\..*": "not an option of the algorithm here",
    r"reward\.normalize_enable|reward\.clip_range": (
        "rewards are not clipped; type ppo scales them by their running deviation, grpo within their group"
    ),
    r"reward\.stop_properly_penalty_coef": (
        "a response at the token limit keeps its reward; type dapo has a length penalty"
    ),
    r"reward\..*": "no counterpart for the reward",
    r"actor\.(muon.*|optim)": "the optimizer is AdamW",
    r"actor\.aux_loss_coef|actor\..*": "no counterpart for the actor",
    r"critic\..*": (
        "the critic shares batches, optimizer and schedule with the actor, except its learning rate"
    ),
    r"algo\..*": "no counterpart among the algorithms here",
    r"eval\..*": "held-out prompts: eval.*",
    r"ckpt\..*": "a checkpoint holds everything a resume needs (docs/checkpoints.md)",
    r"data\.image.*|data\.max_images.*": "models read text only",
    r"data\..*": "no counterpart for the data",
    r"logger\..*|use_wandb|wandb.*|use_tensorboard|logging_steps": (
        "tracking has keys of its own (tracking.*)"
    ),
    r"ref\..*": "the reference is the initial actor, with its devices",
    r"bf16|flash_attn": "model.dtype is bfloat16, model.attn_implementation auto",
    r"pretrain_(data|split).*|ptx_coef": "a task of type sft trains on given answers beside the others",
    r"vllm_.*|enforce_eager|enable_prefix_caching|zero_stage|zpg|deepcompile|overlap_comm|grad_accum_dtype|"
    r"ds_.*|deepspeed.*|ring_.*|packing_samples|load_in_4bit|use_(ms|liger_kernel|ds_universal_ckpt)|perf|"
    r"actor_init_on_gpu|gradient_checkpointing_.*|disable_fast_tokenizer|value_head_prefix": (
        "how OpenRLHF runs"
    ),
}
_SWITCHES = {
    "data.apply_chat_template",
    "algo.kl.use_loss",
    "algo.kl.unbiased_gradient",
    "algo.dynamic_filtering_enable",
    "algo.advantage.is_correction_enable",
    "algo.advantage.no_std_norm",
    "actor.gradient_checkpointing_enable",
    "ds.adam_offload",
}
_NUM_VALUES = {
    "actor.adam.betas": 2,
    "actor.eps_clip_low_high": 2,
    "algo.dynamic_filtering_range": 2,
    "algo.advantage.is_correction_threshold": 2,
    "reward.clip_range": 2,
    "ds.lora.target_modules": 20,
    **dict.fromkeys(_SWITCHES, 0),
}
"""Values of an option at most, where it is not one."""
_PROGRAMS = ("python", "python3", "ray", "deepspeed", "torchrun")
_ADAPTER = '''


def openrlhf_reward(rollout{parameter}):
    """Call ``reward_func`` as OpenRLHF does: for one response, with the prompt as the model has seen it."""
    prompt = rollout.prompt.text
    found = reward_func([prompt + rollout.response], [prompt], [{label}])
    found = found[0] if isinstance(found, list) else found
    value = found["rewards"] if isinstance(found, dict) else found
    return float(value[0] if getattr(value, "ndim", isinstance(value, list)) else value)
'''


def convert_openrlhf(
    file: Path, *, dataset: str = "", reward: str = "", num_rows: int | None = None
) -> Conversion:
    """Convert a shell script; the arguments are those of ``convert_trl``."""
    given, computed, told = _options(file)
    if not given:
        raise ConfigError(f"{file}: it has no option of OpenRLHF; expected --a.b VALUE behind train_ppo_ray")
    c = Conversion(SOURCE, given, DEFAULTS, REASONS, computed=computed, num_rows=num_rows)
    _put_tasks(c, file, dataset, reward)
    _put_algorithm(c)
    _put_kl(c)
    _put_batch(c)
    _put_run(c)
    c.finish()
    c.left |= told
    return c


def _options(file: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return options with their values, those that the script computes, and what is told of others."""
    given: dict[str, Any] = {}
    computed: dict[str, str] = {}
    texts: dict[str, list[str]] = defaultdict(list)
    words, told = read_words(file, "train_ppo_ray")
    begin = next((i for i, word in enumerate(words) if word.endswith("train_ppo_ray")), len(words))
    index = 0
    while index < len(words):
        name, equals, text = words[index].removeprefix("--").partition("=")
        is_option = words[index].startswith("--") and ("." in name or index > begin)
        index += 1
        if not is_option:
            continue
        values = [text] if equals else []
        name = BEFORE.get(name, name)
        while not equals and index < len(words) and len(values) < _NUM_VALUES.get(name, 1):
            if words[index].startswith("--") or words[index] in _PROGRAMS or "[@]" in words[index]:
                break
            values.append(words[index])
            index += 1
        texts[name].append(" ".join(values))
        if name in _SWITCHES:
            given[name] = True
        elif any("$" in value for value in values):
            computed[name] = " ".join(values)
        elif not values:
            given[name] = True
        elif name in ("data.input_template", "data.prompt_dataset", "data.prompt_probs"):
            given[name] = " ".join(values)
        else:
            read = [read_value(value, f"{file}: --{name}") for value in values]
            given[name] = read[0] if len(read) == 1 else read
    told |= {name: told_of(own) for name, own in texts.items() if len({*own}) > 1}
    return given, computed, told


def _put_tasks(c: Conversion, file: Path, dataset: str, reward: str) -> None:
    named = dataset or c.get("data.prompt_dataset") or ""
    sets = [one.strip() for one in str(named).split(",") if one.strip()]
    c.need(sets, "data set", "--dataset", str(file), "data.prompt_dataset")
    rewards: list[dict[str, Any]] = []
    url, model = c.get("reward.remote_url"), c.get("reward.model_name_or_path")
    if reward:
        rewards = [{"plugin": reward}]
    elif isinstance(url, str) and url.endswith(".py"):
        path = next((p for p in (Path(url), file.parent / url) if is_file(p)), None)
        if path is None:
            raise ConfigError(
                f"{file}: the reward function {url!r} is not found here nor beside the script; "
                "copy it there, or name another with --reward"
            )
        label = c.get("data.label_key")
        named = label is None or str(label).isidentifier()
        text = _ADAPTER.replace("{parameter}", f", {label}" if label and named else "")
        text = text.replace("{label}", (label if named else f"rollout.row[{label!r}]") or '""')
        c.files["rewards.py"] = path.read_text(encoding="utf-8").rstrip() + text
        rewards = [{"plugin": "rewards.py:openrlhf_reward"}]
        told = "a query of OpenRLHF ends with the special tokens of the response, here it has none"
        c.note("task.rewards", "reward.remote_url", "data.label_key", differs=told)
    elif model:
        names = str(model).split(",")
        rewards = [{"plugin": "rm_hf", "config": {"model_name": name}} for name in names]
        c.note("task.rewards", "reward.model_name_or_path")
    options = ("reward.remote_url", "train.agent_func_path")
    c.need([r["plugin"] for r in rewards], "reward", "--reward", str(file), *options)
    probs = [float(p) for p in str(c.get("data.prompt_probs") or "").split(",") if p.strip()]
    if probs and len(probs) != len(sets):
        raise ConfigError(f"{file}: data.prompt_probs has {len(probs)} numbers for {len(sets)} data sets")
    weights = probs or c.weights_by_rows(sets)
    for index, one in enumerate(sets):
        own: dict[str, Any] = {"dataset": one.rpartition("@")[2] if "@" in one else one}
        if (split := c.get("data.prompt_split")) != "train":
            own["split"] = split
        if len(sets) > 1:
            own["weight"] = weights[index] if weights else 1.0
        c.tasks[task_name(one, c.tasks)] = {**own, "rewards": rewards}
    told = "" if weights else "rows of all sets are drawn alike; give weights by rows"
    c.note("task.dataset", "data.prompt_dataset", "data.prompt_split", differs=told)
    c.note("task.weight", "data.prompt_probs")
    if evaluation := c.get("eval.dataset"):
        c.put("task.eval_dataset", evaluation, "eval.dataset")
        c.carry_if_set("task.eval_split", "eval.split")
    key, template = c.get("data.input_key"), c.get("data.input_template")
    chat = bool(c.get("data.apply_chat_template"))
    if template and not chat:
        text = template.replace("\\n", "\n").replace("{}", f"{{{key}}}", 1)
        c.put("task.prompt", text, "data.input_key", "data.input_template")
    else:
        c.put("task.prompt", f"{{{key}}}", "data.input_key")
        c.leave("data.input_template", "OpenRLHF does not use it with apply_chat_template")
    c.put("task.chat", chat, "data.apply_chat_template")


def _put_algorithm(c: Conversion) -> None:
    name = "algo.advantage.estimator"
    estimator = c.get(name)
    kind, normalisation = {
        "gae": ("ppo", ""),
        "reinforce": ("reinforce_pp", ""),
        "reinforce_baseline": ("reinforce_pp", ""),
        "rloo": ("rloo", "none"),
        "group_norm": ("grpo", "group"),
        "dr_grpo": ("grpo", "none"),
    }.get(estimator, ("grpo", "none"))
    if estimator == "flash_reinforce":
        c.leave(name, "its baseline is the mean of the batch, which no type has; grpo stands in its place")
    if c.get("actor.policy_loss_type") == "gspo" and kind == "grpo":
        kind = "gspo"
        c.note("task.type", "actor.policy_loss_type")
    elif c.get("actor.policy_loss_type") != "ppo":
        c.leave(
            "actor.policy_loss_type", f"the ratio of a response is of type gspo, which {estimator} is not"
        )
    if (buffer := c.get("reward.overlong_buffer_len")) is not None:
        if kind == "grpo":
            kind = "dapo"
            c.put("task.algorithm_config.overlong_buffer", int(buffer), "reward.overlong_buffer_len")
            factor = "reward.overlong_penalty_factor"
            c.carry("task.algorithm_config.overlong_weight", factor, float)
        else:
            c.leave("reward.overlong_buffer_len", f"only type dapo has a length penalty, not {kind}")
    c.task = {"type": kind, **c.task}
    c.note("task.type", name)
    if normalisation:
        c.put("task.algorithm_config.normalisation", normalisation, name)
    if kind == "reinforce_pp":
        c.put("task.algorithm_config.group_baseline", estimator == "reinforce_baseline", name)
    if c.get("algo.advantage.no_std_norm") and kind in ("ppo", "reinforce_pp"):
        c.leave("algo.advantage.no_std_norm", f"type {kind} whitens its advantages")
    if kind == "ppo":
        c.carry("task.algorithm_config.gamma", "algo.advantage.gamma", float)
        c.carry("task.algorithm_config.gae_lambda", "algo.advantage.lambd", float)
        told = "the reward is scaled by its running deviation first, so that the unit of values differs"
        c.carry("task.algorithm_config.value_clip", "critic.value_clip", float, differs=told)
        c.put("critic.trunk", "separate")
        c.carry("critic.learning_rate", "critic.adam.lr", float)
        c.carry_if_set("critic.name_or_path", "critic.model_name_or_path")
    elif c.get("algo.advantage.gamma") != 1:
        c.leave("algo.advantage.gamma", f"rewards of type {kind} are not discounted")
    clip = c.get("actor.eps_clip")
    low, high = c.get("actor.eps_clip_low_high") or (clip, clip)
    c.put("task.algorithm_config.clip_low", float(low), "actor.eps_clip_low_high", "actor.eps_clip")
    c.put("task.algorithm_config.clip_high", float(high), "actor.eps_clip_low_high", "actor.eps_clip")
    c.put("task.algorithm_config.dual_clip", float(c.get("actor.dual_clip") or 0), "actor.dual_clip")
    mode = "seq-mean-token-mean" if kind == "gspo" else c.get("actor.loss_agg_mode")
    aggregation = "sequence" if mode == "seq-mean-token-mean" else "token"
    c.put("task.algorithm_config.aggregation", aggregation, "actor.loss_agg_mode")
    told = "with a KL or entropy term OpenRLHF averages those over tokens" if kind == "gspo" else ""
    entropy = float(c.get("actor.entropy_coef") or 0)
    c.put(
        "task.algorithm_config.entropy_coefficient",
        entropy,
        "actor.entropy_coef",
        differs=told if entropy else "",
    )
    _put_engine_correction(c)


def _put_engine_correction(c: Conversion) -> None:
    """Write the bound of the weight for engine mismatch: 0.11.0 enables it, later versions have a level."""
    correction = "algo.advantage.is_correction"
    level, how = c.get(f"{correction}_level") or "off", c.get(f"{correction}_mode")  # YAML reads off as False
    if c.get(f"{correction}_enable"):
        kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask")}
        level, how = kinds.get(c.get(f"{correction}_type"), ("sequence", "mask"))
    bounds = c.get(f"{correction}_threshold")
    low, high = bounds if isinstance(bounds, list) else (0.0, bounds)  # before 0.10, an upper bound alone
    is_same = level == "off" or (level == "token" and how == "clip" and low == 0)
    told = (
        "" if is_same else f"{how} per {level} in OpenRLHF, here a token's weight is cut at its upper bound"
    )
    names = ("level", "mode", "threshold", "gating", "enable", "type")
    options = [f"{correction}_{name}" for name in names]
    high = 0.0 if level == "off" else float(high)
    c.put("task.algorithm_config.truncated_is", high, *options, differs=told)


def _put_kl(c: Conversion) -> None:
    name, in_loss = "algo.kl.init_coef", c.get("algo.kl.use_loss")
    if not c.get(name):
        c.put("task.kl.coefficient", 0.0, name)
        return
    if in_loss:
        free = c.get("algo.kl.unbiased_gradient")
        c.carry("task.kl.coefficient", name, float)
        c.put("task.kl.placement", "loss", "algo.kl.use_loss")
        told = "the same gradient in the first update after sampling; OpenRLHF weighs it by the ratio later"
        options = ("algo.kl.estimator", "algo.kl.unbiased_gradient")
        c.put(
            "task.kl.estimator", "k2" if free else c.get(options[0]), *options, differs=told if free else ""
        )
    else:
        told = (
            "OpenRLHF subtracts the KL still to come from each token and does not centre it; here the "
            "KL of the response is centred in its group"
        )
        told = "the reward is scaled by its running deviation first" if c.task["type"] == "ppo" else told
        c.carry("task.kl.coefficient", name, float, differs=told)
        c.put("task.kl.placement", "reward", "algo.kl.use_loss")
        if (estimate := c.get("algo.kl.estimator")) != "k1":
            c.leave("algo.kl.estimator", f"{estimate!r}: the KL in the reward is k1")
    why = "OpenRLHF's target is the KL per token, ours per response: set kl.target (and kl.horizon, in steps)"
    c.leave("algo.kl.target", why)
    c.leave("algo.kl.horizon", why)


def _put_batch(c: Conversion) -> None:
    """Write prompts, groups and updates.

    ``train.batch_size`` counts responses, ``rollout.batch_size`` prompts.
    """
    prompts, size = c.get("rollout.batch_size"), c.get("rollout.n_samples_per_prompt")
    batch, epochs = c.get("train.batch_size"), c.get("train.max_epochs")
    c.put("batch.prompts_per_step", prompts, "rollout.batch_size")
    c.put("batch.group_size", size, "rollout.n_samples_per_prompt")
    told = "" if prompts * size % batch == 0 else "the last update of a step is not full in OpenRLHF"
    minibatches = max(1, math.ceil(prompts * size / batch))
    c.put("batch.num_minibatches", minibatches, "train.batch_size", differs=told)
    c.put("batch.num_epochs", epochs, "train.max_epochs")
    if c.get("algo.dynamic_filtering_enable"):
        low, high = c.get("algo.dynamic_filtering_range")
        told = f"OpenRLHF keeps groups with a mean score in ({low:g}, {high:g}), here rewards differ"
        options = ("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range")
        c.put("batch.refill_rounds", 10, *options, differs=told)
    else:
        c.put("batch.refill_rounds", 0)
    rows = c.rows_of([own["dataset"] for own in c.tasks.values()])
    rows = None if rows is None else min(rows, int(c.get("data.max_samples")))
    steps = None if rows is None else max(1, rows // prompts) * c.get("train.num_episodes")
    c.put_steps(steps, "train.num_episodes", "data.max_samples")
    kind = str(c.get("actor.lr_scheduler"))
    told = f"OpenRLHF ends at {c.get('actor.min_lr_ratio'):g} of the rate, here it ends at 0"
    schedule = next((s for s in ("cosine", "linear") if kind.startswith(s)), "constant")
    same = kind in ("cosine", "linear", "constant", "constant_with_warmup")
    options = ("actor.lr_scheduler", "actor.min_lr_ratio")
    c.put("optimizer.schedule", schedule, *options, differs="" if same else told)
    share = c.get("actor.lr_warmup_ratio")
    if kind == "constant" or not share:
        c.leave("actor.lr_warmup_ratio", "this schedule has no warm-up")
    elif steps is None:
        c.leave("actor.lr_warmup_ratio", "a share of steps whose number is not known; give --rows N")
    else:
        updates = minibatches * epochs
        told = "OpenRLHF's first update has rate 0, here it has the first step of the rise"
        number = math.ceil(math.ceil(share * steps * updates) / updates)
        c.put("optimizer.warmup_steps", number, "actor.lr_warmup_ratio", differs=told)


def _put_run(c: Conversion) -> None:
    c.carry_if_set("model.name_or_path", "actor.model_name_or_path")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[c.get("ds.param_dtype")]
    c.put("model.dtype", dtype, "ds.param_dtype")
    option = "actor.gradient_checkpointing_enable"
    c.carry("model.gradient_checkpointing", option, bool)
    c.leave("ds.attn_implementation", "model.attn_implementation=auto: kernels that share a group's prompt")
    if rank := c.get("ds.lora.rank"):
        c.put("model.lora.rank", rank, "ds.lora.rank")
        c.carry("model.lora.alpha", "ds.lora.alpha", float)
        c.carry("model.lora.dropout", "ds.lora.dropout", float)
        if names := c.get("ds.lora.target_modules"):
            text = names if isinstance(names, str) else ",".join(names)
            c.put("model.lora.target_modules", text, "ds.lora.target_modules")
    most, whole = c.get("rollout.max_new_tokens"), c.get("data.max_len")
    if limit := c.get("prompt_max_len"):  # before 0.10
        c.put("rollout.max_prompt_tokens", limit, "prompt_max_len")
        c.put("rollout.max_new_tokens", 1024 if most is None else most, "rollout.max_new_tokens")
    elif most is None:
        told = f"OpenRLHF gives a response what its prompt leaves of {whole} tokens; here half is for each"
        c.put("rollout.max_new_tokens", whole // 2, "data.max_len", differs=told)
        c.put("rollout.max_prompt_tokens", whole - whole // 2, "data.max_len")
    else:
        c.put("rollout.max_new_tokens", most, "rollout.max_new_tokens")
        c.put("rollout.max_prompt_tokens", max(1, whole - most), "data.max_len")
    c.carry("rollout.temperature", "rollout.temperature", float)
    c.carry("rollout.top_p", "rollout.top_p", float)
    if c.get("vllm.num_engines"):
        c.put_engine("vllm", "vllm.num_engines", "vllm.")
    c.carry("optimizer.learning_rate", "actor.adam.lr", float)
    c.carry("optimizer.betas", "actor.adam.betas", list)
    c.carry("optimizer.adam_eps", "actor.adam.eps", float)
    c.carry("optimizer.weight_decay", "actor.adam.weight_decay", float)
    c.carry("optimizer.max_grad_norm", "actor.max_norm", float)
    if c.get("ds.adam_offload"):
        c.put("optimizer.moments", "host", "ds.adam_offload")
    if c.get("actor.optim") != "adam":
        c.leave("actor.optim", f"{c.get('actor.optim')!r}: the optimizer is AdamW")
    c.carry("seed", "train.seed")
    c.put("eval.every", max(0, c.get("eval.steps")), "eval.steps")
    c.carry("eval.temperature", "eval.temperature", float)
    c.carry("task.eval_samples", "eval.n_samples_per_prompt")
    c.put("checkpoint.every", max(0, c.get("ckpt.save_steps")), "ckpt.save_steps")
    c.carry("checkpoint.keep", "ckpt.max_num")
    c.carry("output_dir", "ckpt.output_dir")
    c.carry_if_set("tracking.experiment", "logger.wandb.project")
    c.carry_if_set("tracking.run_name", "logger.wandb.run_name")
    c.put("guard.enabled", False)
