"""Cases: files and a command line, made from a seed. A case says nothing of what must come of it.

Every case is run as ``multitask-rl ARGUMENTS`` in a folder that holds its files; ``checkpoint`` alone resumes
a run that is there (``actions.py``), because no command reads a checkpoint without a model.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import random
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import yaml

from fuzzing.mutate import ODD, mutate_bytes, mutate_tree
from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.plugins import (
    ALGORITHMS,
    CONSTRAINTS,
    REWARDS,
    TASKS,
    list_plugins,
    load_plugin,
)

REWARD_FILE = b"def score(response, reference, **row):\n    return float(response == reference)\n"
ROWS = [
    {
        "id": i,
        "prompt": f"{i} + 1 = ?",
        "reference": str(i + 1),
        "split": ("train", "test")[i % 5 == 0],
        "level": i % 3,
    }
    for i in range(10)
]
TREE: dict[str, Any] = {
    "tasks": {
        "sums": {
            "type": "grpo",
            "dataset": "rows.jsonl",
            "prompt": "What is {prompt}",
            "weight": 2,
            "rewards": ["rewards.py:score", {"plugin": "exact_match", "weight": 0.5, "config": {}}],
            "sampling": {"temperature": 0.7, "max_new_tokens": 5, "stop": ["\n"]},
            "kl": {"coefficient": 0.1, "placement": "loss"},
            "curriculum": {"by": "level", "pools": 3},
        },
        "words": {
            "type": "ppo",
            "dataset": "rows.jsonl",
            "dataset_config": {},
            "chat": False,
            "system": "Be brief.",
            "reward_model": "f1",
            "reward_config": {},
            "constraints": [
                {
                    "plugin": "rewards.py:score",
                    "mode": "lagrangian",
                    "limit": 0.1,
                    "multiplier": {"mode": "pid"},
                },
                {"mode": "grammar", "config": {"regex": "[a-z]+"}},
            ],
            "algorithm_config": {},
            "min_share": 0.1,
        },
        "made": {"dataset": "rows.jsonl", "rewards": ["exact_match"], "evaluation_only": True},
    }
}
METRICS = [
    {"step": i, "time": 1.5, "task/sums/weight": 0.4, "task/words/weight": 0.6, "loss": 0.1} for i in range(3)
]
EVALUATIONS = [
    {
        **{"step": step, "task": task, "metric": "reward", "values": [0.0, 1.0, None], "prompts": "a"},
        "direction": "higher",
        "metrics": {
            name: {"mean": mean, "n": 3, "stderr": 0.1, "direction": "lower"}
            for name, mean in (("constraint/score/limit", 0.1), ("constraint/score/violation_rate", 0.0))
        },
    }
    for step in range(2)
    for task in ("sums", "words")
]
EVENTS = [{"step": 1, "source": "guard", "kind": "alarm", "task": "sums", "reason": "it fell", "details": {}}]
WORDS = (
    "sums",
    "words",
    "rows.jsonl",
    "rewards.py:score",
    "grpo",
    "reject",
    "penalty",
    "lagrangian",
    "train",
    "test",
)

_OPTIONS = (
    *(
        "--resolve",
        "--cfg",
        "--info",
        "-p",
        "--multirun",
        "--config-dir",
        "--config-dir=.",
        "--cfg=x",
        "-x",
        "-cd",
    ),
    *("--package=@", "--config-name=a", "--config-path=/", "--experimental-rerun=x", "--hydra-help"),
)
_UNFINISHED = (
    *(
        "[1,2",
        "{a:",
        "'",
        '"a',
        "[",
        "{",
        "a,b",
        "$",
        "${",
        "${a",
        "${oc.env:NOPE}",
        "${now:}",
        "choice(1,2)",
    ),
    *(
        "range(1,1e9)",
        "glob(*)",
        "sort(a)",
        "\\",
        "1e999",
        "0x1",
        "a=b",
        "[1,[2,{a:b}]]",
        "{a:1,a:2}",
        "!x",
        "&a",
    ),
)


@dataclass(kw_only=True)
class Case:
    """Files (name -> content) and the arguments of ``multitask-rl``."""

    kind: str
    files: dict[str, bytes]
    arguments: list[str]
    mutated: str = ""
    """The file that was changed, which is made smaller when the case fails; empty = the arguments."""
    action: str = "command"
    """``command``, or ``resume``: restore the checkpoint in the case's file ``state.json``."""
    notes: dict[str, Any] = field(default_factory=dict)


def make_case(seed: int, index: int, kind: str, checkpoint: Mapping[str, bytes]) -> Case:
    """Return case ``index`` of ``seed``: the same for the same arguments.

    Args:
        seed: of the campaign.
        index: of the case in it.
        kind: one of ``KINDS``.
        checkpoint: ``actions.read_checkpoint`` of a run; empty = no case of the kind ``checkpoint`` is asked
            for.
    """
    rng = random.Random(f"{seed}/{index}/{kind}")
    return _MAKERS[kind](rng) if kind != "checkpoint" else _checkpoint(rng, checkpoint)


