import torch
from transformers import Qwen2Config

from multitask_rl.rollout.cache import PreallocatedLayer, make_cache, select_rows


class Holder:
    def __init__(self, config):
        self.config = config


def test_rows_keep_their_states_while_others_leave_and_tokens_arrive():
    torch.manual_seed(0)
    cache = make_cache(Holder(Qwen2Config(num_hidden_layers=1)), 12)
    assert isinstance(cache.layers[0], PreallocatedLayer)
    prompt = torch.randn(2, 3, 4, 5)
    cache.update(prompt, -prompt, 0)
    rows = torch.tensor([0, 0, 0, 1, 1])
    cache.batch_select_indices(rows)
    expected = prompt[rows]
    for kept in ([0, 2, 3, 4], [1, 3], [0]):
        token = torch.randn(len(expected), 3, 1, 5)
        keys, values = cache.update(token, -token, 0)
        expected = torch.cat([expected, token], dim=2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)
        order = select_rows(cache, torch.tensor(kept), len(expected))
        assert sorted(order.tolist()) == kept
        expected = expected[order]
        assert torch.equal(cache.layers[0].keys, expected)


def test_layers_that_keep_something_else_stay_as_transformers_makes_them():
    windowed = Qwen2Config(
        num_hidden_layers=2, use_sliding_window=True, sliding_window=8, max_window_layers=0
    )
    layers = make_cache(Holder(windowed), 12).layers
    assert not any(isinstance(layer, PreallocatedLayer) for layer in layers)
