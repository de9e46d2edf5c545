"""Learner ranks on CUDA devices; what needs two is skipped where there are fewer."""

import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from model_builders import build_model
from multitask_rl.config.run import BatchConfig, EvalConfig, ModelConfig
from multitask_rl.training.backends.ranks import Ranks, host_store
from multitask_rl.training.backends.sharded import forward_pass, shard_model
from run_builders import run_config, train, write_run

pytestmark = pytest.mark.gpu


@pytest.fixture
def ranks():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    store, _ = host_store("127.0.0.1")
    one = Ranks(0, 1, 1, address="127.0.0.1", store=store, device=torch.device("cuda:0"))
    yield one
    one.close()


def test_one_rank_over_nccl_sums_sends_and_gathers(ranks):
    assert ranks.most(7) == 7
    value = torch.arange(3.0, device=ranks.device)
    ranks.sum(value)
    ranks.sum(value, at=0)
    ranks.broadcast([value])
    assert ranks.gather(value).flatten().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="sharding needs torch 2.13")
@pytest.mark.parametrize(("begins_on", "offload"), [("cuda:0", False), ("cpu", False), ("cpu", True)])
def test_one_rank_over_nccl_cuts_a_model_and_gets_its_gradient(ranks, begins_on, offload):
    ids = torch.tensor([[3, 5, 7, 9]], device=ranks.device)
    model = build_model().to(ranks.device)
    model(input_ids=ids).logits.sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    shards = shard_model(model.to(begins_on), ranks, offload=offload)
    home = torch.device("cpu") if offload else ranks.device
    assert {p.device for p in model.parameters()} == {home}
    assert {buffer.device for buffer in model.buffers()} == {ranks.device}
    assert {part.device for part in shards.local} == {home}
    assert all(torch.equal(shards.gather(n), whole[name]) for n, name in enumerate(shards.names))
    for _ in range(2):
        forward_pass(model, lambda: {"sum": model(input_ids=ids).logits.sum()})["sum"].backward()
    shards.take_gradients()
    for name, local in zip(shards.names, shards.local, strict=True):
        torch.testing.assert_close(local.grad, 2.0 * wanted[name].to(home), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_learn_what_one_learns(tmp_path):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype="float32")
    settings = {"model": model, "eval": EvalConfig(every=2, num_prompts=2)}
    one = train(run_config(tmp_path, "one", 1, device_map={"actor": "cuda:0"}, **settings))
    expected = dict(one.actor.model.named_parameters())
    for context in (1, 2):
        settings["batch"] = BatchConfig(prompts_per_step=12, group_size=4, context_ranks=context)
        two = train(run_config(tmp_path, f"two{context}", 1, device_map={"actor": "cuda:0-1"}, **settings))
        for name, found in two.actor.model.named_parameters():
            torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="sharding needs torch 2.13")
def test_two_devices_with_parts_learn_what_one_learns_and_go_on_with_them_in_host_memory(tmp_path):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype="float32")
    settings = {"model": model, "eval": EvalConfig(every=2, num_prompts=2)}

    def learn(output, steps, devices):
        trainer = train(run_config(tmp_path, output, steps, device_map={"actor": devices}, **settings))
        return trainer.actor.state_dict()

    expected = learn("one", 2, "cuda:0")
    learn("two", 1, "cuda:0-1 sharded")
    for name, value in learn("two", 2, "cuda:0-1 sharded offload").items():
        torch.testing.assert_close(value.to("cuda:0"), expected[name], rtol=1e-3, atol=1e-4)
