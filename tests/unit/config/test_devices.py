"""Device maps: every form, and every refusal."""

import pytest

from multitask_rl.config.devices import (
    DeviceSet,
    parse_device_map,
    parse_devices,
    plan_ranks,
    spans_machines,
)
from multitask_rl.config.run import OptimizerConfig, RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.training.backends.build import TorchBackend


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", DeviceSet("cpu")),
        ("cuda", DeviceSet("cuda")),
        ("cuda:0", DeviceSet("cuda", (0,))),
        ("cuda:0-3", DeviceSet("cuda", (0, 1, 2, 3))),
        ("cuda:4,5", DeviceSet("cuda", (4, 5))),
        ("cpu:0-2", DeviceSet("cpu", (0, 1, 2))),
        ("cuda: 6, 0-1", DeviceSet("cuda", (0, 1, 6))),
    ],
)
def test_form_is_read(text: str, expected: DeviceSet) -> None:
    assert parse_devices(text) == expected


def test_the_actors_weights_may_be_shared_out() -> None:
    parsed = parse_device_map({"actor": "cuda:0-3 sharded", "rollout": "cuda:0-3"}, num_cuda=4)
    assert parsed["actor"].is_sharded
    assert parsed["actor"].names == parsed["rollout"].names
    assert not parsed["rollout"].is_sharded
    with pytest.raises(ConfigError, match="sharded needs several devices"):
        parse_devices("cuda:1 sharded")
    assert (parsed["actor"].tensor, parse_devices("cpu:0-3 sharded tensor=2").tensor) == (1, 2)
    assert parse_devices("cuda:0-1 tensor=2").is_sharded
    begin_on_host = {text: parse_devices(text).begins_on_host for text in ("cuda:0-1 sharded", "cuda:0-1")}
    assert begin_on_host == {"cuda:0-1 sharded": True, "cuda:0-1": False}
    assert not parse_devices("cpu:0-1 sharded").begins_on_host
    for text in ("cuda:0-2 tensor=2", "cuda:0-1 tensor=0", "cuda:0-1 tensor=4"):
        with pytest.raises(ConfigError, match="must divide the number of devices"):
            parse_devices(text)
    assert parsed["actor"].parts == 4
    assert parse_devices("cuda:0-7 sharded=2").parts == 2
    assert parse_devices("cuda:0-7 sharded=2 tensor=2").parts == 2
    assert parse_devices("cuda:0-3 tensor=2").parts == 2
    assert parse_devices("cuda:0-3").parts == 1
    for text in ("cuda:0-3 sharded=3", "cuda:0-3 sharded=1", "cuda:0-3 sharded=4 tensor=2"):
        with pytest.raises(ConfigError, match="must be 2 or more and divide"):
            parse_devices(text)
    with pytest.raises(ConfigError, match="only the actor is sharded"):
        parse_device_map({"actor": "cuda:0-1", "critic": "cuda:2-3 sharded"}, num_cuda=4)


def test_parts_of_a_model_on_gpus_may_lie_in_host_memory() -> None:
    for how in ("sharded", "sharded=4", "tensor=2", "sharded=2 tensor=2"):
        text = f"cuda:0-7 {how}"
        usual, offloaded = parse_devices(text), parse_devices(f"{text} offload")
        assert offloaded.is_offloaded
        assert not usual.is_offloaded
        assert (offloaded.parts, offloaded.tensor, offloaded) == (usual.parts, usual.tensor, usual)
    for text in ("cuda:0 offload", "cuda:0-3 offload", "cpu:0-1 sharded offload"):
        with pytest.raises(ConfigError, match=f"'{text}': offload moves weights from GPUs to host memory"):
            parse_devices(text)
    twice = RunConfig(
        device_map={"actor": "cuda:0-1 sharded offload"}, optimizer=OptimizerConfig(moments="host")
    )
    with pytest.raises(ConfigError, match=r"optimizer.moments=host: .* leave optimizer.moments out"):
        TorchBackend.check(twice)


@pytest.mark.parametrize(
    "text", ["gpu", "cuda sharded", "cuda:", "cuda:a", "cuda:0-", "cuda:3-1", "cuda:0,0", "cpu:1", ""]
)
def test_malformed_device_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed|backwards|twice"):
        parse_devices(text)


def test_a_mistyped_range_is_refused_before_it_is_counted() -> None:
    for text in ("cuda:0-99999999999", "cpu:0-5000", "cuda:0-3000,4000-6000"):
        with pytest.raises(ConfigError, match="more than 4096 devices"):
            parse_devices(text)
    assert len(parse_devices("cuda:0-4095").indices) == 4096