def _validate(kind: str, mutated: str, **files: bytes) -> Case:
    """Return the case of a tasks file; ``rows_jsonl=`` and so on replace the usual files."""
    everything = {
        "tasks.yaml": _yaml(TREE),
        "rows.jsonl": _jsonl(ROWS),
        "rewards.py": REWARD_FILE,
        **{name.replace("__", "."): data for name, data in files.items()},
    }
    return Case(
        kind=kind, files=everything, arguments=["tasks", "validate", "--quick", "tasks.yaml"], mutated=mutated
    )


def _tasks(rng: random.Random) -> Case:
    tree = {"tasks": {"a": _random_task(rng), "b": _random_task(rng)}} if rng.random() < 0.4 else TREE
    return _validate("tasks", "tasks.yaml", tasks__yaml=_yaml(mutate_tree(rng, tree, _strings())))


def _bytes(rng: random.Random) -> Case:
    return _validate("bytes", "tasks.yaml", tasks__yaml=mutate_bytes(rng, _yaml(TREE)))


def _rows(rng: random.Random) -> Case:
    """Rows whose structure is changed, or a file whose bytes are, in every format."""
    name = rng.choice(("rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet"))
    structure = rng.random() < 0.5
    rows = mutate_tree(rng, ROWS, WORDS) if structure else ROWS
    rows = rows if isinstance(rows, list) else [rows]
    data = _dump_rows(name, rows)
    if not structure and name.endswith("gz") and rng.random() < 0.5:
        data = gzip.compress(mutate_bytes(rng, gzip.decompress(data)))
    elif not structure:
        data = mutate_bytes(rng, data)
    tree = {"tasks": {"sums": {**TREE["tasks"]["sums"], "dataset": name}}}
    if rng.random() < 0.1:
        tree["tasks"]["sums"]["eval_dataset"] = "rows.jsonl"
    return _validate("rows", name, tasks__yaml=_yaml(tree), **{name.replace(".", "__"): data})


def _overrides(rng: random.Random) -> Case:
    """The command line of a run, composed and checked, or of ``tasks validate``."""
    if rng.random() < 0.3:
        case = _validate("overrides", "")
        case.arguments += [f"tasks.{_override(rng)}" for _ in range(rng.choice((1, 1, 2)))]
        return case
    case = _validate("overrides", "")
    keys = [
        "tasks_file=tasks.yaml",
        "output_dir=out",
        f"checkpoint.resume={rng.choice(('auto', 'never', 'x'))}",
    ]
    given = [
        f"tasks.{_override(rng)}" if rng.random() < 0.4 else _run_override(rng)
        for _ in range(rng.choice((1, 1, 2)))
    ]
    case.arguments = ["bench", *keys, *given]
    case.action = "compose"
    return case


def _override(rng: random.Random) -> str:
    path = rng.choice(("sums", "words", "new", "a b", "", "sums.kl", "sums.rewards"))
    keys = rng.choice(
        ("weight", "a.b", "a", "", "kl.coefficient", "rewards", "sampling.stop", "type", "dataset", ".")
    )
    return f"{path}.{keys}={_text(rng)}" if rng.random() < 0.95 else f"{path}{_text(rng)}"


def _run_override(rng: random.Random) -> str:
    if rng.random() < 0.08:
        return rng.choice(_OPTIONS)
    key = rng.choice(_run_keys())
    if rng.random() < 0.1:
        key = rng.choice(("+", "++", "~", "~~", "@", "+a@b", "hydra.run.dir", "hydra/launcher")) + key
    return f"{key}{rng.choice(('=', '=', '=', '==', '', '.x=', '[0]='))}{_text(rng)}"


def _text(rng: random.Random) -> str:
    """Return what stands behind ``=``: a value, an unfinished one, or any text that an argument can hold."""

    def ordinary() -> Any:
        return rng.choice((1, 2, 0.5, 64, True, ["a"], {"a": 1}, "auto", "x"))

    value = rng.choice((*ODD, *[ordinary] * 20))()
    if rng.random() < 0.3:
        value = rng.choice(_UNFINISHED)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    # what the kernel hands to a program: no NUL, bytes that are no UTF-8 as surrogates
    return (
        text.replace("\x00", "\x01")[:2000]
        .encode("utf-8", "surrogateescape" if "\udc80" in text else "replace")
        .decode("utf-8", "surrogateescape")
    )


