"""What a terminal shows beside results: lines of the log, a hub that cannot be reached."""

from __future__ import annotations

import logging

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.train import TerminalFormatter


def test_a_hub_that_does_not_answer_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    hub = logging.getLogger("huggingface_hub.utils._http")
    for number in range(3):
        hub.warning("'[Errno -2] Name or service not known' thrown while requesting HEAD https://hub/x")
        hub.warning("Retrying in %ds [Retry %d/5].", 2**number, number)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "HF_HUB_OFFLINE=1" in told[0]


def test_a_line_of_the_log_has_no_time_and_module() -> None:
    lines = [
        TerminalFormatter().format(logging.LogRecord("module", level, "", 0, "loading %s", ("it",), None))
        for level in (logging.INFO, logging.WARNING)
    ]
    assert lines == ["loading it", "warning: loading it"]
