"""The server of ``multitask-rl watch``: what it answers, to whom, and that it follows the records."""

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.errors import ConfigError
from multitask_rl.report.live import LiveRun, LiveServer, Tail
from multitask_rl.report.summary import summarise_run
from multitask_rl.tracking.reading import RunRecord
from record_builders import sample, write_records


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    write_records(tmp_path, rollouts=[sample(1)])
    with LiveServer(LiveRun(tmp_path, summarise_run), "a run") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, str]:
    """Return status, body and mark of an answer; ``path`` without a slash is below the secret."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    whole = path if path.startswith("/") else f"/{server.secret}/{path}"
    connection.request(method, whole, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers.get("ETag", "")
    assert answer.headers.get("Access-Control-Allow-Origin") is None
    connection.close()
    return found


def test_it_serves_page_data_and_samples(server: LiveServer) -> None:
    status, page, _ = ask(server, "")
    assert (status, page.count(b"</script>")) == (200, 2)
    assert b"connect-src 'self'" in page
    status, data, mark = ask(server, "data.json")
    assert status == 200
    found = json.loads(data)
    assert found["samples"]["columns"]["step"] == [1]
    assert ask(server, "data.json", **{"If-None-Match": mark}) == (304, b"", mark)
    status, chunk, _ = ask(server, f"texts/{found['samples']['version']}/0")
    assert status == 200
    assert json.loads(zlib.decompress(chunk))[0]["response"] == "2"


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("", "GET", {"Host": "evil.example:80"}, 421),
        ("", "GET", {"Host": "127.0.0.1.evil.example"}, 421),
        ("", "GET", {"Host": ""}, 421),
        ("", "GET", {"Host": "localhost:9999"}, 200),  # through a tunnel
        ("/data.json", "GET", {}, 403),
        ("/wrong/data.json", "GET", {}, 403),
        ("../data.json", "GET", {}, 404),
        ("../../../etc/passwd", "GET", {}, 404),
        ("config.yaml", "GET", {}, 404),
        ("texts/1/99", "GET", {}, 410),
        ("texts/0/0", "GET", {}, 410),
        ("texts/1/-1", "GET", {}, 404),
        ("data.json", "POST", {}, 501),
        ("data.json", "DELETE", {}, 501),
    ],
)
def test_it_answers_only_its_own_page(
    server: LiveServer, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    ask(server, "data.json")
    assert ask(server, path, method, **headers)[0] == status


def test_it_listens_on_this_machine_alone_and_says_why_a_port_cannot_be_had(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host, port = server.server_address[:2]
    assert host == "127.0.0.1"
    assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert f"--port {port}: " in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_a_browser_that_goes_away_is_nothing_to_tell(
    server: LiveServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 403
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sock.close()  # by a reset
        answer.close()
    until = time.monotonic() + 10
    while any("request" in t.name for t in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_it_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def interrupt() -> None:
        while True:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("GET", "/")
                connection.getresponse().read()
                break
            time.sleep(0.01)
        connection.close()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job of the background
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        assert main(["watch", str(tmp_path), "--port", str(port)]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    out, err = capfd.readouterr()
    assert (out.count("\n"), err) == (1, ""), "the address alone"


def test_a_run_that_has_evaluated_nothing_is_waited_for(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, summarise_run)
    with pytest.raises(ConfigError, match=r"holds no evaluations\.jsonl"):
        live.data()
    write_records(tmp_path)
    data, first = live.data()
    assert json.loads(data)["tasks"] == ["sums"]
    assert live.data() == (data, first)


def test_new_lines_are_read_once_and_a_resumed_run_anew(tmp_path: Path) -> None:
    write_records(tmp_path, rollouts=[sample(step) for step in range(1, 5)])
    live = LiveRun(tmp_path, summarise_run)
    live.wait_s = 0.0

    def columns() -> tuple[str, list[int]]:
        live.wait_s = 0.0
        stored = json.loads(live.data()[0])["samples"]
        return stored["version"], stored["columns"]["step"]

    assert columns() == ("1", [1, 2, 3, 4])
    path = tmp_path / "rollouts.jsonl"
    with path.open("a") as lines:
        lines.write(json.dumps(sample(5)) + "\n" + json.dumps(sample(6))[:20])
    assert columns() == ("1", [1, 2, 3, 4, 5]), "a line that is being written waits"
    # cut to a checkpoint, and as long as before when it is read again
    path.write_text("".join(json.dumps(sample(step)) + "\n" for step in (1, 2, 7, 8, 9, 10)))
    assert columns() == ("2", [1, 2, 7, 8, 9, 10])
    assert live.chunk("texts", "1", 0) is None
    assert live.chunk("texts", "2", 0) is not None
    path.unlink()
    assert columns() == ("3", [])


def test_a_task_that_a_resume_renames_is_one_task_from_then_on(tmp_path: Path) -> None:
    write_records(tmp_path, rollouts=[sample(1)])
    live = LiveRun(tmp_path, summarise_run)
    assert json.loads(live.data()[0])["samples"]["names"]["task"] == ["sums"]
    (tmp_path / "config.yaml").write_text(json.dumps({"tasks": {"plus": {"former_names": ["sums"]}}}))
    with (tmp_path / "rollouts.jsonl").open("a") as lines:
        lines.write(json.dumps(sample(2, task="plus")) + "\n")
    live.wait_s = 0.0
    stored = json.loads(live.data()[0])["samples"]
    assert (stored["names"]["task"], stored["columns"]["task"]) == (["plus"], [0, 0])


def test_a_file_is_read_from_where_it_ended(tmp_path: Path) -> None:
    path, found = tmp_path / "lines.jsonl", list[int]()
    tail = Tail(path, lambda line: found.append(line["a"]))
    assert tail.read()
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert tail.read()
    assert found == [1, 2]
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    assert not tail.read()
    assert tail.read()
    assert found == [1, 2, 1, 3, 4]
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n{"a": \n{"a": 5}\n')
    assert tail.read()
    assert found[5:] == [5], "a line that a crash has cut is left out"
    path.write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n{"a": \n{"a": 5}\n{}\n')
    with pytest.raises(ConfigError, match="not a line as a run writes it"):
        tail.read()


def test_reading_a_large_run_waits_longer_between_two_readings(tmp_path: Path) -> None:
    write_records(tmp_path)

    def slow(run: RunRecord) -> dict[str, Any]:
        time.sleep(0.06)
        return summarise_run(run)

    live = LiveRun(tmp_path, slow)
    first, _ = live.data()
    assert live.wait_s > 50 * 0.06
    write_records(tmp_path, rollouts=[sample(1)])
    assert live.data()[0] == first
