"""Two fake CUDA devices, for a machine without a GPU: they reveal tensors on the wrong device.

    PYTHONPATH=$PWD/tests/fake_cuda python -m pytest tests/gpu/test_gpu_run.py

With this folder on the path every Python process that imports torch has them (``sitecustomize.py``). A tensor
on such a device is a `FakeCudaTensor`: its ``device`` says ``cuda:0``, its values lie in host memory, and the
CPU computes them. An error is raised where a GPU raises one:

- tensors of different devices in one operation (CPU tensors of no dimension and CPU indices are allowed),
- a generator of another device, a device number that is not there,
- ``numpy()`` of a tensor on the device,
- packed products of oneDNN, quantised products of the CPU, matrix products of integers,
- the device in a process that was forked after CUDA began.

A copy to the host that does not block shows its values after a synchronisation only. Uninitialised
floating-point memory holds NaN. NCCL is Gloo underneath. Not there: kernels of CUDA with their limits,
graphs, memory that runs out, work that is still under way on another stream.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch._C._distributed_c10d as c10d
from fake_devices import library
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

GIB = 2**30
aten = torch.ops.aten
NUM_DEVICES: int = library.fake_cuda_num_devices()
COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
"""Operations whose indices may lie on the CPU."""
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
CPU_ONLY = ("mkldnn", "onednn", "quantized", "_for_cpu", "_for_cpu_backward", "fbgemm")
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Copies to the host, (from, to), whose values show after the next synchronisation."""
states = [torch.Generator().manual_seed(index) for index in range(NUM_DEVICES)]
"""The default generators of the devices."""
places: dict[int, torch.device] = {}
"""Address of a generator -> its device."""
begun_in: list[int] = []
"""The process that used a device first."""


class FakeCudaTensor(torch.Tensor):
    """A tensor that says it is on a CUDA device; ``held`` has its values in host memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> FakeCudaTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def untyped_storage(self):
        return self.held.untyped_storage()

    def data_ptr(self):
        return self.held.data_ptr()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            if not self.is_leaf:
                raise RuntimeError("only leaves can be copied deeply")
            made = FakeCudaTensor(self.held.detach().clone(), self.device).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                made._is_param = True
            memo[id(self)] = made
            made.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _unpickled, (self.held.detach(), str(self.device), self.requires_grad)

    def tolist(self):
        synchronize()
        return self.held.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        synchronize()
        return self.held.detach().numpy()

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def __repr__(self, **kwargs):
        return f"{self.held!r} on {self.device}"


def _set_data(tensor, value) -> None:
    """Set ``tensor.data``; a tensor that gets a value of the other kind changes its class."""
    if isinstance(value, FakeCudaTensor) == isinstance(tensor, FakeCudaTensor):
        torch._C.TensorBase.data.__set__(tensor, value)
        if isinstance(value, FakeCudaTensor):
            tensor.held = value.held
        return
    with torch.no_grad():
        made = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, made)


def _unpickled(held, device, requires_grad):
    return FakeCudaTensor(held, place(device)).requires_grad_(requires_grad)


def place(device) -> torch.device:
    """Return the device with its number; raise if there is none of this number."""
    device = torch.device(device)
    if device.type == "cuda":
        index = current_device() if device.index is None else device.index
        if index >= NUM_DEVICES:
            raise RuntimeError(f"CUDA error: invalid device ordinal: {device}; there are {NUM_DEVICES}")
        return torch.device("cuda", index)
    return device


def compute(func, args, kwargs):
    """Let the CPU compute ``func``; the result is on the device asked for, else on that of the arguments."""
    if torch.is_inference_mode_enabled():  # composite operations come whole then
        with FakeCudaMode():
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    leaves = leaves_of((*args, *kwargs.values()))
    on_device = [leaf for leaf in leaves if isinstance(leaf, FakeCudaTensor)]
    devices = {t.device for t in on_device}
    asked = kwargs.get("device")
    device = place(asked) if asked is not None else next(iter(devices), torch.device("cpu"))
    if (on_device or device.type == "cuda") and begun_in != [os.getpid()]:
        if begun_in:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess; use the 'spawn' start method")
        begun_in.append(os.getpid())
    _check_generators(func, leaves, device)
    if on_device and func not in COPIES:
        _check_devices(func, args, devices, leaves)
    if func is aten._fused_sdp_choice.default:
        return 0  # attention as plain products; CUDA's kernels are not there
    values, plain = held(args), {name: held(value) for name, value in kwargs.items()}
    if asked is not None:
        plain["device"] = torch.device("cpu")
    into_host = func is aten.copy_.default and not isinstance(args[0], FakeCudaTensor)
    to_host = into_host or (on_device and device.type == "cpu" and func is aten._to_copy.default)
    late = to_host and (plain.pop("non_blocking", False) or (len(args) > 2 and args[2]))
    is_random = device.type == "cuda" and torch.Tag.nondeterministic_seeded in func.tags
    with own_random_state(device.index) if is_random else contextlib.nullcontext():
        found = func(*values, **plain)
    if late:
        waiting.append((found.clone(), found))
        found.fill_(float("nan") if found.is_floating_point() else -1)
    elif to_host or not isinstance(found, (torch.Tensor, tuple, list, type(None))):
        synchronize()  # a value that was read, such as ``item()``, too
    if to_host or device.type == "cpu" or not isinstance(found, (torch.Tensor, tuple, list)):
        return args[0] if into_host else found
    if func in EMPTY and found.is_floating_point():
        found.fill_(float("nan"))
    found = on(device, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if on_device and aliases(func) else found


def leaves_of(values) -> list:
    """Return the values with nested lists and tuples flattened."""
    found = []
    for value in values:
        found.extend(leaves_of(value) if isinstance(value, (list, tuple)) else (value,))
    return found


def held(value):
    """Return the value with each fake tensor replaced by its host tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(held, value))
    return value.held if isinstance(value, FakeCudaTensor) else value


