"""Rows of different lengths, several to a sequence of fixed length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from multitask_rl.errors import ConfigError, DataError

IGNORED = -100
"""Label of a token that no loss counts, as ``transformers`` and torch's cross entropy read it."""


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Packs rows into sequences of at most ``max_seq_len`` tokens; each item is what a causal model takes.

    ``model(input_ids=..., position_ids=..., use_cache=False)`` computes every packed row as if it stood
    alone, in models of ``transformers`` that tell rows apart by their restarted positions (Llama, Qwen, Phi-3
    and most others).

    Args:
        raw_data: rows with ``input_ids``, or with the texts ``prompt`` and ``response`` (or ``text``). A
            response alone is learned from where there is one, else every token.
        max_seq_len: longest sequence, in tokens. Rows that are longer are cut there, and counted in
            ``num_cut``.
        pack_to_max_length: fill sequences with rows, longest first (first-fit decreasing); False = a row a
            sequence.
        tokenizer: reads texts; needed unless every row holds ``input_ids``.
        pad_to_max_length: pad every sequence to ``max_seq_len``. The batches of a torch ``DataLoader`` are
            padded to their longest sequence in any case.

    Raises:
        ConfigError: ``max_seq_len`` below 1, or (on first use) texts without a tokenizer.
        DataError: no rows, or (on first use) a row without tokens.
    """

    def __init__(
        self,
        raw_data: Sequence[Mapping[str, Any]],
        max_seq_len: int,
        pack_to_max_length: bool = True,
        *,
        tokenizer: Any = None,
        pad_to_max_length: bool = False,
    ) -> None:
        if max_seq_len < 1:
            raise ConfigError(f"max_seq_len must be >= 1, got {max_seq_len!r}")
        if not len(raw_data):
            raise DataError("PackedDataset: raw_data has no rows")
        self.raw_data = raw_data
        self.max_seq_len = max_seq_len
        self.pack_to_max_length = pack_to_max_length
        self.tokenizer = tokenizer
        self.pad_to_max_length = pad_to_max_length
        self.num_cut = 0
        """Rows longer than ``max_seq_len``, once packed."""
        self._packs: list[list[int]] | None = None
        self._num_tokens = 0

    @property
    def packs(self) -> list[list[int]]:
        """Rows of each sequence; computed on first use, for which texts are encoded once."""
        if self._packs is None:
            if self.tokenizer is None and any("input_ids" not in row for row in self.raw_data):
                raise ConfigError(
                    "PackedDataset: the rows hold texts; give tokenizer=... or rows with 'input_ids'"
                )
            whole = [len(self._encode(i)[0]) for i in range(len(self.raw_data))]
            self.num_cut = sum(length > self.max_seq_len for length in whole)
            lengths = [min(length, self.max_seq_len) for length in whole]
            self._num_tokens = sum(lengths)
            in_rows = [[i] for i in range(len(lengths))]
            self._packs = _first_fit(lengths, self.max_seq_len) if self.pack_to_max_length else in_rows
        return self._packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sequence ``index``.

        Returns:
            ``input_ids`` [S], ``position_ids`` [S] (from 0 in every row), ``labels`` [S] (-100 where no loss
            is taken, the first token of a row included), ``sequence_ids`` [S] (which row; -1 = padding).
        """
        ids: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        sequences: list[int] = []
        for number, row in enumerate(self.packs[index]):
            tokens, first_learned = self._encode(row)
            tokens = tokens[: self.max_seq_len]
            ids += tokens
            positions += range(len(tokens))
            labels += [t if i >= max(first_learned, 1) else IGNORED for i, t in enumerate(tokens)]
            sequences += [number] * len(tokens)
        named = {"input_ids": ids, "position_ids": positions, "labels": labels, "sequence_ids": sequences}
        item = {name: torch.tensor(values) for name, values in named.items()}
        return self._padded(item, self.max_seq_len) if self.pad_to_max_length else item

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return sequences padded to the longest of them: what a ``DataLoader`` stacks to a batch."""
        items = [self[index] for index in indices]
        length = max(len(item["input_ids"]) for item in items)
        return [self._padded(item, length) for item in items]

    def _padded(self, item: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        missing = length - len(item["input_ids"])
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        values = {"input_ids": pad, "labels": IGNORED, "sequence_ids": -1}
        tails = {name: torch.full((missing,), value) for name, value in values.items()}
        tails["position_ids"] = torch.arange(missing)
        return {name: torch.cat([tensor, tails[name]]) for name, tensor in item.items()}

    @property
    def fill(self) -> float:
        """Share of ``len(self) * max_seq_len`` tokens that rows take."""
        capacity = len(self) * self.max_seq_len
        return self._num_tokens / capacity

    def _encode(self, index: int) -> tuple[list[int], int]:
        """Return the token ids of a row, and the first that is learned from."""
        row = self.raw_data[index]
        if "input_ids" in row:
            tokens, first = [int(i) for i in row["input_ids"]], int(row.get("num_prompt_tokens", 0))
        else:
            prompt = self._read(row.get("prompt", ""))
            tokens, first = [*prompt, *self._read(row.get("response", row.get("text", "")))], len(prompt)
            if first == len(tokens):  # a prompt alone: every token is learned from
                first = 0
        if not tokens:
            raise DataError(f"PackedDataset: row {index} has no tokens (columns: {', '.join(map(str, row))})")
        return tokens, first

    def _read(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices by pack, each within ``budget``: first-fit decreasing, over a tree of free space."""
    size = 1 << max(0, (len(lengths) - 1).bit_length())
    free = [budget] * (2 * size)  # free[size + pack]; a parent holds the larger of its two
    packs: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= lengths[index] else 2 * node + 1
        packs[node - size].append(index)
        free[node] -= lengths[index]
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return [sorted(pack) for pack in packs if pack]
