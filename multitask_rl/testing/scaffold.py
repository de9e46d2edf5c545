"""``multitask-rl plugins new reward my_reward``: a distribution that passes its own tests at once."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from multitask_rl.errors import ConfigError
from multitask_rl.plugins import CONSTRAINTS, REWARDS, list_plugins

__all__ = ["main", "scaffold"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")

_PYPROJECT = Template("""[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "A $kind for multitask-rl"
requires-python = ">=3.11"
dependencies = ["multitask-rl"]

[project.entry-points."multitask_rl.${kind}s"]
$name = "$package:$attribute"

[tool.setuptools]
py-modules = ["$package"]
""")

_REWARD = Template('''"""The reward ``$name``."""

from multitask_rl.scoring.shapes import with_traits


@with_traits(low=0.0, high=1.0, needs=("reference",), timeout_s=5.0, deterministic=True)
def $attribute(response: str, reference: str) -> float:
    """1 if the last line of the response is the reference, else 0."""
    lines = response.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == str(reference).strip())
''')

_CONSTRAINT = Template('''"""The constraint ``$name``."""

from multitask_rl.records import Verdict
from multitask_rl.scoring.shapes import with_traits


@with_traits(timeout_s=5.0, deterministic=True)
def $attribute(response: str, max_characters: int = 2000) -> Verdict:
    """Refuses responses longer than ``max_characters`` (a key of the constraint's ``config``)."""
    violated = len(response) > max_characters
    return Verdict(cost=float(violated), violated=violated, reason=f"{len(response)} characters")
''')

_REWARD_TEST = Template('''"""The contract of ``$name`` and what is special to it."""

from multitask_rl.config.task import RewardSpec
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.testing import assert_reward_contract, make_rollout

ROW = {"prompt": "What is 2 + 2? Answer on the last line.", "reference": "4"}


def test_contract():
    assert_reward_contract("$package:$attribute", row=ROW, gold="2 + 2 makes\\n4")


def test_a_mention_of_the_answer_is_not_the_answer():
    reward = resolve_reward(RewardSpec(plugin="$package:$attribute"), "test")
    responses = ["It is not 4, I think.", "4", ""]
    assert reward.score([make_rollout(text, row=ROW) for text in responses]) == [0.0, 1.0, 0.0]
''')

_CONSTRAINT_TEST = Template('''"""The contract of ``$name``."""

from multitask_rl.testing import assert_constraint_contract

ROW = {"prompt": "Say hello."}


def test_contract():
    assert_constraint_contract(
        "$package:$attribute", row=ROW, accepted="Hello.", violating="Hello. " * 500
    )
''')

_README = Template("""# $distribution

A $kind for `multitask-rl`, found through its entry point `$name`.

    pip install -e .                     # again after every change of the entry point
    pytest                               # the contract suite and your own tests
    multitask-rl plugins check $name

Use it in a tasks file:

    tasks:
      my_task:
        dataset: data.jsonl
        ${kind}s: [{plugin: $name}]
""")


def scaffold(kind: str, name: str, directory: str | Path = ".") -> Path:
    """Write a distribution with one plugin into ``directory/<name>`` and return that path.

    Args:
        kind: ``reward`` or ``constraint``.
        name: the plugin's name: lower-case letters, digits, ``_``.
        directory: where.

    Raises:
        ConfigError: an unusable or taken name or kind, or the folder exists.
    """
    if kind not in ("reward", "constraint"):
        raise ConfigError(f"cannot write a plugin of kind {kind!r}; kinds: reward, constraint")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a plugin: it starts with a lower-case letter, holds a-z, 0-9 and _, and "
            "is no word of Python"
        )
    for info in list_plugins(REWARDS if kind == "reward" else CONSTRAINTS):
        if info.name == name:
            raise ConfigError(
                f"a {kind} {name!r} is installed already ({info.distribution}); choose another name"
            )
    target = Path(directory) / name
    if target.exists():
        raise ConfigError(f"{str(target)!r} exists already; choose another name, or --directory")
    # The module's name has a prefix: a plugin called "math" must not hide the module math.
    values = {
        "kind": kind,
        "name": name,
        "package": f"multitask_rl_{name}",
        "attribute": name,
        "distribution": f"multitask-rl-{name.replace('_', '-')}",
    }
    plugin, test = (_REWARD, _REWARD_TEST) if kind == "reward" else (_CONSTRAINT, _CONSTRAINT_TEST)
    files = {
        "pyproject.toml": _PYPROJECT,
        f"multitask_rl_{name}.py": plugin,
        f"tests/test_{name}.py": test,
        "README.md": _README,
    }
    for path, template in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(template.substitute(values), encoding="utf-8")
    return target


def main(argv: Sequence[str]) -> int:
    """Write the plugin that ``argv`` asks for and say what comes next."""
    parser = argparse.ArgumentParser(prog="multitask-rl plugins new", description=__doc__)
    parser.add_argument("kind", choices=("reward", "constraint"))
    parser.add_argument("name")
    parser.add_argument("--directory", default=".")
    arguments = parser.parse_args(argv)
    target = scaffold(arguments.kind, arguments.name, arguments.directory)
    sys.stdout.write(
        f"wrote {target}\nnext: pip install -e {target} && multitask-rl plugins check {arguments.name}\n"
    )
    return 0
