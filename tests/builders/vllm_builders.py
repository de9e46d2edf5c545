"""A model that vLLM runs on a CPU (heads of 32), and a tokenizer of characters."""

from collections.abc import Sequence
from typing import Any

import torch

EOS = 1


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyz .,!?\n0123456789+-*/="
    vocabulary = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, **{c: i + 3 for i, c in enumerate(characters)}}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def small_model(tie: bool, layers: int = 2) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(small_tokenizer()),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            eos_token_id=EOS,
            pad_token_id=0,
            tie_word_embeddings=tie,
            initializer_range=0.15,
        )
        return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def distance(engine: Any, model: Any, ids: Sequence[int]) -> float:
    """Largest difference between the engine's and the model's log-probabilities of the tokens, in nats."""
    tokens = torch.tensor([list(ids)], device=next(model.parameters()).device)
    logprobs = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
    expected = logprobs.gather(-1, tokens[0, 1:, None])[:, 0].cpu()
    return float((expected - torch.tensor(engine.probe(ids))).abs().max())
