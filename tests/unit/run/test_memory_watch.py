"""A device that is nearly full is told once, and again after it was not."""

from multitask_rl.run.profiling import MemoryWatch


def test_a_nearly_full_device_is_told_when_it_becomes_so():
    shares = iter([0.5, 0.91, 0.97, 0.8, 0.95])
    watch = MemoryWatch(lambda: {"memory/device_share": next(shares)})
    events = [event for step in range(5) for event in watch.observe(step)[1]]
    assert [(event.step, event.kind) for event in events] == [(1, "warn"), (4, "warn")]
    assert "torch holds 91% of a device's memory" in events[0].reason


def test_a_machine_without_devices_has_nothing_to_tell():
    assert MemoryWatch(dict).observe(3) == ({}, [])
