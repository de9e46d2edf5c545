"""ROLL's RLVR pipeline: a YAML file whose domains become tasks."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import is_file
from multitask_rl.config.run import dotted
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert.conversion import Conversion, task_name
from multitask_rl.data.readers import Row, read_file
from multitask_rl.errors import ConfigError, DataError

SOURCE = "ROLL, August 2026 (RLVR pipeline)"
_DATA, _ARGS = "actor_train.data_args", "actor_train.training_args"
_MODEL, _SAMPLING = "actor_train.model_args", "actor_infer.generating_args"
_VALIDATION = "validation.generating_args"
_SHARES = f"{_DATA}.domain_interleave_probs."
DEFAULTS: Mapping[str, Any] = {
    "seed": 42,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "max_ckpt_to_keep": 0,
    "track_with": "tensorboard",
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "prompt_length": 1024,
    "response_length": 0,
    "sequence_length": 0,
    "async_generation_ratio": 0,
    "adv_estimator": "gae",
    "importance_sampling": "token",
    "gamma": 1.0,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "whiten_advantages": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    "max_len_mask": False,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "train_infer_correction.is_weight.enabled": False,
    "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.is_weight.upper_bound": 1.2,
    f"{_DATA}.dataset_dir": ".",
    f"{_ARGS}.learning_rate": 5e-5,
    f"{_ARGS}.lr_scheduler_type": "linear",
    f"{_ARGS}.weight_decay": 0.0,
    f"{_ARGS}.adam_beta1": 0.9,
    f"{_ARGS}.adam_beta2": 0.999,
    f"{_ARGS}.per_device_train_batch_size": 8,
    f"{_ARGS}.gradient_accumulation_steps": 1,
    f"{_ARGS}.warmup_steps": 0,
    f"{_ARGS}.warmup_ratio": 0.0,
    f"{_MODEL}.dtype": "bf16",
    f"{_MODEL}.disable_gradient_checkpointing": False,
    f"{_SAMPLING}.temperature": 0.95,
    f"{_SAMPLING}.top_p": 0.7,
    f"{_SAMPLING}.top_k": 50,
    f"{_VALIDATION}.temperature": 0.95,
    f"{_VALIDATION}.num_return_sequences": 1,
    "actor_infer.strategy_args.strategy_name": "fsdp2_train",
    "critic.training_args.learning_rate": 5e-5,
}
REASONS: Mapping[str, str] = {
    r".*\.(strategy_args|device_mapping|infer_batch_size|world_size|num_gpus_per_worker|backend_timeout|"
    r"max_concurrency|use_dynamic_batching.*|max_tokens_per_microbatch.*|sequence_length.*|"
    r"use_sequence_packing|sequence_packing_args)(\..*)?|num_gpus_per_node|num_nodes|"
    r"is_offload.*|offload_nccl|transfer_backend.*|model_up.*": "devices and layout: device_map, ray, batch",
    r"max_running_requests|is_num_return_sequences_expand|(is_)?use_additional_prompts|generate_opt_level|"
    r"max_additional_.*|router_args.*|rpc_timeout": "the rollout keeps the engine full by itself",
    r"logging_.*|tracker_kwargs.*|profiler_.*|rollout_dump_dir|save_logging_board_dir|report_.*|"
    r"length_profiler_dir|otlp_.*": "every step is logged, and some of its responses (tracking.*)",
    r"system_envs.*|hydra.*|defaults.*|model_download_type|local_rank|base_dir": "how ROLL starts",
    r"checkpoint_config.*": "checkpoints are below output_dir (docs/checkpoints.md)",
    r"reward_clip|advantage_clip|whiten_rewards": "rewards and advantages are not clipped",
    r"reward_(shift|scale|model|system_config).*|use_reward_.*|add_len_reward": "no counterpart for rewards",
    r"rollout_mock.*": "testing.FakeEngine stands in for an engine",
    r"difficulty_mask|difficulty_.*_threshold": (
        "groups of equal rewards have no gradient; see curriculum: {by: pass_rate}"
    ),
    r"error_max_len_.*|difficulty_loss_weight|length_loss_weight|balance_length|mask_type|"
    r"minibatch_data_iter_num": "no mask and no weight of single samples but mask_truncated",
    r".*pg_variant|.*topr.*|use_policy_loss_type|postive_loss_coef|rl_loss_coef|.*(tis|cispo|kimi).*": (
        "no counterpart in the clipped loss; type cispo has CISPO's"
    ),
    r"target_kl|kl_horizon": "ROLL's target is the KL per token, ours per response: set kl.target",
    r"(teacher|student_.*|use_opd|is_pure_opd)(\..*)?": "a task of type distill with teacher: DIR",
    r"dataset_filter.*|.*_filter_config.*": (
        "groups without a gradient are replaced by batch.refill_rounds; no filter of rows or groups by value"
    ),
    r"global_template|tag_to_template.*|.*\.template": "prompts use the tokenizer's own chat template",
    r"reference\..*": "the reference is the initial actor, with its devices",
    r"critic\..*|value_clip|critic_warmup|reward_pretrain": "only type ppo (adv_estimator: gae) has a critic",
    r"actor_infer\..*|validation\..*": "no counterpart; the distribution that is sampled is the one trained",
    r"actor_train\..*": "no counterpart for data, model or training of the actor",
    r"rewards\..*(judge_.*|generating_args\..*)": "keys of rm_generative: rubric, temperature, max_tokens",
    r"rewards\..*": "rewards run in workers: scoring.*",
    r"train_infer_correction\..*": "the weight for engine mismatch is per token, with an upper bound",
    r"num_train_epochs|val_.*|norm_.*": "no counterpart",
}
_HEAD = """
import re

