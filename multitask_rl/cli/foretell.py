"""What a run will need, printed before it begins: memory, disk, seconds of a step (``doctor FILE``)."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from multitask_rl.boundary.printable import counted, duration
from multitask_rl.config.devices import count_cuda_devices
from multitask_rl.config.run import RunConfig
from multitask_rl.models.tokens import load_tokenizer
from multitask_rl.run import estimate
from multitask_rl.run.plan import plan_run


def foretell(config: RunConfig) -> bool:
    """Print what a run of ``config`` will need; whether memory and disk have room for it."""
    with tempfile.TemporaryDirectory(prefix="multitask_rl_doctor_") as folder:
        plan = plan_run(replace(config, output_dir=folder))
    shape = estimate.read_shape(config.model)
    tokenizer = load_tokenizer(config.model.name_or_path, trust_remote_code=config.model.trust_remote_code)
    work = estimate.step_workload(plan, tokenizer)
    device = plan.devices.get("actor", "") or ("cuda" if count_cuda_devices() else "cpu")
    print(plan.describe())
    millions, trained = shape.parameters / 1e6, shape.trainable / 1e6
    print(f"model: {millions:,.1f} M parameters, {trained:,.1f} M trained, on {device}")
    print(
        f"a step: {counted(round(work.samples), 'response')} of at most {work.new_tokens:.0f} tokens to "
        f"{counted(round(work.prompts), 'prompt')} of {work.prompt_tokens:.0f} (means); "
        "shorter responses need less of all that follows"
    )
    whole = torch.cuda.get_device_properties(device).total_memory if device.startswith("cuda") else 0
    memory = estimate.estimate_memory(plan, shape, work, whole)
    peak, room = memory.pop("peak"), estimate.free_memory(device)
    print(f"memory: {estimate.in_units(peak)} beside Python and its libraries ({estimate.sizes(memory)})")
    has_memory = peak <= room
    verdict = "enough" if has_memory else f"TOO LITTLE; {estimate.smaller(config, memory)}"
    print(f"        {estimate.in_units(room)} are free on {device}: {verdict}")
    if host := estimate.estimate_host_memory(plan, shape, work):
        needed, left = sum(host.values()), estimate.free_memory("cpu")
        fits = needed <= left
        has_memory = has_memory and fits
        print(f"host:   {estimate.in_units(needed)} beside Python and its libraries ({estimate.sizes(host)})")
        print(f"        {estimate.in_units(left)} are free: {'enough' if fits else 'TOO LITTLE'}")
    disk = estimate.estimate_disk(
        plan, shape.parameters, shape.trainable, work.prompt_tokens + work.new_tokens
    )
    print(f"disk:   {estimate.disk_text(config, disk)}")
    seconds = estimate.measure_step(plan, shape, work)
    step = sum(seconds.values())
    stages = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    print(
        f"time:   {duration(step)} a step ({stages}), {duration(step * config.max_steps)} for "
        f"{counted(config.max_steps, 'step')}, beside rewards and evaluations; `multitask-rl bench` makes "
        "real steps"
    )
    return has_memory and disk["total"] <= estimate.free_bytes(Path(config.output_dir))
