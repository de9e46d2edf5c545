"""Tiny models and samples for tests of learning."""

from __future__ import annotations

import random
from collections.abc import Mapping

from multitask_rl.models.actor import Actor  # first: it leaves scikit-learn out

# isort: split

import torch
from tokenizers import ByteLevelBPETokenizer, Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.models.lora import add_adapters
from multitask_rl.records import Prompt, Rollout, SamplingParams, Scored
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine

VOCABULARY = ["<pad>", "<eos>", *"0123456789abcdefghijklmnopqrstuvwxyz+-=>;,!. "]


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    from tokenizers import decoders

    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """As of real models: every byte is a token, frequent pairs are merged."""
    backend = ByteLevelBPETokenizer()
    text = ['{"answer": 12, "why": "because it is so"}', "yes no maybe", "0 1 2 10 20 100"]
    backend.train_from_iterator(text * 3, vocab_size=300, special_tokens=["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="<eos>")


def build_byte_actor(seed: int = 0) -> Actor:
    tokenizer = build_byte_tokenizer()
    # as with real models, the logits are wider than the vocabulary
    return Actor(build_model(seed, vocab_size=len(tokenizer) + 11), tokenizer, ModelConfig())


def build_model(
    seed: int = 0, *, tied: bool = True, hidden: int = 32, vocab_size: int = len(VOCABULARY)
) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def build_actor(seed: int = 0, **model: object) -> Actor:
    return Actor(build_model(seed, **model), build_tokenizer(), ModelConfig())


def adapted_actor() -> Actor:
    """Of another architecture, with adapters that are not zero."""
    config = GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    settings = ModelConfig(lora=LoraConfig(rank=4))
    model = add_adapters(model, settings.lora)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return Actor(model, build_tokenizer(), settings)


def sample_scored(
    actor: Actor,
    tasks: str = "ab",
    *,
    groups: int = 6,
    size: int = 4,
    seed: int = 0,
    top_p: float = 1.0,
    grammars: Mapping[str, str] = {},
) -> list[Scored]:
    """Ragged rollouts of random prompts with random 0/1 rewards."""
    rng = random.Random(seed)
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0, grammars=lambda: actor.grammars)
    scored = []
    for task in tasks:
        for draw in range(groups):
            ids = [rng.randrange(2, len(VOCABULARY)) for _ in range(rng.randint(2, 30))]
            prompt = Prompt(task=task, prompt_id=f"{task}/{draw}", draw=draw, row={}, text="", prompt_ids=ids)
            sampling = SamplingParams(
                max_new_tokens=rng.randint(3, 20),
                temperature=1.0 if task == "a" else 0.7,
                top_p=top_p if draw % 2 else 1.0,
                grammar=grammars.get(task, ""),
            )
            request = GenerationRequest(
                prompt_ids=ids, sampling=sampling, seeds=[100 * draw + i for i in range(size)]
            )
            for i, generation in enumerate(engine.generate([request])[0]):
                rollout = Rollout(
                    prompt=prompt,
                    sample=i,
                    response_ids=generation.response_ids,
                    rollout_logprobs=generation.rollout_logprobs,
                    sampling=sampling,
                )
                scored.append(Scored(rollout=rollout, reward=float(rng.random() < 0.4)))
    return scored