def _plugins(rng: random.Random) -> Case:
    """A plugin and its configuration, from the installed ones."""
    group = rng.choice((REWARDS, REWARDS, CONSTRAINTS, ALGORITHMS, TASKS))
    name = rng.choice([p.name for p in list_plugins(group)])
    config = mutate_tree(rng, _defaults(group, name) or {"a": 1}, WORDS)
    task = {"dataset": "rows.jsonl", "rewards": ["rewards.py:score"]}
    if group == REWARDS:
        task["rewards"] = [{"plugin": name, "config": config}]  # type: ignore[list-item]
    elif group == CONSTRAINTS:
        task["constraints"] = [{"plugin": name, "config": config}]  # type: ignore[list-item]
    elif group == ALGORITHMS:
        task |= {"type": name, "algorithm_config": config}
    else:
        task |= {"dataset": f"plugin:{name}", "dataset_config": config}
    return _validate("plugins", "tasks.yaml", tasks__yaml=_yaml({"tasks": {"sums": task}}))


def _templates(rng: random.Random) -> Case:
    pieces = [
        "{prompt}",
        "{reference}",
        "{",
        "}",
        "{{",
        "}}",
        ":",
        "!",
        "!r",
        "!s",
        "!x",
        ".",
        "[0]",
        "level",
        "prompt",
    ]
    pieces += [
        ">9999999",
        "{level:",
        "05d",
        "%",
        "\n",
        "{prompt:{reference}}",
        "{prompt:>999999999}",
        "\ud800",
        "id",
        " ",
    ]
    pieces += [
        "{level:,}",
        "{level:.9999999999}",
        "{id!r:>9}",
        "{level:c}",
        "é",
        "{prompt:>99999}",
        "{level:n}",
        "{a.b}",
    ]
    template = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 6)))
    rows = mutate_tree(rng, ROWS, WORDS) if rng.random() < 0.3 else ROWS
    task = {"dataset": "rows.jsonl", "rewards": ["rewards.py:score"], "prompt": template}
    rows = rows if isinstance(rows, list) else [rows]
    return _validate(
        "templates", "tasks.yaml", tasks__yaml=_yaml({"tasks": {"sums": task}}), rows__jsonl=_jsonl(rows)
    )


def _record(rng: random.Random) -> Case:
    """What a run left, read by ``eval``, ``rescore``, ``report`` or ``compare``."""
    files = _run_folder()
    name = rng.choice(
        ("config.yaml", "config.yaml", "metrics.jsonl", "evaluations.jsonl", "events.jsonl", "rollouts.jsonl")
    )
    if rng.random() < 0.5:
        files[f"run/{name}"] = mutate_bytes(rng, files[f"run/{name}"])
    elif name == "config.yaml":
        files["run/config.yaml"] = _yaml(mutate_tree(rng, yaml.safe_load(files["run/config.yaml"]), WORDS))
    else:
        lines = [json.loads(line) for line in files[f"run/{name}"].splitlines()]
        changed = mutate_tree(rng, lines, WORDS)
        files[f"run/{name}"] = _jsonl(changed if isinstance(changed, list) else [changed])
    files |= {
        path.replace("run/", "other/", 1): text for path, text in _run_folder().items() if "run/" in path
    }
    compare = ["compare", "other", "run", "--html", "page.html"]
    read_by = [["rescore", "run"], compare] if name == "rollouts.jsonl" else [["report", "run"], compare]
    command = rng.choice(read_by)
    case = Case(kind="record", files=files, arguments=command, mutated=f"run/{name}")
    if name == "config.yaml" and rng.random() < 0.6:
        case.arguments, case.action = ["eval", "output_dir=run"], "compose"
    elif command[0] == "rescore":
        case.action = "rescore"
    return case


def _checkpoint(rng: random.Random, checkpoint: Mapping[str, bytes]) -> Case:
    """The state of a checkpoint, with its right hash in the manifest, or the manifest."""
    name = rng.choice(("state.json", "state.json", "state.json", "facts.json", "manifest.json"))
    files = dict(checkpoint)
    if rng.random() < 0.7 or name == "facts.json":
        changed = mutate_tree(rng, json.loads(files[name]), ("sums", "words"))
        files[name] = json.dumps(changed, default=str).encode()
    else:
        files[name] = mutate_bytes(rng, files[name])
    return Case(kind="checkpoint", files=files, arguments=[], mutated=name, action="resume")


_MAKERS: dict[str, Callable[[random.Random], Case]] = {
    "tasks": _tasks,
    "bytes": _bytes,
    "rows": _rows,
    "overrides": _overrides,
    "plugins": _plugins,
    "templates": _templates,
    "record": _record,
}
KINDS = (*_MAKERS, "checkpoint")
"""What can be fuzzed."""


