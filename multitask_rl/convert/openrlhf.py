"""OpenRLHF's command line ``train_ppo_ray --a.b value``, read from a shell script."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import is_file
from multitask_rl.convert import messages as say
from multitask_rl.convert.conversion import Conversion, Reading, Row, Source, at_least_0, flat, task_name
from multitask_rl.convert.shell import read_options, read_value, read_words
from multitask_rl.errors import ConfigError

DEFAULTS = """
train: {batch_size: 128, max_epochs: 1, num_episodes: 1, seed: 42}
rollout: {batch_size: 1024, n_samples_per_prompt: 1, temperature: 1.0, top_p: 1.0}
data: {max_len: 2048, max_samples: 100000000, input_key: input, prompt_split: train}
actor: {adam: {lr: 1.0e-6, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.0}, optim: adam, max_norm: 1.0,
  lr_scheduler: cosine_with_min_lr, lr_warmup_ratio: 0.03, min_lr_ratio: 0.1,
  eps_clip: 0.2, policy_loss_type: ppo, loss_agg_mode: token-mean}
critic: {adam: {lr: 9.0e-6}, value_clip: 0.5}
algo:
  advantage: {estimator: gae, gamma: 1.0, lambd: 1.0, is_correction_enable: false, is_correction_type: tis,
    is_correction_level: "off", is_correction_mode: mask, is_correction_gating: ratio,
    is_correction_threshold: [0.5, 5.0]}
  kl: {init_coef: 0.01, estimator: k1, horizon: 10000}
  dynamic_filtering_range: [0, 1]
reward: {overlong_penalty_factor: 1.0}
eval: {temperature: 0.6, n_samples_per_prompt: 4, steps: -1}
ckpt: {save_steps: -1, max_num: 3, output_dir: ./ckpt}
ds: {param_dtype: bf16, attn_implementation: flash_attention_2, lora: {rank: 0, alpha: 16, dropout: 0.0}}
vllm: {tensor_parallel_size: 1, gpu_memory_utilization: 0.95}
"""
BEFORE = """
actor: {model_name_or_path: pretrain, aux_loss_coef: aux_loss_coef, eps_clip: eps_clip, dual_clip: dual_clip,
  eps_clip_low_high: eps_clip_low_high, policy_loss_type: policy_loss_type, entropy_coef: entropy_loss_coef,
  gradient_checkpointing_enable: gradient_checkpointing, lr_scheduler: lr_scheduler, max_norm: max_norm,
  adam: {lr: actor_learning_rate, betas: adam_betas, weight_decay: l2}, lr_warmup_ratio: lr_warmup_ratio}
critic: {model_name_or_path: critic_pretrain, freezing_steps: freezing_actor_steps, value_clip: value_clip,
  save_value_network: save_value_network, adam: {lr: critic_learning_rate}}
reward: {model_name_or_path: reward_pretrain, remote_url: remote_rm_url, normalize_enable: normalize_reward,
  overlong_buffer_len: overlong_buffer_len, overlong_penalty_factor: overlong_penalty_factor,
  clip_range: reward_clip_range}
data: {prompt_dataset: prompt_data, prompt_probs: prompt_data_probs, prompt_split: prompt_split,
  input_key: input_key, label_key: label_key, input_template: input_template, max_samples: max_samples,
  apply_chat_template: apply_chat_template, max_len: max_len}
train: {agent_func_path: agent_func_path, async_enable: async_train, enable_ema: enable_ema, seed: seed,
  ema_beta: ema_beta, full_determinism_enable: full_determinism, dynamic_batch_enable: use_dynamic_batch,
  batch_size: train_batch_size, micro_batch_size: micro_train_batch_size, num_episodes: num_episodes,
  max_epochs: max_epochs}
rollout: {max_new_tokens: [max_new_tokens, generate_max_len], batch_size: rollout_batch_size, top_p: top_p,
  micro_batch_size: micro_rollout_batch_size, n_samples_per_prompt: n_samples_per_prompt,
  temperature: temperature}
