# SPDX-License-Identifier: Apache-2.0
"""The operators under fake tensors, make_fx, torch.compile and torch.jit.trace."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import steadynorm  # noqa: F401  (loads the operators)
from operator_samples import FORMATS, backward, forward, group_norm, sample


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("shape", ((2, 6, 4, 5), (1, 6, 1, 5), (2, 6, 1, 1), (1, 1, 4, 5)))
def test_fake_tensors_have_the_strides_of_real_ones(shape, last):
    real = sample(shape, 1, dtype=torch.float32, last=last)
    mode = FakeTensorMode()
    with mode:
        x, weight, bias = (mode.from_tensor(t) for t in real.tensors())
        y, statistics = forward(x, weight, bias, real.channels_per_group)
        grads = backward(y, x, statistics, weight, bias, real.channels_per_group)
    want_y, want_statistics = forward(real.x, real.weight, real.bias, real.channels_per_group)
    want = backward(want_y, real.x, want_statistics, real.weight, real.bias, real.channels_per_group)
    for fake, tensor in zip((y, statistics, *grads), (want_y, want_statistics, *want), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)


class Block(torch.nn.Module):
    def __init__(self, dimensions, activation):
        super().__init__()
        conv = torch.nn.Conv2d if dimensions == 4 else torch.nn.Conv3d
        self.first, self.last = conv(3, 8, 3, padding=1), conv(8, 3, 3, padding=1)
        self.weight, self.bias = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(8))
        self.activation = activation

    def forward(self, x):
        return self.last(group_norm(self.first(x), 2, self.weight, self.bias, 1e-5, self.activation))


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("dimensions", (4, 5))
def test_compile_without_a_graph_break(dynamic, dimensions):
    torch.manual_seed(0)
    block = Block(dimensions, "silu").to(memory_format=FORMATS[dimensions])
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (6, 8) if dynamic else (6,):
        x = torch.randn(2, 3, *[size] * (dimensions - 2)).contiguous(memory_format=FORMATS[dimensions])
        results = []
        for module in (block, compiled):
            leaf = x.clone().requires_grad_()
            block.zero_grad()
            y = module(leaf)
            y.square().mean().backward()
            results.append((y, leaf.grad, *(p.grad for p in block.parameters())))
        assert results[0][0].stride() == results[1][0].stride()
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), block(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compile_uses_one_graph_with_the_inner_operators(dynamic):
    graphs = {"forward": [], "backward": []}
    compile_forward, compile_backward = (
        lambda module, _, key=key: graphs[key].append(module) or module for key in graphs
    )
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda m, i: make_boxed_func(compile_forward(m, i)),
        bw_compiler=lambda m, i: make_boxed_func(compile_backward(m, i)),
    )
    s = sample((2, 6, 4, 5), 3, dtype=torch.float32, last=True).requires_grad()
    call = torch.compile(
        lambda x, w, b: group_norm(x, 3, w, b, activation="relu"),
        fullgraph=True,
        dynamic=dynamic,
        backend=backend,
    )
    call(*s.tensors()).sum().backward()
    for key, name in (("forward", "group_norm_forward"), ("backward", "group_norm_backward")):
        (module,) = graphs[key]
        ours = [n for n in module.graph.nodes if "steadynorm" in str(n.target)]
        assert [n.target for n in ours] == [getattr(torch.ops.steadynorm, name).default]


@pytest.mark.parametrize("derivative", (False, True))
def test_compile_under_functorch(derivative):
    s = sample((2, 6, 4), 3, dtype=torch.float32)

    def energy(x):
        return group_norm(x.unsqueeze(0), 3).pow(3).sum()

    per_sample = torch.func.vmap(torch.func.grad(energy) if derivative else energy)
    compiled = torch.compile(per_sample, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(s.x), per_sample(s.x))


def test_compile_says_what_is_wrong():
    call = torch.compile(lambda x: group_norm(x, 3, activation="tanh"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="activation must be one of none, relu"):
        call(torch.randn(2, 6, 4))


@pytest.mark.parametrize("mode", ("real", "fake", "symbolic"))
def test_make_fx(mode):
    s = sample(dtype=torch.float32)
    traced = make_fx(lambda x, w, b: group_norm(x, 3, w, b, activation="silu"), tracing_mode=mode)(
        *s.tensors()
    )
    assert torch.equal(traced(*s.tensors()), group_norm(s.x, 3, s.weight, s.bias, activation="silu"))


def test_jit_trace():
    s = sample(dtype=torch.float32)
    traced = torch.jit.trace(lambda x: group_norm(x, 3, s.weight, s.bias), s.x)
    assert torch.equal(traced(s.x), group_norm(s.x, 3, s.weight, s.bias))
