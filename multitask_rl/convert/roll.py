"""ROLL's RLVR pipeline: a YAML file whose domains become tasks."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.config.checks import is_file
from multitask_rl.config.run import dotted
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.convert import messages as say
from multitask_rl.convert.conversion import Conversion, Reading, Row, Source, task_name
from multitask_rl.data.readers import read_file
from multitask_rl.errors import ConfigError, DataError

_DATA, _ARGS = "actor_train.data_args", "actor_train.training_args"
_MODEL, _SAMPLING = "actor_train.model_args", "actor_infer.generating_args"
_VALIDATION, _ENGINE = "validation.generating_args", "actor_infer.strategy_args"
_SHARES = f"{_DATA}.domain_interleave_probs."
DEFAULTS = """
{seed: 42, max_steps: 500, save_steps: 50, eval_steps: 10, max_ckpt_to_keep: 0, track_with: [tensorboard],
  rollout_batch_size: 128, num_return_sequences_in_group: 1, prompt_length: 1024, response_length: 0,
  sequence_length: 0, async_generation_ratio: 0, adv_estimator: gae, importance_sampling: token, gamma: 1.0,
  lambd: 0.95, pg_clip: 0.2, use_pg_clip_range: false, pg_clip_low: 0.2, pg_clip_high: 0.2,
  dual_clip_loss: false, whiten_advantages: false, use_kl_loss: false, kl_loss_coef: 0.0,
  add_token_level_kl: false, init_kl_coef: 0.2, kl_penalty: kl, entropy_loss_coef: 0.0,
  loss_agg_mode: seq-mean-token-mean, max_len_mask: false, ppo_epochs: 1, max_grad_norm: 1.0,
  train_infer_correction: {is_weight: {enabled: false, weight_type: token, upper_bound: 1.2}},
  actor_train: {
    data_args: {dataset_dir: ., messages: <text>},
    training_args: {learning_rate: 5.0e-5, lr_scheduler_type: linear, weight_decay: 0.0, adam_beta1: 0.9,
      adam_beta2: 0.999, per_device_train_batch_size: 8, gradient_accumulation_steps: 1, warmup_steps: 0,
      warmup_ratio: 0.0},
    model_args: {dtype: bf16, disable_gradient_checkpointing: false, lora_rank: <number>,
      lora_alpha: <number>}},
  actor_infer: {generating_args: {temperature: 0.95, top_p: 0.7, top_k: 50},
    strategy_args: {strategy_name: fsdp2_train}},
  validation: {generating_args: {temperature: 0.95, num_return_sequences: 1}},
  critic: {training_args: {learning_rate: 5.0e-5}}}
"""
REASONS = r"""
.*\.(strategy_args|device_mapping|infer_batch_size|world_size|num_gpus_per_worker|backend_timeout|
  max_concurrency|use_dynamic_batching.*|max_tokens_per_microbatch.*|sequence_length.*|use_sequence_packing|
  sequence_packing_args)(\..*)?|num_gpus_per_node|num_nodes|is_offload.*|offload_nccl|transfer_backend.*|
  model_up.*: devices and layout: device_map, ray, batch
max_running_requests|is_num_return_sequences_expand|(is_)?use_additional_prompts|generate_opt_level|
  max_additional_.*|router_args.*|rpc_timeout: the rollout keeps the engine full by itself
logging_.*|tracker_kwargs.*|profiler_.*|rollout_dump_dir|save_logging_board_dir|report_.*|length_profiler_dir|
  otlp_.*: every step is logged, and some of its responses (tracking.*)
system_envs.*|hydra.*|defaults.*|model_download_type|local_rank|base_dir: how ROLL starts
checkpoint_config.*: checkpoints are below output_dir (docs/checkpoints.md)
reward_clip|advantage_clip|whiten_rewards: rewards and advantages are not clipped
reward_(shift|scale|model|system_config).*|use_reward_.*|add_len_reward: no counterpart for rewards
rollout_mock.*: testing.FakeEngine stands in for an engine
difficulty_mask|difficulty_.*_threshold: groups of equal rewards have no gradient; see curriculum: {by:
  pass_rate}
