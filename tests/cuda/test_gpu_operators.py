# SPDX-License-Identifier: Apache-2.0
"""The operators inside PyTorch on a GPU: autocast, graphs, streams, devices, memory, errors, sizes."""

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from calls import (
    LAYOUTS,
    assert_all_same_bits,
    assert_within,
    drawn_on_gpu,
    normal,
    parameters,
    same_format,
    step,
)

import steadynorm
from steadynorm.bench.bounds import expect

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIB = 1 << 20


# --- dtype and memory format ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 16, 12, 13), (2, 16, 6, 7, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_module_keeps_dtype_and_format_under_autocast(dtype, shape, layout):
    module = steadynorm.GroupNorm(4, 16, activation="relu").cuda()
    x = normal(*shape, dtype=dtype, layout=layout).requires_grad_()
    with torch.autocast("cuda", dtype):
        y = module(x)
    assert steadynorm.last_rung() == "native"
    assert y.dtype == dtype
    assert same_format(y, x)
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == dtype
    assert same_format(x.grad, x)
    assert module.weight.grad.dtype == module.bias.grad.dtype == FP32
    expected = step(x, 4, module.weight, module.bias, activation="relu")
    assert_same_bits(y.detach(), expected["y"], "under autocast")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("autocast", [None, BF16, FP16])
def test_function_returns_the_dtype_of_stock(autocast, dtype):
    x, (weight, bias) = normal(2, 16, 12, 13, dtype=dtype), parameters(16, dtypes=(dtype, dtype))
    with torch.autocast("cuda", autocast or BF16, enabled=autocast is not None):
        expected = F.group_norm(x, 4, weight, bias)
        assert steadynorm.group_norm(x, 4, weight, bias).dtype == expected.dtype
        assert steadynorm.group_norm(x, 4, weight, bias, out_dtype=FP16).dtype == FP16
        assert steadynorm.group_norm(x, 4, weight, bias, out_dtype=None).dtype == dtype
    assert steadynorm.last_rung() == "native"


def test_function_returns_the_dtype_of_x_where_stock_refuses_a_mix():
    x, (weight, bias) = normal(2, 16, 12, 13, dtype=BF16), parameters(16)
    assert steadynorm.group_norm(x, 4, weight, bias).dtype == BF16


