# SPDX-License-Identifier: Apache-2.0
"""Every output within the bounds of docs/numerics.md, through the public entry, on a GPU."""

import math

import pytest
import torch
from bits import same_bits
from calls import (
    DTYPES,
    LAYOUTS,
    assert_step_within,
    drawn_on_gpu,
    memory_format,
    normal,
    operands_of,
    parameters,
    step,
)

from cases import read_cases
from steadynorm.bench.bounds import ACTIVATIONS

pytestmark = pytest.mark.gpu

# dtype, shape, groups, offset of x, dy = 1: inputs at which other implementations are wrong.
HARD = {
    "fp16-ones": ("fp16", (1, 16, 256, 256), 4, 0.0, True),
    "bf16-offset-1-ones": ("bf16", (1, 512, 64, 64), 32, 1.0, True),
    "bf16-ones": ("bf16", (1, 16, 256, 256), 4, 0.0, True),
    "bf16-offset-16": ("bf16", (2, 64, 32, 32), 8, 16.0, False),
    "fp32-offset-1e5": ("fp32", (2, 64, 32, 32), 8, 1e5, False),
    "fp32-offset-100": ("fp32", (1, 256, 64, 64, 64), 8, 100.0, False),
}
LARGEST_CASE = 64 << 20
# D = 3, 5, 7, 10, 30; C = 12, 36, 1000, 4098.
ODD_CHANNELS = [(6, 2), (10, 2), (14, 2), (40, 4), (60, 2), (12, 3), (36, 12), (1000, 8), (1000, 1000)]
ODD_CHANNELS += [(4098, 2), (4098, 683)]


def hard(name, layout="contiguous"):
    dtype, shape, groups, offset, ones = HARD[name]
    x = normal(*shape, dtype=DTYPES[dtype], offset=offset, layout=layout)
    dy = torch.ones_like(x) if ones else normal(*shape, seed=1, dtype=DTYPES[dtype], layout=layout)
    return x, groups, dy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_keep_the_bound(name, layout):
    x, groups, dy = hard(name, layout)
    weight, bias = parameters(x.shape[1], dtypes=(x.dtype, x.dtype))
    found = assert_step_within(x, groups, weight, bias, dy, name, typical=True)
    assert found["dx"].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HARD)
def test_hard_inputs_keep_the_bound_with_weight_1_and_bias_0(name, layout):
    x, groups, dy = hard(name, layout)
    weight, bias = torch.ones(x.shape[1], device="cuda"), torch.zeros(x.shape[1], device="cuda")
    found = assert_step_within(x, groups, weight, bias, dy, name, typical=True)
    largest = {"fp16-ones": 1e-7, "bf16-offset-1-ones": 4e-7}.get(name)
    if largest:
        assert found["dx"].float().abs().max().item() <= largest


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_small_bf16_with_an_offset_of_16(groups):
    x, dy = normal(2, 8, 16, dtype=torch.bfloat16, offset=16), normal(2, 8, 16, seed=1, dtype=torch.bfloat16)
    assert_step_within(x, groups, *parameters(8), dy, "offset 16", typical=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 8, 5, 7), (1, 24, 64, 65), (1, 16, 300, 301)])
def test_fp32_with_a_mean_of_1e5_deviations(shape, layout):
    x, dy = normal(*shape, offset=1e5, layout=layout), normal(*shape, seed=1, layout=layout)
    assert_step_within(x, 4, *parameters(shape[1]), dy, f"{shape}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", read_cases(), ids=lambda case: case.name)
