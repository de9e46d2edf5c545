"""Batches of similar length under a token budget, for any ``torch`` data loader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Sampler

from multitask_rl.errors import ConfigError


class DynamicBatchSampler(Sampler[list[int]]):
    """Batch sampler: indices of rows of similar length, as many as a token budget takes.

    A batch costs its number of rows times its longest row, which is what padding makes of it. Every row is in
    one batch of an epoch.

    Args:
        dataset: rows with a length; what ``length`` reads.
        max_tokens_per_batch: most tokens of a padded batch. A longer row is a batch of its own.
        tokenizer: counts the tokens of texts; None counts UTF-8 bytes, of which a byte-level tokenizer never
            makes more tokens.
        length: row -> number of tokens. Default: ``len(row["input_ids"])``, else the text under ``prompt`` or
            ``text``, else the row itself where it is a text.
        shuffle: draw the order of batches anew in every epoch (``set_epoch``), and rows of one length too.
        seed: of the order.
        num_replicas: processes that share the batches.
        rank: this process; every process gets the same number of batches, the last ones twice if need be.

    Raises:
        ConfigError: a budget below 1, no such rank, or a row whose length cannot be told.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        max_tokens_per_batch: int,
        *,
        tokenizer: Any = None,
        length: Callable[[Any], int] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        if max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch must be >= 1, got {max_tokens_per_batch!r}")
        if not 0 <= rank < num_replicas:
            raise ConfigError(f"rank must be in [0, num_replicas), got {rank!r} of {num_replicas!r}")
        self.max_tokens_per_batch = max_tokens_per_batch
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.num_replicas = num_replicas
        self.rank = rank
        measure = length or (lambda row: row_length(row, tokenizer))
        self.lengths = [measure(dataset[index]) for index in range(len(dataset))]
        """Tokens of each row."""
        self._batches = self._cut()

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of ``epoch`` from the next iteration on; without ``shuffle`` nothing changes."""
        self.epoch = epoch
        self._batches = self._cut()

    def _cut(self) -> list[list[int]]:
        random_ = random.Random(f"{self.seed}/{self.epoch}")
        order = list(range(len(self.lengths)))
        if self.shuffle:
            random_.shuffle(order)
        order.sort(key=self.lengths.__getitem__)
        batches: list[list[int]] = []
        for index in order:  # ascending: the newest row is the widest of its batch
            if not batches or self.lengths[index] * (len(batches[-1]) + 1) > self.max_tokens_per_batch:
                batches.append([])
            batches[-1].append(index)
        if self.shuffle:
            random_.shuffle(batches)
        if batches and (missing := -len(batches) % self.num_replicas):
            batches += (batches * missing)[:missing]
        return batches[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def row_length(row: Any, tokenizer: Any) -> int:
    """Return the number of tokens of ``row`` (see ``DynamicBatchSampler``).

    Raises:
        ConfigError: it holds neither token ids nor a text.
    """
    if isinstance(row, Mapping):
        if "input_ids" in row:
            return len(row["input_ids"])
        row = next((row[key] for key in ("prompt", "text") if isinstance(row.get(key), str)), row)
    if not isinstance(row, str):
        raise ConfigError(
            f"the length of a row of type {type(row).__name__} is not known; give rows with 'input_ids', "
            "'prompt' or 'text', or length=..."
        )
    return len(tokenizer(row, add_special_tokens=False)["input_ids"]) if tokenizer else len(row.encode())
