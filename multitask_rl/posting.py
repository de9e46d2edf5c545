"""Requests to servers that a configuration names: redirects are refused.

``urllib`` follows a redirect with the headers of the first request, the bearer token among them, to any host
that the answer names.
"""

from __future__ import annotations

import urllib.request
from http.client import HTTPResponse
from typing import Any, cast

__all__ = ["open_request"]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect to the caller, as an error with its status."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request: ``urllib`` then raises ``HTTPError``."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def open_request(request: urllib.request.Request, *, timeout: float) -> HTTPResponse:
    """Send ``request`` and return the answer.

    Args:
        request: as for ``urllib.request.urlopen``.
        timeout: in seconds, of every wait.

    Raises:
        urllib.error.HTTPError: the server answers an error, or a redirect (3xx).
        OSError: refused, reset, timed out.
    """
    return cast("HTTPResponse", _OPENER.open(request, timeout=timeout))