algo: {advantage: {estimator: advantage_estimator, no_std_norm: no_advantage_std_norm, gamma: gamma,
  lambd: lambd, is_correction_enable: enable_vllm_is_correction,
  is_correction_threshold: vllm_is_truncated_threshold},
  kl: {init_coef: init_kl_coef, target: kl_target, horizon: kl_horizon, estimator: kl_estimator,
  use_loss: use_kl_loss}, dynamic_filtering_enable: dynamic_filtering,
  dynamic_filtering_range: dynamic_filtering_reward_range}
eval: {dataset: eval_dataset, split: eval_split, steps: eval_steps, temperature: eval_temperature,
  n_samples_per_prompt: eval_n_samples_per_prompt}
ckpt: {output_dir: save_path, save_steps: save_steps, max_num: max_ckpt_num, path: ckpt_path,
  save_hf: save_hf_ckpt, disable_ds: disable_ds_ckpt, max_mem: max_ckpt_mem, load_enable: load_checkpoint}
logger: {wandb: {project: wandb_project, run_name: wandb_run_name}}
ds: {param_dtype: param_dtype, attn_implementation: attn_implementation, adam_offload: adam_offload,
  lora: {rank: lora_rank, alpha: lora_alpha, dropout: lora_dropout, target_modules: target_modules}}
vllm: {num_engines: vllm_num_engines, tensor_parallel_size: vllm_tensor_parallel_size,
  gpu_memory_utilization: vllm_gpu_memory_utilization}
"""
"""Present options: their names before 0.11."""
REASONS = r"""
.*micro_batch_size|.*max_tokens_per_gpu|train\.dynamic_batch.*|rollout\.vllm_generate.*: memory is bounded by
  batch.tokens_per_microbatch and rollout.max_batch_tokens
.*num_nodes|.*num_gpus_per_node|train\.colocate.*|.*offload.*|ds\..*|vllm\..*|local_rank|.*colocate.*: devices
  and layout: device_map, batch, rollout.engine_config, ray
train\.(async|partial).*: rollouts beside the update: rollout.max_staleness (docs/overlap.md)
train\.(enable_ema|ema_beta): no average of the weights is kept
train\.agent_func_path: an agent is an environment of a task (docs/bring-your-environment.md)
train\..*: not an option of the algorithm here
reward\.normalize_enable|reward\.clip_range: rewards are not clipped; type ppo scales them by their running
  deviation, grpo within their group
reward\.stop_properly_penalty_coef: a response at the token limit keeps its reward; type dapo has a length
  penalty
reward\..*: no counterpart for the reward
actor\.(muon.*|optim): the optimizer is AdamW
actor\..*: no counterpart for the actor
critic\..*: the critic shares batches, optimizer and schedule with the actor, except its learning rate
algo\..*: no counterpart among the algorithms here
eval\..*: held-out prompts: eval.*
ckpt\..*: a checkpoint holds everything a resume needs (docs/checkpoints.md)
data\.image.*|data\.max_images.*: models read text only
data\..*: no counterpart for the data
logger\..*|use_wandb|wandb.*|use_tensorboard|logging_steps: tracking has keys of its own (tracking.*)
ref\..*: the reference is the initial actor, with its devices
bf16|flash_attn: model.dtype is bfloat16, model.attn_implementation auto
pretrain_(data|split).*|ptx_coef: a task of type sft trains on given answers beside the others
vllm_.*|enforce_eager|enable_prefix_caching|zero_stage|zpg|deepcompile|overlap_comm|grad_accum_dtype|
  ds_.*|deepspeed.*|ring_.*|packing_samples|load_in_4bit|use_(ms|liger_kernel|ds_universal_ckpt)|perf|
  actor_init_on_gpu|gradient_checkpointing_.*|disable_fast_tokenizer|value_head_prefix: how OpenRLHF runs
"""
_NUM_VALUES = flat("""
actor: {gradient_checkpointing_enable: 0, adam: {betas: 2}, eps_clip_low_high: 2}
algo: {kl: {use_loss: 0, unbiased_gradient: 0}, dynamic_filtering_enable: 0, dynamic_filtering_range: 2,
  advantage: {is_correction_enable: 0, is_correction_threshold: 2, no_std_norm: 0}}
