"""Test a plugin against the contract of its kind and print a line per check."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.ranges import suggest
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError, MultitaskRLError, PluginError, path_errors
from multitask_rl.plugins import ENVIRONMENTS, declared_elsewhere, list_plugins, locate
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.testing.contract import Finding, assert_findings, check_constraint, check_reward
from multitask_rl.testing.scaffold import KINDS

_EXAMPLE_ROW: dict[str, Any] = {
    "prompt": "What is 2 + 2?",
    "reference": "4",
    "answer": "4",
    "metadata": {},
}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings about one plugin."""

    plugin: str
    kind: str
    traits: PluginTraits | None
    """Traits of a reward or constraint; ``needs`` with the columns that its parameters or ``Config`` name."""
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(finding.passed for finding in self.findings)

    def text(self) -> str:
        """Return the report for a terminal."""
        traits = self.traits
        lines = [f"{self.kind} {self.plugin}"]
        if traits is not None:
            values = f"range [{traits.low:g}, {traits.high:g}], " if self.kind == "reward" else ""
            lines[0] += (
                f": {values}"
                f"{'deterministic' if traits.deterministic else 'not deterministic'}, "
                f"reads {', '.join(traits.needs) or 'no declared column'}, "
                f"{traits.timeout_s:g} s per response, "
                f"{'worker process' if traits.isolate else 'in the trainer'}"
            )
        for finding in self.findings:
            detail = f": {finding.detail}" if finding.detail else ""
            lines.append(f"  {'ok  ' if finding.passed else 'FAIL'}  {finding.name}{detail}")
        failed = sum(not finding.passed for finding in self.findings)
        total = len(self.findings)
        lines.append(f"{total - failed} of {total} checks passed" if failed else f"all {total} checks passed")
        return "\n".join(lines)


