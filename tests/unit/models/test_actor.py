"""Loading the actor."""

import pytest
import torch
from transformers import GPTJConfig, GPTJForCausalLM, MambaConfig, MambaForCausalLM

from model_builders import build_tokenizer
from multitask_rl.config.run import ModelConfig
from multitask_rl.models.actor import load_actor

MODELS = {
    "attention of its own": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=60, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    ),
    "none": lambda: MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1)),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
@torch.no_grad()
def test_a_model_without_the_usual_attention_is_loaded(build, tmp_path):
    model = build().eval()
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    loaded = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu").model
    ids = torch.arange(2, 12).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
