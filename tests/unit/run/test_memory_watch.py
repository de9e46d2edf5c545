"""What a run uses of its machine: numbers of a step, and a warning when a device is nearly full."""

import subprocess
import sys

import pytest

from multitask_rl.run.profiling import MemoryWatch, SystemUse


def test_a_nearly_full_device_is_told_when_it_becomes_so():
    shares = iter([0.5, 0.91, 0.97, 0.8, 0.95])
    watch = MemoryWatch(lambda: {"memory/device_share": next(shares)})
    events = [event for step in range(5) for event in watch.observe(step)[1]]
    assert [(event.step, event.kind) for event in events] == [(1, "warn"), (4, "warn")]
    assert "torch holds 91% of a device's memory" in events[0].reason


def test_a_machine_without_devices_has_nothing_to_tell():
    assert MemoryWatch(dict).observe(3) == ({}, [])


def test_memory_of_the_run_is_that_of_all_its_processes():
    use = SystemUse(every_s=0.0)
    alone = use.numbers()
    assert set(alone) >= {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"}
    assert 0 <= alone["system/system_memory_usage_percentage"] <= 100
    program = "held = bytearray(200_000_000); print(flush=True); input()"
    name = "system/run_memory_usage_megabytes"

    def grows() -> float:
        before = use.numbers()[name]
        with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            together = use.numbers()[name]
            child.communicate("\n")
        return together - before

    # what earlier tests have started may end meanwhile
    assert any(grows() == pytest.approx(210, abs=15) for _ in range(5))


def test_steps_that_are_short_repeat_what_was_measured(monkeypatch):
    use = SystemUse(every_s=60.0)
    first = use.numbers()
    monkeypatch.setattr(use, "measure", dict)
    assert use.numbers() == first != {}


def test_each_gpu_has_its_memory_and_without_a_package_for_it_no_utilization(monkeypatch):
    def lacks(device):
        if device == 0:
            raise ModuleNotFoundError("pynvml")
        return 40

    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: device < 2)  # the third is not used here
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (3_000_000, 4_000_000))
    monkeypatch.setattr("torch.cuda.utilization", lacks)
    found = {name: value for name, value in SystemUse().numbers().items() if "gpu" in name}
    memory = {"memory_usage_megabytes": 1.0, "memory_usage_percentage": 25.0}
    expected = {f"system/gpu_{device}_{name}": value for device in (0, 1) for name, value in memory.items()}
    assert found == expected | {"system/gpu_1_utilization_percentage": 40.0}
