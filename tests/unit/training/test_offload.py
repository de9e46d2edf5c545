"""Activations that wait elsewhere: the same gradient, and the weights do not move."""

from __future__ import annotations

import torch

from model_builders import build_model
from multitask_rl.training.runner import ActivationOffload

IDS = torch.randint(2, 40, (3, 50), generator=torch.Generator().manual_seed(0))


def _gradients(model: torch.nn.Module, offload: bool) -> list[torch.Tensor]:
    model.zero_grad()
    if offload:
        with ActivationOffload(model):
            loss = model(input_ids=IDS, labels=IDS).loss
    else:
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_the_gradient_is_the_same_bit_for_bit() -> None:
    model = build_model()
    for expected, found in zip(_gradients(model, False), _gradients(model, True), strict=True):
        assert torch.equal(expected, found)


def test_weights_are_not_copied_and_activations_are() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    module = torch.nn.ParameterList([weight])
    x = torch.randn(2, 4, requires_grad=True)
    with ActivationOffload(module):
        hidden = x * 2
        out = (hidden @ weight.t()).exp()
    saved = out.grad_fn._saved_result
    assert saved.data_ptr() != out.data_ptr()
    assert out.grad_fn.next_functions[0][0]._saved_mat2.data_ptr() == weight.data_ptr()
    assert out.grad_fn.next_functions[0][0]._saved_self.data_ptr() != hidden.data_ptr()


def test_a_saved_tensor_keeps_its_strides_and_an_expanded_one_is_not_copied() -> None:
    """CUDA's attention saves a transposed output, and a bias that is expanded to all heads."""
    x, scale = torch.randn(2, 3, 4, requires_grad=True), torch.rand(2, 1, 4)
    with ActivationOffload(torch.nn.ParameterList()):
        out = x.transpose(0, 1).exp()
        scaled = out * scale.expand(2, 3, 4).transpose(0, 1)
    assert out.grad_fn._saved_result.stride() == out.stride() != out.contiguous().stride()
    saved = scaled.grad_fn._saved_other
    assert (saved.data_ptr(), saved.stride()) == (scale.data_ptr(), (0, 4, 1))


def test_an_expanded_part_of_larger_rows_is_not_copied() -> None:
    """The bias of few tokens: its rows are padded, so its storage is larger than the expanded tensor."""
    x, rows = torch.randn(2, 3, 1, requires_grad=True), torch.rand(2, 1, 8)
    with ActivationOffload(torch.nn.ParameterList()):
        scaled = x * rows[..., :1].expand(2, 3, 1)
    saved = scaled.grad_fn._saved_other
    assert (saved.data_ptr(), saved.stride()) == (rows.data_ptr(), (8, 0, 1))
