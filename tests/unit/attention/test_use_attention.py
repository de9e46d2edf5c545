"""One door for every attention of our own: what a model used before comes back."""

import pytest
import torch

from multitask_rl.attention.block import BLOCKS
from multitask_rl.attention.context import CONTEXT
from multitask_rl.attention.interface import current_peers, use_attention
from multitask_rl.attention.shared import SHARED_PROMPT
from rollout_models import build


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_models_attend_as_before_after_the_context_even_when_it_fails(own):
    models = [build("qwen2.Qwen2"), build("qwen2.Qwen2")]
    models[0].set_attn_implementation(own)

    def used():
        return [model.config._attn_implementation for model in models]

    with use_attention(models, BLOCKS):
        with use_attention(models[:1], SHARED_PROMPT):
            assert used() == [SHARED_PROMPT, BLOCKS]
        assert used() == [BLOCKS, BLOCKS]
    with pytest.raises(ZeroDivisionError), use_attention(models, BLOCKS):
        1 / 0  # noqa: B018
    assert used() == [own, "sdpa"]


def test_the_peers_of_the_innermost_context_are_asked():
    outer, inner = object(), object()
    with use_attention([], CONTEXT, peers=outer):
        with use_attention([], CONTEXT, peers=inner):
            assert current_peers() is inner
        assert current_peers() is outer
    with pytest.raises(IndexError):
        current_peers()


def test_cudnn_whose_gradients_may_be_nan_does_not_attend():
    assert not torch.backends.cuda.cudnn_sdp_enabled()
