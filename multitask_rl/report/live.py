"""``multitask-rl watch RUN``: the page of a run, served on this machine while the run goes on.

The server listens on 127.0.0.1, answers GET only, writes nothing and reads nothing but the run's records. Its
address has a secret, because every user of a machine reaches its local ports; a request under another name
of the host is refused, because a foreign website may give its own name this address (DNS rebinding).
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from multitask_rl.errors import ConfigError, MultitaskRLError
from multitask_rl.report.page import charted, payload, span
from multitask_rl.report.samples import CHUNK, Samples
from multitask_rl.report.shell import render_shell
from multitask_rl.tracking.jsonl import RECORDS, dump_line, load_line
from multitask_rl.tracking.reading import RunRecord, former_names, read_run, tell_left_out

_LEAST_WAIT_S = 2.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Tail:
    """Reads the lines that a file of JSON lines got since the last reading."""

    def __init__(self, path: Path, convert: Callable[[dict[str, Any]], Any]) -> None:
        self._path = path
        self._convert = convert
        self._end = 0
        self._last = b""
        """The last line read, to notice that the file was cut and has grown again."""

    def read(self) -> bool:
        """Convert the new whole lines; False, and nothing read, if the file is not the one read before.

        The next call then begins at its first line.

        Raises:
            ConfigError: names a line that is no record.
        """
        if not self._path.exists():
            is_same = self._end == 0
            self._end, self._last = 0, b""
            return is_same
        with self._path.open("rb") as stream:
            stream.seek(self._end - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._end, self._last = 0, b""
                return False
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                record = None
                try:
                    record = load_line(line)
                except (ValueError, RecursionError) as error:
                    tell_left_out(f"{self._path}, byte {self._end}", str(error))
                try:
                    if record is not None:
                        self._convert(record)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ConfigError(f"{self._path}: not a line as a run writes it: {error}") from error
                self._end += len(line)
                self._last = line
        return True


class LiveRun:
    """The data of a run's page as bytes, read again when its records have grown.

    ``summarise``: what ``report`` says of a run, see ``page.payload``. ``most_work``: share of one core that
    reading may take; a large run is read less often.
    """

    def __init__(
        self,
        directory: Path,
        summarise: Callable[[RunRecord], Mapping[str, Any]],
        most_work: float = 0.02,
    ) -> None:
        self._directory = directory
        self._summarise = summarise
        self._most_work = most_work
        self._lock = threading.Lock()
        self._version = 0
        self._state: tuple[object, ...] | None = None
        self._read_at = -1e9
        self._data = b""
        self.wait_s = _LEAST_WAIT_S
        """Seconds until it is worth to ask again."""
        self._former: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._samples = Samples(self._former)
        self._metrics: list[dict[str, float]] = []
        self._spans: list[list[Any]] = []
        self._version += 1
        self._tails = [
            Tail(self._directory / "rollouts.jsonl", self._samples.add),
            Tail(self._directory / "metrics.jsonl", lambda line: self._metrics.append(charted(line))),
            Tail(self._directory / "timeline.jsonl", lambda line: self._spans.append(span(line))),
        ]

    def data(self) -> tuple[bytes, str]:
        """Return the page's data as JSON, and a mark that changes with it.

        Raises:
            ConfigError: the run has evaluated nothing yet, or a record cannot be read.
        """
        with self._lock:
            state = tuple(self._sizes())
            began = time.monotonic()
            if state != self._state and began - self._read_at >= self.wait_s:
                run = read_run(self._directory)
                if (former := former_names(run.config)) != self._former:
                    self._former = former  # a resume has renamed tasks
                    self._begin()
                while not all(tail.read() for tail in self._tails):
                    self._begin()  # a resume has cut the records
                data = payload(run, self._summarise(run), self._metrics, self._spans)
                samples = {
                    "version": str(self._version),
                    "columns": self._samples.columns,
                    "names": self._samples.names,
                    "chunk_size": CHUNK,
                    "texts": None,
                    "tokens": None,
                    "left_out": 0,
                }
                self._data = dump_line({**data, "samples": samples}).encode(errors="replace")
                self._state, self._read_at = state, time.monotonic()
                self.wait_s = max(_LEAST_WAIT_S, (self._read_at - began) / self._most_work)
            return self._data, f'"{self._version}-{hash(self._state)}"'

    def _sizes(self) -> list[object]:
        found: list[object] = []
        for name in (*RECORDS, "config.yaml", "machine.json"):
            with suppress(OSError):
                status = os.stat(self._directory / name)
                found.append((name, status.st_size, status.st_mtime_ns))
        return found

    def chunk(self, kind: str, version: str, index: int) -> bytes | None:
        """Return ``texts`` or ``tokens`` of a chunk of samples; None if there is no such chunk any more."""
        with self._lock:
            own = self._samples.tokens if kind == "tokens" else self._samples.texts
            chunks = own.packed() if version == str(self._version) else []
            return chunks[index] if 0 <= index < len(chunks) else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "multitask-rl", ""
    timeout = 30
    server: LiveServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ("127.0.0.1", "localhost"):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"this server has the names 127.0.0.1 and localhost")
            return
        secret, _, path = self.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(secret.encode(), self.server.secret.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"open the address that `multitask-rl watch` has printed")
            return
        match path.split("/"):
            case [""]:
                self._answer(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
            case ["data.json"]:
                self._answer_data()
            case ["texts" | "tokens" as kind, version, index] if index.isdecimal():
                chunk = self.server.run.chunk(kind, version, int(index))
                if chunk is None:
                    self._answer(HTTPStatus.GONE, b"the run has gone back: the page reads it again")
                else:
                    self._answer(HTTPStatus.OK, chunk, "application/json", {"Content-Encoding": "deflate"})
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"no such page")

    def _answer_data(self) -> None:
        try:
            data, mark = self.server.run.data()
        except (MultitaskRLError, OSError) as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode(errors="replace"))
            return
        more = {"ETag": mark, "X-Next-Seconds": f"{self.server.run.wait_s:.1f}"}
        if self.headers.get("If-None-Match") == mark:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", more=more)
        else:
            self._answer(HTTPStatus.OK, data, "application/json", more)

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str = "text/plain; charset=utf-8",
        more: Mapping[str, str] | None = None,
    ) -> None:
        with suppress(ConnectionError, TimeoutError):  # the browser has gone on
            self.send_response(status)
            if status is not HTTPStatus.NOT_MODIFIED:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            for name, value in {**_HEADERS, **(more or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page of ``run`` at ``address``; ``port`` 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, run: LiveRun, title: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.run = run
        self.secret = secrets.token_urlsafe(12)
        self.page = render_shell(title, "run.js", None).encode()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a browser has gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
