"""Starts vLLM in this process, with the settings of its CPU build and without side effects.

Under tensor parallelism the scheduler stays in this process and every rank is a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from multitask_rl.config.schema.ranges import Count, OneOf, Settings
from multitask_rl.errors import ConfigError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in process: weights by reference, start in 3 s instead of 16
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer shares the process and its cores
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process that has computed with OpenMP hangs
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # ranks that wait for each other end by signal alone
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_CACHE_BYTES = 256 * 2**20


@dataclass(kw_only=True, slots=True)
class VLLMConfig(Settings):
    """Keys of ``rollout.engine_config``."""

    max_num_seqs: Count = 256
    """Sequences decoded at once."""
    max_model_len: int = 0
    """Prompt and response tokens at most; 0 = what the model's positions cover."""
    tensor_parallel_size: int = 1
    """Devices (CPU: processes) one copy of the model is split over; divides its attention heads."""
    gpu_memory_utilization: float = 0.4
    """Share of the device for vLLM; the trainer needs the rest."""
    kv_cache_memory_bytes: int = 0
    """Size of the key-value cache; 0 = from ``gpu_memory_utilization`` (on a CPU: 256 MiB)."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts faster, runs slower. Always so on a CPU."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16")] = "auto"
    """``auto`` (as the actor's weights, float16 too), ``float32`` or ``bfloat16``."""
    sleep_level: Annotated[int, OneOf(0, 1, 2)] = 0
    """What the engine gives back while the actor learns on the same device (CUDA): 0 = nothing, 1 = the
    key-value cache, weights go to host memory, 2 = both are given up, the next update brings weights."""


def num_workers_elsewhere(config: VLLMConfig) -> int:
    """Return how many workers of a started engine are processes of their own; 0 = its only one is here."""
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    return 0 if in_process and config.tensor_parallel_size == 1 else config.tensor_parallel_size


def start_vllm(model_dir: str, config: VLLMConfig, seed: int) -> Any:
    """Return the ``LLM``.

    Raises:
        ConfigError: the CPU build cannot sleep or compute the heads, a tensor-parallel size does not fit, or
            vLLM does not start.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _without_side_effects(config.tensor_parallel_size):
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = bool(current_platform.is_cpu())
        arguments: dict[str, Any] = {}
        if config.sleep_level:
            if on_cpu:
                raise ConfigError(
                    "rollout.engine_config.sleep_level: the CPU build of vLLM cannot sleep; leave it at 0"
                )
            arguments["enable_sleep_mode"] = True
        if on_cpu:
            # a chunk of a prompt draws a token and takes the draw back: not possible with a seed on a CPU
            arguments["enable_chunked_prefill"] = False
            # a group shares whole blocks only: the CPU build's default of 128 excludes short prompts
            arguments["block_size"] = 32
        if config.max_model_len:
            arguments["max_model_len"] = config.max_model_len
        cache_bytes = config.kv_cache_memory_bytes or (_CPU_CACHE_BYTES if on_cpu else 0)
        if cache_bytes:
            arguments["kv_cache_memory_bytes"] = cache_bytes
        _hide_dunders_of_llvmlite()
        try:
            architecture = AutoConfig.from_pretrained(model_dir)
            if config.tensor_parallel_size != 1:
                _check_ranks(architecture, config.tensor_parallel_size, on_cpu)
                # in a placement group of Ray, vLLM would choose Ray's backend, on any machine
                arguments["distributed_executor_backend"] = "mp"
            if on_cpu:
                _check_heads(architecture)
            dtype = config.dtype
            if dtype == "auto":
                dtype = str(getattr(architecture, "dtype", None) or "auto").removeprefix("torch.")
            llm = LLM(
                model=model_dir,
                dtype=dtype,
                seed=seed % 2**31,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                gpu_memory_utilization=config.gpu_memory_utilization,
                enforce_eager=config.enforce_eager or on_cpu,
                logprobs_mode="processed_logprobs",
                # the trainer's library for every grammar; it masks before the log-probabilities
                structured_outputs_config={"backend": "guidance"},
                enable_prefix_caching=True,
                worker_extension_cls="multitask_rl.rollout.vllm.worker.WeightReceiver",
                **arguments,
            )
            llm.collective_rpc("separate_classes")
            if num_workers_elsewhere(config):
                llm.collective_rpc("ignore_terminal")
                if on_cpu:
                    llm.collective_rpc("stay_eager")
                    llm.collective_rpc("unlink_memory")
            # this process's ends of the queues to and from the ranks
            core = getattr(llm.llm_engine.engine_core, "engine_core", None)
            executor = getattr(core, "model_executor", None)
            queues = getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())
            for queue in queues:
                if queue is not None:
                    close_sockets_with(queue)
            return llm
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"vLLM does not start on {model_dir} with rollout.engine_config = {config}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _hide_dunders_of_llvmlite() -> None:
    """Let vLLM 0.32 start in a process that has imported numba (which bm25s and others do).

    Its CPU build reads ``__dict__`` of every object of every module. llvmlite's library answers any name with
    a function, so that vLLM finds a function where it expects a dict.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    try:
        vars(ffi.lib)
    except TypeError:  # has none: a former start, or a later version of llvmlite
        return
    library = type(ffi.lib)
    find = library.__getattr__

    def find_function(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function


def _check_heads(architecture: Any) -> None:
    """Raise a ConfigError for attention heads that the CPU build would refuse at the first forward."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = architecture.get_text_config()
    try:
        width = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    except (AttributeError, TypeError, ZeroDivisionError):  # no attention, or a number of heads per layer
        return
    # tried: 48 is computed though vLLM's list lacks it; 8, 16, 24, 40, 56 and 288 are not
    allowed = sorted({48, *CPUAttentionBackend.get_supported_head_sizes()})
    if width not in allowed:
        raise ConfigError(
            f"rollout.engine=vllm: the model's attention heads are {width} wide, and the CPU build of vLLM "
            f"computes heads of {', '.join(map(str, allowed))}; set rollout.engine=hf, or take another model"
        )


def _check_ranks(architecture: Any, size: int, on_cpu: bool) -> None:
    """Raise a ConfigError where vLLM would hang, or name the number and not the key."""
    key = f"rollout.engine_config.tensor_parallel_size is {size}"
    heads = getattr(architecture.get_text_config(), "num_attention_heads", size)
    if size < 1 or heads % size:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(f"{key}, and the model has {heads} attention heads; allowed: {allowed}")
    devices = len(os.sched_getaffinity(0)) if on_cpu else torch.cuda.device_count()
    if size > devices:
        what = "cores" if on_cpu else "CUDA devices (under executor=ray: ray.gpus_per_engine)"
        raise ConfigError(f"{key}, and this process may use {devices} {what}; lower it to that or less")


def close_sockets_with(queue: Any) -> None:
    """Close the sockets of ``queue`` when it is collected.

    vLLM up to 0.31 leaves this to the garbage collector, which may end their context first. The context then
    waits for the sockets without an end.
    """
    held = list(vars(queue).items())
    if queue._spin_condition is not None:
        held += vars(queue._spin_condition).items()
    sockets = [socket for name, socket in held if name.endswith("_socket") and socket is not None]

    def close() -> None:
        for socket in sockets:
            socket.close(linger=0)
        for socket in sockets:
            socket.context.term()

    weakref.finalize(queue, close).atexit = False


@contextlib.contextmanager
def _without_side_effects(num_ranks: int) -> Iterator[None]:
    """Restore random streams, thread count and its setter; each rank gets a share of the threads."""
    set_num_threads = torch.set_num_threads
    python, numpy = random.getstate(), np.random.get_state()
    before, threads = os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()
    if num_ranks > 1:
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads // num_ranks))
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        if num_ranks > 1:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before
        # vLLM leaves one thread, and on a CPU makes the setter do nothing
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
