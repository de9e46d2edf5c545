"""A Python script that trains with TRL, read without running it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.convert.conversion import Reading, Rows
from multitask_rl.errors import ConfigError, path_errors

_READERS = ("json", "parquet", "csv")
_WHERE = ("name", "data_dir", "revision", "streaming")
"""Keywords of ``load_dataset`` that choose rows, besides ``split``."""
A_TENTH = "train_test_split of a tenth"
"""A call that holds out as many rows as are held out here."""
_POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""Parameters of ``GRPOTrainer`` that may be given by position."""


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        try:
            self._tree = parse_python(text)
        except SyntaxError as error:
            raise ConfigError(f"{name}: line {error.lineno}: this is not Python: {error.msg}") from error
        self._text = text
        self._top: dict[str, list[ast.stmt]] = defaultdict(list)
        """Name -> the statements that bind it, at the top level or in the body of ``main``."""
        for node in self._statements(self._tree.body):
            for bound in _bound(node):
                self._top[bound].append(node)

    def _statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.If) or (isinstance(node, ast.FunctionDef) and node.name == "main"):
                yield from self._statements(node.body)

    def call(self, name: str) -> ast.Call | None:
        """Return the first call of ``name`` or ``module.name``."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        return next((c for c in calls if ast.unparse(c.func).rpartition(".")[2] == name), None)

    def binding(self, name: ast.Name) -> ast.stmt | None:
        """Return the last statement before ``name`` that binds it, else the only one, if it is behind."""
        found = self._top.get(name.id, [])
        before = [one for one in found if (one.end_lineno or one.lineno) < name.lineno]
        behind = found if len(found) == 1 and found[0].lineno > name.lineno else []
        return next(iter(before[-1:] or behind), None)

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return what a name was assigned, or the expression itself."""
        seen: list[ast.expr] = []
        while isinstance(node, ast.Name) and node not in seen:
            seen.append(node)
            bound = self.binding(node)
            if not isinstance(bound, (ast.Assign, ast.AnnAssign)) or bound.value is None or _unpacks(bound):
                break
            node = bound.value
        return node

    def attributes(self, node: ast.expr, script: Reading) -> None:
        """Take the options that are set as attributes of the name ``node``: ``config.beta = 0.1``."""
        for each in ast.walk(self._tree):
            target = each.targets[0] if isinstance(each, ast.Assign) else None
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == ast.unparse(node):
                self.keyword(target.attr, each.value, script)  # type: ignore[attr-defined]

    def constant(self, node: ast.expr) -> Any:
        """Return the value of a literal; ValueError for others."""
        return ast.literal_eval(self.resolve(node))

    def keywords(self, call: ast.Call, script: Reading, prefix: str = "") -> None:
        for keyword in call.keywords:
            name = f"{prefix}{keyword.arg}" if keyword.arg else ast.unparse(keyword.value)
            self.keyword(name, keyword.value, script)

    def keyword(self, name: str, value: ast.expr, script: Reading) -> None:
        """Take one option: a constant, or code that computes it."""
        script.options.pop(name, None), script.computed.pop(name, None)
        try:
            script.options[name] = self.constant(value)
        except ValueError:
            text = ast.unparse(value)
            if text.startswith("torch."):  # torch.bfloat16
                script.options[name] = text.removeprefix("torch.")
            else:
                script.computed[name] = text

    def model(self, node: ast.expr, script: Reading) -> None:
        """Take the model's name, and the keywords that load it."""
        loaded = self.resolve(node)
        if isinstance(loaded, ast.Call) and loaded.args:  # AutoModelForCausalLM.from_pretrained("...")
            mine = Reading()
            self.keywords(loaded, mine)
            if mine.options:
                before = script.options.get("model_init_kwargs") or {}
                script.options["model_init_kwargs"] = {**before, **mine.options}
            script.computed |= {f"from_pretrained.{name}": text for name, text in mine.computed.items()}
            loaded = self.resolve(loaded.args[0])
        if isinstance(loaded, ast.Constant):
            script.model = str(loaded.value)
        else:
            script.computed["GRPOTrainer.model"] = ast.unparse(node)

    def adapters(self, node: ast.expr, script: Reading) -> bool:
        """Take the options of the ``LoraConfig`` that ``node`` is; return whether it is one."""
        call = self.resolve(node)
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "LoraConfig":
            return False
        self.keywords(call, script, "peft_config.")
        return True

    def rows(self, node: ast.expr) -> Rows:
        """Return what ``node`` loads."""
        node = self.resolve(node)
        if isinstance(node, ast.Subscript):
            found, key = self.rows(node.value), ast.unparse(node.slice).strip("'")
            if A_TENTH in found.calls and key != "train":
                return replace(found, calls=["train_test_split" if x == A_TENTH else x for x in found.calls])
            if {"train_test_split", A_TENTH} & {*found.calls}:
                return found
            with suppress(ValueError):
                return replace(found, split=str(self.constant(node.slice)))
            return found
        if not isinstance(node, ast.Call):
            return Rows()
        given: dict[str, ast.expr] = {k.arg: k.value for k in node.keywords if k.arg}
        name = ast.unparse(node.func).rpartition(".")[2]
        if isinstance(node.func, ast.Attribute):
            found = self.rows(node.func.value)
            if found.dataset or found.parts:
                size = (
                    [*map(ast.unparse, [*node.args, *given.values()])] if name == "train_test_split" else []
                )
                is_tenth = "0.1" in size and {*given} <= {"test_size", "seed", "shuffle"}
                return replace(found, calls=[*found.calls, A_TENTH if is_tenth else name])
        if name == "load_dataset":
            given = dict(zip(("path", "name"), node.args, strict=False)) | given
            with suppress(ValueError, KeyError):
                return loaded_rows(given, self.constant)
        if name in ("concatenate_datasets", "interleave_datasets") and node.args:
            listed = self.resolve(node.args[0])
            parts = [self.rows(one) for one in listed.elts] if isinstance(listed, ast.List) else []
            with suppress(ValueError, TypeError):
                equal = [1.0] * len(parts) if name.startswith("inter") else []
                shares = self.constant(given["probabilities"]) if "probabilities" in given else None
                weights = [float(share) for share in shares or equal]
                if parts and all(part.dataset for part in parts) and len(weights) in (0, len(parts)):
                    return Rows(parts=parts, weights=weights)
        return Rows()

    def rewards(self, node: ast.expr, script: Reading) -> None:
        name = node.id if isinstance(node, ast.Name) else ""
        more = [
            one
            for one in ast.walk(self._tree)
            if (isinstance(one, ast.AugAssign) and ast.unparse(one.target) == name)
            or (isinstance(one, ast.Call) and ast.unparse(one.func).startswith(f"{name}."))
        ]
        if name and more:
            script.computed["GRPOTrainer.reward_funcs"] = "; ".join(map(ast.unparse, more))
        node = self.resolve(node)
        own: dict[str, str] = {}
        for index, item in enumerate(node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]):
            bound = self.binding(item) if isinstance(item, ast.Name) else None
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
            for node in self._top.get(open_names.pop(), ()):
                if id(node) not in needed:
                    needed[id(node)] = node
                    open_names += _used(node)
        in_order = sorted(needed.values(), key=lambda node: node.lineno)
        imports = [n for n in in_order if isinstance(n, (ast.Import, ast.ImportFrom))]
        rest = [n for n in in_order if n not in imports]
        parts = ["\n".join(ast.unparse(n) for n in imports)]
        parts += [_dedented(ast.get_source_segment(self._text, n, padded=True) or "", n) for n in rest]
        parts += [text for text in own.values() if text]
        return "\n\n\n".join(filter(None, parts)) + "\n"


