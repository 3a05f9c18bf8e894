# SPDX-License-Identifier: Apache-2.0
"""The fused residual against `s = x + r; y = group_norm(s)`: bits, strides, gradients, what is saved."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers import ACTIVATIONS, FLOATS, LAYOUTS, assert_same_bits, laid_out, layout_of, normal
from operator_samples import PARAMETERS
from residual_helpers import assert_same, fused, inner, operands, results, unfused
from steadynorm import GroupNorm, group_norm

# A unit of several channels, leaves and units of several, ragged ones, one position; ranks 2 to 5.
SHAPES = [
    ((2, 6, 5, 7), 3),
    ((3, 8, 41, 53), 2),
    ((1, 320, 3, 5), 32),
    ((2, 12, 9, 15, 17), 3),
    ((5, 12), 3),
    ((2, 10, 2050), 5),
]


class Operators(TorchDispatchMode):
    """The names of the operators that kernels were asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("steadynorm::"))
        return func(*args, **(kwargs or {}))


def operators_of(*arguments) -> list[str]:
    with Operators() as seen:
        fused(*arguments)
    return seen.names


# Values.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64))
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_the_pair_and_its_gradients_have_the_bits_of_the_two_calls(native, shape, groups, dtype, layout):
    choices = list(product(ACTIVATIONS, PARAMETERS))
    for activation, parameters in choices[len(shape) % 2 :: 4]:
        tensors = operands(shape, dtype, parameters, layout)
        case = f"{activation}, {parameters}"
        got, expected = (results(f, tensors, groups, activation=activation) for f in (fused, unfused))
        assert_same(got, expected, case)
        assert_same_bits(got["dr"], got["dx"], case)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
@pytest.mark.parametrize("used", ((0,), (1,), (0, 1)))
@pytest.mark.parametrize("tracked", ((0,), (1,), (2,), (3,), (1, 2), (0, 1, 2, 3)))
def test_gradients_where_only_some_are_used_or_wanted(native, used, tracked, dtype):
    if used == (1,) and not {0, 1} & set(tracked):
        return  # the sum has no gradient then
    tensors = operands((2, 6, 5, 7), dtype, layout="channels_last")
    got, expected = (results(f, tensors, 3, used, tracked, activation="silu") for f in (fused, unfused))
    assert_same(got, expected, "")
    assert (got.get("dweight") is None) == (used == (1,) or 2 not in tracked)


