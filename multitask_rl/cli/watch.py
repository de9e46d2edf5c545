"""``multitask-rl watch RUN``: the page of a run in the browser, while the run goes on."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from multitask_rl.boundary.interrupts import answer_with
from multitask_rl.boundary.printable import printable
from multitask_rl.errors import ConfigError
from multitask_rl.report.live import LiveRun, LiveServer
from multitask_rl.report.summary import summarise_run


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigError: there is no such directory, or the port is taken.
    """
    parser = argparse.ArgumentParser(
        prog="multitask-rl watch", description="Show a run in the browser while it goes on; Ctrl-C ends it."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="output directory of the run")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    options = parser.parse_args(arguments)
    if not options.run.is_dir():
        raise ConfigError(f"{options.run} is no directory; give the output_dir of a run, once it has begun")
    if not 0 <= options.port < 65536:
        parser.error("--port must be in [0, 65535]")
    try:
        server = LiveServer(LiveRun(options.run, summarise_run), str(options.run), options.port)
    except OSError as error:
        raise ConfigError(f"--port {options.port}: {error.strerror}; leave it out for a free one") from error
    with server:
        sys.stdout.write(printable(f"{options.run}: {server.address} (on this machine only; Ctrl-C ends)\n"))
        sys.stdout.flush()
        if options.open:
            webbrowser.open(server.address)
        answer_with(lambda _: True)  # without a message: it ends at once
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
