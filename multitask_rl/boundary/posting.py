"""HTTP requests to configured servers: no redirects, and a time limit on the whole exchange.

A server of this machine is asked without a proxy, for which ``localhost`` is the machine that it runs on.

``urllib`` sends the headers of the first request, bearer token included, to any host that a redirect names.
Its time limit applies to each read, so a server that sends a byte now and then never reaches it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any, cast

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def bypass_proxies() -> None:
    """Let this process and those that it starts reach servers of this machine without a configured proxy."""
    names = ("no_proxy", "NO_PROXY")  # a library reads the first one that is set, so both get the same hosts
    hosts = (os.environ.get(names[0]) or os.environ.get(names[1], "")).split(",")
    if hosts != ["*"]:  # every host, as long as it stands alone
        hosts = list(dict.fromkeys(filter(None, [*hosts, *THIS_MACHINE])))
    for name in names if urllib.request.getproxies() else ():
        os.environ[name] = ",".join(hosts)


@contextlib.contextmanager
def open_request(request: urllib.request.Request, *, timeout: float) -> Iterator[HTTPResponse]:
    """Send ``request``; the context value is the response, which must be read inside the context.

    ``timeout`` is in seconds, for the whole exchange.

    Raises:
        urllib.error.HTTPError: the server answers an error, or a redirect (3xx).
        OSError: refused, reset, timed out.
    """
    sockets: list[socket.socket] = []

    class Http(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            sockets.append(self.sock)

    class Https(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            sockets.append(self.sock)

    class Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(Http, req)

        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(Https, req)

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Return no request: ``urllib`` then raises ``HTTPError`` with the redirect's status."""

    is_over = threading.Event()

    def hang_up() -> None:
        is_over.set()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, hang_up)
    timer.daemon = True
    timer.start()
    handlers: list[Any] = [NoRedirect, Handler]
    # not ``bypass_proxies``: in ``no_proxy`` urllib needs [::1] with brackets, with which httpx fails
    if urllib.parse.urlsplit(request.full_url).hostname in THIS_MACHINE:
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    try:
        with cast("HTTPResponse", opener.open(request, timeout=timeout)) as response:
            yield response
    except urllib.error.HTTPError:
        raise
    except Exception as error:
        if is_over.is_set():
            raise TimeoutError(f"no whole answer within {timeout:g} s") from error
        raise
    finally:
        timer.cancel()
