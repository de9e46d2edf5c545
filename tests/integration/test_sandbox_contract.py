"""Every sandbox we ship keeps the promises of the interface."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import (
    Ending,
    Limits,
    Program,
    StdioTask,
    StdioTest,
    open_sandbox,
    shared_sandbox,
)
from multitask_rl.sandbox.doctor import report
from multitask_rl.sandbox.pool import NamespaceSandbox
from multitask_rl.sandbox.remote import HttpSandbox
from multitask_rl.testing.sandbox import assert_sandbox_contract


class RunCodeHandler(BaseHTTPRequestHandler):
    """Answers ``/run_code`` the way SandboxFusion does, with a plain subprocess."""

    failures: ClassVar[list[int]] = []
    """Statuses to answer before anything works."""
    requests = 0

    def do_POST(self) -> None:
        type(self).requests += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.failures:
            self._answer(self.failures.pop(), {"detail": "busy"})
            return
        self._answer(200, self._run(body))

    def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        limit = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({body['memory_limit_MB'] << 20},) * 2)\n"
        source = f"{limit}exec(compile({body['code']!r}, 'main.py', 'exec'))"
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", source],
                input=body["stdin"].encode(),
                capture_output=True,
                timeout=body["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
        result = {
            "status": "Finished",
            "return_code": done.returncode,
            "stdout": done.stdout.decode(),
            "stderr": done.stderr.decode(),
            "execution_time": 0.01,
        }
        return {"status": "Success" if done.returncode == 0 else "Failed", "run_result": result}

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


class OddHandler(RunCodeHandler):
    """Answers with what it is told to, or drips."""

    body: ClassVar[bytes] = b""
    drips = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while type(self).drips:
                self.wfile.write(b" ")
                time.sleep(0.05)
            self.wfile.write(type(self).body)


@pytest.fixture
def server(request):
    handler = getattr(request, "param", RunCodeHandler)
    RunCodeHandler.failures, RunCodeHandler.requests = [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("level", ["bwrap", "landlock"])  # namespaces: in test_one_file_each
def test_every_level_keeps_the_contract(level):
    if level == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    assert_sandbox_contract(lambda: NamespaceSandbox(workers=1, level=level))


def test_the_http_client_keeps_the_contract_with_a_real_server(server):
    assert_sandbox_contract(lambda: HttpSandbox(server, backoff_s=0.01), function_tasks=False)


def test_the_http_client_tries_again_after_a_server_error(server):
    with HttpSandbox(server, backoff_s=0.01) as sandbox:
        RunCodeHandler.failures = [503, 429]
        outcome = sandbox.run(Program(source="print(1)"))
    assert (outcome.ending, outcome.stdout, outcome.retries) == (Ending.completed, b"1\n", 2)


def test_the_http_client_gives_no_score_when_the_server_stays_broken(server):
    with HttpSandbox(server, retries=1, backoff_s=0.01) as sandbox:
        RunCodeHandler.failures = [500] * 10
        task = StdioTask(tests=[StdioTest(stdin="", stdout="1")])
        outcome = sandbox.run(Program(source="print(1)", task=task))
    assert outcome.ending is Ending.infrastructure_error
    assert outcome.pass_fraction is None
    assert "500" in outcome.message


def test_the_http_client_does_not_repeat_a_refused_request(server):
    with HttpSandbox(server, backoff_s=0.01) as sandbox:
        RunCodeHandler.failures, RunCodeHandler.requests = [422], 0
        outcome = sandbox.run(Program(source="print(1)"))
    assert outcome.ending is Ending.infrastructure_error
    assert RunCodeHandler.requests == 1


@pytest.mark.parametrize("server", [OddHandler], indirect=True)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}}",
        b'{"run_result": "done"}',
        b'{"run_result": [1]}',
        b'{"status": "Success", "run_result": {"return_code": "0"}}',
        b'{"status": "Success", "run_result": {"return_code": true}}',
        b'{"status": "Success", "run_result": {"return_code": 0, "execution_time": Infinity}}',
        b'{"status": "Success", "run_result": {"return_code": 0, "execution_time": "1"}}',
        b'{"status": "Success", "run_result": {"return_code": 0, "stdout": {"a": 1}}}',
        b'{"a": ' + b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_the_http_client_gives_no_score_for_an_odd_answer(server, body):
    OddHandler.body = body
    with HttpSandbox(server, retries=1, backoff_s=0.01, check=False) as sandbox:
        outcome = sandbox.run(Program(source="print(1)"))
    assert (outcome.ending, outcome.retries) == (Ending.infrastructure_error, 1)


@pytest.mark.parametrize("server", [OddHandler], indirect=True)
def test_the_http_client_does_not_wait_for_an_answer_that_drips(server):
    OddHandler.drips = True
    began = time.monotonic()
    try:
        with HttpSandbox(server, retries=0, overhead_s=0.3, check=False) as sandbox:
            outcome = sandbox.run(Program(source="print(1)", limits=Limits(wall_s=0.2)))
    finally:
        OddHandler.drips = False
    assert outcome.ending is Ending.infrastructure_error
    assert "no whole answer within 0.5 s" in outcome.message
    assert time.monotonic() - began < 10


def test_the_http_client_refuses_to_open_without_a_server():
    with pytest.raises(SandboxError, match="no working sandbox server"):
        HttpSandbox("http://127.0.0.1:9", retries=0)


def test_an_unavailable_level_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match=r"bubblewrap .* is not installed"):
        NamespaceSandbox(workers=1, level="bwrap")


def test_the_weakest_acceptable_level_is_only_used_when_stronger_ones_fail():
    with NamespaceSandbox(workers=1, minimum_level="landlock") as sandbox:
        assert sandbox.level == "namespaces"


def test_a_sandbox_opens_by_name():
    with open_sandbox("namespaces", workers=1) as sandbox:
        assert sandbox.run(Program(source="print(1)")).stdout == b"1\n"


def test_all_callers_share_one_sandbox():
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared_sandbox())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(sandbox) for sandbox in found}) == 1
    assert found[0].run(Program(source="print(2)")).stdout == b"2\n"


def test_the_doctor_finds_the_layers_this_suite_runs_on():
    layers = {layer: is_active for layer, is_active, _ in report()}
    assert layers["level namespaces"]
    needed = ("system call filter", "no sockets", "own root directory", "no /proc")
    assert all(layers[name] for name in needed)
    assert "cgroup limits" in layers
