"""Draw docs/figures/report.png, the page of the demo's run: ``python docs/draw_report.py runs/demo/run``.

Needs Chromium (``chromium``) and Pillow.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from multitask_rl.cli import main

PICTURE = Path(__file__).with_name("figures") / "report.png"
SIZE = (1200, 1230)
COLOURS = 192


def draw(run: Path) -> None:
    """Take the picture of the top of the page of ``run``; paths of this machine are left out."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "runs/demo/run")
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "reference"))
        for path in (copy / "config.yaml", copy / "events.jsonl"):
            path.write_text(path.read_text().replace(f"{Path.cwd()}/", ""))
        page, shot = Path(folder, "report.html"), Path(folder, "report.png")
        with contextlib.chdir(folder):
            main(["report", "runs/demo/run", "--html", str(page)])
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += ["--virtual-time-budget=8000"]
        command += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
