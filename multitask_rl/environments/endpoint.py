"""An agent of the user's own as an environment: its requests to an OpenAI-compatible address are the turns.

``agent:file.py:run`` names a function ``run(base_url, api_key, row) -> reward``, sync or async. It runs in a
thread of the world's worker, with any framework. What it asks of ``base_url`` becomes a message to the actor,
and the actor's sampled text is the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any, ClassVar

from multitask_rl.boundary.posting import bypass_proxies
from multitask_rl.data.render import joined
from multitask_rl.environments.base import Earned, Message, Opening, StepResult, World
from multitask_rl.environments.calls import read_calls
from multitask_rl.errors import PluginError
from multitask_rl.plugins import ENVIRONMENTS, locate
from multitask_rl.records import ROLES

MODEL = "actor"
"""Name of the model at the address; any other name in a request means the same."""
_PATH = "/v1/chat/completions"
_MAX_REQUEST_BYTES = 64 << 20
_IDLE_S = 60.0


class RefusedError(Exception):
    """A request that gets no answer; ``status`` is that of the HTTP response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Request:
    """One request of an agent; ``answer`` becomes the assistant's message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call: bool = True
    max_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    digest: bytes = b""
    """Hash of the body; equal for a request that the client repeats."""
    answer: Future[dict[str, Any]] = field(default_factory=Future)


class AgentWorld(World):
    """An episode whose other side is a program: it runs in a thread of its own and asks for answers.

    A request whose messages begin with those of the former one and its answer goes on with the conversation.
    Any other request (another agent of the program, a shortened history, other tools) begins it anew.
    Requests that arrive together are answered one after the other.
    """

    grace_s = 5.0
    """Seconds that the program has for its reward after a limit ended the episode."""

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(16)
        self._requests: SimpleQueue[Request | None] = SimpleQueue()  # None: the program ended
        self._lock = threading.Lock()
        self._open: list[Request] = []
        self._asked: dict[bytes, Request] = {}
        """The last request with each digest."""
        self._is_over = False
        self._now: Request | None = None
        self._earned: Earned = None
        self._error: Exception | None = None
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run_agent, name="agent", daemon=True)
        self._row: Mapping[str, Any] = {}

    def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        """Run the program on a row and return its reward; a coroutine runs in an event loop of its own."""
        raise NotImplementedError

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Start the program; its first request is the prompt."""
        self._row = row
        ENDPOINT.register(self._key, self)
        self._thread.start()
        request = self._next()
        if request is None:
            raise RuntimeError("the agent ended without a request for an answer")
        return _opening(request)

    def step(self, message: Message) -> StepResult:
        """Answer the open request, and wait for the next or for the end."""
        assert self._now is not None, "step without an open request"
        answered, self._now = self._now, None
        answer, info = _assistant(message, answered)
        history = [_plain(m) for m in [*answered.messages, answer]]
        with self._lock:
            self._open.remove(answered)
        answered.answer.set_result(answer)
        request = self._next()
        if request is None:
            return StepResult(done=True, info=info)
        known, new = request.messages[: len(history)], request.messages[len(history) :]
        if new and request.tools == answered.tools and [_plain(m) for m in known] == history:
            said = [_for_template(m) for m in new]
            return StepResult(messages=said, info=info, max_tokens=request.max_tokens, stop=request.stop)
        return StepResult(anew=_opening(request), info=info)

    def earned(self) -> Earned:
        """Return the program's reward; None if it is cut off by a limit and gives none in ``grace_s``."""
        if self._now is not None:  # a limit ended the episode
            self._refuse()
            self._thread.join(self.grace_s)
            self._error = None
        if self._error is not None:
            raise self._error
        return self._earned

    def close(self) -> None:
        """End the episode's program: refuse further requests, cancel an async program, wait for its end.

        The wait has no limit here: if the program goes on for more than ``turn_timeout_s``, the pool takes
        the worker process for hanging, gives it no further episodes, and kills it.
        """
        ENDPOINT.forget(self)
        self._refuse()
        self._requests.put(None)  # a reset or step that waits in another thread ends
        self._stop()
        if self._thread.ident is not None:
            self._thread.join()

    def ask(self, request: Request, *, is_repeated: bool = False) -> dict[str, Any]:
        """Hand ``request`` to the actor and return its message; called by the program's threads.

        ``is_repeated``: the client has lost the answer to the same request, which it gets now.

        Raises:
            RefusedError: the episode is over.
        """
        with self._lock:
            if self._is_over:
                raise RefusedError(410, "the episode is over")
            known = self._asked.get(request.digest) if is_repeated else None
            if known is None:
                self._open.append(request)
                self._asked[request.digest] = request
                self._requests.put(request)
        return dict((known or request).answer.result())

    def _next(self) -> Request | None:
        """Wait for the next request; None = the program ended."""
        self._now = self._requests.get()
        if self._now is None and self._error is not None:
            raise self._error
        return self._now

    def _refuse(self) -> None:
        with self._lock:
            self._is_over = True
            refused, self._open = self._open, []
        for request in refused:
            request.answer.set_exception(RefusedError(410, "the episode is over"))

    def _run_agent(self) -> None:
        try:
            value = self.run(f"{ENDPOINT.url()}/{self._key}/v1", self._key, self._row)
            if inspect.isawaitable(value):
                with asyncio.Runner() as runner:
                    loop = runner.get_loop()
                    task = loop.create_task(_wait_for(value))
                    self._stop = lambda: _cancel(loop, task)
                    value = runner.run(_wait_for(task))
            self._earned = value
        except Exception as error:  # noqa: BLE001 - the boundary where an agent's error becomes data
            self._error = error
        except BaseException as error:  # noqa: BLE001 - it must not end the worker
            self._error = RuntimeError(f"the agent ended with {type(error).__name__}: {error}")
        finally:
            self._requests.put(None)


