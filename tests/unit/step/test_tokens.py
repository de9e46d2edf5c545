"""What is stored of the tokens of a response."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_builders import build_byte_tokenizer, build_tokenizer
from multitask_rl.records import Scored, TrainSample
from multitask_rl.step.tokens import TokenTexts, advantages_of, with_tokens
from multitask_rl.testing import make_rollout
from multitask_rl.training.backend import CreditedSample


def build_metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2: a space is a part of the word behind it, and the first one of a text is dropped."""
    words = ["<unk>", "<eos>", "a", "▁a", "▁the", "▁cat", "s"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_texts_of_tokens_keep_their_spaces_and_name_special_tokens() -> None:
    assert TokenTexts(build_metaspace_tokenizer()).of([4, 5, 6, 1]) == [" the", " cat", "s", "<eos>"]
    tokenizer = build_byte_tokenizer()
    text = "because it is so 12\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(TokenTexts(tokenizer).of(ids)) == text
    assert len(ids) < len(text), "some tokens have several characters"
    assert TokenTexts(build_tokenizer()).of([3, 3]) == [build_tokenizer().decode([3])] * 2


def test_a_part_of_a_character_is_shown_as_one() -> None:
    tokenizer = build_byte_tokenizer()
    assert TokenTexts(tokenizer).of(tokenizer.encode("é", add_special_tokens=False)) == ["\ufffd"] * 2


def credited(rollout, advantages, ids=None):
    sample = TrainSample(
        scored=Scored(rollout=rollout, reward=1.0),
        prompt_ids=[1],
        response_ids=rollout.response_ids if ids is None else ids,
        rollout_logprobs=[],
    )
    return CreditedSample(sample=sample, advantages=torch.tensor(advantages))


@pytest.mark.parametrize(
    ("parts", "stored"),
    [
        ([[0.123456, -2.0, 0.5]], [0.123, -2.0, 0.5]),
        ([[1.23456, 1.23456, 1.23456]], 1.23),
        ([[0.5, 0.25], [1.0]], [0.5, 0.25, 1.0]),
        ([], None),
    ],
)
def test_advantages_are_rounded_joined_and_one_number_where_they_are_equal(parts, stored) -> None:
    rollout = make_rollout("abc", sample=1)
    rollout.rollout_logprobs = [-0.12345, -0.0001, -7.0]
    known = advantages_of([credited(rollout, own, rollout.response_ids[: len(own)]) for own in parts])
    (one,) = with_tokens([Scored(rollout=rollout, reward=1.0)], TokenTexts(build_tokenizer()), known)
    assert one.tokens is not None
    assert one.tokens.advantages == stored
    assert one.tokens.logprobs == [-0.123, 0.0, -7.0]
    assert len(one.tokens.texts) == 3
    other = make_rollout("abc", sample=2)
    (none,) = with_tokens([Scored(rollout=other, reward=1.0)], TokenTexts(build_tokenizer()), known)
    assert none.tokens is not None
    assert none.tokens.advantages is None
