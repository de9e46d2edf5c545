"""Batches under a token budget and packed sequences, against plain implementations."""

import random

import pytest
import torch
from torch.utils.data import DataLoader

from model_builders import build_model, build_tokenizer
from multitask_rl.api.batch_sampler import DynamicBatchSampler
from multitask_rl.api.packed_dataset import PackedDataset
from multitask_rl.errors import ConfigError, DataError

RANDOM = random.Random(0)
LENGTHS = [RANDOM.randint(1, 60) for _ in range(200)]
ROWS = [{"input_ids": [2 + i % 30] * length} for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_hold_every_row_once_within_the_budget(shuffle: bool) -> None:
    sampler = DynamicBatchSampler(ROWS, max_tokens_per_batch=256, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(len(ROWS)))
    assert all(len(batch) * max(LENGTHS[i] for i in batch) <= 256 for batch in batches)
    # ascending order is what keeps padding small: less than a tenth here, a half in the order of the rows
    cells = sum(len(batch) * max(LENGTHS[i] for i in batch) for batch in batches)
    assert sum(LENGTHS) / cells > 0.9
    assert len(sampler) == len(batches)


def test_an_epoch_has_an_order_of_its_own_and_ranks_share_it() -> None:
    sampler = DynamicBatchSampler(ROWS, 256, shuffle=True, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    ranks = [
        list(DynamicBatchSampler(ROWS, 256, shuffle=True, seed=3, num_replicas=3, rank=r)) for r in range(3)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert {i for batches in ranks for batch in batches for i in batch} == set(range(len(ROWS)))


def test_a_loader_of_torch_takes_it_and_texts_count_by_tokenizer_or_bytes() -> None:
    texts = [{"prompt": "ä" * n} for n in (1, 5, 9, 30)]
    assert DynamicBatchSampler(texts, 64).lengths == [2, 10, 18, 60]
    assert DynamicBatchSampler(texts, 64, tokenizer=build_tokenizer()).lengths == [1, 5, 9, 30]
    loader = DataLoader(texts, batch_sampler=DynamicBatchSampler(texts, 64), collate_fn=list)
    assert sorted(len(row["prompt"]) for batch in loader for row in batch) == [1, 5, 9, 30]
    with pytest.raises(ConfigError, match="max_tokens_per_batch must be >= 1"):
        DynamicBatchSampler(texts, 0)
    with pytest.raises(ConfigError, match="length of a row of type int is not known"):
        DynamicBatchSampler([3], 8)


@torch.no_grad()
def test_packed_rows_get_the_logits_they_get_alone() -> None:
    model = build_model()
    dataset = PackedDataset(ROWS[:20], max_seq_len=128)
    seen = []
    for index in range(len(dataset)):
        item = dataset[index]
        given = {name: item[name][None] for name in ("input_ids", "position_ids")}
        packed = model(**given, use_cache=False).logits[0]
        for number, row in enumerate(dataset.packs[index]):
            ids = torch.tensor([ROWS[row]["input_ids"]])
            alone = model(input_ids=ids).logits[0]
            torch.testing.assert_close(packed[item["sequence_ids"] == number], alone, atol=2e-5, rtol=1e-4)
            seen.append(row)
    assert sorted(seen) == list(range(20))


def test_sequences_are_full_and_none_is_longer_than_allowed() -> None:
    dataset = PackedDataset(ROWS, max_seq_len=128)
    assert all(len(dataset[i]["input_ids"]) <= 128 for i in range(len(dataset)))
    assert len(dataset) == -(-sum(LENGTHS) // 128), "first-fit decreasing reaches the least number here"
    assert dataset.fill > 0.97
    assert len(PackedDataset(ROWS, 128, pack_to_max_length=False)) == len(ROWS)
    short = PackedDataset(ROWS, max_seq_len=20)
    assert max(len(short[i]["input_ids"]) for i in range(len(short))) == 20
    assert short.num_cut == sum(length > 20 for length in LENGTHS)


def test_only_the_response_is_learned_from_and_padding_never_is() -> None:
    rows = [{"prompt": "ab", "response": "cde"}, {"prompt": "fg"}]
    dataset = PackedDataset(rows, 16, tokenizer=build_tokenizer(), pad_to_max_length=True)
    item = dataset[0]
    assert [len(value) for value in item.values()] == [16] * 4
    ids = item["input_ids"].tolist()
    # prompt of the first row, then its response; the second row has no response: all but its first token
    assert item["labels"].tolist() == [-100, -100, *ids[2:5], -100, ids[6], *[-100] * 9]
    assert item["sequence_ids"].tolist() == [0] * 5 + [1] * 2 + [-1] * 9


def test_a_loader_pads_a_batch_to_its_longest_sequence() -> None:
    dataset = PackedDataset([{"input_ids": [7] * length} for length in (2, 5)], 6)
    (batch,) = DataLoader(dataset, batch_size=2)
    assert batch["input_ids"].tolist() == [[7] * 5, [7, 7, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 7, 7, 7, 7], [-100, 7, -100, -100, -100]]
    assert batch["sequence_ids"].tolist() == [[0] * 5, [0, 0, -1, -1, -1]]


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        PackedDataset([], 16)
    with pytest.raises(ConfigError, match="give tokenizer"):
        len(PackedDataset([{"prompt": "a"}], 16))
    with pytest.raises(DataError, match="row 0 has no tokens"):
        len(PackedDataset([{"input_ids": []}], 16))