class Cut(torch.autograd.Function):
    """The identity; no gradient flows back."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_no_gradient_of_the_outputs_gives_none_of_the_arguments(native, dtype):
    tensors = [t.requires_grad_() for t in operands((2, 6, 5, 7), dtype)]
    y, s = fused(*tensors[:2], 3, *tensors[2:])
    (Cut.apply(y).sum() + Cut.apply(s).sum()).backward()
    assert [t.grad for t in tensors] == [None] * 4


def test_the_sum_is_rounded_once_and_normalised_as_stored(native):
    """256 + 1 + 2^-7 is 257 in fp32 and 256 in bf16; in that group all values are then the same."""
    x = torch.full((1, 2, 4, 4), 256.0, dtype=torch.bfloat16)
    r = (1 - torch.rand(1, 2, 4, 4) / 2).bfloat16()
    y, s = fused(x, r, 2, eps=1e-5)
    assert torch.equal(s, x) and torch.equal(y, torch.zeros_like(y))
    assert not torch.equal(group_norm(x.float() + r.float(), 2), torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", (1e-30, 1e25))
def test_values_beyond_fp32_squares(native, dtype, scale):
    if dtype == torch.float16:
        scale = {1e-30: 2.0**-20, 1e25: 2e3}[scale]
    for layout, shape in product(LAYOUTS, ((2, 6, 5, 7), (1, 4, 40, 60))):
        x, r, weight, bias = operands(shape, torch.float32, layout=layout)
        x, r = ((t - t.mean()).mul(scale).to(dtype) for t in (x, r))
        got, expected = (results(f, (x, r, weight, bias), 2) for f in (fused, unfused))
        assert bool(got["y"].isfinite().all())
        assert_same(got, expected, f"{layout}, {shape}")


def test_a_nan_of_either_makes_its_group_nan_and_no_other(native):
    for which in (0, 1):
        tensors = list(operands((2, 6, 5, 7)))
        tensors[which][1, 2, 3, 3] = float("nan")
        y, s = fused(*tensors[:2], 3)
        wrong = torch.zeros(2, 6, 5, 7, dtype=torch.bool)
        wrong[1, 2:4] = True
        assert torch.equal(y.isnan(), wrong)
        assert int(s.isnan().sum()) == 1


def test_no_samples(native):
    tensors = [normal(0, 6, 4), normal(0, 6, 4), normal(6), normal(6)]
    got = results(fused, tensors, 3, activation="relu")
    assert got["y"].shape == got["sum"].shape == got["dx"].shape == (0, 6, 4)
    assert torch.equal(got["dweight"], torch.zeros(6)) and torch.equal(got["dbias"], torch.zeros(6))


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64))
@pytest.mark.parametrize("out_dtype", (*FLOATS, torch.float64, None))
def test_out_dtype_is_that_of_y_alone(native, dtype, out_dtype):
    tensors = operands((2, 6, 5, 7), dtype, layout="channels_last")
    options = {"activation": "gelu", "out_dtype": out_dtype}
    got, expected = (results(f, tensors, 3, **options) for f in (fused, unfused))
    assert_same(got, expected, "")
    assert got["y"].dtype == (out_dtype or dtype) and got["sum"].dtype == dtype


def test_autocast_leaves_dtypes_alone(rung):
    x, r, *_ = operands((2, 6, 5, 7), torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        for y, s in (GroupNorm(3, 6)(x, r), fused(x, r, 3)):
            assert y.dtype == s.dtype == torch.bfloat16


# Strides.


def strided():
    x, r = normal(2, 6, 4, 5), normal(2, 6, 4, 5, seed=1)
    last = laid_out(x, "channels_last")
    return {
        "r contiguous, x channels_last": (last, r),
        "x contiguous, r channels_last": (r, last),
        "r expanded": (x, r[:1, :, :1].expand(2, 6, 4, 5)),
        "r transposed": (x, normal(2, 6, 5, 4).mT),
        "x sliced": (laid_out(normal(2, 12, 4, 5), "channels_last")[:, ::2], r),
        "x transposed": (normal(2, 6, 5, 4).mT, r),
        "both sliced": (normal(2, 12, 4, 5)[:, ::2], normal(4, 6, 4, 5)[::2]),
    }


@pytest.mark.parametrize("case", strided())
def test_any_strides(native, case):
    tensors = (*strided()[case], normal(6), normal(6, seed=1))
    got, expected = (results(f, tensors, 3, activation="silu") for f in (fused, unfused))
    assert_same(got, expected, case)


def test_dense_tensors_take_one_kernel_and_others_no_copy(native):
    for layout in LAYOUTS:
        x, r, weight, bias = operands((2, 6, 5, 7), layout=layout)
        for tracked in (False, True):
            seen = operators_of(x, r, 3, *(p.requires_grad_(tracked) for p in (weight, bias)))
            assert seen == ["group_norm_residual_forward"]
            seen = operators_of(x.clone().requires_grad_(tracked), r, 3, weight, bias)
            assert [name for name in seen if "group_norm" in name] == ["group_norm_residual_forward"]
    for x, r in strided().values():
        seen = operators_of(x, r, 3)
        assert seen == ["aten::add", "group_norm_forward"]


def test_called_directly_the_inner_operator_takes_any_strides(native):
    for case, (x, r) in strided().items():
        y, s, _ = inner(x, r, None, None, 2)
        assert layout_of(y) == layout_of(s) == layout_of(group_norm(x, 3)), case
        assert_same_bits(s, x + r, case)
        assert_same_bits(y, group_norm(s, 3), case)


# What is kept for backward.


def test_of_full_size_the_sum_alone_is_saved(native):
    x, r, weight, bias = (t.requires_grad_() for t in operands((2, 6, 5, 7)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, s = fused(x, r, 3, weight, bias, activation="silu")
    assert [t.data_ptr() for t in saved if t.shape == x.shape] == [s.data_ptr()]


def test_changing_the_sum_before_backward_is_an_error(native):
    x, r, *_ = (t.requires_grad_() for t in operands((2, 6, 5, 7)))
    y, s = fused(x, r, 3)
    s.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing_changes_no_gradient(rung, reentrant):
    norm = GroupNorm(3, 6, activation="silu")
    found = []
    for run in (norm, lambda x, r: checkpoint(norm, x, r, use_reentrant=reentrant)):
        x, r, *_ = (t.requires_grad_() for t in operands((2, 6, 5, 7)))
        norm.zero_grad()
        y, s = run(x, r)
        (y.square().sum() + (s * normal(*s.shape)).sum()).backward()
        found.append((x.grad, r.grad, norm.weight.grad, norm.bias.grad))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