data: {apply_chat_template: 0}
ds: {adam_offload: 0, lora: {target_modules: 20}}
reward: {clip_range: 2}
""")
"""How many values an option has at most, where it is not one; 0 = a switch."""
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


def read(file: Path) -> Reading:
    """Read the options of a shell script."""
    words, told = read_words(file, "train_ppo_ray")
    found = read_options(_options(file, words), told)
    if not found.options:
        raise ConfigError(f"{file}: it has no option of OpenRLHF; expected --a.b VALUE behind train_ppo_ray")
    return found


def _options(file: Path, words: list[str]) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield options, their texts, and their values unless the script computes them."""
    present: dict[str, str] = {}
    for name, old in flat(BEFORE).items():
        present |= dict.fromkeys(old if isinstance(old, list) else [old], name)
    begin = next((i for i, word in enumerate(words) if word.endswith("train_ppo_ray")), len(words))
    index = 0
    while index < len(words):
        name, equals, text = words[index].removeprefix("--").partition("=")
        is_option = words[index].startswith("--") and ("." in name or index > begin)
        index += 1
        if not is_option:
            continue
        values = [text] if equals else []
        name = present.get(name, name)
        while not equals and index < len(words) and len(values) < _NUM_VALUES.get(name, 1):
            if words[index].startswith("--") or words[index] in _PROGRAMS or "[@]" in words[index]:
                break
            values.append(words[index])
            index += 1
        whole = " ".join(values)
        if not values or _NUM_VALUES.get(name) == 0:
            yield name, whole, {name: True}
        elif "$" in whole:
            yield name, whole, None
        elif name in ("data.input_template", "data.prompt_dataset", "data.prompt_probs"):
            yield name, whole, {name: whole}
        else:
            found = [read_value(value, f"{file}: --{name}") for value in values]
            yield name, whole, {name: found[0] if len(found) == 1 else found}


def tasks(c: Conversion) -> None:
    """Write a task per data set."""
    named = c.dataset or c.get("data.prompt_dataset") or ""
    sets = [one.strip() for one in str(named).split(",") if one.strip()]
    c.need(sets, "data set", "data.prompt_dataset", instead="--dataset")
    entries = rewards(c)
    c.need(entries, "reward", "reward.remote_url", "train.agent_func_path")
    probs = [float(p) for p in str(c.get("data.prompt_probs") or "").split(",") if p.strip()]
    if probs and len(probs) != len(sets):
        raise ConfigError(f"{c.file}: data.prompt_probs has {len(probs)} numbers for {len(sets)} data sets")
    weights = probs or c.weights_by_rows(sets)
    for index, one in enumerate(sets):
        own: dict[str, Any] = {"dataset": one.rpartition("@")[2]}
        if (split := c.get("data.prompt_split")) != "train":
            own["split"] = split
        if len(sets) > 1:
            own["weight"] = weights[index] if weights else 1.0
        c.tasks[task_name(one, c.tasks)] = {**own, "rewards": entries}
    told = "" if weights else say.SETS_ALIKE
    c.note("task.dataset", "data.prompt_dataset", "data.prompt_split", differs=told)
    c.note("task.weight", "data.prompt_probs")
    if c.get("eval.dataset"):
        c.carry("task.eval_dataset", "eval.dataset")
        c.put_if_set("task.eval_split", "eval.split")
    key, template = c.get("data.input_key"), c.get("data.input_template")
    chat = bool(c.get("data.apply_chat_template"))
    if template and not chat:
        text = template.replace("\\n", "\n").replace("{}", f"{{{key}}}", 1)
        c.put("task.prompt", text, "data.input_key", "data.input_template")
    else:
        c.put("task.prompt", f"{{{key}}}", "data.input_key")
        c.leave("data.input_template", say.TEMPLATE_UNUSED)
    c.put("task.chat", chat, "data.apply_chat_template")


