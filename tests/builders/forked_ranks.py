"""Learner ranks forked from one process that has imported what they need: a rank starts in milliseconds.

``LocalRank``, which a run starts, imports torch and transformers for each (``test_learner_ranks.py``).
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from functools import cache

BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import forked_ranks; forked_ranks.main()"
LOCK = threading.Lock()


class ForkedRank:
    """A learner rank that calls ``replica.serve(**where)``."""

    def __init__(self, where):
        self.pid = ask({"start": where})

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
    """Ask the process that forks ranks."""
    with LOCK:
        process = parent()
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


@cache
def parent():
    """Start the process that forks ranks; it ends with this one."""
    command = [sys.executable, "-P", "-c", BOOT, json.dumps(sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def main():
    """Fork ranks, tell how they ended and kill them, as lines of standard input say."""
    from multitask_rl.training.backends import replica

    codes = {}
    for line in sys.stdin:
        ((what, given),) = json.loads(line).items()
        answer = None
        if what == "start":
            if (answer := os.fork()) == 0:
                serve(replica, given)
            codes[answer] = None
        elif codes[given] is None:
            if what == "kill":
                os.kill(given, signal.SIGKILL)
            pid, status = os.waitpid(given, 0 if what == "kill" else os.WNOHANG)
            codes[given] = os.waitstatus_to_exitcode(status) if pid else None
        if what == "poll":
            answer = codes[given]
        print(json.dumps(answer), flush=True)


def serve(replica, where):
    """Do in a forked process what ``LocalRank`` does in a new one."""
    os.setsid()
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    os.dup2(2, 1)
    os.write(writing, (json.dumps(where) + "\n").encode())
    sys.stdin = os.fdopen(0)
    try:
        replica.main()
    finally:
        os._exit(1)
