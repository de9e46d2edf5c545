"""Scripts, commands and learner ranks in forks of one process that has imported everything.

Importing torch, transformers and MLflow takes seconds for each process. ``LocalRank``, which a run starts,
and ``python script.py`` are tested as they are, too (``test_learner_ranks.py``, ``test_gpu_benchmark.py``).
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import forked; forked.main()"
LOCK = threading.Lock()


def run_forked(*arguments, cwd, env=None, timeout=300.0):
    """Do what ``python ARGUMENTS`` does, a script or ``-m MODULE``; return a ``CompletedProcess``."""
    given = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        printed = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        environment = dict(os.environ) if env is None else env
        pid = ask({"run": (given, str(cwd), environment, printed)})
        until = time.monotonic() + timeout
        while (code := ask({"poll": pid})) is None:
            if time.monotonic() > until:
                ask({"kill": pid})
                raise subprocess.TimeoutExpired(given, timeout)
            time.sleep(0.02)
        return subprocess.CompletedProcess(given, code, *(Path(p).read_text() for p in printed))


class ForkedRank:
    """A learner rank that calls ``replica.serve(**where)``."""

    def __init__(self, where):
        self.pid = ask({"serve": (where,)})

    def ended(self):
        """Return how it ended; empty while it runs."""
        code = ask({"poll": self.pid})
        if code is None:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self):
        """End the process at once. Idempotent."""
        ask({"kill": self.pid})


def ask(question):
    """Ask the process that forks."""
    with LOCK:
        process = parent()
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


@cache
def parent():
    """Start the process that forks; it ends with this one."""
    command = [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(process.communicate)
    return process


def main():
    """Fork processes, tell how they ended and kill them, as lines of standard input say."""
    from multitask_rl.lazy import without_collector

    with without_collector():
        from multitask_rl.training.backends import replica  # noqa: F401

        # after ours, which leave scikit-learn out
        from transformers.models.qwen2 import modeling_qwen2  # noqa: F401  # isort: skip

    codes = {}
    for line in sys.stdin:
        ((what, given),) = json.loads(line).items()
        answer = None
        if what == "run":
            import_for_scripts()
        if what in ("run", "serve"):
            if (answer := os.fork()) == 0:
                code = 1
                try:
                    code = {"run": run, "serve": serve}[what](*given)
                except BaseException:  # noqa: BLE001 - a process of its own ends with it
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            codes[answer] = None
        elif codes[given] is None:
            if what == "kill":
                os.kill(given, signal.SIGKILL)
            pid, status = os.waitpid(given, 0 if what == "kill" else os.WNOHANG)
            codes[given] = os.waitstatus_to_exitcode(status) if pid else None
        if what == "poll":
            answer = codes[given]
        print(json.dumps(answer), flush=True)


@cache
def import_for_scripts():
    """Import what ranks do not need."""
    from multitask_rl.lazy import without_collector

    with without_collector():
        import datasets  # noqa: F401

        from multitask_rl.cli import train  # noqa: F401
        from multitask_rl.trainer import Trainer  # noqa: F401

        with suppress(ImportError):  # a machine with a GPU may lack them
            import evaluate  # noqa: F401 - with pipelines of transformers; each exact_match needs it
            import mlflow  # noqa: F401


def run(arguments, folder, environment, printed):
    """Run a script or a module in this process; return its exit code."""
    import torch

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(printed, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        if arguments[0] == "-m":
            sys.path[:] = ["", *map(os.path.abspath, paths), *sys.path]
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            first = os.path.dirname(os.path.abspath(arguments[0]))
            sys.path[:] = [first, *map(os.path.abspath, paths), *sys.path]
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


def serve(where):
    """Do in a forked process what ``LocalRank`` does in a new one."""
    from multitask_rl.training.backends import replica

    os.setsid()
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.dup2(2, 1)
    os.write(writing, (json.dumps(where) + "\n").encode())
    sys.stdin = os.fdopen(0)
    replica.main()
    return 0