def test_named_cases(case, dtype):
    if case.bytes(dtype) > LARGEST_CASE:
        pytest.skip("larger than 64 MiB: the benchmark measures its error")
    x, weight, bias, dy = operands_of(case, dtype)
    for activation in ("none", case.activation):
        what = f"{case.name} {dtype} {activation}"
        assert_step_within(x, case.groups, weight, bias, dy, what, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, layout, dtype):
    x, dy = (normal(2, 24, 33, 35, seed=i, dtype=DTYPES[dtype], layout=layout) for i in range(2))
    weight, bias = (3 * p for p in parameters(24))
    assert_step_within(x, 6, weight, bias, dy, activation, activation=activation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spatial", [(1, 1), (7, 13), (10, 20), (45, 47)])
@pytest.mark.parametrize(("channels", "groups"), ODD_CHANNELS)
def test_odd_channel_counts(channels, groups, spatial, layout):
    shape = (2, channels, *spatial)
    x, dy = (normal(*shape, seed=i, dtype=torch.bfloat16, layout=layout) for i in range(2))
    found = step(x, groups, *parameters(channels), dy=dy)
    assert_step_within(x, groups, *parameters(channels), dy, f"{shape} G={groups}")
    if channels == groups and spatial == (1, 1):  # L = 1
        assert not found["dx"].any()


@pytest.mark.parametrize("shape", [(3, 12), (2, 12, 5), (2, 12, 5, 3), (2, 12, 2, 3, 4), (2, 6, 2, 3, 2, 3)])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_every_rank(shape, groups):
    x, dy = normal(*shape), normal(*shape, seed=1)
    assert_step_within(x, groups, *parameters(shape[1]), dy, f"{shape}")


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_any_dtype(layout, dtype, weight_dtype, bias_dtype):
    x, dy = (normal(3, 12, 9, 11, seed=i, dtype=DTYPES[dtype], layout=layout) for i in range(2))
    for samples in (0, 3):
        weight, bias = parameters(12, samples=samples, dtypes=(DTYPES[weight_dtype], DTYPES[bias_dtype]))
        found = assert_step_within(x, 4, weight, bias, dy, f"N rows {samples}", activation="silu")
        assert found["dweight"].dtype == weight.dtype
        assert found["dbias"].dtype == bias.dtype
        assert found["dweight"].shape == weight.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("present", ["neither", "weight", "bias"])
def test_missing_parameters(present, layout):
    x, dy = (normal(2, 12, 9, 11, seed=i, layout=layout) for i in range(2))
    weight, bias = parameters(12)
    given = (weight if present == "weight" else None, bias if present == "bias" else None)
    assert_step_within(x, 3, *given, dy, present, activation="gelu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1e30, 1e18, 1e-18, 1e-30])
def test_huge_and_tiny_values(scale, layout):
    x, dy = normal(2, 12, 40, 60, layout=layout) * scale, normal(2, 12, 40, 60, seed=1, layout=layout)
    found = step(x, 3, *parameters(12), dy=dy)
    assert all(tensor.isfinite().all() for tensor in found.values())
    assert_step_within(x, 3, *parameters(12), dy, f"scale {scale}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_constant_groups_give_the_bias(layout):
    x = torch.full((2, 12, 31, 33), 3.7, device="cuda").contiguous(memory_format=memory_format(layout, 4))
    weight, bias = parameters(12)
    y = step(x, 3, weight, bias)["y"]
    assert same_bits(y, bias.view(1, 12, 1, 1).expand_as(y))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_nan_and_inf_stay_in_their_group(activation, layout, bad):
    clean = normal(2, 12, 50, 60, layout=layout)
    weight, bias = parameters(12)
    dy = normal(2, 12, 50, 60, seed=1, layout=layout)
    x = clean.clone()
    x[1, 5, 7, 9] = bad  # group 1 of 3
    expected, found = (step(t, 3, weight, bias, dy=dy, activation=activation) for t in (clean, x))
    for name in ("y", "dx"):
        inside = torch.zeros_like(x, dtype=torch.bool)
        inside[1, 4:8] = True
        assert found[name][inside].isnan().all(), f"{name} hides it"
        assert same_bits(found[name][~inside], expected[name][~inside]), f"{name} outside the group"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_samples(layout):
    x = normal(0, 12, 5, 5, layout=layout)
    found = step(x, 3, *parameters(12), dy=torch.empty_like(x))
    assert found["y"].shape == found["dx"].shape == x.shape
    assert not found["dweight"].any()
    assert not found["dbias"].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("elements", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_operands(dtype, elements, layout):
    def shifted(tensor):
        held = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device="cuda")[elements:]
        return held.as_strided(tensor.shape, tensor.stride(), elements).copy_(tensor)

    x, dy = (normal(2, 24, 17, 16, seed=i, dtype=DTYPES[dtype], layout=layout) for i in range(2))
    weight, bias = parameters(24)
    expected = step(x, 4, weight, bias, dy=dy)
    found = step(shifted(x), 4, shifted(weight), shifted(bias), dy=shifted(dy))
    for name, tensor in found.items():
        assert same_bits(tensor, expected[name]), f"{name} at {elements} elements of offset"


@pytest.mark.parametrize("seed", range(3))
def test_strided_input_equals_its_contiguous_copy(seed):
    base = normal(4, 24, 18, 20, seed=seed, dtype=torch.bfloat16)
    weight, bias = parameters(24)
    for x in (base[::2], base[:, :, ::2], base.transpose(2, 3), base.flip(0), base[:, :, 3:, 1:]):
        dy = normal(*x.shape, seed=seed + 1, dtype=x.dtype)
        found, expected = (step(t, 4, weight, bias, dy=dy) for t in (x, x.contiguous()))
        assert found["y"].is_contiguous()
        for name, tensor in found.items():
            assert same_bits(tensor, expected[name]), f"{name} of strides {x.stride()}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradients_of_any_strides(layout):
    x = normal(2, 24, 18, 20, layout=layout)
    weight, bias = parameters(24)
    other = "channels_last" if layout == "contiguous" else "contiguous"
    whole = normal(2, 24, 18, 40, seed=1)
    one = torch.ones((), device="cuda")
    for dy in (normal(2, 24, 18, 20, seed=1, layout=other), whole[..., ::2], one.expand_as(x)):
        found, expected = (step(x, 4, weight, bias, dy=t) for t in (dy, dy.contiguous()))
        assert found["dx"].stride() == x.stride()
        for name, tensor in found.items():
            assert same_bits(tensor, expected[name]), f"{name} with dy of strides {dy.stride()}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_sums_do_not_saturate(layout):
    shape = (1, 2, 4096, 8192)  # 2^26 values a group
    x = drawn_on_gpu(shape, dtype=torch.bfloat16, layout=layout).abs_().add_(1)
    dy = torch.ones_like(x)
    assert_step_within(x, 1, *parameters(2), dy, "2^26 values", typical=True)
