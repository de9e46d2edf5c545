"""``multitask-rl submit RECIPE key=value ...``: start a run on a cluster, as docs/clusters.md describes."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.errors import ConfigError

_RECIPES = (
    "a recipe is a batch script of Slurm (*.sbatch), a RayJob of KubeRay (yaml with kind: RayJob) or a file "
    "of `ray up` (yaml with cluster_name); examples/clusters/ has one of each"
)


def main(arguments: Sequence[str]) -> int:
    """Print the commands that start the run, and run them unless ``--dry-run`` is given."""
    parser = argparse.ArgumentParser(prog="multitask-rl submit", description=__doc__)
    parser.add_argument("recipe", type=Path, help=_RECIPES)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("overrides", nargs="*", help="key=value arguments of `multitask-rl train`")
    given = parser.parse_intermixed_args(arguments)
    commands, manifest = build_commands(given.recipe, given.overrides)
    if manifest:
        print(manifest)
    for command in commands:
        print(shlex.join(command))
    if given.dry_run:
        return 0
    for command in commands:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"{command[0]} is not on this machine's PATH; run the command above where it is, or give "
                "--dry-run to print it only"
            )
        status = subprocess.run(command, input=manifest or None, text=True, check=False).returncode
        if status:
            return status
    return 0


def build_commands(recipe: Path, overrides: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return the commands that start the run of ``recipe``, and the text that they read from stdin.

    Raises:
        ConfigError: ``recipe`` is not there or no recipe, or an override is not ``key=value``.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"submit: {override!r} is no key=value argument of `multitask-rl train`")
    try:
        text = recipe.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"submit: {recipe} cannot be read ({error}); {_RECIPES}") from error
    if recipe.suffix == ".sbatch":
        return [["sbatch", str(recipe), *overrides]], ""
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"submit: {recipe} is no YAML: {error}") from error
    if isinstance(content, dict) and content.get("kind") == "RayJob":
        spec = content.get("spec")
        if not isinstance(spec, dict) or not str(spec.get("entrypoint", "")).startswith("multitask-rl train"):
            raise ConfigError(f"submit: {recipe}: spec.entrypoint must begin with `multitask-rl train`")
        spec["entrypoint"] = f"{spec['entrypoint']} {shlex.join(overrides)}".strip()
        return [["kubectl", "create", "-f", "-"]], yaml.safe_dump(content, sort_keys=False)
    if isinstance(content, dict) and "cluster_name" in content:
        train = shlex.join(["multitask-rl", "train", "executor=ray", *overrides])
        return [
            ["ray", "up", "--yes", str(recipe)],
            ["ray", "exec", str(recipe), f"RAY_ADDRESS=auto {train}"],
        ], ""
    raise ConfigError(f"submit: {recipe} is no recipe: {_RECIPES}")