error_max_len_.*|difficulty_loss_weight|length_loss_weight|balance_length|mask_type|minibatch_data_iter_num:
  no mask and no weight of single samples but mask_truncated
.*pg_variant|.*topr.*|use_policy_loss_type|postive_loss_coef|rl_loss_coef|.*(tis|cispo|kimi).*: no counterpart
  in the clipped loss; type cispo has CISPO's
target_kl|kl_horizon: ROLL's target is the KL per token, ours per response: set kl.target
(teacher|student_.*|use_opd|is_pure_opd)(\..*)?: a task of type distill with teacher: DIR
dataset_filter.*|.*_filter_config.*: groups without a gradient are replaced by batch.refill_rounds; no filter
  of rows or groups by value
global_template|tag_to_template.*|.*\.template: prompts use the tokenizer's own chat template
reference\..*: the reference is the initial actor, with its devices
critic\..*|value_clip|critic_warmup|reward_pretrain: only type ppo (adv_estimator: gae) has a critic
actor_infer\..*|validation\..*: no counterpart; the distribution that is sampled is the one trained
actor_train\..*: no counterpart for data, model or training of the actor
rewards\..*(judge_.*|generating_args\..*): keys of rm_generative: rubric, temperature, max_tokens
rewards\..*: rewards run in workers: scoring.*
train_infer_correction\..*: the weight for engine mismatch is per token, with an upper bound
num_train_epochs|val_.*|norm_.*: no counterpart
"""
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
_PARALLEL = ("tensor_model", "pipeline_model", "context")
_SCORES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}
_MISSING = """
def reward_{name}(response, **row):
    raise NotImplementedError("write what {worker} of ROLL does: the reward of `response`; `row`: columns")
"""


def read(file: Path) -> Reading:
    """Read the YAML file of an RLVR pipeline."""
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
    return Reading(options=given)


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


def tasks(c: Conversion) -> None:
    """Write a task for each domain, and a file with the rows that ROLL gives to it."""
    files = [c.dataset] if c.dataset else _files(c, _DATA)
    c.need(files, "data set", instead="--dataset")
    named = [name for name in c.given if name.startswith(_SHARES)]
    c.defaults |= dict.fromkeys(named, 0.0)
    shares = {name.removeprefix(_SHARES): c.get(name) for name in named}
    if shares:  # ROLL gives the last one what is left
        last = list(shares)[-1]
        shares[last] = max(0.0, round(1.0 - sum(shares.values()) + shares[last], 9))
    names = {
        re.sub(r"^rewards\.|\.(worker_cls|tag_included)$", "", name)
        for name in c.given
        if re.fullmatch(r"rewards\..*\.(worker_cls|tag_included)", name)
    }
    domains = [domain for domain in shares if shares[domain] > 0] or sorted(names)
    c.need(domains, "domain", instead="rewards")
    tags: dict[str, str] = {}
    for name in names:
        tags |= dict.fromkeys(c.texts(f"rewards.{name}.tag_included"), name)
    c.note("task.dataset", f"{_DATA}.file_name", f"{_DATA}.dataset_dir")
    train = _by_domain(c, files, tags)
    held_out = _by_domain(c, _files(c, "validation.data_args"), tags)
    functions = ""
    for domain in domains:
        name = task_name(domain, c.tasks)
        own: dict[str, Any] = {"dataset": f"data/{name}.jsonl", "weight": shares.get(domain, 1.0)}
        code, entries = ("", [{"plugin": c.reward}]) if c.reward else _rewards(c, domain, name)
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
    folder, listed = c.get(f"{section}.dataset_dir") or ".", c.texts(f"{section}.file_name")
    # examples of ROLL write the folder in both options
    joined = [one if Path(one).exists() else str(Path(str(folder)) / one) for one in listed]
    return [one if Path(one).exists() else given for one, given in zip(joined, listed, strict=True)]


def _by_domain(
    c: Conversion, files: Sequence[str], tags: Mapping[str, str]
) -> dict[str, list[Mapping[str, Any]]]:
    """Return rows by their column ``domain``, else by their tag's domain; tell files that are not read."""
    found: dict[str, list[Mapping[str, Any]]] = {}
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
    c: Conversion, domain: str, rows: Sequence[Mapping[str, Any]], rewards: Sequence[Mapping[str, Any]]
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
        told = f"{counted(num_texts, 'row')} with a text that is no list of messages"
        c.left[f"messages of {domain}"] = told
    if missing := len(rows) - len(found):
        told = f"{missing} of {len(rows)} rows have tests of another kind than programs run by their input"
        c.left[f"rows of {domain}"] = f"{told} or single assert statements"
    return found


