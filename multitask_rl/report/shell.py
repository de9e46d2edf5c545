"""One HTML file of style, scripts and data; or without the data, which a server on this machine sends.

Curves are drawn by uPlot (``uplot/``, MIT licence; unchanged from its npm package, version 1.6.32).
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from multitask_rl.tracking.jsonl import dump_line

_FILES = files("multitask_rl.report")


def render_shell(title: str, script: str, data: Mapping[str, Any] | None) -> str:
    """Return an HTML page in which the file ``script`` shows ``data``.

    With ``data`` None the page asks its server for the data. ``script`` follows ``parts.js`` and ends with
    ``start(show)``. The page's content security policy allows these scripts alone, so a script in the text of
    a response does not run.
    """
    licence = _read("uplot/LICENSE").replace("*/", "")
    scripts = [_read("uplot/uPlot.iife.min.js"), _read("parts.js"), _read(script)]
    code = f"/* uPlot\n{licence}\n*/\n" + '"use strict";\n'.join(["", *scripts])
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    parts = {
        "@POLICY@": policy + ("" if data is not None else "; connect-src 'self'"),
        "@TITLE@": html.escape(title),
        "@STYLE@": _read("uplot/uPlot.min.css") + _read("style.css"),
        "@SCRIPT@": code,
        # no text of a response may end the script element or begin a comment in it
        "@DATA@": "null"
        if data is None
        else dump_line(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    }
    page = _read("shell.html")
    # one pass, so that a part which names another mark stays as it is
    pieces = []
    for mark in ("@POLICY@", "@TITLE@", "@STYLE@", "@TITLE@", "@DATA@", "@SCRIPT@"):
        before, _, page = page.partition(mark)
        pieces += [before, parts[mark]]
    return "".join([*pieces, page])


def rounded(value: float | None) -> float | None:
    """Return a number with the digits that a page shows; None for one that is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _read(name: str) -> str:
    return _FILES.joinpath(name).read_text(encoding="utf-8")
