"""Which role runs on which device: ``device_map: {actor: "cuda:0-3", critic: "cuda:4-5"}``.

Each device of the actor is a learner rank with a copy of the weights. With ``cuda:0-3 sharded`` a rank has a
part of them; with ``cuda:0-7 sharded=4`` each four ranks divide a copy; with ``cuda:0-3 tensor=2`` pairs of
ranks also compute every layer together. With ``cuda:0-3 sharded offload`` the parts lie in host memory.
Ranks on a CPU are numbered the same way: ``cpu:0-3``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.ranges import unknown_name
from multitask_rl.errors import ConfigError

_ROLES = ("actor", "critic", "reference", "rollout")
_PER_TASK = ("reward", "constraint")
_WITH_ACTOR = {"reference": "reference model", "rollout": "rollout engine"}
_ALLOWED = (
    "allowed: cpu, cuda, cuda:0, cuda:0-3, cuda:4,5, cpu:0-3; for the actor also cuda:0-3 sharded, "
    "cuda:0-7 sharded=4, cuda:0-3 tensor=2, and any of these three with offload"
)
_MOST_DEVICES = 4096
_NUMBERED = re.compile(
    r"(cpu|cuda):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)(sharded(?:=(\d+))?)?(?:tensor=(\d+))?(offload)?"
)


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """The devices of a role, all of one kind (``cuda`` or ``cpu``)."""

    kind: str
    """``cpu`` or ``cuda``"""
    indices: tuple[int, ...] = ()
    """Indices, ascending, each once; empty for plain ``cpu`` and ``cuda``."""
    is_sharded: bool = field(default=False, compare=False)
    """Each device holds a part of the model."""
    tensor: int = field(default=1, compare=False)
    """Number of neighbouring devices that compute every layer together."""
    parts: int = field(default=1, compare=False)
    """Parts that a copy of the model (``tensor``: of each part of the layers) is cut into."""
    is_offloaded: bool = field(default=False, compare=False)
    """The parts lie in host memory; a device has only the block that it computes."""

    @property
    def names(self) -> list[str]:
        """The devices' names for ``torch.device``."""
        if self.kind == "cpu":
            return ["cpu"] * max(1, len(self.indices))
        return [f"{self.kind}:{i}" for i in self.indices] or [self.kind]

    @property
    def begins_on_host(self) -> bool:
        """The whole actor is loaded into host memory, and each device gets its part from there."""
        return self.is_sharded and self.kind == "cuda"

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.indices))}" if self.indices else self.kind


def parse_devices(text: str, where: str = "device") -> DeviceSet:
    """Return the devices that ``text`` names; ConfigError, which begins with ``where``, if it names none.

    >>> parse_devices("cuda:0-2,5").indices
    (0, 1, 2, 5)
    """
    text = str(text)
    close = text.replace(" ", "")
    if close in ("cpu", "cuda"):
        return DeviceSet(close)
    match = _NUMBERED.fullmatch(close)
    if match is None:
        raise ConfigError(f"{where}: {text!r} is no device ({_ALLOWED})")
    indices: list[int] = []
    for part in match[2].split(","):
        low, _, high = part.partition("-")
        if high and int(high) < int(low):
            raise ConfigError(f"{where}: the range {part!r} of {text!r} runs backwards; write {high}-{low}")
        if len(indices) + int(high or low) - int(low) >= _MOST_DEVICES:
            raise ConfigError(f"{where}: {text!r} names more than {_MOST_DEVICES} devices")
        indices += range(int(low), int(high or low) + 1)
    if len(set(indices)) < len(indices):
        raise ConfigError(f"{where}: {text!r} names a device twice")
    if match[1] == "cpu" and sorted(indices) != list(range(len(indices))):
        raise ConfigError(f"{where}: {text!r}: ranks on a CPU are counted from 0 ({_ALLOWED})")
    tensor = int(match[5] or 1)
    is_sharded = bool(match[3]) or tensor > 1
    if is_sharded and len(indices) == 1:
        raise ConfigError(f"{where}: {text!r}: sharded needs several devices, e.g. cuda:0-3 sharded")
    if tensor < 1 or len(indices) % tensor:
        raise ConfigError(
            f"{where}: {text!r}: tensor={tensor} must divide the number of devices, {len(indices)}"
        )
    number = len(indices) // tensor
    parts = int(match[4] or number) if is_sharded else 1
    if is_sharded and (parts < min(2, number) or number % parts):
        beside = f" ({len(indices)} devices by tensor={tensor})" if tensor > 1 else ""
        raise ConfigError(
            f"{where}: {text!r}: sharded={parts} must be 2 or more and divide {number}{beside}: each copy of "
            "the model has so many parts"
        )
    if match[6] and (not is_sharded or match[1] == "cpu"):
        why = ", where those of a CPU are" if is_sharded else " and needs sharded or tensor=2"
        raise ConfigError(
            f"{where}: {text!r}: offload moves weights from GPUs to host memory{why}; write e.g. "
            "cuda:0-3 sharded offload"
        )
    return DeviceSet(
        match[1],
        tuple(sorted(indices)),
        is_sharded=is_sharded,
        tensor=tensor,
        parts=parts,
        is_offloaded=bool(match[6]),
    )