def rewards(c: Conversion) -> list[dict[str, Any]]:
    """Return the rewards of every task: a function with an adapter behind it, or reward models."""
    url, model = c.get("reward.remote_url"), c.get("reward.model_name_or_path")
    if c.reward:
        return [{"plugin": c.reward}]
    if isinstance(url, str) and url.endswith(".py"):
        path = next((p for p in (Path(url), c.file.parent / url) if is_file(p)), None)
        if path is None:
            raise ConfigError(
                f"{c.file}: the reward function {url!r} is not found here nor beside the script; "
                "copy it there, or name another with --reward"
            )
        label = c.get("data.label_key")
        named = label is None or str(label).isidentifier()
        text = _ADAPTER.replace("{parameter}", f", {label}" if label and named else "")
        text = text.replace("{label}", (label if named else f"rollout.row[{label!r}]") or '""')
        c.files["rewards.py"] = path.read_text(encoding="utf-8").rstrip() + text
        c.note("task.rewards", "reward.remote_url", "data.label_key", differs=say.NO_EOS)
        return [{"plugin": "rewards.py:openrlhf_reward"}]
    if model:
        c.note("task.rewards", "reward.model_name_or_path")
    names = str(model).split(",") if model else []
    return [{"plugin": "rm_hf", "config": {"model_name": name}} for name in names]


def algorithm(c: Conversion) -> None:
    """Write the type, and what belongs to it alone."""
    option, loss, buffer = "algo.advantage.estimator", "actor.policy_loss_type", "reward.overlong_buffer_len"
    estimator = c.get(option)
    kind, normalisation = {
        "gae": ("ppo", ""),
        "reinforce": ("reinforce_pp", ""),
        "reinforce_baseline": ("reinforce_pp", ""),
        "rloo": ("rloo", "none"),
        "group_norm": ("grpo", "group"),
        "dr_grpo": ("grpo", "none"),
    }.get(estimator, ("grpo", "none"))
    if estimator == "flash_reinforce":
        c.leave(option, say.FLASH_REINFORCE)
    if c.get(loss) == "gspo" and kind == "grpo":
        kind = "gspo"
        c.note("task.type", loss)
    elif c.get(loss) != "ppo":
        c.leave(loss, say.NOT_GSPO, estimator=estimator)
    if (length := c.get(buffer)) is not None:
        if kind == "grpo":
            kind = "dapo"
            c.put("algorithm.overlong_buffer", int(length), buffer)
            c.carry("algorithm.overlong_weight", "reward.overlong_penalty_factor", float)
        else:
            c.leave(buffer, say.NOT_DAPO, kind=kind)
    c.task = {"type": kind, **c.task}
    c.note("task.type", option)
    if normalisation:
        c.put("algorithm.normalisation", normalisation, option)
    if kind == "reinforce_pp":
        c.put("algorithm.group_baseline", estimator == "reinforce_baseline", option)
    if c.get("algo.advantage.no_std_norm") and kind in ("ppo", "reinforce_pp"):
        c.leave("algo.advantage.no_std_norm", say.WHITENS, kind=kind)
    if kind == "ppo":
        options = ("algo.advantage.gamma", "algo.advantage.lambd", "critic.value_clip", "critic.adam.lr")
        c.put_critic(*options, "critic.model_name_or_path")
    elif c.get("algo.advantage.gamma") != 1:
        c.leave("algo.advantage.gamma", say.NOT_DISCOUNTED, kind=kind)


def loss(c: Conversion) -> None:
    """Write bounds, means and weights of the loss.

    0.11.0 enables weights for engine mismatch, later versions have a level; before 0.10, there was an upper
    bound alone.
    """
    clip, gspo = c.get("actor.eps_clip"), c.task["type"] == "gspo"
    for side, bound in zip(("low", "high"), c.get("actor.eps_clip_low_high") or (clip, clip), strict=True):
        c.put(f"algorithm.clip_{side}", float(bound), "actor.eps_clip_low_high", "actor.eps_clip")
    c.put("algorithm.dual_clip", float(c.get("actor.dual_clip") or 0), "actor.dual_clip")
    by_sequence = gspo or c.get("actor.loss_agg_mode") == "seq-mean-token-mean"
    c.put("algorithm.aggregation", "sequence" if by_sequence else "token", "actor.loss_agg_mode")
    entropy = float(c.get("actor.entropy_coef") or 0)
    told = say.TERMS_OVER_TOKENS if gspo and entropy else ""
    c.put("algorithm.entropy_coefficient", entropy, "actor.entropy_coef", differs=told)
    names = ("level", "mode", "threshold", "gating", "enable", "type")
    options = [f"algo.advantage.is_correction_{name}" for name in names]
    level, how, bounds, _, enabled, kind = map(c.get, options)
    level = level or "off"  # YAML reads off as False
    if enabled:
        level, how = {"tis": ("token", "clip"), "icepop": ("token", "mask")}.get(kind, ("sequence", "mask"))
    try:
        low, high = map(float, bounds) if isinstance(bounds, list) else (0.0, bounds)
    except (TypeError, ValueError):
        raise ConfigError(f"{options[2]}: expected two numbers, got {bounds!r}") from None
    bound, exact = (0.0, True) if level == "off" else (float(high), (level, how, low) == ("token", "clip", 0))
    told = "" if exact else say.WEIGHT_CUT_ABOVE
    c.put("algorithm.truncated_is", bound, *options, differs=told, how=how, level=level)


