"""Which tests have the machine to themselves: ``make unit`` runs two of the others at a time, then these."""

from pathlib import Path

import pytest

ALONE = (
    # limits and measurements of time, processes and memory
    "integration/test_long_context",
    "integration/test_pipeline",
    "integration/test_sandbox_",
    "integration/test_streaming",
    "test_architecture",
    "unit/rewards/test_code",
    "unit/sandbox/",
    "unit/scoring/",
    "unit/cli/test_cli",
    # several processes of their own, or all cores
    "gpu/",
    "integration/test_chaos",
    "integration/test_learner_ranks",
    "integration/test_ray_",
    "integration/test_vllm_",
    "unit/training/backends/test_ranks",
)
"""How the paths of their files begin, from this folder."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of those files."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix().startswith(ALONE):
            item.add_marker("alone")
