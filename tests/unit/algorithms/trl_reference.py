"""Numbers of TRL's own code on fixed tensors: what ``test_trl_reference.py`` compares with.

Needs ``trl`` (1.16.0 wrote the stored numbers) beside torch and transformers, which only this file uses:

    python trl_reference.py > trl_1_16_0.json

The trainers are TRL's, on an untrained model of a few hundred parameters; injected are the rewards that its
advantage code reads and the log-probabilities that its loss code reads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import MethodType
from typing import Any

import torch

GROUP, PROMPTS = 4, 3
LENGTHS = [3, 5, 1, 4, 2, 5, 5, 3, 1, 2, 4, 5]
WIDTH, MAX_NEW_TOKENS = max(LENGTHS), 8

LOSSES: dict[str, dict[str, Any]] = {
    # name -> attributes of the trainer (``delta`` is one of its arguments)
    "grpo": {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "token_mean_clip_higher": {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "dual_clip": {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": 1.5},
    "k3_in_loss": {"loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.04},
    "truncated_is": {
        "loss_type": "bnpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.04,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
    },
    "gspo": {
        "loss_type": "grpo",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
        "importance_sampling_level": "sequence",
    },
    "cispo": {"loss_type": "cispo", "epsilon_low": 0.2, "epsilon_high": 1.3},
}

DEFAULTS = {"beta": 0.0, "use_vllm": False, "importance_sampling_level": "token"}


def make_inputs() -> dict[str, Any]:
    """Return the fixed tensors, padded [B, WIDTH] in float64, and rewards [B] and [B, 2]."""
    generator = torch.Generator().manual_seed(16)
    count = GROUP * PROMPTS

    def noise() -> torch.Tensor:
        return torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)

    old = -noise().abs() - 0.05
    components = torch.randint(0, 4, (count, 2), generator=generator).double()
    components[:, 1] *= 2.5
    components[GROUP : 2 * GROUP, 0] = 1.0
    return {
        "old": old,
        "new": old + 0.4 * noise(),
        "ref": old + 0.3 * noise(),
        "rollout": old + 0.5 * noise(),
        "advantages": torch.randn(count, dtype=torch.float64, generator=generator),
        "components": components,
    }


def _build_trainer(cls: Any, config_cls: Any, directory: str, **settings: Any) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "a", "b"])}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=4,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )
    config = config_cls(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=GROUP * PROMPTS,
        per_device_eval_batch_size=GROUP * PROMPTS,
        num_generations=GROUP,
        num_generations_eval=GROUP,
        max_completion_length=MAX_NEW_TOKENS,
        report_to=[],
        **settings,
    )
    trainer = cls(
        model=model,
        reward_funcs=[_unused_reward, _unused_reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * PROMPTS),
        processing_class=tokenizer,
    )
    trainer.model.eval()  # no scaling by gradient accumulation
    return trainer


def _unused_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _advantages(trainer: Any, components: torch.Tensor) -> list[float]:
    """Run TRL's generation and scoring with its reward call replaced by ``components`` [B, 2]."""
    trainer._calculate_rewards = MethodType(lambda self, *args: components.float(), trainer)
    rows = [{"prompt": "a b"} for _ in range(GROUP * PROMPTS)]
    return trainer._generate_and_score_completions(rows)["advantages"].tolist()


def _loss(trainer: Any, inputs: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Run TRL's loss with its forward pass replaced by the fixed log-probabilities."""
    for name, value in {**DEFAULTS, **settings}.items():
        if name != "delta":
            setattr(trainer, name, value)
    trainer.args.delta = settings.get("delta")
    trainer.args.use_bias_correction_kl = False  # plain k3, as in the algorithms under test
    logprobs = inputs["new"].clone().requires_grad_(True)
    outputs = (logprobs, torch.zeros_like(logprobs), None)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: outputs
    mask = (torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]).long()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.full((GROUP * PROMPTS, 2), 2),
            "prompt_mask": torch.ones(GROUP * PROMPTS, 2, dtype=torch.long),
            "completion_ids": torch.full_like(mask, 3),
            "completion_mask": mask,
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs["old"],
            "ref_per_token_logps": inputs["ref"],
            "importance_sampling_ratio": (inputs["old"] - inputs["rollout"]).exp().clamp(max=2.0),
            "num_items_in_batch": mask.sum(),
        },
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.item(), "gradient": gradient[mask.bool()].tolist()}


def compute_reference() -> dict[str, Any]:
    """Return all of TRL's numbers, JSON-able."""
    import trl

    inputs = make_inputs()
    with tempfile.TemporaryDirectory() as directory:
        grpo = _build_trainer(trl.GRPOTrainer, trl.GRPOConfig, directory, beta=0.0)
        advantages = {}
        for scale in ("group", "none"):
            grpo.scale_rewards = scale
            advantages[f"grpo_{scale}"] = _advantages(grpo, inputs["components"])
        grpo.multi_objective_aggregation = "normalize_then_sum"
        advantages["gdpo"] = _advantages(grpo, inputs["components"])
        rloo = _build_trainer(trl.RLOOTrainer, trl.RLOOConfig, directory, beta=0.0)
        advantages["rloo"] = _advantages(rloo, inputs["components"])
        losses = {name: _loss(grpo, inputs, settings) for name, settings in LOSSES.items()}
    return {"trl": trl.__version__, "advantages": advantages, "losses": losses}


if __name__ == "__main__":
    json.dump(compute_reference(), sys.stdout, indent=1)
    print()
