"""Environments of other libraries, used as they are.

``trl:``: a class, or a function that makes one, of TRL's ``environment_factory``.
``openenv:<address or directory>``: a server of OpenEnv, running or started here.
``verifiers:<taskset>``: a taskset or environment of verifiers, of any number of turns.
``reasoning_gym:<data set>``: a data set's questions, answered until the verifier is satisfied.
``agent:``: see ``endpoint.py``. Each becomes a ``World`` with a ``Config``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml

from multitask_rl.boundary.posting import bypass_proxies
from multitask_rl.data.reasoning_gym import answer_in, create_generator, entry_of, score_of
from multitask_rl.environments.base import Earned, Message, Opening, StepResult, World
from multitask_rl.environments.calls import CallCounts, read_calls
from multitask_rl.environments.endpoint import ENDPOINT, MODEL, Agent, AgentWorld
from multitask_rl.environments.tools import ToolWorld
from multitask_rl.errors import DataError, PluginError, import_extra
from multitask_rl.scoring.foreign import import_verifiers


class TrlWorld(ToolWorld):
    """An environment of TRL's ``environment_factory`` for one episode.

    The reward comes from its method ``get_reward``, from a reward function of TRL that reads environments, or
    from both; then each counts under its name. TRL calls such a function with one element per episode. Here
    it gets lists of one element: ``environments``, ``prompts``, ``completions`` (the messages of the episode)
    and every column of the row.

    Args:
        environment: the instance, whose public methods are the tools.
        where: its place in the tasks file, for messages.
        run: calls a function, also an async one, and returns its result.
        function: the reward function; None = none.
    """

    def __init__(
        self, environment: Any, where: str, run: Callable[..., Any], function: Callable[..., Any] | None
    ) -> None:
        super().__init__(environment, where, run)
        self._function = function
        self._row: Mapping[str, Any] = {}
        self._said: list[Message] = []

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin the episode."""
        self._row = row
        return super().reset(row)

    def step(self, message: Message) -> StepResult:
        """Make the calls of the answer."""
        result = super().step(message)
        self._said += [message, *result.messages]
        return result

    def earned(self) -> Earned:
        """Return what the environment and the function give; None = both leave the episode unscored."""
        own = super().earned()
        if self._function is None:
            return own
        columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
        prompts = [self._row.get("prompt")]
        given = {
            "environments": [self._environment],
            "prompts": prompts,
            "completions": [self._said],
            **columns,
        }
        parameters = inspect.signature(self._function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        (value,) = self._run(self._function, **given)
        if own is None or value is None:
            return value if own is None else own
        parts = own if isinstance(own, Mapping) else {type(self._environment).__name__: own}
        return {**parts, self._function.__name__: value}


class VerifiersWorld(AgentWorld):
    """A taskset or environment of verifiers (>= 0.4, its v1 API), run by the library itself.

    Its programs ask a model at an address; here that is the endpoint of the actor. What is earned are the
    weighted rewards of the actor's last trace.
    """

    expects: ClassVar[str] = "'verifiers:<taskset id>'"
    target: ClassVar[str] = ""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The environment, and how a row finds its task."""

        env: dict[str, Any] = field(default_factory=dict)
        """Keys of the environment's configuration (``taskset``, ``id``, its agents, ``timeout``). An agent
        without a ``runtime`` runs as a process of this machine; one without a ``harness`` has the taskset's,
        else ``null``, which can only talk and call the task's tools."""
        role: str = ""
        """Agent that the actor plays; empty = the only one without a ``client``."""
        column: str = "idx"
        """Column that holds the task's ``idx`` or ``id``; a row without it is matched by its prompt."""
        grace_s: float = 5.0
        """Seconds for the rewards after a limit (turns, tokens) ended the episode, at most half of
        ``turn_timeout_s``."""

    def __init__(self, config: VerifiersWorld.Config) -> None:
        super().__init__()
        self.grace_s = config.grace_s
        self._served = _serve_verifiers(self.target, config)

    def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Earned:
        """Run one episode of the library."""
        served = self._served
        running = served.start(served.task(row), self._join)
        self._stop = running.cancel
        episode = running.result()
        traces = [t for t in episode.traces if t.agent.name in (served.role, None, "")]
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if errors and not self._is_over:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        if not traces or not traces[-1].rewards:
            return None
        return {name: part.value for name, part in traces[-1].rewards.items() if part is not None}

    def _join(self, trace: Any) -> None:
        if trace.agent.name in (self._served.role, None, ""):
            ENDPOINT.register(trace.id, self)  # the library sends it with every request of the trace


class _ServedVerifiers:
    """An environment of verifiers with what its episodes share, in an event loop of its own."""

    def __init__(self, target: str, config: VerifiersWorld.Config) -> None:
        self._library, loaders = import_verifiers(f"'verifiers:{target}'")
        try:
            given = {**config.env, "taskset": {"id": target, **config.env.get("taskset", {})}}
            kind = loaders.env_config_type(target, given.get("id", ""))
            own = loaders.default_harness_id(target)
            harness = {"id": "null" if own == "bash" else own}  # bash would run the actor's commands here
            roles = [
                n for n, f in kind.model_fields.items() if isinstance(f.default, self._library.AgentConfig)
            ]
            for role in roles:
                defaults = {"runtime": {"type": "subprocess"}}
                if kind.model_fields[role].default.harness is None:
                    defaults["harness"] = harness
                given[role] = {**defaults, **given.get(role, {})}
            ours = [config.role] if config.role else [r for r in roles if "client" not in given[r]]
            if len(ours) != 1 or ours[0] not in roles:
                raise ValueError(
                    f"which of the agents {roles} is the actor? Set config.role, and give every other one a "
                    f"client: env: {{{(roles or ['agent'])[-1]}: {{client: {{base_url: ...}}, model: ...}}}}"
                )
            self.role: str = ours[0]
            self._env = loaders.load_environment(loaders.resolve_env_config(given))
            self._rest = iter(self._env.taskset)
            self._tasks: list[Any] = list(self._rest) if self._env.taskset.bounded else []
        except Exception as error:
            raise PluginError(
                f"the verifiers taskset {target!r} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self._column = config.column
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._is_ready: Future[None] = Future()
        threading.Thread(target=self._loop.run_until_complete, args=(self._hold(),), daemon=True).start()
        self._is_ready.result()

    def task(self, row: Mapping[str, Any]) -> Any:
        """Return the row's task."""
        key = row.get(self._column)
        if not self._env.taskset.bounded:
            if not isinstance(key, int) or key < 0:
                raise DataError(f"an endless taskset needs the column {self._column!r} with the task's index")
            with self._lock:
                while len(self._tasks) <= key:
                    self._tasks.append(next(self._rest))
            return self._tasks[key]
        for task in self._tasks:
            found = (task.data.idx, task.data.id) if self._column in row else (task.data.prompt_text,)
            if (key if self._column in row else row.get("prompt")) in found:
                return task
        what = f"column {self._column!r}: {key!r}" if self._column in row else "its prompt"
        raise DataError(f"the taskset has no task for the row ({what})")

    def start(self, task: Any, on_trace: Callable[[Any], None]) -> Future[Any]:
        """Begin an episode."""
        client = self._library.EvalClientConfig(base_url=f"{ENDPOINT.url()}/v1", api_key_var="UNUSED")
        context = self._library.ModelContext(model=MODEL, client=client)
        episode = self._env.run_episode(task, context, on_trace=on_trace)
        return asyncio.run_coroutine_threadsafe(episode, self._loop)

    async def _hold(self) -> None:
        try:
            async with self._env.serving():
                self._is_ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - it is raised where the environment is built
            self._is_ready.set_exception(error)


_verifiers: dict[str, _ServedVerifiers] = {}
_verifiers_lock = threading.Lock()


def _serve_verifiers(target: str, config: VerifiersWorld.Config) -> _ServedVerifiers:
    """Return the environment, which this process builds once."""
    key = repr((target, asdict(config)))
    with _verifiers_lock:
        if key not in _verifiers:
            _verifiers[key] = _ServedVerifiers(target, config)
        return _verifiers[key]


class OpenEnvWorld(World):
    """A session with a server of OpenEnv, at an address or started here from its directory.

    The actor acts in text if the action has one required field, a text, or ``action`` names the field.
    Otherwise it calls tools: those of a server of tools (MCP), or ``act`` with the fields of the action.
    """

    expects: ClassVar[str] = "'openenv:http://host:port' or 'openenv:directory of an environment'"
    target: ClassVar[str] = ""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How answers of the actor become actions, and observations become messages to it."""

        action: str = ""
        """Field of the action that the actor's answer fills. Empty: the only required field if it is a text;
        else the actor calls tools."""
        observation: str = ""
        """Field of the observation that the actor reads; dots lead into lists and mappings, as in
        ``messages.0.content``. Empty: the only field if it is a text; else the actor reads the observation as
        JSON."""
        columns: list[str] = field(default_factory=lambda: ["seed"])
        """Columns of the row that the server's ``reset`` gets as arguments; those that a row lacks are left
        out."""
        timeout_s: float = 60.0
        """Longest wait for an answer of the server, in seconds."""

    def __init__(self, config: OpenEnvWorld.Config) -> None:
        self.config = config
        self._library = import_extra("openenv", "openenv", f"'openenv:{self.target}' needs openenv")
        is_address = self.target.partition("://")[0] in ("http", "https", "ws", "wss")
        bypass_proxies()  # also of the client's web sockets
        self._url = self.target.rstrip("/") if is_address else _start_openenv(self.target)
        self._client: Any = None
        self._field = ""
        self._tools: list[dict[str, Any]] = []
        self._is_mcp = False

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Open a session and reset it."""
        url = self._url.replace("ws", "http", 1) if self._url.startswith("ws") else self._url
        with urllib.request.urlopen(f"{url}/schema", timeout=self.config.timeout_s) as answer:
            schema = json.load(answer)["action"]
        client = self._library.GenericEnvClient(base_url=self._url, message_timeout_s=self.config.timeout_s)
        self._client = client.sync()
        try:
            result = self._client.reset(**{name: row[name] for name in self.config.columns if name in row})
        except RuntimeError as error:
            if "CAPACITY_REACHED" in str(error):
                error.add_note("raise max_concurrent_envs in the server's create_app")
            raise
        fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        required = [name for name in schema.get("required", []) if name in fields]
        self._is_mcp = schema.get("title") in ("Action", "CallToolAction", "ListToolsAction")
        if self.config.action:
            self._field = self.config.action
        elif self._is_mcp:
            listed = self._client.step({"type": "list_tools"}).observation["tools"]
            self._tools = [_tool(t["name"], t["description"], t["input_schema"]) for t in listed]
        elif len(required) == 1 and fields[required[0]].get("type") == "string":
            self._field = required[0]
        else:
            parameters = {**schema, "properties": fields}
            self._tools = [_tool("act", schema.get("description") or "Act in the environment.", parameters)]
        text = self._text(result.observation)
        return Opening(messages=[{"role": "user", "content": text}] if text else [], tools=self._tools)

    def step(self, message: Message) -> StepResult:
        """Send the actor's action, or its calls one after the other."""
        text = str(message["content"])
        if self._field:
            result, said = self._act({self._field: text.strip()})
            return self._answer([{"role": "user", "content": said}], result.done, result.reward, {})
        _, calls = read_calls(text)
        names = [tool["function"]["name"] for tool in self._tools]
        messages: list[Message] = []
        rewards: list[float] = []
        counts, is_done = CallCounts(left=self.calls_left), not calls
        for call in calls:
            said = counts.check(call, names)
            if not said:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
                result, said = self._act(action if self._is_mcp else call.arguments)
                rewards += [] if result.reward is None else [float(result.reward)]
                is_done = result.done
                if said.startswith(_BAD_ARGUMENTS):
                    counts.refuse(call)
                elif said.startswith(_ERROR):
                    counts.failed[call.name] += 1
            messages.append({"role": "tool", "name": call.name, "content": said})
            if is_done:
                break
        self.calls_left = counts.left
        return self._answer(messages, is_done, sum(rewards) if rewards else None, counts.info)

    def _act(self, action: dict[str, Any]) -> tuple[Any, str]:
        """Take one step and return its result and what the actor reads of it."""
        try:
            result = self._client.step(action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return SimpleNamespace(reward=None, done=False), f"{_BAD_ARGUMENTS} {json.dumps(action)}"
        seen = result.observation
        if not self._is_mcp:
            return result, self._text(seen)
        if seen.get("error"):
            kind = _BAD_ARGUMENTS if seen["error"].get("error_type") == "invalid_args" else _ERROR
            return result, f"{kind} {seen['error'].get('message', seen['error'])}"
        value = seen.get("result")
        if isinstance(value, dict) and isinstance(value.get("content"), list):
            return result, "\n".join(str(part.get("text", part)) for part in value["content"])
        return result, value if isinstance(value, str) else json.dumps(value, default=str)

    def _answer(
        self, messages: list[Message], is_done: bool, reward: float | None, info: dict[str, Any]
    ) -> StepResult:
        if is_done:
            info = {**info, "state": self._client.state()}
        return StepResult(messages=messages, done=is_done, reward=reward, info=info)

    def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            self._client.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        value: Any = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward")}
        if self.config.observation:
            for part in self.config.observation.split("."):
                value = value[int(part)] if isinstance(value, list) else value[part]
        elif len(value) == 1:
            (only,) = value.values()
            value = only if isinstance(only, str) else value
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""


def _tool(name: str, description: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description or "", "parameters": dict(parameters)}
    return {"type": "function", "function": function}


_ERROR = "Error:"
_BAD_ARGUMENTS = "Error: no valid arguments:"
_START_S = 120.0
_BOOT = """
import os, socket, sys, threading, uvicorn
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with its parent
sys.path.insert(0, "")
listening = socket.socket(fileno=int(sys.argv[2]))
uvicorn.Server(uvicorn.Config(sys.argv[1], log_level="warning")).run(sockets=[listening])
"""


_openenv: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
_openenv_lock = threading.Lock()


def _start_openenv(directory: str) -> str:
    """Return the address of this process's server of the environment in ``directory``."""
    place = Path(directory).expanduser().resolve()
    manifest = place / "openenv.yaml"
    if not manifest.is_file():
        raise PluginError(f"no address and no directory with openenv.yaml: {directory!r}")
    with _openenv_lock:
        process, url = _openenv.get(str(place), (None, ""))
        if process is not None and process.poll() is None:
            return url
        app = str(yaml.safe_load(manifest.read_text()).get("app") or "server.app:app")
        with socket.create_server(("127.0.0.1", 0)) as listening:
            number = listening.fileno()
            command = [sys.executable, "-c", _BOOT, app, str(number)]
            process = subprocess.Popen(command, cwd=place, stdin=subprocess.PIPE, stdout=2, pass_fds=[number])
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        _openenv[str(place)] = process, url
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=_START_S):
            return url
    process.kill()
    raise PluginError(f"the server of {place} (app {app!r}) did not start; its output is on standard error")


class ReasoningGymWorld(World):
    """A question of a reasoning-gym data set, which the actor may answer several times.

    The episode ends with an answer of the full score, 1, or with the last try. After any other answer the
    actor is told its score. The reward is the score of the last answer.
    """

    expects: ClassVar[str] = "'reasoning_gym:<data set>'"
    target: ClassVar[str] = ""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How often the actor may answer, and what it is told."""

        tries: int = 3
        """Most answers to a question, at least 1."""
        feedback: str = "Your answer scores {score:.2f} of 1. Try again."
        """What the actor is told after an answer that another may follow; ``{score}`` is in [0, 1]."""
        answer_tag: str = "answer"
        """Name of the tag around the answer: the content of the last ``<answer>...</answer>`` is scored. If a
        text has no such tag, or the name is empty, the whole text is scored."""
        dataset: dict[str, Any] = field(default_factory=dict)
        """Settings of the data set by name, as its own configuration class has them. They matter only where
        the verifier depends on them; ``dataset_config`` of the task makes the rows."""

        def __post_init__(self) -> None:
            if self.tries < 1:
                raise ValueError(f"tries has to be at least 1, got {self.tries}")
            self.feedback.format(score=0.0)

    def __init__(self, config: ReasoningGymWorld.Config) -> None:
        self.config = config
        self._dataset = create_generator(self.target, {"size": 1, "seed": 0, **config.dataset}, "dataset")
        self._entry: dict[str, Any] = {}
        self._scores: list[float] = []

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Take the row's question, which its prompt asks."""
        missing = {"answer", "metadata"} - set(row)
        if missing:
            raise DataError(
                f"the row has no {' and no '.join(sorted(missing))}: 'reasoning_gym:' makes such rows"
            )
        self._entry = entry_of(row)
        return Opening()

    def step(self, message: Message) -> StepResult:
        """Score an answer."""
        answer = answer_in(str(message["content"]), self.config.answer_tag)
        score = score_of(self._dataset, answer, self._entry)
        self._scores.append(score)
        if score >= 1.0 or len(self._scores) == self.config.tries:
            return StepResult(done=True, info={"tries": len(self._scores)})
        return StepResult(messages=[{"role": "user", "content": self.config.feedback.format(score=score)}])

    def earned(self) -> float | None:
        """Return the score of the last answer."""
        return self._scores[-1] if self._scores else None


FOREIGN: dict[str, Any] = {
    "openenv": OpenEnvWorld,
    "verifiers": VerifiersWorld,
    "reasoning_gym": ReasoningGymWorld,
    "agent": Agent,
}
"""The worlds by prefix."""
