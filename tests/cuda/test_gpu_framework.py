# SPDX-License-Identifier: Apache-2.0
"""The operators on a GPU as PyTorch sees them: its own checkers, float64, autocast, torch.compile."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import steadynorm
from operator_samples import (
    ACTIVATIONS,
    PARAMETERS,
    apply,
    backward,
    forward,
    group_norm,
    sample,
    stats,
    stock,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LOW = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", (torch.float64, *LOW))
@pytest.mark.parametrize("last", (False, True))
def test_opcheck(dtype, last):
    s = sample((2, 8, 5, 6), 2, "mixed", dtype, last=last, device=DEVICE)
    y, statistics = forward(s.x, s.weight, s.bias, 4, 1e-5, "silu")
    opcheck(forward, (s.x, s.weight, s.bias, 4, 1e-5, "silu"))
    opcheck(backward, (torch.randn_like(y), s.x, statistics, s.weight, s.bias, 4, "silu"))
    opcheck(stats, (s.x, 4))
    opcheck(apply, (s.x, stats(s.x, 4), s.weight, s.bias, 4, 1e-5, "silu"))
    s.requires_grad()
    opcheck(group_norm, (s.x, 2, s.weight, s.bias, 1e-5, "silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("last", (False, True))
def test_float64_agrees_with_stock(activation, parameters, last):
    s = sample((3, 8, 7, 9), 2, parameters, torch.float64, last=last, device=DEVICE).requires_grad()
    y = group_norm(s.x, 2, s.weight, s.bias, activation=activation)
    expected = stock(s.x, 2, s.weight, s.bias, activation=activation)
    assert y.dtype == torch.float64 and y.stride() == s.x.stride()
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12, check_stride=False)
    dy = torch.randn_like(y)
    got, want = (torch.autograd.grad(out, s.tensors(), dy) for out in (y, expected))
    assert got[0].stride() == s.x.stride()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11, check_stride=False)


@pytest.mark.parametrize("activation", ("none", "silu", "gelu", "gelu_tanh"))
def test_float64_gradcheck(activation):
    s = sample((2, 4, 2, 2), 2, "mixed", last=True, device=DEVICE).requires_grad()

    def call(x, weight, bias):
        return group_norm(x, 2, weight, bias, 1e-3, activation)

    assert gradcheck(call, s.tensors()) and gradgradcheck(call, s.tensors())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("parameters", ("both", "rows"))
def test_no_sample(dtype, parameters):
    s = sample((0, 8, 4, 5), 2, parameters, dtype, device=DEVICE).requires_grad()
    group_norm(s.x, 2, s.weight, s.bias, activation="silu").sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in s.tensors())


def test_autocast_leaves_dtypes_alone():
    s = sample(dtype=torch.bfloat16, parameter_dtype=torch.float32, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.float16):
        assert group_norm(s.x, s.groups, s.weight, s.bias).dtype == torch.bfloat16


@pytest.mark.parametrize("dynamic", (False, True))
def test_compile_keeps_channels_last(dynamic):
    s = sample((2, 8, 6, 5), 2, "both", torch.bfloat16, last=True, device=DEVICE).requires_grad()
    call = torch.compile(
        lambda x, w, b: group_norm(x * 2, 2, w, b, activation="silu") + 1, fullgraph=True, dynamic=dynamic
    )
    y = call(*s.tensors())
    y.float().square().sum().backward()
    assert y.stride() == s.x.stride() == s.x.grad.stride()


@pytest.fixture(params=("native", "compiled", "eager"))
def rung(request):
    """Leaves one rung and eager PyTorch; all are on again afterwards."""
    for name in ("native", "compiled"):
        steadynorm.set_rung(name, name == request.param)
    yield request.param
    for name in ("native", "compiled"):
        steadynorm.set_rung(name, True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_keeps_dtype_and_format_on_every_rung(rung, dtype):
    norm = steadynorm.GroupNorm(4, 16, activation="relu").to(DEVICE)
    x = torch.randn(2, 16, 8, 8, 8, device=DEVICE, dtype=dtype)
    x = x.to(memory_format=torch.channels_last_3d).requires_grad_()
    with torch.autocast(DEVICE, dtype=dtype):
        y = norm(x)
        assert steadynorm.last_rung() == rung
        function = steadynorm.group_norm(x, 4, norm.weight, norm.bias)
        expected = torch.nn.functional.group_norm(x, 4, norm.weight, norm.bias)
    assert function.dtype == expected.dtype == torch.float32
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last_3d)
    # One rounding of what fp32 gives, which the rungs have to a few of its own.
    fp32 = torch.nn.functional.group_norm(x.detach().float(), 4).relu()
    torch.testing.assert_close(y, fp32.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6, check_stride=False)
    y.float().sum().backward()
    assert x.grad.dtype == dtype and x.grad.is_contiguous(memory_format=torch.channels_last_3d)
