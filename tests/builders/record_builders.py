"""Records of a run as a run writes them, without the run."""

import json
from pathlib import Path
from typing import Any

__all__ = ["sample", "write_records"]


def write_records(directory: Path, **files: list[dict[str, Any]]) -> Path:
    """Write the records of a run, with an evaluation if none is given."""
    score = {"step": 1, "task": "sums", "metric": "m", "direction": "higher", "values": [0.0, 1.0]}
    for name, lines in {"evaluations": [score], **files}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def sample(step: int, **other: Any) -> dict[str, Any]:
    texts = {"prompt_id": "sums/1", "prompt": "1+1", "response": "2"}
    return {"step": step, "task": "sums", **texts, "reward": 0.5, **other}
