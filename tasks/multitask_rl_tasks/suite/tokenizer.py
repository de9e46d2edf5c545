"""A character tokenizer as an ordinary Hugging Face tokenizer: one token per printable ASCII character.

Besides the characters it holds padding, end, unknown and eight reserved control tokens
``<|reward_0|>`` ... ``<|reward_7|>`` for algorithms that condition on a reward level.
"""

from __future__ import annotations

from typing import Any

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""Newline and printable ASCII."""

PAD, EOS, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
CONTROL_TOKENS = tuple(f"<|reward_{level}|>" for level in range(8))


def build_tokenizer(characters: str = CHARACTERS, *, max_length: int = 128) -> Any:
    """Return a ``PreTrainedTokenizerFast`` with one token per character.

    Args:
        characters: the alphabet; anything else becomes the unknown token.
        max_length: context of the models it is made for, in tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNKNOWN, *CONTROL_TOKENS, *characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    # `clean_up_tokenization_spaces` would eat the space before punctuation: the text must round-trip.
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(CONTROL_TOKENS),
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="right",
        # No token types: a pair (prompt, response) is the plain concatenation, which a Llama can read.
        model_input_names=["input_ids", "attention_mask"],
    )
