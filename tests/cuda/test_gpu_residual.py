# SPDX-License-Identifier: Apache-2.0
"""The fused residual on a GPU: the bits of `s = x + r; y = group_norm(s)`, memory, graphs, streams."""

from itertools import product

import pytest
import torch
from bits import assert_same_bits
from calls import LAYOUTS, drawn_on_gpu, normal, parameters, same_format

import steadynorm

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# One that stays on chip where there is no residual, many leaves, ragged, a volume, one position.
SHAPES = [
    ((2, 320, 16, 16), 32),
    ((3, 16, 129, 131), 8),
    ((2, 6, 517, 516), 2),
    ((1, 64, 20, 33, 34), 8),
    ((33, 12, 1, 1), 4),
]


def fused(x, r, groups, weight=None, bias=None, **options):
    outputs = steadynorm.group_norm(x, groups, weight, bias, residual=r, **options)
    assert steadynorm.last_rung() == "native"
    return outputs


def unfused(x, r, groups, weight=None, bias=None, **options):
    s = x + r
    return steadynorm.group_norm(s, groups, weight, bias, **options), s


def results(call, tensors, groups, **options):
    """y, the sum, and all gradients of both."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = call(*leaves[:2], groups, *leaves[2:], **options)
    upstream = [normal(*t.shape, seed=8 + i, dtype=t.dtype) for i, t in enumerate(outputs)]
    return [t.detach() for t in outputs], torch.autograd.grad(outputs, leaves, upstream)


def assert_same(got, expected, case: str) -> None:
    names = ("y", "sum", "dx", "dr", "dweight", "dbias")
    for name, a, b in zip(names, (*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert_same_bits(a, b, f"{case}{name}")
        assert same_format(a, b), f"{case}{name}: strides {a.stride()}, not {b.stride()}"


def operands(shape, dtype, layout="contiguous", offset=0.0):
    pair = (normal(*shape, seed=i, dtype=dtype, layout=layout, offset=offset) for i in range(2))
    return (*pair, *parameters(shape[1]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_pair_and_its_gradients_have_the_bits_of_the_two_calls(dtype, shape, groups, layout):
    for activation, offset, out_dtype in (
        ("silu", 0.0, None),
        ("none", 300.0, FP32),
        ("gelu_tanh", 0.5, BF16),
    ):
        tensors = operands(shape, dtype, layout, offset)
        options = {"activation": activation, "out_dtype": out_dtype}
        got, expected = (results(f, tensors, groups, **options) for f in (fused, unfused))
        assert_same(got, expected, f"{activation}, {offset}, {out_dtype}: ")


@pytest.mark.parametrize("scale", [1e-30, 1e25])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_whose_squares_are_no_fp32(layout, scale):
    for dtype, (shape, groups) in product((BF16, FP32), SHAPES[:3]):
        x, r, *rest = operands(shape, dtype, layout)
        tensors = (x * scale, r * scale, *rest)
        got, expected = (results(f, tensors, groups) for f in (fused, unfused))
        assert bool(got[0][0].isfinite().all())
        assert_same(got, expected, f"{dtype}, {shape}: ")


# The second sweep reads what the first has written: it must not begin before that is there.
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 64, 64, 64), (2, 32, 129, 130), (1, 32, 128, 128, 128)])
def test_repeated_runs(shape, layout):
    x, r = (drawn_on_gpu(shape, seed=i, dtype=BF16, layout=layout) for i in range(2))
    y, s = (t.clone() for t in fused(x, r, 8, activation="silu"))
    for run in range(50):
        filled = torch.full_like(x, float("nan"))  # what the next sum's memory may hold
        del filled
        for name, got, expected in zip(("y", "sum"), fused(x, r, 8, activation="silu"), (y, s), strict=True):
            assert_same_bits(got, expected, f"run {run}: {name}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [(1, 0), (0, 1), (1, 1), (2, 4)])
def test_misaligned(layout, which):
    for dtype, (shape, groups) in product((BF16, FP32), SHAPES[1:4]):
        tensors = operands(shape, dtype, layout)

        def shifted(t, by):
            storage = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
            return torch.as_strided(storage, t.shape, t.stride(), by).copy_(t)

        moved = [shifted(t, by) for t, by in zip(tensors[:2], which, strict=True)]
        got, expected = (results(fused, (*pair, *tensors[2:]), groups) for pair in (moved, tensors[:2]))
        assert_same(got, expected, f"{dtype}, {shape}: ")


def test_other_strides_and_a_float64():
    x, r, *rest = operands((2, 12, 20, 21), BF16)
    last = r.to(memory_format=torch.channels_last)
    for pair in (
        (x, last),
        (last, x),
        (x[:, ::2], r[:, ::2]),
        (x, r[:1].expand_as(x)),
        (x.double(), r.double()),
    ):
        tensors = (*pair, *(p[: pair[0].shape[1]] for p in rest))
        got, expected = (results(f, tensors, 3, activation="relu") for f in (fused, unfused))
        assert_same(got, expected, f"{pair[1].stride()}: ")


def test_autocast():
    x, r, weight, bias = operands((2, 16, 12, 13), BF16, "channels_last")
    norm = steadynorm.GroupNorm(4, 16).cuda()
    with torch.autocast("cuda", BF16):
        y, s = fused(x, r, 4, weight, bias)
        own, _ = norm(x, r)
    assert (y.dtype, s.dtype, own.dtype) == (FP32, BF16, BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_full_size_temporary(layout):
    x, r = (drawn_on_gpu((1, 64, 64, 128, 128), seed=i, dtype=BF16, layout=layout) for i in range(2))
    fused(x, r, 8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = fused(x, r, 8)
    torch.cuda.synchronize()
    size = x.numel() * x.element_size()
    assert torch.cuda.max_memory_allocated() - before < len(outputs) * size + size // 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_graph(layout):
    x, r, weight, bias = operands((2, 16, 33, 34), BF16, layout)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fused(x, r, 4, weight, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fused(x, r, 4, weight, bias)
    for seed in (5, 6):
        x.copy_(normal(*x.shape, seed=seed, dtype=BF16))
        r.copy_(normal(*x.shape, seed=seed + 10, dtype=BF16))
        graph.replay()
        for got, expected in zip(outputs, unfused(x, r, 4, weight, bias), strict=True):
            assert_same_bits(got, expected, f"replay {seed}")


def test_more_than_2_to_the_31_elements():
    x, r = (drawn_on_gpu((1, 16, 134217729), seed=i, dtype=BF16) for i in range(2))
    y, s = fused(x, r, 2, activation="relu")
    assert bool(torch.equal(s, x + r))
    del x, r
    assert bool(torch.equal(y, steadynorm.group_norm(s, 2, activation="relu")))


@pytest.mark.parametrize("moved", ["residual", "input"])
def test_a_residual_on_another_device_is_one_sentence(moved):
    x, r = normal(2, 6, 5), normal(2, 6, 5)
    x, r = (x, r.cpu()) if moved == "residual" else (x.cpu(), r)
    with pytest.raises(ValueError, match=r"^group_norm: residual must be on input's device .*, got "):
        steadynorm.group_norm(x, 3, residual=r)