from multitask_rl.scoring.shapes import with_traits
"""
_CHOICE = r"""

@with_traits(low={low}, high=1.0)
def reward_{name}(response, ground_truth):
    # the first capital letter of the last box, else of what follows "answer is"
    boxed = re.findall(r"\\boxed\{{([^}}]+)\}}", response)
    place = response.lower().rfind("answer is")
    said = boxed[-1] if boxed else response if place < 0 else response[place + 9 :]
    letter = next((character for character in said if character.isupper()), "")
    return {scores}[letter == ground_truth[:1], bool(boxed)]
"""
_COUNTS = (
    "rollout_batch_size",
    "num_return_sequences_in_group",
    "ppo_epochs",
    "max_steps",
    f"{_ARGS}.per_device_train_batch_size",
    f"{_ARGS}.gradient_accumulation_steps",
)
_SCORES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}
_MISSING = """
def reward_{name}(response, **row):
    raise NotImplementedError("write what {worker} of ROLL does: the reward of `response`; `row`: columns")
"""


def convert_roll(
    file: Path, *, dataset: str = "", reward: str = "", num_rows: int | None = None
) -> Conversion:
    """Convert the YAML file of an RLVR pipeline; the arguments are those of ``convert_trl``."""
    tree, _ = load_yaml(file)
    tree = tree if isinstance(tree, Mapping) else {}
    given = {key: value for key, value in dotted(_resolved(tree, tree)) if value is not None}
    for prefix, kind, instead in (
        ("train_env_manager.", "an agentic pipeline", "an environment a task: bring-your-environment.md"),
        ("student_train.", "a pipeline of distillation", "tasks of type distill: task-types.md"),
    ):
        if any(name.startswith(prefix) for name in given):
            raise ConfigError(f"{file}: it is {kind}; only RLVR's is read. Here it is {instead} (docs)")
    if not any(name.startswith(("actor_train.", "rewards.")) for name in given):
        raise ConfigError(
            f"{file}: it has no section actor_train or rewards, as an RLVR pipeline of ROLL has"
        )
    shares = {name: 0.0 for name in given if name.startswith(_SHARES)}
    c = Conversion(SOURCE, given, {**DEFAULTS, **shares}, REASONS, computed={}, num_rows=num_rows)
    for option in _COUNTS:
        if c.get(option) < 1:
            raise ConfigError(f"{option}: expected at least 1, got {c.get(option)}")
    _put_tasks(c, file, dataset, reward)
    _put_algorithm(c)
    _put_kl(c)
    _put_batch(c)
    _put_run(c)
    c.finish()
    return c


def _resolved(value: Any, tree: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Return the value with each ``${name}`` replaced by what ``tree`` has there, if anything."""
    if isinstance(value, Mapping):
        return {key: _resolved(own, tree, within) for key, own in value.items()}
    if isinstance(value, list):
        return [_resolved(own, tree, within) for own in value]
    if not isinstance(value, str):
        return value

    def of(name: str) -> Any:
        if name in within:
            raise ConfigError(f"${{{name}}} stands for itself; write the value")
        found: Any = tree
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return f"${{{name}}}" if found is None else _resolved(found, tree, (*within, name))

    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    return of(whole[1]) if whole else re.sub(r"\$\{([\w.]+)\}", lambda m: str(of(m[1])), value)