def test_torchrun_over_machines_gives_each_rank_the_gpu_of_its_number_there(monkeypatch):
    config = RunConfig(device_map={"actor": "cuda:0-3 sharded"})
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, number in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    assert spans_machines(config)
    assert plan_ranks(config) == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")] * 2
    with pytest.raises(ConfigError, match=r"LOCAL_RANK; write cuda:0-3"):
        plan_ranks(RunConfig(device_map={"actor": "cuda:4-7"}))
    with pytest.raises(ConfigError, match=r"device_map.critic='cuda:1': .* by Ray or torchrun"):
        plan_ranks(RunConfig(device_map={"actor": "cuda:0-3", "critic": "cuda:1"}))
    assert plan_ranks(RunConfig(device_map={"actor": "cpu:0-3"})) == [("cpu", "cpu")] * 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"4 processes on 2 machines, 3 of them here: .* --nproc_per_node"):
        plan_ranks(config)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert not spans_machines(config)
    assert plan_ranks(config)[2] == ("cuda:2", "cuda:2")


def test_learner_ranks_of_a_ray_cluster_may_outnumber_the_devices_of_this_machine():
    parsed = parse_device_map({"actor": "cuda:0-15", "critic": "cuda:0-15"}, num_cuda=8, other_machines=True)
    assert len(parsed["actor"].names) == 16
    with pytest.raises(ConfigError, match=r"cuda:8 is not on this machine"):
        parse_device_map({"actor": "cuda:8-15"}, num_cuda=8, other_machines=True)
    with pytest.raises(ConfigError, match=r"device_map.reward.math: cuda:9 is not"):
        parse_device_map({"reward.math": "cuda:9"}, num_cuda=8, other_machines=True)


def test_reference_map_parses_where_the_devices_exist() -> None:
    parsed = parse_device_map({"actor": "cuda:0-3", "critic": "cuda:4-5", "reward.code": "cpu"}, num_cuda=6)
    assert parsed["actor"].indices == (0, 1, 2, 3)
    assert str(parsed["critic"]) == "cuda:4,5"
    assert parsed["reward.code"].names[0] == "cpu"


@pytest.mark.parametrize(
    ("device_map", "parts"),
    [
        ({"actor": "cuda:0-3", "critic": "cuda:3-5"}, ["actor", "critic", "share cuda:3"]),
        ({"actor": "cuda:7-9"}, ["device_map.actor", "cuda:8,9", "cuda:0-7"]),
        ({"actr": "cpu"}, ["did you mean 'actor'", "reward.<task>"]),
        ({"reward.mth": "cpu"}, ["did you mean 'math'"]),
        (
            {"actor": "cuda:0", "reference": "cuda:1"},
            ["device_map.reference", "of the actor, which has cuda:0"],
        ),
        ({"reference": "cuda:1"}, ["device_map.reference", "device_map does not name"]),
        # not "or give both the same devices": an engine with weights of its own would refuse these, too
        ({"actor": "cuda:0", "rollout": "cuda:1-2"}, ["has cuda:0; leave rollout out."]),
        ({"actor": "cuda:0", "rollout": "cpu"}, ["device_map.rollout", "leave rollout out"]),
        ({"actor": "cuda:0", "reward.math": "cuda:1-2"}, ["device_map.reward.math", "name one, e.g. cuda:1"]),
        ({"actor": "cuda:0", "critic": "cuda:1-2"}, ["device_map.critic", "there are 1 ranks"]),
    ],
)
def test_impossible_map_is_refused(device_map: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_device_map(device_map, num_cuda=8, tasks=["math"])
    assert [p for p in parts if p not in f"{caught.value}."] == [], caught.value


def test_roles_may_share_a_whole_set() -> None:
    parsed = parse_device_map({"actor": "cuda:0-1", "rollout": "cuda:0,1"}, num_cuda=2)
    assert parsed["actor"] == parsed["rollout"]


def test_cuda_on_a_machine_without_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        parse_device_map({"actor": "cuda"}, num_cuda=0)


def test_only_the_actor_has_ranks_on_a_cpu() -> None:
    parsed = parse_device_map({"actor": "cpu:0-1", "critic": "cuda:0", "reward.code": "cpu"}, num_cuda=1)
    assert parsed["actor"].names == ["cpu", "cpu"]
    with pytest.raises(ConfigError, match=r"device_map.critic: 'cpu:0-1': only the actor has ranks on a CPU"):
        parse_device_map({"critic": "cpu:0-1"})
