"""Tiny models of many architectures."""

import importlib

import torch

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ARCHITECTURES = {
    "qwen2.Qwen2": {"num_key_value_heads": 2},
    "llama.Llama": {"num_key_value_heads": 2},
    "mistral.Mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "gpt_neox.GPTNeoX": {},
    "opt.OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom.Bloom": {"n_layer": 2, "n_head": 4},
    "mamba.Mamba": {},
    "lfm2.Lfm2": {"num_key_value_heads": 2, "block_ff_dim": 64, "full_attn_idxs": [1]},
    "granitemoehybrid.GraniteMoeHybrid": {
        **{"num_key_value_heads": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    },
}


def build(name: str):
    folder, prefix = name.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configuration = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    torch.manual_seed(0)
    config = getattr(configuration, f"{prefix}Config")(**SIZES, **ARCHITECTURES[name])
    return getattr(module, f"{prefix}ForCausalLM")(config).eval()