def kl(c: Conversion) -> None:
    """Write the KL in the reward, or in the loss."""
    coefficient, in_loss, estimate, unbiased = (
        f"algo.kl.{name}" for name in ("init_coef", "use_loss", "estimator", "unbiased_gradient")
    )
    is_in_loss = c.get(in_loss)
    if not c.get(coefficient):
        c.put("task.kl.coefficient", 0.0, coefficient)
        return
    if is_in_loss:
        free = c.get(unbiased)
        c.carry("task.kl.coefficient", coefficient, float)
        c.put("task.kl.placement", "loss", in_loss)
        value = "k2" if free else c.get(estimate)
        c.put("task.kl.estimator", value, estimate, unbiased, differs=say.RATIO_LATER, exact=not free)
    else:
        told = say.SCALED if c.task["type"] == "ppo" else say.KL_CENTRED
        c.carry("task.kl.coefficient", coefficient, float, differs=told)
        c.put("task.kl.placement", "reward", in_loss)
        if (value := c.get(estimate)) != "k1":
            c.leave(estimate, say.K1_IN_REWARD, value=value)
    for name in ("target", "horizon"):
        c.leave(f"algo.kl.{name}", f"{say.KL_TARGET} (and kl.horizon, in steps)")


def batch(c: Conversion) -> None:
    """Write prompts, groups, updates and steps.

    ``train.batch_size`` counts responses, ``rollout.batch_size`` prompts.
    """
    prompts, size = c.get("rollout.batch_size"), c.get("rollout.n_samples_per_prompt")
    whole = c.get("train.batch_size")
    c.put("batch.prompts_per_step", prompts, "rollout.batch_size")
    c.put("batch.group_size", size, "rollout.n_samples_per_prompt")
    updates, told = max(1, math.ceil(prompts * size / whole)), say.LAST_PARTIAL
    exact = prompts * size % whole == 0
    c.put("batch.num_minibatches", updates, "train.batch_size", differs=told, exact=exact)
    c.carry("batch.num_epochs", "train.max_epochs")
    if c.get("algo.dynamic_filtering_enable"):
        low, high = c.get("algo.dynamic_filtering_range")
        options = ("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range")
        c.put("batch.refill_rounds", 10, *options, differs=say.REFILL_RANGE, low=low, high=high)
    else:
        c.put("batch.refill_rounds", 0)
    rows = c.rows_of([own["dataset"] for own in c.tasks.values()])
    rows = None if rows is None else min(rows, int(c.get("data.max_samples")))
    steps = None if rows is None else max(1, rows // prompts) * c.get("train.num_episodes")
    c.put_steps(steps, "train.num_episodes", "data.max_samples")


def schedule(c: Conversion) -> None:
    """Write the schedule and the warm-up, a share of all updates."""
    kind, lowest = str(c.get("actor.lr_scheduler")), c.get("actor.min_lr_ratio")
    known = next((s for s in ("cosine", "linear") if kind.startswith(s)), "constant")
    exact = kind in ("cosine", "linear", "constant", "constant_with_warmup")
    options, told = ("actor.lr_scheduler", "actor.min_lr_ratio"), "" if exact else say.LOWEST_RATE
    c.put("optimizer.schedule", known, *options, differs=told, lowest=lowest)
    warmup = "actor.lr_warmup_ratio"
    if kind == "constant" or not c.get(warmup):
        c.leave(warmup, say.NO_WARMUP)
    elif "max_steps" not in c.run:
        c.leave(warmup, say.SHARE_OF_STEPS)
    else:
        updates = c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]
        number = math.ceil(math.ceil(c.get(warmup) * c.run["max_steps"] * updates) / updates)
        c.put("optimizer.warmup_steps", number, warmup, differs=say.FIRST_UPDATE)


