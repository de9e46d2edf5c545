"""verl's configuration: a YAML file, or the overrides ``a.b.c=value`` of a shell script."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert import messages as say
from multitask_rl.convert.conversion import Conversion, Reading, Row, Source, at_least_0, task_name
from multitask_rl.convert.shell import read_options, read_value, read_words
from multitask_rl.errors import ConfigError

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_O, _VAL = f"{_A}.optim", f"{_R}.val_kwargs"
_FUNCTION, _BUFFER = "reward.custom_reward_function", "reward.reward_kwargs.overlong_buffer_cfg"
DEFAULTS = """
data: {prompt_key: prompt, max_prompt_length: 512, max_response_length: 512, train_batch_size: 1024}
actor_rollout_ref:
  actor:
    {ppo_mini_batch_size: 256, ppo_epochs: 1, grad_clip: 1.0, loss_agg_mode: token-mean, entropy_coeff: 0,
    loss_scale_factor: <number>,
    clip_ratio_low: 0.2, clip_ratio_high: 0.2, clip_ratio_c: 3.0, policy_loss: {loss_mode: vanilla},
    use_kl_loss: false, kl_loss_coef: 0.001, kl_loss_type: low_var_kl,
    optim: {lr: 1.0e-6, betas: [0.9, 0.999], weight_decay: 0.01, lr_warmup_steps: -1,
    lr_warmup_steps_ratio: 0.0, lr_scheduler_type: constant, min_lr_ratio: 0.0}}
  rollout:
    {n: 1, temperature: 1.0, top_p: 1.0, top_k: -1, name: vllm, gpu_memory_utilization: 0.5,
    tensor_model_parallel_size: 2, val_kwargs: {temperature: 0, do_sample: false, n: 1}}
  model: {enable_gradient_checkpointing: true, lora_rank: 0, lora_alpha: 16,
    lora: {rank: 0, alpha: 32, dropout: 0.0}}
critic: {optim: {lr: 1.0e-5}, cliprange_value: 0.5}
algorithm:
  {adv_estimator: gae, gamma: 1.0, lam: 1.0, norm_adv_by_std_in_grpo: true, use_kl_in_reward: false,
  kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.001, horizon: 10000},
  filter_groups: {max_num_gen_batches: 0}, rollout_correction: {rollout_is_threshold: 2.0}}
reward:
  {custom_reward_function: {name: compute_score}, reward_kwargs: {overlong_buffer_cfg: {penalty_factor: 1.0}}}
trainer:
  {total_epochs: 30, total_training_steps: <number>, max_actor_ckpt_to_keep: <number>, save_freq: -1,
  test_freq: -1, resume_mode: auto, logger: [console, wandb]}
"""
MOVED: Mapping[str, str] = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
}
"""Options of versions before 0.8 -> present ones."""
REASONS = r"""
.*micro_batch_size.*|.*dynamic_bsz|.*max_token_len_per_gpu|.*max_num_(batched_tokens|seqs): memory is bounded
  by batch.tokens_per_microbatch and rollout.max_batch_tokens
.*(fsdp_config|megatron|veomni|torchtitan)\..*|.*\.strategy|.*ulysses.*|.*offload.*|
  .*remove_padding|.*torch_compile|.*fused_kernels|.*liger|.*forward_prefetch: devices and layout: device_map,
  batch
actor_rollout_ref\.ref\..*: the reference has the actor's devices and batches
actor_rollout_ref.actor\.clip_ratio: verl reads clip_ratio_low and clip_ratio_high, which have defaults of
  their own (0.2): alone it changes nothing
actor_rollout_ref.actor\..*: no counterpart in the loss of the algorithms here
actor_rollout_ref.rollout\.multi_turn\..*|actor_rollout_ref.rollout\.agent\..*|data\.(tool|function_tool).*:
  turns and tools: environment of a task (docs/environments.md)
actor_rollout_ref.rollout\.val_kwargs\..*: held-out prompts have a temperature of their own
  (eval.temperature), else the keys of training: rollout.top_p, rollout.top_k
