"""Checks of a tasks file beyond keys and types. None imports a plugin or a heavy library."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.grammar import GRAMMAR_KEYS, check_grammar
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.task import ConstraintSpec, TaskSpec
from multitask_rl.errors import ConfigError, path_errors, require_extra
from multitask_rl.plugins import PLUGIN_FORMS, declared_elsewhere, is_importable, list_plugins

_UNSCORED = ("anchor", "sft", "distill")
"""Kinds of tasks that need no reward."""
RESERVED_NAMES = ("all", "macro", "worst", "global")
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
FOREIGN_PREFIXES = ("trl", "verl", "verifiers", "reasoning_gym", "evaluate")
"""Prefixes of reward functions of other libraries; ``scoring.adapt`` reads the rest of the name."""
ENVIRONMENT_PREFIXES = ("trl", "openenv", "verifiers", "reasoning_gym", "agent")
"""Prefixes of environments of other libraries and of agents; ``environments.adapt`` reads the rest."""
FUNCTION_PREFIXES = ("trl", "verl", "agent")
"""Prefixes before the name of a function or class in our own notation."""
GENERATOR_PREFIX = "reasoning_gym:"
"""Prefix of data sets that a program generates, with their own verifier."""

_TEMPLATE_ARGUMENTS = {
    *("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "return_dict"),
    *("continue_final_message", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length"),
}
"""Arguments of ``apply_chat_template`` that are no variables of a template."""

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""Pattern of a task's name."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FORMAT = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?\d{0,3}[,_]?(\.\d{1,3})?[bcdeEfFgGnosxX%]?", re.DOTALL)
"""Format of a template field; a width or precision of more digits could fill the memory."""


def is_data_path(dataset: str) -> bool:
    """Whether ``dataset`` names a file rather than a hub id or a plugin."""
    return dataset.endswith(DATA_SUFFIXES) or dataset.startswith(("/", "./", "../", "~"))


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; False for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:  # too long
        return False


def parse_template(template: str) -> list[tuple[str, str | None, str | None, str | None]]:
    """Return the pieces of a prompt template as ``string.Formatter.parse`` does.

    Raises:
        ConfigError: it is malformed, or a field is no column, or has a conversion or format that is refused.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"prompt template {template!r}: {error}; write {{{{ and }}}} for braces") from error
    for _, column, form, conversion in pieces:
        if column is not None and (not column or any(c in column for c in ".[]{}")):
            raise ConfigError(
                f"prompt template {template!r}: {{{column}}} is no column; write {{{{ and }}}} for braces"
            )
        if conversion not in (None, "r", "s"):
            raise ConfigError(f"prompt template {template!r}: the conversion !{conversion} is not !r or !s")
        if form and not _FORMAT.fullmatch(form):
            raise ConfigError(
                f"prompt template {template!r}: {{{column}:{form}}} has no format that Python knows, with a "
                "width and a precision of three digits at most"
            )
    return pieces


def check_tasks(specs: Mapping[str, TaskSpec], where: Where) -> None:
    """Check what concerns all tasks together.

    Raises:
        ConfigError: all weights are 0, floors add up to more than 1, or two tasks have one former name.
    """
    file = where.file or "tasks"
    trained = [s for s in specs.values() if not s.evaluation_only]
    if trained and max(s.weight for s in trained) <= 0:
        raise ConfigError(
            f"{file}: the weights of {', '.join(s.name for s in trained)} are all 0; "
            f"give at least one task a weight > 0, or leave them out for equal weights"
        )
    floors = sum(s.min_share or 0.0 for s in trained)
    if floors > 1:
        raise ConfigError(f"{file}: the min_share of all tasks add up to {floors:g} > 1")
    heirs = {name: name for name in specs}
    for spec in specs.values():
        old = spec.renamed_from
        if old and heirs.setdefault(old, spec.name) != spec.name:
            raise ConfigError(
                f"{file}: tasks.{spec.name}.renamed_from: a checkpoint's state of {old!r} "
                f"goes to task {heirs[old]!r}; leave 'renamed_from' out (a checkpoint written under the new "
                "name does not need it), or give one of the tasks another name"
            )


