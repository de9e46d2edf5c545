"""verl's configuration: a YAML file, or the overrides ``a.b.c=value`` of a shell script."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert.conversion import Conversion, task_name
from multitask_rl.convert.shell import read_value, read_words, told_of
from multitask_rl.errors import ConfigError

SOURCE = "verl 0.9 (main_ppo)"
_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_O = f"{_A}.optim"
DEFAULTS: Mapping[str, Any] = {
    "data.prompt_key": "prompt",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    f"{_A}.ppo_mini_batch_size": 256,
    f"{_A}.ppo_epochs": 1,
    f"{_A}.clip_ratio_low": 0.2,
    f"{_A}.clip_ratio_high": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.loss_agg_mode": "token-mean",
    f"{_A}.entropy_coeff": 0,
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    f"{_A}.policy_loss.loss_mode": "vanilla",
    f"{_A}.grad_clip": 1.0,
    f"{_O}.lr": 1e-6,
    f"{_O}.betas": [0.9, 0.999],
    f"{_O}.weight_decay": 0.01,
    f"{_O}.lr_warmup_steps": -1,
    f"{_O}.lr_warmup_steps_ratio": 0.0,
    f"{_O}.lr_scheduler_type": "constant",
    f"{_O}.min_lr_ratio": 0.0,
    f"{_R}.n": 1,
    f"{_R}.temperature": 1.0,
    f"{_R}.top_p": 1.0,
    f"{_R}.top_k": -1,
    f"{_R}.name": "vllm",
    f"{_R}.gpu_memory_utilization": 0.5,
    f"{_R}.tensor_model_parallel_size": 2,
    f"{_R}.val_kwargs.temperature": 0,
    f"{_R}.val_kwargs.do_sample": False,
    f"{_R}.val_kwargs.n": 1,
    f"{_M}.enable_gradient_checkpointing": True,
    f"{_M}.lora_rank": 0,
    f"{_M}.lora_alpha": 16,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.resume_mode": "auto",
    "trainer.logger": ["console", "wandb"],
}
MOVED: Mapping[str, str] = {
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
}
"""Options of versions before 0.8 -> present ones."""
REASONS: Mapping[str, str] = {
    ".*micro_batch_size.*|.*dynamic_bsz|.*max_token_len_per_gpu|.*max_num_(batched_tokens|seqs)": (
        "memory is bounded by batch.tokens_per_microbatch and rollout.max_batch_tokens"
    ),
    r".*(fsdp_config|megatron|veomni|torchtitan)\..*|.*\.strategy|.*ulysses.*|.*offload.*|"
    r".*remove_padding|.*torch_compile|.*fused_kernels|.*liger|.*forward_prefetch": (
        "devices and layout: device_map, batch"
    ),
    r"actor_rollout_ref\.ref\..*": "the reference has the actor's devices and batches",
    r"actor_rollout_ref.actor\.clip_ratio": (
        "verl reads clip_ratio_low and clip_ratio_high, which have defaults of their own (0.2): alone "
        "it changes nothing"
    ),
    r"actor_rollout_ref.actor\..*": "no counterpart in the loss of the algorithms here",
    r"actor_rollout_ref.rollout\.multi_turn\..*|actor_rollout_ref.rollout\.agent\..*|"
    r"data\.(tool|function_tool).*": ("turns and tools: environment of a task (docs/environments.md)"),
    r"actor_rollout_ref.rollout\.val_kwargs\..*": (
        "held-out prompts have a temperature of their own (eval.temperature), else the keys of training: "
        "rollout.top_p, rollout.top_k"
    ),
    r"actor_rollout_ref.rollout\..*": "the engine has its own keys: rollout.engine_config",
    r"actor_rollout_ref.model\.custom_chat_template": "a file chat_template.jinja in the model's directory",
    r"actor_rollout_ref.model\..*": "no counterpart for the model",
    r"critic\..*": (
        "the critic shares batches, optimizer and schedule with the actor, except its learning rate"
    ),
    r"reward\.reward_model\..*|reward_model\..*": (
        "a reward model is a plugin with its own configuration (rm_hf)"
    ),
    r"reward\..*|sandbox_fusion\..*": "rewards run in workers: scoring.*; programs: docs/sandbox.md",
    r"algorithm\.rollout_correction\..*": "the weight for engine mismatch is per token, with an upper bound",
    r"algorithm\..*": "no counterpart among the algorithms here",
    r"distillation\..*": "a task of type distill",
    r"data\.(shuffle|seed|.*workers|return_.*|use_shm)": (
        "every task has a stream of shuffled rows, from the seed"
    ),
    r"data\..*": "no counterpart for the data",
    r"trainer\.(n_gpus_per_node|nnodes|device|balance_batch)": (
        "devices: device_map; sizes of batches are not per device in verl either"
    ),
    r"trainer\.(log_val.*|.*_data_dir)": (
        "responses are written to rollouts.jsonl (tracking.store_rollouts)"
    ),
    r"trainer\.val_before_train": "held-out prompts are evaluated at the start and the end, always",
    r"trainer\.val_only": "`multitask-rl eval` evaluates without training",
    r"trainer\.critic_warmup": "actor and critic learn from the first step on",
    r"trainer\..*|global_profiler.*|ray_kwargs.*|transfer_queue.*|skip.*|hydra.*": "how verl runs",
}
_ESTIMATORS: Mapping[str, str] = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp",
}
_CONFIGURATIONS = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own configurations, which hold its defaults."""
_MOST_SOURCES = 32
"""A file with more sources is one task."""
_ESTIMATES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def convert_verl(
    file: Path, *, dataset: str = "", reward: str = "", num_rows: int | None = None
) -> Conversion:
    """Convert a YAML file or a shell script; the arguments are those of ``convert_trl``."""
    if file.suffix in (".yaml", ".yml", ".json"):
        tree, _ = load_yaml(file)
        given = dict(_flat(tree if isinstance(tree, Mapping) else {}))
        computed: dict[str, str] = {}
        told: dict[str, str] = {}
    else:
        given, computed, told = _overrides(file)
    if not given:
        raise ConfigError(
            f"{file}: it has no option of verl; expected a.b.c=value in a script, or a YAML file"
        )
    c = Conversion(SOURCE, given, DEFAULTS, REASONS, computed=computed, num_rows=num_rows)
    _put_tasks(c, file, dataset, reward)
    _put_algorithm(c)
    _put_kl(c)
    _put_batch(c)
    _put_run(c)
    c.finish()
    c.left |= told
    return c


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted options; interpolations and keys of hydra are left out, lists stay whole."""
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value and name not in _WHOLE:
            yield from _flat(value, f"{name}.")
        elif value is not None and not str(value).startswith("${") and key not in ("_target_", "defaults"):
            yield _present(name), value


_WHOLE = ("reward.custom_reward_function.reward_kwargs", "custom_reward_function.reward_kwargs")


def _present(name: str) -> str:
    name = name.lstrip("+~")
    found = next((old for old in MOVED if name == old or (old.endswith(".") and name.startswith(old))), None)
    return name if found is None else MOVED[found] + name.removeprefix(found)


def _overrides(file: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return options with their values, those that the script computes, and what is told of others."""
    given: dict[str, Any] = {}
    computed: dict[str, str] = {}
    texts: dict[str, list[str]] = defaultdict(list)
    words, told = read_words(file, "main_ppo")
    for word in words:
        name, equals, text = word.partition("=")
        if name == "--config-name" and text.removesuffix(".yaml") not in _CONFIGURATIONS:
            told[f"{name} {text}"] = "its options are not read; print them all with `--cfg job`, convert that"
        if not equals or "." not in name or not name.lstrip("+").replace(".", "_").isidentifier():
            continue
        texts[_present(name)].append(text)
        if "$" in text:
            computed[_present(name)] = text
        else:
            # hydra needs no space behind the colon of {key:value}, YAML does
            text = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", text) if text.startswith("{") else text
            given.update(_flat({name: read_value(text, f"{file}: {name}")}))
    told |= {name: told_of(own) for name, own in texts.items() if len({*own}) > 1}
    kwargs = "reward.custom_reward_function.reward_kwargs."
    nested = {k.removeprefix(kwargs): given.pop(k) for k in list(given) if k.startswith(kwargs)}
    if nested:
        given[kwargs.rstrip(".")] = nested
    return given, computed, told


def _put_tasks(c: Conversion, file: Path, dataset: str, reward: str) -> None:
    files = _list(dataset or c.get("data.train_files"))
    c.need(files, "data set", "--dataset", str(file), "data.train_files")
    held_out = _list(c.get("data.val_files"))
    function = "reward.custom_reward_function"
    rewards: list[dict[str, Any]] = []
    if reward:
        rewards = [{"plugin": reward}]
    elif path := c.get(f"{function}.path"):
        entry: dict[str, Any] = {"plugin": f"verl:{path}:{c.get(f'{function}.name')}"}
        if kwargs := c.get(f"{function}.reward_kwargs"):
            entry["config"] = {"arguments": kwargs}
        rewards = [entry]
        c.note("task.rewards", f"{function}.path", f"{function}.name", f"{function}.reward_kwargs")
    elif not c.get("reward.reward_model.enable"):
        rewards = [{"plugin": "verl:verl.utils.reward_score:default_compute_score"}]
        told = (
            "verl's own table of rewards by data source, which needs verl installed; --reward names another"
        )
        c.note("task.rewards", "reward.custom_reward_function", differs=told)
    if c.get("reward.reward_model.enable") and (model := c.get("reward.reward_model.model_path")):
        told = "one logit of a classification model; verl may ask a generating one"
        rewards.append({"plugin": "rm_hf", "config": {"model_name": model}})
        c.note("task.rewards", "reward.reward_model.enable", "reward.reward_model.model_path", differs=told)
    if c.get("reward.reward_manager.name") not in (None, "naive", "dapo"):
        told = (
            "compute_score gets one response at a time here: f(data_source, solution_str, ground_truth, ...)"
        )
        c.leave("reward.reward_manager.name", told)
    weights = c.weights_by_rows(files)
    for index, one in enumerate(files):
        own: dict[str, Any] = {"dataset": one}
        if len(held_out) == len(files):
            own["eval_dataset"] = held_out[index]
        if len(files) > 1:
            own["weight"] = weights[index] if weights else 1.0
        name = str(Path(one).parent.name if Path(one).stem == "train" else one)
        sources = c.count_values(one, "data_source")
        if not 1 < len(sources) <= _MOST_SOURCES:
            c.tasks[task_name(name, c.tasks)] = {**own, "rewards": rewards}
            if len(sources) > 1:
                c.left["column data_source"] = f"{len(sources)} sources of {one} are one task; see key select"
            continue
        c.note("task.select", "column data_source", differs=f"{one} becomes a task for each of its sources")
        share = own.get("weight", float(sources.total())) / sources.total()
        known = c.count_values(own["eval_dataset"], "data_source") if "eval_dataset" in own else {}
        for source, number in sorted(sources.items()):
            part = {**own, "select": {"data_source": source}, "weight": share * number}
            if "eval_dataset" in own and source not in known:
                del part["eval_dataset"]
                told = f"{held_out[index]} has no row of it: a tenth of its training rows is held out"
                c.left[f"data.val_files for {source}"] = told
            c.tasks[task_name(source, c.tasks)] = {**part, "rewards": rewards}
    told = "" if weights else "verl draws rows of all files alike; give weights by rows"
    c.note("task.dataset", "data.train_files", differs=told)
    if len(held_out) == len(files):
        c.note("task.eval_dataset", "data.val_files")
    else:
        c.leave("data.val_files", f"{len(held_out)} files for {len(files)} tasks; set eval_dataset of each")
    key = c.get("data.prompt_key")
    c.put("task.prompt", f"{{{key}}}", "data.prompt_key")
    prefix = "data.apply_chat_template_kwargs."
    for option in [name for name in c.given if name.startswith(prefix)]:
        c.carry(f"task.chat_template_kwargs.{option.removeprefix(prefix)}", option)


def _put_algorithm(c: Conversion) -> None:
    estimator, mode = c.get("algorithm.adv_estimator"), c.get(f"{_A}.policy_loss.loss_mode")
    kind = _ESTIMATORS.get(estimator, "grpo")
    if estimator not in _ESTIMATORS:
        c.leave("algorithm.adv_estimator", f"{estimator!r} has no counterpart; type grpo stands in its place")
    if mode in ("gspo", "cispo") and kind == "grpo":
        kind = mode
        c.note("task.type", f"{_A}.policy_loss.loss_mode")
    elif mode != "vanilla":
        c.leave(f"{_A}.policy_loss.loss_mode", f"{mode!r} with {estimator!r} has no counterpart")
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    length = c.get(f"{buffer}.len")
    if c.get(f"{buffer}.enable") and length:
        if kind == "grpo":
            kind = "dapo"
            c.put("task.algorithm_config.overlong_buffer", length, f"{buffer}.enable", f"{buffer}.len")
            factor = c.get(f"{buffer}.penalty_factor")
            c.put("task.algorithm_config.overlong_weight", float(factor), f"{buffer}.penalty_factor")
        else:
            c.leave(f"{buffer}.len", f"only type dapo has a length penalty, not {kind}")
    c.task = {"type": kind, **c.task}
    c.note("task.type", "algorithm.adv_estimator")
    if kind in ("grpo", "dapo", "gspo", "cispo"):
        by_std = c.get("algorithm.norm_adv_by_std_in_grpo")
        name = "algorithm.norm_adv_by_std_in_grpo"
        c.put("task.algorithm_config.normalisation", "group" if by_std else "none", name)
    if kind == "reinforce_pp":
        c.put(
            "task.algorithm_config.group_baseline", estimator.endswith("baseline"), "algorithm.adv_estimator"
        )
        if c.get("algorithm.gamma") != 1:
            c.leave("algorithm.gamma", "rewards of reinforce_pp are not discounted")
    elif kind == "ppo":
        told = "the reward is scaled by its running deviation first, so that the unit of values differs"
        c.carry("task.algorithm_config.gamma", "algorithm.gamma", float)
        c.carry("task.algorithm_config.gae_lambda", "algorithm.lam", float)
        clip = "critic.cliprange_value"
        c.carry("task.algorithm_config.value_clip", clip, float, differs=told)
        c.put("critic.trunk", "separate")
        c.carry("critic.learning_rate", "critic.optim.lr", float)
        c.carry_if_set("critic.name_or_path", "critic.model.path")
    c.carry("task.algorithm_config.clip_low", f"{_A}.clip_ratio_low", float)
    c.carry("task.algorithm_config.clip_high", f"{_A}.clip_ratio_high", float)
    dual = 0.0 if kind in ("gspo", "cispo") else float(c.get(f"{_A}.clip_ratio_c"))
    c.put("task.algorithm_config.dual_clip", dual, f"{_A}.clip_ratio_c")
    _put_aggregation(c)
    c.carry("task.algorithm_config.entropy_coefficient", f"{_A}.entropy_coeff", float)
    correction = "algorithm.rollout_correction"
    if c.get(f"{correction}.rollout_is") == "token":
        cap = f"{correction}.rollout_is_threshold"
        c.put("task.algorithm_config.truncated_is", float(c.get(cap)), f"{correction}.rollout_is", cap)
    else:
        c.put("task.algorithm_config.truncated_is", 0.0)
        c.leave(
            f"{correction}.rollout_is", f"{c.get(f'{correction}.rollout_is')!r}: weights are per token only"
        )


def _put_aggregation(c: Conversion) -> None:
    """Write the denominator. A constant one is ``samples * max_new_tokens``; ``loss_weight`` makes others."""
    option, scale = f"{_A}.loss_agg_mode", f"{_A}.loss_scale_factor"
    mode, most = c.get(option), c.get("data.max_response_length")
    match mode:
        case "token-mean":
            c.put("task.algorithm_config.aggregation", "token", option)
        case "seq-mean-token-mean":
            c.put("task.algorithm_config.aggregation", "sequence", option)
        case "seq-mean-token-sum" | "seq-mean-token-sum-norm":
            c.put("task.algorithm_config.aggregation", "constant", option)
            divisor = 1 if mode == "seq-mean-token-sum" else c.get(scale) or most
            if divisor != most:
                c.put("task.loss_weight", most / divisor, scale, option)
        case _:
            c.put("task.algorithm_config.aggregation", "token")
            c.leave(option, f"{mode!r} has no counterpart; the mean over tokens stands in its place")


def _put_kl(c: Conversion) -> None:
    kind, in_reward, in_loss = c.task["type"], c.get("algorithm.use_kl_in_reward"), c.get(f"{_A}.use_kl_loss")
    if in_loss:
        name = str(c.get(f"{_A}.kl_loss_type"))
        # k3+ has the value of k3 and the gradient of k2
        estimate = "k2" if name.endswith("+") else _ESTIMATES.get(name)
        options = (f"{_A}.use_kl_loss", f"{_A}.kl_loss_coef", f"{_A}.kl_loss_type")
        if estimate is None:
            c.leave(options[2], f"{name!r} has no counterpart; k3 is written")
        c.put("task.kl.coefficient", float(c.get(f"{_A}.kl_loss_coef")), *options[:2])
        c.put("task.kl.placement", "loss", options[0])
        c.put("task.kl.estimator", estimate or "k3", *(options[2:] if estimate else ()))
    if in_reward and in_loss:
        c.leave("algorithm.use_kl_in_reward", "a task has the KL in its loss or in its reward, not in both")
    elif in_reward:
        exact = kind in ("rloo", "opo") or c.task.get("algorithm_config.normalisation") == "none"
        told = "verl adds it to the reward before rewards are scaled; here it is subtracted after"
        told = "" if exact else f"{told}, so the coefficient is in units of the scaled reward"
        name = "algorithm.kl_ctrl.kl_coef"
        c.put("task.kl.coefficient", float(c.get(name)), "algorithm.use_kl_in_reward", name, differs=told)
        c.put("task.kl.placement", "reward", "algorithm.use_kl_in_reward")
        if (penalty := c.get("algorithm.kl_penalty")) not in ("kl", "k1"):
            c.leave("algorithm.kl_penalty", f"{penalty!r}: the KL in the reward is k1")
        if c.get("algorithm.kl_ctrl.type") == "adaptive":
            why = "verl's target is the KL per token, ours per response: set kl.target and kl.horizon"
            for name in ("type", "target_kl", "horizon"):
                c.leave(f"algorithm.kl_ctrl.{name}", why)


def _put_batch(c: Conversion) -> None:
    prompts, mini = c.get("data.train_batch_size"), c.get(f"{_A}.ppo_mini_batch_size")
    c.put("batch.prompts_per_step", prompts, "data.train_batch_size")
    c.carry("batch.group_size", f"{_R}.n")
    told = "" if prompts % mini == 0 else "verl's last mini-batch is smaller, here all are equal"
    name = f"{_A}.ppo_mini_batch_size"
    c.put("batch.num_minibatches", max(1, math.ceil(prompts / mini)), name, differs=told)
    c.carry("batch.num_epochs", f"{_A}.ppo_epochs")
    if c.get("algorithm.filter_groups.enable"):
        rounds = c.get("algorithm.filter_groups.max_num_gen_batches")
        told = "verl samples again until the batch is full; here at most so many rounds, then it trains"
        options = ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches")
        c.put("batch.refill_rounds", rounds - 1 if rounds > 0 else 10, *options, differs=told)
    else:
        c.put("batch.refill_rounds", 0, "algorithm.filter_groups.enable")
    if most := c.get("trainer.total_training_steps"):
        c.put_steps(most, "trainer.total_training_steps")
        c.leave("trainer.total_epochs", "trainer.total_training_steps is given, which verl prefers")
    else:
        # the sources of a file are tasks with one data set
        rows = c.rows_of(dict.fromkeys(own["dataset"] for own in c.tasks.values()))
        passes = c.get("trainer.total_epochs")
        c.put_steps(None if rows is None else rows // prompts * passes, "trainer.total_epochs")


def _put_run(c: Conversion) -> None:
    c.carry_if_set("model.name_or_path", f"{_M}.path")
    c.put("model.dtype", "bfloat16")
    name = f"{_M}.enable_gradient_checkpointing"
    c.carry("model.gradient_checkpointing", name)
    if c.get(f"{_M}.trust_remote_code"):
        c.put("model.trust_remote_code", True, f"{_M}.trust_remote_code")
    if rank := c.get(f"{_M}.lora_rank"):
        c.put("model.lora.rank", rank, f"{_M}.lora_rank")
        c.carry("model.lora.alpha", f"{_M}.lora_alpha", float)
        if isinstance(names := c.get(f"{_M}.target_modules"), str):
            c.put("model.lora.target_modules", names, f"{_M}.target_modules")
    c.carry("rollout.max_new_tokens", "data.max_response_length")
    told = (
        ""
        if c.get("data.filter_overlong_prompts")
        else "verl ends with an error or cuts; here they are left out"
    )
    options = ("data.max_prompt_length", "data.filter_overlong_prompts", "data.truncation")
    c.put("rollout.max_prompt_tokens", c.get("data.max_prompt_length"), *options, differs=told)
    c.carry("rollout.temperature", f"{_R}.temperature", float)
    c.carry("rollout.top_p", f"{_R}.top_p", float)
    c.put("rollout.top_k", max(0, c.get(f"{_R}.top_k")), f"{_R}.top_k")
    c.put_engine(c.get(f"{_R}.name"), f"{_R}.name", f"{_R}.", "tensor_model_parallel_size")
    greedy = not c.get(f"{_R}.val_kwargs.do_sample")
    heat = f"{_R}.val_kwargs.temperature"
    c.put("eval.temperature", 0.0 if greedy else float(c.get(heat)), heat, f"{_R}.val_kwargs.do_sample")
    c.carry("task.eval_samples", f"{_R}.val_kwargs.n")
    c.carry("optimizer.learning_rate", f"{_O}.lr", float)
    c.carry("optimizer.betas", f"{_O}.betas", list)
    c.carry("optimizer.weight_decay", f"{_O}.weight_decay", float)
    clip = f"{_O}.clip_grad" if f"{_O}.clip_grad" in c.given else f"{_A}.grad_clip"
    c.carry("optimizer.max_grad_norm", clip, float)
    if c.get(name := f"{_A}.fsdp_config.optimizer_offload"):
        c.put("optimizer.moments", "host", name)
    schedule, lowest = c.get(f"{_O}.lr_scheduler_type"), c.get(f"{_O}.min_lr_ratio")
    if schedule in ("constant", "cosine"):
        told = (
            f"verl ends at {lowest:g} of the rate, here it ends at 0"
            if schedule == "cosine" and lowest
            else ""
        )
        c.put("optimizer.schedule", schedule, f"{_O}.lr_scheduler_type", f"{_O}.min_lr_ratio", differs=told)
    else:
        c.leave(f"{_O}.lr_scheduler_type", f"{schedule!r} has no counterpart; the rate is constant")
    steps, share = c.get(f"{_O}.lr_warmup_steps"), c.get(f"{_O}.lr_warmup_steps_ratio")
    told = "verl's first step has rate 0, here it has the first step of the rise"
    if steps > 0:
        c.put("optimizer.warmup_steps", steps, f"{_O}.lr_warmup_steps", differs=told)
    elif share and "max_steps" in c.run:
        number = int(share * c.run["max_steps"])
        c.put("optimizer.warmup_steps", number, f"{_O}.lr_warmup_steps_ratio", differs=told)
    elif share:
        c.leave(f"{_O}.lr_warmup_steps_ratio", "a share of steps whose number is not known; give --rows N")
    for key, option in (("eval.every", "trainer.test_freq"), ("checkpoint.every", "trainer.save_freq")):
        c.put(key, max(0, c.get(option)), option)
    c.carry_if_set("checkpoint.keep", "trainer.max_actor_ckpt_to_keep")
    resume = {"disable": "never", "auto": "auto"}.get(c.get("trainer.resume_mode"))
    if resume:
        c.put("checkpoint.resume", resume, "trainer.resume_mode")
    else:
        c.leave(
            "trainer.resume_mode",
            "a checkpoint of verl cannot be resumed here; load its weights as the model",
        )
    c.carry_if_set("output_dir", "trainer.default_local_dir")
    for option, key in (("project_name", "experiment"), ("experiment_name", "run_name")):
        c.carry_if_set(f"tracking.{key}", f"trainer.{option}")
    c.put_trackers("trainer.logger")
    c.put("guard.enabled", False)


def _list(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else [str(item) for item in value]