actor_rollout_ref.rollout\..*: the engine has its own keys: rollout.engine_config
actor_rollout_ref.model\.custom_chat_template: a file chat_template.jinja in the model's directory
actor_rollout_ref.model\..*: no counterpart for the model
critic\..*: the critic shares batches, optimizer and schedule with the actor, except its learning rate
reward\.reward_model\..*|reward_model\..*: a reward model is a plugin with its own configuration (rm_hf)
reward\..*|sandbox_fusion\..*: rewards run in workers: scoring.*; programs: docs/sandbox.md
algorithm\.rollout_correction\..*: the weight for engine mismatch is per token, with an upper bound
algorithm\..*: no counterpart among the algorithms here
distillation\..*: a task of type distill
data\.(shuffle|seed|.*workers|return_.*|use_shm): every task has a stream of shuffled rows, from the seed
data\..*: no counterpart for the data
trainer\.(n_gpus_per_node|nnodes|device|balance_batch): devices: device_map; sizes of batches are not per
  device in verl either
trainer\.(log_val.*|.*_data_dir): responses are written to rollouts.jsonl (tracking.store_rollouts)
trainer\.val_before_train: held-out prompts are evaluated at the start and the end, always
trainer\.val_only: `multitask-rl eval` evaluates without training
trainer\.critic_warmup: actor and critic learn from the first step on
trainer\..*|global_profiler.*|ray_kwargs.*|transfer_queue.*|skip.*|hydra.*: how verl runs
"""
_TYPES = {
    **{"gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "gdpo": "gdpo", "opo": "opo", "rloo": "rloo"},
    **{"rloo_vectorized": "rloo"},
    **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), "reinforce_pp"),
}
"""Estimator -> our type."""
_ESTIMATES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_MEGATRON_LINEAR = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
"""Megatron's names of all linear layers."""
_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own configurations, which hold its defaults."""
_MOST_SOURCES = 32
"""A file with more sources is one task."""
_WHOLE = (f"{_FUNCTION}.reward_kwargs", "custom_reward_function.reward_kwargs")
"""Options whose value is a mapping."""


def read(file: Path) -> Reading:
    """Read a YAML file, or the overrides of a shell script."""
    if file.suffix in (".yaml", ".yml", ".json"):
        tree, _ = load_yaml(file)
        found = Reading(options=dict(_flat(tree if isinstance(tree, Mapping) else {})))
    else:
        words, told = read_words(file, "main_ppo")
        found = read_options(_overrides(file, words, told), told)
        nested = {k: found.options.pop(k) for k in list(found.options) if k.startswith(f"{_WHOLE[0]}.")}
        if nested:
            found.options[_WHOLE[0]] = {k.removeprefix(f"{_WHOLE[0]}."): value for k, value in nested.items()}
    if not found.options:
        raise ConfigError(
            f"{file}: it has no option of verl; expected a.b.c=value in a script, or a YAML file"
        )
    return found


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted options; interpolations and keys of hydra are left out, lists stay whole."""
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value and name not in _WHOLE:
            yield from _flat(value, f"{name}.")
        elif value is not None and not str(value).startswith("${") and key not in ("_target_", "defaults"):
            yield _present(name), value


def _present(name: str) -> str:
    name = name.lstrip("+~")
    found = next((old for old in MOVED if name == old or (old.endswith(".") and name.startswith(old))), None)
    return name if found is None else MOVED[found] + name.removeprefix(found)


