"""Print the section of CHANGELOG.md of a version: ``python docs/release_notes.py 0.1.0``.

Refuses a version that is not the one of pyproject.toml and CITATION.cff, or has no section.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, root: Path = ROOT) -> str:
    """Return the text under ``## [version]``.

    Raises:
        SystemExit: the files disagree about the version, or the section is missing or empty.
    """
    package = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    found = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    cited = found[1] if found else "none"
    if not version == package == cited:
        raise SystemExit(
            f"the tag says {version}, pyproject.toml {package}, CITATION.cff {cited}: "
            "give all three one version"
        )
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.DOTALL | re.MULTILINE
    )
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## [{version}] - DATE': rename 'Unreleased' to it")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(notes((sys.argv[1:] or [""])[0]))