def check_task(spec: TaskSpec, where: Where) -> None:
    """Check one task; a ``ConfigError`` says where, what and what is allowed."""
    name, temperature = spec.name, spec.sampling.temperature if spec.sampling is not None else 1.0
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"{where}: the task name {name!r} is reserved for aggregates; rename it "
            f"(reserved: {', '.join(RESERVED_NAMES)})"
        )
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{where}: the task name {name!r} is not allowed: ASCII letters, digits, '_' and '-', at most "
            "64, the first a letter or digit (it becomes part of metric names and command-line keys)"
        )
    if temperature == 0.0 and not spec.evaluation_only:  # all responses of a group would be the same
        raise ConfigError(
            f"{where.at('sampling', 'temperature')}: must be > 0 for a task that is trained, got "
            f"{temperature!r}; for greedy evaluation set eval.temperature=0, or make the task evaluation_only"
        )
    check_entry_point(where.at("type"), "multitask_rl.algorithms", spec.type)
    if spec.environment:
        check_entry_point(where.at("environment"), "multitask_rl.environments", spec.environment)
        _check_prefix(where.at("environment"), spec.environment, ENVIRONMENT_PREFIXES)
    for index, reward in enumerate(spec.rewards):
        place = where.at("rewards", index)
        _check_plugin(place, "multitask_rl.rewards", reward.plugin)
        value = reward.config.get("unfinished") if reward.plugin == "environment" else None
        if reward.range is not None and isinstance(value, (int, float)):
            low, high = reward.range
            if not low <= value <= high:  # each episode that a limit ends would be a failure
                raise ConfigError(
                    f"{place.at('config', 'unfinished')}: {value:g} is outside the range [{low:g}, {high:g}] "
                    "of the reward; give a value within it, or widen 'range'"
                )
    has_grammar = False
    for index, constraint in enumerate(spec.constraints):
        place = where.at("constraints", index)
        _check_constraint(place, constraint)
        if has_grammar and constraint.mode == "grammar":
            raise ConfigError(
                f"{place}: a second grammar; a task has one: join them in one regex "
                "('first|second') or in one schema ('anyOf'), or make it two tasks"
            )
        has_grammar |= constraint.mode == "grammar"
    if not spec.is_scored and spec.kind not in _UNSCORED and not spec.dataset.startswith("plugin:"):
        raise ConfigError(
            f"{where}: the task has neither rewards nor constraints that judge, so nothing could be learnt; "
            f"add 'rewards: [<name>]' (`multitask-rl plugins list` shows what is installed)"
        )
    if spec.tools_column and spec.environment:
        raise ConfigError(
            f"{where.at('tools_column')}: the chat template shows the tools of the environment; leave one out"
        )
    if taken := sorted(_TEMPLATE_ARGUMENTS & set(spec.chat_template_kwargs)):
        raise ConfigError(
            f"{where.at('chat_template_kwargs', taken[0])}: the run sets it itself; leave it out (a variable "
            "of the template such as enable_thinking is meant)"
        )
    for key, template in (("prompt", spec.prompt), ("answer", spec.answer)):
        try:
            parse_template(template)
        except ConfigError as error:
            raise ConfigError(f"{where.at(key)}: {error}") from error
    if spec.answer and spec.kind not in ("anchor", "sft"):
        raise ConfigError(
            f"{where.at('answer')}: only types anchor and sft read it, not {spec.type}; leave it out"
        )
    if bool(spec.teacher) != (spec.kind == "distill"):
        raise ConfigError(
            f"{where.at('teacher')}: type distill needs a teacher, and no other type has one; give teacher: "
            "PATH of its model, or take another type"
        )
    if not spec.prompt and not (spec.kind == "anchor" and spec.answer and not spec.is_scored):
        raise ConfigError(
            f"{where.at('prompt')}: an empty prompt is for plain text: a task of type anchor with 'answer' "
            "and without rewards"
        )
    if spec.kind in ("anchor", "sft") and spec.environment:
        raise ConfigError(
            f"{where.at('environment')}: a task of type {spec.kind} has one turn; leave environment out, or "
            "take a type that samples episodes, such as grpo"
        )
    if spec.kind == "sft" and spec.constraints:
        raise ConfigError(
            f"{where.at('constraints')}: type sft trains on the rows' answers, which no constraint changes; "
            "leave them out"
        )
    if spec.kind == "sft" and (spec.group_size or 1) > 1:
        raise ConfigError(f"{where.at('group_size')}: type sft trains on one answer per row; leave it out")
    if spec.curriculum.by and (spec.kind == "sft" or (spec.kind == "distill" and not spec.is_scored)):
        remedy = "" if spec.kind == "sft" else ", or give the task rewards"
        raise ConfigError(
            f"{where.at('curriculum')}: the rewards of training responses decide which pools are drawn, so "
            f"it would have no effect on type {spec.kind}; leave it out{remedy}"
        )
    if spec.kind in _UNSCORED and spec.kl.coefficient > 0:
        raise ConfigError(
            f"{where.at('kl')}: type {spec.kind} has no KL term to the initial actor; leave kl out"
            + ("" if spec.kind == "anchor" else ", or measure it with a task of type anchor")
        )
    if spec.kind == "distill" and any(c.mode in ("penalty", "lagrangian") for c in spec.constraints):
        raise ConfigError(
            f"{where.at('constraints')}: modes penalty and lagrangian act on rewards, which type distill "
            "does not train on; use mode reject or grammar"
        )
    known = ["reward", *(r.name for r in spec.rewards)]
    if spec.primary_metric.split("/", 1)[0] not in known:
        raise ConfigError(
            f"{where.at('primary_metric')}: primary_metric {spec.primary_metric!r} is none of the task's "
            f"rewards{suggest(spec.primary_metric, known)} (allowed: {', '.join(known)}, or "
            "<reward>/<component>)"
        )
    _check_dataset(where.at("dataset"), spec.dataset)
    _check_dataset(where.at("eval_dataset"), spec.eval_dataset)
    for column, wanted in spec.select.items():
        values = wanted if isinstance(wanted, (list, tuple)) else [wanted]
        if not values or not all(isinstance(value, (str, int, float)) for value in values):
            raise ConfigError(
                f"{where.at('select', column)}: got {wanted!r}; expected the column's value in rows "
                "of the task (a text, a number, true or false), or a list of values"
            )


