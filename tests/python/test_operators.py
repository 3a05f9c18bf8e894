# SPDX-License-Identifier: Apache-2.0
"""The operators as PyTorch sees them: schemas, checkers, memory formats, dtypes, errors, threads."""

import pytest
import torch
import torch.nn.functional as F
from torch.library import opcheck

import steadynorm  # noqa: F401  (loads the operators)
from operator_samples import (
    ACTIVATIONS,
    FORMATS,
    PARAMETERS,
    apply,
    backward,
    forward,
    group_norm,
    sample,
    stats,
    stock,
)

LOW = (torch.float32, torch.bfloat16, torch.float16)
OPERATORS = (
    "group_norm",
    "group_norm_forward",
    "group_norm_backward",
    "group_norm_stats",
    "group_norm_apply",
)
CASES = [
    # shape, groups, channels last
    ((2, 6), 2, False),
    ((2, 6, 5), 3, False),
    ((2, 6, 4, 5), 3, False),
    ((2, 6, 4, 5), 3, True),
    ((1, 4, 2, 3, 2), 2, True),
]
# Strides and sizes do not depend on the dtype: each dtype once, each shape once.
CHECKED = [(*case, torch.float32) for case in CASES]
CHECKED += [(*CASES[3], dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)]


def close(actual, expected, dtype=None, scale=1.0):
    eps = torch.finfo(dtype or actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=4 * eps * scale, atol=8 * eps * scale)


# --- schemas and PyTorch's checkers


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_tagged(name):
    operator = getattr(torch.ops.steadynorm, name).default
    assert torch.Tag.pt2_compliant_tag in operator.tags
    assert torch.Tag.needs_exact_strides in operator.tags


@pytest.mark.parametrize(("shape", "groups", "last", "dtype"), CHECKED)
def test_opcheck_differentiable(shape, groups, last, dtype):
    for parameters, activation in (("both", "silu"), ("rows", "none"), ("bias", "relu"), ("neither", "gelu")):
        s = sample(shape, groups, parameters, dtype, last=last).requires_grad()
        opcheck(group_norm, (s.x, s.groups, s.weight, s.bias, 1e-5, activation))


@pytest.mark.parametrize(("shape", "groups", "last", "dtype"), CHECKED)
def test_opcheck_inner(shape, groups, last, dtype):
    # Without requires_grad: these have no gradient, and the checker would run the refused backward.
    for parameters, activation, mask in (
        ("both", "silu", [True, True, True]),
        ("mixed", "none", [False, True, False]),
        ("weight", "gelu_tanh", [True, False, False]),
    ):
        s = sample(shape, groups, parameters, dtype, last=last)
        D = s.channels_per_group
        out = torch.float32 if dtype != torch.float64 else None
        opcheck(forward, (s.x, s.weight, s.bias, D, 1e-5, activation, out))
        y, statistics = forward(s.x, s.weight, s.bias, D, 1e-5, activation)
        opcheck(backward, (torch.randn_like(y), s.x, statistics, s.weight, s.bias, D, activation, mask))
        opcheck(stats, (s.x, D))
        opcheck(apply, (s.x, stats(s.x, D), s.weight, s.bias, D, 1e-5, activation))


# --- agreement


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("last", (False, True))
def test_float64_agrees_with_stock(activation, parameters, last):
    s = sample((3, 8, 3, 4), 2, parameters, last=last).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias, 1e-3, activation)
    expected = stock(s.x, s.groups, s.weight, s.bias, 1e-3, activation)
    close(y, expected, scale=10)
    dy = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, s.tensors(), dy), torch.autograd.grad(expected, s.tensors(), dy), strict=True
    ):
        close(got, want, scale=100)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_agrees_with_float64(dtype):
    s = sample((3, 8, 3, 4), 2, "both", dtype)
    y = group_norm(s.x, s.groups, s.weight, s.bias, activation="silu")
    wide = stock(s.x.double(), s.groups, s.weight.double(), s.bias.double(), activation="silu")
    close(y, wide, dtype)