def parse_device_map(
    device_map: Mapping[str, str],
    *,
    num_cuda: int | None = None,
    tasks: Sequence[str] | None = None,
    other_machines: bool = False,
) -> dict[str, DeviceSet]:
    """Return the devices of every role named in ``device_map``.

    Args:
        device_map: role -> devices; a role is one of ``actor``, ``critic``, ``reference``, ``rollout``,
            ``reward.<task>`` and ``constraint.<task>``.
        num_cuda: CUDA devices of the machine; None = ask torch, if the map names one.
        tasks: None = any task.
        other_machines: all learner ranks but the first may be on other machines. Of roles without a task,
            only the first device is looked for on this machine; the others are counted.

    Raises:
        ConfigError: an unknown role or task, a malformed or missing device, one that the role cannot use, or
            two sets that overlap in part (two roles may share a whole set).
    """
    parsed: dict[str, DeviceSet] = {}
    for role, text in device_map.items():
        kind, dot, task = role.partition(".")
        if (dot and kind not in _PER_TASK) or (not dot and role not in _ROLES):
            known = [*_ROLES, *(f"{k}.<task>" for k in _PER_TASK)]
            raise ConfigError(f"device_map: {unknown_name('role', role, known)}")
        if dot and tasks is not None and task not in tasks:
            raise ConfigError(f"device_map.{role}: {unknown_name('task', task, tasks)}")
        devices = parsed[role] = parse_devices(text, f"device_map.{role}")
        if devices.kind == "cpu" and devices.indices and role != "actor":
            raise ConfigError(
                f"device_map.{role}: {text!r}: only the actor has ranks on a CPU; write {role}: cpu"
            )
        if devices.is_sharded and role != "actor":
            raise ConfigError(
                f"device_map.{role}: {text!r}: only the actor is sharded, and its reference with it"
            )
    if num_cuda is None and any(d.kind == "cuda" for d in parsed.values()):
        num_cuda = count_cuda_devices()
    actor = parsed.get("actor")
    num_ranks = len(actor.names) if actor is not None else 1
    for role, devices in parsed.items():
        available = num_cuda or 0
        here = devices.indices[:1] if other_machines and "." not in role else devices.indices
        missing = [i for i in here if i >= available]
        if devices.kind == "cuda" and (missing or not available):
            names = f"cuda:{','.join(map(str, missing))}" if missing else "cuda"
            have = f"cuda:0-{available - 1} and cpu" if available > 1 else "cuda:0 and cpu"
            have = have if available else "no CUDA device, only cpu"
            raise ConfigError(
                f"device_map.{role}: {names} is not on this machine, which has {have}; name what it has"
            )
    for role, devices in parsed.items():
        if role in _WITH_ACTOR and devices != actor:
            has = f"which has {actor}" if actor is not None else "which device_map does not name"
            raise ConfigError(
                f"device_map.{role}: {devices}: the {_WITH_ACTOR[role]} lives on the devices of the actor, "
                f"{has}; leave {role} out"
            )
        if "." in role and len(devices.indices) > 1:
            raise ConfigError(
                f"device_map.{role}: {devices}: a model of a {role.partition('.')[0]} runs on one device; "
                f"name one, e.g. {devices.names[0]}"
            )
        if role == "critic" and len(devices.indices) > num_ranks:
            raise ConfigError(
                f"device_map.critic: {devices}: each learner rank has one critic, and there are "
                f"{num_ranks} ranks (devices of the actor); name as many or fewer devices"
            )
    for (role, mine), (other, theirs) in combinations(parsed.items(), 2):
        shared = set(mine.indices) & set(theirs.indices)
        if shared and mine.kind == theirs.kind and mine != theirs:
            common = DeviceSet("cuda", tuple(sorted(shared)))
            raise ConfigError(
                f"device_map: {role} ({mine}) and {other} ({theirs}) share {common} but not all; "
                "give them separate devices, or the same set to place them together"
            )
    return parsed