def model(c: Conversion) -> None:
    """Write what is loaded as the actor, and its adapters."""
    c.put_if_set("model.name_or_path", "actor.model_name_or_path")
    c.carry("model.dtype", "ds.param_dtype", {"bf16": "bfloat16", "fp16": "float16"}.__getitem__)
    c.carry("model.gradient_checkpointing", "actor.gradient_checkpointing_enable", bool)
    c.leave("ds.attn_implementation", say.ATTENTION)
    if rank := c.get("ds.lora.rank"):
        c.put("model.lora.rank", rank, "ds.lora.rank")
        c.carry("model.lora.alpha", "ds.lora.alpha", float)
        c.carry("model.lora.dropout", "ds.lora.dropout", float)
        if names := c.get("ds.lora.target_modules"):
            text = names if isinstance(names, str) else ",".join(names)
            c.put("model.lora.target_modules", text, "ds.lora.target_modules")


def sampling(c: Conversion) -> None:
    """Write limits of prompts and responses, which OpenRLHF has for both together, and the engine."""
    most, whole = c.get("rollout.max_new_tokens"), c.get("data.max_len")
    if limit := c.get("prompt_max_len"):  # before 0.10
        c.put("rollout.max_prompt_tokens", limit, "prompt_max_len")
        c.put("rollout.max_new_tokens", 1024 if most is None else most, "rollout.max_new_tokens")
    elif most is None:
        c.put("rollout.max_new_tokens", whole // 2, "data.max_len", differs=say.HALF_EACH, whole=whole)
        c.put("rollout.max_prompt_tokens", whole - whole // 2, "data.max_len")
    else:
        c.put("rollout.max_new_tokens", most, "rollout.max_new_tokens")
        c.put("rollout.max_prompt_tokens", max(1, whole - most), "data.max_len")
    c.carry("rollout.temperature", "rollout.temperature", float)
    c.carry("rollout.top_p", "rollout.top_p", float)
    if c.get("vllm.num_engines"):
        c.put_engine("vllm", "vllm.num_engines", "vllm.")


def optimizer(c: Conversion) -> None:
    """Write AdamW's settings; other optimizers are told."""
    c.carry("optimizer.learning_rate", "actor.adam.lr", float)
    c.carry("optimizer.betas", "actor.adam.betas", list)
    c.carry("optimizer.adam_eps", "actor.adam.eps", float)
    c.carry("optimizer.weight_decay", "actor.adam.weight_decay", float)
    c.carry("optimizer.max_grad_norm", "actor.max_norm", float)
    if c.get("ds.adam_offload"):
        c.put("optimizer.moments", "host", "ds.adam_offload")
    if (name := c.get("actor.optim")) != "adam":
        c.leave("actor.optim", say.ADAMW, value=name)


OPENRLHF = Source(
    name="OpenRLHF 0.11 (train_ppo_ray)",
    read=read,
    defaults=DEFAULTS,
    reasons=REASONS,
    counts=("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size", "train.max_epochs"),
    table=(
        tasks,
        algorithm,
        loss,
        kl,
        batch,
        schedule,
        model,
        sampling,
        optimizer,
        Row("seed", "train.seed"),
        Row("eval.every", "eval.steps", at_least_0),
        Row("eval.temperature", "eval.temperature", float),
        Row("task.eval_samples", "eval.n_samples_per_prompt"),
        Row("checkpoint.every", "ckpt.save_steps", at_least_0),
        Row("checkpoint.keep", "ckpt.max_num"),
        Row("output_dir", "ckpt.output_dir"),
        Row("tracking.experiment", "logger.wandb.project", if_set=True),
        Row("tracking.run_name", "logger.wandb.run_name", if_set=True),
    ),
)
