"""Which tests need a processor to themselves: ``make unit`` runs others three at a time, then these two."""

import atexit
import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

# no test may wait for a hub; as "make unit" sets it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# with Ray's own 15 a replica would need minutes to start beside other tests
os.environ.setdefault("RAY_worker_niceness", "0")
# tests kill processes, never the machine, and a disk takes milliseconds for each file
os.fsync = lambda file: None

ALONE = (
    # limits and measurements of time, processes and memory
    "integration/test_pipeline",
    "integration/test_sandbox_li",
    "integration/test_world_pool",
    "unit/scoring/",
    "unit/rewards/test_hostile_text",
    # the device
    "gpu/",
)
"""How the paths of their files begin, from this folder."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests ``-m alone`` or ``-m "not alone"`` leaves out."""
    unwanted = {"alone": False, "not alone": True}.get(config.option.markexpr)
    if unwanted is None or not collection_path.match("test_*.py"):
        return None
    return True if is_alone(collection_path) == unwanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of those files."""
    for item in items:
        if is_alone(item.path):
            item.add_marker("alone")


def is_alone(file: Path) -> bool:
    """Return whether the tests of ``file`` need a processor to themselves."""
    return file.relative_to(Path(__file__).parent).as_posix().startswith(ALONE)


SHARED = ("from forked import", "mark.vllm")
"""What takes seconds to start, once for all tests of a process: files that have it stay in one."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give files that share the start of something to one process, others whole to any."""
    from xdist.scheduler import LoadFileScheduling

    @cache
    def shared(file: str) -> str:
        text = (config.rootpath / file).read_text(encoding="utf-8")
        return next((start for start in SHARED if start in text), file)

    class ByStart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared(super()._split_scope(nodeid))

    return ByStart(config, log) if config.getvalue("dist") == "loadfile" else None


gc.disable()  # until all test files are imported


def pytest_collection_finish() -> None:
    """Let the collector pass over the modules: it would spend a tenth of the suite's time on them."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # the interpreter's end frees them; pytest collects before


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """List the processes below this one that were not there when the test began."""
    here = psutil.Process()
    before = {child.pid for child in here.children(recursive=True)}
    return lambda: [child for child in here.children(recursive=True) if child.pid not in before]