def on(device, value):
    """Return the value with tensors on ``device`` in place of those that the CPU computed."""
    if isinstance(value, (list, tuple)):
        return tuple(on(device, one) for one in value)
    return FakeCudaTensor(value, device) if isinstance(value, torch.Tensor) else value


@functools.cache
def aliases(func) -> bool:
    """Return whether ``func`` writes to an argument or returns a view of one."""
    return any(argument.alias_info for argument in func._schema.arguments)


@functools.cache
def is_of_cpu(func) -> bool:
    """Return whether ``func`` exists on CPUs only."""
    return any(part in str(func) for part in CPU_ONLY)


@contextlib.contextmanager
def own_random_state(index: int):
    """Draw from the device's default generator in place of the CPU's."""
    before = torch.random.get_rng_state()
    torch.random.set_rng_state(states[index].get_state())
    try:
        yield
    finally:
        states[index].set_state(torch.random.get_rng_state())
        torch.random.set_rng_state(before)


def _check_generators(func, leaves, device) -> None:
    """Raise if a generator is of another device, by ``places``: here it is one of torch's class."""
    for leaf in leaves:
        if isinstance(leaf, torch._C.Generator):
            found = places.get(leaf._cdata, torch.device("cpu"))
            if found != device:
                raise RuntimeError(f"Expected a '{device}' generator but found one of '{found}' in {func}")


def _check_devices(func, args, devices, leaves) -> None:
    """Raise if a GPU has no ``func``, or none for this dtype, or if tensors are on different devices."""
    name = func.__name__.partition(".")[0]
    if is_of_cpu(func):
        raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend")
    if name in PRODUCTS and not (args[0].is_floating_point() or args[0].is_complex()):
        raise RuntimeError(f"'{name}_cuda' not implemented for {args[0].dtype}")
    strangers = [
        t for t in leaves if isinstance(t, torch.Tensor) and type(t) is not FakeCudaTensor and t.dim()
    ]
    if func in INDEXED:
        strangers = [t for t in strangers if not any(t is index for index in args[1])]
    if len(devices) > 1 or strangers:
        found = [*map(str, devices), *(f"cpu {tuple(t.shape)}" for t in strangers)]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {func}")


class FakeCudaMode(TorchDispatchMode):
    """Catches operations that create a device tensor from host tensors or from none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        to_device = asked is not None and torch.device(asked).type == "cuda"
        if to_device or any(issubclass(kind, FakeCudaTensor) for kind in types):
            return compute(func, args, kwargs)
        _check_generators(func, kwargs.values(), torch.device("cpu"))
        return func(*args, **kwargs)


class Generator(torch.Generator):
    """A generator that says it is on the device it was made for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, device="cpu")

    def __init__(self, device="cpu"):
        places[self._cdata] = place(device)

    @property
    def device(self):
        return places[self._cdata]


