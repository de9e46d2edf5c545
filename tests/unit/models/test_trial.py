"""What a model can compute is tried on ordinary tokens: special tokens say nothing about it."""

from __future__ import annotations

import pytest
import torch

from model_builders import build_model
from multitask_rl.models.trial import trial_ids
from multitask_rl.rollout.decoder import can_decode_cached, can_share_prompts
from multitask_rl.training.microbatch import supports_packing
from multitask_rl.training.shared_prompt import supports_shared_prompts

TRIALS = [can_share_prompts, can_decode_cached, supports_packing, supports_shared_prompts]


@pytest.mark.parametrize("tried", TRIALS)
def test_special_tokens_at_either_end_of_the_vocabulary_do_not_count(tried):
    model = build_model(vocab_size=512, tied=False)
    with torch.no_grad():
        ends = model.get_input_embeddings().weight
        ends[1:64] = ends[-64:] = torch.nan  # 0 fills up shorter rows
    assert tried(model)


@pytest.mark.parametrize("size", [3, 47, 512])
def test_ids_are_of_the_vocabulary(size):
    assert set(trial_ids(build_model(vocab_size=size), range(80))) <= set(range(size))