def _tests(row: Mapping[str, Any]) -> list[Any] | None:
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


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _rewards(c: Conversion, domain: str, name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return code for rewards.py, and the task's rewards."""
    option, ours = f"rewards.{domain}.worker_cls", f"rewards.py:reward_{name}"
    worker = str(c.get(option) or "").rpartition(".")[2]
    if worker == "MathRuleRewardWorker":
        c.note(f"{name}: math_answer", option, differs=say.MATH_VERIFY)
        return "", [{"plugin": "math_answer"}]
    if worker == "CodeSandboxRewardWorker":
        c.note(f"{name}: code_evaluator", option, differs=say.OUR_SANDBOX)
        return "", [{"plugin": "code_evaluator", "config": {"all_or_nothing": True}}]
    if worker == "LLMJudgeRewardWorker":
        model = c.get(f"rewards.{domain}.judge_model_name") or c.get(
            f"rewards.{domain}.model_args.model_name_or_path"
        )
        c.need(model, f"model of the judge of {domain}")
        address = c.get(f"rewards.{domain}.judge_api_url")
        c.note(f"{name}: rm_generative", option, differs=say.JUDGE_SCALE)
        c.leave(f"rewards.{domain}.judge_api_key", say.JUDGE_KEY)
        config = {"base_url": address or "http://localhost:8000/v1", "model": str(model)}
        return "", [{"plugin": "rm_generative", "config": config}]
    if worker in ("CrossThinkQARuleRewardWorker", "MultipleChoiceBoxedRuleRewardWorker"):
        kind = str(c.get(f"rewards.{domain}.reward_type") or "strict")
        scores = _SCORES.get(kind, _SCORES["strict"])
        if worker.startswith("MultipleChoice"):
            scores = {(right, boxed): float(right and boxed) for right, boxed in scores}
        options = (option, f"rewards.{domain}.reward_type")
        c.note(f"{name}: {ours}", *options, differs=say.LETTER_ALONE)
        return _CHOICE.format(name=name, scores=scores, low=min(scores.values())), [{"plugin": ours}]
    c.leave(option, say.NO_WORKER, worker=worker or "no worker", name=name)
    return _MISSING.format(name=name, worker=worker or "the worker"), [{"plugin": ours}]


def algorithm(c: Conversion) -> None:
    """Write the type, and what belongs to it alone."""
    options = ("adv_estimator", "norm_mean_type", "norm_std_type", "whiten_advantages")
    estimator, mean, std, whitens = map(c.get, options)
    by_group, by = c.get("num_return_sequences_in_group") > 1, ""
    if estimator == "grpo":
        mean = std = "group"
    if estimator == "gae":
        kind = "ppo"
        told = "" if whitens else say.WHITENED
    elif mean == "group" and by_group and (std == "group" or not whitens):
        kind = "grpo"
        c.put("algorithm.normalisation", {"group": "group", None: "none"}.get(std, "task"))
        told = say.NOT_WHITENED_AGAIN if whitens else ""
        told = told if std in ("group", None) else say.RUNNING_DEVIATION
    else:
        kind = "reinforce_pp"
        c.put("algorithm.group_baseline", mean == "group" and by_group)
        by = mean or std
        others = say.NOT_NORMALISED if mean not in (None, "group") or std else ""
        told = others or (say.TRUNCATED_COUNT if c.get("max_len_mask") else "")
        told = told if whitens else say.WHITENED_OVER_TOKENS
    if estimator not in ("gae", "grpo", "reinforce"):
        c.leave("adv_estimator", say.NO_ESTIMATOR, value=estimator, kind=kind)
        told = ""
    if c.get("importance_sampling") == "seq":
        if kind == "grpo":
            kind = "gspo"
            c.note("task.type = gspo", "importance_sampling")
        else:
            c.leave("importance_sampling", say.ONE_RATIO, kind=kind)
    c.task = {"type": kind, **c.task}
    c.note(f"task.type = {kind}", *options, differs=told, std=std, by=by)
    if kind == "ppo":
        paths = ("critic.model_args.model_name_or_path", "reward_pretrain")
        c.put_critic("gamma", "lambd", "value_clip", "critic.training_args.learning_rate", *paths)
    elif c.get("gamma") != 1:
        c.leave("gamma", say.NOT_DISCOUNTED_HERE, kind=kind)


def loss(c: Conversion) -> None:
    """Write bounds and means of the loss, and the bound of the weight for engine mismatch."""
    is_range = c.get("use_pg_clip_range")
    for side in ("low", "high"):
        option = f"pg_clip_{side}" if is_range else "pg_clip"
        c.put(f"algorithm.clip_{side}", float(c.get(option)), option, "use_pg_clip_range")
    dual = 1.0 + 2.0 * float(c.get("pg_clip")) if c.get("dual_clip_loss") else 0.0
    c.put("algorithm.dual_clip", dual, "dual_clip_loss")
    c.carry("algorithm.mask_truncated", "max_len_mask")
    c.carry("algorithm.entropy_coefficient", "entropy_loss_coef", float)
    mode = str(c.get("loss_agg_mode"))
    aggregation = {"token-mean": "token", "seq-mean-token-mean": "sequence"}.get(mode, "constant")
    told = say.MASKED_COUNT if c.get("max_len_mask") and aggregation != "token" else ""
    if mode == "seq-mean-token-sum":
        c.put("task.loss_weight", float(most_new_tokens(c)), "loss_agg_mode")
    elif aggregation == "constant":
        told = say.PADDED
    c.put("algorithm.aggregation", aggregation, "loss_agg_mode", differs=told)
    options = [f"train_infer_correction.is_weight.{o}" for o in ("enabled", "weight_type", "upper_bound")]
    if not c.get(options[0]):
        c.put("algorithm.truncated_is", 0.0, options[0])
    else:
        _, per, bound = map(c.get, options)
        told = "" if per == "token" else say.TOKEN_WEIGHT
        c.put("algorithm.truncated_is", float(bound or 0.0), *options, differs=told, per=per)


def kl(c: Conversion) -> None:
    """Write the KL in the loss, else in the reward."""
    in_loss, in_reward, penalty = map(c.get, ("use_kl_loss", "add_token_level_kl", "kl_penalty"))
    coefficient = float(c.get("init_kl_coef"))
    if in_loss:
        c.put("task.kl.coefficient", float(c.get("kl_loss_coef")), "use_kl_loss", "kl_loss_coef")
        c.put("task.kl.placement", "loss", "use_kl_loss")
        c.put("task.kl.estimator", "k3")
    if in_reward and in_loss:
        c.leave("add_token_level_kl", say.BOTH_KL)
    elif in_reward:
        told = "" if c.task["type"] == "ppo" else say.KL_AFTER_NORMALISING
        options = ("add_token_level_kl", "init_kl_coef", "kl_penalty")
        c.put("task.kl.coefficient", coefficient, *options, differs=told)
        c.put("task.kl.placement", "reward")
        if penalty != "kl":
            c.leave("kl_penalty", say.K1_IN_REWARD, value=penalty)


def most_new_tokens(c: Conversion) -> int:
    """Return the limit of a response."""
    if length := c.get("response_length"):
        return int(length)
    if length := c.get("sequence_length"):
        return int(length) - int(c.get("prompt_length"))
    raise ConfigError("response_length or sequence_length is missing; ROLL needs one of them, too")


def batch(c: Conversion) -> None:
    """Write prompts, groups, updates, further rounds of sampling, and the number of steps."""
    c.carry("batch.prompts_per_step", "rollout_batch_size")
    c.carry("batch.group_size", "num_return_sequences_in_group")
    c.carry("batch.num_epochs", "ppo_epochs")
    sizes = [f"{_ARGS}.per_device_train_batch_size", f"{_ARGS}.gradient_accumulation_steps"]
    strategy, mapping = "actor_train.strategy_args", "actor_train.device_mapping"
    splits = [f"{strategy}.strategy_config.{kind}_parallel_size" for kind in _PARALLEL]
    if str(c.get(f"{strategy}.strategy_name")).startswith("fsdp2"):
        splits.append(f"{_MODEL}.ulysses_size")
    parts = math.prod(int(c.get(split) or 1) for split in splits)
    devices = max(1, num_devices(c.get(mapping)) // parts)
    responses = c.run["batch.prompts_per_step"] * c.run["batch.group_size"]
    updates = max(1, math.ceil(responses / (math.prod(map(c.get, sizes)) * devices)))
    c.put("batch.num_minibatches", updates, *sizes, mapping, differs=say.ONE_DEVICE, exact=mapping in c.given)
    types = [name for name in c.given if name.endswith("query_filter_config.type")]
    filters = [name for name in types if c.get(name) != "no_filter"]
    rounds = 10 if filters else 0
    c.put("batch.refill_rounds", rounds, *filters, differs=say.REFILL_EQUAL, exact=not filters)
    c.put_steps(int(c.get("max_steps")), "max_steps")
    if ratio := float(c.get("async_generation_ratio")):
        told = "" if ratio == int(ratio) else say.WHOLE_STEPS
        c.put("rollout.max_staleness", math.ceil(ratio), "async_generation_ratio", differs=told)


def num_devices(mapping: Any) -> int:
    """Count the devices of a list, or of a sum of ``list(range(0, 8))`` and ``[8, 9]`` as a text."""
    if isinstance(mapping, list):
        return len(mapping)
    ranges = re.findall(r"range\(([\d\s,]+)\)", str(mapping))
    listed = re.findall(r"\[([\d\s,]+)\]", str(mapping))
    return sum(len(range(*map(int, one.split(",")))) for one in ranges) + sum(
        len(one.split(",")) for one in listed
    )


def model(c: Conversion) -> None:
    """Write what is loaded as the actor, and its adapters."""
    c.put_if_set("model.name_or_path", "pretrain", f"{_MODEL}.model_name_or_path")
    dtype = str(c.get(f"{_MODEL}.dtype"))
    known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    c.put("model.dtype", known.get(dtype, dtype if dtype in known.values() else "auto"), f"{_MODEL}.dtype")
    plain = f"{_MODEL}.disable_gradient_checkpointing"
    c.put("model.gradient_checkpointing", not c.get(plain), plain)
    targets, size, scale = (f"{_MODEL}.lora_{name}" for name in ("target", "rank", "alpha"))
    if names := c.texts(targets):
        rank = int(c.get(size) or 8)
        c.put("model.lora.rank", rank, size, targets)
        c.put("model.lora.alpha", float(c.get(scale) or 2 * rank), scale)
        c.put("model.lora.target_modules", ",".join(names).replace(" ", ""), targets)


def sampling(c: Conversion) -> None:
    """Write what is sampled, and by what; options that repeat others have nothing to write."""
    c.put("rollout.max_new_tokens", most_new_tokens(c), "response_length", "sequence_length")
    c.carry("rollout.max_prompt_tokens", "prompt_length")
    c.carry("rollout.temperature", f"{_SAMPLING}.temperature", float)
    c.carry("rollout.top_p", f"{_SAMPLING}.top_p", float)
    c.carry("rollout.top_k", f"{_SAMPLING}.top_k", lambda number: max(0, int(number)))
    c.get(f"{_SAMPLING}.max_new_tokens"), c.get(f"{_SAMPLING}.num_return_sequences")
    name = f"{_ENGINE}.strategy_name"
    c.put_engine(c.get(name), name, f"{_ENGINE}.strategy_config.")
    c.carry("eval.temperature", f"{_VALIDATION}.temperature", float)
    c.carry("task.eval_samples", f"{_VALIDATION}.num_return_sequences")


def optimizer(c: Conversion) -> None:
    """Write AdamW's settings, the schedule and the warm-up, which ROLL counts in updates."""
    c.carry("optimizer.learning_rate", f"{_ARGS}.learning_rate", float)
    names = [f"{_ARGS}.adam_beta1", f"{_ARGS}.adam_beta2"]
    c.put("optimizer.betas", [float(c.get(name)) for name in names], *names)
    c.carry("optimizer.weight_decay", f"{_ARGS}.weight_decay", float)
    c.carry("optimizer.max_grad_norm", "max_grad_norm", float)
    name = f"{_ARGS}.lr_scheduler_type"
    value = str(c.get(name))
    if value.removesuffix("_with_warmup") in ("constant", "linear", "cosine"):
        c.put("optimizer.schedule", value.removesuffix("_with_warmup"), name)
    else:
        c.leave(name, say.CONSTANT_RATE, value=value)
    warmup, ratio = f"{_ARGS}.warmup_steps", f"{_ARGS}.warmup_ratio"
    updates = c.run["batch.num_minibatches"] * c.run["batch.num_epochs"]
    steps = int(c.get(warmup)) or math.ceil(float(c.get(ratio)) * updates * c.run["max_steps"])
    number, told = math.ceil(steps / updates), say.PER_STEP if updates > 1 and steps else ""
    c.put("optimizer.warmup_steps", number, warmup, ratio, differs=told, updates=updates)


def resume(c: Conversion) -> None:
    """A path is left: a checkpoint of ROLL gives its weights only."""
    value = c.get("resume_from_checkpoint")
    if isinstance(value, str):
        c.leave("resume_from_checkpoint", say.NO_RESUME_FROM)
    else:
        c.put("checkpoint.resume", "auto" if value else "never", "resume_from_checkpoint")


ROLL = Source(
    name="ROLL, August 2026 (RLVR pipeline)",
    read=read,
    defaults=DEFAULTS,
    reasons=REASONS,
    counts=(
        *("rollout_batch_size", "num_return_sequences_in_group", "ppo_epochs", "max_steps"),
        *(f"{_ARGS}.per_device_train_batch_size", f"{_ARGS}.gradient_accumulation_steps"),
    ),
    table=(
        tasks,
        algorithm,
        loss,
        kl,
        batch,
        model,
        sampling,
        optimizer,
        Row("eval.every", "eval_steps"),
        Row("checkpoint.every", "save_steps"),
        Row("checkpoint.keep", "max_ckpt_to_keep", if_set=True),
        resume,
        Row("seed", "seed"),
        Row("output_dir", "output_dir", if_set=True),
        Row("tracking.run_name", "exp_name", if_set=True),
        lambda c: c.put_trackers("track_with"),
    ),
)
