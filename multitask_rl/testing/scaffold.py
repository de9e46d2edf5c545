"""The kinds of plugins, and an installable plugin of each kind with tests that pass."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from multitask_rl.errors import ConfigError
from multitask_rl.plugins import (
    ALGORITHMS,
    CONSTRAINTS,
    GUARDS,
    REWARDS,
    ROLLOUT_ENGINES,
    SCHEDULERS,
    TASKS,
    TRACKERS,
    list_plugins,
)

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

[project.entry-points."$group"]
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

Use it:

    $use
""")

_TASK = Template('''"""The task ``$name``: its rows, and what goes with them."""

from dataclasses import dataclass


class $attribute:
    """Sums of small numbers."""

    @dataclass(kw_only=True)
    class Config:
        """Keys of ``dataset_config``."""

        num_rows: int = 100
        """Rows to train on."""

    def __init__(self, config):
        self.config = config

    def settings(self):
        """Return keys of the tasks file that hold where the file gives none."""
        return {"type": "grpo", "prompt": "{prompt}", "rewards": ["exact_match"]}

    def rows(self, split):
        """Return the rows of ``split``; every row earns its reward with its ``reference``."""
        first = {"train": 0, "test": self.config.num_rows}.get(split)
        if first is None:
            return []
        numbers = range(first, first + self.config.num_rows)
        return [{"id": i, "prompt": f"What is {i} + 1?", "reference": str(i + 1)} for i in numbers]
''')

_ALGORITHM = Template('''"""The algorithm ``$name``."""

from multitask_rl.algorithms.grpo import GRPO


class $attribute(GRPO):
    """GRPO whose loss leaves tokens of negative advantage out."""

    def credit(self, batch):
        """Return advantages [N], none of them negative."""
        credit = super().credit(batch)
        credit.advantages = credit.advantages.clamp(min=0.0)
        return credit
''')

_SCHEDULER = Template('''"""The scheduler policy ``$name``."""

from multitask_rl.curriculum.base import SchedulerPolicy


class $attribute(SchedulerPolicy):
    """Weigh each task by its distance to its target."""

    def _preferences(self):
        return {task: self.prior[task] * self.deficit(task) for task in self.tasks}

    def reasons(self):
        """Return why each task has its share."""
        return {task: f"{self.deficit(task):.2f} below its target" for task in self.tasks}
''')

_GUARD = Template('''"""The guard ``$name``."""

from dataclasses import dataclass

from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardAction, GuardDecision


class $attribute(Guard):
    """Ends the run when a task falls too far below the best it has shown."""

    @dataclass(kw_only=True)
    class Config:
        """Keys of ``guard.guard_config``."""

        largest_fall: float = 0.5
        """In the unit of the task's primary metric."""

    def __init__(self, config):
        self.config, self.best = config, {}

    def observe(self, step, evaluations, confirm=None):
        """Judge the weights of ``step`` by their held-out evaluation."""
        fallen = ""
        for task, evaluation in evaluations.items():
            value = evaluation.primary.score  # higher is better; NaN where nothing could be scored
            if value < self.best.get(task, value) - self.config.largest_fall:
                fallen = task
            if value == value:
                self.best[task] = max(value, self.best.get(task, value))
        if fallen:
            reason = f"{fallen} fell by more than {self.config.largest_fall:g}"
            return GuardDecision(action=GuardAction.stop, task=fallen, reason=reason)
        scores = [evaluation.primary.score for evaluation in evaluations.values()]
        return GuardDecision(judged_good=bool(scores) and all(score == score for score in scores))

    def state_dict(self):
        """Return the state, JSON-able."""
        return {"best": dict(self.best)}

    def load_state_dict(self, state, renamed=None):
        """Restore ``state_dict``."""
        self.best = {(renamed or {}).get(task, task): value for task, value in state["best"].items()}
''')

_ENGINE = Template('''"""The rollout engine ``$name``."""

import torch

from multitask_rl.errors import EngineError
from multitask_rl.models.sampling import draw_uniforms, sample_tokens, suppress
from multitask_rl.rollout.base import Generation, RolloutEngine


class $attribute(RolloutEngine):
    """Samples from the actor's own weights, one response at a time."""

    shares_weights = True

    @classmethod
    def build(cls, actor, config, *, seed, output_dir):
        """Return an engine with the weights of ``actor``."""
        engine = cls()
        engine.actor = actor
        return engine

    @torch.no_grad()
    def generate(self, requests):
        """Return ``len(seeds)`` generations per request."""
        return [[self.sample(request, seed) for seed in request.seeds] for request in requests]

    def sample(self, request, seed):
        """Return one response: the same weights, prompt and seed give the same tokens."""
        actor, params, ids, logprobs = self.actor, request.sampling, [], []
        if params.grammar:
            raise EngineError("$name has no grammars; use rollout.engine=hf")
        for uniform in torch.from_numpy(draw_uniforms(seed, params.max_new_tokens)).split(1):
            text = torch.tensor([[*request.prompt_ids, *ids]], device=actor.model.device)
            logits = actor.model(input_ids=text).logits[:, -1].float().cpu()
            if params.suppressed_ids:
                logits = suppress(logits, torch.tensor(params.suppressed_ids))
            filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
            token, logprob = sample_tokens(logits, uniform, **filters)
            ids.append(int(token))
            logprobs.append(float(logprob))
            response = actor.tokenizer.decode(ids, skip_special_tokens=False)
            if ids[-1] in actor.eos_token_ids or any(stop in response for stop in params.stop):
                return Generation(response_ids=ids, rollout_logprobs=logprobs, finish_reason="stop")
        return Generation(response_ids=ids, rollout_logprobs=logprobs, finish_reason="length")

    def update_weights(self, weights, policy_version):
        """Take the version; the weights are the actor's own."""
        self.policy_version = policy_version
''')