def _check_constraint(where: Where, constraint: ConstraintSpec) -> None:
    mode, default = constraint.mode, ConstraintSpec()
    if mode == "grammar":
        for key, value, usual in (
            ("plugin", constraint.plugin, default.plugin),
            ("limit", constraint.limit, default.limit),
            ("weight", constraint.weight, default.weight),
            ("max_attempts", constraint.max_attempts, default.max_attempts),
            ("stream_every", constraint.stream_every, default.stream_every),
            ("multiplier", constraint.multiplier, default.multiplier),
        ):
            if value != usual:
                raise ConfigError(
                    f"{where.at(key)}: a constraint of mode grammar has no {key}, got {value!r}: it judges "
                    "no response, it decides what can be sampled; give the grammar in config: one of "
                    f"{', '.join(GRAMMAR_KEYS)}"
                )
        check_grammar(constraint.config, where.at("config"))
        return
    if not constraint.plugin:
        raise ConfigError(f"{where}: key 'plugin' is missing; only mode grammar has none")
    _check_plugin(where, "multitask_rl.constraints", constraint.plugin)
    if mode == "lagrangian" and constraint.limit is None:
        raise ConfigError(
            f"{where.at('limit')}: mode lagrangian keeps the mean cost at a limit; give one in [0, 1]"
        )
    if mode != "lagrangian" and constraint.multiplier != default.multiplier:
        raise ConfigError(
            f"{where.at('multiplier')}: mode {mode!r} has no multiplier; leave it out, or set "
            "mode: lagrangian"
        )


def check_entry_point(where: Where, group: str, name: str) -> None:
    """Raise ``ConfigError`` for a plain name that no entry point of ``group`` has."""
    names = sorted({plugin.name for plugin in list_plugins(group)})
    if name not in names and ":" not in name:  # loading checks module:object and file.py:object
        kind = group.rpartition(".")[2].removesuffix("s").replace("_", " ")
        raise ConfigError(
            f"{where}: unknown {kind} {name!r}{declared_elsewhere(name)}{suggest(name, names)}"
            f"{_own_form(name)} (installed: {', '.join(names) or 'none'}); "
            "a plugin added since the last install appears after `pip install -e .`"
        )