def _texts(c: Conversion, option: str) -> list[str]:
    """Return a text or a list of texts as a list."""
    value = c.get(option)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{option}: expected a text or a list of texts, got {value!r}")
    return listed


def _put_tasks(c: Conversion, file: Path, dataset: str, reward: str) -> None:
    """Write a task for each domain, and a file with the rows that ROLL gives to it."""
    files = [dataset] if dataset else _files(c, _DATA)
    c.need(files, "data set", "--dataset", str(file))
    shares = {name.removeprefix(_SHARES): c.get(name) for name in c.given if name.startswith(_SHARES)}
    if shares:  # ROLL gives the last one what is left
        last = list(shares)[-1]
        shares[last] = max(0.0, round(1.0 - sum(shares.values()) + shares[last], 9))
    names = {
        re.sub(r"^rewards\.|\.(worker_cls|tag_included)$", "", name)
        for name in c.given
        if re.fullmatch(r"rewards\..*\.(worker_cls|tag_included)", name)
    }
    domains = [domain for domain in shares if shares[domain] > 0] or sorted(names)
    c.need(domains, "domain", "rewards", str(file))
    tags: dict[str, str] = {}
    for name in names:
        tags |= dict.fromkeys(_texts(c, f"rewards.{name}.tag_included"), name)
    c.note("task.dataset", f"{_DATA}.file_name", f"{_DATA}.dataset_dir")
    train = _by_domain(c, files, tags)
    held_out = _by_domain(c, _files(c, "validation.data_args"), tags)
    functions = ""
    for domain in domains:
        name = task_name(domain, c.tasks)
        own: dict[str, Any] = {"dataset": f"data/{name}.jsonl", "weight": shares.get(domain, 1.0)}
        code, entries = ("", [{"plugin": reward}]) if reward else _rewards(c, domain, name)
        functions += code
        if rows := _rows(c, domain, train.get(domain, []), entries):
            c.files[own["dataset"]] = _lines(rows)
        else:
            c.left.setdefault(f"rows of {domain}", f"no row for {own['dataset']}")
        if validation := _rows(c, domain, held_out.get(domain, []), entries):
            own["eval_dataset"] = f"data/{name}.held_out.jsonl"
            c.files[own["eval_dataset"]] = _lines(validation)
        c.tasks[name] = {**own, "rewards": entries}
        c.note("task.rewards, task.dataset", f"rewards.{domain}.tag_included")
    if functions:
        c.files["rewards.py"] = f"{_HEAD}{functions}".lstrip()
    c.note("task.weight", *(f"{_SHARES}{domain}" for domain in domains))
    if held_out:
        c.note("task.eval_dataset", "validation.data_args.file_name")
    if messages := c.get(f"{_DATA}.messages"):
        c.put("task.prompt", f"{{{messages}}}", f"{_DATA}.messages")
    else:
        c.put("task.prompt", f"{{{c.get(f'{_DATA}.prompt') or 'prompt'}}}", f"{_DATA}.prompt")
        c.put("task.chat", False)  # ROLL reads such a text without a chat template


def _files(c: Conversion, section: str) -> list[str]:
    folder, listed = c.get(f"{section}.dataset_dir") or ".", _texts(c, f"{section}.file_name")
    # examples of ROLL write the folder in both options
    joined = [one if Path(one).exists() else str(Path(str(folder)) / one) for one in listed]
    return [one if Path(one).exists() else given for one, given in zip(joined, listed, strict=True)]


