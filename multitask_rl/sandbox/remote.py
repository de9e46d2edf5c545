"""A client for servers that speak SandboxFusion's ``/run_code``, behind the same interface.

The server runs one file per request, without tests; this module compares the output. It refuses function
tests: the program could read tests that are appended to it. The server is responsible for the isolation.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from multitask_rl.boundary.posting import open_request
from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Ending, Outcome, Program, Sandbox, ScriptTask, StdioTask, TestResult
from multitask_rl.sandbox.cell.endings import same_text

_log = logging.getLogger(__name__)
_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_ANSWER_LIMIT = 64 << 20


class HttpSandbox(Sandbox):
    """Runs programs on a SandboxFusion-compatible server; safe to share between threads.

    Args:
        url: base address, e.g. ``http://sandbox:8080``.
        concurrency: requests at once; more wait here.
        retries: further attempts after a refused connection, a time-out or a server error.
        backoff_s: wait before the first further attempt; doubles each time.
        overhead_s: time that a request may take beyond the program's wall limit.
        check: ask the server for a trivial program first.

    Raises:
        SandboxError: ``check`` found no working server.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 8,
        retries: int = 3,
        backoff_s: float = 0.2,
        overhead_s: float = 10.0,
        check: bool = True,
    ) -> None:
        if concurrency < 1 or retries < 0:
            given = f"{concurrency!r} and {retries!r}"
            raise ValueError(f"concurrency must be >= 1 and retries >= 0, got {given}")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {url!r}")
        self._url = url.rstrip("/")
        self._retries, self._backoff_s, self._overhead_s = retries, backoff_s, overhead_s
        self._executor = ThreadPoolExecutor(concurrency, thread_name_prefix="sandbox-http")
        self._room = threading.BoundedSemaphore(64 * concurrency)
        self._is_closed = threading.Event()
        if check:
            outcome = self._run(Program(source="print(6 * 7)"))
            if outcome.ending is not Ending.completed or outcome.stdout.strip() != b"42":
                self.close()
                problem = outcome.message or f"a trivial program ended as {outcome.ending}"
                raise SandboxError(f"no working sandbox server at {self._url}: {problem}")

    def submit(self, program: Program) -> Future[Outcome]:
        """See ``Sandbox``; ``ValueError`` for a task that needs tests inside a process of the program."""
        if not isinstance(program.task, (ScriptTask, StdioTask)):
            raise ValueError(
                f"a {type(program.task).__name__} cannot be judged by a remote server without handing it the "
                "answers; use the sandbox 'namespaces' for function tests"
            )
        while not self._room.acquire(timeout=0.2):
            if self._is_closed.is_set():
                break
        if self._is_closed.is_set():
            raise SandboxError("the sandbox is closed")
        future = self._executor.submit(self._run, program)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Cancel waiting programs; running ones end by themselves."""
        self._is_closed.set()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, program: Program) -> Outcome:
        task = program.task
        if not isinstance(task, StdioTask):
            return self._execute(program, task.stdin if isinstance(task, ScriptTask) else b"")
        outcomes, tests = [], []
        for test in task.tests:
            outcome = self._execute(program, test.stdin)
            if outcome.ending is Ending.infrastructure_error:
                return outcome
            ending = outcome.ending
            if ending is Ending.completed:
                is_right = same_text(outcome.stdout, test.stdout.encode(), task.float_tolerance)
                ending = Ending.passed if is_right else Ending.failed
            outcomes.append(outcome)
            tests.append(TestResult(ending=ending, message=outcome.message, wall_s=outcome.wall_s))
        shown = next((i for i, test in enumerate(tests) if not test.is_passed), len(tests) - 1)
        return replace(
            outcomes[shown],
            ending=tests[shown].ending,
            tests=tuple(tests),
            wall_s=sum(outcome.wall_s for outcome in outcomes),
        )

    def _execute(self, program: Program, stdin: str | bytes) -> Outcome:
        request = {
            "code": _text(program.source),
            "language": "python",
            "stdin": _text(stdin),
            "run_timeout": program.limits.wall_s,
            "memory_limit_MB": program.limits.mem_mb,
        }
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(self._backoff_s * 2 ** (attempt - 1))
            if self._is_closed.is_set():
                problem = "the sandbox was closed"
                break
            try:
                posted = urllib.request.Request(
                    f"{self._url}/run_code",
                    json.dumps(request).encode(),
                    {"Content-Type": "application/json"},
                )
                with open_request(posted, timeout=program.limits.wall_s + self._overhead_s) as response:
                    answer = json.loads(response.read(_ANSWER_LIMIT))
                if not isinstance(answer, dict):
                    raise ValueError(f"the server answers {type(answer).__name__}, not an object")
                if answer.get("status") != "SandboxError":
                    return replace(_outcome(answer, program), retries=attempt)
                problem = f"the server reports {answer.get('message')!r}"
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in _RETRIED_STATUS:
                        problem = f"the server answers {error.code} {error.reason}"
                        break
                    problem = f"{type(error).__name__}: {error}"
            except (OSError, ValueError, KeyError, RecursionError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            _log.warning("sandbox server %s: %s (attempt %d)", self._url, problem, attempt + 1)
        return Outcome(ending=Ending.infrastructure_error, message=problem, retries=attempt)


def _text(data: str | bytes) -> str:
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    return text.encode("utf-8", "replace").decode()


def _outcome(answer: dict[str, Any], program: Program) -> Outcome:
    """Return the outcome in a server's answer; raise ``ValueError`` where it has another form."""
    result = answer.get("run_result") or answer.get("compile_result") or {}
    if not isinstance(result, dict):
        raise ValueError(f"run_result is {type(result).__name__}, not an object")
    texts = [result.get(key) or "" for key in ("stdout", "stderr")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stdout and stderr are {[type(text).__name__ for text in texts]}, not text")
    stdout, stderr = (text.encode("utf-8", "replace") for text in texts)
    code, wall_s = result.get("return_code"), result.get("execution_time") or 0.0
    if code is not None and (type(code) is not int or abs(code) > 1 << 31):
        raise ValueError(f"return_code is {code!r:.40}, not a status")
    if type(wall_s) not in (int, float) or not 0 <= wall_s < 1 << 31:
        raise ValueError(f"execution_time is {wall_s!r:.40}, not a number of seconds")
    last = stderr.decode("utf-8", "replace").rstrip().rpartition("\n")[2][:500]
    limits = program.limits
    if result.get("status") == "TimeLimitExceeded":
        ending, message = Ending.timeout, f"wall-clock limit of {limits.wall_s:g} s"
    elif len(stdout) > limits.stdout_bytes:
        ending, message = Ending.output_limit, f"more than {limits.stdout_bytes} bytes of output"
    elif code == 0 and answer.get("status") == "Success":
        ending, message = Ending.completed, ""
    elif last.startswith("MemoryError"):
        ending, message = Ending.memory_limit, last
    elif last.startswith(("SyntaxError", "IndentationError", "TabError")):
        ending, message = Ending.compile_error, last
    else:
        ending, message = Ending.runtime_error, last or f"exit status {code}"
    return Outcome(
        ending=ending,
        message=message,
        wall_s=float(wall_s),
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        stdout=stdout[: limits.stdout_bytes],
        stderr=stderr[: limits.stderr_bytes],
        stdout_length=len(stdout),
        stderr_length=len(stderr),
    )
