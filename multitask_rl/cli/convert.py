"""Write a tasks file and a run's configuration from a configuration of TRL, verl, ROLL or OpenRLHF.

Options whose meaning has a counterpart are taken over; the others are listed with the reason, in the terminal
and in DIR/report.txt. Nothing of the source is run. The pages docs/coming-from-*.md show both sides.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from multitask_rl.boundary.printable import printable
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.convert.conversion import EXPERIMENT, convert
from multitask_rl.convert.openrlhf import OPENRLHF
from multitask_rl.convert.roll import ROLL
from multitask_rl.convert.trl import TRL
from multitask_rl.convert.verl import VERL
from multitask_rl.errors import ConfigError

SOURCES = {"trl": TRL, "verl": VERL, "roll": ROLL, "openrlhf": OPENRLHF}


def main(arguments: list[str]) -> int:
    """Convert one file, write the results below ``--out`` and print what became of each option."""
    parser = argparse.ArgumentParser(prog="multitask-rl convert", description=__doc__)
    parser.add_argument(
        "file",
        help="script or YAML of TRL; YAML or shell script of verl; YAML of ROLL; shell script of OpenRLHF",
    )
    parser.add_argument("--from", dest="source", required=True, choices=SOURCES)
    parser.add_argument(
        "--out", default="converted", metavar="DIR", help="folder to write (default: converted)"
    )
    parser.add_argument("--dataset", default="", help="instead of the data set that FILE names")
    parser.add_argument("--reward", default="", help="instead of the rewards that FILE names: a plugin")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of a data set that is not a local file")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="devices of a launch of TRL")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    done = convert(
        SOURCES[options.source],
        Path(options.file),
        dataset=options.dataset,
        reward=options.reward,
        num_rows=options.rows,
        processes=options.processes,
    )
    if (out / "tasks.yaml").exists():
        raise ConfigError(f"{out / 'tasks.yaml'} exists already; name another folder with --out DIR")
    paths = done.write(out)
    for line in done.report():
        print(printable(line))
    folder = shlex.quote(str(out))
    model = "" if "model.name_or_path" in done.run else " model.name_or_path=MODEL"
    print(f"\nwritten: {', '.join(map(str, paths))}", flush=True)
    load_tasks(out / "tasks.yaml")
    print(f"next: multitask-rl tasks validate {folder}/tasks.yaml")
    print(f"      multitask-rl train --config-dir {folder} +experiment={EXPERIMENT}{model}")
    return 0