def resolve_devices(
    device_map: Mapping[str, str], *, tasks: Sequence[str] | None = None, other_machines: bool = False
) -> dict[str, str]:
    """Check ``device_map`` as ``parse_device_map`` does; return the first device of every role."""
    parsed = parse_device_map(device_map, tasks=tasks, other_machines=other_machines)
    return {role: devices.names[0] for role, devices in parsed.items()}


def actor_devices(config: RunConfig) -> DeviceSet:
    """Return the devices of the actor, ``cpu`` if none is named."""
    return parse_devices(config.device_map.get("actor", "cpu"), "device_map.actor")


def plan_ranks(config: RunConfig) -> list[tuple[str, str]]:
    """Return (device of the actor, device of the critic) of each learner rank.

    If there are more ranks than devices of the critic, the ranks get these in turn. A single rank gets
    ``("", "")``: its models stay where they are. If ``torchrun`` started ranks on several machines and the
    actor is on GPUs, a rank and its critic get the GPU with the rank's number within its machine.

    Raises:
        ConfigError: ranks and devices do not fit, or a setting that sequences in parts cannot serve.
    """
    device_map, context, actor = config.device_map, config.batch.context_ranks, actor_devices(config)
    number = len(actor.names)
    if number % context:
        raise ConfigError(
            f"batch.context_ranks={context} must divide the number of learner ranks, {number}: the devices "
            f"of device_map.actor, e.g. cuda:0-{context - 1} or cpu:0-{context - 1}"
        )
    if number == 1:
        return [("", "")]
    critic = parse_devices(device_map.get("critic", str(actor)), "device_map.critic")
    if critic.names != actor.names and spans_machines(config):
        raise ConfigError(
            f"device_map.critic={str(critic)!r}: with {number} learner ranks by Ray or torchrun the critic "
            "lives on the actor's devices; leave it out"
        )
    if context > 1:
        if config.batch.layout not in ("auto", "bucketed"):
            raise ConfigError(
                f"batch.layout={config.batch.layout}: batch.context_ranks={context} needs samples in rows of "
                "their own; set batch.layout=auto or bucketed"
            )
        if config.model.rope_scaling.get("type") == "dynamic":
            raise ConfigError(
                "model.rope_scaling: type dynamic depends on the longest sequence a rank has seen, so the "
                "parts of a sequence would not fit together; take yarn or ntk, or set batch.context_ranks=1"
            )
    if actor.kind == "cuda" and (per_machine := ranks_per_machine()):
        machines = int(os.environ["GROUP_WORLD_SIZE"])
        if per_machine * machines != torchrun_size():
            raise ConfigError(
                f"torchrun started {torchrun_size()} processes on {machines} machines, {per_machine} of them "
                "here: a rank gets the GPU of its number, so every machine needs equally many; set "
                "--nproc_per_node alike on all"
            )
        if list(actor.indices) != list(range(number)):
            raise ConfigError(
                f"device_map.actor={config.device_map['actor']!r}: over several machines torchrun gives each "
                f"process the GPU of its LOCAL_RANK; write cuda:0-{number - 1}, and choose a machine's GPUs "
                "by CUDA_VISIBLE_DEVICES"
            )
        return [(f"cuda:{rank % per_machine}",) * 2 for rank in range(number)]
    return [(name, critic.names[rank % len(critic.names)]) for rank, name in enumerate(actor.names)]


def torchrun_size() -> int:
    """Return the number of processes that ``torchrun`` started, this one among them; 0 = it started none."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def ranks_per_machine() -> int:
    """Return how many ranks this machine has if ``torchrun`` started ranks on several; else 0.

    The other machines must have as many.
    """
    has_several = torchrun_size() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    return int(os.environ["LOCAL_WORLD_SIZE"]) if has_several else 0


def spans_machines(config: RunConfig) -> bool:
    """Whether all learner ranks but the first may be on other machines than this one."""
    return config.executor == "ray" or ranks_per_machine() > 0


def count_cuda_devices() -> int:
    """Return how many CUDA devices torch sees."""
    import torch  # heavy, and most device maps name no CUDA device

    return torch.cuda.device_count()
