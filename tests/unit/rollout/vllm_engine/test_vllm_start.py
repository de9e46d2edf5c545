"""What vLLM's queues leave open, closed in order; no vLLM needed."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from multitask_rl.rollout.vllm.start import close_sockets_with

zmq = pytest.importorskip("zmq")


class _Queue:
    """Holds its sockets as vLLM's does, and is left to the garbage collector."""

    def __init__(self) -> None:
        context = zmq.Context()
        self.context_of_all = weakref.ref(context)
        self.local_socket = context.socket(zmq.XPUB)
        self.remote_socket = None
        cancel = {f"{side}_cancel_socket": context.socket(zmq.PAIR) for side in ("read", "write")}
        self._spin_condition: Any = SimpleNamespace(poller=zmq.Poller(), **cancel)
        self.itself = self


@pytest.mark.parametrize("times", [1, 2])
def test_a_collected_queue_has_closed_its_sockets_and_then_their_context(times: int) -> None:
    queue = _Queue()
    context, gone = queue.context_of_all, weakref.ref(queue)
    for _ in range(times):  # vLLM from 0.32 on does it, too
        close_sockets_with(queue)
    del queue
    # what is open still is an error here (a ResourceWarning), and may wait for ever elsewhere
    gc.collect()
    assert gone() is None
    assert context() is None


def test_a_queue_without_readers_on_this_machine_is_closed() -> None:
    queue = _Queue()
    queue._spin_condition.read_cancel_socket.close()
    queue._spin_condition.write_cancel_socket.close()
    queue._spin_condition = None
    socket = queue.local_socket
    close_sockets_with(queue)
    del queue
    gc.collect()
    assert socket.closed
