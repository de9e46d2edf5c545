"""Our advantages and losses against TRL's own code, whose numbers are stored beside this file."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl_reference import GROUP, LENGTHS, MAX_NEW_TOKENS, PROMPTS, WIDTH, make_inputs

from algorithm_builders import credit_batch
from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.algorithms.cispo import CISPO
from multitask_rl.algorithms.dapo import DAPO
from multitask_rl.algorithms.dr_grpo import DrGRPO
from multitask_rl.algorithms.gdpo import GDPO
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.gspo import GSPO
from multitask_rl.algorithms.rloo import RLOO

HERE = Path(__file__).parent
STORED = json.loads((HERE / "trl_1_16_0.json").read_text())
INPUTS = make_inputs()
COMPONENTS = INPUTS["components"]
GROUPS = torch.arange(PROMPTS).repeat_interleave(GROUP)
MASK = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
SEQUENCE = torch.arange(GROUP * PROMPTS).repeat_interleave(torch.tensor(LENGTHS))


def _advantages(algorithm):
    batch = credit_batch(
        COMPONENTS.sum(1),
        GROUPS,
        component_rewards=COMPONENTS,
        component_weights=torch.ones(2, dtype=torch.float64),
    )
    return algorithm.credit(batch).advantages


def _stored_advantages(name):
    return torch.tensor(STORED["advantages"][name], dtype=torch.float64)


@pytest.mark.parametrize(
    ("algorithm", "name"), [(DrGRPO(DrGRPO.Config()), "grpo_none"), (RLOO(RLOO.Config()), "rloo")]
)
def test_advantages_without_scale_are_trls(algorithm, name):
    torch.testing.assert_close(_advantages(algorithm), _stored_advantages(name), rtol=1e-6, atol=1e-6)


def test_group_normalised_advantages_are_trls_up_to_its_epsilon():
    ours = group.divide_by_group_std(group.centre(COMPONENTS.sum(1), GROUPS), GROUPS, epsilon=1e-4)
    torch.testing.assert_close(ours, _stored_advantages("grpo_group"), rtol=1e-6, atol=1e-6)
    grpo = _advantages(GRPO(GRPOConfig(normalisation="group")))
    torch.testing.assert_close(grpo, _stored_advantages("grpo_group"), rtol=1e-4, atol=1e-6)


def test_gdpo_advantages_are_trls_up_to_epsilon_and_degrees_of_freedom():
    count = GROUP * PROMPTS
    ours = _advantages(GDPO(GDPO.Config())) * ((count - 1) / count) ** 0.5
    torch.testing.assert_close(ours, _stored_advantages("gdpo"), rtol=1e-4, atol=1e-4)


LOSSES = {
    "grpo": GRPO(GRPOConfig(clip_high=0.2, dual_clip=0.0, aggregation="sequence")),
    "token_mean_clip_higher": DAPO(DAPO.Config(dual_clip=0.0)),
    "dr_grpo": DrGRPO(DrGRPO.Config(dual_clip=0.0)),
    "dual_clip": GRPO(GRPOConfig(clip_high=0.2, dual_clip=1.5)),
    "k3_in_loss": GRPO(GRPOConfig(clip_high=0.2, dual_clip=0.0)),
    "truncated_is": GRPO(GRPOConfig(clip_high=0.2, dual_clip=0.0)),
    "gspo": GSPO(GSPO.Config(clip_low=0.03, clip_high=0.04)),
    "cispo": CISPO(CISPO.Config(clip_high=0.3)),
}


def _reduce(loss, aggregation):
    if aggregation == "token":
        return loss.mean()
    if aggregation == "sequence":
        return torch.stack([part.mean() for part in loss.split(LENGTHS)]).mean()
    return loss.sum() / (len(LENGTHS) * MAX_NEW_TOKENS)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_and_gradient_are_trls(name):
    algorithm, ragged = LOSSES[name], {k: v[MASK] for k, v in INPUTS.items() if v.shape == MASK.shape}
    logprobs = ragged["new"].clone().requires_grad_(True)
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=ragged["old"],
        advantages=INPUTS["advantages"][SEQUENCE],
        sequence=SEQUENCE,
        num_sequences=len(LENGTHS),
        ref_logprobs=ragged["ref"],
        rollout_logprobs=ragged["rollout"] if name == "truncated_is" else None,
        kl_coefficient=0.04 if name in ("k3_in_loss", "truncated_is") else 0.0,
    )
    loss = _reduce(algorithm.loss(batch).loss, algorithm.config.aggregation)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    stored = STORED["losses"][name]
    assert loss.item() == pytest.approx(stored["loss"], rel=1e-10)
    expected = torch.tensor(stored["gradient"], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_the_cases_tell_the_settings_apart():
    losses = [STORED["losses"][name]["loss"] for name in LOSSES]
    assert len(set(losses)) == len(losses)
    assert set(LOSSES) == set(STORED["losses"])


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_stored_numbers_are_what_the_installed_trl_says():
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.run(
        [sys.executable, str(HERE / "trl_reference.py")], capture_output=True, env=environment, check=True
    ).stdout
    installed = json.loads(output)
    for name, advantages in STORED["advantages"].items():
        assert installed["advantages"][name] == pytest.approx(advantages, rel=1e-5, abs=1e-6)
    for name, stored in STORED["losses"].items():
        assert installed["losses"][name]["loss"] == pytest.approx(stored["loss"], rel=1e-9)
        assert installed["losses"][name]["gradient"] == pytest.approx(stored["gradient"], rel=1e-9, abs=1e-12)
