"""AdamW with moments of one byte: what they lose, what they keep, and that a checkpoint loses nothing."""

import pytest
import torch

from multitask_rl.config.run import CriticConfig, OptimizerConfig
from multitask_rl.training.eight_bit import BLOCK, SMALLEST, EightBitAdamW, pack, unpack
from multitask_rl.training.optimizer import ActorCriticOptimizer

SHAPE = torch.Size([SMALLEST // 64, 70])
"""Not a multiple of the block."""


def moments(scale: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    first = torch.randn(SHAPE) * torch.logspace(-6, 0, SHAPE[1]) * scale
    return {
        "step": torch.tensor(3.0),
        "exp_avg": first,
        "exp_avg_sq": first.square() * (1 + torch.rand(SHAPE)),
    }


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_a_number_is_kept_to_a_few_percent_unless_it_is_far_below_its_block(scale):
    given = moments(scale)
    found = unpack(pack(given), SHAPE)
    for key, least, levels in (("exp_avg", 1e-2, 127), ("exp_avg_sq", 1e-4, 256)):
        flat = given[key].reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % BLOCK)]).view(-1, BLOCK)
        tops = padded.abs().amax(-1).repeat_interleave(BLOCK)[: len(flat)]
        far = flat.abs() < least * tops
        errors = (found[key].reshape(-1) - flat).abs() / flat.abs()
        assert not far.all()
        # half a code, at a tenth of the codes, to the power that the codes count roots of
        assert errors[~far].max() < 1.05 * (2 if levels == 127 else 4) * 0.5 / (0.1 * levels)


def test_what_is_unpacked_is_packed_to_the_same_codes():
    packed = pack(moments())
    again = pack(unpack(packed, SHAPE))
    assert set(packed) == {"step", *(f"exp_avg{s}_{k}" for s in ("", "_sq") for k in ("codes", "scales"))}
    for key, value in packed.items():
        assert torch.equal(again[key], value), key


def test_small_moments_stay_float32():
    small = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.randn(SMALLEST - 1),
        "exp_avg_sq": torch.rand(SMALLEST - 1),
    }
    found = pack(small)
    assert all(torch.equal(found[key], small[key]) for key in small)


def test_a_second_moment_decays_as_it_should_and_never_reaches_0():
    """A percent a step is less than a code: rounded to the nearest one it would stand still."""
    parameter = torch.nn.Parameter(torch.zeros(64, BLOCK))
    groups = [{"params": [parameter], "lr": 0.0}]
    optimizer = EightBitAdamW(groups, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    torch.manual_seed(1)
    parameter.grad = torch.rand(64, BLOCK) + 0.5
    parameter.grad[:, 0] = 3.0
    optimizer.step()
    before = unpack(optimizer.state[parameter], parameter.shape)["exp_avg_sq"]
    # one number of each block stays large: it holds the block's scale
    parameter.grad = torch.zeros(64, BLOCK)
    parameter.grad[:, 0] = 3.0
    for _ in range(100):
        optimizer.step()
    after = unpack(optimizer.state[parameter], parameter.shape)["exp_avg_sq"]
    assert float((after[:, 1:] / before[:, 1:]).mean()) == pytest.approx(0.99**100, rel=0.02)
    assert after.min() > 0


def test_weights_whose_gradient_ends_stay_where_they_are():
    """They share blocks with rows that go on: their moments have to decay, the scales do not."""
    moved = {}
    for name, kind in (("int8", EightBitAdamW), ("float32", torch.optim.AdamW)):
        parameter = torch.nn.Parameter(torch.zeros(24, 896))
        settings = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
        optimizer = kind([{"params": [parameter], "lr": 1.0}], **settings)
        torch.manual_seed(4)
        for step in range(300):
            parameter.grad = torch.randn(24, 896)
            if step >= 20:
                parameter.grad[::2] = 0.0
            optimizer.step()
        moved[name] = float(parameter.detach()[::2].abs().max())
    assert moved["int8"] == pytest.approx(moved["float32"], rel=0.1)


@pytest.mark.parametrize("shape", [(20, 30), (200, 300)])
def test_a_weight_that_is_a_transposed_view_moves(shape):
    weights = torch.randn(shape)
    found = []
    for given in (weights.t(), weights.t().contiguous()):
        parameter = torch.nn.Parameter(given.clone())
        groups = [{"params": [parameter], "lr": 0.1}]
        optimizer = EightBitAdamW(groups, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter) * parameter.detach()
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


def train(optimizer, parameter, steps=200):
    """Fit a linear map from noisy batches; return the mean squared error of the weights."""
    torch.manual_seed(2)
    target = torch.randn(SHAPE)
    for _ in range(steps):
        inputs = torch.randn(32, SHAPE[1])
        parameter.grad = None
        ((inputs @ (parameter - target).T) + 0.5 * torch.randn(32, SHAPE[0])).square().mean().backward()
        optimizer.step()
    return float((parameter.detach() - target).square().mean())


def test_training_goes_as_with_float32_moments():
    errors = {}
    for name, kind in (("int8", EightBitAdamW), ("float32", torch.optim.AdamW)):
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        settings = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
        errors[name] = train(kind([{"params": [parameter], "lr": 0.02}], **settings), parameter)
    assert errors["float32"] < 0.1
    assert errors["int8"] == pytest.approx(errors["float32"], rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_resumes_to_the_same_bits(dtype):
    def build(weights):
        parameter = torch.nn.Parameter(weights.clone())
        config = OptimizerConfig(learning_rate=0.01, moments="int8")
        return parameter, ActorCriticOptimizer([parameter], [], config, CriticConfig())

    def step(parameter, optimizer, number):
        parameter.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
        optimizer.step(1.0)

    whole, optimizer = build(torch.zeros(SHAPE, dtype=dtype))
    for number in range(3):
        step(whole, optimizer, number)
    saved = optimizer.tensors({id(whole): "weight"})
    assert saved["weight|exp_avg"].dtype == saved["weight|exp_avg_sq"].dtype == torch.float32
    assert saved["weight|exp_avg"].shape == SHAPE
    resumed, other = build(whole.detach())
    other.load_tensors({name: value.clone() for name, value in saved.items()}, {"weight": resumed})
    for number in range(3, 6):
        step(whole, optimizer, number)
        step(resumed, other, number)
    assert torch.equal(resumed, whole)


def test_moments_take_a_quarter_of_the_bytes():
    sizes = {}
    for moments_of in ("float32", "int8"):
        parameter = torch.nn.Parameter(torch.zeros(256, 256))
        optimizer = ActorCriticOptimizer([parameter], [], OptimizerConfig(moments=moments_of), CriticConfig())
        parameter.grad = torch.ones(256, 256)
        optimizer.step(1.0)
        sizes[moments_of] = optimizer.state_bytes
    assert sizes["int8"] < 0.26 * sizes["float32"]


def test_weights_of_float64_move():
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.float64))
    optimizer = ActorCriticOptimizer(
        [weight], [], OptimizerConfig(moments="int8", learning_rate=1e-2), CriticConfig()
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step(1.0)
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, -1e-2), rtol=1e-3, atol=0.0)
