"""Builders of rollouts and tiny transformers models for the tests of bundled rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multitask_rl.records import Prompt, Rollout


def rollout(response: str, text: str = "a question", **row: Any) -> Rollout:
    prompt = Prompt(task="t", prompt_id="t/0", draw=0, row=row, text=text, prompt_ids=[1])
    return Rollout(prompt=prompt, sample=0, response=response)


WORDS = [
    "good",
    "bad",
    "kill",
    "hello",
    "yes",
    "no",
    "safe",
    "unsafe",
    "user",
    "assistant",
    "what",
    "is",
    "it",
]


def save_tokenizer(directory: Path, words: list[str] | None = None, chat_template: str | None = None) -> Any:
    """Save a word-level tokenizer with <pad>, <unk>, <eos>; return it."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)  # every tiny model passes here; threads that wait for a busy core cost 100 times
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<unk>", "<eos>", *(words or WORDS)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    backend.decoder = decoders.WordPiece(prefix="##")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return tokenizer


def qwen_config(tokenizer: Any, **changes: Any) -> Any:
    from transformers import Qwen2Config

    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    return Qwen2Config(**(sizes | changes))


def train_classifier(
    directory: Path, examples: list[tuple[str, Any]], steps: int = 60, **config: Any
) -> None:
    """Train a tiny Qwen2 classifier on (text, class or target) examples and save it to ``directory``."""
    import torch
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(0)
    tokenizer = save_tokenizer(directory)
    model = Qwen2ForSequenceClassification(qwen_config(tokenizer, **config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tokenizer([text for text, _ in examples], padding=True, padding_side="right", return_tensors="pt")
    target = torch.tensor([label for _, label in examples])
    for _ in range(steps):
        logits = model(**batch).logits
        if logits.shape[1] == 1:
            loss = torch.nn.functional.mse_loss(logits[:, 0], target.float())
        else:
            loss = torch.nn.functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)


def data_directory() -> Path:
    import os

    return Path(os.environ.get("MULTITASK_RL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def real_rows(name: str, limit: int = 0) -> list[dict[str, Any]]:
    """Return ``limit`` rows spread over the file (0 = all); skip the test where the data is absent."""
    import gzip
    import json

    import pytest

    directory = data_directory()
    path = next(
        (p for p in (directory / f"{name}.jsonl", directory / f"{name}.jsonl.gz") if p.is_file()), None
    )
    if path is None:
        pytest.skip(f"real data absent: no {name}.jsonl in {directory} (set MULTITASK_RL_DATA)")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return rows if not limit else rows[:: max(1, len(rows) // limit)][:limit]