def check_plugin(
    name_or_ref: str,
    row: Mapping[str, Any] | None = None,
    *,
    kind: str | None = None,
    gold: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> CheckReport:
    """Run the contract suite of its kind on a plugin.

    Args:
        name_or_ref: as in a tasks file or run configuration.
        row: a row of its data (rewards, constraints, environments); None = a sum.
        kind: a key of ``scaffold.KINDS``; None = the kind of its entry point, else ``environment`` for an
            object with ``reset``, ``constraint`` for one that is no reward, else ``reward``.
        gold: a response that deserves the full score (rewards).
        config: keys of its ``Config``.

    Raises:
        PluginError, ConfigError, MissingExtraError: it cannot be loaded or built.
    """

    def fits(other: str) -> bool:
        try:
            if other == "environment":
                return "reset" in dir(locate(name_or_ref, ENVIRONMENTS, "check").value)
            find_plugin(other, name_or_ref, "check")
        except PluginError:
            return False
        return True

    if kind is None and ":" not in name_or_ref:
        if name_or_ref.endswith(".py"):
            locate(name_or_ref, ENVIRONMENTS)  # a file, with the object not named
        groups = {info.group for info in list_plugins() if info.name == name_or_ref}
        kind = next((kind for kind, one in KINDS.items() if one.group in groups), None)
        if kind is None:
            near = suggest(name_or_ref, (info.name for info in list_plugins()))
            raise PluginError(
                f"no plugin {name_or_ref!r} is installed{declared_elsewhere(name_or_ref)}{near}; "
                "`multitask-rl plugins list` shows those that are. An entry point just added to a "
                "pyproject.toml is seen only after its distribution is installed again (pip install -e .)."
            )
    elif kind is None:
        kind = next((kind for kind in ("reward", "constraint", "environment") if fits(kind)), "")
        if not kind:
            try:
                find_plugin("reward", name_or_ref, "check")
            except PluginError as error:
                try:
                    locate(name_or_ref, ENVIRONMENTS)
                except PluginError:
                    raise error from None  # there is no object that could be of another kind
                others = ", ".join(KINDS)
                raise PluginError(
                    f"{str(error).rstrip('.')}. If it is no reward, name its kind: --kind {others}"
                ) from error
    if kind not in ("reward", "constraint"):
        suite = pkgutil.resolve_name(f"{KINDS[kind].suite}:check_{kind}")
        own = {"row": row} if kind == "environment" else {}
        return CheckReport(name_or_ref, kind, None, tuple(suite(name_or_ref, config, **own)))
    source = find_plugin(kind, name_or_ref, "check")
    own_row = dict(_EXAMPLE_ROW if row is None else row)
    if kind == "constraint":
        findings = check_constraint(name_or_ref, row=own_row, config=config)
    else:
        findings = check_reward(name_or_ref, row=own_row, gold=gold, config=config)
        if row is None:  # the example row need not be one of the plugin's data
            findings = [
                Finding(f.name, True, f"not tried, give --row ({f.detail})")
                if not f.passed and f.detail.startswith("data failure")
                else f
                for f in findings
            ]
    needs = tuple(dict.fromkeys([*source.traits.needs, *source.check(config or {})]))
    return CheckReport(name_or_ref, kind, replace(source.traits, needs=needs), tuple(findings))


def assert_contract(
    kind: str,
    plugin: str,
    config: Mapping[str, Any] | None = None,
    *,
    row: Mapping[str, Any] | None = None,
) -> None:
    """Assert that a plugin keeps the contract of its kind.

    Args:
        kind: a key of ``scaffold.KINDS``.
        plugin: as a tasks file or a run configuration names it.
        config: keys of its ``Config`` (tracker: of ``tracking``, backend: of the run).
        row: a row of its data (rewards, constraints, environments).

    Raises:
        AssertionError: lists every check that failed.
    """
    assert_findings(check_plugin(plugin, row, kind=kind, config=config).findings)


assert_algorithm_contract = partial(assert_contract, "algorithm")
assert_guard_contract = partial(assert_contract, "guard")
assert_scheduler_contract = partial(assert_contract, "scheduler")
assert_task_contract = partial(assert_contract, "task")


def main(argv: Sequence[str]) -> int:
    """Check the plugin named in ``argv``, print the report; 0 if it keeps its contract, else 1.

    The check runs in a process of its own, which a plugin may end. Exit code and report come back in a file.
    """
    arguments = _parser().parse_args(argv)
    boot = "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    boot += "from multitask_rl.testing.check import report; report(int(sys.argv[1]), sys.argv[3:])"
    with tempfile.TemporaryFile() as answer:
        sys.stdout.flush()
        given = [str(answer.fileno()), json.dumps(sys.path), *argv]
        ended = subprocess.run([sys.executable, "-P", "-c", boot, *given], pass_fds=[answer.fileno()])
        answer.seek(0)
        text = answer.read()
    if not text:
        code = ended.returncode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        error = PluginError(
            f"plugins check: {arguments.plugin!r} ends its process {how} where it is imported, built or "
            "called, so there is no report. A run would end there too. Find what ends the process (os._exit, "
            "sys.exit, a crash of a compiled library) and raise an error instead."
        )
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    exit_code, out, err = json.loads(text)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return int(exit_code)


def report(descriptor: int, argv: Sequence[str]) -> None:
    """Check the plugin named in ``argv``, write exit code, report and error to ``descriptor``, and exit."""
    try:
        arguments = _parser().parse_args(argv)
        text, allowed = arguments.row, "a JSON object, or a .jsonl file whose first row is taken"
        if text is not None and not text.lstrip().startswith("{"):
            with path_errors("--row:", text, allowed), Path(text).open(encoding="utf-8") as file:
                text = file.readline()
        row = None if text is None else _json(text, "--row")
        config = _json(arguments.config, "--config")
        found = check_plugin(arguments.plugin, row, kind=arguments.kind, gold=arguments.gold, config=config)
        answer = (0 if found.passed else 1, found.text() + "\n", "")
    except MultitaskRLError as error:
        answer = (error.exit_code, "", f"error: {error}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os._exit(0)  # threads and exit handlers of the plugin must not keep the process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="multitask-rl plugins check", description=__doc__)
    parser.add_argument("plugin", help="installed name, module:object, file.py:object or a foreign prefix")
    parser.add_argument("--kind", choices=tuple(KINDS))
    parser.add_argument("--row", help="a JSON object, or a .jsonl file whose first row is taken")
    parser.add_argument("--gold", help="a response that deserves the full score")
    parser.add_argument("--config", default="{}", help="a JSON object with keys of its Config")
    return parser


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {text[:80]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: expected a JSON object, got {text[:80]!r}")
    return value
