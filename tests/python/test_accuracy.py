# SPDX-License-Identifier: Apache-2.0
"""The public function against float64, within the bounds of docs/numerics.md, and faults that others had."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_within_bounds,
    channels_last,
    laid_out,
    normal,
    outputs,
)
from steadynorm import accuracy, group_norm

pytestmark = pytest.mark.usefixtures("native")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def parameters(channels: int, dtype=torch.float32, samples: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    row = (samples, channels) if samples else (channels,)
    return (1 + normal(*row, seed=11) / 3).to(dtype), (normal(*row, seed=12) / 3).to(dtype)


# The ruler itself.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_is_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 0.1, 1e30, 1e-30, 1e-44], dtype=dtype)
    following = torch.nextafter(values, torch.tensor(math.inf, dtype=dtype))
    assert torch.equal(accuracy.unit(values.double(), dtype), following.double() - values.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unit_of_narrow_types(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 0.25, 100.0], dtype=dtype)
    following = (values.view(torch.int16) + 1).view(dtype)
    assert torch.equal(accuracy.unit(values.double(), dtype), following.double() - values.double())


@pytest.mark.parametrize("output", ["y", "dx", "dweight", "dbias"])
def test_a_wrong_result_is_noticed(output):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 + 2**-16)

    def wrong(x, groups, weight, bias, eps, activation, out_dtype):
        if output == "y":
            return group_norm(x, groups, weight, bias, eps) * (1 + 2**-18)
        x, weight, bias = (
            Wrong.apply(t) if n == output else t for n, t in (("dx", x), ("dweight", weight), ("dbias", bias))
        )
        return group_norm(x, groups, weight, bias, eps)

    x, dy = normal(2, 6, 50), normal(2, 6, 50, seed=1)
    # Sums whose terms have one sign, so that they are as large as their bound is wide.
    if output == "dbias":
        dy = dy.abs()
    if output == "dweight":
        dy = x.sign()
    measured = accuracy.measure(wrong, x, 3, *parameters(6), dy=dy)
    broken = [m.output for m in measured if not m.ok]
    assert output in broken
    assert output == "y" or broken == [output]  # a factor on y is one on the gradients too


def test_nan_is_noticed():
    measured = accuracy.measure(
        lambda x, *_, **__: group_norm(x, 3).index_fill(2, torch.tensor(4), math.nan), normal(2, 6, 50), 3
    )
    assert not measured[0].ok
    assert measured[0].index[2] == 4


# Within the bounds.


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@layouts
def test_random_volume(layout, dtype, activation):
    x, dy = (laid_out(normal(2, 16, 5, 9, 7, seed=s, dtype=dtype), layout) for s in (1, 2))
    assert_within_bounds(x, 4, *parameters(16), activation=activation, dy=dy)


@pytest.mark.parametrize("which", ["neither", "weight", "bias", "both"])
@layouts
def test_missing_parameters(layout, which):
    weight, bias = parameters(12)
    x, dy = (laid_out(normal(2, 12, 9, 7, seed=s), layout) for s in (1, 2))
    for activation in ("none", "silu"):
        assert_within_bounds(
            x,
            3,
            weight if which in ("weight", "both") else None,
            bias if which in ("bias", "both") else None,
            activation=activation,
            dy=dy,
        )


@layouts
def test_per_sample_parameters(layout):
    x, dy = (laid_out(normal(3, 12, 9, 7, seed=s), layout) for s in (1, 2))
    for activation in ("none", "silu"):
        assert_within_bounds(x, 3, *parameters(12, samples=3), activation=activation, dy=dy)
    weight, _ = parameters(12)
    _, bias = parameters(12, samples=3)
    assert_within_bounds(x, 3, weight, bias, dy=dy)


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4, 1e5, -1e5])
@pytest.mark.parametrize("activation", ["none", "silu"])
@layouts
def test_mean_far_from_zero(layout, activation, ratio):
    x, dy = laid_out(ratio + normal(2, 16, 9, 31), layout), laid_out(normal(2, 16, 9, 31, seed=2), layout)
    assert_within_bounds(x, 4, *parameters(16), activation=activation, dy=dy)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1e6, 1e18, 1e30])
@layouts
def test_huge_and_tiny_values(layout, scale):
    x, dy = laid_out(scale * normal(2, 16, 9, 31), layout), laid_out(normal(2, 16, 9, 31, seed=2), layout)
    assert_within_bounds(x, 4, *parameters(16), dy=dy)


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_backward_took_the_last_dimension_for_the_spatial_size(rank):
    shape = (3, 6, 5, 4, 3, 2)[:rank]
    assert_within_bounds(normal(*shape), 2, *parameters(6), dy=normal(*shape, seed=1))


@pytest.mark.parametrize("D", [3, 5, 7, 10, 30])
@layouts
def test_padding_of_a_rounded_up_block_leaked_into_the_next_group(layout, D):
    shape = (1, 16 * D, 10, 20)
    x, dy = laid_out(normal(*shape), layout), laid_out(normal(*shape, seed=1), layout)
    assert_within_bounds(x, 16, dy=dy)
    # A correlation would hide a leak: the mean and the deviation of each group show it.
    y = group_norm(x, 16).double().reshape(16, -1)
    assert y.mean(1).abs().max() < 1e-6
    assert (y.var(1, correction=0) - 1).abs().max() < 2e-5


def test_ragged_positions():
    x, dy = normal(1, 1024, 200), normal(1, 1024, 200, seed=1)
    assert_within_bounds(x, 32, *parameters(1024), dy=dy)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_parameter_bytes_were_read_in_the_inputs_dtype(dtype, weight_dtype, bias_dtype):
    x, dy = normal(2, 12, 33, dtype=dtype), normal(2, 12, 33, seed=1, dtype=dtype)
    weight, bias = parameters(12)
    assert_within_bounds(x, 4, weight.to(weight_dtype), bias.to(bias_dtype), activation="gelu", dy=dy)


@layouts
def test_variance_as_difference_of_squares_was_zero(layout):
    x = laid_out(100 + 0.01 * normal(1, 2, 128, 256), layout)
    assert_within_bounds(x, 2, dy=normal(1, 2, 128, 256, seed=1))
    assert (group_norm(x, 2, eps=0.0).double().reshape(2, -1).var(1) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", FLOATS)
@layouts
def test_long_constant_vectors_saturated_a_serial_sum(layout, dtype):
    # An fp32 sum of ones stops at 2^24. Their mean is 1, so that y is the bias.
    x = laid_out(torch.ones(1, 1, 4200, 4200, dtype=dtype), "contiguous")
    if layout == "channels_last":
        x = channels_last(torch.ones(1, 2, 3000, 3000, dtype=dtype))
    bias = torch.full((x.size(1),), 0.5)
    y = group_norm(x, 1, None, bias)
    assert (y == 0.5).all()


@pytest.mark.parametrize("value", [0.1, -3.7, 1e-20, 1e20])
@layouts
def test_constant_groups_give_the_bias_exactly(layout, value):
    x = laid_out(torch.full((2, 6, 37, 5), value), layout).requires_grad_()
    bias = torch.arange(6.0)
    y = group_norm(x, 2, None, bias)
    assert torch.equal(y, bias.reshape(1, 6, 1, 1).expand(y.shape))


@layouts
def test_squares_in_the_storage_dtype_overflowed(layout):
    x = laid_out((1000 * normal(2, 8, 12, 12).clamp(-1, 1)).half(), layout)
    assert_within_bounds(x, 2, *parameters(8), dy=normal(2, 8, 12, 12, seed=1, dtype=torch.float16))


def test_sums_of_products_in_the_storage_dtype_overflowed():
    # 65536 products add up to more than fp16's largest number unless each gradient is small.
    x = normal(1, 4, 256, 256, dtype=torch.float16)
    weight, bias = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    group_norm(x, 2, weight, bias).backward(torch.ones(1, 4, 256, 256, dtype=torch.float16))
    assert torch.equal(bias.grad, torch.full((4,), 65536.0))
    assert weight.grad.isfinite().all()
    assert_within_bounds(x, 2, weight.detach(), bias.detach(), dy=torch.ones_like(x) * 2**-6)


@pytest.mark.parametrize(
    ("shape", "groups", "offset", "eps", "dtype"),
    [
        ((1, 512, 64, 64), 32, 1, 1e-5, torch.bfloat16),
        ((2, 64, 32, 32), 8, 16, 1e-5, torch.bfloat16),
        ((1, 6, 3), 2, 0, 0.5, torch.float16),
    ],
)
def test_statistics_were_truncated_between_forward_and_backward(shape, groups, offset, eps, dtype):
    x, dy = (offset + normal(*shape)).to(dtype), torch.ones(shape, dtype=dtype)
    weight, bias = parameters(shape[1])
    assert_within_bounds(x, groups, weight, bias, eps, dy=dy)
    narrow = outputs(x, groups, weight, bias, eps, dy=dy)["dx"]
    wide = outputs(x.float(), groups, weight, bias, eps, dy=dy.float())["dx"]
    assert torch.equal(narrow, wide.to(dtype))


def test_affine_gradients_were_summed_in_the_parameters_dtype():
    x = normal(8, 16, 64, 64, dtype=torch.float16)
    dy = normal(8, 16, 64, 64, seed=1, dtype=torch.float16)
    assert_within_bounds(x, 4, *parameters(16, torch.float16), dy=dy)


@pytest.mark.parametrize("shape", [(2, 12, 50), (2, 12, 10, 5), (2, 12, 5, 5, 2)])
def test_one_group_was_taken_for_instance_norm(shape):
    x, dy = normal(*shape), normal(*shape, seed=1)
    for groups in (1, 12):
        assert_within_bounds(x, groups, *parameters(12), dy=dy)
        y = group_norm(x, groups).double().reshape(2, groups, -1)
        assert y.mean(2).abs().max() < 1e-6


def test_dx_missed_the_two_terms_of_the_groups_statistics():
    # Any y of one group sums to 0 and keeps its length, so that dx is orthogonal to both directions.
    x, dy = normal(2, 6, 4), normal(2, 6, 4, seed=1)
    weight, bias = parameters(6)
    assert_within_bounds(x, 3, weight, bias, dy=dy)
    dx = outputs(x, 3, weight, bias, 0.0, dy=dy)["dx"].double().reshape(2, 3, -1)
    xhat = F.group_norm(x.double(), 3, eps=0.0).reshape(2, 3, -1)
    assert dx.sum(2).abs().max() < 2e-6
    assert (dx * xhat).sum(2).abs().max() < 2e-6


@pytest.mark.parametrize("shape", [(1, 320, 40, 64), (1, 640, 48, 48)])
@layouts
def test_end_of_a_groups_range_was_miscounted(layout, shape):
    x, dy = laid_out(normal(*shape), layout), laid_out(normal(*shape, seed=1), layout)
    assert_within_bounds(x, 32, *parameters(shape[1]), dy=dy)


@layouts
def test_dy_in_another_format_than_x(layout):
    x = laid_out(normal(2, 12, 9, 8), layout)
    for dy in (
        laid_out(normal(2, 12, 9, 8, seed=1), "contiguous"),
        laid_out(normal(2, 12, 9, 8, seed=1), "channels_last"),
        torch.ones(1).expand(2, 12, 9, 8),
        normal(2, 12, 1, 8, seed=1).expand(2, 12, 9, 8),
        normal(2, 12, 9, 16, seed=1)[..., ::2],
        normal(2, 12, 10, 9, seed=1)[:, :, 1:, 1:],
    ):
        assert_within_bounds(x, 3, *parameters(12), activation="silu", dy=dy)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.transpose(0, 1)[:, :12],
        lambda x: x.transpose(2, 3),
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[:, :, :, :1].expand(-1, -1, -1, 5),
        lambda x: x.flip(2),
    ],
    ids=["channels stepped", "N and C swapped", "H and W swapped", "batch expanded", "W expanded", "flipped"],
)
def test_strides_were_read_as_if_contiguous(view):
    x = view(normal(24, 24, 6, 5))
    weight, bias = parameters(2 * x.size(1))
    dy = normal(*x.shape, seed=1)
    assert_within_bounds(x, 3, weight[::2], bias[:1].expand(x.size(1)), dy=dy)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", FLOATS)
@layouts
def test_misaligned_storage(layout, dtype, offset):
    like = laid_out(normal(2, 12, 9, 7, dtype=dtype), layout)
    x = torch.as_strided(torch.empty(like.numel() + offset, dtype=dtype), like.shape, like.stride(), offset)
    x.copy_(like)
    assert_within_bounds(x, 3, *parameters(12), dy=normal(2, 12, 9, 7, seed=1, dtype=dtype))


@pytest.mark.parametrize("channels", [12, 36, 132, 1000, 4098])
def test_table_of_channel_counts(channels):
    x, dy = normal(2, channels, 5), normal(2, channels, 5, seed=1)
    for groups in range(1, channels + 1):
        if channels % groups == 0:
            assert_within_bounds(x, groups, *parameters(channels), dy=dy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@layouts
def test_squared_deviation_over_65504_and_eps_below_fp16(layout, dtype):
    x = laid_out((40000 * normal(2, 8, 6, 6).sign()).to(dtype), layout)
    y = group_norm(x, 2, eps=1e-12)
    assert y.isfinite().all()
    assert_within_bounds(x, 2, None, None, 1e-12, dy=normal(2, 8, 6, 6, seed=1, dtype=dtype))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@layouts
def test_nan_stays_in_its_group(layout, activation, bad):
    x = normal(2, 12, 9, 7)
    clean = outputs(laid_out(x, layout), 3, *parameters(12), activation=activation, dy=torch.ones_like(x))
    x[1, 5, 4, 3] = bad
    found = outputs(laid_out(x, layout), 3, *parameters(12), activation=activation, dy=torch.ones_like(x))
    for name in ("y", "dx"):
        assert found[name][1, 4:8].isnan().all()
        assert torch.equal(found[name][0], clean[name][0])
        assert torch.equal(found[name][1, :4], clean[name][1, :4])
        assert torch.equal(found[name][1, 8:], clean[name][1, 8:])
    assert found["dweight"][4:8].isnan().all()
    for name in ("dweight", "dbias"):
        assert found[name][:4].isfinite().all()
        assert found[name][8:].isfinite().all()


def test_nan_in_dy_stays_in_its_group():
    dy = normal(2, 12, 9, 7, seed=1)
    dy[0, 2, 1, 1] = math.nan
    dx = outputs(normal(2, 12, 9, 7), 3, dy=dy)["dx"]
    assert dx[0, :4].isnan().all()
    assert dx[0, 4:].isfinite().all()
    assert dx[1].isfinite().all()


def test_one_value_per_group_has_no_gradient():
    x, dy = normal(5, 8), normal(5, 8, seed=1)
    weight, bias = parameters(8)
    found = outputs(x, 8, weight, bias, dy=dy)
    assert torch.equal(found["y"], bias.expand(5, 8))
    assert torch.equal(found["dx"], torch.zeros(5, 8))


def test_two_values_have_a_closed_form():
    # Values m - d and m + d: x^ is -1 and 1 over sqrt(1 + eps / d^2).
    for mean in (0.0, 3.0, 1000.0):
        x = torch.tensor([[[mean - 0.5, mean + 0.5]]])
        expected = 1 / math.sqrt(1 + 0.25 / 0.25)
        y = group_norm(x, 1, eps=0.25)
        torch.testing.assert_close(y, torch.tensor([[[-expected, expected]]]), atol=1e-7, rtol=0)