class Event:
    """Work is done at once; ``synchronize`` shows copies."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        return None

    def wait(self, *args):
        return None

    def query(self):
        return not waiting

    def synchronize(self):
        synchronize()

    def elapsed_time(self, other):
        return 0.0


class Stream(Event):
    """The one stream."""

    wait_stream = wait_event = Event.wait

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class ProcessGroupNCCL(c10d.ProcessGroupGloo):
    """Collectives over Gloo; called directly, they take tensors on a device only, as NCCL does."""

    class Options:
        """What the project sets of NCCL's options."""

        _timeout = timedelta(minutes=10)

    def __init__(self, store, rank, size, options=None):
        own = c10d.ProcessGroupGloo._Options()
        own._timeout = (options or self.Options())._timeout
        own._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        super().__init__(store, rank, size, own)


def _of_device(name):
    call = getattr(c10d.ProcessGroupGloo, name)

    @functools.wraps(call)
    def wrapped(self, *args):
        for leaf in leaves_of(args):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeCudaTensor):
                raise RuntimeError(f"No backend for a tensor on {leaf.device} in {name}")
        return call(self, *held(args))

    return wrapped


for _name in ("allreduce", "broadcast", "reduce", "allgather", "gather", "reduce_scatter", "send", "recv"):
    setattr(ProcessGroupNCCL, _name, _of_device(_name))


def _register_backend(group, device, kind, backend=None):
    """Register a backend of CUDA for the CPU, too: there the dispatcher finds what tensors hold."""
    register_backend(group, device, kind, backend)
    if torch.device(device).type == "cuda":
        register_backend(group, torch.device("cpu"), kind, backend)


register_backend = c10d.ProcessGroup._register_backend


def current_device() -> int:
    return library.fake_cuda_current_device()


def number(device=None) -> int:
    if isinstance(device, int):
        device = f"cuda:{device}"
    return current_device() if device is None else place(device).index


def set_device(device) -> None:
    library.fake_cuda_set_device(number(device))


@contextlib.contextmanager
def on_device(device):
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        library.fake_cuda_set_device(before)


def synchronize(device=None) -> None:
    number(device)
    while waiting:
        source, target = waiting.pop(0)  # a later copy into the same memory is the one that stays
        target.copy_(source)


def _reset_sharded_param(parameter) -> None:
    """Leave the padded part of FSDP as it is: torch looks for memory in common in its own class only."""
    padded, part = parameter._sharded_param_data, parameter.sharded_param._local_tensor
    shares = padded.numel() and padded.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    if not (isinstance(padded, FakeCudaTensor) and shares):
        reset_sharded_param(parameter)


reset_sharded_param = FSDPParam.reset_sharded_param


def with_fakes(call):
    """Return ``call`` wrapped so that the fakes are on in its thread: torch keeps modes per thread."""

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        torch._C._set_only_lift_cpu_tensors(True)
        with FakeCudaMode():
            return call(*args, **kwargs)

    return wrapped


def begin() -> None:
    """Give torch in this process the fake devices."""
    library.fake_cuda_begin()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) goes through the dispatcher
    torch.__future__.set_swap_module_params_on_conversion(True)  # a tensor cannot become one of another class
    threading.Thread._bootstrap_inner = with_fakes(threading.Thread._bootstrap_inner)
    properties = SimpleNamespace(
        name="fake", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132
    )
    answers = {
        "is_available": lambda: NUM_DEVICES > 0,
        "is_initialized": lambda: bool(begun_in),
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": current_device,
        "set_device": set_device,
        "device": on_device,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: Stream(),
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_stats": lambda device=None: {},
        "memory_allocated": lambda device=None: GIB,
        "max_memory_allocated": lambda device=None: GIB,
        "memory_reserved": lambda device=None: 2 * GIB,
        "max_memory_reserved": lambda device=None: 2 * GIB,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (60 * GIB, 80 * GIB),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_rng_state": lambda device="cuda": states[number(device)].get_state(),
        "get_rng_state_all": lambda: [state.get_state() for state in states],
        "set_rng_state": lambda state, device="cuda": states[number(device)].set_state(state),
        "manual_seed": lambda seed: states[current_device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [state.manual_seed(seed) for state in states],
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.Generator = Generator
    FSDPParam.reset_sharded_param = _reset_sharded_param
    torch.distributed.distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d.ProcessGroup._register_backend = _register_backend
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    FakeCudaMode().__enter__()