def test_statistics_are_mean_and_rstd():
    s = sample((2, 6, 40), 3, dtype=torch.float32)
    _, statistics = forward(s.x, None, None, 2)
    assert statistics.shape == (3, 2, 3) and statistics.dtype == torch.float32
    x = s.x.double().reshape(2, 3, -1)
    close(statistics[0].double() + statistics[1], x.mean(2), torch.float32)
    close(statistics[2], (x.var(2, correction=0) + 1e-5).rsqrt(), torch.float32)
    wide = forward(s.x.double(), None, None, 2)[1]
    assert wide.dtype == torch.float64
    close(wide[0] + wide[1], x.mean(2), scale=10)


def test_moments_are_count_mean_and_m2():
    for dtype in (torch.float32, torch.float64):
        s = sample((2, 6, 40), 3, dtype=dtype)
        moments = stats(s.x, 2)
        x = s.x.double().reshape(2, 3, -1)
        assert moments.dtype == torch.float64
        assert (moments[..., 0] == 80).all()
        close(moments[..., 1], x.mean(2), dtype)
        close(moments[..., 2], x.var(2, correction=0) * 80, dtype, scale=80)


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("dtype", LOW)
def test_apply_of_stats_is_forward(dtype, last):
    s = sample((2, 6, 7, 9), 3, "mixed", dtype, torch.float32, last=last)
    y, _ = forward(s.x, s.weight, s.bias, 2, 1e-5, "gelu")
    again = apply(s.x, stats(s.x, 2), s.weight, s.bias, 2, 1e-5, "gelu")
    assert torch.equal(y, again) and y.stride() == again.stride()


# --- dtypes


