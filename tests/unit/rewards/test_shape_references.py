"""A schema is data: what it refers to elsewhere is not fetched."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Score
from multitask_rl.testing import make_rollout
from multitask_rl_rewards.shape import JsonSchema


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    httpd = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/schema", asked
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_remote_reference_is_refused_and_never_fetched(
    server: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = server
    (tmp_path / "schema.json").write_text("{}")
    for remote in (address, f"{address}#/a", (tmp_path / "schema.json").as_uri()):
        with pytest.raises(ConfigError, match="not fetched"):
            JsonSchema(JsonSchema.Config(schema={"properties": {"a": {"$ref": remote}}}))
        row = {"schema": {"type": "array", "allOf": [{"$ref": remote}], "contains": {"$ref": remote}}}
        [result] = JsonSchema(JsonSchema.Config()).score([make_rollout("[1]", row=row)])
        assert isinstance(result, Failure)
        assert "not fetched" in result.message
    assert asked == []


def test_references_inside_the_schema_work() -> None:
    schema = {
        "$defs": {"n": {"type": "integer"}},
        "items": {"$ref": "#/$defs/n"},
        "$id": "http://a.example/s",
    }
    [good, bad] = JsonSchema(JsonSchema.Config(schema=schema)).score(
        [make_rollout("[1]"), make_rollout('["a"]')]
    )
    assert isinstance(good, Score)
    assert isinstance(bad, Score)
    assert (good.value, bad.value) == (1.0, 0.5)
    missing = JsonSchema(JsonSchema.Config(schema={"items": {"$ref": "#/$defs/none"}}))
    [result] = missing.score([make_rollout("[1]")])
    assert isinstance(result, Failure)