def _random_task(rng: random.Random) -> dict[str, Any]:
    """Return a task with some of the keys, each of its own type."""
    task = {"dataset": "rows.jsonl", "rewards": ["rewards.py:score"]}
    fields = [f for f in dataclasses.fields(TaskSpec) if f.name not in ("name", "source", "sampling_keys")]
    for chosen in rng.sample(fields, rng.randrange(1, 6)):
        task[chosen.name] = _of_type(rng, typing.get_type_hints(TaskSpec)[chosen.name])
    return task


def _of_type(rng: random.Random, hint: Any, depth: int = 0) -> Any:
    """Return a value of the type ``hint``, now and then another."""
    if rng.random() < 0.05 or depth > 4:
        return rng.choice(ODD)()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if arguments and type(None) in arguments:
        return _of_type(rng, rng.choice([a for a in arguments if a is not type(None)]), depth)
    if dataclasses.is_dataclass(hint):
        hints, own = typing.get_type_hints(hint), dataclasses.fields(hint)
        chosen = rng.sample(own, rng.randrange(len(own)))
        return {f.name: _of_type(rng, hints[f.name], depth + 1) for f in chosen}
    if origin in (list, tuple):
        return [_of_type(rng, arguments[0], depth + 1) for _ in range(rng.randrange(3))]
    if hint is str:
        return rng.choice(_strings())
    if hint is bool:
        return rng.random() < 0.5
    if hint in (int, float):
        return rng.choice((0, 1, 2, -1, 0.5, 0.1, 1e9, 64))
    return {"a": rng.choice(ODD)()}


@lru_cache
def _strings() -> tuple[str, ...]:
    names = [p.name for group in (REWARDS, CONSTRAINTS, ALGORITHMS) for p in list_plugins(group)]
    return (
        *WORDS,
        *names,
        "k1",
        "k2",
        "k3",
        "loss",
        "reward",
        "pass_rate",
        "level",
        "{prompt}",
        "grammar",
        "cpu",
        "log",
    )


@lru_cache
def _defaults(group: str, name: str) -> dict[str, Any]:
    """Return the default configuration of a plugin, as plain values; {} without a ``Config``."""
    config = getattr(load_plugin(group, name), "Config", None)
    if not dataclasses.is_dataclass(config):
        return {}
    values = {}
    for f in dataclasses.fields(config):
        factory = f.default_factory
        value = f.default if factory is dataclasses.MISSING else factory()
        values[f.name] = 1 if value is dataclasses.MISSING else value
    return json.loads(json.dumps(values, default=str))  # type: ignore[no-any-return]


@lru_cache
def _run_keys() -> list[str]:
    from multitask_rl.cli.train import config_keys

    return list(config_keys())


def _run_folder() -> dict[str, bytes]:
    spec = TaskSpec(
        name="sums", dataset="rows.jsonl", rewards=[RewardSpec(plugin="rewards.py:score", name="score")]
    )
    spec.constraints = [ConstraintSpec(plugin="rewards.py:score", name="score", limit=0.1)]
    config = dataclasses.asdict(RunConfig(output_dir="run"))
    config["tasks"] = {"sums": dataclasses.asdict(spec)}
    rollout = {
        "step": 1,
        "task": "sums",
        "prompt_id": "0",
        "draw": 0,
        "sample": 0,
        "attempt": 0,
        "prompt": "1 + 1 = ?",
    }
    rollout |= {
        "response": "2",
        "reward": 1.0,
        "breakdown": {"score": {"value": 1.0, "components": {}}},
        "cost": 0.0,
    }
    rollout |= {
        "failure": None,
        "finish_reason": "stop",
        "rejected": False,
        "verdicts": {},
        "policy_version": 0,
    }
    rollout |= {"sampling": {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": []}}
    rollout |= {"row": ROWS[0], "prompt_ids": [1, 2], "response_ids": [3]}
    return {
        "run/config.yaml": _yaml(json.loads(json.dumps(config))),
        "run/metrics.jsonl": _jsonl(METRICS),
        "run/evaluations.jsonl": _jsonl(EVALUATIONS),
        "run/events.jsonl": _jsonl(EVENTS),
        "run/rollouts.jsonl": _jsonl([rollout] * 2),
        "rows.jsonl": _jsonl(ROWS),
        "rewards.py": REWARD_FILE,
    }


def _dump_rows(name: str, rows: list[Any]) -> bytes:
    if name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = io.BytesIO()
        try:
            table = pa.Table.from_pylist([r for r in rows if isinstance(r, dict)])
            pq.write_table(table, stream)
        except Exception:  # noqa: BLE001 - rows that Arrow cannot hold
            pq.write_table(pa.Table.from_pylist(ROWS), stream)
        return stream.getvalue()
    if name.endswith(".json"):
        return json.dumps(rows, default=str).encode()
    return gzip.compress(_jsonl(rows)) if name.endswith(".gz") else _jsonl(rows)


def _jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()


def _yaml(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")
