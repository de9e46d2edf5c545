"""Activations that wait elsewhere: the same gradient, and the weights do not move."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_builders import build_actor, build_model
from multitask_rl.config.run import ModelConfig, RunConfig
from multitask_rl.training import forward
from multitask_rl.training.critic import Critic
from multitask_rl.training.microbatch import build_microbatches
from multitask_rl.training.runner import ActivationOffload, ModelRunner

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


class CopiesOfWeights(TorchDispatchMode):
    """The number of copies into a tensor of the shape of the head, or of its transpose."""

    def __init__(self, shape):
        super().__init__()
        self.shapes, self.number = {tuple(shape), tuple(shape)[::-1]}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.number += tuple(args[0].shape) in self.shapes
        return function(*args, **(kwargs or {}))


def test_a_head_in_slices_is_not_copied_under_autocast(monkeypatch) -> None:
    actor = build_actor(vocab_size=211)
    monkeypatch.setattr(forward, "SLICE_CELLS", 8 * 211)
    config = RunConfig(model=ModelConfig(autocast=True, activation_offload=True))
    runner = ModelRunner(actor, Critic(), config)
    responses = [[3 + i + j for j in range(20)] for i in range(3)]
    (batch,) = build_microbatches([[5, 6]] * 3, responses, max_tokens=10**6, layout="packed", pad_token_id=0)
    head = actor.model.get_output_embeddings().weight
    with CopiesOfWeights(head.shape) as seen:
        out = runner.forward(replace(batch, indices=[]), [])
    out.logprobs.sum().backward()
    assert seen.number == 0
