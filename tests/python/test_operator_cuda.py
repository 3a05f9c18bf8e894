# SPDX-License-Identifier: Apache-2.0
"""The operators on a CUDA device, as PyTorch sees them. Needs a GPU and a library built for it."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import steadynorm  # noqa: F401  (loads the operators)
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
LOW = (torch.float32, torch.bfloat16, torch.float16)


def widened(s):
    """The same sample in float64 on the CPU."""
    return [
        None if t is None else t.detach().double().cpu().requires_grad_() for t in (s.x, s.weight, s.bias)
    ]


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
@pytest.mark.parametrize("dtype", (torch.float64, *LOW))
@pytest.mark.parametrize("last", (False, True))
def test_agrees_with_float64(activation, parameters, dtype, last):
    s = sample((3, 8, 7, 9), 2, parameters, dtype, last=last, device=DEVICE)
    wide = widened(s)
    y = group_norm(s.requires_grad().x, 2, s.weight, s.bias, activation=activation)
    expected = stock(wide[0], 2, wide[1], wide[2], activation=activation)
    eps = torch.finfo(dtype).eps
    assert y.dtype == dtype and y.stride() == s.x.stride()
    torch.testing.assert_close(y.double().cpu(), expected, rtol=4 * eps, atol=16 * eps)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, s.tensors(), dy)
    want = torch.autograd.grad(expected, [t for t in wide if t is not None], dy.double().cpu())
    assert got[0].stride() == s.x.stride()
    for a, b, tensor in zip(got, want, s.tensors(), strict=True):
        assert a.dtype == tensor.dtype
        torch.testing.assert_close(a.double().cpu(), b, rtol=8 * eps, atol=max(64 * eps, 1e-4 * (eps > 1e-9)))


@pytest.mark.parametrize("activation", ("none", "silu", "gelu", "gelu_tanh"))
def test_float64_gradcheck(activation):
    s = sample((2, 4, 2, 2), 2, "mixed", last=True, device=DEVICE).requires_grad()

    def call(x, weight, bias):
        return group_norm(x, 2, weight, bias, 1e-3, activation)

    assert gradcheck(call, s.tensors()) and gradgradcheck(call, s.tensors())


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("last", (False, True))
def test_apply_of_stats_is_forward(dtype, last):
    s = sample((2, 8, 33, 17), 2, "mixed", dtype, torch.float32, last=last, device=DEVICE)
    y, _ = forward(s.x, s.weight, s.bias, 4, 1e-5, "gelu")
    assert torch.equal(apply(s.x, stats(s.x, 4), s.weight, s.bias, 4, 1e-5, "gelu"), y)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("parameters", ("both", "rows"))
def test_no_sample(dtype, parameters):
    s = sample((0, 8, 4, 5), 2, parameters, dtype, device=DEVICE).requires_grad()
    group_norm(s.x, 2, s.weight, s.bias, activation="silu").sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in s.tensors())


def test_gradient_in_the_other_format():
    s = sample((2, 8, 6, 5), 2, "both", torch.float32, last=True, device=DEVICE).requires_grad()
    y = group_norm(s.x, 2, s.weight, s.bias)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, s.tensors(), dy, retain_graph=True)
    got = torch.autograd.grad(y, s.tensors(), dy.contiguous())
    assert got[0].stride() == s.x.stride()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_parameter_on_the_cpu():
    x = torch.randn(2, 8, 5, device=DEVICE)
    with pytest.raises(ValueError, match=r"^group_norm: weight must be on input's device cuda:0, got cpu$"):
        group_norm(x, 2, torch.ones(8))
    with pytest.raises(ValueError, match=r"^group_norm: weight must be on input's device cpu, got cuda:0$"):
        group_norm(x.cpu(), 2, torch.ones(8, device=DEVICE))


def test_autocast_leaves_dtypes_alone():
    s = sample(dtype=torch.bfloat16, parameter_dtype=torch.float32, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.float16):
        assert group_norm(s.x, s.groups, s.weight, s.bias).dtype == torch.bfloat16


def test_side_stream_and_graph_capture():
    s = sample((2, 32, 16, 16), 8, "both", torch.bfloat16, last=True, device=DEVICE)
    expected = group_norm(s.x, 8, s.weight, s.bias, activation="silu")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = group_norm(s.x, 8, s.weight, s.bias, activation="silu")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(beside, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = group_norm(s.x, 8, s.weight, s.bias, activation="silu")
    s.x.mul_(2).add_(1)
    graph.replay()
    assert torch.equal(captured, group_norm(s.x, 8, s.weight, s.bias, activation="silu"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_device_that_is_not_current():
    s = sample((2, 8, 5, 6), 2, "both", torch.float32, device="cuda:1").requires_grad()
    y = group_norm(s.x, 2, s.weight, s.bias)
    y.square().sum().backward()
    assert torch.cuda.current_device() == 0
    assert {t.device for t in (y, *(t.grad for t in s.tensors()))} == {torch.device("cuda:1")}


@pytest.mark.parametrize("dynamic", (False, True))
def test_compile_keeps_channels_last(dynamic):
    s = sample((2, 8, 6, 5), 2, "both", torch.bfloat16, last=True, device=DEVICE).requires_grad()
    call = torch.compile(
        lambda x, w, b: group_norm(x * 2, 2, w, b, activation="silu") + 1, fullgraph=True, dynamic=dynamic
    )
    y = call(*s.tensors())
    y.float().square().sum().backward()
    assert y.stride() == s.x.stride() == s.x.grad.stride()