# --- graphs, streams, devices ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 16, 12, 13), (2, 24, 260, 261)])
def test_cuda_graph_of_forward_and_backward(shape, layout):
    def draw(seed):
        x, dy = (normal(*shape, seed=seed + i, dtype=BF16, layout=layout) for i in range(2))
        return x, dy, *parameters(shape[1], seed=seed + 2)

    static = draw(0)

    def run():
        x, dy, weight, bias = static
        return step(x, 4, weight, bias, dy=dy, activation="silu")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (10, 20):
        fresh = draw(seed)
        for held, new in zip(static, fresh, strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        x, dy, weight, bias = fresh
        assert_all_same_bits(captured, step(x, 4, weight, bias, dy=dy, activation="silu"), f"replay {seed}")


def test_work_is_on_the_current_stream():
    """The input is written on a side stream after a wait; work on another stream would read it too early."""
    x, (weight, bias) = normal(2, 16, 64, 65), parameters(16)
    expected = step(x, 4, weight, bias, dy=x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        found = step(late, 4, weight, bias, dy=late)
    torch.cuda.synchronize()
    assert_all_same_bits(found, expected, "side stream")


def test_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    x, (weight, bias) = normal(2, 16, 64, 65), parameters(16)
    expected = step(x, 4, weight, bias, dy=x)
    with torch.cuda.device(0):
        there, w, b = (t.to("cuda:1") for t in (x, weight, bias))
        found = step(there, 4, w, b, dy=there)
        assert torch.cuda.current_device() == 0
    assert found["y"].device == found["dweight"].device == there.device
    assert_all_same_bits({name: t.to("cuda:0") for name, t in found.items()}, expected, "second device")


# --- memory ---------------------------------------------------------------------------------------


def peak_of(function) -> tuple[object, int, int]:
    """The result, and the bytes allocated at the peak and afterwards, beyond those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 128, 512, 512), (2, 32, 96, 96, 96), (1, 64, 128, 128, 64)])
def test_no_full_size_temporary(shape, layout):
    x, dy = (drawn_on_gpu(shape, seed=i, dtype=BF16, layout=layout) for i in range(2))
    weight, bias = parameters(shape[1])
    step(x, 8, weight, bias, dy=dy, activation="silu")
    size = x.numel() * 2
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y, peak, kept = peak_of(lambda: steadynorm.group_norm(x, 8, weight, bias, activation="silu"))
    assert peak <= 1.05 * size, f"forward: {peak / size:.3f} of x at its peak"
    assert kept <= size + 0.01 * size, f"forward keeps {kept / size:.3f} of x"
    _, peak, _ = peak_of(lambda: torch.autograd.grad(y, leaves, dy))
    assert peak <= 1.05 * size, f"backward: {peak / size:.3f} of x at its peak"
    with torch.autocast("cuda", BF16):
        _, peak, _ = peak_of(lambda: steadynorm.group_norm(x, 8, weight, bias))
    assert peak <= 2.05 * size, f"autocast to fp32: {peak / size:.3f} of x at its peak"  # y alone is 2


def test_out_of_memory_stays_pytorchs():
    x, (weight, bias) = drawn_on_gpu((1, 64, 1024, 1024), dtype=BF16), parameters(64)
    step(x[:, :, :8], 8, weight, bias)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * MIB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            steadynorm.group_norm(x, 8, weight, bias)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    step(x, 8, weight, bias)  # the native rung still serves


# --- errors ---------------------------------------------------------------------------------------

BAD = {
    "groups of 0": lambda d: ((2, 6, 4), {"num_groups": 0}),
    "negative groups": lambda d: ((2, 6, 4), {"num_groups": -1}),
    "indivisible": lambda d: ((2, 30, 4), {"num_groups": 4}),
    "rank 1": lambda d: ((6,), {"num_groups": 1}),
    "no channels": lambda d: ((2, 0, 4), {"num_groups": 1}),
    "no positions": lambda d: ((2, 6, 0), {"num_groups": 2}),
    "weight's size": lambda d: ((2, 6, 4), {"weight": torch.ones(5, device=d)}),
    "bias's rank": lambda d: ((2, 6, 4), {"bias": torch.ones(2, 6, 1, device=d)}),
    "one row for two samples": lambda d: ((2, 6, 4), {"weight": torch.ones(1, 6, device=d)}),
    "fp64 weight": lambda d: ((2, 6, 4), {"weight": torch.ones(6, device=d, dtype=torch.float64)}),
    "integer weight": lambda d: ((2, 6, 4), {"weight": torch.ones(6, device=d, dtype=torch.int64)}),
    "activation": lambda d: ((2, 6, 4), {"activation": "swish"}),
    "negative eps": lambda d: ((2, 6, 4), {"eps": -1.0}),
    "eps not finite": lambda d: ((2, 6, 4), {"eps": float("nan")}),
    "out_dtype": lambda d: ((2, 6, 4), {"out_dtype": torch.int32}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_cpu(name):
    def error(device):
        shape, changed = BAD[name](device)
        arguments = {"num_groups": 2, **changed}
        with pytest.raises((ValueError, RuntimeError)) as caught:
            steadynorm.group_norm(torch.ones(shape, device=device), **arguments)
        return caught.type, str(caught.value)

    on_cpu, on_gpu = error("cpu"), error("cuda")
    assert on_gpu == on_cpu
    assert "\n" not in on_gpu[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_inputs_of_other_dtypes(dtype):
    kinds = []
    for device in ("cpu", "cuda"):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            steadynorm.group_norm(torch.ones(2, 6, 4, device=device).to(dtype), 2)
        kinds.append((caught.type, str(caught.value)))
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("moved", ["weight", "bias"])
def test_a_parameter_on_another_device(moved):
    given = dict(zip(("weight", "bias"), parameters(6), strict=True))
    given[moved] = given[moved].cpu()
    with pytest.raises(ValueError, match=rf"{moved} must be on input's device cuda:0, got cpu"):
        steadynorm.group_norm(torch.ones(2, 6, 4, device="cuda"), 2, **given)
    given = {moved: torch.ones(6, device="cuda")}
    with pytest.raises(ValueError, match=rf"{moved} must be on input's device cpu, got cuda:0"):
        steadynorm.group_norm(torch.ones(2, 6, 4), 2, **given)


def test_a_failed_call_leaves_the_next_one_right():
    x, (weight, bias) = normal(2, 6, 4), parameters(6)
    expected = step(x, 2, weight, bias, dy=x)
    with pytest.raises(ValueError):
        steadynorm.group_norm(x, 4, weight, bias)
    assert_all_same_bits(step(x, 2, weight, bias, dy=x), expected, "after an error")


# --- more than 2^31 elements ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_2_to_the_31_elements(layout):
    shape, groups = (2, 64, 256, 256, 257), 8  # 2.16e9 elements, half of them in each sample
    free, _ = torch.cuda.mem_get_info()
    if free < 62 << 30:
        pytest.skip(f"needs 62 GiB of GPU memory, got {free >> 30}")
    x, dy = (drawn_on_gpu(shape, seed=i, dtype=BF16, layout=layout) for i in range(2))
    weight, bias = parameters(64)
    found = step(x, groups, weight, bias, dy=dy, activation="silu")
    for n in range(2):
        at = slice(n, n + 1)
        alone = step(x[at], groups, weight, bias, dy=dy[at], activation="silu", wanted=("dx",))
        for name in ("y", "dx"):
            for c in range(0, 64, 16):  # in parts: the comparison makes copies
                part = slice(c, c + 16)
                assert_same_bits(alone[name][:, part], found[name][at, part], f"{name} of sample {n}")
        del alone
        c = slice(0, 8) if n == 0 else slice(56, 64)
        right = expect(x[at, c], 1, weight[c], bias[c], 1e-5, "silu", dy[at, c])
        for name in ("y", "dx"):
            assert_within(found[name][at, c], right[name], f"{name} of sample {n}")
        del right
        torch.cuda.empty_cache()


def test_one_group_of_more_than_2_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip(f"needs 40 GiB of GPU memory, got {free >> 30}")
    x = torch.empty((1, 2, (1 << 30) + 1000), dtype=BF16, device="cuda").fill_(-1)
    x[:, 1] = 1
    x[0, 1, -1] = 1025  # the last element: read and written only with 64-bit indices
    y = step(x, 1)["y"]
    count = x.numel()
    mean = 1024 / count
    deviation = ((count - 1) * 1.0 + 1025.0**2) / count - mean * mean
    right = (torch.tensor([-1.0, 1.0, 1025.0], dtype=torch.float64) - mean) / (deviation + 1e-5) ** 0.5
    found = torch.stack([y[0, 0, 0], y[0, 1, 0], y[0, 1, -1]]).cpu()
    assert_same_bits(found, right.to(BF16), "closed form")
    assert (y[0, 0] == y[0, 0, 0]).all()
    assert (y[0, 1, :-1] == y[0, 1, 0]).all()
