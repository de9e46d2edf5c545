"""A redirect does not carry a token to another host; servers of this machine are asked without a proxy."""

from __future__ import annotations

import http.server
import os
import threading
import urllib.error
import urllib.request

import pytest

from multitask_rl.boundary.posting import bypass_proxies, open_request

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("http_proxy", NOWHERE)
    monkeypatch.delenv("no_proxy", raising=False)
    kind = http.server.SimpleHTTPRequestHandler
    monkeypatch.setattr(kind, "log_message", lambda *_: None)
    with http.server.HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            request = urllib.request.Request(f"http://{host}:{server.server_port}/")
            with open_request(request, timeout=5) as answer:
                assert answer.status == 200
        finally:
            server.shutdown()
            thread.join()
    with (
        pytest.raises(OSError, match="refused"),
        open_request(urllib.request.Request("http://h/"), timeout=5),
    ):
        pytest.fail("no proxy was asked")


@pytest.mark.parametrize(
    ("before", "after"), [("", "localhost,127.0.0.1,::1"), ("h", "h,localhost,127.0.0.1,::1"), ("*", "*")]
)
def test_proxies_are_bypassed_once(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    monkeypatch.setenv("NO_PROXY", before)
    monkeypatch.setenv("no_proxy", before)
    monkeypatch.setenv("http_proxy", NOWHERE)
    bypass_proxies()
    bypass_proxies()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (after, after)


def test_hosts_that_only_the_upper_case_name_gives_stay_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")  # so that it is taken away again afterwards
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.setenv("http_proxy", NOWHERE)
    assert urllib.request.proxy_bypass("corp.example")
    bypass_proxies()
    assert urllib.request.proxy_bypass("corp.example")
    assert urllib.request.proxy_bypass("127.0.0.1:80")


def test_a_redirect_is_an_error_and_nothing_is_sent_to_where_it_leads() -> None:
    asked: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302 if self.path == "/first" else 200)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/other")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            headers = {"Authorization": "Bearer secret"}
            request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/first", b"{}", headers)
            with (
                pytest.raises(urllib.error.HTTPError, match="302") as caught,
                open_request(request, timeout=5),
            ):
                pytest.fail("the redirect was followed")
            caught.value.close()
            request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/fine", b"{}", headers)
            with open_request(request, timeout=5) as answer:
                assert answer.status == 200
        finally:
            server.shutdown()
            thread.join()
    assert asked == [("/first", "Bearer secret"), ("/fine", "Bearer secret")]