def loaded_rows(given: Mapping[str, Any], constant: Callable[[Any], Any]) -> Rows:
    """Return what ``load_dataset`` loads with the keywords ``given``, whose values ``constant`` returns."""
    name = constant(given["path"])
    if name in _READERS and "data_files" in given:
        files = constant(given["data_files"])
        return Rows(dataset=files) if isinstance(files, str) else Rows()
    split = constant(given["split"]) if "split" in given else ""
    config = {key: constant(given[key]) for key in _WHERE if key in given}
    return Rows(dataset=name, split=split if isinstance(split, str) else "", config=config)


def read_script(file: Path) -> Reading:
    """Return what the script gives to ``GRPOConfig`` and ``GRPOTrainer``.

    Raises:
        ConfigError: the file cannot be read, or calls neither.
    """
    with path_errors("the script", file, "the path of a Python file"):
        text = file.read_text(encoding="utf-8")
    reader, script = _Reader(text, str(file)), Reading()
    config, trainer = reader.call("GRPOConfig"), reader.call("GRPOTrainer")
    if config is None and trainer is None:
        raise ConfigError(
            f"{file}: it calls neither GRPOConfig nor GRPOTrainer, so there is nothing to convert"
        )
    if config is not None:
        for value in config.args[:1]:
            reader.keyword("output_dir", value, script)
        reader.keywords(config, script)
    if trainer is None and (lora := reader.call("LoraConfig")):
        reader.keywords(lora, script, "peft_config.")
    wrapper = reader.call("get_peft_model")
    for node in wrapper.args if wrapper is not None else ():
        reader.adapters(node, script)
    train = reader.call("train")
    for keyword in train.keywords if train is not None else ():
        script.options[f"train.{keyword.arg}"] = ast.unparse(keyword.value)
    if trainer is not None:
        _read_trainer(reader, trainer, script)
    return script


def _read_trainer(reader: _Reader, trainer: ast.Call, script: Reading) -> None:
    given = [*zip(_POSITIONS, trainer.args, strict=False), *((k.arg, k.value) for k in trainer.keywords)]
    # the last of them, as keywords of the model go into its options
    for name, node in sorted(given, key=lambda one: one[0] == "model"):
        match name:
            case "model":
                reader.model(node, script)
            case "train_dataset":
                script.rows = reader.rows(node)
                if not script.rows.dataset and not script.rows.parts:
                    script.computed["GRPOTrainer.train_dataset"] = ast.unparse(reader.resolve(node))
            case "eval_dataset":
                script.eval_rows = reader.rows(node)
                if not script.eval_rows.dataset and ast.unparse(node) != "None":
                    script.options["GRPOTrainer.eval_dataset"] = ast.unparse(reader.resolve(node))
            case "reward_funcs":
                reader.rewards(node, script)
            case "peft_config":
                if not reader.adapters(node, script) and ast.unparse(node) != "None":
                    script.computed["GRPOTrainer.peft_config"] = ast.unparse(node)
            case "args":
                reader.attributes(node, script)
                if reader.call("GRPOConfig") is None:
                    script.options["GRPOTrainer.args"] = ast.unparse(node)
            case "processing_class":
                pass
            case None:
                script.computed[f"GRPOTrainer.**{ast.unparse(node)}"] = ast.unparse(node)
            case _:
                script.options[f"GRPOTrainer.{name}"] = ast.unparse(node)


def _unpacks(node: ast.stmt) -> bool:
    """Whether the statement is ``a, b = ...``: what one of the names is bound to is not read."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Tuple, ast.List))


def _bound(node: ast.stmt) -> Iterable[str]:
    if _unpacks(node):
        return [one.id for one in ast.walk(node.targets[0]) if isinstance(one, ast.Name)]  # type: ignore[attr-defined]
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