def _by_domain(c: Conversion, files: Sequence[str], tags: Mapping[str, str]) -> dict[str, list[Row]]:
    """Return rows by their column ``domain``, else by their tag's domain; tell files that are not read."""
    found: dict[str, list[Row]] = {}
    for one in files:
        if not is_file(Path(one)):
            c.left[f"rows of {one}"] = "the file is not here; convert where it is"
            continue
        try:
            for row in read_file(one):
                # ROLL takes a row with a tag of no reward as mathematics
                domain = row.get("domain")
                domain = tags.get(str(row.get("tag")), "math_rule") if domain is None else domain
                found.setdefault(str(domain), []).append(row)
        except DataError as error:
            c.left[f"rows of {one}"] = str(error)
    return found


def _rows(
    c: Conversion, domain: str, rows: Sequence[Row], rewards: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows as our rewards and prompts read them."""
    found, num_texts = [], 0
    runs_programs = any(entry["plugin"] == "code_evaluator" for entry in rewards)
    messages = c.get(f"{_DATA}.messages")
    for row in rows:
        # `task` and `split` would choose rows here
        own = {key: value for key, value in row.items() if key not in ("task", "split")}
        if messages and isinstance(said := own.get(messages), str):
            with contextlib.suppress(ValueError):
                said = json.loads(said)
            if isinstance(said, list):
                own[messages] = said
            else:
                num_texts += 1
        if "ground_truth" in own:
            own.setdefault("reference", own["ground_truth"])
        if runs_programs:
            if (tests := _tests(own)) is None:
                continue
            own["tests"] = tests
        found.append(own)
    if num_texts:
        c.left[f"messages of {domain}"] = f"{num_texts} rows have a text that is no list of messages"
    if missing := len(rows) - len(found):
        told = f"{missing} of {len(rows)} rows have tests of another kind than programs run by their input"
        c.left[f"rows of {domain}"] = f"{told} or single assert statements"
    return found


def _tests(row: Row) -> list[Any] | None:
    """Return the tests of a program as ``code_evaluator`` reads them; None if it cannot."""
    cases = row.get("test_cases")
    try:
        cases = json.loads(cases) if isinstance(cases, str) else cases
    except ValueError:
        return None
    if not cases or not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        return None
    if row.get("case_type") == "assert":
        said = [str(case.get("assert_code") or "").strip() for case in cases]
        return said if all(text.startswith("assert ") and "\n" not in text for text in said) else None
    is_called = str(row.get("test_case_function") or "") not in ("", "None")
    if is_called or not all({"stdin", "expected_stdout"} <= case.keys() for case in cases):
        return None
    return [{"stdin": case["stdin"], "stdout": case["expected_stdout"]} for case in cases]


def _lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rewards(c: Conversion, domain: str, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return code for rewards.py, and the task's rewards."""
    option = f"rewards.{domain}.worker_cls"
    worker = str(c.get(option) or "").rpartition(".")[2]
    if worker == "MathRuleRewardWorker":
        c.note(f"{name}: math_answer", option, differs="both use math-verify; see docs/graders.md")
        return "", [{"plugin": "math_answer"}]
    if worker == "CodeSandboxRewardWorker":
        c.note(f"{name}: code_evaluator", option, differs="programs run in our sandbox")
        return "", [{"plugin": "code_evaluator", "config": {"all_or_nothing": True}}]
    if worker == "LLMJudgeRewardWorker":
        model = c.get(f"rewards.{domain}.judge_model_name") or c.get(
            f"rewards.{domain}.model_args.model_name_or_path"
        )
        c.need(model, f"model of the judge of {domain}", "--reward", "the file")
        address = c.get(f"rewards.{domain}.judge_api_url")
        told = "a server gives 0 to 10 (vllm serve MODEL); ROLL's judge says yes or no"
        c.note(f"{name}: rm_generative", option, differs=told)
        c.leave(f"rewards.{domain}.judge_api_key", "is read from the environment variable OPENAI_API_KEY")
        config = {"base_url": address or "http://localhost:8000/v1", "model": str(model)}
        return "", [{"plugin": "rm_generative", "config": config}]
    if worker in ("CrossThinkQARuleRewardWorker", "MultipleChoiceBoxedRuleRewardWorker"):
        kind = str(c.get(f"rewards.{domain}.reward_type") or "strict")
        scores = _SCORES.get(kind, _SCORES["strict"])
        if worker.startswith("MultipleChoice"):
            scores = {(right, boxed): float(right and boxed) for right, boxed in scores}
        told = "the letter alone; ROLL adds penalties for repetitions and for length"
        c.note(f"{name}: rewards.py:reward_{name}", option, f"rewards.{domain}.reward_type", differs=told)
        return _CHOICE.format(name=name, scores=scores, low=min(scores.values())), [
            {"plugin": f"rewards.py:reward_{name}"}
        ]
    c.leave(option, f"{worker or 'no worker'} has no counterpart; write it as reward_{name}() in rewards.py")
    return _MISSING.format(name=name, worker=worker or "the worker"), [
        {"plugin": f"rewards.py:reward_{name}"}
    ]


def _put_algorithm(c: Conversion) -> None:
    estimator, by_group = c.get("adv_estimator"), c.get("num_return_sequences_in_group") > 1
    mean, std = c.get("norm_mean_type"), c.get("norm_std_type")
    whitens = c.get("whiten_advantages")
    if estimator == "grpo":
        mean = std = "group"
    options = ("adv_estimator", "norm_mean_type", "norm_std_type", "whiten_advantages")
    told = ""
    if estimator == "gae":
        kind = "ppo"
        told = "" if whitens else "advantages are whitened here"
    elif mean == "group" and by_group and (std == "group" or not whitens):
        kind = "grpo"
        c.put("task.algorithm_config.normalisation", {"group": "group", None: "none"}.get(std, "task"))
        told = "advantages are not whitened once more" if whitens else told
        told = told if std in ("group", None) else f"divided by a running deviation of the task, not {std!r}"
    else:
        kind = "reinforce_pp"
        c.put("task.algorithm_config.group_baseline", mean == "group" and by_group)
        if not whitens:
            told = "advantages are whitened over the task's tokens here"
        elif mean not in (None, "group") or std:
            told = f"rewards are not normalised by {mean or std!r} before advantages are whitened"
        elif c.get("max_len_mask"):
            told = "mean and deviation count truncated responses, too"
    if estimator not in ("gae", "grpo", "reinforce"):
        c.leave("adv_estimator", f"{estimator!r} has no counterpart; type {kind} stands in its place")
        told = ""
    if c.get("importance_sampling") == "seq":
        if kind == "grpo":
            kind = "gspo"
            c.note("task.type = gspo", "importance_sampling")
        else:
            c.leave("importance_sampling", f"one ratio per response has type gspo only, not {kind}")
    c.task = {"type": kind, **c.task}
    c.note(f"task.type = {kind}", *options, differs=told)
    if kind == "ppo":
        told = "the reward is scaled by its running deviation first, so that the unit of values differs"
        c.carry("task.algorithm_config.gamma", "gamma", float)
        c.carry("task.algorithm_config.gae_lambda", "lambd", float)
        c.put(
            "task.algorithm_config.value_clip", float(c.get("value_clip") or 0.0), "value_clip", differs=told
        )
        c.put("critic.trunk", "separate")
        c.carry("critic.learning_rate", "critic.training_args.learning_rate", float)
        if path := c.get("critic.model_args.model_name_or_path") or c.get("reward_pretrain"):
            c.put("critic.name_or_path", path, "critic.model_args.model_name_or_path", "reward_pretrain")
    elif c.get("gamma") != 1:
        c.leave("gamma", f"rewards of {kind} are not discounted")
    is_range = c.get("use_pg_clip_range")
    for side in ("low", "high"):
        option = f"pg_clip_{side}" if is_range else "pg_clip"
        c.put(f"task.algorithm_config.clip_{side}", float(c.get(option)), option, "use_pg_clip_range")
    dual = 1.0 + 2.0 * float(c.get("pg_clip")) if c.get("dual_clip_loss") else 0.0
    c.put("task.algorithm_config.dual_clip", dual, "dual_clip_loss")
    c.carry("task.algorithm_config.mask_truncated", "max_len_mask")
    c.carry("task.algorithm_config.entropy_coefficient", "entropy_loss_coef", float)
    mode = str(c.get("loss_agg_mode"))
    aggregation = {"token-mean": "token", "seq-mean-token-mean": "sequence"}.get(mode, "constant")
    told = "the mean counts masked responses" if c.get("max_len_mask") and aggregation != "token" else ""
    if mode == "seq-mean-token-sum":
        c.put("task.loss_weight", float(_most_new_tokens(c)), "loss_agg_mode")
    elif aggregation == "constant":
        told = "ROLL sums over responses and divides by the padded length; here a mean / max_new_tokens"
    c.put("task.algorithm_config.aggregation", aggregation, "loss_agg_mode", differs=told)
    enabled, granularity, bound = (
        f"train_infer_correction.is_weight.{name}" for name in ("enabled", "weight_type", "upper_bound")
    )
    if not c.get(enabled):
        c.put("task.algorithm_config.truncated_is", 0.0, enabled)
    else:
        per = c.get(granularity)
        told = "" if per == "token" else f"a weight per {per} in ROLL, per token here"
        cap = float(c.get(bound) or 0.0)
        c.put("task.algorithm_config.truncated_is", cap, enabled, granularity, bound, differs=told)


def _put_kl(c: Conversion) -> None:
    in_loss, in_reward = c.get("use_kl_loss"), c.get("add_token_level_kl")
    if in_loss:
        c.put("task.kl.coefficient", float(c.get("kl_loss_coef")), "use_kl_loss", "kl_loss_coef")
        c.put("task.kl.placement", "loss", "use_kl_loss")
        c.put("task.kl.estimator", "k3")
    if in_reward and in_loss:
        c.leave("add_token_level_kl", "a task has the KL in its loss or in its reward, not in both")
    elif in_reward:
        told = "" if c.task["type"] == "ppo" else "subtracted after advantages are normalised, not before"
        options = ("add_token_level_kl", "init_kl_coef", "kl_penalty")
        c.put("task.kl.coefficient", float(c.get("init_kl_coef")), *options, differs=told)
        c.put("task.kl.placement", "reward")
    else:
        c.get("init_kl_coef"), c.get("kl_penalty")
    if in_reward and not in_loss and (penalty := c.get("kl_penalty")) != "kl":
        c.leave("kl_penalty", f"{penalty!r}: the KL in the reward is k1")


def _most_new_tokens(c: Conversion) -> int:
    if length := c.get("response_length"):
        return int(length)
    if length := c.get("sequence_length"):
        return int(length) - int(c.get("prompt_length"))
    raise ConfigError("response_length or sequence_length is missing; ROLL needs one of them, too")


def _put_batch(c: Conversion) -> None:
    prompts, group = c.get("rollout_batch_size"), c.get("num_return_sequences_in_group")
    c.put("batch.prompts_per_step", prompts, "rollout_batch_size")
    c.put("batch.group_size", group, "num_return_sequences_in_group")
    c.carry("batch.num_epochs", "ppo_epochs")
    each, times = f"{_ARGS}.per_device_train_batch_size", f"{_ARGS}.gradient_accumulation_steps"
    parts = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        parts *= int(c.get(f"actor_train.strategy_args.strategy_config.{name}") or 1)
    if str(c.get("actor_train.strategy_args.strategy_name")).startswith("fsdp2"):
        parts *= int(c.get(f"{_MODEL}.ulysses_size") or 1)
    devices = max(1, _num_devices(c.get("actor_train.device_mapping")) // parts)
    told = "" if "actor_train.device_mapping" in c.given else "for one device; ROLL's number depends on them"
    updates = max(1, math.ceil(prompts * group / (c.get(each) * c.get(times) * devices)))
    c.put("batch.num_minibatches", updates, each, times, "actor_train.device_mapping", differs=told)
    filters = [
        name for name in c.given if name.endswith("query_filter_config.type") and c.get(name) != "no_filter"
    ]
    told = "ROLL samples until the batch is full; here up to ten times, and only groups of equal rewards go"
    c.put("batch.refill_rounds", 10 if filters else 0, *filters, differs=told if filters else "")
    c.put_steps(int(c.get("max_steps")), "max_steps")
    if ratio := float(c.get("async_generation_ratio")):
        told = "" if ratio == int(ratio) else "a whole number of steps here"
        c.put("rollout.max_staleness", math.ceil(ratio), "async_generation_ratio", differs=told)


def _num_devices(mapping: Any) -> int:
    """Count the devices of a list, or of a sum of ``list(range(0, 8))`` and ``[8, 9]`` as a text."""
    if isinstance(mapping, list):
        return len(mapping)
    ranges = re.findall(r"range\(([\d\s,]+)\)", str(mapping))
    listed = re.findall(r"\[([\d\s,]+)\]", str(mapping))
    return sum(len(range(*map(int, one.split(",")))) for one in ranges) + sum(
        len(one.split(",")) for one in listed
    )


def _put_run(c: Conversion) -> None:
    if path := c.get("pretrain") or c.get(f"{_MODEL}.model_name_or_path"):
        c.put("model.name_or_path", path, "pretrain", f"{_MODEL}.model_name_or_path")
    dtype = str(c.get(f"{_MODEL}.dtype"))
    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    c.put("model.dtype", known.get(dtype, dtype if dtype in known.values() else "auto"), f"{_MODEL}.dtype")
    name = f"{_MODEL}.disable_gradient_checkpointing"
    c.put("model.gradient_checkpointing", not c.get(name), name)
    if targets := _texts(c, f"{_MODEL}.lora_target"):
        rank = int(c.get(f"{_MODEL}.lora_rank") or 8)
        c.put("model.lora.rank", rank, f"{_MODEL}.lora_rank", f"{_MODEL}.lora_target")
        c.put("model.lora.alpha", float(c.get(f"{_MODEL}.lora_alpha") or 2 * rank), f"{_MODEL}.lora_alpha")
        c.put("model.lora.target_modules", ",".join(targets).replace(" ", ""), f"{_MODEL}.lora_target")
    c.put("rollout.max_new_tokens", _most_new_tokens(c), "response_length", "sequence_length")
    c.carry("rollout.max_prompt_tokens", "prompt_length")
    c.carry("rollout.temperature", f"{_SAMPLING}.temperature", float)
    c.carry("rollout.top_p", f"{_SAMPLING}.top_p", float)
    c.put("rollout.top_k", max(0, int(c.get(f"{_SAMPLING}.top_k"))), f"{_SAMPLING}.top_k")
    c.get(f"{_SAMPLING}.max_new_tokens"), c.get(f"{_SAMPLING}.num_return_sequences")
    engine = "actor_infer.strategy_args.strategy_name"
    c.put_engine(c.get(engine), engine, "actor_infer.strategy_args.strategy_config.")
    c.carry("eval.temperature", f"{_VALIDATION}.temperature", float)
    c.carry("task.eval_samples", f"{_VALIDATION}.num_return_sequences")
    c.carry("optimizer.learning_rate", f"{_ARGS}.learning_rate", float)
    betas = (f"{_ARGS}.adam_beta1", f"{_ARGS}.adam_beta2")
    c.put("optimizer.betas", [float(c.get(name)) for name in betas], *betas)
    c.carry("optimizer.weight_decay", f"{_ARGS}.weight_decay", float)
    c.carry("optimizer.max_grad_norm", "max_grad_norm", float)
    schedule = str(c.get(name := f"{_ARGS}.lr_scheduler_type"))
    if schedule.removesuffix("_with_warmup") in ("constant", "linear", "cosine"):
        c.put("optimizer.schedule", schedule.removesuffix("_with_warmup"), name)
    else:
        c.leave(name, f"{schedule!r} has no counterpart; the rate is constant")
    warmup, ratio = f"{_ARGS}.warmup_steps", f"{_ARGS}.warmup_ratio"
    updates = c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]
    steps = int(c.get(warmup)) or math.ceil(float(c.get(ratio)) * updates * c.run["max_steps"])
    told = f"ROLL counts updates, here steps of {updates}" if updates > 1 and steps else ""
    c.put("optimizer.warmup_steps", math.ceil(steps / updates), warmup, ratio, differs=told)
    c.carry("eval.every", "eval_steps")
    c.carry("checkpoint.every", "save_steps")
    c.carry_if_set("checkpoint.keep", "max_ckpt_to_keep")
    resume = c.get("resume_from_checkpoint")
    if isinstance(resume, str):
        c.leave(
            "resume_from_checkpoint", "no resume from a checkpoint of ROLL; give its weights as the model"
        )
    else:
        c.put("checkpoint.resume", "auto" if resume else "never", "resume_from_checkpoint")
    c.carry("seed", "seed")
    c.carry_if_set("output_dir", "output_dir")
    c.carry_if_set("tracking.run_name", "exp_name")
    c.put_trackers("track_with")
    c.put("guard.enabled", False)