_TRACKER = Template('''"""The tracker ``$name``."""

from multitask_rl.tracking.base import Tracker


class $attribute(Tracker):
    """Writes the mean reward of every task to ``$name.csv`` in the output directory."""

    def __init__(self, output_dir, config, run_id):
        self.path = output_dir / "$name.csv"

    def start(self, parameters, resume_step=None):
        """Keep the lines up to the step that a resumed run continues from."""
        is_resumed = resume_step is not None and self.path.exists()
        lines = self.path.read_text().splitlines() if is_resumed else []
        kept = [line for line in lines if int(line.partition(",")[0]) <= resume_step]
        self.path.write_text("".join(f"{line}\\n" for line in kept))

    def log_metrics(self, metrics, step):
        """Append a line per task."""
        with self.path.open("a") as file:
            for name, value in metrics.items():
                if name.startswith("task/") and name.endswith("/reward_mean"):
                    file.write(f"{step},{name.split('/')[1]},{value}\\n")
''')

_PLAIN_TEST = Template('''"""The contract of ``$name``."""

from multitask_rl.testing import assert_contract


def test_contract():
    assert_contract("$kind", "$package:$attribute")
''')
_TASK_KEYS = "tasks:\n      my_task:\n        dataset: data.jsonl\n        "


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin that ``plugins new`` writes and ``plugins check`` checks."""

    group: str
    module: Template
    use: str
    """A line of a tasks file, or a command, that names the plugin."""
    suite: str = "multitask_rl.testing.kinds"
    """Module of its contract suite, ``check_<kind>``."""
    test: Template = _PLAIN_TEST


KINDS: dict[str, Kind] = {
    "reward": Kind(REWARDS, _REWARD, _TASK_KEYS + "rewards: [{plugin: $name}]", test=_REWARD_TEST),
    "constraint": Kind(
        CONSTRAINTS, _CONSTRAINT, _TASK_KEYS + "constraints: [{plugin: $name}]", test=_CONSTRAINT_TEST
    ),
    "task": Kind(TASKS, _TASK, "tasks:\n      my_task: {dataset: plugin:$name}"),
    "algorithm": Kind(ALGORITHMS, _ALGORITHM, _TASK_KEYS + "type: $name"),
    "scheduler": Kind(SCHEDULERS, _SCHEDULER, "multitask-rl train scheduler.policy=$name"),
    "guard": Kind(GUARDS, _GUARD, "multitask-rl train guard.plugin=$name"),
    "engine": Kind(
        ROLLOUT_ENGINES, _ENGINE, "multitask-rl train rollout.engine=$name", "multitask_rl.testing.engine"
    ),
    "tracker": Kind(TRACKERS, _TRACKER, "multitask-rl train 'tracking.trackers=[console,jsonl,$name]'"),
}


def scaffold(kind: str, name: str, directory: str | Path = ".") -> Path:
    """Write a distribution with one plugin into ``directory/<name>`` and return that path.

    Args:
        kind: a key of ``KINDS``.
        name: the plugin's name: lower-case letters, digits, ``_``.
        directory: of the new folder.

    Raises:
        ConfigError: unknown kind, unusable or taken name, or the folder exists.
    """
    if kind not in KINDS:
        raise ConfigError(f"cannot write a plugin of kind {kind!r}; kinds: {', '.join(KINDS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a plugin: it starts with a lower-case letter, holds a-z, 0-9 and _, and "
            "is no word of Python"
        )
    chosen = KINDS[kind]
    for info in list_plugins(chosen.group):
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
        "group": chosen.group,
        "name": name,
        "use": Template(chosen.use).substitute(name=name),
        "package": f"multitask_rl_{name}",
        "attribute": name,
        "distribution": f"multitask-rl-{name.replace('_', '-')}",
    }
    files = {
        "pyproject.toml": _PYPROJECT,
        f"multitask_rl_{name}.py": chosen.module,
        f"tests/test_{name}.py": chosen.test,
        "README.md": _README,
    }
    for path, template in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(template.substitute(values), encoding="utf-8")
    return target


def main(argv: Sequence[str]) -> int:
    """Write the plugin that ``argv`` asks for and print the next command."""
    parser = argparse.ArgumentParser(prog="multitask-rl plugins new", description=__doc__)
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("name")
    parser.add_argument("--directory", default=".")
    arguments = parser.parse_args(argv)
    target = scaffold(arguments.kind, arguments.name, arguments.directory)
    sys.stdout.write(
        f"wrote {target}\nnext: pip install -e {target} && multitask-rl plugins check {arguments.name}\n"
    )
    return 0
