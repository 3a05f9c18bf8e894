# SPDX-License-Identifier: Apache-2.0
"""torch.compile around the module: how often it compiles, and what it puts around our operators."""

import re
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code

import steadynorm
from helpers import channels_last, laid_out, layout_of, normal, use_rung
from steadynorm import rungs

SIZES = ((2, 3, 16, 24), (2, 3, 24, 32), (4, 3, 32, 16), (3, 3, 40, 48), (5, 3, 16, 56))
# Whatever inductor's code runs on tensors: its own fused kernels, and the operators that it calls.
CALLS = re.compile(r"\b(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+|aten\.\w+)\(")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class UNet(nn.Module):
    """Two levels, a norm of another width at each site."""

    def __init__(self):
        super().__init__()
        widths = ((3, 8), (8, 16), (16, 24), (24 + 16, 16), (16 + 8, 8))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in widths)
        self.norms = nn.ModuleList(steadynorm.GroupNorm(4, b, activation="silu") for _, b in widths)
        self.head = nn.Conv2d(8, 2, 1)

    def block(self, i, x):
        return self.norms[i](self.convs[i](x))

    def forward(self, x):
        fine = self.block(0, x)
        middle = self.block(1, nn.functional.max_pool2d(fine, 2))
        x = self.block(2, nn.functional.max_pool2d(middle, 2))
        for i, skip in ((3, middle), (4, fine)):
            x = self.block(i, torch.cat([nn.functional.interpolate(x, skip.shape[2:]), skip], 1))
        return self.head(x)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_unet_is_not_compiled_for_every_size(dynamic):
    counter = CompileCounterWithBackend("aot_eager")
    network = UNet().to(memory_format=torch.channels_last)
    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic, backend=counter)
    counts = []
    for size in SIZES:
        x = channels_last(normal(*size))
        y = compiled(x)
        y.square().mean().backward()
        torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-4)
        counts.append(counter.frame_count)
    if dynamic:
        assert set(counts) == {counts[0]}
    else:  # As with stock: for the first size, for other heights and widths, for other batch sizes.
        assert counts == [1, 2, 3, 3, 3]


def chain(dimensions):
    conv = {4: nn.Conv2d, 5: nn.Conv3d}[dimensions]
    norm = steadynorm.GroupNorm(2, 8, activation="silu")
    return nn.Sequential(conv(3, 8, 3, padding=1), norm, conv(8, 4, 3, padding=1))


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
@pytest.mark.parametrize(("dimensions", "dynamic"), [(4, False), (4, True), (5, False)])
def test_nothing_runs_between_channels_last_convolutions_and_our_operators(dimensions, dynamic):
    format = {4: torch.channels_last, 5: torch.channels_last_3d}[dimensions]
    network = chain(dimensions).to(memory_format=format)
    x = channels_last(normal(2, 3, 6, 7) if dimensions == 4 else normal(2, 3, 6, 7, 5))
    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic)
    # Without caches: they would return code that was made with other strides from our Meta kernels.
    with torch._inductor.config.patch(force_disable_caches=True):
        y, (forward, backward) = run_fw_bw_and_get_code(lambda: compiled(x))
    torch.testing.assert_close(y, network(x))

    def calls(code):
        return [
            name.removesuffix(".default").split(".")[-1] for name in CALLS.findall(code.split("def call(")[1])
        ]

    assert calls(forward) == ["convolution", "group_norm_forward", "convolution"]
    assert calls(backward) == ["convolution_backward", "group_norm_backward", "convolution_backward"]


@pytest.mark.parametrize("layout_of_dy", ("contiguous", "channels_last", "expanded"))
def test_gradients_from_tangents_of_any_layout(layout_of_dy):
    norm = steadynorm.GroupNorm(2, 8, activation="gelu")
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    dy = normal(2, 8, 5, 6, seed=1)
    dy = dy[:, :, :1, :1].expand(2, 8, 5, 6) if layout_of_dy == "expanded" else laid_out(dy, layout_of_dy)
    found = []
    for module in (compiled, norm):
        x = channels_last(normal(2, 8, 5, 6)).requires_grad_()
        found.append((*torch.autograd.grad(module(x), [x, *norm.parameters()], dy),))
        assert layout_of(found[-1][0]) == "channels_last"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_inside_a_compiled_network_keeps_the_inputs_dtype():
    network = chain(4)
    seen = []
    network[1].register_forward_hook(lambda _, inputs, y: seen.append((inputs[0].dtype, y.dtype)))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = compiled(normal(2, 3, 6, 7)), network(normal(2, 3, 6, 7))
    assert y.dtype == want.dtype == torch.bfloat16
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize(("dimensions", "dynamic"), [(4, False), (4, True), (5, True)])
def test_the_memory_format_is_kept_without_our_operators(monkeypatch, dimensions, dynamic):
    use_rung(rungs.EAGER, monkeypatch)
    norm = steadynorm.GroupNorm(2, 8)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    shape = (4, 8, 6, 7) if dimensions == 4 else (4, 8, 6, 7, 5)
    every_second = channels_last(normal(*shape))[::2]
    one_sample = every_second[:1]  # dense, whatever the stride between samples
    for x in (channels_last(normal(*shape)), normal(*shape), every_second, one_sample):
        y, expected = compiled(x), norm(x)
        assert layout_of(y) == layout_of(expected)
        torch.testing.assert_close(y, expected)
    assert layout_of(norm(one_sample)) == "channels_last" != layout_of(norm(every_second))

    # What a convolution returns says of itself that it is not channels_last, if its sizes are symbols.
    network = nn.Sequential({4: nn.Conv2d, 5: nn.Conv3d}[dimensions](8, 8, 3, padding=1), norm)
    x = channels_last(normal(*shape))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert layout_of(compiled(x)) == layout_of(network(x)) == "channels_last"
