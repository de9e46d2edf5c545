"""Stop strings, from the engine to the text that rewards read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_builders import build_byte_tokenizer, build_model
from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.models.actor import Actor
from multitask_rl.records import Prompt, SamplingParams
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.step.stages import RolloutStage


@pytest.mark.parametrize("stop", ["<|end|>", "no", "<|end|> no", "s<|end|>", "be yes"])
def test_a_stop_string_may_hold_special_tokens_and_rewards_read_what_stands_before_it(stop, tmp_path):
    tokenizer = build_byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|call|>", "<|end|>"]})
    answer = tokenizer("maybe<|call|> yes<|end|> no maybe", add_special_tokens=False).input_ids
    model = build_model(vocab_size=len(tokenizer))

    def says(_module: Any, _given: Any, logits: torch.Tensor) -> torch.Tensor:
        """Whatever it reads, it says ``answer``."""
        says.step += 1
        return logits.index_fill(-1, torch.tensor([answer[says.step]]), 50.0)

    actor = Actor(model, tokenizer, ModelConfig())
    engine = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=tmp_path)
    engine._shares_prompts = False  # no forward but those that sample
    says.step = -1
    model.lm_head.register_forward_hook(says)
    run: Any = SimpleNamespace(
        spec=None, sampling=SamplingParams(max_new_tokens=len(answer), stop=(stop,)), group_size=1
    )
    stage = RolloutStage(engine, {"t": run}, tokenizer.decode, seed=0)
    prompt = Prompt(task="t", prompt_id="t/0", draw=0, row={}, text="", prompt_ids=[5, 6])
    (rollout,) = stage.process([prompt])
    whole = tokenizer.decode(rollout.response_ids, skip_special_tokens=False)
    if stop == "be yes":  # a special token stands between its letters
        assert (rollout.finish_reason, rollout.response) == ("length", "maybe yes no maybe")
        return
    assert rollout.finish_reason == "stop"
    assert whole.endswith(stop)
    assert whole.count(stop) == 1
    assert rollout.response == {"no": "maybe yes ", "s<|end|>": "maybe ye"}.get(stop, "maybe yes")
