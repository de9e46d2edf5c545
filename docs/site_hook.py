"""For ``make site``: links to files beside the pages (scripts, results, tests) become plain text."""

from __future__ import annotations

import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with only those links that lead to pages and figures of the site."""

    def keep(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        on_site = not target.startswith("../") and target.endswith((".md", ".svg", ".png"))
        return match[0] if on_site else text

    return _LINK.sub(keep, markdown)