def _opening(request: Request) -> Opening:
    messages = [_for_template(m) for m in request.messages]
    return Opening(
        messages=messages,
        tools=request.tools,
        is_whole=True,
        max_tokens=request.max_tokens,
        stop=request.stop,
    )


async def _wait_for(value: Any) -> Any:
    return await value


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the program has ended
        loop.call_soon_threadsafe(task.cancel)


class Agent(AgentWorld):
    """``agent:``: a function of the user's own, ``run(base_url, api_key, row, **arguments)``.

    It returns the reward (a number, a mapping of numbers, None = unscored). An exception counts as a failure
    of the infrastructure, so the function must catch errors that the actor causes. Its requests may set
    ``max_tokens`` and ``stop``; other sampling settings are those of the run.
    """

    expects: ClassVar[str] = "'agent:file.py:function' or 'agent:package.module:function'"
    target: ClassVar[str] = ""
    where: ClassVar[str] = ""
    function: ClassVar[Callable[..., Any]]

    @dataclass(kw_only=True, slots=True)
    class Config:
        """What the function gets beside address, key and row, and how long it has at the end."""

        arguments: dict[str, Any] = field(default_factory=dict)
        """Further arguments of the function, by name."""
        grace_s: float = 5.0
        """Seconds that the function has to return its reward after a limit of the task (``max_turns``,
        ``max_response_tokens``) ended the episode, at most half of ``turn_timeout_s``; then it earned nothing
        (``unfinished`` of the reward ``environment``)."""

    def __init_subclass__(cls) -> None:
        """Find the function ``target``; ``build_foreign`` makes a subclass per reference.

        Raises:
            PluginError: there is none, or it does not take an address, a key and a row.
        """
        found = locate(cls.target, ENVIRONMENTS, cls.where).value
        try:
            if isinstance(found, type):
                raise TypeError("it is a class")
            inspect.signature(found).bind_partial("base_url", "api_key", {})
        except (TypeError, ValueError) as error:
            message = f"{cls.where}: {cls.target!r} is no function run(base_url, api_key, row) ({error})"
            raise PluginError(message) from error
        cls.function = staticmethod(found)

    def __init__(self, config: Agent.Config) -> None:
        super().__init__()
        self.grace_s = config.grace_s
        self._arguments = config.arguments
        try:
            inspect.signature(self.function).bind("base_url", "api_key", {}, **config.arguments)
        except TypeError as error:
            raise PluginError(f"arguments: {self.target!r}: {error}") from error

    def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        """Call the function."""
        return self.function(base_url, api_key, row, **self._arguments)


