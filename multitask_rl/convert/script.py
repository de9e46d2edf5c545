"""A Python script that trains with TRL, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.errors import ConfigError, path_errors

_READERS = ("json", "parquet", "csv")
_CHANGES = ("map", "filter", "select", "shuffle", "rename_column", "rename_columns", "remove_columns")


@dataclass(kw_only=True)
class Script:
    """What a script gives to TRL."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``GRPOConfig``, and ``lora_*`` of ``LoraConfig``, that are constants."""
    computed: dict[str, str] = field(default_factory=dict)
    """Keyword arguments that are not: name -> source text."""
    model: str = ""
    dataset: str = ""
    split: str = ""
    eval_dataset: str = ""
    dataset_calls: list[str] = field(default_factory=list)
    """Methods that change the rows after loading."""
    rewards: list[str] = field(default_factory=list)
    """References of the plugins, or ``model:<id>`` for a reward model."""
    rewards_file: str = ""
    """Text of a module that holds the rewards that the script defines, with what they need of it."""


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        try:
            self._tree = parse_python(text)
        except SyntaxError as error:
            raise ConfigError(f"{name}: line {error.lineno}: this is not Python: {error.msg}") from error
        self._text = text
        self._top: dict[str, ast.stmt] = {}
        """Name -> the statement that binds it, at the top level or in the body of ``main``."""
        for node in self._statements(self._tree.body):
            for bound in _bound(node):
                self._top.setdefault(bound, node)

    def _statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.If) or (isinstance(node, ast.FunctionDef) and node.name == "main"):
                yield from self._statements(node.body)

    def call(self, name: str) -> ast.Call | None:
        """Return the first call of ``name`` or ``module.name``."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        return next((c for c in calls if ast.unparse(c.func).rpartition(".")[2] == name), None)

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return what a name was assigned, or the expression itself."""
        if isinstance(node, ast.Name) and isinstance(self._top.get(node.id), (ast.Assign, ast.AnnAssign)):
            value = self._top[node.id].value  # type: ignore[attr-defined]
            return self.resolve(value) if value is not None else node
        return node

    def constant(self, node: ast.expr) -> Any:
        """Return the value of a literal; ValueError for others."""
        return ast.literal_eval(self.resolve(node))

    def keywords(self, call: ast.Call, script: Script, prefix: str = "") -> None:
        for keyword in call.keywords:
            name = f"{prefix}{keyword.arg}" if keyword.arg else ast.unparse(keyword.value)
            try:
                script.options[name] = self.constant(keyword.value)
            except ValueError:
                text = ast.unparse(keyword.value)
                if text.startswith("torch."):  # torch.bfloat16
                    script.options[name] = text.removeprefix("torch.")
                else:
                    script.computed[name] = text

    def adapters(self, node: ast.expr, script: Script) -> bool:
        """Take the options of the ``LoraConfig`` that ``node`` is; return whether it is one."""
        call = self.resolve(node)
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "LoraConfig":
            return False
        self.keywords(call, script, "peft_config.")
        return True

    def dataset(self, node: ast.expr) -> tuple[str, str, list[str]]:
        """Return path or id, split, and the methods that change the rows; "" where it is not found."""
        node = self.resolve(node)
        if isinstance(node, ast.Subscript):
            name, _, calls = self.dataset(node.value)
            return name, str(self.constant(node.slice)), calls
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            name, split, calls = self.dataset(node.func.value)
            return name, split, [*calls, node.func.attr]
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "load_dataset":
            given = {k.arg: k.value for k in node.keywords}
            try:
                name = self.constant(node.args[0] if node.args else given["path"])
                split = self.constant(given["split"]) if "split" in given else ""
                if name in _READERS and "data_files" in given:
                    files = self.constant(given["data_files"])
                    return (files, "", []) if isinstance(files, str) else ("", "", [])
                return name, split, []
            except (ValueError, KeyError):
                return "", "", []
        return "", "", []

    def rewards(self, node: ast.expr, script: Script) -> None:
        node = self.resolve(node)
        own: dict[str, str] = {}
        for index, item in enumerate(node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]):
            bound = self._top.get(item.id) if isinstance(item, ast.Name) else None
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                script.rewards.append(f"model:{item.value}")
            elif isinstance(item, ast.Name) and isinstance(bound, ast.ImportFrom) and not bound.level:
                alias = next(a for a in bound.names if (a.asname or a.name) == item.id)
                script.rewards.append(f"trl:{bound.module}:{alias.name}")
            elif isinstance(item, ast.Name) and isinstance(bound, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own[item.id] = ""
                script.rewards.append(f"trl:rewards.py:{item.id}")
            else:
                name = item.id if isinstance(item, ast.Name) else f"reward_{index + 1}"
                own[name] = "" if isinstance(item, ast.Name) else f"{name} = {ast.unparse(item)}"
                script.rewards.append(f"trl:rewards.py:{name}")
        if own:
            script.rewards_file = self._module(own)

    def _module(self, own: dict[str, str]) -> str:
        """Return a module with the functions, and the imports, constants and functions that they use."""
        open_names = [n for n, text in own.items() if not text]
        open_names += [n for text in own.values() if text for n in _used(parse_python(text))]
        needed: dict[int, ast.stmt] = {}
        while open_names:
            node = self._top.get(open_names.pop())
            if node is not None and id(node) not in needed:
                needed[id(node)] = node
                open_names += _used(node)
        in_order = sorted(needed.values(), key=lambda node: node.lineno)
        imports = [n for n in in_order if isinstance(n, (ast.Import, ast.ImportFrom))]
        rest = [n for n in in_order if n not in imports]
        parts = ["\n".join(ast.unparse(n) for n in imports)]
        parts += [_dedented(ast.get_source_segment(self._text, n, padded=True) or "", n) for n in rest]
        parts += [text for text in own.values() if text]
        return "\n\n\n".join(filter(None, parts)) + "\n"


def read_script(file: Path) -> Script:
    """Return what the script gives to ``GRPOConfig`` and ``GRPOTrainer``.

    Raises:
        ConfigError: the file cannot be read, or calls neither.
    """
    with path_errors("the script", file, "the path of a Python file"):
        text = file.read_text(encoding="utf-8")
    reader, script = _Reader(text, str(file)), Script()
    config, trainer = reader.call("GRPOConfig"), reader.call("GRPOTrainer")
    if config is None and trainer is None:
        raise ConfigError(
            f"{file}: it calls neither GRPOConfig nor GRPOTrainer, so there is nothing to convert"
        )
    if config is not None:
        reader.keywords(config, script)
    if trainer is None and (lora := reader.call("LoraConfig")):
        reader.keywords(lora, script, "peft_config.")
    wrapper = reader.call("get_peft_model")
    for node in wrapper.args if wrapper is not None else ():
        reader.adapters(node, script)
    train = reader.call("train")
    for keyword in train.keywords if train is not None else ():
        script.options[f"train.{keyword.arg}"] = ast.unparse(keyword.value)
    for keyword in trainer.keywords if trainer is not None else ():
        match keyword.arg:
            case "model":
                node = reader.resolve(keyword.value)
                if isinstance(node, ast.Call) and node.args:  # AutoModelForCausalLM.from_pretrained("...")
                    node = reader.resolve(node.args[0])
                if isinstance(node, ast.Constant):
                    script.model = str(node.value)
            case "train_dataset":
                script.dataset, script.split, script.dataset_calls = reader.dataset(keyword.value)
            case "eval_dataset":
                script.eval_dataset = reader.dataset(keyword.value)[0]
            case "reward_funcs":
                reader.rewards(keyword.value, script)
            case "peft_config":
                if not reader.adapters(keyword.value, script) and ast.unparse(keyword.value) != "None":
                    script.computed["GRPOTrainer.peft_config"] = ast.unparse(keyword.value)
            case "args" | "processing_class" | None:
                pass
            case name:
                script.options[f"GRPOTrainer.{name}"] = ast.unparse(keyword.value)
    return script


def _bound(node: ast.stmt) -> Iterable[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign() if isinstance(node.target, ast.Name):
            return [node.target.id]
    return []


def _used(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def _dedented(text: str, node: ast.stmt) -> str:
    lines = text.splitlines()
    return "\n".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in lines)
