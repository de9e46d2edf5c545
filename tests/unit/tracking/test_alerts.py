"""Alerts reach the log and a real HTTP server; one that refuses or hangs never hurts the run."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import ConfigError
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Event
from multitask_rl.run.assembly import build_trackers
from multitask_rl.run.plan import plan_run
from multitask_rl.tracking import alerts
from multitask_rl.tracking.alerts import AlertTracker
from multitask_rl.tracking.base import Trackers
from run_builders import run_config, write_run


class Server:
    """An HTTP server on this machine that keeps what is posted to it."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], Any]] = []
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.append((dict(self.headers), json.loads(body)))
                outer.hold.wait(30)
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/hook/secret-path"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(alerts.TOKEN_VARIABLE, raising=False)
    server = Server()
    yield server
    server.hold.set()
    server.http.shutdown()
    server.http.server_close()


def event(kind: str, source: str = "guard", step: int = 7) -> Event:
    data = {"value": 0.25, "reference": math.nan}
    return Event(step=step, source=source, kind=kind, reason="math has regressed", task="math", data=data)


def test_alerts_and_nothing_else_are_posted_in_order_with_the_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(alerts.TOKEN_VARIABLE, "t0ken")
    tracker = AlertTracker(tmp_path, server.url)
    with caplog.at_level(logging.WARNING):
        for kind, source in (
            ("warn", "guard"),
            ("reweight", "scheduler"),
            ("alarm", "multiplier"),
            ("rollback", "guard"),
            ("stop", "guard"),
        ):
            tracker.log_event(event(kind, source))
        tracker.finish("stopped")
    bodies = [body for _, body in server.received]
    assert [(b["source"], b["kind"]) for b in bodies] == [
        ("guard", "warn"),
        ("multiplier", "alarm"),
        ("guard", "rollback"),
        ("guard", "stop"),
    ]
    assert bodies[2] == {
        "step": 7,
        "source": "guard",
        "kind": "rollback",
        "reason": "math has regressed",
        "task": "math",
        "data": {"value": 0.25, "reference": None},
        "run": str(tmp_path),
    }
    headers = server.received[0][0]
    assert headers["Authorization"] == "Bearer t0ken"
    assert headers["Content-Type"] == "application/json"
    assert [r.message for r in caplog.records if "rollback" in r.message] == [
        "guard rollback [math] at step 7: math has regressed"
    ]
    tracker.finish("stopped")
    tracker.log_event(event("stop"))
    assert len(server.received) == 4, "closed"


def test_without_a_token_nothing_is_claimed(server: Server, tmp_path: Path) -> None:
    tracker = AlertTracker(tmp_path, server.url)
    tracker.log_event(event("rollback"))
    tracker.finish("finished")
    assert "Authorization" not in server.received[0][0]


def test_a_server_that_refuses_is_logged_and_the_next_alert_is_tried(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = 500
    tracker = AlertTracker(tmp_path, server.url)
    tracker.log_event(event("rollback"))
    tracker.log_event(event("stop"))
    tracker.finish("stopped")
    assert [b["kind"] for _, b in server.received] == ["rollback", "stop"]
    assert "refused a write (the run goes on" in caplog.text
    assert "2 alerts did not reach the webhook at 127.0.0.1" in caplog.text
    assert "secret-path" not in caplog.text, "the address may hold a secret"


def test_a_server_that_hangs_holds_up_nobody_and_the_queue_is_bounded(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "_FLUSH_S", 0.2)
    server.hold.clear()
    tracker = AlertTracker(tmp_path, server.url)
    for step in range(300):
        tracker.log_event(event("warn", step=step))
    tracker.finish("finished")
    assert len(server.received) <= 1
    assert "alerts did not reach the webhook" in caplog.text


def test_no_server_at_all_and_no_webhook(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody = Server()
    nobody.http.shutdown()
    nobody.http.server_close()
    trackers = Trackers(
        tmp_path, TrackingConfig(trackers=[]), None, {"alerts": AlertTracker(tmp_path, nobody.url)}
    )
    trackers.start({})
    trackers.log_event(event("stop"))
    trackers.finish("stopped")
    assert trackers.failures == {}
    assert "1 alerts did not reach" in caplog.text
    silent = AlertTracker(tmp_path)
    silent.log_event(event("stop"))
    silent.finish("stopped")


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="webhook must start with http"):
        SafetyGuard(webhook="file:///etc/passwd")


def test_an_alarm_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path)
    for shown, trackers in ((True, ["console"]), (False, [])):
        config = run_config(tmp_path, "out", 1, tracking=TrackingConfig(trackers=trackers))
        own = build_trackers(plan_run(config), SafetyGuard(), None)
        own.log_event(event("alarm"))
        assert capsys.readouterr().out.count("math has regressed") == shown
        assert caplog.text.count("math has regressed") == (not shown)