class Endpoint:
    """The server of this process, started on first use, and the open episodes by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._worlds: dict[str, AgentWorld] = {}

    def url(self) -> str:
        """Return the address, without a path."""
        with self._lock:
            if self._server is None:
                bypass_proxies()
                self._server = _Server(("127.0.0.1", 0), _Handler)
                serve = self._server.serve_forever
                threading.Thread(target=serve, name="endpoint", daemon=True).start()
            return f"http://127.0.0.1:{self._server.server_port}"

    def register(self, key: str, world: AgentWorld) -> None:
        """Hand requests with ``key`` to the episode ``world``, until ``forget``.

        A request has its key in the path, as session or as API key. Further calls add keys to an episode.
        """
        with self._lock:
            self._worlds[key] = world

    def forget(self, world: AgentWorld) -> None:
        """Refuse requests with any key of ``world`` from now on."""
        with self._lock:
            self._worlds = {key: one for key, one in self._worlds.items() if one is not world}

    def world(self, keys: Sequence[str]) -> AgentWorld:
        """Return the world of the first known key.

        Raises:
            RefusedError: none is known.
        """
        with self._lock:
            for key in keys:
                if key in self._worlds:
                    return self._worlds[key]
        raise RefusedError(401, "no open episode has this key")


ENDPOINT = Endpoint()
"""The endpoint of this process."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


