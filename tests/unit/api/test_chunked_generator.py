"""Chunked generation samples what the engine samples, however the prompt is cut."""

import pytest

from model_builders import build_actor
from multitask_rl.api.chunked_generator import ChunkedGenerator
from multitask_rl.errors import ConfigError
from multitask_rl.records import SamplingParams

PROMPTS = ["0123456789" * 7, "abc", "what is 1+1?"]
SAMPLING = SamplingParams(max_new_tokens=6)


def test_chunks_and_no_cache_give_the_tokens_of_one_forward() -> None:
    actor = build_actor()
    whole, cut, without = (
        ChunkedGenerator(actor, 128, chunk_size, cache)
        for chunk_size, cache in ((4096, True), (8, True), (4096, False))
    )
    expected = whole.generate(PROMPTS, num_samples=3, sampling=SAMPLING, seed=5)
    assert [len(group) for group in expected] == [3, 3, 3]
    for other in (cut, without):
        found = other.generate(PROMPTS, num_samples=3, sampling=SAMPLING, seed=5)
        for one, two in zip((g for r in expected for g in r), (g for r in found for g in r), strict=True):
            assert one.response_ids == two.response_ids
            assert one.rollout_logprobs == pytest.approx(two.rollout_logprobs, abs=1e-4)
    texts = cut.texts(PROMPTS, num_samples=3, sampling=SAMPLING, seed=5)
    assert texts[1][0] == actor.tokenizer.decode(expected[1][0].response_ids, skip_special_tokens=True)


def test_no_forward_is_longer_than_a_chunk() -> None:
    actor = build_actor()
    widths: list[int] = []
    hook = actor.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: widths.append(inputs[0].numel())
    )
    generator = ChunkedGenerator(actor, 128, chunk_size=16)
    generator.generate(["a"], sampling=SAMPLING)  # tries what the model can
    widths.clear()
    generator.generate([PROMPTS[0]], sampling=SAMPLING)
    hook.remove()
    assert max(widths) <= 16
    assert sum(widths) >= 70


def test_lengths_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    generator = ChunkedGenerator(build_actor(), 32768)
    assert generator.max_length == 256
    assert "cut to the 256 positions" in caplog.text
    short = ChunkedGenerator(build_actor(), 5)
    (group,) = short.generate(["abc"], sampling=SamplingParams(max_new_tokens=50))
    assert len(group[0].response_ids) <= 2
    with pytest.raises(ConfigError, match="must have between 1 and max_length - 1 = 4"):
        short.generate(["abcdefg"])
    with pytest.raises(ConfigError, match="chunk_size must be >= 1"):
        ChunkedGenerator(build_actor(), 8, chunk_size=0)


def test_one_text_is_no_list_of_prompts() -> None:
    """It would be read as a prompt for each of its characters."""
    with pytest.raises(ConfigError, match=r"prompts: expected a list of texts, got one text; give \[text\]"):
        ChunkedGenerator(build_actor(), 64).texts("1+1=")