@pytest.mark.parametrize("out", (None, torch.float32, torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("dtype", (*LOW, torch.float64))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_dtypes_of_outputs(dtype, out, device):
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    s = sample(dtype=dtype, parameter_dtype=parameter, device=device).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias, out_dtype=out)
    assert y.dtype == (out or dtype)
    y.sum().backward()
    assert [t.grad.dtype for t in s.tensors()] == [dtype, parameter, parameter]


@pytest.mark.parametrize("out", LOW)
def test_rounding_once(out):
    s = sample((2, 6, 50), dtype=torch.float32)
    wide = group_norm(s.x, s.groups, s.weight, s.bias, activation="silu", out_dtype=torch.float32)
    assert torch.equal(
        group_norm(s.x, s.groups, s.weight, s.bias, activation="silu", out_dtype=out), wide.to(out)
    )


def test_autocast_leaves_dtypes_alone():
    s = sample(dtype=torch.bfloat16, parameter_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        assert group_norm(s.x, s.groups, s.weight, s.bias).dtype == torch.bfloat16
        found = torch.func.jvp(lambda x: group_norm(x, s.groups, s.weight, s.bias), (s.x,), (s.x,))
        assert {t.dtype for t in found} == {torch.bfloat16}


# --- memory formats


def layouts():
    x4, x5 = torch.randn(2, 6, 4, 5), torch.randn(2, 6, 3, 4, 5)
    last4, last5 = (x.contiguous(memory_format=FORMATS[x.dim()]) for x in (x4, x5))
    yield "contiguous", x4, torch.contiguous_format
    yield "channels_last", last4, torch.channels_last
    yield "channels_last_3d", last5, torch.channels_last_3d
    yield "transposed", x4.transpose(2, 3), torch.contiguous_format
    yield "sliced", x4[..., ::2], torch.contiguous_format
    yield "sliced channels_last", last4[..., ::2], torch.contiguous_format
    yield "expanded", x4[:1].expand(2, -1, -1, -1), torch.contiguous_format
    yield "3-D transposed", torch.randn(2, 5, 6).transpose(1, 2), torch.contiguous_format
    one = torch.randn(2, 6, 1, 1)
    yield "one position", one, torch.contiguous_format
    yield (
        "one position, channels_last",
        one.contiguous(memory_format=torch.channels_last),
        torch.contiguous_format,
    )
    odd = torch.randn(2 * 6 * 5).as_strided((2, 6, 1, 5), (30, 5, 77, 1))
    yield "size 1 with any stride", odd, torch.contiguous_format
    thin = torch.randn(1, 6, 1, 5).contiguous(memory_format=torch.channels_last)
    yield "thin channels_last", thin, torch.channels_last


@pytest.mark.parametrize("name", [name for name, *_ in layouts()])
def test_memory_format_of_y_and_dx(name):
    x, kept = next((x, kept) for n, x, kept in layouts() if n == name)
    strides = torch.empty(x.shape, memory_format=kept).stride()
    expected = stock(x.double(), 3)
    for device in ("cpu", "meta"):
        leaf = x if device == "cpu" else torch.empty_strided(x.shape, x.stride(), device=device)
        y, statistics = forward(leaf, None, None, 2)
        assert y.stride() == strides
        assert statistics.is_contiguous()
        dx, *_ = backward(torch.ones_like(y), leaf, statistics, None, None, 2)
        assert dx.stride() == strides
    leaf = x.detach().requires_grad_()
    y = group_norm(leaf, 3)
    assert y.stride() == strides
    close(y, expected, scale=10)
    assert torch.autograd.grad(y.square().sum(), leaf)[0].stride() == strides


def gradients_of_y(y):
    formats = (torch.contiguous_format, torch.channels_last)
    same, other = formats if y.is_contiguous() else reversed(formats)
    dy = torch.randn(y.shape, dtype=y.dtype)
    yield "same", dy.contiguous(memory_format=same)
    yield "other format", dy.contiguous(memory_format=other)
    yield "sliced", torch.randn(*y.shape[:3], 2 * y.shape[3], dtype=y.dtype)[..., ::2]
    yield "expanded", torch.randn(1, 1, 1, 1, dtype=y.dtype).expand(y.shape)
    yield "transposed", dy.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("last", (False, True))
def test_gradient_of_y_in_any_format(last):
    s = sample(dtype=torch.float32, last=last).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias, activation="relu")
    for _, dy in gradients_of_y(y):
        got = torch.autograd.grad(y, s.tensors(), dy, retain_graph=True)
        plain = torch.empty_like(y).copy_(dy)
        want = torch.autograd.grad(y, s.tensors(), plain, retain_graph=True)
        assert got[0].stride() == s.x.stride()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# --- what is asked for


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_only_wanted_gradients_are_defined(dtype, device):
    s = sample(dtype=dtype, device=device)
    y, statistics = forward(s.x, s.weight, s.bias, 2)
    for bits in range(8):
        mask = [bool(bits & 1), bool(bits & 2), bool(bits & 4)]
        grads = backward(y, s.x, statistics, s.weight, s.bias, 2, "none", mask)
        assert [g is not None for g in grads] == mask
        assert [g is not None for g in backward(y, s.x, statistics, None, s.bias, 2, "none", mask)] == [
            mask[0],
            False,
            mask[2],
        ]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_no_sample(dtype):
    for parameters in ("both", "rows"):
        s = sample((0, 6, 4, 5), 3, parameters, dtype).requires_grad()
        y = group_norm(s.x, s.groups, s.weight, s.bias, activation="silu")
        assert y.shape == s.x.shape
        y.sum().backward()
        for tensor in s.tensors():
            assert tensor.grad.shape == tensor.shape and not tensor.grad.any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_one_value_per_group_has_zero_gradient(dtype):
    s = sample((3, 6), 6, "both", dtype).requires_grad()
    group_norm(s.x, s.groups, s.weight, s.bias).sum().backward()
    assert not s.x.grad.any()


# --- threads


def test_threads_are_torchs_and_bits_do_not_depend_on_them():
    s = sample((2, 32, 48, 48), 8, dtype=torch.float32).requires_grad()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = group_norm(s.x, s.groups, s.weight, s.bias, activation="gelu")
            results.append((y, *torch.autograd.grad(y.square().sum(), s.tensors())))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_inference_mode():
    s = sample(dtype=torch.float32)
    with torch.inference_mode():
        y = group_norm(s.x, s.groups, s.weight, s.bias)
        assert y.is_inference()
    assert torch.equal(y, group_norm(s.x, s.groups, s.weight, s.bias))


def test_default_arguments_are_those_of_stock():
    s = sample(dtype=torch.float64)
    close(group_norm(s.x, 3, s.weight, s.bias), F.group_norm(s.x, 3, s.weight, s.bias), scale=10)
