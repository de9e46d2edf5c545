"""The long description of the wheel: the README, whose links would lead nowhere outside the repository.

With an address in ``tool.multitask-rl.repository`` of pyproject.toml they become absolute, else plain text.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description(readme: str, repository: str) -> str:
    """Return ``readme`` without relative links and pictures."""
    relative = r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)"
    if repository:
        return re.sub(
            relative,
            lambda m: f"{m[1]}[{m[2]}]({repository}/{'raw' if m[1] else 'blob'}/main/{m[3]})",
            readme,
        )
    return re.sub(relative, lambda m: "" if m[1] else m[2], readme)


settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
text = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=description(text, settings["tool"].get("multitask-rl", {}).get("repository", "")),
    long_description_content_type="text/markdown",
)