class _Handler(BaseHTTPRequestHandler):
    """``POST /v1/chat/completions``; the key stands before ``/v1``, as session, or as bearer token."""

    protocol_version = "HTTP/1.1"
    close_connection = True  # the base class sets it per request
    timeout = _IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}
        if self.path.endswith("/models"):
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send_error(RefusedError(404, f"no {self.path}; there is POST {_PATH}"))

    def do_POST(self) -> None:
        try:
            length = self.headers.get("Content-Length") or ""
            if not (length.isdecimal() and 0 < int(length) <= _MAX_REQUEST_BYTES):
                self.close_connection = True
                raise RefusedError(400, f"a body of 1 to {_MAX_REQUEST_BYTES} bytes is expected")
            data = self.rfile.read(int(length))
            path = self.path.partition("?")[0]
            if not path.endswith(_PATH):
                raise RefusedError(
                    404, f"no {path}; there is POST {_PATH}, so set your client to chat completions"
                )
            bearer = self.headers.get("Authorization", "").partition(" ")[2].strip()
            session = self.headers.get("X-Session-ID", "")
            world = ENDPOINT.world([path.removesuffix(_PATH).strip("/"), session, bearer])
            try:
                body = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise RefusedError(400, f"the body is no JSON: {error}") from error
            asked = _read_request(body)
            asked.digest = hashlib.sha256(data).digest()
            is_repeated = self.headers.get("X-Stainless-Retry-Count", "0") != "0"  # of the openai client
            message = world.ask(asked, is_repeated=is_repeated)
        except RefusedError as error:
            self._send_error(error)
            return
        answer = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        answer["model"] = body.get("model") or MODEL
        reason, usage = message.pop("finish_reason"), message.pop("usage")
        if body.get("stream"):
            options = body.get("stream_options") or {}
            self._stream(answer, message, reason, usage if options.get("include_usage") else None)
        else:
            choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
            self._send(200, {**answer, "object": "chat.completion", "choices": [choice], "usage": usage})

    def _stream(
        self, answer: dict[str, Any], message: dict[str, Any], reason: str, usage: dict[str, int] | None
    ) -> None:
        parts: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
        if message["content"]:
            parts.append(({"content": message["content"]}, None))
        for index, call in enumerate(message.get("tool_calls", [])):
            parts.append(({"tool_calls": [{"index": index, **call}]}, None))
        chunks = []
        for delta, finish in [*parts, ({}, reason)]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            chunks.append({**answer, "object": "chat.completion.chunk", "choices": [choice]})
        if usage is not None:
            chunks.append({**chunks[-1], "choices": [], "usage": usage})
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._write(200, "text/event-stream", f"{lines}data: [DONE]\n\n".encode())

    def _send_error(self, error: RefusedError) -> None:
        kind = "invalid_request_error"
        self._send(error.status, {"error": {"message": str(error), "type": kind, "code": error.status}})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(body).encode())

    def _write(self, status: int, kind: str, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the agent no longer listens
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def _read_request(body: Any) -> Request:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RefusedError(400, "'messages' has to be a list with at least one message")
    if body.get("n") not in (None, 1):
        raise RefusedError(400, "only n=1: every request is one turn of one episode")
    if body.get("functions"):
        raise RefusedError(400, "'functions' is not known; give 'tools'")
    if body.get("chat_template_kwargs"):
        raise RefusedError(
            400, "'chat_template_kwargs' is a key of the task: set it in the tasks file, not in a request"
        )
    messages = []
    for message in body["messages"]:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise RefusedError(
                400, f"a message is an object with a 'role' of {', '.join(ROLES)}, got {message!r:.200}"
            )
        calls = message.get("tool_calls") or []
        if not (isinstance(calls, list) and all(map(_has_function, calls))):
            raise RefusedError(
                400, f"'tool_calls' has to be a list of calls of functions, got {calls!r:.200}"
            )
        role = "system" if message["role"] == "developer" else message["role"]
        messages.append({**message, "role": role, "content": _text(message.get("content"))})
    tools = body.get("tools") or []
    if not (isinstance(tools, list) and all(map(_has_function, tools))):
        raise RefusedError(400, f"'tools' has to be a list of functions, got {tools!r:.200}")
    limits = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise RefusedError(400, "'max_tokens' and 'max_completion_tokens' have to be whole numbers above 0")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise RefusedError(400, "'stop' has to be a text or a list of texts")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError(400, "'stream_options' has to be an object")
    return Request(
        messages=messages,
        tools=tools,
        may_call=bool(tools) and body.get("tool_choice") != "none",
        max_tokens=min(limits, default=0),
        stop=stop,
    )


def _has_function(value: Any) -> bool:
    """Whether ``value``, a tool or a call of one, is a function with a name."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _text(content: Any) -> str:
    """Return a message's content as one text."""
    text = joined(content)
    if text is None or isinstance(text, str):
        return text or ""
    raise RefusedError(400, "the content of a message has to be text: the actor reads nothing else")


def _assistant(message: Message, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the actor's message as the agent gets it, and the facts on its calls."""
    text, reason = str(message.get("content") or ""), str(message.get("finish_reason") or "stop")
    usage = {"prompt_tokens": 0, "completion_tokens": 0, **message.get("usage", {})}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    answer: dict[str, Any] = {"role": "assistant", "content": text, "finish_reason": reason, "usage": usage}
    if not request.may_call:
        return answer, {}
    said, calls = read_calls(text)
    if not calls or any(call.problem for call in calls):  # the agent gets the text, and judges it
        return answer, {"wrong_calls": {"bad_json": 1}} if calls else {}
    answer |= {"content": said, "finish_reason": "tool_calls", "tool_calls": []}
    for call in calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        identity = f"call_{secrets.token_hex(8)}"
        answer["tool_calls"].append({"id": identity, "type": "function", "function": function})
    known = {tool["function"]["name"] for tool in request.tools}
    facts = {
        "tool_calls": dict(Counter(call.name for call in calls if call.name in known)),
        "wrong_calls": {"unknown_tool": sum(call.name not in known for call in calls)},
    }
    return answer, {key: own for key, own in facts.items() if any(own.values())}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a message that its meaning depends on, for comparison."""
    calls = []
    for call in map(_call_for_template, message.get("tool_calls") or []):
        calls.append((call.get("id"), call["function"].get("name"), call["function"].get("arguments")))
    kept = {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    return {"role": message["role"], "content": message["content"], "calls": calls, **kept}


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it: no empty keys, arguments of calls as an object."""
    kept = {k: v for k, v in message.items() if v is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_call_for_template(call) for call in kept["tool_calls"]]
    return kept


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    with contextlib.suppress(TypeError, ValueError):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