def _overrides(
    file: Path, words: list[str], told: dict[str, str]
) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    for word in words:
        name, equals, text = word.partition("=")
        if name == "--config-name" and text.removesuffix(".yaml") not in _CONFIGURATIONS:
            told[f"{name} {text}"] = "its options are not read; print them all with `--cfg job`, convert that"
        if equals and "." in name and name.lstrip("+").replace(".", "_").isidentifier():
            # hydra needs no space behind the colon of {key:value}, YAML does
            spaced = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", text) if text.startswith("{") else text
            is_known = "$" not in text
            values = dict(_flat({name: read_value(spaced, f"{file}: {name}")})) if is_known else None
            yield _present(name), text, values


def tasks(c: Conversion) -> None:
    """Write a task per file, or per source in a file."""
    files, held_out = (list(filter(None, c.texts(f"data.{name}_files"))) for name in ("train", "val"))
    files = [c.dataset] if c.dataset else files
    c.need(files, "data set", "data.train_files", instead="--dataset")
    entries = rewards(c)
    weights = c.weights_by_rows(files)
    for index, one in enumerate(files):
        own: dict[str, Any] = {"dataset": one}
        if len(held_out) == len(files):
            own["eval_dataset"] = held_out[index]
        if len(files) > 1:
            own["weight"] = weights[index] if weights else 1.0
        sources = c.count_values(one, "data_source")
        if not 1 < len(sources) <= _MOST_SOURCES:
            name = Path(one).parent.name if Path(one).stem == "train" else one
            c.tasks[task_name(name, c.tasks)] = {**own, "rewards": entries}
            if len(sources) > 1:
                c.left["column data_source"] = f"{len(sources)} sources of {one} are one task; see key select"
            continue
        c.note("task.select", "column data_source", differs=say.SOURCES_TO_TASKS, file=one)
        share = own.get("weight", float(sources.total())) / sources.total()
        known = c.count_values(own["eval_dataset"], "data_source") if "eval_dataset" in own else {}
        for source, number in sorted(sources.items()):
            part = {**own, "select": {"data_source": source}, "weight": share * number}
            if "eval_dataset" in own and source not in known:
                c.left[f"data.val_files for {source}"] = say.NO_HELD_OUT.format(file=part.pop("eval_dataset"))
            c.tasks[task_name(source, c.tasks)] = {**part, "rewards": entries}
    c.note("task.dataset", "data.train_files", differs="" if weights else say.ROWS_ALIKE)
    if len(held_out) == len(files):
        c.note("task.eval_dataset", "data.val_files")
    else:
        c.leave("data.val_files", say.HELD_OUT_FILES, files=len(held_out), tasks=len(files))
    c.put("task.prompt", f"{{{c.get('data.prompt_key')}}}", "data.prompt_key")
    prefix = "data.apply_chat_template_kwargs."
    for option in [name for name in c.given if name.startswith(prefix)]:
        c.carry(f"task.chat_template_kwargs.{option.removeprefix(prefix)}", option)


def rewards(c: Conversion) -> list[dict[str, Any]]:
    """Return the rewards of every task: a function, verl's own table, a reward model."""
    found: list[dict[str, Any]] = []
    enable, model = "reward.reward_model.enable", "reward.reward_model.model_path"
    if c.reward:
        found = [{"plugin": c.reward}]
    elif path := c.get(f"{_FUNCTION}.path"):
        kwargs = c.get(f"{_FUNCTION}.reward_kwargs")
        config = {"config": {"arguments": kwargs}} if kwargs else {}
        found = [{"plugin": f"verl:{path}:{c.get(f'{_FUNCTION}.name')}", **config}]
        c.note("task.rewards", f"{_FUNCTION}.path", f"{_FUNCTION}.name", f"{_FUNCTION}.reward_kwargs")
    elif not c.get(enable):
        found = [{"plugin": "verl:verl.utils.reward_score:default_compute_score"}]
        c.note("task.rewards", _FUNCTION, differs=say.DEFAULT_SCORE)
    if c.get(enable) and (name := c.get(model)):
        found.append({"plugin": "rm_hf", "config": {"model_name": name}})
        c.note("task.rewards", enable, model, differs=say.ONE_LOGIT)
    if c.get("reward.reward_manager.name") not in (None, "naive", "dapo"):
        c.leave("reward.reward_manager.name", say.ONE_RESPONSE)
    return found


def algorithm(c: Conversion) -> None:
    """Write the type, and what belongs to it alone."""
    option, mode_option = "algorithm.adv_estimator", f"{_A}.policy_loss.loss_mode"
    estimator, mode = c.get(option), c.get(mode_option)
    kind = _TYPES.get(estimator, "grpo")
    if estimator not in _TYPES:
        c.leave(option, say.NO_ESTIMATOR, value=estimator, kind=kind)
    if mode in ("gspo", "cispo") and kind == "grpo":
        kind = mode
        c.note("task.type", mode_option)
    elif mode != "vanilla":
        c.leave(mode_option, say.NO_LOSS_MODE, value=mode, estimator=estimator)
    length = c.get(f"{_BUFFER}.len")
    if c.get(f"{_BUFFER}.enable") and length:
        if kind == "grpo":
            kind = "dapo"
            c.put("algorithm.overlong_buffer", length, f"{_BUFFER}.enable", f"{_BUFFER}.len")
            c.carry("algorithm.overlong_weight", f"{_BUFFER}.penalty_factor", float)
        else:
            c.leave(f"{_BUFFER}.len", say.NOT_DAPO, kind=kind)
    c.task = {"type": kind, **c.task}
    c.note("task.type", option)
    if kind in ("grpo", "dapo", "gspo", "cispo"):
        by_std = "algorithm.norm_adv_by_std_in_grpo"
        c.put("algorithm.normalisation", "group" if c.get(by_std) else "none", by_std)
    if kind == "reinforce_pp":
        c.put("algorithm.group_baseline", estimator.endswith("baseline"), option)
        if c.get("algorithm.gamma") != 1:
            c.leave("algorithm.gamma", say.NOT_DISCOUNTED_HERE, kind=kind)
    elif kind == "ppo":
        options = ("algorithm.gamma", "algorithm.lam", "critic.cliprange_value", "critic.optim.lr")
        c.put_critic(*options, "critic.model.path")


def loss(c: Conversion) -> None:
    """Write bounds and means of the loss.

    A constant denominator is ``samples * max_new_tokens``; ``loss_weight`` makes others.
    """
    c.carry("algorithm.clip_low", f"{_A}.clip_ratio_low", float)
    c.carry("algorithm.clip_high", f"{_A}.clip_ratio_high", float)
    dual, has_none = f"{_A}.clip_ratio_c", c.task["type"] in ("gspo", "cispo")
    c.put("algorithm.dual_clip", 0.0 if has_none else float(c.get(dual)), dual)
    option, scale = f"{_A}.loss_agg_mode", f"{_A}.loss_scale_factor"
    mode, most = c.get(option), c.get("data.max_response_length")
    plain = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
    if mode in plain:
        c.put("algorithm.aggregation", plain[mode], option)
    elif mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        c.put("algorithm.aggregation", "constant", option)
        divisor = 1 if mode == "seq-mean-token-sum" else c.get(scale) or most
        if divisor != most:
            c.put("task.loss_weight", most / divisor, scale, option)
    else:
        c.put("algorithm.aggregation", "token")
        c.leave(option, say.NO_AGGREGATION, value=mode)
    c.carry("algorithm.entropy_coefficient", f"{_A}.entropy_coeff", float)
    weights, cap = (f"algorithm.rollout_correction.rollout_is{end}" for end in ("", "_threshold"))
    if c.get(weights) == "token":
        c.put("algorithm.truncated_is", float(c.get(cap)), weights, cap)
    else:
        c.put("algorithm.truncated_is", 0.0)
        c.leave(weights, say.TOKEN_WEIGHTS, value=c.get(weights))


def kl(c: Conversion) -> None:
    """Write the KL in the loss, else in the reward."""
    in_reward, control = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
    in_loss, coefficient, estimate = (
        f"{_A}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    )
    if c.get(in_loss):
        name = str(c.get(estimate))
        # k3+ has the value of k3 and the gradient of k2
        known = "k2" if name.endswith("+") else _ESTIMATES.get(name)
        if known is None:
            c.leave(estimate, say.NO_ESTIMATE, value=name)
        c.put("task.kl.coefficient", float(c.get(coefficient)), in_loss, coefficient)
        c.put("task.kl.placement", "loss", in_loss)
        c.put("task.kl.estimator", known or "k3", *([estimate] if known else []))
    if c.get(in_reward) and c.get(in_loss):
        c.leave(in_reward, say.BOTH_KL)
    elif c.get(in_reward):
        unscaled = c.task["type"] in ("rloo", "opo")
        exact = unscaled or c.task.get("algorithm_config.normalisation") == "none"
        value, options = float(c.get(f"{control}.kl_coef")), (in_reward, f"{control}.kl_coef")
        c.put("task.kl.coefficient", value, *options, differs=say.KL_SCALED, exact=exact)
        c.put("task.kl.placement", "reward", in_reward)
        if (penalty := c.get("algorithm.kl_penalty")) not in ("kl", "k1"):
            c.leave("algorithm.kl_penalty", say.K1_IN_REWARD, value=penalty)
        if c.get(f"{control}.type") == "adaptive":
            for name in ("type", "target_kl", "horizon"):
                c.leave(f"{control}.{name}", f"{say.KL_TARGET} and kl.horizon")


def batch(c: Conversion) -> None:
    """Write prompts, groups, updates and steps; verl's last mini-batch may be smaller."""
    size, option = "data.train_batch_size", f"{_A}.ppo_mini_batch_size"
    prompts, mini = c.get(size), c.get(option)
    c.put("batch.prompts_per_step", prompts, size)
    c.carry("batch.group_size", f"{_R}.n")
    updates = max(1, math.ceil(prompts / mini))
    c.put("batch.num_minibatches", updates, option, differs=say.LAST_SMALLER, exact=prompts % mini == 0)
    c.carry("batch.num_epochs", f"{_A}.ppo_epochs")
    enable, most = (f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches"))
    if c.get(enable):
        rounds = c.get(most) - 1 if c.get(most) > 0 else 10
        c.put("batch.refill_rounds", rounds, enable, most, differs=say.REFILL_ROUNDS)
    else:
        c.put("batch.refill_rounds", 0, enable)
    total, passes = "trainer.total_training_steps", "trainer.total_epochs"
    if c.get(total):
        c.put_steps(c.get(total), total)
        c.leave(passes, say.STEPS_GIVEN, option=total)
    else:
        # the sources of a file are tasks with one data set
        rows = c.rows_of(dict.fromkeys(own["dataset"] for own in c.tasks.values()))
        c.put_steps(None if rows is None else rows // prompts * c.get(passes), passes)


def model(c: Conversion) -> None:
    """Write what is loaded as the actor, and its adapters."""
    c.put_if_set("model.name_or_path", f"{_M}.path")
    c.put("model.dtype", "bfloat16")
    c.carry("model.gradient_checkpointing", f"{_M}.enable_gradient_checkpointing")
    if c.get(f"{_M}.trust_remote_code"):
        c.put("model.trust_remote_code", True, f"{_M}.trust_remote_code")
    if rank := c.get(f"{_M}.lora_rank"):
        c.put("model.lora.rank", rank, f"{_M}.lora_rank")
        c.carry("model.lora.alpha", f"{_M}.lora_alpha", float)
        if isinstance(c.get(f"{_M}.target_modules"), str):
            c.carry("model.lora.target_modules", f"{_M}.target_modules")
    elif c.get(f"{_M}.lora.rank"):  # of Megatron
        c.carry("model.lora.rank", f"{_M}.lora.rank")
        c.carry("model.lora.alpha", f"{_M}.lora.alpha", float)
        c.carry("model.lora.dropout", f"{_M}.lora.dropout", float)
        modules = c.texts(f"{_M}.lora.target_modules")
        if {*modules} in (set(), {"all-linear"}, _MEGATRON_LINEAR):
            c.put("model.lora.target_modules", "all-linear", f"{_M}.lora.target_modules")
        else:
            c.leave(f"{_M}.lora.target_modules", say.MEGATRON_NAMES)


def sampling(c: Conversion) -> None:
    """Write what is sampled, and by what."""
    c.carry("rollout.max_new_tokens", "data.max_response_length")
    options = ("data.max_prompt_length", "data.filter_overlong_prompts", "data.truncation")
    most, exact, _ = map(c.get, options)
    c.put("rollout.max_prompt_tokens", most, *options, differs=say.LONG_PROMPTS, exact=bool(exact))
    c.carry("rollout.temperature", f"{_R}.temperature", float)
    c.carry("rollout.top_p", f"{_R}.top_p", float)
    c.carry("rollout.top_k", f"{_R}.top_k", at_least_0)
    c.put_engine(c.get(f"{_R}.name"), f"{_R}.name", f"{_R}.", "tensor_model_parallel_size")
    heat, samples = f"{_VAL}.temperature", f"{_VAL}.do_sample"
    c.put("eval.temperature", float(c.get(heat)) if c.get(samples) else 0.0, heat, samples)
    c.carry("task.eval_samples", f"{_VAL}.n")


def optimizer(c: Conversion) -> None:
    """Write AdamW's settings, the schedule and the warm-up."""
    c.carry("optimizer.learning_rate", f"{_O}.lr", float)
    c.carry("optimizer.betas", f"{_O}.betas", list)
    c.carry("optimizer.weight_decay", f"{_O}.weight_decay", float)
    clip = f"{_O}.clip_grad" if f"{_O}.clip_grad" in c.given else f"{_A}.grad_clip"
    c.carry("optimizer.max_grad_norm", clip, float)
    if c.get(name := f"{_A}.fsdp_config.optimizer_offload"):
        c.put("optimizer.moments", "host", name)
    option, lowest_option = f"{_O}.lr_scheduler_type", f"{_O}.min_lr_ratio"
    schedule, lowest = c.get(option), c.get(lowest_option)
    if schedule in ("constant", "cosine"):
        told = say.LOWEST_RATE if schedule == "cosine" and lowest else ""
        c.put("optimizer.schedule", schedule, option, lowest_option, differs=told, lowest=lowest)
    else:
        c.leave(option, say.CONSTANT_RATE, value=schedule)
    warmup, ratio = f"{_O}.lr_warmup_steps", f"{_O}.lr_warmup_steps_ratio"
    number, share = c.get(warmup), c.get(ratio)
    if number > 0:
        c.put("optimizer.warmup_steps", number, warmup, differs=say.FIRST_STEP)
    elif share and "max_steps" in c.run:
        number = int(share * c.run["max_steps"])
        c.put("optimizer.warmup_steps", number, ratio, differs=say.FIRST_STEP)
    elif share:
        c.leave(ratio, say.SHARE_OF_STEPS)


def resume(c: Conversion) -> None:
    """A path is left: a checkpoint of verl gives its weights only."""
    known = {"disable": "never", "auto": "auto"}.get(c.get("trainer.resume_mode"))
    if known:
        c.put("checkpoint.resume", known, "trainer.resume_mode")
    else:
        c.leave("trainer.resume_mode", say.NO_RESUME)


VERL = Source(
    name="verl 0.9 (main_ppo)",
    read=read,
    defaults=DEFAULTS,
    reasons=REASONS,
    counts=("data.train_batch_size", f"{_A}.ppo_mini_batch_size"),
    table=(
        tasks,
        algorithm,
        loss,
        kl,
        batch,
        model,
        sampling,
        optimizer,
        Row("eval.every", "trainer.test_freq", at_least_0),
        Row("checkpoint.every", "trainer.save_freq", at_least_0),
        Row("checkpoint.keep", "trainer.max_actor_ckpt_to_keep", if_set=True),
        resume,
        Row("output_dir", "trainer.default_local_dir", if_set=True),
        Row("tracking.experiment", "trainer.project_name", if_set=True),
        Row("tracking.run_name", "trainer.experiment_name", if_set=True),
        lambda c: c.put_trackers("trainer.logger"),
    ),
)
