"""Run the notebooks of ``examples/notebooks`` and store what they show: ``make notebooks``.

Each runs in a folder of its own. Seconds, rates and messages of the machine are left out of what is stored:
another run changes little.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
TIMES = re.compile(
    r"  \S+ gone  \S+ left|^.*\ba step [\d.]+ s:.*\n(?:<span [^>]*>(?:updates/s; )?loss .*\n)?", re.MULTILINE
)
"""In the view of a run: the time gone and left, and the line on where the time of a step goes."""


def main() -> None:
    """Write every notebook anew."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "notebooks"
            shutil.copytree(NOTEBOOKS, folder)
            notebook = nbformat.read(path, as_version=4)
            client = NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True)
            client.execute(cwd=str(folder))
        for cell in notebook.cells:
            if "outputs" in cell:
                cell.outputs = [shown(own) for own in cell.outputs if own.get("name") != "stderr"]
        notebook.metadata.language_info = {"name": "python"}
        path.write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


def shown(output: Any) -> Any:
    """Return an output without times."""
    if "text/html" in output.get("data", {}):
        output.data["text/html"] = TIMES.sub("", output.data["text/html"])
    return output


if __name__ == "__main__":
    main()
