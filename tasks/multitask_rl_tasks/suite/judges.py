"""The suite's judges, trained and not coded: a reward model and a safety classifier.

Both read ``prompt + response`` and are saved as ordinary Hugging Face directories, which the plugins
``rm_hf`` and ``safety_classifier`` load by path. Both err, as real judges do; their error rates on held-out
prompts are part of what is returned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.seeding import derive_seed, random_stream
from multitask_rl_tasks.suite.base import Row, Split, iterate_rows
from multitask_rl_tasks.suite.preference import Preference, PreferencePair, sample_pair
from multitask_rl_tasks.suite.safe import REFUSAL, Safe, is_violation
from multitask_rl_tasks.suite.settings import JudgeSettings, RewardModelSettings, cached_directory
from multitask_rl_tasks.suite.tokenizer import build_tokenizer
from multitask_rl_tasks.suite.warm_start import build_config

if TYPE_CHECKING:
    from torch import Tensor

SAFETY_LABELS = ("safe", "unsafe")
NUM_TEST_EXAMPLES = 1000
"""Held-out pairs or texts on which the error rates are measured."""


def save_reward_model(directory: Path, settings: RewardModelSettings, *, cache_dir: Path) -> dict[str, Any]:
    """Train a reward model on noisy preference pairs and save it in ``directory`` (cached by settings).

    Loss: ``-log sigmoid(r(chosen) - r(rejected))`` (Bradley-Terry; arXiv:2203.02155, Eq. 1).

    Returns:
        ``accuracy`` (share of held-out pairs ordered as the gold utility does), ``annotator_accuracy`` (the
        same of the training labels), ``parameters``, ``seconds``, ``from_cache``.
    """

    def build(target: Path) -> dict[str, Any]:
        from torch.nn.functional import logsigmoid

        started = time.perf_counter()
        judge = _Judge(settings, num_labels=1)
        pairs = _pairs(settings, "train", settings.num_examples, settings.noise)

        def loss(batch: Sequence[PreferencePair]) -> Tensor:
            texts = [p.prompt + p.chosen for p in batch] + [p.prompt + p.rejected for p in batch]
            chosen, rejected = judge.logits(texts)[:, 0].chunk(2)
            return -logsigmoid(chosen - rejected).mean()

        judge.fit(pairs, loss)
        test = _pairs(settings, "heldout", NUM_TEST_EXAMPLES, 0.0)
        chosen = judge.predict([p.prompt + p.chosen for p in test])[:, 0]
        rejected = judge.predict([p.prompt + p.rejected for p in test])[:, 0]
        return judge.save(target) | {
            "accuracy": float((chosen > rejected).float().mean()),
            "annotator_accuracy": 1.0 - sum(p.is_flipped for p in pairs) / len(pairs),
            "seconds": time.perf_counter() - started,
        }

    return cached_directory(
        directory, cache_dir=cache_dir, kind="reward-model", settings=settings, build=build
    )


def save_safety_classifier(directory: Path, settings: JudgeSettings, *, cache_dir: Path) -> dict[str, Any]:
    """Train a classifier with the labels ``safe`` and ``unsafe`` and save it (cached by settings).

    Returns:
        ``false_positive_rate`` and ``false_negative_rate`` at threshold 1/2 on held-out prompts,
        ``parameters``, ``seconds``, ``from_cache``.
    """

    def build(target: Path) -> dict[str, Any]:
        import torch
        from torch.nn.functional import cross_entropy

        started = time.perf_counter()
        judge = _Judge(
            settings,
            num_labels=len(SAFETY_LABELS),
            id2label=dict(enumerate(SAFETY_LABELS)),
            label2id={label: i for i, label in enumerate(SAFETY_LABELS)},
        )

        def loss(batch: Sequence[tuple[str, bool]]) -> Tensor:
            labels = torch.tensor([int(unsafe) for _, unsafe in batch])
            return cross_entropy(judge.logits([text for text, _ in batch]), labels)

        judge.fit(_exchanges(settings, "train", settings.num_examples, settings.noise), loss)
        test = _exchanges(settings, "heldout", NUM_TEST_EXAMPLES, 0.0)
        flagged = judge.predict([text for text, _ in test]).argmax(dim=1).bool()
        unsafe = torch.tensor([label for _, label in test])
        return judge.save(target) | {
            "false_positive_rate": float(flagged[~unsafe].float().mean()),
            "false_negative_rate": float((~flagged[unsafe]).float().mean()),
            "seconds": time.perf_counter() - started,
        }

    return cached_directory(
        directory, cache_dir=cache_dir, kind="safety-classifier", settings=settings, build=build
    )


def _pairs(settings: RewardModelSettings, split: Split, count: int, noise: float) -> list[PreferencePair]:
    rows = iterate_rows(Preference(), seed=settings.seed, split=split)
    stream = random_stream(settings.seed, "suite-preference-pairs", split)
    return [sample_pair(next(rows), stream, flip_rate=noise, longest=settings.longest) for _ in range(count)]


def _exchanges(settings: JudgeSettings, split: Split, count: int, noise: float) -> list[tuple[str, bool]]:
    """Return (prompt + response, is unsafe), the labels flipped with probability ``noise``."""
    rows = iterate_rows(Safe(), seed=settings.seed, split=split)
    stream = random_stream(settings.seed, "suite-safety-exchanges", split)
    exchanges = []
    for row in (next(rows) for _ in range(count)):
        response = _some_response(row, stream)
        unsafe = is_violation(row["prompt"], response)
        exchanges.append((row["prompt"] + response, unsafe != (stream.random() < noise)))
    return exchanges


def _some_response(row: Row, stream: random.Random) -> str:
    """Return the refusal, the echo, or an echo with one letter changed or lost, as a policy might say."""
    kind = stream.random()
    if kind < 0.4:
        return REFUSAL
    letters = list(row["echo"])
    if kind > 0.7:
        letters[stream.randrange(len(letters))] = stream.choice(["", *"abcdekx"])
    return "".join(letters)


class _Judge:
    """A small Llama with a classification head on the last token."""

    def __init__(self, settings: JudgeSettings, *, num_labels: int, **config: Any) -> None:
        import torch
        from transformers import LlamaForSequenceClassification

        self._settings = settings
        self._tokenizer = build_tokenizer(max_length=settings.size.max_length)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(settings.seed, "suite-judge-weights", num_labels))
            self._model = LlamaForSequenceClassification(
                build_config(settings.size, self._tokenizer, num_labels=num_labels, **config)
            )

    def logits(self, texts: Sequence[str]) -> Tensor:
        """Return [N, L] logits with gradient."""
        encoded = self._tokenizer(list(texts), padding=True, return_tensors="pt")
        logits: Tensor = self._model(**encoded, use_cache=False).logits
        return logits

    def predict(self, texts: Sequence[str]) -> Tensor:
        """Return [N, L] logits without gradient."""
        import torch

        with torch.no_grad():
            return torch.cat([self.logits(texts[i : i + 256]) for i in range(0, len(texts), 256)])

    def fit(self, examples: Sequence[Any], loss: Any) -> None:
        """Minimise ``loss(batch)`` over ``epochs`` passes, the learning rate falling linearly to 0."""
        import torch

        settings = self._settings
        optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True
        )
        batches = list(_shuffled_batches(examples, settings))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
        self._model.train()
        for batch in batches:
            loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self._model.eval()

    def save(self, directory: Path) -> dict[str, Any]:
        """Write model and tokenizer; return the number of parameters."""
        self._model.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        return {"parameters": sum(parameter.numel() for parameter in self._model.parameters())}


def _shuffled_batches(examples: Sequence[Any], settings: JudgeSettings) -> Iterator[list[Any]]:
    stream = random_stream(settings.seed, "suite-judge-order")
    for _ in range(settings.epochs):
        order = stream.sample(range(len(examples)), len(examples))
        for start in range(0, len(order), settings.batch_size):
            yield [examples[i] for i in order[start : start + settings.batch_size]]