def _own_form(name: str) -> str:
    """Return a hint if ``name`` is a file, or a dotted path without ``:``; else ""."""
    if name.endswith(".py"):
        return f"; for an object of that file write {name}:FUNCTION"
    module, dot, last = name.rpartition(".")
    return f"; for an object of a module write {module}:{last}" if dot else ""


def _check_plugin(where: Where, group: str, plugin: str) -> None:
    """Check that a reward or constraint exists, without importing it: parse its file or find its package."""
    prefix, _, rest = plugin.partition(":")
    if not rest:
        return check_entry_point(where, group, plugin)
    if prefix in FOREIGN_PREFIXES and prefix in FUNCTION_PREFIXES:
        if ":" not in rest and rest not in {p.name for p in list_plugins(group)}:
            raise ConfigError(
                f"{where}: {plugin!r} names no file, module or installed plugin; expected "
                f"'{prefix}:file.py:function' or '{prefix}:package.module:function'"
            )
        return _check_plugin(where, group, rest)
    if prefix in FOREIGN_PREFIXES:
        return None
    _check_prefix(where, plugin, FOREIGN_PREFIXES)
    place, _, name = plugin.rpartition(":")
    if place.endswith(".py"):
        with path_errors(f"{where}: the plugin file", place, PLUGIN_FORMS):
            text = Path(place).expanduser().read_text(encoding="utf-8")
        try:
            tree = parse_python(text)
        except SyntaxError as error:
            raise ConfigError(
                f"{where}: {place}:{error.lineno} is not Python: {error.msg}; correct that line"
            ) from error
        names: list[str] = []
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names += [t.id for t in node.targets if isinstance(t, ast.Name)]
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names += [(a.asname or a.name).split(".")[0] for a in node.names]
        if name not in names:
            raise ConfigError(
                f"{where}: {place!r} has no {name!r}{suggest(name, names)} (it has: {', '.join(names)})"
            )
    elif not is_importable(place):
        raise ConfigError(
            f"{where}: {plugin!r} is not found: no module {place!r}{suggest(place, FOREIGN_PREFIXES)}; "
            f"install its package, or name a file: {place.replace('.', '/')}.py:{name} "
            f"(prefixes: {', '.join(FOREIGN_PREFIXES)})"
        )


def _check_prefix(where: Where, plugin: str, known: Sequence[str]) -> None:
    """Refuse ``prefix:file.py:object`` and the like with a prefix that is not ``known``."""
    place = plugin.rpartition(":")[0]
    prefix, colon, _ = place.partition(":")
    if colon and prefix not in known and not is_file(Path(place).expanduser()):
        raise ConfigError(
            f"{where}: unknown prefix {prefix!r} of {plugin!r}{suggest(prefix, known)} "
            f"(allowed: {', '.join(known)}, or none)"
        )


def _check_dataset(where: Where, dataset: str) -> None:
    if not dataset:
        return
    if dataset.startswith("plugin:"):
        check_entry_point(where, "multitask_rl.tasks", dataset.removeprefix("plugin:"))
    elif dataset.startswith(GENERATOR_PREFIX):
        require_extra("reasoning_gym", "reasoning-gym", f"{where}: {dataset!r} needs reasoning-gym")
    elif is_data_path(dataset):
        beside = f"in {str(Path(where.file).parent)!r} or " if where.line > 0 else ""
        allowed = f"a file {beside}in the working directory whose name ends in {', '.join(DATA_SUFFIXES)}"
        path = Path(dataset).expanduser()
        with path_errors(f"{where}: the data set", dataset, allowed):
            if where.line > 0 and not path.exists():
                path = Path(where.file).parent / path
            if path.parent.is_dir():
                allowed += suggest(path.name, (file.name for file in path.parent.iterdir()))
        with path_errors(f"{where}: the data set", path, allowed):
            path.open("rb").close()
        if not dataset.endswith(DATA_SUFFIXES):
            raise ConfigError(f"{where}: {dataset!r} must end in one of {', '.join(DATA_SUFFIXES)}")
    elif not _HUB_ID.fullmatch(dataset):
        raise ConfigError(
            f"{where}: {dataset!r} is neither a path ({', '.join(DATA_SUFFIXES)}), a Hugging Face id "
            f"(owner/name), plugin:<task> nor reasoning_gym:<generator>"
        )
